"""LoRA+: another learning rate for B.

Source: Hayou et al., "LoRA+: Efficient Low Rank Adaptation of Large Models" (arXiv:2402.12354). Deviation from PEFT's
`create_loraplus_optimizer`: there vectors also have B's rate; here only B has it.
"""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any

from ...core import ConfigError, SelectionError, Tree, leaves_with_paths, map_with_paths

if TYPE_CHECKING:
    import optax


def plus(ratio: float) -> optax.GradientTransformation:
    """Multiply the learning rate of the factors B of adapters; chain it after an optimizer.

    It multiplies the updates of B. The result is the update at that multiple of the rate, including decoupled weight
    decay.

    Args:
        ratio: B's learning rate divided by that of all other leaves; its authors advise about 16.

    Returns:
        A transformation without state.

    Raises:
        ConfigError: for a ratio that is not positive and finite.
        SelectionError: from ``init``, when no trainable leaf is a factor B.

    Memory:
        None.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from lowtide import lora
        >>> tx = optax.chain(optax.sgd(1.0), lora.plus(16))
        >>> params = {"lora_a": jnp.ones(1), "lora_b": jnp.ones(1)}
        >>> jax.tree.map(float, jax.tree.map(jnp.sum, tx.update(params, tx.init(params))[0]))
        {'lora_a': -1.0, 'lora_b': -16.0}
    """
    import optax

    value: Any = ratio
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise ConfigError(
            f"ratio: {ratio!r} is not a multiple of a learning rate",
            expected="a finite number above 0",
            got=repr(ratio),
            hint="pass for instance 16",
        )
    factor = float(value)

    def init(params: Tree) -> optax.EmptyState:
        if not any(_is_factor_b(path) for path, _ in leaves_with_paths(params)):
            raise SelectionError(
                "LoRA+: the trainable leaves have no factor B",
                expected="adapters of LoRA, rsLoRA or DoRA",
                got=f"{len(leaves_with_paths(params))} leaves",
                hint='select them with wrt="**/lora_*", or leave lt.lora.plus out',
            )
        return optax.EmptyState()

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        return map_with_paths(lambda path, leaf: leaf * factor if _is_factor_b(path) else leaf, updates), state

    return optax.GradientTransformation(init, update)


def _is_factor_b(path: str) -> bool:
    return path.rpartition("/")[2] == "lora_b"
