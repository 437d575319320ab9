"""The decoder's switches without other libraries: packing, windows, blocks of queries, one stack for all rooms."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide import models
from lowtide.core import ConfigError, SelectionError, leaves_with_paths, map_with_paths
from lowtide.jaxprs import jaxpr_flops
from lowtide.models._config_file import config_from_hf, config_to_hf

from .kinds import KINDS

LENGTHS = (9, 5, 9)


def packed() -> dict[str, Any]:
    """Three documents in one row, and four tokens of padding."""
    tokens = np.random.default_rng(0).integers(1, 96, sum(LENGTHS))
    ids = np.repeat([1, 2, 3], LENGTHS)
    labels = np.where(np.append(ids[1:] == ids[:-1], False), np.append(tokens[1:], 0), -100)
    positions = np.concatenate([np.arange(length) for length in LENGTHS])
    fill = {"tokens": 0, "labels": -100, "segment_ids": 0, "positions": 0}
    row = {"tokens": tokens, "labels": labels, "segment_ids": ids, "positions": positions}
    return {name: jnp.asarray(np.append(value, [fill[name]] * 4), jnp.int32)[None] for name, value in row.items()}


def apart(row: dict[str, Any]) -> list[dict[str, Any]]:
    starts = np.cumsum((0, *LENGTHS))
    return [{k: row[k][:, a:b] for k in ("tokens", "labels")} for a, b in zip(starts[:-1], starts[1:], strict=True)]


# One kind for each mask: no window; one window; windows as data, with soft caps; sinks, with experts. Then rotary
# frequencies that depend on the length. The logits of packed rows of all families: tests/models/test_families.py.
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt_oss", "llama dynamic"])
def test_packed_documents_have_the_loss_and_the_gradients_of_separate_ones(kind: str) -> None:
    model = jax.tree.map(
        lambda leaf: leaf * 4 if leaf.ndim > 2 else leaf, models.init(KINDS[kind], key=jax.random.key(0))
    )
    wrt = ("**", "!layers/attn/window") if "window" in model.layers["attn"] else "**"
    grads = jax.jit(lt.value_and_grad(lambda m, b: models.loss(m, b)[0] * (b["labels"] != -100).sum(), wrt=wrt))
    row = packed()
    value, gradient = grads(model, row)
    parts = [grads(model, part) for part in apart(row)]
    np.testing.assert_allclose(value, sum(part for part, _ in parts), rtol=1e-5)
    for one, *others in zip(jax.tree.leaves(gradient), *(jax.tree.leaves(g) for _, g in parts), strict=True):
        largest = float(np.abs(one).max())
        np.testing.assert_allclose(one, sum(others), rtol=0, atol=1e-5 * max(1.0, largest))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["phi3", "llama dynamic"])
def test_the_length_of_a_document_stretches_its_own_positions_alone(kind: str) -> None:
    model = jax.tree.map(
        lambda leaf: leaf * 4 if leaf.ndim > 2 else leaf, models.init(KINDS[kind], key=jax.random.key(0))
    )
    logits, lengths = jax.jit(models.logits), (10, 50)
    short, long = (np.random.default_rng(n).integers(1, 96, (1, n)) for n in lengths)
    want, want_long = logits(model, short)[0], logits(model, long)[0]
    assert np.abs(logits(model, long[:, :10])[0] - want_long[:10]).max() > 1e-3  # which is beyond pretraining
    segments = np.repeat([[1, 2]], lengths, axis=1)
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    row = logits(model, np.concatenate([short, long], 1), segment_ids=segments, positions=positions)[0]
    padded = np.pad(short, ((0, 0), (0, 40)))
    segments = np.stack([np.repeat([1, 0], (10, 40)), np.ones(50, int)])
    positions = np.arange(50) * np.stack([np.arange(50) < 10, np.ones(50, bool)])
    rows = logits(model, np.concatenate([padded, long]), segment_ids=segments, positions=positions)
    unplaced = logits(model, np.concatenate([padded, long]), segment_ids=segments)
    np.testing.assert_allclose(unplaced[1], rows[1], rtol=0, atol=1e-5)
    for got in (row[:10], rows[0, :10], unplaced[0, :10]):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    for got in (row[10:], rows[1]):
        np.testing.assert_allclose(got, want_long, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_is_written_and_read_again(kind: str) -> None:
    config = KINDS[kind]
    again = config_from_hf(config_to_hf(config, "float32"), "config.json")
    assert again.windows == config.windows
    shapes = [jax.eval_shape(lambda c=c: models.init(c, key=jax.random.key(0))) for c in (config, again)]
    assert jax.tree.leaves(shapes[0]) == jax.tree.leaves(shapes[1])


def test_a_model_that_its_family_has_no_words_for_is_not_written() -> None:
    mixed = models.DecoderConfig(**{**vars(KINDS["llama"]), "qk_norm": "head"})
    with pytest.raises(
        ConfigError, match=r"config.json of LlamaForCausalLM cannot express qk_norm = 'head', only 'none'(.|\n)*hint:"
    ):
        config_to_hf(mixed, "float32")
    with pytest.raises(ConfigError, match=r'family must be "llama", .*, not \'lama\'(.|\n)*hint: did you mean "llama"'):
        config_to_hf(models.DecoderConfig(**{**vars(KINDS["llama"]), "family": "lama"}), "float32")


@pytest.mark.slow
def test_how_far_layers_see_is_data_and_nothing_that_trains() -> None:
    model = models.init(KINDS["gemma2"], key=jax.random.key(0))
    np.testing.assert_array_equal(model.layers["attn"]["window"], [8, 2**30, 8, 2**30])
    assert "window" not in models.init(KINDS["mistral"], key=jax.random.key(0)).layers["attn"]
    with pytest.raises(SelectionError, match=r'layers/attn/window: (.|\n)*"!layers/attn/window"'):
        lt.value_and_grad(lambda m: models.loss(m, packed())[0], wrt="**")(model)
    step = lt.offload.layerwise_step(model.stack, optax.sgd(0.1), wrt=("**", "!layers/attn/window"))
    trainer = lt.Trainer(model, models.loss, step)
    row = packed()
    plain = lt.value_and_grad(lambda m, b: models.loss(m, b)[0], wrt=("**", "!layers/attn/window"))
    model = jax.tree.map(jnp.array, model)
    value, gradient = jax.jit(plain)(model, row)
    (record,) = trainer.fit([row], num_steps=1, progress=False)
    np.testing.assert_allclose(record["loss"], value, rtol=1e-6)
    moved = trainer.model.layers["mlp"]["up_proj"]["weight"]
    expected = model.layers["mlp"]["up_proj"]["weight"] - 0.1 * gradient.layers["mlp"]["up_proj"]["weight"]
    np.testing.assert_allclose(moved, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 0}, "sliding_window must be an integer of at least 1, not 0"),
        ({"sliding_layers": (True,) * 4, "sliding_window": None}, "need a sliding_window"),
        (
            {"sliding_layers": (True,), "sliding_window": 4},
            r"sliding_layers must have 4 values, one for each layer, not 1(.|\n)*hint: .*layer_types",
        ),
        (
            {"rotary_fraction": 0.2},
            r"head_dim and its rotated part must be even, not \d+ and \d+(.|\n)*hint: change head_dim",
        ),
        (
            {"rope_scaling": models.RopeScaling(rope_type="longrope", factor=2.0)},
            r"short_factor must have \d+ values, one for each frequency, not 0",
        ),
    ],
)
def test_switches_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        models.DecoderConfig(**{**vars(KINDS["llama"]), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts must be an integer of at least 1, not 0"),
        (
            {"num_experts_per_token": 9},
            r"num_experts_per_token must be an integer from 1 to 4, not 9(.|\n)*hint: .*than num_experts",
        ),
    ],
)
def test_impossible_mixtures_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        models.Experts(**{"num_experts": 4, "num_experts_per_token": 2, "intermediate_size": 8, **changes})


@pytest.mark.slow
def test_layers_that_do_not_run_again_compute_no_product_twice() -> None:
    model, tokens = models.init(KINDS["llama"], key=jax.random.key(0)), jnp.zeros((2, 32), jnp.int32)
    flops: dict[bool, int] = {}
    for dora in (False, True):
        adapted = lt.lora.add(
            model, lt.lora.Config(rank=2, targets="layers/**/*_proj", dora=dora), key=jax.random.key(1)
        )
        trainable, frozen = lt.partition(adapted, "**/lora_*")

        def gradients(trainable: Any, frozen: Any = frozen) -> Any:
            batch = {"tokens": tokens, "labels": tokens}
            return jax.grad(lambda part: models.loss(lt.combine(part, frozen), batch)[0])(trainable)

        flops[dora] = jaxpr_flops(jax.make_jaxpr(gradients)(trainable))
    assert flops[True] < 1.15 * flops[False]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "gemma3_text in nf4 with adapters"])
def test_groups_of_layers_have_the_gradients_of_single_ones(kind: str) -> None:
    config = KINDS[kind.partition(" ")[0]]
    if kind == "mixtral":
        assert config.experts is not None
        config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, router_loss_coef=0.5))
    model = models.init(config, key=jax.random.key(0))
    wrt = "**"
    if kind not in KINDS:
        assert "window" in model.layers["attn"]  # windows as data are grouped, too
        wrt = "**/lora_*"
        model = lt.quantize(model, "layers/**/{q,down}_proj", "nf4")
        model = lt.lora.add(model, lt.lora.Config(rank=2, targets="layers/**/{q,down}_proj"), key=jax.random.key(1))
        model = map_with_paths(lambda path, leaf: leaf + 0.02 if "lora_b" in path else leaf, model)
    row = packed()
    losses = (partial(models.loss, remat=True, layers_per_remat=size) for size in (3, 1))
    found, wanted = (jax.jit(lt.value_and_grad(loss, wrt, has_aux=True))(model, row) for loss in losses)
    for (path, one), (_, other) in zip(leaves_with_paths(found), leaves_with_paths(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6, err_msg=path)
        assert np.abs(other).max() > 0, path
