"""Blocks that divide their work over axes of their own: by tensors, experts, in rings; values, bytes, bad input."""

from __future__ import annotations

import functools
import re
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P, lax
from jax.sharding import Mesh, NamedSharding

from lowtide.core import LayerStack, StructureError
from lowtide.jaxprs import equations, make_jaxpr
from lowtide.memory import Program, compile, target
from lowtide.pipeline import Pipeline, schedule, value_and_grad
from lowtide.train import ShardingRules, Trainer, make_mesh

from .test_executor import assert_close

ROWS, LENGTH, EXPERTS, MICROBATCHES = 16, 4, 4, 4


def mesh_of(devices: Any = None, **sizes: int) -> Mesh:
    devices = jax.devices() if devices is None else devices
    return Mesh(np.array(devices[: np.prod([*sizes.values()])]).reshape(*sizes.values()), tuple(sizes))


def mapped(part: Any, ins: Any, outs: Any, axis: str, check: bool) -> Any:
    return jax.shard_map(part, in_specs=ins, out_specs=outs, axis_names={axis}, check_vma=check)


# --- blocks, and what they compute on one device ---------------------------------------------------------------------


def tensor_parallel(check: bool, in_sequence: bool = False) -> Any:
    """Column- and row-parallel products; activations whole, or divided along the sequence."""

    def part(h: Any, up: Any, down: Any) -> Any:
        if not in_sequence:
            return lax.psum(jnp.tanh(h @ up) @ down, "tensor")
        h = lax.all_gather(h, "tensor", axis=1, tiled=True)
        return lax.psum_scatter(jnp.tanh(h @ up) @ down, "tensor", scatter_dimension=1, tiled=True)

    rows = P(None, "tensor") if in_sequence else P()
    inner = mapped(part, (rows, P(None, "tensor"), P("tensor")), rows, "tensor", check)
    return lambda w, h, _: h + inner(h, w["up"], w["down"])


def plain_products(w: Any, h: Any, _: Any) -> Any:
    return h + jnp.tanh(h @ w["up"]) @ w["down"]


def ring(check: bool) -> Any:
    """Attention to all positions, of which keys go round."""

    def part(h: Any, up: Any, down: Any) -> Any:
        query, size = h @ up, lax.axis_size("ring")
        pairs = [(i, (i + 1) % size) for i in range(size)]

        def turn(_: Any, carry: Any) -> Any:
            keys, top, bottom = carry
            scores = jnp.exp(query @ keys.mT)
            top, bottom = top + scores @ keys, bottom + scores.sum(-1, keepdims=True)
            return lax.ppermute(keys, "ring", pairs), top, bottom

        zeros = jnp.zeros_like(query)
        _, top, bottom = lax.fori_loop(0, size, turn, (jnp.tanh(h @ down.T), zeros, zeros[..., :1]))
        return (top / bottom) @ down

    inner = mapped(part, (P(None, "ring"), P(), P()), P(None, "ring"), "ring", check)
    return lambda w, h, _: h + inner(h, w["up"], w["down"])


def plain_attention(w: Any, h: Any, _: Any) -> Any:
    query, keys = h @ w["up"], jnp.tanh(h @ w["down"].T)
    return h + jax.nn.softmax(query @ keys.mT) @ keys @ w["down"]


def routed(x: Any, router: Any) -> tuple[Any, Any, Any]:
    """By token, expert and place there, of the best two: whether, with which weight; and parts of the router's loss."""
    chances = jax.nn.softmax(x @ router)
    best, which = lax.top_k(chances, 2)
    chosen = jax.nn.one_hot(which, EXPERTS).reshape(-1, EXPERTS)
    places = ((jnp.cumsum(chosen, 0) - chosen) * chosen).sum(-1).astype(int)
    sent = (chosen[:, :, None] * jax.nn.one_hot(places, 2 * len(x))[:, None]).reshape(len(x), 2, EXPERTS, -1)
    weights = best / best.sum(-1, keepdims=True)
    return sent.sum(1), jnp.einsum("nkec,nk->nec", sent, weights), (chosen.mean(0), chances.mean(0))


