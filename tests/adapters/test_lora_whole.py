"""What trains as a whole beside adapters: values, gradients, merging, files, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import lowtide as lt
from lowtide import models
from lowtide.adapters import lora
from lowtide.core import ConfigError, ModelFileError, SelectionError, StructureError, leaves_with_paths, map_with_paths
from tests.models.kinds import KINDS

KEY = jax.random.key(0)
BATCH = {"tokens": jnp.arange(1, 13).reshape(2, 6), "labels": jnp.arange(2, 14).reshape(2, 6)}
SAVED = {"modules_to_save": ["outer/*", "layers/attn_norm", "layers/attn/k_proj"]}
TARGETS = "**/{q,k,o}_proj"


def noisy(model: Any) -> Any:
    """Values of their own in everything that trains."""

    def draw(path: str, leaf: Any) -> Any:
        noise = 0.1 * np.random.default_rng(len(path)).normal(size=leaf.shape)
        return jnp.asarray(np.asarray(leaf) + noise, leaf.dtype)

    return map_with_paths(lambda path, leaf: draw(path, leaf) if "lora_" in path else leaf, model)


@functools.cache
def base(family: str = "qwen2") -> models.Decoder:
    """A decoder whose biases are no zeros."""
    with jax.ensure_compile_time_eval():  # a test may ask for it first while it traces
        made = models.init(KINDS[family], key=KEY)
        return map_with_paths(lambda path, leaf: leaf + 0.1 if path.endswith("bias") else leaf, made)


def added(model: Any = None, **options: Any) -> Any:
    config = lora.Config(**({"rank": 2, "alpha": 4, "targets": TARGETS} | options))
    return lora.add(base() if model is None else model, config, key=KEY)


def assert_equal(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def loss(model: Any) -> Any:
    return models.loss(model, BATCH, remat=True)[0]


LOSS = jax.jit(loss)


class TestValues:
    @pytest.mark.sentinel
    @pytest.mark.slow
    def test_it_starts_as_no_change_and_its_gradients_are_those_of_the_array(self) -> None:
        fresh = added(**SAVED, bias="all")
        whole = [each.path for each in lora.report(fresh).matched if each.kind == "trained whole"]
        biases = [f"layers/attn/{name}_proj/bias" for name in "kqv"]
        modules = ["outer/embed", "outer/lm_head", "outer/norm", "layers/attn/k_proj", "layers/attn_norm"]
        assert sorted(whole) == sorted([*biases, *(f"{name}/weight" for name in modules)])
        assert float(LOSS(fresh)) == pytest.approx(float(LOSS(base())), rel=1e-6)
        model = noisy(fresh)
        value, of_model = jax.jit(lt.value_and_grad(loss, lora.TRAINABLE))(model)
        of_merged, of_arrays = jax.jit(jax.value_and_grad(loss))(lora.merge(model))
        grads, plain = dict(leaves_with_paths(of_model)), dict(leaves_with_paths(of_arrays))
        for path in whole:
            np.testing.assert_allclose(grads[f"{path}/lora_saved"], plain[path], rtol=1e-4, atol=1e-6, err_msg=path)
            assert np.abs(plain[path]).max() > 0
        np.testing.assert_allclose(of_merged, value, rtol=1e-5)
        assert_equal(lora.disable(model), base())

    @pytest.mark.slow
    def test_a_module_that_is_no_decoder(self) -> None:
        mlp = eqx.nn.MLP(4, 3, 8, 2, key=KEY)
        x = jnp.ones(4)
        model = noisy(added(mlp, targets="layers/{0,1}", modules_to_save="layers/2/*"))
        assert isinstance(model.layers[2].bias, lora.SavedWeight)
        run = eqx.filter_jit(lambda model, x: model(x))
        np.testing.assert_allclose(run(model, x), run(lora.merge(model), x), rtol=1e-5)
        assert not np.allclose(run(model, x), run(lora.disable(model), x))
        fn = lambda params, x: jnp.einsum("oi,i->o", params["w"], x) + params["b"]  # noqa: E731
        params = {"w": jnp.ones((3, 4)), "b": jnp.ones(3)}
        model = noisy(added(params, targets="w", modules_to_save="b"))
        np.testing.assert_allclose(jax.jit(lt.adapted(fn))(model, x), jax.jit(fn)(lora.merge(model), x), rtol=1e-5)

    @pytest.mark.slow
    def test_half_precision_trains_in_float32_and_merges_back(self) -> None:
        model = noisy(added(jax.tree.map(lambda x: x.astype(jnp.bfloat16), base()), **SAVED))
        assert model.outer["norm"]["weight"].lora_saved.dtype == jnp.float32
        assert lora.merge(model).outer["norm"]["weight"].dtype == jnp.bfloat16

    def test_combined_as_changes(self) -> None:
        one, other = noisy(added(**SAVED)), added(**SAVED)
        both = lora.combine([one, other, one], [1.0, 3.0, 0.5])
        node = one.outer["norm"]["weight"]
        weight, saved = np.asarray(node.weight), np.asarray(node.lora_saved)
        want = weight + 1.5 * (saved - weight)
        np.testing.assert_allclose(lora.merge(both).outer["norm"]["weight"], want, rtol=1e-5)

    def test_shapes_are_enough_and_dropout_leaves_it_alone(self) -> None:
        shapes = added(jax.eval_shape(base), **SAVED)
        assert jax.tree.map(lambda leaf: leaf.shape, shapes) == jax.tree.map(lambda leaf: leaf.shape, added(**SAVED))
        dropped = lora.dropout(added(**SAVED), 0.5, key=KEY)
        assert isinstance(dropped.outer["norm"]["weight"], lora.SavedWeight)


class TestFiles:
    @pytest.mark.parametrize(
        "options",
        [SAVED, {"bias": "lora_only"}, {"bias": "all"}, {**SAVED, "bias": "all", "layers": [0, 2]}],
        ids=["modules", "lora_only", "all", "all, some layers"],
    )
    def test_round_trip(self, tmp_path: Path, options: Any) -> None:
        model = added(**options) if "layers" in options else noisy(added(**options))
        lora.save(model, tmp_path)
        assert_equal(lora.load(base(), tmp_path), model)
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        names = ["embed_tokens", "input_layernorm", "k_proj", "lm_head", "model.norm"]
        assert config["modules_to_save"] == (names if "modules_to_save" in options else None)
        assert config["bias"] == options.get("bias", "none")

    def test_tied_embeddings_are_two_equal_tensors(self, tmp_path: Path) -> None:
        tied = base("gemma2")
        model = noisy(added(tied, modules_to_save="outer/embed"))
        lora.save(model, tmp_path)
        tensors = load_file(tmp_path / "adapter_model.safetensors")
        keys = ["base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"]
        np.testing.assert_array_equal(*(tensors[key] for key in keys))
        assert_equal(lora.load(tied, tmp_path), model)
        vectors = noisy(lora.add(tied, lora.IA3Config(modules_to_save="outer/embed")))
        lora.save(vectors, tmp_path / "vectors")
        assert_equal(lora.load(tied, tmp_path / "vectors"), vectors)
        save_file(tensors | {keys[0]: tensors[keys[0]] + 1}, tmp_path / "adapter_model.safetensors")
        with pytest.raises(ModelFileError, match=r"lm_head and model.embed_tokens differ(.|\n)*ensure_weight_tying"):
            lora.load(tied, tmp_path)

    def test_a_pytree_by_its_paths(self, tmp_path: Path) -> None:
        params = {"a": {"kernel": jnp.ones((3, 4))}, "b": {"kernel": jnp.ones((4, 2, 2)), "bias": jnp.ones(4)}}
        model = noisy(added(params, targets="a/kernel", modules_to_save="b"))
        lora.save(model, tmp_path)
        assert {"base_model.model.b.kernel", "base_model.model.b.bias"} < {
            *load_file(tmp_path / "adapter_model.safetensors")
        }
        assert_equal(lora.load(params, tmp_path), model)
        params = {"a": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(3)}, "stack": {"weight": jnp.ones((2, 3, 4))}}
        params["stack"]["bias"], params["norm"] = jnp.ones((2, 3)), {"bias": jnp.ones(3)}
        for word, count in (("lora_only", 2), ("all", 3)):
            model = noisy(added(params, targets=["a/kernel", "stack"], bias=word))
            assert len(lora.report(model).matched) == 2 + count
            lora.save(model, tmp_path)
            assert json.loads((tmp_path / "adapter_config.json").read_text())["bias"] == word
            assert_equal(lora.load(params, tmp_path), model)

    @pytest.mark.parametrize(
        ("edit", "message"),
        [
            (lambda t, k: t.pop(k), r"1 missing: base_model.model.model.norm.weight"),
            (lambda t, k: t.update({k: t[k][:3]}), r"model.norm.weight does not fit\n.*shape \[32\]"),
            (lambda t, k: t.update({k: t[k] * np.inf}), r"values that are not finite"),
            (lambda t, k: t.update({k + "x": t[k]}), r"1 unexpected: base_model.model.model.norm.weightx"),
        ],
    )
    def test_damaged_tensors(self, tmp_path: Path, edit: Any, message: str) -> None:
        lora.save(added(**SAVED), tmp_path)
        tensors = load_file(tmp_path / "adapter_model.safetensors")
        edit(tensors, "base_model.model.model.norm.weight")
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        with pytest.raises(ModelFileError, match=message):
            lora.load(base(), tmp_path)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"modules_to_save": "lm_head"}, r"modules_to_save"),
            ({"modules_to_save": [""]}, r"modules_to_save"),
            ({"modules_to_save": ["layers.0.input_layernorm"]}, r"only some layers of .* train as a whole"),
            ({"modules_to_save": None}, r"unexpected: "),
            ({"bias": "some"}, r"option 'bias' is not supported"),
            ({"bias": "all"}, r"missing: .*base_layer.bias"),
        ],
    )
    def test_damaged_configurations(self, tmp_path: Path, changes: Any, message: str) -> None:
        lora.save(added(**SAVED), tmp_path)
        path = tmp_path / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        with pytest.raises(ModelFileError, match=message):
            lora.load(base(), tmp_path)

    def test_biases_that_peft_has_no_word_for(self, tmp_path: Path) -> None:
        model = added(bias="all")
        attn = model.layers["attn"]
        plain = {**attn, "q_proj": {**attn["q_proj"], "bias": attn["q_proj"]["bias"].weight}}
        with pytest.raises(StructureError, match=r"cannot express this choice of biases(.|\n)*hint: .*bias="):
            lora.check_names(dataclasses.replace(model, layers={**model.layers, "attn": plain}))
        params = {"a": {"weight": jnp.ones((8, 8))}, "b": {"weight": jnp.ones((8, 8)), "bias": jnp.zeros(8)}}
        vectors = lora.add(params, lora.IA3Config(targets="a", feedforward="a", modules_to_save="b/bias"))
        shapes = jax.eval_shape(lambda: vectors)
        for run in (lambda: lora.save(vectors, tmp_path / "vectors"), lambda: lora.check_names(shapes)):
            with pytest.raises(
                StructureError, match=r"biases train in addition to IA3 adapters(.|\n)*hint: .*modules_to_save"
            ):
                run()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"modules_to_save": "outer/head"}, SelectionError, r"modules_to_save: pattern 'outer/head'(.|\n)*hint:"),
        ({"modules_to_save": TARGETS}, SelectionError, r"modules_to_save leaves no target"),
        (
            {"bias": "lora_only", "targets": "**/o_proj"},
            StructureError,
            r"'lora_only' does not select any bias(.|\n)*all",
        ),
        ({"bias": "most"}, ConfigError, r'bias must be "none", "lora_only" or "all", not .most.'),
        ({"bias": "lora_only", "layers": [0]}, ConfigError, r"contradicts layers"),
        ({"modules_to_save": 3}, ConfigError, r"modules_to_save must be at least one glob or .*, not 3"),
    ],
)
def test_what_is_refused(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        added(**options)


def test_what_cannot_train_as_a_whole_is_refused_by_path() -> None:
    quantised = lt.quantize(base(), "layers/attn/k_proj/weight", "int8")
    with pytest.raises(StructureError, match=r"k_proj/weight: a quantised weight(.|\n)*QuantizedWeight(.|\n)*hint:"):
        added(quantised, **SAVED)
    with pytest.raises(StructureError, match=r"already has an adapter"):
        added(added(targets="**/k_proj"), targets="**/q_proj", modules_to_save="**/k_proj")
    with pytest.raises(StructureError, match=r"router/weight: the external library has no module"):
        added(base("qwen3_moe"), targets="**/q_proj", modules_to_save="**/router")
    lora.add(base(), lora.IA3Config(modules_to_save="outer/norm"))
