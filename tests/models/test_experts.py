"""Mixtures: values beside every expert computing every token, arithmetic beside the paper's, and experts on devices."""

from __future__ import annotations

import dataclasses
import math
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import lowtide as lt
from lowtide import models
from lowtide.core import ConfigError, activation_sharding, map_with_paths
from lowtide.models import _experts
from lowtide.models._experts import grouped_linear, mixture
from lowtide.train import ShardingRules, make_mesh

from .kinds import KINDS

KEY = jax.random.key(0)


def drawn(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


SIZES = [
    (50, (0, 40, 0, 7, 3)),
    (50, (10, 10, 10, 10, 10)),
    (50, (0, 0, 0, 0, 1)),
    (50, (5, 0, 0, 0, 0)),
    (700, (0, 640, 2, 30, 28)),
    (4, (0, 0, 3, 0, 1)),
    (30, (0, 19, *[0] * 30, 1, 10)),
    (60, (*[1] * 60, *[0] * 10)),
    (90, (3, 14, 0, 9)),  # the other rows belong to experts of other devices
]
"""Numbers of rows, of all experts and of each."""


# Every size on both platforms. Whether weights are transposed alternates: it changes the products, not the rows.
@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("num_rows", "sizes", "transposed", "platform"),
    [(*SIZES[i], (i + j) % 2 > 0, name) for i in range(len(SIZES)) for j, name in enumerate(("cpu", "gpu"))],
)
def test_grouped_products_and_their_gradients_equal_dense_ones(
    num_rows: int, sizes: tuple[int, ...], transposed: bool, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_experts, "traced_device", lambda: SimpleNamespace(platform=platform))
    monkeypatch.setattr(_experts, "_COPIED_BYTES", 8 * 6 * 9 * 4)  # so that tiles take several steps
    count = len(sizes)
    shapes = ((num_rows, 6), (count, 6, 9) if transposed else (count, 9, 6), (num_rows, 9))
    x, weight, probe = (drawn(seed, *shape) for seed, shape in enumerate(shapes))
    expert = np.repeat(np.arange(count), sizes)

    def ours(x: Any, weight: Any) -> Any:
        everywhere = 16 if num_rows == 90 else None
        out = grouped_linear(x, weight, jnp.asarray(sizes), transposed=transposed, num_experts=everywhere)
        return jnp.sum(out * probe), out

    def dense(x: Any, weight: Any) -> Any:
        rows = weight[expert] if transposed else weight[expert].transpose(0, 2, 1)
        out = jnp.einsum("mi,mio->mo", x[: len(expert)], rows)
        out = jnp.concatenate([out, jnp.zeros((num_rows - len(expert), 9))])
        return jnp.sum(out * probe), out

    found, wanted = (jax.jit(jax.value_and_grad(fn, argnums=(0, 1), has_aux=True))(x, weight) for fn in (ours, dense))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)
    # What does not train costs nothing: no loop over gradients of weights, and no rows that wait for it.
    of_x = str(jax.make_jaxpr(jax.grad(lambda x: ours(x, weight)[0]))(x)).count("while[")
    of_both = str(jax.make_jaxpr(jax.grad(ours, (0, 1), has_aux=True))(x, weight)).count("while[")
    assert (of_x, of_both) in {(2, 3), *([(0, 0)] if platform == "gpu" and num_rows < count else [])}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_what_is_not_finite_stays_with_its_expert(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_experts, "traced_device", lambda: SimpleNamespace(platform=platform))
    x, weight, probe = (drawn(seed, *shape) for seed, shape in enumerate(((50, 6), (3, 9, 6), (50, 9))))
    probe = probe.at[20].set(jnp.inf).at[48].set(jnp.nan)  # a row of the second expert, and one of none

    def total(weight: Any) -> Any:
        return jnp.sum(grouped_linear(x, weight, jnp.asarray([12, 16, 10])) * probe)

    of_weight = np.asarray(jax.jit(jax.grad(total))(weight))
    assert np.isfinite(of_weight[[0, 2]]).all() and not np.isfinite(of_weight[1]).all()


