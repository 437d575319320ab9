"""The kernel for TPUs: its values beside all scores, where it is taken, and what stands in its place."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, Mesh

import lowtide as lt
from lowtide.core import ConfigError, activation_sharding
from lowtide.core._compat import tpu_topology_devices
from lowtide.jaxprs import Kind, equations, jaxpr_flops, kind_of
from lowtide.models import DecoderConfig, init, loss
from lowtide.ops import AttentionMask, _splash
from lowtide.ops._dispatch import AttentionCase
from tests.ops.all_scores import SINKS, drawn, loss_of, of_all_scores

LENGTH = 256
SEGMENTS = np.repeat([[1, 2, 3, 0], [1, 1, 1, 1]], [70, 90, 60, 36], axis=1).astype(np.int32)
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({}, {}),
    "all keys": ({"causal": False}, {}),
    "window": ({"window": 50}, {}),
    "segments": ({"segments": SEGMENTS, "causal": False}, {}),
    "sinks": ({"window": 500}, {"sinks": SINKS}),
    "all of it": ({"segments": SEGMENTS, "window": 90}, {"sinks": SINKS, "soft_cap": 3.0}),
}


def compared(kind: str, groups: int, is_fused: bool, dtype: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """The result and its gradients by the kernel, as XLA's operations compute it, beside those of all scores."""
    kernel = _splash.Kernel(128, is_fused, interpret=True)
    sizes = (4, groups, groups)
    given = (*(drawn(seed, 2, LENGTH, heads, 64, dtype=dtype) for seed, heads in enumerate(sizes)), jnp.asarray(SINKS))
    found = []
    for attend in (functools.partial(_splash.attend_by, kernel), of_all_scores):
        (_, out), grads = loss_of(attend, *KINDS[kind])(*given)
        found.append([np.asarray(each, np.float64) for each in (out, *grads)])
    return list(zip(*found, strict=True))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("kind", "groups", "is_fused"),
    [
        ("causal", 1, True),
        ("all keys", 4, False),
        ("window", 2, False),
        ("segments", 2, True),
        ("sinks", 4, True),
        ("all of it", 2, False),
    ],
)
def test_values_and_gradients_are_those_of_all_scores(
    kind: str, groups: int, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_splash, "_STEP_BYTES", _splash._SUM_BYTES * LENGTH * 4)  # four heads of one row at a time
    for one, other in compared(kind, groups, is_fused, np.float32):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5, equal_nan=False)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("kind", "is_fused"), [("causal", True), ("all of it", False)])
def test_half_precision_and_heads_one_after_another(kind: str, is_fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_splash, "_STEP_BYTES", 1)
    for one, other in compared(kind, 2, is_fused, jnp.bfloat16):
        assert np.abs(one - other).max() <= 4e-2 * max(1, np.abs(other).max())


def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return jnp.sum(lt.ops.attention(q, k, v, **options).astype(jnp.float32) ** 2)


GRADIENT = functools.partial(jax.grad, argnums=(0, 1, 2))


@functools.cache
def tpus() -> list[Any]:
    return tpu_topology_devices("v5e:2x2")


def shapes(sharding: Any, length: int = 1024, dim: int = 64, dtype: Any = jnp.bfloat16) -> list[Any]:
    return [jax.ShapeDtypeStruct((4, length, heads, dim), dtype, sharding=sharding) for heads in (8, 4, 4)]


def lowered(fn: Callable[..., Any], sharding: Any, **given: Any) -> Any:
    with jax.default_device(tpus()[0]):
        return jax.jit(fn).lower(*shapes(sharding, **given))


def num_kernels(fn: Callable[..., Any], sharding: Any = None, **given: Any) -> int:
    place = jax.sharding.SingleDeviceSharding(tpus()[0]) if sharding is None else sharding
    return lowered(fn, place, **given).as_text().count("tpu_custom_call")


def mesh_of(*names: str, kind: AxisType = AxisType.Auto) -> Mesh:
    return Mesh(np.array(tpus()).reshape(2, 2), names, axis_types=(kind, kind))


def mapped(q: Any, k: Any, v: Any) -> Any:
    return jnp.sum(jax.vmap(lambda *of: attend(*(each[None] for each in of)))(q, k, v))


@pytest.mark.sentinel
@pytest.mark.slow
@pytest.mark.tpu_aot
def test_a_program_for_one_tpu_has_the_kernel_where_it_fits() -> None:
    assert num_kernels(attend) == 1
    assert num_kernels(GRADIENT(attend)) == num_kernels(GRADIENT(mapped)) == 2  # forward, and all gradients in one
    assert num_kernels(GRADIENT(attend), length=8192) == 3
    assert num_kernels(attend, dim=128, dtype=jnp.float32) == num_kernels(attend, dim=256) == 1
    assert num_kernels(functools.partial(attend, mask=AttentionMask(window=100), soft_cap=20.0)) == 1
    assert num_kernels(attend, length=896) == num_kernels(attend, length=2000) == num_kernels(attend, dim=96) == 0
    assert num_kernels(attend, dtype=jnp.float16) == 0
    assert num_kernels(functools.partial(attend, implementation="splash"), length=896) == 1
    assert num_kernels(functools.partial(attend, implementation="blocks")) == 0


