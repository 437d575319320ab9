"""Mixture of experts (MoE): the router, the experts' MLPs, grouped matrix products, and the load-balancing loss.

No token is dropped. A token has one row for each of its K experts. Rows are sorted by expert, and each expert computes
only its own rows (`grouped_linear`), as in Jiang et al., "Mixtral of Experts" (arXiv:2401.04088).

Shapes: B batch, T sequence, D model, E experts, K experts per token, M = B T K rows, F hidden. In a grouped product:
I in, O out, C rows of a block or tile, P rows of an expert in the slab (see `_SlabPlan`), G tiles at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Float, Int

from ..core import BATCH_AXES, CONTEXT, ConfigError, Tree, linear, num_shards_along, traced_device, traced_mesh
from ._config import Experts

_Activation = Callable[[Array], Array]


def mixture(
    mlp: Tree,
    x_BTD: Float[Array, "B T D"],
    experts: Experts,
    activation: _Activation,
    router_BTD: Float[Array, "B T D"] | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T E"], Float[Array, "B T E"]]:
    """Return the outputs of the MoE, the router's probabilities, and an array that is 1 for chosen experts, else 0.

    `router_BTD` are the inputs of the router, if they are not those of the experts.

    Each device sorts its own rows. With the mesh axis ``expert``, each device along the axis holds some experts. It
    gathers the tokens of all these devices, and a reduce-scatter adds up the outputs. Raises ConfigError if E is not a
    multiple of the axis size.

    Memory: K rows for each token of this device, or of all devices along ``expert``. Also this device's experts of one
    layer, gathered along ``fsdp`` and ``data``.
    """
    mesh = traced_mesh()
    axes = () if mesh is None else tuple(name for name in BATCH_AXES if mesh.shape.get(name, 1) > 1)
    if mesh is not None and x_BTD.shape[0] % math.prod(mesh.shape[name] for name in axes):
        axes = ()  # rows that do not divide evenly, such as an evaluation's last batch, are replicated
    num_shards = num_shards_along(CONTEXT)
    context = (CONTEXT,) if num_shards > 1 and not x_BTD.shape[1] % num_shards else ()
    compute = functools.partial(
        _mixture_on_device, experts=experts, activation=activation, has_expert_axis="expert" in axes
    )
    if mesh is None or not (axes or context):
        return compute(mlp, x_BTD, router_BTD)
    if "expert" in axes and experts.num_experts % mesh.shape["expert"]:
        raise ConfigError(
            f"{experts.num_experts} experts cannot be sharded along the axis expert of size {mesh.shape['expert']}",
            hint="choose another size of expert in make_mesh, and fsdp for the other devices",
        )
    row_spec, replicated_spec = P(axes, context), P()
    weights = {"router": replicated_spec, "experts": P("expert") if "expert" in axes else replicated_spec}
    router_spec = None if router_BTD is None else row_spec
    in_specs, out_specs = (weights, row_spec, router_spec), (row_spec,) * 3
    axis_names = {*axes, *context}
    sharded_compute = jax.shard_map(
        compute, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axis_names, check_vma=False
    )
    return sharded_compute(mlp, x_BTD, router_BTD)


def _mixture_on_device(
    mlp: Tree,
    x_BTD: Array,
    router_BTD: Array | None,
    *,
    experts: Experts,
    activation: _Activation,
    has_expert_axis: bool,
) -> tuple[Array, Array, Array]:
    """Compute `mixture` on one device; with `has_expert_axis`, gather the tokens of all devices along ``expert``."""
    router = mlp["router"]
    logits_BTE = linear(x_BTD if router_BTD is None else router_BTD, router["weight"], router.get("bias"))
    scores = jax.nn.sigmoid if experts.sigmoid else jax.nn.softmax
    probs_BTE = scores(logits_BTE.astype(jnp.float32))
    if experts.sigmoid:
        choice_BTE = probs_BTE + router["correction"].astype(jnp.float32)[None, None]
        _, chosen_BTK = jax.lax.top_k(_mask_groups(choice_BTE, experts), experts.num_experts_per_token)
        weights_BTK = jnp.take_along_axis(probs_BTE, chosen_BTK, axis=-1)
    else:
        weights_BTK, chosen_BTK = jax.lax.top_k(probs_BTE, experts.num_experts_per_token)
    if experts.normalize:  # sigmoids may all be zero
        total_BT1 = jnp.sum(weights_BTK, axis=-1, keepdims=True)
        weights_BTK = weights_BTK / (total_BT1 + 1e-20 if experts.sigmoid else total_BT1)
    if experts.routed_scale != 1:
        weights_BTK = weights_BTK * experts.routed_scale
    if "expert_scale" in router:
        weights_BTK = weights_BTK * router["expert_scale"].astype(jnp.float32)[chosen_BTK]
    counts_BTE = jnp.sum(jax.nn.one_hot(chosen_BTK, experts.num_experts, dtype=jnp.float32), axis=2)
    if not has_expert_axis:
        return _dispatch(mlp["experts"], x_BTD, weights_BTK, chosen_BTK, experts, activation), probs_BTE, counts_BTE
    x_BTD, weights_BTK, local_BTK = (
        jax.lax.all_gather(array, "expert", axis=0, tiled=True) for array in (x_BTD, weights_BTK, chosen_BTK)
    )
    # Inside `shard_map` the leaves hold this device's `count` experts, so its first expert has index count * position.
    count = jax.tree.leaves(mlp["experts"])[0].shape[0]
    local_BTK = local_BTK - count * jax.lax.axis_index("expert")
    # Experts of other devices get the index `count`, which sorts behind the experts of this device.
    local_BTK = jnp.where((local_BTK >= 0) & (local_BTK < count), local_BTK, count)
    out_BTD = _dispatch(mlp["experts"], x_BTD, weights_BTK, local_BTK, experts, activation)
    # The sum over devices adds up the outputs of all experts, and each device keeps the sums for its tokens.
    return jax.lax.psum_scatter(out_BTD, "expert", scatter_dimension=0, tiled=True), probs_BTE, counts_BTE


def _mask_groups(choice_BTE: Array, experts: Experts) -> Array:
    """Exclude experts outside of the best groups; a group's score is the sum of its two best experts (DeepSeek V3)."""
    if experts.num_groups == 1:
        return choice_BTE
    groups = choice_BTE.reshape(*choice_BTE.shape[:2], experts.num_groups, -1)
    scores_BTG = jnp.sum(jax.lax.top_k(groups, 2)[0], axis=-1)
    _, best_BTC = jax.lax.top_k(scores_BTG, experts.num_chosen_groups)
    is_best_BTG = jnp.max(jax.nn.one_hot(best_BTC, experts.num_groups), axis=2) > 0
    return jnp.where(is_best_BTG[..., None], groups, -jnp.inf).reshape(choice_BTE.shape)


