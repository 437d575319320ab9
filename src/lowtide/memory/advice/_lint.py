"""Lint a step: find memory that it uses without need, with path, bytes and a remedy for each finding.

The rules inspect the compiled program, not the source: whether an output reuses its argument's buffer, whether a
gradient reaches a state, whether a value contains only the data of a weight. So they work for any framework, and the
bytes of a finding exist in the compiled program. Rules that also read the traced function are in `_jaxpr_rules`.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, cast

from ...core import format_bytes, parse_bytes
from ...hlo import ArgumentLeaf, Edge, Graph, Value, compile_program, reachable
from ...report import COMPUTED_ROLES, Buffer, MemoryReport
from ...targets import Target
from .._analysis import examine
from .._owners import Owners
from .._roles import Role
from ._findings import RULE_FUNCTIONS, Finding, Part, Step, leaf_finding, rule
from ._jaxpr_rules import dtypes  # this import also registers the rules of the module

_PRODUCTS = {"convolution", "custom-call", "dot"}
_PARTIAL_WRITES = ("dynamic-update-slice", "scatter")
_MIN_LOGITS_SHARE = 0.01
"""Smallest share of the device bytes for a finding about logits."""


def lint(
    fn: Callable[..., Any],
    *args: Any,
    target: Target | str | None = None,
    roles: Mapping[str, Role] | None = None,
    min_bytes: int | str = "1 MiB",
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> tuple[Finding, ...]:
    """Compile a step, and find memory that it uses without need.

    Args:
        fn: the step, as in `lowtide.memory.analyze`.
        *args: its arguments, or shapes of them.
        target: target to compile for.
        roles: as in `lowtide.memory.analyze`; no rule needs them.
        min_bytes: smallest finding to report: bytes, or ``"1 MiB"``. The rule ``checkpoint-name-unmatched`` ignores it.
        donate_argnums: as in `jax.jit`.
        static_argnums: as in `jax.jit`.
        **kwargs: keyword arguments of `fn`.

    Returns:
        Findings, the largest first; empty if no rule applies.

    Raises:
        ConfigError: for a `min_bytes` that is not a size.
        Exception: any exception of `lowtide.memory.analyze`.

    Memory:
        Nothing is allocated on the target.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
        >>> [finding.rule for finding in lint(lambda w, g: w - 0.1 * g, w, w)]
        ['undonated-state']
    """
    limit = parse_bytes(min_bytes)
    program = compile_program(fn, args, kwargs, target, donate_argnums, static_argnums)
    report, owners = examine(program, roles)
    findings = run_rules(owners, report, program.jaxpr, {"jaxpr"} if owners is None else {"jaxpr", "owners"})
    large_findings = [f for f in findings if f.num_bytes >= limit or f.rule == "checkpoint-name-unmatched"]
    return tuple(sorted(large_findings, key=lambda f: (-f.num_bytes, f.rule, f.path)))


def run_rules(
    owners: Owners | None, report: MemoryReport, jaxpr: Any = None, parts: Set[Part] = frozenset({"owners"})
) -> list[Finding]:
    """Run the rules that need only `parts` of a step; by default, the rules that read only the compiled program."""
    step = Step(report, cast(Owners, owners), jaxpr)
    findings = [finding for function, needs in RULE_FUNCTIONS if needs <= parts for finding in function(step)]
    # A finding of `copied-in-loop` is more specific for the same bytes.
    copied_paths = {f.path for f in findings if f.rule == "copied-in-loop"}
    return [f for f in findings if f.rule != "rebuilt-state" or f.path not in copied_paths]


# --- arguments and outputs -------------------------------------------------------------------------------------------


@rule({"undonated-state": "the step replaces an argument that is not donated, so two copies of it exist"})
def _undonated_state(step: Step) -> Iterator[Finding]:
    owners, reported_leaves = step.owners, set[int]()  # one buffer serves one output
    has_backward = "backward" in owners.dataflow.phases.values()
    for output, index in owners.replaced.items():
        leaf = owners.leaves[index]
        is_reused = leaf.donated or index in reported_leaves or output in owners.in_place
        is_unchanged = owners.dataflow.copy_of(output) == index
        # A new state is computed from the old one element by element.
        sources = owners.dataflow.same_size_sources(output)
        if is_reused or is_unchanged or all(owners.dataflow.copy_of(value) != index for value in sources):
            continue
        if not has_backward and _is_model_output(owners, output, index):
            continue
        reported_leaves.add(index)
        yield leaf_finding(
            "undonated-state",
            leaf,
            detail=f"returned as {owners.path_of(output) or 'the result'}",
            remedy=f"donate argument {leaf.argument!r}: jax.jit(step, donate_argnums=...)",
        )


@rule({"donation-not-used": "a donated buffer is not reused for any output"})
def _unused_donations(step: Step) -> Iterator[Finding]:
    reused_leaves = set(step.owners.in_place.values())
    for index, leaf in enumerate(step.owners.leaves):
        if leaf.donated and index not in reused_leaves:
            yield Finding(
                rule="donation-not-used",
                path=leaf.path,
                num_bytes=leaf.num_bytes or leaf.logical_bytes,
                detail="" if leaf.kept else "the program does not read it",
                remedy="return a value of the same shape, dtype and layout for it, or do not donate it",
            )


@rule({"rebuilt-state": "a loop writes the new value of a donated argument to a second buffer"})
def _rebuilt_state(step: Step) -> Iterator[Finding]:
    owners, extra_bytes = step.owners, collections.Counter[str]()
    donated_leaves = {
        owners.path_of(output): owners.leaves[index]
        for output, index in owners.replaced.items()
        if output in owners.in_place and owners.leaves[index].donated
    }
    for buffer in step.report.peak:
        # The output is in the argument's buffer, so this is a second buffer, which is copied into it at the end.
        if buffer.role == "outputs" and buffer.path in donated_leaves and "while/body" in buffer.scope:
            extra_bytes[buffer.path] += buffer.num_bytes
    for path, num_bytes in extra_bytes.items():
        yield Finding(
            rule="rebuilt-state",
            path=donated_leaves[path].path,
            num_bytes=num_bytes,
            detail=f"returned as {path or 'the result'}",
            remedy="keep one array for each layer and loop over the layers in Python, which updates each array in "
            "place; or carry the array through the loop and write slices (jax.lax.dynamic_update_slice), where that "
            "keeps its layout",
        )


@rule({"returned-unchanged": "an output is a copy of an argument"})
def _returned_unchanged(step: Step) -> Iterator[Finding]:
    owners, flow = step.owners, step.owners.dataflow
    for output in owners.results:
        index = flow.copy_of(output)
        if index is None or output in owners.in_place or not flow.graph.is_like(output, owners.parameter_of[index]):
            continue
        yield leaf_finding(
            "returned-unchanged",
            owners.leaves[index],
            detail=f"returned as {owners.path_of(output) or 'the result'}",
            remedy="leave it out of the result: the caller already has it",
        )


def _is_model_output(owners: Owners, output: Value, leaf: int) -> bool:
    """Return whether an output is a model's result for an argument of equal shape, not the argument's next value."""
    # A model multiplies its input by weights. A state is replaced element by element or in slices, or keeps its name.
    path, name = owners.path_of(output), owners.leaves[leaf].path.partition("/")[2]
    if name and path.rpartition("/")[2] == name.rpartition("/")[2]:
        return False
    flow = owners.dataflow

    def sources(node: tuple[Value, bool]) -> list[tuple[Value, bool]]:
        value, is_mixed = node
        is_mixed = is_mixed or flow.graph.instructions[value[0]].opcode in _PRODUCTS
        return [(source, is_mixed) for source, _ in flow.sources(value)]

    return any(is_mixed and flow.copy_of(value) == leaf for value, is_mixed in reachable([(output, False)], sources))


# --- frozen leaves ---------------------------------------------------------------------------------------------------


@rule({"optimizer-over-frozen": "a leaf without a gradient has optimizer state or an accumulator"})
def _optimizer_over_frozen(step: Step) -> Iterator[Finding]:
    owners, flow = step.owners, step.owners.dataflow
    if "backward" not in flow.phases.values():
        return
    sizes = _dimensions(owners)
    counts = collections.Counter(sizes.values())
    for output, index in owners.replaced.items():
        # The optimizer state of a leaf has the leaf's shape. So there are at least two leaves of the shape, and the
        # passes of differentiation read the weight but not its state.
        has_twin = index in sizes and counts[sizes[index]] > 1
        is_scalar = flow.graph.num_elements(output) <= 1
        if is_scalar or not has_twin or flow.is_differentiated(index) or _has_training_input(owners, output, index):
            continue
        yield leaf_finding(
            "optimizer-over-frozen",
            owners.leaves[index],
            detail="it has no gradient",
            remedy="initialise the optimizer with trainable leaves only: tx.init(trainable) after "
            "lowtide.partition(params, wrt)",
        )


def _has_training_input(owners: Owners, output: Value, leaf: int) -> bool:
    """Return whether a new state depends on a gradient, an activation or another differentiated leaf."""
    # Scalars do not count, since the norm of all gradients also scales gradients that are zero. A moving average of
    # parameters or statistics has such an input, so it does not count as unused optimizer state.
    flow = owners.dataflow

    def array_sources(value: Value) -> list[Value]:
        sources = flow.sources(value) if flow.copy_of(value) is None else ()
        return [source for source, _ in sources if flow.graph.num_elements(source) > 1]

    def is_training_value(value: Value) -> bool:
        origin = flow.copy_of(value)
        if origin is not None:
            return origin != leaf and flow.is_differentiated(origin)
        return not flow.is_constant(value) and flow.is_in_pass(value)

    return any(map(is_training_value, reachable([output], array_sources)))


@rule({"norm-over-frozen": "the gradient of a frozen leaf is computed for a norm"})
def _norms_over_frozen(step: Step) -> Iterator[Finding]:
    owners, flow, graph = step.owners, step.owners.dataflow, step.owners.dataflow.graph
    trained_leaves = set(owners.replaced.values())
    frozen_leaves: dict[tuple[int, ...], list[ArgumentLeaf]] = {}
    # A compiler may compute a gradient twice, once for the norm. The second copy is assigned to no leaf.
    unmatched_leaves: dict[tuple[int, ...], set[int]] = {}
    for index, dims in _dimensions(owners).items():
        if index not in trained_leaves and len(dims) > 1:
            frozen_leaves.setdefault(dims, []).append(owners.leaves[index])
        elif index in trained_leaves and flow.is_differentiated(index):
            unmatched_leaves.setdefault(dims, set()).add(index)
    norms = collections.Counter[tuple[int, ...]]()
    for instr_id, instruction in graph.instructions.items():
        if instruction.opcode not in ("reduce", "reduce-window") or flow.phase((instr_id, ())) != "update":
            continue
        values = list(flow.same_size_sources((instruction.proto.operand_ids[0], ()), through_backward=True))
        leaves = {leaf for value in values if (leaf := flow.gradient_of(value)) is not None}
        if leaves:
            for leaf_set in unmatched_leaves.values():
                leaf_set -= leaves
            continue  # the norm of a trained leaf's gradient
        cotangents = (v for v in values if flow.phase(v) == "backward" and not flow.is_constant(v))
        norms.update({_sorted_dims(graph, value) for value in cotangents})
    for dims, count in norms.items():
        for leaf in frozen_leaves.get(dims, [])[: max(count - len(unmatched_leaves.get(dims, ())), 0)]:
            yield leaf_finding("norm-over-frozen", leaf, remedy="take the norm over the gradients of trainable leaves")


def _dimensions(owners: Owners) -> dict[int, tuple[int, ...]]:
    """Return the sorted dimensions of every floating-point leaf, by index of the leaf."""
    graph = owners.dataflow.graph
    return {index: _sorted_dims(graph, value) for value, index in owners.parameters.items() if graph.is_floating(value)}


def _sorted_dims(graph: Graph, value: Value) -> tuple[int, ...]:
    """Return the dimensions other than 1, sorted, since layouts may be transposed."""
    return tuple(sorted(dim for dim in graph.shape(value).dimensions if dim != 1))


# --- copies of arguments for the backward pass -----------------------------------------------------------------------


@rule(
    {
        "residual-copy": "a copy of an argument is kept for the backward pass",
        "frozen-cast": "a frozen argument is held twice: in its own dtype, and in the lower precision "
        "that the step uses",
    }
)
def _residual_copies(step: Step) -> Iterator[Finding]:
    """Find copies of arguments that are kept for the backward pass, and casts of whole frozen arguments."""
    owners, flow = step.owners, step.owners.dataflow
    copies_by_name = {b.operation: b for b in step.report.buffers if b.role == "copies"}
    traced_dtypes = None if step.jaxpr is None else dtypes(step.jaxpr)
    largest: dict[int, Buffer] = {}
    for value in flow.phases:
        index, buffer = flow.copy_of(value), copies_by_name.get(flow.graph.name(value))
        if index is None or buffer is None or flow.phase(value) != "forward" or value not in flow.read_backward:
            continue
        # The compiler makes copies of equal type and size for another layout; a user cannot avoid them.
        graph, parameter = flow.graph, owners.parameter_of[index]
        is_same_type = graph.shape(value).element_type == graph.shape(parameter).element_type
        is_layout_copy = is_same_type and graph.num_elements(value) <= graph.num_elements(parameter)
        if buffer.path != owners.leaves[index].path or is_layout_copy:
            continue
        if index not in largest or buffer.num_bytes > largest[index].num_bytes:
            largest[index] = buffer
    for index, buffer in largest.items():
        leaf = owners.leaves[index]
        detail = f"{buffer.dtype}{list(buffer.shape)} from {buffer.source or buffer.scope}"
        if _is_cast_of_frozen(owners, buffer, index):
            rule, detail = "frozen-cast", f"{detail}, in addition to {format_bytes(leaf.num_bytes)}"
            # Neither a barrier nor jax.checkpoint keeps a compiler from casting all layers before the loop.
            remedy = f"pass it in {buffer.dtype}, since it is frozen"
        elif buffer.source and (traced_dtypes is None or buffer.dtype in traced_dtypes):
            # A copy in any other dtype is made by the compiler, such as the bfloat16 inputs of TPU products.
            rule = "residual-copy"
            remedy = "recompute it with jax.checkpoint around the cast or gather and the product that reads it; or "
            remedy += "compute it once, outside the loop"
        else:
            continue
        yield Finding(rule=rule, path=leaf.path, num_bytes=buffer.num_bytes, detail=detail, remedy=remedy)


@rule({"dequantized-residual": "a quantised frozen weight is kept as floats for the backward pass"})
def _dequantized_residuals(step: Step) -> Iterator[Finding]:
    """Find frozen weights that the forward pass dequantises and keeps as floats for the backward pass."""
    owners, flow = step.owners, step.owners.dataflow
    float_buffers = {b.operation: b for b in step.report.buffers if b.role == "activations" and b.source}
    for value in flow.phases:
        buffer = float_buffers.get(flow.graph.name(value))
        if buffer is None or flow.phase(value) != "forward" or not flow.graph.is_floating(value):
            continue
        ancestors = reachable([value], lambda node: [source for source, _ in flow.sources(node)])
        arguments = {owners.parameters[node]: node for node in ancestors if node in owners.parameters}
        if not arguments or arguments.keys() & set(owners.replaced.values()):
            continue
        size, graph = flow.graph.num_elements(value), flow.graph
        integers = {index: graph.num_elements(node) for index, node in arguments.items() if not graph.is_floating(node)}
        narrow = {index for index, node in arguments.items() if graph.item_type(node)[1] <= 8}
        # Codes are integers of at most 8 bits, one for each weight, or 4-bit codes packed in pairs.
        codes = [index for index, count in integers.items() if index in narrow and size in (count, 2 * count)]
        has_scales = len(arguments) > 1  # scales may be integers, too
        if codes and has_scales:
            leaf = owners.leaves[codes[0]]
            detail = f"{buffer.dtype}{list(buffer.shape)} from {buffer.source}"
            yield Finding(
                rule="dequantized-residual",
                path=leaf.path,
                num_bytes=buffer.num_bytes,
                detail=f"{detail}, in addition to {format_bytes(leaf.num_bytes)}",
                remedy="dequantise it again for each product, with jax.checkpoint around dequantisation and product, "
                "as the weights of lowtide.quantize do",
            )


def _is_cast_of_frozen(owners: Owners, copy: Buffer, leaf: int) -> bool:
    """Return whether a copy holds a whole leaf in fewer bytes, and the leaf is frozen (no output replaces it)."""
    is_whole = math.prod(copy.shape) == owners.dataflow.graph.num_elements(owners.parameter_of[leaf])
    is_narrower = copy.num_bytes < owners.leaves[leaf].num_bytes
    is_frozen = owners.dataflow.is_differentiated(leaf) and leaf not in owners.replaced.values()
    return is_whole and is_narrower and is_frozen


# --- copies in loops -------------------------------------------------------------------------------------------------


# A loop writes slices into its carry in place, unless an operation may read the old values after the write. Then XLA
# first copies the whole array, in every iteration. The source code does not show this copy.
@rule({"copied-in-loop": "a loop copies a whole carried array before it writes a part of it"})
def _copied_in_loops(step: Step) -> Iterator[Finding]:
    """Yield a finding for every carried array of a loop that is copied as a whole and then partly written."""
    owners, graph = step.owners, step.owners.dataflow.graph
    buffers_by_name = {buffer.operation: buffer for buffer in step.report.buffers}
    for instruction in graph.instructions.values():
        if instruction.opcode != "while":
            continue
        root = graph.computations[instruction.proto.called_computation_ids[0]].root_id
        for value in graph.results(root):
            names = map(graph.name, _carried_copies(graph, value))
            copies = [buffers_by_name[name] for name in names if name in buffers_by_name]
            if copies:
                first, leaf = copies[0], owners.dataflow.copy_of((instruction.proto.operand_ids[0], value[1]))
                yield Finding(
                    rule="copied-in-loop",
                    path=first.label if leaf is None else owners.leaves[leaf].path,
                    num_bytes=sum(copy.num_bytes for copy in copies),
                    detail=f"{first.dtype}{list(first.shape)}, {first.source or 'unknown line'}",
                    remedy="make the write depend on all reads of the old values: compute the new values from the "
                    "values read, or write one array after the other; do not carry arrays that are only read",
                )


def _carried_copies(graph: Graph, value: Value) -> list[Value]:
    """Return the copies of a carried array in an iteration; empty unless the iteration also writes a part of it."""
    # The search goes back from the returned value to the parameter of the loop's body, over aliases, copies and partial
    # writes only. Any other source means that the array is computed anew.
    copies: list[Value] = []
    is_partial = False
    body = graph.instructions[value[0]].computation
    visited, frontier = {value}, [value]
    while frontier:  # several paths may lead back to the parameter, one for each branch of a conditional
        value = frontier.pop()
        instruction = graph.instructions[value[0]]
        if instruction.opcode == "parameter" and instruction.computation == body:
            continue
        if instruction.opcode in (*_PARTIAL_WRITES, "copy"):
            is_partial = is_partial or instruction.opcode != "copy"
            copies += [value] if instruction.opcode == "copy" else []
            sources: list[Value] = [(instruction.proto.operand_ids[0], ())]
        else:
            sources = [source for source, edge in graph.sources(value) if edge == Edge.ALIAS]
        if instruction.opcode == "while":  # for an inner loop continue at its initial value; it is checked separately
            sources = sources[:1]
        if not sources:
            return []
        frontier += [source for source in sources if source not in visited]
        visited.update(sources)
    return _largest_branch(graph, copies) if is_partial else []


def _largest_branch(graph: Graph, copies: list[Value]) -> list[Value]:
    """Keep only the copies of the branch with the most copies, since only one branch of a conditional runs."""
    groups: dict[tuple[bool, int | None], dict[int, list[Value]]] = {}
    for copy in copies:
        computation, caller = graph.instructions[copy[0]].computation, graph.caller(copy[0])
        is_branch = caller is not None and graph.instructions[caller].opcode == "conditional"
        key = (is_branch, caller if is_branch else computation)
        groups.setdefault(key, {}).setdefault(computation, []).append(copy)
    return [copy for branches in groups.values() for copy in max(branches.values(), key=len)]


# --- arrays held at once ---------------------------------------------------------------------------------------------


@rule({"stacked-gradients": "the gradients of many microbatches or examples are held at once before they are summed"})
def _stacked_gradients(step: Step) -> Iterator[Finding]:
    owners, graph = step.owners, step.owners.dataflow.graph
    # Compare elements, not bytes: a gradient may have a wider dtype than its weight, or another sharding.
    counts = {owners.leaves[index].path: graph.num_elements(value) for value, index in owners.parameters.items()}
    partial_names = {graph.name(value) for value in owners.dataflow.partial}  # parts of one split product
    gradients = collections.defaultdict[str, list[Buffer]](list)
    for buffer in step.report.peak:  # the largest first
        if buffer.role == "gradients" and buffer.phase == "backward" and buffer.operation not in partial_names:
            if math.prod(buffer.shape) >= counts.get(buffer.path, math.inf) > 0:
                gradients[buffer.path].append(buffer)
    for path, buffers in gradients.items():
        sizes = [math.prod(buffer.shape) for buffer in buffers]
        # Two arrays of one size may be a gradient and a value computed from it. Three are gradients of microbatches.
        if sizes[0] < 2 * counts[path] and len(buffers) < 3:
            continue
        first = buffers[0]
        gradient_bytes = first.num_bytes * counts[path] // sizes[0]
        yield Finding(
            rule="stacked-gradients",
            path=path,
            num_bytes=sum(buffer.num_bytes for buffer in buffers) - gradient_bytes,
            detail=f"{'' if len(buffers) == 1 else f'{len(buffers)} × '}{first.dtype}{list(first.shape)} from "
            f"{first.source or first.scope}",
            remedy="add each gradient to a sum: lowtide.accumulate(grad_fn, num_microbatches=...), or a scan that "
            "clips each gradient and carries the sum",
        )


@rule({"checkpoint-undone": "jax.checkpoint saves no memory: the compiler keeps the values, or recomputes all at once"})
def _undone_checkpoints(step: Step) -> Iterator[Finding]:
    flow = step.owners.dataflow
    names = {flow.graph.name(value) for value in flow.merged}
    merged: dict[str, list[Buffer]] = {}
    recomputed: dict[tuple[object, ...], list[Buffer]] = {}
    for buffer in step.report.peak:
        if buffer.role == "activations" and buffer.operation in names:
            merged.setdefault(buffer.source or buffer.scope, []).append(buffer)
        elif buffer.role == "recomputed" and "while/body" not in buffer.scope:
            recomputed.setdefault((buffer.scope, buffer.source, buffer.shape), []).append(buffer)
    for buffers in recomputed.values():
        if len(buffers) > 2:  # recomputed values of several layers are live at the same time
            merged.setdefault(buffers[0].source or buffers[0].scope, []).extend(buffers)
    for location, buffers in merged.items():
        yield Finding(
            rule="checkpoint-undone",
            path=location,
            num_bytes=sum(buffer.num_bytes for buffer in buffers),
            detail=f"{len(buffers)} × {buffers[0].dtype}{list(buffers[0].shape)} and similar",
            remedy="put the layers into jax.lax.scan, with jax.checkpoint around its body; outside loops, the "
            "compilers for TPUs and GPUs keep the layers apart, and the CPU compiler before JAX 0.12 does not",
        )


def logits(owners: Owners) -> tuple[int, Callable[[Buffer], bool]]:
    """Return the number of columns of logits, and a predicate for buffers that are logits."""
    # Logits have a row for each token of an integer argument, and a column for each word of the vocabulary: the largest
    # dimension of a differentiated leaf, which is not square. Square weights, as of graph networks, have no vocabulary.
    graph = owners.dataflow.graph
    tokens, widths = set[int](), set[int]()
    for value, index in owners.parameters.items():
        dims = graph.shape(value).dimensions
        if not graph.is_floating(value) and len(dims) >= 1:
            tokens.add(graph.num_elements(value))
        elif owners.dataflow.is_differentiated(index) and len(dims) >= 2 and sorted(dims)[-2] < max(dims):
            widths.add(max(dims))
    widest = max(widths, default=0)
    sizes = {count * widest for count in tokens if count > 1}
    if _is_hidden_width(owners, widest, sizes):
        sizes = set[int]()

    def is_logits(buffer: Buffer) -> bool:
        return buffer.role in COMPUTED_ROLES and widest in buffer.shape and math.prod(buffer.shape) in sizes

    return widest, is_logits


def _is_hidden_width(owners: Owners, columns: int, sizes: set[int]) -> bool:
    """Return whether a product of the logits' size is an operand of a forward product, as in a wide hidden layer."""
    flow, graph = owners.dataflow, owners.dataflow.graph
    for instr_id, instruction in graph.instructions.items():
        if instruction.opcode not in _PRODUCTS or flow.phase((instr_id, ())) != "forward":
            continue
        for operand in instruction.proto.operand_ids:
            value = (operand, ())
            if graph.num_elements(value) in sizes and columns in graph.shape(value).dimensions:
                opcodes = (graph.instructions[source[0]].opcode for source in flow.same_size_sources(value))
                if any(opcode in _PRODUCTS for opcode in opcodes):
                    return True
    return False


