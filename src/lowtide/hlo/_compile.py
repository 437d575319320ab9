"""Compile a function for a target, and keep the compiler's information about its memory.

XLA writes its buffer assignment only into dumps. So every compile in this file dumps the program into a temporary
folder; a TPU's compiler also dumps programs that do not fit. Known inefficiency: every report costs a compile. JAX's
persistent cache is bypassed, because a cached program dumps nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..core import (
    ConfigError,
    PlacementError,
    PlacementWarning,
    StructureError,
    TargetError,
    Tree,
    combine,
    leaves_with_paths,
    on_host,
    path_str,
)
from ..core._compat import argument_names, jit_options, without_compilation_cache
from ..jaxprs import plain
from ..targets import Target, resolve_target
from ._copies import options_of
from ._executable import argument_of
from ._proto import read_hlo

_JIT_TYPE = type(jax.jit(lambda: None))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """A function compiled for a target; made by `compile_program`."""

    target: Target
    lowered: Any
    """The `jax.stages.Lowered` that was compiled."""
    jaxpr: Any
    """The function as JAX traced it: a `jax.core.ClosedJaxpr`."""
    hlo: Any
    """The optimised program, its buffers and their lifetimes, as XLA's protobuf message; None if XLA dumped none."""
    static: tuple[int, ...] = ()
    """Positions of the static arguments."""
    host_paths: frozenset[str] = frozenset()
    """Tree paths of the argument leaves that the caller declared in host memory."""
    argument_names: tuple[str, ...] = ()
    """JAX's names of the argument leaves, in flattening order."""
    error: BaseException | None = None
    """The compiler's exception if the program did not fit (then there is no executable); None if it fits."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Compile options, as `copy_options` returns them for a program that uses host memory."""
    _compiled: Any = None

    @property
    def compiled(self) -> Any:
        """The `jax.stages.Compiled`.

        Raises:
            Exception: the compiler's out-of-memory error, unchanged, when the program does not fit.
        """
        if self.error is not None:
            raise self.error
        return self._compiled


def compile_program(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Target | str | None,
    donate_argnums: int | Sequence[int] | None,
    static_argnums: int | Sequence[int] | None,
) -> CompiledProgram:
    """Compile a function for a target; arguments, errors and warnings are those of `lowtide.memory.compile`."""
    return compile_lowered(lower_program(fn, args, kwargs, target, donate_argnums, static_argnums))


def lower_program(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Target | str | None,
    donate_argnums: int | Sequence[int] | None,
    static_argnums: int | Sequence[int] | None = None,
) -> CompiledProgram:
    """Trace and lower a function for a target as `compile_program` does; `compile_lowered` compiles the result."""
    goal = resolve_target(target)
    is_jitted = hasattr(fn, "lower")
    if is_jitted and donate_argnums is not None:
        hint = "pass the plain function, or leave out donate_argnums to use the jitted function's donation"
        raise ConfigError("donate_argnums was given for a function that is already jitted", hint=hint)
    donate_argnames: Sequence[str] = ()
    if is_jitted and not isinstance(fn, _JIT_TYPE):
        fn, args, kwargs, donate_argnums, donate_argnames, inferred = _unwrap(fn, args, kwargs)
        static_argnums, is_jitted = inferred if static_argnums is None else static_argnums, False
    static = positions("static_argnums", static_argnums, len(args))
    donated = positions("donate_argnums", donate_argnums, len(args))
    # The static arguments become None, a tree without leaves, so that paths keep the caller's numbering.
    dynamic: Any = (tuple(None if index in static else arg for index, arg in enumerate(args)), kwargs)
    if is_jitted:
        jitted: Any = fn
    else:
        inner, dynamic = _close_over_constants(fn, *dynamic, only_modules=True)
        jitted = jax.jit(inner, static_argnums=static, donate_argnums=donated, donate_argnames=donate_argnames or None)
    (placed, keywords), host_paths = place_arguments(dynamic, goal, strict=not is_jitted)
    pairs = enumerate(zip(args, placed, strict=True))
    positional = tuple(arg if index in static else new for index, (arg, new) in pairs)
    traced, lowered = _lower(jitted, positional, keywords, goal)
    num_static = len(args) - len(lowered.args_info[0])
    if num_static != len(static):
        problem = f"the jitted function has {num_static} static positional arguments, but static_argnums is {static}"
        raise ConfigError(problem, hint="repeat the positions of the jitted function's static arguments")
    has_memory_kinds = not (goal.platform == "gpu" and goal.is_ahead_of_time)  # compile-only GPUs have none
    if has_memory_kinds and (descriptions := crossed_donations(lowered)):
        warnings.warn(
            f"{'; '.join(descriptions[:3])}{'; …' if len(descriptions) > 3 else ''}: JAX pairs them only by shape\n"
            "hint: also donate the arguments that results replace (gradients for updates, parameters for new "
            "parameters), in the order of the results; otherwise TPU and CPU may abort",
            PlacementWarning,
            stacklevel=3,
        )
    return CompiledProgram(
        target=goal,
        lowered=lowered,
        jaxpr=plain(traced.jaxpr),
        hlo=None,
        static=static,
        host_paths=host_paths,
        argument_names=tuple(argument_names(traced)),
        options=options_of(lowered, bool(host_paths), goal),
    )


