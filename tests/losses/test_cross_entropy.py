import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide import lora, losses
from lowtide.core import ConfigError, StructureError

B, T, D, V = 2, 13, 8, 20


def _case(dtype=jnp.float32, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    h = jax.random.normal(keys[0], (B, T, D)).astype(dtype)
    head = jax.random.normal(keys[1], (V, D)).astype(dtype)
    labels = jax.random.randint(keys[2], (B, T), 0, V)
    return h, head, labels.at[0, 3].set(-100).at[1, 12].set(-100)


def _dense(h, head, labels, reduction="mean"):
    logits = h.astype(jnp.float32) @ head.astype(jnp.float32).T
    keep = labels != -100
    gold = jnp.take_along_axis(logits, jnp.where(keep, labels, 0)[..., None], axis=-1)[..., 0]
    total = jnp.sum(jnp.where(keep, jax.nn.logsumexp(logits, axis=-1) - gold, 0.0))
    return total / jnp.sum(keep) if reduction == "mean" else total


@pytest.mark.parametrize("chunk_size", [4, 10, 1000, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 26))])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_value_and_gradients_equal_the_dense_loss(chunk_size, reduction):
    h, head, labels = _case()

    def ours(h, head):
        return losses.chunked_cross_entropy(h, head, labels, chunk_size=chunk_size, reduction=reduction)

    got = jax.jit(jax.value_and_grad(lambda *a: 3 * ours(*a), argnums=(0, 1)))(h, head)
    want = jax.value_and_grad(lambda *a: 3 * _dense(*a, labels, reduction), argnums=(0, 1))(h, head)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), got, want)
    np.testing.assert_allclose(ours(h, head), _dense(h, head, labels, reduction), rtol=1e-6)


def test_half_precision_inputs_reduce_in_float32():
    h, head, labels = _case(jnp.bfloat16)
    loss, (dh, dhead) = jax.value_and_grad(losses.chunked_cross_entropy, argnums=(0, 1))(h, head, labels, chunk_size=8)
    assert loss.dtype == jnp.float32
    assert (dh.dtype, dhead.dtype) == (jnp.bfloat16, jnp.bfloat16)
    np.testing.assert_allclose(loss, _dense(h, head, labels), rtol=1e-5)


def test_the_gradient_of_a_mean_keeps_its_scale_in_half_precision():
    h, head, labels = _case(jnp.bfloat16)
    labels = jnp.abs(labels)
    # 1 / 26 is no bfloat16 number: as a factor of that dtype it would shift every gradient the same way.
    total = jax.grad(functools.partial(losses.chunked_cross_entropy, reduction="sum"))(h, head, labels)
    mean = jax.grad(losses.chunked_cross_entropy)(h, head, labels)
    np.testing.assert_array_equal(mean, (total.astype(jnp.float32) * (1 / jnp.float32(labels.size))).astype(mean.dtype))


def test_a_vector_of_positions_and_two_batch_axes_are_taken():
    h, head, labels = _case()
    one = losses.chunked_cross_entropy(h[0], head, labels[0])
    np.testing.assert_allclose(one, _dense(h[:1], head, labels[:1]), rtol=1e-6)
    np.testing.assert_allclose(
        losses.chunked_cross_entropy(h[None], head, labels[None], chunk_size=6), _dense(h, head, labels), rtol=1e-6
    )


def test_ignored_positions_get_no_gradient_and_an_ignored_batch_costs_nothing():
    h, head, labels = _case()
    dh = jax.grad(losses.chunked_cross_entropy)(h, head, labels)
    assert not dh[0, 3].any()
    assert dh[0, 2].any()
    assert losses.chunked_cross_entropy(h, head, jnp.full_like(labels, -100)) == 0
    shifted = jnp.where(labels == -100, 7, labels)
    kept = losses.chunked_cross_entropy(h, head, jnp.where(shifted == 7, 7, labels), ignore_index=7)
    np.testing.assert_allclose(kept, _dense(h, head, jnp.where(shifted == 7, -100, labels)), rtol=1e-6)


