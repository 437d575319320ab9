"""LoRA for weights that are not matrices: kernels of attention and convolutions, and embedding tables.

Here a kernel is a weight W[m..., n...] with two groups of axes, m and n. A product sums over one group. The correction
is B A with B[m..., r] and A[r, n...]. The factor with the summed group replaces W in the product. The result has r in
place of the other group, and is then multiplied by the other factor. So a convolution becomes a convolution with r
channels and a product over channels, as in PEFT. A table lookup takes rows of B and multiplies them by A. In all
leaves, stack axes come before both groups. Only functions in `lowtide.adapted` can use the node.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ...core import ExternalNames, ModelFileError, StructureError, Tree, shown
from .._adapted import Use
from ._node import AdapterWeight, named_sharding, shard_leaf
from ._peft import (
    LORA,
    LORA_TENSORS,
    MERGE_HINT,
    MODEL_HINT,
    WEIGHT_INITS,
    PeftConfig,
    TensorFile,
    check_array,
    check_values,
    tensor_keys,
)
from ._sites import Site, sites

KERNELS = "lowtide_kernels"
"""Lowtide's own key in `adapter_config.json`, which PEFT ignores."""

# Source: Hu et al. (arXiv:2106.09685), section 4.1, for matrices; for convolutions PEFT's `lora.Conv2d`.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoRAKernel(AdapterWeight):
    """A weight with two groups of axes and a low-rank adapter; a pytree node for `lowtide.adapted`.

    The paths of its leaves are ``<path>/weight``, ``<path>/lora_a`` and ``<path>/lora_b``.

    Examples:
        >>> node = LoRAKernel(jnp.ones((3, 3, 4, 8)), jnp.ones((2, 8)), jnp.zeros((3, 3, 4, 2)), 1.0, 3, 1)
        >>> node.rank, node.shape
        (2, (3, 3, 4, 8))
    """

    NAME: ClassVar[str] = "LoRA of a kernel"
    PEFT_TYPE: ClassVar[str | None] = LORA
    REQUIRED_LEAVES: ClassVar[tuple[str, ...]] = ("weight", "lora_a", "lora_b")

    weight: Any
    """The base weight, [*stack, *m, *n]."""
    lora_a: Any
    """The factor A, [*stack, r, *n], float32."""
    lora_b: Any
    """The factor B, [*stack, *m, r], float32."""
    alpha: float = dataclasses.field(metadata={"static": True})
    """Numerator of the scale of the correction (static)."""
    num_rows: int = dataclasses.field(metadata={"static": True})
    """Number of axes of m (static)."""
    num_columns: int = dataclasses.field(metadata={"static": True})
    """Number of axes of n (static)."""

    @property
    def rank(self) -> int:
        """The rank r of B A."""
        return int(self.lora_b.shape[-1])

    @property
    def num_stacked(self) -> int:
        """Number of leading stack axes."""
        return self.ndim - self.num_rows - self.num_columns

    @property
    def scaling(self) -> float:
        """Scale of the correction B A: ``alpha / rank``."""
        return self.alpha / self.rank

    def transposed(self, order: tuple[int, ...]) -> LoRAKernel | None:
        """Transpose the weight; return None if `order` mixes its groups of axes or moves its stack axes."""
        num_stack, rows_end = self.num_stacked, self.num_stacked + self.num_rows
        stack, kernel_order = order[:num_stack], order[num_stack:]
        is_swapped = kernel_order[0] >= rows_end
        split = self.num_columns if is_swapped else self.num_rows
        first, second = kernel_order[:split], kernel_order[split:]
        row_axes, column_axes = (second, first) if is_swapped else (first, second)
        if stack != tuple(range(num_stack)) or sorted(row_axes) != [*range(num_stack, rows_end)]:
            return None
        # The factors are B [*stack, *m, r] and A [*stack, r, *n]. If the groups swap, Aᵀ becomes B and Bᵀ becomes A.
        weight, a_axes = self.weight.transpose(order), tuple(axis - self.num_rows + 1 for axis in column_axes)
        if is_swapped:
            new_b = self.lora_a.transpose((*stack, *a_axes, num_stack))
            new_a = self.lora_b.transpose((*stack, rows_end, *row_axes))
            return LoRAKernel(weight, new_a, new_b, self.alpha, self.num_columns, self.num_rows)
        new_a = self.lora_a.transpose((*stack, num_stack, *a_axes))
        new_b = self.lora_b.transpose((*stack, *row_axes, rows_end))
        return LoRAKernel(weight, new_a, new_b, self.alpha, self.num_rows, self.num_columns)

    def through(self, run: Callable[[Any], Any], *, over_rows: bool, at: int, dtype: Any) -> Any:
        """Compute a function that is linear in the weight, without materialising W + scaling B A.

        Args:
            run: the function. Its argument is an array in place of the weight, without stack axes. The array may have
                any number of axes in place of the free group, which is the group that `run` does not sum over.
            over_rows: whether `run` sums over m, or takes rows along m; otherwise it sums over n.
            at: position of the first axis of the free group in the result of `run`.
            dtype: dtype of the computation and of the result.

        Returns:
            ``run(W + scaling B A)``.

        Memory:
            In addition to the result, an array with r in place of the free group.
        """
        first, second = (self.lora_b, self.lora_a) if over_rows else (self.lora_a, self.lora_b)
        # `run` is linear and sums over one group only, so run(B A) is run(B) times A, or run(A) times B. The factor in
        # the call has one axis r in place of the free group, and the result of `run` has r as its axis `at`.
        low_rank = jnp.moveaxis(run(first.astype(dtype)), at, -1) * jnp.asarray(self.scaling, dtype)
        factor = second.astype(dtype) if over_rows else jnp.moveaxis(second.astype(dtype), -1, 0)
        num_free = factor.ndim - 1
        delta = jnp.tensordot(low_rank, factor, 1)
        delta = jnp.moveaxis(delta, tuple(range(-num_free, 0)), tuple(range(at, at + num_free)))
        return run(self.weight.astype(dtype)) + delta

    def inverted(self) -> LoRAKernel:
        """Return the inverse adapter: merging it undoes the merge of this adapter."""
        return dataclasses.replace(self, lora_b=-self.lora_b)