def _dispatch(
    module: Tree, x_BTD: Array, weights_BTK: Array, chosen_BTK: Array, experts: Experts, activation: _Activation
) -> Array:
    """Sort rows by expert, apply the experts, and sum over each token's experts; experts not in `module` add zero."""
    batch, length, width = x_BTD.shape
    per_token, count = experts.num_experts_per_token, jax.tree.leaves(module)[0].shape[0]
    chosen_M = chosen_BTK.reshape(-1)
    order_M = jnp.argsort(chosen_M, stable=True)
    sizes_E = jnp.bincount(chosen_M, length=count).astype(jnp.int32)
    # The inverse order restores each token's experts in order of their probability before they are summed. So the sum
    # over K has the same order, and the same rounding, whatever else is in the batch.
    inverse_M = jnp.argsort(order_M)
    take: Any = _gather_rows if traced_device().platform == "tpu" else _gather_rows_custom_vjp
    rows_MD = take(per_token, x_BTD.reshape(-1, width), order_M, inverse_M)
    out_MD = _expert_mlps(module, rows_MD, sizes_E, chosen_M[order_M], experts, activation)
    out_BTKD = take(1, out_MD, inverse_M, order_M).reshape(batch, length, per_token, width)
    weights_BTK = jnp.where(chosen_BTK < count, weights_BTK, 0.0)
    return jnp.sum(out_BTKD * weights_BTK.astype(out_BTKD.dtype)[..., None], axis=2)


