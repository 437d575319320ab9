"""Findings of the lint, and its rules."""

from __future__ import annotations

import dataclasses

from ...core import format_bytes
from ...hlo import ArgumentLeaf

RULES = {
    "undonated-state": "the step replaces an argument that is not donated, so two copies of it exist",
    "donation-not-used": "a donated buffer is not reused for any output",
    "rebuilt-state": "a loop writes the new value of a donated argument to a second buffer",
    "returned-unchanged": "an output is a copy of an argument",
    "checkpoint-name-unmatched": "a checkpoint policy contains a name that no checkpoint_name defines",
    "offload-moved-nothing": "the step offloads values, but host memory holds none",
    "optimizer-over-frozen": "a leaf without a gradient has optimizer state or an accumulator",
    "norm-over-frozen": "the gradient of a frozen leaf is computed for a norm",
    "residual-copy": "a copy of an argument is kept for the backward pass",
    "dequantized-residual": "a quantised frozen weight is kept as floats for the backward pass",
    "frozen-cast": "a frozen argument is held twice: in its own dtype, and in the lower precision that the step uses",
    "adapter-multiplied-out": "a low-rank correction is added to its weight, so a second copy of the weight exists",
    "large-constant": "the function closes over a large array, which becomes part of the program",
    "checkpoint-name-unused": "no checkpoint policy contains a name, although a policy contains others, or "
    "jax.checkpoint recomputes its value",
    "duplicated-average": "two states of the step are updated in the same way from the same values",
    "copied-in-loop": "a loop copies a whole carried array before it writes a part of it",
    "stacked-gradients": "the gradients of many microbatches or examples are held at once before they are summed",
    "checkpoint-undone": "jax.checkpoint saves no memory: the compiler keeps the values, or recomputes all at once",
    "whole-logits": "the logits of all tokens are held at once",
    "replicated": "every device of the mesh holds all of a large argument",
    "padded": "a large buffer is mostly padding",
}
"""Rules and their meaning."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """An unnecessary use of memory in a step.

    Examples:
        >>> print(Finding(rule="undonated-state", path="state/w", num_bytes=2**20, remedy="donate argument 0"))
        undonated-state: state/w, 1.00 MiB: the step replaces an argument that is not donated, so two copies of it exist
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
