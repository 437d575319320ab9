"""Mixture of experts (MoE): the router, the experts' MLPs, and the load-balancing loss.

No token is dropped, and no expert computes a token that did not choose it. Rows are sorted by expert and multiplied
group by group (`_grouped`).

Shapes: B batch, T sequence, D model, E experts, K experts per token, M = B T K rows, F hidden.

Sources: Jiang et al., "Mixtral of Experts" (arXiv:2401.04088). Fedus et al., "Switch Transformers"
(arXiv:2101.03961), equation 4, for the loss; it is taken over all layers together, as in Hugging Face transformers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Float

from ..core import BATCH_AXES, CONTEXT, ConfigError, Tree, divided_along, divided_mesh, linear, traced_device
from ._config import Experts
from ._grouped import grouped_linear


def mixture(
    mlp: Tree, x_BTD: Float[Array, "B T D"], experts: Experts, activation: Callable[[Array], Array]
) -> tuple[Float[Array, "B T D"], Float[Array, "B T E"], Float[Array, "B T E"]]:
    """Return the outputs of the MoE, the router's probabilities, and 1 for each chosen expert, else 0.

    Each device sorts its own rows. Along the mesh axis ``expert`` each device holds some experts: tokens are
    all-gathered, and outputs are summed and scattered back. Memory: K rows per token of this device (of all devices
    along ``expert``), and this device's experts of one layer, gathered along ``fsdp`` and ``data``.
    """
    mesh = divided_mesh()
    axes = () if mesh is None else tuple(name for name in BATCH_AXES if mesh.shape.get(name, 1) > 1)
    if mesh is not None and x_BTD.shape[0] % math.prod(mesh.shape[name] for name in axes):
        axes = ()  # rows that do not divide evenly, such as an evaluation's last batch, are replicated
    num_shards = divided_along(CONTEXT)
    context = (CONTEXT,) if num_shards > 1 and not x_BTD.shape[1] % num_shards else ()
    if mesh is None or not (axes or context):
        return _mixture_on_device(mlp, x_BTD, experts=experts, activation=activation, has_expert_axis=False)
    if "expert" in axes and experts.num_experts % mesh.shape["expert"]:
        raise ConfigError(
            "the experts cannot be sharded along the axis expert",
            expected=f"a size that divides {experts.num_experts} experts",
            got=mesh.shape["expert"],
            hint="choose another size of expert in make_mesh, and fsdp for the other devices",
        )
    compute = functools.partial(
        _mixture_on_device, experts=experts, activation=activation, has_expert_axis="expert" in axes
    )
    row_spec, replicated_spec = P(axes, context), P()
    weights = {"router": replicated_spec, "experts": P("expert") if "expert" in axes else replicated_spec}
    sharded_compute = jax.shard_map(
        compute,
        mesh=mesh,
        in_specs=(weights, row_spec),
        out_specs=(row_spec,) * 3,
        axis_names={*axes, *context},
        check_vma=False,
    )
    return sharded_compute(mlp, x_BTD)


def _mixture_on_device(
    mlp: Tree, x_BTD: Array, *, experts: Experts, activation: Callable[[Array], Array], has_expert_axis: bool
) -> tuple[Array, Array, Array]:
    """Compute the rows of one device; with `has_expert_axis`, gather the tokens of all devices along ``expert``."""
    logits_BTE = linear(x_BTD, mlp["router"]["weight"])
    if "bias" in mlp["router"]:
        logits_BTE = logits_BTE + mlp["router"]["bias"].astype(logits_BTE.dtype)[None, None]
    probs_BTE = jax.nn.softmax(logits_BTE.astype(jnp.float32), axis=-1)
    weights_BTK, chosen_BTK = jax.lax.top_k(probs_BTE, experts.num_experts_per_token)
    if experts.normalize:
        weights_BTK = weights_BTK / jnp.sum(weights_BTK, axis=-1, keepdims=True)
    counts_BTE = jnp.sum(jax.nn.one_hot(chosen_BTK, experts.num_experts, dtype=jnp.float32), axis=2)
    if not has_expert_axis:
        return _dispatch(mlp["experts"], x_BTD, weights_BTK, chosen_BTK, experts, activation), probs_BTE, counts_BTE
    x_BTD, weights_BTK, local_BTK = (
        jax.lax.all_gather(array, "expert", axis=0, tiled=True) for array in (x_BTD, weights_BTK, chosen_BTK)
    )
    # Inside `shard_map` the leaves have only this device's experts; their indices begin at `count` times its position.
    count = jax.tree.leaves(mlp["experts"])[0].shape[0]
    local_BTK = local_BTK - count * jax.lax.axis_index("expert")
    # Experts of other devices get the index `count`, which sorts behind this device's own.
    local_BTK = jnp.where((local_BTK >= 0) & (local_BTK < count), local_BTK, count)
    out_BTD = _dispatch(mlp["experts"], x_BTD, weights_BTK, local_BTK, experts, activation)
    # Each device computed only its own experts: the sum over devices is complete, and each keeps its own tokens.
    return jax.lax.psum_scatter(out_BTD, "expert", scatter_dimension=0, tiled=True), probs_BTE, counts_BTE


def _dispatch(
    module: Tree,
    x_BTD: Array,
    weights_BTK: Array,
    chosen_BTK: Array,
    experts: Experts,
    activation: Callable[[Array], Array],
) -> Array:
    """Sort rows by expert, compute them and sum over each token's experts; experts not in `module` add zero."""
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
    """Gather rows in an order of all their copies, M = N * `copies`; `inverse_M` is the inverse of `order_M`."""
    del inverse_M
    return x_ND[order_M // copies]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_rows_custom_vjp(copies: int, x_ND: Array, order_M: Array, inverse_M: Array) -> Array:
    """Gather like `_gather_rows`; the backward pass gathers in the inverse order of the permutation.

    XLA transposes a gather to a scatter, which is several times slower on a GPU.
    """
    return _gather_rows(copies, x_ND, order_M, inverse_M)


def _gather_rows_forward(copies: int, x_ND: Array, order_M: Array, inverse_M: Array) -> tuple[Array, Array]:
    return _gather_rows(copies, x_ND, order_M, inverse_M), inverse_M


def _gather_rows_backward(copies: int, inverse_M: Array, dy_MD: Array) -> tuple[Array, None, None]:
    return jnp.sum(dy_MD[inverse_M].reshape(-1, copies, dy_MD.shape[-1]), axis=1), None, None


_gather_rows_custom_vjp.defvjp(_gather_rows_forward, _gather_rows_backward)


def balance_loss(
    probs_BE: Array, counts_BE: Array, tokens_B: Array, experts: Experts, num_layers: int
) -> Float[Array, ""]:
    """Return the load-balancing loss over all layers; uniform routing gives the number of experts per token.

    `probs_BE` and `counts_BE` are sums over the tokens of a sequence and over all layers. `tokens_B` excludes padding.
    """
    # E * sum_e f_e P_e: f_e is the share of tokens that chose expert e, P_e its mean probability.
    total = jnp.maximum(jnp.sum(tokens_B), 1.0) * num_layers
    return experts.num_experts * jnp.sum(jnp.sum(probs_BE, axis=0) / total * jnp.sum(counts_BE, axis=0) / total)


def _expert_mlps(
    module: Tree,
    rows_MD: Array,
    sizes_E: Array,
    expert_M: Array,
    experts: Experts,
    activation: Callable[[Array], Array],
) -> Array:
    multiply = functools.partial(grouped_linear, sizes_E=sizes_E, num_experts=experts.num_experts)
    if not experts.clamped:
        gate_MF = activation(multiply(rows_MD, module["gate"]["weight"]))
        up_MF = multiply(rows_MD, module["up"]["weight"])
        return multiply(gate_MF * up_MF, module["down"]["weight"])
    # gpt-oss: columns of gate and up alternate, 1.702 approximates GELU by x sigmoid(1.702 x), and up is shifted by 1.
    gate_up = module["gate_up"]
    out = multiply(rows_MD, gate_up["weight"], transposed=True) + gate_up["bias"].astype(rows_MD.dtype)[expert_M]
    gate_MF = jnp.minimum(out[:, ::2], experts.limit)
    up_MF = jnp.clip(out[:, 1::2], -experts.limit, experts.limit)
    hidden_MF = (up_MF + 1) * gate_MF * jax.nn.sigmoid(gate_MF * 1.702)
    down = module["down"]
    return multiply(hidden_MF, down["weight"], transposed=True) + down["bias"].astype(rows_MD.dtype)[expert_M]
