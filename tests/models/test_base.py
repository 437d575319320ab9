"""The model embedded in the package is small, really trained, and what its record says."""

import argparse
import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide.models import base_path, generate, load, load_tokenizer, loss


def test_it_stays_below_four_megabytes_and_its_record_is_true():
    assert (base_path() / "model.safetensors").stat().st_size <= 4_000_000
    record = json.loads((base_path() / "training.json").read_text())
    model = load(base_path())
    assert record["num_parameters"] == sum(leaf.size for leaf in jax.tree.leaves(model))
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype("bfloat16")}
    assert record["held_out_loss_nats_per_token"] < 3.0


@pytest.mark.slow
def test_it_has_learned_the_standard_library():
    model, tokenizer = load(base_path()), load_tokenizer(base_path())
    ids = tokenizer.encode(inspect.getsource(argparse)).ids
    rows = np.asarray(ids[: 16 * 129], np.int32).reshape(16, 129)
    value, _ = loss(model, {"tokens": jnp.asarray(rows[:, :-1]), "labels": jnp.asarray(rows[:, 1:])})
    shuffled = np.random.default_rng(0).permutation(rows.ravel()).reshape(rows.shape)
    noise, _ = loss(model, {"tokens": jnp.asarray(shuffled[:, :-1]), "labels": jnp.asarray(shuffled[:, 1:])})
    assert value < 3.2 < 5.5 < noise


@pytest.mark.slow
def test_it_completes_code():
    model, tokenizer = load(base_path()), load_tokenizer(base_path())
    prompt = "class Error(Exception):\n    def __init__(self"
    tokens = generate(model, jnp.asarray(tokenizer.encode(prompt).ids), 4, key=jax.random.key(0), temperature=0.0)
    assert tokenizer.decode(np.asarray(tokens).tolist()).startswith(prompt + ", ")
