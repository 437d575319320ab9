"""Functions of each token over tiles: values and gradients of the whole, and what is not computed or kept."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType

import lowtide as lt
from lowtide import models
from lowtide.core import ConfigError, is_recomputed, recomputed
from lowtide.jaxprs import equations, jaxpr_flops, make_jaxpr
from lowtide.ops import _tiled_map, tiled_map

WIDTH = 6


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles of five tokens, whatever they save."""
    monkeypatch.setattr(_tiled_map, "tile_size", lambda shape, *_: min(shape[1], 5))
    yield


def drawn(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def mlp(params: Any, x: Any) -> Any:
    """Two results, of which the first has the shape of the first array."""
    h, positions = x
    wide = jnp.tanh(h @ params["up"]) * positions[..., None]
    return h + wide @ params["down"], {"norms": jnp.sum(wide, axis=-1)}


PARAMS = {"up": drawn(0, 4, WIDTH), "down": drawn(1, WIDTH, 4)}


def given(length: int) -> tuple[Any, Any]:
    return drawn(2, 2, length, 4), 1 + jnp.arange(length)[None] / length


def loss(run: Any, reads: str = "both") -> Any:
    def total(params: Any, h: Any, positions: Any) -> Any:
        out, more = run(params, (h, positions))
        value = jnp.sum(jnp.sin(out)) if reads in ("both", "first") else 0.0
        return value + (jnp.sum(more["norms"] ** 2) if reads in ("both", "second") else 0.0)

    return total


def tiled(params: Any, x: Any) -> Any:
    return tiled_map(mlp, params, x, width=WIDTH)


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("reads", ["both", "first", "second"])
@pytest.mark.parametrize(
    "length", [3, 5, 13, 45, 52]
)  # less than a tile, one, few, exactly a loop's, a loop and a rest
def test_values_and_gradients_are_those_of_the_whole(length: int, reads: str) -> None:
    h, positions = given(length)
    for one, other in zip(
        jax.jit(jax.value_and_grad(loss(tiled, reads), (0, 1)))(PARAMS, h, positions),
        jax.jit(jax.value_and_grad(loss(mlp, reads), (0, 1)))(PARAMS, h, positions),
        strict=True,
    ):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), one, other)


def test_what_does_not_train_gets_no_gradient_and_bfloat16_is_added_up_in_float32() -> None:
    h, positions = given(200)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    h = h.astype(jnp.bfloat16)

    def of_up(run: Any) -> Any:
        return lambda up: loss(run)({**params, "up": up}, h, positions).astype(jnp.float32)

    closed = jax.make_jaxpr(jax.grad(of_up(tiled)))(params["up"])
    shapes = {tuple(var.aval.shape) for var in closed.jaxpr.outvars}
    assert shapes == {(4, WIDTH)}
    carried = [var.aval for eqn in closed.eqns if eqn.primitive.name == "scan" for var in eqn.outvars]
    assert any(aval.shape == (4, WIDTH) and aval.dtype == jnp.float32 for aval in carried)
    assert not any(aval.shape == (WIDTH, 4) for aval in carried)  # of the frozen matrix


@pytest.mark.slow
def test_random_keys_are_others_for_each_tile() -> None:
    def noise(params: Any, x: Any) -> Any:
        return x + jax.random.normal(params["key"], x.shape[1:2])[None, :, None]

    drawn_by = tiled_map(noise, {"key": jax.random.key(0)}, jnp.zeros((1, 20, 1)), width=1)[0, :, 0]
    tiles = np.asarray(drawn_by).reshape(4, 5)
    assert len(np.unique(tiles)) == 20


def test_weights_in_few_bits_are_made_arrays_once_for_a_loop() -> None:
    weight = lt.quantize({"w": drawn(3, 64, 64)}, "w", "int8")["w"]

    def fn(params: Any, x: Any) -> Any:
        return lt.core.linear(x, params["w"])

    x = drawn(4, 1, 200, 64)
    run = jax.jit(lambda w, x: tiled_map(fn, {"w": w}, x, width=64))
    np.testing.assert_allclose(run(weight, x), fn({"w": weight}, x), rtol=1e-5, atol=1e-5)
    grad = jax.jit(jax.grad(lambda x: jnp.sum(run(weight, x) ** 2)))(x)
    wanted = jax.grad(lambda x: jnp.sum(fn({"w": weight}, x) ** 2))(x)
    np.testing.assert_allclose(grad, wanted, rtol=1e-4, atol=1e-4)
    closed = jax.make_jaxpr(lambda w, x: tiled_map(fn, {"w": w}, x, width=64))(weight, x)
    loops = [eqn for eqn in equations(closed) if eqn.primitive.name == "scan"]
    assert loops and not any(var.aval.dtype == jnp.int8 for loop in loops for var in loop.invars)


