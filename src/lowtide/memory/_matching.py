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
    in_place: Mapping[Value, int],
) -> dict[Value, int]:
    """Match each array of the entry's result with the leaf that it replaces, or whose gradient it is, if there is one.

    The candidates of an output are the leaves of its shape and type from which it is computed element by element. The
    output with the fewest candidates chooses first. Outputs share a leaf only if no other one is left. Among several
    candidates the path decides (without the argument's number), then the reused buffer (`in_place`), then the order.

    An output without candidates that depends on the backward pass is a gradient. For it the path decides, then the
    order.
    """
    matcher = _Matcher(flow, leaves, parameters)
    gradients: list[Value] = []
    pairs: list[tuple[tuple[int, ...], Value, int]] = []
    for order, (value, path) in enumerate(paths.items()):
        origins = matcher.origins(value)
        if not origins and flow.phase(value) in ("backward", "update"):
            gradients.append(value)
        for leaf in origins:
            rank = (len(origins), -matcher.common_suffix_length(path, leaf), leaf != in_place.get(value), order, leaf)
            pairs.append((rank, value, leaf))
    # Greedy matching: the best pairs first, each leaf once; then outputs without a free leaf share one; then gradients.
    pairs.sort(key=lambda pair: pair[0])
    matches, used_leaves = dict[Value, int](), set[int]()
    for _, value, leaf in pairs:
        if value not in matches and leaf not in used_leaves:
            matches[value] = leaf
            used_leaves.add(leaf)
    for _, value, leaf in pairs:
        matches.setdefault(value, leaf)
    used_leaves.clear()
    for value in gradients:
        leaf = matcher.closest(value, paths[value], used_leaves)
        if leaf is not None:
            matches[value] = leaf
            used_leaves.add(leaf)
    return {**in_place, **matches}


class _Matcher:
    def __init__(self, flow: Dataflow, leaves: Sequence[ArgumentLeaf], parameters: Mapping[Value, int]) -> None:
        self.flow = flow
        self.types = {leaf: self._type(value) for value, leaf in parameters.items()}
        self.names = {leaf: _path_names(leaves[leaf]) for leaf in parameters.values()}
        self.by_type: dict[tuple[int, ...], list[int]] = {}
        self.by_suffix: dict[tuple[Any, ...], list[int]] = {}
        # Differentiated leaves come first: a gradient belongs to the parameters, not to a momentum of equal shape.
        for leaf in sorted(self.types, key=lambda leaf: (not flow.is_differentiated(leaf), leaf)):
            self.by_type.setdefault(self.types[leaf], []).append(leaf)
            for length in range(1, len(self.names[leaf]) + 1):
                self.by_suffix.setdefault((self.types[leaf], self.names[leaf][-length:]), []).append(leaf)

    def origins(self, output: Value) -> set[int]:
        """Return the leaves of the output's shape and type from which it is computed element by element."""
        output_type = self._type(output)
        copied_leaves = {self.flow.copy_of(value) for value in self.flow.same_size_sources(output)}
        return {leaf for leaf in copied_leaves if leaf is not None and self.types.get(leaf) == output_type}

    def common_suffix_length(self, path: str, leaf: int) -> int:
        """Return the number of names that a path and a leaf's path share at their ends."""
        pairs = zip(reversed(path.split("/")), reversed(self.names[leaf]), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def closest(self, output: Value, path: str, used_leaves: set[int]) -> int | None:
        """Return the first free leaf of the output's shape and type whose path shares the longest end."""
        output_type, names = self._type(output), tuple(path.split("/"))
        for length in range(len(names), 0, -1):
            if candidates := self.by_suffix.get((output_type, names[-length:])):
                return next((leaf for leaf in candidates if leaf not in used_leaves), candidates[0])
        candidates = self.by_type.get(output_type, [])
        while candidates and candidates[0] in used_leaves and len(candidates) > 1:
            candidates.pop(0)
        return candidates[0] if candidates else None

    def _type(self, value: Value) -> tuple[int, ...]:
        shape = self.flow.graph.shape(value)
        return (shape.element_type, *shape.dimensions)


def _path_names(leaf: ArgumentLeaf) -> tuple[str, ...]:
    """Return the names of a leaf's path without the argument's number, which results do not have."""
    names = tuple(leaf.path.split("/"))
    return names[1:] if isinstance(leaf.argument, int) else names