def _gather_rows(copies: int, x_ND: Array, order_M: Array, inverse_M: Array) -> Array:
    """Return M = N * `copies` rows: row m is ``x_ND[order_M[m] // copies]``; only the custom VJP uses `inverse_M`."""
    del inverse_M
    return x_ND[order_M // copies]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_rows_custom_vjp(copies: int, x_ND: Array, order_M: Array, inverse_M: Array) -> Array:
    """Gather like `_gather_rows`; the backward pass gathers by `inverse_M` and adds up the copies of each row."""
    # XLA transposes a gather to a scatter, which is several times slower on a GPU.
    return _gather_rows(copies, x_ND, order_M, inverse_M)


def _gather_rows_forward(copies: int, x_ND: Array, order_M: Array, inverse_M: Array) -> tuple[Array, Array]:
    return _gather_rows(copies, x_ND, order_M, inverse_M), inverse_M


def _gather_rows_backward(copies: int, inverse_M: Array, dy_MD: Array) -> tuple[Array, None, None]:
    return jnp.sum(dy_MD[inverse_M].reshape(-1, copies, dy_MD.shape[-1]), axis=1), None, None


_gather_rows_custom_vjp.defvjp(_gather_rows_forward, _gather_rows_backward)


def balance_loss(
    probs_BE: Array, counts_BE: Array, tokens_B: Array, experts: Experts, num_layers: int
) -> Float[Array, ""]:
    """Return the load-balancing loss over all layers; for uniform routing it is the number of experts per token.

    `probs_BE` and `counts_BE` are sums over the tokens of a sequence and over all layers. `tokens_B` has the number of
    tokens of each sequence, without padding.
    """
    # Fedus et al., "Switch Transformers" (arXiv:2101.03961), equation 4; taken over all layers together, as in Hugging
    # Face transformers. E * sum_e f_e P_e: f_e is the share of tokens that chose expert e, P_e its mean probability.
    total = jnp.maximum(jnp.sum(tokens_B), 1.0) * num_layers
    return experts.num_experts * jnp.sum(jnp.sum(probs_BE, axis=0) / total * jnp.sum(counts_BE, axis=0) / total)


def _expert_mlps(
    module: Tree, rows_MD: Array, sizes_E: Array, expert_M: Array, experts: Experts, activation: _Activation
) -> Array:
    multiply = functools.partial(grouped_linear, sizes_E=sizes_E, num_experts=experts.num_experts)
    if experts.beside_mlp:
        gate_MF, up_MF = jnp.split(multiply(rows_MD, module["gate_up"]["weight"]), 2, axis=-1)
        return multiply(activation(gate_MF) * up_MF, module["down"]["weight"])
    if not experts.clamped:
        gate_MF = activation(multiply(rows_MD, module["gate"]["weight"]))
        up_MF = multiply(rows_MD, module["up"]["weight"])
        return multiply(gate_MF * up_MF, module["down"]["weight"])
    # gpt-oss: columns of gate and up alternate, x sigmoid(1.702 x) approximates GELU, and 1 is added to up.
    gate_up = module["gate_up"]
    out = multiply(rows_MD, gate_up["weight"], transposed=True) + gate_up["bias"].astype(rows_MD.dtype)[expert_M]
    gate_MF = jnp.minimum(out[:, ::2], experts.limit)
    up_MF = jnp.clip(out[:, 1::2], -experts.limit, experts.limit)
    hidden_MF = (up_MF + 1) * gate_MF * jax.nn.sigmoid(gate_MF * 1.702)
    down = module["down"]
    return multiply(hidden_MF, down["weight"], transposed=True) + down["bias"].astype(rows_MD.dtype)[expert_M]


# Grouped matrix product: rows are sorted by expert and multiplied by the weights of their expert, as in Gale et al.,
# "MegaBlocks" (arXiv:2211.15841). A TPU uses `jax.lax.ragged_dot_general`, which XLA compiles to a grouped kernel. On
# other platforms XLA multiplies every row by every expert (JAX 0.10.2: eight times the arithmetic for eight experts).
# So a CPU multiplies blocks of rows of one expert, and a GPU computes one batched product plus tiles for other rows.
# Known limit on platforms other than TPU: only first derivatives in reverse mode (JAX raises an error for `jax.jvp`).


def grouped_linear(
    x_MI: Float[Array, "M I"],
    weight: Float[Array, "E O I"],
    sizes_E: Int[Array, "E"],
    *,
    transposed: bool = False,
    num_experts: int | None = None,
) -> Float[Array, "M O"]:
    """Return ``x_MI[m] @ weight[e].T`` for each row m and its expert e, in the dtype of `x_MI`.

    Rows are sorted by expert. `sizes_E` has the number of rows of each expert; rows beyond their sum become zero.
    `weight` is [E, I, O] if `transposed`, or an object with a method ``grouped``, such as an adapter. `num_experts` is
    the number of experts on all devices that share the rows; None: E. Memory: the result. On a CPU also a padded copy
    of `x_MI` and one expert's weights. On a GPU also the slab and copied weights (`_slab_product`).
    """
    grouped_method: Any = getattr(weight, "grouped", None)
    if grouped_method is not None:  # an adapter multiplies by the base weight and by its factors separately
        multiply = functools.partial(grouped_linear, sizes_E=sizes_E, num_experts=num_experts)
        return grouped_method(x_MI, multiply, transposed=transposed)
    weight = weight.astype(x_MI.dtype)
    if traced_device().platform == "tpu":
        contract = (((1,), (1 if transposed else 2,)), ((), ()))
        dims = jax.lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=contract, lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
        )
        return jax.lax.ragged_dot_general(x_MI, weight, sizes_E, dims)
    return _product(transposed, num_experts or sizes_E.shape[0], x_MI, weight, sizes_E)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(transposed: bool, num_experts: int, x_MI: Array, weight: Array, sizes_E: Array) -> Array:
    product = _slab_product if traced_device().platform == "gpu" else _block_product
    return product(transposed, num_experts, x_MI, weight, sizes_E)


