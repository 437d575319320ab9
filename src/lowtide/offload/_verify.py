"""Check in a compiled program that arguments and outputs are in the requested memories, host or device.

A lost placement raises no error: the program computes the same values, but needs the memory that the placement should
save. Under `jit`, tracers have no `sharding`, a memory kind may be dropped, and a donation may stay unused. So this
module reads the executable: memory kinds of arguments and outputs, XLA's byte totals for each memory, aliases (outputs
written into arguments), and copies between the memories.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax

from ..core import (
    ConfigError,
    PlacementError,
    check_choice,
    check_type,
    format_bytes,
    leaf_bytes,
    leaves_with_paths,
    match_names,
    on_host,
    parse_bytes,
    path_str,
)
from ..memory import Program, crossed_donations, undonated

# Limits. A CPU has one memory, so memory kinds are checked there, but bytes and copies are not. Compile-only GPUs keep
# no memory kinds of arguments. For them, the check uses the declared kinds, which only a `lowtide.memory.Program`
# records. Copies are counted in XLA's dump. For a bare `jax.stages.Compiled` they are counted in its text, which the
# compiler cannot print for some TPU programs.

Space = Literal["host", "device"]

_HOST_SPACE = 5  # the memory space of host memory in XLA's layouts: f32[8]{0:S(5)}
_COPIES = ("copy", "copy-start", "async-start", "dynamic-slice", "dynamic-update-slice", "fusion", "custom-call")
_COPY_IN_TEXT = re.compile(
    r"= (.*?) (?:copy|copy-start|async-start|dynamic-slice-start|dynamic-update-slice-start|fusion-start)\("
)
_ENTRY_ARRAY = re.compile(r"\w+\[[\d,]*\](?:\{[^}]*\})?")
_ALIAS = re.compile(r"\{ ?(\d*) ?\}: \((\d+), \{\}")
_ARRAY = re.compile(r"\w+\[(\d[\d,]*)\]\{[^}]*\}")
_HOST = f"S({_HOST_SPACE})"
_INSTRUCTION = re.compile(r"^ *(ROOT )?%?([\w.\-]+) = (.*)$")
_OPERAND = re.compile(r"%([\w.\-]+)")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_MAX_HOPS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Result of `verify`; all bytes are those of one device.

    Examples:
        >>> Placement(platform="tpu", host_paths=("0/w",), num_moves=2, host_argument_bytes=64).num_moves
        2
    """

    platform: str
    """Platform that the program was compiled for: ``cpu``, ``gpu`` or ``tpu``."""
    host_paths: tuple[str, ...] = ()
    """Paths of the arguments in host memory."""
    device_bytes: int = 0
    """Device memory of the running program: arguments, outputs not written into arguments, temporaries, and code."""
    host_argument_bytes: int = 0
    """Bytes of arguments in host memory, as XLA counts them."""
    host_output_bytes: int = 0
    """Bytes of outputs in host memory, including those written into arguments."""
    host_alias_bytes: int = 0
    """Bytes of outputs in host memory that are written into arguments."""
    host_temp_bytes: int = 0
    """Bytes of temporaries in host memory: offloaded activations, and unwanted copies."""
    num_moves: int | None = None
    """Number of copies between host and device, with loop bodies counted once; None if unknown, as on a CPU."""
    notes: tuple[str, ...] = ()
    """Checks that were not possible, with the reason."""


@dataclasses.dataclass(frozen=True)
class _Leaf:
    path: str
    space: Space
    num_bytes: int
    shape: tuple[int, ...] = ()
    shard: tuple[int, ...] = ()
    is_used: bool = True
    is_donated: bool = False


