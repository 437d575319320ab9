"""Low-precision optimizer state, and bfloat16 weights updated as if they were wider, for any Optax optimizer.

The state is stored packed, and the wrapped transformation gets it decoded. XLA decodes it inside the update, so no
decoded copy of the whole state exists. Exception: on a mesh whose shardings are unknown, the update may hold the whole
state in float32. Limits: a change of a number by less than half of the distance between two codes is lost. In bfloat16,
stochastic rounding keeps such changes on average. Blocks run along the last axes: a mesh that shards these axes should
give whole blocks to each device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jaxtyping import Array, Int

from ..core import (
    ConfigError,
    LowtideError,
    PlacementError,
    PlacementWarning,
    SelectionError,
    StructureError,
    Tree,
    check_integer,
    combine,
    explicit_mesh,
    is_array_like,
    leaves_with_paths,
    map_with_paths,
    memory_space,
    split_static,
    traced_device,
    varying_axes,
)
from ..core._compat import laid_out_on_tpus
from ..offload import (
    check_shardings,
    check_transformation,
    explicit_shardings,
    is_part,
    is_taken_apart,
    num_devices,
    state_shardings,
    stream,
    traced_program,
    without_explicit_axes,
)
from ._formats import FORMATS
from ._packed import BFLOAT16, PackedArray, is_packed, refuse_derivatives, scales_of
from ._selection import check_bits, moments, optimizer_paths, parse_patterns
from ._weights import convert_residuals, init_residuals, is_narrow, narrow_updates, require_bfloat16, widen

LEAST_SIZE = 4096
"""Leaves with fewer elements stay in their dtype, as in bitsandbytes."""
_BLOCK_BYTES = 2**25


class LowPrecisionState(NamedTuple):
    """State of `low_precision`."""

    step: Int[Array, ""]
    """Number of steps so far; stochastic rounding depends on it."""
    inner: Tree
    """State of the wrapped transformation, with a `PackedArray` in place of each packed array."""
    residuals: Tree = ()
    """Residual of each bfloat16 parameter: its float32 value minus the stored value. None where no residual is kept; an
    empty tuple without ``weights``."""

    @property
    def has_residuals(self) -> bool:
        """Whether the state was made with ``weights``."""
        return not (isinstance(self.residuals, tuple) and not self.residuals)


def low_precision(
    tx: optax.GradientTransformation,
    format: str | Mapping[str, str] | None = "8bit",
    *,
    weights: str | None = None,
    match: str | None = None,
    least_size: int = LEAST_SIZE,
    seed: int = 0,
    shardings: Tree = None,
) -> optax.GradientTransformationExtraArgs:
    """Store an optimizer's state in 8 or 4 bits, or in bfloat16; update bfloat16 weights as if they were wider.

    Args:
        tx: any Optax transformation, also a chain or a wrapper. Wrappers that leave the state unchanged in some steps
            are cheaper around this transformation (see Returns).
        format: ``8bit`` (bitsandbytes' dynamic map, blocks of 256), ``companded`` (8 bits, blocks of 128), ``fp8``
            (e4m3, blocks of 256), ``4bit`` (companded, blocks of 64; second moments have no code for 0) or
            ``bfloat16`` (stochastically rounded). Or a mapping from regular expressions on paths to these formats,
            which replaces `match`; the first expression that matches a path decides. Or None, to use only `weights`.
        weights: how bfloat16 parameters keep updates below 1/256 of their value; None loses these. ``split`` stores a
            weight's residual, the rounding error of its bfloat16 value, in 8 bits; ``kahan`` stores it in bfloat16.
            ``stochastic`` stores no residual and rounds weights stochastically. With `weights`, `tx` gets parameters
            and gradients in float32. The updates are bfloat16: apply them unchanged with `optax.apply_updates`.
        match: a regular expression on the paths of the state's leaves, such as ``0/mu/layers/w``. It has to match the
            whole path, with or without slashes around it (``/0/mu/``). The floating-point arrays that it selects are
            packed. The default selects the moments of Optax's optimizers (``mu``, ``nu``, ``nu_max``, ``m1``,
            ``exp_avg``, ``exp_avg_sq`` and ``trace``), whatever the names of the parameters.
        least_size: leaves with fewer elements are not packed; weights with fewer elements have float32 residuals.
        seed: seed of stochastic rounding.
        shardings: for parameters on a mesh, a tree of `jax.sharding.NamedSharding` with the structure of the
            parameters, as in `lowtide.offload.optimizer`. Each device then updates its own shard block by block.
            `lt.Trainer` sets this argument if this transformation is the outermost, or directly inside `lt.train.ema`.

    Returns:
        A transformation whose state holds packed leaves. Its updates are those of `tx` for the decoded state. Call its
        ``update`` under `jax.jit` with the state donated. Wrappers that leave the state unchanged in some steps, such
        as `optax.MultiSteps`, may be part of `tx`. If they wrap this transformation instead, these steps do not decode
        the state.

    Raises:
        ConfigError: for an invalid `tx`, format, regular expression, size, seed or leaf of `shardings`, for neither a
            format nor `weights`, and for a `match` without effect. From ``init``: for `weights` without bfloat16
            parameters, a second `low_precision` inside, and a selected leaf in host memory. Also for moments that need
            more bits than the format has. Moments of centered RMSProp and the average of `lt.train.ema` need float32.
            Moments of Momo and the slow mean of AdEMAMix need 16 bits; moments of D-Adaptation need 8 bits.
            From ``update``: for `weights` without parameters.
        SelectionError: from ``init``, when no leaf of the state is selected.
        PlacementError: from ``update``, for a state in host memory.
        StructureError: from ``update``, for a state of another transformation or of other parameters; for gradients or
            `shardings` of another structure; for a `tx` that changes the structure of its state. Also for a
            derivative through the packed state, as in meta-learning.

    Warns:
        PlacementWarning: from ``init``, when a regular expression packs no leaf: it matches no leaf, earlier
            expressions match its leaves, or its leaves are small or not real floating-point arrays. Also when it packs
            a copy of the parameters. From ``update``, when it is traced for a mesh without `shardings`; GPUs and
            bfloat16 do not need `shardings`.

    Memory:
        About 1.02 bytes (``8bit``, ``fp8``), 1.03 (``companded``), 0.56 (``4bit``) or 2 (``bfloat16``) for each number
        of the state; 1 (``split``) or 2 (``kahan``) for each weight. So AdamW with ``8bit`` and ``split`` needs 5.03
        bytes a parameter including the weight, and 7.03 with its bfloat16 gradient.
        An update that is separable by rows holds one block of rows in float32 at a time (on a mesh, give `shardings`).

    Examples:
        >>> tx = low_precision(optax.adam(1e-3))
        >>> state = tx.init({"w": jnp.ones((64, 64))})
        >>> state.inner[0].mu["w"].codes.dtype.name
        'uint8'

    References:
        Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861). FlashOptim
        (arXiv:2602.23349), for ``split``.
    """
    check_transformation(tx)
    patterns = parse_patterns(format, match, weights)
    check_integer("least_size", least_size, hint=f"leave it out to use {LEAST_SIZE}")
    check_integer("seed", seed, -(2**31), 2**32 - 1, hint="leave it out to use 0")
    check_shardings(shardings)
    is_default = match is None and not isinstance(format, Mapping)
    transformation = _LowPrecision(
        optax.with_extra_args_support(tx), patterns, is_default, weights, least_size, seed, shardings
    )
    return optax.GradientTransformationExtraArgs(transformation.init, transformation.update)


def with_shardings(tx: optax.GradientTransformation, shardings: Tree) -> optax.GradientTransformation:
    """Return a `low_precision` transformation with these shardings, unless it already has shardings.

    Args:
        tx: any Optax transformation.
        shardings: as in `low_precision`.

    Returns:
        The transformation with these shardings; `tx` itself if it has shardings or is not from `low_precision`.
    """
    transformation = getattr(tx.init, "__self__", None)
    if not isinstance(transformation, _LowPrecision) or transformation.shardings is not None:
        return tx
    transformation = dataclasses.replace(transformation, shardings=shardings)
    return optax.GradientTransformationExtraArgs(transformation.init, transformation.update)


@dataclasses.dataclass(frozen=True)
class _LowPrecision:
    """Arguments of `low_precision`, and the ``init`` and ``update`` of the transformation that it returns."""

    tx: optax.GradientTransformationExtraArgs
    patterns: Sequence[tuple[re.Pattern[str], str]]
    is_default: bool
    """Whether `patterns` is the default, which is matched against `optimizer_paths` (without parameter names)."""
    weights: str | None
    least_size: int
    seed: int
    shardings: Tree

    def init(self, params: Tree) -> LowPrecisionState:
        leaves, probe, init = jax.tree.leaves(params), jnp.zeros(()), self._init
        if leaves and all(isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) for leaf in (probe, *leaves)):
            devices = {frozenset(leaf.sharding.device_set) for leaf in leaves}
            is_elsewhere = len(devices) == 1 and devices != {frozenset(probe.devices())}
            # Outside of jit, constant arrays would be made on the default device, or on the mesh that is set. Under jit
            # they are made where the parameters are.
            if is_elsewhere and explicit_mesh(params) is None and jax.sharding.get_abstract_mesh().empty:
                transformation = optax.GradientTransformation(self._init, self.tx.update)
                init = jax.jit(self._init, out_shardings=state_shardings(transformation, params))
        state = init(params)
        if self._selects(params):
            for message in self._find_warnings(state.inner, params):
                warnings.warn(message, PlacementWarning, stacklevel=2)
        return state

    def _selects(self, params: Tree) -> bool:
        """Return whether the patterns must select a leaf of the state.

        This is not required without patterns or parameters, or if `params` is only a part of the parameters.
        """
        return bool(self.patterns and jax.tree.leaves(params)) and not is_part()

    def _find_warnings(self, state: Tree, params: Tree) -> Iterator[str]:
        """Yield a warning for each setting that has no effect or is harmful."""
        paths, nodes = zip(*leaves_with_paths(state, is_leaf=is_packed), strict=True)
        packed, names, free = list(map(is_packed, nodes)), self._paths(state, params, is_packed), set(range(len(nodes)))
        if not self.is_default:
            copies = _find_copies(self._inner_init, (params, self._init_residuals(params)))
            copy_paths = [path for path, *flags in zip(paths, packed, copies, strict=False) if all(flags)]
            if copy_paths:
                yield (
                    f"low_precision: {copy_paths[0]} begins as a copy of parameters, and quantisation changes it\n"
                    "hint: exclude it from match; the default selects only moments"
                )
        for pattern, _ in self.patterns:
            matches = {index for index, name in enumerate(names) if _is_match(pattern, name)}
            new_matches = matches & free
            free -= new_matches
            if not matches:
                yield (
                    f"low_precision: {pattern.pattern} matches nothing in this optimizer's state\n"
                    f"hint: match one of its paths: {', '.join(paths[:8])}"
                )
            elif not new_matches:
                yield (
                    f"low_precision: earlier expressions match everything that {pattern.pattern} matches\n"
                    "hint: put specific expressions first, because the first match applies"
                )
            elif not any(packed[index] for index in new_matches):
                yield (
                    f"low_precision: the leaves that {pattern.pattern} selects stay unchanged: they have fewer than "
                    f"least_size = {self.least_size} numbers, or are not real floating-point arrays\n"
                    "hint: choose a smaller least_size, or leave out the format"
                )

    def _init(self, params: Tree) -> LowPrecisionState:
        residuals = self._init_residuals(params)
        if self.weights is not None and not is_part():
            require_bfloat16(self.weights, params)
        can_fill = functools.partial(self._pack_mask, params=params)
        state = _init_filled(self._inner_init, (params, residuals), can_fill)
        if any(map(is_packed, jax.tree.leaves(state, is_leaf=is_packed))):
            hint = "wrap it once; `format` can map regular expressions to formats"
            raise ConfigError("the optimizer is already wrapped by lt.optim.low_precision", hint=hint)
        formats = self._leaf_formats(state, params)
        if self._selects(params) and not any(formats):
            got = ", ".join(path for path, _ in leaves_with_paths(state)[:8]) or "a state without arrays"
            expected = f"a path that matches {' or '.join(pattern.pattern for pattern, _ in self.patterns)}"
            hint = "write match as a regular expression for such paths"
            problem = "low_precision selects nothing in the optimizer's state"
            raise SelectionError(problem, expected=expected, got=got, hint=hint)
        step = jnp.zeros((), jnp.int32)
        leaf_plans = enumerate(zip(moments(state), formats, self._pack_mask(state, params), strict=True))

        def pack_leaf(path: str, leaf: Any) -> Any:
            number, (moment, form, can_pack) = next(leaf_plans)
            key = self._key(step, number)
            if form is not None:
                check_bits(path, form, moment)
            if form is None or not can_pack:
                return leaf
            if isinstance(leaf, _Filled):
                return _pack_fill(leaf, form, moment.is_positive, key)
            if memory_space(leaf) == jax.memory.Space.Host:
                hint = 'wrap in the other order: lt.offload.optimizer(low_precision(tx), match=r".*/codes")'
                raise ConfigError(f"the optimizer keeps {path} in host memory, where it cannot be packed", hint=hint)
            return _pack_array(leaf, form, moment.is_positive, key)

        return LowPrecisionState(step, map_with_paths(pack_leaf, state), residuals)

    def _inner_init(self, params: Tree, residuals: Tree) -> Tree:
        return self.tx.init(params if self.weights is None else widen(params, residuals))

    def _paths(self, state: Tree, params: Tree, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
        """Return the path of each leaf of a state, in the form against which the expressions are matched."""
        if self.is_default:
            return optimizer_paths(state, params, is_leaf)
        return [path for path, _ in leaves_with_paths(state, is_leaf=is_leaf)]

    def _leaf_formats(self, state: Tree, params: Tree) -> list[str | None]:
        return list(map(self._format_of, self._paths(state, params)))

    def _pack_mask(self, state: Tree, params: Tree) -> list[bool]:
        """Return whether each leaf of the wrapped optimizer's dense state is to be packed."""

        def is_large(leaf: Any) -> bool:
            shape = getattr(leaf, "shape", ())
            return bool(shape) and math.prod(shape) >= self.least_size

        pairs = zip(self._leaf_formats(state, params), jax.tree.leaves(state), strict=True)
        return [form is not None and is_large(x) and jnp.issubdtype(x.dtype, jnp.floating) for form, x in pairs]

    def update(self, updates: Tree, state: Any, params: Tree = None, **extra: Any) -> Any:
        # An Equinox module has functions among its leaves. Optax updates only the leaves that have gradients.
        params, _ = split_static(params)
        if (restored := self._restore_nodes(state, params)) is not None:
            updates, new_state = self.update(updates, restored, params, **extra)
            return updates, jax.tree.structure(state).unflatten(jax.tree.leaves(new_state))
        self._check_state(state, params)
        try:
            return self._update_in_blocks(updates, state, params, extra)
        except (AttributeError, TypeError, ValueError) as error:
            _explain(error, self._init, updates, state, params)
            raise

    def _restore_nodes(self, state: Any, params: Tree) -> Any:
        """Restore the nodes of a state that another library (such as `flax.nnx.Optimizer`) replaced by its own nodes.

        Such a state has the same leaves in the same order, so the structure of `init` fits it. Return None for a state
        that needs no restoring or does not fit.
        """
        if not isinstance(state, LowPrecisionState) or params is None:
            return None
        if any(map(is_packed, jax.tree.leaves(state.inner, is_leaf=is_packed))):
            return None
        try:
            expected, structure = jax.tree.flatten(jax.eval_shape(self._init, params))
        except (ConfigError, SelectionError):  # `params` is only a part of the parameters, which init may refuse
            return None
        types, leaves = [(leaf.shape, leaf.dtype) for leaf in expected], jax.tree.leaves(state)
        if jax.tree.structure(state) == structure or len(leaves) != len(types):
            return None
        is_same = [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves] == types
        return structure.unflatten(leaves) if is_same else None

    def _init_residuals(self, params: Tree) -> Tree:
        return () if self.weights is None else init_residuals(self.weights, params, self.least_size)

    def _check_state(self, state: Any, params: Tree) -> None:
        """Raise for a state of another transformation or format, because the update would silently keep its format."""
        if not isinstance(state, LowPrecisionState):
            raise _state_error("the result of its init, or a checkpoint of it", type(state).__name__)
        if self.weights is not None and params is None:
            hint = "call tx.update(grads, state, params), as for optax.adamw"
            raise ConfigError(f'an update with weights="{self.weights}" needs the parameters', hint=hint)
        expected = jax.eval_shape(self._init_residuals, params) if self.weights else ()
        if (expected_dtypes := _format_dtypes(expected)) != (dtypes := _format_dtypes(state.residuals)):
            raise _state_error(expected_dtypes, dtypes)
        for path, node in leaves_with_paths(state.inner, is_leaf=is_packed):
            if is_packed(node) and (form := self._format_of(path)) not in (node.format, None):
                raise _state_error(f"{path} in {form}", node.format)

    def _argument_shardings(self, grads: Tree, state: Any, params: Tree, arrays: Tree) -> Any:
        """Return the shardings of the update's arguments, or None without `shardings`."""
        if self.shardings is None:
            return None
        reference = grads if params is None else params
        expected, got = map(jax.tree.structure, (reference, self.shardings))
        if expected != got:
            hint = "pass jax.tree.map(lambda p: p.sharding, params), computed outside of jit"
            problem = "shardings does not have the structure of the parameters"
            raise StructureError(problem, expected=expected, got=got, hint=hint)
        structs = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            reference,
            self.shardings,
        )
        opt_state_shardings = state_shardings(optax.GradientTransformation(self._init, self.tx.update), structs)
        no_shardings = jax.tree.map(lambda _: None, arrays)
        return self.shardings, opt_state_shardings, None if params is None else self.shardings, no_shardings

    def _update_in_blocks(self, grads: Tree, state: LowPrecisionState, params: Tree, extra: Mapping[str, Any]) -> Any:
        """Update one block of rows at a time if possible; for whole leaves, XLA would store float32 arrays."""
        arrays, static = split_static(extra)
        args = jax.tree.map(_as_array, (grads, state, params, arrays))

        def run(grads: Tree, state: Any, params: Tree, arrays: Tree) -> Any:
            return self._update_whole(grads, state, params, combine(arrays, static))

        leaves = jax.tree.leaves(state, is_leaf=is_packed)
        # XLA fuses the update of leaves without scales, so only leaves with scales, and residuals, need blocks.
        packed = [leaf.codes for leaf in leaves if is_packed(leaf) and leaf.scales is not None]
        packed += jax.tree.leaves(state.residuals)
        is_on_host = any(memory_space(leaf) == jax.memory.Space.Host for leaf in packed)
        # Inside a shard_map, some arrays vary over its axes and others do not, which loops over blocks do not support.
        is_varying = any(varying_axes(jax.typeof(leaf)) for leaf in jax.tree.leaves(args) if is_array_like(leaf))
        if not packed or is_on_host or is_varying or traced_device().platform == "gpu":
            return run(*args)
        shardings = self._argument_shardings(*args)
        if shardings is None and num_devices(args) > 1 and (shardings := explicit_shardings(args)) is None:
            warnings.warn(
                "low_precision: the update runs as a whole, with float32 temporaries, because its mesh has several "
                "devices and the shardings of its leaves are unknown\n"
                "hint: pass low_precision(tx, shardings=jax.tree.map(lambda p: p.sharding, params))",
                PlacementWarning,
                stacklevel=4,
            )
            return run(*args)
        num_grads, packed_ids = len(jax.tree.leaves(grads)), set(map(id, packed))
        declared = [num_grads + index for index, leaf in enumerate(jax.tree.leaves(state)) if id(leaf) in packed_ids]
        is_like_grads = params is None or jax.tree.structure(params) == jax.tree.structure(grads)

        def replaced_trees(grads: Tree, state: Any, params: Tree, arrays: Any) -> Any:
            return grads if is_like_grads else params, state

        def update_streamed(*args: Any, shardings: Any = shardings) -> Any:
            options: Any = {"chunk_bytes": _BLOCK_BYTES, "declared": declared, "on_fallback": lambda *_: None}
            return stream(run, args, replaced_trees, shardings=shardings, **options)

        return without_explicit_axes(update_streamed, args, replaced_trees(*args), shardings)

    def _update_whole(self, updates: Tree, state: LowPrecisionState, params: Tree, extra: Mapping[str, Any]) -> Any:
        def run(inputs: tuple[Tree, LowPrecisionState, Tree]) -> tuple[Tree, Tree, Tree]:
            grads, state, params = inputs
            if self.weights is not None:
                params = widen(params, state.residuals)
                grads = jax.tree.map(lambda g: g.astype(jnp.float32) if is_narrow(g) else g, grads)
            unpack = lambda node: _constrain_layout(node).dense() if is_packed(node) else node  # noqa: E731
            dense = jax.tree.map(unpack, state.inner, is_leaf=is_packed)
            return *self.tx.update(grads, dense, params, **extra), params

        inputs, scales = (updates, state, params), list[Any]()
        if traced_device().platform == "gpu" and not is_taken_apart():
            # The first pass computes the scales alone, and the second repeats the update. Each pass is one fused
            # kernel, and no float32 state is stored between them. The barriers keep XLA from merging the two
            # computations. Each array has its own barrier, so XLA may update a leaf as soon as its gradient is known:
            # with one barrier for all, a step of Llama 1B's shapes needed 7.46 bytes per parameter instead of 6.80.
            _, new_state, _ = run(jax.tree.map(jax.lax.optimization_barrier, inputs))
            scales = [
                scales_of(new, old.format) if is_packed(old) and old.scales is not None else None
                for old, new in _pair_leaves(state.inner, new_state)
            ]
            scales = jax.tree.map(jax.lax.optimization_barrier, scales)
        updates, new_state, wide_params = run(inputs)
        old_state, step = inputs[1], state.step + 1
        packed = self._pack_state(new_state, old_state.inner, step, scales)
        if self.weights is None:
            return updates, LowPrecisionState(step, packed, old_state.residuals)
        keys = [self._key(step, -1 - index) for index in range(len(jax.tree.leaves(params)))]
        updates, residuals = narrow_updates(inputs[2], wide_params, old_state.residuals, updates, keys)
        return updates, LowPrecisionState(step, packed, residuals)

    def _pack_state(self, new: Tree, old: Tree, step: Any, scales: Sequence[Any]) -> Tree:

        def pack_leaf(number: int, old_leaf: Any, leaf: Any) -> Any:
            if not is_packed(old_leaf):
                return leaf
            key, form, is_positive = self._key(step, number), old_leaf.format, old_leaf.is_positive
            leaf_scales = scales[number] if scales else None
            leaf = refuse_derivatives(leaf)
            packed = PackedArray.stored(leaf, form, key, is_positive=is_positive, scales=leaf_scales)
            # The optimizer may widen a leaf: optax.inject_hyperparams in float32 does so with bfloat16 parameters.
            return dataclasses.replace(_constrain_layout(packed), dtype=old_leaf.dtype)

        leaves = [pack_leaf(number, *pair) for number, pair in enumerate(_pair_leaves(old, new))]
        return jax.tree.structure(old, is_leaf=is_packed).unflatten(leaves)

    def _key(self, step: Any, number: int) -> Any:
        """Return a random uint32 for a step and a leaf.

        `number` is the index of a leaf of the inner state, or -1 minus the index of a parameter.
        """
        key = jax.random.fold_in(jax.random.key(self.seed), step)
        return jax.random.bits(jax.random.fold_in(key, jnp.int32(number).astype(jnp.uint32)), dtype=jnp.uint32)

    def _format_of(self, path: str) -> str | None:
        return next((form for pattern, form in self.patterns if _is_match(pattern, path)), None)


