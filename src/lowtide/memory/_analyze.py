"""Report the bytes of a compiled program without running it.

`_owners` assigns an owner to each buffer. This module compiles, adds XLA's totals, moves arguments and outputs that are
declared in host memory, and builds the `MemoryReport`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ..core import ConfigError, TargetError, format_bytes, leaves_with_paths
from ..core._compat import has_cudnn
from ..hlo import (
    DEVICE_COLOR,
    HOST_COLOR,
    ArgumentLeaf,
    CompiledProgram,
    aliased,
    aliased_in,
    argument_leaves,
    compile_program,
    host_outputs,
    lowered_leaves,
    named_leaves,
    output_paths,
    positions,
)
from ..report import DERIVED_ROLES, Buffer, MemoryReport, Space, SpaceBytes
from ..targets import Target, resolve_target
from ._host_copies import with_host_copies
from ._isolate import run_isolated
from ._owners import Owners, find_owners

Role = int | str | Sequence[int | str]
"""Arguments of a role: a position, a keyword, or several of these."""

_NOTABLE_BYTES = 2**20
"""Constants outside the figures get a note from this size on."""
_RESERVED = ("other", *DERIVED_ROLES)


def analyze(
    fn: Callable[..., Any],
    *args: Any,
    target: Target | str | None = None,
    roles: Mapping[str, Role] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    isolate: bool = False,
    **kwargs: Any,
) -> MemoryReport:
    """Compile a function for a target and report its bytes.

    Args:
        fn: a function, or the result of `jax.jit` (its donation and static arguments apply).
        *args: its arguments: arrays, `jax.ShapeDtypeStruct`s, or trees of them. Only shape, dtype, sharding and memory
            kind are read. Arrays on a mesh are moved to a mesh of the same axes over the target's devices.
        target: a `Target`, a name for `lowtide.memory.target`, or None for the hardware at hand.
        roles: role names, each with the position or keyword of an argument, or several of these.
        donate_argnums: as in `jax.jit`; not for a function that is already jitted.
        static_argnums: as in `jax.jit`. For a jitted function with static positional arguments, repeat its value.
        isolate: compile in a separate process, since a process that compiled for a TPU keeps much memory. The function
            and its arguments are sent with cloudpickle, arrays as shapes.
        **kwargs: keyword arguments of `fn`, except those with the name of a parameter above.

    Returns:
        The report, for one device of the target.

    Raises:
        TargetError: when the target is unknown, or too small for an argument's mesh.
        StructureError: for an argument that a compiled function does not take, with its path.
        ConfigError: for roles, `donate_argnums` or `static_argnums` that do not fit the arguments.
        Exception: any other exception of the compiler, unchanged. A program that does not fit a TPU gets a report.

    Memory:
        Nothing is allocated on the target. Figures include the padding of the target's layouts. An argument that the
        function does not read takes no bytes, as in a jitted call. Constants that the function closes over count as
        code or temporaries, not as arguments.

    Examples:
        >>> import jax.numpy as jnp
        >>> shape = jax.ShapeDtypeStruct((1024,), jnp.float32)
        >>> report = analyze(lambda state, g: state - g, shape, shape, donate_argnums=0, roles={"state": 0, "grads": 1})
        >>> report.device.alias_bytes, report.by_role["state"], report.by_role["outputs"]
        (4096, 4096, 0)
    """
    if isolate:
        options = {"donate_argnums": donate_argnums, "static_argnums": static_argnums, "roles": roles, "kwargs": kwargs}
        return run_isolated(analyze, fn, args, options, resolve_target(target))
    # Check the roles before the compiler, which may take minutes.
    _roles_by_argument(roles or {}, len(args), list(kwargs), positions("static_argnums", static_argnums, len(args)))
    program = compile_program(
        fn, args, kwargs, target=target, donate_argnums=donate_argnums, static_argnums=static_argnums
    )
    return examine(program, roles)[0]


def analyze_compiled(
    compiled: Any,
    *,
    target: Target | str | None = None,
    roles: Mapping[str, Role] | None = None,
    static_argnums: int | Sequence[int] | None = None,
) -> MemoryReport:
    """Report the bytes of a compiled program.

    Args:
        compiled: a `jax.stages.Compiled`.
        target: the target that it was compiled for; None for the hardware at hand.
        roles: as in `analyze`.
        static_argnums: the static arguments that it was compiled with. With them, positions in `roles` are those of
            the uncompiled function.

    Returns:
        The report, for one device.

    Raises:
        ConfigError: for roles that do not fit the arguments.
        TargetError: when the program was compiled for another platform, or its compiler reports no memory.

    Memory:
        Reads the compiler's report; compiles and allocates nothing.
    """
    resolved_target = resolve_target(target)
    _check_platform(compiled, resolved_target)
    if compiled.memory_analysis() is None:
        raise TargetError(
            f"the compiler for {resolved_target.name!r} reports no memory",
            hint='analyze for another target, such as "v5e:2x2"',
        )
    num_static = len(static_argnums) if isinstance(static_argnums, Sequence) else int(static_argnums is not None)
    static = positions("static_argnums", static_argnums, len(compiled.args_info[0]) + num_static)
    leaves = argument_leaves(compiled)
    paths = frozenset(leaf.path for leaf in leaves if leaf.on_host)
    return _examine(resolved_target, compiled, _Figures.of_compiled(compiled, leaves), None, roles, static, paths, ())[
        0
    ]


def examine(program: CompiledProgram, roles: Mapping[str, Role] | None = None) -> tuple[MemoryReport, Owners | None]:
    """Build the report of a program, and return it with the owners of its buffers.

    The owners are None without a dump from the compiler. A program that did not fit has allocations but no executable.
    Raises `ConfigError` for roles that do not fit the arguments.
    """
    if program.error is not None:
        stages = program.lowered
        figures = _Figures.of_allocations(program.hlo, lowered_leaves(stages, program.hlo, program.argument_names))
    else:
        stages = program.compiled
        leaves = argument_leaves(stages)
        if program.hlo is not None and leaves and not any(leaf.kept for leaf in leaves):
            leaves = lowered_leaves(program.lowered, program.hlo, program.argument_names, stages)
        figures = _Figures.of_compiled(stages, leaves, program.hlo)
    return _examine(
        program.target, stages, figures, program.hlo, roles, program.static, program.host_paths, program.argument_names
    )


def examine_dump(hlo: Any, target: Target, stats: Any, roles: Mapping[str, str]) -> tuple[MemoryReport, Owners]:
    """Report on a program of which only the dump exists, as after an out-of-memory error.

    `stats` are the compiler's figures; None when it refused the program. An argument has the name that JAX recorded for
    its parameter. Its role is ``roles[name]``, or the name itself without an entry.
    """
    leaves = named_leaves(hlo)
    figures = _Figures.of_allocations(hlo, leaves) if stats is None else _Figures.of_stats(stats, leaves, {}, [])
    leaf_roles = [roles.get(str(leaf.argument), str(leaf.argument)) for leaf in leaves]
    owners = find_owners(hlo, leaves, leaf_roles, output_paths(hlo), figures.totals)
    return _report(target, figures, owners, leaf_roles, list(dict.fromkeys(leaf_roles)), _HostPlacement({}, {})), owners


@dataclasses.dataclass(frozen=True)
class _Figures:
    """The compiler's figures for a program as a whole."""

    leaves: list[ArgumentLeaf]
    device: SpaceBytes
    host: SpaceBytes
    host_outputs: Mapping[str, int]
    """Bytes of results that are declared in host memory, by path."""
    is_aliased: list[bool]
    """For every leaf, whether an output is written into its buffer."""
    has_totals: bool = True
    """Whether XLA reported totals in addition to the allocations."""

    @classmethod
    def of_compiled(cls, compiled: Any, leaves: list[ArgumentLeaf], hlo: Any = None) -> _Figures:
        is_aliased = aliased(compiled, leaves) if hlo is None else aliased_in(hlo, leaves)
        return cls.of_stats(compiled.memory_analysis(), leaves, host_outputs(compiled), is_aliased)

    @classmethod
    def of_stats(
        cls, stats: Any, leaves: list[ArgumentLeaf], host_outputs: Mapping[str, int], is_aliased: list[bool]
    ) -> _Figures:
        device, host = (
            SpaceBytes(
                argument_bytes=getattr(stats, f"{prefix}argument_size_in_bytes"),
                output_bytes=getattr(stats, f"{prefix}output_size_in_bytes"),
                alias_bytes=getattr(stats, f"{prefix}alias_size_in_bytes"),
                temp_bytes=getattr(stats, f"{prefix}temp_size_in_bytes"),
                code_bytes=getattr(stats, f"{prefix}generated_code_size_in_bytes"),
            )
            for prefix in ("", "host_")
        )
        return cls(leaves, device, host, host_outputs, is_aliased)

    @property
    def totals(self) -> dict[Space, SpaceBytes] | None:
        """XLA's totals by memory space; None if it reported none."""
        return {"device": self.device, "host": self.host} if self.has_totals else None

    @classmethod
    def of_allocations(cls, hlo: Any, leaves: list[ArgumentLeaf]) -> _Figures:
        """Compute the figures from the allocations of a program that did not fit."""
        spaces: list[SpaceBytes] = []
        for color in (DEVICE_COLOR, HOST_COLOR):
            # As in XLA's own figures, outputs include those in donated arguments, and `alias_bytes` subtracts them.
            allocations = [a for a in hlo.assignment.allocations if a.color == color and not a.is_thread_local]
            arguments = sum(a.size for a in allocations if a.is_entry_parameter)
            alias = sum(a.size for a in allocations if a.is_entry_parameter and a.is_parameter_aliased_with_output)
            outputs = sum(
                a.size for a in allocations if a.maybe_live_out and not (a.is_entry_parameter or a.is_constant)
            )
            temporaries = sum(a.size for a in allocations) - arguments - outputs
            spaces.append(
                SpaceBytes(
                    argument_bytes=arguments, output_bytes=outputs + alias, alias_bytes=alias, temp_bytes=temporaries
                )
            )
        device, host = spaces
        return cls(leaves, device, host, {}, [False] * len(leaves), has_totals=False)


