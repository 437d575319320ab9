"""Compile a function for a target, and keep the compiler's information about its memory.

XLA writes its buffer assignment only into dumps. So every compile here dumps the program into a temporary folder, even
when a TPU's compiler gives up because the program does not fit.

Known inefficiency: every report costs a compile, as much as the first call of the function. JAX's persistent cache is
bypassed, because a cached program dumps nothing.
"""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from ..core import ConfigError, PlacementError, PlacementWarning, StructureError, leaves_with_paths, on_host
from ..core._compat import argument_names, without_compilation_cache
from ..jaxprs import plain
from ..targets import Target, resolve_target
from ._foreign import close_over_constants, foreign_jit_error, unwrap
from ._placement import place_arguments
from ._proto import read_hlo

_JIT_TYPE = type(jax.jit(lambda: None))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """A function compiled for a target; made by `compile_program`."""

    target: Target
    """Target of the compile."""
    lowered: Any
    """The `jax.stages.Lowered` that was compiled."""
    jaxpr: Any
    """The function as JAX traced it: a `jax.core.ClosedJaxpr`."""
    hlo: Any
    """XLA's description of the optimised program, its buffers and their lifetimes: a protobuf message."""
    static: tuple[int, ...] = ()
    """Positions of the static arguments."""
    host_paths: frozenset[str] = frozenset()
    """Arguments that the caller declared in host memory."""
    argument_names: tuple[str, ...] = ()
    """JAX's names of the argument leaves, in flattening order."""
    error: BaseException | None = None
    """Exception that the compiler raised if the program did not fit. There is no executable then."""
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
    *,
    target: Target | str | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] | None = None,
) -> CompiledProgram:
    """Compile a function; arguments, errors and warnings are those of `lowtide.memory.compile`."""
    goal = resolve_target(target)
    is_jitted = hasattr(fn, "lower")
    if is_jitted and donate_argnums is not None:
        raise ConfigError(
            "donate_argnums was given for a function that is already jitted",
            hint="pass the plain function, or leave out donate_argnums to use the jitted function's donation",
        )
    donate_argnames: Sequence[str] = ()
    if is_jitted and not isinstance(fn, _JIT_TYPE):
        fn, args, kwargs, donate_argnums, donate_argnames, inferred = unwrap(fn, args, kwargs)
        static_argnums, is_jitted = inferred if static_argnums is None else static_argnums, False
    static = positions("static_argnums", static_argnums, len(args))
    donated = positions("donate_argnums", donate_argnums, len(args))
    # The static arguments become None, a tree without leaves, so that paths keep the caller's numbering.
    dynamic: Any = (tuple(None if index in static else arg for index, arg in enumerate(args)), kwargs)
    if is_jitted:
        jitted: Any = fn
    else:
        inner, dynamic = close_over_constants(fn, *dynamic, only_modules=True)
        jitted = jax.jit(inner, static_argnums=static, donate_argnums=donated, donate_argnames=donate_argnames or None)
    (placed, keywords), host_paths = place_arguments(dynamic, goal, strict=not is_jitted)
    positional = tuple(
        arg if index in static else new for index, (arg, new) in enumerate(zip(args, placed, strict=True))
    )
    traced, lowered = _lower(jitted, positional, keywords, goal)
    num_static = len(args) - len(lowered.args_info[0])
    if num_static != len(static):
        raise ConfigError(
            "the jitted function has static arguments that static_argnums does not name",
            expected=f"{num_static} positions in static_argnums",
            got=static,
            hint="repeat the static positional arguments of the jitted function in static_argnums",
        )
    if not (goal.platform == "gpu" and goal.is_ahead_of_time):  # compile-only GPUs have no memory kinds
        _warn_of_crossed_donations(lowered)
    compiled, hlo, error = _compile(lowered)
    return CompiledProgram(
        target=goal,
        lowered=lowered,
        jaxpr=plain(traced.jaxpr),
        hlo=hlo,
        static=static,
        host_paths=host_paths,
        argument_names=tuple(argument_names(traced)),
        error=error,
        _compiled=compiled,
    )