def expert_parallel(check: bool, is_ragged: bool = False) -> Any:
    """Tokens, divided along the axis, go to the device of their experts and back."""

    def part(h: Any, router: Any, up: Any, down: Any) -> Any:
        x = h.reshape(-1, h.shape[-1])
        sent, taken, shares = routed(x, router)
        z = lax.all_to_all(jnp.einsum("nec,nd->ecd", sent, x), "expert", 0, 1, tiled=True)
        if is_ragged:
            sizes = jnp.full(z.shape[:1], z.shape[1], jnp.int32)
            y = lax.ragged_dot(jnp.tanh(lax.ragged_dot(z.reshape(-1, z.shape[-1]), up, sizes)), down, sizes)
        else:
            y = jnp.tanh(z @ up) @ down
        y = lax.all_to_all(y.reshape(z.shape), "expert", 1, 0, tiled=True)
        chosen, chances = lax.pmean(shares, "expert")
        return jnp.einsum("nec,ecd->nd", taken, y).reshape(h.shape), jnp.sum(chosen * chances)

    rows, whole = P("expert"), P()
    inner = mapped(part, (rows, whole, rows, rows), (rows, whole), "expert", check)

    def block(w: Any, h: Any, _: Any) -> Any:
        out, loss = inner(h[0], w["router"], w["experts"]["up"], w["experts"]["down"])
        return h[0] + out, h[1] + 0.1 * loss

    return block


def plain_experts(w: Any, h: Any, _: Any) -> Any:
    x = h[0].reshape(-1, h[0].shape[-1])
    sent, taken, shares = routed(x, w["router"])
    y = jnp.tanh(jnp.einsum("nec,nd->ecd", sent, x) @ w["experts"]["up"]) @ w["experts"]["down"]
    return h[0] + jnp.einsum("nec,ecd->nd", taken, y).reshape(h[0].shape), h[1] + 0.1 * jnp.sum(shares[0] * shares[1])


# --- models of them --------------------------------------------------------------------------------------------------

PLAIN = {"tensor": plain_products, "sequence": plain_products, "ring": plain_attention, "expert": plain_experts}
AXES = {"tensor": "tensor", "sequence": "tensor", "ring": "ring", "expert": "expert"}
RULES = {r"layers/experts/up": P("stage", "expert", None, "fsdp"), r"layers/experts/down": P("stage", "expert", "fsdp")}


def block_of(kind: str, check: bool = True) -> Any:
    if kind in ("tensor", "sequence"):
        return tensor_parallel(check, kind == "sequence")
    return ring(check) if kind == "ring" else expert_parallel(check)


def stack_of(block: Any, kind: str) -> LayerStack:
    def error(outer: Any, h: Any, tokens: Any) -> Any:
        return jnp.mean((h @ outer.T - jax.nn.one_hot(tokens, len(outer))) ** 2)

    if kind != "expert":
        return LayerStack(lambda o, x: jnp.take(o, x, 0), block, lambda o, h, x: (error(o, h, x), {}))
    return LayerStack(
        lambda o, x: (jnp.take(o, x, 0), jnp.zeros(())),
        block,
        lambda o, h, x: (error(o, h[0], x) + h[1], {"router": h[1]}),
    )


def specs_of(kind: str) -> Any:
    if kind == "ring":
        return {"up": P("stage"), "down": P("stage")}
    if kind != "expert":
        return {"up": P("stage", None, "tensor"), "down": P("stage", "tensor")}
    experts = {"up": P("stage", "expert", None, "fsdp"), "down": P("stage", "expert", "fsdp")}
    return {"router": P("stage"), "experts": experts}


def shapes_of(kind: str, num_layers: int, width: int) -> Any:
    inner = width if kind == "ring" else 3 * width
    if kind != "expert":
        return {"up": (num_layers, width, inner), "down": (num_layers, inner, width)}
    experts = {"up": (num_layers, EXPERTS, width, inner), "down": (num_layers, EXPERTS, inner, width)}
    return {"router": (num_layers, width, EXPERTS), "experts": experts}


def is_shape(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and isinstance(leaf[0], int)


def weights_of(kind: str, num_layers: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(0).normal
    layers = jax.tree.map(
        lambda shape: jnp.asarray(0.4 * draw(size=shape), jnp.float32), shapes_of(kind, num_layers, 8), is_leaf=is_shape
    )
    return jnp.asarray(np.eye(8) + 0.1 * draw(size=(8, 8)), jnp.float32), layers


def batch_of() -> Any:
    return np.random.default_rng(1).integers(0, 8, (ROWS, LENGTH)).astype(np.int32)


@functools.cache
def wanted(kind: str) -> Any:
    """Of four layers."""
    stack, rows = stack_of(PLAIN[kind], kind), np.split(batch_of(), MICROBATCHES)

    def loss(outer: Any, layers: Any) -> Any:
        found = [stack.apply(outer, layers, part) for part in rows]
        return jax.tree.map(lambda *each: sum(each) / MICROBATCHES, *found)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*weights_of(kind, 4))


def pipeline_of(kind: str, name: str, mesh: Mesh, check: bool = True, block: Any = None, **options: Any) -> Pipeline:
    number = mesh.shape["stage"] * (2 if name == "zb-v" else 1)
    made = schedule(name, num_stages=number, num_microbatches=options.pop("num_microbatches", MICROBATCHES))
    return value_and_grad(stack_of(block or block_of(kind, check), kind), made, mesh=mesh, **options)


def placed(tree: Any, mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), tree, specs)