def _examine(
    target: Target,
    stages: Any,
    figures: _Figures,
    hlo: Any,
    roles: Mapping[str, Role] | None,
    static: Sequence[int],
    host_paths: frozenset[str],
    leaf_names: Sequence[str],
) -> tuple[MemoryReport, Owners | None]:
    num_args = len(stages.args_info[0]) + len(static)
    roles_by_argument = _roles_by_argument(roles or {}, num_args, list(stages.args_info[1]), static)
    leaf_roles = [roles_by_argument.get(leaf.argument, "other") for leaf in figures.leaves]
    dynamic = [position for position in range(num_args) if position not in static]
    figures = dataclasses.replace(figures, leaves=[_with_call_position(leaf, dynamic) for leaf in figures.leaves])
    placement = _host_placement(target, figures, host_paths)
    figures = dataclasses.replace(figures, leaves=_with_names(figures.leaves, leaf_names))
    owners = None
    notes = (_HOST_NOTES[target.platform],) if placement.leaves or placement.outputs else ()
    if target.platform == "gpu" and target.is_ahead_of_time and not has_cudnn():
        notes = (*notes, "compiled without cuDNN, which is not installed: a GPU with it may use other kernels")
    if hlo is not None:
        # Not `out_info`, which JAX cannot compute for programs with ordered effects.
        numbers = jax.tree.unflatten(stages.out_tree, range(stages.out_tree.num_leaves))
        outputs = [path for path, _ in leaves_with_paths(numbers)]
        owners = find_owners(hlo, figures.leaves, leaf_roles, outputs, figures.totals)
        notes = (*notes, *_uncounted_notes(owners, target))
    else:
        notes = (*notes, "temporaries have no owners: the program was compiled without lowtide.memory.compile")
    return _report(target, figures, owners, leaf_roles, [*(roles or {}), "other"], placement, notes), owners