@pytest.mark.tpu_aot
def test_recomputation_keeps_what_its_policy_names() -> None:
    def doubled(q: Any, k: Any, v: Any) -> Any:
        return 2 * attend(q * 2, k, v)

    names = jax.checkpoint_policies.save_only_these_names
    kept = jax.checkpoint(doubled, policy=names("attn_out", "attn_lse"))

    def num_choices(fn: Any) -> int:
        with jax.default_device(tpus()[0]):
            closed = jax.make_jaxpr(jax.value_and_grad(fn, argnums=(0, 1, 2)))(*shapes(None))
        return [kind_of(eqn) for eqn in equations(closed)].count(Kind.CHOICE)

    assert num_choices(kept) == 2
    assert num_choices(jax.checkpoint(doubled, policy=names("attn_out"))) == 3


@pytest.mark.tpu_aot
def test_derivatives_of_gradients_are_those_of_blocks() -> None:
    def curvature(q: Any, k: Any, v: Any) -> Any:
        return jax.grad(lambda q: jnp.sum(jax.grad(attend)(q, k, v)))(q)

    assert num_kernels(curvature) == 0


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_among_devices_the_kernel_is_where_a_mesh_says_who_has_what() -> None:
    mesh = mesh_of("data", "tensor")
    place = jax.NamedSharding(mesh, P("data", None, "tensor"))
    assert num_kernels(GRADIENT(attend), place) == 0  # XLA divides blocks

    def trained(*args: Any) -> Any:
        with activation_sharding(lambda h: h, mesh):
            return GRADIENT(attend)(*args)

    assert num_kernels(trained, place) == 2
    text = lowered(trained, place).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2
    assert not [word for word in ("all-gather", "all-to-all", "all-reduce", "collective-permute") if word in text]
    explicit = mesh_of("data", "tensor", kind=AxisType.Explicit)
    with jax.set_mesh(explicit):
        assert num_kernels(GRADIENT(attend), jax.NamedSharding(explicit, P("data", None, "tensor"))) == 2
    others = mesh_of("data", "mine")
    with jax.set_mesh(others):
        assert num_kernels(attend, jax.NamedSharding(others, P("data"))) == 0

    def by_hand(*args: Any) -> Any:
        def local(*parts: Any) -> Any:
            return jax.lax.psum(attend(*parts), ("data", "tensor"))

        specs = P("data", None, "tensor")
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(*args)

    assert num_kernels(GRADIENT(by_hand), place) == 2


@pytest.mark.tpu_aot
def test_devices_that_divide_tokens_have_the_kernel_between_exchanges() -> None:
    mesh = mesh_of("fsdp", "context")

    def trained(*args: Any) -> Any:
        with activation_sharding(lambda h: h, mesh):
            mask = AttentionMask(segment_ids=jnp.zeros((4, 1024), int))
            return GRADIENT(functools.partial(attend, mask=mask))(*args)

    assert num_kernels(trained, jax.NamedSharding(mesh, P("fsdp", "context"))) == 2


@pytest.mark.tpu_aot
def test_gradients_of_sinks_are_added_up_over_rows_of_all_devices() -> None:
    mesh = mesh_of("data", "tensor")

    def of_sinks(q: Any, k: Any, v: Any) -> Any:
        with activation_sharding(lambda h: h, mesh):
            return jax.grad(lambda sinks: attend(q, k, v, sinks=sinks))(jnp.ones(8))

    text = lowered(of_sinks, jax.NamedSharding(mesh, P("data", None, "tensor"))).as_text()
    assert text.count("tpu_custom_call") == 2 and text.count("all_reduce") == 1


@pytest.mark.tpu_aot
def test_one_that_is_asked_for_by_name_is_there_or_refused() -> None:
    named = functools.partial(attend, implementation="splash")
    place = jax.NamedSharding(mesh_of("data", "tensor"), P("data"))
    with pytest.raises(ConfigError, match=r"cannot be sharded over the devices(.|\n)*hint:"):
        num_kernels(named, place)
    ids: Any = np.ones((4, 1024), int)
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("float16", {"dtype": jnp.float16}, {}),
        ("heads of 96", {"dim": 96}, {}),
        ("2000 queries and 2000 keys", {"length": 2000}, {}),
        ("different segments for keys", {}, {"mask": AttentionMask(segment_ids=(ids, ids.copy()))}),
    ]
    for why, given, options in cases:
        with pytest.raises(ConfigError, match=rf"kernel for TPUs cannot compute this\n(.|\n)*got: {why}(.|\n)*hint:"):
            num_kernels(functools.partial(named, **options), **given)
    with pytest.raises(ConfigError, match=r"got: a device of kind cpu(.|\n)*hint:"):
        named(*(jnp.ones((1, 128, 2, 64)) for _ in range(3)))


