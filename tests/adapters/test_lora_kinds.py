"""rsLoRA, DoRA, (IA)³ and VeRA: parity with dense weights, nothing multiplied out, layers, dropout, files, refusals."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide import models
from lowtide.adapters import lora
from lowtide.adapters.lora import _initialization, _kinds, _lora, _model
from lowtide.adapters.lora._schema import AdapterFile
from lowtide.core import (
    ConfigError,
    ModelFileError,
    NonFiniteError,
    SelectionError,
    StructureError,
    combine,
    linear,
    partition,
    tree_bytes,
    value_and_grad,
)
from lowtide.finetune._config import LORA_VARIANTS
from lowtide.jaxprs import equations
from tests.models.kinds import KINDS

KEY = jax.random.key(0)
OUT, IN, LAYERS, ROWS = 40, 56, 3, 5
CONFIGS: dict[str, Any] = {
    "LoRA": lora.Config(rank=2, alpha=2, targets="w"),
    "rsLoRA": lora.Config(rank=4, alpha=2, targets="w", rslora=True, init="gaussian"),
    "DoRA": lora.Config(rank=2, alpha=2, targets="w", dora=True),
    "(IA)³": lora.IA3Config(targets="w", feedforward=()),
    "(IA)³ of inputs": lora.IA3Config(targets="w", feedforward="w"),
    "VeRA": lora.VeRAConfig(rank=3, targets="w"),
    "DoRA of a layer": lora.Config(rank=2, alpha=2, targets="w", dora=True, layers=[1]),
    "(IA)³ of a layer": lora.IA3Config(targets="w", feedforward=(), layers=[1]),
    "VeRA of a layer": lora.VeRAConfig(rank=3, targets="w", layers=[1]),
}


def noisy(model: Any) -> Any:
    """Adapters that do something, in every leaf that trains."""

    def fill(path: Any, leaf: Any) -> Any:
        name = getattr(path[-1], "name", "")
        noise = 0.3 * np.random.default_rng(sum(map(ord, name))).normal(size=leaf.shape)
        return jnp.asarray(np.asarray(leaf) + noise, leaf.dtype) if name.startswith("lora_") else leaf

    return jax.tree_util.tree_map_with_path(fill, model)


def base(dtype: Any = jnp.float32) -> Any:
    return {"w": jnp.asarray((np.random.default_rng(0).normal(size=(LAYERS, OUT, IN)) / IN**0.5).astype(dtype))}


@functools.cache
def build(kind: str, dtype: Any = jnp.float32) -> Any:
    return noisy(lora.add(base(dtype), CONFIGS[kind], key=KEY))


def outputs(model: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda _, w: (None, linear(x, w)), None, model["w"])[1]


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.sin(outputs(model, x).astype(jnp.float32)))


X = jnp.asarray(np.random.default_rng(5).normal(size=(ROWS, IN)), jnp.float32)
OUTPUTS = jax.jit(outputs)


def dense(node: Any) -> jax.Array:
    """Every kind written out from its paper, with the norm of DoRA as a constant; no code of the node's."""
    w, on = node.weight, 1.0 if node.layer_scale is None else node.layer_scale[:, None, None]
    if isinstance(node, lora.IA3Weight):
        scale = node.lora_scale[:, None, :] if node.feedforward else node.lora_scale[:, :, None]
        return w * (on * scale + 1 - on)
    if isinstance(node, lora.VeRAWeight):
        b, d = node.lora_lambda_b[:, :, None], node.lora_lambda_d[:, :, None]
        return w + on * ((b * node.vera_b) @ (d * node.vera_a))
    rank = node.lora_a.shape[1]
    whole = w + on * node.alpha / (rank**0.5 if node.rslora else rank) * (node.lora_b @ node.lora_a)
    if node.lora_magnitude is None:
        return whole
    norm = jax.lax.stop_gradient(jnp.linalg.norm(whole, axis=-1))
    return jnp.where(on > 0, whole * (node.lora_magnitude / norm)[:, :, None], w)


