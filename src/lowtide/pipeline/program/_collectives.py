"""Collectives and foreign calls in the functions of a stage: which ones a pipeline refuses, and which ones it replaces.

Collectives along the pipeline's axis are refused, because a stage must not wait for other ranks. On CPUs, permutations
along other axes are replaced by gathers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.sharding import AxisType

from ...core import StructureError, varying_axes
from ...jaxprs import Kind, bodies, equations, is_closed, kind_of, make_jaxpr, opened, source_line, walk, with_bodies


def refuse_undivided_calls(name: str, jaxpr: Any, platform: str) -> None:
    """Raise, with the source line, for kernels and callbacks that JAX cannot lower on a mesh with automatic axes."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = [axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Auto]

    def enter(eqn: Any, _: Any, context: tuple[Sequence[str], str]) -> tuple[Sequence[str], str]:
        auto_axes, location = context
        manual_axes = eqn.params["newly_manual_axes"] if kind_of(eqn) is Kind.SHARD_MAP else ()
        is_kernel_body = kind_of(eqn) is Kind.KERNEL
        remaining_axes = () if is_kernel_body else [axis for axis in auto_axes if axis not in manual_axes]
        return remaining_axes, source_line(eqn) or location

    for eqn, (auto_axes, enclosing_line) in walk(jaxpr, (axes, ""), enter):
        is_kernel = kind_of(eqn) is Kind.KERNEL and platform == "tpu" and not eqn.params["interpret"]
        if not auto_axes or not (is_kernel or eqn.primitive.name == "pure_callback"):
            continue
        call_name = "pallas_call" if is_kernel else "jax.pure_callback"
        location = source_line(eqn) or enclosing_line
        raise StructureError(
            f"{name}: {call_name}{location and f' at {location}'} cannot run in a pipeline whose mesh has other axes",
            expected=f"a mesh with only the pipeline's axis, or a call in a jax.shard_map over {', '.join(auto_axes)}",
            hint="wrap the call: jax.shard_map(call, in_specs=P(), out_specs=P(), "
            f"axis_names={{{', '.join(map(repr, axes))}}})(x), with P({auto_axes[0]!r}) for sharded rows; for a call "
            "with a custom_vjp, wrap the function that has it",
        )


_COLLECTIVES = {
    *("psum", "psum_invariant", "psum_start", "psum_invariant_start", "unreduced_psum", "unreduced_psum_start"),
    *("pmax", "pmin", "ppermute", "ppermute_start", "psend", "precv", "pbroadcast", "pbroadcast_start", "pgather"),
    *("all_gather", "all_gather_start", "all_gather_invariant", "all_gather_reduced", "all_gather_reduced_start"),
    *("reduce_scatter", "reduce_scatter_start", "unreduced_reduce_scatter", "all_to_all", "all_to_all_start"),
    "ragged_all_to_all",
}


def refuse_collectives(name: str, jaxpr: Any, axis: str) -> None:
    """Raise for collectives that would wait forever: along the pipeline's axis, or if only some devices take part."""
    for eqn, location in _with_source_lines(jaxpr):
        if kind_of(eqn) is Kind.SHARD_MAP:
            specs = (*eqn.params["in_specs"], *eqn.params["out_specs"])
            if any(axis in (entry if isinstance(entry, tuple) else (entry,)) for spec in specs for entry in spec):
                raise _spec_error(axis, location, f"one of {', '.join(map(str, specs))}")
        if axis in _collective_axes(eqn):
            raise StructureError(
                f"{name}: {eqn.primitive.name} runs along {axis!r}{location and f' at {location}'}, and would wait for "
                "ranks of the pipeline that run other passes",
                hint="pass values between stages as leaves of h; for a sum over layers, let blocks add to a leaf of h",
            )
    for eqn, location in _with_source_lines(jaxpr):
        kind = kind_of(eqn)
        if kind not in (Kind.BRANCH, Kind.WHILE):
            continue
        predicate = eqn.invars[0] if kind is Kind.BRANCH else eqn.params["cond_jaxpr"].jaxpr.outvars[0]
        inner_axes = {
            axis for body in bodies(eqn) for inner in equations(body.jaxpr) for axis in _collective_axes(inner)
        }
        if axes := sorted(predicate.aval.manual_axis_type.varying & inner_axes):
            where = location and f" at {location}"
            raise StructureError(
                f"{name}: {eqn.primitive.name}{where} is decided separately by each device along {', '.join(axes)}, "
                "although its branches or their gradients contain collectives along that axis",
                hint=f"decide for all devices, for instance by jax.lax.psum(score, {axes[0]!r}) > 0; or pass replicated"
                f" weights as jax.lax.pcast(w, {axes[0]!r}, to='varying'), whose gradients are summed outside",
            )


