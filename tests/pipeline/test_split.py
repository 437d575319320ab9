"""The split of a backward pass: values of plain JAX, no product twice, and nothing waits that is not read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from lowtide.core import StructureError, partition
from lowtide.jaxprs._versions import make_jaxpr
from lowtide.models import DecoderConfig, init
from lowtide.pipeline.split import Pass, Value, trace_split


@dataclasses.dataclass(frozen=True)
class Case:
    """A stage, its arguments, and how many products its passes have."""

    stage: Callable[..., Any]
    weights: Any
    x: Any
    extras: tuple[Any, ...] = ()
    recomputed: int = 0
    """Products of the forward pass that the backward pass does again."""


class Residuals(NamedTuple):
    """What a forward pass leaves, by the pass that reads it last."""

    for_input: tuple[Any, ...]
    for_weight: tuple[Any, ...]


class ArrayPasses:
    """The passes of a stage as functions of arrays; the executor keeps them in buffers."""

    def __init__(self, stage: Callable[..., Any], weights: Any, x: Any, *extras: Any, wrt: str = "**") -> None:
        trainable, frozen = partition(weights, wrt)
        self.split = trace_split(stage, trainable, frozen, x, *extras)
        self.gradients_tree = jax.tree.structure(trainable)
        self.hoist, self.flops = self.split.hoist, self.split.flops

    @property
    def hoisted(self) -> list[jax.ShapeDtypeStruct]:
        return [value.struct for value in self.split.hoisted]

    @property
    def residuals(self) -> Residuals:
        kept = (self._kept(Pass.FORWARD, last) for last in (Pass.INPUT, Pass.WEIGHT))
        return Residuals(*(tuple(value.struct for value in values) for values in kept))

    @property
    def waiting(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What the input pass leaves in addition to residuals, but for gradients of weights."""
        return tuple(value.struct for value in self._kept(Pass.INPUT, Pass.WEIGHT))

    def forward(self, weights: Any, x: Any, *extras: Any, hoisted: Any = None) -> tuple[Any, Residuals]:
        env = self._env(weights, hoisted, extras) | self.split.x.env(x)
        self.split.plan.run(Pass.FORWARD, env, {}, {}, {})
        kept = (self._kept(Pass.FORWARD, last) for last in (Pass.INPUT, Pass.WEIGHT))
        return self.split.read(self.split.y, env, {}), Residuals(
            *(tuple(env[value] for value in values) for values in kept)
        )

    def input(
        self, weights: Any, residuals: Residuals, dy: Any, *extras: Any, hoisted: Any = None
    ) -> tuple[Any, tuple[Any, ...]]:
        env = self._env(weights, hoisted, extras) | self.split.dy.env(dy)
        env.update(zip(self._kept(Pass.FORWARD, Pass.INPUT), residuals.for_input, strict=True))
        env.update(zip(self._kept(Pass.FORWARD, Pass.WEIGHT), residuals.for_weight, strict=True))
        self.split.plan.run(Pass.INPUT, env, {}, {}, {})
        waiting = [env[value] for value in self._kept(Pass.INPUT, Pass.WEIGHT)]
        gradients = [jnp.asarray(self.split.plan.read(atom, env, {})) for _, atom in self.split.gradients(Pass.INPUT)]
        return self.split.read(self.split.dx, env, {}), (*waiting, *gradients)

    def weight(self, weights: Any, for_weight: Any, waiting: Any, *extras: Any, hoisted: Any = None) -> Any:
        env, cotangents = self._env(weights, hoisted, extras), self._kept(Pass.INPUT, Pass.WEIGHT)
        env.update(zip(self._kept(Pass.FORWARD, Pass.WEIGHT), for_weight, strict=True))
        env.update(zip(cotangents, waiting, strict=False))
        self.split.plan.run(Pass.WEIGHT, env, {}, {}, {})
        early = waiting[len(cotangents) :]
        found = {i: gradient for (i, _), gradient in zip(self.split.gradients(Pass.INPUT), early, strict=True)}
        for i, atom in self.split.gradients(Pass.WEIGHT):
            found[i] = jnp.asarray(self.split.plan.read(atom, env, {}))
        return self.gradients_tree.unflatten([found[i] for i in sorted(found)])

    def _env(self, weights: Any, hoisted: Any, extras: Any) -> Any:
        return self.split.env(weights, self.hoist(weights) if hoisted is None else hoisted, extras)

    def _kept(self, made: Pass, last: Pass) -> list[Value]:
        return self.split.kept.get((made, last), [])


