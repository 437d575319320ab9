"""`Plan`: the decisions of a search, what the compiler said about them, and its table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from ..core import ConfigError, check_choice, check_integer, format_bytes, parse_json, write_files
from ..report.views._png import frontier_png
from ._decisions import Action, Decision, Memory, Remat, remat

PLACES = ("layer_inputs", "optimizer", "parameters")
"""Fields of a plan that name a memory."""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A choice that the search compiled, cheaply or whole."""

    label: str
    """Text: values that the choice keeps, and data that it places on the host."""
    num_microbatches: int
    seconds: float
    """Estimated time of a step."""
    device_bytes: int
    """Bytes of the compiled step on one device."""
    host_bytes: int
    """Bytes of the compiled step in host memory."""
    is_compiled: bool = True
    """False if `device_bytes` is an estimate of a cheap compilation for a TPU, and `host_bytes` is unknown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The fastest choice that fits a budget, by estimated time; its bytes are compiled.

    Examples:
        >>> plan = Plan(
        ...     target="v5e",
        ...     budget_bytes=2**34,
        ...     num_microbatches=1,
        ...     decisions=(Decision(("mlp_up",), "keep", 2**30, 10**12),),
        ...     device_bytes=2**33,
        ...     host_bytes=0,
        ...     flops=10**14,
        ...     seconds=(0.5, 0.6),
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
    layer_inputs: Memory = "device"
    """Memory that holds the input of each layer until the backward pass."""
    layers_per_remat: int = 1
    """Number of layers that are recomputed as a group."""
    optimizer: Memory = "device"
    """Memory of the optimizer state between steps."""
    parameters: Memory = "device"
    """Memory of the frozen layers."""
    formats: tuple[str, ...] = ()
    """Words of `allow`, and ``small_tiles``, with which the plan was found, because no choice without them fits."""
    has_stack: bool = True
    """Whether the loss runs a `lowtide.core.LayerStack`. Without one, only placements are planned."""
    device_bytes: int
    """Bytes of the compiled step on one device."""
    host_bytes: int
    """Bytes of the compiled step in host memory."""
    flops: int
    """FLOPs of a step: those of the step that keeps nothing, less those that the kept values save."""
    seconds: tuple[float, float]
    """Estimated time of a step. The first number assumes that products and memory traffic overlap, the second that they
    follow each other. On a chip without catalogue figures, only ratios of such times have a meaning."""
    other_choice: str | None = None
    """The compiled choice that fits and would be fastest by the first number, if that is another choice."""
    owners: tuple[tuple[str, int], ...] = ()
    """The owners of the most bytes on the device at the peak, with their bytes (compiled)."""
    digest: str = ""
    """Hash of the settings of a run that keeps its plan; empty without such a run."""
    attempts: tuple[Attempt, ...] = ()
    """All choices that were compiled, in the order of the search."""

    @property
    def hidden(self) -> Remat:
        """The `lowtide.core.HiddenPass` that applies the decisions."""
        return remat(self.decisions, self.layer_inputs, self.layers_per_remat)

    @property
    def frontier(self) -> tuple[Attempt, ...]:
        """The choices compiled whole that no other one beats in bytes and in time, from the smallest to the fastest."""
        best: list[Attempt] = []
        for attempt in sorted(self.attempts, key=lambda item: (item.device_bytes, item.seconds)):
            if attempt.is_compiled and (not best or attempt.seconds < best[-1].seconds):
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
            for name in ("owners", "formats"):
                fields[name] = tuple(tuple(item) if isinstance(item, list) else item for item in fields[name])
            for name in PLACES:
                check_choice(name, fields[name], get_args(Memory))
            for item in fields["decisions"]:
                check_choice("action of a decision", item.action, get_args(Action))
            for name in ("budget_bytes", "num_microbatches", "device_bytes", "flops", "layers_per_remat"):
                check_integer(name, fields[name])
            return cls(**fields)
        except (AttributeError, KeyError, TypeError) as error:
            problem = "the text is not a plan"
            raise ConfigError(problem, got=f"{type(error).__name__}: {error}", hint="pass Plan.to_json()") from error

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        tables: list[Any] = []
        if self.decisions:
            values = Table(title="values of each layer", title_justify="left")
            for column in ("name", "decision", "bytes (one microbatch)", "FLOPs saved"):
                values.add_column(column, justify="left" if column in ("name", "decision") else "right")
            all_flops = self.flops + sum(item.flops for item in self.decisions if item.action != "recompute")
            for item in self.decisions:
                values.add_row(item.label, item.action, format_bytes(item.num_bytes), f"{item.flops / all_flops:.1%}")
            tables.append(values)
        compiled = Table(title="compiled choices", title_justify="left")
        for column in ("choice", "microbatches", "device", "host", "estimated time", ""):
            compiled.add_column(column, justify="left" if column in ("choice", "") else "right")
        for attempt in self.attempts:
            fits = attempt.device_bytes <= self.budget_bytes
            verdict = "estimated" if not attempt.is_compiled else "fits" if fits else "too large"
            sizes = (format_bytes(number) if number else "" for number in (attempt.device_bytes, attempt.host_bytes))
            row = attempt.label, str(attempt.num_microbatches), *sizes, f"{attempt.seconds:.3g} s", verdict
            compiled.add_row(*row)
        owners = Table(title="owners at the peak (compiled)", title_justify="left")
        owners.add_column("owner")
        owners.add_column("bytes", justify="right")
        for label, num_bytes in self.owners:
            owners.add_row(label, format_bytes(num_bytes))
        return Group(Text(str(self)), *tables, compiled, *([owners] if self.owners else []))

    def print(self) -> None:
        """Print the decisions, all compiled choices, and the owners at the peak as tables."""
        from rich.console import Console

        Console().print(self)

    def to_png(self, path: str | Path) -> None:
        """Draw the compiled choices: estimated time against bytes, the budget and the frontier.

        Raises:
            ConfigError: without matplotlib, or for a plan without compiled choices.
            OutputError: when the file cannot be written.
        """
        if not self.attempts:
            raise ConfigError("the plan has no compiled choices to draw", hint="draw the result of lt.plan")
        title = f"{format_bytes(self.device_bytes)} of {format_bytes(self.budget_bytes)} on {self.target}"
        chosen = self.device_bytes, self.seconds[1]
        picture = frontier_png(title, self.attempts, self.frontier, self.budget_bytes, chosen)
        write_files(Path(path).parent, {Path(path).name: picture})

    @property
    def choice(self) -> str:
        """Text: kept values, data on the host, groups of layers, formats and microbatches."""
        parts = label_parts(self.decisions, self, self.layers_per_remat)
        parts += [f"with {', '.join(self.formats)}"] if self.formats else []
        parts += [] if self.has_stack else ["placement only"]
        return "; ".join([*parts, f"microbatches: {self.num_microbatches}"])

    @property
    def summary(self) -> str:
        """The choice, its bytes, FLOPs and estimated time, in one line."""
        low, high = self.seconds
        other = f"; if memory traffic overlaps, faster: {self.other_choice}" if self.other_choice else ""
        return (
            f"{self.choice}; {format_bytes(self.device_bytes)} of {format_bytes(self.budget_bytes)} (compiled for "
            f"{self.target}); {self.flops / 1e12:.3g} TFLOP; {low:.3g} to {high:.3g} s (estimated){other}"
        )

    def __str__(self) -> str:
        return f"plan: {self.summary}"


def label_parts(decisions: Sequence[Decision], memories: Any, layers_per_remat: int) -> list[str]:
    """Return texts about a choice; `memories` has the fields `PLACES`."""
    kept = ", ".join(item.label for item in decisions if item.action == "keep")
    on_host = [item.label for item in decisions if item.action == "host"]
    on_host += [name.replace("_", " ") for name in PLACES if getattr(memories, name) == "host"]
    parts = [f"keep {kept}" if kept else "recompute all"] if decisions else []
    parts += [f"on the host: {', '.join(on_host)}"] if on_host else []
    return parts + ([f"groups of {layers_per_remat} layers"] if layers_per_remat > 1 else [])


def _with_tuples(item: Any) -> dict[str, Any]:
    """Return a JSON object with tuples in place of arrays."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in item.items()}
