"""The program that runs a schedule: loss and gradients of the model that is not pipelined, whatever it has."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lowtide.core import ConfigError, LayerStack, SelectionError, StructureError
from lowtide.pipeline import SCHEDULES, Costs, Pipeline, Schedule, schedule, value_and_grad

TWO_STAGES = {"interleaved", "interleaved-zb", "looped-bfs", "zb-v", "dualpipe-v", "v-half", "v-min"}
NUM_LAYERS = {4: 7, 8: 11, 16: 13}
"""Uneven for all; of 16 stages some have none."""
NUM_MICROBATCHES, ROWS, LENGTH, VOCABULARY, WIDTH, INNER = 6, 24, 3, 11, 8, 16
EMPTY = 1
"""The microbatch without any target."""


def mesh_of(num_ranks: int, others: int | None = None) -> Mesh:
    others = 8 // num_ranks if others is None else others
    return Mesh(np.array(jax.devices()[: num_ranks * others]).reshape(num_ranks, others), ("stage", "fsdp"))


def first(outer: Any, batch: Any) -> Any:
    h = jnp.take(outer["embed"], batch["tokens"], axis=0)
    return {"x": h, "depth": jnp.int32(0), "aux": jnp.float32(0), "key": batch["key"]}


def block(layer: Any, h: Any, batch: Any) -> Any:
    """A mask, positions, dropout by microbatch and layer, and a loss of its own."""
    key = jax.random.fold_in(h["key"], h["depth"])  # keys may pass from stage to stage
    inner = checkpoint_name(jnp.tanh(h["x"] @ layer["up"] + batch["positions"][..., None]), "inner")
    kept = jax.random.bernoulli(key, 0.8, inner.shape)
    out = jnp.where(kept, inner, 0) @ layer["down"]
    mixed = jnp.einsum("bst,btd->bsd", batch["mask"].astype(out.dtype), out)
    aux = h["aux"] + 0.01 * jnp.mean(layer["scale"] * out.mean((0, 1)))
    out = h["x"] + mixed * layer["scale"][None, None]
    return {**h, "x": out, "depth": h["depth"] + 1, "aux": aux}


def last(outer: Any, h: Any, batch: Any) -> Any:
    """The embedding again, and a mean over the tokens that count."""
    logits = h["x"] @ outer["embed"].T * outer["temperature"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["labels"], 0))
    counts = batch["labels"] >= 0
    return jnp.sum(losses * counts) / jnp.sum(counts) + h["aux"], {"norm": jnp.mean(h["x"] ** 2)}


def num_targets(batch: Any) -> Any:
    return jnp.sum(batch["labels"] >= 0)


STACK = LayerStack(first, block, last)


def normal(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def parameters(num_layers: int) -> tuple[Any, Any]:
    outer = {"embed": normal(0, VOCABULARY, WIDTH), "temperature": jnp.float32(1.5)}
    shapes = {"up": (num_layers, WIDTH, INNER), "down": (num_layers, INNER, WIDTH)}
    draw = np.random.default_rng(1).normal
    layers = {name: jnp.asarray(0.3 * draw(size=shape), jnp.float32) for name, shape in shapes.items()}
    return outer, {**layers, "scale": jnp.asarray(np.ones((num_layers, WIDTH)), jnp.float32)}


def make_batch() -> Any:
    draw = np.random.default_rng(2)
    tokens = draw.integers(0, VOCABULARY, (ROWS, LENGTH))
    # Microbatches of different numbers of targets, one of them of none.
    labels = np.where(draw.uniform(size=tokens.shape) < 0.4, -100, tokens)
    labels[4:8] = -100
    return {
        "tokens": jnp.asarray(tokens, jnp.int32),
        "labels": jnp.asarray(labels, jnp.int32),
        "positions": jnp.asarray(np.tile(np.arange(LENGTH) / LENGTH, (ROWS, 1)), jnp.float32),
        "mask": jnp.asarray(np.tile(np.tril(np.ones((LENGTH, LENGTH), bool)), (ROWS, 1, 1))),
        "key": jax.random.key(7),
    }


@jax.jit
def reference(outer: Any, layers: Any, batch: Any) -> Any:
    """In plain JAX: the sum over microbatches by weight, one after the other."""
    split = {name: leaf.reshape(NUM_MICROBATCHES, -1, *leaf.shape[1:]) for name, leaf in batch.items() if name != "key"}

    def of_microbatch(number: Any) -> Any:
        part = {name: leaf[number] for name, leaf in split.items()}
        part["key"] = jax.random.fold_in(batch["key"], number)

        def weighted(outer: Any, layers: Any) -> Any:
            loss, found = STACK.apply(outer, layers, part)
            return num_targets(part) * loss, num_targets(part) * found["norm"]

        found = jax.value_and_grad(weighted, argnums=(0, 1), has_aux=True)(outer, layers)
        return found, num_targets(part)

    found, weights = jax.lax.map(of_microbatch, jnp.array([i for i in range(NUM_MICROBATCHES) if i != EMPTY]))
    return jax.tree.map(lambda each: each.sum(0) / weights.sum(), found)


def sharded(tree: Any, mesh: Mesh) -> Any:
    """Every leaf divided along its last axis that can be."""

    def place(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        axes = [i for i, size in enumerate(leaf.shape) if size % mesh.shape["fsdp"] == 0 and i]
        spec = ["fsdp" if i == (axes or [None])[-1] else None for i in range(leaf.ndim)]
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(place, tree)


def assert_close(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=tolerance, atol=tolerance, equal_nan=False)


def pipeline_of(name: str, num_ranks: int, **options: Any) -> Pipeline:
    chunks = 2 if name in TWO_STAGES else 1
    costs = Costs(input=1.2, weight=0.8) if name == "auto" else None  # of which the best has several passes in a tick
    made = schedule(name, num_stages=chunks * num_ranks, num_microbatches=NUM_MICROBATCHES, costs=costs)
    return value_and_grad(STACK, made, **{"mesh": mesh_of(num_ranks), "weight": num_targets} | options)


# Fast: one stage per rank with W apart from I, and two stages. Slow: more stages than layers. Schedules with I and W in
# one pass, 1f1b and gpipe, are in tests/pipeline/test_inputs.py.
QUICK = (("zb-h1", 4), ("auto", 4))
CASES = (("interleaved-zb", 4), ("v-min", 8))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "num_ranks"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)]
)
def test_everything_at_once_gives_the_gradients_of_the_plain_model(name: str, num_ranks: int) -> None:
    """Uneven layers, tied weights, masks, dropout, a loss by tokens, one of the blocks, and FSDP on another axis."""
    pipeline = pipeline_of(name, num_ranks)
    assert (pipeline.schedule.ticks is not None) is (name == "auto")
    outer, layers = parameters(NUM_LAYERS[pipeline.schedule.num_stages])
    batch = make_batch()
    (loss, metrics), grads = reference(outer, layers, batch)
    given = [sharded(tree, pipeline.mesh) for tree in (outer, layers, batch)]
    (found, found_metrics), found_grads = jax.jit(pipeline)(*given)
    assert_close((found, found_metrics["norm"]), (loss, metrics))
    assert_close(found_grads, grads)
    if name != "auto":  # each way to place stages
        evaluated, of_evaluation = jax.jit(pipeline.evaluate)(*given)
        assert_close((evaluated, of_evaluation["norm"]), (loss, metrics))


# --- a smaller model -------------------------------------------------------------------------------------------------

PLAIN = LayerStack(
    first=lambda outer, batch: batch["x"] @ outer["in"],
    block=lambda layer, h, batch: h + checkpoint_name(jnp.tanh(h @ layer["up"]), "inner") @ layer["down"],
    last=lambda outer, h, batch: (
        jnp.mean((h @ outer["in"].T * outer["temperature"] - batch["x"]) ** 2),
        {"norm": jnp.mean(h**2)},
    ),
)


def plain_arguments(num_layers: int) -> tuple[Any, Any, Any]:
    layers = parameters(num_layers)[1]
    del layers["scale"]
    outer = {"in": 0.3 * normal(3, WIDTH, WIDTH), "temperature": jnp.float32(1.5)}
    return outer, layers, {"x": normal(4, ROWS, WIDTH)}


def plain_pipeline(name: str, num_ranks: int = 2, **options: Any) -> Pipeline:
    made = schedule(
        name, num_stages=(1 + (name in TWO_STAGES)) * num_ranks, num_microbatches=options.pop("num_microbatches", 4)
    )
    return value_and_grad(PLAIN, made, mesh=mesh_of(num_ranks, 1), **options)


def of_plain_jax(stack: LayerStack, outer: Any, layers: Any, batch: Any) -> Any:
    """Mean over all rows, for losses of which microbatches make no difference."""
    loss = lambda outer, layers: stack.apply(outer, layers, batch)  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(outer, layers)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in dict((*QUICK, *CASES))])
def test_the_other_schedules_give_the_gradients_of_the_plain_model(name: str) -> None:
    """Of uneven layers and tied weights."""
    pipeline = plain_pipeline(name, 4, num_microbatches=NUM_MICROBATCHES)
    given = plain_arguments(NUM_LAYERS[pipeline.schedule.num_stages])
    assert_close(jax.jit(pipeline)(*given), of_plain_jax(PLAIN, *given))


def offloading(name: str) -> Any:
    """Return a policy that moves values of this name to the host."""
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[name],
        offload_src="device",
        offload_dst="pinned_host",
    )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("remat", [True, offloading("inner")])
def test_recomputation_and_offload_change_no_value(remat: Any) -> None:
    given = plain_arguments(4)
    assert_close(jax.jit(plain_pipeline("zb-v", remat=remat))(*given), of_plain_jax(PLAIN, *given))


@pytest.mark.slow
def test_two_steps_then_an_evaluation_without_compiling_again(compilations: Any) -> None:
    pipeline = plain_pipeline("zb-h1", arranged=True, layers_per_stage=[2, 3])
    outer, layers, batch = plain_arguments(5)
    rows = pipeline.arrange(layers)
    tx = optax.adam(1e-2)

    def step(of: Any, params: Any, state: Any, batch: Any) -> Any:
        value, grads = of(*params, batch)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    ours, theirs = jax.jit(partial(step, pipeline)), jax.jit(partial(step, partial(of_plain_jax, PLAIN)))
    wanted = outer, layers
    wanted_state = jax.jit(tx.init)(wanted)
    replicated = jax.device_put(outer, NamedSharding(pipeline.mesh, PartitionSpec()))
    params, state = (replicated, rows), jax.jit(tx.init)((replicated, rows))
    batch = jax.device_put(batch, NamedSharding(pipeline.mesh, PartitionSpec()))
    params, state, _ = ours(params, state, batch)
    params, state, _ = ours(params, state, batch)  # shardings have settled
    with compilations.none():
        params, state, _ = ours(params, state, batch)
    batch = plain_arguments(5)[2]
    for _ in range(3):
        wanted, wanted_state, _ = theirs(wanted, wanted_state, batch)
    assert_close((params[0], pipeline.restore(params[1], 5)), wanted, 1e-4)
    assert_close(jax.jit(pipeline.evaluate)(*params, batch), of_plain_jax(PLAIN, *wanted, batch)[0], 1e-4)


def test_layers_keep_their_order_through_arranging() -> None:
    pipeline = pipeline_of("zb-v", 2, mesh=mesh_of(2, 1))
    layers = {"n": jnp.arange(6)[:, None] * jnp.ones((1, 2))}
    rows = pipeline.arrange(layers)
    # Stages of 1, 2, 2 and 1 layers on ranks 0, 1, 1, 0; short ones have a row of padding.
    assert rows["n"][:, 0].tolist() == [0, 0, 5, 5, 1, 2, 3, 4]
    assert rows["n"].sharding.spec == PartitionSpec("stage")
    assert pipeline.restore(rows, 6)["n"][:, 0].tolist() == list(range(6))
    with pytest.raises(StructureError, match=r"(?s)in the order of ranks must have 8 rows, not 6.*hint:"):
        pipeline.restore(layers, 6)
    shapes = pipeline.arrange({"n": jax.ShapeDtypeStruct((6, 2), jnp.float32)})
    assert shapes["n"].shape == (8, 2)


@pytest.mark.slow
def test_only_what_trains_has_gradients() -> None:
    given = plain_arguments(4)
    _, (of_outer, of_layers) = jax.jit(plain_pipeline("v-half", wrt="layers/up"))(*given)
    assert jax.tree.leaves(of_outer) == [] and set(k for k, v in of_layers.items() if v is not None) == {"up"}
    assert_close(of_layers["up"], of_plain_jax(PLAIN, *given)[1][1]["up"])


@pytest.mark.slow
def test_outer_weights_alone_may_train() -> None:
    given = plain_arguments(4)
    _, (of_outer, of_layers) = jax.jit(plain_pipeline("1f1b", wrt="outer/**"))(*given)
    assert jax.tree.leaves(of_layers) == []
    assert_close(of_outer, of_plain_jax(PLAIN, *given)[1][0])


@pytest.mark.slow
def test_a_microbatch_without_weight_has_no_gradient_whatever_its_activations() -> None:
    pipeline = plain_pipeline("zb-h1", weight=lambda batch: jnp.sum(batch["counts"]))
    outer, layers, batch = plain_arguments(5)
    is_empty = np.arange(ROWS) // (ROWS // 4) == EMPTY
    batch["counts"] = jnp.asarray(~is_empty, jnp.float32)
    broken = {**batch, "x": jnp.asarray(np.where(is_empty[:, None], np.nan, batch["x"]))}
    for run in (jax.jit(pipeline), jax.jit(pipeline.evaluate)):
        assert_close(run(outer, layers, broken), run(outer, layers, batch))


def rows_of(outer: Any, h: Any) -> Any:
    """A loop over the sum of two leaves, which so have one gradient."""
    return jax.lax.scan(lambda h, row: (jnp.tanh(h + row[None, :]), None), h, outer["a"] + outer["b"])[0]


@pytest.mark.slow
def test_weights_that_are_added_to_each_other_or_to_the_loss_have_their_gradients() -> None:
    """The gradient of the bias is the cotangent of the loss."""
    stack = LayerStack(
        first=lambda outer, x: rows_of(outer["first"], x),
        block=lambda layer, h, x: jnp.tanh(h @ layer),
        last=lambda outer, h, x: (jnp.mean(rows_of(outer["last"], h) ** 2) + outer["bias"], {}),
    )
    both = {"a": jnp.full((2, WIDTH), 0.1), "b": jnp.full((2, WIDTH), 0.2)}
    outer = {"first": both, "last": {name: 2 * leaf for name, leaf in both.items()}, "bias": jnp.float32(0.5)}
    layers, x = parameters(4)[1]["up"][..., :WIDTH], normal(2, 8, WIDTH)
    pipeline = value_and_grad(stack, schedule("zb-h1", num_stages=2, num_microbatches=4), mesh=mesh_of(2, 1))
    assert_close(jax.jit(pipeline)(outer, layers, x), of_plain_jax(stack, outer, layers, x))


@pytest.mark.slow
def test_a_block_may_leave_arrays_without_elements() -> None:
    stack = LayerStack(
        first=lambda outer, x: x,
        block=lambda layer, h, x: h + jax.lax.associative_scan(jnp.multiply, jnp.tanh(h @ layer), axis=1),
        last=lambda outer, h, x: (jnp.mean(h**2), {}),
    )
    layers, x = parameters(4)[1]["up"][..., :WIDTH], normal(2, 8, WIDTH)
    pipeline = value_and_grad(stack, schedule("zb-h1", num_stages=2, num_microbatches=4), mesh=mesh_of(2, 1))
    assert_close(jax.jit(pipeline)({}, layers, x), of_plain_jax(stack, {}, layers, x))


@pytest.mark.slow
def test_padding_reaches_no_gradient_whatever_it_computes() -> None:
    """A table with an entry for each layer, of which padding reads one too many: nan."""

    def scaled(layer: Any, h: Any, x: Any) -> Any:
        at, h = h
        return at + 1, h + jnp.tanh(h @ layer) * jnp.take(jnp.linspace(0.5, 1, 5), at)

    stack = LayerStack(lambda outer, x: (jnp.int32(0), x), scaled, lambda outer, h, x: (jnp.mean(h[1] ** 2), {}))
    layers, x = parameters(5)[1]["up"][..., :WIDTH], normal(2, 8, WIDTH)
    made = schedule("zb-h1", num_stages=2, num_microbatches=4)
    pipeline = value_and_grad(stack, made, mesh=mesh_of(2, 1), layers_per_stage=[3, 2], arranged=True)
    value, (_, found) = jax.jit(pipeline)({}, pipeline.arrange(layers), x)
    assert not found[5].any()
    assert_close((value, ({}, pipeline.restore(found, 5))), of_plain_jax(stack, {}, layers, x))


@pytest.mark.slow
def test_outer_weights_may_be_plain_numbers() -> None:
    outer, layers, batch = plain_arguments(4)
    found = plain_pipeline("1f1b")({**outer, "temperature": 1.5}, layers, batch)
    assert_close(found, of_plain_jax(PLAIN, outer, layers, batch))


@pytest.mark.slow
def test_functions_may_return_plain_numbers() -> None:
    stack = LayerStack(
        first=lambda outer, x: {"x": x, "aux": 0.0},
        block=lambda layer, h, x: {"x": jnp.tanh(h["x"] @ layer), "aux": h["aux"] + jnp.mean(h["x"])},
        last=lambda outer, h, x: (jnp.mean(h["x"] ** 2) + h["aux"], {"rows": x.shape[0], "half": 0.5}),
    )
    layers, x = parameters(4)[1]["up"][..., :WIDTH], normal(2, 8, WIDTH)
    pipeline = value_and_grad(stack, schedule("zb-h1", num_stages=2, num_microbatches=4), mesh=mesh_of(2, 2))
    (loss, metrics), grads = jax.jit(pipeline)({}, layers, x)
    (wanted, _), wanted_grads = of_plain_jax(stack, {}, layers, x)
    assert_close((loss, grads), (wanted, wanted_grads))
    assert metrics == {"rows": 2.0, "half": 0.5}
    assert_close(jax.jit(pipeline.evaluate)({}, layers, x), (loss, metrics))


def test_a_batch_may_have_no_arrays() -> None:
    stack = LayerStack(
        first=lambda outer, batch: outer["x"],
        block=lambda layer, h, batch: jnp.tanh(h @ layer),
        last=lambda outer, h, batch: (jnp.mean(h**2), {}),
    )
    outer, layers = {"x": jnp.ones((2, WIDTH))}, parameters(4)[1]["up"][..., :WIDTH]
    made = schedule("zb-h1", num_stages=2, num_microbatches=4)
    pipeline = value_and_grad(stack, made, mesh=mesh_of(2, 1), weight=lambda batch: 2.0)
    assert_close(jax.jit(pipeline)(outer, layers, {}), of_plain_jax(stack, outer, layers, {}))


def test_a_block_may_print(capfd: pytest.CaptureFixture[str]) -> None:
    def block(layer: Any, h: Any, batch: Any) -> Any:
        h = jnp.tanh(h @ layer)
        jax.debug.print("sum {}", jnp.sum(h))
        return h

    def printed(fn: Any, *args: Any) -> list[float]:
        jax.block_until_ready(jax.jit(fn)(*args))
        jax.effects_barrier()
        return sorted(float(line.removeprefix("sum ")) for line in capfd.readouterr().out.splitlines())

    stack = LayerStack(lambda outer, x: x, block, lambda outer, h, x: (jnp.mean(h**2), {}))
    layers, x = parameters(4)[1]["up"][..., :WIDTH], normal(2, 6, WIDTH)
    pipeline = value_and_grad(stack, schedule("zb-h1", num_stages=2, num_microbatches=3), mesh=mesh_of(2, 1))
    wanted = printed(lambda layers: [stack.apply({}, layers, part) for part in jnp.split(x, 3)], layers)
    assert len(wanted) == 3 * 4
    assert printed(pipeline, {}, layers, x) == pytest.approx(wanted, abs=1e-4)


def test_the_report_of_a_batch_whose_first_leaf_is_a_key() -> None:
    pipeline = pipeline_of("1f1b", 2)
    outer, layers = parameters(4)
    batch = make_batch()
    report = pipeline.report(outer, layers, {"": batch["key"], **batch})
    assert report.waiting_bytes == pipeline.report(outer, layers, batch).waiting_bytes > 0


@pytest.mark.slow
def test_a_loop_over_rows_of_activations_reads_what_waits_as_a_whole() -> None:
    stack = LayerStack(
        first=lambda outer, x: x,
        block=lambda layer, h, x: jnp.tanh(h @ layer),
        last=lambda outer, h, x: (jnp.mean(jax.lax.map(lambda row: jnp.tanh(row @ outer["w"]), h) ** 2), {}),
    )
    layers, x = parameters(4)[1]["up"][..., :WIDTH], normal(2, 8, LENGTH, WIDTH)
    outer = {"w": normal(3, WIDTH, INNER)}
    pipeline = value_and_grad(stack, schedule("zb-h1", num_stages=2, num_microbatches=4), mesh=mesh_of(2, 1))
    assert_close(jax.jit(pipeline)(outer, layers, x), of_plain_jax(stack, outer, layers, x))


@pytest.mark.slow
def test_a_schedule_of_ones_own_runs() -> None:
    text = "0F0 0F1 0B0 0I1 0W1\n1F0 1B0 1F1 1B1"
    pipeline, given = value_and_grad(PLAIN, Schedule.from_text(text), mesh=mesh_of(2, 1)), plain_arguments(2)
    assert_close(jax.jit(pipeline)(*given), of_plain_jax(PLAIN, *given))


# --- what is wrong -------------------------------------------------------------------------------------------------


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)the pipeline has no layers.*hint:"):
        pipeline_of("1f1b", 2)(parameters(1)[0], jax.tree.map(lambda leaf: leaf[:0], parameters(1)[1]), make_batch())


@pytest.mark.slow
def test_layers_and_batches_that_do_not_fit_are_named() -> None:
    outer, layers = parameters(5)
    batch = make_batch()
    with pytest.raises(ConfigError, match=r"(?s)layers_per_stage must be 2 numbers .*add up to 5, not \[3, 3\].*hint:"):
        pipeline_of("1f1b", 2, layers_per_stage=[3, 3])(outer, layers, batch)
    alone = pipeline_of("1f1b", 2, mesh=mesh_of(2, 1))
    with pytest.raises(StructureError, match=r"(?s)labels.*does not split into microbatches.*multiple of 6.*hint:"):
        alone(outer, layers, {name: leaf if name == "key" else leaf[:11] for name, leaf in batch.items()})
    with pytest.raises(StructureError, match=r"(?s)labels and tokens have different numbers of rows, 24 and 12.*hint:"):
        alone(outer, layers, {**batch, "tokens": batch["tokens"][:12]})
    with pytest.raises(StructureError, match=r"batch leaf labels has no rows\nhint:"):
        alone(outer, layers, {name: leaf if name == "key" else leaf[:0] for name, leaf in batch.items()})
    few = {name: leaf if name == "key" else leaf[:12] for name, leaf in batch.items()}
    for run in (pipeline_of("1f1b", 2), pipeline_of("1f1b", 2).report):
        with pytest.raises(StructureError, match=r"(?s)along fsdp.*multiple of 24 \(6 microbatches × 4 parts\).*hint:"):
            run(outer, layers, few)
    pipeline_of("1f1b", 2, batch_axes=()).report(outer, layers, few)
    with pytest.raises(StructureError, match=r"(?s)in the order of ranks must have 6 rows, not 5.*hint:.*arrange"):
        pipeline_of("1f1b", 2, layers_per_stage=[2, 3], arranged=True)(outer, layers, batch)
    with pytest.raises(
        ConfigError, match=r"(?s)5 layers do not divide evenly into 2 stages.*hint:.*layers_per_stage=\[3, 2\]"
    ):
        pipeline_of("1f1b", 2, arranged=True).arrange(layers)
    for weight in (lambda batch: batch["labels"], lambda batch: "labels"):
        with pytest.raises(StructureError, match=r"(?s)weight of a microbatch is not a number.*(labels|shape).*hint:"):
            pipeline_of("1f1b", 2, weight=weight)(outer, layers, batch)
    del batch["positions"]
    for run in (pipeline_of("1f1b", 2), pipeline_of("1f1b", 2).evaluate, pipeline_of("1f1b", 2).report):
        with pytest.raises(KeyError, match="positions") as caught:
            run(outer, layers, batch)
        assert "leaves of batch: key, labels, mask, tokens" in caught.value.__notes__


@pytest.mark.slow
def test_functions_of_another_shape_are_named() -> None:
    outer, layers = parameters(4)
    made = schedule("1f1b", num_stages=2, num_microbatches=NUM_MICROBATCHES)

    def run(**functions: Any) -> Any:
        stack = LayerStack(**{"first": first, "block": block, "last": last} | functions)
        return value_and_grad(stack, made, mesh=mesh_of(2))(outer, layers, make_batch())

    with pytest.raises(
        StructureError, match=r"(?s)x: a block returns a shape or dtype that differs.*3, 8.*got: .*3, 4.*hint:"
    ):
        run(block=lambda layer, h, batch: {**h, "x": h["x"][..., :4]})
    with pytest.raises(StructureError, match=r"(?s)does not return a loss.*\(loss, metrics\).*got:"):
        run(last=lambda outer, h, batch: h["x"])


# Fewer than a microbatch has; all of them and one more; all alone; some whole ones.
@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("rows", "weighted"),
    [(1, False), (13, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((12, False), (7, True)))],
)
def test_an_evaluation_takes_any_number_of_rows(rows: int, weighted: bool) -> None:
    pipeline, stack, layers = evaluated(weighted)
    batch = {"x": normal(3, rows, 5, WIDTH), "w": jnp.ones(rows)}
    assert_close(jax.jit(pipeline.evaluate)({}, layers, batch), jax.jit(stack.apply)({}, layers, batch))


@pytest.mark.slow
def test_an_evaluation_needs_the_memory_of_a_microbatch() -> None:
    pipeline, _, layers = evaluated(False)

    def temp_bytes(rows: int) -> int:
        batch = {"x": jnp.zeros((rows, 512, WIDTH)), "w": jnp.ones(rows)}
        return jax.jit(pipeline.evaluate).lower({}, layers, batch).compile().memory_analysis().temp_size_in_bytes

    assert temp_bytes(59) <= 1.5 * temp_bytes(60)


def test_rows_that_differ_or_are_none_are_not_evaluated() -> None:
    pipeline, _, layers = evaluated(False)
    x = jnp.ones((7, 5, WIDTH))
    with pytest.raises(StructureError, match=r"(?s)different numbers of rows, 13 and 7.*hint:"):
        pipeline.evaluate({}, layers, {"x": x, "w": jnp.ones(13)})
    for run in (pipeline, pipeline.evaluate, pipeline.report):
        with pytest.raises(StructureError, match=r"batch leaf x has no rows\nhint:"):
            run({}, layers, {"x": x[:0]})


def test_an_integer_that_is_selected_is_refused_by_the_report_too() -> None:
    pipeline, _, layers = evaluated(False)
    for run in (pipeline, pipeline.report):
        with pytest.raises(SelectionError, match="outer/step: a leaf of type int32 cannot be differentiated"):
            run({"step": jnp.int32(0)}, layers, {"x": jnp.ones((24, 5, WIDTH))})


def evaluated(weighted: bool) -> tuple[Pipeline, LayerStack, Any]:
    stack = LayerStack(
        first=lambda outer, batch: batch["x"],
        block=lambda layer, h, batch: h + jnp.tanh(h @ layer),
        last=lambda outer, h, batch: (jnp.mean(h**2), {"size": jnp.mean(jnp.abs(h))}),
    )
    made = schedule("zb-h1", num_stages=2, num_microbatches=6)
    weight = (lambda batch: jnp.sum(batch["w"])) if weighted else None
    pipeline = value_and_grad(stack, made, mesh=mesh_of(2, 2), weight=weight)
    return pipeline, stack, parameters(4)[1]["up"][..., :WIDTH]


def test_keys_of_the_rows_that_are_left_over_are_new_ones() -> None:
    stack = LayerStack(
        first=lambda outer, batch: batch["x"],
        block=lambda layer, h, batch: h * layer,
        last=lambda outer, h, batch: (jax.random.uniform(batch["key"]) + 0 * jnp.sum(h), {}),
    )
    pipeline = value_and_grad(stack, schedule("1f1b", num_stages=1, num_microbatches=2), mesh=mesh_of(1, 1))
    key = jax.random.key(5)
    loss, _ = jax.jit(pipeline.evaluate)({}, jnp.ones((2, 1, 1)), {"x": jnp.ones((3, 1)), "key": key})
    drawn = [jax.random.uniform(jax.random.fold_in(key, number)) for number in (0, 1)]
    assert jnp.allclose(loss, (2 * drawn[0] + drawn[1]) / 3)
