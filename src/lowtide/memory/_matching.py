"""Match each output with the argument leaf that it replaces, or whose gradient it is.

Buffers alone are not enough: JAX gives a donated buffer to the first output of its shape, so new parameters may be
written into the buffer of a momentum. Paths alone are not enough either, since a result often has another tree
structure. So the dataflow decides first: a new momentum is computed from the old one, and new parameters from the old
ones and the momenta.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ..hlo import ArgumentLeaf, Value
from ._dataflow import Dataflow


def match_outputs(
    flow: Dataflow,
    leaves: Sequence[ArgumentLeaf],
    parameters: Mapping[Value, int],
    paths: Mapping[Value, str],
    reused: Mapping[Value, int],
) -> dict[Value, int]:
    """Match each array of the entry's result with the leaf that it replaces, or whose gradient it is, if there is one.

    The candidates of an output are the leaves of its shape and type from which it is computed element by element. The
    output with the fewest candidates chooses first, and outputs share a leaf only if no other one is left. Among
    several candidates the path decides (without the argument's number), then the reused buffer, then the order.

    An output without candidates that depends on the backward pass is a gradient. For it the path decides, then the
    order.

    Args:
        flow: dataflow of the program.
        leaves: the argument leaves.
        parameters: argument leaf of each array of the entry's parameters.
        paths: path of each array of the entry's result.
        reused: argument leaf whose buffer holds the array of the entry's result.
    """
    matcher = _Matcher(flow, leaves, parameters)
    gradients: list[Value] = []
    pairs: list[tuple[tuple[int, ...], Value, int]] = []
    for order, (value, path) in enumerate(paths.items()):
        origins = matcher.origins(value)
        if not origins and flow.phase(value) in ("backward", "update"):
            gradients.append(value)
        for leaf in origins:
            rank = (len(origins), -matcher.common(path, leaf), leaf != reused.get(value), order, leaf)
            pairs.append((rank, value, leaf))
    # Greedy matching: the best pairs first, each leaf once; then outputs without a free leaf share one; then gradients.
    pairs.sort(key=lambda pair: pair[0])
    matched, taken = dict[Value, int](), set[int]()
    for _, value, leaf in pairs:
        if value not in matched and leaf not in taken:
            matched[value] = leaf
            taken.add(leaf)
    for _, value, leaf in pairs:
        matched.setdefault(value, leaf)
    taken.clear()
    for value in gradients:
        leaf = matcher.closest(value, paths[value], taken)
        if leaf is not None:
            matched[value] = leaf
            taken.add(leaf)
    return {**reused, **matched}


class _Matcher:
    def __init__(self, flow: Dataflow, leaves: Sequence[ArgumentLeaf], parameters: Mapping[Value, int]) -> None:
        self.flow = flow
        self.types = {leaf: self._type(value) for value, leaf in parameters.items()}
        self.names = {leaf: _names(leaves[leaf]) for leaf in parameters.values()}
        self.alike: dict[tuple[int, ...], list[int]] = {}
        self.by_suffix: dict[tuple[Any, ...], list[int]] = {}
        # Differentiated leaves come first: a gradient belongs to the parameters, not to a momentum of equal shape.
        for leaf in sorted(self.types, key=lambda leaf: (not flow.is_differentiated(leaf), leaf)):
            self.alike.setdefault(self.types[leaf], []).append(leaf)
            for length in range(1, len(self.names[leaf]) + 1):
                self.by_suffix.setdefault((self.types[leaf], self.names[leaf][-length:]), []).append(leaf)

    def origins(self, output: Value) -> set[int]:
        """Return the leaves of the output's shape and type from which it is computed element by element."""
        wanted = self._type(output)
        found = {self.flow.copy_of(value) for value in self.flow.same_size(output)}
        return {leaf for leaf in found if leaf is not None and self.types.get(leaf) == wanted}

    def common(self, path: str, leaf: int) -> int:
        """Return the number of names that a path and a leaf's path share at their ends."""
        pairs = zip(reversed(path.split("/")), reversed(self.names[leaf]), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def closest(self, output: Value, path: str, taken: set[int]) -> int | None:
        """Return the first free leaf of the output's shape and type whose path shares the longest end."""
        wanted, names = self._type(output), tuple(path.split("/"))
        for length in range(len(names), 0, -1):
            if alike := self.by_suffix.get((wanted, names[-length:])):
                return next((leaf for leaf in alike if leaf not in taken), alike[0])
        alike = self.alike.get(wanted, [])
        while alike and alike[0] in taken and len(alike) > 1:
            alike.pop(0)
        return alike[0] if alike else None

    def _type(self, value: Value) -> tuple[int, ...]:
        shape = self.flow.graph.shape(value)
        return (shape.element_type, *shape.dimensions)


def _names(leaf: ArgumentLeaf) -> tuple[str, ...]:
    """Return the names of a leaf's path without the argument's number, which results do not have."""
    names = tuple(leaf.path.split("/"))
    return names[1:] if isinstance(leaf.argument, int) else names