def normal(number: int, *shape: int, dtype: Any = jnp.float32) -> Any:
    return jnp.asarray(0.3 * np.random.default_rng(number).normal(size=shape), dtype)


def mlp(weights: Any, x: Any) -> Any:
    return x + jax.nn.gelu(x @ weights["a"] + weights["b"][None]) @ weights["c"]


def attention(weights: Any, x: Any, mask: Any) -> Any:
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, weights[name]) for name in "qkv")
    scores = jnp.where(mask[:, None], jnp.einsum("btnh,bsnh->bnts", q, k), -1e9)
    return x + jnp.einsum("bnts,bsnh,nhd->btd", jax.nn.softmax(scores), v, weights["o"])


def scan(weights: Any, x: Any, block: Any = mlp) -> Any:
    return jax.lax.scan(lambda h, layer: (block(layer, h), None), x, weights)[0]


def remat(weights: Any, x: Any) -> Any:
    return scan(weights, x, jax.checkpoint(mlp))


def bf16(weights: Any, x: Any) -> Any:
    return scan(
        jax.tree.map(lambda w: w, weights), x, lambda w, h: mlp(jax.tree.map(lambda w: w.astype(h.dtype), w), h)
    )


@jax.custom_vjp
def clipped(x: Any, w: Any) -> Any:
    return x @ w


clipped.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda kept, dy: (jnp.clip(dy @ kept[1].T, -0.1, 0.1), kept[0].T @ dy),
)


def nested(weights: Any, x: Any) -> Any:
    """A scan over chunks of tokens in a scan over layers, and weights that all layers share."""

    def block(h: Any, layer: Any) -> tuple[Any, None]:
        chunks = h.reshape(2, -1, h.shape[-1])
        done = jax.lax.scan(lambda c, chunk: (c, jnp.tanh(chunk @ layer @ weights["shared"])), None, chunks)[1]
        return h + done.reshape(h.shape), None

    return jax.lax.scan(block, x, weights["layers"])[0]


LAYER = {"a": normal(0, 8, 16), "b": normal(1, 16), "c": normal(2, 16, 8)}
LAYERS = {"a": normal(0, 3, 8, 16), "b": normal(1, 3, 16), "c": normal(2, 3, 16, 8)}
X = normal(9, 6, 8)
HEADS = {**{name: normal(i, 8, 2, 4) for i, name in enumerate("qkv")}, "o": normal(5, 2, 4, 8)}


def gated(w: Any, x: Any) -> Any:
    """One operation reads two results of another."""
    gate, up = jnp.split(x @ w["up"], 2, -1)
    return x + (gate * up) @ w["down"]


def branches(w: Any, x: Any) -> Any:
    """Four of them."""
    h = x @ w
    parts = jax.lax.cond(h.sum() > 0, lambda h: tuple(h[:, i : i + 2] for i in range(4)), lambda h: (h[:, :2],) * 4, h)
    return x + jnp.sin(jnp.concatenate(parts, -1))


def chosen(w: Any, x: Any) -> Any:
    """Branches with products, one of them with a loop, the other recomputed: the weight pass has its own of each."""

    def long(h: Any) -> Any:
        return jnp.tanh(scan(w["layers"], h) * w["scale"][None])

    @jax.checkpoint
    def short(h: Any) -> Any:
        return jax.lax.cond(h[0, 0] > 0, lambda h: jnp.sin(h @ w["one"]), lambda h: jnp.tanh(h @ w["two"]), h)

    return x + jax.lax.switch(jnp.int32(x.sum() > 0), [long, short], x)


