"""The only file that touches JAX outside its public, stable interface.

Each use was checked on the versions of its row; where they differ, the code beside it says how.

| use | 0.10.2 | 0.11.2 | 0.12.0.1 | replaced by |
|---|---|---|---|---|
| `debug_info.arg_names` of a traced jaxpr | yes | yes | yes | a public list of the arguments that `jit` kept |
| `_jit_info` of a jitted function | yes | yes | yes | a public list of its donated arguments |
| `jax.stages.Lowered._lowering.compile_args` | yes | yes | yes | the same |
| `jax.stages.Compiled._executable._xla_in_layouts` | yes | not needed | not needed | JAX 0.11 |
| `jax._src.config.remat3` | yes | yes | yes | its primitives in `jax.extend` |
| `jax._src.compiler.compile_or_get_cached` | yes | yes | yes | a public event with the program that is compiled |
| `jax._src.compilation_cache.is_cache_used` | yes | yes | yes | a public way to compile once without the cache |
| `jax.experimental.topologies.get_topology_desc` | yes | yes | yes | a stable home for ahead-of-time topologies |
| `jax.experimental.layout.with_layout_constraint` | yes | yes | yes | a stable home for layouts |
| `jax._src.lib.cuda_versions.cudnn_get_version` | yes | yes | yes | a public way to ask for cuDNN |
| `jax._src.hardware_utils.has_visible_nvidia_gpu` | yes | yes | yes | GPU topologies without what only running needs |
| `jax._src.distributed.global_state.client` | yes | yes | yes | a public key-value store of `jax.distributed` |
| `jax._src.lax.control_flow.conditionals` on the stack | yes | yes | yes | a public way to ask what is traced |
| `jax.interpreters.ad`, `.batching`, `.mlir` | yes | yes | yes | a public way to make operations |
| `jax_plugins.xla_cuda13.initialize` (and 12) | yes | yes | yes | GPU topologies without what only running needs |
| splash attention of `jax.experimental.pallas.ops.tpu`, `_splash_*` | yes | yes | yes | a public kernel with its sums |
| `jax.experimental.pallas`, its `triton` | yes | deprecated | deprecated | kernels of Mosaic GPU; without, two passes |
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
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from ._errors import ConfigError, StructureError


def tpu_topology_devices(topology_name: str, *, chip_config_name: str | None = None) -> list[Any]:
    """Devices of a TPU topology that need not be present, for ahead-of-time compilation.

    Args:
        topology_name: ``name:AxB[xC]``, such as ``v5e:2x2``.
        chip_config_name: how a chip's cores appear, where libtpu's default is not what a machine shows: ``megacore``
            makes the two cores of a v4 chip one device.

    Returns:
        Compile-only JAX devices.

    Raises:
        Exception: whatever libtpu raises for a topology it does not know.
    """
    from jax.experimental import topologies

    # Without these libtpu asks the (absent) TPU metadata server, and refuses to load in two processes at once.
    said = {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost"}
    for name, value in {**said, "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}.items():
        os.environ.setdefault(name, value)
    options = {} if chip_config_name is None else {"chip_config_name": chip_config_name}
    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology_name, **options).devices)


def gpu_topology_devices(target_config: str, *, partitions: int, hosts: int, devices: int) -> list[Any]:
    """Devices of NVIDIA GPUs that need not be present, for ahead-of-time compilation.

    JAX finds the plugin whatever `JAX_PLATFORMS` says, but where that may mean a GPU the plugin first asks for cuDNN,
    cuBLAS and more. Programs that only compile need none of them, so the check is skipped: on machines without a GPU
    at once, on those with one only after JAX's own attempt failed, when its backends are settled.

    Args:
        target_config: the GPU, a `GpuTargetConfigProto` in text form.
        partitions: how many groups of hosts there are; NVLink does not leave a group.
        hosts: hosts of a group.
        devices: GPUs of a host.

    Returns:
        Compile-only JAX devices, with no memories (``addressable_memories() == []``).

    Raises:
        NotImplementedError: when JAX has no usable CUDA plugin.
        Exception: whatever XLA raises for a description that it does not understand.
    """
    from jax._src import hardware_utils
    from jax.experimental import topologies

    def describe() -> list[Any]:
        what = {"target_config": target_config, "topology": f"{partitions}x{hosts}x{devices}"}
        return list(topologies.get_topology_desc(platform="cuda", topology_name="any", **what).devices)

    if not hardware_utils.has_visible_nvidia_gpu():
        with _no_cuda_check():
            return _describe_or_register(describe)
    try:
        return describe()
    except NotImplementedError:
        jax.devices()  # what JAX runs on is decided before the plugin that it refused is registered
        with _no_cuda_check():
            return _describe_or_register(describe)


def _describe_or_register(describe: Callable[[], list[Any]]) -> list[Any]:
    try:
        return describe()
    except NotImplementedError:
        # JAX looked for plugins before, and this one failed its check then.
        names = [name for name in ("xla_cuda13", "xla_cuda12") if importlib.util.find_spec(f"jax_plugins.{name}")]
        if not names:
            raise
        importlib.import_module(f"jax_plugins.{names[0]}").initialize()
        return describe()


@contextlib.contextmanager
def _no_cuda_check() -> Generator[None]:
    name = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def row_major(x: Any) -> Any:
    """Make the compiler store a traced array with its last axis innermost.

    Args:
        x: a tracer.

    Returns:
        The same value.
    """
    return laid_out(x, tuple(range(x.ndim)))


def laid_out(x: Any, order: tuple[int, ...]) -> Any:
    """Make the compiler store a traced array with its axes in this order.

    Args:
        x: a tracer.
        order: its axes from the outermost to the innermost.

    Returns:
        The same value.
    """
    from jax.experimental.layout import Layout, with_layout_constraint

    return with_layout_constraint(x, Layout(order))


def laid_out_on_tpus(x: Any, order: tuple[int, ...]) -> Any:
    """`laid_out` in programs for TPUs: of a divided array XLA's other compilers gather all parts to do so."""
    return _on_tpus().bind(x, order=order)