# --- values ----------------------------------------------------------------------------------------------------------


def assert_nobody_gathers(text: str, experts: Any) -> None:
    """No device has the weights of others' experts, or what experts of others leave to a later pass."""
    assert "all-to-all" in text
    gathered = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather(?:-start)?\(", text)
    whole = tuple(",".join(map(str, leaf.shape[1:])) for leaf in jax.tree.leaves(experts))
    assert gathered and not [dims for dims in gathered if dims.endswith(whole)]
    assert "layout_constraint" not in text, "of divided arrays it gathers everything that waits"


QUICK = [("ring", "zb-h1", True, True)]
OTHERS = [
    # Each kind with and without types, with and without recomputation; each way to place stages, and to split passes.
    ("expert", "zb-v", False, False),
    ("expert", "auto", True, True),
    ("tensor", "zb-h1", False, True),
    ("tensor", "zb-v", True, False),
    ("sequence", "1f1b", True, False),
    ("sequence", "zb-h1", False, True),
    ("ring", "zb-v", False, False),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "check", "remat"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_blocks_that_divide_their_work_give_the_gradients_of_plain_ones(
    kind: str, name: str, check: bool, remat: bool
) -> None:
    mesh = mesh_of(stage=2, **{AXES[kind]: 2}, fsdp=2)
    pipeline = pipeline_of(kind, name, mesh, check, remat=remat, arranged=True)
    outer, layers = weights_of(kind, 4)
    given = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), pipeline.arrange(layers), specs_of(kind)
    )
    compiled = jax.jit(pipeline).lower(outer, given, batch_of()).compile()
    results, (of_outer, of_layers) = compiled(outer, given, batch_of())
    for one, weight in zip(jax.tree.leaves(of_layers), jax.tree.leaves(given), strict=True):
        assert one.addressable_shards[0].data.size <= weight.addressable_shards[0].data.size  # as divided as it is
    found = results, (of_outer, pipeline.restore(of_layers, 4))
    assert_close(found, wanted(kind))
    if kind == "expert":
        assert_nobody_gathers(compiled.as_text(), layers["experts"])


@pytest.mark.slow
def test_experts_by_ragged_products() -> None:
    outer, layers = weights_of("expert", 4)
    mesh = mesh_of(stage=2, expert=2)
    pipeline = pipeline_of("expert", "zb-h1", mesh, block=expert_parallel(True, is_ragged=True))
    assert_close(jax.jit(pipeline)(outer, layers, batch_of()), wanted("expert"))


@pytest.mark.slow
def test_first_and_last_may_permute_too_and_a_permutation_may_leave_devices_out() -> None:
    def moved(h: Any, pairs: Any) -> Any:
        return mapped(lambda h: lax.ppermute(h, "ring", pairs), P(None, "ring"), P(None, "ring"), "ring", True)(h)

    def plain(h: Any, pairs: Any) -> Any:
        parts = dict(pairs)
        halves = {to: jnp.split(h, 2, 1)[begin] for begin, to in parts.items()}
        return jnp.concatenate([halves.get(i, jnp.zeros_like(h[:, ::2])) for i in range(2)], 1)

    def stack(move: Any) -> LayerStack:
        return LayerStack(
            lambda o, x: move(jnp.take(o, x, 0), [(0, 1), (1, 0)]),
            lambda w, h, x: h + jnp.tanh(move(h, [(0, 1)]) @ w["up"]) @ w["down"],
            lambda o, h, x: (jnp.mean((move(h, [(1, 0)]) - 1) ** 2), {}),
        )

    outer, layers = weights_of("tensor", 2)
    made = schedule("zb-h1", num_stages=2, num_microbatches=MICROBATCHES)
    pipeline = value_and_grad(stack(moved), made, mesh=mesh_of(stage=2, ring=2))
    loss = lambda *args: stack(plain).apply(*args, batch_of())  # noqa: E731
    expected = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(outer, layers)
    assert_close(jax.jit(pipeline)(outer, layers, batch_of()), expected)
    assert_close(jax.jit(pipeline.evaluate)(outer, layers, batch_of()), expected[0])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("names", [("ring", "tensor"), ("tensor", "ring")])