def mapped(w: Any, x: Any, check_vma: bool) -> Any:
    """A product divided over devices, and one of rows."""
    mesh, of = Mesh(jax.devices()[:2], ("fsdp",)), PartitionSpec

    def block(h: Any, a: Any, c: Any) -> Any:
        return jax.lax.psum(jnp.tanh(jnp.tanh(h @ a)) @ c, "fsdp")

    divided = jax.shard_map(
        block, mesh=mesh, in_specs=(of(), of(None, "fsdp"), of("fsdp")), out_specs=of(), check_vma=check_vma
    )
    rows = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(of("fsdp"), of()), out_specs=of("fsdp"), check_vma=check_vma)
    return x + jnp.sin(rows(divided(x, w["a"], w["c"]), w["d"]))


CASES = {
    "mlp": Case(mlp, LAYER, X),
    "attention": Case(attention, HEADS, normal(9, 2, 5, 8), (jnp.tril(jnp.ones((2, 5, 5), bool)),)),
    "scan": Case(scan, LAYERS, X),
    "remat": Case(remat, LAYERS, X, recomputed=1),  # of the second product only the result is needed, and it is not
    "twice": Case(lambda w, x: jnp.sin(x @ w) @ w, normal(0, 8, 8), X),
    "unused": Case(lambda w, x: jnp.tanh(x @ w["used"]), {"used": normal(0, 8, 8), "unused": normal(1, 4)}, X),
    "integers": Case(
        lambda w, x, i: {"h": jnp.tanh(x["h"] @ w["w"])[i], "n": x["n"] + 1, "none": None},
        {"w": normal(0, 8, 8), "none": None},
        {"h": X, "n": jnp.arange(3), "none": None},
        (jnp.array([3, 1]),),
    ),
    "bf16": Case(bf16, LAYERS, X.astype(jnp.bfloat16)),
    "custom_vjp": Case(
        lambda w, x: clipped(jnp.tanh(clipped(x, w["a"])), w["b"]), {"a": normal(0, 8, 8), "b": normal(1, 8, 8)}, X
    ),
    "nested": Case(nested, {"layers": normal(0, 3, 8, 8), "shared": normal(1, 8, 8)}, X),
    "parts": Case(gated, {"up": normal(0, 8, 32), "down": normal(1, 16, 8)}, X),
    "branches": Case(branches, normal(0, 8, 8), X),
    "chosen": Case(chosen, {"layers": LAYERS, "scale": normal(3, 8), "one": normal(4, 8, 8), "two": normal(5, 8, 8)}, X,
                   recomputed=2),
    "mapped": Case(partial(mapped, check_vma=True), LAYER | {"d": normal(3, 8, 8)}, X),
    "mapped without types": Case(partial(mapped, check_vma=False), LAYER | {"d": normal(3, 8, 8)}, X),
    "jit": Case(lambda w, x: jax.jit(mlp)(w, jax.jit(mlp)(w, x)), LAYER, X),
}  # fmt: skip


def ones(tree: Any) -> Any:
    return jax.tree.map(lambda y: jnp.asarray(np.cos(np.arange(y.size)).reshape(y.shape), y.dtype), tree)


def as_numpy(leaf: Any) -> np.ndarray:
    return np.asarray(leaf, np.float32) if is_float(leaf) else np.asarray(leaf)


def is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def plain(case: Case) -> Callable[..., Any]:
    """The whole backward pass, and the forward one."""

    def both(weights: Any, x: Any, dy: Any) -> Any:
        leaves, tree = jax.tree.flatten(x)

        def of_floats(weights: Any, floats: list[Any]) -> Any:
            given = iter(floats)
            return case.stage(
                weights, tree.unflatten([next(given) if is_float(x) else x for x in leaves]), *case.extras
            )

        y, back = jax.vjp(of_floats, weights, [x for x in leaves if is_float(x)])
        # What is no float has a cotangent of its own type.
        dy = jax.tree.map(lambda y, d: d if is_float(y) else jnp.zeros(y.shape, jax.dtypes.float0), y, dy)
        return y, *back(dy)

    return both