def _dense(mlp: Any, x_BTD: Any, experts: models.Experts) -> Any:
    """Every expert computes every token."""
    probs = jax.nn.softmax(
        x_BTD @ mlp["router"]["weight"].T + mlp["router"].get("bias", jnp.zeros(experts.num_experts))[None, None]
    )
    top, chosen = jax.lax.top_k(probs, experts.num_experts_per_token)
    top = top / jnp.sum(top, -1, keepdims=True) if experts.normalize else top
    shares = jnp.sum(jax.nn.one_hot(chosen, experts.num_experts) * top[..., None], axis=2)
    part = mlp["experts"]
    if experts.clamped:
        both = jnp.einsum("btd,edf->btef", x_BTD, part["gate_up"]["weight"]) + part["gate_up"]["bias"][None, None]
        gate, up = jnp.minimum(both[..., ::2], experts.limit), jnp.clip(both[..., 1::2], -experts.limit, experts.limit)
        hidden = (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
        out = jnp.einsum("btef,efd->bted", hidden, part["down"]["weight"]) + part["down"]["bias"][None, None]
    else:
        gate, up = (jnp.einsum("btd,efd->btef", x_BTD, part[name]["weight"]) for name in ("gate", "up"))
        out = jnp.einsum("btef,edf->bted", jax.nn.silu(gate) * up, part["down"]["weight"])
    return jnp.sum(out * shares[..., None], axis=2)


def _mlp(kind: str) -> Any:
    """Weights of one layer, of the size that they begin with times 20."""
    shapes = jax.eval_shape(lambda: models.init(KINDS[kind], key=KEY)).layers["mlp"]
    return map_with_paths(
        lambda path, leaf: (0.1 if "bias" in path else 0.4) * drawn(len(path), *leaf.shape[1:]), shapes
    )


# The three ways to compute a mixture: shares that add up to 1 or not, and biases with clamped hidden values.
@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("kind", "meshes"),
    [
        ("mixtral", ({}, {"fsdp": 2, "data": 2, "expert": 2})),
        ("qwen3_moe", ({"expert": 4, "fsdp": 1},)),
        ("gpt_oss", ({"fsdp": 2, "data": 2, "expert": 2},)),
    ],
)
def test_a_mixture_equals_a_dense_reference_on_one_device_and_on_many(
    kind: str, meshes: tuple[dict[str, int], ...]
) -> None:
    experts: Any = KINDS[kind].experts
    mlp, x, probe = _mlp(kind), drawn(5, 8, 11, 32), drawn(6, 8, 11, 32)
    reference = jax.value_and_grad(lambda mlp, x: jnp.sum(_dense(mlp, x, experts) * probe), (0, 1))
    want, grads = jax.jit(reference)(mlp, x)
    for axes in meshes:
        mesh = make_mesh(**axes, devices=jax.devices()[: int(np.prod([1, *axes.values()]))])

        def ours(mlp: Any, x: Any, mesh: Any = mesh) -> Any:
            with activation_sharding(lambda h: h, mesh):
                return jnp.sum(mixture(mlp, x, experts, jax.nn.silu)[0] * probe)

        rules = ShardingRules(mesh=mesh, rules={r"experts/.*": P("expert")} if "expert" in axes else {})
        rows = jax.sharding.NamedSharding(mesh, P(rules.batch_axes))
        placed = jax.device_put((mlp, x), (map_with_paths(rules.of, mlp), rows))
        got, ours_grads = jax.jit(jax.value_and_grad(ours, (0, 1)))(*placed)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-3), ours_grads, grads)


def test_rows_that_cannot_be_divided_are_computed_everywhere_and_experts_that_cannot_are_named() -> None:
    experts: Any = KINDS["mixtral"].experts
    mlp, x = _mlp("mixtral"), drawn(5, 3, 4, 32)

    def ours(mlp: Any, x: Any) -> Any:
        with activation_sharding(lambda h: h, make_mesh(expert=4, fsdp=1, devices=jax.devices()[:4])):
            return mixture(mlp, x, experts, jax.nn.silu)[0]

    want = jax.jit(lambda mlp, x: _dense(mlp, x, KINDS["mixtral"].experts))(mlp, x)
    np.testing.assert_allclose(jax.jit(ours)(mlp, x), want, rtol=1e-4, atol=1e-3)
    experts = dataclasses.replace(experts, num_experts=6)
    with pytest.raises(ConfigError, match=r"6 experts cannot be sharded along the axis expert of size 4(.|\n)*hint:"):
        ours(mlp, jnp.concatenate([x, x[:1]]))