def _is_match(pattern: re.Pattern[str], path: str) -> bool:
    return any(map(pattern.fullmatch, (path, f"/{path}/")))


def _constrain_layout(node: PackedArray) -> PackedArray:
    """Constrain codes to a row-major layout and scales to a transposed one, as XLA for TPUs stores them between steps.

    Without the constraints, XLA uses one layout for both in the loop over blocks, and copies whole arrays. They are not
    added in two cases. If the last axis of the codes is shorter than 128, XLA stores another axis innermost, and a
    constraint would add copies. With 128 or more scales in a row, codes and scales have the same layout anyway.
    """
    scales, num_lanes = node.scales, 128
    if scales is None or scales.ndim < 2 or scales.shape[-1] >= num_lanes or node.codes.shape[-1] < num_lanes:
        return node
    *leading_axes, rows, blocks = range(scales.ndim)
    codes = laid_out_on_tpus(node.codes, tuple(range(node.codes.ndim)))
    return dataclasses.replace(node, codes=codes, scales=laid_out_on_tpus(scales, (*leading_axes, blocks, rows)))


def _pair_leaves(old: Tree, new: Tree) -> list[tuple[Any, Any]]:
    """Return pairs of a leaf of a stored state (a `PackedArray` is one leaf) and its value after the update."""
    nodes, structure = jax.tree.flatten(old, is_leaf=is_packed)
    try:
        return list(zip(nodes, structure.flatten_up_to(new), strict=True))
    except ValueError as error:
        problem = "an update changes the structure of the optimizer's state"
        hint = "wrap a transformation whose state keeps its structure"
        raise StructureError(problem, expected=structure, got=jax.tree.structure(new), hint=hint) from error


