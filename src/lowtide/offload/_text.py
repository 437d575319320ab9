"""Read XLA's text of a compiled program: shapes of arrays in host memory, and which results are gradients.

Donation and byte totals do not distinguish a new optimizer state from gradients of host parameters: both are host
results with the shapes of host arguments. The scope of the operation that computes a result does. JAX writes
``transpose`` into the scopes of a backward pass.
"""

from __future__ import annotations

import re

_ARRAY = re.compile(r"\w+\[([\d,]+)\]\{[^}]*\}")
_HOST = "S(5)"
_INSTRUCTION = re.compile(r"^ *(ROOT )?%?([\w.\-]+) = (.*)$")
_OPERAND = re.compile(r"%([\w.\-]+)")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_MAX_HOPS = 64


def host_shapes(text: str) -> set[tuple[int, ...]]:
    """Return the shapes of all arrays in host memory in a program's text (`jax.stages.Compiled.as_text`)."""
    return {
        tuple(map(int, match[1].split(",")))
        for line in text.splitlines()
        if _HOST in line
        for match in _ARRAY.finditer(line)
        if _HOST in match[0]
    }


def gradients(text: str) -> set[int]:
    """Return the positions of the results that the backward pass computes and nothing changes afterwards."""
    entry = text.partition("\nENTRY ")[2].partition("\n}")[0]
    lines = {match[2]: match for match in map(_INSTRUCTION.match, entry.splitlines()) if match}
    root = next((match for match in lines.values() if match[1]), None)
    if root is None:
        return set()
    results = _operands(root[3]) if re.search(r"\btuple\(", root[3]) else [root[2]]
    return {index for index, name in enumerate(results) if "transpose(" in _scope(name, lines)}


def _operands(line: str) -> list[str]:
    return _OPERAND.findall("%" + line.partition("(%")[2].partition(")")[0])


def _scope(name: str, lines: dict[str, re.Match[str]]) -> str:
    """Return the scope of the operation that computes a value; copies and tuple elements take that of their operand."""
    for _ in range(_MAX_HOPS):
        if name not in lines:
            return ""
        scope, operands = _SCOPE.search(lines[name][3]), _operands(lines[name][3])
        if scope or not operands:
            return scope[1] if scope else ""
        name = operands[0]
    return ""
