"""The only module that uses JAX outside of its public, stable interface.

Each use was checked on the JAX versions of the columns. If versions differ, a comment or docstring at the use says how.

| use | 0.10.2 | 0.11.2 | 0.12.0.1 | could be replaced by |
|---|---|---|---|---|
| `debug_info.arg_names` of a traced jaxpr | yes | yes | yes | public names of a traced function's argument leaves |
| `_jit_info` of a jitted function | yes | yes | yes | a public list of its donated and static arguments |
| `jax.stages.Lowered._lowering.compile_args` | yes | yes | yes | a public list of the arguments that `jit` kept |
| `jax.stages.Compiled._executable._xla_in_layouts` | yes | not needed | not needed | JAX 0.11 |
| `jax._src.config.remat3` | yes | yes | yes | public primitives of remat3 in `jax.extend` |
| `jax._src.compiler.compile_or_get_cached` | yes | yes | yes | a public event with the program that is compiled |
| `jax._src.compilation_cache.is_cache_used` | yes | yes | yes | a public way to compile once without the cache |
| `jax.experimental.topologies.get_topology_desc` | yes | yes | yes | a stable module for ahead-of-time topologies |
| `jax.experimental.layout.with_layout_constraint` | yes | yes | yes | a stable module for layouts |
| `jax._src.lib.cuda_versions.cudnn_get_version` | yes | yes | yes | a public query for cuDNN |
| `jax._src.cudnn.fused_attention_stablehlo` | yes | yes | yes | documents in `jax.nn.dot_product_attention` |
| `jax._src.hardware_utils.has_visible_nvidia_gpu` | yes | yes | yes | GPU topologies that do not need cuDNN |
| `jax._src.distributed.global_state.client` | yes | yes | yes | a public key-value store of `jax.distributed` |
| `jax._src.lax.control_flow.conditionals` on the stack | yes | yes | yes | a public query for traced branches |
| `jax.interpreters.ad`, `.batching`, `.mlir` | yes | yes | yes | a public way to define primitives |
| `jax_plugins.xla_cuda13.initialize` (and 12) | yes | yes | yes | GPU topologies that do not need cuDNN |
| `jax.experimental.pallas.ops.tpu.splash_attention`, `_splash_*` | yes | yes | yes | a kernel with log-sum-exps |
| `module_context.axis_context` of a lowering | yes | yes | yes | a public way to lower by the number of devices |
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import os
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from ._errors import ConfigError, StructureError


def tpu_topology_devices(topology_name: str, *, chip_config_name: str | None = None) -> list[Any]:
    """Return devices of a TPU topology for ahead-of-time compilation; no TPU needs to be present.

    `topology_name` is ``name:AxB[xC]``, such as ``v5e:2x2``. `chip_config_name` is needed if libtpu's default differs
    from a real machine. For example, ``megacore`` makes the two cores of a v4 chip one device.
    """
    from jax.experimental import topologies

    # Without these variables libtpu queries the (absent) TPU metadata server, and cannot load in two processes at once.
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    options = {} if chip_config_name is None else {"chip_config_name": chip_config_name}
    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology_name, **options).devices)


def gpu_topology_devices(target_config: str, *, partitions: int, hosts: int, devices: int) -> list[Any]:
    """Return devices of NVIDIA GPUs for ahead-of-time compilation; no GPU needs to be present.

    `target_config` is a `GpuTargetConfigProto` in text form. There are `partitions` groups of `hosts` machines with
    `devices` GPUs each; NVLink connects the GPUs of a group. The devices have no memories
    (``addressable_memories() == []``). Raises `NotImplementedError` when JAX has no usable CUDA plugin.
    """
    from jax._src import hardware_utils
    from jax.experimental import topologies

    def describe() -> list[Any]:
        options = {"target_config": target_config, "topology": f"{partitions}x{hosts}x{devices}"}
        return list(topologies.get_topology_desc(platform="cuda", topology_name="any", **options).devices)

    # JAX finds the plugin regardless of `JAX_PLATFORMS`. If that variable allows GPUs, the plugin first checks for
    # cuDNN, cuBLAS and more. Programs that are only compiled need none of them, so the check is skipped. Without
    # a GPU it is skipped at once. With a GPU it is skipped only after JAX's own attempt failed and JAX's backends are
    # initialised.
    if not hardware_utils.has_visible_nvidia_gpu():
        with _no_cuda_check():
            return _describe_or_register(describe)
    try:
        return describe()
    except NotImplementedError:
        jax.devices()  # initialise JAX's backends before the plugin that JAX refused is registered
        with _no_cuda_check():
            return _describe_or_register(describe)


def _describe_or_register(describe: Callable[[], list[Any]]) -> list[Any]:
    try:
        return describe()
    except NotImplementedError:
        # JAX searched for plugins earlier, and the CUDA plugin failed its check then. So register it now.
        names = [name for name in ("xla_cuda13", "xla_cuda12") if importlib.util.find_spec(f"jax_plugins.{name}")]
        if not names:
            raise
        importlib.import_module(f"jax_plugins.{names[0]}").initialize()
        return describe()


@contextlib.contextmanager
def _no_cuda_check() -> Generator[None]:
    name = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    previous = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous


def row_major(x: Any) -> Any:
    """Constrain the compiler to store a traced array with its last axis innermost."""
    return laid_out(x, tuple(range(x.ndim)))


def laid_out(x: Any, order: tuple[int, ...]) -> Any:
    """Constrain the compiler to store a traced array with its axes in a given order, outermost first."""
    from jax.experimental.layout import Layout, with_layout_constraint

    return with_layout_constraint(x, Layout(order))


def laid_out_on_tpus(x: Any, order: tuple[int, ...]) -> Any:
    """Apply `laid_out` only in programs for TPUs: on other platforms XLA would first gather all shards of `x`."""
    return _on_tpus().bind(x, order=order)


@functools.cache
def _on_tpus() -> Any:
    def mapped(values: Any, axes: Any, order: tuple[int, ...]) -> Any:
        x = jnp.moveaxis(values[0], axes[0], 0)
        return laid_out_on_tpus(x, (0, *(axis + 1 for axis in order))), 0

    primitive: Any = Primitive("laid_out_on_tpus")
    primitive.def_impl(lambda x, order: x)
    primitive.def_abstract_eval(lambda x, order: x)
    # The primitive is the identity, so the cotangent passes unchanged, in any layout.
    ad.deflinear2(primitive, lambda cotangent, _, order: [cotangent])
    batching.primitive_batchers[primitive] = mapped
    mlir.register_lowering(primitive, lambda ctx, x, order: [x])
    mlir.register_lowering(primitive, mlir.lower_fun(laid_out, multiple_results=False), platform="tpu")
    return primitive


def no_derivative(x: Any, description: str) -> Any:
    """Return an array unchanged, but raise if a derivative goes through it, since the derivative would be lost.

    The `StructureError` says ``a derivative goes through {description}``.
    """
    return _without_derivative().bind(x, subject=description)


@functools.cache
def _without_derivative() -> Any:
    def differentiated(primals: Any, tangents: Any, subject: str) -> Any:
        if type(tangents[0]) is ad.Zero:
            return no_derivative(primals[0], subject), tangents[0]
        hint = "apply jax.lax.stop_gradient to gradients, parameters and decays, or keep that state in float32"
        raise StructureError(f"a derivative goes through {subject}, and would be lost", hint=hint)

    primitive: Any = Primitive("no_derivative")
    primitive.def_impl(lambda x, subject: x)
    primitive.def_abstract_eval(lambda x, subject: x)
    ad.primitive_jvps[primitive] = differentiated
    batching.primitive_batchers[primitive] = lambda values, axes, subject: (no_derivative(values[0], subject), axes[0])
    # The parameter cannot be called `description`: `mlir.lower_per_platform` has an argument of that name.
    mlir.register_lowering(primitive, lambda ctx, x, subject: [x])
    return primitive


def bilinear(
    name: str, fn: Callable[..., Any], transpose_first: Callable[..., Any], transpose_second: Callable[..., Any]
) -> Any:
    """Make a primitive of two arrays that is linear in each, with custom transposes.

    ``transpose_first(cotangent, first, second)`` returns the cotangent of `first`, and gets a placeholder as `first`.
    `transpose_second` does the same for `second`. `fn` computes the result, also under `jax.vmap`.
    """
    primitive: Any = Primitive(name)
    primitive.def_impl(jax.jit(fn))
    primitive.def_abstract_eval(lambda *avals: avals[0].update(shape=jax.eval_shape(fn, *avals).shape, weak_type=False))
    mlir.register_lowering(primitive, mlir.lower_fun(fn, multiple_results=False))
    ad.defbilinear(primitive, transpose_first, transpose_second)
    batching.primitive_batchers[primitive] = lambda values, axes: (jax.vmap(fn, axes)(*values), 0)
    return primitive


def on_one_device(
    alone: Callable[..., Any], among: Callable[..., Any], *args: Any, platform: str = "tpu", needed: str = ""
) -> Any:
    """Compute with `alone` in a program for one device of a platform, and with `among` in all other programs.

    `alone` is also used inside of a `jax.shard_map` over all axes. XLA does not partition kernels, and a program's
    number of devices is known only when it is lowered. So this function binds a primitive, whose lowering selects one
    of two jaxprs. Derivatives are those of `among`. If `needed` is not empty, the lowering raises a `ConfigError` with
    this message instead of selecting `among`.
    """
    leaves, tree = jax.tree.flatten(args)
    jaxprs = [jax.make_jaxpr(lambda *flat, fn=fn: fn(*tree.unflatten(flat)))(*leaves) for fn in (alone, among)]
    results = _on_one_device().bind(*leaves, alone=jaxprs[0], among=jaxprs[1], platform=platform, needed=needed)
    return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(among, *args)), results)


@functools.cache
def _on_one_device() -> Any:
    primitive: Any = Primitive("on_one_device")
    primitive.multiple_results = True
    primitive.def_impl(lambda *args, **params: jax.jit(functools.partial(primitive.bind, **params))(*args))
    primitive.def_abstract_eval(lambda *_, among, **__: list(among.out_avals))

    def lowered(ctx: Any, *values: Any, alone: Any, among: Any, platform: str, needed: str, target: str) -> Any:
        is_alone = target == platform and _is_for_one_device(ctx.module_context.axis_context)
        if needed and not is_alone:
            raise ConfigError(needed, hint="leave it out to use what the target supports")
        return mlir.lower_fun(jaxpr_as_fun(alone if is_alone else among))(ctx, *values)

    def derivative(primals: Any, tangents: Any, *, among: Any, **_: Any) -> Any:
        # Operands without a tangent are closed over, so that no zeros are made for them.
        positions = [index for index, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

        def fn(*operands: Any) -> Any:
            replacements = dict(zip(positions, operands, strict=True))
            return jaxpr_as_fun(among)(*(replacements.get(index, primal) for index, primal in enumerate(primals)))

        return jax.jvp(fn, [primals[index] for index in positions], [tangents[index] for index in positions])

    def mapped(values: Any, axes: Any, *, alone: Any, among: Any, **params: Any) -> Any:
        jaxprs = [jax.make_jaxpr(jax.vmap(jaxpr_as_fun(jaxpr), axes))(*values) for jaxpr in (alone, among)]
        results = primitive.bind(*values, alone=jaxprs[0], among=jaxprs[1], **params)
        return results, [0] * len(results)

    mlir.register_lowering(primitive, functools.partial(lowered, target=""))
    for target in ("tpu", "cuda"):
        mlir.register_lowering(primitive, functools.partial(lowered, target=target), platform=target)
    ad.primitive_jvps[primitive] = derivative
    batching.primitive_batchers[primitive] = mapped
    return primitive


def _is_for_one_device(axis_context: Any) -> bool:
    """Return whether code is lowered for one device: a one-device program, or a `jax.shard_map` over all mesh axes."""
    num_devices = getattr(axis_context, "num_devices", None)
    if num_devices is not None:
        return num_devices == 1
    mesh = getattr(axis_context, "mesh", None)
    if mesh is None:
        return False
    manual = {*axis_context.manual_axes, *getattr(mesh, "manual_axes", ())}
    return all(size == 1 for name, size in mesh.shape.items() if name not in manual)


def splash_forward(
    q_NTH: Any,
    k_KSH: Any,
    v_KSH: Any,
    segments: tuple[Any, Any] | None,
    sinks_N: Any,
    *,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    block: int,
    interpret: bool,
) -> tuple[Any, Any]:
    """Compute attention with JAX's splash attention kernel.

    Shapes: N query heads, K key/value heads, T queries, S keys, H head. Queries are already multiplied by their scale.
    `segments` are the segment ids of queries [T] and of keys [S]. `window` is the number of keys that a query sees, its
    own included. `block` is the number of queries and of keys in a block, and divides T and S. With `interpret`, XLA
    operations emulate the kernel. Returns the output [N, T, H], and the log-sum-exp of each row of scores [N, T].
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    tables, _, mask_function = _splash_tables(q_NTH.shape[1], k_KSH.shape[1], causal, window, block, False)
    out, (lse,) = kernel._splash_attention_forward(  # pyright: ignore[reportPrivateUsage]
        tables,
        q_NTH,
        k_KSH,
        v_KSH,
        None if segments is None else kernel.SegmentIds(*segments),
        sinks_N,
        mask_value=kernel.DEFAULT_MASK_VALUE,
        is_mqa=False,
        block_sizes=_splash_blocks(block, False),
        residual_checkpoint_name=None,
        save_residuals=True,
        mask_function=mask_function,
        attn_logits_soft_cap=soft_cap,
        interpret=interpret,
    )
    return out, lse


