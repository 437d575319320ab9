"""An update that is left out: the state stays bit for bit as it was, and being able to do so costs hardly a byte."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import NonFiniteError

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3),
    "clip and adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "average": lambda: lt.train.ema(optax.adamw(1e-3), decay=0.99),
}
WIDE, DIM, NUM_LAYERS = 512, 16, 4
"""Where bytes are counted, and where values are compared."""
LEAF_BYTES = 4 * WIDE**2


def model(dim: int = DIM) -> Any:
    draw = np.random.default_rng(0).normal
    layers = [jnp.asarray(draw(size=(dim, dim)) / dim**0.5, jnp.float32) for _ in range(NUM_LAYERS)]
    return {"layers": layers, "seen": jnp.zeros(())}


def loss_fn(model: Any, batch: Any) -> Any:
    x = batch["x"]
    for weight in model["layers"]:
        x = jnp.tanh(x @ weight)
    # The square root of 0 is finite, its gradient is not.
    loss = jnp.mean(x**2) + batch["add"] + jnp.sqrt(batch["root"] * jnp.sum(x**2))
    return loss, {}, {**model, "seen": model["seen"] + 1}


def batch(*, add: float = 0.0, root: float = 1.0, dim: int = DIM) -> Any:
    return {"x": np.full((4, dim), 0.1, np.float32), "add": np.float32(add), "root": np.float32(root)}


def trainer(optimizer: str, dim: int = DIM, **options: Any) -> lt.Trainer:
    return lt.Trainer(model(dim), loss_fn, OPTIMIZERS[optimizer](), wrt="layers/*", mutable="seen", **options)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("optimizer", "target"),
    [
        ("adamw", None),
        pytest.param("adamw", "v5e:2x2", marks=pytest.mark.tpu_aot),
        pytest.param("average", None, marks=pytest.mark.slow),
    ],
)
def test_bytes_of_being_able_to_leave_an_update_out(optimizer: str, target: str | None) -> None:
    def device_bytes(on_nan: Any) -> int:
        return trainer(optimizer, WIDE, on_nan=on_nan).memory(batch(dim=WIDE), target=target).device_bytes

    more = device_bytes("skip") - device_bytes("ignore")
    assert more <= (2 if target is None else 0.5) * LEAF_BYTES  #


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("optimizer", "num_microbatches"),
    [*((name, 2) for name in OPTIMIZERS), pytest.param("clip and adamw", 1, marks=pytest.mark.slow)],
)
def test_the_state_stays_as_it_was(optimizer: str, num_microbatches: int) -> None:
    def whole(leaf: Any) -> Any:  # one value of each microbatch
        return leaf if num_microbatches == 1 or np.ndim(leaf) else np.full(num_microbatches, leaf)

    def loss(model: Any, batch: Any) -> Any:
        return loss_fn(model, jax.tree.map(lambda leaf: leaf[0] if leaf.ndim == 1 else leaf, batch))

    ours = lt.Trainer(
        model(),
        loss,
        OPTIMIZERS[optimizer](),
        wrt="layers/*",
        mutable="seen",
        on_nan="skip",
        num_microbatches=num_microbatches,
    )
    bad = [batch(add=np.nan), batch(add=np.inf), batch(root=0.0)]
    data = [jax.tree.map(whole, given) for one in bad for given in (batch(), one)]
    data.append(jax.tree.map(whole, batch()))
    for number in range(len(bad)):
        ours.fit(data, num_steps=2 * number + 1)
        before = jax.tree.map(np.array, ours.state)
        records = ours.fit(data, num_steps=2 * number + 2)
        assert not (np.isfinite(records[0]["loss"]) and np.isfinite(records[0]["grad_norm"]))
        after = jax.tree.map(np.array, ours.state)
        for part in ("trainable", "opt_state", "mutable"):
            jax.tree.map(np.testing.assert_array_equal, getattr(after, part), getattr(before, part))
        assert after.step == 2 * number + 2
    ours.fit(data, num_steps=len(data))
    assert ours.state.mutable["seen"] == (len(bad) + 1) * num_microbatches


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_good_steps_are_those_without_a_guard(optimizer: str) -> None:
    both = [trainer(optimizer, on_nan=on_nan) for on_nan in ("abort", "ignore")]
    for each in both:
        each.fit([batch(add=step) for step in range(4)], num_steps=4)
    # XLA contracts operations to one rounding as it likes in each program; of a clipped gradient it differs.
    same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=5e-7)
    same = same if "clip" in optimizer else np.testing.assert_array_equal
    jax.tree.map(same, *[jax.tree.map(np.array, each.state) for each in both])


@pytest.mark.slow
def test_the_update_that_raises_is_left_out() -> None:
    ours = trainer("adamw")
    with pytest.raises(NonFiniteError, match=r"(?s)step 2: loss is not finite.*hint: lower the learning rate"):
        ours.fit([batch(), batch(add=np.nan), batch()], num_steps=3)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.tree.map(np.array, ours.state)))