def positions(name: str, argnums: int | Sequence[int] | None, num_args: int) -> tuple[int, ...]:
    """Return argument positions as non-negative numbers, sorted.

    Raises:
        ConfigError: for a position that no argument has.
    """
    requested = () if argnums is None else (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for position in requested:
        if not -num_args <= position < num_args:
            raise ConfigError(
                f"{name} names argument {position}, which does not exist",
                expected=f"positions of the {num_args} positional arguments",
                got=position,
                hint="count from 0",
            )
    return tuple(sorted({position % num_args for position in requested}))


def _lower(jitted: Any, args: Sequence[Any], kwargs: Mapping[str, Any], goal: Target) -> tuple[Any, Any]:
    try:
        # Without a placed argument that the program reads, JAX would compile for its own default device. A function
        # that queries its device while it is traced (for a kernel of one platform) also has to get the target's.
        with jax.default_device(goal.devices()[0]):
            traced = jitted.trace(*args, **kwargs)
            if not hasattr(traced, "jaxpr"):
                raise foreign_jit_error(jitted)
            platform = "cuda" if goal.platform == "gpu" else goal.platform
            lowered = traced.lower(lowering_platforms=(platform,)) if goal.is_ahead_of_time else traced.lower()
        return traced, lowered
    except ValueError as error:
        if "memory_space of all inputs passed to" in str(error):
            raise PlacementError(
                "the function combines a value in host memory with one in device memory",
                expected="operands in device memory",
                got=f"{str(error).splitlines()[0]}; in host memory: {_host_paths(args, kwargs)}",
                hint="move it with lt.offload.to_device inside the function; wrap an optimizer whose state is on the "
                "host with lt.offload.optimizer",
            ) from error
        if "incompatible devices" not in str(error):
            raise
        raise StructureError(
            f"the function's arrays, shardings or meshes are not all on target {goal.name!r}",
            got=str(error).splitlines()[0],
            hint="shard every argument on one mesh, and build the function's own meshes from target(...).devices()",
        ) from error
    except TypeError as error:
        if "abstract array" not in str(error):
            raise
        raise StructureError(
            "an argument has a type that a compiled function does not support",
            expected="arrays, jax.ShapeDtypeStructs or numbers",
            got=str(error).splitlines()[0],
            hint="make the argument static, or leave it out of the tree",
        ) from error


def crossed_donations(lowered: Any) -> list[str]:
    """List the results that would overwrite a donated argument in another memory.

    JAX pairs donated arguments with results by shape and dtype only (jax 0.10.2). XLA then keeps a second copy, and
    libtpu and the CPU may abort the process.

    Args:
        lowered: a `jax.stages.Lowered`.

    Returns:
        A description of each such result, with its name in the function's value.
    """
    main = next(
        op for op in lowered.compiler_ir("stablehlo").body.operations if op.attributes["sym_name"].value == "main"
    )
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


def _warn_of_crossed_donations(lowered: Any) -> None:
    descriptions = crossed_donations(lowered)
    if descriptions:
        warnings.warn(
            f"{'; '.join(descriptions[:3])}{'; …' if len(descriptions) > 3 else ''}: JAX pairs them only by shape\n"
            "hint: also donate the arguments that results replace (gradients for updates, parameters for new "
            "parameters), in the order of the results; otherwise TPU and CPU may abort",
            PlacementWarning,
            stacklevel=4,
        )


def _host_paths(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """List the paths of the arguments in host memory."""
    leaves = [*leaves_with_paths(tuple(args)), *leaves_with_paths(dict(kwargs))]
    paths = [path for path, leaf in leaves if on_host(getattr(leaf, "sharding", None))]
    return ", ".join(paths[:6]) + (f", … ({len(paths) - 6} more)" if len(paths) > 6 else "") or "no argument"


def _compile(lowered: Any) -> tuple[Any, Any, BaseException | None]:
    """Return the executable or None if it does not fit, the dumped program or None, and the error."""
    with tempfile.TemporaryDirectory(prefix="lowtide-", ignore_cleanup_errors=True) as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_proto": True}
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
    """Read the optimised program of a dump, or return None without one or without its buffer assignment.

    Args:
        folder: the folder of XLA's dump. The largest of several programs is read, because XLA dumps helper programs,
            too.
    """
    files = sorted(Path(folder).glob("*after_optimizations.hlo.pb"), key=lambda path: -path.stat().st_size)
    hlo = read_hlo(files[0]) if files else None
    return hlo if hlo is not None and hlo.assignment.allocations else None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of JAX says that a program or an array does not fit."""
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text or "CompileTimeHbmOom" in text or "Out of memory" in text
