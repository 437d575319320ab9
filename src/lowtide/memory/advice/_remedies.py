"""Remedies (changes that lower the memory of a step), ranked by estimated or compiled savings.

An estimate removes buffers from the report's timeline and computes the new peak. So buffers that are not live at the
peak add nothing to the estimate. Remedies that only change how the step is called (donation, sharding, the batch) can
be applied and compiled; their saving is then the compiler's figure. For other remedies the estimate is an upper bound,
since the replacement of a buffer (recomputation, transfers) also takes memory.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ...core import format_bytes
from ...hlo import ArgumentLeaf
from ...report import COMPUTED_ROLES, Buffer, MemoryReport, live_bytes
from ...targets import Target
from .._analysis import Program, compile, examine
from .._job import Job
from .._owners import Owners
from .._roles import Role
from ._findings import Finding
from ._lint import logits, run_rules

_LOSS_CHUNKS = 8
_MOMENTS = re.compile(r"/(mu|nu|nu_max|m1|exp_avg|exp_avg_sq|trace)(/|$)")
"""Pattern in the paths of state that `lowtide.optim.low_precision` quantises."""
_MIN_QUANTIZED_SIZE = 4096
"""Elements of the smallest leaf that `lowtide.optim.low_precision` quantises."""
_EIGHT_BIT_SAVING = 1 - (1 + 4 / 256) / 4
"""Share of float32 bytes that 8-bit codes save: 1 byte plus a scale of 4 bytes per 256 elements, versus 4 bytes."""
_MIN_SHARE = 0.01
"""Remedies that save less than this share of the device bytes are not listed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change that lowers the memory of a step.

    Examples:
        >>> print(Remedy(kind="donate", action="donate argument 0 (params)", estimated_bytes=2**30))
        donate: donate argument 0 (params), saves about 1.00 GiB (estimated)
    """

    kind: str
    """``donate``, ``split-frozen``, ``offload-optimizer``, ``low-precision-optimizer``, ``recompute``, ``chunk-loss``,
    ``shard``, ``smaller-batch`` or a rule of `lowtide.memory.lint`."""
    action: str
    """Text that describes the change."""
    estimated_bytes: int
    """Device bytes that the change saves at the peak, estimated from the report."""
    range_bytes: tuple[int, int] | None = None
    """Least and most bytes that the change saves, if the report gives only a range; otherwise None."""
    compiled_bytes: int | None = None
    """Device bytes that the change saves when compiled; None if it was not compiled."""
    apply: Callable[[], Program] | None = dataclasses.field(default=None, repr=False, compare=False)
    """Function that compiles the step with the remedy; None if the step's code has to change, or is not available."""

    @property
    def saving_bytes(self) -> int:
        """Compiled saving if there is one, otherwise the estimate."""
        return self.estimated_bytes if self.compiled_bytes is None else self.compiled_bytes

    def __str__(self) -> str:
        low, high = self.range_bytes or (self.estimated_bytes, self.estimated_bytes)
        if self.compiled_bytes is not None:
            figure = f"{format_bytes(self.compiled_bytes)} (compiled)"
        elif low == high:
            figure = f"about {format_bytes(high)} (estimated)"
        else:
            figure = f"{f'{format_bytes(low)} to' if low else 'up to'} {format_bytes(high)} (estimated)"
        return f"{self.kind}: {self.action}, saves {figure}"