def _format_dtypes(residuals: Tree) -> str:
    dtypes = ", ".join(leaf.dtype.name for leaf in jax.tree.leaves(residuals))
    return f"residuals in {dtypes}" if dtypes else "no residuals"


def _state_error(expected: str, got: str) -> StructureError:
    hint = "convert a state of another format, or of the wrapped optimizer, with lt.optim.converted"
    problem = "the state does not belong to this lt.optim.low_precision"
    return StructureError(problem, expected=expected, got=got, hint=hint)


def _explain(error: Exception, init: Callable[[Tree], Any], grads: Tree, state: Any, params: Tree) -> None:
    """Raise an error that explains a failed update, if the state or the gradients are the cause."""
    if isinstance(error, LowtideError):
        return
    hosted = [path for path, leaf in leaves_with_paths(state) if memory_space(leaf) == jax.memory.Space.Host]
    if hosted:
        problem = f"{hosted[0]}: the state is in host memory, but this update computes on the device"
        call = 'lt.offload.optimizer(low_precision(tx), match=r".*/codes").update'
        raise PlacementError(problem, hint=f"call {call}, or pass lt.offload.to_device(state)") from error
    try:
        expected = jax.eval_shape(init, grads if params is None else params).inner
    except Exception:  # init does not accept the arguments, either, so the expected state is unknown
        return
    # A leaf may be packed in one state and dense in the other: a state made with another least_size is valid.
    state_leaves, expected_leaves = (
        dict(leaves_with_paths(tree, is_leaf=is_packed)) for tree in (state.inner, expected)
    )
    if state_leaves.keys() != expected_leaves.keys():
        raise _state_error(_join_paths(expected_leaves), _join_paths(state_leaves)) from error
    for path, leaf in state_leaves.items():
        shape = leaf.shape if is_packed(leaf) else jnp.shape(leaf)
        if tuple(shape) != tuple(expected_leaves[path].shape):
            raise _state_error(f"{path}: {list(expected_leaves[path].shape)}", str(list(shape))) from error
    params_structure, grads_structure = map(jax.tree.structure, (params, grads))
    if params is not None and grads_structure != params_structure:
        problem = "the gradients do not have the structure of the parameters"
        hint = "call update(grads, state, params) with the parameters that init was called with"
        raise StructureError(problem, expected=params_structure, got=grads_structure, hint=hint) from error