def test_reasons_name_the_part_of_a_mask_that_the_kernel_lacks() -> None:
    def reason(**facts: Any) -> str:
        case = AttentionCase(platform="tpu", head_dim=64, num_queries=1024, num_keys=1024)
        return _splash.unsupported_reason(dataclasses.replace(case, **facts))

    assert reason(window=100) == ""
    assert "differs between layers" in reason(has_traced_window=True)
    assert "start after" in reason(starts_at_first_key=False)
    assert "without causal" in reason(window=9, causal=False)


@pytest.fixture
def own_programs() -> Iterator[None]:
    """None that were traced before, and none left for those that come after."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.usefixtures("own_programs")
def test_a_kernel_that_takes_other_arguments_is_left_to_blocks_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def other(*_: Any, **__: Any) -> Any:
        raise TypeError("unexpected keyword argument 'mask_value'")

    monkeypatch.setattr(_splash, "splash_forward", other)
    _splash._warn_of_another_kernel.cache_clear()
    with pytest.warns(UserWarning, match=r"does not support .*kernel for TPUs(.|\n)*'mask_value'(.|\n)*hint:"):
        assert num_kernels(GRADIENT(attend)) == 1  # the backward pass is another kernel, and reads the same
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert num_kernels(attend) == 0
    with pytest.raises(ConfigError, match=r"does not support .*kernel for TPUs(.|\n)*hint:"):
        num_kernels(functools.partial(attend, implementation="splash"))


@pytest.mark.tpu_aot
def test_arithmetic_counts_once_and_whole_programs_for_other_targets_have_no_kernel() -> None:
    with jax.default_device(tpus()[0]):
        traced = jax.jit(attend).trace(*shapes(None))
        blocks = jax.make_jaxpr(functools.partial(attend, implementation="blocks"))(*shapes(None))
        closed = jax.make_jaxpr(attend)(*shapes(None))
    assert [kind_of(eqn) for eqn in equations(closed)].count(Kind.CHOICE) == 1
    assert jaxpr_flops(closed) == pytest.approx(jaxpr_flops(blocks), rel=0.01)  # queries are scaled, not scores
    assert "custom_call" not in traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_a_step_of_adapters_has_the_kernel() -> None:
    sizes = {"vocab_size": 256, "hidden_size": 512, "intermediate_size": 512, "num_layers": 2}
    config = DecoderConfig(**sizes, num_heads=8, num_kv_heads=4, head_dim=64)
    base = jax.eval_shape(lambda key: init(config, key=key, dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16), KEY)
    model = lt.lora.add(base, lt.lora.Config(rank=4, targets="layers/**/*_proj"), key=KEY)
    names = ("tokens", "labels", "segment_ids", "positions")
    batch = {name: jax.ShapeDtypeStruct((2, 2048), jnp.int32) for name in names}
    step = lt.value_and_grad(functools.partial(loss, remat=True), wrt="**/lora_*", has_aux=True)

    def kernels(place: Any) -> set[str]:
        held = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), (model, batch))
        with jax.default_device(tpus()[0]):
            text = jax.jit(step).lower(*held).as_text()
        return set(re.findall(r'kernel_name = "(splash_\w+?)"', text))

    assert kernels(jax.sharding.SingleDeviceSharding(tpus()[0])) == {
        "splash_mha_fwd_segmented_residuals",
        "splash_mha_dkv_segmented_no_residuals",
    }
    assert kernels(jax.NamedSharding(mesh_of("data", "tensor"), P())) == set()


KEY = jax.random.key(0)


@pytest.mark.tpu_aot
@pytest.mark.slow
@pytest.mark.usefixtures("little_optimized")
def test_a_layer_takes_fewer_bytes_than_with_blocks() -> None:
    def passes(implementation: Any) -> Any:
        def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
            out, back = jax.vjp(functools.partial(lt.ops.attention, implementation=implementation), q, k, v)
            return out, back(dout)

        return both

    def temporaries(implementation: Any) -> int:
        args = [jax.ShapeDtypeStruct((4, 2048, heads, 128), jnp.bfloat16) for heads in (16, 4, 4, 16)]
        report = lt.memory.analyze(passes(implementation), *args, target="v5e:1x1")
        return report.device.temp_bytes

    assert temporaries("splash") < 2 / 3 * temporaries("blocks")
