"""Print the table in `docs/concepts/streamed-optimizers.md`: which Optax optimizers are streamed, and what prevents it.

python scripts/optimizer_table.py            # the table
python scripts/optimizer_table.py --write    # into the page
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lowtide.core import PlacementWarning, memory_space
from lowtide.offload import optimizer
from lowtide.offload._streaming import plan

PAGE = Path(__file__).parents[1] / "docs" / "concepts" / "streamed-optimizers.md"
MARKS = ("<!-- table: scripts/optimizer_table.py -->", "<!-- end of table -->")
CHUNK_BYTES = 64 * 2**20
SHAPES = {"embedding": (32768, 4096), "layers": {"w": (8, 4096, 4096), "norm": (8, 4096)}}

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adabelief": lambda: optax.adabelief(1e-2),
    "adadelta": lambda: optax.adadelta(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "adafactor (momentum)": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9),
    "adagrad": lambda: optax.adagrad(1e-2),
    "adam": lambda: optax.adam(1e-2),
    "adamax": lambda: optax.adamax(1e-2),
    "adamaxw": lambda: optax.adamaxw(1e-2),
    "adamw": lambda: optax.adamw(1e-2),
    "adan": lambda: optax.adan(1e-2),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "fromage": lambda: optax.fromage(1e-2),
    "lamb": lambda: optax.lamb(1e-2),
    "lars": lambda: optax.lars(1e-2),
    "lbfgs": lambda: optax.lbfgs(1e-2, memory_size=3, linesearch=None),
    "lion": lambda: optax.lion(1e-2),
    "nadam": lambda: optax.nadam(1e-2),
    "nadamw": lambda: optax.nadamw(1e-2),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=0),
    "novograd": lambda: optax.novograd(1e-2),
    "optimistic_adam": lambda: optax.optimistic_adam(1e-2),
    "optimistic_adam_v2": lambda: optax.optimistic_adam_v2(1e-2),
    "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(1e-2),
    "polyak_sgd": lambda: optax.polyak_sgd(1.0),
    "radam": lambda: optax.radam(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2),
    "rmsprop (momentum, centered)": lambda: optax.rmsprop(1e-2, momentum=0.9, centered=True),
    "rprop": lambda: optax.rprop(1e-2),
    "sgd": lambda: optax.sgd(1e-2),
    "sgd (momentum)": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "sign_sgd": lambda: optax.sign_sgd(1e-2),
    "signum": lambda: optax.signum(1e-2),
    "sm3": lambda: optax.sm3(1e-2),
    "yogi": lambda: optax.yogi(1e-2),
    "contrib.ademamix": lambda: optax.contrib.ademamix(1e-2),
    "contrib.adopt": lambda: optax.contrib.adopt(1e-2),
    "contrib.cocob": lambda: optax.contrib.cocob(),
    "contrib.dadapt_adamw": lambda: optax.contrib.dadapt_adamw(1e-2),
    "contrib.madgrad": lambda: optax.contrib.madgrad(1e-2),
    "contrib.muon": lambda: optax.contrib.muon(1e-2),
    "contrib.prodigy": lambda: optax.contrib.prodigy(1e-2),
    "contrib.schedule_free_adamw": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "contrib.simplified_ademamix": lambda: optax.contrib.simplified_ademamix(1e-2),
    "chain(clip_by_global_norm, adamw, ema)": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-2), optax.ema(0.9)
    ),
    "chain(adam, clip_by_global_norm)": lambda: optax.chain(optax.adam(1e-2), optax.clip_by_global_norm(1.0)),
    "MultiSteps(adamw)": lambda: optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
    "MultiSteps(chain(clip_by_global_norm, adamw))": lambda: optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), 2
    ).gradient_transformation(),
    "apply_if_finite(adamw)": lambda: optax.apply_if_finite(optax.adamw(1e-2), 3),
    "inject_hyperparams(adamw)": lambda: optax.inject_hyperparams(optax.adamw)(1e-2),
    "partition(adamw, set_to_zero)": lambda: optax.partition(
        {True: optax.adamw(1e-2), False: optax.set_to_zero()}, lambda p: jax.tree.map(lambda leaf: leaf.ndim > 1, p)
    ),
    "masked(adamw)": lambda: optax.masked(optax.adamw(1e-2), lambda p: jax.tree.map(lambda leaf: leaf.ndim > 1, p)),
    "chain(adamw, keep_params_nonnegative)": lambda: optax.chain(optax.adamw(1e-2), optax.keep_params_nonnegative()),
}

KINDS = (
    "sgd (momentum)",  # one moment
    "adamw",  # two moments
    "amsgrad",  # a running maximum
    "rmsprop (momentum, centered)",  # the difference of two moments
    "adan",  # the previous gradient
    "rprop",  # signs and step sizes
    "novograd",  # a number for each leaf
    "adafactor (momentum)",  # sums of rows and columns
    "sm3",  # maxima of rows and columns
    "lbfgs",  # a history
    "noisy_sgd",  # a random key
    "polyak_sgd",  # an extra argument
    "lamb",  # norms of a leaf
    "contrib.prodigy",  # norms over all leaves
    "contrib.schedule_free_adamw",  # a copy of the parameters
    "contrib.ademamix",  # a slow mean
    "contrib.cocob",  # rewards
    "contrib.muon",  # another optimizer for each shape
    "chain(clip_by_global_norm, adamw, ema)",
    "MultiSteps(adamw)",
    "apply_if_finite(adamw)",
    "inject_hyperparams(adamw)",
    "partition(adamw, set_to_zero)",
    "masked(adamw)",
)
"""One optimizer for each kind of state. The tests run these; the table contains all optimizers."""


def extra_arguments(name: str) -> dict[str, Any]:
    """Return the extra arguments of an optimizer's update, in addition to gradients, state and parameters."""
    return {"value": jnp.float32(0.5)} if name == "polyak_sgd" else {}


