"""Requirements of a layerwise step on a `LayerStack`, in addition to `LayerStack.shapes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ...core import ConfigError, SelectionError, StructureError, Tree, leaves_with_paths, match_path
from ...jaxprs import Kind, called, kind_of, opened


def refuse_metrics(metrics: Tree) -> None:
    """Raise `StructureError` for metrics of `LayerStack.last` without names, or with names that the step reports."""
    taken = {"loss", "grad_norm"} & set(metrics if isinstance(metrics, dict) else {})
    if not isinstance(metrics, dict) or taken:
        raise StructureError(
            f"last returns a metric named {', '.join(sorted(taken))}, which the step reports itself"
            if taken
            else "the metrics of last are not a dictionary",
            expected="a dictionary of scalars with names other than loss and grad_norm",
            got=", ".join(metrics) if taken else type(metrics).__name__,
            hint="rename it" if taken else "return a dictionary of metrics",
        )


def refuse_equal_paths(outer: Tree) -> None:
    """Raise `StructureError` when two outer leaves have the same path: the path is the key of a leaf's state."""
    paths = [path for path, _ in leaves_with_paths(outer)]
    for path in paths:
        if paths.count(path) > 1:
            raise StructureError(
                f"two leaves have the path outer/{path}",
                expected="one leaf for each path",
                got=f"{paths.count(path)} leaves",
                hint="rename a key that contains '/'",
            )


def refuse_explicit_axes(**trees: Tree) -> None:
    """Raise `ConfigError` when a leaf is on a mesh whose axes are part of its type.

    The buffers of a layerwise step take their sharding from the values that are written into them. Explicit axes forbid
    that.
    """
    for path, leaf in leaves_with_paths(trees):
        if explicit := jax.typeof(leaf).sharding.mesh.explicit_axes:
            raise ConfigError(
                f"{path}: its mesh has explicit axes, which a layerwise step does not support",
                expected="axes of type jax.sharding.AxisType.Auto",
                got=f"explicit {', '.join(map(str, explicit))}",
                hint="pass axis_types=(jax.sharding.AxisType.Auto,) * number of axes to jax.make_mesh, whose "
                "default is explicit",
            )


def refuse_unmatched(running: Sequence[str], outer: Tree) -> None:
    """Raise `SelectionError` when the patterns of `LayerStack.running` match no outer leaf, as a misspelt name does."""
    paths = [path for path, _ in leaves_with_paths(outer)]
    if running and not any(match_path(path, pattern) for path in paths for pattern in running):
        raise SelectionError(
            f"LayerStack.running matches no outer leaf: {', '.join(map(repr, running))}",
            expected=f"a pattern for one of {', '.join(paths[:8]) or 'no leaves'}",
            hint="name matrices that last multiplies by, such as lm_head/weight, or pass ()",
        )


def check_running(jaxpr: Any, paths: list[str]) -> None:
    """Raise `StructureError` when a running gradient would be added several times, or not at all.

    The first inputs of the jaxpr are the totals of the running gradients at `paths`.
    """
    for path, var in zip(paths, jaxpr.invars, strict=False):
        if _uses(jaxpr, var) != 1:
            raise StructureError(
                f"outer/{path}: last does not use it exactly once, so its gradient cannot be added to a running total",
                expected="one use, in lowtide.core.linear or chunked_cross_entropy, outside of loops",
                got="no use" if not _uses(jaxpr, var) else "several uses, or one inside a loop or another operation",
                hint="remove its pattern from LayerStack.running; its gradient is then summed like any other",
            )


def _uses(jaxpr: Any, var: Any) -> int:
    """Count the operations with a custom derivative rule that read a variable; any other reader counts as two."""
    count = 2 * sum(output is var for output in jaxpr.outvars)
    for eqn in jaxpr.eqns:
        positions = [position for position, operand in enumerate(eqn.invars) if operand is var]
        kind = kind_of(eqn)
        if positions and kind in (Kind.CALL, Kind.REMAT):
            inner = opened(called(eqn))
            count += sum(_uses(inner, inner.invars[position]) for position in positions)
        elif positions:
            count += 1 if kind is Kind.CUSTOM_VJP and len(positions) == 1 else 2
    return count