DENSE = jax.jit(dense)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("kind", CONFIGS)
def test_values_and_gradients_equal_those_of_the_dense_weight_and_merge(kind: str) -> None:
    fresh = lora.add(base(), CONFIGS[kind], key=KEY)
    np.testing.assert_allclose(OUTPUTS(fresh, X), OUTPUTS(base(), X), atol=1e-6)
    model = build(kind)
    value, grads = jax.jit(value_and_grad(jax.checkpoint(loss), wrt=lora.TRAINABLE))(model, X)
    trainable, frozen = partition(model, lora.TRAINABLE)
    want = jax.jit(jax.value_and_grad(lambda t: loss({"w": dense(combine(t, frozen)["w"])}, X)))(trainable)
    np.testing.assert_allclose(value, want[0], rtol=1e-5, atol=2e-8)  # a mean of numbers of both signs
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, want[1])
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))
    merged = np.asarray(lora.merge(model)["w"])
    np.testing.assert_allclose(merged, DENSE(model["w"]), rtol=1e-5, atol=1e-6)
    if "layer" in kind:
        np.testing.assert_array_equal(merged[::2], np.asarray(model["w"].weight)[::2])
        assert all(not np.asarray(leaf)[::2].any() for leaf in jax.tree.leaves(grads))
    assert lora.disable(model)["w"] is model["w"].weight


@pytest.mark.slow_after(8)
@pytest.mark.parametrize("kind", CONFIGS)
def test_no_second_array_of_the_weights_size_is_made(kind: str) -> None:
    """Of DoRA the squares of W are summed at once; everything else is thin."""
    model = build(kind, jnp.bfloat16)
    jaxpr = jax.make_jaxpr(value_and_grad(loss, wrt=lora.TRAINABLE))(model, X.astype(jnp.bfloat16))
    made = {
        equation.primitive.name
        for equation in equations(jaxpr.jaxpr)
        for var in equation.outvars
        if tuple(getattr(var.aval, "shape", ()))[-2:] in ((OUT, IN), (IN, OUT))
    }
    squared = {"convert_element_type", "square", "stop_gradient", "integer_pow", "transpose", "copy"}
    assert not made - squared, made
    assert "DoRA" in kind or not made & {"square", "integer_pow", "convert_element_type"}


@pytest.mark.parametrize("kind", ["DoRA", "(IA)³", "VeRA"])
def test_weight_at_x_of_one_matrix(kind: str) -> None:
    node = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[1]), build(kind)["w"])
    want, x = np.asarray(DENSE(build(kind)["w"]))[1], np.asarray(X)
    found = jax.jit(lambda node: (node @ X.T, node @ X[0], X @ node.T))(node)
    for one, other in zip(found, (want @ x.T, want @ x[0], x @ want.T), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow_after(7)
@pytest.mark.parametrize("kind", CONFIGS)
def test_files_keep_the_adapter_and_its_gradient(kind: str, tmp_path: Any) -> None:
    model = build(kind)
    if "layer" in kind:  # what is not saved comes back as zeros, and is not seen
        off = np.arange(LAYERS) != 1
        node = jax.tree_util.tree_map_with_path(
            lambda path, leaf: (
                jnp.asarray(np.where(off.reshape(-1, *[1] * (leaf.ndim - 1)), 0, leaf))
                if path[-1].name.startswith("lora_")
                else leaf
            ),
            model["w"],
        )
        model = {"w": node}
    lora.save(model, tmp_path)
    again = lora.load(base(), tmp_path)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    jax.tree.map(np.testing.assert_array_equal, again, model)
    step = jax.jit(value_and_grad(loss, wrt=lora.TRAINABLE))
    jax.tree.map(np.testing.assert_array_equal, step(again, X), step(model, X))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "VeRA"])
def test_dropout_is_the_same_for_one_key_and_right_on_average(kind: str) -> None:
    model = build(kind)
    run = jax.jit(lambda key: outputs(lora.dropout(model, 0.5, key=key), X))
    np.testing.assert_array_equal(run(KEY), run(KEY))
    many = np.asarray(jax.jit(jax.vmap(run))(jax.random.split(KEY, 2000)))
    assert np.abs(many[0] - many[1]).max() > 0.01
    assert np.abs(many[0, 0] - many[0, 1]).max() > 0.01  # layers draw their own
    np.testing.assert_allclose(many.mean(0), OUTPUTS(model, X), atol=0.15)
    dropped = lambda x: outputs(lora.dropout(model, 0.5, key=KEY), x)  # noqa: E731
    plain, again = (
        jax.jit(jax.grad(lambda x, f=f: jnp.sum(f(dropped)(x))))(X) for f in (lambda fn: fn, jax.checkpoint)
    )
    np.testing.assert_allclose(plain, again, rtol=1e-5, atol=1e-6)