def _join_paths(paths: Iterable[str]) -> str:
    paths = list(paths)
    return ", ".join(paths[:6]) + (f", … ({len(paths) - 6} more)" if len(paths) > 6 else "")


# --- initial state ---------------------------------------------------------------------------------------------------

# Optimizer states nearly always begin as zeros. For a jitted ``init``, XLA packs 4096 x 4096 zeros at compile time,
# which takes one to two minutes (jax 0.10.2). For larger arrays, the program holds several float32 copies: 27 bytes a
# number on a TPU. Outside of jit, Optax first makes the float32 state of all parameters. So ``init`` is traced here,
# and an array that is filled with one number is packed from that number alone.

_COPIES = ("copy", "copy_p", "stop_gradient")


@dataclasses.dataclass(frozen=True)
class _Filled:
    """Placeholder for an array that is filled with one number."""

    shape: tuple[int, ...]
    dtype: Any
    value: Any


def _find_copies(init: Callable[..., Tree], args: Sequence[Tree]) -> list[bool]:
    """Return for each leaf of ``init(*args)`` whether it is a copy of an argument; [] if `init` cannot be traced."""
    try:
        program, _ = traced_program(init, args)
    except Exception:  # as in `_init_filled`
        return []
    producers, num_args = {value: eqn for eqn in program.equations for value in eqn.outputs}, len(jax.tree.leaves(args))

    def is_copy(value: int) -> bool:
        if (equation := producers.get(value)) is None:
            return value < num_args
        return equation.primitive.name in (*_COPIES, "convert_element_type") and is_copy(equation.inputs[0])

    return list(map(is_copy, program.outputs))