def init_kernel(weight: Any, use: Use, rank: int, alpha: float, draw: Callable[[tuple[int, ...]], Any]) -> LoRAKernel:
    """Make a node with A from `draw` and B zero; both are shapes if the weight is a `jax.ShapeDtypeStruct`."""
    shape_a, shape_b = _factor_shapes(tuple(weight.shape), rank, use.num_rows, use.num_columns)
    if isinstance(weight, jax.ShapeDtypeStruct):
        lora_a, lora_b = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (shape_a, shape_b))
    else:
        lora_a, lora_b = draw(shape_a), jnp.zeros(shape_b, jnp.float32)
    return _make_kernel(weight, lora_a, lora_b, alpha, use.num_rows, use.num_columns)


def _make_kernel(weight: Any, lora_a: Any, lora_b: Any, alpha: float, num_rows: int, num_columns: int) -> LoRAKernel:
    """Make a node; shard the factors like the kernel along the axes that they share with it."""
    if (sharding := named_sharding(weight)) is not None:
        spec = (*sharding.spec, *(None,) * (len(weight.shape) - len(sharding.spec)))
        specs = _factor_shapes(spec, None, num_rows, num_columns)
        lora_a, lora_b = (
            shard_leaf(leaf, jax.sharding.NamedSharding(sharding.mesh, jax.P(*axes)))
            for leaf, axes in zip((lora_a, lora_b), specs, strict=True)
        )
    return LoRAKernel(weight, lora_a, lora_b, alpha, num_rows, num_columns)


def _factor_shapes(shape: tuple[Any, ...], rank: Any, num_rows: int, num_columns: int) -> tuple[Any, Any]:
    """Return the shapes (or specs) of A [*stack, r, *n] and B [*stack, *m, r] from the shape of W [*stack, *m, *n]."""
    split = len(shape) - num_columns
    return (*shape[: split - num_rows], rank, *shape[split:]), (*shape[:split], rank)


def merge_kernel(node: LoRAKernel) -> Any:
    """Compute W + scaling B A in float32, with a float32 copy of W, and round it once to the dtype of W."""
    if isinstance(node.weight, jax.ShapeDtypeStruct):
        return node.weight
    weight, lora_a, lora_b = (jnp.asarray(leaf) for leaf in (node.weight, node.lora_a, node.lora_b))
    merged = _merge_arrays(weight, lora_a, lora_b, node.scaling, node.num_stacked)
    sharding = named_sharding(node.weight)
    return merged if sharding is None else jax.device_put(merged, sharding)


@functools.partial(jax.jit, static_argnums=4)
def _merge_arrays(weight: Any, lora_a: Any, lora_b: Any, scaling: float, num_stacked: int) -> Any:
    # Without `precision`, a GPU or TPU multiplies float32 in a shorter format.
    product: Callable[..., Any] = functools.partial(jnp.tensordot, axes=1, precision=jax.lax.Precision.HIGHEST)
    for _ in range(num_stacked):
        product = jax.vmap(product)
    delta = product(lora_b.astype(jnp.float32), lora_a.astype(jnp.float32))
    return (weight.astype(jnp.float32) + scaling * delta).astype(weight.dtype)


