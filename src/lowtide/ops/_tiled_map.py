"""Map a function of single tokens over tiles of tokens, so that its intermediate arrays have the size of a tile.

The map suits blocks that the backward pass recomputes in any case. The function's residuals are then made in the
backward pass, tile by tile, so the function runs as often as without tiles. Gradients of parameters and closed-over
arrays are summed in float32 at least. The gradient of the first array overwrites the cotangent of the first result if
their shapes and dtypes agree. If the tokens of rows are sharded, each device maps over its local tokens.

Shapes: B batch, T tokens, t tokens of a tile.

Deviations and limits: tiles support only reverse mode (`jax.custom_vjp`); weights are read once per tile.

Source: Bekman et al., "Arctic Long Sequence Training" (arXiv:2506.13996), section 3.1, tiled MLP.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from ..core import (
    CONTEXT,
    ConfigError,
    ConvertedClosure,
    LinearWeight,
    Tree,
    check_integer,
    check_number,
    closure_convert,
    explicit_mesh,
    initial_carry,
    is_key,
    is_own_name,
    kept_names,
    map_token_shards,
    num_token_shards,
    traced_device,
    uniformly_varying,
    zero_after,
)
from ..core._compat import laid_out_on_tpus
from ..jaxprs import evaluate, make_jaxpr
from ..targets import busy_rows
from ._blocks import local_sizes, wide_dtype

_ROWS = {"cpu": 256, "gpu": 8192}
"""Minimum rows of a tile, by platform: with fewer rows, a product leaves some of a GPU's hundred processors idle."""
_DEFAULT_ROWS = 1024
_LEAST_SAVED = {"gpu": 2**29}
_DEFAULT_LEAST_SAVED = 2**27
"""Fewest bytes that tiles have to save. The minimum is higher on a GPU, which launches all operations per tile."""
_MOST_UNROLLED = 8
_NUM_WIDE = 4
"""Number of arrays of the full width that live at once: two arrays of a gated MLP, and their cotangents."""


