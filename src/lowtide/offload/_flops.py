"""Arithmetic of a traced function, counted on its jaxpr.

A count for choosing between values, not for timing: 2mnk for a product, one for each element of any other result, one
for each element that a reduction reads, none for moving data. Kernels that XLA does not see into count as one operation
for each element of their results, except cuDNN's attention. A `while` loop counts once; of a `cond` the dearest branch.
"""

from __future__ import annotations

import math
from typing import Any

from jax.extend import core as jex

_FREE = {
    *("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice", "dynamic_slice", "gather", "rev"),
    *("dynamic_update_slice", "concatenate", "pad", "convert_element_type", "bitcast_convert_type", "copy"),
    *("name", "device_put", "iota", "split", "stop_gradient", "optimization_barrier", "sharding_constraint"),
}


def jaxpr_flops(jaxpr: Any) -> int:
    """FLOPs of a jaxpr, everything inside included."""
    return sum(eqn_flops(eqn) for eqn in jaxpr.eqns)


def eqn_flops(eqn: Any) -> int:
    """FLOPs of one operation, all iterations of a scan included."""
    primitive = eqn.primitive.name
    out = eqn.outvars[0].aval if eqn.outvars else None
    if primitive == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        lhs = eqn.invars[0].aval.shape
        return 2 * _size(out) * math.prod(lhs[dim] for dim in contracted)
    if primitive == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        return 2 * _size(out) * math.prod(kernel) // kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    if primitive in ("ragged_dot", "ragged_dot_general"):
        return 2 * _size(out) * eqn.invars[0].aval.shape[-1]
    if primitive.startswith("dot_product_attention_fwd"):  # query [B, T, N, H], key [B, S, K, H]
        return 4 * _size(eqn.invars[0].aval) * eqn.invars[1].aval.shape[1]
    inner = [jaxpr_flops(jaxpr) for jaxpr in jex.jaxprs_in_params(eqn.params)]
    if inner and primitive != "pallas_call":
        return max(inner) if primitive == "cond" else eqn.params.get("length", 1) * sum(inner)
    if primitive in _FREE:
        return 0
    if primitive.startswith(("reduce_", "arg", "cum")) and primitive != "reduce_precision":
        return _size(eqn.invars[0].aval)
    return sum(_size(var.aval) for var in eqn.outvars)


def _size(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))
