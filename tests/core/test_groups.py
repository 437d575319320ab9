"""Groups of layers that are computed again together: values, what is differentiated, and bytes."""

from __future__ import annotations

import dataclasses
import functools
import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import lowtide as lt
from lowtide.core import ConfigError, LayerStack, StructureError, leaves_with_paths
from lowtide.jaxprs import jaxpr_flops

DIM, LENGTH = 8, 7


def _block(layer: Any, h: Any, batch: Any) -> Any:
    """Something of which a part is no number to differentiate, and a part leads nowhere."""
    x = jnp.tanh(h["x"] @ layer["w"] + layer["b"][None]) * (1 + 0.1 * h["count"])
    x = x * jax.random.bernoulli(jax.random.fold_in(h["key"], h["count"]), 0.8, x.shape)
    return {**h, "x": x, "count": h["count"] + layer["step"], "unused": h["unused"] * layer["b"][0]}


STACK = LayerStack(
    first=lambda outer, batch: {
        "x": batch["x"] * outer["scale"],
        "count": jnp.int32(0),
        "key": batch["key"],
        "unused": jnp.ones(3),
    },
    block=_block,
    last=lambda outer, h, batch: (jnp.mean((h["x"] * outer["scale"] - batch["y"]) ** 2), {"count": h["count"]}),
)


def parameters() -> tuple[Any, Any, Any]:
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    layers = {"w": draw(LENGTH, DIM, DIM) / 2, "b": draw(LENGTH, DIM), "step": jnp.arange(LENGTH) % 2}
    return {"scale": jnp.float32(1.5)}, layers, {"x": draw(8, DIM), "y": draw(8, DIM), "key": jax.random.key(3)}


def gradients(size: int, wrt: str, stack: LayerStack = STACK) -> Any:
    def loss(model: Any, batch: Any) -> Any:
        return stack.apply(model["outer"], model["layers"], batch, remat=True, layers_per_remat=size)[0]

    return lt.value_and_grad(loss, wrt)


def close(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, one), (_, other) in zip(leaves_with_paths(found), leaves_with_paths(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=5e-6, err_msg=path)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("size", "wrt"),
    [(2, "**/{w,b,scale}"), (3, "outer/**"), (3, "layers/w"), (LENGTH, "**/{w,b,scale}")],
)
def test_values_and_gradients_are_those_of_single_layers(size: int, wrt: str) -> None:
    outer, layers, batch = parameters()
    model = {"outer": outer, "layers": layers}
    found = jax.jit(gradients(size, wrt))(model, batch)
    close(found, jax.jit(gradients(1, wrt))(model, batch))
    assert all(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(found))
    metrics = STACK.apply(outer, layers, batch, remat=True, layers_per_remat=size)[1]
    assert metrics["count"] == jnp.sum(layers["step"])


@pytest.mark.slow
def test_what_a_block_closes_over_is_differentiated_also_twice_and_for_many() -> None:
    _, layers, batch = parameters()

    def loss(gain: Any, size: int) -> Any:
        stack = LayerStack(
            first=lambda outer, batch: batch["x"],
            block=lambda layer, h, batch: jnp.tanh(h @ layer["w"]) * gain,
            last=lambda outer, h, batch: (jnp.sum(h**2), {}),
        )
        return stack.apply({}, {"w": layers["w"]}, batch, remat=True, layers_per_remat=size)[0]

    for derivative in (jax.grad(loss), jax.grad(jax.grad(loss))):
        of_many = jax.jit(jax.vmap(derivative, in_axes=(0, None)), static_argnums=1)
        close(of_many(jnp.array([0.5, 0.9, 1.2]), 3), of_many(jnp.array([0.5, 0.9, 1.2]), 1))


def _of_rows(w: Any, batch: Any, size: int, **products: Any) -> Any:
    stack = LayerStack(
        first=lambda outer, batch: batch["x"],
        block=lambda layer, h, batch: jnp.tanh(jnp.einsum("bi,ij->bj", h, layer["w"], **products)),
        last=lambda outer, h, batch: (jnp.mean((h - batch["y"]) ** 2), {}),
    )
    return stack.apply({}, {"w": w}, batch, remat=True, layers_per_remat=size)[0]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("is_inside", [False, True], ids=["gradient around", "gradient inside"])
