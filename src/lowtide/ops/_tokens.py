"""A function of each token by itself, over tiles of tokens: its intermediate arrays are those of one tile.

For blocks that the backward pass computes again in any case: what the function keeps for its derivative is made there,
tile by tile, so that it runs as often as before. Gradients of what it closes over are added up in float32 at least.

Shapes: B batch, T tokens.

Deviations and limits: reverse mode only (`jax.custom_vjp`); weights are read once for each tile.

Source: Bekman et al., "Arctic Long Sequence Training" (arXiv:2506.13996), section 3.1, tiled MLP.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..core import LinearWeight, Tree, explicit_mesh, is_key, traced_device, zero_after
from ..core._compat import laid_out_on_tpus, like_type
from ..targets import busy_rows
from ._divided import divided_sizes

_ROWS_ON_CPU, _ROWS_ELSEWHERE = 256, 1024
"""Rows that keep products busy on chips of which nobody says how fast they are."""
_MOST_UNROLLED = 4
_NUM_WIDE = 4
"""How many arrays of the full width live at once: of a gated MLP two, and their cotangents."""


def over_tokens(fn: Callable[[Tree, Array], Tree], params: Tree, x: Array, *, width: int, share: float = 1) -> Tree:
    """Compute ``fn(params, x)`` tile by tile, where that saves bytes.

    Few tiles are written out. Of many there is a loop, which costs a copy of the weights of its own: XLA reads a layer's
    slice of stacked weights in place in products alone. Weights in few bits are made arrays before a loop, for their
    products would make them for each tile.

    Args:
        fn: of parameters and tokens [B, t, ...], to arrays [B, t, ...], each token by itself; it closes over nothing
            that is traced.
        params: what it reads beside tokens. Random keys among them are made others for each tile.
        x: tokens, [B, T, ...].
        width: numbers of the widest array that it makes of a token.
        share: the part of tokens that a weight is multiplied by, of experts.

    Returns:
        What `fn` returns of all tokens.

    Memory:
        For the backward pass `params` and `x`. Arrays of the full width of one tile, which has as many tokens as keep a
        chip's products busy, or more.
    """
    leaves, treedef = jax.tree.flatten(params)
    if explicit_mesh((leaves, x)) is not None:  # whose arrays of zeros would say how they are divided
        return fn(params, x)
    return _over_tiles((fn, treedef, tile_size(x.shape, width * x.dtype.itemsize, params, share)), tuple(leaves), x)


def tile_size(shape: tuple[int, ...], width_bytes: int, params: Tree, share: float = 1) -> int:
    """Return how many tokens of each row a tile has.

    Args:
        shape: of the tokens, [B, T, ...], over all devices.
        width_bytes: of the widest array, for each token.
        params: whose bytes a loop copies.
        share: as in `over_tokens`.
    """
    device = traced_device()
    busy = _ROWS_ON_CPU if device.platform == "cpu" else busy_rows(device.device_kind) or _ROWS_ELSEWHERE
    busy = round(busy / share)
    batch, _ = divided_sizes(shape[0], 1)
    tokens, wide = batch * shape[1], _NUM_WIDE * width_bytes
    nodes = jax.tree.leaves(params, is_leaf=_is_in_few_bits)
    copied = sum(2 * math.prod(node.shape) for node in nodes if len(node.shape) > 1)
    unrolled = tokens if any(map(_is_in_few_bits, nodes)) else max(busy, -(-tokens // _MOST_UNROLLED))
    looped = max(busy, 1 << max(copied // wide // 2, 1).bit_length() - 1)
    rows = unrolled if unrolled * wide <= looped * wide + copied else looped
    return min(shape[1], max(1, -(-rows // batch)))


def _is_in_few_bits(node: Any) -> bool:
    return isinstance(node, LinearWeight) and hasattr(node, "dense")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_tiles(static: Any, leaves: tuple[Any, ...], x: Array) -> Tree:
    fn, treedef, size = static
    params = treedef.unflatten(leaves)
    params = _with_arrays(params, _arrays(params, x, size))
    shapes = jax.eval_shape(fn, params, x)
    results = jax.tree.map(lambda like: like_type([x, *leaves], like.shape, like.dtype), shapes)

    def body(index: Any, start: Any, size: int, results: Tree) -> Tree:
        return _written(results, fn(_of_tile(params, index), _tile(x, start, size)), start)

    return _loop(x.shape[1], size, body, results)


def _forward(static: Any, leaves: tuple[Any, ...], x: Any) -> tuple[Tree, Any]:
    wanted = tuple(leaf.perturbed for leaf in leaves)
    values = tuple(leaf.value for leaf in leaves)
    return _over_tiles(static, values, x.value), (values, x.value, wanted)


def _backward(static: Any, residuals: Any, cotangents: Tree) -> tuple[Any, Any]:
    fn, treedef, size = static
    leaves, x, wanted = residuals
    is_zero = jax.tree.map(_is_zero, cotangents, is_leaf=_is_zero)
    trained = [leaf if wants else None for leaf, wants in zip(leaves, wanted, strict=True)]
    given = [*jax.tree.leaves(cotangents, is_leaf=_is_zero), x, *leaves]
    given = [each for each in given if not _is_zero(each)]
    arrays = _arrays(treedef.unflatten(leaves), x, size)

    def body(index: Any, start: Any, size: int, carry: Any) -> Any:
        dleaves, dx = carry

        def run(trained: list[Any], tile: Array) -> Tree:
            own = [old if new is None else new for old, new in zip(leaves, trained, strict=True)]
            return fn(_of_tile(_with_arrays(treedef.unflatten(own), arrays), index), tile)

        out, vjp = jax.vjp(run, trained, _tile(x, start, size))
        douts = jax.tree.map(
            lambda zero, whole, like: jnp.zeros_like(like) if zero else _tile(whole, start, size),
            is_zero,
            cotangents,
            out,
        )
        more, dtile = vjp(douts)
        return jax.tree.map(lambda sum, one: sum + one.astype(sum.dtype), dleaves, more), _written(dx, dtile, start)

    def zeros(like: Any, dtype: Any) -> Array:
        return like_type(given, like.shape, dtype)

    sums = jax.tree.map(lambda leaf: zeros(leaf, jnp.promote_types(leaf.dtype, jnp.float32)), trained)
    dleaves, dx = _loop(x.shape[1], size, body, (sums, zeros(x, x.dtype)))
    # XLA might do first what needs `dx`, and keep the wide arrays for the gradients of leaves meanwhile.
    dleaves, dx = jax.lax.optimization_barrier((dleaves, dx))
    found = [None if one is None else one.astype(leaf.dtype) for one, leaf in zip(dleaves, leaves, strict=True)]
    return tuple(found), dx


_over_tiles.defvjp(_forward, _backward, symbolic_zeros=True)


def _is_zero(value: Any) -> bool:
    return isinstance(value, jax.custom_derivatives.SymbolicZero)


def _arrays(params: Tree, x: Array, size: int) -> list[Array]:
    """Make arrays of the weights in few bits, where there is a loop."""
    if x.shape[1] // size <= _MOST_UNROLLED:
        return []
    nodes: list[Any] = jax.tree.leaves(params, is_leaf=_is_in_few_bits)
    return [_laid_out(node.dense(x.dtype)) for node in nodes if _is_in_few_bits(node)]


def _laid_out(weight: Array) -> Array:
    """Store a weight as its codes are, else XLA lays out those of all layers anew."""
    return laid_out_on_tpus(weight, tuple(range(weight.ndim)))


def _with_arrays(params: Tree, arrays: list[Array]) -> Tree:
    """Put arrays in the place of the weights in few bits, if there are any."""
    if not arrays:
        return params
    left = iter(arrays)
    return jax.tree.map(lambda node: next(left) if _is_in_few_bits(node) else node, params, is_leaf=_is_in_few_bits)


def _of_tile(params: Tree, index: Any) -> Tree:
    def one(leaf: Any) -> Any:
        return jax.random.fold_in(leaf, index) if is_key(leaf) else leaf

    return jax.tree.map(one, params)


def _tile(x: Array, start: Any, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)


def _written(whole: Tree, tile: Tree, start: Any) -> Tree:
    return jax.tree.map(lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, start, axis=1), whole, tile)


def _loop(length: int, size: int, body: Callable[[Any, Any, int, Any], Any], carry: Any) -> Any:
    """Run body(index, start, size, carry) over full tiles, in a loop if there are many, and over the shorter rest."""
    full = length // size
    if full > _MOST_UNROLLED:
        carry = jax.lax.fori_loop(0, full, lambda i, c: body(i, i * size, size, c), carry)
        return body(full, full * size, length - full * size, carry) if length % size else carry
    for index, start in enumerate(range(0, length, size)):
        own = min(size, length - start)
        carry = body(index, start + zero_after(carry), own, carry) if own < length else body(0, 0, own, carry)
    return carry