def verify(
    compiled: Any,
    expected: Mapping[str, Space],
    *,
    outputs: Mapping[str, Space] | None = None,
    device_bytes: int | str | None = None,
    host_bytes: int | str | None = None,
    host_temp_bytes: int | str | None = None,
    donated: bool = True,
) -> Placement:
    """Raise unless the arguments and outputs of a compiled program are in the intended memories.

    Args:
        compiled: a `lowtide.memory.Program` or a `jax.stages.Compiled`.
        expected: maps globs on argument paths to ``"host"`` or ``"device"``. A path is the argument's position or
            keyword, then the tree path, as in ``1/**``. If several globs match a leaf, the last one decides.
        outputs: as `expected`, for globs on the tree paths of the function's results; None checks no results.
        device_bytes: largest allowed device memory of the program; a number or text such as ``"2.5 GiB"``.
        host_bytes: largest allowed host memory: arguments, temporaries, and outputs that are not written into
            arguments. A tight bound detects a second copy of a host leaf.
        host_temp_bytes: smallest allowed size of temporaries in host memory, such as offloaded activations.
        donated: whether host leaves that the program updates must be donated; the host holds undonated leaves twice.

    Returns:
        The placement, with notes on checks that this platform's compiler does not allow.

    Raises:
        PlacementError: with the first 12 problems; on a CPU only memory kinds are checked. The problems are:

            - A leaf is in the wrong memory, or XLA does not count a host argument as host memory.
            - No output reuses a donated host leaf, or JAX pairs a donated leaf with an output in another memory.
            - A host leaf is not donated, although a host result of its shape, not a gradient, replaces it.
            - The program gathers the shards of a host leaf, or reads host leaves without copies to the device.
            - The bytes are beyond the bounds.
            - Host leaves are expected in a `jax.stages.Compiled` for a compile-only GPU, which shows no memory kinds.

        SelectionError: when a glob matches no argument or output.
        ConfigError: when `compiled` is not a program, `expected` is not a mapping, or a memory or size is invalid.

    Memory:
        Reads the compiler's report; allocates nothing on a device.

    Examples:
        >>> import jax.numpy as jnp
        >>> from lowtide.offload import to_device, to_host
        >>> step = jax.jit(lambda state, x: to_device(state["mu"]) + x)
        >>> compiled = step.lower({"mu": to_host(jnp.ones(3))}, jnp.ones(3)).compile()
        >>> verify(compiled, {"0/**": "host", "1": "device"}).host_paths
        ('0/mu',)
    """
    if not (isinstance(compiled, Program) or hasattr(compiled, "input_formats")):
        hint = "pass jax.jit(fn).lower(*args).compile(), or lt.memory.compile(fn, *args, target=...)"
        raise ConfigError(f"verify needs a compiled program, not a {type(compiled).__name__}", hint=hint)
    hint = 'use globs on argument paths as keys, as in {"1/**": "host"}'
    check_type("expected", expected, Mapping, "a mapping of paths to memories", hint=hint)
    program = compiled if isinstance(compiled, Program) else None
    executable = program.compiled if program is not None else compiled
    arguments, results = _arguments(executable, program), _results(executable)
    platform, is_compile_only = _platform(executable, program)
    notes: list[str] = []
    sizes = _totals(executable)
    is_declared = is_compile_only and platform == "gpu"
    if is_declared:
        arguments, outputs = _with_declared_spaces(arguments, program, expected), None
        notes.append("compile-only GPUs keep no memory kinds: arguments were checked as declared, outputs were not")
        sizes.update({"device_bytes": program.report().device_bytes} if program is not None else {})
    problems = _find_misplaced(arguments, expected, "argument") + _find_misplaced(results, outputs or {}, "output")
    host_arguments = [leaf for leaf in arguments if leaf.space == "host" and leaf.is_used]
    placement = Placement(
        platform=platform,
        host_paths=tuple(leaf.path for leaf in arguments if leaf.space == "host"),
        num_moves=None if platform == "cpu" else _count_all_moves(executable, program),
        **sizes,
    )
    if platform == "cpu":
        notes.append("a CPU has one memory: kinds were checked, bytes and copies were not")
    elif not is_declared:
        host_paths = {path for path, space in _expected_spaces(arguments, expected).items() if space == "host"}
        problems += _find_miscounted(executable, program, placement, host_arguments, host_paths)
        text = _text(executable)
        problems += _find_gathered(host_arguments, text)
        undonated_leaves = [leaf for leaf in host_arguments if leaf.path in host_paths and not leaf.is_donated]
        duplicated = _find_duplicated(undonated_leaves, results, text) if donated else []
        problems += duplicated
        if undonated_leaves and not duplicated and any(leaf.space == "host" for leaf in results):
            listed = ", ".join(leaf.path for leaf in undonated_leaves[:4])
            notes.append(f"{listed}{', …' if len(undonated_leaves) > 4 else ''}: on the host and not donated")
    if platform != "cpu" and placement.num_moves is None:
        notes.append("the program's text cannot be printed: copies were not counted")
    if platform != "cpu":
        problems += _find_exceeded_bounds(placement, device_bytes, host_bytes, host_temp_bytes)
    notes += [f"{leaf.path}: not read by the program" for leaf in arguments if not leaf.is_used]
    if problems:
        listed = [*problems[:12], *([f"… ({len(problems) - 12} more)"] if len(problems) > 12 else [])]
        raise PlacementError(
            problems[0] if len(problems) == 1 else f"{len(problems)} placements are wrong",
            got="\n    ".join(["", *listed]) if len(problems) > 1 else None,
            hint="place arguments with lt.offload.to_host before the call and move results back with it inside the "
            "jitted function; under jit a value is a tracer, which has a memory space in its type and no `sharding`",
        )
    return dataclasses.replace(placement, notes=tuple(notes))


