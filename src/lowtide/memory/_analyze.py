"""Compile a function for a target and say where its bytes go, without running it.

Known inefficiency: a compile is the price of every report, the same as the first call of the function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from lowtide.core import ConfigError, StructureError, TargetError

from ._executable import ArgumentLeaf, aliased, argument_leaves, host_output_bytes
from ._placement import place
from ._report import MemoryReport, SpaceBytes
from ._targets import Target, resolve_target

Role = int | str | Sequence[int | str]
"""Which arguments a role covers: a position, a keyword, or several."""

_RESERVED = ("other", "unattributed", "outputs", "temporaries", "code")


def analyze(
    fn: Callable[..., Any],
    *args: Any,
    target: Target | str | None = None,
    roles: Mapping[str, Role] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> MemoryReport:
    """Compile a function for a target and report its bytes.

    Args:
        fn: a function, or one that `jax.jit` returned (its donation and static arguments hold).
        *args: its arguments: arrays, `jax.ShapeDtypeStruct`s, or trees of them; nothing is read from them but shape,
            dtype, sharding and memory kind. Arrays on a mesh are moved to a mesh of the same axes over the target's
            devices.
        target: a `Target`, a name for `lowtide.memory.target`, or None for the hardware at hand.
        roles: what to call which arguments: a name for a position, a keyword, or several of these.
        donate_argnums: as in `jax.jit`; not for a function that is jitted already.
        static_argnums: as in `jax.jit`. For a jitted function with static positional arguments, repeat its own.
        **kwargs: keyword arguments of `fn` (except those named like this function's own).

    Returns:
        The report, for one device of the target.

    Raises:
        TargetError: when the target is unknown, or too small for an argument's mesh.
        StructureError: for an argument that a compiled function does not take, with its path.
        ConfigError: for roles, `donate_argnums` or `static_argnums` that do not fit the arguments.
        Exception: what the compiler raises, such as a TPU's out-of-memory error, unchanged.

    Memory:
        Nothing is allocated on the target. Figures include the padding of the target's layouts. An argument that
        the function does not read costs no bytes here, as in a jitted call. Constants that the function closes over
        count as code or temporaries, not as arguments.

    Examples:
        >>> import jax.numpy as jnp
        >>> shape = jax.ShapeDtypeStruct((1024,), jnp.float32)
        >>> report = analyze(lambda state, g: state - g, shape, shape, donate_argnums=0, roles={"state": 0, "grads": 1})
        >>> report.device.alias_bytes, report.by_role["state"], report.by_role["outputs"]
        (4096, 4096, 0)
    """
    goal = resolve_target(target)
    is_jitted = hasattr(fn, "trace") and hasattr(fn, "lower")
    if is_jitted and donate_argnums is not None:
        raise ConfigError(
            "donate_argnums was given for a function that is jitted already",
            hint="pass the plain function, or leave donate_argnums out: the jitted function's own donation holds",
        )
    static = _positions("static_argnums", static_argnums, len(args))
    donated = _positions("donate_argnums", donate_argnums, len(args))
    jitted: Any = fn if is_jitted else jax.jit(fn, static_argnums=static, donate_argnums=donated)
    # The static arguments become None, a tree without leaves, so that paths keep the caller's numbering.
    movable = (tuple(None if at in static else arg for at, arg in enumerate(args)), kwargs)
    placed, keywords = place(movable, goal, strict=not is_jitted)
    positional = tuple(arg if at in static else new for at, (arg, new) in enumerate(zip(args, placed, strict=True)))
    compiled = _compile(jitted, positional, keywords, goal)
    num_static = len(args) - len(compiled.args_info[0])
    if num_static != len(static):
        raise ConfigError(
            "the jitted function has static arguments that static_argnums does not name",
            expected=f"{num_static} positions in static_argnums",
            got=static,
            hint="repeat the static positional arguments of the jitted function in static_argnums",
        )
    return analyze_compiled(compiled, target=goal, roles=roles, static_argnums=static)


def analyze_compiled(
    compiled: Any,
    *,
    target: Target | str | None = None,
    roles: Mapping[str, Role] | None = None,
    static_argnums: int | Sequence[int] | None = None,
) -> MemoryReport:
    """Report the bytes of a program that is compiled already.

    Args:
        compiled: a `jax.stages.Compiled`.
        target: what it was compiled for; None for the hardware at hand.
        roles: as in `analyze`.
        static_argnums: the static arguments it was compiled with, so that `roles` can count positions as the caller
            does.

    Returns:
        The report, for one device.

    Raises:
        ConfigError: for roles that do not fit the arguments.
        TargetError: when the program was compiled for another platform, or its compiler reports no memory.

    Memory:
        Reads what the compiler reported; compiles and allocates nothing.
    """
    goal = resolve_target(target)
    _check_platform(compiled, goal)
    stats = compiled.memory_analysis()
    if stats is None:
        raise TargetError(
            f"the compiler for {goal.name!r} reports no memory", hint='analyze for another target, such as "v5e:2x2"'
        )
    leaves = argument_leaves(compiled)
    num_static = len(static_argnums) if isinstance(static_argnums, Sequence) else int(static_argnums is not None)
    num_args = len(compiled.args_info[0]) + num_static
    static = _positions("static_argnums", static_argnums, num_args)
    owners = _owners(roles or {}, num_args, list(compiled.args_info[1]), static)
    device, host, notes = _spaces(compiled, stats, leaves)
    names = [*(roles or {}), "other"]
    return MemoryReport(
        target=goal,
        device=device,
        host=host,
        by_role=_by_role(device, names, owners, [leaf for leaf in leaves if not leaf.on_host]),
        host_by_role=_by_role(host, names, owners, [leaf for leaf in leaves if leaf.on_host]),
        notes=notes,
    )


def _compile(jitted: Any, args: Sequence[Any], kwargs: Mapping[str, Any], goal: Target) -> Any:
    try:
        # Without a placed argument that the program reads, JAX would compile for its own default device instead; and
        # a function that asks while it is traced (for a kernel of one platform) has to hear of the target.
        with jax.default_device(goal.devices()[0]):
            traced = jitted.trace(*args, **kwargs)
            lowered = traced.lower(lowering_platforms=(goal.platform,)) if goal.is_ahead_of_time else traced.lower()
        return lowered.compile()
    except ValueError as error:
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
            "an argument is not something a compiled function takes",
            expected="arrays, jax.ShapeDtypeStructs or numbers",
            got=str(error).splitlines()[0],
            hint="make the argument static, or leave it out of the tree",
        ) from error


def _check_platform(compiled: Any, goal: Target) -> None:
    shardings = [s for s in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)) if s is not None]
    platforms = {device.platform for sharding in shardings for device in sharding.device_set}
    if platforms and platforms != {goal.platform}:
        raise TargetError(
            f"the program was not compiled for target {goal.name!r}",
            expected=goal.platform,
            got=", ".join(sorted(platforms)),
            hint="name the target it was compiled for",
        )


def _positions(name: str, argnums: int | Sequence[int] | None, num_args: int) -> tuple[int, ...]:
    given = () if argnums is None else (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for position in given:
        if not -num_args <= position < num_args:
            raise ConfigError(
                f"{name} names argument {position}",
                expected=f"positions of the {num_args} positional arguments",
                got=position,
                hint="count from 0",
            )
    return tuple(sorted({position % num_args for position in given}))


def _owners(
    roles: Mapping[str, Role], num_args: int, keywords: Sequence[str], static: Sequence[int]
) -> dict[int | str, str]:
    """The role of every argument that has one, by its position among those that are not static, or by keyword."""
    dynamic = {position: at for at, position in enumerate(p for p in range(num_args) if p not in static)}
    keys: dict[int | str, int | str] = {**dynamic, **{p - num_args: at for p, at in dynamic.items()}}
    keys.update({keyword: keyword for keyword in keywords})
    owners: dict[int | str, str] = {}
    for role, arguments in roles.items():
        if role in _RESERVED:
            raise ConfigError(f"the role name {role!r} is reserved", got=role, hint=f"reserved: {', '.join(_RESERVED)}")
        for argument in (arguments,) if isinstance(arguments, (int, str)) else arguments:
            if argument not in keys:
                raise ConfigError(
                    f"role {role!r} names argument {argument!r}, which is static or does not exist",
                    expected=f"one of the positions {sorted(dynamic)} or keywords {sorted(keywords)}",
                    got=repr(argument),
                    hint="count positions from 0, as the function is called",
                )
            if keys[argument] in owners:
                raise ConfigError(
                    f"argument {argument!r} has two roles, {owners[keys[argument]]!r} and {role!r}",
                    hint="give every argument one role",
                )
            owners[keys[argument]] = role
    return owners


def _spaces(
    compiled: Any, stats: Any, leaves: Sequence[ArgumentLeaf]
) -> tuple[SpaceBytes, SpaceBytes, tuple[str, ...]]:
    device = SpaceBytes(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        code_bytes=stats.generated_code_size_in_bytes,
    )
    host = SpaceBytes(
        argument_bytes=stats.host_argument_size_in_bytes,
        output_bytes=stats.host_output_size_in_bytes,
        alias_bytes=stats.host_alias_size_in_bytes,
        temp_bytes=stats.host_temp_size_in_bytes,
        code_bytes=stats.host_generated_code_size_in_bytes,
    )
    declared = SpaceBytes(
        argument_bytes=sum(leaf.num_bytes for leaf in leaves if leaf.on_host),
        output_bytes=host_output_bytes(compiled),
    )
    if host.total_bytes or not declared.total_bytes:
        return device, host, ()
    # The CPU compiler has one space and counts everything as device bytes.
    hits = aliased(compiled, leaves)
    alias = sum(leaf.num_bytes for leaf, hit in zip(leaves, hits, strict=True) if hit and leaf.on_host)
    moved = SpaceBytes(argument_bytes=declared.argument_bytes, output_bytes=declared.output_bytes, alias_bytes=alias)
    rest = SpaceBytes(
        argument_bytes=device.argument_bytes - moved.argument_bytes,
        output_bytes=device.output_bytes - moved.output_bytes,
        alias_bytes=device.alias_bytes - moved.alias_bytes,
        temp_bytes=device.temp_bytes,
        code_bytes=device.code_bytes,
    )
    note = "this compiler has one memory space: arguments and outputs declared in host memory were moved to the host"
    return rest, moved, (note,)


def _by_role(
    space: SpaceBytes, names: Sequence[str], owners: Mapping[int | str, str], leaves: Sequence[ArgumentLeaf]
) -> dict[str, int]:
    roles = dict.fromkeys(names, 0)
    for leaf in leaves:
        roles[owners.get(leaf.argument, "other")] += leaf.num_bytes
    return {
        **roles,
        "unattributed": space.argument_bytes - sum(roles.values()),
        "outputs": space.output_bytes - space.alias_bytes,
        "temporaries": space.temp_bytes,
        "code": space.code_bytes,
    }
