"""Name the values that are worth keeping, without editing the function that computes them.

The function is traced, and its jaxpr gets a `checkpoint_name` after every matrix product, convolution and attention.
Everything else in it (loops, branches, inner `jit`s and checkpoints, effects, custom derivative rules) stays the same.

Names are meant to be written by hand:

| value | name | example |
|---|---|---|
| a product with a parameter | the parameter's path, without a final `weight` or `kernel` | `attn/q_proj` |
| the result of `jax.nn.dot_product_attention`, and its scores where they exist | | `dot_product_attention` |
| a result of a custom-derivative function that contains a product or kernel | its name | `flash_attention` |
| any other product | `dot_0`, `dot_1`, … after named scopes and names of inner `jit`s | `mlp/dot_0` |

A repeated name gets a number: `attn/q_proj_1`. Several results of one call get the suffixes `/0`, `/1`.

Limits: a product inside a `while` loop or a custom derivative rule gets no name, because checkpoint policies do not see
it there. JAX's attention is recognised by the traceback that JAX stores with an operation. Outside `jax.jit`, the
function is traced at every call, which costs time, and inner `jit`s compile again.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex
from jax.extend.core.primitives import name_p

from ..core import SelectionError
from ..jaxprs import Body, bodies, called, equations, fold, is_closed, kind_of, opened, with_bodies
from ._trace import HIDING, is_name, trace

Origin = tuple[str, ...] | None
"""Path of the parameter that a value is computed from; empty for an activation, None for a constant."""

_PRODUCTS = {
    "dot_general": "dot",
    "transposed_product": "dot",
    "conv_general_dilated": "conv",
    "ragged_dot": "dot",
    "ragged_dot_general": "dot",
}
_KERNELS = {"pallas_call", "scaled_matmul_wrapper", "dot_product_attention_fwd_wrapper"}
_ATTENTION = "dot_product_attention"


def tag(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Name the matrix products, convolutions and attention outputs of a function for `checkpoint`.

    A product with a parameter is named after the parameter's path within its argument, without a final ``weight`` or
    ``kernel``: ``attn/q_proj``. JAX's attention is ``dot_product_attention`` (and ``dot_product_attention/scores``,
    where XLA computes them). A function with a custom derivative rule gives its name. Any other product is ``dot_0``,
    ``dot_1``, … after its named scopes: ``mlp/dot_0``. Existing names are kept. If a product is cast to a smaller dtype
    right away, the name goes to the result of the cast, which has fewer bytes. `lowtide.offload.names` lists the names
    of a function.

    Args:
        fn: a function of any arguments. Its arrays are traced as by `jax.jit`; other arguments (numbers, text,
            functions) reach it unchanged.

    Returns:
        A function with the results, gradients, dtypes and effects of `fn`. Call it under `jax.jit`, because every call
        traces it.

    Raises:
        SelectionError: when it is called and `fn` computes nothing that can be named.

    Memory:
        None: a name alone keeps nothing.

    Examples:
        >>> import jax.numpy as jnp
        >>> from lowtide.offload import names
        >>> def mlp(params, x):
        ...     return jnp.tanh(x @ params["up"]["kernel"]) @ params["down"]["kernel"]
        >>> params = {"up": {"kernel": jnp.ones((4, 8))}, "down": {"kernel": jnp.ones((8, 4))}}
        >>> [value.name for value in names(tag(mlp), params, jnp.ones((2, 4)))]
        ['up', 'down']
    """

    @functools.wraps(fn)
    def tagged(*args: Any, **kwargs: Any) -> Any:
        traced = trace(fn, args, kwargs)
        namer = _Namer()
        origins = [tuple(path.split("/")) if path else () for path in traced.paths]
        jaxpr = namer.jaxpr(traced.closed.jaxpr, origins, ())
        if not namer.has_names:
            raise SelectionError(
                f"{getattr(fn, '__qualname__', type(fn).__name__)!r} computes nothing that tag can name",
                expected="a matrix product, a convolution or attention, outside of while loops",
                got=f"{len(jaxpr.eqns)} other operations",
                hint="name values in the function with jax.ad_checkpoint.checkpoint_name",
            )
        results = jex.jaxpr_as_fun(traced.closed.replace(jaxpr=jaxpr))(*traced.arrays)
        return jax.tree.unflatten(traced.out_tree, results)

    return tagged