class TestDecoder:
    def model(self, kind: str = "qwen2") -> models.Decoder:
        """Shapes are enough to add to."""
        return jax.eval_shape(lambda: models.init(KINDS[kind], key=KEY))

    @pytest.mark.parametrize(("kind", "count"), [("qwen2", 7), ("phi3", 4), ("qwen3_moe", 4)])
    def test_all_linear_is_every_projection_of_a_layer(self, kind: str, count: int) -> None:
        found = lora.report(lora.add(self.model(kind), lora.Config(rank=2, targets="all-linear"), key=KEY))
        assert len(found.matched) == count
        assert all(each.path.endswith("_proj/weight") for each in found.matched)

    def test_patterns_exclusions_and_the_report(self) -> None:
        config = lora.Config(
            rank=4,
            targets="all-linear",
            exclude="**/o_proj",
            rank_pattern={"**/down_proj": 2},
            alpha_pattern=[("**/{up,down}_proj", 5)],
        )
        model = lora.add(self.model(), config, key=KEY)
        found = {each.path.split("/")[2]: each for each in lora.report(model).matched}
        assert {name: each.rank for name, each in found.items()} == {
            **dict.fromkeys(["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], 4),
            "down_proj": 2,
        }
        assert model.layers["mlp"]["down_proj"]["weight"].alpha == 5
        assert found["down_proj"].num_parameters == 4 * 2 * (32 + 48)
        assert lora.report(model).trainable_bytes == tree_bytes(partition(model, "**/lora_*")[0])

    @pytest.mark.slow
    def test_merging_ia3_scales_the_bias(self) -> None:
        model = models.init(KINDS["qwen2"], key=KEY)
        bias = model.layers["attn"]["k_proj"]["bias"]
        model.layers["attn"]["k_proj"]["bias"] = jnp.ones_like(bias)
        model = noisy(lora.add(model, lora.IA3Config(), key=None))
        tokens, logits = np.arange(12).reshape(2, 6), jax.jit(models.logits)
        np.testing.assert_allclose(logits(lora.merge(model), tokens), logits(model, tokens), atol=1e-5)

    def test_routers_are_refused_by_path(self) -> None:
        with pytest.raises(StructureError, match=r"(?s)layers/mlp/router/weight.*hint: "):
            lora.add(self.model("mixtral"), lora.Config(rank=2, targets="layers/mlp/router"), key=KEY)


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"init": "eva"}, "init must be .*, not 'eva'"),
            ({"init": "pisa"}, "init must be .*, not 'pisa'.*hint: did you mean \"pissa\""),
            ({"rank_pattern": {"w": 0}}, r"rank_pattern\['w'\] must be an integer of at least 1, not 0.*hint: "),
            ({"rank_pattern": [("w", 2, 3)]}, r"rank_pattern must map globs on module paths to values.*\('w', 2, 3\)"),
            ({"alpha_pattern": {"w": -1}}, r"alpha_pattern\['w'\] must be a finite number above 0, not -1.*hint: "),
            ({"layers": []}, r"layers must be one or more indices counted from 0, not \[\].*hint: "),
            ({"layers": [-1]}, r"layers must be one or more indices counted from 0, not \[-1\].*hint: "),
            ({"dora": 1}, "dora must be True or False, not 1"),
        ],
    )
    def test_configurations(self, options: Any, match: str) -> None:
        with pytest.raises(ConfigError, match=rf"(?s){match}"):
            lora.Config(**options)

    def test_what_matches_nothing(self) -> None:
        for options in ({"rank_pattern": {"v": 2}}, {"exclude": "v"}):
            with pytest.raises(SelectionError, match="'v' matches nothing"):
                lora.add(base(), lora.Config(rank=2, targets="w", **options), key=KEY)
        with pytest.raises(SelectionError, match="feedforward: pattern 'v' matches nothing"):
            lora.add(base(), lora.IA3Config(targets="w", feedforward="v"))
        with pytest.raises(ConfigError, match="layers: 3 is not a layer of the targets"):
            lora.add(base(), lora.Config(rank=2, targets="w", layers=[0, 3]), key=KEY)
        with pytest.raises(ConfigError, match="all-linear.*needs a model that declares"):
            lora.add(base(), lora.Config(targets="all-linear"), key=KEY)
        with pytest.raises(ConfigError, match="key is missing: the initial values are random"):
            lora.add(base(), lora.Config(targets="w"))
        with pytest.raises(ConfigError, match=r"config must be a Config, IA3Config or VeRAConfig, not \{.*\nhint: "):
            lora.add(base(), {"rank": 2}, key=KEY)

    def test_a_bias_that_the_model_adds_itself(self) -> None:
        model = {"a": {"weight": jnp.ones((4, 4)), "bias": jnp.ones(4)}}
        with pytest.raises(StructureError, match=r"(?s)a/weight: its output has a bias.*hint: "):
            lora.add(model, lora.IA3Config(targets="a", feedforward=()))

    def test_a_merge_that_is_not_finite(self) -> None:
        node = build("LoRA")["w"]
        broken = dataclasses.replace(node, lora_b=node.lora_b.at[0, 0, 0].set(jnp.inf))
        with pytest.raises(NonFiniteError, match=r"(?s)w: the merged weight has values.*hint: "):
            lora.merge({"w": broken})

    def test_sums_of_what_is_no_sum_and_files_of_several_kinds(self, tmp_path: Any) -> None:
        with pytest.raises(StructureError, match=r"(?s)kind DoRA is not a sum.*hint: "):
            lora.combine([build("DoRA"), build("DoRA")])
        both = {"a": build("DoRA")["w"], "b": build("LoRA")["w"]}
        with pytest.raises(StructureError, match=r"several kinds(.|\n)*DoRA and LoRA"):
            lora.save(both, tmp_path)
        models = [build(kind) for kind in ("VeRA of a layer", "rsLoRA")]
        got = lora.merge(lora.combine(models, [1.0, -0.5]))["w"]
        weight = np.asarray(base()["w"])
        want = weight + sum(by * (np.asarray(DENSE(m["w"])) - weight) for m, by in zip(models, (1, -0.5), strict=True))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        ("kind", "change", "match"),
        [
            ("VeRA", {"save_projection": False}, "the projections are not in the file"),
            ("VeRA", {"r": 2**31}, "r has an unusable value"),
            ("VeRA", {"r": 2}, "does not fit"),
            ("(IA)³", {"feedforward_modules": ["w.1"]}, "only some layers of .* are feedforward modules"),
            ("(IA)³", {"feedforward_modules": "("}, "not a LoRA configuration"),
            ("(IA)³", {"r": 4}, "option 'r' is not supported"),
            ("DoRA", {"use_dora": False}, "unexpected: .*lora_magnitude_vector"),
            ("LoRA", {"use_dora": True}, "missing: .*lora_magnitude_vector"),
            ("LoRA", {"layers_to_transform": [0, 1]}, "unexpected: .*w.2"),
        ],
    )
    def test_files_that_say_otherwise(self, kind: str, change: Any, match: str, tmp_path: Any) -> None:
        stack = {"layers": {"w": build(kind)["w"]}}
        lora.save(stack, tmp_path)
        path = tmp_path / "adapter_config.json"
        change = {k: ["layers.1.w"] if v == ["w.1"] else v for k, v in change.items()}
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(ModelFileError, match=rf"(?s){match.replace('w.2', 'lora_')}.*hint: "):
            lora.load({"layers": base()}, tmp_path)


