"""On CPUs, replace permutations along axes other than the pipeline's by gathers.

In XLA's CPU client, all devices of a program take part in a collective permute, and the client cannot tell the permutes
of a `shard_map` apart. If a rank's block sends along another axis, it can receive data that another rank sends in the
same tick (jaxlib 0.10.2 to 0.12.0). A gather involves only the devices of one group. TPUs and GPUs send from device to
device, so their programs keep permutes.

Known inefficiency: a CPU device holds the data that all devices of its group send.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from ...core import varying_axes
from ...jaxprs import Kind, is_closed, kind_of, make_jaxpr, opened, with_bodies


def without_permutes(jaxpr: Any, axis: str) -> Any:
    """Replace each permutation by an operation that is a gather on a CPU and a permutation on other platforms.

    The jaxpr, open or closed, is traced inside the pipeline's `shard_map`. No permutation along the pipeline's `axis`
    is allowed. Returns the same object if there is nothing to replace.
    """
    return _replace_permutes(jaxpr, axis, None)


def wrap_without_permutes(fn: Callable[..., Any], axis: str) -> Callable[..., Any]:
    """Make a function that applies `without_permutes` to a function of trees of arrays."""

    def run(*args: Any) -> Any:
        closed, shapes = make_jaxpr(fn)(*args)
        rewritten = without_permutes(closed, axis)
        if rewritten is closed:
            return fn(*args)
        return jax.tree.unflatten(jax.tree.structure(shapes), jex.jaxpr_as_fun(rewritten)(*jax.tree.leaves(args)))

    return run


def _replace_permutes(jaxpr: Any, axis: str, shard_map_params: Any) -> Any:
    if is_closed(jaxpr) and opened(jaxpr) is not jaxpr:  # in versions where a closed jaxpr is a separate class
        inner = _replace_permutes(jaxpr.jaxpr, axis, shard_map_params)
        return jaxpr if inner is jaxpr.jaxpr else jaxpr.replace(jaxpr=inner)
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "ppermute" and shard_map_params is not None and axis not in _axis_names(eqn):
            eqns += _gather_operations(eqn, shard_map_params)
            continue
        inner_params = eqn.params if kind_of(eqn) is Kind.SHARD_MAP else shard_map_params
        eqns.append(
            with_bodies(eqn, lambda body, inner_params=inner_params: _replace_permutes(body.jaxpr, axis, inner_params))
        )
    if len(eqns) == len(jaxpr.eqns) and all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=eqns)


def _axis_names(eqn: Any) -> tuple[Any, ...]:
    name = eqn.params["axis_name"]
    return name if isinstance(name, tuple) else (name,)


def _gather_operations(eqn: Any, shard_map_params: Any) -> list[Any]:
    """Return the operations that replace a permutation, traced as in the `shard_map` around it."""
    names, pairs, mesh = _axis_names(eqn), eqn.params["perm"], shard_map_params["mesh"]
    # A permute numbers devices in mesh order, whatever the order of its axis names. A gather numbers them in the order
    # of its axis names. So the names are sorted into mesh order.
    axes = tuple(name for name in mesh.axis_names if name in names)
    size = int(np.prod([mesh.shape[name] for name in axes]))
    source = np.full(size, -1)
    source[[destination for _, destination in pairs]] = [start for start, _ in pairs]

    def gather(x: Any) -> Any:
        sender = lax.select_n(lax.axis_index(axes), *map(np.int32, source))  # a table would become a jaxpr constant
        received = lax.dynamic_index_in_dim(lax.all_gather(x, axes), jnp.maximum(sender, 0), keepdims=False)
        return received if source.min() >= 0 else jnp.where(sender >= 0, received, jnp.zeros_like(received))

    def permute(x: Any) -> Any:
        return lax.platform_dependent(x, cpu=gather, default=lambda x: lax.ppermute(x, names, pairs))

    aval = eqn.invars[0].aval
    varying = tuple(sorted(varying_axes(aval) & shard_map_params["newly_manual_axes"]))
    jaxprs: list[Any] = []

    def body(x: Any) -> Any:
        jaxprs.append(make_jaxpr(permute)(lax.pcast(x, varying, to="varying") if varying else x)[0])
        return jnp.zeros(())

    specs = jax.sharding.PartitionSpec()
    manual_axes, check_vma = shard_map_params["newly_manual_axes"], shard_map_params["check_vma"]
    with jax.sharding.use_abstract_mesh(mesh):
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=specs, out_specs=specs, axis_names=manual_axes, check_vma=check_vma
        )
        jax.eval_shape(mapped, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    (closed,) = jaxprs
    return _inline(closed, eqn)


def _inline(closed: Any, eqn: Any) -> list[Any]:
    """Return the operations of a jaxpr with one input and output, renamed to the variables of an operation."""
    inner = opened(closed)
    assert not inner.constvars, "the jaxpr has no constants"
    names = {inner.invars[0]: eqn.invars[0], inner.outvars[0]: eqn.outvars[0]}

    def rename(var: Any) -> Any:
        return var if isinstance(var, jex.Literal) else names.get(var, var)

    return [
        inner_eqn.replace(
            invars=list(map(rename, inner_eqn.invars)),
            outvars=list(map(rename, inner_eqn.outvars)),
            source_info=eqn.source_info,
        )
        for inner_eqn in inner.eqns
    ]