def splash_backward(
    arrays_NTH: tuple[Any, Any, Any, Any],
    keys_KSH: tuple[Any, Any],
    segments: tuple[Any, Any] | None,
    *,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    block: int,
    is_fused: bool,
    interpret: bool,
) -> tuple[Any, Any, Any]:
    """Compute the gradients of queries, keys and values with JAX's splash attention kernels.

    `arrays_NTH` are the queries, the cotangent of the output, the log-sum-exps [N, T], and each row's sum of output
    times cotangent [N, T]. `keys_KSH` are keys and values. With `is_fused` one kernel computes all three gradients, and
    stores a partial gradient of the queries for each block of keys. Other arguments are those of `splash_forward`.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    (q_NTH, dout_NTH, lse_NT, delta_NT), (k_KSH, v_KSH) = arrays_NTH, keys_KSH
    tables, by_keys, mask_function = _splash_tables(q_NTH.shape[1], k_KSH.shape[1], causal, window, block, is_fused)
    ids = None if segments is None else kernel.SegmentIds(*segments)
    sizes = _splash_blocks(block, is_fused)
    # The log-sum-exps already include the sinks, so these gradients do not need them.
    arrays = (q_NTH, k_KSH, v_KSH, ids, None, lse_NT, dout_NTH, delta_NT)
    options: dict[str, Any] = {
        "is_mqa": False,
        "mask_value": kernel.DEFAULT_MASK_VALUE,
        "mask_function": mask_function,
        "attn_logits_soft_cap": soft_cap,
        "interpret": interpret,
        **{name: getattr(sizes, name) for name in ("q_layout", "k_layout", "v_layout")},
    }
    dq, dk, dv = kernel._splash_attention_bwd_dkv(  # pyright: ignore[reportPrivateUsage]
        *arrays,
        bq=block,
        bkv=block,
        bkv_compute=sizes.block_kv_dkv_compute,
        use_fused_bwd_kernel=is_fused,
        mask_info=by_keys,
        **options,
    )
    if not is_fused:
        dq = kernel._splash_attention_bwd_dq(*arrays, bq=block, bkv=block, mask_info=tables, **options)  # pyright: ignore[reportPrivateUsage]
    return dq, dk, dv


def _splash_blocks(block: int, is_fused: bool) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    dq_block = None if is_fused else block
    columns = min(block, 512)  # score columns that a step holds: no other memory grows with `block`
    return kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=columns,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=columns,
        block_q_dq=dq_block,
        block_kv_dq=dq_block,
        use_fused_bwd_kernel=is_fused,
    )


@functools.cache
def _splash_tables(
    num_queries: int, num_keys: int, causal: bool, window: int | None, block: int, is_fused: bool
) -> tuple[Any, Any, Any]:
    """Return the block tables of the forward and dq kernels, the block tables of the dkv kernel, and the mask function.

    The tables are NumPy arrays. JAX's constructors would make traced arrays, and evaluate the mask at every element.
    """
    import numpy as np
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info

    def is_visible(queries: Any, keys: Any) -> Any:
        visible = queries >= keys
        return visible if window is None else visible & (queries - keys < window)

    class Band(masks.Mask):
        """Mask by the distance from key to query; a block is returned as one row, with an entry for each distance."""

        @property
        def shape(self) -> tuple[int, ...]:
            return num_queries, num_keys

        def __getitem__(self, idx: Any) -> Any:
            rows, columns = idx
            first, last = rows.start - columns.stop + 1, rows.stop - columns.start
            distances = np.arange(first, last)[None]
            return is_visible(distances, 0) if causal else np.ones(distances.shape, bool)

    mask: Any = Band()
    if causal:
        mask.q_sequence, mask.mask_function = np.arange(num_queries, dtype=np.int32), is_visible
    options: Any = {"block_shape": (block, block), "head_shards": 1, "q_seq_shards": 1}
    by_queries, mask_function = info.process_mask(masks.MultiHeadMask([mask]), **options)
    by_keys, _ = info.process_mask_dkv(masks.MultiHeadMask([mask]), **options, shrink_grid=not is_fused)
    return by_queries, by_keys, mask_function


@functools.cache
def cudnn_version() -> int:
    """Return the version of cuDNN that JAX can use in this process, such as 91300 for 9.13; 0 if there is none.

    Compiling cuDNN's kernels needs cuDNN even without a GPU.
    """
    try:
        from jax._src.lib import cuda_versions

        return 0 if cuda_versions is None else cuda_versions.cudnn_get_version()
    except (ImportError, RuntimeError, AttributeError):
        return 0


class CudnnOptions(NamedTuple):
    """Settings of cuDNN's attention that are known when the program is traced."""

    scale: float
    causal: bool
    window: int | None = None
    """Number of keys that a causal query sees, its own included."""
    soft_cap: float | None = None
    """Needs JAX 0.12."""


