"""Adapters of a mixture's experts beside weights W + s B A that are multiplied out, on one device and on many."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from safetensors.numpy import load_file, save_file

import lowtide as lt
from lowtide import models
from lowtide.core import (
    ConfigError,
    ModelFileError,
    StructureError,
    activation_sharding,
    leaves_with_paths,
    map_with_paths,
)
from lowtide.models._experts import grouped_linear, mixture
from lowtide.train import ShardingRules, make_mesh
from tests.models.kinds import KINDS

WEIGHTS = "adapter_model.safetensors"
KEY = jax.random.key(0)
TOKENS = jax.random.randint(KEY, (4, 2), 0, 96)  # few rows: a CPU compiles a block of every length up to them
BATCH = {"tokens": TOKENS, "labels": TOKENS}
TARGETS = {"mixtral": "**/experts/**", "qwen3_moe": ["**/experts/{up,down}"], "gpt_oss": ["**/experts/**", "!**/bias"]}


@functools.cache
def base(family: str) -> models.Decoder:
    return jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim == 4 else leaf, models.init(KINDS[family], key=KEY))


@functools.cache
def adapted(family: str, rslora: bool = False) -> models.Decoder:
    """A model whose adapters have values that are no zeros."""
    config = lt.lora.Config(rank=3, alpha=2.0, targets=TARGETS[family], rslora=rslora)
    model = lt.lora.add(base(family), config, key=KEY)
    random = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(0.3 * random.normal(size=leaf.shape), leaf.dtype)  # noqa: E731
    return map_with_paths(lambda path, leaf: draw(leaf) if "lora_" in path else leaf, model)


def dense(model: Any) -> Any:
    """Multiply every adapter out."""

    def one(node: Any) -> Any:
        if not isinstance(node, lt.lora.LoRAWeight):
            return node
        scale = 2.0 / (3**0.5 if node.rslora else 3)
        return node.weight + scale * jnp.einsum("leor,leri->leoi", node.lora_b, node.lora_a)

    return jax.tree.map(one, model, is_leaf=lambda node: isinstance(node, lt.lora.LoRAWeight))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_values_and_gradients_are_those_of_weights_multiplied_out(family: str) -> None:
    model, config = adapted(family, rslora=family == "gpt_oss"), KINDS[family]
    nodes = lt.lora.report(model).matched
    assert all(each.shape[:2] == (4, 4) for each in nodes) and len(nodes) == (3 if family == "mixtral" else 2)
    traced = jax.jit(lt.value_and_grad(lambda m: models.loss(m, BATCH, remat=True)[0], "**/lora_*")).trace(model)
    ours = traced.lower().compile()(model)
    wanted = jax.jit(lt.value_and_grad(lambda m: models.loss(dense(m), BATCH)[0], "**/lora_*"))(model)
    for (path, one), (_, other) in zip(leaves_with_paths(ours), leaves_with_paths(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6, err_msg=path)
        assert np.abs(one).max() > 1e-5, path
    merged, whole = lt.lora.merge(model), jax.jit(dense)(model)
    for (path, one), (_, other) in zip(leaves_with_paths(merged), leaves_with_paths(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6, err_msg=path)
    experts: Any = config.experts
    shape = (experts.num_experts, config.hidden_size, experts.intermediate_size)
    made = {
        eqn.primitive.name
        for eqn in lt.jaxprs.equations(traced.jaxpr)
        if any(getattr(var.aval, "shape", ())[-3:] == shape for var in eqn.outvars)
    }
    assert not made & {"add", "mul", "dot_general", "add_any", "dynamic_update_slice", "while"}, made


@pytest.mark.slow
def test_experts_on_many_devices_are_those_of_one() -> None:
    experts: Any = KINDS["mixtral"].experts
    layers = adapted("mixtral").layers
    mlp = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[1]), layers["mlp"])
    x = jax.random.normal(KEY, (8, 1, 32))

    def loss(mlp: Any, x: Any, mesh: Any = None) -> Any:
        with activation_sharding(lambda h: h, mesh or make_mesh(devices=jax.devices()[:1])):
            return jnp.sum(jnp.sin(mixture(mlp, x, experts, jax.nn.silu)[0]))

    want = jax.jit(lt.value_and_grad(loss, "**/lora_*"))(mlp, x)
    mesh = make_mesh(fsdp=2, data=2, expert=2)
    rules = ShardingRules(mesh=mesh, rules={r"experts/.*": P("expert")})
    rows = jax.sharding.NamedSharding(mesh, P(rules.batch_axes))
    placed = jax.device_put((mlp, x), (map_with_paths(rules.of, mlp), rows))
    got = jax.jit(lt.value_and_grad(functools.partial(loss, mesh=mesh), "**/lora_*"))(*placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4), got, want)


@pytest.mark.slow
def test_a_trainer_with_divided_experts_takes_the_steps_of_one_device() -> None:
    model = lt.lora.add(base("mixtral"), lt.lora.Config(rank=2, targets=["**/experts/**", "**/{q,v}_proj"]), key=KEY)
    mesh = make_mesh(expert=2, fsdp=2, devices=jax.devices()[:4])
    rules = ShardingRules(mesh=mesh, rules={r".*experts/.*": P(None, "expert")})
    losses: dict[bool, Any] = {}
    for is_divided in (False, True):
        trainer = lt.Trainer(
            jax.tree.map(jnp.array, model),
            models.loss,
            optax.adam(1e-2),
            wrt="**/lora_*",
            sharding=rules if is_divided else None,
        )
        losses[is_divided] = [record["loss"] for record in trainer.fit([BATCH] * 3, num_steps=3, progress=False)]
        state = trainer.state
    np.testing.assert_allclose(losses[True], losses[False], rtol=1e-4)
    assert losses[True][-1] < losses[True][0]
    lora_b = state.trainable.layers["mlp"]["experts"]["up"]["weight"].lora_b
    assert lora_b.shape == (4, 4, 48, 2) and lora_b.addressable_shards[0].data.shape[1] == 2


def test_what_experts_do_not_take_is_refused_by_path() -> None:
    model, add = base("mixtral"), functools.partial(lt.lora.add, key=KEY)
    for config in (
        lt.lora.Config(targets="**/experts/up", rank=2, dora=True),
        lt.lora.Config(targets="**/experts/up", rank=2, layers=[0]),
        lt.lora.Config(targets="**/experts/up", rank=2, init="pissa"),
        lt.lora.IA3Config(targets="**/experts/up", feedforward=()),
        lt.lora.VeRAConfig(targets="**/experts/up", rank=2),
    ):
        with pytest.raises(ConfigError, match=r"layers/mlp/experts/up/weight: experts support only LoRA(.|\n)*hint:"):
            add(model, config)
    with pytest.raises(StructureError, match="experts/down/bias: is not a weight matrix"):
        add(base("gpt_oss"), lt.lora.Config(targets="**/experts/**", rank=2))
    with pytest.raises(ConfigError, match="rank of .*experts/down/weight must be an integer from 1 to"):
        add(model, lt.lora.Config(targets="**/experts/down", rank=33))
    with pytest.raises(StructureError, match="experts/down/weight: an adapter of experts does not support dropout"):
        lt.lora.dropout(adapted("mixtral"), 0.1, key=KEY)
    with pytest.raises(StructureError, match="experts/down/weight: quantised experts do not support adapters"):
        lt.lora.loftq(model, lt.lora.Config(targets="**/experts/down", rank=2), "int8", key=KEY)
    with pytest.raises(StructureError, match="w: is not a weight matrix"):  # what it is, nobody says
        add({"w": jnp.ones((2, 3, 4, 4))}, lt.lora.Config(rank=2, targets="w"))


@pytest.mark.slow
def test_two_adapters_of_experts_add_up() -> None:
    one = adapted("mixtral")
    other = map_with_paths(lambda path, leaf: -0.5 * leaf if "lora_a" in path else leaf, one)
    both, logits = lt.lora.combine([one, other], [1.0, 2.0]), jax.jit(models.logits)
    np.testing.assert_allclose(logits(both, TOKENS), logits(base("mixtral"), TOKENS), rtol=0, atol=1e-4)
    assert dataclasses.is_dataclass(both) and lt.lora.report(both).matched[0].rank == 6


@pytest.mark.slow
def test_experts_stored_the_other_way_round_read_with_b_and_write_with_a() -> None:
    draw = lambda seed, *shape: jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)  # noqa: E731
    node = lt.lora.LoRAWeight(draw(0, 2, 5, 4), draw(1, 2, 3, 4), draw(2, 2, 5, 3), alpha=2.0)
    x, sizes, expert = draw(3, 4, 5), jnp.array([1, 2]), [0, 1, 1]
    weight, a, b = (np.asarray(leaf) for leaf in (node.weight, node.lora_a, node.lora_b))
    whole = weight + 2 / 3 * np.einsum("emr,ern->emn", b, a)
    multiply = jax.jit(functools.partial(grouped_linear, transposed=True))
    got = np.asarray(multiply(x, cast("Any", node), sizes))
    np.testing.assert_allclose(got[:3], np.einsum("mi,mio->mo", np.asarray(x)[:3], whole[expert]), atol=1e-5)
    assert not got[3].any()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_files_have_a_module_for_each_expert_and_come_back(family: str, tmp_path: Path) -> None:
    model = adapted(family, rslora=family == "qwen3_moe")
    lt.lora.save(model, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    name = {"mixtral": "block_sparse_moe.experts.3.w3", "qwen3_moe": "mlp.experts.3.up_proj"}[family]
    node = model.layers["mlp"]["experts"]["up"]["weight"]
    for factor, leaf in (("lora_A", node.lora_a), ("lora_B", node.lora_b)):
        found = tensors[f"base_model.model.model.layers.2.{name}.{factor}.weight"]
        np.testing.assert_array_equal(found, np.asarray(leaf)[2, 3])
    again = lt.lora.load(base(family), tmp_path)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    jax.tree.map(np.testing.assert_array_equal, again, model)
    del tensors[f"base_model.model.model.layers.2.{name}.lora_A.weight"]
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ModelFileError, match=rf"1 missing: .*layers.2.{name}.lora_A"):
        lt.lora.load(base(family), tmp_path)


def test_files_of_experts_that_cannot_be_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:  # neither modules elsewhere nor parameters
        patched.setattr(models.Decoder, "expert_parameters", {})
        with pytest.raises(StructureError, match=r"experts/down/weight: the external name has no module"):
            lt.lora.check_names(adapted("gpt_oss"))
    lt.lora.save(adapted("mixtral"), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "exclude_modules": ["0.w1"]}))
    kept = {name: leaf for name, leaf in load_file(tmp_path / WEIGHTS).items() if ".0.w1." not in name}
    save_file(kept, tmp_path / WEIGHTS)
    with pytest.raises(ModelFileError, match=r"experts/gate/weight supports only LoRA of all 16 (.|\n)*LoRA of 12"):
        lt.lora.load(base("mixtral"), tmp_path)
    # Experts that are one parameter there are no modules, though their names are in the list.
    attention = lt.lora.add(base("qwen3_moe"), lt.lora.Config(rank=2, targets="**/q_proj"), key=KEY)
    lt.lora.save(attention, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    names = {"target_modules": ["q_proj", "gate_proj", "up_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **names}))
    assert len(lt.lora.report(lt.lora.load(base("qwen3_moe"), tmp_path)).matched) == 1


def test_ia3_files_of_experts_are_refused(tmp_path: Path) -> None:
    lt.lora.save(adapted("mixtral"), tmp_path)
    names = [name for name in load_file(tmp_path / WEIGHTS) if name.endswith(".lora_B.weight")]
    tensors = {name.replace("lora_B.weight", "ia3_l"): np.ones((64, 1), np.float32) for name in names}
    modules = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    config = {"peft_type": "IA3", "target_modules": modules, "feedforward_modules": []}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ModelFileError, match=r"supports only LoRA of all 16 (.|\n)*got: IA3 of 16"):
        lt.lora.load(base("mixtral"), tmp_path)


def test_gate_and_up_of_two_scales_are_refused_before_a_run(tmp_path: Path) -> None:
    config = lt.lora.Config(rank=2, targets="**/experts/**", alpha_pattern={"**/experts/up": 7.0})
    model = lt.lora.add(base("mixtral"), config, key=KEY)
    for run in (lt.lora.check_names, lambda model: lt.lora.save(model, tmp_path)):
        with pytest.raises(StructureError, match=r"experts/gate(.|\n)*one adapter of .*gate_up_proj, with one scale"):
            run(model)
    assert not list(tmp_path.iterdir())