def _init_filled(init: Callable[..., Tree], args: Sequence[Tree], can_fill: Callable[[Tree], Sequence[bool]]) -> Tree:
    """Call ``init(*args)``; each array that is filled with one number becomes a `_Filled` and is not allocated.

    `can_fill` takes the state's tree of shapes and returns whether each leaf may become a `_Filled`.
    """
    try:
        if explicit_mesh(args) is not None:  # a `_Filled` has no sharding
            return _to_arrays(init(*args))
        program, structure = traced_program(init, args)
    except Exception:  # not traceable, or invalid arguments: calling init raises its own error
        return _to_arrays(init(*args))
    producers = {value: equation for equation in program.equations for value in equation.outputs}
    fillable = can_fill(structure.unflatten([program.avals[value] for value in program.outputs]))
    filled = dict[int, _Filled]()
    for index, (is_fillable, value) in enumerate(zip(fillable, program.outputs, strict=True)):
        aval = program.avals[value]
        if is_fillable and (number := _fill_value(producers, program.constants, value)) is not None:
            filled[index] = _Filled(aval.shape, aval.dtype, jnp.asarray(number, aval.dtype))
    if not filled or program.effects:
        return _to_arrays(init(*args))
    # Run only the equations that the remaining leaves need; a filled array is never computed.
    remaining = {value for index, value in enumerate(program.outputs) if index not in filled}
    values: dict[int, Any] = dict(enumerate(map(_as_array, jax.tree.leaves(args))))
    values.update({value: jnp.asarray(program.constants[value]) for value in program.constants.keys() & remaining})
    program.run(program.needed_for(remaining, known=values), values)
    return structure.unflatten([filled.get(index) or values[value] for index, value in enumerate(program.outputs)])


