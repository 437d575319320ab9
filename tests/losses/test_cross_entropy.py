import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowtide import lora, losses, value_and_grad
from lowtide.core import ConfigError, StructureError
from lowtide.jaxprs import equations

B, T, D, V = 2, 13, 8, 20


LOSS = jax.jit(losses.chunked_cross_entropy, static_argnames=("chunk_size", "reduction", "ignore_index"))
GRAD = jax.jit(jax.grad(losses.chunked_cross_entropy))


def _case(dtype=jnp.float32):
    random = np.random.default_rng(0)
    h, head = (jnp.asarray(random.normal(size=shape).astype(dtype)) for shape in ((B, T, D), (V, D)))
    labels = random.integers(0, V, (B, T), np.int32)
    labels[0, 3] = labels[1, 12] = -100
    return h, head, jnp.asarray(labels)


def _dense(h, head, labels, reduction="mean"):
    """The loss, and its gradients in activations and head, from all logits in NumPy's float64."""
    h, head, labels = np.asarray(h, np.float64), np.asarray(head, np.float64), np.asarray(labels)
    logits, keep = h @ head.T, labels != -100
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    is_gold = np.arange(len(head)) == np.where(keep, labels, 0)[..., None]
    by = keep / (keep.sum() if reduction == "mean" else 1)
    dlogits = (probabilities - is_gold) * by[..., None]
    return -np.sum(np.log(probabilities[is_gold]) * by.ravel()), dlogits @ head, np.einsum("btv,btd->vd", dlogits, h)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("chunk_size", "reduction"),
    [
        *((4, "mean"), (1000, "mean"), (4, "sum")),
        pytest.param(1, "mean", marks=pytest.mark.slow),
    ],
)
def test_value_and_gradients_equal_the_dense_loss(chunk_size, reduction):
    h, head, labels = _case()
    want, *want_grads = _dense(h, head, labels, reduction)

    @jax.jit
    def ours(h, head):
        loss = functools.partial(losses.chunked_cross_entropy, chunk_size=chunk_size, reduction=reduction)
        with_gradients = jax.value_and_grad(lambda *a: 3 * loss(*a, labels), argnums=(0, 1))
        return with_gradients(h, head), loss(h, head, labels)

    (value, grads), alone = ours(h, head)
    np.testing.assert_allclose(value, 3 * want, rtol=2e-5, atol=1e-5)
    for one, other in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(one, 3 * other, rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(alone, want, rtol=1e-6)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("soft_cap", "z_loss"), [(2.0, 0.0), (None, 1e-2), (3.0, 1e-2)])