@pytest.mark.slow
def test_transformations_of_others() -> None:
    h, positions = given(23)
    probe = jnp.cos(h)

    def curvature(run: Any) -> Any:
        gradient = jax.grad(lambda h: loss(run)(PARAMS, h, positions))
        return jax.jvp(gradient, (h,), (probe,))[1]

    # Compiled as a whole: the hundreds of operations of a derivative cost more one by one.
    of_tiles, of_all = (jax.jit(lambda run=run: curvature(run))() for run in (tiled, mlp))
    np.testing.assert_allclose(of_tiles, of_all, rtol=1e-4, atol=1e-4)
    mapped = jax.jit(jax.vmap(lambda row: tiled(PARAMS, (row[None], positions))[0][0]))(h)
    np.testing.assert_allclose(mapped, mlp(PARAMS, (h, positions))[0], rtol=1e-5, atol=1e-5)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def by_hand(params: Any, h: Any) -> Any:
        return jax.lax.psum(loss(tiled)(params, h, positions), "data")

    divided = jax.shard_map(by_hand, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    wanted = jax.jit(jax.grad(loss(mlp), (0, 1)))(PARAMS, h, positions)
    for one, other in zip(jax.jit(jax.grad(divided, (0, 1)))(PARAMS, h), wanted, strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), one, other)


def test_sizes_follow_the_chip_and_what_they_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def size(platform: str, kind: str, shape: tuple[int, ...], params: Any, share: float = 1) -> int:
        device = types.SimpleNamespace(platform=platform, device_kind=kind)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(_tiled_map, "traced_device", lambda: device)
            return _tiled_map.tile_size(shape, 2 * 14336, params, share)

    dense = [jax.ShapeDtypeStruct((14336, 4096), jnp.bfloat16)] * 3
    quantized = jax.eval_shape(lambda: [lt.quantize({"w": jnp.zeros((14336, 4096))}, "w", "nf4")["w"]] * 3)
    v5p, gpu = ("tpu", "TPU v5"), ("gpu", "NVIDIA H200")
    assert size(*v5p, (1, 2048, 4096), dense) == 512  # four, written out
    assert size(*v5p, (1, 131072, 4096), dense) == 1024  # in a loop
    assert size(*v5p, (1, 2048, 4096), quantized) == 2048  # one: arrays of the weights would be larger
    assert size(*v5p, (8, 16384, 4096), dense) == 128  # of each of eight rows
    assert size(*gpu, (1, 8192, 4096), dense) == 8192 and size(*gpu, (1, 131072, 4096), dense) == 8192
    assert size(*v5p, (1, 32768, 4096), dense, share=1 / 16) == 8192  # so that each expert has as many


LENGTH = 24


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss"])
def test_decoders_of_every_kind_have_the_gradients_of_all_tokens_at_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.models.kinds import KINDS

    config = KINDS[kind]
    model = jax.jit(lambda key: models.init(config, key=key))(key=jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, LENGTH + 1))
    batch = {"tokens": jnp.asarray(tokens[:, :-1]), "labels": jnp.asarray(tokens[:, 1:])}
    batch["segment_ids"] = jnp.asarray(np.repeat([[1, 2, 0], [1, 1, 2]], [9, 11, 4], axis=1))
    traced: list[bool] = []
    monkeypatch.setattr(_tiled_map, "_over_tiles", _seen(traced, _tiled_map._over_tiles))

    def gradients(remat: bool) -> Any:
        def run(leaves: Any) -> Any:
            return models.loss(lt.combine(leaves, rest), batch, remat=remat)[0]

        leaves, rest = lt.partition(model, lambda path, leaf: jnp.issubdtype(leaf.dtype, jnp.inexact))
        return jax.jit(jax.value_and_grad(run))(leaves)

    kept = gradients(False)
    assert not traced
    again = gradients(True)
    assert traced
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), again, kept)