@functools.cache
def _on_tpus() -> Any:
    def mapped(values: Any, axes: Any, order: tuple[int, ...]) -> Any:
        x = jnp.moveaxis(values[0], axes[0], 0)
        return laid_out_on_tpus(x, (0, *(axis + 1 for axis in order))), 0

    primitive: Any = Primitive("laid_out_on_tpus")
    primitive.def_impl(lambda x, order: x)
    primitive.def_abstract_eval(lambda x, order: x)
    ad.deflinear2(primitive, lambda cotangent, _, order: [cotangent])
    batching.primitive_batchers[primitive] = mapped
    mlir.register_lowering(primitive, lambda ctx, x, order: [x])
    mlir.register_lowering(primitive, mlir.lower_fun(laid_out, multiple_results=False), platform="tpu")
    return primitive


def no_derivative(x: Any, what: str) -> Any:
    """Return an array that is refused where a derivative goes through it, rather than to be lost.

    Args:
        x: an array.
        what: is differentiated then, for the `StructureError`.
    """
    return _without_derivative().bind(x, what=what)


@functools.cache
def _without_derivative() -> Any:
    def differentiated(primals: Any, tangents: Any, what: str) -> Any:
        if type(tangents[0]) is ad.Zero:
            return no_derivative(primals[0], what), tangents[0]
        raise StructureError(
            f"a derivative goes through {what}",
            got="it would be lost there",
            hint="jax.lax.stop_gradient of the gradients, parameters and decays; or that state in float32",
        )

    primitive: Any = Primitive("no_derivative")
    primitive.def_impl(lambda x, what: x)
    primitive.def_abstract_eval(lambda x, what: x)
    ad.primitive_jvps[primitive] = differentiated
    batching.primitive_batchers[primitive] = lambda values, axes, what: (no_derivative(values[0], what), axes[0])
    mlir.register_lowering(primitive, lambda ctx, x, what: [x])
    return primitive


