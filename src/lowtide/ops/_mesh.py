"""Kernels in programs for several devices: rows and heads are sharded, or blocks replace the kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import P

from ..core import BATCH_AXES, traced_mesh


def shard_over_mesh(compute: Callable[..., Any], blocks_fn: Callable[..., Any], *args: Any) -> Any:
    """Run a pass of a kernel, once on each device if a known mesh shards rows and heads.

    `blocks_fn` is the same pass of `_blocks`, which gives the shapes of the results. The rank of an argument or a
    result selects its sharding: sinks [N], segments [B, T], log-sum-exps [B, N, T], or tokens [B, T, N, H].
    """
    arrays = jax.tree.leaves(args)
    mesh = traced_mesh()
    batch, heads = arrays[0].shape[0], math.gcd(arrays[0].shape[2], arrays[1].shape[2])
    axes = _mesh_axes(mesh, batch, heads)
    if axes is None:
        return compute(*args)
    row_axes, head_axes = axes
    token_spec = P(row_axes, None, head_axes, None)
    specs = {0: P(), 1: P(head_axes), 2: P(row_axes, None), 3: P(row_axes, head_axes, None), 4: token_spec}
    in_specs = jax.tree.map(lambda leaf: specs[leaf.ndim], args)
    out_specs = jax.tree.map(lambda leaf: specs[leaf.ndim], jax.eval_shape(blocks_fn, *args))
    names = set(mesh.axis_names) - set(getattr(mesh, "manual_axes", ()))
    # Under `jax.set_mesh` or another `jax.shard_map`, None means the current mesh.
    mesh_arg = None if not jax.sharding.get_abstract_mesh().empty else mesh

    def local(*args: Any) -> Any:
        # The gradient of sinks [N] is a sum over rows, which are sharded. All other results have one entry per row.
        return jax.tree.map(lambda leaf: jax.lax.psum(leaf, row_axes) if leaf.ndim == 1 else leaf, compute(*args))

    sharded: Any = jax.shard_map(
        local, mesh=mesh_arg, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False
    )
    return sharded(*args)


def _mesh_axes(mesh: Any, batch: int, heads: int) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return the mesh axes that shard rows and heads; None if their sizes do not fit, or if the mesh has other axes."""
    if mesh is None:
        return None
    manual = getattr(mesh, "manual_axes", ())
    sizes = {name: size for name, size in mesh.shape.items() if size > 1 and name not in manual}
    row_axes = tuple(name for name in BATCH_AXES if name in sizes)
    head_axes = tuple(name for name in ("tensor", "context") if name in sizes)
    if not sizes or set(sizes) - {*row_axes, *head_axes}:
        return None
    num_row_shards, num_head_shards = (math.prod(sizes[name] for name in names) for names in (row_axes, head_axes))
    return None if batch % num_row_shards or heads % num_head_shards else (row_axes, head_axes)


def fold_rows(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make `jax.vmap` of a pass add its axis to the rows of the batch, the first axis of arrays with two or more axes.

    JAX's own rule for cuDNN's kernel supports neither documents nor every mask array. If an argument with fewer axes
    is mapped, such as sinks or a traced window, the pass runs for one entry of the mapped axis after another.
    """
    mapped: Any = jax.custom_batching.custom_vmap(fn)

    @mapped.def_vmap
    def rule(axis_size: int, in_batched: Any, *args: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
        leaves, tree = jax.tree.flatten(args)
        are_mapped = jax.tree.leaves(in_batched)
        if any(leaf.ndim < 3 for leaf, is_mapped in zip(leaves, are_mapped, strict=True) if is_mapped):
            stacked = [leaf for leaf, is_mapped in zip(leaves, are_mapped, strict=True) if is_mapped]

            def run(entries: list[Any]) -> Any:
                entry = iter(entries)
                pairs = zip(leaves, are_mapped, strict=True)
                return mapped(*tree.unflatten([next(entry) if is_mapped else leaf for leaf, is_mapped in pairs]))

            results = jax.lax.map(run, stacked)
        else:
            results = mapped(
                *tree.unflatten([_fold(*pair, axis_size) for pair in zip(leaves, are_mapped, strict=True)])
            )
            results = jax.tree.map(lambda leaf: leaf.reshape(axis_size, -1, *leaf.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return mapped


def _fold(leaf: Any, is_mapped: bool, axis_size: int) -> Any:
    """Merge the mapped axis, which comes first, into the rows; arrays with fewer than two axes have no rows."""
    if not is_mapped and leaf.ndim < 2:
        return leaf
    leaf = leaf if is_mapped else jnp.broadcast_to(leaf, (axis_size, *leaf.shape))
    return leaf.reshape(-1, *leaf.shape[2:])
