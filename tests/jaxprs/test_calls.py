"""Every operation that holds jaxprs is looked into, those that nobody knows too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.extend import core as jex
from jax.sharding import PartitionSpec as P

from lowtide.core._compat import classic_remat, on_one_device
from lowtide.jaxprs import (
    PRIMITIVES,
    Body,
    Kind,
    bodies,
    called,
    eqn_flops,
    equations,
    fold,
    kind_of,
    make_jaxpr,
    opened,
    variables_read,
    walk,
    with_bodies,
)

X = jnp.linspace(0.1, 1.0, 8)


@jax.custom_vjp
def with_vjp(x: Any) -> Any:
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))
with_jvp = jax.custom_jvp(lambda x: jnp.sin(x))
with_jvp.defjvp(lambda x, t: (jnp.sin(x[0]), jnp.cos(x[0]) * t[0]))


def divided(x: Any) -> Any:
    mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("a"), out_specs=P("a"))(x)


def kernel(x: Any) -> Any:
    def body(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = jnp.sin(x_ref[...])

    spec = pl.BlockSpec((2,), lambda i: (i,))
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(body, out_shape=like, grid=(4,), in_specs=[spec], out_specs=spec, interpret=True)(x)


unknown_p = jex.Primitive("nobody_knows")
unknown_p.multiple_results = True
unknown_p.def_abstract_eval(lambda *avals, **_: list(avals))


def unknown(x: Any) -> Any:
    inner = jax.make_jaxpr(jnp.sin)(x)
    return unknown_p.bind(x, parts=(1, ("text", (inner,))))[0]


# A function with a sine inside of an operation, the operation's kind, what its bodies read, and how often they run.
HOLDING: dict[str, tuple[Any, Kind, list[tuple[int, ...] | None], int]] = {
    "jit": (jax.jit(jnp.sin), Kind.CALL, [(0,)], 1),
    "closed_call": (jex.jaxpr_as_fun(jax.make_jaxpr(jax.jit(jnp.sin))(X)), Kind.CALL, [(0,)], 1),
    "checkpoint": (jax.checkpoint(jnp.sin), Kind.REMAT, [(0,)], 1),
    "custom_jvp_call": (with_jvp, Kind.CUSTOM_JVP, [(0,)], 1),
    "custom_vjp_call": (with_vjp, Kind.CUSTOM_VJP, [(0,)], 1),
    "scan": (lambda x: jax.lax.scan(lambda h, y: (jnp.sin(h) * x, y), x, x)[0], Kind.SCAN, [(0, 1, 2)], 8),
    "while": (
        lambda x: jax.lax.while_loop(lambda h: h[0] < x[1], lambda h: jnp.sin(h) * x, x),
        Kind.WHILE,
        [(0, 2), (1, 2)],
        1,
    ),
    "cond": (lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), Kind.BRANCH, [(1,), (1,)], 1),
    "on_one_device": (lambda x: on_one_device(jnp.cos, jnp.sin, x), Kind.CHOICE, [(0,)], 1),
    "shard_map": (divided, Kind.SHARD_MAP, [(0,)], 1),
    "pallas_call": (kernel, Kind.KERNEL, [None], 4),
    "reduce": (
        lambda x: jax.lax.reduce(x, jnp.float32(1), lambda a, b: jnp.sin(a) * b, (0,)),
        Kind.SCALAR,
        [None],
        1,
    ),
    "nobody_knows": (unknown, Kind.OTHER, [None], 1),
}


def traced(name: str) -> Any:
    """The jaxpr of one of them."""
    return make_jaxpr(lambda x: HOLDING[name][0](x))(X)[0]


def sole(closed: Any) -> Any:
    """The first operation that holds others."""
    return next(eqn for eqn in closed.jaxpr.eqns if kind_of(eqn) is not None)


@pytest.mark.parametrize("name", HOLDING)
def test_every_kind_of_operation_is_walked(name: str) -> None:
    _, kind, reads, times = HOLDING[name]
    closed = traced(name)
    eqn = sole(closed)
    assert kind_of(eqn) is kind
    assert [body.reads for body in bodies(eqn)] == reads
    for body in bodies(eqn):
        assert body.reads is None or len(body.reads) == len(opened(body.jaxpr).invars)
    assert [one.primitive.name for one in equations(closed)].count("sin") == 1
    found = {one.primitive.name: runs for one, runs in walk(closed, 1, lambda _, body, runs: runs * body.times)}
    assert found["sin"] == times


def test_the_table_has_no_row_that_nothing_tests() -> None:
    """By other names of other versions: pjit, core_call, eval_jaxpr, remat2."""
    kinds = {kind for kind, _ in PRIMITIVES.values()} - {Kind.OPAQUE}  # which shows nothing
    assert kinds == {kind_of(sole(traced(name))) for name in HOLDING} - {Kind.SCALAR, Kind.OTHER}


def test_what_the_iteration_before_gave_is_told_apart() -> None:
    assert [list(body.carried) for body in bodies(sole(traced("scan")))] == [[1]]
    assert [list(body.carried) for body in bodies(sole(traced("while")))] == [[1], [1]]


@pytest.mark.parametrize("name", [name for name in HOLDING if name != "pallas_call"])
def test_bodies_can_be_replaced(name: str) -> None:
    """Wherever the parameter has them: by itself, in a tuple, deeper."""

    def cosines(body: Body) -> Any:
        cos = jax.lax.cos_p
        eqns = [eqn.replace(primitive=cos) if eqn.primitive.name == "sin" else eqn for eqn in opened(body.jaxpr).eqns]
        new = opened(body.jaxpr).replace(eqns=eqns)
        return new if body.jaxpr is opened(body.jaxpr) else body.jaxpr.replace(jaxpr=new)

    eqn = with_bodies(sole(traced(name)), cosines)
    inside = [one.primitive.name for body in bodies(eqn) for one in equations(body.jaxpr)]
    assert "sin" not in inside and "cos" in inside


@pytest.mark.slow
def test_parts_that_have_names_keep_them() -> None:
    """A linear solve holds a tuple with fields, which a plain tuple would not be."""
    matrix = jnp.eye(2) * 2

    def solve(x: Any) -> Any:
        step = jax.checkpoint(lambda v: matrix @ v)
        return jax.lax.custom_linear_solve(step, x, lambda _, b: b / 2, symmetric=True)

    closed = make_jaxpr(solve)(jnp.ones(2))[0]
    eqn = with_bodies(sole(closed), lambda body: body.jaxpr.replace())
    assert hasattr(eqn.params["jaxprs"], "_fields")
    assert eqn_flops(eqn) >= 2 * 2 * 2
    assert jnp.allclose(jax.jit(jex.jaxpr_as_fun(closed))(jnp.ones(2))[0], 0.5)


def test_values_are_followed_through_calls_literals_and_constants() -> None:
    held = jnp.arange(3.0)

    def fn(x: Any, y: Any) -> Any:
        return jax.jit(lambda a: a * held)(x) + 2.0, y

    def sources(jaxpr: Any, inputs: Any) -> list[str]:
        def apply(eqn: Any, operands: list[str]) -> list[str]:
            inner = called(eqn)
            return sources(inner, operands) if inner is not None else ["".join(operands)] * len(eqn.outvars)

        return fold(jaxpr, inputs, apply, lambda _, value: "2" if value is not None and jnp.ndim(value) == 0 else "c")

    first, second = sources(jax.make_jaxpr(fn)(held, held), ["x", "y"])
    assert set(first) == {"x", "c", "2"} and second == "y"


def test_variables_that_are_read_anywhere() -> None:
    jaxpr = jax.make_jaxpr(lambda x, y, z: jax.jit(jnp.sin)(x) + z)(X, X, X).jaxpr
    read = variables_read(jaxpr)
    assert [var in read for var in jaxpr.invars] == [True, False, True]
    assert {var for eqn in equations(jaxpr) for var in eqn.invars} <= read


def test_calls_of_traced_functions_are_looked_through() -> None:
    @jax.custom_vjp
    def twice(x: Any) -> Any:
        return 2 * x

    twice.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))
    cubed = jax.custom_jvp(lambda x: x**3)
    cubed.defjvp(lambda primals, tangents: (primals[0] ** 3, 3 * primals[0] ** 2 * tangents[0]))
    # Called in another function, from JAX 0.11 on an `eval_jaxpr`.
    traced = jax.jit(jnp.sin).trace(jnp.ones(3))
    with classic_remat():  # the new one shows nothing of what it calls
        whole = lambda x: traced(jax.checkpoint(jnp.cos)(twice(cubed(jax.jit(jnp.exp)(x)))))  # noqa: E731
        jaxpr = jax.make_jaxpr(whole)(jnp.ones(3))
    inside = [eqn.primitive.name for eqn in equations(jaxpr) if called(eqn) is None]
    assert inside == [
        "exp",
        "integer_pow",
        "mul",
        "cos",
        "sin",
    ]
