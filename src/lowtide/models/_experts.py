"""A mixture of experts: a router that chooses, experts that compute what chose them, and the loss of the router.

No token is dropped and no expert computes what no token chose: rows are sorted by expert and multiplied group by group
(`_grouped`).

Shapes: B batch, T sequence, D model, E experts, K experts of a token, M = B T K rows, F hidden.

Sources: Jiang et al., "Mixtral of Experts" (arXiv:2401.04088); Fedus et al., "Switch Transformers" (arXiv:2101.03961),
equation 4, for the loss, over all layers together as in Hugging Face's models.
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
    """Compute what each token's experts make of it.

    Where devices divide rows or tokens, each sorts its own. Along the axis ``expert`` of their mesh each has some
    experts: tokens are gathered, and what the experts make of them is added up where they came from.

    Args:
        mlp: ``router`` and ``experts``.
        x_BTD: activations.
        experts: sizes and switches.
        activation: of the gate.

    Returns:
        The sum of the experts' results by their shares; each expert's probability; and how often it was chosen, 0 or 1.

    Raises:
        ConfigError: when the axis ``expert`` does not divide the experts.

    Memory:
        Rows of the tokens of a device (along ``expert`` those of all its devices), one for each of a token's experts;
        and a device's experts of the layer, whole: along ``fsdp`` and ``data`` they are gathered.
    """
    mesh = divided_mesh()
    axes = () if mesh is None else tuple(name for name in BATCH_AXES if mesh.shape.get(name, 1) > 1)
    if mesh is not None and x_BTD.shape[0] % math.prod(mesh.shape[name] for name in axes):
        axes = ()  # rows that cannot be divided, such as the last of an evaluation, are on every device
    parts = divided_along(CONTEXT)
    context = (CONTEXT,) if parts > 1 and not x_BTD.shape[1] % parts else ()
    if mesh is None or not (axes or context):
        return _local(mlp, x_BTD, experts=experts, activation=activation, axis=False)
    if "expert" in axes and experts.num_experts % mesh.shape["expert"]:
        raise ConfigError(
            "the experts cannot be divided along the axis expert",
            expected=f"a size that divides {experts.num_experts} experts",
            got=mesh.shape["expert"],
            hint="choose another size of expert in make_mesh, and fsdp for the rest",
        )
    compute = functools.partial(_local, experts=experts, activation=activation, axis="expert" in axes)
    rows, whole = P(axes, context), P()
    weights = {"router": whole, "experts": P("expert") if "expert" in axes else whole}
    mapped = jax.shard_map(
        compute,
        mesh=mesh,
        in_specs=(weights, rows),
        out_specs=(rows,) * 3,
        axis_names={*axes, *context},
        check_vma=False,
    )
    return mapped(mlp, x_BTD)


def _local(
    mlp: Tree, x_BTD: Array, *, experts: Experts, activation: Callable[[Array], Array], axis: bool
) -> tuple[Array, Array, Array]:
    """Compute a device's rows; with `axis` by the experts of all devices along it."""
    logits_BTE = linear(x_BTD, mlp["router"]["weight"])
    if "bias" in mlp["router"]:
        logits_BTE = logits_BTE + mlp["router"]["bias"].astype(logits_BTE.dtype)[None, None]
    probs_BTE = jax.nn.softmax(logits_BTE.astype(jnp.float32), axis=-1)
    shares_BTK, chosen_BTK = jax.lax.top_k(probs_BTE, experts.num_experts_per_token)
    if experts.normalize:
        shares_BTK = shares_BTK / jnp.sum(shares_BTK, axis=-1, keepdims=True)
    counts_BTE = jnp.sum(jax.nn.one_hot(chosen_BTK, experts.num_experts, dtype=jnp.float32), axis=2)
    if not axis:
        return _routed(mlp["experts"], x_BTD, shares_BTK, chosen_BTK, experts, activation), probs_BTE, counts_BTE
    x_BTD, shares_BTK, ours_BTK = (
        jax.lax.all_gather(each, "expert", axis=0, tiled=True) for each in (x_BTD, shares_BTK, chosen_BTK)
    )
    count = jax.tree.leaves(mlp["experts"])[0].shape[0]
    ours_BTK = ours_BTK - count * jax.lax.axis_index("expert")
    ours_BTK = jnp.where((ours_BTK >= 0) & (ours_BTK < count), ours_BTK, count)  # those of other devices come last
    out_BTD = _routed(mlp["experts"], x_BTD, shares_BTK, ours_BTK, experts, activation)
    return jax.lax.psum_scatter(out_BTD, "expert", scatter_dimension=0, tiled=True), probs_BTE, counts_BTE