def _as_array(leaf: Any) -> Any:
    """Convert a Python number to an array, since Optax accepts both; return other leaves unchanged."""
    return jnp.asarray(leaf) if isinstance(leaf, (bool, int, float, complex)) else leaf


def _to_arrays(state: Tree) -> Tree:
    return jax.tree.map(_as_array, state)


def _fill_value(producers: Mapping[int, Any], constants: Mapping[int, Any], value: int) -> Any:
    """Return the scalar constant that the array `value` is filled with, or None."""
    if (equation := producers.get(value)) is None:
        return None
    name, operand = equation.primitive.name, equation.inputs[0] if equation.inputs else -1
    if name in _COPIES:
        return _fill_value(producers, constants, operand)
    if name == "convert_element_type":  # repeat every conversion of the program, because each may round
        number = _fill_value(producers, constants, operand)
        return None if number is None else jnp.asarray(number).astype(equation.params["new_dtype"])
    number = constants.get(operand) if name == "broadcast_in_dim" else None
    return number if number is not None and not jnp.shape(number) else None


def _pack_fill(leaf: _Filled, form: str, is_positive: bool, key: Any) -> PackedArray:
    """Pack an array that is filled with one number: pack one block, and repeat its code and its scale.

    `key` is as in `PackedArray.rounded`.
    """
    pack = functools.partial(PackedArray.stored, format=form, key=key, is_positive=is_positive)
    block = pack(jnp.full(1 if form == BFLOAT16 else FORMATS[form].block, leaf.value))
    template = jax.eval_shape(pack, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    scales = None if block.scales is None else jnp.full(template.scales.shape, block.scales[0])
    return dataclasses.replace(template, codes=jnp.full(leaf.shape, block.codes[0]), scales=scales)


def _pack_array(leaf: Any, form: str, is_positive: bool, key: Any) -> PackedArray:
    """Pack an array and keep its sharding over the axes of an explicit mesh; arguments as in `_pack_fill`."""

    def pack(leaf: Any, key: Any) -> PackedArray:
        return PackedArray.stored(leaf, form, key, is_positive=is_positive)

    sharding = jax.typeof(leaf).sharding
    if not sharding.mesh.explicit_axes:
        return pack(leaf, key)
    spec = (*sharding.spec, *(None,) * leaf.ndim)[: leaf.ndim]

    def part_sharding(struct: Any) -> Any:
        if struct.shape == leaf.shape:
            return sharding
        # Scales have the leading axes of the array; an axis of blocks replaces its last axis.
        has_rows = struct.shape[:-1] == leaf.shape[:-1]
        return jax.NamedSharding(sharding.mesh, jax.P(*spec[:-1], None) if has_rows else jax.P())

    shapes = jax.eval_shape(pack, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (leaf, key)))
    pack_sharded: Any = jax.sharding.auto_axes(
        pack, axes=sharding.mesh.explicit_axes, out_sharding=jax.tree.map(part_sharding, shapes)
    )
    return pack_sharded(leaf, key)