def _report(
    target: Target,
    figures: _Figures,
    owners: Owners | None,
    leaf_roles: Sequence[str],
    names: Sequence[str],
    placement: _HostPlacement,
    notes: tuple[str, ...] = (),
) -> MemoryReport:
    """Build the report of a program; `names` are the roles to list, even with zero bytes."""
    device, host = _space_bytes(figures, placement)
    buffers = owners.buffers if owners else _coarse_buffers(figures, leaf_roles)
    buffers = tuple(placement.apply(buffer, figures.leaves) for buffer in buffers)
    peak_moment = owners.peak_moment if owners else 0
    if owners and target.platform == "gpu" and placement.leaves:
        device, buffers, peak_moment = with_host_copies(owners, device, buffers, placement.leaves)
    host_flags = [leaf.on_host or index in placement.leaves for index, leaf in enumerate(figures.leaves)]
    rows = list(zip(figures.leaves, leaf_roles, host_flags, strict=True))
    return MemoryReport(
        target=target,
        device=device,
        host=host,
        by_role=_by_role(device, names, [(leaf, role) for leaf, role, is_on_host in rows if not is_on_host]),
        host_by_role=_by_role(host, names, [(leaf, role) for leaf, role, is_on_host in rows if is_on_host]),
        buffers=buffers,
        moments=owners.moments if owners else ("",),
        peak_moment=peak_moment,
        host_peak_moment=owners.host_peak_moment if owners else 0,
        notes=notes,
    )