# --- facts about the program ---------------------------------------------------------------------------------------


def _dynamic_positions(executable: Any, program: Program | None) -> list[int]:
    """Return the positions of the non-static positional arguments, in a call that also passes static arguments."""
    static = program.static if program is not None else ()
    return [index for index in range(len(executable.args_info[0]) + len(static)) if index not in static]


def _arguments(executable: Any, program: Program | None) -> list[_Leaf]:
    infos = jax.tree_util.tree_leaves_with_path(executable.args_info)
    dynamic = _dynamic_positions(executable, program)
    leaves: list[_Leaf] = []
    for (path, info), fmt in zip(infos, jax.tree.leaves(executable.input_formats), strict=True):
        name = str(dynamic[path[1].idx]) if hasattr(path[1], "idx") else path[1].key
        inner = path_str(path[2:])
        # JAX drops arguments that the program does not read; these have no layout.
        is_used = fmt.layout is not None
        leaves.append(
            _Leaf(
                path=f"{name}/{inner}" if inner else name,
                space="host" if is_used and on_host(fmt.sharding) else "device",
                num_bytes=_shard_bytes(info, fmt.sharding) if is_used else 0,
                shape=tuple(info.shape),
                shard=tuple(fmt.sharding.shard_shape(tuple(info.shape))) if is_used else (),
                is_used=is_used,
                is_donated=bool(info.donated),
            )
        )
    return leaves


def _results(executable: Any) -> list[_Leaf]:
    shardings = jax.tree.leaves(executable.output_shardings)
    return [
        _Leaf(path, "host" if on_host(sharding) else "device", _shard_bytes(info, sharding), tuple(info.shape))
        for (path, info), sharding in zip(leaves_with_paths(executable.out_info), shardings, strict=True)
    ]


def _shard_bytes(info: Any, sharding: Any) -> int:
    """Return the bytes of one device's shard without padding, a lower bound of XLA's count."""
    return leaf_bytes(jax.ShapeDtypeStruct(sharding.shard_shape(tuple(info.shape)), info.dtype))


def _platform(executable: Any, program: Program | None) -> tuple[str, bool]:
    """Return the platform, and whether its devices are compile-only devices without host memory."""
    shardings = jax.tree.leaves((executable.input_shardings, executable.output_shardings))
    if not shardings:
        return (program.target.platform, program.target.is_ahead_of_time) if program is not None else ("cpu", False)
    device = next(iter(shardings[0].device_set))
    return "gpu" if device.platform in ("cuda", "rocm") else device.platform, not device.addressable_memories()


def _with_declared_spaces(
    leaves: Sequence[_Leaf], program: Program | None, expected: Mapping[str, Space]
) -> list[_Leaf]:
    if program is None and "host" in expected.values():
        problem = "a jax.stages.Compiled for a compile-only GPU does not show which arguments are on the host"
        hint = 'compile it with lowtide.memory.compile(fn, *args, target="h100"), or verify it for a TPU or on a GPU'
        raise PlacementError(problem, hint=hint)
    declared_paths = program.host_paths if program is not None else frozenset[str]()
    return [dataclasses.replace(leaf, space="host" if leaf.path in declared_paths else "device") for leaf in leaves]


def _totals(executable: Any) -> dict[str, Any]:
    """Return the fields of a `Placement` that count bytes; empty if the compiler has no figures."""
    stats = executable.memory_analysis()
    if stats is None:
        return {}
    parts = ("argument", "output", "temp", "generated_code")
    # The sum replaces XLA's `peak_memory_in_bytes`, which on a TPU includes host arguments and outputs.
    on_device = sum(getattr(stats, f"{part}_size_in_bytes") for part in parts) - stats.alias_size_in_bytes
    host_parts = ("argument", "output", "alias", "temp")
    on_host = {f"host_{part}_bytes": getattr(stats, f"host_{part}_size_in_bytes") for part in host_parts}
    return {"device_bytes": on_device, **on_host}