def row(name: str) -> tuple[str, str, str]:
    """Return a table row: the optimizer, how it is updated with all state on the host, and what prevents streaming."""
    tx = optax.with_extra_args_support(OPTIMIZERS[name]())
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), SHAPES, is_leaf=lambda s: type(s) is tuple)
    # In jax 0.10.2, shapes with a single-device sharding lose their host memory kind during tracing.
    mesh = jax.sharding.Mesh(jax.devices()[:1], "x")
    host = jax.sharding.NamedSharding(mesh, jax.P(), memory_kind="pinned_host")
    state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host if leaf.ndim else None),
        jax.eval_shape(tx.init, params),
    )
    if all(leaf.ndim == 0 for leaf in jax.tree.leaves(state)):
        return name, "no state", ""
    _run(name, params, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host), state))
    made = plan(
        lambda grads, state, params: tx.update(grads, state, params, **extra_arguments(name)),
        (params, state, params),
        lambda grads, state, params: (grads, state),
        chunk_bytes=CHUNK_BYTES,
        fold=True,
    )
    leaves = jax.tree.leaves((params, state, params))
    hosted = [sum(memory_space(leaves[at]) == jax.memory.Space.Host for at in group.leaves) for group in made.groups]
    blocked = sorted({group.blocked_by for group in made.groups if group.blocked_by})
    if not made.groups:
        return name, "small state, moved at once", ""
    if not blocked:
        return name, "streamed, norms first" if made.passes else "streamed", ""
    whole = [number for number, group in zip(hosted, made.groups, strict=True) if group.blocked_by]
    everything = len(whole) == 1 and whole[0] == sum(hosted)
    how = "all leaves together" if everything else "leaf by leaf" if len(whole) == len(made.groups) else "mixed"
    return name, how, ", ".join(f"`{reason}`" for reason in blocked)


def _run(name: str, params: Any, state: Any) -> None:
    """Trace the real update, because a plan alone does not show whether its blocks fit together."""
    wrapped = optimizer(OPTIMIZERS[name](), ".*", chunk_bytes=CHUNK_BYTES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlacementWarning)  # the table contains this
        jax.jit(lambda *args: wrapped.update(*args, **extra_arguments(name))).trace(params, state, params)


def table() -> str:
    """Return the whole table as Markdown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        rows = [row(name) for name in OPTIMIZERS]
    lines = ["| optimizer | update | what prevented blocks |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {how} | {reason} |" for name, how, reason in rows)])


def main() -> None:
    if "--write" not in sys.argv:
        print(table())
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text(f"{before}{MARKS[0]}\n{table()}\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