def _uncounted_notes(owners: Owners, target: Target) -> tuple[str, ...]:
    """Return a note on constants in no buffer: the TPU compiler counts them as code, others do not count them."""
    total = sum(buffer.num_bytes for buffer in owners.uncounted)
    if total < _NOTABLE_BYTES:
        return ()
    largest = max(owners.uncounted, key=lambda buffer: buffer.num_bytes)
    array = f"{largest.dtype}[{','.join(map(str, largest.shape))}]"
    location = f" used at {largest.source}" if largest.source else ""
    accounting = "are counted as code" if target.platform == "tpu" else "are in none of this compiler's figures"
    return (
        f"{format_bytes(total)} of constants that the function closes over are part of the program and {accounting} "
        f"(the largest: {array}{location}); as arguments they would have an owner",
    )


def _check_platform(compiled: Any, target: Target) -> None:
    shardings = [s for s in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)) if s is not None]
    platforms = {device.platform for sharding in shardings for device in sharding.device_set}
    if platforms and platforms != {target.platform}:
        raise TargetError(
            f"the program was not compiled for target {target.name!r}",
            expected=target.platform,
            got=", ".join(sorted(platforms)),
            hint="name the target it was compiled for",
        )


def _roles_by_argument(
    roles: Mapping[str, Role], num_args: int, keywords: Sequence[str], static: Sequence[int]
) -> dict[int | str, str]:
    """Return roles by argument: the position among the arguments that are not static, or the keyword."""
    dynamic = {position: index for index, position in enumerate(p for p in range(num_args) if p not in static)}
    keys: dict[int | str, int | str] = {**dynamic, **{p - num_args: index for p, index in dynamic.items()}}
    keys.update({keyword: keyword for keyword in keywords})
    owners: dict[int | str, str] = {}
    untyped_roles: Any = roles
    if not isinstance(untyped_roles, Mapping):
        raise ConfigError(
            "roles is no mapping",
            expected='names of roles with arguments, such as {"params": 0, "batch": 1}',
            got=repr(roles)[:80],
            hint="name the position or the keyword of each argument",
        )
    for role, arguments in roles.items():
        if role in _RESERVED:
            raise ConfigError(f"the role name {role!r} is reserved", got=role, hint=f"reserved: {', '.join(_RESERVED)}")
        for argument in (arguments,) if isinstance(arguments, (int, str)) else arguments:
            if argument not in keys:
                raise ConfigError(
                    f"role {role!r} names argument {argument!r}, which is static or does not exist",
                    expected=f"one of the positions {sorted(dynamic)}"
                    + (f" or keywords {sorted(keywords)}" if keywords else ""),
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


def _with_call_position(leaf: ArgumentLeaf, dynamic: Sequence[int]) -> ArgumentLeaf:
    """Return the leaf with the argument position of the call, in which static arguments count."""
    if not isinstance(leaf.argument, int):
        return leaf
    position = dynamic[leaf.argument]
    return dataclasses.replace(leaf, argument=position, path=_with_head(leaf.path, str(position)))


def _with_names(leaves: list[ArgumentLeaf], leaf_names: Sequence[str]) -> list[ArgumentLeaf]:
    """Begin paths with the parameter names of the signature, if every argument has a different name.

    `leaf_names` has JAX's name of every leaf, such as ``params['w']``. Arguments of a ``*args`` parameter share a name.
    """
    if len(leaf_names) != len(leaves):
        return leaves
    heads = [re.split(r"[\[.]", name)[0] for name in leaf_names]
    by_argument = {leaf.argument: head for leaf, head in zip(leaves, heads, strict=True)}
    if not all(heads) or len(set(heads)) != len(by_argument):
        return leaves
    return [dataclasses.replace(leaf, path=_with_head(leaf.path, by_argument[leaf.argument])) for leaf in leaves]


def _with_head(path: str, head: str) -> str:
    _, slash, tail = path.partition("/")
    return f"{head}{slash}{tail}"


_HOST_NOTES = {
    "cpu": "this compiler has one memory space: arguments and outputs declared in host memory were moved to the host",
    "gpu": "compile-only GPUs know no host memory for arguments: arguments and outputs declared there were moved to "
    "the host, and the copies that a real GPU makes on the device to read them are counted from above",
    "tpu": "arguments and outputs declared in host memory were moved to the host",
}


@dataclasses.dataclass(frozen=True)
class _HostPlacement:
    """Arguments and outputs that are declared in host memory, but counted as device memory by the compiler."""

    leaves: Mapping[int, int]
    """Bytes by index of the argument leaf."""
    outputs: Mapping[str, int]
    """Bytes by path of the output."""
    alias_bytes: int = 0
    """Bytes of moved arguments whose buffer holds an output."""

    @property
    def output_bytes(self) -> int:
        """Bytes of outputs to move.

        An output in the buffer of a moved argument moves, too, even if the compiler dropped its memory kind.
        """
        return max(sum(self.outputs.values()), self.alias_bytes)

    def apply(self, buffer: Buffer, leaves: Sequence[ArgumentLeaf]) -> Buffer:
        is_argument = buffer.phase == "argument" and buffer.path in {leaves[index].path for index in self.leaves}
        is_output = buffer.role == "outputs" and buffer.dtype and buffer.path in self.outputs
        return dataclasses.replace(buffer, space="host") if is_argument or is_output else buffer


def _host_placement(target: Target, figures: _Figures, host_paths: frozenset[str]) -> _HostPlacement:
    host_leaves = [
        index for index, leaf in enumerate(figures.leaves) if leaf.kept and (leaf.on_host or leaf.path in host_paths)
    ]
    # The compilers for a TPU and for a present GPU count host arguments as host memory. A compile-only GPU has no
    # memories (`addressable_memories() == []`), so its compiler drops the memory kind of arguments.
    if target.platform == "tpu" or figures.host.argument_bytes or figures.host.output_bytes:
        return _HostPlacement({}, {})
    return _HostPlacement(
        {index: figures.leaves[index].num_bytes for index in host_leaves},
        figures.host_outputs,
        sum(figures.leaves[index].num_bytes for index in host_leaves if figures.is_aliased[index]),
    )


def _space_bytes(figures: _Figures, placement: _HostPlacement) -> tuple[SpaceBytes, SpaceBytes]:
    def with_placement(space: SpaceBytes, sign: int) -> SpaceBytes:
        return dataclasses.replace(
            space,
            argument_bytes=space.argument_bytes + sign * sum(placement.leaves.values()),
            output_bytes=space.output_bytes + sign * placement.output_bytes,
            alias_bytes=space.alias_bytes + sign * placement.alias_bytes,
        )

    return with_placement(figures.device, -1), with_placement(figures.host, 1)


def _coarse_buffers(figures: _Figures, roles: Sequence[str]) -> tuple[Buffer, ...]:
    """Return buffers for a program without a dump: arguments by leaf, everything else as XLA's totals."""
    buffers: list[Buffer] = []
    spaces: list[tuple[Space, SpaceBytes]] = [("device", figures.device), ("host", figures.host)]
    for space, total in spaces:
        space_buffers = [
            Buffer(space=space, role=role, path=leaf.path, num_bytes=leaf.num_bytes, start=0, end=0)
            for leaf, role in zip(figures.leaves, roles, strict=True)
            if leaf.kept and leaf.on_host == (space == "host")
        ]
        derived = _derived_bytes(total, sum(buffer.num_bytes for buffer in space_buffers))
        space_buffers += [
            Buffer(space=space, role=role, phase="", num_bytes=size, start=0, end=0) for role, size in derived.items()
        ]
        buffers += [buffer for buffer in space_buffers if buffer.num_bytes]
    return tuple(buffers)


def _by_role(space: SpaceBytes, names: Sequence[str], leaves: Sequence[tuple[ArgumentLeaf, str]]) -> dict[str, int]:
    roles = dict.fromkeys(names, 0)
    for leaf, role in leaves:
        roles[role] += leaf.num_bytes
    return {**roles, **_derived_bytes(space, sum(roles.values()))}


def _derived_bytes(space: SpaceBytes, leaf_bytes: int) -> dict[str, int]:
    """Return bytes by role for everything except argument leaves, whose bytes are given."""
    return {
        "unattributed": space.argument_bytes - leaf_bytes,
        "outputs": space.output_bytes - space.alias_bytes,
        "temporaries": space.temp_bytes,
        "code": space.code_bytes,
    }