def cudnn_attention(
    options: CudnnOptions, q: Any, k: Any, v: Any, mask: Any = None, documents: Any = None
) -> tuple[Any, Any]:
    """Return cuDNN's attention [B, T, N, H], and the log-sum-exp of each query's scores in float32.

    `mask` [B or 1, 1, T, S] is true where a query sees a key; with it, causality and window are not applied.
    `documents` holds the starts and lengths of each row's documents, both int32 [B, M]. The log-sum-exps have the shape
    [B, N, T], or [B * M, N, T] with documents. JAX's public function has neither documents nor log-sum-exps that a
    custom backward pass can change.
    """
    operands, params = _cudnn_operands(options, q, mask, documents)
    primitive = _cudnn_module()._dot_product_attention_fwd_p_wrapper
    return tuple(primitive.bind(q, k, v, *operands, is_training=True, **params))


def cudnn_gradients(
    options: CudnnOptions,
    arrays: tuple[Any, Any, Any],
    results: tuple[Any, Any],
    dout: Any,
    mask: Any = None,
    documents: Any = None,
) -> tuple[Any, Any, Any]:
    """Return the gradients of queries, keys and values; `results` has the types that `cudnn_attention` returns."""
    operands, params = _cudnn_operands(options, arrays[0], mask, documents)
    primitive = _cudnn_module()._dot_product_attention_bwd_p_wrapper
    out, lse = results
    return tuple(primitive.bind(*arrays, *operands, lse, out, dout, **params))[:3]