def remedies(
    fn: Callable[..., Any],
    *args: Any,
    target: Target | str | None = None,
    roles: Mapping[str, Role] | None = None,
    batch: str = "batch",
    verify: bool = True,
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> tuple[Remedy, ...]:
    """Rank the changes that would lower the memory of a step.

    Args:
        fn: the step, as in `lowtide.memory.analyze`.
        *args: its arguments, or shapes of them.
        target: target to compile for.
        roles: as in `lowtide.memory.analyze`.
        batch: the role whose leaves have the batch as their leading axis.
        verify: whether to compile the step with every remedy that only changes the step's call, to measure the saving.
        donate_argnums: as in `jax.jit`.
        static_argnums: as in `jax.jit`.
        **kwargs: keyword arguments of `fn`.

    Returns:
        Remedies that save at least 1 % of the device bytes, the largest saving first.

    Raises:
        Exception: any exception of `lowtide.memory.analyze`.

    Memory:
        Nothing is allocated on the target.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
        >>> [r.kind for r in remedies(lambda w, g: w - 0.1 * g, w, w, roles={"params": 0})]
        ['donate']
    """
    options: Any = {"donate_argnums": donate_argnums, "static_argnums": static_argnums, "roles": roles}
    return advise(Job(fn=fn, args=args, kwargs=kwargs, **options), target, batch=batch, verify=verify)[1]


def advise(
    job: Job, target: Target | str | None = None, *, batch: str = "batch", verify: bool = False
) -> tuple[MemoryReport, tuple[Remedy, ...]]:
    """Report the bytes of a job, and rank the changes that would lower them, with one compilation.

    Args:
        job: the step.
        target: target to compile for.
        batch: as in `remedies`.
        verify: as in `remedies`; True adds one compilation for each remedy that only changes the step's call.

    Returns:
        The report, and the remedies as in `remedies` (none if the compiler wrote no dump).

    Raises:
        Exception: any exception of `lowtide.memory.analyze`.
    """
    call = _Call(job, target)
    program = call.compile()
    report, owners = examine(program, job.roles)
    if owners is None:
        return report, ()
    candidates = suggest(report, owners, run_rules(owners, report, program.jaxpr), call, batch)
    if verify:
        candidates = tuple(_verify(remedy, report) for remedy in candidates)
    return report, ranked(candidates, report)


def ranked(candidates: Iterable[Remedy], report: MemoryReport) -> tuple[Remedy, ...]:
    """Return the remedies that save at least `_MIN_SHARE` of the device bytes, the largest saving first."""
    significant = [remedy for remedy in candidates if remedy.saving_bytes >= _MIN_SHARE * report.device_bytes]
    return tuple(sorted(significant, key=lambda remedy: -remedy.saving_bytes))


def _verify(remedy: Remedy, report: MemoryReport) -> Remedy:
    if remedy.apply is None:
        return remedy
    try:
        saved_bytes = report.device_bytes - remedy.apply().report().device_bytes
    except Exception as error:
        # A step that depends on its batch size or shardings does not compile with others. Then keep the estimate.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return dataclasses.replace(remedy, action=f"{remedy.action} (compilation failed: {reason})", apply=None)
    return dataclasses.replace(remedy, compiled_bytes=saved_bytes)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A step with its arguments and target; `compile` compiles it, and the other methods return changed calls."""

    job: Job
    target: Target | str | None

    def compile(self) -> Program:
        job = self.job
        options: dict[str, Any] = {"donate_argnums": job.donate_argnums, "static_argnums": job.static_argnums}
        return compile(job.fn, *job.args, target=self.target, **options, **job.kwargs)

    def with_donation(self, position: int, donated_positions: Iterable[int], keywords: Iterable[str]) -> _Call:
        """Return the call with one more donated argument."""
        job = dataclasses.replace(self.job, donate_argnums=tuple(sorted({*donated_positions, position})))
        if hasattr(job.fn, "trace") and hasattr(job.fn, "lower"):
            # A jitted function keeps its other donations. Static keyword arguments, those not in `keywords`, are bound.
            static = {key: value for key, value in job.kwargs.items() if key not in set(keywords)}
            dynamic = {key: value for key, value in job.kwargs.items() if key not in static}
            job = dataclasses.replace(job, fn=functools.partial(job.fn, **static), kwargs=dynamic)
        return _Call(job, self.target)

    def with_argument(self, argument: int, change: Callable[[Any], Any]) -> _Call:
        args = list(self.job.args)
        args[argument] = jax.tree.map(change, args[argument])
        return _Call(dataclasses.replace(self.job, args=tuple(args)), self.target)


def suggest(
    report: MemoryReport, owners: Owners, findings: Sequence[Finding], call: _Call | None = None, batch: str = "batch"
) -> tuple[Remedy, ...]:
    """Return the remedies for a report, with estimated savings; without a `call`, `apply` has the value None."""
    candidates = [*_donations(report, owners, findings, call), *_from_findings(report, findings)]
    candidates += _optimizer_state(report, owners)
    candidates += [*_recomputations(report), *_chunked_loss(report, owners), *_sharded_arguments(report, owners, call)]
    candidates += _smaller_batch(report, owners, call, batch)
    return tuple(candidates)


def _donations(
    report: MemoryReport, owners: Owners, findings: Sequence[Finding], call: _Call | None
) -> Iterable[Remedy]:
    arguments: dict[int | str, list[ArgumentLeaf]] = {}
    undonated = {finding.path for finding in findings if finding.rule == "undonated-state"}
    for leaf in owners.leaves:
        if leaf.path in undonated:
            arguments.setdefault(leaf.argument, []).append(leaf)
    for argument, leaves in arguments.items():
        paths = {leaf.path for leaf in leaves}
        results = {index: value for value, index in owners.replaced.items() if owners.leaves[index].path in paths}
        # A donated buffer serves only one output, even if several outputs are computed from the argument.
        outputs = {owners.path_of(value) for value in results.values()}
        output_buffers = (b for b in report.buffers if b.role == "outputs" and b.dtype != "" and b.path in outputs)
        buffer_ids = {id(b) for b in output_buffers if (b.start, b.end) == (0, len(report.moments) - 1)}
        estimate = _saving(report, lambda b, buffer_ids=buffer_ids: float(id(b) in buffer_ids))
        apply = None
        if call is not None and isinstance(argument, int):
            donated = {leaf.argument for leaf in owners.leaves if leaf.donated and isinstance(leaf.argument, int)}
            apply = call.with_donation(argument, donated, {str(leaf.argument) for leaf in owners.leaves}).compile
        # The saving may be zero: XLA copies a donated argument if the program reads it after writing the result.
        yield Remedy(
            kind="donate",
            action=f"donate argument {argument!r} ({_join_roles(report, paths)})",
            estimated_bytes=estimate,
            range_bytes=(0, estimate),
            apply=apply,
        )


def _from_findings(report: MemoryReport, findings: Sequence[Finding]) -> Iterable[Remedy]:
    frozen_paths = {f.path for f in findings if f.rule == "optimizer-over-frozen"}
    if frozen_paths:
        yield Remedy(
            kind="split-frozen",
            action=f"initialise the optimizer with trainable leaves only: {_join_names(frozen_paths)} get no gradient",
            estimated_bytes=_saving(report, lambda b: float(b.phase == "argument" and b.path in frozen_paths)),
        )
    for path in sorted({f.path for f in findings if f.rule == "residual-copy"}):
        yield Remedy(
            kind="residual-copy",
            action=f"recompute the copy of {path} in the backward pass, or compute it once, outside the loop",
            estimated_bytes=_saving(report, lambda b, p=path: float(b.role == "copies" and b.path == p)),
        )
    for finding in (f for f in findings if f.rule == "frozen-cast"):
        leaf = next(b for b in report.buffers if b.phase == "argument" and b.path == finding.path)
        kept_share = finding.num_bytes / leaf.num_bytes

        def share(b: Buffer, path: str = finding.path, kept_share: float = kept_share) -> float:
            return (b.path == path) * ((1 - kept_share) if b.phase == "argument" else float(b.role == "copies"))

        yield Remedy(
            kind="frozen-cast",
            action=f"pass {finding.path} in {finding.detail.partition('[')[0]}, as the step uses it: it is frozen",
            estimated_bytes=_saving(report, share),
        )
    unchanged_bytes = collections.Counter[str]()
    for finding in (f for f in findings if f.rule == "returned-unchanged"):
        unchanged_bytes[finding.path] += finding.num_bytes
    for path, num_bytes in unchanged_bytes.items():
        yield Remedy(
            kind="returned-unchanged",
            action=f"leave {path} out of the result",
            estimated_bytes=min(num_bytes, report.device.output_bytes - report.device.alias_bytes),
        )


def _optimizer_state(report: MemoryReport, owners: Owners) -> Iterable[Remedy]:
    """Yield remedies for optimizer state: leaves that the update replaces and no pass of differentiation reads."""
    flow = owners.dataflow
    state_leaves = {
        index
        for index in owners.replaced.values()
        if not flow.is_differentiated(index) and owners.leaves[index].kept and not owners.leaves[index].on_host
    }
    if not state_leaves or "backward" not in flow.phases.values():
        return
    paths = {owners.leaves[index].path for index in state_leaves}
    moment_paths = {path for path in paths if _MOMENTS.search(path)}
    # A step that does not donate its state holds it twice: as an argument and as a result.
    results = {
        owners.path_of(value): owners.leaves[index].path
        for value, index in owners.replaced.items()
        if index in state_leaves
    }

    def state_path(b: Buffer) -> str | None:
        return b.path if b.phase == "argument" else results.get(b.path) if b.role == "outputs" else None

    def packed_share(b: Buffer) -> float:
        is_wide = state_path(b) in moment_paths and b.dtype == "f32" and math.prod(b.shape) >= _MIN_QUANTIZED_SIZE
        return _EIGHT_BIT_SAVING * is_wide

    yield Remedy(
        kind="low-precision-optimizer",
        action=f"store {_join_roles(report, moment_paths)} in 8 bits with lowtide.optim.low_precision(tx): "
        f"{_join_names(moment_paths)}",
        estimated_bytes=_saving(report, packed_share),
    )
    if report.target.platform == "cpu":
        return  # a CPU has only one memory
    # Two leaves are on the device while streaming.
    staging = 2 * max(owners.leaves[index].num_bytes for index in state_leaves)
    estimate = _saving(report, lambda b: float(state_path(b) in paths)) - staging
    yield Remedy(
        kind="offload-optimizer",
        action=f"keep {_join_roles(report, paths)} in host memory, streamed leaf by leaf: {_join_names(paths)}",
        estimated_bytes=max(estimate, 0),
    )


def _chunked_loss(report: MemoryReport, owners: Owners) -> Iterable[Remedy]:
    widest, is_logits = logits(owners)
    estimate = _saving(report, lambda b: (1 - 1 / _LOSS_CHUNKS) * is_logits(b))
    if estimate:
        yield Remedy(
            kind="chunk-loss",
            action=f"compute the loss in {_LOSS_CHUNKS} chunks of tokens with lowtide.losses.chunked_cross_entropy, so "
            f"that no array holds {widest} columns for all tokens",
            estimated_bytes=estimate,
        )


def _sharded_arguments(report: MemoryReport, owners: Owners, call: _Call | None) -> Iterable[Remedy]:
    arguments: dict[int | str, list[int]] = {}
    for index, leaf in enumerate(owners.leaves):
        if leaf.num_replicas > 1:
            arguments.setdefault(leaf.argument, []).append(index)
    for argument, positions in arguments.items():
        paths = {owners.leaves[index].path for index in positions if _is_divisible(owners, index)}
        count = owners.leaves[positions[0]].num_replicas
        outputs = {
            owners.path_of(value) for value, index in owners.replaced.items() if owners.leaves[index].path in paths
        }

        def sharded_share(b: Buffer, p: set[str] = paths, o: set[str] = outputs, share: float = 1 - 1 / count) -> float:
            is_argument, is_output = b.phase == "argument" and b.path in p, b.role == "outputs" and b.path in o
            return share * (is_argument or is_output)

        yield Remedy(
            kind="shard",
            action=f"shard argument {argument!r} ({_join_roles(report, paths)}) over the {count} devices that each "
            "hold all of it",
            estimated_bytes=_saving(report, sharded_share),
            apply=_compile_sharded(call, argument, count),
        )


def _is_divisible(owners: Owners, leaf: int) -> bool:
    value = owners.parameter_of.get(leaf)
    dims = owners.dataflow.graph.shape(value).dimensions if value is not None else ()
    return any(dim and dim % owners.leaves[leaf].num_replicas == 0 for dim in dims)


def _compile_sharded(call: _Call | None, argument: int | str, count: int) -> Callable[[], Program] | None:
    """Return `compile` of a call whose argument has leaves sharded along their first axis divisible by `count`."""
    if call is None or not isinstance(argument, int):
        return None

    def shard_leaf(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not sharding.is_fully_replicated:
            return leaf
        axis = next((index for index, dim in enumerate(leaf.shape) if dim and dim % count == 0), None)
        if axis is None:
            return leaf
        spec = PartitionSpec(*[None] * axis, sharding.mesh.axis_names)
        new_sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=new_sharding)

    return call.with_argument(argument, shard_leaf).compile


def _smaller_batch(report: MemoryReport, owners: Owners, call: _Call | None, batch: str) -> Iterable[Remedy]:
    rows = zip(owners.leaves, owners.roles, strict=True)
    leaves = [leaf for leaf, role in rows if role == batch and leaf.kept and leaf.num_bytes]
    graph = owners.dataflow.graph
    shapes = {index: graph.shape(value).dimensions for value, index in owners.parameters.items()}
    batch_shapes = [shapes[index] for index, leaf in enumerate(owners.leaves) if leaf in leaves and index in shapes]
    lengths = {dims[0] if dims else 0 for dims in batch_shapes}
    if len(lengths) != 1 or (length := lengths.pop()) < 2 or length % 2:
        return
    weight_shapes = {tuple(sorted(dims)) for index, dims in shapes.items() if owners.leaves[index] not in leaves}

    def scales(buffer: Buffer) -> bool:
        # A computed buffer is assumed to grow with the batch if its size is a multiple of the batch size. Buffers with
        # the shape of a weight are excluded, since gradients have such shapes.
        if buffer.phase == "argument":
            return buffer.role == batch
        elements = math.prod(buffer.shape)
        is_computed = buffer.role in COMPUTED_ROLES and buffer.phase != "update"
        is_weight = tuple(sorted(buffer.shape)) in weight_shapes
        return is_computed and elements > 1 and elements % length == 0 and not is_weight

    apply = None
    argument = (call.job.roles or {}).get(batch) if call is not None else None
    if call is not None and isinstance(argument, int):
        apply = call.with_argument(argument % len(call.job.args), _halve).compile
    action = f"use half of the {length} examples"
    if "backward" in owners.dataflow.phases.values():
        kept_bytes = sum(leaf.num_bytes for leaf in leaves) // 2
        action += "; lowtide.accumulate(grad_fn, num_microbatches=2) gives the same values"
        if kept_bytes >= _MIN_SHARE * report.device_bytes:
            action += f" but keeps the other half ({format_bytes(kept_bytes)})"
    estimate = _saving(report, lambda b: 0.5 * scales(b))
    yield Remedy(kind="smaller-batch", action=action, estimated_bytes=estimate, apply=apply)


def _halve(leaf: Any) -> Any:
    if not getattr(leaf, "shape", ()):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct((leaf.shape[0] // 2, *leaf.shape[1:]), leaf.dtype, sharding=sharding)


def _join_roles(report: MemoryReport, paths: set[str]) -> str:
    roles = {b.role for b in report.buffers if b.phase == "argument" and b.path in paths}
    return ", ".join(sorted(roles - {"other"})) or _join_names(paths)


# --- estimates -------------------------------------------------------------------------------------------------------


def _saving(report: MemoryReport, share: Callable[[Buffer], float]) -> int:
    """Return the decrease of the device's peak in bytes when each buffer loses a share (0 to 1) of its bytes."""
    device_buffers = [b for b in report.buffers if b.space == "device"]
    reduced_buffers = [dataclasses.replace(b, num_bytes=round(b.num_bytes * (1 - share(b)))) for b in device_buffers]
    moments = len(report.moments)
    return max(live_bytes(device_buffers, moments)) - max(live_bytes(reduced_buffers, moments))


def _recomputations(report: MemoryReport) -> Iterable[Remedy]:
    """Yield a remedy for each function whose values could be recomputed."""
    # The largest saving is everything that the function keeps for the backward pass. The smallest saving excludes the
    # memory that recomputation needs.
    groups: dict[str, list[Buffer]] = {}
    for buffer in report.peak:
        if _is_residual(buffer, report):
            groups.setdefault(_source_function(buffer), []).append(buffer)
    recomputed_functions = {_source_function(buffer) for buffer in report.buffers if buffer.phase == "recompute"}
    for function, buffers in sorted(groups.items(), key=lambda item: -sum(b.num_bytes for b in item[1]))[:5]:
        shapes = _join_names(f"{b.dtype}{list(b.shape)}" for b in buffers)
        advice = "put jax.checkpoint around it, or name the values with checkpoint_name and offload them"
        if report.target.platform == "cpu" and not any(map(_is_in_loop, buffers)):
            if not _are_layers(buffers):
                continue
            advice = (
                "put the layers into jax.lax.scan, with jax.checkpoint around its body (outside a loop, the CPU "
                "compiler before JAX 0.12 merges recomputation with the forward pass, or does all of it at once)"
            )
        # Count the function's buffers at all times: before the peak, other buffers hold the same arrays.
        saved_bytes = _saving(
            report, lambda b, function=function: float(_is_residual(b, report) and _source_function(b) == function)
        )
        least_bytes = max(saved_bytes - _recomputation_bytes(buffers, function in recomputed_functions), 0)
        action, range_bytes = f"recompute the residuals of {function} ({shapes}): {advice}", (least_bytes, saved_bytes)
        yield Remedy(kind="recompute", action=action, estimated_bytes=least_bytes, range_bytes=range_bytes)


def _is_residual(buffer: Buffer, report: MemoryReport) -> bool:
    """Return whether a buffer is kept for the backward pass; on a CPU, recomputed values outside loops also count."""
    # The CPU compiler may run recomputation outside loops all at once, so that its values are live at the same time.
    is_at_once = report.target.platform == "cpu" and not _is_in_loop(buffer)
    return buffer.role == "activations" or (buffer.role == "recomputed" and is_at_once)


def _recomputation_bytes(buffers: Sequence[Buffer], is_recomputed: bool) -> int:
    """Return the bytes that recomputation itself needs: the function's inputs, and the largest array of one layer."""
    # The inputs are assumed to be the smallest array that is kept in each layer, such as the input of a block. If the
    # function is already recomputed and keeps one array, the inputs are that array.
    groups = _group_buffers(buffers)
    if len(groups) < 2 and not is_recomputed:
        return 0
    layer_counts = [(group[0].shape[:1] or (1,))[0] if key is group[0] else len(group) for key, group in groups.items()]
    sizes = [sum(buffer.num_bytes for buffer in group) for group in groups.values()]
    floating_sizes = [
        size for size, group in zip(sizes, groups.values(), strict=True) if group[0].dtype[:1] in ("f", "b", "c")
    ]
    return min(floating_sizes, default=0) + max(
        size // max(count, 1) for size, count in zip(sizes, layer_counts, strict=True)
    )


def _group_buffers(buffers: Sequence[Buffer]) -> dict[object, list[Buffer]]:
    """Group a function's buffers: each loop's stack forms a group; equal buffers of unrolled layers form a group."""
    groups: dict[object, list[Buffer]] = {}
    for buffer in buffers:
        is_stack = buffer.operation.startswith(("while", "parameter"))
        groups.setdefault(buffer if is_stack else (buffer.scope, buffer.source, buffer.shape), []).append(buffer)
    return groups


def _are_layers(buffers: Sequence[Buffer]) -> bool:
    """Return whether at least half of the bytes are in arrays that occur three times or more, like unrolled layers."""
    repeated_bytes = [b.num_bytes for group in _group_buffers(buffers).values() if len(group) > 2 for b in group]
    return 2 * sum(repeated_bytes) >= sum(b.num_bytes for b in buffers)


def _is_in_loop(buffer: Buffer) -> bool:
    is_random = buffer.dtype.startswith("u")  # random bits, which XLA makes in separate loops
    return not is_random and ("while/body" in buffer.scope or buffer.operation.startswith(("while", "parameter")))


def _source_function(buffer: Buffer) -> str:
    """Return the file and function of a buffer's source line, ``train.py (block)``; without a line, its scope."""
    return re.sub(r":\d+ \(", " (", buffer.source) or buffer.scope


def _join_names(names: Iterable[str], limit: int = 3) -> str:
    """Join the first `limit` distinct names in sorted order, and append the number of names left out."""
    unique_names = list(dict.fromkeys(sorted(names)))
    suffix = f" and {len(unique_names) - limit} more" if len(unique_names) > limit else ""
    return ", ".join(unique_names[:limit]) + suffix
