"""Adapter directories: names, configuration, round trips, damaged and unsupported files."""

from __future__ import annotations

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lowtide.adapters import lora
from lowtide.core import ModelFileError, OutputError, StructureError, linear, value_and_grad

KEY = jax.random.key(0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoder:
    """A tree that knows its modules' names elsewhere, as `lowtide.models.Decoder` does."""

    outer: dict
    layers: dict

    def external_name(self, path):
        names = {"outer/lm_head": "lm_head", "layers/norm": "model.layers.{layer}.input_layernorm"}
        names |= {f"layers/attn/{p}_proj": f"model.layers.{{layer}}.self_attn.{p}_proj" for p in "qv"}
        return names[path]


def decoder():
    proj = {name: {"weight": jnp.full((3, 6, 4), 0.1)} for name in ("q_proj", "v_proj")}
    proj["q_proj"]["bias"] = jnp.zeros((3, 6))
    layers = {"attn": proj, "norm": {"weight": jnp.ones((3, 4))}}
    return Decoder({"lm_head": {"weight": jnp.full((10, 4), 0.1)}}, layers)


def with_values(model, seed=0):
    """Adapters with numbers of their own everywhere, so that a swap of any two shows."""

    def fill(path, leaf):
        is_adapter = getattr(path[-1], "name", "").startswith("lora_")
        return (
            jnp.asarray(np.random.default_rng([seed, len(str(path))]).normal(size=leaf.shape), jnp.float32)
            if is_adapter
            else leaf
        )

    return jax.tree_util.tree_map_with_path(fill, model)


def adapted(targets="**/{q,v}_proj", rank=2, alpha=4.0, model=None):
    return with_values(lora.add(model or decoder(), lora.Config(rank=rank, alpha=alpha, targets=targets), key=KEY))


def read_config(directory):
    return json.loads((directory / "adapter_config.json").read_text())


def edit_config(directory, **changes):
    (directory / "adapter_config.json").write_text(json.dumps(read_config(directory) | changes))


def edit_tensors(directory, edit):
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


class TestSave:
    @pytest.mark.slow
    def test_names_and_values(self, tmp_path):
        model = adapted()
        lora.save(model, tmp_path / "new" / "adapter", base_model_name_or_path="base")
        tensors = load_file(tmp_path / "new" / "adapter" / "adapter_model.safetensors")
        modules = [f"model.layers.{layer}.self_attn.{p}_proj" for layer in range(3) for p in "qv"]
        assert set(tensors) == {f"base_model.model.{m}.lora_{ab}.weight" for m in modules for ab in "AB"}
        assert {t.dtype for t in tensors.values()} == {np.dtype(np.float32)}
        node = model.layers["attn"]["v_proj"]["weight"]
        name = "base_model.model.model.layers.1.self_attn.v_proj"
        np.testing.assert_array_equal(tensors[f"{name}.lora_A.weight"], node.lora_a[1])
        np.testing.assert_array_equal(tensors[f"{name}.lora_B.weight"], node.lora_b[1])

    def test_config(self, tmp_path):
        lora.save(adapted(), tmp_path, base_model_name_or_path="base")
        config = read_config(tmp_path)
        want = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "bias": "none",
            "target_modules": ["q_proj", "v_proj"], "rank_pattern": {}, "alpha_pattern": {}, "fan_in_fan_out": False,
            "inference_mode": True, "base_model_name_or_path": "base",
        }  # fmt: skip
        assert config.items() >= want.items()
        assert isinstance(config["lora_alpha"], int)

    def test_task_type_may_be_absent(self, tmp_path):
        lora.save(adapted(), tmp_path, task_type=None)
        assert read_config(tmp_path)["task_type"] is None
        assert read_config(tmp_path)["base_model_name_or_path"] is None

    def test_tree_paths_name_what_has_no_external_name(self, tmp_path):
        model = {
            "layers": {"mlp": {"weight": jnp.ones((2, 4, 4))}},
            "stack": jnp.ones((2, 4, 4)),
            "head": jnp.ones((4, 4)),
        }
        lora.save(adapted(["layers/mlp", "stack", "head"], model=model), tmp_path)
        names = {name.split(".lora_")[0] for name in load_file(tmp_path / "adapter_model.safetensors")}
        want = {"layers.0.mlp", "layers.1.mlp", "stack.0", "stack.1", "head"}
        assert names == {f"base_model.model.{name}" for name in want}

    def test_partly_adapted_suffixes_are_spelled_out(self, tmp_path):
        model = {"a": {"q_proj": jnp.ones((4, 4))}, "b": {"q_proj": jnp.ones((4, 4)), "k_proj": jnp.ones((4, 4))}}
        lora.save(adapted(["a/q_proj", "b/k_proj"], model=model), tmp_path)
        assert read_config(tmp_path)["target_modules"] == ["a.q_proj", "k_proj"]

    def test_a_name_that_ends_another_needs_a_regular_expression(self, tmp_path):
        model = {"w": {"q": jnp.ones((4, 4))}, "x": {"w": {"q": jnp.ones((4, 4))}}}
        tuned = adapted("w/q", model=model)
        lora.save(tuned, tmp_path)
        assert read_config(tmp_path)["target_modules"] == r"w\.q"
        assert_equal(lora.load(model, tmp_path), tuned)

    @pytest.mark.slow_after(1)
    @pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
    def test_patterns(self, tmp_path, ranks):
        model = adapted("**/q_proj", rank=ranks[0], alpha=1.5)
        model = with_values(lora.add(model, lora.Config(rank=ranks[1], alpha=8, targets="**/v_proj"), key=KEY))
        lora.save(model, tmp_path)
        config = read_config(tmp_path)
        assert (config["r"], config["lora_alpha"]) == (ranks[0], 1.5)
        assert (config["rank_pattern"], config["alpha_pattern"]) == ({"v_proj": ranks[1]}, {"v_proj": 8})
        assert_equal(lora.load(decoder(), tmp_path), model)

    def test_patterns_that_would_be_ambiguous(self, tmp_path):
        base = {"w": {"q": jnp.ones((4, 4))}, "x": {"w": {"q": jnp.ones((4, 4))}, "y": jnp.ones((4, 4))}}
        model = adapted(["x/w/q", "x/y"], rank=2, model=base)
        model = with_values(lora.add(model, lora.Config(rank=1, alpha=4, targets="w/q"), key=KEY))
        lora.save(model, tmp_path)
        assert read_config(tmp_path)["rank_pattern"] == {"x.w.q": 2, "w.q": 1, "x.y": 2}
        assert_equal(lora.load(base, tmp_path), model)

    def test_replaces_an_older_adapter_and_leaves_other_files(self, tmp_path):
        lora.save(adapted("**/q_proj"), tmp_path)
        (tmp_path / "README.md").write_text("mine")
        lora.save(adapted("**/v_proj"), tmp_path)
        assert_equal(lora.load(decoder(), tmp_path), adapted("**/v_proj"))
        assert sorted(os.listdir(tmp_path)) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]

    def test_nothing_to_save(self, tmp_path):
        with pytest.raises(StructureError, match=r"no adapter to save(.|\n)*hint: .*lt.lora.add"):
            lora.save(decoder(), tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_abstract_adapters(self, tmp_path):
        model = lora.add(jax.eval_shape(decoder), lora.Config(rank=2), key=KEY)
        with pytest.raises(StructureError, match=r"layers/attn/q_proj/weight: .*no values(.|\n)*hint: "):
            lora.save(model, tmp_path)

    def test_two_modules_of_one_name(self, tmp_path):
        model = {"a": {"b.c": jnp.ones((4, 4))}, "a.b": {"c": jnp.ones((4, 4))}}
        with pytest.raises(StructureError, match=r"another adapted module has the name 'a.b.c'(.|\n)*hint: rename"):
            lora.save(adapted("**", model=model), tmp_path)

    def test_an_unwritable_folder(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(OutputError, match=r"cannot write adapter_model.safetensors(.|\n)*got: (.|\n)*hint: choose"):
            lora.save(adapted(), tmp_path / "file" / "adapter")

    def test_a_failed_write_leaves_the_older_files(self, tmp_path, monkeypatch):
        lora.save(adapted("**/q_proj"), tmp_path)

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OutputError, match="No space left"):
            lora.save(adapted("**/v_proj"), tmp_path)
        assert sorted(os.listdir(tmp_path)) == ["adapter_config.json", "adapter_model.safetensors"]
        assert_equal(lora.load(decoder(), tmp_path), adapted("**/q_proj"))


class TestLoad:
    @pytest.mark.parametrize("targets", ["**/{q,v}_proj", "**/v_proj", ["**/q_proj", "outer/lm_head"]])
    def test_round_trip(self, tmp_path, targets):
        model = adapted(targets)
        lora.save(model, tmp_path)
        assert_equal(lora.load(decoder(), tmp_path), model)

    @pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
    def test_short_floats_become_float32(self, tmp_path, dtype):
        lora.save(adapted(), tmp_path)
        edit_tensors(tmp_path, lambda tensors: tensors.update({k: v.astype(np.float16) for k, v in tensors.items()}))
        node = lora.load(jax.tree.map(lambda leaf: leaf.astype(dtype), decoder()), tmp_path).layers["attn"]["q_proj"][
            "weight"
        ]
        assert (node.weight.dtype, node.lora_a.dtype, node.lora_b.dtype) == (dtype, jnp.float32, jnp.float32)

    def test_into_an_abstract_model(self, tmp_path):
        lora.save(adapted(), tmp_path)
        model = lora.load(jax.eval_shape(decoder), tmp_path)
        assert isinstance(model.layers["attn"]["q_proj"]["weight"].weight, jax.ShapeDtypeStruct)
        assert isinstance(model.layers["attn"]["q_proj"]["weight"].lora_a, jax.Array)

    def test_replaces_the_values_of_the_same_adapters(self, tmp_path):
        lora.save(adapted(), tmp_path)
        fresh = lora.add(decoder(), lora.Config(rank=2, alpha=1), key=KEY)
        assert_equal(lora.load(fresh, tmp_path), adapted())

    @pytest.mark.parametrize(("targets", "rank"), [("**/q_proj", 2), ("**/{q,v}_proj", 1)])
    def test_refuses_to_drop_other_adapters(self, tmp_path, targets, rank):
        lora.save(adapted(), tmp_path)
        model = adapted(targets, rank=rank)
        with pytest.raises(StructureError, match=r"the adapters of the model differ(.|\n)*hint: .*merge"):
            lora.load(model, tmp_path)

    @pytest.mark.slow_after(1)
    @pytest.mark.parametrize("fresh", [True, False])
    def test_a_loaded_adapter_trains_on(self, tmp_path, fresh):
        """Keras reloads A = B = 0, whose gradients are zero for ever."""
        model = lora.add(decoder(), lora.Config(rank=2), key=KEY) if fresh else adapted()
        lora.save(model, tmp_path)
        model = lora.load(decoder(), tmp_path)

        def loss(model):
            return jnp.sum(
                linear(jnp.ones((1, 4)), jax.tree.map(lambda leaf: leaf[0], model.layers["attn"]["q_proj"]["weight"]))
                ** 2
            )

        node = value_and_grad(loss, wrt="**/lora_*")(model)[1].layers["attn"]["q_proj"]["weight"]
        assert bool(jnp.any(node.lora_b[0] != 0))
        assert fresh or bool(jnp.any(node.lora_a[0] != 0))

    def test_rank_stabilised_scale(self, tmp_path):
        lora.save(adapted(rank=2, alpha=4.0), tmp_path)
        edit_config(tmp_path, use_rslora=True, alpha_pattern={"v_proj": 3})
        attn = lora.load(decoder(), tmp_path).layers["attn"]
        assert attn["q_proj"]["weight"].scaling == pytest.approx(4 / 2**0.5)
        assert attn["v_proj"]["weight"].scaling == pytest.approx(3 / 2**0.5)
        lora.save(lora.load(decoder(), tmp_path), tmp_path / "again")
        again = lora.load(decoder(), tmp_path / "again").layers["attn"]
        assert again["v_proj"]["weight"].scaling == pytest.approx(3 / 2**0.5)

    @pytest.mark.parametrize(
        "targets", [None, r".*self_attn\.(q|v)_proj", ["self_attn.q_proj", "v_proj"], ["q_proj", "v_proj", "k_proj"]]
    )
    def test_ways_to_write_the_targets(self, tmp_path, targets):
        lora.save(adapted(), tmp_path)
        edit_config(tmp_path, target_modules=targets)
        assert_equal(lora.load(decoder(), tmp_path), adapted())

    def test_excluded_modules(self, tmp_path):
        lora.save(adapted("**/v_proj"), tmp_path)
        edit_config(tmp_path, target_modules=["q_proj", "v_proj"], exclude_modules=["q_proj"])
        assert_equal(lora.load(decoder(), tmp_path), adapted("**/v_proj"))

    def test_dropout_warns_once(self, tmp_path):
        lora.save(adapted(), tmp_path)
        edit_config(tmp_path, lora_dropout=0.1)
        with pytest.warns(UserWarning, match="lora_dropout 0.1 is not applied.*--lora-dropout 0.1") as caught:
            assert_equal(lora.load(decoder(), tmp_path), adapted())
        assert len(caught) == 1


class TestBadFiles:
    @pytest.fixture
    def directory(self, tmp_path):
        lora.save(adapted(), tmp_path)
        return tmp_path

    def refuse(self, directory, match, model=None):
        with pytest.raises(ModelFileError, match=rf"{match}(.|\n)*hint: "):
            lora.load(model or decoder(), directory)

    def test_missing_directory(self, tmp_path):
        self.refuse(tmp_path / "nowhere", r"nowhere/adapter_config.json: no such file")

    @pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
    def test_missing_file(self, directory, name):
        (directory / name).unlink()
        self.refuse(directory, f"{name}: no such file")

    @pytest.mark.parametrize("keep", [0, 4, 60, -1])
    def test_truncated_tensors(self, directory, keep):
        path = directory / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        self.refuse(directory, r"adapter_model.safetensors: truncated")

    @pytest.mark.parametrize(
        ("text", "match"),
        [("{", "not readable as JSON"), ("[]", "not a JSON object"), ("{}", "not a LoRA configuration: r is missing")],
    )
    def test_garbled_config(self, directory, text, match):
        (directory / "adapter_config.json").write_text(text)
        self.refuse(directory, rf"adapter_config.json: {match}")

    @pytest.mark.parametrize(
        "changes",
        [
            {"r": "many"},
            {"lora_alpha": None},
            {"rank_pattern": ["q_proj"]},
            {"target_modules": "("},
            {"target_modules": 3},
        ],
    )
    def test_garbled_values(self, directory, changes):
        edit_config(directory, **changes)
        self.refuse(directory, r"adapter_config.json: not a LoRA configuration")

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"r": 0}, r"r has an unusable value(.|\n)*greater than or equal to 1"),
            ({"r": 2**40}, r"r has an unusable value"),
            ({"rank_pattern": {"q_proj": -1}}, r"rank_pattern.q_proj has an unusable value(.|\n)*got: -1"),
            ({"lora_alpha": float("nan")}, "NaN is not a finite number"),
            ({"lora_alpha": 10**400}, "an integer of 401 digits"),
            ({"alpha_pattern": {"q_proj": 1e300}}, "alpha_pattern.q_proj has an unusable value"),
            ({"lora_alpha": 0}, r"lora_alpha must be a finite number above 0, not 0"),
            ({"lora_alpha": -16}, r"lora_alpha must be a finite number above 0, not -16"),
            ({"alpha_pattern": {"v_proj": 0.0}}, r"alpha_pattern\['v_proj'\] must be a finite number above 0, not 0"),
            ({"use_rslora": "false"}, r"use_rslora has an unusable value(.|\n)*'false'"),
            ({"layers_to_transform": -1}, r"layers_to_transform(.|\n)*unusable value"),
            ({"layers_pattern": "(a+)+"}, r"layers_pattern(.|\n)*unusable value"),
            ({"target_modules": ["q_proj", 3]}, "target_modules.1 has an unusable value"),
        ],
    )
    def test_values_out_of_range(self, directory, changes, match):
        edit_config(directory, **changes)
        self.refuse(directory, match)

    @pytest.mark.slow_after(3)
    @pytest.mark.parametrize("name", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
    def test_a_regular_expression_that_needs_forever_is_given_up(self, directory, name, monkeypatch):
        monkeypatch.setattr("lowtide.adapters.lora._peft.MOST_SECONDS", 0.2)
        endless = r"(([a-z]|[a-z._0-9])+)+[!?]"
        edit_config(directory, **{name: {endless: 2} if name.endswith("pattern") else endless})
        self.refuse(directory, r"adapter_config.json: a regular expression takes too long")

    @pytest.mark.parametrize(
        "pattern", ["(" * 5000, "q{e<=2}_proj", "[[:alpha:]]_proj", "a{9,1}", "(?P<a>x)(?P<a>y)", "*"]
    )
    def test_what_is_no_regular_expression_of_python_is_refused(self, directory, pattern):
        edit_config(directory, target_modules=pattern)
        self.refuse(directory, r"adapter_config.json: not a LoRA configuration")

    def test_tensors_that_are_not_finite(self, directory):
        path = directory / "adapter_model.safetensors"
        tensors = load_file(path)
        name = sorted(tensors)[0]
        save_file(tensors | {name: np.full_like(tensors[name], np.nan)}, path)
        self.refuse(directory, rf"tensor {name} has values that are not finite")

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("bias", "some"), ("fan_in_fan_out", True),
            ("peft_type", "LOHA"), ("lora_bias", True), ("init_lora_weights", "pissa_niter_4"),
            ("layer_replication", [[0, 2]]), ("an_option_of_the_future", True),
        ],
    )  # fmt: skip
    def test_unsupported_options(self, directory, option, value):
        edit_config(directory, bias=None)
        lora.load(decoder(), directory)
        edit_config(directory, **{option: value})
        self.refuse(directory, rf"option '{option}' is not supported(.|\n)*got: {option}=")

    def test_missing_tensor(self, directory):
        name = "base_model.model.model.layers.2.self_attn.v_proj.lora_B.weight"
        edit_tensors(directory, lambda tensors: tensors.pop(name))
        self.refuse(directory, rf"its tensors do not match(.|\n)*expected: 12 tensors\n  got: 1 missing: {name}\n")
        stray = "x" * 5000
        edit_tensors(directory, lambda tensors: tensors.update({stray: np.ones((2, 2), np.float32)}))
        self.refuse(directory, rf"  got: 1 missing: {name}; 1 unexpected: x{{120}}… \(5000 characters\)\n")

    def test_unexpected_tensor(self, directory):
        name = "base_model.model.model.embed_tokens.lora_embedding_A"
        edit_tensors(directory, lambda tensors: tensors.update({name: np.ones((2, 2), np.float32)}))
        self.refuse(directory, rf"1 unexpected: {name}")

    def test_tensors_that_the_config_does_not_target(self, directory):
        edit_config(directory, target_modules=["q_proj"])
        self.refuse(directory, r"6 unexpected: .*v_proj")

    def test_another_model(self, directory):
        self.refuse(directory, r"tensors for at least one module(.|\n)*12 unexpected", {"w": jnp.ones((4, 4))})

    @pytest.mark.parametrize("targets", ["**/q_proj", "**/v_proj"])
    def test_shape(self, tmp_path, targets):
        model = decoder()
        lora.save(adapted(targets), tmp_path)
        wide = jax.tree.map(lambda leaf: jnp.ones((3, 6, 5)) if leaf.shape == (3, 6, 4) else leaf, model)
        self.refuse(tmp_path, r"tensor .*layers.0.*lora_A.weight does not fit(.|\n)*\[2, 5\](.|\n)*F32\[2, 4\]", wide)

    def test_rank_that_disagrees_with_the_tensors(self, directory):
        edit_config(directory, r=3)
        self.refuse(directory, r"lora_A.weight does not fit\n.*\[3, 4\]\n.*F32\[2, 4\]")

    def test_integer_tensor(self, directory):
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        edit_tensors(directory, lambda tensors: tensors.update({name: np.ones((2, 4), np.int32)}))
        self.refuse(directory, rf"tensor {name} does not fit\n.*floating-point.*\n.*I32\[2, 4\]")

    def test_a_rank_of_one_layer_that_its_tensors_do_not_have(self, directory):
        edit_config(directory, rank_pattern={r"layers\.0\.self_attn\.q_proj": 2**20})
        self.refuse(directory, r"layers\.0\.self_attn\.q_proj\.lora_A\.weight does not fit\n.*\[1048576, 4\]")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("rslora", [False, True])
