"""What versions of JAX say otherwise is read alike."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex

from lowtide.jaxprs import _versions as _jaxprs
from lowtide.jaxprs import equations


def test_the_parts_of_a_scan_are_counted() -> None:
    def fn(a: Any, b: Any, init: Any, xs: Any) -> Any:
        return jax.lax.scan(lambda carry, x: (carry * a + x @ b, None), init, xs)[0]

    def counts(fn: Any) -> list[tuple[int, int]]:
        eqns = jax.make_jaxpr(fn)(jnp.ones(2), jnp.ones((3, 2)), jnp.ones(2), jnp.ones((5, 3))).jaxpr.eqns
        return [_jaxprs.scan_counts(eqn.params) for eqn in eqns if eqn.primitive.name == "scan"]

    assert counts(fn) == [(2, 1)]
    # Forward and transposed; the latter carries the cotangent, and in the gradient of a, which both read, its total.
    assert counts(jax.grad(lambda *args: fn(*args).sum(), argnums=2)) == [(2, 1), (1, 1)]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("traced_before", [False, True], ids=["inside", "outside"])
@pytest.mark.parametrize("is_new", [False, True], ids=["classic", "remat3"])
def test_recomputation_and_names_are_read_in_one_way(is_new: bool, traced_before: bool) -> None:
    from jax._src import config

    def checkpointed() -> Any:
        policy = jax.checkpoint_policies.save_only_these_names("sine", "other")
        return jax.checkpoint(lambda x: checkpoint_name(jnp.sin(x), "sine") ** 2, policy=policy)

    with config.remat3(is_new):
        made = checkpointed()

        def fn(x: Any) -> Any:
            return jax.lax.scan(lambda h, _: (made(h) if traced_before else checkpointed()(h), None), x, length=2)[0]

        closed, shapes = _jaxprs.make_jaxpr(fn)(jnp.ones(3))
        found = [eqn.primitive.name for eqn in equations(closed)]
        assert {"remat2", "checkpoint"}.intersection(found), "the class of recomputation"
        assert "name" in found
        (scan,) = (eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan")
        (body,) = jex.jaxprs_in_params(scan.params)
        (remat,) = (eqn for eqn in body.eqns if eqn.primitive.name in ("remat2", "checkpoint"))
        assert _jaxprs.policy_names(remat.params["policy"]) == {"sine": True, "other": True}
        assert shapes.shape == (3,)
        x = jnp.linspace(0.1, 1.0, 3)
        gradient = jax.grad(lambda x: jex.jaxpr_as_fun(closed)(x)[0].sum())(x)
        assert jnp.allclose(gradient, jax.grad(lambda x: (jnp.sin(jnp.sin(x) ** 2) ** 2).sum())(x), rtol=1e-5)


class Callable:
    """With methods that know their class, and with texts that are no names."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self.texts = texts

    def __call__(self, prim: Any, *_: Any, **params: Any) -> bool:
        return params.get("name") in self.texts


def recursive() -> Any:
    def policy(prim: Any, *avals: Any, **params: Any) -> bool:
        return params.get("name") == "a" or (not avals and policy(prim, 1, **params))

    return policy


def closing_over(value: Any) -> Any:
    def policy(prim: Any, *_: Any, **params: Any) -> bool:
        return value is not None and params.get("name") in ("a", "b")

    return policy


def among(names: Any, least: int, prim: Any, *avals: Any, **params: Any) -> bool:
    return prim.name == "name" and avals[0].size > least and params["name"] in names


P = jax.checkpoint_policies


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (P.save_only_these_names("a", "b"), "ab"),
        (P.save_any_names_but_these("a"), "-a"),
        (P.save_from_both_policies(P.save_any_names_but_these("a", "b"), P.save_only_these_names("b")), "-a"),
        (P.save_anything_except_these_names("a"), ""),
        (P.dots_with_no_batch_dims_saveable, ""),
        (P.everything_saveable, ""),
        (P.save_from_both_policies(P.dots_saveable, P.save_only_these_names("a")), "a"),
        (P.save_from_both_policies(Callable("a"), P.save_only_these_names("b")), "ab"),
        (
            P.save_and_offload_only_these_names(
                names_which_can_be_saved=["a"],
                names_which_can_be_offloaded=["b"],
                offload_src="device",
                offload_dst="pinned_host",
            ),
            "ab",
        ),
        (recursive(), "a"),
        (closing_over(Callable), "ab"),
        (closing_over(Callable("c", "d")), "ab"),
        (functools.partial(among, frozenset("ab"), 1000), "ab"),
        (Callable("a").__call__, "a"),
        (lambda prim, other: other in {"a"}, ""),  # which JAX could not ask either
    ],
)
def test_names_of_a_policy_are_those_that_change_its_answer(policy: Any, names: str) -> None:
    assert _jaxprs.policy_names(policy) == dict.fromkeys(names.removeprefix("-"), not names.startswith("-"))