# --- problems ------------------------------------------------------------------------------------------------------


def _expected_spaces(leaves: Sequence[_Leaf], expected: Mapping[str, Space]) -> dict[str, Space]:
    spaces: dict[str, Space] = {}
    for pattern, space in expected.items():
        hint = 'use "host" for every kind of host memory'
        check_choice(f"{pattern}: its memory", space, ("host", "device"), hint=hint)
        spaces.update(dict.fromkeys(match_names([leaf.path for leaf in leaves], pattern), space))
    return spaces


def _find_misplaced(leaves: Sequence[_Leaf], expected: Mapping[str, Space], role: str) -> list[str]:
    spaces = _expected_spaces(leaves, expected)
    return [
        f"{role} {leaf.path}: expected on the {spaces[leaf.path]}, got on the {leaf.space} "
        f"({format_bytes(leaf.num_bytes)})"
        for leaf in leaves
        if leaf.is_used and spaces.get(leaf.path, leaf.space) != leaf.space
    ]


def _find_miscounted(
    executable: Any,
    program: Program | None,
    placement: Placement,
    host_arguments: Sequence[_Leaf],
    host_paths: set[str],
) -> list[str]:
    """Describe host arguments that XLA counts as device memory or never copies, and donations without effect."""
    problems: list[str] = []
    names = ", ".join(leaf.path for leaf in host_arguments[:6]) + (", …" if len(host_arguments) > 6 else "")
    num_bytes = sum(leaf.num_bytes for leaf in host_arguments)
    if placement.host_argument_bytes < num_bytes:
        problems.append(
            f"{names}: XLA counts {format_bytes(placement.host_argument_bytes)} of host arguments, "
            f"not at least {format_bytes(num_bytes)}"
        )
    donated_paths = [leaf.path for leaf in host_arguments if leaf.is_donated and leaf.path in host_paths]
    if donated_paths:
        positions = [str(index) for index in _dynamic_positions(executable, program)]
        unused_donations = {leaf.path for leaf in undonated(executable, arg_names=positions)}
        unused = [path for path in donated_paths if path in unused_donations]
        problems += [f"{path}: donated, but no output reuses its buffer" for path in unused]
        problems += _find_crossed_donations(executable, program)
    if host_arguments and placement.num_moves == 0:
        problems.append(f"{names}: read by the program, which copies nothing between the memories")
    return problems


def _find_crossed_donations(executable: Any, program: Program | None) -> list[str]:
    """Describe donated parameters paired with an output in another memory: JAX pairs by shape alone (jax 0.10.2)."""
    if program is not None:
        return crossed_donations(program.lowered)
    header = _text(executable).split("\n", 1)[0]
    layout = re.split(r"\}, \w+=", header.partition("entry_computation_layout={")[2])[0]
    parameters, outputs = (_ENTRY_ARRAY.findall(part) for part in layout.partition(")->")[::2])
    return [
        f"parameter {parameter}: donated to an output that is in another memory"
        for output, parameter in _ALIAS.findall(header)
        if int(parameter) < len(parameters)
        and int(output or 0) < len(outputs)
        and (_HOST in parameters[int(parameter)]) != (_HOST in outputs[int(output or 0)])
    ]


def _find_duplicated(undonated_leaves: list[_Leaf], results: Sequence[_Leaf], text: str) -> list[str]:
    """Describe undonated host arguments that a host result of the same shape replaces; gradients do not count."""
    if not text:
        return []
    gradient_positions = _gradients(text)
    remaining_leaves = list(undonated_leaves)
    problems: list[str] = []
    for position, result in enumerate(results):
        leaf = next((leaf for leaf in remaining_leaves if leaf.shape == result.shape), None)
        if leaf is not None and result.space == "host" and position not in gradient_positions:
            remaining_leaves.remove(leaf)
            problems.append(
                f"{leaf.path}: not donated, so the host holds it and the result {result.path} "
                f"({format_bytes(leaf.num_bytes)} twice); donate it, or pass donated=False to accept that"
            )
    return problems