def split_passes(case: Case) -> Callable[..., Any]:
    traced = ArrayPasses(case.stage, case.weights, case.x, *case.extras)

    def both(weights: Any, x: Any, dy: Any) -> Any:
        y, residuals = traced.forward(weights, x, *case.extras)
        dx, waiting = traced.input(weights, residuals, dy, *case.extras)
        dweights = traced.weight(weights, residuals.for_weight, waiting, *case.extras)
        return y, dweights, jax.tree.leaves(dx)

    return both


def products(jaxpr: Any) -> Iterator[tuple[int, Any]]:
    """Every matrix product, with how often it runs."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield 1, eqn
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        times = eqn.params["mesh"].size if eqn.primitive.name == "shard_map" else times
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from ((times * number, found) for number, found in products(inner))


def count(fn: Callable[..., Any], *args: Any) -> int:
    return sum(number for number, _ in products(make_jaxpr(fn)(*args)[0].jaxpr))


def num_bytes(*trees: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(trees))


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_plain_backward_pass(name: str) -> None:
    case = CASES[name]
    dy = ones(jax.eval_shape(case.stage, case.weights, case.x, *case.extras))
    found, wanted = (jax.jit(fn(case))(case.weights, case.x, dy) for fn in (split_passes, plain))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(*map(as_numpy, (one, other)), rtol=1e-6, atol=1e-6, equal_nan=False)


@pytest.mark.parametrize("name", CASES)
def test_no_product_is_made_twice_and_both_passes_have_theirs(name: str) -> None:
    case = CASES[name]
    traced = ArrayPasses(case.stage, case.weights, case.x, *case.extras)
    dy, residuals = jax.eval_shape(traced.forward, case.weights, case.x, *case.extras)
    _, waiting = jax.eval_shape(traced.input, case.weights, residuals, dy, *case.extras)
    forward = count(traced.forward, case.weights, case.x, *case.extras)
    in_input = count(traced.input, case.weights, residuals, dy, *case.extras)
    in_weight = count(traced.weight, case.weights, residuals.for_weight, waiting, *case.extras)
    # JAX's own trace has the recomputed products among its own.
    assert forward == count(case.stage, case.weights, case.x, *case.extras)
    assert forward + in_input + in_weight == count(plain(case), case.weights, case.x, dy)
    # What a weight needs is as much as what an input needs, but for products of two activations.
    assert in_weight > 0 and in_input >= in_weight
    scanned = 3 if case.stage in (scan, remat, bf16) else 1
    assert forward + case.recomputed * scanned == in_input if case.recomputed else True


@pytest.mark.parametrize("name", CASES)
def test_no_more_waits_than_what_the_weight_pass_reads(name: str) -> None:
    case = CASES[name]
    traced = ArrayPasses(case.stage, case.weights, case.x, *case.extras)
    args = (case.weights, traced.residuals.for_weight, traced.waiting, *case.extras)
    jaxpr = jax.make_jaxpr(traced.weight)(*args).jaxpr
    inputs = sum(number * num_bytes([var.aval for var in eqn.invars]) for number, eqn in products(jaxpr))
    assert num_bytes(traced.residuals.for_weight, traced.waiting) <= inputs
    read = {var for eqn in jaxpr.eqns for var in eqn.invars if not hasattr(var, "val")} | set(jaxpr.outvars)
    offset = len(jax.tree.leaves(case.weights))
    given = jaxpr.invars[offset : len(jaxpr.invars) - len(jax.tree.leaves(case.extras))]
    assert all(var in read for var in given), "something waits that nobody reads"


def test_what_the_input_pass_alone_reads_is_not_kept_for_the_weight_pass() -> None:
    traced = ArrayPasses(scan, LAYERS, X)
    wide = [x.shape for x in traced.residuals.for_weight]
    assert sorted(wide) == [(3, 6, 8), (3, 6, 16)]  # the inputs of the two products
    assert sorted(x.shape for x in traced.waiting) == [(3, 6, 8), (3, 6, 16)]  # and their cotangents
    assert traced.residuals.for_input


def test_gradients_of_vectors_come_with_the_input_pass() -> None:
    """A sum over tokens waits for nothing, and nothing for it: the frontier is the cheaper one, not the latest."""

    def stage(weights: Any, x: Any) -> Any:
        return x * weights["scale"] + weights["bias"]

    traced = ArrayPasses(stage, {"scale": jnp.ones((1, 8)), "bias": jnp.ones((1, 8))}, normal(0, 1000, 8))
    assert traced.residuals.for_weight == () and traced.waiting == ()
    given = {"scale": jnp.ones((1, 8)), "bias": jnp.ones((1, 8))}, normal(0, 1000, 8)
    _, residuals = jax.eval_shape(traced.forward, *given)
    assert num_bytes(residuals) == 1000 * 8 * 4


def test_what_depends_on_weights_alone_is_made_once_and_never_waits() -> None:
    traced = ArrayPasses(bf16, LAYERS, X.astype(jnp.bfloat16))
    assert sorted(x.shape for x in traced.hoisted if len(x.shape) == 3 and x.shape[1] > 1) == [(3, 8, 16), (3, 16, 8)]
    assert all(x.dtype == jnp.bfloat16 for x in traced.hoisted)
    weight_shapes = {(3, 8, 16), (3, 16, 8)}
    assert not weight_shapes & {x.shape for x in (*traced.residuals.for_input, *traced.residuals.for_weight)}
    hoisted = traced.hoist(LAYERS)
    given = (LAYERS, X.astype(jnp.bfloat16))
    text = str(jax.make_jaxpr(lambda w, x, h: traced.forward(w, x, hoisted=h))(*given, hoisted))
    assert "bf16[8,16] = convert_element_type" not in text


@pytest.mark.slow
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_effects_happen_as_often_as_without_a_split(is_recomputed: bool) -> None:
    seen: list[float] = []

    def block(h: Any, w: Any) -> Any:
        h = jnp.tanh(h @ w)
        jax.debug.callback(lambda norm: seen.append(float(norm)), jnp.sum(h))
        return h, None

    def stage(w: Any, x: Any) -> Any:
        return jax.lax.scan(jax.checkpoint(block) if is_recomputed else block, x, w)[0]

    case = Case(stage, normal(0, 3, 8, 8), X)
    calls = []
    for passes in (plain, split_passes):
        jax.block_until_ready(jax.jit(passes(case))(case.weights, case.x, X))
        jax.effects_barrier()
        calls.append(sorted(seen))
        seen.clear()
    assert len(calls[0]) == 3 * (1 + is_recomputed)
    assert calls[1] == pytest.approx(calls[0])


@pytest.mark.slow
def test_what_an_effect_reads_is_made_for_it_and_nothing_waits_for_it() -> None:
    seen: list[float] = []

    def stage(w: Any, x: Any, has_effect: bool = True) -> Any:
        @jax.checkpoint
        def block(h: Any, w: Any) -> Any:
            h = jnp.tanh(h @ w)
            if has_effect:  # of a product that nothing else reads
                jax.debug.callback(lambda norm: seen.append(float(norm)), jnp.sum(h @ w.T))
            return h @ w

        return jax.lax.scan(lambda h, w: (block(h, w), None), x, w)[0]

    case = Case(stage, normal(0, 3, 8, 8), X)
    found, wanted = (jax.jit(fn(case))(case.weights, case.x, X) for fn in (split_passes, plain))
    jax.effects_barrier()
    assert len(seen) == 12
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    with_effect, without = (ArrayPasses(partial(stage, has_effect=one), case.weights, X) for one in (True, False))
    assert num_bytes(with_effect.residuals) == num_bytes(without.residuals)
    assert num_bytes(with_effect.waiting) == num_bytes(without.waiting)


@pytest.mark.slow
def test_what_a_loop_makes_of_a_weight_in_every_iteration_is_made_once() -> None:
    def stage(w: Any, x: Any) -> Any:  # in chunks, as a head is read
        return jax.lax.map(lambda row: jnp.tanh(row.astype(jnp.bfloat16) @ (2 * w["a"]).astype(jnp.bfloat16)), x)

    weights = {"a": normal(0, 8, 16)}
    traced = ArrayPasses(stage, weights, X)
    assert [(x.shape, x.dtype) for x in traced.hoisted] == [((8, 16), jnp.bfloat16)]
    case = Case(stage, weights, X)
    dy = ones(jax.eval_shape(stage, weights, X))
    found, wanted = (jax.tree.leaves(jax.jit(fn(case))(weights, X, dy)) for fn in (split_passes, plain))
    for one, other in zip(found, wanted, strict=True):
        assert np.array_equal(as_numpy(one), as_numpy(other))


def test_the_first_stage_is_split_without_a_gradient_of_its_input() -> None:
    tokens = jnp.array([[1, 2, 3, 1]])

    def stage(weights: Any, tokens: Any) -> Any:
        return scan(weights["layers"], jnp.take(weights["embed"], tokens, axis=0)[0])

    weights = {"layers": LAYERS, "embed": normal(7, 5, 8)}
    traced = ArrayPasses(stage, weights, tokens)
    y, residuals = jax.eval_shape(traced.forward, weights, tokens)
    dx, waiting = jax.eval_shape(traced.input, weights, residuals, y)
    assert dx is None
    assert count(traced.input, weights, residuals, y) == 6
    assert count(traced.weight, weights, residuals.for_weight, waiting) == 6

    @jax.jit
    def passes(weights: Any, dy: Any) -> Any:
        residuals = traced.forward(weights, tokens)[1]
        return traced.weight(weights, residuals.for_weight, traced.input(weights, residuals, dy)[1])

    found = passes(weights, ones(y))
    wanted = jax.jit(lambda w, dy: jax.vjp(lambda w: stage(w, tokens), w)[1](dy)[0])(weights, ones(y))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)


def test_frozen_weights_have_no_gradient() -> None:
    traced = ArrayPasses(mlp, LAYER, X, wrt="c")
    y, residuals = jax.eval_shape(traced.forward, LAYER, X)
    _, waiting = jax.eval_shape(traced.input, LAYER, residuals, y)
    found = jax.eval_shape(traced.weight, LAYER, residuals.for_weight, waiting)
    assert found["a"] is None and found["b"] is None and found["c"].shape == (16, 8)
    assert count(traced.weight, LAYER, residuals.for_weight, waiting) == 1


@pytest.mark.slow
def test_a_decoder_is_split_with_its_loops_over_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.ops._attention._LEAST_IN_BLOCKS", 1)
    monkeypatch.setattr("lowtide.ops._blocks.block_size", lambda *_: 2)
    config = DecoderConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8
    )
    model = init(config, key=jax.random.key(0))
    batch = {"tokens": jnp.zeros((2, 6), int)}
    block = jax.checkpoint(model.stack.block)

    def stage(layers: Any, h: Any) -> Any:
        return jax.lax.scan(lambda h, layer: (block(layer, h, batch), None), h, layers)[0]

    case = Case(stage, model.layers, normal(3, 2, 6, 16))
    found, wanted = (jax.jit(fn(case))(case.weights, case.x, ones(case.x)) for fn in (split_passes, plain))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6, equal_nan=False)


def test_bad_stages_are_named() -> None:
    with pytest.raises(StructureError, match=r"(?s)must return a floating-point array, not .*int32.*hint:"):
        ArrayPasses(lambda w, x: jnp.argmax(x @ w, axis=1), LAYER["a"], X)
