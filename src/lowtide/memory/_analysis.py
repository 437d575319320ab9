"""Compile functions for a target, and report their bytes without running them.

`_owners` finds the owner of each buffer: an argument, an output or an operation. This module compiles, adds XLA's
totals, and builds the `MemoryReport`. Arguments and outputs that are declared in host memory count as host bytes. For
an absent (compile-only) GPU, the report adds the device copies of host arguments that a real GPU makes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from ..core import TargetError, format_bytes, leaves_with_paths
from ..core._compat import cudnn_version
from ..hlo import (
    DEVICE_COLOR,
    HOST_COLOR,
    ArgumentLeaf,
    CompiledProgram,
    Edge,
    Graph,
    Traffic,
    Value,
    aliased,
    aliased_in,
    argument_leaves,
    compile_program,
    host_outputs,
    lowered_leaves,
    named_leaves,
    positions,
)
from ..report import Buffer, MemoryReport, Space, SpaceBytes, live_bytes
from ..targets import Target, resolve_target
from ._isolation import run_isolated
from ._owners import Owners
from ._roles import Role, argument_roles, named_roles

_NOTABLE_BYTES = 2**20
"""Constants outside of a report's buffers get a note if they have at least this many bytes in total."""
_SLICES = ("dynamic-slice", "slice", "gather")
_PARTIAL_WRITES = ("dynamic-update-slice", "scatter")
_HOST_NOTES = {
    "cpu": "this compiler has one memory space: arguments and outputs declared in host memory count as host bytes",
    "gpu": "compile-only GPUs have no host memory for arguments: arguments and outputs declared there count as host "
    "bytes, and the device copies through which a real GPU reads them are an upper bound",
    "tpu": "arguments and outputs declared in host memory count as host bytes",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program(CompiledProgram):
    """A function compiled for a target; made by `compile`.

    Examples:
        >>> import jax.numpy as jnp
        >>> program = compile(lambda w, x: x @ w, jnp.ones((4, 4)), jnp.ones((2, 4)))
        >>> program.report(roles={"params": 0}).by_role["params"]
        64
    """

    @property
    def bytes_accessed(self) -> int:
        """Bytes that a call moves to and from a device's memory; a loop body counts once per iteration.

        The operands and results of each kernel count once. On a TPU, these bytes divided by the chip's bandwidth are a
        lower bound on the time of a call. Caches of a CPU or GPU save some of the counted traffic.

        Raises:
            StructureError: for a loop whose number of iterations depends on data.
        """
        return Traffic(self.hlo.module).total()

    def report(self, roles: Mapping[str, Role] | None = None) -> MemoryReport:
        """Report the bytes of the program and their owners.

        Args:
            roles: role names and their arguments, as in `lowtide.memory.analyze`.

        Returns:
            The report, even for a program that does not fit.

        Raises:
            ConfigError: when a role's name is reserved, or a role's argument is static, is missing or has two roles.
        """
        return examine(self, roles)[0]


def compile(
    fn: Callable[..., Any],
    *args: Any,
    target: Target | str | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Program:
    """Compile a function for attached or absent hardware, without running it.

    Args:
        fn: the function; all arguments are as in `analyze`.
        *args: arguments of `fn`.
        target: the hardware to compile for.
        donate_argnums: positions of donated arguments.
        static_argnums: positions of static arguments.
        **kwargs: keyword arguments of `fn`.

    Returns:
        The program. A program that does not fit a TPU is also returned: its `report()` gives the bytes, and its
        `compiled` raises the compiler's error.

    Raises:
        Exception: any exception of `analyze`, except for errors about its parameters `roles` and `isolate`.

    Warns:
        PlacementWarning: when JAX aliases a donated argument on the host to a result on the device, or the reverse.

    Memory:
        Nothing is allocated on the target. This process keeps the compiler's memory; `analyze` can compile in a
        separate process.
    """
    program = compile_program(fn, args, kwargs, target, donate_argnums, static_argnums)
    return Program(**{field.name: getattr(program, field.name) for field in dataclasses.fields(program)})


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
        *args: arguments of `fn`: arrays, `jax.ShapeDtypeStruct`s or trees of them. Only shape, dtype, sharding and
            memory kind are read. A sharding on a mesh is moved to a mesh of the same axes over the target's devices. In
            an argument that contains functions (an Equinox module), everything except arrays is constant, as in
            `equinox.filter_jit`.
        target: a `Target`, a name for `lowtide.memory.target`, or None for the attached hardware.
        roles: maps the name of a role to its arguments: a position, a keyword, or a sequence of them. Example:
            ``{"params": 0, "batch": ("x", "y")}``. Other arguments have the role ``other``.
        donate_argnums: as in `jax.jit`; not for a function that is already jitted.
        static_argnums: as in `jax.jit`. For a jitted function, repeat the positions that `jax.jit` received.
        isolate: compile in a separate process, since a process that compiled for a TPU keeps much memory. The function
            and its arguments are pickled with cloudpickle, with shapes in place of arrays.
        **kwargs: keyword arguments of `fn`, whose names must differ from the parameters above.

    Returns:
        The report, for one device of the target.

    Raises:
        TargetError: when the target is unknown or too small for an argument's mesh, or the separate process crashes.
        StructureError: when `jax.jit` refuses the type of an argument, whose path the error gives; when arrays or
            meshes are not on the target; or when `isolate` is set and the function cannot be pickled.
        ConfigError: when `donate_argnums` or `static_argnums` do not fit the arguments; when a role's name is reserved;
            or when a role's argument is static, is missing or has two roles.
        PlacementError: when the function computes with values in host memory; the error lists their paths.
        Exception: any other exception of the compiler, unchanged. A program that does not fit a TPU gets a report.

    Warns:
        PlacementWarning: as in `compile`.

    Memory:
        Nothing is allocated on the target. Figures include the padding of the target's layouts. An argument that the
        function does not read takes no bytes, as in a jitted call. Constants that the function closes over belong to no
        argument. Depending on the compiler they count as temporaries, as code or in no figure. In the last two cases, a
        note gives their bytes if they have at least 1 MiB in total.

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
    argument_roles(roles or {}, [], len(args), list(kwargs), positions("static_argnums", static_argnums, len(args)))
    program = compile_program(fn, args, kwargs, target, donate_argnums, static_argnums)
    return examine(program, roles)[0]


def analyze_compiled(
    compiled: Any,
    *,
    target: Target | str | None = None,
    roles: Mapping[str, Role] | None = None,
    static_argnums: int | Sequence[int] | None = None,
) -> MemoryReport:
    """Report the bytes of a compiled program.

    Paths begin with the number of an argument (``0/w``), because a compiled program keeps no argument names.

    Args:
        compiled: a `jax.stages.Compiled`.
        target: the target that it was compiled for; None for the attached hardware.
        roles: as in `analyze`.
        static_argnums: positions of static arguments of the compilation. Positions in `roles` count static arguments.

    Returns:
        The report, for one device. Temporaries have no owners, because XLA's dump is missing.

    Raises:
        ConfigError: for invalid `roles`, as in `analyze`.
        TargetError: when the program was compiled for another platform, or its compiler reports no memory.

    Memory:
        Reads the compiler's report; compiles and allocates nothing.
    """
    goal = resolve_target(target)
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    platforms = {device.platform for sharding in shardings for device in sharding.device_set}
    if platforms and platforms != {goal.platform}:
        problem = f"the program was compiled for {', '.join(sorted(platforms))}, not for target {goal.name!r}"
        raise TargetError(problem, hint="pass the target of the compilation")
    if compiled.memory_analysis() is None:
        problem = f"the compiler for {goal.name!r} does not report memory"
        raise TargetError(problem, hint='analyze for another target, such as "v5e:2x2"')
    num_static = len(static_argnums) if isinstance(static_argnums, Sequence) else int(static_argnums is not None)
    static = positions("static_argnums", static_argnums, len(compiled.args_info[0]) + num_static)
    program = CompiledProgram(target=goal, lowered=None, jaxpr=None, hlo=None, static=static, _compiled=compiled)
    return examine(program, roles)[0]


def examine(program: CompiledProgram, roles: Mapping[str, Role] | None = None) -> tuple[MemoryReport, Owners | None]:
    """Return a program's report, and the owners of its buffers (None if the compiler wrote no dump)."""
    target, hlo, static = program.target, program.hlo, program.static
    if program.error is not None:  # a program that did not fit has allocations but no executable
        stages = program.lowered
        figures = _Figures.of_allocations(hlo, lowered_leaves(stages, hlo))
    else:
        stages = program.compiled
        leaves = argument_leaves(stages)
        if hlo is not None and leaves and not any(leaf.kept for leaf in leaves):
            leaves = lowered_leaves(program.lowered, hlo, stages)
        is_aliased = aliased(stages, leaves) if hlo is None else aliased_in(hlo, leaves)
        figures = _Figures.of_stats(stages.memory_analysis(), leaves, host_outputs(stages), is_aliased)
    num_args = len(stages.args_info[0]) + len(static)
    leaf_roles = argument_roles(roles or {}, figures.leaves, num_args, list(stages.args_info[1]), static)
    dynamic = [position for position in range(num_args) if position not in static]
    figures = dataclasses.replace(figures, leaves=[_with_call_position(leaf, dynamic) for leaf in figures.leaves])
    placement = _host_placement(target, figures, program.host_paths)
    figures = dataclasses.replace(figures, leaves=_with_names(figures.leaves, program.argument_names))
    owners = None
    notes = (_HOST_NOTES[target.platform],) if placement.leaves or placement.outputs else ()
    if target.platform == "gpu" and target.is_ahead_of_time and not cudnn_version():
        notes = (*notes, "compiled without cuDNN, which is not installed: a GPU with cuDNN may use other kernels")
    if hlo is not None:
        # JAX cannot compute `out_info` for programs with ordered effects, so use `out_tree`.
        numbers = jax.tree.unflatten(stages.out_tree, range(stages.out_tree.num_leaves))
        outputs = [path for path, _ in leaves_with_paths(numbers)]
        owners = Owners(hlo, figures.leaves, leaf_roles, outputs, figures.totals)
        notes = (*notes, *_uncounted_notes(owners, target))
    else:
        notes = (*notes, "temporaries have no owners: the program was compiled without lowtide.memory.compile")
    return _report(target, figures, owners, leaf_roles, [*(roles or {}), "other"], placement, notes), owners


def examine_dump(hlo: Any, target: Target, stats: Any, roles: Mapping[str, str]) -> tuple[MemoryReport, Owners]:
    """Return a dumped program's report and owners; `stats` are XLA's memory statistics, None without an executable."""
    leaves = named_leaves(hlo)  # JAX recorded a name for each parameter
    figures = _Figures.of_allocations(hlo, leaves) if stats is None else _Figures.of_stats(stats, leaves, {}, [])
    leaf_roles = named_roles(roles, leaves)
    owners = Owners(hlo, leaves, leaf_roles, None, figures.totals)
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
        """XLA's totals by memory space; None if XLA reported none."""
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
            computed = [a for a in allocations if not (a.is_entry_parameter or a.is_constant)]
            outputs = sum(a.size for a in computed if a.maybe_live_out)
            temporaries = sum(a.size for a in allocations) - arguments - outputs
            sizes = {"argument_bytes": arguments, "output_bytes": outputs + alias, "temp_bytes": temporaries}
            spaces.append(SpaceBytes(**sizes, alias_bytes=alias))
        device, host = spaces
        return cls(leaves, device, host, {}, [False] * len(leaves), has_totals=False)


def _report(
    target: Target,
    figures: _Figures,
    owners: Owners | None,
    leaf_roles: Sequence[str],
    names: Sequence[str],
    placement: _HostPlacement,
    notes: tuple[str, ...] = (),
) -> MemoryReport:
    """Build the report of a program, which lists the argument roles `names` even if they have zero bytes."""
    device, host = (
        dataclasses.replace(
            space,
            argument_bytes=space.argument_bytes + sign * sum(placement.leaves.values()),
            output_bytes=space.output_bytes + sign * placement.output_bytes,
            alias_bytes=space.alias_bytes + sign * placement.alias_bytes,
        )
        for space, sign in ((figures.device, -1), (figures.host, 1))
    )
    buffers = owners.buffers if owners else _coarse_buffers(figures, leaf_roles)
    buffers = tuple(placement.apply(buffer, figures.leaves) for buffer in buffers)
    peak_moment = owners.peak_moment if owners else 0
    if owners and target.platform == "gpu" and placement.leaves:
        device, buffers, peak_moment = _with_host_copies(owners, device, buffers, placement.leaves)
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


def _coarse_buffers(figures: _Figures, roles: Sequence[str]) -> tuple[Buffer, ...]:
    """Return buffers for a program without a dump: one per argument leaf, and one per role of `_derived_bytes`."""
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
    """Map the roles that arguments cannot have to their bytes; `leaf_bytes` is the total of the argument leaves."""
    return {
        "unattributed": space.argument_bytes - leaf_bytes,
        "outputs": space.output_bytes - space.alias_bytes,
        "temporaries": space.temp_bytes,
        "code": space.code_bytes,
    }


def _uncounted_notes(owners: Owners, target: Target) -> tuple[str, ...]:
    """Return one note on the constants outside of the report's buffers; no note if they are below `_NOTABLE_BYTES`."""
    total = sum(buffer.num_bytes for buffer in owners.uncounted)
    if total < _NOTABLE_BYTES:
        return ()
    largest = max(owners.uncounted, key=lambda buffer: buffer.num_bytes)
    array = f"{largest.dtype}[{','.join(map(str, largest.shape))}]"
    location = f" used at {largest.source}" if largest.source else ""
    accounting = "counted as code" if target.platform == "tpu" else "not counted by this compiler"
    return (
        f"{format_bytes(total)} of constants that the function closes over are part of the program and {accounting} "
        f"(the largest: {array}{location}); arguments would have an owner",
    )


# --- paths of arguments ----------------------------------------------------------------------------------------------


def _with_call_position(leaf: ArgumentLeaf, dynamic: Sequence[int]) -> ArgumentLeaf:
    """Replace a leaf's argument number, which counts no static arguments, by the argument's position in the call."""
    if not isinstance(leaf.argument, int):
        return leaf
    position = dynamic[leaf.argument]
    return dataclasses.replace(leaf, argument=position, path=_with_head(leaf.path, str(position)))


def _with_names(leaves: list[ArgumentLeaf], leaf_names: Sequence[str]) -> list[ArgumentLeaf]:
    """Replace argument numbers in paths by the signature's parameter names, if all arguments have different names."""
    if len(leaf_names) != len(leaves):
        return leaves
    # JAX names leaves like `params['w']`. All arguments in `*args` have the same name, and so have all in `**kwargs`.
    # So an argument passed by keyword keeps its keyword.
    heads = [
        leaf.argument if isinstance(leaf.argument, str) else re.split(r"[\[.]", name)[0]
        for leaf, name in zip(leaves, leaf_names, strict=True)
    ]
    by_argument = {leaf.argument: head for leaf, head in zip(leaves, heads, strict=True)}
    if not all(heads) or len(set(heads)) != len(by_argument):
        return leaves
    return [dataclasses.replace(leaf, path=_with_head(leaf.path, by_argument[leaf.argument])) for leaf in leaves]


def _with_head(path: str, head: str) -> str:
    _, slash, tail = path.partition("/")
    return f"{head}{slash}{tail}"


# --- host memory -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _HostPlacement:
    """Arguments and outputs that are declared in host memory, but counted as device memory by the compiler."""

    leaves: Mapping[int, int]
    """Bytes by index of the argument leaf."""
    outputs: Mapping[str, int]
    """Bytes by path of the output."""
    alias_bytes: int = 0
    """Bytes of the arguments in `leaves` whose buffers also hold an output."""

    @property
    def output_bytes(self) -> int:
        """Bytes of outputs to count as host memory instead of device memory."""
        # An output in the buffer of a host argument counts, too, even if the compiler dropped its memory kind.
        return max(sum(self.outputs.values()), self.alias_bytes)

    def apply(self, buffer: Buffer, leaves: Sequence[ArgumentLeaf]) -> Buffer:
        is_argument = buffer.phase == "argument" and buffer.path in {leaves[index].path for index in self.leaves}
        is_output = buffer.role == "outputs" and buffer.dtype and buffer.path in self.outputs
        return dataclasses.replace(buffer, space="host") if is_argument or is_output else buffer


def _host_placement(target: Target, figures: _Figures, host_paths: frozenset[str]) -> _HostPlacement:
    # The compilers for a TPU and for a present GPU count host arguments as host memory. A compile-only GPU has no
    # memories (`addressable_memories() == []`), so its compiler drops the memory kind of arguments.
    if target.platform == "tpu" or figures.host.argument_bytes or figures.host.output_bytes:
        return _HostPlacement({}, {})
    leaves = {
        index: leaf.num_bytes
        for index, leaf in enumerate(figures.leaves)
        if leaf.kept and (leaf.on_host or leaf.path in host_paths)
    }
    alias_bytes = sum(num_bytes for index, num_bytes in leaves.items() if figures.is_aliased[index])
    return _HostPlacement(leaves, figures.host_outputs, alias_bytes)


# A compile-only GPU has no host memory, so its program reads host arguments in place. A real GPU copies them to the
# device. These copies are assumed to be live:
# - of an array that is read as a whole: from the start of the program, where XLA starts such copies, to the last read,
#   or to the result that overwrites the array if it is made later;
# - of an array that is read as a whole in a loop: during the loop's body;
# - of a slice: during the operation or the loop body that reads it.
# These times are an upper bound: a real schedule may start a copy later.
def _with_host_copies(
    owners: Owners, device: SpaceBytes, buffers: tuple[Buffer, ...], leaves: Collection[int]
) -> tuple[SpaceBytes, tuple[Buffer, ...], int]:
    """Add device copies of the host arguments at indices `leaves`; return device bytes, buffers and peak position."""
    device_buffers = [buffer for buffer in buffers if buffer.space == "device"]
    bytes_before = live_bytes(device_buffers, len(owners.moments))
    copies = list(_HostCopies(owners).buffers(leaves))
    bytes_after = live_bytes([*device_buffers, *copies], len(owners.moments))
    peak = max(range(len(bytes_after)), key=bytes_after.__getitem__)
    added_bytes = bytes_after[peak] - bytes_before[owners.peak_moment]
    # Fragmentation exists only at the peak in the timeline, so it moves to the new peak.
    moved_buffers = [
        dataclasses.replace(b, start=peak, end=peak) if b.role == "fragmentation" and b.space == "device" else b
        for b in buffers
    ]
    return dataclasses.replace(device, temp_bytes=device.temp_bytes + added_bytes), (*moved_buffers, *copies), peak


class _HostCopies:
    """Device copies of host arguments; the search follows an argument's memory to the operations that read it."""

    def __init__(self, owners: Owners) -> None:
        self.owners, self.graph = owners, owners.graph

    def buffers(self, leaves: Collection[int]) -> Iterator[Buffer]:
        for index in leaves:
            if (parameter := self.owners.parameter_of.get(index)) is None:
                continue
            full_reads, slice_reads = self._read_ranges(index, parameter)
            leaf = self.owners.leaves[index]
            for (start, end), num_bytes in {**slice_reads, **dict.fromkeys(full_reads, leaf.num_bytes)}.items():
                yield Buffer(
                    space="device",
                    role="copies",
                    path=leaf.path,
                    phase="argument",
                    operation="copy from host memory",
                    shape=tuple(self.graph.shape(parameter).dimensions) if (start, end) in full_reads else (),
                    dtype=self.graph.item_type(parameter)[0] if (start, end) in full_reads else "",
                    num_bytes=num_bytes,
                    start=start,
                    end=end,
                )

    def _read_ranges(self, leaf: int, parameter: Value) -> tuple[set[tuple[int, int]], dict[tuple[int, int], int]]:
        """Return the position ranges of whole reads, and a map from ranges of partial reads to their largest bytes."""
        full_reads = dict[int, tuple[int, int]]()
        slice_reads = dict[tuple[int, int], int]()
        aliases, frontier = {parameter}, [parameter]
        while frontier:
            value = frontier.pop()
            for reader, edge in self.owners.dataflow.users.get(value, ()):
                # Aliases, bitcasts and in-place writes are still the argument's memory, so follow them. Any other user
                # reads the memory, and needs a copy on the device.
                instruction = self.graph.instructions[reader[0]]
                is_write = instruction.opcode in _PARTIAL_WRITES and instruction.proto.operand_ids[0] == value[0]
                if edge == Edge.ALIAS or is_write or instruction.opcode == "bitcast":
                    if reader not in aliases:
                        aliases.add(reader)
                        frontier.append(reader)
                    if not is_write:
                        continue
                scheduled_id = _scheduled_instruction(self.graph, reader[0])
                if scheduled_id is None:
                    continue
                computation = self.graph.instructions[scheduled_id].computation
                read_range = self._live_range(scheduled_id)
                if is_write or instruction.opcode in _SLICES:
                    part = (_update_operand(instruction.proto), ()) if is_write else reader
                    num_bytes = self.graph.num_elements(part) * self.graph.item_type(part)[1] // 8
                    slice_reads[read_range] = max(slice_reads.get(read_range, 0), num_bytes)
                else:
                    first, last = full_reads.get(computation, read_range)
                    full_reads[computation] = min(first, read_range[0]), max(last, read_range[1])
        if (entry := full_reads.get(self.graph.entry.id)) is not None:
            full_reads[self.graph.entry.id] = 0, max(entry[1], self._overwrite_position(leaf, aliases))
        full_ranges = set(full_reads.values())
        slice_ranges = {
            span: num_bytes
            for span, num_bytes in slice_reads.items()
            if not any(start <= span[0] and span[1] <= end for start, end in full_ranges)
        }
        return full_ranges, slice_ranges

    def _overwrite_position(self, leaf: int, aliases: set[Value]) -> int:
        """Return the position at which a result overwrites the leaf; 0 if no result overwrites the leaf."""
        results = (
            value
            for value, argument_leaf in self.owners.replaced.items()
            if argument_leaf == leaf and value in self.owners.in_place
        )
        return max((_definition_position(self.graph, value) for value in results if value not in aliases), default=0)

    def _live_range(self, instr_id: int) -> tuple[int, int]:
        """Return the first and last position of an instruction; in a loop, the first and last position of the body."""
        positions = self.graph.positions
        computation = self.graph.computations[self.graph.instructions[instr_id].computation]
        if computation.id == self.graph.entry.id:
            return positions[instr_id]
        body_positions = [positions[i.id] for i in computation.instructions if i.id in positions]
        return min(first for first, _ in body_positions), max(last for _, last in body_positions)


def _update_operand(proto: Any) -> int:
    """Return the id of the operand with the new values; a scatter has n targets, then indices, then n updates."""
    return proto.operand_ids[(len(proto.operand_ids) + 1) // 2 if proto.opcode == "scatter" else 1]


def _definition_position(graph: Graph, value: Value) -> int:
    """Return the position at which a value is made, following its aliases."""
    visited = {value}
    while True:
        instr_id = _scheduled_instruction(graph, value[0])
        aliases = [source for source, edge in graph.sources(value) if edge == Edge.ALIAS and source not in visited]
        if not aliases or (instr_id is not None and graph.instructions[instr_id].opcode == "fusion"):
            return graph.positions[instr_id][0] if instr_id is not None else 0
        value = aliases[0]
        visited.add(value)


def _scheduled_instruction(graph: Graph, instr_id: int) -> int | None:
    """Return the id of the scheduled instruction (such as a fusion) that runs an instruction, or None."""
    scheduled_id: int | None = instr_id
    while scheduled_id is not None and scheduled_id not in graph.positions:
        scheduled_id = graph.caller(scheduled_id)
    return scheduled_id