@pytest.mark.slow
def test_a_decoder_has_the_tiles_and_the_attention_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_layers": 2}
    config = models.DecoderConfig(**sizes, num_heads=2, num_kv_heads=1, head_dim=8)
    model = models.init(config, key=jax.random.key(0))
    batch = {name: jnp.ones((2, 96), jnp.int32) for name in ("tokens", "labels")}
    step = jax.value_and_grad(lambda model, batch: models.loss(model, batch, remat=True)[0])

    def shapes(model: Any) -> set[tuple[int, ...]]:
        return {var.aval.shape for eqn in equations(jax.make_jaxpr(step)(model, batch)) for var in eqn.outvars}

    asked = dataclasses.replace(model, tile_tokens=64)
    assert (2, 96, 32) in shapes(model) and (2, 32, 32) not in shapes(model)  # what the MLP makes
    assert (2, 32, 32) in shapes(asked) and (2, 96, 32) not in shapes(asked)
    scores = dataclasses.replace(model, attention="xla")
    named = ["attn_lse" in str(jax.make_jaxpr(step)(each, batch)) for each in (scores, model)]
    assert named == [False, True]  # all scores at once, blocks
    want = jax.jit(step)(model, batch)
    for other in (asked, scores):
        for one, same in zip(jax.tree.leaves(jax.jit(step)(other, batch)), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(one, same, rtol=1e-4, atol=1e-6)
    for field, value in (("tile_tokens", 0), ("tile_tokens", 2.0), ("tile_tokens", True), ("attention", "flash")):
        with pytest.raises(ConfigError, match=rf"{value!r}(.|\n)*hint:"):
            step(dataclasses.replace(model, **{field: value}), batch)
    with pytest.raises(ConfigError, match=r"cuDNN's kernel cannot(.|\n)*hint:"):
        step(dataclasses.replace(model, attention="cudnn"), batch)


@pytest.mark.slow
@pytest.mark.parametrize("length", [14, 45])  # tiles and a shorter rest, a loop
def test_functions_may_close_over_what_a_program_computes(length: int) -> None:
    h, positions = given(length)
    wide = drawn(5, 4, WIDTH)

    def loss(wide: Any, scale: Any, h: Any, mask: Any, size: int) -> Any:
        def fn(params: Any, x: Any) -> Any:
            key = jax.random.fold_in(params["key"], 3)
            hidden = jnp.where(mask[None, None], jnp.tanh(x[0] @ wide) * scale, 0)
            return hidden @ params["down"] + 0 * jax.random.normal(key, ())

        params = {"down": PARAMS["down"], "key": jax.random.key(0)}
        return jnp.sum(tiled_map(fn, params, (h,), width=WIDTH, size=size) ** 2)

    args = wide, jnp.float32(0.7), h, jnp.arange(WIDTH) % 3 > 0
    want = jax.value_and_grad(loss, (0, 1, 2))(*args, 10**6)

    def compared(run: Any) -> None:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4), run, want)

    tiled = functools.partial(loss, size=10)  # of 2 rows together
    compared(jax.value_and_grad(tiled, (0, 1, 2))(*args))
    compared(jax.jit(jax.value_and_grad(tiled, (0, 1, 2)))(*args))
    compared(jax.value_and_grad(jax.jit(tiled), (0, 1, 2))(*args))
    compared(jax.value_and_grad(jax.checkpoint(tiled), (0, 1, 2))(*args))
    np.testing.assert_allclose(jax.jit(tiled)(*args), want[0], rtol=1e-4)
    scaled = jax.grad(lambda scale: tiled(args[0], scale, *args[2:]))(0.7)  # a number of Python
    np.testing.assert_allclose(scaled, want[1][1], rtol=1e-4)
    several = jax.vmap(tiled, (None, 0, None, None))(args[0], jnp.array([0.7, 0.1]), *args[2:])
    np.testing.assert_allclose(several[0], want[0], rtol=1e-4)


def test_sizes_and_arrays_that_are_none_are_refused() -> None:
    h, positions = given(12)
    for size in (0, -5, 2.5, True, "3"):
        with pytest.raises(ConfigError, match=rf"size must be an integer of at least 1, not {size!r}\nhint:"):
            tiled_map(mlp, PARAMS, (h, positions), width=WIDTH, size=size)  # pyright: ignore[reportArgumentType]
    for size in (None, 4):  # whether there are tiles or not
        for fn in (lambda _, x: jnp.mean(x[0], axis=1), lambda _, x: jnp.mean(x[0], 1, keepdims=True), lambda _, x: 1):
            with pytest.raises(
                ConfigError, match=r"must return arrays \[B, \d+, ...\](.|\n)*, not (.|\n)*hint: return one entry"
            ):
                tiled_map(fn, {}, (h,), width=WIDTH, size=size)
    for options in ({"width": 0}, {"width": None}, {"share": 0}, {"share": "a"}, {"share": -1}, {"share": True}):
        name, value = next(iter(options.items()))
        with pytest.raises(ConfigError, match=rf"tiled_map: {name} must be (.|\n)*{value!r}(.|\n)*hint:"):
            tiled_map(mlp, PARAMS, (h, positions), **{"width": WIDTH, **options})
    with pytest.raises(ConfigError, match=r"params must be arrays, not 'gelu'\nhint: .*functools.partial"):
        tiled_map(mlp, {**PARAMS, "activation": "gelu"}, (h, positions), width=WIDTH)
    for x in ((), (jnp.ones(3),), (h, jnp.ones(12)), (h, jnp.ones((2, 13))), (h, jnp.ones((3, 12))), (h[:0],)):
        with pytest.raises(ConfigError, match=r"x must be arrays with rows and tokens(.|\n)*hint:"):
            tiled_map(mlp, PARAMS, x, width=WIDTH)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        args = jax.device_put((h, positions), jax.NamedSharding(mesh, P()))
        with pytest.raises(ConfigError, match=r"explicit axes(.|\n)*hint:"):
            tiled_map(mlp, jax.device_put(PARAMS, jax.NamedSharding(mesh, P())), args, width=WIDTH, size=4)