def compile_lowered(program: CompiledProgram) -> CompiledProgram:
    """Compile a program that `lower_program` has lowered."""
    compiled, hlo, error = _compile(program.lowered, program.options)
    return dataclasses.replace(program, hlo=hlo, error=error, _compiled=compiled)


def positions(name: str, argnums: int | Sequence[int] | None, num_args: int) -> tuple[int, ...]:
    """Return argument positions, sorted and not negative; raise `ConfigError` for a position out of range."""
    requested = () if argnums is None else (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for position in requested:
        if not -num_args <= position < num_args:
            problem = f"{name} names argument {position}, but there are {num_args} positional arguments"
            raise ConfigError(problem, hint="count from 0")
    return tuple(sorted({position % num_args for position in requested}))


def _lower(jitted: Any, args: Sequence[Any], kwargs: Mapping[str, Any], goal: Target) -> tuple[Any, Any]:
    try:
        # JAX compiles for its default device if no argument that the program reads has a device. Functions that query
        # the default device during tracing, to choose a kernel, also have to get a device of the target.
        with jax.default_device(goal.devices()[0]):
            traced = jitted.trace(*args, **kwargs)
            if not hasattr(traced, "jaxpr"):
                raise _foreign_jit_error(jitted)
            platform = "cuda" if goal.platform == "gpu" else goal.platform
            lowered = traced.lower(lowering_platforms=(platform,)) if goal.is_ahead_of_time else traced.lower()
        return traced, lowered
    except ValueError as error:
        first_line = str(error).partition("\n")[0]
        if "memory_space of all inputs passed to" in str(error):
            raise PlacementError(
                "the function combines a value in host memory with one in device memory",
                got=f"{first_line}; in host memory: {_host_paths(args, kwargs)}",
                hint="move it with lt.offload.to_device inside the function; wrap an optimizer whose state is on the "
                "host with lt.offload.optimizer",
            ) from error
        if "incompatible devices" not in str(error):
            raise
        problem = f"the function's arrays, shardings or meshes are not all on target {goal.name!r}"
        hint = "shard every argument on one mesh, and build the function's own meshes from target(...).devices()"
        raise StructureError(problem, got=first_line, hint=hint) from error
    except TypeError as error:
        if "abstract array" not in str(error):
            raise
        problem = "an argument has a type that a compiled function does not support"
        hint = "make the argument static, or leave it out of the tree"
        raise StructureError(problem, got=str(error).partition("\n")[0], hint=hint) from error


def crossed_donations(lowered: Any) -> list[str]:
    """List the results that would overwrite a donated argument in another memory (host or device).

    JAX pairs donated arguments with results by shape and dtype only (jax 0.10.2). XLA then keeps a second copy, and
    libtpu and the CPU may abort the process.

    Args:
        lowered: a `jax.stages.Lowered`.

    Returns:
        A description of each such result, with its tree path.
    """
    operations = lowered.compiler_ir("stablehlo").body.operations
    main = next(operation for operation in operations if operation.attributes["sym_name"].value == "main")
    results = main.attributes["res_attrs"] if "res_attrs" in main.attributes else []
    descriptions: list[str] = []
    for argument in main.arg_attrs:
        if "tf.aliasing_output" not in argument:
            continue
        result = results[argument["tf.aliasing_output"].value]
        kinds = [side["mhlo.memory_kind"].value if "mhlo.memory_kind" in side else None for side in (argument, result)]
        if kinds[1] is not None and (kinds[0] or "device") != kinds[1]:
            name = result["jax.result_info"].value if "jax.result_info" in result else "a result"
            descriptions.append(
                f"{name}, in {kinds[1]} memory, overwrites a donated argument in {kinds[0] or 'device'} memory"
            )
    return descriptions


def _host_paths(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    leaves = [*leaves_with_paths(tuple(args)), *leaves_with_paths(dict(kwargs))]
    paths = [path for path, leaf in leaves if on_host(getattr(leaf, "sharding", None))]
    return ", ".join(paths[:6]) + (f", … ({len(paths) - 6} more)" if len(paths) > 6 else "") or "no argument"


def _compile(lowered: Any, options: Mapping[str, Any]) -> tuple[Any, Any, BaseException | None]:
    """Return the executable, the dumped program and the out-of-memory error; each may be None."""
    with tempfile.TemporaryDirectory(prefix="lowtide-", ignore_cleanup_errors=True) as folder:
        options = {**options, "xla_dump_to": folder, "xla_dump_hlo_as_proto": True}
        compiled, error = None, None
        try:
            with without_compilation_cache():
                compiled = lowered.compile(compiler_options=options)
        except Exception as failure:
            if not is_out_of_memory(failure):
                raise
            error = failure
        dumped = read_dump(folder)
        if error is not None and dumped is None:
            raise error
        return compiled, dumped, error


def read_dump(folder: str | Path) -> Any:
    """Return the optimised program in XLA's dump in `folder`; None if it has no program or no buffer assignment."""
    # Read the largest program, because XLA dumps helper programs, too.
    files = sorted(Path(folder).glob("*after_optimizations.hlo.pb"), key=lambda path: -path.stat().st_size)
    hlo = read_hlo(files[0]) if files else None
    return hlo if hlo is not None and hlo.assignment.allocations else None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of JAX says that a program or an array does not fit into memory."""
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text or "CompileTimeHbmOom" in text or "Out of memory" in text


# --- functions in other libraries' jit wrappers ----------------------------------------------------------------------

# `equinox.filter_jit` and `flax.nnx.jit` apply `jax.jit` to a function of flat arrays, whose names users do not know.
# So the function inside of the wrapper is passed to `jax.jit` directly, with the wrapper's donation. Checked with
# Equinox 0.13.8 and Flax 0.12.8.


def _unwrap(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the function in a wrapper, args, kwargs, donate_argnums, donate_argnames and static_argnums for `jax.jit`.

    Raises `StructureError` for a wrapper that is neither `equinox.filter_jit` nor `flax.nnx.jit`.
    """
    library = type(fn).__module__.partition(".")[0]
    if library == "equinox" and hasattr(fn, "donate_first"):
        donated = [index for index in range(len(args)) if (fn.donate_rest if index else fn.donate_first)]
        inner, (positional, named) = _close_over_constants(fn.__wrapped__, args, kwargs, only_modules=False)
        return inner, positional, named, donated, [*named] if fn.donate_rest else [], ()
    if library == "flax" and hasattr(fn, "jitted_fn"):
        inner, states = _split_modules(fn.__wrapped__, args)
        return inner, states, kwargs, *jit_options(fn.jitted_fn)
    raise _foreign_jit_error(fn)


def _foreign_jit_error(fn: Any) -> StructureError:
    return StructureError(
        f"the function is wrapped by {type(fn).__module__.partition('.')[0]}'s own jit, whose arguments Lowtide "
        "cannot name",
        expected="a plain function, or one that jax.jit, equinox.filter_jit or flax.nnx.jit returned",
        got=type(fn).__name__,
        hint="pass the undecorated function (often fn.__wrapped__), with donate_argnums if it donates",
    )


def _close_over_constants(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, only_modules: bool
) -> tuple[Callable[..., Any], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Bind leaves that are not arrays as constants, as `equinox.filter_jit` does; return new function and arguments.

    `jax.jit` refuses an argument that contains a function, such as an activation, and traces Python values such as a
    dropout flag. With `only_modules`, arguments without a function or an Equinox module stay unchanged.
    """

    def is_constant(leaf: Any) -> bool:
        return not (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))

    def is_module(node: Any) -> bool:
        return any(f"{kind.__module__}.".startswith("equinox.") for kind in type(node).__mro__)

    def split(argument: Any) -> tuple[Any, Any]:
        leaves = jax.tree.leaves(argument, is_leaf=is_module)
        if only_modules and not any(is_module(leaf) or (callable(leaf) and is_constant(leaf)) for leaf in leaves):
            return None, argument
        return (
            jax.tree.map(lambda leaf: leaf if is_constant(leaf) else None, argument),
            jax.tree.map(lambda leaf: None if is_constant(leaf) else leaf, argument),
        )

    pairs, named = [split(arg) for arg in args], {key: split(arg) for key, arg in kwargs.items()}
    constants = tuple(constant for constant, _ in pairs), {key: constant for key, (constant, _) in named.items()}
    arrays = tuple(array for _, array in pairs), {key: array for key, (_, array) in named.items()}
    if not jax.tree.leaves(constants):
        return fn, arrays

    def merge(arg: Any, constant: Any) -> Any:
        return combine(arg, constant) if jax.tree.leaves(constant) else arg

    @functools.wraps(fn)
    def bound(*args: Any, **kwargs: Any) -> Any:
        result = fn(
            *map(merge, args, constants[0]), **{key: merge(arg, constants[1][key]) for key, arg in kwargs.items()}
        )
        # The result may contain such leaves, too: a step returns the updated module with its functions.
        return jax.tree.map(lambda leaf: None if is_constant(leaf) else leaf, result)

    return bound, arrays


def _split_modules(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a pure function of NNX states, and the states; the function returns its result and changed variables."""
    nnx: Any = sys.modules["flax.nnx"]

    def has_module(tree: Any) -> bool:
        leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.Pytree | nnx.Variable))
        return any(isinstance(leaf, nnx.Pytree | nnx.Variable) for leaf in leaves)

    def split(trees: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
        with nnx.split_context() as context:
            parts = [context.split(tree) if has_module(tree) else (None, tree) for tree in trees]
        return [definition for definition, _ in parts], tuple(nnx.as_pure(state) for _, state in parts)

    definitions, states = split(args)

    @functools.wraps(fn)
    def bound(*states: Any, **kwargs: Any) -> Tree:
        with nnx.merge_context() as context:
            pairs = zip(definitions, states, strict=True)
            values = [state if definition is None else context.merge(definition, state) for definition, state in pairs]
        before = {id(leaf) for leaf in jax.tree.leaves(states)}
        result = fn(*values, **kwargs)
        modules = [value for value, definition in zip(values, definitions, strict=True) if definition is not None]
        _, (after, returned) = split([modules, result])
        # Unchanged variables are left out: `nnx.jit` returns them, too, but they take no bytes.
        return returned, jax.tree.map(lambda leaf: None if id(leaf) in before else leaf, after)

    return bound, states


# --- arguments on the target -----------------------------------------------------------------------------------------

# Arguments become shapes on the target's devices, which `jit` treats like the real arrays. A leaf on one device goes to
# the target's first device. A leaf on a mesh goes to a mesh of the same axes over the target's devices. If any leaf is
# on a mesh, an uncommitted leaf gets no sharding, because `jit` lets the compiler shard it. A leaf in host memory stays
# there.


def place_arguments(arguments: Any, goal: Target, *, strict: bool) -> tuple[Any, frozenset[str]]:
    """Replace every array of a tree by a `jax.ShapeDtypeStruct` on the target; also return the paths in host memory.

    Tree paths begin with a group (positional or keyword) and an argument. A leaf whose type `jit` refuses raises
    `StructureError` if `strict` is True; if `strict` is False the leaf stays, because it may be static.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(arguments)
    mapper = _MeshMapper(goal)
    named = [(path, leaf) for path, leaf in leaves if isinstance(_sharding(leaf), NamedSharding)]
    meshes = [mapper.mesh(leaf, path) for path, leaf in named if leaf.sharding.mesh.size > 1]
    placed = [_target_struct(path, leaf, mapper, meshes[0] if meshes else None, strict) for path, leaf in leaves]
    host_paths = frozenset(path_str(path[1:]) for path, leaf in leaves if on_host(_sharding(leaf)))
    return treedef.unflatten(placed), host_paths


class _MeshMapper:
    """Meshes over the target's devices, one for each distinct mesh of the arguments."""

    def __init__(self, goal: Target) -> None:
        self.goal, self.devices = goal, goal.devices()
        self._meshes: dict[Any, Mesh] = {}

    def mesh(self, leaf: Any, path: Any) -> Mesh:
        mesh = leaf.sharding.mesh
        if mesh in self._meshes:
            return self._meshes[mesh]
        # A mesh of the target's own devices keeps the user's order of devices.
        if isinstance(mesh, Mesh) and set(mesh.devices.flat) <= set(self.devices):
            return self._meshes.setdefault(mesh, mesh)
        sizes = tuple(mesh.axis_sizes)
        if math.prod(sizes) > len(self.devices):
            axes = dict(zip(mesh.axis_names, sizes, strict=True))
            raise TargetError(
                f"{_describe(path)}: its mesh {axes} needs more than the {len(self.devices)} devices of target "
                f"{self.goal.name!r}",
                hint="choose a larger topology, or a smaller mesh",
            )
        grid = np.array(self.devices[: math.prod(sizes)], dtype=object).reshape(sizes)
        return self._meshes.setdefault(mesh, Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types))


def _describe(path: Any) -> str:
    """Describe a leaf's place in a call: ``argument 0 at params/w``, ``argument 'batch'``."""
    argument, inner = argument_of(path), path_str(path[2:])
    return f"argument {argument!r} at {inner}" if inner else f"argument {argument!r}"


def _target_struct(path: Any, leaf: Any, mapper: _MeshMapper, mesh: Mesh | None, strict: bool) -> Any:
    if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic):
        return leaf
    try:
        aval = jax.typeof(leaf)
        shape, dtype = aval.shape, aval.dtype
    except (TypeError, AttributeError) as error:
        if isinstance(leaf, jax.ShapeDtypeStruct) and not all(isinstance(dim, int) for dim in leaf.shape):
            raise StructureError(
                f"{_describe(path)}: the dimensions of the shape must be whole numbers, not {tuple(leaf.shape)}",
                hint="pass numbers for settings on the command line, such as --set batch=8; other values are text",
            ) from error
        if not strict:
            return leaf
        kind = f"{type(leaf).__name__}{f' of dtype {leaf.dtype}' if isinstance(leaf, np.ndarray) else ''}"
        hint = "name the argument in static_argnums, or leave it out of the tree"
        problem = f"{_describe(path)}: a compiled function does not support its type, {kind}"
        raise StructureError(problem, hint=hint) from error
    sharding = _target_sharding(path, leaf, mapper, mesh)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False))


def _target_sharding(path: Any, leaf: Any, mapper: _MeshMapper, mesh: Mesh | None) -> Any:
    sharding = _sharding(leaf)
    kind = sharding.memory_kind if on_host(sharding) else None
    if isinstance(sharding, NamedSharding):
        return NamedSharding(mapper.mesh(leaf, path), sharding.spec, memory_kind=kind)
    if sharding is not None and len(sharding.device_set) > 1:
        problem = f"{_describe(path)}: a {type(sharding).__name__} cannot be moved to another target"
        raise StructureError(problem, hint="shard it with jax.sharding.NamedSharding(mesh, PartitionSpec(...))")
    if kind is not None:
        # The type of a traced shape carries a sharding's memory space only when there is a mesh (jax 0.10.2).
        target_mesh = Mesh(np.array(mapper.devices[:1], dtype=object), ("device",)) if mesh is None else mesh
        return NamedSharding(target_mesh, PartitionSpec(), memory_kind=kind)
    if mesh is None or (sharding is not None and getattr(leaf, "committed", True)):
        return SingleDeviceSharding(mapper.devices[0])
    return None


def _sharding(leaf: Any) -> Any:
    return getattr(leaf, "sharding", None) if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) else None