def test_rows_are_divided_by_a_shard_map(is_inside: bool) -> None:
    _, layers, batch = parameters()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def local(w: Any, batch: Any) -> Any:
        return jax.lax.pmean(_of_rows(w, batch, 3), "data")

    specs: dict[str, Any] = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": P()}
    rows = {name: batch[name] for name in ("x", "y")}
    if is_inside:
        divided = jax.shard_map(jax.grad(local), **specs)
    else:
        divided = jax.grad(jax.shard_map(local, **specs))
    close(jax.jit(divided)(layers["w"], rows), jax.grad(_of_rows)(layers["w"], rows, 1))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("spec", [P(), P(None, "data"), P(None, None, "data")])
def test_gradients_are_divided_as_parameters_are_on_a_mesh_with_explicit_axes(spec: Any) -> None:
    _, layers, batch = parameters()
    rows = {name: batch[name] for name in ("x", "y")}
    wanted = jax.grad(_of_rows)(layers["w"], rows, 1)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        w = jax.device_put(layers["w"], NamedSharding(mesh, spec))
        rows = jax.device_put(rows, NamedSharding(mesh, P("data")))
        fn = functools.partial(_of_rows, size=3, out_sharding=P("data", None))
        found = jax.jit(jax.grad(fn))(w, rows)
    assert found.sharding.is_equivalent_to(w.sharding, 3)
    close(found, wanted)


def _convolutions(layer: Any, h: Any, batch: Any) -> Any:
    y = jax.lax.conv_general_dilated(h, layer["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    y = (y - y.mean((0, 1, 2))[None, None, None]) * jax.lax.rsqrt(y.var((0, 1, 2)) + 1e-5)[None, None, None]
    return h + jax.nn.relu(y * layer["scale"][None, None, None])


def _recurrence(layer: Any, h: Any, batch: Any) -> Any:
    def cell(state: Any, x: Any) -> Any:
        state = jnp.tanh(x @ layer["input"] + state @ layer["hidden"])
        return state, state

    return h + jax.lax.scan(cell, jnp.zeros((h.shape[0], h.shape[2])), h.swapaxes(0, 1))[1].swapaxes(0, 1)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("block", "shapes", "h"),
    [
        (_convolutions, {"kernel": (3, 3, 4, 4), "scale": (4,)}, (2, 6, 6, 4)),
        (_recurrence, {"input": (DIM, DIM), "hidden": (DIM, DIM)}, (2, 5, DIM)),
    ],
    ids=["convolutions", "recurrence"],
)
def test_blocks_of_other_kinds(block: Any, shapes: dict[str, Any], h: Any) -> None:
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(0.4 * random.normal(size=shape), jnp.float32)  # noqa: E731
    model = {"outer": {}, "layers": {name: draw(5, *shape) for name, shape in shapes.items()}}
    stack = LayerStack(lambda outer, batch: batch, block, lambda outer, h, batch: (jnp.mean(h**2), {}))
    batch = draw(*h)
    close(
        jax.jit(gradients(2, "layers/**", stack))(model, batch), jax.jit(gradients(1, "layers/**", stack))(model, batch)
    )


@pytest.mark.parametrize("target", ["cpu", pytest.param("v5e", marks=[pytest.mark.tpu_aot, pytest.mark.slow])])
@pytest.mark.usefixtures("little_optimized")
def test_it_keeps_an_activation_of_each_group_and_of_the_layers_of_one_and_copies_no_parameters(target: str) -> None:
    stack = LayerStack(
        first=lambda outer, batch: batch,
        block=lambda layer, h, batch: jnp.sin(h @ layer["w"] + h @ layer["a"]),
        last=lambda outer, h, batch: (jnp.mean(h), {}),
    )

    def temporaries(size: int, length: int, rows: int, dim: int) -> int:
        layers = {name: jax.ShapeDtypeStruct((length, dim, dim), jnp.float32) for name in ("w", "a")}
        model, batch = {"outer": {}, "layers": layers}, jax.ShapeDtypeStruct((rows, dim), jnp.float32)
        program = lt.memory.compile(gradients(size, "layers/a", stack), model, batch, target=target)
        return program.report().device.temp_bytes

    activation = 2**16 * 256 * 4
    single, grouped = (temporaries(size, 36, 2**16, 256) for size in (1, 6))
    # 36 beside 6 + 6; of both a TPU has some in its vector memory.
    assert single - grouped > (23 if target == "cpu" else 11) * activation
    layer = 4096 * 4096 * 4
    single, grouped = (temporaries(size, 12, 64, 4096) for size in (1, 4))
    assert grouped < single + layer // 10


@pytest.mark.parametrize("size", [2, 4])
def test_it_computes_all_layers_but_the_last_of_each_group_once_more(size: int) -> None:
    rows, dim, length = 16, 64, 8
    stack = LayerStack(
        lambda outer, batch: batch, lambda layer, h, batch: h @ layer["w"], lambda o, h, b: (jnp.sum(h), {})
    )
    model: Any = {"outer": {}, "layers": {"w": jax.ShapeDtypeStruct((length, dim, dim), jnp.float32)}}
    batch = jax.ShapeDtypeStruct((rows, dim), jnp.float32)
    found = jaxpr_flops(jax.make_jaxpr(gradients(size, "layers/**", stack))(model, batch))
    product = 2 * rows * dim * dim * length  # one forward and two backward; the layer itself has nothing to recompute
    assert found / product == pytest.approx(3 + (size - 1) / size, rel=0.01)


@pytest.mark.parametrize("size", [0, -1, 8, True, 2.0, "2"])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"(?s)layers_per_remat.*an integer from 1 to 7.*hint: .*root .*, 3"):
        STACK.apply(*parameters(), remat=True, layers_per_remat=size)