def _seen(traced: list[bool], fn: Any) -> Any:
    def run(*args: Any) -> Any:
        traced.append(True)
        return fn(*args)

    return run


def test_a_block_knows_whether_it_runs_again() -> None:
    assert not is_recomputed()
    assert recomputed(lambda: is_recomputed())()
    with pytest.raises(ZeroDivisionError):
        recomputed(lambda: 1 // 0)()
    assert not is_recomputed()


def named_mlp(params: Any, x: Any) -> Any:
    """The same, with one name inside of a jit, and one outside."""
    h, positions = x
    up = jax.jit(lambda h, weight: checkpoint_name(h @ weight, "up"))(h, params["up"])
    wide = jnp.tanh(up) * positions[..., None]
    return h + checkpoint_name(wide @ params["down"], "down"), {"norms": jnp.sum(wide, axis=-1)}


@pytest.mark.parametrize("length", [12, 48])  # unrolled tiles, and a loop; both end with a shorter tile
@pytest.mark.parametrize("save", [("up",), ("up", "down"), "u."])
def test_named_values_inside_of_tiles_are_kept(length: int, save: Any) -> None:
    h, positions = given(length)

    def total(block: Any, params: Any, h: Any) -> Any:
        out, more = block(params, h)
        return jnp.sum(jnp.sin(out)) + jnp.sum(more["norms"] ** 2)

    def block(params: Any, h: Any) -> Any:  # it closes over a tracer
        return tiled_map(lambda params, x: named_mlp(params, x), params, (h, positions), width=WIDTH)

    def gradients(block: Any) -> Any:
        return jax.value_and_grad(functools.partial(total, block), argnums=(0, 1))

    kept = gradients(lt.offload.checkpoint(block, save=save))
    expected = jax.jit(gradients(lambda params, h: named_mlp(params, (h, positions))))(PARAMS, h)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), jax.jit(kept)(PARAMS, h), expected
    )
    flops = [jaxpr_flops(make_jaxpr(fn)(PARAMS, h)[0]) for fn in (kept, gradients(jax.checkpoint(recomputed(block))))]
    assert flops[0] < flops[1]


def test_names_inside_of_tiles_are_listed_and_unknown_names_refused() -> None:
    h, positions = given(12)

    def block(params: Any, h: Any) -> Any:
        return tiled_map(named_mlp, params, (h, positions), width=WIDTH)[0].sum()

    with pytest.raises(lt.core.SelectionError, match="matches no named value(.|\n)*near misses: up"):
        jax.grad(lt.offload.checkpoint(block, save=["upp"]))(PARAMS, h)


@pytest.mark.parametrize("names", [["attn_out", "attn_lse"], ["mlp_gate", "mlp_up"], ["attn_q", "attn_k", "attn_v"]])
def test_a_decoder_keeps_names_with_tiles_bit_for_bit(names: list[str]) -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_layers": 2}
    config = models.DecoderConfig(**sizes, num_heads=2, num_kv_heads=1, head_dim=8)
    model = dataclasses.replace(models.init(config, key=jax.random.key(0)), tile_tokens=64)
    batch = {name: jnp.ones((2, 96), jnp.int32) for name in ("tokens", "labels")}

    def step(block: Any, **options: Any) -> Any:
        stack = dataclasses.replace(model.stack, block=block)
        return jax.value_and_grad(lambda outer, layers: stack.apply(outer, layers, batch, **options)[0], argnums=(0, 1))

    block = model.stack.block
    recomputed_all = step(block, remat=True)
    kept = step(lt.offload.checkpoint(block, save=names, prevent_cse=False))
    results = [jax.jit(fn)(model.outer, model.layers) for fn in (recomputed_all, kept)]
    jax.tree.map(np.testing.assert_array_equal, *results)
    closed = [make_jaxpr(fn)(model.outer, model.layers)[0] for fn in (recomputed_all, kept)]
    assert jaxpr_flops(closed[1]) < jaxpr_flops(closed[0])
    shapes = {var.aval.shape for eqn in equations(closed[1]) for var in eqn.outvars}
    assert (2, 32, 32) in shapes  # tiles of the MLP