def _find_gathered(host_arguments: Sequence[_Leaf], text: str) -> list[str]:
    """Describe sharded host arguments that the program gathers from all devices in order to slice them."""
    host_lines = [line for line in text.splitlines() if _HOST in line]
    host_arrays = [match for line in host_lines for match in _ARRAY.finditer(line) if _HOST in match[0]]
    shapes = {tuple(map(int, match[1].split(","))) for match in host_arrays}
    shards = {leaf.shard for leaf in host_arguments}
    return [
        f"{leaf.path}: its shards of {list(leaf.shard)} are gathered to {list(leaf.shape)} on every host; "
        "pass shardings= to lt.offload.optimizer, and cut other slices along an axis that is not sharded"
        for leaf in host_arguments
        if leaf.shape != leaf.shard and leaf.shape in shapes - shards
    ]


def _find_exceeded_bounds(
    placement: Placement, max_device: int | str | None, max_host: int | str | None, min_temp: int | str | None
) -> list[str]:
    temp = placement.host_temp_bytes
    host = placement.host_argument_bytes + placement.host_output_bytes - placement.host_alias_bytes + temp
    bounds = (
        ("the host", "at most", max_host, host),
        ("the device", "at most", max_device, placement.device_bytes),
        ("temporaries on the host", "at least", min_temp, temp),
    )
    return [
        f"{memory}: expected {bound} {format_bytes(limit)}, got {format_bytes(size)}"
        for memory, bound, bound_bytes, size in bounds
        if bound_bytes is not None
        for limit in [parse_bytes(bound_bytes)]
        if (size > limit if bound == "at most" else size < limit)
    ]


# --- copies between the memories -----------------------------------------------------------------------------------


def _count_all_moves(executable: Any, program: Program | None) -> int | None:
    if program is not None and program.hlo is not None:
        moves = 0
        for computation in program.hlo.module.computations:
            shapes = {instruction.id: instruction.shape for instruction in computation.instructions}
            for instruction in computation.instructions:
                if instruction.opcode in _COPIES:
                    operand_shapes = [instruction.shape, *(shapes[operand] for operand in instruction.operand_ids)]
                    arrays = (array for shape in operand_shapes for array in _arrays(shape))
                    moves += len({array.layout.memory_space == _HOST_SPACE for array in arrays}) == 2
        return moves
    text = _text(executable)
    if not text:
        return None
    # A copy between the memories is an operation whose arrays are in both memory spaces.
    written = (_ARRAY.finditer(match[1]) for match in map(_COPY_IN_TEXT.search, text.splitlines()) if match)
    return sum(len({_HOST in array[0] for array in arrays}) == 2 for arrays in written)


def _text(executable: Any) -> str:
    """Return the program's text; empty if the compiler cannot print it."""
    try:
        return executable.as_text() or ""
    except jax.errors.JaxRuntimeError:
        return ""


def _arrays(shape: Any) -> Iterator[Any]:
    """Yield the arrays of a shape, without scalars: asynchronous copies have scalar indices and contexts."""
    if shape.tuple_shapes:
        for part in shape.tuple_shapes:
            yield from _arrays(part)
    elif shape.dimensions:
        yield shape


# Donation and byte totals do not distinguish a new optimizer state from gradients of host parameters: both are host
# results with the shapes of host arguments. The scope of the operation that computes a result distinguishes them,
# because JAX writes ``transpose`` into the scopes of a backward pass.


def _gradients(text: str) -> set[int]:
    """Return the positions of the results whose last operation belongs to the backward pass."""
    entry = text.partition("\nENTRY ")[2].partition("\n}")[0]
    lines = {match[2]: match for match in map(_INSTRUCTION.match, entry.splitlines()) if match}
    root = next((match for match in lines.values() if match[1]), None)
    if root is None:
        return set()
    results = _operands(root[3]) if re.search(r"\btuple\(", root[3]) else [root[2]]
    return {index for index, name in enumerate(results) if "transpose(" in _scope(name, lines)}


def _operands(line: str) -> list[str]:
    return _OPERAND.findall("%" + line.partition("(%")[2].partition(")")[0])


def _scope(name: str, lines: dict[str, re.Match[str]]) -> str:
    """Return the scope of the operation that computes a value; if it has no scope, follow its first operand."""
    for _ in range(_MAX_HOPS):
        if name not in lines:
            return ""
        scope, operands = _SCOPE.search(lines[name][3]), _operands(lines[name][3])
        if scope or not operands:
            return scope[1] if scope else ""
        name = operands[0]
    return ""
