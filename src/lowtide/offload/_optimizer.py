"""Optimizer state in host memory, for any Optax optimizer.

The wrapped transformation keeps the leaves that a regular expression selects (by default Adam's moments) on the host.
It updates these leaves block by block (`_streaming`) if the update is separable: each row of a result needs only the
same row of the arguments (`_separable`). Values are those of the original transformation.

Wrap the outermost transformation, ``optimizer(optax.chain(...))``, not a member of a chain, so that the whole update is
analysed as one function. Before JAX 0.12, shapes from `jax.eval_shape` have no memory spaces, so `update` raises
`PlacementError` for such a state. `jax.jit(step).eval_shape` keeps the memory spaces of structs with shardings.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from ..core import (
    ConfigError,
    PlacementError,
    PlacementWarning,
    SelectionError,
    StructureError,
    Tree,
    axis_names,
    check_choice,
    check_integer,
    combine,
    explicit_mesh,
    is_array_like,
    leaf_bytes,
    leaves_with_paths,
    map_with_paths,
    memory_space,
    parse_bytes,
    shown,
    split_static,
    varying_axes,
)
from ..core._compat import inside_branch, transformation
from ..jaxprs import make_jaxpr
from ._host_memory import DEVICE, HOST, put, warn_without_host_memory
from ._streaming import large_on_host, refuse_other_structure, stream

_UNKNOWN_SHARDINGS = "it is on a mesh of several devices and shardings= is missing"
_SHARDINGS_HINT = "pass jax.tree.map(lambda p: p.sharding, params), computed outside of jit"


def optimizer(
    tx: optax.GradientTransformation,
    match: str = r".*/(mu|nu)/.*",
    *,
    mode: str = "streamed",
    chunk_bytes: int | str = 64 * 2**20,
    shardings: Tree = None,
) -> optax.GradientTransformationExtraArgs:
    """Keep an optimizer's state in host memory, and update it there one block at a time.

    Args:
        tx: any Optax transformation; chains and wrappers go inside.
        match: a regular expression on the paths of the state's leaves, such as ``0/mu/layers/w``; it has to match the
            whole path. The path is also tried with a slash at both ends (``/0/mu/``), so the default also finds Adam's
            moments at the root and of a bare array.
        mode: ``streamed`` cuts leaves into blocks of rows if each row of the results needs only the same row of the
            arguments. Norms over rows are computed in an earlier pass, which reads the state a second time. Any other
            update runs leaf by leaf, with one `PlacementWarning`. Selected state of at most one block, and of at most
            half the bytes of the gradients, is moved whole. ``leaf`` moves each leaf whole, one after the other.
            ``whole`` moves everything to the device and back at once.
        chunk_bytes: bytes that a block moves from the host, a number or text such as ``"64 MiB"``. Larger blocks cost
            memory, smaller blocks cost time.
        shardings: for parameters that are sharded on a mesh: a tree like the parameters, with a
            `jax.sharding.NamedSharding` for each. A tracer has no sharding unless its mesh has explicit axes, and
            slices along a sharded axis would gather the leaf on every device. With `shardings`, each device streams its
            shard. Without shardings, each device moves its whole shards, one leaf after the other.

    Returns:
        A transformation with the state structure of `tx`. Its updates are in the memory of the gradients, normally the
        device; its selected state is on the host. Call ``update`` under `jax.jit` with the state donated, so that the
        state is updated in place. Donate the gradients, too (or, in a whole step, the parameters). Otherwise JAX pairs
        a donated host array with an update on the device, because it pairs donated arguments with results by shape
        alone (jax 0.10.2; on a CPU this ends the process). `lowtide.offload.verify` finds such a pair in the compiled
        step.

    Raises:
        ConfigError: for an invalid `tx`, `mode`, `chunk_bytes`, `shardings` or regular expression.
        SelectionError: from ``init`` and ``update``, when `match` selects no leaf of the state.
        PlacementError: from ``update``, when a selected leaf is not in host memory.
        StructureError: from ``update``, when `shardings` does not have the structure of the gradients. Also under
            `jax.vmap` or differentiation, in a branch of `jax.lax.cond`, or in a `jax.shard_map` with ``check_vma``.

    Warns:
        PlacementWarning: from ``init``, for sharded parameters without `shardings`. From ``update``: when selected
            leaves are larger than a block and cannot be cut (or must not be, on a mesh without `shardings`); when
            traced for a compile-only device without host memory; for 8- and 4-bit leaves that a TPU's compiler copies
            whole; and for side effects of `tx`, which are left out.

    Memory:
        Per step, in addition to the parameters and gradients: the host holds one copy of the selected state, the device
            about two blocks. If leaves are moved whole, the device holds about twice the state of the largest leaf.

    Examples:
        >>> params = {"w": jnp.ones((4, 2))}
        >>> tx = optimizer(optax.adam(1e-1))
        >>> state = tx.init(params)
        >>> state[0].mu["w"].sharding.memory_kind
        'pinned_host'
        >>> updates, state = jax.jit(tx.update, donate_argnums=(0, 1))({"w": jnp.ones((4, 2))}, state, params)
        >>> bool(jnp.allclose(updates["w"], -0.1)), state[0].nu["w"].sharding.memory_kind
        (True, 'pinned_host')

    References:
        Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training, https://arxiv.org/abs/2101.06840
    """
    check_transformation(tx)
    check_choice("mode", mode, ("streamed", "leaf", "whole"))
    if is_offloaded(tx):
        hint = "wrap it once; `match` can select several parts of its state: r'.*/(mu|nu|ema)/.*'"
        raise ConfigError("the optimizer is already wrapped by lt.offload.optimizer", hint=hint)
    try:
        pattern = re.compile(match)
    except (re.error, TypeError) as error:
        hint = 'write r".*/mu/.*" instead of the glob "mu/*"'
        raise ConfigError(f"match={match!r} is not a regular expression: {error}", hint=hint) from error
    check_shardings(shardings)
    offloaded = _OffloadedTransformation(
        optax.with_extra_args_support(tx), pattern, mode, check_chunk(chunk_bytes), shardings
    )
    return optax.GradientTransformationExtraArgs(offloaded.init, offloaded.update)


def check_chunk(chunk_bytes: Any) -> int:
    """Return a block size in bytes from a number or text; raise `ConfigError` unless it is positive."""
    number = parse_bytes(chunk_bytes) if isinstance(chunk_bytes, str) else chunk_bytes
    check_integer("chunk_bytes", number, hint='give bytes, or text such as "64 MiB"')
    return int(number)


def check_shardings(shardings: Tree) -> None:
    """Check the argument `shardings` of an optimizer.

    Args:
        shardings: None, or a tree of `jax.sharding.NamedSharding` and fully replicated shardings.

    Raises:
        ConfigError: for other leaves, such as `jax.sharding.PartitionSpec`, which has no mesh.
    """
    for path, leaf in leaves_with_paths(shardings):
        is_whole = isinstance(leaf, jax.sharding.Sharding) and leaf.is_fully_replicated
        if not (is_whole or isinstance(leaf, jax.sharding.NamedSharding)):
            problem = f"shardings: {path or 'the tree'} must be a jax.sharding.NamedSharding, not {shown(leaf)}"
            raise ConfigError(problem, hint=_SHARDINGS_HINT)


def is_offloaded(tx: Any) -> bool:
    return isinstance(getattr(tx.init, "__self__", None), _OffloadedTransformation)


def check_transformation(tx: Any) -> None:
    """Raise if an object is not an Optax transformation.

    Args:
        tx: any object.

    Raises:
        ConfigError: when `tx` has no callable ``init`` and ``update``.
    """
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        hint = "pass for instance optax.adamw(1e-4)"
        raise ConfigError(f"the optimizer must be an optax.GradientTransformation, not {shown(tx)}", hint=hint)


class _OffloadedTransformation:
    """The functions of the transformation that `optimizer` returns. Mutable: the first warning sets `has_warned`."""

    def __init__(self, tx: Any, pattern: re.Pattern[str], mode: str, chunk_bytes: int, shardings: Tree) -> None:
        self.tx, self.pattern, self.mode = tx, pattern, mode
        self.chunk_bytes, self.shardings = chunk_bytes, shardings
        self.has_warned = False
        self.compiled = jax.jit(self._update)

    def init(self, params: Tree) -> Tree:
        for path, leaf in leaves_with_paths(params):
            sharding = None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
            if self.shardings is None and sharding is not None and not sharding.is_fully_replicated:
                warnings.warn(
                    f"{path} is sharded, but the optimizer has no shardings, so it is updated leaf by leaf\n"
                    "hint: call lt.offload.optimizer(..., shardings=jax.tree.map(lambda p: p.sharding, params))",
                    PlacementWarning,
                    stacklevel=2,
                )
                break
        leaves = jax.tree.leaves(params)
        is_concrete = all(isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) for leaf in leaves)
        if not is_concrete or len({frozenset(leaf.sharding.device_set) for leaf in leaves}) != 1:
            return self._init(params)
        # In a compiled program, the leaves of the state move to the host one after the other. Eager code would first
        # hold the whole state on the device.
        init_only = optax.GradientTransformation(self._init, self.tx.update)
        return jax.jit(self._init, out_shardings=state_shardings(init_only, params))(params)

    def _init(self, params: Tree) -> Tree:
        state = self.tx.init(params)
        leaves, structure = jax.tree.flatten(state)
        selected = self._select_leaves(state)
        return structure.unflatten(put(leaf, HOST) if index in selected else leaf for index, leaf in enumerate(leaves))

    def update(self, updates: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        # For a module with functions among its leaves, such as Equinox's, Optax receives only the array leaves.
        params, _ = split_static(params)
        leaves = jax.tree.leaves((updates, state, params, extra))
        is_concrete = all(is_array_like(leaf) and not isinstance(leaf, Tracer) for leaf in leaves)
        return (self.compiled if is_concrete else self._update)(updates, state, params, **extra)

    def _update(self, grads: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        if inside_branch():  # the branch would return copies of the host state, and does not compile for TPUs
            raise StructureError(
                "the optimizer's update is in a branch of jax.lax.cond, as in optax.MultiSteps or "
                "optax.apply_if_finite",
                expected="lt.offload.optimizer around the outermost transformation",
                hint="use lt.offload.optimizer(optax.MultiSteps(tx, every_k_schedule=4).gradient_transformation()), "
                "and match=r'.*/(mu|nu|acc_grads)/.*' to stream its state, too",
            )
        selected = self._select_leaves(state)
        if not warn_without_host_memory("optimizer", "the leaves of the state"):
            for index, (path, leaf) in enumerate(leaves_with_paths(state)):
                if index in selected and memory_space(leaf) is not HOST:
                    hint = "make the state with this transformation's init; shapes from jax.eval_shape have no memory "
                    hint += 'kind, so move them with lt.offload.to_host(state, "**/{mu,nu}/**")'
                    raise PlacementError(f"optimizer state {path} is not in host memory", hint=hint)
        arrays, static = split_static(extra)

        def update(grads: Tree, state: Tree, params: Tree, arrays: Tree) -> tuple[Tree, Tree]:
            return self.tx.update(grads, state, params, **combine(arrays, static))

        # Updates have the structure of the parameters if that differs from the gradients' structure (optax.lookahead).
        is_like_grads = params is None or jax.tree.structure(params) == jax.tree.structure(grads)

        def replaces(grads: Tree, state: Tree, params: Tree, arrays: Tree) -> tuple[Tree, Tree]:
            return grads if is_like_grads else params, state

        args = (grads, state, params, arrays)
        shardings = self._shardings(*args)
        if self.mode == "whole" or (self.mode == "streamed" and self._fits_one_block(grads, state, selected)):
            on_device = put(state, DEVICE)
            updates, new_state = update(grads, on_device, params, arrays)
            refuse_other_structure(jax.tree.structure((updates, new_state)), jax.tree.structure(replaces(*args)))
            return updates, jax.tree.map(lambda leaf, old: put(leaf, memory_space(old)), new_state, state)
        self._refuse_transformed(args)
        declared = {len(jax.tree.leaves(grads)) + index for index in selected}
        prevented = _UNKNOWN_SHARDINGS if shardings is None and num_devices(args) > 1 else None

        def streamed(*args: Any, shardings: Tree = shardings) -> tuple[Tree, Tree]:
            return stream(
                update,
                args,
                replaces,
                chunk_bytes=self.chunk_bytes,
                by_leaf=self.mode == "leaf",
                shardings=shardings,
                prevented=prevented,
                declared=declared,
                on_fallback=self._warn_once,
            )

        return without_explicit_axes(streamed, args, replaces(*args), shardings)

    def _refuse_transformed(self, args: Tree) -> None:
        """Raise `StructureError` under JAX transformations that do not support loops over blocks in host memory."""
        leaves = [leaf for leaf in jax.tree.leaves(args) if is_array_like(leaf)]
        transform, remedy = transformation(leaves), 'choose mode="whole"'
        if transform == "jax.vmap" and self.mode == "leaf":
            return
        if transform == "jax.vmap":
            remedy = 'choose mode="leaf", or stack the leaves and call update once, without vmap'
        elif any(varying_axes(jax.typeof(leaf)) for leaf in leaves):
            transform, remedy = "jax.shard_map with check_vma=True", 'pass check_vma=False, or choose mode="whole"'
        if transform:
            problem = f"the update is under {transform}, but JAX cannot transform loops over blocks in host memory"
            raise StructureError(problem, hint=remedy)

    def _select_leaves(self, state: Tree) -> set[int]:
        """Return the positions of the selected leaves. Random keys stay on the device, whatever the pattern selects."""
        leaves, is_match = leaves_with_paths(state), self.pattern.fullmatch
        selected = {
            index
            for index, (path, leaf) in enumerate(leaves)
            if (is_match(path) or is_match(f"/{path}/"))
            and is_array_like(leaf)
            and not jnp.issubdtype(jax.typeof(leaf).dtype, jax.dtypes.prng_key)
        }
        if not selected:
            problem = f"match={self.pattern.pattern!r} selects no leaf of the optimizer's state by its whole path"
            listed = ", ".join(path for path, _ in leaves[:6]) + (", …" if len(leaves) > 6 else "")
            got = f"{len(leaves)} leaves: {listed}"
            hint = 'use r".*" to select everything; a transformation without state needs no offloading'
            raise SelectionError(problem, got=got, hint=hint)
        return selected

    def _fits_one_block(self, grads: Tree, state: Tree, selected: set[int]) -> bool:
        """Return whether the host leaves fit into one block, and take at most half the bytes of the gradients.

        For so little state, such as 8-bit momentum, loops need more memory than moving the leaves whole.
        """
        leaves = jax.tree.leaves(state)
        large = large_on_host(leaves, self.chunk_bytes, selected)
        max_bytes = min(self.chunk_bytes, sum(map(leaf_bytes, jax.tree.leaves(grads))) // 2)
        return sum(leaf_bytes(leaves[index]) for index in large) <= max_bytes

    def _shardings(self, grads: Tree, state: Tree, params: Tree, arrays: Tree) -> Tree:
        if self.shardings is None:
            is_on_mesh = num_devices((grads, state, params)) > 1
            return explicit_shardings((grads, state, params, arrays)) if is_on_mesh else None
        find_sharding = _sharding_finder(self.shardings, grads)
        trees = (grads, state, params, jax.tree.map(lambda _: None, arrays))
        return tuple(map_with_paths(find_sharding, tree) for tree in trees)

    def _warn_once(self, paths: list[str], reason: str) -> None:
        if self.has_warned:
            return
        self.has_warned = True
        names = [path.partition("/")[2] or path for path in paths]
        listed = ", ".join(names[:4]) + (f", … ({len(names) - 4} more)" if len(names) > 4 else "")
        remedy = 'choose mode="leaf" to accept it, an optimizer that works element by element, or a narrower match'
        if reason == _UNKNOWN_SHARDINGS:
            remedy = 'pass shardings=jax.tree.map(lambda p: p.sharding, params), or choose mode="leaf" to accept it'
        warnings.warn(
            f"optimizer state {listed} is updated leaf by leaf instead of block by block, because {reason}\n"
            f"hint: {remedy}",
            PlacementWarning,
            stacklevel=2,
        )


def num_devices(tree: Tree) -> int:
    """Return the number of devices of the largest mesh that a leaf is on; 1 without a mesh.

    Args:
        tree: arrays or tracers. Axes of an enclosing `jax.shard_map` do not count, because a leaf is a shard there.

    Examples:
        >>> num_devices({"w": jnp.ones(2)})
        1
    """
    meshes = [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(tree) if is_array_like(leaf)]
    sizes = (math.prod(size for name, size in mesh.shape.items() if name not in mesh.manual_axes) for mesh in meshes)
    return max(sizes, default=1)


def explicit_shardings(tree: Tree) -> Tree:
    """Return the shardings that are part of the leaves' types, as a tree; None if any mesh axis is not explicit.

    Args:
        tree: arrays or tracers.
    """
    leaves, structure = jax.tree.flatten(tree)
    shardings = [jax.typeof(leaf).sharding if is_array_like(leaf) else None for leaf in leaves]
    typed_shardings = [None if sharding is None or sharding.mesh.empty else sharding for sharding in shardings]
    is_explicit = all(sharding.mesh.are_all_axes_explicit for sharding in typed_shardings if sharding is not None)
    return structure.unflatten(typed_shardings) if is_explicit else None


def without_explicit_axes(run: Callable[..., Tree], args: Sequence[Tree], like: Tree, shardings: Tree) -> Tree:
    """Call a function with automatic instead of explicit mesh axes, because it computes with blocks and shards.

    Args:
        run: the function. If the arguments' mesh has explicit axes, it also gets the keyword argument `shardings`.
        args: its arguments.
        like: a tree like the function's result; the result gets the shardings of these leaves.
        shardings: a tree of the arguments' shardings, None where unknown.
    """
    mesh = explicit_mesh([leaf for leaf in jax.tree.leaves(args) if is_array_like(leaf)])
    if mesh is None:
        return run(*args)

    def result_sharding(leaf: Any) -> Any:
        sharding = jax.typeof(leaf).sharding
        return sharding if sharding.mesh.explicit_axes else jax.sharding.NamedSharding(mesh, jax.P())

    def run_with_auto_axes(*args: Any) -> Tree:
        auto_mesh = jax.sharding.get_abstract_mesh()
        return run(*args, shardings=jax.tree.map(lambda s: jax.sharding.NamedSharding(auto_mesh, s.spec), shardings))

    return jax.sharding.auto_axes(
        run_with_auto_axes, axes=mesh.explicit_axes, out_sharding=jax.tree.map(result_sharding, like)
    )(*args)


def state_shardings(tx: optax.GradientTransformation, params: Tree) -> Tree:
    """Return the shardings of an optimizer's state, for ``out_shardings`` of `jax.jit`.

    Args:
        tx: a transformation, made by `optimizer` or not.
        params: arrays or `jax.ShapeDtypeStruct`s with shardings.

    Returns:
        A tree like ``tx.init(params)``, of shardings with memory kinds. A leaf with the shape of a parameter is sharded
        like it if the leaf's path ends in the parameter's path. The same holds for codes of low-precision state, and
        for their scales where possible. Other leaves are replicated. Leaves that `optimizer` moved are ``pinned_host``.

    Raises:
        PlacementError: when a parameter has no sharding.

    Memory:
        Nothing is allocated.

    Examples:
        >>> shardings = state_shardings(optimizer(optax.adam(1e-3)), {"w": jnp.ones((4, 2))})
        >>> shardings[0].mu["w"].memory_kind, shardings[0].count.memory_kind
        ('pinned_host', 'device')
    """
    for path, leaf in leaves_with_paths(params):
        if getattr(leaf, "sharding", None) is None:
            hint = "call state_shardings outside of jit, give structs shardings, and convert NumPy to JAX arrays"
            raise PlacementError(f"parameter {path}, a {type(leaf).__name__}, has no sharding", hint=hint)
    find_sharding = _sharding_finder(jax.tree.map(lambda leaf: leaf.sharding, params), params)
    # Only a jaxpr keeps memory spaces; `jax.eval_shape` drops them.
    closed, shapes = make_jaxpr(tx.init)(params)
    kinds = ["pinned_host" if aval.memory_space is HOST else "device" for aval in closed.out_avals]
    shardings = [
        (find_sharding(path, leaf) or replicated(params)).with_memory_kind(kind)
        for (path, leaf), kind in zip(leaves_with_paths(shapes), kinds, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), shardings)


def replicated(tree: Tree) -> Any:
    """Return the replicated sharding for a tree of arrays, or of shapes with shardings."""
    first = jax.tree.leaves(tree)[0].sharding
    return jax.sharding.NamedSharding(first.mesh, jax.P()) if isinstance(first, jax.sharding.NamedSharding) else first


def _sharding_finder(shardings: Tree, params: Tree) -> Any:
    """Return a function that maps a state leaf to its parameter's sharding, by the end of the path, or to None."""
    structure = jax.tree.structure(params)
    try:
        flat = structure.flatten_up_to(shardings)
    except ValueError as error:
        problem = "shardings does not have the structure of the parameters"
        got = jax.tree.structure(shardings)
        raise StructureError(problem, expected=structure, got=got, hint=_SHARDINGS_HINT) from error
    shardings_by_path = {path: (leaf.shape, s) for (path, leaf), s in zip(leaves_with_paths(params), flat, strict=True)}

    def find_sharding(path: str, leaf: Any) -> Any:
        segments = path.split("/")
        # The longest suffix that is the path of a parameter of this shape wins.
        for start in range(len(segments) + 1):
            shape, sharding = shardings_by_path.get("/".join(segments[start:]), (None, None))
            if shape == getattr(leaf, "shape", ()):
                return sharding
        for start in range(len(segments)):  # codes or scales in a node that replaces a leaf of the state
            shape, sharding = shardings_by_path.get("/".join(segments[start:-1]), (None, None))
            if shape and (part_sharding := _sharding_of_part(leaf, shape, sharding)):
                return part_sharding
        return None

    return find_sharding


def _sharding_of_part(leaf: Any, shape: tuple[int, ...], sharding: Any) -> Any:
    """Return the sharding of codes in a parameter's shape, or of scales for blocks of its last axis; else None.

    The last axis of scales is sharded if its size divides the parameter's and is a multiple of the number of devices.
    """
    if leaf.shape == shape:
        return sharding
    if leaf.shape[:-1] != shape[:-1] or not leaf.ndim or not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    spec = (*sharding.spec, *(None,) * leaf.ndim)[: leaf.ndim]
    count = math.prod(sharding.mesh.shape[axis] for axis in axis_names(spec[-1]))
    if leaf.shape[-1] and not shape[-1] % leaf.shape[-1] and not leaf.shape[-1] % count:
        return jax.sharding.NamedSharding(sharding.mesh, jax.P(*spec))
    return jax.sharding.NamedSharding(sharding.mesh, jax.P(*spec[:-1], None))
