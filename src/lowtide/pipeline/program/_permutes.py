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

    Args:
        jaxpr: open or closed, traced inside the pipeline's `shard_map`.
        axis: the pipeline's axis, along which no permutation is allowed.

    Returns:
        A jaxpr with the same inputs and outputs; the same object if there is nothing to replace.
    """
    return _changed(jaxpr, axis, None)


def permuting_nothing(fn: Callable[..., Any], axis: str) -> Callable[..., Any]:
    """Make a function that applies `without_permutes` to another function.

    Args:
        fn: function of trees of arrays.
        axis: the pipeline's axis.
    """

    def run(*args: Any) -> Any:
        closed, shapes = make_jaxpr(fn)(*args)
        changed = without_permutes(closed, axis)
        if changed is closed:
            return fn(*args)
        return jax.tree.unflatten(jax.tree.structure(shapes), jex.jaxpr_as_fun(changed)(*jax.tree.leaves(args)))

    return run


def _changed(jaxpr: Any, axis: str, around: Any) -> Any:
    if is_closed(jaxpr) and opened(jaxpr) is not jaxpr:  # in versions where a closed jaxpr is a separate class
        inner = _changed(jaxpr.jaxpr, axis, around)
        return jaxpr if inner is jaxpr.jaxpr else jaxpr.replace(jaxpr=inner)
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "ppermute" and around is not None and axis not in _axes(eqn):
            eqns += _gathering(eqn, around)
            continue
        inside = eqn.params if kind_of(eqn) is Kind.SHARD_MAP else around
        eqns.append(with_bodies(eqn, lambda body, inside=inside: _changed(body.jaxpr, axis, inside)))
    if len(eqns) == len(jaxpr.eqns) and all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=eqns)


def _axes(eqn: Any) -> tuple[Any, ...]:
    name = eqn.params["axis_name"]
    return name if isinstance(name, tuple) else (name,)


def _gathering(eqn: Any, around: Any) -> list[Any]:
    """Return the operations that replace a permutation, traced as in the `shard_map` around it."""
    names, pairs, mesh = _axes(eqn), eqn.params["perm"], around["mesh"]
    # A permute numbers devices in mesh order, whatever the order of its axis names. A gather numbers them in the order
    # of its axis names. So the names are sorted into mesh order.
    axes = tuple(one for one in mesh.axis_names if one in names)
    size = int(np.prod([mesh.shape[one] for one in axes]))
    source = np.full(size, -1)
    source[[to for _, to in pairs]] = [begin for begin, _ in pairs]

    def gather(x: Any) -> Any:
        mine = lax.select_n(lax.axis_index(axes), *map(np.int32, source))  # a table would become a jaxpr constant
        sent = lax.dynamic_index_in_dim(lax.all_gather(x, axes), jnp.maximum(mine, 0), keepdims=False)
        return sent if source.min() >= 0 else jnp.where(mine >= 0, sent, jnp.zeros_like(sent))

    def move(x: Any) -> Any:
        return lax.platform_dependent(x, cpu=gather, default=lambda x: lax.ppermute(x, names, pairs))

    aval = eqn.invars[0].aval
    varying = tuple(sorted(varying_axes(aval) & around["newly_manual_axes"]))
    found: list[Any] = []

    def body(x: Any) -> Any:
        found.append(make_jaxpr(move)(lax.pcast(x, varying, to="varying") if varying else x)[0])
        return jnp.zeros(())

    specs = jax.sharding.PartitionSpec()
    manual, check = around["newly_manual_axes"], around["check_vma"]
    with jax.sharding.use_abstract_mesh(mesh):
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs, axis_names=manual, check_vma=check)
        jax.eval_shape(mapped, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    (closed,) = found
    return _inlined(closed, eqn)


def _inlined(closed: Any, eqn: Any) -> list[Any]:
    """Return the operations of a jaxpr with one input and output, renamed to the variables of an operation."""
    inner = opened(closed)
    assert not inner.constvars, "nothing is held apart"
    names = {inner.invars[0]: eqn.invars[0], inner.outvars[0]: eqn.outvars[0]}

    def named(var: Any) -> Any:
        return var if isinstance(var, jex.Literal) else names.get(var, var)

    return [
        one.replace(
            invars=list(map(named, one.invars)),
            outvars=list(map(named, one.outvars)),
            source_info=eqn.source_info,
        )
        for one in inner.eqns
    ]