# In files, a module ``m`` has the tensors ``base_model.model.m.lora_A.weight`` and ``….lora_B.weight``. For a kernel in
# PyTorch's order, [out, in, *window], they are those of PEFT's convolutions, [r, in, *window] and [out, r, 1, ...]. For
# all other kernels they are `LoRAKernel.lora_a` and `LoRAKernel.lora_b`, which no other library reads. The shape of a
# kernel does not determine how many of its axes belong to m (row axes) and n (column axes). The key `KERNELS` of the
# configuration records both numbers. Files without this key are from PEFT, and their kernels are convolutions.


def kernel_name(model: Tree, site: Site) -> str:
    """Return the name of a kernel: its path with dots. Raise `StructureError` for a model with `ExternalNames`."""
    if isinstance(model, ExternalNames):
        hint = 'merge it with lt.lora.merge, or store lt.partition(model, "**/lora_*")[0], as checkpoints do'
        raise StructureError(f"{site.path}: PEFT's format cannot store the adapter of this kernel", hint=hint)
    return site.module.replace("/", ".")


def kernel_tensors(site: Site, name: str) -> dict[str, np.ndarray]:
    node = site.node
    check_values(site.path, [node.lora_a])
    shapes = _tensor_shapes(tuple(node.shape), node.rank, node.num_rows, node.num_columns)
    tensors = {leaf: np.asarray(getattr(node, leaf), np.float32).reshape(shapes[leaf]) for leaf in shapes}
    return {key: np.ascontiguousarray(tensors[leaf]) for leaf, key in tensor_keys(name, LORA_TENSORS).items()}


def adapted_kernels(model: Tree, config: PeftConfig, keys: set[str]) -> dict[int, tuple[str, int, int]]:
    """Map `Site.index` to name, number of row axes and number of column axes, for kernels with an adapter in files."""
    axis_counts: Mapping[str, Any] = (config.file.lowtide_kernels or {}) if config.is_lora else {}
    kernels: dict[int, tuple[str, int, int]] = {}
    for site in () if isinstance(model, ExternalNames) or not config.is_lora else sites(model):
        if not site.is_floating or len(site.weight.shape) < 2:
            continue
        name, ndim = site.module.replace("/", "."), len(site.weight.shape)
        if name in axis_counts and sum(axis_counts[name]) <= ndim:
            kernels[site.index] = (name, *axis_counts[name])
        elif name not in axis_counts and ndim > 2 and config.targets(name):
            if tensor_keys(name, LORA_TENSORS)["lora_a"] in keys:
                kernels[site.index] = (name, 1, ndim - 1)
    if absent := sorted({*axis_counts} - {name for name, _, _ in kernels.values()}):
        message = f"{config.source}: {KERNELS} names a kernel that the model lacks, or that has fewer axes there"
        raise ModelFileError(message, got=f"{shown(absent[0])}: {axis_counts[absent[0]]}", hint=MODEL_HINT)
    if kernels and (config.variants.non_sums or config.file.init_lora_weights in WEIGHT_INITS):
        message = f"{config.source}: only plain LoRA is supported for a kernel"
        options = [f"{v.option}={v in config.variants}" for v in config.kind.variants if not v.is_sum]
        options = ", ".join([*options, f"init_lora_weights={config.file.init_lora_weights!r}"])
        raise ModelFileError(message, got=options, hint=f"{MERGE_HINT}, or convert it to plain LoRA there")
    return kernels


def read_kernel(file: TensorFile, site: Site, kernel: tuple[str, int, int], config: PeftConfig) -> LoRAKernel:
    name, num_rows, num_columns = kernel
    check_array(file.path, site, "has a kernel adapter")
    shape, rank = tuple(site.weight.shape), config.rank_of(name)
    shapes = _tensor_shapes(shape, rank, num_rows, num_columns)
    tensors = {leaf: file.read(key, shapes[leaf]) for leaf, key in tensor_keys(name, LORA_TENSORS).items()}
    _, shape_b = _factor_shapes(shape, rank, num_rows, num_columns)
    lora_a, lora_b = jnp.asarray(tensors["lora_a"]), jnp.asarray(tensors["lora_b"].reshape(shape_b))
    alpha = config.alpha_of(name) * rank ** (1 - config.variants.power)
    return _make_kernel(site.weight, lora_a, lora_b, alpha, num_rows, num_columns)


def _tensor_shapes(shape: tuple[int, ...], rank: int, num_rows: int, num_columns: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of A and B in files; for a convolution in PEFT's format, B ends with axes of length 1."""
    shape_a, shape_b = _factor_shapes(shape, rank, num_rows, num_columns)
    ones = (1,) * (num_columns - 1) if num_rows == 1 and len(shape) == 1 + num_columns else ()
    return {"lora_a": shape_a, "lora_b": (*shape_b, *ones)}
