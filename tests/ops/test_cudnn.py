"""cuDNN's kernel: which cases it takes, its bookkeeping on a CPU with a stand-in for the kernel, and its lowering."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide as lt
from lowtide.core import ConfigError
from lowtide.core._compat import CudnnOptions
from lowtide.ops import AttentionMask, _attention, _blocks, _cudnn, _dispatch
from lowtide.ops._dispatch import AttentionCase
from lowtide.ops._options import ScoreOptions
from tests.ops.all_scores import SINKS, drawn, loss_of, of_all_scores

LENGTH = 96
SEGMENTS = np.repeat([[1, 2, 3, 0], [4, 1, 9, 9]], [20, 41, 30, 5], axis=1).astype(np.int32)


# --- the table --------------------------------------------------------------------------------------------------------

HOPPER = {"device_kind": "NVIDIA H100", "capability": (9, 0), "cudnn_version": 91400}
AMPERE = {"device_kind": "NVIDIA A100", "capability": (8, 0), "cudnn_version": 91400}
OLDEST, MIDDLE, NEWEST = (0, 10, 2), (0, 11, 2), (0, 12, 0)
PACKED, GEMMA = {"segments": "shared"}, {"has_traced_window": True, "windows": (1024, 2**30)}
LONG = {"num_queries": 32768, "num_keys": 32768}
CASES: list[tuple[dict[str, Any], str, str, str]] = [
    # facts, and what is chosen with JAX 0.10.2, 0.11.2 and 0.12.0
    ({}, "options", "options", "options"),
    (LONG, "options", "options", "options"),
    ({"is_grouped": True}, "options", "options", "options"),
    ({"dtype": "float16"}, "options", "options", "options"),
    ({"dtype": "float32"}, "blocks", "blocks", "blocks"),
    ({"head_dim": 64}, "options", "options", "options"),
    ({"head_dim": 192}, "options", "options", "options"),
    ({"head_dim": 256}, "options", "options", "options"),
    ({"head_dim": 264}, "blocks", "blocks", "blocks"),
    ({"head_dim": 100}, "blocks", "blocks", "blocks"),
    ({"head_dim": 256, **AMPERE}, "blocks", "blocks", "blocks"),
    ({"head_dim": 128, **AMPERE}, "options", "options", "options"),
    ({"causal": False}, "options", "options", "options"),
    ({"window": 1024}, "options", "options", "options"),
    ({"window": 1024, "causal": False}, "mask array", "mask array", "mask array"),
    ({"window": 1024, "causal": False, **LONG}, "blocks", "blocks", "blocks"),
    (GEMMA, "options", "options", "options"),
    ({**GEMMA, "head_dim": 256, **LONG}, "options", "options", "options"),
    ({"has_traced_window": True}, "mask array", "mask array", "mask array"),
    ({"has_traced_window": True, **LONG}, "blocks", "blocks", "blocks"),
    (PACKED, "documents", "documents", "documents"),
    ({**PACKED, "is_grouped": True}, "mask array", "documents", "documents"),
    ({**PACKED, "is_grouped": True, **LONG}, "blocks", "documents", "documents"),
    ({**PACKED, **GEMMA, "is_grouped": True, **LONG}, "blocks", "documents", "documents"),
    ({**PACKED, "window": 512, **LONG}, "documents", "documents", "documents"),
    ({**PACKED, "causal": False}, "documents", "documents", "documents"),
    ({**PACKED, "head_dim": 256}, "documents", "documents", "documents"),
    ({**PACKED, **AMPERE}, "mask array", "mask array", "mask array"),
    ({**PACKED, **AMPERE, **LONG}, "blocks", "blocks", "blocks"),
    ({**PACKED, **AMPERE, "num_queries": 4095, "num_keys": 4095}, "blocks", "blocks", "blocks"),
    ({"starts_at_first_key": False, "num_queries": 1, "num_keys": 4095}, "mask array", "mask array", "mask array"),
    ({"segments": "separate", "num_keys": 4095, "has_sinks": True}, "blocks", "blocks", "blocks"),
    ({"starts_at_first_key": False, "num_queries": 1, "has_sinks": True}, "xla", "xla", "xla"),
    ({"segments": "separate"}, "mask array", "mask array", "mask array"),
    ({"segments": "separate", **LONG}, "blocks", "blocks", "blocks"),
    ({"starts_at_first_key": False, "num_queries": 64}, "mask array", "mask array", "mask array"),
    ({"has_sinks": True}, "options", "options", "options"),
    ({"has_sinks": True, "window": 128, "head_dim": 64, "is_grouped": True}, "options", "options", "options"),
    ({"has_sinks": True, **PACKED, **LONG}, "documents", "documents", "documents"),
    ({"has_soft_cap": True}, "blocks", "blocks", "options"),
    ({"has_soft_cap": True, **GEMMA}, "blocks", "blocks", "options"),
    ({"has_soft_cap": True, "cudnn_version": 91200}, "blocks", "blocks", "blocks"),
    ({"has_soft_cap": True, **AMPERE}, "blocks", "blocks", "blocks"),
    ({"has_soft_cap": True, **PACKED}, "blocks", "blocks", "blocks"),
    ({"cudnn_version": 0}, "blocks", "blocks", "blocks"),
    ({"capability": (7, 5)}, "blocks", "blocks", "blocks"),
    ({"capability": (10, 3), "cudnn_version": 91000}, "blocks", "blocks", "blocks"),
    ({"capability": (10, 3), "cudnn_version": 91100}, "options", "options", "options"),
    ({"capability": (12, 0), **PACKED}, "documents", "documents", "documents"),
    ({"capability": None, "device_kind": "AMD Instinct MI300X"}, "blocks", "blocks", "blocks"),
    ({"num_queries": 32, "num_keys": 32, "dtype": "float32"}, "xla", "xla", "xla"),
]


def test_the_table_of_implementations() -> None:
    assert len(CASES) >= 40
    for facts, *expected in CASES:
        for version, wanted in zip((OLDEST, MIDDLE, NEWEST), expected, strict=True):
            case = AttentionCase(**{**HOPPER, **facts, "jax_version": version})
            choice = _attention.choose_attention(case)
            method = _cudnn.method_of(case)[0]
            assert (method if choice.implementation == "cudnn" else choice.implementation) == wanted, (facts, version)
            assert bool(choice.reason) == (wanted != "options"), (facts, choice)


def test_reasons_name_the_fact() -> None:
    def reason(**facts: Any) -> str:
        return _attention.choose_attention(AttentionCase(**{**HOPPER, "jax_version": NEWEST, **facts})).reason

    assert reason(head_dim=512) == "not cuDNN's kernel: heads of 512"
    assert "compute capability 7.5, below 8.0" in reason(capability=(7, 5))
    assert reason(platform="cpu") == ""
    assert reason(segments="separate", **LONG).endswith("a mask array for 32768 queries is slower")
    assert reason(segments="shared", **LONG) == "with the offsets of up to 128 documents a row"
    assert "JAX 0.12" in reason(has_soft_cap=True, jax_version=MIDDLE)


# --- bookkeeping, with a stand-in for the kernel ----------------------------------------------------------------------


def visible(options: CudnnOptions, q: Any, k: Any, mask: Any, documents: Any) -> Any:
    if mask is not None:
        return mask
    segments = None
    if documents is not None:
        starts, lengths = (array[:, :, None] for array in documents)
        tokens = jnp.arange(q.shape[1])[None, None]
        segments = jnp.argmax((tokens >= starts) & (tokens < starts + lengths), axis=1)
    return AttentionMask(causal=options.causal, window=options.window, segment_ids=segments).to_array(
        q.shape[1], k.shape[1]
    )


def scores_of(options: CudnnOptions, q: Any, k: Any, mask: Any, documents: Any) -> Any:
    s = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)) * options.scale
    if options.soft_cap is not None:
        s = options.soft_cap * jnp.tanh(s / options.soft_cap)
    return jnp.where(visible(options, q, k, mask, documents), s, -jnp.inf)


def attend(options: CudnnOptions, q: Any, k: Any, v: Any, mask: Any = None, documents: Any = None) -> Any:
    """Return the output and the log-sum-exps of cuDNN's kernel; entries that the kernel does not write are 7."""
    s = scores_of(options, q, k, mask, documents)
    lse = jax.nn.logsumexp(s, axis=-1)
    out = jnp.einsum("bnts,bsnh->btnh", jnp.exp(s - lse[..., None]), jnp.repeat(v, q.shape[2] // v.shape[2], axis=2))
    if documents is not None:
        starts, lengths = documents
        tokens = jnp.arange(q.shape[1])[None, None]
        rows = jnp.minimum(starts[..., None] + tokens, q.shape[1] - 1)
        stats = jnp.take_along_axis(lse[:, None], rows[:, :, None], axis=3)
        stats = jnp.where((tokens < lengths[..., None])[:, :, None], stats, 7.0)
        lse = stats.reshape(-1, *lse.shape[1:])
    return out, lse


def differentiate(
    options: CudnnOptions, arrays: Any, results: Any, dout: Any, mask: Any = None, documents: Any = None
) -> Any:
    """Return the gradients by the rule of the kernel, p = exp(s - lse) and ds = p (dp - delta)."""
    (q, k, v), (out, lse) = arrays, results
    s = scores_of(options._replace(soft_cap=None), q, k, mask, documents)
    if documents is not None:
        starts, lengths = documents
        stats = lse.reshape(q.shape[0], -1, *lse.shape[1:])
        lse = jnp.zeros(stats.shape[:1] + stats.shape[2:])
        for document in range(starts.shape[1]):
            index = jnp.arange(q.shape[1])[None] - starts[:, document, None]
            part = jnp.take_along_axis(stats[:, document], jnp.maximum(index, 0)[:, None], axis=2)
            lse = jnp.where(((index >= 0) & (index < lengths[:, document, None]))[:, None], part, lse)
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(array, groups, axis=2) for array in (k, v))
    p = jnp.exp(s - lse[..., None])
    dp = jnp.einsum("btnh,bsnh->bnts", dout, v)
    ds = p * (dp - jnp.sum(out * dout, axis=-1).swapaxes(1, 2)[..., None]) * options.scale
    grads = [jnp.einsum("bnts,btnh->bsnh", *pair) for pair in ((ds, q), (p, dout))]
    dk, dv = (x.reshape(*x.shape[:2], -1, groups, x.shape[3]).sum(3) for x in grads)
    return jnp.einsum("bnts,bsnh->btnh", ds, k), dk, dv


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let a CPU compute what the kernel computes; the list says which parts ran."""
    calls: list[str] = []

    def record(name: str, fn: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            jax.debug.callback(lambda: calls.append(name))
            return fn(*args, **kwargs)

        return called

    facts = dict(platform="gpu", jax_version=NEWEST, dtype="bfloat16", **HOPPER)
    case_of = _dispatch.case_of
    monkeypatch.setattr(_cudnn, "case_of", lambda *args: dataclasses.replace(case_of(*args), **facts))
    monkeypatch.setattr(_attention, "case_of", lambda *args: dataclasses.replace(case_of(*args), **facts))
    monkeypatch.setattr(_cudnn, "cudnn_attention", record("kernel", attend))
    monkeypatch.setattr(_cudnn, "cudnn_gradients", record("kernel", differentiate))
    monkeypatch.setattr(_blocks, "forward", record("blocks", _blocks.forward))
    monkeypatch.setattr(_blocks, "gradients", record("blocks", _blocks.gradients))
    monkeypatch.setattr(_cudnn, "on_one_device", lambda kernel_fn, _, *args, **__: kernel_fn(*args))
    return calls


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "causal": ({}, {}, {"kernel"}),
    "window and sinks": ({"window": 9}, {"sinks": SINKS}, {"kernel"}),
    "documents": ({"segments": SEGMENTS}, {}, {"kernel"}),
    "documents in both directions": ({"segments": SEGMENTS, "causal": False}, {}, {"kernel"}),
    "documents, window and sinks": ({"segments": SEGMENTS, "window": 9}, {"sinks": SINKS}, {"kernel"}),
    "documents and a traced window": ({"segments": SEGMENTS, "window": "traced 9"}, {}, {"kernel"}),
    "traced window and sinks": ({"window": "traced 200"}, {"sinks": SINKS}, {"kernel"}),
    "unknown window": ({"window": "traced 11"}, {}, {"blocks"}),
    "repeated document": ({"segments": np.where(SEGMENTS == 3, 1, SEGMENTS)}, {"sinks": SINKS}, {"blocks"}),
    "many documents": ({"segments": np.repeat(np.arange(12)[None], 8, axis=1).repeat(2, axis=0)}, {}, {"blocks"}),
    "separate segments": ({"segments": (SEGMENTS, SEGMENTS.copy())}, {"sinks": SINKS}, {"kernel"}),
}


def of_kernel(q: Any, k: Any, v: Any, mask: AttentionMask, scores: ScoreOptions) -> Any:
    windows = (9, 200) if isinstance(mask.window, jax.Array) else None
    mask = dataclasses.replace(mask, windows=windows)
    options: Any = {"scale": scores.scale, "sinks": scores.sinks, "implementation": "cudnn"}
    return lt.ops.attention(q, k, v, mask=mask, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_equal_those_of_all_scores(kind: str, stand_in: list[str]) -> None:
    mask, scores, expected_calls = KINDS[kind]
    arrays = [drawn(seed, 2, LENGTH, heads, 16) for seed, heads in enumerate((4, 2, 2))]
    (_, actual), grads = loss_of(of_kernel, mask, scores)(*arrays, jnp.asarray(SINKS))
    (_, wanted), wanted_grads = loss_of(of_all_scores, mask, scores)(*arrays, jnp.asarray(SINKS))
    jax.effects_barrier()
    assert set(stand_in) == expected_calls
    for leaf, reference in zip((actual, *grads), (wanted, *wanted_grads), strict=True):
        np.testing.assert_allclose(leaf, reference, rtol=1e-5, atol=1e-5)


def test_rows_that_are_mapped_are_rows_of_the_batch(stand_in: list[str]) -> None:
    arrays = [drawn(seed, 3, 2, LENGTH, heads, 16) for seed, heads in enumerate((4, 2, 2))]
    segments = jnp.asarray(np.stack([SEGMENTS, SEGMENTS[::-1], np.ones_like(SEGMENTS)]))

    def loss(q: Any, k: Any, v: Any, segments: Any) -> Any:
        out = of_kernel(q, k, v, AttentionMask(segment_ids=segments), ScoreOptions(0.3, sinks=jnp.asarray(SINKS)))
        return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape))

    fn = jax.value_and_grad(loss, (0, 1, 2))
    actual = jax.jit(jax.vmap(fn))(*arrays, segments)
    jax.effects_barrier()
    assert set(stand_in) == {"kernel"}
    wanted = [jax.jit(fn)(*(array[index] for array in arrays), segments[index]) for index in range(3)]
    for leaf, *rest in zip(jax.tree.leaves(actual), *map(jax.tree.leaves, wanted), strict=True):
        np.testing.assert_allclose(leaf, np.stack(rest), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["window", "sinks", "segment_ids"])
def test_parts_of_a_mask_that_are_mapped(name: str, stand_in: list[str]) -> None:
    arrays = [drawn(seed, 2, LENGTH, heads, 16) for seed, heads in enumerate((4, 2, 2))]
    values = {
        "window": jnp.array([9, 200]),
        "sinks": jnp.stack([jnp.asarray(SINKS), jnp.asarray(-SINKS)]),
        "segment_ids": jnp.asarray(np.stack([SEGMENTS, SEGMENTS[::-1]])),
    }

    def loss(q: Any, k: Any, v: Any, value: Any) -> Any:
        fields: dict[str, Any] = {"window": None, "sinks": jnp.asarray(SINKS), "segment_ids": None, name: value}
        if name == "segment_ids":  # in two arrays, which need a mask array
            fields[name] = value, value + 0
        mask = AttentionMask(window=fields["window"], segment_ids=fields["segment_ids"])
        out = lt.ops.attention(q, k, v, mask=mask, scale=0.3, sinks=fields["sinks"], implementation="cudnn")
        return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape))

    fn = jax.value_and_grad(loss, (0, 1, 2))
    actual = jax.jit(jax.vmap(fn, (None, None, None, 0)))(*arrays, values[name])
    jax.effects_barrier()
    assert set(stand_in) == {"kernel"}
    wanted = [jax.jit(fn)(*arrays, value) for value in values[name]]
    for leaf, *rest in zip(jax.tree.leaves(actual), *map(jax.tree.leaves, wanted), strict=True):
        np.testing.assert_allclose(leaf, np.stack(rest), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 30), (0, 30), (2, 66)], ids=["few-queries", "no-rows", "two-rows"])
@pytest.mark.parametrize("kind", ["sinks", "documents"])
def test_few_rows_and_queries(shape: tuple[int, int], kind: str, stand_in: list[str]) -> None:
    rows, length = shape
    arrays = [drawn(seed, rows, length, heads, 16) for seed, heads in enumerate((4, 2, 2))]
    ids = jnp.asarray(np.repeat([[1, 2, 0]], [11, 7, length - 18], axis=1).repeat(rows, axis=0))
    mask, scores = AttentionMask(segment_ids=ids if kind == "documents" else None), ScoreOptions(0.3, None, SINKS)
    out = jax.jit(lambda *args: of_kernel(*args, mask, scores))(*arrays)
    assert out.shape == (rows, length, 4, 16)
    np.testing.assert_allclose(out, of_all_scores(*arrays, mask, scores), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes", [{"data": 2}, {"tensor": 2}, {"context": 2}, {"data": 2, "context": 2}])
@pytest.mark.parametrize("kind", ["documents, window and sinks", "window and sinks", "separate segments"])
def test_meshes(axes: dict[str, int], kind: str, stand_in: list[str]) -> None:
    names, sizes = tuple(axes), tuple(axes.values())
    types = (jax.sharding.AxisType.Auto,) * len(names)
    mesh = jax.make_mesh(sizes, names, devices=jax.devices()[: int(np.prod(sizes))], axis_types=types)
    mask, scores, _ = KINDS[kind]
    arrays = [drawn(seed, 2, LENGTH, heads, 16) for seed, heads in enumerate((4, 2, 2))]
    with jax.set_mesh(mesh):
        (_, actual), grads = loss_of(of_kernel, mask, scores)(*arrays, jnp.asarray(SINKS))
    (_, wanted), wanted_grads = loss_of(of_all_scores, mask, scores)(*arrays, jnp.asarray(SINKS))
    jax.effects_barrier()
    assert set(stand_in) == {"kernel"}
    for leaf, reference in zip((actual, *grads), (wanted, *wanted_grads), strict=True):
        np.testing.assert_allclose(leaf, reference, rtol=2e-4, atol=2e-4)


def test_rows_that_vary_along_an_axis_of_shard_map(stand_in: list[str]) -> None:
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    arrays = [drawn(seed, 2, LENGTH, heads, 16) for seed, heads in enumerate((4, 2, 2))]

    def loss(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        def local(q: Any, k: Any, v: Any, sinks: Any) -> Any:
            return lt.ops.attention(q, k, v, mask=AttentionMask(window=9), sinks=sinks, implementation="cudnn")

        specs = (*[jax.P("x")] * 3, jax.P())
        out = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P("x"))(q, k, v, sinks)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape))

    grads = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*arrays, jnp.asarray(SINKS))

    def wanted_loss(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        out = of_all_scores(q, k, v, AttentionMask(window=9), ScoreOptions(16**-0.5, None, sinks))
        return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape))

    wanted = jax.jit(jax.grad(wanted_loss, (0, 1, 2, 3)))(*arrays, jnp.asarray(SINKS))
    assert "kernel" in stand_in
    for leaf, reference in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(leaf, reference, rtol=2e-4, atol=2e-4)


def test_offsets_beyond_int32_are_left_to_blocks(stand_in: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cudnn, "_MOST_OFFSET", 2 * LENGTH * 4 * 16)
    for rows, expected in ((1, "kernel"), (2, "blocks")):
        arrays = [drawn(seed, rows, LENGTH, heads, 16) for seed, heads in enumerate((4, 2, 2))]
        mask = AttentionMask(segment_ids=jnp.asarray(SEGMENTS[:rows]))
        stand_in.clear()
        jax.jit(functools.partial(lt.ops.attention, mask=mask, implementation="cudnn"))(*arrays)
        jax.effects_barrier()
        assert set(stand_in) == {expected}


@pytest.mark.gpu_aot
def test_documents_need_a_mesh_in_a_program_for_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = lt.target("h100:2").devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("model",))
    sharding = jax.NamedSharding(mesh, jax.P())
    q, k, v = (jax.ShapeDtypeStruct((2, 256, n, 64), jnp.bfloat16, sharding=sharding) for n in (2, 2, 2))
    ids = jax.ShapeDtypeStruct((2, 256), jnp.int32, sharding=sharding)
    monkeypatch.setattr(_dispatch, "cudnn_version", lambda: 91400)

    def fn(q: Any, k: Any, v: Any, ids: Any, implementation: Any) -> Any:
        return lt.ops.attention(q, k, v, mask=AttentionMask(segment_ids=ids), implementation=implementation)

    def lower(implementation: Any) -> str:
        with jax.default_device(devices[0]):
            traced = jax.jit(functools.partial(fn, implementation=implementation)).trace(q, k, v, ids)
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert "fmha" not in lower(None)  # blocks
    with pytest.raises(ConfigError, match="cannot be sharded over the devices of this program"):
        lower("cudnn")


def test_the_case_of_a_comparison_is_exact_and_finds_errors(
    stand_in: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = jax.devices()[0]
    kernels = [
        _cudnn.Kernel(method, options, windows, documents, _blocks.Config(True, window, 1.0, None, 64))
        for method, options, windows, documents, window in (
            ("options", (CudnnOptions(1.0, True, 9), CudnnOptions(1.0, True)), (9, 2**30), 0, None),
            ("documents", (CudnnOptions(1.0, True, 700),), None, 64, 700),
            ("mask array", (CudnnOptions(1.0, True),), None, 0, None),
        )
    ]
    for kernel in kernels:
        assert _cudnn.small_case_problem(device, kernel, 32, "float32", True, True) == ""

    def transposed(*args: Any, **kwargs: Any) -> Any:
        dq, dk, dv = differentiate(*args, **kwargs)
        return dq, dv, dk

    monkeypatch.setattr(_cudnn, "cudnn_gradients", transposed)
    _cudnn._small_case.clear_cache()
    for kernel in kernels:
        assert "differ by" in _cudnn.small_case_problem(device, kernel, 32, "float32", False, False)
    monkeypatch.setattr(_cudnn, "cudnn_attention", lambda *_, **__: 1 / 0)
    _cudnn._small_case.clear_cache()
    assert "ZeroDivisionError" in _cudnn.small_case_problem(device, kernels[0], 32, "float32", False, False)
    _cudnn._small_case.clear_cache()


def test_blocks_replace_a_kernel_that_is_wrong(stand_in: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (drawn(seed, 2, LENGTH, heads, 16) for seed, heads in enumerate((4, 2, 2)))
    mask = AttentionMask(segment_ids=jnp.asarray(SEGMENTS))
    monkeypatch.setattr(_cudnn, "local_gpu", lambda: jax.devices()[0])
    monkeypatch.setattr(_cudnn, "small_case_problem", lambda *_: "values differ by 80 %")
    _cudnn._compare_with_blocks.cache_clear()
    with pytest.warns(UserWarning, match=r"blocks .* replace cuDNN's kernel \(documents\)(.|\n)*80 %(.|\n)*hint: "):
        jax.jit(functools.partial(lt.ops.attention, mask=mask))(q, k, v)
    jax.effects_barrier()
    assert set(stand_in) == {"blocks"}
    with warnings.catch_warnings():  # once per process
        warnings.simplefilter("error")
        lt.ops.attention(q, k, v, mask=mask)
    with pytest.raises(ConfigError, match="cuDNN's kernel is wrong on this GPU: values differ"):
        lt.ops.attention(q, k, v, mask=mask, implementation="cudnn")
    _cudnn._compare_with_blocks.cache_clear()


# --- documents of one length ------------------------------------------------------------------------------------------


def test_documents_of_one_length_are_rows() -> None:
    q, k, v = (drawn(seed, 2, LENGTH, heads, 16) for seed, heads in enumerate((4, 2, 2)))
    ids = np.repeat([[1, 2, 3, 4], [7, 5, 6, 0]], 24, axis=1)
    for segments, length in (
        (ids, 24),
        (jnp.asarray(ids), 24),
        (np.where(ids == 4, 1, ids), None),  # a document in two parts
        (np.repeat([[1, 2, 3, 4]] * 2, [24, 24, 20, 28], axis=1), None),
        (np.ones_like(ids), None),
        ((ids, ids.copy()), None),
    ):
        mask = AttentionMask(segment_ids=segments, window=10)
        assert _attention.equal_document_length(mask, LENGTH, LENGTH) == length
        actual = lt.ops.attention(q, k, v, mask=mask, scale=0.3)
        wanted = of_all_scores(q, k, v, mask, ScoreOptions(0.3))
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)
    mask = AttentionMask(segment_ids=ids)
    text = jax.jit(lambda *args: lt.ops.attention(*args, mask=mask)).lower(q, k, v).as_text()
    assert "8x24x4x16" in text  # [B T / 24, 24, N, H]
    assert lt.ops.attention(q[:0], k[:0], v[:0], mask=AttentionMask(segment_ids=ids[:0])).shape == (0, LENGTH, 4, 16)
    # Rows of 24 tokens are too short for the kernel of TPUs, which computes rows of 96 with segments.
    long = AttentionCase(platform="tpu", head_dim=64, num_queries=1024, num_keys=1024, segments="shared")
    short = dataclasses.replace(long, num_queries=64, num_keys=64, segments="none")
    assert not _attention._is_better(None, short, long) and not _attention._is_better("splash", short, long)
    assert _attention._is_better(None, dataclasses.replace(long, segments="none"), long)


# --- the lowering -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    ("method", "fields", "config"),
    [
        ("options", {"window": 100}, ["CAUSAL", '"sliding_window_length": 100', '"max_seg_per_batch": 1']),
        ("documents", {"segments": True}, ["PADDING_CAUSAL", '"max_seg_per_batch": 8']),
        ("mask array", {"segments": True, "window": 100}, ["NO_MASK", '"sliding_window_length": 0']),
        pytest.param(
            *("options", {"soft_cap": 30.0}, ["CAUSAL", "tanh"]),
            marks=pytest.mark.skipif(jax.__version_info__ < NEWEST, reason="JAX 0.12 has soft caps"),
        ),
    ],
)
def test_both_passes_are_lowered_to_the_kernel(method: Any, fields: dict[str, Any], config: list[str]) -> None:
    sharding = jax.sharding.SingleDeviceSharding(lt.target("h100").devices()[0])
    q, k, v = (jax.ShapeDtypeStruct((2, 256, n, 64), jnp.bfloat16, sharding=sharding) for n in (4, 2, 2))
    ids = jax.ShapeDtypeStruct((2, 256), jnp.int32, sharding=sharding) if "segments" in fields else None
    sinks = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding)
    window = fields.get("window")
    options = CudnnOptions(0.1, True, window, fields.get("soft_cap"))
    blocks = _blocks.Config(True, window, 0.1, None, 128)
    kernel = _cudnn.Kernel(method, (options,), None, 8 if method == "documents" else 0, blocks)
    passes = _blocks.Passes(_cudnn.forward, _cudnn.gradients, kernel)

    def loss(q: Any, k: Any, v: Any, sinks: Any, ids: Any) -> Any:
        out: Any = _blocks.attend(passes, q, k, v, sinks, _blocks.RuntimeMask(None, None, ids, ids))
        return jnp.sum(out.astype(jnp.float32))

    traced = jax.jit(jax.grad(loss, (0, 1, 2, 3))).trace(q, k, v, sinks, ids)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    name = "fmhaScaleBiasSoftmax" if method == "mask array" else "fmhaSoftmax"
    assert f"@__cudnn${name}(" in text and f"@__cudnn${name}Backward(" in text
    plain = text.replace("\\22", '"')
    assert all(part in plain for part in config)
    assert ("stablehlo.case" in text) == (method == "documents")  # blocks for more than eight documents