@rule({"whole-logits": "the logits of all tokens are held at once"})
def _whole_logits(step: Step) -> Iterator[Finding]:
    columns, is_logits = logits(step.owners)
    buffers = [buffer for buffer in step.report.peak if is_logits(buffer)]
    total = sum(buffer.num_bytes for buffer in buffers)
    if buffers and total >= _MIN_LOGITS_SHARE * step.report.device_bytes:
        yield Finding(
            rule="whole-logits",
            path=buffers[0].label,
            num_bytes=total,
            detail=f"{len(buffers)} × {buffers[0].dtype}{list(buffers[0].shape)}, "
            f"{buffers[0].source or 'unknown line'}",
            remedy=f"compute the loss in chunks of tokens: lowtide.losses.chunked_cross_entropy ({columns} columns)",
        )


# --- mesh and padding ------------------------------------------------------------------------------------------------


@rule({"replicated": "every device of the mesh holds all of a large argument"})
def _replicated(step: Step) -> Iterator[Finding]:
    for leaf in step.owners.leaves:
        if leaf.num_replicas > 1:
            yield leaf_finding(
                "replicated",
                leaf,
                detail=f"on {leaf.num_replicas} devices",
                remedy="shard it over an axis of the mesh: NamedSharding(mesh, PartitionSpec('axis'))",
            )


@rule({"padded": "a large buffer is mostly padding"}, needs=())
def _padded_buffers(step: Step) -> Iterator[Finding]:
    for buffer in step.report.peak:
        if buffer.padding_bytes * 2 > buffer.num_bytes:
            yield Finding(
                rule="padded",
                path=buffer.label,
                num_bytes=buffer.padding_bytes,
                detail=f"{buffer.dtype}{list(buffer.shape)} takes {format_bytes(buffer.num_bytes)}",
                remedy="move the short axis away from the last two, or merge it with its neighbour",
            )