def test_layers_of_different_rank_and_alpha_are_one_stack_and_come_back(tmp_path, rslora):
    config = lora.Config(rank=3, alpha=6.0, targets="**/{q,v}_proj", rslora=rslora)
    lora.save(with_values(lora.add(decoder(), config, key=KEY)), tmp_path / "before")
    name = "model.layers.{}.self_attn.q_proj"
    a, b = (f"base_model.model.{name}.lora_{half}.weight" for half in "AB")
    ranks, alphas = (1, 3, 2), (6.0, 6.0, 1.5)

    def cut(tensors):
        for layer, rank in enumerate(ranks):
            tensors[a.format(layer)] = tensors[a.format(layer)][:rank].copy()
            tensors[b.format(layer)] = tensors[b.format(layer)][:, :rank].copy()

    edit_tensors(tmp_path / "before", cut)
    of_layers = {"rank_pattern": {"layers.0.self_attn.q_proj": 1, "layers.2.self_attn.q_proj": 2}}
    of_layers["alpha_pattern"] = {"layers.2.self_attn.q_proj": 1.5}
    edit_config(tmp_path / "before", **of_layers)
    model = lora.load(decoder(), tmp_path / "before")
    node = model.layers["attn"]["q_proj"]["weight"]
    assert node.rank == 3
    tensors = load_file(tmp_path / "before" / "adapter_model.safetensors")
    merged = lora.merge(model).layers["attn"]["q_proj"]["weight"]
    for layer, (rank, alpha) in enumerate(zip(ranks, alphas, strict=True)):
        scale = alpha / (rank**0.5 if rslora else rank)
        want = 0.1 + scale * tensors[b.format(layer)] @ tensors[a.format(layer)]
        np.testing.assert_allclose(merged[layer], want, rtol=1e-5, atol=1e-6)

    def loss(model, x):
        def layer(h, weight):
            return jnp.sin(linear(h, weight))[:, :4], None

        return jnp.sum(jax.lax.scan(layer, x, model.layers["attn"]["q_proj"]["weight"])[0] ** 2)

    grads = value_and_grad(loss, wrt="layers/attn/q_proj/**/lora_*")(model, jnp.ones((2, 4)))[1]
    of_node = grads.layers["attn"]["q_proj"]["weight"]
    for layer, rank in enumerate(ranks):  # what fills up never trains
        assert np.all(of_node.lora_a[layer, rank:] == 0) and np.all(of_node.lora_b[layer, :, rank:] == 0)
        assert np.abs(of_node.lora_a[layer, :rank]).max() > 0 and np.abs(of_node.lora_b[layer, :, :rank]).max() > 0
    lora.save(model, tmp_path / "after")
    again = load_file(tmp_path / "after" / "adapter_model.safetensors")
    assert again.keys() == tensors.keys()
    for key, values in tensors.items():
        np.testing.assert_array_equal(again[key], values, err_msg=key)
    assert_equal(lora.load(decoder(), tmp_path / "after"), model)


class TestExternalNames:
    @pytest.mark.parametrize("target", ["layers/norm", "layers/attn/q_proj/bias"])
    def test_stacked_vectors_take_no_adapter(self, target):
        with pytest.raises(
            StructureError, match=rf"{target}(.|\n)*(external name|one vector|does not fit)(.|\n)*hint: "
        ):
            lora.add(decoder(), lora.Config(rank=2, targets=target), key=KEY)