# --- conversion between formats --------------------------------------------------------------------------------------


def converted(state: Tree, tx: optax.GradientTransformation, params: Tree) -> Tree:
    """Convert an optimizer's state to the format of another transformation.

    Args:
        state: a state of `low_precision` around an optimizer, or of that optimizer alone. It may also be nested in
            the state of a chain or a wrapper.
        tx: the transformation that continues the run: `low_precision` around the same optimizer, or that optimizer
            alone, in the same chain or wrapper.
        params: the current parameters.

    Returns:
        A state of `tx`. Residuals of bfloat16 weights are kept where both the old and the new state have them.

    Raises:
        ConfigError: for a `tx` that is not an Optax transformation.
        StructureError: when `state` belongs to another optimizer than `tx`, or to other parameters.

    Memory:
        Both states, plus the decoded old state in float32. Under `jax.jit` only one leaf at a time is in float32.

    Examples:
        >>> from lowtide.optim import low_precision
        >>> params = {"w": jnp.ones((64, 64))}
        >>> plain = optax.adam(1e-3)
        >>> state = converted(plain.init(params), low_precision(plain, "4bit"), params)
        >>> state.inner[0].mu["w"].format
        '4bit'
    """
    check_transformation(tx)
    old_states = iter([node for node in jax.tree.leaves(state, is_leaf=_is_stored) if _is_stored(node)])

    # Decode the old state, so that its structure is that of the optimizer alone, with and without packed leaves.
    def dense_inner(node: Any) -> Tree:
        if not _is_stored(node):
            return node
        return jax.tree.map(lambda leaf: leaf.dense() if is_packed(leaf) else leaf, node.inner, is_leaf=is_packed)

    dense = jax.tree.map(dense_inner, state, is_leaf=_is_stored)
    templates, structure = jax.tree.flatten(jax.eval_shape(tx.init, params), is_leaf=_is_stored)

    def convert_node(template: Any, value: Any) -> Any:
        if not _is_stored(template):
            return _cast_like(template, value)
        old = next(old_states, LowPrecisionState(jnp.zeros((), jnp.int32), ()))
        key = jax.random.bits(jax.random.fold_in(jax.random.key(0), old.step), dtype=jnp.uint32)
        inner_templates, inner_structure = jax.tree.flatten(template.inner, is_leaf=is_packed)

        def convert_leaf(struct: Any, leaf: Any) -> Any:
            leaf = _cast_like(struct, leaf)
            if not is_packed(struct):
                return leaf
            return PackedArray.stored(jnp.asarray(leaf), struct.format, key, is_positive=struct.is_positive)

        leaves = list(map(convert_leaf, inner_templates, inner_structure.flatten_up_to(value)))
        residuals = convert_residuals(params, old.residuals, template.residuals) if template.has_residuals else ()
        return LowPrecisionState(jnp.asarray(old.step, jnp.int32), inner_structure.unflatten(leaves), residuals)

    try:
        return structure.unflatten(map(convert_node, templates, structure.flatten_up_to(dense)))
    except ValueError as error:
        raise _mismatch_error(structure, jax.tree.structure(dense)) from error


def _is_stored(node: Any) -> bool:
    return isinstance(node, LowPrecisionState)


def _cast_like(template: Any, leaf: Any) -> Any:
    if (shape := getattr(leaf, "shape", type(leaf).__name__)) != template.shape:
        raise _mismatch_error(template.shape, shape)
    return leaf if leaf.dtype == template.dtype else jnp.asarray(leaf, template.dtype)


def _mismatch_error(expected: Any, got: Any) -> StructureError:
    hint = "pass a state of the same optimizer and parameters: converted only changes how a state is stored"
    problem = "the state belongs to another optimizer, or to other parameters"
    return StructureError(problem, expected=expected, got=got, hint=hint)
