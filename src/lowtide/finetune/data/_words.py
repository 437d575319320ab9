"""The words that settings of data take; apart from what needs NumPy, so that a command line starts fast."""

PACKINGS = ("auto", "best-fit", "none", "contiguous")
"""Of `packing`: ``auto`` is contiguous windows for plain text, and best-fit for records."""
TOO_LONG = ("cut", "split", "drop")
"""Of `too_long`."""
LOSS_ON = ("completion", "all")
"""Of `loss_on`."""