@pytest.mark.parametrize("wrong", [V, V + 5, -1])
def test_a_label_outside_the_vocabulary_is_loud(wrong):
    h, head, labels = _case()
    assert jnp.isnan(losses.chunked_cross_entropy(h, head, labels.at[0, 0].set(wrong)))


def test_a_frozen_head_gets_no_cotangent_even_eagerly():
    h, head, labels = _case()
    grad = jax.grad(functools.partial(losses.chunked_cross_entropy, chunk_size=4))
    jaxpr = jax.make_jaxpr(grad)(h, head, labels)
    made = [str(v.aval) for eqn in _equations(jaxpr.jaxpr) for v in eqn.outvars]
    assert made
    assert f"float32[{V},{D}]" not in made


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for param in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "jaxpr") or hasattr(p, "eqns")):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def test_a_head_with_an_adapter_trains_the_adapter_only():
    h, head, labels = _case()
    model = lora.add({"head": {"weight": head}}, lora.Config(rank=2, targets="head"), key=jax.random.key(1))
    model["head"]["weight"] = jax.tree.map(lambda x: x + 0.1, model["head"]["weight"])
    weight = model["head"]["weight"]
    dense = weight.weight + (32 / 2) * weight.lora_b @ weight.lora_a
    loss = losses.chunked_cross_entropy(h, weight, labels, chunk_size=6)
    np.testing.assert_allclose(loss, _dense(h, dense, labels), rtol=1e-5)
    from lowtide import value_and_grad

    def loss_fn(model):
        return losses.chunked_cross_entropy(h, model["head"]["weight"], labels, chunk_size=6)

    _, grads = value_and_grad(loss_fn, "**/lora_*")(model)
    want = jax.grad(lambda b: _dense(h, weight.weight + 16 * b @ weight.lora_a, labels))(weight.lora_b)
    np.testing.assert_allclose(grads["head"]["weight"].lora_b, want, rtol=1e-4, atol=1e-6)


def test_no_recompile_on_the_second_call(compilations):
    h, head, labels = _case()
    step = jax.jit(jax.grad(losses.chunked_cross_entropy))
    step(h, head, labels)
    with compilations.none():
        step(h, head, labels)


def _large(device=None):
    sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)

    def shape(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    return shape(4, 1024, 64), shape(8192, 64), shape(4, 1024, dtype=jnp.int32)


@pytest.mark.parametrize("where", ["cpu", pytest.param("v5e", marks=[pytest.mark.tpu_aot, pytest.mark.slow])])
def test_no_program_holds_all_logits(where, request):
    args = _large(request.getfixturevalue("tpu_device") if where == "v5e" else None)
    logits_bytes = 4 * 1024 * 8192 * 4
    grad = jax.jit(jax.value_and_grad(losses.chunked_cross_entropy, argnums=(0, 1)), static_argnames="chunk_size")
    chunked = grad.lower(*args, chunk_size=512).compile().memory_analysis().temp_size_in_bytes
    whole = grad.lower(*args, chunk_size=4096).compile().memory_analysis().temp_size_in_bytes
    assert chunked < logits_bytes / 2 < whole


def test_bad_input_is_refused_by_name():
    h, head, labels = _case()
    with pytest.raises(StructureError, match=r"activations and labels do not fit(.|\n)*hint:"):
        losses.chunked_cross_entropy(h, head, labels[:, 1:])
    with pytest.raises(StructureError, match=r"activations and labels do not fit(.|\n)*T at least 1(.|\n)*hint:"):
        losses.chunked_cross_entropy(h[:, :0], head, labels[:, :0])
    with pytest.raises(StructureError, match=r"activations and head do not fit(.|\n)*\[V, 8\](.|\n)*hint:.*transpose"):
        losses.chunked_cross_entropy(h, head.T, labels)
    with pytest.raises(StructureError, match=r"labels have to be integers(.|\n)*hint:"):
        losses.chunked_cross_entropy(h, head, labels.astype(jnp.float32))
    with pytest.raises(ConfigError, match=r"chunk_size=0(.|\n)*hint:"):
        losses.chunked_cross_entropy(h, head, labels, chunk_size=0)
    with pytest.raises(ConfigError, match=r"reduction='avg'(.|\n)*hint:"):
        losses.chunked_cross_entropy(h, head, labels, reduction="avg")