def test_logits_are_capped_and_held_near_one_partition(soft_cap, z_loss):
    h, head, labels = _case()

    def dense(h, head):
        logits = h @ head.T
        logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
        one = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
        one = one + z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
        return jnp.sum(jnp.where(labels == -100, 0, one)) / jnp.sum(labels != -100)

    options = {"chunk_size": 4, "soft_cap": soft_cap, "z_loss": z_loss}
    ours = jax.value_and_grad(lambda *a: losses.chunked_cross_entropy(*a, labels, **options), argnums=(0, 1))
    for one, other in zip(*(jax.tree.leaves(jax.jit(f)(h, head)) for f in (ours, DENSE(dense))), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


DENSE = functools.partial(jax.value_and_grad, argnums=(0, 1))


@pytest.mark.slow
def test_half_precision_inputs_reduce_in_float32():
    h, head, labels = _case(jnp.bfloat16)
    grad_fn = jax.value_and_grad(functools.partial(losses.chunked_cross_entropy, chunk_size=8), argnums=(0, 1))
    loss, (dh, dhead) = jax.jit(grad_fn)(h, head, labels)
    assert loss.dtype == jnp.float32
    assert (dh.dtype, dhead.dtype) == (jnp.bfloat16, jnp.bfloat16)
    want, *grads = _dense(h, head, labels)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    for got, exact in zip((dh, dhead), grads, strict=True):
        np.testing.assert_allclose(got.astype(jnp.float32), exact, atol=2**-7 * np.abs(exact).max())


def test_the_gradient_of_a_mean_keeps_its_scale_in_half_precision():
    h, head, labels = _case(jnp.bfloat16)
    labels = jnp.abs(labels) % V
    # 1 / 26 is no bfloat16 number: as a factor of that dtype it would shift every gradient the same way.
    total = jax.jit(jax.grad(functools.partial(losses.chunked_cross_entropy, reduction="sum")))(h, head, labels)
    mean = GRAD(h, head, labels)
    want = np.asarray(total, np.float32) * (1 / np.float32(labels.size))
    np.testing.assert_array_equal(mean, want.astype(mean.dtype))


def test_a_vector_of_positions_and_two_batch_axes_are_taken():
    h, head, labels = _case()
    one = losses.chunked_cross_entropy(h[0], head, labels[0])  # the one call without jit
    np.testing.assert_allclose(one, _dense(h[:1], head, labels[:1])[0], rtol=1e-6)
    two = LOSS(h[None], head, labels[None], chunk_size=6)
    np.testing.assert_allclose(two, _dense(h, head, labels)[0], rtol=1e-6)


def test_ignored_positions_get_no_gradient_and_an_ignored_batch_costs_nothing():
    h, head, labels = _case()
    dh = np.asarray(GRAD(h, head, labels))
    assert not dh[0, 3].any()
    assert dh[0, 2].any()
    assert LOSS(h, head, np.full_like(labels, -100)) == 0
    shifted = np.where(labels == -100, 7, labels)
    kept = LOSS(h, head, shifted, ignore_index=7)
    np.testing.assert_allclose(kept, _dense(h, head, np.where(shifted == 7, -100, labels))[0], rtol=1e-6)


@pytest.mark.parametrize("wrong", [V, V + 5, -1])
def test_a_label_outside_the_vocabulary_is_loud(wrong):
    h, head, labels = _case()
    labels = np.array(labels)
    labels[0, 0] = wrong
    loss, (dh, dhead) = jax.value_and_grad(LOSS, (0, 1))(h, head, labels)
    assert np.isnan(loss) and np.isnan(dhead).all()
    # Of other positions the gradients are what they were.
    assert np.isnan(dh[0, 0]).all() and np.isfinite(dh[0, 1:]).all() and np.isfinite(dh[1:]).all()


def test_a_frozen_head_gets_no_cotangent_even_eagerly():
    h, head, labels = _case()
    grad = jax.grad(functools.partial(losses.chunked_cross_entropy, chunk_size=4))
    jaxpr = jax.make_jaxpr(grad)(h, head, labels)
    made = [str(v.aval) for eqn in equations(jaxpr) for v in eqn.outvars]
    assert made
    assert f"float32[{V},{D}]" not in made


@pytest.mark.slow
def test_a_head_with_an_adapter_trains_the_adapter_only():
    h, head, labels = _case()
    model = lora.add({"head": {"weight": head}}, lora.Config(rank=2, targets="head"), key=jax.random.key(1))
    model["head"]["weight"] = jax.tree.map(lambda x: x + 0.1, model["head"]["weight"])
    weight = model["head"]["weight"]
    factors = (np.asarray(weight.lora_b), np.asarray(weight.lora_a))
    want, _, of_head = _dense(h, np.asarray(head) + (32 / 2) * factors[0] @ factors[1], labels)

    def loss_fn(model):
        return losses.chunked_cross_entropy(h, model["head"]["weight"], labels, chunk_size=6)

    loss, grads = jax.jit(value_and_grad(loss_fn, "**/lora_*"))(model)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(grads["head"]["weight"].lora_b, 16 * of_head @ factors[1].T, rtol=1e-4, atol=1e-6)


def test_no_recompile_on_the_second_call(compilations):
    h, head, labels = _case()
    GRAD(h, head, labels)
    with compilations.none():
        GRAD(h, head, labels)


def _large(device=None):
    sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)

    def shape(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    return shape(4, 1024, 64), shape(8192, 64), shape(4, 1024, dtype=jnp.int32)


@pytest.mark.parametrize("where", ["cpu", pytest.param("v5e", marks=[pytest.mark.tpu_aot, pytest.mark.slow])])
@pytest.mark.usefixtures("little_optimized")
def test_no_program_holds_all_logits(where, request):
    args = _large(request.getfixturevalue("tpu_device") if where == "v5e" else None)
    logits_bytes = 4 * 1024 * 8192 * 4
    grad = jax.jit(jax.value_and_grad(losses.chunked_cross_entropy, argnums=(0, 1)), static_argnames="chunk_size")

    def temp_bytes(chunk_size):
        return grad.lower(*args, chunk_size=chunk_size).compile().memory_analysis().temp_size_in_bytes

    assert temp_bytes(512) < logits_bytes / 2
    if where == "cpu":  # the measure sees logits where they are
        assert logits_bytes / 2 < temp_bytes(4096)


@pytest.mark.parametrize("argnums", [0, (0, 1)])
def test_a_bfloat16_head_is_multiplied_as_it_is(argnums):
    h, head = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 64, 256), (8192, 256)))
    labels = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    text = jax.jit(jax.grad(losses.chunked_cross_entropy, argnums)).lower(h, head, labels).as_text()
    products = re.findall(r"dot_general.*: \((.*)\) ->", text)
    assert len(products) == (2 if argnums == 0 else 3)
    assert all(product.count("xbf16>") == 2 for product in products)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("axes", "argnums"), [(("data", None, None), (0, 1)), (("data", None, "model"), 0)])