def test_a_permutation_numbers_devices_as_the_mesh_does(names: tuple[str, ...]) -> None:
    """As JAX's own does, in whatever order it names axes; JAX 0.12 refuses other orders than the mesh's."""
    pairs, rows = [(0, 3), (3, 1), (1, 2)], P(("ring", "tensor"))

    def block(w: Any, h: Any, _: Any) -> Any:
        return w * jax.shard_map(lambda h: lax.ppermute(h, names, pairs), in_specs=rows, out_specs=rows)(h)

    stack = LayerStack(lambda o, x: x, block, lambda o, h, x: (jnp.mean(jnp.arange(4.0) @ h) / 4, {}))
    mesh = mesh_of(stage=2, ring=2, tensor=2)
    pipeline = value_and_grad(
        stack, schedule("1f1b", num_stages=2, num_microbatches=2), mesh=mesh, batch_axes=["ring", "tensor"]
    )
    layers, batch = jnp.array([2.0, 3.0]), jnp.arange(16.0).reshape(8, 2)
    parts = batch.reshape(2, 4, 2)
    moved = jnp.zeros_like(parts).at[:, 1].set(parts[:, 0]).at[:, 2].set(parts[:, 3])  # twice
    (loss, _), (_, grads) = jax.jit(pipeline)({}, layers, batch)
    assert loss == pytest.approx(6 * jnp.mean(moved[:, 1] + 2 * moved[:, 2]) / 4)
    assert_close(grads, loss / layers)


@pytest.mark.slow
def test_a_trainer_keeps_experts_divided_and_trains_as_one_device_does() -> None:
    mesh = make_mesh(stage=2, expert=2, fsdp=2)
    sharding = ShardingRules(mesh=mesh, rules=RULES)
    assert sharding.batch_axes == ("expert", "data", "fsdp")
    outer, layers = weights_of("expert", 4)
    model, tx = {"outer": outer, "layers": layers}, optax.sgd(0.1, momentum=0.9)
    stack = stack_of(plain_experts, "expert")
    one = Trainer(
        jax.tree.map(jnp.array, model),
        lambda model, batch: stack.apply(model["outer"], model["layers"], batch),
        tx,
        num_microbatches=MICROBATCHES,
    )
    trainer = Trainer(model, None, tx, pipeline=pipeline_of("expert", "zb-h1", mesh), sharding=sharding)
    found, expected = (each.fit([batch_of()] * 2, num_steps=2, progress=False) for each in (trainer, one))
    assert [record["loss"] for record in found] == pytest.approx([record["loss"] for record in expected], rel=1e-5)
    assert_close(trainer.model, one.model)
    up = trainer.state.trainable["layers"]["experts"]["up"]
    assert up.addressable_shards[0].data.size == up.size // 8


# --- bytes and work --------------------------------------------------------------------------------------------------