def _product_forward(transposed: bool, num_experts: int, x: Any, weight: Any, sizes: Any) -> tuple[Array, Any]:
    out: Any = _product(transposed, num_experts, x.value, weight.value, sizes.value)
    # `perturbed` is true for differentiated inputs. `x_MI` is a residual only if the weights need a gradient.
    return out, (x.value if weight.perturbed else None, weight.value, sizes.value, x.perturbed)


def _product_backward(transposed: bool, num_experts: int, residuals: Any, cotangent: Any) -> tuple[Any, Any, None]:
    x_MI, weight, sizes_E, is_x_perturbed = residuals
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return None, None, None
    # The gradient of `x_MI` is the same product with the weights in the other orientation.
    dx = _product(not transposed, num_experts, cotangent, weight, sizes_E) if is_x_perturbed else None
    if x_MI is None:
        return dx, None, None
    weight_gradient = _slab_weight_gradient if traced_device().platform == "gpu" else _block_weight_gradient
    return dx, weight_gradient(transposed, num_experts, x_MI, cotangent, sizes_E).astype(weight.dtype), None


_product.defvjp(_product_forward, _product_backward, symbolic_zeros=True)


# Grouped product for CPUs: a loop over blocks of rows of one expert each. The last rows of a block may belong to the
# next expert. Their results are wrong, and the block of that expert overwrites them. A CPU reads an expert's weights
# again for each block, so blocks are long. `jax.lax.switch` selects the shortest of a few block lengths that holds the
# remaining rows. CPU time for 4,096 rows, 16 experts, I = 512, O = 384, float32: 31 ms, versus 66 ms with blocks of 16
# rows and 25 ms for one dense product of all rows. Known limit: `jax.vmap` over tokens computes a block of every
# length, because JAX then turns the switch into a select.
_BLOCK_LENGTHS = (8, 16, 32, 64, 128, 192, 256)


def _block_product(transposed: bool, num_experts: int, x_MI: Array, weight: Array, sizes_E: Array) -> Array:
    """Multiply each group of rows by the weights of its expert, to [M, O]."""
    blocks = _Blocks(x_MI.shape[0], sizes_E)
    num_rows, contract = x_MI.shape[0], 0 if transposed else 1
    # Without padding `dynamic_slice` would clamp the start of a last block that is not full.
    padded = jnp.pad(x_MI, ((0, blocks.max_length), (0, 0)))

    def multiply(length: int, rows_CI: Array, weight: Array) -> Array:
        part = jax.lax.dot_general(rows_CI[:length], weight, (((1,), (contract,)), ((), ())))
        return jnp.pad(part, ((0, blocks.max_length - length), (0, 0)))

    def body(i: Any, out: Array) -> Array:
        expert, start, num_remaining = blocks.block(i)
        rows = jax.lax.dynamic_slice_in_dim(padded, start, blocks.max_length)
        # Blocks run in the order of rows, so the next block overwrites what this block writes past its own rows.
        part = blocks.apply_shortest(num_remaining, multiply, rows, weight[expert])
        return jax.lax.dynamic_update_slice_in_dim(out, part, start, axis=0)

    out = jnp.zeros((num_rows + blocks.max_length, weight.shape[2 if transposed else 1]), x_MI.dtype)
    out = jax.lax.fori_loop(0, blocks.num_blocks, body, out)[:num_rows]
    # Rows of no expert must be zero, but the last block may have computed some of them.
    return jnp.where((jnp.arange(num_rows) < jnp.sum(sizes_E))[:, None], out, 0)