class _Namer:
    """Rewrites the jaxprs of a function and records the names that are in use."""

    def __init__(self) -> None:
        self.has_names = False
        self._name_counts = collections.Counter[str]()
        self._attention_products = 0

    def jaxpr(self, jaxpr: Any, origins: Sequence[Origin], scope: tuple[str, ...]) -> Any:
        """Name values in the jaxpr, given the origins of its arguments and the scopes around it."""
        consumers: dict[Any, list[Any]] = {}
        for eqn in jaxpr.eqns:
            for var in eqn.invars:
                if isinstance(var, jex.Var):
                    consumers.setdefault(var, []).append(eqn)
        names: dict[Any, str] = {}
        eqns: list[Any] = []
        fresh = jex.gensym()

        def apply(old: Any, operand_origins: list[Origin]) -> list[Origin]:
            eqn = self._name_inside(old, operand_origins, scope)
            if _should_name(eqn):
                self.has_names = True
                values = [_narrowing_cast(var, consumers, jaxpr.outvars) for var in eqn.outvars]
                if not any(is_name(use) for v in (*eqn.outvars, *values) for use in consumers.get(v, [])):
                    names.update(zip(values, self._names(eqn, operand_origins, scope), strict=True))
            # A named value gets a fresh variable before the name operation. The name's result takes over the old
            # variable, so all readers read the named value.
            named = [var for var in eqn.outvars if var in names and not isinstance(var, jex.DropVar)]
            inner = {var: fresh(var.aval) for var in named}
            eqns.append(eqn.replace(outvars=[inner.get(var, var) for var in eqn.outvars]) if named else eqn)
            eqns.extend(
                jex.new_jaxpr_eqn([inner[var]], [var], name_p, {"name": names[var]}, set(), eqn.source_info, eqn.ctx)
                for var in named
            )
            return [_origin(eqn, operand_origins)] * len(old.outvars)

        fold(jaxpr, origins, apply, lambda *_: None)
        return jaxpr.replace(eqns=eqns)

    def _name_inside(self, eqn: Any, operand_origins: list[Origin], scope: tuple[str, ...]) -> Any:
        """Name values in the jaxprs that an operation calls, unless a checkpoint policy would not see them."""
        inner = bodies(eqn)
        if not inner or kind_of(eqn) in HIDING or any(body.reads is None for body in inner):
            return eqn
        # JAX's own jits (einsum, silu) are defined in JAX's source; their names mean nothing to the reader.
        is_jax = "/jax/_src/" in (opened(inner[0].jaxpr).debug_info.func_src_info or "")
        function_name = "" if is_jax else _unqualified_name(eqn.params.get("name"))
        scope = (*scope, *_scopes(eqn), *([function_name] if function_name else []))

        def rewrite(body: Body) -> Any:
            # A carry counts as an activation, whatever its initial value is.
            origins = [() if i in body.carried else operand_origins[index] for i, index in enumerate(body.reads or ())]
            new = self.jaxpr(opened(body.jaxpr), origins, scope)
            return body.jaxpr.replace(jaxpr=new) if is_closed(body.jaxpr) else new

        return with_bodies(eqn, rewrite)

    def _names(self, eqn: Any, operand_origins: list[Origin], scope: tuple[str, ...]) -> list[str]:
        """Return one name for each result of an operation that is worth a name."""
        primitive = eqn.primitive.name
        scope = (*scope, *_scopes(eqn))
        if _is_in_attention(eqn):
            return self._attention_names(eqn, scope)
        if primitive in _PRODUCTS:
            parameters = [path for path in operand_origins[:2] if path]
            if parameters:
                path = max(reversed(parameters), key=len)  # the deeper one, else the right-hand operand's
                return [self._unique_name("/".join(_strip_leaf_name(path)))]
            return [self._unique_name("/".join((*scope, _PRODUCTS[primitive])), first="_0")]
        function_name = opened(called(eqn)).debug_info.func_name if _is_custom(eqn) else eqn.params.get("name")
        return self._result_names(eqn, (*scope, _unqualified_name(function_name) or primitive))

    def _attention_names(self, eqn: Any, scope: tuple[str, ...]) -> list[str]:
        if eqn.primitive.name not in _PRODUCTS:
            return self._result_names(eqn, (*scope, _ATTENTION))
        self._attention_products += 1  # XLA computes two products: the scores, then scores times values
        leaf = [_ATTENTION, "scores"] if self._attention_products % 2 else [_ATTENTION]
        return [self._unique_name("/".join((*scope, *leaf)))]

    def _result_names(self, eqn: Any, path: tuple[str, ...]) -> list[str]:
        name = self._unique_name("/".join(path))
        return [name] if len(eqn.outvars) == 1 else [f"{name}/{i}" for i in range(len(eqn.outvars))]

    def _unique_name(self, name: str, first: str = "") -> str:
        self._name_counts[name] += 1
        num_repeats = self._name_counts[name] - 1
        return f"{name}_{num_repeats}" if num_repeats else f"{name}{first}"


