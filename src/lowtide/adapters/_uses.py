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
from ._products import checked_precision, is_row, is_rows


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
    uses: _Uses
    """Uses that were recorded until now (static)."""

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


class _Uses(set[Use]):
    """A set that is compared and hashed by identity, so that all copies of a probe share one."""

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType, reportUnannotatedClassAttribute]

    def __eq__(self, other: object) -> bool:
        return self is other


def probe(leaf: Any) -> Probe:
    """Make a probe for a weight, from its array or its shape."""
    return Probe(leaf, len(leaf.shape), _Uses())


def noted(eqn: Any, operands: Sequence[Any], at: int) -> Sequence[Any] | None:
    """Record a use of a probe and compute the operation; return None where it is not a use of a weight.

    Args:
        eqn: the operation.
        operands: arrays, and the probe as a `Weight`.
        at: index of the probe among the operands.
    """
    use = _USES.get(eqn.primitive.name)
    weight = operands[at]
    node: Probe = weight.node
    found = None if use is None else use(eqn, node, at)
    if found is None or (weight.is_turned and (found.num_rows, found.num_columns) != (1, 1)):
        return None
    if "precision" in eqn.params:
        checked_precision(eqn, weight.path)
    num_stacked = found.num_stacked + node.num_axes - node.ndim
    node.uses.add(found._replace(num_stacked=num_stacked, over_rows=found.over_rows != weight.is_turned))
    array = node.weight.mT if weight.is_turned else node.weight
    array = array.astype(eqn.invars[at].aval.dtype)  # a cast leaves the node as it is
    return runner(eqn)(*(array if i == at else value for i, value in enumerate(operands)))


def _of_product(eqn: Any, node: Probe, at: int) -> Use | None:
    contracted, stacks = eqn.params["dimension_numbers"]
    own, stack = sorted(contracted[at]), stacks[at]
    if stack != tuple(range(len(stack))):
        return None
    # Contracted axes directly after the stack are m, and those at the end are n.
    first, num_axes = len(stack), node.ndim - len(stack)
    if num_axes > len(own) and own == list(range(first, first + len(own))):
        return Use(first, len(own), num_axes - len(own), True, True)
    if num_axes > len(own) and own == list(range(node.ndim - len(own), node.ndim)):
        return Use(first, num_axes - len(own), len(own), True, False)
    # The contracted axis is the second-last, and axes before it are free: a stack whose matrices all multiply the same
    # array.
    is_matrix = len(own) == 1 and own[0] >= node.ndim - 2 > 0
    return Use(node.ndim - 2, 1, 1, True, own[0] == node.ndim - 2) if is_matrix else None


def _of_convolution(eqn: Any, node: Probe, at: int) -> Use | None:
    channel, last = eqn.params["dimension_numbers"].rhs_spec[0], node.ndim - 1
    is_grouped = eqn.params["feature_group_count"] != 1 or eqn.params["batch_group_count"] != 1
    if at != 1 or is_grouped or channel not in (0, last):
        return None
    return Use(0, 1, last, False, False) if channel == 0 else Use(0, last, 1, False, True)


def _of_rows(eqn: Any, node: Probe, at: int) -> Use | None:
    return Use(0, 1, node.ndim - 1, False, True) if at == 0 and node.ndim > 1 and is_rows(eqn, node.shape) else None


def _of_row(eqn: Any, node: Probe, at: int) -> Use | None:
    is_table = at == 0 and node.ndim == node.num_axes == 2 and is_row(eqn, node.shape)
    return Use(0, 1, 1, False, True) if is_table else None


_USES = {
    "dot_general": _of_product,
    "conv_general_dilated": _of_convolution,
    "gather": _of_rows,
    "dynamic_slice": _of_row,
}
"""Functions that recognise a use of a weight, by primitive name. Other operations move the weight, or are refused."""