def test_axes_of_the_mesh_may_be_explicit(axes, argnums):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    h, head, labels = _case()
    want = jax.grad(losses.chunked_cross_entropy, argnums)(h, head, labels)
    specs = jax.P(axes[0], None, None), jax.P(None, axes[2]), jax.P(axes[0])
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip((h, head, labels), specs, strict=True)
        ]
        got = jax.jit(jax.grad(losses.chunked_cross_entropy, argnums))(*placed)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.slow
def test_a_loss_inside_of_a_shard_map_has_the_gradients_of_the_whole():
    h, head, labels = _case()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    specs = (jax.P("data"), jax.P(), jax.P("data"))

    def local(h, head, labels):
        return jax.lax.psum(losses.chunked_cross_entropy(h, head, labels, reduction="sum", chunk_size=4), "data")

    ours = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P())
    dense = functools.partial(losses.chunked_cross_entropy, reduction="sum")
    both = [jax.jit(jax.value_and_grad(each, argnums=(0, 1)))(h, head, labels) for each in (ours, dense)]
    for one, other in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)


def test_bad_input_is_refused_by_name():
    h, head, labels = _case()
    with pytest.raises(StructureError, match=r"h and labels must have .*, not \(2, 13, 8\) and \(2, 12\)"):
        losses.chunked_cross_entropy(h, head, labels[:, 1:])
    with pytest.raises(StructureError, match=r"h and labels must have .* T at least 1, not \(2, 0, 8\) and \(2, 0\)"):
        losses.chunked_cross_entropy(h[:, :0], head, labels[:, :0])
    with pytest.raises(StructureError, match=r"head must have shape \[V, 8\] .*, not \(8, 20\)\nhint: transpose"):
        losses.chunked_cross_entropy(h, head.T, labels)
    with pytest.raises(
        StructureError, match=r"labels must have an integer dtype, not float32\nhint: pass class indices"
    ):
        losses.chunked_cross_entropy(h, head, labels.astype(jnp.float32))
    with pytest.raises(ConfigError, match=r"chunk_size must be an integer of at least 1, not 0\nhint:"):
        losses.chunked_cross_entropy(h, head, labels, chunk_size=0)
    with pytest.raises(ConfigError, match='reduction must be "mean" or "sum", not \'avg\''):
        losses.chunked_cross_entropy(h, head, labels, reduction="avg")
    for each in (jnp.int32, jnp.complex64):
        with pytest.raises(StructureError, match=rf"h must have a floating-point dtype, not {jnp.dtype(each)}\nhint:"):
            losses.chunked_cross_entropy(jnp.ones(h.shape, each), head, labels)
    for each in (jnp.bool_, jnp.complex64):
        with pytest.raises(
            StructureError, match=rf"head must have a floating-point or integer dtype, not {jnp.dtype(each)}\nhint:"
        ):
            losses.chunked_cross_entropy(h, jnp.ones(head.shape, each), labels)
    losses.chunked_cross_entropy(h, jnp.ones(head.shape, jnp.int8), labels, ignore_index=-(2**31))
    with pytest.raises(StructureError, match=r"V at least 1, not \(0, 8\)\nhint:"):
        losses.chunked_cross_entropy(h, head[:0], labels)
    for arrays in (([1.0], head, labels), (h, [[1.0]], labels), (h, head, [1, 2])):
        with pytest.raises(StructureError, match=r"must be an array, not list\nhint:"):
            losses.chunked_cross_entropy(*arrays)
    for option in ({"ignore_index": None}, {"ignore_index": 1.5}, {"ignore_index": 2**40}):
        with pytest.raises(ConfigError, match=r"ignore_index must be an integer from (.|\n)*hint:"):
            losses.chunked_cross_entropy(h, head, labels, **option)
    with pytest.raises(ConfigError, match=r"chunk_size must be an integer of at least 1, not 2.5\nhint:"):
        losses.chunked_cross_entropy(h, head, labels, chunk_size=2.5)
    for option in (
        {"soft_cap": 0.0},
        {"soft_cap": True},
        {"z_loss": True},
        {"z_loss": -1e-4},
        {"z_loss": float("nan")},
        {"z_loss": "1e-4"},
    ):
        with pytest.raises(ConfigError, match=rf"{next(iter(option))} must be a finite number(.|\n)*hint:"):
            losses.chunked_cross_entropy(h, head, labels, **option)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("dtype", "size"), [("uint8", 256), ("uint8", 300), ("int8", 200), ("int16", 40000)])
def test_labels_of_few_bits_are_those_of_many(dtype, size):
    rng = np.random.default_rng(0)
    h, head = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 8, 4), (size, 4)))
    labels = jnp.asarray(rng.integers(0, 100, (2, 8)), jnp.int32)
    np.testing.assert_allclose(LOSS(h, head, labels.astype(dtype)), LOSS(h, head, labels), rtol=1e-6)