@pytest.mark.parametrize("remat", [False, jax.checkpoint_policies.dots_saveable])
def test_groups_are_computed_again_as_a_whole(remat: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)groups of layers: remat must be True, not .*hint: leave layers_per_remat"
    ):
        STACK.apply(*parameters(), remat=remat, layers_per_remat=2)


def _closing_over(w: Any, batch: Any, size: int = 3) -> Any:
    """Blocks that read integers, booleans and keys of the batch, which they close over."""

    def block(layer: Any, h: Any, batch: Any) -> Any:
        noise = jax.random.normal(batch["key"], h.shape) * 0.1
        return jnp.tanh(h @ layer["w"]) + jnp.where(batch["mask"], batch["ids"], 0)[:, None] * 0.01 + noise

    stack = LayerStack(lambda outer, batch: batch["x"], block, lambda outer, h, batch: (jnp.sum(h**2), {}))
    return stack.apply({}, {"w": w}, batch, remat=True, layers_per_remat=size)[0]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "around",
    [
        jax.jit,
        jax.checkpoint,
        lambda fn: lambda w, b: jax.lax.scan(lambda total, one: (total + fn(w, one), None), 0.0, jax.tree.map(
            lambda x: jnp.stack([x, x]), b))[0],
        lambda fn: lambda w, b: jax.vmap(fn, (None, 0))(w, jax.tree.map(lambda x: jnp.stack([x, x]), b)).sum(),
        lambda fn: lambda w, b: jax.lax.cond(b["ids"][0] >= 0, fn, lambda w, b: 0.0, w, b),
    ],
    ids=["jit", "checkpoint", "microbatches", "vmap", "cond"],
)  # fmt: skip
def test_what_is_no_number_to_differentiate_may_be_closed_over_by_any_program(around: Any) -> None:
    _, layers, batch = parameters()
    batch = {"x": batch["x"], "ids": jnp.arange(8), "mask": jnp.arange(8) % 2 == 0, "key": jax.random.key(1)}
    single = functools.partial(_closing_over, size=1)
    close(jax.grad(around(_closing_over))(layers["w"], batch), jax.grad(around(single))(layers["w"], batch))


@pytest.mark.slow
def test_nothing_that_a_block_closes_over_stays() -> None:
    _, layers, _ = parameters()

    def step() -> None:
        held = jnp.ones((8, DIM))
        stack = LayerStack(lambda outer, batch: jnp.ones((8, DIM)), lambda layer, h, batch: h @ layer["w"] + held,
                           lambda outer, h, batch: (jnp.sum(h), {}))  # fmt: skip
        jax.grad(lambda w: stack.apply({}, {"w": w}, {}, remat=True, layers_per_remat=3)[0])(layers["w"])

    step()
    gc.collect()
    before = len(jax.live_arrays())
    step()
    gc.collect()
    assert len(jax.live_arrays()) <= before


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("target", "size"), [("cpu", 4), pytest.param("h100", 2, marks=pytest.mark.gpu_aot)])
def test_what_does_not_divide_keeps_nothing_for_longer(target: str, size: int) -> None:
    """Five layers. A group of one would be in loops of one round, which XLA takes apart."""

    def block(layer: Any, h: Any, batch: Any) -> Any:
        return h + jnp.sin(jnp.exp(h @ layer["up"])) @ layer["down"]

    stack = LayerStack(lambda outer, batch: batch, block, lambda outer, h, batch: (jnp.sum(jnp.sin(h @ outer)), {}))
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    layers = {"up": shape((5, 64, 512)), "down": shape((5, 512, 64))}
    model, batch = {"outer": shape((64, 1024)), "layers": layers}, shape((8192, 64))

    def temporaries(size: int) -> int:
        program = lt.memory.compile(gradients(size, "layers/**", stack), model, batch, target=target)
        return program.report().device.temp_bytes

    assert temporaries(size) < temporaries(1) + 8192 * 64 * 4