def test_a_switch_of_lora_has_a_row_in_the_table_of_variants() -> None:
    """A field or an option outside of the table would reach no guard, so its variant would silently do nothing."""
    fields = {field.name: field.type for field in dataclasses.fields(lora.Config)}
    assert {name for name, kind in fields.items() if kind == "bool"} == {row.field for row in _lora.VARIANTS}
    options = {name for name in AdapterFile.model_fields if name.startswith("use_")}
    assert options == {row.option for row in _lora.VARIANTS}
    assert {name for switches in LORA_VARIANTS.values() for name in switches} == {row.field for row in _lora.VARIANTS}
    for row in _lora.VARIANTS:
        assert not (row.is_sum and row.leaf) and bool(row.leaf) == bool(row.suffix)
        assert getattr(lora.LoRAWeight, row.leaf or row.field, 0) in (None, False)  # the node's default is plain LoRA
        assert not row.leaf or (row.leaf in lora.LoRAWeight.AXES and row.leaf.startswith("lora_"))


class TestUnknownVariant:
    """rsLoRA, with a row in the table that does not say what it computes."""

    CONFIG = lora.Config(rank=2, targets="w", rslora=True)
    NODE = lora.LoRAWeight(jnp.ones((6, 8)), jnp.ones((2, 8)), jnp.ones((6, 2)), alpha=2.0, rslora=True)

    @pytest.fixture(autouse=True)
    def rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = tuple(row._replace(name=f"new {row.name}", is_sum=False) for row in _lora.VARIANTS)
        for module in (_lora, _initialization, _kinds, _model):
            monkeypatch.setattr(module, "VARIANTS", rows)
        monkeypatch.setattr(type(_lora.LORA_KIND), "variants", rows)

    def add(self, model: Any, **options: Any) -> Any:
        return lora.add(model, self.CONFIG, key=KEY, **options)

    def test_it_is_refused_when_it_is_added(self) -> None:
        mixture, x = jax.eval_shape(lambda: models.init(KINDS["mixtral"], key=KEY)), jnp.ones((2, 8))
        experts = dataclasses.replace(self.CONFIG, targets="**/experts/up")
        table = dataclasses.replace(self.CONFIG, targets="outer/embed")
        kernel = {"fn": lambda p, x: jnp.einsum("bi,ihd->bhd", x, p["w"]), "args": (x,)}
        product = {"fn": lambda p, x: x @ p["w"], "args": (x,)}
        cases: list[tuple[str, Any]] = [
            ("w: this kernel supports only plain LoRA", lambda: self.add({"w": jnp.ones((8, 2, 3))}, **kernel)),
            (r"as \[in, out\].*which new rsLoRA, new DoRA, ", lambda: self.add({"w": jnp.ones((8, 3))}, **product)),
            ("experts support only LoRA.*got: new rsLoRA", lambda: lora.add(mixture, experts, key=KEY)),
            ("an embedding supports only LoRA.*got: new rsLoRA", lambda: lora.add(mixture, table, key=KEY)),
            ("LoftQ .* needs rslora=False, dora=False", lambda: lora.loftq(base(), self.CONFIG, key=KEY)),
            ("init: 'pissa' contradicts rslora", lambda: dataclasses.replace(self.CONFIG, init="pissa")),
        ]
        for match, call in cases:
            with pytest.raises(ConfigError, match=f"(?s){match}"):
                call()
        assert self.add(base())["w"].kind == "new rsLoRA"

    def test_its_nodes_are_no_sums(self, tmp_path: Any) -> None:
        model = {"w": self.NODE}
        plain = {"v": dataclasses.replace(self.NODE, rslora=False)}
        cases: list[tuple[str, Any]] = [
            ("the kind new rsLoRA is not a sum", lambda: lora.combine([model, model])),
            ("w: new rsLoRA cannot be unmerged", lambda: lora.unmerge({"w": jnp.ones((6, 8))}, lora.split(model)[0])),
            ("does not support new rsLoRA", lambda: self.NODE.rows(jnp.array([1]))),
            ("several kinds.*LoRA and new rsLoRA", lambda: lora.save(model | plain, tmp_path)),
        ]
        for match, call in cases:
            with pytest.raises(StructureError, match=f"(?s){match}"):
                call()
        with pytest.raises(TypeError):
            jnp.ones((2, 6)) @ self.NODE

    @pytest.mark.parametrize(
        ("weight", "changes", "match"),
        [
            (jnp.ones((6, 8)), {"init_lora_weights": "olora"}, "option 'init_lora_weights' is not supported"),
            (jnp.ones((2, 3, 8)), {"lowtide_kernels": {"w": [2, 1]}}, "got: use_rslora=True, use_dora=False, "),
        ],
    )
    def test_its_files(self, weight: Any, changes: Any, match: str, tmp_path: Any) -> None:
        lora.save({"w": self.NODE}, tmp_path)
        path = tmp_path / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        with pytest.raises(ModelFileError, match=f"(?s){match}"):
            lora.load({"w": weight}, tmp_path)
