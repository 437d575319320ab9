"""`Plan`: the decisions of a search, what the compiler said about them, and its table."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

from ..core import ConfigError, check_choice, check_integer, format_bytes, parse_json, write_files
from ._decisions import Action, Decision, Remat


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A choice that the search compiled."""

    kept: tuple[str, ...]
    """Labels of the decisions that keep values; empty if each layer is recomputed as a whole."""
    num_microbatches: int
    seconds: float
    """Estimated time of a step."""
    device_bytes: int
    """Bytes of the compiled step on one device."""
    host_bytes: int
    """Bytes of the compiled step in host memory."""

    @property
    def label(self) -> str:
        """The choice as text."""
        return "keep " + ", ".join(self.kept) if self.kept else "recompute all"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The fastest choice that fits a budget, by estimated time; its bytes are compiled.

    Examples:
        >>> plan = Plan(
        ...     target="v5e",
        ...     budget_bytes=2**34,
        ...     num_microbatches=1,
        ...     decisions=(Decision(("mlp_up",), "keep", 2**30, 10**12),),
        ...     tagged=False,
        ...     device_bytes=2**33,
        ...     host_bytes=0,
        ...     flops=10**14,
        ...     seconds=(0.5, 0.6),
        ...     attempts=(),
        ... )
        >>> Plan.from_json(plan.to_json()) == plan
        True
    """

    target: str
    """Name of the target for which the step was compiled."""
    budget_bytes: int
    """Bytes that the step may use on one device."""
    num_microbatches: int
    """Number of parts into which the step splits a batch."""
    decisions: tuple[Decision, ...]
    """Treatment of the named values of the layers."""
    tagged: bool
    """Whether `lowtide.offload.tag` named the values."""
    device_bytes: int
    """Bytes of the compiled step on one device."""
    host_bytes: int
    """Bytes of the compiled step in host memory."""
    flops: int
    """FLOPs of a step: those of the step that keeps nothing, less those that the kept values save."""
    seconds: tuple[float, float]
    """Estimated time of a step. The first number assumes that products and memory traffic overlap, the second that they
    follow each other. On a chip without catalogue figures, only ratios of such times have a meaning."""
    attempts: tuple[Attempt, ...]
    """All compiled choices, in the order of the search."""

    @property
    def hidden(self) -> Remat:
        """The `lowtide.core.HiddenPass` that applies the decisions."""
        names = (name for item in self.decisions if item.action == "keep" for name in item.names)
        return Remat(save=frozenset(names), tagged=self.tagged)

    @property
    def frontier(self) -> tuple[Attempt, ...]:
        """The compiled choices for which no other one is both faster and smaller, from the smallest to the fastest."""
        best: list[Attempt] = []
        for attempt in sorted(self.attempts, key=lambda item: (item.device_bytes, item.seconds)):
            if not best or attempt.seconds < best[-1].seconds:
                best.append(attempt)
        return tuple(best)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the plan as JSON text, and write it to `path` if one is given.

        Raises:
            OutputError: when the file cannot be written.
        """
        text = json.dumps(dataclasses.asdict(self), indent=1) + "\n"
        if path is not None:
            write_files(Path(path).parent, {Path(path).name: text.encode()})
        return text

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan of a text that `to_json` made.

        Raises:
            ConfigError: for JSON that is not a plan.
            ModelFileError: for text that is not a JSON object.
        """
        raw: Any = parse_json(text.encode(), "the plan")
        try:
            fields = _with_tuples(raw)
            fields["decisions"] = tuple(Decision(**_with_tuples(item)) for item in fields["decisions"])
            fields["attempts"] = tuple(Attempt(**_with_tuples(item)) for item in fields["attempts"])
            for item in fields["decisions"]:
                check_choice("action of a decision", item.action, get_args(Action))
            for name in ("budget_bytes", "num_microbatches", "device_bytes", "flops"):
                check_integer(name, fields[name])
            return cls(**fields)
        except (AttributeError, KeyError, TypeError) as error:
            problem = "the text is not a plan"
            raise ConfigError(problem, got=f"{type(error).__name__}: {error}", hint="pass Plan.to_json()") from error

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"{format_bytes(self.budget_bytes)} on {self.target}", title_justify="left")
        for column in ("values of each layer", "decision", "bytes (one microbatch)", "FLOPs saved"):
            table.add_column(column, justify="left" if column in ("values of each layer", "decision") else "right")
        for item in self.decisions:
            share = item.flops / (self.flops + sum(d.flops for d in self.decisions if d.action != "recompute"))
            table.add_row(item.label, item.action, format_bytes(item.num_bytes), f"{share:.1%}")
        compiled = Table(title="compiled", title_justify="left")
        for column in ("choice", "microbatches", "device", "estimated time", ""):
            compiled.add_column(column, justify="left" if column in ("choice", "") else "right")
        for attempt in self.attempts:
            verdict = "fits" if attempt.device_bytes <= self.budget_bytes else "too large"
            sizes = str(attempt.num_microbatches), format_bytes(attempt.device_bytes), f"{attempt.seconds:.3g} s"
            compiled.add_row(attempt.label, *sizes, verdict)
        return Group(Text(str(self)), table, compiled)

    def print(self) -> None:
        """Print the decisions and all compiled choices as tables."""
        from rich.console import Console

        Console().print(self)

    @property
    def summary(self) -> str:
        """What is kept, the microbatches, the bytes, the FLOPs and the estimated time, in one line."""
        kept = ", ".join(item.label for item in self.decisions if item.action == "keep") or "nothing"
        low, high = self.seconds
        return (
            f"keep {kept}; microbatches: {self.num_microbatches}; {format_bytes(self.device_bytes)} of "
            f"{format_bytes(self.budget_bytes)} (compiled for {self.target}); {self.flops / 1e12:.3g} TFLOP; "
            f"{low:.3g} to {high:.3g} s (estimated)"
        )

    def __str__(self) -> str:
        return f"plan: {self.summary}"


def _with_tuples(item: Any) -> dict[str, Any]:
    """Return a JSON object with tuples in place of arrays."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in item.items()}
