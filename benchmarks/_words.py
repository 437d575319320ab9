"""How rows of a GPU day are told: figures with their units, and why two rows are no ratio. Standard library only."""

from __future__ import annotations

import math
import statistics

from _lines import Row

GIB = 2**30
LOSS_TOLERANCE = 0.05
"""Nats by which two sides that compute in bfloat16 may differ in their first steps."""
VALUE_TOLERANCE = 0.05
"""Of the largest value: by how much parameters or gradients may."""
SAME = ("jax", "jaxlib", "torch", "transformers", "peft")
"""Distributions that two rows of a ratio share."""


def first(text: str) -> str:
    """The first line of a text."""
    return (text.strip().splitlines() or ["?"])[0]


def apart(row: Row, base: Row) -> str:
    """Why a row does not do what the one beside it does; nothing where losses and values agree.

    Losses that were not compared are no reason to believe that they agree.
    """
    one, other = row.get("losses"), base.get("losses")
    difference = row.get("loss_difference")
    if one and other:
        differences = [abs(a - b) for a, b in zip(one, other, strict=False)]
        difference = math.nan if any(map(math.isnan, differences)) else max(differences)
    if difference is None:
        return "losses not compared"
    if not difference <= LOSS_TOLERANCE:
        return f"losses apart by {difference:.3g} nats"
    apart, largest = row.get("max_difference"), row.get("largest_value", 1.0)
    if apart is not None and not apart <= VALUE_TOLERANCE * largest:
        return f"values apart by {apart:.3g}, of at most {largest:.3g}"
    return ""


def not_alike(ours: Row, theirs: Row) -> str:
    """Why two sides do not train the same."""
    # Of weights in few bits each side counts what it stores: several codes are one number of bitsandbytes'.
    packed = ours.get("method") == "qlora"
    for key, what in (("num_trained", "trained"), *[("num_parameters", "frozen")] * (not packed)):
        if ours.get(key) != theirs.get(key):
            return f"{ours.get(key)} parameters {what}, and {theirs.get(key)} by the other"
    for row in (ours, theirs):
        if not row["losses"][-1] < row["losses"][0]:
            return f"the loss of {row.get('side', 'one side')} does not fall"
    return ""


def mixed(row: Row, base: Row) -> str:
    """What a ratio is labelled with whose rows are not of one commit and one set of versions: it meets no aim."""
    one, other = row.get("versions", {}), base.get("versions", {})
    named = [name for name in SAME if one.get(name) != other.get(name)]
    key = "code_commit" if row.get("code_commit") and base.get("code_commit") else "commit"
    told = [f"not of the same {', '.join([*named, *['commit'] * (row.get(key) != base.get(key))])}"]
    told = told if told != ["not of the same "] else []
    unknown = ["versions"] * (not (one and other)) + ["commit"] * (not (row.get(key) and base.get(key)))
    told += [f"of unknown {' and '.join(unknown)}"] * bool(unknown)
    told += ["with uncommitted changes"] * any(side.get("uncommitted_changes") for side in (row, base))
    return "".join(f"; {words}" for words in told)


def ratio(ours: Row, theirs: Row, key: str) -> float | None:
    return ours[key] / theirs[key] if ours.get(key) and theirs.get(key) else None


def seconds(row: Row) -> float | None:
    """The median where every step was timed."""
    found = row.get("seconds_per_step")
    return statistics.median(found) if isinstance(found, list) and found else found or None


def over(row: Row, base: Row) -> float | None:
    one, other = seconds(row), seconds(base)
    return one / other if one and other else None


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def speed(row: Row) -> str:
    return f"{row['tokens_per_second']:,.0f} tokens/s" if row.get("tokens_per_second") else ""


def peak(row: Row) -> str:
    return f"peak {gib(row['peak_bytes'])}" if row.get("peak_bytes") else ""


def speed_and_peak(row: Row) -> str:
    return "runs out of memory" if row.get("out_of_memory") else joined(speed(row), peak(row))


def predicted(row: Row) -> str:
    predicted, measured = row.get("predicted_bytes"), row.get("measured_bytes") or row.get("peak_bytes")
    if not predicted or not measured:
        return ""
    if (row.get("peak_before_bytes") or 0) >= max(predicted, measured):
        return f"{gib(predicted)}, below the {gib(measured)} that were held before the first step"
    return f"{gib(predicted)} and {gib(measured)} ({percent(predicted / measured - 1, 2)} off)"


def joined(*words: str) -> str:
    return ", ".join(word for word in words if word)