def bilinear(name: str, fn: Callable[..., Any], of_first: Callable[..., Any], of_second: Callable[..., Any]) -> Any:
    """Make an operation of two arrays that is linear in each, with transposes of its own.

    Args:
        name: of the operation.
        fn: what it computes, by which it is mapped, too.
        of_first: ``of_first(cotangent, first, second)``: the first's cotangent, given the second.
        of_second: likewise of the second, given the first.
    """
    primitive: Any = Primitive(name)
    primitive.def_impl(jax.jit(fn))
    primitive.def_abstract_eval(lambda *avals: avals[0].update(shape=jax.eval_shape(fn, *avals).shape, weak_type=False))
    mlir.register_lowering(primitive, mlir.lower_fun(fn, multiple_results=False))
    ad.defbilinear(primitive, of_first, of_second)
    batching.primitive_batchers[primitive] = lambda values, axes: (jax.vmap(fn, axes)(*values), 0)
    return primitive


def on_one_device(alone: Callable[..., Any], among: Callable[..., Any], *args: Any, needed: str = "") -> Any:
    """Compute with one function in a program for one TPU, with another in all other programs.

    XLA divides no Mosaic kernel, and how many devices a program is for shows when it is lowered, not when it is traced.
    Derivatives are those of the second function.

    Args:
        alone: what one TPU computes, or each of several inside of a `jax.shard_map` over all axes.
        among: another function for the same results.
        args: trees of arrays.
        needed: what to say, with a `ConfigError`, where the second would be taken; empty: nothing.
    """
    leaves, tree = jax.tree.flatten(args)
    held = [jax.make_jaxpr(lambda *flat, fn=fn: fn(*tree.unflatten(flat)))(*leaves) for fn in (alone, among)]
    results = _on_one_device().bind(*leaves, alone=held[0], among=held[1], needed=needed)
    return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(among, *args)), results)


@functools.cache
def _on_one_device() -> Any:
    primitive: Any = Primitive("on_one_device")
    primitive.multiple_results = True
    primitive.def_impl(lambda *args, **params: jax.jit(functools.partial(primitive.bind, **params))(*args))
    primitive.def_abstract_eval(lambda *_, alone, among, needed: list(among.out_avals))

    def lowered(ctx: Any, *values: Any, alone: Any, among: Any, needed: str, is_tpu: bool) -> Any:
        is_alone = is_tpu and _is_for_one_device(ctx.module_context.axis_context)
        if needed and not is_alone:
            raise ConfigError(needed, hint="leave it out for what the target has")
        return mlir.lower_fun(jaxpr_as_fun(alone if is_alone else among))(ctx, *values)

    def derivative(primals: Any, tangents: Any, *, among: Any, **_: Any) -> Any:
        moving = [at for at, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

        def fn(*moved: Any) -> Any:
            given = dict(zip(moving, moved, strict=True))
            return jaxpr_as_fun(among)(*(given.get(at, primal) for at, primal in enumerate(primals)))

        return jax.jvp(fn, [primals[at] for at in moving], [tangents[at] for at in moving])

    def mapped(values: Any, axes: Any, *, alone: Any, among: Any, needed: str) -> Any:
        both = [jax.make_jaxpr(jax.vmap(jaxpr_as_fun(one), axes))(*values) for one in (alone, among)]
        results = primitive.bind(*values, alone=both[0], among=both[1], needed=needed)
        return results, [0] * len(results)

    mlir.register_lowering(primitive, functools.partial(lowered, is_tpu=False))
    mlir.register_lowering(primitive, functools.partial(lowered, is_tpu=True), platform="tpu")
    ad.primitive_jvps[primitive] = derivative
    batching.primitive_batchers[primitive] = mapped
    return primitive


def _is_for_one_device(axis_context: Any) -> bool:
    """Whether what is lowered is for one device: of a program for one, or of each inside of a `jax.shard_map`."""
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
    """Attend by JAX's splash attention kernel.

    Args:
        q_NTH: queries, multiplied by their scale.
        k_KSH: keys.
        v_KSH: values.
        segments: of queries [T] and of keys [S].
        sinks_N: a score of each head.
        causal: whether a query sees no key after it.
        window: how many it sees.
        soft_cap: of scores.
        block: rows and columns of a block of scores, which divide T and S.
        interpret: whether to compute by XLA's operations what the kernel would.

    Returns:
        The result, and the logarithm of each row's sum of exponentials, [N, T].
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
    """Return the gradients of queries, keys and values by the same kernel.

    Args:
        arrays_NTH: queries as `splash_forward` takes them, the cotangent of its result, the logarithms that it gave,
            and the products of results and cotangents, added up over each row, [N, T].
        keys_KSH: keys and values.
        segments: as `splash_forward` takes them, and the others, too.
        causal: likewise.
        window: likewise.
        soft_cap: likewise.
        block: likewise.
        is_fused: whether one kernel computes all three, of queries once for each block of keys.
        interpret: likewise.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    (q_NTH, dout_NTH, lse_NT, delta_NT), (k_KSH, v_KSH) = arrays_NTH, keys_KSH
    tables, by_keys, mask_function = _splash_tables(q_NTH.shape[1], k_KSH.shape[1], causal, window, block, is_fused)
    ids = None if segments is None else kernel.SegmentIds(*segments)
    sizes = _splash_blocks(block, is_fused)
    # Sinks are in the sums: only their own gradient would need them.
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

    apart = None if is_fused else block
    columns = min(block, 512)  # of scores that a step holds, which is all that grows with a block
    return kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=columns,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=columns,
        block_q_dq=apart,
        block_kv_dq=apart,
        use_fused_bwd_kernel=is_fused,
    )


