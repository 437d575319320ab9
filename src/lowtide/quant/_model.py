"""Quantise chosen weights of a tree, and dequantise them again."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..core import (
    LinearWeight,
    SelectionError,
    StructureError,
    Tree,
    axis_names,
    explicit_mesh,
    leaves_with_paths,
    match_names,
    model_part,
    put,
    shardings_of,
    without_explicit_axes,
)
from ._weight import Format, QuantizedWeight, encode, format_named, largest_values


def quantize(tree: Tree, match: str | Sequence[str], format: str = "nf4", *, block: int | None = None) -> Tree:
    """Quantise chosen frozen weights of a tree.

    Args:
        tree: any pytree. The model has to use its weights through `lowtide.core.linear` and `lowtide.core.rows`, or as
            ``weight @ x``, ``x @ weight`` or ``x @ weight.T``. Weights have shape [out, in], or [num_layers, out, in]
            for stacked layers. For `jax.ShapeDtypeStruct` leaves, the leaves of the nodes are shapes, too.
        match: globs on the paths of weights or of the modules that hold them; globs with ``!`` exclude. Only matches
            that are floating-point matrices are quantised: no norms, biases, experts or convolutions.
        format: ``"nf4"``: 4 bits, quantiles of a normal distribution, blocks of 64 with 8-bit scales: 4.13 bits per
            weight. Codes and scales equal those of bitsandbytes if 64 divides `in`. ``"int4"``: 4 bits, blocks of 32:
            4.5 bits. ``"mxfp4"``: 4 bits, blocks of 32 with powers of two as scales: 4.25 bits. ``"int8"`` and
            ``"fp8"``: 8 bits, one scale per row.
        block: number of neighbours in a row that share a scale: a multiple of 8 up to 65,536, or 0 for whole rows.
            None: the block size of the format, the only one for ``"mxfp4"``. The last block of a row may be shorter.

    Returns:
        The tree with a `QuantizedWeight` in place of each selected weight. The nodes are frozen: they get no gradient.

    Raises:
        SelectionError: when a pattern matches nothing, or the exclusions leave nothing.
        ConfigError: for an unknown format or block.
        StructureError: when no floating-point matrix is matched, or a match is already quantised, or has a
            `lowtide.lora.LoRAKernel` (the adapter of convolutions and embedding tables). Also when a weight has an
            entry that is not finite, or that the format rounds to infinity. Under `jax.jit`, entries are not checked:
            an entry that is not finite turns its block into NaN. In ``"nf4"``, whose 8-bit scales cannot store NaN, it
            turns all 256 blocks that share a nested scale into NaN.

    Memory:
        ``bits * out * in / 8`` bytes for each matrix, in new arrays. Matrices are quantised one at a time, with a few
        float32 copies of the current one. The given tree is not changed: drop it to free its weights.
        `lowtide.models.load` quantises while it reads, so only one matrix at a time is in memory unquantised. On a CPU,
        each 4-bit code takes one more byte while a step runs.

    Examples:
        >>> tree = {"q_proj": {"weight": jnp.ones((8, 64))}, "norm": {"weight": jnp.ones(64)}}
        >>> tree = quantize(tree, "*", "int8")
        >>> type(tree["q_proj"]["weight"]).__name__, type(tree["norm"]["weight"]).__name__
        ('QuantizedWeight', 'ArrayImpl')

    References:
        Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (arXiv:2305.14314).
    """
    form = format_named(format, block)
    named_leaves = leaves_with_paths(tree, is_leaf=_is_node)
    chosen = _match_paths([path for path, leaf in named_leaves if hasattr(leaf, "shape")], match)
    kernel_adapters = _kernel_adapters(tree)
    nodes: dict[int, Any] = {}
    for index, (path, leaf) in enumerate(named_leaves):
        if path not in chosen:
            continue
        if isinstance(leaf, QuantizedWeight):
            hint = "call lt.dequantize first, or leave this path out"
            raise StructureError(f"{path} is already quantised in {leaf.format}", hint=hint)
        if _is_matrix(path, leaf):
            if path in kernel_adapters:
                problem = f"{path} cannot be quantised: its adapter, a {kernel_adapters[path]}, needs it as an array"
                raise StructureError(problem, hint=f'leave it out, for instance with the pattern "!{path}"')
            nodes[index] = _quantize_leaf(path, leaf, form)
    if not nodes:
        raise _no_matrix_error([(path, leaf) for path, leaf in named_leaves if path in chosen])
    treedef = jax.tree.structure(tree, is_leaf=_is_node)
    return treedef.unflatten([nodes.get(index, leaf) for index, (_, leaf) in enumerate(named_leaves)])


def dequantize(tree: Tree) -> Tree:
    """Replace every quantised weight by a plain array, in the dtype that it had before `quantize`.

    Args:
        tree: a pytree with `QuantizedWeight` nodes, also below adapters.

    Returns:
        The tree without quantised weights; the rounding of the format stays.

    Raises:
        StructureError: when the tree has no quantised weight.

    Memory:
        A new array for each weight, and a float32 copy of one matrix at a time.

    Examples:
        >>> tree = quantize({"w": jnp.full((2, 64), 3.0)}, "w", "nf4")
        >>> bool(jnp.allclose(dequantize(tree)["w"], 3.0, rtol=1e-3))
        True
    """
    if not any(map(_is_quantized, jax.tree.leaves(tree, is_leaf=_is_quantized))):
        hint = "quantise with lt.quantize; a dequantised model has only plain arrays"
        raise StructureError("the tree has no quantised weight", hint=hint)
    return jax.tree.map(lambda leaf: _dequantize(leaf) if _is_quantized(leaf) else leaf, tree, is_leaf=_is_quantized)


def abstract(shape: tuple[int, ...], form: Format, dtype: Any) -> QuantizedWeight:
    """Return the node for a weight of this shape and dtype, with `jax.ShapeDtypeStruct` leaves."""
    return jax.eval_shape(functools.partial(_encode_array, form, dtype), jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedWeight)


def _is_node(leaf: Any) -> bool:
    """Return whether a node counts as one leaf: a `QuantizedWeight`, or another `LinearWeight` that wraps no weight."""
    # The type decides, because a user's module may have a field named ``linear``.
    is_foreign = isinstance(leaf, LinearWeight) and hasattr(type(leaf), "linear") and not hasattr(leaf, "weight")
    return isinstance(leaf, QuantizedWeight) or is_foreign


def _kernel_adapters(tree: Tree) -> dict[str, str]:
    """Return the class names of adapters with a method ``through`` (`LoRAKernel`), by the path of their weight."""
    is_adapter = lambda node: hasattr(node, "through") and hasattr(node, "weight")  # noqa: E731
    nodes = [(path, node) for path, node in leaves_with_paths(tree, is_leaf=is_adapter) if is_adapter(node)]
    return {f"{path}/weight".removeprefix("/"): type(node).__name__ for path, node in nodes}


def _match_paths(paths: list[str], match: Any) -> set[str]:
    """Return the paths that globs select, by path or by module; globs with ``!`` exclude by path or by module."""
    by_name: dict[str, list[str]] = {}
    for path in paths:
        # Below an adapter, the path of the weight is <module>/weight/weight.
        for name in {path, path.removesuffix("/weight"), path.removesuffix("/weight").removesuffix("/weight")}:
            by_name.setdefault(name, []).append(path)
    names = list(by_name)
    patterns = list(match) if isinstance(match, Iterable) and not isinstance(match, str) else [match]
    chosen = {path for name in match_names(names, patterns) for path in by_name[name]}
    exclusions = [pattern[1:] for pattern in patterns if isinstance(pattern, str) and pattern.startswith("!")]
    chosen -= {path for name in (match_names(names, exclusions) if exclusions else ()) for path in by_name[name]}
    if not chosen:
        hint = "narrow the patterns that start with '!'"
        raise SelectionError("the exclusions leave nothing selected", got=repr(patterns), hint=hint)
    return chosen


def _is_matrix(path: str, leaf: Any) -> bool:
    """Return whether a leaf is one floating-point matrix, or a stack of them."""
    parts, is_floating = path.split("/"), hasattr(leaf, "shape") and jnp.issubdtype(leaf.dtype, jnp.floating)
    if not is_floating or not math.prod(leaf.shape) or parts[-1].startswith("lora_"):
        return False
    # Layers in a list, as in Equinox, have numbers in their paths and no layer axis.
    is_stacked = model_part(path) == "layers" and not any(part.isdigit() for part in parts)
    stack = len(leaf.shape) - 2
    return stack == 1 if is_stacked else stack in (0, 1)


def _quantize_leaf(path: str, leaf: Any, form: Format) -> QuantizedWeight:
    if isinstance(leaf, jax.core.Tracer):
        return _encode_array(form, leaf.dtype, leaf)
    node = abstract(tuple(leaf.shape), form, leaf.dtype)
    sharding = getattr(leaf, "sharding", None)
    shardings = placed(node, sharding if isinstance(sharding, jax.sharding.NamedSharding) else None)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        if shardings is None:
            return node
        return jax.tree.map(
            lambda part, place: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=place), node, shardings
        )
    return build(path, leaf, form, functools.partial(_take_matrix, leaf), shardings)


def matrices(tree: Tree, match: str | Sequence[str]) -> set[str]:
    """Return the paths of the matrices that `quantize` would quantise with this `match`.

    Raises:
        SelectionError: when a pattern matches nothing, or the exclusions leave nothing.
        StructureError: when no matrix is matched.
    """
    leaves = dict(leaves_with_paths(tree))
    chosen = _match_paths([*leaves], match)
    paths = {path for path in chosen if _is_matrix(path, leaves[path])}
    if not paths:
        raise _no_matrix_error([(path, leaf) for path, leaf in leaves.items() if path in chosen])
    return paths


def _no_matrix_error(named_leaves: list[tuple[str, Any]]) -> StructureError:
    path, leaf = named_leaves[0]
    return StructureError(
        f"{path} is not a weight matrix" + (f", nor are {len(named_leaves) - 1} more" if len(named_leaves) > 1 else ""),
        expected="a floating-point array of shape [out, in], or [num_layers, out, in] below layers/",
        got=f"{leaf.dtype}{list(leaf.shape)}",
        hint="match only the projections; vectors such as norms and biases are small",
    )


def build(
    path: str, like: Any, form: Format, matrix: Callable[[tuple[int, ...]], Any], places: QuantizedWeight | None = None
) -> QuantizedWeight:
    """Quantise a weight whose matrices are available one at a time.

    Args:
        path: path of the weight, for error messages.
        like: an object with the shape and dtype of the weight.
        form: the format.
        matrix: function that returns the matrix at an index of the stack, or at () for a weight without a stack.
        places: shardings of the leaves, from `placed`; None for JAX's default device.

    Raises:
        StructureError: for an entry that is not finite, or that the format rounds to infinity.

    Memory:
        The node, and in addition one matrix with a few float32 copies. Leaves for host memory are made on the device.
    """
    stack = tuple(like.shape[:-2])
    if not stack:
        node, checks = _quantize_matrix(form, matrix(()))
        _check_finite(path, form, checks)
        return node if places is None else jax.tree.map(put, node, places)
    # Write into donated buffers. In a `lax.map`, XLA for CPU would hold a bfloat16 stack in float32.
    node = jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), abstract(tuple(like.shape), form, like.dtype))
    if places is not None:
        node = jax.tree.map(lambda leaf, place: put(leaf, place.with_memory_kind("device")), node, places)
    for index in np.ndindex(*stack):
        matrix_node, checks = _quantize_matrix(form, matrix(index))
        _check_finite(f"{path}[{', '.join(map(str, index))}]", form, checks)
        node = _write_matrix(node, matrix_node, tuple(np.int32(i) for i in index))
    return node if places is None else jax.tree.map(jax.device_put, node, places)


def placed(node: QuantizedWeight, sharding: jax.sharding.NamedSharding | None) -> Any:
    """Return shardings of a node's leaves: the weight's sharding, without mesh axes that do not divide a leaf evenly.

    Args:
        node: a node of arrays or shapes.
        sharding: the sharding of the weight, or None.

    Returns:
        A node of shardings; None if `sharding` is None.
    """
    if sharding is None:
        return None
    ndim = len(node.codes.shape)
    spec = (*sharding.spec, *(None,) * (ndim - len(sharding.spec)))

    def leaf_sharding(leaf: Any) -> Any:
        axes = spec if len(leaf.shape) == ndim else (*spec[: ndim - 2], *(None,) * (len(leaf.shape) - ndim + 2))
        counts = [math.prod(sharding.mesh.shape[name] for name in axis_names(axis)) for axis in axes]
        sizes = zip(axes, leaf.shape, counts, strict=True)
        leaf_spec = [axis if size % count == 0 else None for axis, size, count in sizes]
        return jax.sharding.NamedSharding(sharding.mesh, jax.P(*leaf_spec), memory_kind=sharding.memory_kind)

    return jax.tree.map(leaf_sharding, node)


def _check_finite(path: str, form: Format, checks: Array) -> None:
    is_finite, stays_finite = np.asarray(checks).tolist()
    if not is_finite:
        hint = "load the weights again: they are damaged, or a run diverged"
        raise StructureError(f"{path} has a value that is not finite, which would corrupt its block", hint=hint)
    if not stays_finite:
        problem = f"{path} has a value close to the largest of its dtype, which {form.name} rounds to infinity"
        raise StructureError(problem, hint="scale the weight down, or leave it out of the pattern")


def _encode_array(form: Format, dtype: Any, weight: Array) -> QuantizedWeight:
    def encode_node(weight: Array) -> QuantizedWeight:
        return encode(weight, form, dtype)

    def leaf_shardings(_: Any) -> Any:
        like = jax.ShapeDtypeStruct(weight.shape, weight.dtype)
        return placed(jax.eval_shape(encode_node, like), shardings_of(weight))

    return without_explicit_axes(encode_node, leaf_shardings, weight)


@functools.partial(jax.jit, static_argnums=0)
def _quantize_matrix(form: Format, weight: Array) -> tuple[QuantizedWeight, Array]:
    """Return the node, and two bools: whether all entries are finite before quantisation, and after it."""

    def check(weight: Array, node: QuantizedWeight) -> Array:
        return jnp.stack([jnp.all(jnp.isfinite(weight)), jnp.all(jnp.isfinite(largest_values(node)))])

    node = _encode_array(form, weight.dtype, weight)
    return node, without_explicit_axes(check, lambda mesh: jax.sharding.NamedSharding(mesh, jax.P()), weight, node)


def _take_matrix(stack: Any, index: tuple[int, ...]) -> Any:
    if index and any(isinstance(leaf, jax.Array) and explicit_mesh(leaf) for leaf in jax.tree.leaves(stack)):
        return _take_sharded_matrix(stack, tuple(np.int32(i) for i in index))
    return jax.tree.map(lambda leaf: leaf[index] if index else leaf, stack)


@jax.jit
def _take_sharded_matrix(stack: Any, index: tuple[Any, ...]) -> Any:
    def take(stack: Any, index: tuple[Any, ...]) -> Any:
        return jax.tree.map(lambda leaf: leaf[index], stack)

    def place(leaf: Any) -> Any:
        sharding = jax.typeof(leaf).sharding
        return jax.sharding.NamedSharding(sharding.mesh, jax.P(*sharding.spec[len(index) :]))

    return without_explicit_axes(take, lambda _: jax.tree.map(place, stack), stack, index)


@functools.partial(jax.jit, donate_argnums=0)
def _write_matrix(stack: Any, matrix: Any, index: tuple[Any, ...]) -> Any:
    def write(buffer: Array, leaf: Array) -> Array:
        start = (*index, *(np.int32(0),) * leaf.ndim)
        return jax.lax.dynamic_update_slice(buffer, leaf[(None,) * len(index)], start)

    def write_leaves(stack: Any, matrix: Any) -> Any:
        return jax.tree.map(write, stack, matrix)

    return without_explicit_axes(write_leaves, lambda _: shardings_of(stack), stack, matrix)


def _dequantize(node: QuantizedWeight) -> Any:
    if isinstance(node.codes, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(node.shape, node.dtype, sharding=node.sharding)
    stack = node.codes.shape[:-2]
    if not stack or isinstance(node.codes, jax.core.Tracer):
        return _dequantize_matrix(node)
    dense = jnp.zeros(node.shape, node.dtype, device=node.sharding)
    for index in np.ndindex(*stack):
        dense = _write_matrix(dense, _dequantize_matrix(_take_matrix(node, index)), tuple(map(np.int32, index)))
    return dense if node.sharding is None else jax.device_put(dense, node.sharding)


@jax.jit
def _dequantize_matrix(node: QuantizedWeight) -> Array:
    return node.dense()