def _cudnn_module() -> Any:
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def _cudnn_operands(options: CudnnOptions, q: Any, mask: Any, documents: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the operands after queries, keys and values, and the parameters that both passes share."""
    module = _cudnn_module()
    bias = lengths = starts = unused = jnp.zeros(0, q.dtype)
    mask_type = module.MaskType.CAUSAL if options.causal and mask is None else module.MaskType.NO_MASK
    if mask is not None:
        bias = jnp.where(mask, jnp.zeros((), q.dtype), module.get_large_negative_number(q.dtype))
    if documents is not None:
        starts, lengths = documents
        starts = jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)  # JAX expects one more column, which it fills
        mask_type = module.MaskType.PADDING_CAUSAL if options.causal else module.MaskType.PADDING
    params: dict[str, Any] = {
        "scale": options.scale,
        "seed": 42,  # of dropout, which is not used
        "dropout_rate": 0.0,
        "variadic_args": (mask is not None, False),  # whether there are a bias and its gradient
        "mask_type": mask_type,
        "layout": module.AttentionLayout.BTNH.value,
        "sliding_window_length": options.window if mask is None else None,
    }
    if "score_mod" in inspect.signature(module.dot_product_attention).parameters:  # JAX 0.12
        params["score_mod"] = None if options.soft_cap is None else _soft_cap(options.soft_cap)
    return [bias, lengths, lengths, starts, starts, unused, unused], params


@functools.cache
def _soft_cap(limit: float) -> Callable[[Any], Any]:
    """Return one function for each limit, because JAX caches compiled programs by function."""

    def soft_cap(scores: Any) -> Any:
        return limit * jnp.tanh(scores / limit)

    return soft_cap


class _Patch:
    """Replacement of a function in a JAX module; mutable. Use it as ``with patch(module):``.

    ``make(original)`` returns the replacement. The original is restored when the last open block, of any thread, exits.
    """

    def __init__(self, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._name, self._make = name, make
        self._lock = threading.Lock()
        self._users = 0
        self._original: Any = None

    @contextlib.contextmanager
    def __call__(self, module: Any) -> Generator[None]:
        with self._lock:
            if self._users == 0:
                self._original = getattr(module, self._name)
                setattr(module, self._name, self._make(self._original))
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    setattr(module, self._name, self._original)


_cache_patch = _Patch("is_cache_used", lambda original: lambda backend: False)


def without_compilation_cache() -> contextlib.AbstractContextManager[None]:
    """Bypass JAX's persistent compilation cache in a ``with`` block.

    XLA writes a dump only when it compiles, so a program from the cache would have no dump.
    """
    from jax._src import compilation_cache

    return _cache_patch(compilation_cache)


def inside_branch() -> bool:
    """Return whether a branch of `jax.lax.cond` or `jax.lax.switch` is being traced."""
    frame = inspect.currentframe()
    # JAX has no public query for this, but functions of its module `conditionals` trace the branches.
    while frame is not None:
        if frame.f_globals.get("__name__") == "jax._src.lax.control_flow.conditionals":
            return True
        frame = frame.f_back
    return False


_TRANSFORMATIONS = {"BatchTracer": "jax.vmap", "JVPTracer": "differentiation", "LinearizeTracer": "differentiation"}


def transformation(values: Iterable[Any]) -> str | None:
    """Return the transformation that values are traced for, ``jax.vmap`` or ``differentiation``, or None.

    The answer comes from the type names of JAX's tracers (jax 0.10.2 to 0.12.0). A transformation around a `jax.jit` is
    not detected inside of that `jax.jit`.
    """
    return next((name for value in values if (name := _TRANSFORMATIONS.get(type(value).__name__))), None)


def jit_options(jitted: Any) -> tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...]]:
    """Return a jitted function's donated arguments by position and by name, and its static arguments by position."""
    info = jitted._jit_info
    return info.donate_argnums, info.donate_argnames, info.static_argnums


def argument_names(traced: Any) -> list[str]:
    """Return JAX's names of a `jax.stages.Traced`'s argument leaves, such as ``params['w']``; empty if unknown."""
    return list(traced.jaxpr.jaxpr.debug_info.arg_names or ())


def kept_arguments(lowered: Any, num_leaves: int) -> list[int] | None:
    """Return the indices of the argument leaves that a `jax.stages.Lowered` reads, in the order of its parameters.

    `num_leaves` is the number of leaves, read or not. Returns None when JAX does not expose the indices.
    """
    try:
        compile_args = lowered._lowering.compile_args
        # Constants that JAX turned into arguments come first.
        num_constants = len(compile_args["all_args_info"].in_avals) - num_leaves
        indices = sorted(index - num_constants for index in compile_args["kept_var_idx"])
    except (AttributeError, KeyError, TypeError):
        return None
    return [index for index in indices if index >= 0]


def called(compiled: Any, *args: Any) -> Any:
    """Call a `jax.stages.Compiled`; work around an error of JAX 0.10 for int4 and other types below one byte.

    JAX 0.10 records the bits per element in the layout of the program's argument but not in the array's layout. It
    compares the two layouts, and so refuses an int4 array that comes from `jax.device_put`, from a mesh or from a
    checkpoint.
    """
    executable: Any = getattr(compiled, "_executable", None)
    layouts: list[Any] = getattr(executable, "_xla_in_layouts", None) or []
    compared = [None if getattr(layout, "sub_byte_element_size_in_bits", 0) else layout for layout in layouts]
    if compared == layouts:
        return compiled(*args)
    executable._xla_in_layouts = compared  # JAX skips the comparison for None
    try:
        return compiled(*args)
    finally:
        executable._xla_in_layouts = layouts


def classic_remat() -> contextlib.AbstractContextManager[Any]:
    """Trace `jax.checkpoint` and `checkpoint_name` in a ``with`` block as JAX 0.10 does, also with ``jax_remat3``.

    With ``jax_remat3`` the traced program has no jaxpr that other code can read. On JAX 0.11.2 XLA also fails to
    compile such a program if it offloads values, because a `reduce_precision` of them runs in host memory.
    """
    from jax._src import config

    return config.remat3(False) if hasattr(config, "remat3") else contextlib.nullcontext()


class Compilation:
    """A program that JAX compiled, or failed to compile."""

    def __init__(self, compile_again: Callable[[list[tuple[str, Any]]], Any]) -> None:
        self._compile_again = compile_again
        self.executable: Any = None
        """XLA's executable; None when the compiler raised."""
        self.error: BaseException | None = None

    @property
    def platform(self) -> str:
        """Platform of the program: ``cpu``, ``gpu``, ``tpu``; empty when the compiler raised."""
        return self.executable.local_devices()[0].platform if self.executable is not None else ""

    def stats(self) -> Any:
        """Return the compiler's byte figures, with the fields of `memory_analysis()`; None without an executable."""
        return self.executable.get_compiled_memory_stats() if self.executable is not None else None

    def dump(self, folder: str) -> None:
        """Compile the program again with a dump into a folder; errors of the compiler are expected and suppressed."""
        with contextlib.suppress(Exception):
            self._compile_again([("xla_dump_to", folder), ("xla_dump_hlo_as_proto", True)])


@contextlib.contextmanager
def watch_compilations() -> Generator[list[Compilation]]:
    """Record, in order, the programs that JAX compiles inside the ``with`` block; the list keeps them alive."""
    from jax._src import compiler

    compilations: list[Compilation] = []
    with _compiler_patch(compiler):
        _watchers.append(compilations)
        try:
            yield compilations
        finally:
            # Compare by identity: nested watchers may hold equal lists.
            _watchers[:] = [watcher for watcher in _watchers if watcher is not compilations]


def _wrap_compiler(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile_or_get_cached(
        backend: Any, computation: Any, devices: Any, options: Any, *args: Any, **kwargs: Any
    ) -> Any:
        def compile_again(overrides: list[tuple[str, Any]]) -> Any:
            new_options = copy.copy(options)
            new_options.env_option_overrides = [*new_options.env_option_overrides, *overrides]
            with without_compilation_cache():
                return original(backend, computation, devices, new_options, *args, **kwargs)

        record = Compilation(compile_again)
        # Recorded before compiling, so that a program that fails to compile is recorded, too.
        for watcher in tuple(_watchers):
            watcher.append(record)
        try:
            record.executable = original(backend, computation, devices, options, *args, **kwargs)
        except BaseException as error:
            record.error = error
            raise
        return record.executable

    return compile_or_get_cached


_watchers: list[list[Compilation]] = []
_compiler_patch = _Patch("compile_or_get_cached", _wrap_compiler)


def exchange(topic: str, text: str, timeout_seconds: int) -> list[str | None]:
    """Send a text to all processes of `jax.distributed`, and return the texts of all processes, by process index.

    All processes pass the same `topic`. A topic is used only once. A text is None if it does not arrive in time.
    """
    from jax._src import distributed

    client: Any = distributed.global_state.client
    client.key_value_set(f"{topic}/{jax.process_index()}", text)
    # Only a failed process misses the barrier. The wait then ends with an error, and the texts of the others are read.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        client.wait_at_barrier(topic, timeout_seconds * 1000)
    texts = {int(key.rpartition("/")[2]): value for key, value in client.key_value_dir_get(topic)}
    return [texts.get(index) for index in range(jax.process_count())]


def post(topic: str, text: str) -> None:
    """Publish a text for the other processes of `jax.distributed`; only the first text of a topic is kept."""
    from jax._src import distributed

    with contextlib.suppress(jax.errors.JaxRuntimeError):
        distributed.global_state.client.key_value_set(f"{topic}/said", text)  # pyright: ignore[reportOptionalMemberAccess]


def posted(topic: str) -> str | None:
    """Return the text that a process published under a topic with `post`, or None."""
    from jax._src import distributed

    client: Any = distributed.global_state.client
    entries = [] if client is None else client.key_value_dir_get(topic)
    return entries[0][1] if entries else None