@functools.cache
def _splash_tables(
    num_queries: int, num_keys: int, causal: bool, window: int | None, block: int, is_fused: bool
) -> tuple[Any, Any, Any]:
    """Return which blocks the kernel visits, by queries and by keys, as NumPy's arrays, and what it masks them with.

    Where JAX makes them they are arrays of whatever is traced, and each number of each block is looked at.
    """
    import numpy as np
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info

    def is_seen(queries: Any, keys: Any) -> Any:
        seen = queries >= keys
        return seen if window is None else seen & (queries - keys < window)

    class Band(masks.Mask):
        """What is seen follows from how far a key is from a query: of a block each distance is looked at once."""

        @property
        def shape(self) -> tuple[int, ...]:
            return num_queries, num_keys

        def __getitem__(self, idx: Any) -> Any:
            rows, columns = idx
            first, last = rows.start - columns.stop + 1, rows.stop - columns.start
            distances = np.arange(first, last)[None]
            return is_seen(distances, 0) if causal else np.ones(distances.shape, bool)

    mask: Any = Band()
    if causal:
        mask.q_sequence, mask.mask_function = np.arange(num_queries, dtype=np.int32), is_seen
    told: Any = {"block_shape": (block, block), "head_shards": 1, "q_seq_shards": 1}
    by_queries, mask_function = info.process_mask(masks.MultiHeadMask([mask]), **told)
    by_keys, _ = info.process_mask_dkv(masks.MultiHeadMask([mask]), **told, shrink_grid=not is_fused)
    return by_queries, by_keys, mask_function


@functools.cache
def has_cudnn() -> bool:
    """Whether JAX can use NVIDIA's cuDNN in this process; compiling its kernels needs it even without a GPU."""
    try:
        from jax._src.lib import cuda_versions

        return cuda_versions is not None and cuda_versions.cudnn_get_version() > 0
    except (ImportError, RuntimeError, AttributeError):
        return False


class _Patch:
    """A function of a JAX module that is replaced as long as anybody needs it, in whichever order threads leave."""

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


_cache_is_used = _Patch("is_cache_used", lambda original: lambda backend: False)


@contextlib.contextmanager
def without_compilation_cache() -> Generator[None]:
    """Compile for certain: a program found in JAX's persistent cache would dump nothing."""
    from jax._src import compilation_cache

    with _cache_is_used(compilation_cache):
        yield