@functools.cache
def on_a_pod(kind: str, number: int) -> Program:
    """Of this many microbatches, compiled for chips that are not there."""
    mesh, width = mesh_of(target("v5p:2x2x2").devices(), stage=2, **{AXES[kind]: 2}, fsdp=2), 128
    pipeline = pipeline_of(kind, "zb-h1", mesh, arranged=True, num_microbatches=number)

    def shape(dims: Any, spec: Any, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

    layers = jax.tree.map(shape, shapes_of(kind, 4, width), specs_of(kind), is_leaf=is_shape)
    tokens = shape((number * 16, 16), P(pipeline.batch_axes), jnp.int32)
    return compile(pipeline, shape((width, width), P()), layers, tokens, target="v5p:2x2x2")


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.parametrize("kind", ["expert", "ring"])
@pytest.mark.usefixtures("little_optimized")
def test_memory_is_flat_in_microbatches(kind: str) -> None:
    few, many = (on_a_pod(kind, number).report().device.temp_bytes for number in (4, 16))
    assert many <= 1.02 * few


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.usefixtures("little_optimized")
def test_a_tpu_permutes_where_a_cpu_gathers() -> None:
    text = on_a_pod("ring", 4).compiled.as_text()
    assert '/all_gather"' not in text and re.search(r' collective-permute(-start)?\(.*shard_map/[^"]*ppermute"', text)


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.usefixtures("little_optimized")
def test_a_trainer_predicts_what_experts_take_on_a_pod() -> None:
    mesh = make_mesh(stage=2, expert=2, fsdp=2)
    outer, layers = weights_of("expert", 4)
    pipeline = pipeline_of("expert", "zb-h1", mesh)
    rules = ShardingRules(mesh=mesh, rules=RULES)
    trainer = Trainer({"outer": outer, "layers": layers}, None, optax.sgd(0.1), pipeline=pipeline, sharding=rules)
    report = trainer.memory(batch_of(), target="v5p:2x2x2")
    assert report.target.chip == "v5p" and report.by_role["trainable"] > 0


@pytest.mark.parametrize("kind", ["expert", pytest.param("ring", marks=pytest.mark.slow)])
def test_no_product_of_a_block_is_done_twice(kind: str) -> None:
    def num_products(fn: Any, *args: Any) -> int:
        return sum(eqn.primitive.name == "dot_general" for eqn in equations(make_jaxpr(fn)(*args)[0]))

    mesh = mesh_of(stage=2, **{AXES[kind]: 2})
    outer, layers = weights_of(kind, 2)
    pipeline, plain = pipeline_of(kind, "zb-h1", mesh), stack_of(PLAIN[kind], kind)
    loss = lambda *args: plain.apply(*args, batch_of())  # noqa: E731
    in_plain = num_products(jax.value_and_grad(loss, (0, 1), has_aux=True), outer, layers)
    assert num_products(pipeline, outer, layers, batch_of()) == in_plain
    assert pipeline.report(outer, layers, batch_of()).flops["blocks"].unsplit == ()


# --- bad input -------------------------------------------------------------------------------------------------------


def identity(spec: Any, **options: Any) -> Any:
    return lambda w, h, _: jax.shard_map(lambda h: h, in_specs=spec, out_specs=spec, **options)(h)


WRONG: dict[str, tuple[Any, str]] = {
    "no such axis": (block_of("ring"), r"does not have: ring\n.*'tensor'.*hint: name an axis of the mesh"),
    "no axis for experts": (
        identity(P("expert"), axis_names={"expert"}),
        r"does not have: expert.*make_mesh\(stage=..., exp",
    ),
    "no such axis in a spec": (identity(P("tnesor")), "does not have: tnesor"),
    "no shard_map": (lambda w, h, _: lax.psum(h, "tensor"), "'tensor' outside of a shard_map.*hint: call jax.sh"),
    "neither": (lambda w, h, _: lax.psum(h, "tnesor"), "does not have: tnesor"),
    "a mesh": (
        identity(P("tensor"), mesh=mesh_of(tensor=2)),
        r"passes its own mesh to jax.shard_map.*hint: leave mesh= out.*jax.set_mesh",
    ),
    "the pipeline's axis in a spec": (identity(P("stage")), "shards an array along 'stage'.*hint: leave 'stage' out"),
    "that without types": (identity(P("stage"), check_vma=False), "shards an array along 'stage'"),
    "that beside others": (identity(P("stage"), axis_names={"tensor"}), "shards an array along 'stage'"),
    "a permutation along it": (
        lambda w, h, _: h + mapped(lambda h: lax.ppermute(h, "stage", [(0, 1)]), P(), P(), "tensor", False)(h),
        "ppermute runs along 'stage' at tests",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_block_cannot_divide_is_refused_before_anything_is_compiled(case: str) -> None:
    block, message = WRONG[case]
    outer, layers = weights_of("tensor", 2)
    pipeline = pipeline_of("tensor", "zb-h1", mesh_of(stage=2, tensor=2), block=block)
    with pytest.raises(StructureError, match=f"(?s){message}"):
        jax.jit(pipeline).lower(outer, layers, batch_of())


def asserts_itself(w: Any, h: Any, _: Any) -> NoReturn:
    raise AssertionError


@pytest.mark.parametrize("is_own", [False, True])
def test_axes_are_named_where_jax_asserts_that_one_is_there(is_own: bool) -> None:
    inner = lambda w, h, _: mapped(lambda h: lax.psum(h, "tnesor"), P("tensor"), P(), "tensor", True)(h)  # noqa: E731
    outer, layers = weights_of("tensor", 2)
    mesh = mesh_of(stage=2, tensor=2)
    pipeline = pipeline_of("tensor", "zb-h1", mesh, block=asserts_itself if is_own else inner)
    for call in (jax.jit(pipeline), pipeline.report):
        with pytest.raises(AssertionError) as caught:
            call(outer, layers, batch_of())
        assert ("axes of the mesh: stage, tensor" in caught.value.__notes__) != is_own