def _routed(
    module: Tree,
    x_BTD: Array,
    shares_BTK: Array,
    chosen_BTK: Array,
    experts: Experts,
    activation: Callable[[Array], Array],
) -> Array:
    """Sort rows by expert, compute, and add up each token's; rows of an expert that is not in `module` give zero."""
    batch, length, width = x_BTD.shape
    per_token, count = experts.num_experts_per_token, jax.tree.leaves(module)[0].shape[0]
    chosen_M = chosen_BTK.reshape(-1)
    order_M = jnp.argsort(chosen_M, stable=True)
    sizes_E = jnp.bincount(chosen_M, length=count).astype(jnp.int32)
    back_M = jnp.argsort(order_M)  # sums over a token's experts in the order of their shares, whatever the batch
    take: Any = _rows if traced_device().platform == "tpu" else _rows_by_gathers
    rows_MD = take(per_token, x_BTD.reshape(-1, width), order_M, back_M)
    out_MD = _compute(module, rows_MD, sizes_E, chosen_M[order_M], experts, activation)
    out_BTKD = take(1, out_MD, back_M, order_M).reshape(batch, length, per_token, width)
    shares_BTK = jnp.where(chosen_BTK < count, shares_BTK, 0.0)
    return jnp.sum(out_BTKD * shares_BTK.astype(out_BTKD.dtype)[..., None], axis=2)


def _rows(copies: int, x_ND: Array, order_M: Array, back_M: Array) -> Array:
    """Take rows in an order of all their copies, M = N * `copies`; `back_M` is the inverse of `order_M`."""
    del back_M
    return x_ND[order_M // copies]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows_by_gathers(copies: int, x_ND: Array, order_M: Array, back_M: Array) -> Array:
    """As `_rows`; its gradient takes rows back, where XLA's would scatter them, several times slower on a GPU."""
    return _rows(copies, x_ND, order_M, back_M)


def _rows_forward(copies: int, x_ND: Array, order_M: Array, back_M: Array) -> tuple[Array, Array]:
    return _rows(copies, x_ND, order_M, back_M), back_M


def _rows_backward(copies: int, back_M: Array, dy_MD: Array) -> tuple[Array, None, None]:
    return jnp.sum(dy_MD[back_M].reshape(-1, copies, dy_MD.shape[-1]), axis=1), None, None


_rows_by_gathers.defvjp(_rows_forward, _rows_backward)


def balance_loss(
    probs_BE: Array, counts_BE: Array, tokens_B: Array, experts: Experts, num_layers: int
) -> Float[Array, ""]:
    """Return the load-balancing loss of all layers: 1 for routers that are even times the experts of a token.

    Args:
        probs_BE: each expert's probabilities, added up over a sequence's tokens and all layers.
        counts_BE: how often it was chosen, likewise.
        tokens_B: tokens of each sequence that count.
        experts: sizes.
        num_layers: L.
    """
    total = jnp.maximum(jnp.sum(tokens_B), 1.0) * num_layers
    return experts.num_experts * jnp.sum(jnp.sum(probs_BE, axis=0) / total * jnp.sum(counts_BE, axis=0) / total)


def _compute(
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
    both = module["gate_up"]
    out = multiply(rows_MD, both["weight"], transposed=True) + both["bias"].astype(rows_MD.dtype)[expert_M]
    gate_MF = jnp.minimum(out[:, ::2], experts.limit)
    up_MF = jnp.clip(out[:, 1::2], -experts.limit, experts.limit)
    hidden_MF = (up_MF + 1) * gate_MF * jax.nn.sigmoid(gate_MF * 1.702)
    down = module["down"]
    return multiply(hidden_MF, down["weight"], transposed=True) + down["bias"].astype(rows_MD.dtype)[expert_M]
