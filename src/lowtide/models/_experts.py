"""A mixture of experts: a router that chooses, experts that compute what chose them, and the loss of the router.

No token is dropped and no expert computes what no token chose: rows are sorted by expert and multiplied group by group
(`_grouped`).

Shapes: B batch, T sequence, D model, E experts, K experts of a token, M = B T K rows, F hidden.

Sources: Jiang et al., "Mixtral of Experts" (arXiv:2401.04088); Fedus et al., "Switch Transformers" (arXiv:2101.03961),
equation 4, for the loss, over all layers together as in Hugging Face's models.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..core import Tree, linear
from ._config import Experts
from ._grouped import grouped_linear


def mixture(
    mlp: Tree, x_BTD: Float[Array, "B T D"], experts: Experts, activation: Callable[[Array], Array]
) -> tuple[Float[Array, "B T D"], Float[Array, "B T E"], Float[Array, "B T E"]]:
    """Compute what each token's experts make of it.

    Args:
        mlp: ``router`` and ``experts``.
        x_BTD: activations.
        experts: sizes and switches.
        activation: of the gate.

    Returns:
        The sum of the experts' results by their shares; each expert's probability; and how often it was chosen, 0 or 1.
    """
    batch, length, width = x_BTD.shape
    num, per_token = experts.num_experts, experts.num_experts_per_token
    logits_BTE = linear(x_BTD, mlp["router"]["weight"])
    if "bias" in mlp["router"]:
        logits_BTE = logits_BTE + mlp["router"]["bias"].astype(logits_BTE.dtype)[None, None]
    probs_BTE = jax.nn.softmax(logits_BTE.astype(jnp.float32), axis=-1)
    shares_BTK, chosen_BTK = jax.lax.top_k(probs_BTE, per_token)
    if experts.normalize:
        shares_BTK = shares_BTK / jnp.sum(shares_BTK, axis=-1, keepdims=True)
    chosen_M = chosen_BTK.reshape(-1)
    order_M = jnp.argsort(chosen_M, stable=True)
    sizes_E = jnp.bincount(chosen_M, length=num).astype(jnp.int32)
    rows_MD = x_BTD.reshape(-1, width)[order_M // per_token]
    out_MD = _compute(mlp["experts"], rows_MD, sizes_E, chosen_M[order_M], experts, activation)
    back_M = jnp.argsort(order_M)  # sums over a token's experts in the order of their shares, whatever the batch
    out_BTKD = out_MD[back_M].reshape(batch, length, per_token, width)
    out_BTD = jnp.sum(out_BTKD * shares_BTK.astype(out_BTKD.dtype)[..., None], axis=2)
    counts_BTE = jnp.sum(jax.nn.one_hot(chosen_BTK, num, dtype=jnp.float32), axis=2)
    return out_BTD, probs_BTE, counts_BTE


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
    if not experts.clamped:
        gate_MF = activation(grouped_linear(rows_MD, module["gate"]["weight"], sizes_E))
        up_MF = grouped_linear(rows_MD, module["up"]["weight"], sizes_E)
        return grouped_linear(gate_MF * up_MF, module["down"]["weight"], sizes_E)
    both = module["gate_up"]
    out = (
        grouped_linear(rows_MD, both["weight"], sizes_E, transposed=True) + both["bias"].astype(rows_MD.dtype)[expert_M]
    )
    gate_MF = jnp.minimum(out[:, ::2], experts.limit)
    up_MF = jnp.clip(out[:, 1::2], -experts.limit, experts.limit)
    hidden_MF = (up_MF + 1) * gate_MF * jax.nn.sigmoid(gate_MF * 1.702)
    down = module["down"]
    return (
        grouped_linear(hidden_MF, down["weight"], sizes_E, transposed=True)
        + down["bias"].astype(rows_MD.dtype)[expert_M]
    )
