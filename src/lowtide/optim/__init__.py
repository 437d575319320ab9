"""Low-precision optimizer state for Optax transformations."""

from ._low_precision import LowPrecisionState as LowPrecisionState
from ._low_precision import converted as converted
from ._low_precision import low_precision as low_precision
from ._low_precision import with_shardings as with_shardings
from ._packed import PackedArray as PackedArray

__all__ = ["LowPrecisionState", "PackedArray", "converted", "low_precision", "with_shardings"]