def tiled_map(
    fn: Callable[[Tree, Tree], Tree], params: Tree, x: Tree, *, width: int, share: float = 1, size: int | None = None
) -> Tree:
    """Compute ``fn(params, x)`` tile by tile, if that saves memory.

    Up to 8 full tiles are unrolled. More tiles are a loop, which copies the weights: XLA reads a layer's slice of
    stacked weights in place for a product, but not for a loop. Quantised weights are dequantised once, before a loop.

    Args:
        fn: a function of parameters and arrays [B or 1, t, ...] that returns arrays [B, t, ...] and treats tokens
            independently.
        params: arrays that `fn` reads in addition to tokens. Random keys (of `jax.random.key`) differ between tiles.
        x: arrays of the tokens [B or 1, T, ...]. The first array has the activations [B, T, D].
        width: elements per token of the widest array that `fn` makes.
        share: fraction of the tokens that each weight multiplies, below 1 for experts.
        size: tokens of a tile, counted over all rows of one device. None chooses a size that keeps the chip busy. With
            None, there are no tiles if they would save little memory, or on a mesh with explicit axes.

    Returns:
        The result of `fn` for all tokens.

    Raises:
        ConfigError: for a `size` that is not a number of tokens, or that is given on a mesh with explicit axes; for an
            invalid `width` or `share`; for arrays or results without tokens; for `params` that are not arrays; and
            inside of a `jax.shard_map` for a function that closes over arrays that are the same on all devices.

    Memory:
        With several tiles the residuals are `params` and `x`. Arrays of the full width exist for one tile at a time.

    Examples:
        >>> def mlp(params, x):
        ...     return jax.nn.silu(x @ params["up"]) @ params["down"]
        >>> params = {"up": jnp.ones((8, 32)), "down": jnp.ones((32, 8))}
        >>> tiled_map(mlp, params, jnp.ones((2, 6, 8)), width=32, size=4).shape
        (2, 6, 8)
    """
    (leaves, treedef), (arrays, structure) = jax.tree.flatten(params), jax.tree.flatten(x)
    _check(arrays, leaves, size)
    hint = "pass the elements per token of the widest array, such as the intermediate size of a gated MLP"
    check_integer("tiled_map: width", width, hint=hint)
    hint = "pass the experts per token divided by the number of experts"
    check_number("tiled_map: share", share, above=0, most=1, hint=hint)
    if explicit_mesh((leaves, arrays)) is not None:  # with explicit axes, zeros for results would need shardings
        return _call_untiled(fn, params, x, arrays)
    if num_token_shards(arrays[0].shape[1], arrays) > 1:

        def map_local(params: Tree, x: Tree) -> Tree:
            params = _fold_in_keys(params, jax.lax.axis_index(CONTEXT))
            return tiled_map(fn, params, x, width=width, share=share, size=size)

        return map_token_shards(map_local, params, x)
    if size is None:
        tile = tile_size(arrays[0].shape, width * arrays[0].dtype.itemsize, params, share)
    else:
        tile = max(1, size // local_sizes(arrays[0].shape[0], 1)[0])
    if tile >= arrays[0].shape[1]:
        return _call_untiled(fn, params, x, arrays)
    leaves, arrays = uniformly_varying((tuple(leaves), tuple(arrays)))
    static, captured = _capture_tracers(_Static(fn, treedef, structure, tile, kept_names()), leaves, arrays)
    return _over_tiles(static, (*leaves, *captured), arrays)


def _capture_tracers(static: _Static, leaves: Sequence[Any], x: Sequence[Array]) -> tuple[_Static, list[Any]]:
    """Turn tracers that the function closes over into leaves: a `jax.custom_vjp` has no derivatives of closures."""
    dense_weights = jax.eval_shape(lambda leaves, x: _dequantize_weights(static, leaves, x), list(leaves), list(x))
    closed, captured = dict[int, tuple[ConvertedClosure, int]](), list[Any]()
    for size in {static.size, x[0].shape[1] % static.size} - {0}:
        tile = jax.eval_shape(lambda x, size=size: _slice(x, 0, size), list(x))
        converted = closure_convert(static, list(leaves), dense_weights, jnp.int32(0), tile)
        closed[size] = converted, len(leaves) + len(captured)
        captured += converted.tracers
    (_, varying) = uniformly_varying((x[0], captured))
    if any(jax.typeof(varied) != jax.typeof(tracer) for varied, tracer in zip(varying, captured, strict=True)):
        types = ", ".join(map(str, map(jax.typeof, captured)))
        problem = "tiled_map: the function closes over arrays that are the same on all devices of a jax.shard_map"
        raise ConfigError(f"{problem}: {types}", hint="pass them in params")
    return (static._replace(closed=closed), captured) if captured else (static, [])


def _check(arrays: Sequence[Any], leaves: Sequence[Any], size: int | None) -> None:
    shapes: list[tuple[int, ...]] = [tuple(getattr(array, "shape", ())) for array in arrays]
    rows, *tokens = (*shapes[0][:2], 0)[:2] if shapes else (0, 0)
    if not rows or tokens == [0] or any(list(shape[1:2]) != tokens or shape[0] not in (1, rows) for shape in shapes):
        got = ", ".join(str(getattr(array, "shape", type(array).__name__)) for array in arrays) or "no array"
        expected = "arrays with rows and tokens, [B, T, ...], or [1, T, ...] after the first one"
        raise ConfigError(f"tiled_map: x must be {expected}, not {got}", hint="pass arrays without tokens in params")
    if no_arrays := [leaf for leaf in leaves if not (hasattr(leaf, "shape") or isinstance(leaf, numbers.Number))]:
        hint = "bind settings to the function with functools.partial"
        raise ConfigError(f"tiled_map: params must be arrays, not {no_arrays[0]!r}", hint=hint)
    if size is None:
        return
    check_integer("tiled_map: size", size, hint="leave it out to choose a size that keeps the target busy")
    if explicit_mesh((leaves, arrays)) is not None:
        hint = "leave size out, or make the mesh with jax.sharding.AxisType.Auto"
        raise ConfigError(f"tiled_map: size={size} is not supported on a mesh with explicit axes", hint=hint)


def _call_untiled(fn: Callable[[Tree, Tree], Tree], params: Tree, x: Tree, arrays: Sequence[Any]) -> Tree:
    results = fn(params, x)
    _check_results(jax.tree.leaves(results), *2 * [arrays[0].shape[1]])
    return results


def _check_results(results: Sequence[Any], length: int, num_tokens: int) -> None:
    if any(len(getattr(result, "shape", ())) < 2 or result.shape[1] != length for result in results):
        got = ", ".join(str(getattr(result, "shape", type(result).__name__)) for result in results)
        tile = f" for a tile of {length} of {num_tokens} tokens" if length < num_tokens else ""
        hint = "return one entry for each token, and sum over tokens outside of the function"
        raise ConfigError(f"tiled_map: the function must return arrays [B, {length}, ...]{tile}, not {got}", hint=hint)


def tile_size(shape: tuple[int, ...], width_bytes: int, params: Tree, share: float = 1) -> int:
    """Return how many tokens of each row a tile has.

    `shape`, [B, T, ...], is the shape of the tokens over all devices that shard rows. `width_bytes` are the bytes per
    token of the widest array. `params` matter, because a loop over tiles copies them.
    """
    device = traced_device()
    busy = _ROWS.get(device.platform) or busy_rows(device.device_kind) or _DEFAULT_ROWS
    busy = round(busy / share)
    batch, _ = local_sizes(shape[0], 1)
    tokens, wide = batch * shape[1], _NUM_WIDE * width_bytes
    nodes = jax.tree.leaves(params, is_leaf=_is_quantized)
    copied = sum(2 * math.prod(node.shape) for node in nodes if len(node.shape) > 1)
    # Unrolled tiles are few, so they are large. Each would dequantise quantised weights again, so these get one tile.
    unrolled = tokens if any(map(_is_quantized, nodes)) else max(busy, -(-tokens // _MOST_UNROLLED))
    # A loop copies the weights in any case, so its tiles may take half the copy's bytes, with a power of two of rows.
    looped = max(busy, 1 << max(copied // wide // 2, 1).bit_length() - 1)
    rows = unrolled if unrolled * wide <= looped * wide + copied else looped
    saved = (tokens - rows) * wide - (0 if rows == unrolled else copied)
    is_worthwhile = saved >= _LEAST_SAVED.get(device.platform, _DEFAULT_LEAST_SAVED)
    return shape[1] if not is_worthwhile else min(shape[1], max(1, -(-rows // batch)))


def _is_quantized(node: Any) -> bool:
    return isinstance(node, LinearWeight) and hasattr(node, "dense")


class _Static(NamedTuple):
    """The function, and all settings of its map that are not arrays."""

    fn: Callable[[Tree, Tree], Tree]
    params: Any
    """Structure of the parameters."""
    x: Any
    """Structure of the tokens."""
    size: int
    kept: frozenset[str] | None
    """Names of values that are stored until the backward pass (`lowtide.core.kept_names`)."""
    closed: Mapping[int, tuple[ConvertedClosure, int]] = {}
    """Traced `fn` and the leaf index of its first tracer, by tokens per tile; empty unless `fn` closes over tracers."""

    def __call__(self, leaves: Sequence[Any], dense_weights: list[Array], index: Any, tile: Sequence[Any]) -> Tree:
        if self.closed:
            closed, begin = self.closed[tile[0].shape[1]]
            index = jnp.asarray(index, jnp.int32)
            inputs = jax.tree.leaves((list(leaves[: self.params.num_leaves]), dense_weights, index, list(tile)))
            results = closed(inputs, leaves[begin : begin + len(closed.tracers)])
            return jax.tree.structure(closed.shapes).unflatten(results)
        params = _replace_quantized(self.params.unflatten(leaves), dense_weights)
        return self.fn(_fold_in_keys(params, index), self.x.unflatten(tile))

    def with_names(
        self, leaves: Sequence[Any], dense_weights: list[Array], index: Any, tile: Sequence[Any], stored: Any = None
    ) -> tuple[Tree, dict[str, Array]]:
        """Return the results of a tile, and its values with kept names, by number and name.

        Each value has the shape [B, t, ...]. With `stored`, values that were stored replace the computed values. XLA
        removes the computation of a replaced value, but the gradient flows through it.
        """
        values: dict[str, Array] = {}

        def on_name(name: str, value: Any) -> Any:
            if (is_own_name(name) if self.kept is None else name not in self.kept) or value.shape[1:2] != length:
                return value
            key = f"{len(values)}/{name}"
            values[key] = value if stored is None else _substitute(value, stored[key])
            return values[key]

        length = tile[0].shape[1:2]
        closed, shapes = make_jaxpr(self)(list(leaves), dense_weights, index, list(tile))
        inputs = jax.tree.leaves((list(leaves), dense_weights, index, list(tile)))
        return jax.tree.structure(shapes).unflatten(evaluate(closed, inputs, on_name)), values


@jax.custom_jvp
def _substitute(value: Any, stored: Any) -> Any:
    """Return `stored`; its derivative is that of `value`."""
    return stored


@_substitute.defjvp
def _substitute_jvp(primals: Any, tangents: Any) -> Any:
    return primals[1], tangents[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_tiles(static: _Static, leaves: tuple[Any, ...], x: tuple[Array, ...]) -> Tree:
    return _results(static._replace(kept=frozenset()), leaves, x)[0]


def _results(static: _Static, leaves: tuple[Any, ...], x: tuple[Array, ...]) -> tuple[Tree, dict[str, Array]]:
    """Return the results, and the values with kept names, for all tiles."""
    length, size = x[0].shape[1], static.size
    call = static.with_names if static.kept != frozenset() else lambda *args: (static(*args), {})
    shapes: Any = jax.eval_shape(lambda leaves, x: call(leaves, [], 0, _slice(x, 0, size)), list(leaves), list(x))
    _check_results(jax.tree.leaves(shapes[0]), size, length)

    def full_zeros(like: Any) -> Array:
        return initial_carry([*x, *leaves], (like.shape[0], length, *like.shape[2:]), like.dtype)

    results = jax.tree.map(full_zeros, shapes)
    dense_weights = _dequantize_weights(static, leaves, x)

    def body(index: Any, start: Any, size: int, results: Tree) -> Tree:
        return _update(results, call(leaves, dense_weights, index, _slice(x, start, size)), start)

    return _loop(x[0].shape[1], static.size, body, results)


def _forward(static: _Static, leaves: Any, x: Any) -> tuple[Tree, Any]:
    perturbed = tuple(leaf.perturbed for leaf in leaves)
    # A Python number arrives as a scalar object of JAX that is not an array.
    leaves, x = (
        tuple(primal.value if hasattr(primal.value, "shape") else jnp.asarray(primal.value) for primal in primals)
        for primals in (leaves, x)
    )
    results, kept = _results(static, leaves, x)
    # Policies of `jax.checkpoint` select these names.
    kept = {key: checkpoint_name(array, key.partition("/")[2]) for key, array in kept.items()}
    return results, (leaves, x, perturbed, kept)


def _backward(static: _Static, residuals: Any, cotangents: Tree) -> tuple[Any, Any]:
    leaves, x, perturbed, kept = residuals
    trained = [leaf if is_perturbed else None for leaf, is_perturbed in zip(leaves, perturbed, strict=True)]
    floating = [array if jnp.issubdtype(array.dtype, jnp.inexact) else None for array in x]
    douts, structure = jax.tree.flatten(cotangents, is_leaf=_is_zero)
    inputs = [array for array in (*douts, *x, *leaves, *kept.values()) if not _is_zero(array)]
    dense_weights = _dequantize_weights(static, leaves, x)
    in_place = not _is_zero(douts[0]) and (douts[0].shape, douts[0].dtype) == (x[0].shape, x[0].dtype)

    def zeros(like: Any, dtype: Any) -> Array:
        return initial_carry(inputs, like.shape, dtype)

    def body(index: Any, start: Any, size: int, carry: Any) -> Any:
        dleaves, dx = carry

        def run(trained: list[Any], floating: list[Any]) -> list[Array]:
            tile = [old if new is None else new for old, new in zip(_slice(x, start, size), floating, strict=True)]
            merged = [old if new is None else new for old, new in zip(leaves, trained, strict=True)]
            results = (
                static.with_names(merged, dense_weights, index, tile, _slice(kept, start, size))[0]
                if kept
                else static(merged, dense_weights, index, tile)
            )
            return structure.flatten_up_to(results)

        outs, vjp = jax.vjp(run, trained, _slice(floating, start, size))
        full_douts = [dx[0], *douts[1:]] if in_place else douts
        pairs = zip(full_douts, outs, strict=True)
        grads, dx_tile = vjp([jnp.zeros_like(out) if _is_zero(d) else _slice(d, start, size) for d, out in pairs])
        dleaves = jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), dleaves, grads)
        return dleaves, _update(dx, dx_tile, start)

    dleaves = jax.tree.map(lambda leaf: zeros(leaf, wide_dtype(leaf.dtype)), trained)
    dx = jax.tree.map(lambda array: zeros(array, array.dtype), floating)
    if in_place:
        dx[0] = douts[0]
    dleaves, dx = _loop(x[0].shape[1], static.size, body, (dleaves, dx))
    # Without a barrier XLA might first use `dx`, and keep the wide arrays for the gradients of leaves until later.
    dleaves, dx = jax.lax.optimization_barrier((dleaves, dx))
    leaf_grads = [None if grad is None else grad.astype(leaf.dtype) for grad, leaf in zip(dleaves, leaves, strict=True)]
    return tuple(leaf_grads), tuple(dx)


_over_tiles.defvjp(_forward, _backward, symbolic_zeros=True)


def _is_zero(value: Any) -> bool:
    return isinstance(value, jax.custom_derivatives.SymbolicZero)


def _dequantize_weights(static: _Static, leaves: Sequence[Any], x: Sequence[Array]) -> list[Array]:
    """Return all quantised weights, dequantised, if tiles run in a loop; else an empty list."""
    if x[0].shape[1] // static.size <= _MOST_UNROLLED:
        return []
    params = leaves[: static.params.num_leaves]
    nodes: list[Any] = jax.tree.leaves(static.params.unflatten(params), is_leaf=_is_quantized)
    weights: list[Array] = [node.dense(x[0].dtype) for node in nodes if _is_quantized(node)]
    # Keep the layout of the codes. Otherwise XLA changes the layout of the codes of all layers.
    return [laid_out_on_tpus(weight, tuple(range(weight.ndim))) for weight in weights]


def _replace_quantized(params: Tree, arrays: list[Array]) -> Tree:
    """Replace the quantised weights of `params` by `arrays`; without arrays, return `params` unchanged."""
    if not arrays:
        return params
    remaining = iter(arrays)
    return jax.tree.map(lambda node: next(remaining) if _is_quantized(node) else node, params, is_leaf=_is_quantized)


def _fold_in_keys(params: Tree, index: Any) -> Tree:
    return jax.tree.map(lambda leaf: jax.random.fold_in(leaf, index) if is_key(leaf) else leaf, params)


def _slice(x: Tree, start: Any, size: int) -> Any:
    return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, start, size, axis=1), x)


def _update(arrays: Tree, tile: Tree, start: Any) -> Tree:
    return jax.tree.map(lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, start, axis=1), arrays, tile)


def _loop(length: int, size: int, body: Callable[[Any, Any, int, Any], Any], carry: Any) -> Any:
    """Run body(index, start, size, carry) over full tiles, in a loop if there are many, and a shorter last tile."""
    full = length // size
    if full > _MOST_UNROLLED:
        carry = jax.lax.fori_loop(0, full, lambda i, c: body(i, i * size, size, c), carry)
        return body(full, full * size, length - full * size, carry) if length % size else carry
    for index, start in enumerate(range(0, length, size)):
        count = min(size, length - start)
        # `zero_after` makes a tile wait for the tile before: XLA computed tiles concurrently in spite of a barrier.
        carry = body(index, start + zero_after(carry), count, carry) if count < length else body(0, 0, count, carry)
    return carry
