import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide as lt
from lowtide.core import ConfigError, StructureError
from lowtide.models import loss
from tests.models.tiny_llama import CONFIG, LOGITS, LOSS, loss_fn, make_batch, make_model


@pytest.mark.slow
def test_the_loss_is_the_cross_entropy_of_the_logits():
    model, batch = make_model(), make_batch()
    of_tokens = np.asarray(LOGITS(model, batch["tokens"]), np.float64)
    gold = np.take_along_axis(of_tokens, np.asarray(batch["labels"])[..., None], axis=-1)[..., 0]
    want = np.mean(np.log(np.exp(of_tokens).sum(-1)) - gold)
    np.testing.assert_allclose(LOSS(model, batch), want, rtol=1e-6)


def test_a_later_token_never_changes_an_earlier_logit():
    model, batch = make_model(), make_batch()
    before = LOGITS(model, batch["tokens"])
    after = LOGITS(model, batch["tokens"].at[:, 5].add(1))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert not np.allclose(before[:, 5:], after[:, 5:])


@functools.cache
def _all_gradients():
    return jax.value_and_grad(loss_fn)(make_model(), make_batch())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("wrt", ["layers/attn/q_proj/**", "outer/embed/*", "layers/**"])
def test_selected_gradients_equal_jax_bit_for_bit(wrt):
    want_value, want = _all_gradients()
    value, grads = lt.value_and_grad(loss_fn, wrt)(make_model(), make_batch())
    selected, _ = lt.partition(want, wrt)
    assert value == want_value
    assert jax.tree.structure(grads) == jax.tree.structure(selected)
    jax.tree.map(np.testing.assert_array_equal, grads, selected)


def test_impossible_sizes_are_refused():
    with pytest.raises(ConfigError, match="num_kv_heads must be a divisor of num_heads = 4, not 3"):
        dataclasses.replace(CONFIG, num_kv_heads=3)
    with pytest.raises(ConfigError, match=r"head_dim and its rotated part must be even, not 5 and 5(.|\n)*hint:"):
        dataclasses.replace(CONFIG, head_dim=5)
    with pytest.raises(ConfigError, match="num_layers must be an integer of at least 1, not 0"):
        dataclasses.replace(CONFIG, num_layers=0)


def test_an_embedding_that_cannot_look_rows_up_is_refused_by_name():
    model = make_model()
    node = lt.lora.IA3Weight(model.outer["embed"]["weight"], jnp.ones(CONFIG.vocab_size))
    model = dataclasses.replace(model, outer={**model.outer, "embed": {"weight": node}})
    with pytest.raises(StructureError, match=r"outer/embed: an embedding lookup needs .*, not IA3Weight\nhint:"):
        loss(model, make_batch())