def inside_branch() -> bool:
    """Whether a branch of `jax.lax.cond` or `jax.lax.switch` is traced right now."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "jax._src.lax.control_flow.conditionals":
            return True
        frame = frame.f_back
    return False


_TRANSFORMATIONS = {"BatchTracer": "jax.vmap", "JVPTracer": "differentiation", "LinearizeTracer": "differentiation"}


def has_pallas_triton() -> bool:
    """Whether this JAX makes Triton kernels."""
    with contextlib.suppress(ModuleNotFoundError):  # its parents, which it imports, may go first
        return importlib.util.find_spec("jax.experimental.pallas.triton") is not None
    return False


def in_triton(kernel: Callable[..., None], shapes: Any, rows: int, *, aliases: Any, interpret: bool) -> Any:
    """Make a call of a Triton kernel on blocks of rows.

    Args:
        kernel: of references to blocks, of the arguments and then of the results.
        shapes: of the arguments, and of the results: [rows of all, numbers of a row], or of scalars.
        rows: of a block; they divide those of all. Of 2,048 numbers, as blocks have, each of 128 threads gets 16.
        aliases: results by the argument that each overwrites.
        interpret: run it without Triton, on any device.

    Returns:
        A function of the arguments.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    def block(of: Any) -> Any:
        return pl.BlockSpec((rows, of.shape[1]), lambda i: (i, 0)) if of.shape else pl.BlockSpec((), lambda i: ())

    specs: Any = {"in_specs": [*map(block, shapes[0])], "out_specs": [*map(block, shapes[1])]}
    how: Any = {"grid": (shapes[1][0].shape[0] // rows,), "compiler_params": triton.CompilerParams(num_warps=4)}
    return pl.pallas_call(kernel, shapes[1], input_output_aliases=aliases, interpret=interpret, **specs, **how)


def transformation(values: Iterable[Any]) -> str | None:
    """Name the transformation that some values are traced for, ``jax.vmap`` or ``differentiation``; None for neither.

    Read off the names of JAX's tracers (jax 0.10.2 to 0.12.0). One inside of which a `jax.jit` is traced is not seen.
    """
    return next((found for value in values if (found := _TRANSFORMATIONS.get(type(value).__name__))), None)


def jit_options(jitted: Any) -> tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...]]:
    """Return the donated arguments of a function that `jax.jit` returned, by position and name, and the static ones."""
    info = jitted._jit_info
    return info.donate_argnums, info.donate_argnames, info.static_argnums


def argument_names(traced: Any) -> list[str]:
    """JAX's names of a traced function's argument leaves, ``params['w']``, as its compiled programs carry them.

    Args:
        traced: a `jax.stages.Traced`.

    Returns:
        One name a leaf, in flattening order; empty when JAX keeps none.
    """
    return list(traced.jaxpr.jaxpr.debug_info.arg_names or ())


def kept_arguments(lowered: Any, num_leaves: int) -> list[int] | None:
    """Return the argument leaves that a lowered program reads, in the order of its parameters.

    Args:
        lowered: a `jax.stages.Lowered`.
        num_leaves: how many leaves its arguments have.

    Returns:
        Indices in flattening order; None when JAX does not tell.
    """
    try:
        told = lowered._lowering.compile_args
        num_constants = len(told["all_args_info"].in_avals) - num_leaves  # constants that JAX hoisted come first
        kept = sorted(at - num_constants for at in told["kept_var_idx"])
    except (AttributeError, KeyError, TypeError):
        return None
    return [at for at in kept if at >= 0]


def called(compiled: Any, *args: Any) -> Any:
    """Call a compiled program, with arrays of less than a byte that were put on a device, too.

    JAX 0.10 writes the bits of an element into the layout of the program's argument and not into the array's, compares
    the two, and refuses an int4 array by jax.device_put, on a mesh or from a checkpoint.

    Args:
        compiled: a `jax.stages.Compiled`.
        args: its arguments.
    """
    executable: Any = getattr(compiled, "_executable", None)
    layouts: list[Any] = getattr(executable, "_xla_in_layouts", None) or []
    compared = [None if getattr(layout, "sub_byte_element_size_in_bits", 0) else layout for layout in layouts]
    if compared == layouts:
        return compiled(*args)
    executable._xla_in_layouts = compared  # None is compared with nothing
    try:
        return compiled(*args)
    finally:
        executable._xla_in_layouts = layouts


