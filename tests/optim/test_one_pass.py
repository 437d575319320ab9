"""Updates on GPUs in one pass: kernels, computed here without Triton, beside the two passes; compiled for an H100."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import StructureError, tree_bytes
from lowtide.memory import compile
from lowtide.optim import PackedArray, _low_precision, _one_pass, low_precision

SHAPES = {"bias": (512,), "head": (512, 256), "layers": (3, 16, 512)}
CLIPPED = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(
        optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10), mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
)


def params(dtype: Any = jnp.float32, shapes: Any = SHAPES) -> Any:
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Trace for a GPU, compute kernels without Triton; says of each update whether it was in kernels."""
    seen = list[bool]()

    def in_one_pass(*args: Any) -> Any:
        made = _one_pass.in_one_pass(*args, interpret=True)
        seen.append(made is not None)
        return made

    monkeypatch.setattr(_low_precision, "traced_device", lambda: types.SimpleNamespace(platform="gpu"))
    monkeypatch.setattr(_low_precision, "has_triton", lambda: True)
    monkeypatch.setattr(_low_precision, "in_one_pass", in_one_pass)
    return seen


def trained(tx: Any, begin: Any, num_steps: int = 3, state: Any = None, **options: Any) -> Any:
    step = jax.jit(lambda grads, state, params: tx.update(grads, state, params), **options)
    params, state = begin, tx.init(begin) if state is None else state
    for seed in range(num_steps):
        rng = np.random.default_rng(seed)
        grads = jax.tree.map(lambda leaf, rng=rng: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), begin)
        updates, state = step(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("tx", "weights", "form"),
    [
        (CLIPPED, None, "8bit"),
        (optax.adamw(1e-2), "split", "companded"),
        (optax.lion(1e-3), "kahan", "8bit"),
        (optax.sgd(1e-2, momentum=0.9), "stochastic", "8bit"),
        (optax.apply_if_finite(optax.rmsprop(1e-2, momentum=0.9), 3), None, "8bit"),
        (optax.adamw(1e-2), "split", {".*/mu/.*": "bfloat16", ".*/nu/.*": "8bit"}),
    ],
    ids=["clipped", "split", "lion-kahan", "sgd-stochastic", "if-finite", "two-formats"],
)
def test_kernels_compute_what_two_passes_do(
    tx: Any, weights: Any, form: Any, used: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = params(jnp.float32 if weights is None else jnp.bfloat16)
    tx = low_precision(tx, form, weights=weights)
    found = trained(tx, begin)
    assert used == [True]
    monkeypatch.setattr(_low_precision, "has_triton", lambda: False)
    expected = trained(tx, begin)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        # Fused otherwise, a number may be rounded otherwise, and so may its neighbour that is drawn by its bits.
        apart = np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64))
        scale = np.abs(np.asarray(other, np.float64)).max() + 1e-30
        assert (apart > 1e-6 * scale).mean() < 1e-2, (one.shape, one.dtype)
    for one, other in zip(jax.tree.leaves(found[0]), jax.tree.leaves(expected[0]), strict=True):
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), rtol=2e-2, atol=1e-3)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("of_params", "of_grads", "weights", "is_used"),
    [
        (jnp.float32, jnp.bfloat16, "split", False),
        (jnp.bfloat16, jnp.float32, "split", True),
        (jnp.bfloat16, jnp.float16, "split", True),
        (jnp.bfloat16, jnp.float32, None, False),  # a state that an update makes wider
        (jnp.bfloat16, jnp.bfloat16, None, True),
    ],
)
def test_gradients_may_be_of_another_dtype(
    of_params: Any, of_grads: Any, weights: Any, is_used: bool, used: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = {"w": params(of_params)["head"], "h": jnp.ones((16, 256), jnp.bfloat16)}
    rng = np.random.default_rng(0)
    grads = {name: jnp.asarray(rng.normal(size=leaf.shape) / 10, of_grads) for name, leaf in begin.items()}
    tx = low_precision(optax.adamw(1e-2), weights=weights)

    def updated() -> Any:
        step, state = jax.jit(lambda *given: tx.update(*given)), tx.init(begin)
        for _ in range(2):
            updates, state = step(grads, state, begin)
        return updates, state

    found = updated()
    assert used[0] == is_used or of_params == jnp.float32
    monkeypatch.setattr(_low_precision, "has_triton", lambda: False)
    expected = updated()
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        apart = np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64))
        assert (apart > 2e-2 * (np.abs(np.asarray(other, np.float64)).max() + 1e-30)).mean() < 2e-2


def of_rows(grads: Any) -> Any:
    return jax.tree.map(lambda g: g / (1e-6 + jnp.linalg.norm(g, axis=-1, keepdims=True)), grads)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("tx", "form", "shapes"),
    [
        (optax.lamb(1e-2), "8bit", SHAPES),
        (optax.adamw(1e-2), "4bit", SHAPES),
        (optax.adamw(1e-2), "8bit", {"w": (16, 300)}),
        (optax.adamw(1e-2), {".*/mu/.*": "companded", ".*/nu/.*": "8bit"}, SHAPES),
        (optax.chain(optax.stateless(lambda g, p: of_rows(g)), optax.scale_by_adam()), "8bit", SHAPES),
    ],
    ids=["norms", "4bit", "rows-that-are-no-blocks", "two-sizes", "rows"],
)
def test_what_kernels_cannot_do_is_in_two_passes(tx: Any, form: Any, shapes: Any, used: list[bool]) -> None:
    after, state = trained(low_precision(tx, form), params(shapes=shapes), 1)
    assert used == [False]
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(after))


