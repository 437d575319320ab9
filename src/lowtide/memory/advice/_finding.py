"""Findings of the lint, and its rules."""

from __future__ import annotations

import dataclasses

from ...core import format_bytes
from ...hlo import ArgumentLeaf

RULES = {
    "undonated-state": "an argument that the step replaces is not donated, so that two copies of it live",
    "donation-not-used": "a donated buffer is not reused for any output",
    "rebuilt-state": "a loop makes the new value of a donated argument beside the old one",
    "returned-unchanged": "an output is a copy of an argument",
    "checkpoint-name-unmatched": "a checkpoint policy asks for a name that no checkpoint_name gives",
    "offload-moved-nothing": "something is to be offloaded, and nothing is in host memory",
    "optimizer-over-frozen": "optimizer state or an accumulator of a leaf that gets no gradient",
    "norm-over-frozen": "the gradient of a leaf that does not train is computed for a norm",
    "residual-copy": "a copy of an argument is kept for the backward pass",
    "dequantized-residual": "a frozen weight in few bits is kept as floats for the backward pass",
    "frozen-cast": "an argument that does not train is held twice: as it is, and in the lower precision it is used in",
    "adapter-multiplied-out": "a low-rank correction is added to its weight, so that a second copy of the weight lives",
    "large-constant": "the function closes over a large array, which becomes part of the program",
    "checkpoint-name-unused": "no checkpoint policy asks for a name, though a policy asks for others, or "
    "jax.checkpoint recomputes its value",
    "duplicated-average": "two states of the step are updated in the same way from the same values",
    "copied-in-loop": "a loop writes a part of an array that it carries, and copies all of it before",
    "stacked-gradients": "the gradients of many microbatches or examples are held at once, to be added up",
    "checkpoint-undone": "jax.checkpoint saves nothing: the compiler keeps it all the same, or recomputes all at once",
    "whole-logits": "the logits of all tokens are held at once",
    "replicated": "a large argument is on every device of the mesh in full",
    "padded": "a large buffer is mostly padding",
}
"""Rules and their meaning."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """An unnecessary use of memory in a step.

    Examples:
        >>> print(Finding(rule="undonated-state", path="0/w", num_bytes=2**20, remedy="donate argument 0"))
        undonated-state: 0/w, 1.00 MiB: an argument that the step replaces is not donated, so that two copies of it live
          hint: donate argument 0
    """

    rule: str
    """One of `RULES`."""
    path: str
    """Tree path of the argument or output, or the checkpoint name."""
    num_bytes: int
    """Bytes on one device that it takes."""
    remedy: str
    """How to avoid it."""
    detail: str = ""
    """Further details of this finding."""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        text = f"{self.rule}: {self.path}, {format_bytes(self.num_bytes)}: {RULES[self.rule]}{detail}"
        return f"{text}\n  hint: {self.remedy}"


def leaf_finding(rule: str, leaf: ArgumentLeaf, *, detail: str = "", remedy: str) -> Finding:
    """Build a finding with the path and bytes of an argument leaf."""
    return Finding(rule=rule, path=leaf.path, num_bytes=leaf.num_bytes, detail=detail, remedy=remedy)
