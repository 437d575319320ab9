"""First values from the weight itself: PiSSA and OLoRA.

The adapter begins as a part of the weight, which has to be subtracted from the weight for that. PEFT changes the base
weight to do so. Here the base weight stays unchanged, because other adapters and files use it. The node keeps the first
factors, frozen, and subtracts their product from its correction. A saved adapter is therefore B A - B0 A0: a plain one
of twice the rank, for the original base.

Sources: Meng et al., "PiSSA" (arXiv:2404.02948); Büyükakyüz, "OLoRA" (arXiv:2406.01775). Known inefficiency: all
singular values are computed, and only a few are used.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import LinearWeight
from ...core import memory_space as space_of


def principal_factors(weight: Any, rank: int, scaling: float, init: str) -> tuple[Array, Array]:
    """Return the factors A [*L, r, in] and B [*L, out, r] of the part ``scaling * B A`` of a weight [*L, out, in].

    "pissa" takes the largest singular values, "olora" the first columns of a QR decomposition. One matrix at a time is
    held in float32, with its decomposition.
    """
    if len(weight.shape) == 2:
        return _matrix_factors(weight, rank, scaling, init)
    factors = [_matrix_factors(_slice_layer(weight, index), rank, scaling, init) for index in range(weight.shape[0])]
    return jnp.stack([a for a, _ in factors]), jnp.stack([b for _, b in factors])


def _slice_layer(weight: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], weight)


def dense_matrix(matrix: Any) -> Float[Array, "out in"]:
    """Return a matrix in float32, on the device; a quantised one is dequantised."""
    array: Any = getattr(matrix, "dense")(jnp.float32) if isinstance(matrix, LinearWeight) else matrix  # noqa: B009
    is_concrete = isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)
    if is_concrete and space_of(array) == jax.memory.Space.Host:
        array = jax.device_put(array, jax.memory.Space.Device)
    return jnp.asarray(array, jnp.float32)


def _matrix_factors(matrix: Any, rank: int, scaling: float, init: str) -> tuple[Array, Array]:
    return (pissa if init == "pissa" else _olora)(dense_matrix(matrix), rank, scaling)


@functools.partial(jax.jit, static_argnums=(1, 2))
def pissa(matrix: Float[Array, "out in"], rank: int, scaling: float) -> tuple[Array, Array]:
    """Return the factors of the best approximation of a given rank, divided by `scaling`."""
    u, s, vt = jnp.linalg.svd(matrix, full_matrices=False)
    # Half of the singular values goes into each factor, as their square root: B A = U (S / scaling) Vᵀ.
    root = jnp.sqrt(s[:rank] / scaling)
    return root[:, None] * vt[:rank], u[:, :rank] * root[None, :]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _olora(matrix: Float[Array, "out in"], rank: int, scaling: float) -> tuple[Array, Array]:
    # As in PEFT, the part that is subtracted from the weight is `scaling` times this product.
    q, r = jnp.linalg.qr(matrix)
    return r[:rank], q[:, :rank]
