"""Arithmetic of a traced function, counted on its jaxpr.

The count serves to compare alternatives, not to predict time: 2mnk for a product, one per element of any other result,
one per element that a reduction reads, none for moving data. A Pallas kernel counts its own estimate (`cost_estimate`),
or else its body for each point of its grid. Other kernels that XLA does not see into count one operation per element of
their results, except cuDNN's attention. A `while` loop counts once, a `cond` its most expensive branch, a `shard_map`
the work of all devices.
"""

from __future__ import annotations

import math
from typing import Any

from ._calls import Kind, bodies, kind_of
from ._versions import opened

_FREE_PRIMITIVES = {
    *("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice", "dynamic_slice", "gather", "rev"),
    *("dynamic_update_slice", "concatenate", "pad", "convert_element_type", "bitcast_convert_type", "copy"),
    *("name", "device_put", "iota", "split", "stop_gradient", "optimization_barrier", "sharding_constraint"),
    *("get", "swap", "masked_load", "masked_swap", "program_id", "num_programs"),  # of Pallas kernels
    *(
        "pcast",
        "pvary",
        "reshard",
        "layout_constraint",
        "laid_out_on_tpus",
        "no_derivative",
        "ppermute",
        "all_gather",
        "all_gather_invariant",
        "all_to_all",
    ),
}


def jaxpr_flops(jaxpr: Any) -> int:
    """Return the FLOPs of a jaxpr, open or closed, including everything inside.

    Operations whose results nothing reads count nothing, because compilers drop them. Results of a call or a loop that
    nothing outside reads are not followed inside.
    """
    jaxpr = opened(jaxpr)
    read = set(map(id, jaxpr.outvars))
    total = 0
    # Backwards, so that the readers of a result are known before the operation that computes it.
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not read.isdisjoint(map(id, eqn.outvars)):
            total += eqn_flops(eqn)
            read.update(map(id, eqn.invars))
    return total


def eqn_flops(eqn: Any) -> int:
    """Return the FLOPs of one operation, including all iterations of a scan."""
    primitive = eqn.primitive.name
    out = eqn.outvars[0].aval if eqn.outvars else None
    if primitive in ("dot_general", "scaled_dot"):
        (contracted, _), _ = eqn.params["dimension_numbers"]
        lhs = eqn.invars[0].aval.shape
        return 2 * _size(out) * math.prod(lhs[dim] for dim in contracted)
    if primitive == "transposed_product":
        return 2 * _size(out) * eqn.invars[1].aval.shape[-1]
    if primitive == "conv_general_dilated":
        features = eqn.params["dimension_numbers"].rhs_spec[0]  # axis of the output features; its size may be 0
        kernel = math.prod(size for dim, size in enumerate(eqn.invars[1].aval.shape) if dim != features)
        stuffed = math.prod(eqn.params["lhs_dilation"])  # zeros that the gradient of a strided convolution inserts
        return 2 * _size(out) * kernel // stuffed
    if primitive == "ragged_dot_general":
        return _ragged_flops(eqn)
    if primitive.startswith("scaled_matmul"):  # [B, M, K] and [B, N, K]
        return 2 * _size(out) * eqn.invars[0].aval.shape[-1]
    if primitive.startswith("dot_product_attention"):  # query [B, T, N, H], key [B, S, K, H]; by layout 1 heads first
        num_products = 5 if "_bwd" in primitive else 2  # backward: the scores again, and four gradients
        return 2 * num_products * _size(eqn.invars[0].aval) * eqn.invars[1].aval.shape[1 + eqn.params["layout"]]
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None:
        return estimate.flops
    kind = kind_of(eqn)
    if kind not in (None, Kind.SCALAR):
        inner = [body.times * jaxpr_flops(body.jaxpr) for body in bodies(eqn)]
        num_devices = manual_devices(eqn.params) if kind is Kind.SHARD_MAP else 1
        return max(inner) if kind is Kind.BRANCH else num_devices * sum(inner)
    if primitive in _FREE_PRIMITIVES:
        return 0
    if primitive.startswith(("reduce_", "arg", "cum")) and primitive != "reduce_precision":
        return _size(eqn.invars[0].aval)
    return sum(_size(var.aval) for var in eqn.outvars)


def _ragged_flops(eqn: Any) -> int:
    """Return the FLOPs of a product whose rows, or whose summed axis, are in groups."""
    numbers, (lhs, _, groups) = eqn.params["ragged_dot_dimension_numbers"], (var.aval for var in eqn.invars)
    (contracted, _), _ = numbers.dot_dimension_numbers
    flops = 2 * _size(eqn.outvars[0].aval) * math.prod(lhs.shape[dim] for dim in contracted)
    return flops // max(groups.shape[-1], 1) if set(numbers.lhs_ragged_dimensions) & set(contracted) else flops


def manual_devices(params: Any) -> int:
    """Return the number of devices over which a `shard_map` shards its arrays.

    Args:
        params: parameters of its equation.
    """
    return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])


def _size(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))