def translate_error(error: Exception, mesh: Any, axis: str) -> StructureError | None:
    """Translate JAX's error about a `shard_map` or a collective in a function of the stack; else return None.

    JAX's messages are recognised by their wording in 0.10.2 and 0.12.0.
    """
    text = str(error)
    other_axes = [name for name in mesh.axis_names if name != axis]
    available = ", ".join(map(repr, other_axes)) or "none"
    unbound = re.search(r"unbound axis name: (\w+)", text) if isinstance(error, NameError) else None
    if unbound and unbound[1] in other_axes:
        return StructureError(
            f"a function of the stack has a collective along {unbound[1]!r} outside of a shard_map over it",
            expected="jax.shard_map around it, because the compiler shards arrays along all axes but the pipeline's",
            hint=f"call jax.shard_map(part, in_specs=..., out_specs=..., axis_names={{{unbound[1]!r}}})(h, weights)",
        )
    axis_match = re.search(r"refers to '(\w+)'", text) or re.search(r"axis_names=frozenset\(\{(.*?)\}\) to be", text)
    is_shard_map_error = isinstance(error, ValueError) and "shard_map" in text
    names = [unbound[1]] if unbound else re.findall(r"\w+", axis_match[1]) if axis_match and is_shard_map_error else []
    if axis in names:
        return _spec_error(axis, "", text.splitlines()[0])
    missing = [name for name in names if name not in other_axes]
    if missing:
        return StructureError(
            f"a function of the stack names an axis that the mesh does not have: {', '.join(missing)}",
            expected=f"axes of the mesh other than {axis!r}: {available}",
            hint=f"use make_mesh({axis}=..., {missing[0]}=...), or another name in the function"
            if missing[0] in ("data", "fsdp", "expert", "tensor")
            else "name an axis of the mesh, or add the axis: jax.sharding.Mesh(devices, axis_names)",
        )
    if isinstance(error, ValueError) and "should match the mesh passed to shard_map" in text:
        return StructureError(
            "a function of the stack passes its own mesh to jax.shard_map",
            expected=f"no mesh: the pipeline traces the function in a shard_map over {axis!r}, whose mesh it uses",
            hint="leave mesh= out: jax.shard_map(part, in_specs=..., out_specs=..., axis_names=...); without a "
            "pipeline, call the function under jax.set_mesh(mesh)",
        )
    if isinstance(error, TypeError) and re.search(rf"V:[^}}]*\b{re.escape(axis)}\b", text):
        return _spec_error(axis, "", text.splitlines()[0])
    return None


def _spec_error(axis: str, location: str, got: str) -> StructureError:
    return StructureError(
        f"a jax.shard_map{location and f' at {location}'} shards an array along {axis!r}, the axis of the pipeline",
        got=got,
        hint=f"leave {axis!r} out of in_specs and out_specs: a block receives only the arrays of its own stage",
    )


def _with_source_lines(jaxpr: Any) -> Iterator[tuple[Any, str]]:
    """Yield each operation with its source line or, if it has no line, with the line of the enclosing operation."""
    for eqn, enclosing_line in walk(jaxpr, "", lambda eqn, _, enclosing_line: source_line(eqn) or enclosing_line):
        yield eqn, source_line(eqn) or enclosing_line


def _collective_axes(eqn: Any) -> tuple[Any, ...]:
    """Return the axes of a collective; empty for other operations."""
    if eqn.primitive.name not in _COLLECTIVES:
        return ()
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return axes if isinstance(axes, tuple) else (axes,)


# In XLA's CPU client, all devices of a program take part in a collective permute, and the client cannot tell the
# permutes of a `shard_map` apart. If a block sends along another axis, its rank can receive data that another rank
# sends in the same tick (jaxlib 0.10.2 to 0.12.0). A gather involves only the devices of one group. TPUs and GPUs send
# from device to device, so their programs keep permutes. Known inefficiency: a CPU device holds the data that all
# devices of its group send.


def without_permutes(jaxpr: Any, axis: str, shard_map_params: Any = None) -> Any:
    """Replace permutations in a `shard_map` by operations that are gathers on CPUs and permutations elsewhere.

    The jaxpr, open or closed, is traced inside the pipeline's `shard_map`. A permutation along the pipeline's `axis`,
    or one that is in no `shard_map` of the stage, stays. `shard_map_params` are the parameters of the innermost
    `shard_map` of the stage around the jaxpr, or None. Returns the same object if there is nothing to replace.
    """
    if is_closed(jaxpr) and opened(jaxpr) is not jaxpr:  # in versions where a closed jaxpr is a separate class
        inner = without_permutes(jaxpr.jaxpr, axis, shard_map_params)
        return jaxpr if inner is jaxpr.jaxpr else jaxpr.replace(jaxpr=inner)
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "ppermute" and shard_map_params is not None and axis not in _collective_axes(eqn):
            eqns += _gather_operations(eqn, shard_map_params)
            continue
        inner_params = eqn.params if kind_of(eqn) is Kind.SHARD_MAP else shard_map_params
        eqns.append(
            with_bodies(eqn, lambda body, inner_params=inner_params: without_permutes(body.jaxpr, axis, inner_params))
        )
    if len(eqns) == len(jaxpr.eqns) and all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=eqns)


def _gather_operations(eqn: Any, shard_map_params: Any) -> list[Any]:
    """Return the operations that replace a permutation, traced as in the `shard_map` around it."""
    names, pairs, mesh = _collective_axes(eqn), eqn.params["perm"], shard_map_params["mesh"]
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
    """Return the operations of a jaxpr, with its one input and its one output renamed to those of `eqn`."""
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
