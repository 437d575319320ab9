"""Lint of loops: what they copy or make anew at each iteration."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lowtide.memory import analyze, lint


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


@pytest.mark.parametrize("reads", ["new", "old"])
def test_a_loop_that_copies_what_it_writes_into(reads: str) -> None:
    """A cache of keys, one row a step: whoever reads it as it was before the write makes a CPU copy all of it."""

    def decode(cache: Any, w: Any, token: Any) -> Any:
        def step(i: Any, carry: Any) -> Any:
            cache, h = carry
            new = jax.lax.dynamic_update_slice(cache, (h @ w)[:, None], (0, i, 0))
            weights = jax.nn.softmax(jnp.einsum("bd,btd->bt", h, cache if reads == "old" else new))
            return new, jnp.einsum("bt,btd->bd", weights, cache if reads == "old" else new)

        return jax.lax.fori_loop(0, 64, step, (cache, token))

    args = shape(4, 512, 512), shape(512, 512), shape(4, 512)
    found = lint(decode, *args, donate_argnums=0, target="cpu")
    copied = [("copied-in-loop", "cache", 4 * 512 * 512 * 4)] if reads == "old" else []
    assert [(one.rule, one.path, one.num_bytes) for one in found] == copied


def test_a_loop_that_copies_in_each_branch_what_it_writes_into() -> None:
    """The old values are read after a write that not every iteration makes; one branch runs, and copies once."""

    def train(table: Any, row: Any) -> Any:
        def step(i: Any, table: Any) -> Any:
            new = jax.lax.cond(i % 2 == 0, lambda t: t.at[i].set(row), lambda t: t, table)
            return new.at[0].add(table[i] @ row)

        return jax.lax.fori_loop(0, 64, step, table)

    (found,) = lint(train, shape(64, 40960), shape(40960), donate_argnums=0, target="cpu")
    assert (found.rule, found.path, found.num_bytes) == ("copied-in-loop", "table", 64 * 40960 * 4)


@pytest.mark.slow
def test_a_loop_that_makes_its_state_anew() -> None:
    def stacked(cache: Any, w: Any, x: Any) -> Any:
        def layer(x: Any, one: Any) -> Any:
            cache, w = one
            return jnp.tanh(x @ w), jax.lax.dynamic_update_slice(cache, x[None] @ w, (3, 0, 0))

        return jax.lax.scan(layer, x, (cache, w))

    def carried(cache: Any, w: Any, x: Any) -> Any:
        def layer(carry: Any, one: Any) -> Any:
            x, cache = carry
            at, w = one
            return (jnp.tanh(x @ w), jax.lax.dynamic_update_slice(cache, (x @ w)[None, None], (at, 3, 0, 0))), None

        return jax.lax.scan(layer, (x, cache), (jnp.arange(4), w))[0]

    args = (shape(4, 256, 8, 64), shape(4, 64, 64), shape(8, 64))
    (found,) = lint(stacked, *args, target="cpu", donate_argnums=0)
    assert (found.rule, found.path, found.num_bytes) == ("rebuilt-state", "cache", 4 * 256 * 8 * 64 * 4)
    assert lint(carried, *args, target="cpu", donate_argnums=0) == ()
    report = analyze(stacked, *args, target="cpu", donate_argnums=0)
    assert report.peak_by_role["outputs"] >= found.num_bytes
    saved = report.device_bytes - analyze(carried, *args, target="cpu", donate_argnums=0).device_bytes
    assert saved == pytest.approx(found.num_bytes, rel=0.01)
