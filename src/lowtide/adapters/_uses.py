"""Record how a function uses weights, so that each gets a suitable adapter before anything runs.

The function's program is evaluated as in `lowtide.adapted`, with a `Probe` in place of each weight. A probe records the
axes that each operation sums over, and computes the same result as the array.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from ..jaxprs import runner
from ._products import is_row_gather, is_row_slice, precision_name


class Use(NamedTuple):
    """One way in which a weight is used: its axes are [*stack, *m, *n], and the operation sums over m or over n."""

    num_stacked: int
    num_rows: int
    """Number of axes of m."""
    num_columns: int
    """Number of axes of n."""
    is_product: bool
    """Whether the operation is a product; otherwise it is a convolution or a table lookup."""
    over_rows: bool
    """Whether the operation sums over m, or takes rows along m."""

    @property
    def is_matrix(self) -> bool:
        """Whether the weight is multiplied as one matrix, or as a stack of matrices."""
        return self.is_product and self.num_rows == self.num_columns == 1


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["num_axes", "uses"])
@dataclasses.dataclass(frozen=True)
class Probe:
    """An array that records the operations that use it."""

    weight: Any
    num_axes: int
    """Number of axes of the whole weight (static); leading axes may have been sliced off since."""
    uses: _UseSet
    """Uses recorded so far (static)."""

    @property
    def ndim(self) -> int:
        """Number of axes of the weight."""
        return self.weight.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.weight.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the weight."""
        return self.weight.dtype


class _UseSet(set[Use]):
    """A set that is compared and hashed by identity, so that all copies of a probe share one."""

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType, reportUnannotatedClassAttribute]

    def __eq__(self, other: object) -> bool:
        return self is other


def probe(leaf: Any) -> Probe:
    """Make a probe for a weight, from its array or its shape."""
    return Probe(leaf, len(leaf.shape), _UseSet())


def record_use(eqn: Any, operands: Sequence[Any], index: int) -> Sequence[Any] | None:
    """Record a use of the probe ``operands[index]`` and compute the operation.

    The probe comes as a `Weight`. The result is None where the operation is not a use of a weight.
    """
    recognize = _RECOGNIZERS.get(eqn.primitive.name)
    weight = operands[index]
    node: Probe = weight.node
    usage = None if recognize is None else recognize(eqn, node, index)
    if usage is None or (weight.is_transposed and (usage.num_rows, usage.num_columns) != (1, 1)):
        return None
    if "precision" in eqn.params:
        precision_name(eqn, weight.path)
    num_stacked = usage.num_stacked + node.num_axes - node.ndim
    node.uses.add(usage._replace(num_stacked=num_stacked, over_rows=usage.over_rows != weight.is_transposed))
    array = node.weight.mT if weight.is_transposed else node.weight
    array = array.astype(eqn.invars[index].aval.dtype)  # a cast leaves the node as it is
    return runner(eqn)(*(array if i == index else value for i, value in enumerate(operands)))


def _product_use(eqn: Any, node: Probe, index: int) -> Use | None:
    contracted, batch_axes = eqn.params["dimension_numbers"]
    axes, stack_axes = sorted(contracted[index]), batch_axes[index]
    if stack_axes != tuple(range(len(stack_axes))):
        return None
    # Contracted axes directly after the stack are m, and those at the end are n.
    num_stack, num_axes = len(stack_axes), node.ndim - len(stack_axes)
    if num_axes > len(axes) and axes == list(range(num_stack, num_stack + len(axes))):
        return Use(num_stack, len(axes), num_axes - len(axes), True, True)
    if num_axes > len(axes) and axes == list(range(node.ndim - len(axes), node.ndim)):
        return Use(num_stack, num_axes - len(axes), len(axes), True, False)
    # The contracted axis is the second-last, and axes before it are free: a stack whose matrices all multiply the same
    # array.
    is_matrix = len(axes) == 1 and axes[0] >= node.ndim - 2 > 0
    return Use(node.ndim - 2, 1, 1, True, axes[0] == node.ndim - 2) if is_matrix else None


def _convolution_use(eqn: Any, node: Probe, index: int) -> Use | None:
    channel, last = eqn.params["dimension_numbers"].rhs_spec[0], node.ndim - 1
    is_grouped = eqn.params["feature_group_count"] != 1 or eqn.params["batch_group_count"] != 1
    if index != 1 or is_grouped or channel not in (0, last):
        return None
    return Use(0, 1, last, False, False) if channel == 0 else Use(0, last, 1, False, True)


def _gather_use(eqn: Any, node: Probe, index: int) -> Use | None:
    return (
        Use(0, 1, node.ndim - 1, False, True)
        if index == 0 and node.ndim > 1 and is_row_gather(eqn, node.shape)
        else None
    )


def _row_slice_use(eqn: Any, node: Probe, index: int) -> Use | None:
    is_table = index == 0 and node.ndim == node.num_axes == 2 and is_row_slice(eqn, node.shape)
    return Use(0, 1, 1, False, True) if is_table else None


_RECOGNIZERS = {
    "dot_general": _product_use,
    "conv_general_dilated": _convolution_use,
    "gather": _gather_use,
    "dynamic_slice": _row_slice_use,
}
"""Functions that recognise a use of a weight, by primitive name. Other operations move the weight, or are refused."""