def _block_weight_gradient(transposed: bool, num_experts: int, x_MI: Array, dy_MO: Array, sizes_E: Array) -> Array:
    """Sum the weight gradient of each expert over its rows, to [E, O, I] or [E, I, O] in float32."""
    blocks = _Blocks(x_MI.shape[0], sizes_E)
    padding = ((0, blocks.max_length), (0, 0))
    rows_MI, rows_MO = jnp.pad(x_MI, padding), jnp.pad(dy_MO, padding)

    def multiply(length: int, x_CI: Array, dy_CO: Array) -> Array:
        lhs, rhs = (x_CI, dy_CO) if transposed else (dy_CO, x_CI)
        contract = (((0,), (0,)), ((), ()))
        return jax.lax.dot_general(lhs[:length], rhs[:length], contract, preferred_element_type=jnp.float32)

    def body(i: Any, total: Array) -> Array:
        expert, start, num_remaining = blocks.block(i)
        is_valid = (jnp.arange(blocks.max_length) < num_remaining)[:, None]
        x_CI = jnp.where(is_valid, jax.lax.dynamic_slice_in_dim(rows_MI, start, blocks.max_length), 0)
        dy_CO = jnp.where(is_valid, jax.lax.dynamic_slice_in_dim(rows_MO, start, blocks.max_length), 0)
        return total.at[expert].add(blocks.apply_shortest(num_remaining, multiply, x_CI, dy_CO))

    widths = (x_MI.shape[1], dy_MO.shape[1]) if transposed else (dy_MO.shape[1], x_MI.shape[1])
    return jax.lax.fori_loop(0, blocks.num_blocks, body, jnp.zeros((sizes_E.shape[0], *widths), jnp.float32))


