"""One transformer, written with four libraries and run in every way: its adapters' gradients are the same."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lowtide as lt
from lowtide.core import leaves_with_paths, map_with_paths

KEY = jax.random.key(0)
VOCAB, WIDTH, HEADS, LAYERS, RANK = 16, 8, 2, 4, 2
NAMES = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "o": (WIDTH, WIDTH)}
NAMES |= {"up": (2 * WIDTH, WIDTH), "down": (WIDTH, 2 * WIDTH)}
"""Weights of a layer, [out, in]."""
BATCH = {name: jax.random.randint(jax.random.key(i), (8, 6), 0, VOCAB) for i, name in enumerate(("x", "y"))}


@pytest.fixture(autouse=True)
def rank_promotion() -> Any:
    """Flax and Keras add their biases by rank promotion."""
    with jax.numpy_rank_promotion("allow"):
        yield


def drawn(name: str, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(sum(name.encode()) + len(shape)).normal(size=shape) / 3, jnp.float32)


OUTER = {"embedding": drawn("embedding", VOCAB, WIDTH), "head": drawn("head", WIDTH, VOCAB)}
DENSE = {name: drawn(name, LAYERS, *shape) for name, shape in NAMES.items()}
A = {name: drawn(f"{name}a", LAYERS, RANK, shape[1]) for name, shape in NAMES.items()}
B = {name: drawn(f"{name}b", LAYERS, shape[0], RANK) / 2 for name, shape in NAMES.items()}


def computed(h: Any, times: Callable[[str, Any], Any]) -> Any:
    """One layer, of functions that multiply by its weights."""
    q, k, v = (times(name, h).reshape(*h.shape[:-1], HEADS, -1) for name in ("q", "k", "v"))
    scores = jax.nn.softmax(jnp.einsum("...thd,...shd->...hts", q, k), axis=-1)
    h = h + times("o", jnp.einsum("...hts,...shd->...thd", scores, v).reshape(h.shape))
    return h + times("down", jax.nn.gelu(times("up", h)))


def first(outer: Any, batch: Any) -> Any:
    return outer["embedding"][batch["x"]]


def block(layer: Any, h: Any, batch: Any) -> Any:
    return computed(h, lambda name, x: jnp.einsum("...i,oi->...o", x, layer[name]))


def last(outer: Any, h: Any, batch: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(h @ outer["head"], batch["y"]).mean(), {}


def plain(params: Any, batch: Any) -> Any:
    h = first(params["outer"], batch)
    h, _ = jax.lax.scan(lambda h, layer: (block(layer, h, batch), None), h, params["layers"])
    return last(params["outer"], h, batch)[0]


def recomputed(params: Any, batch: Any) -> Any:
    step = jax.checkpoint(lambda h, layer: (block(layer, h, batch), None))
    h, _ = jax.lax.scan(step, first(params["outer"], batch), params["layers"])
    return last(params["outer"], h, batch)[0]


@functools.cache
def model() -> Any:
    """Of arrays, with the adapters above."""
    base = {"outer": OUTER, "layers": DENSE}
    config = lt.lora.Config(rank=RANK, alpha=RANK, targets="layers/*")
    adapted = lt.lora.add(base, config, key=KEY, fn=plain, args=(BATCH,))
    return filled(adapted, lambda path: path.split("/")[1])


def filled(adapted: Any, name_of: Callable[[str], str]) -> Any:
    values = {"lora_a": A, "lora_b": B}
    return map_with_paths(lambda path, leaf: values[path[-6:]][name_of(path)] if path[-6:] in values else leaf, adapted)


def merged_loss(params: Any, batch: Any) -> Any:
    return plain({**params, "layers": lt.lora.merge(params["layers"])}, batch)


@pytest.fixture(scope="module")
def expected() -> Any:
    """Loss and gradients over W + BA, as plain JAX has them."""
    return jax.jit(lt.value_and_grad(merged_loss, "**/lora_*"))(model(), BATCH)


def assert_equal(found: Any, expected: Any) -> None:
    pairs = zip(leaves_with_paths(found), leaves_with_paths(expected), strict=True)
    for (path, one), (_, other) in pairs:
        scale = float(np.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * max(1.0, scale), err_msg=path)
        assert scale > 0, path


@pytest.mark.slow
@pytest.mark.parametrize("fn", [plain, recomputed])
def test_scan_and_checkpoint(fn: Any, expected: Any) -> None:
    """Programs without jit: `tests/adapters/test_adapted.py`."""
    assert_equal(jax.jit(lt.value_and_grad(lt.adapted(fn), "**/lora_*"))(model(), BATCH), expected)


@pytest.mark.slow
def test_vmap_over_adapters(expected: Any) -> None:
    one = model()
    two = lambda leaf: np.stack([np.zeros_like(leaf), np.asarray(leaf)])  # noqa: E731
    several = map_with_paths(lambda path, leaf: two(leaf) if "lora_" in path else leaf, one)
    axes = map_with_paths(lambda path, leaf: 0 if "lora_" in path else None, one)
    of_several = jax.vmap(lt.value_and_grad(lt.adapted(plain), "**/lora_*"), in_axes=(axes, None))
    grads = jax.jit(of_several)(several, BATCH)
    assert_equal(jax.tree.map(lambda leaf: np.asarray(leaf)[1], grads), expected)


@pytest.mark.slow
def test_eight_devices(expected: Any) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, rows = (jax.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P("data")))
    placed, batch = jax.device_put(model(), whole), jax.device_put(BATCH, rows)
    assert_equal(jax.jit(lt.value_and_grad(lt.adapted(plain), "**/lora_*"))(placed, batch), expected)


STACK = lt.LayerStack(first, lt.adapted(block), last)


@pytest.mark.slow
def test_a_pipeline(expected: Any) -> None:
    mesh = jax.make_mesh((4,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
    schedule = lt.pipeline.schedule("zb-h1", num_stages=4, num_microbatches=4)
    of_pipeline = lt.pipeline.value_and_grad(STACK, schedule, mesh=mesh, axis="stage", wrt="layers/**/lora_*")
    params = model()
    (loss, _), (_, layers) = of_pipeline(params["outer"], params["layers"], BATCH)
    assert_equal((loss, layers), (expected[0], expected[1]["layers"]))


@pytest.mark.slow
def test_a_layerwise_step(expected: Any) -> None:
    """Of SGD with a rate of 1 the update is the gradient."""
    params = jax.tree.map(jnp.array, model())
    before = jax.tree.map(np.asarray, params)
    step = lt.offload.layerwise_step(STACK, optax.sgd(1.0), wrt="layers/**/lora_*", place={"layers": "device"})
    state, frozen = step.init(params["outer"], params["layers"])
    state, metrics = jax.jit(step)(state, frozen, BATCH)
    after = dict(leaves_with_paths(state.layers))
    moved = map_with_paths(lambda path, old: old - after[path] if "lora_" in path else None, before["layers"])
    assert_equal(moved, expected[1]["layers"])
    assert float(metrics["loss"]) == pytest.approx(float(expected[0]), rel=1e-6)


class Library(NamedTuple):
    """The model of a library: its weights, a loss of them, which are adapted, and of a path layer and name."""

    params: Any
    loss: Callable[..., Any]
    targets: Any
    site_of: Callable[[str], tuple[int, str]]
    is_turned: bool
    """Whether its weights are [in, out]."""


class EquinoxLayer(eqx.Module):
    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    o: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __call__(self, h: Any) -> Any:
        return computed(h, lambda name, x: jax.vmap(getattr(self, name))(x))


def of_equinox() -> Library:
    def linear(layer: int, name: str) -> Any:
        out, inner = NAMES[name]
        module = eqx.nn.Linear(inner, out, use_bias=False, key=KEY)
        return eqx.tree_at(lambda module: module.weight, module, DENSE[name][layer])

    layers = [EquinoxLayer(**{name: linear(i, name) for name in NAMES}) for i in range(LAYERS)]

    def loss(layers: Any, batch: Any) -> Any:
        h = first(OUTER, batch)
        for layer in layers:
            h = jax.vmap(layer)(h)
        return last(OUTER, h, batch)[0]

    return Library(layers, loss, "**/weight", lambda path: (int(path.split("/")[0]), path.split("/")[1]), False)


class NnxLayer(nnx.Module):
    def __init__(self, layer: int) -> None:
        for name, (out, inner) in NAMES.items():
            module = nnx.Linear(inner, out, use_bias=False, rngs=nnx.Rngs(0))
            module.kernel[...] = DENSE[name][layer].T
            setattr(self, name, module)

    def __call__(self, h: Any) -> Any:
        return computed(h, lambda name, x: getattr(self, name)(x))


def of_nnx() -> Library:
    graph, state = nnx.split(nnx.Sequential(*(NnxLayer(i) for i in range(LAYERS))))

    def loss(params: Any, batch: Any) -> Any:
        own = nnx.state(nnx.merge(graph, state))
        nnx.replace_by_pure_dict(own, params)
        return last(OUTER, nnx.merge(graph, own)(first(OUTER, batch)), batch)[0]

    params = nnx.to_pure_dict(state)
    return Library(params, loss, "**/kernel", lambda path: (int(path.split("/")[1]), path.split("/")[2]), True)


def of_keras() -> Library:
    import keras

    layers = [{name: keras.layers.Dense(NAMES[name][0], use_bias=False) for name in NAMES} for _ in range(LAYERS)]
    params: dict[str, Any] = {}
    for i, layer in enumerate(layers):
        for name, module in layer.items():
            module.build((None, NAMES[name][1]))
            params[f"{i}:{name}"] = DENSE[name][i].T

    def loss(params: Any, batch: Any) -> Any:
        h = first(OUTER, batch)
        for i, layer in enumerate(layers):
            h = computed(
                h, lambda name, x, i=i, layer=layer: layer[name].stateless_call([params[f"{i}:{name}"]], [], x)[0]
            )
        return last(OUTER, h, batch)[0]

    return Library(params, loss, "*", lambda path: (int(path[0]), path.split("/")[0].split(":")[1]), True)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("make", [of_equinox, of_nnx, of_keras])
def test_a_library_has_the_gradients_of_plain_functions(make: Any, expected: Any) -> None:
    library: Library = make()
    config = lt.lora.Config(rank=RANK, alpha=RANK, targets=library.targets)
    adapted = lt.lora.add(library.params, config, key=KEY, fn=library.loss, args=(BATCH,))

    def factor(path: str, leaf: Any) -> Any:
        if "lora_" not in path:
            return leaf
        layer, name = library.site_of(path)
        is_a = path.endswith("lora_a") != library.is_turned
        value = (A if is_a else B)[name][layer]
        return value.T if library.is_turned else value

    adapted = map_with_paths(factor, adapted)
    loss, grads = jax.jit(lt.value_and_grad(lt.adapted(library.loss), "**/lora_*"))(adapted, BATCH)
    assert float(loss) == pytest.approx(float(expected[0]), rel=1e-6)
    for path, grad in leaves_with_paths(grads):
        layer, name = library.site_of(path)
        node = expected[1]["layers"][name]
        is_a = path.endswith("lora_a") != library.is_turned
        other = (node.lora_a if is_a else node.lora_b)[layer]
        assert_equal({path: grad.T if library.is_turned else grad}, {path: other})