@pytest.mark.slow
def test_the_loss_of_routers_counts_tokens_and_no_padding() -> None:
    config = dataclasses.replace(
        KINDS["qwen3_moe"], experts=dataclasses.replace(KINDS["qwen3_moe"].experts, router_loss_coef=0.5)
    )
    model, loss = models.init(config, key=KEY), jax.jit(models.loss)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 96, (2, 12)), jnp.int32)
    batch = {"tokens": tokens, "labels": tokens}
    value, metrics = loss(model, batch)
    plain = loss(dataclasses.replace(model, config=KINDS["qwen3_moe"]), batch)[0]
    np.testing.assert_allclose(value, plain + 0.5 * metrics["router_loss"], rtol=1e-6)
    assert 2.0 <= metrics["router_loss"] < 2.2  # even routers: as many as a token has experts
    longer = {
        name: np.concatenate([leaf, np.full((2, 5), fill, np.int32)], axis=1)
        for name, leaf, fill in (("tokens", tokens, 0), ("labels", tokens, -100))
    }
    segments = np.repeat([[1, 0]] * 2, (12, 5), axis=1).astype(np.int32)
    again = loss(model, {**longer, "segment_ids": segments})
    np.testing.assert_allclose(again[1]["router_loss"], metrics["router_loss"], rtol=1e-5)


def _step_of_a_mixture() -> tuple[Any, Any, float]:
    """A step that trains attention, its arguments' shapes, and its arithmetic."""
    config = models.DecoderConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_layers=1,  # XLA counts what is in a loop once
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
        experts=models.Experts(num_experts=16, num_experts_per_token=2, intermediate_size=512),
        family="mixtral",
    )
    batch, length = 4, 512
    model = jax.eval_shape(lambda: models.init(config, key=jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    step = lt.value_and_grad(lambda m, b: models.loss(m, b)[0], wrt="**/attn/**")
    per_token = 2 * (4 * 256 * 256 + 16 * 256) + 2 * 2 * length * 256  # projections and router; scores and their sums
    experts = 2 * 2 * 3 * 256 * 512
    head = 2 * 256 * 512
    # Forward once, backward once for what enters, and for the weights of attention once more.
    arithmetic = batch * length * (2 * (per_token + experts + head) + 2 * 4 * 256 * 256)
    return step, (model, {"tokens": tokens, "labels": tokens}), arithmetic


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.usefixtures("little_optimized")
@pytest.mark.skipif(
    jax.__version_info__ >= (0, 12), reason="libtpu of JAX 0.12 counts the most iterations that a loop may have"
)
def test_a_step_computes_no_expert_that_no_token_chose() -> None:
    step, args, arithmetic = _step_of_a_mixture()
    compiled = lt.memory.compile(step, *args, target="v5e").compiled
    assert compiled.cost_analysis()["flops"] == pytest.approx(arithmetic, rel=0.15)


@pytest.mark.slow
@pytest.mark.gpu_aot
def test_nor_does_a_gpu_which_computes_an_eighth_more_rows_and_a_step_of_what_is_left() -> None:
    step, args, arithmetic = _step_of_a_mixture()
    text = lt.memory.compile(step, *args, target="h100").compiled.as_text()  # XLA counts nothing for an absent GPU
    numbers = re.findall(r"%?([\w.-]+) = \w+\[([\d,]*)\]", text)
    shapes = {name: [int(size) for size in sizes.split(",") if size] for name, sizes in numbers}
    flops = 0
    for name, left, dims in re.findall(r"%?([\w.-]+) = \S+ dot\(%?([\w.-]+),.*lhs_contracting_dims={([\d,]*)}", text):
        flops += 2 * math.prod([*shapes[name], *(shapes[left][int(dim)] for dim in dims.split(","))])
    assert flops == pytest.approx(arithmetic, rel=0.15)
    # Rows go back to their tokens by gathers: what is added to where several rows may go has no model axis.
    added = re.findall(r"%scatter-add[\w.]* = \w+\[([\d,]*)\]\S* scatter\(", text)
    assert added
    assert not [shape for shape in added if shape.endswith(",256")]
