"""Optax optimizers of every kind of state, with their state on the host: values equal those of the unwrapped one."""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowtide.core import PlacementWarning, SelectionError
from lowtide.offload import _streaming, optimizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "optimizer_table.py"
_spec = importlib.util.spec_from_file_location("optimizer_table", SCRIPT)
assert _spec is not None and _spec.loader is not None
optimizer_table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(optimizer_table)

NUM_STEPS = 5
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:optax")


def trees(kind: str) -> Any:
    def normal(at: int, *shape: int) -> np.ndarray:
        return np.random.default_rng(at).normal(size=shape).astype(np.float32)

    return {
        "flat": {"a": normal(0, 56, 128), "b": normal(1, 16, 256)},
        "nested": {
            "layers": {"w": normal(0, 3, 56, 128), "norm": normal(1, 3, 128)},
            "head": (normal(2, 4096), np.float32(0.7)),
            "matrix": normal(3, 16, 256),
        },
        "bare": normal(0, 56, 128),
        "factored": {"layers": normal(0, 2, 56, 128)},
    }[kind]


def run(tx: Any, state: Any, params: Any, extra: dict[str, Any]) -> Any:
    tx = optax.with_extra_args_support(tx)

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    start = jax.tree.map(np.asarray, params)
    for at in range(NUM_STEPS):
        params, state = step(params, state, jax.tree.map(lambda p: np.sin((at + 2) * p + at), start))  # noqa: B023
    return params, state


def check(name: str, kind: str, chunk_bytes: int = 24 * 1024) -> None:
    # On a device from the start: else the first step would put them there, and the second one be compiled again.
    params, extra = jax.device_put(trees(kind), jax.devices()[0]), optimizer_table.extra_arguments(name)
    tx = optimizer_table.OPTIMIZERS[name]()
    wrapped = optimizer(tx, ".*", chunk_bytes=chunk_bytes)
    try:
        state = wrapped.init(params)
    except SelectionError:
        assert not jax.tree.leaves(tx.init(params))
        return
    want = run(tx, jax.device_put(tx.init(params), jax.devices()[0]), params, extra)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlacementWarning)
        got = run(wrapped, state, params, extra)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    on_device = [leaf for leaf in jax.tree.leaves(got[1]) if leaf.sharding.memory_kind != "pinned_host"]
    assert all(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in on_device)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6, err_msg=str(path))


SLOW = pytest.mark.slow
BARE = ("adafactor", "lbfgs", "noisy_sgd", "polyak_sgd", "apply_if_finite(adamw)", "MultiSteps(adamw)")
"""One of each kind of state: factored, histories, keys, extra arguments, wrappers."""
QUICK = ("adamw", "chain(clip_by_global_norm, adamw, ema)")


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", BARE)
def test_a_bare_array_has_the_values_of_the_unwrapped_optimizer(name: str) -> None:
    check(name, "bare")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else SLOW) for name in optimizer_table.KINDS]
)
def test_five_steps_have_the_values_of_the_unwrapped_optimizer(name: str) -> None:
    check(name, "flat" if name == "sm3" else "nested")  # sm3 takes no scalars, wrapped or not


@pytest.mark.slow_after(1)
@pytest.mark.filterwarnings("error::lowtide.core.PlacementWarning")
@pytest.mark.parametrize("name", ["contrib.dadapt_adamw", "MultiSteps(chain(clip_by_global_norm, adamw))"])
def test_norms_over_all_leaves_take_a_pass_of_their_own(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlacementWarning)
        check(name, "flat", 8 * 1024)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "name",
    ["adafactor (momentum)", "sm3", *(pytest.param(n, marks=SLOW) for n in ("adafactor", "novograd", "contrib.muon"))],
)
def test_statistics_of_rows_and_columns_meet_blocks_of_the_leaf(name: str, monkeypatch: Any) -> None:
    # As of leaves of gigabytes: small state is moved at once, and rows of one layer are cut.
    monkeypatch.setattr(_streaming, "_SMALL_PART", 8)
    cuts = list[Any]()
    cut_block = _streaming.cut_block
    monkeypatch.setattr(_streaming, "cut_block", lambda *a, **of: cuts.append(cut_block(*a, **of)) or cuts[-1])
    check(name, "factored", 8 * 1024)
    if name in ("adafactor (momentum)", "sm3"):
        assert cuts == [(1, 16)]  # and a tail of eight


def test_the_list_holds_every_alias_of_optax() -> None:
    listed = {name.partition(" ")[0].rpartition(".")[2] for name in optimizer_table.OPTIMIZERS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        public = {name: getattr(optax, name) for name in optax.__all__}
    made_of_a_rate = {
        name
        for name, value in public.items()
        if inspect.isfunction(value)
        and "learning_rate" in inspect.signature(value).parameters
        and not name.startswith(("scale_by_", "dpsgd"))  # building blocks; deprecated
    }
    assert made_of_a_rate - listed == set()


@pytest.mark.slow
def test_the_page_holds_the_generated_table() -> None:
    page = optimizer_table.PAGE.read_text(encoding="utf-8")
    begin, end = optimizer_table.MARKS
    assert page.partition(begin)[2].partition(end)[0].strip() == optimizer_table.table(), (
        "run scripts/optimizer_table.py --write"
    )