class _Blocks:
    """Division of rows into blocks of one expert each; `sizes_E` has the number of rows of each expert."""

    def __init__(self, num_rows: int, sizes_E: Array) -> None:
        self._lengths = tuple(length for length in _BLOCK_LENGTHS if length < 2 * num_rows) or _BLOCK_LENGTHS[:1]
        self.max_length = self._lengths[-1]
        self._sizes_E = sizes_E
        self._rows_before_E = jnp.cumsum(sizes_E) - sizes_E
        per_expert_E = -(-sizes_E // self.max_length)
        self._blocks_to_E = jnp.cumsum(per_expert_E)
        self._blocks_before_E = self._blocks_to_E - per_expert_E
        self.num_blocks = self._blocks_to_E[-1]

    def block(self, i: Any) -> tuple[Array, Array, Array]:
        """Return the expert of block `i`, the block's first row, and the number of the expert's rows from there on."""
        # The first expert whose cumulative number of blocks exceeds `i`.
        expert = jnp.sum(self._blocks_to_E <= i)
        offset = (i - self._blocks_before_E[expert]) * self.max_length
        return expert, self._rows_before_E[expert] + offset, self._sizes_E[expert] - offset

    def apply_shortest(self, num_remaining: Array, multiply: Callable[..., Array], *rows: Array) -> Array:
        """Return ``multiply(length, *rows)`` for the shortest block length >= `num_remaining`, else the longest one."""
        length_index = jnp.sum(jnp.asarray(self._lengths[:-1]) < num_remaining)
        return jax.lax.switch(length_index, [functools.partial(multiply, length) for length in self._lengths], *rows)


# Grouped product for GPUs: a few large products, because each loop step costs microseconds there. The slab is one
# batched product over the first rows of every expert, 9/8 of the mean number of rows. It reads the weights in place. A
# loop computes the other rows of busier experts in tiles, several tiles per step, each with a copy of its weights. With
# an even router the loop has no steps. With fewer rows than experts, as for a generated token, there is no slab: tiles
# read only the experts that some row chose.
# Known limits: the slab always computes all its rows. Very uneven routers cause up to twice the arithmetic, and few
# rows cause more (at least 8 rows per expert). Tiles copy weights that a kernel could read in place. JAX 0.10 to 0.12
# have no such kernel for every GPU: XLA multiplies by all experts, and Pallas deprecates its Triton backend.
_ROW_MULTIPLE = 8
"""Rows per expert of the slab, and rows of a tile, are multiples of this number, as tensor cores require."""
_TILES = (16, 256)
"""Rows of the shortest and of the longest tile, if experts have at least 4 rows on average."""
_MAX_TILES = 32
_MAX_UNROLLED_STEPS = 4
_COPIED_BYTES = 128 * 2**20
"""Most bytes of weights that the tiles of one step may copy; but at least one expert is copied, even a larger one."""


def _slab_product(transposed: bool, num_experts: int, x_MI: Array, weight: Array, sizes_E: Array) -> Array:
    """Multiply each group of rows by the weights of its expert, to [M, O]."""
    plan, num_rows = _SlabPlan(x_MI.shape[0], num_experts, weight, sizes_E), x_MI.shape[0]
    dims = "gci,gio->gco" if transposed else "gci,goi->gco"
    out = jnp.zeros((num_rows, weight.shape[2 if transposed else 1]), x_MI.dtype)
    if plan.slab:
        part_EPO = jnp.einsum(dims, _gather_masked(x_MI, *plan.slab_rows()), weight)
        position_M, in_slab_M = plan.slab_positions()
        out = jnp.where(in_slab_M[:, None], part_EPO.reshape(-1, out.shape[1])[position_M], 0)

    def body(i: Any, out: Array) -> Array:
        expert_G, rows_GC, is_valid_GC = plan.tiles(i)
        part_GCO = jnp.einsum(dims, _gather_masked(x_MI, rows_GC, is_valid_GC), weight[expert_G])
        # Invalid rows get distinct indices past the end: `mode="drop"` discards them and indices stay unique.
        out_of_range_GC = num_rows + jnp.arange(rows_GC.size).reshape(rows_GC.shape)
        return out.at[jnp.where(is_valid_GC, rows_GC, out_of_range_GC)].set(part_GCO, mode="drop", unique_indices=True)

    return plan.loop_over_tiles(body, out)


def _slab_weight_gradient(transposed: bool, num_experts: int, x_MI: Array, dy_MO: Array, sizes_E: Array) -> Array:
    """Sum the weight gradient of each expert over its rows, to [E, O, I] or [E, I, O] in float32."""
    dims = "gci,gco->gio" if transposed else "gci,gco->goi"
    widths = (x_MI.shape[1], dy_MO.shape[1]) if transposed else (dy_MO.shape[1], x_MI.shape[1])
    shape = jax.ShapeDtypeStruct((sizes_E.shape[0], *widths), jnp.float32)
    plan = _SlabPlan(x_MI.shape[0], num_experts, shape, sizes_E)

    def gradient(rows: Array, mask: Array) -> Array:
        operands = _gather_masked(x_MI, rows, mask), _gather_masked(dy_MO, rows, mask)
        return jnp.einsum(dims, *operands, preferred_element_type=jnp.float32)

    def body(i: Any, total: Array) -> Array:
        expert_G, rows_GC, is_valid_GC = plan.tiles(i)
        return total.at[expert_G].add(gradient(rows_GC, is_valid_GC))

    return plan.loop_over_tiles(body, gradient(*plan.slab_rows()) if plan.slab else jnp.zeros(shape.shape, shape.dtype))


def _gather_masked(x_MI: Array, rows: Array, mask: Array) -> Array:
    """Gather rows, with zeros where `mask` is false."""
    return jnp.where(mask[..., None], x_MI.at[rows].get(mode="clip"), 0)


class _SlabPlan:
    """Split of rows into the slab (first P rows of each expert) and tiles; `num_experts` > E if experts are sharded."""

    def __init__(self, num_rows: int, num_experts: int, weight: Array | jax.ShapeDtypeStruct, sizes_E: Array) -> None:
        num_local_experts, mean = sizes_E.shape[0], num_rows // num_experts
        # Slab: 9/8 of the mean, rounded up to the multiple. Tile: the largest power of two up to a quarter of the mean,
        # limited to the range of `_TILES`.
        self.slab = 0 if num_rows < num_experts else -(-(mean + -(-mean // 8)) // _ROW_MULTIPLE) * _ROW_MULTIPLE
        self._tile_rows = (
            min(_TILES[1], max(_TILES[0], 1 << (mean // 4).bit_length() - 1)) if mean >= 4 else _ROW_MULTIPLE
        )
        expert_bytes = weight.size // num_local_experts * weight.dtype.itemsize
        self._tiles_per_step = min(_MAX_TILES, max(1, _COPIED_BYTES // expert_bytes))
        if self.slab:  # an even router leaves few rows for tiles
            self._tiles_per_step = min(self._tiles_per_step, max(1, mean * num_local_experts // 8 // self._tile_rows))
        # An expert with n rows needs at most 1 + (n - 1) // tile tiles.
        max_active_experts = min(num_local_experts, num_rows)
        self._max_tiles = max_active_experts + (num_rows - max_active_experts) // self._tile_rows
        self._num_rows, self._sizes_E = num_rows, sizes_E
        self._rows_to_E = jnp.cumsum(sizes_E)
        self._remaining_E = jnp.maximum(sizes_E - self.slab, 0)
        self._tiles_to_E = jnp.cumsum(-(-self._remaining_E // self._tile_rows))

    def slab_rows(self) -> tuple[Array, Array]:
        """Return the row indices of the slab, and a mask of the rows that belong to the expert, both [E, P]."""
        offset_P = jnp.arange(self.slab)
        return (self._rows_to_E - self._sizes_E)[:, None] + offset_P[None], offset_P[None] < self._sizes_E[:, None]

    def slab_positions(self) -> tuple[Array, Array]:
        """Return the index of each row in the flattened slab, and a mask of the rows in the slab, both [M]."""
        rows_M = jnp.arange(self._num_rows)
        expert_M = jnp.sum(self._rows_to_E[None] <= rows_M[:, None], axis=1)
        offset_M = rows_M - (self._rows_to_E - self._sizes_E)[jnp.minimum(expert_M, len(self._sizes_E) - 1)]
        in_slab_M = (expert_M < len(self._sizes_E)) & (offset_M < self.slab)
        return jnp.where(in_slab_M, expert_M * self.slab + offset_M, 0), in_slab_M

    def tiles(self, i: Any) -> tuple[Array, Array, Array]:
        """Return the experts [G], the row indices [G, C] and a mask of valid rows [G, C] of the tiles of step `i`."""
        tile_G = i * self._tiles_per_step + jnp.arange(min(self._tiles_per_step, self._max_tiles))
        # A tile belongs to the first expert whose cumulative number of tiles exceeds the tile's index.
        is_past_GE = self._tiles_to_E[None] <= tile_G[:, None]
        expert_G = jnp.minimum(jnp.sum(is_past_GE, axis=1), len(self._sizes_E) - 1)
        tiles_before_G = jnp.max(jnp.where(is_past_GE, self._tiles_to_E[None], 0), axis=1)
        offset_GC = (tile_G - tiles_before_G)[:, None] * self._tile_rows + jnp.arange(self._tile_rows)[None]
        first_row_G = (self._rows_to_E - self._sizes_E)[expert_G] + self.slab
        is_valid_GC = (offset_GC < self._remaining_E[expert_G][:, None]) & (tile_G < self._tiles_to_E[-1])[:, None]
        return expert_G, first_row_G[:, None] + offset_GC, is_valid_GC

    def loop_over_tiles(self, body: Callable[[Any, Array], Array], initial: Array) -> Array:
        """Run `body` for all steps; without a slab, up to 4 are unrolled, since the host checks a loop at each step."""
        steps = -(-self._max_tiles // self._tiles_per_step)
        if steps <= _MAX_UNROLLED_STEPS and not self.slab:
            return functools.reduce(lambda out, i: body(i, out), range(steps), initial)
        return jax.lax.fori_loop(0, -(-self._tiles_to_E[-1] // self._tiles_per_step), body, initial)