def _narrowing_cast(var: Any, consumers: dict[Any, list[Any]], results: Sequence[Any]) -> Any:
    """Return the result of a cast to a smaller dtype if the cast is the value's only reader; else the value."""
    uses = consumers.get(var, [])
    if len(uses) != 1 or uses[0].primitive.name != "convert_element_type" or var in results:
        return var
    cast = uses[0].outvars[0]
    return cast if cast.aval.dtype.itemsize < var.aval.dtype.itemsize else var


def _origin(eqn: Any, operand_origins: list[Origin]) -> Origin:
    """Return the origin of a result: the common path of its operands, without constants."""
    if eqn.primitive.name in _PRODUCTS or kind_of(eqn) is not None:
        return ()
    paths = [path for path in operand_origins if path is not None]
    if not paths:
        return None
    common = min(paths, key=len)
    while any(path[: len(common)] != common for path in paths):
        common = common[:-1]
    return common


def _strip_leaf_name(path: tuple[str, ...]) -> tuple[str, ...]:
    while len(path) > 1 and path[-1] in ("weight", "kernel", "value"):
        path = path[:-1]
    return path


def _scopes(eqn: Any) -> list[str]:
    """Return the named scopes of an operation, without transformations and without einsum's subscripts."""
    scopes: list[str] = []
    for part in str(eqn.source_info.name_stack).split("/"):
        while (inner := re.fullmatch(r"\w+\((.*)\)", part)) is not None:
            part = inner[1]
        if part and "->" not in part:
            scopes.append(part)
    return scopes


def _unqualified_name(name: Any) -> str:
    """Return the unqualified name of a function; empty for a lambda."""
    unqualified = str(name or "").rsplit(".", 1)[-1].strip("_")
    return unqualified if unqualified.isidentifier() else ""


def _is_in_attention(eqn: Any) -> bool:
    frames = getattr(eqn.source_info.traceback, "frames", None) or ()
    return any(frame.function_name == _ATTENTION and "jax" in frame.file_name for frame in frames)


def _is_custom(eqn: Any) -> bool:
    kind = kind_of(eqn)
    return kind is not None and kind.is_custom


def _should_name(eqn: Any) -> bool:
    """Return whether an operation is a product or a kernel, or a custom-derivative function that contains one."""
    candidates = [eqn, *(equations(called(eqn)) if _is_custom(eqn) else ())]
    return any(inner_eqn.primitive.name in (*_PRODUCTS, *_KERNELS) for inner_eqn in candidates)