@pytest.mark.slow
def test_what_passes_all_layers_is_kept_once_and_has_no_gradient_where_it_is_frozen() -> None:
    def stack(is_carried: bool) -> LayerStack:
        def block(layer: Any, h: Any, batch: Any) -> Any:
            x, context = h if is_carried else (h, batch["context"])
            x = jnp.tanh(x @ layer["w"] + jnp.tanh(context @ layer["v"]))
            return (x, context) if is_carried else x

        return LayerStack(
            lambda outer, batch: (batch["x"], batch["context"]) if is_carried else batch["x"],
            block,
            lambda outer, h, batch: (jnp.sum((h[0] if is_carried else h) ** 2), {}),
        )

    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape) / 4, jnp.float32)  # noqa: E731
    model = {"outer": {}, "layers": {"w": draw(8, 32, 32), "v": draw(8, 32, 32)}}
    batch = {"x": draw(16, 32), "context": draw(16, 32)}
    carried, held = (gradients(4, "layers/w", stack(each)) for each in (True, False))
    close(jax.jit(carried)(model, batch), jax.jit(gradients(1, "layers/w", stack(True)))(model, batch))
    counts = [jaxpr_flops(jax.make_jaxpr(each)(model, batch)) for each in (carried, held)]
    assert counts[0] == pytest.approx(counts[1], rel=0.01)
    # Where it is differentiated, it has all layers' gradients.
    both = (jax.grad(lambda b, size: stack(True).apply({}, model["layers"], b, remat=True, layers_per_remat=size)[0])
            (batch, size) for size in (3, 1))  # fmt: skip
    close(*both)


def test_groups_move_parameters_from_the_host() -> None:
    outer, layers, batch = parameters()
    model = {"outer": outer, "layers": layers}
    on_host = lt.offload.to_host(model, "**/{w,scale}")
    assert on_host["layers"]["w"].sharding.memory_kind == "pinned_host"
    expected = jax.jit(gradients(3, "layers/b"))(model, batch)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(gradients(3, "layers/b"))(on_host, batch), expected)


def test_a_stack_of_no_layers_does_nothing() -> None:
    outer, layers, batch = parameters()
    none = jax.tree.map(lambda leaf: leaf[:0], layers)
    assert STACK.apply(outer, none, batch, remat=True)[1]["count"] == 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Checked:
    """A node that looks at what it is made of."""

    x: Any
    unread: Any

    def __post_init__(self) -> None:
        assert self.x.shape == self.unread.shape


def test_activations_may_be_nodes_that_check_themselves_on_a_mesh_with_explicit_axes() -> None:
    _, layers, batch = parameters()

    def loss(w: Any, size: int, **products: Any) -> Any:
        stack = LayerStack(
            lambda outer, batch: Checked(batch, batch * 2),
            lambda layer, h, batch: Checked(jnp.einsum("bi,ij->bj", h.x, layer["w"], **products), h.unread * 2),
            lambda outer, h, batch: (jnp.mean(jnp.tanh(h.x) ** 2), {}),
        )
        return stack.apply({}, {"w": w}, rows, remat=True, layers_per_remat=size)[0]

    rows = batch["x"]
    wanted = jax.grad(loss)(layers["w"], 1)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rows = jax.device_put(rows, NamedSharding(mesh, P("data")))
        fn = functools.partial(loss, size=3, out_sharding=P("data", None))
        close(jax.jit(jax.grad(fn))(jax.device_put(layers["w"], NamedSharding(mesh, P()))), wanted)


@pytest.mark.slow
def test_activations_may_begin_as_a_number_of_python_and_other_types_are_named() -> None:
    _, layers, _ = parameters()
    stack = LayerStack(
        lambda outer, batch: {"x": jnp.ones(DIM), "sum": 0.0},
        lambda layer, h, batch: {"x": jnp.tanh(layer["w"] @ h["x"]), "sum": h["sum"] + h["x"].sum()},
        lambda outer, h, batch: (h["sum"], {}),
    )
    model = {"outer": {}, "layers": {"w": layers["w"]}}
    close(gradients(3, "layers/w", stack)(model, {}), gradients(1, "layers/w", stack)(model, {}))
    other = dataclasses.replace(stack, block=lambda layer, h, batch: {"x": h["x"][:2], "sum": h["sum"]})
    for size in (1, 3):
        with pytest.raises(StructureError, match=r"x: a block returns a shape or dtype(.|\n)*float32\[\d\]"):
            gradients(size, "layers/w", other)(model, {})
