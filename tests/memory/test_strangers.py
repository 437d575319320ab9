"""What strangers bring: other libraries' jit, settings that are text, closed-over tables, stacks of loops."""

from __future__ import annotations

import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

from lowtide.core import StructureError, tree_bytes
from lowtide.losses import chunked_cross_entropy
from lowtide.memory import Job, advise, analyze, compile, extrapolate, remedies
from lowtide.memory.advice._extrapolation import fit_bytes

LAYERS, DIM, ROWS = 6, 64, 512


def shape(*dims: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


@pytest.mark.filterwarnings("ignore:Some donated buffers")  # the batch, which equinox.filter_jit donates, too
def test_a_step_below_the_jit_of_a_library_is_found() -> None:
    nnx, eqx = pytest.importorskip("flax.nnx"), pytest.importorskip("equinox")
    tx = optax.adam(1e-3)
    x = shape(64, DIM)

    def loss(model: Any, x: Any) -> Any:
        return jnp.mean(jax.vmap(model)(x) ** 2)

    def train(model: Any, state: Any, x: Any) -> Any:
        value, grads = eqx.filter_value_and_grad(loss)(model, x)
        updates, state = tx.update(grads, state)
        return eqx.apply_updates(model, updates), state, value  # with the model's functions

    model = eqx.nn.MLP(DIM, DIM, 4 * DIM, 1, key=jax.random.key(0))
    state = tx.init(eqx.filter(model, eqx.is_array))
    roles = {"params": 0, "optimizer": 1}
    ours = analyze(train, model, state, x, target="cpu", roles=roles, donate_argnums=(0, 1))
    theirs = analyze(eqx.filter_jit(train, donate="all-except-first"), model, state, x, target="cpu", roles=roles)
    params, optimizer = tree_bytes(eqx.filter(model, eqx.is_array)), tree_bytes(state)
    assert ours.by_role["params"] == theirs.by_role["params"] == params
    assert ours.device.alias_bytes == params + optimizer
    assert theirs.device.alias_bytes == optimizer

    @nnx.jit(donate_argnums=1)
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        value, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return value

    @nnx.jit
    def predict(model: Any, x: Any) -> Any:
        return model(x)

    layer = nnx.Linear(DIM, DIM, rngs=nnx.Rngs(0))
    report = analyze(step, layer, nnx.Optimizer(layer, tx, wrt=nnx.Param), x, target="cpu", roles=roles)
    assert report.by_role["params"] == 4 * DIM * (DIM + 1)
    assert report.device.alias_bytes == report.by_role["optimizer"] >= 2 * report.by_role["params"]
    assert report.device.output_bytes - report.device.alias_bytes >= report.by_role["params"]  # the updated model
    # Variables that a call only reads are no results of it.
    assert analyze(predict, layer, x, target="cpu").device.output_bytes < 4 * 64 * DIM + 1024


def test_the_jit_of_an_unknown_library_is_refused() -> None:
    class Jit:
        def lower(self, *args: Any) -> Any: ...

    with pytest.raises(StructureError, match=r"own jit(.|\n)*hint: .*__wrapped__"):
        compile(Jit(), shape(4))


def test_a_shape_of_text_is_said_to_be_one() -> None:
    with pytest.raises(StructureError, match=r"must be whole numbers, not \('abc', 4\)\nhint: .*--set batch=8"):
        compile(lambda x: x * 2, shape("abc", 4))


def test_lines_inside_of_lowtide_are_not_shown_as_the_user_s() -> None:
    def loss(head: Any, h: Any, labels: Any) -> Any:
        return jnp.mean(chunked_cross_entropy(h, head, labels))

    report = analyze(jax.grad(loss), shape(1024, DIM), shape(ROWS, DIM), shape(ROWS, dtype=jnp.int32), target="cpu")
    sources = {b.source for b in report.buffers if b.source}
    assert sources
    assert all("test_strangers.py" in source for source in sources)


@pytest.mark.slow
def test_constants_outside_of_the_compiler_s_figures_are_noted() -> None:
    table = np.random.default_rng(0).normal(size=(8, 2**18)).astype(np.float32)
    report = analyze(lambda x: jnp.tanh(x @ table), shape(8, 8), target="cpu")
    assert any("8.00 MiB of constants" in note and "f32[8,262144]" in note for note in report.notes)
    assert sum(b.num_bytes for b in report.peak) == report.device_bytes
    assert analyze(lambda x: x + 1.5, shape(8, 8), target="cpu").notes == ()


def stacked(wide: int, remat: bool) -> tuple[Any, Any, Any]:
    """The gradient of a loop over blocks behind an embedding."""

    def block(h: Any, w: Any) -> Any:
        return h + jax.nn.gelu(jnp.tanh(h @ w["a"])) @ w["b"]

    def embed(x: Any, table: Any) -> Any:
        return jnp.sin(x @ table)

    def loss(params: Any, x: Any) -> Any:
        run = jax.checkpoint(block) if remat else block
        h, _ = jax.lax.scan(lambda h, w: (run(h, w), None), embed(x, params["embed"]), params["layers"])
        return jnp.mean(h**2)

    layers = {"a": shape(LAYERS, DIM, wide), "b": shape(LAYERS, wide, DIM)}
    return jax.grad(loss), {"embed": shape(DIM, DIM), "layers": layers}, shape(ROWS, DIM)


def test_a_stack_of_a_loop_is_named_after_what_the_loop_makes() -> None:
    report = analyze(*stacked(DIM, False), target="cpu")
    stacks = [b for b in report.peak if b.role == "activations" and b.shape == (LAYERS, ROWS, DIM)]
    assert len(stacks) >= 4
    assert all("(stacked.<locals>.block)" in b.source for b in stacks)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("wide", [DIM, 4 * DIM])
def test_recomputing_a_block_saves_about_what_is_estimated(wide: int) -> None:
    before, after = (analyze(*stacked(wide, remat), target="cpu").device_bytes for remat in (False, True))
    found = remedies(*stacked(wide, False), target="cpu", verify=False)
    remedy = next(r for r in found if r.kind == "recompute" and "block" in r.action)
    # 9.2 % below on JAX 0.11 and 0.12, 0 to 8 % on 0.10
    assert remedy.estimated_bytes == pytest.approx(before - after, rel=0.1)
    low, high = remedy.range_bytes or (0, 0)
    assert low == remedy.estimated_bytes < high < 1.5 * low


def test_recomputing_a_message_passing_net_saves_about_what_is_estimated() -> None:
    nodes, edges = 512, 4096

    def step(remat: bool) -> Any:
        def layer(h: Any, w: Any, senders: Any, receivers: Any) -> Any:
            messages = jax.nn.gelu(h[senders] @ w["sender"] + h[receivers] @ w["receiver"])
            return h + jnp.tanh(jax.ops.segment_sum(messages, receivers, num_segments=nodes) @ w["up"])

        def loss(params: Any, h: Any, *ends: Any) -> Any:
            run = jax.checkpoint(layer) if remat else layer
            return jnp.mean(jax.lax.scan(lambda h, w: (run(h, w, *ends), None), h, params)[0] ** 2)

        return jax.grad(loss)

    ends = [shape(edges, dtype=jnp.int32)] * 2
    args = {name: shape(4, 32, 32) for name in ("sender", "receiver", "up")}, shape(nodes, 32), *ends
    report, found = advise(Job(fn=step(False), args=args), "cpu")
    saved = report.device_bytes - analyze(step(True), *args, target="cpu").device_bytes
    (remedy,) = (r for r in found if r.kind == "recompute" and "layer" in r.action)
    assert saved > report.device_bytes / 2
    assert all(estimate == pytest.approx(saved, rel=0.15) for estimate in remedy.range_bytes or (0,))
    assert "chunk-loss" not in {r.kind for r in found}  # an edge is no token


def test_a_small_curve_is_a_curve() -> None:
    def bytes_at(n: int) -> int:
        return 10_000 + 4_000 * n + 30 * n * n

    line = fit_bytes([(n, bytes_at(n)) for n in (2, 3, 4)])
    assert len(line.coefficients) == 2 and line.residual is not None and 0.002 < line.residual < 0.05
    curve = fit_bytes([(n, bytes_at(n)) for n in (2, 3, 4, 8)])
    assert curve.predict(100) == pytest.approx(bytes_at(100), rel=1e-3)


@pytest.mark.slow
def test_a_small_curve_is_looked_at_twice() -> None:
    def make(n: int) -> Any:  # a line, and a little more for every pair
        return lambda x, pairs: (jnp.negative(x), jnp.negative(pairs)), (shape(n, 4096), shape(n, n, 32))

    found = extrapolate(make, limit="24 MiB", target="cpu")
    assert len(found.fit.coefficients) == 3
    assert found.predicted_bytes == pytest.approx(found.report.device_bytes, rel=0.002)
    out = io.StringIO()
    found.print(Console(file=out, width=200))
    assert "0.0 % at the answer" in out.getvalue()


def test_an_equinox_module_without_functions_is_no_array_either() -> None:
    eqx = pytest.importorskip("equinox")
    model = eqx.filter_eval_shape(lambda key: eqx.nn.MultiheadAttention(2, 32, key=key), jax.random.key(0))
    report = analyze(lambda models, x: models[0](x, x, x), [model], shape(16, 32))
    assert {b.path for b in report.buffers if b.path.startswith("models/")} >= {"models/0/query_proj/weight"}


def test_the_line_that_calls_analyze_is_no_line_of_the_program() -> None:
    report = analyze(jax.nn.gelu, shape(512, 512), target="cpu")
    assert all("test_strangers.py" not in buffer.source for buffer in report.buffers)


def test_a_layer_s_noise_is_no_loop_over_layers() -> None:
    def loss(w: Any, x: Any, key: Any) -> Any:
        h = jnp.tanh(x @ w)
        return jnp.mean(jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0) ** 2)

    key = jax.eval_shape(lambda: jax.random.key(0))
    found = remedies(jax.grad(loss), shape(64, 512), shape(1024, 64), key, target="cpu", verify=False)
    assert "recompute" not in {r.kind for r in found}