@pytest.mark.slow
def test_a_block_that_is_not_finite_is_nan_and_no_other(used: list[bool]) -> None:
    tx, begin = low_precision(optax.adamw(1e-2)), {"w": jnp.ones((16, 512))}
    grads = {"w": jnp.ones((16, 512)).at[3, 300].set(jnp.inf).at[5, 0].set(jnp.nan)}
    _, state = jax.jit(tx.update)(grads, tx.init(begin), begin)
    assert used == [True]
    is_nan = np.isnan(state.inner[0].mu["w"].dense())
    assert is_nan.sum() == 512 and is_nan[3, 256:].all() and is_nan[5, :256].all()


@pytest.mark.slow
def test_updates_are_differentiated_and_mapped(used: list[bool]) -> None:
    begin, x = {"w": jnp.ones((16, 256))}, jnp.full((16, 256), 1e-4)
    state = low_precision(optax.adam(1e-2)).init(begin)

    def fn(x: Any, rate: Any) -> Any:
        tx = low_precision(optax.adam(rate))
        return jnp.sum(jax.jit(tx.update)({"w": x}, state, begin)[0]["w"] ** 2)

    slope = jax.grad(fn, argnums=1)(x, 1e-2)
    assert used == [True] and float(slope) == pytest.approx(2 * float(fn(x, 1e-2)) / 1e-2, rel=1e-4)
    with pytest.raises(StructureError, match="a derivative goes through the quantised state of lt.optim.low_precision"):
        jax.grad(fn)(x, 1e-2)
    with pytest.raises(StructureError, match="a derivative goes through the quantised state of lt.optim.low_precision"):
        jax.grad(lambda decay: fn(decay * x, 1e-2))(0.9)
    many = jax.vmap(fn, (0, None))(jnp.stack([x, 2 * x]), 1e-2)
    np.testing.assert_allclose(many, [fn(x, 1e-2), fn(2 * x, 1e-2)], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "is_used"), [(jax.P(None, "x"), True), (jax.P(None, None, "x"), True), (jax.P("x"), False)]
)
def test_on_a_mesh_each_device_updates_its_part(spec: Any, is_used: bool, used: list[bool]) -> None:
    """But for rows of 384, which are no whole blocks."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    begin = {"w": params(jnp.bfloat16)["layers"], "b": jnp.zeros((512,), jnp.bfloat16)}
    begin["w"] = begin["w"] if is_used else begin["w"][:2, :, :384].reshape(2, 16, 384)
    places = {"w": jax.NamedSharding(mesh, spec), "b": jax.NamedSharding(mesh, jax.P())}
    tx = low_precision(optax.adamw(1e-2), weights="split", shardings=places)
    expected = trained(tx, begin)
    divided = jax.device_put(begin, places)
    of_state = lt.offload.state_shardings(tx, divided)
    state = jax.jit(tx.init, out_shardings=of_state)(divided)
    of_scales = state.inner[0].mu["w"].scales.sharding
    assert not is_used or of_scales.is_equivalent_to(places["w"], 3)
    used.clear()
    found = trained(tx, divided, state=state, out_shardings=(places, of_state))
    assert used == [is_used]
    assert found[1].inner[0].mu["w"].codes.sharding.is_equivalent_to(places["w"], 3)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        apart = np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64))
        assert (apart > 1e-6 * np.abs(np.asarray(other, np.float64)).max()).mean() < 1e-2


@pytest.mark.slow
@pytest.mark.gpu_aot
def test_on_a_mesh_nothing_is_gathered() -> None:
    mesh = jax.sharding.Mesh(np.array(lt.target("h100:4").devices()), ("x",))
    place = jax.NamedSharding(mesh, jax.P(None, None, "x"))
    size = 4 * 512 * 2048
    leaves = {"w": jax.ShapeDtypeStruct((4, 512, 2048), jnp.bfloat16, sharding=place)}
    tx = low_precision(optax.adamw(1e-3), weights="split", shardings={"w": place})
    state, of_state = jax.eval_shape(tx.init, leaves), lt.offload.state_shardings(tx, leaves)
    state = jax.tree.map(lambda x, of: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of), state, of_state)
    options: Any = {"donate_argnums": (0, 1), "out_shardings": ({"w": place}, of_state)}
    program = compile(jax.jit(tx.update, **options), leaves, state, leaves, target="h100:4")
    text = program.compiled.as_text()
    assert "xla.gpu.triton" in text and "all-gather" not in text
    assert 4 * program.bytes_accessed / size < 0.45 * 28


@pytest.mark.slow
@pytest.mark.gpu_aot
@pytest.mark.parametrize(("form", "weights"), [("8bit", "split"), ("companded", None)])
def test_on_a_gpu_an_update_reads_everything_once(form: str, weights: Any) -> None:
    shape, size = (4, 512, 2048), 4 * 512 * 2048
    tx = low_precision(optax.adamw(1e-3), form, weights=weights)
    leaves = {"w": jax.ShapeDtypeStruct(shape, jnp.float32 if weights is None else jnp.bfloat16)}
    state = jax.eval_shape(tx.init, leaves)
    program = compile(tx.update, leaves, state, leaves, target="h100", donate_argnums=(0, 1))
    assert "xla.gpu.triton" in program.compiled.as_text()
    read_and_written = 3 * tree_bytes(leaves) + 2 * tree_bytes(state)
    assert program.bytes_accessed == pytest.approx(read_and_written, rel=0.01)
    assert program.report().device.temp_bytes < 0.01 * size
    if weights == "split":
        assert program.bytes_accessed / size < 0.45 * 28  # of AdamW in float32


def widely(name: str) -> Any:
    """A transformation with one more operation on each number."""
    whole = {"and", "or", "xor", "not", "shift_left", "shift_right_arithmetic", "shift_right_logical"}
    two = {"add", "sub", "mul", "div", "max", "min", "rem", "pow", "eq", "ne", "ge", "gt", "le", "lt"}

    def operate(x: Any) -> Any:
        if name in whole:
            bits = jax.lax.bitcast_convert_type(x, jnp.int32)
            made = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "not": "bitwise_not"}.get(
                name, name
            )
            return getattr(jax.lax, made)(*([bits] if name == "not" else [bits, bits & 3])).astype(jnp.float32)
        if name == "clamp":
            return jax.lax.clamp(-1.0, x, 1.0)
        if name == "integer_pow":
            return jax.lax.integer_pow(x, 3)
        if name == "select_n":
            return jnp.where(x > 0, x, 2 * x)
        known = {"add_any": "add", "stop_gradient": "stop_gradient"}
        fn = getattr(jax.lax, known.get(name, name))
        if name in ("bitcast_convert_type", "convert_element_type"):
            return fn(x, jnp.int32).astype(jnp.float32)
        return fn(*([x, x + 1] if name in two or name == "add_any" else [x])).astype(jnp.float32)

    return optax.stateless(lambda updates, _: jax.tree.map(operate, updates))


@pytest.mark.slow
@pytest.mark.gpu_aot
def test_triton_has_all_operations() -> None:
    leaves = {"w": jax.ShapeDtypeStruct((16, 256), jnp.float32)}
    tx = low_precision(optax.chain(*map(widely, sorted(_one_pass._OPERATIONS)), optax.trace(0.9)))
    state = jax.eval_shape(tx.init, leaves)
    assert "xla.gpu.triton" in compile(tx.update, leaves, state, leaves, target="h100").compiled.as_text()


@pytest.mark.slow
@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    ("tx", "is_in_kernels"),
    [
        (optax.apply_if_finite(optax.adamw(1e-2), 3), True),
        (optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(), True),
        (optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(0.0, 1e-2, 5)), True),
        (optax.lion(1e-3), True),
        (optax.novograd(1e-2), None),
        (optax.lamb(1e-2), False),
        (optax.stateless(lambda g, _: jax.tree.map(lambda x: jax.lax.select_n(x.astype(int) % 3, x, -x, x), g)), False),
    ],
    ids=["if-finite", "many-steps", "hyperparameters", "lion", "novograd", "lamb", "switch"],
)
def test_optimizers_compile_for_a_gpu(tx: Any, is_in_kernels: bool | None) -> None:
    leaves = {"b": jax.ShapeDtypeStruct((8,), jnp.float32), "w": jax.ShapeDtypeStruct((16, 256), jnp.float32)}
    tx = low_precision(optax.chain(tx, optax.trace(0.9)))
    program = compile(tx.update, leaves, jax.eval_shape(tx.init, leaves), leaves, target="h100")
    assert is_in_kernels is None or ("xla.gpu.triton" in program.compiled.as_text()) == is_in_kernels


def test_what_an_update_prints_is_printed(used: list[bool], capfd: pytest.CaptureFixture[str]) -> None:
    def printed(grads: Any, _: Any) -> Any:
        jax.debug.print("seen")
        return grads

    tx, begin = low_precision(optax.chain(optax.stateless(printed), optax.trace(0.9))), {"w": jnp.ones((16, 256))}
    jax.block_until_ready(jax.jit(tx.update)(begin, tx.init(begin), begin))
    jax.effects_barrier()
    assert used == [False] and "seen" in capfd.readouterr().out


@pytest.mark.slow
def test_a_packed_array_is_one_of_a_kernel() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 512)), jnp.float32)
    whole, blocks = PackedArray.of(x, "8bit"), PackedArray.of(x.reshape(-1, 256), "8bit")
    np.testing.assert_array_equal(whole.codes.reshape(-1, 256), blocks.codes)
    np.testing.assert_array_equal(whole.scales.reshape(-1, 1), blocks.scales)