@contextlib.contextmanager
def classic_remat() -> Generator[None]:
    """Trace `jax.checkpoint` and `checkpoint_name` as JAX 0.10 does, whatever ``jax_remat3`` says.

    What it traces otherwise holds neither a jaxpr that others can read, nor, on JAX 0.11.2, offloaded values that XLA
    compiles: a `reduce_precision` of them runs in the host's memory.
    """
    from jax._src import config

    with config.remat3(False) if hasattr(config, "remat3") else contextlib.nullcontext():
        yield


class Compilation:
    """A program that JAX compiled, or tried to."""

    def __init__(self, compile_again: Callable[[list[tuple[str, Any]]], Any]) -> None:
        self._compile_again = compile_again
        self.executable: Any = None
        """XLA's executable; None when the compiler raised."""
        self.error: BaseException | None = None
        """What the compiler raised."""

    @property
    def platform(self) -> str:
        """What it was compiled for: ``cpu``, ``gpu``, ``tpu``; empty when the compiler raised."""
        return self.executable.local_devices()[0].platform if self.executable is not None else ""

    def stats(self) -> Any:
        """Return the compiler's byte figures, with the fields of `memory_analysis()`; None without an executable."""
        return self.executable.get_compiled_memory_stats() if self.executable is not None else None

    def dump(self, folder: str) -> None:
        """Compile it once more, dumped into a folder; an error of the compiler is expected and dropped."""
        with contextlib.suppress(Exception):
            self._compile_again([("xla_dump_to", folder), ("xla_dump_hlo_as_proto", True)])


@contextlib.contextmanager
def watch_compilations() -> Generator[list[Compilation]]:
    """Remember every program that JAX compiles inside the block, so that it can be looked at after a failure.

    Yields:
        The programs so far, in order. They are kept alive as long as the list is.
    """
    from jax._src import compiler

    seen: list[Compilation] = []
    with _compile_or_get_cached(compiler):
        _watchers.append(seen)
        try:
            yield seen
        finally:
            _watchers[:] = [watcher for watcher in _watchers if watcher is not seen]


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile_or_get_cached(
        backend: Any, computation: Any, devices: Any, options: Any, *rest: Any, **named: Any
    ) -> Any:
        def again(overrides: list[tuple[str, Any]]) -> Any:
            changed = copy.copy(options)
            changed.env_option_overrides = [*changed.env_option_overrides, *overrides]
            with without_compilation_cache():
                return original(backend, computation, devices, changed, *rest, **named)

        record = Compilation(again)
        for watcher in tuple(_watchers):
            watcher.append(record)
        try:
            record.executable = original(backend, computation, devices, options, *rest, **named)
        except BaseException as error:
            record.error = error
            raise
        return record.executable

    return compile_or_get_cached


_watchers: list[list[Compilation]] = []
_compile_or_get_cached = _Patch("compile_or_get_cached", _watched)


def exchange(topic: str, text: str, timeout_seconds: int) -> list[str | None]:
    """Tell all processes of `jax.distributed` something, and hear what each of them says.

    Args:
        topic: a name that all processes use once.
        text: what this one says.
        timeout_seconds: how long to wait for the others.

    Returns:
        What each process said, in order; None of those that did not come in time.
    """
    from jax._src import distributed

    client: Any = distributed.global_state.client
    client.key_value_set(f"{topic}/{jax.process_index()}", text)
    # Only a process that failed does not come: the others wait for it in any case.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        client.wait_at_barrier(topic, timeout_seconds * 1000)
    said = {int(key.rpartition("/")[2]): value for key, value in client.key_value_dir_get(topic)}
    return [said.get(index) for index in range(jax.process_count())]


def post(topic: str, text: str) -> None:
    """Leave a text for the other processes of `jax.distributed`; the first one that is left holds."""
    from jax._src import distributed

    with contextlib.suppress(jax.errors.JaxRuntimeError):
        distributed.global_state.client.key_value_set(f"{topic}/said", text)  # pyright: ignore[reportOptionalMemberAccess]


def posted(topic: str) -> str | None:
    """Return what a process left with `post`, or None."""
    from jax._src import distributed

    client: Any = distributed.global_state.client
    found = [] if client is None else client.key_value_dir_get(topic)
    return found[0][1] if found else None
