"""Named activations: give names (`tag`), list them (`names`), and choose by name what to keep (`checkpoint`).

Names are those of `jax.ad_checkpoint.checkpoint_name`. The functions here read and rewrite jaxprs through
`jax.extend.core`. Policies of `jax.checkpoint` see names inside `jit`, `scan`, `cond`, `vmap` and other checkpoints.
They do not see names inside the primal function of a `custom_vjp` or `custom_jvp`: differentiation replaces this
function by its rule, and policies see the names in the rule.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import difflib
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex
from jax.extend.core.primitives import name_p

from ..core import (
    LAYER_INPUT,
    LAYER_NAMES,
    ConfigError,
    PlacementError,
    PlacementWarning,
    SelectionError,
    Tree,
    check_host_slices,
    format_bytes,
    is_own_name,
    leaf_bytes,
    leaves_with_paths,
    recomputed,
)
from ..core._compat import classic_remat
from ..jaxprs import (
    Body,
    Kind,
    bodies,
    called,
    eqn_flops,
    equations,
    fold,
    is_closed,
    kind_of,
    make_jaxpr,
    opened,
    variables_read,
    walk,
    with_bodies,
)

_HIDING: Mapping[Kind | None, str] = {
    Kind.CUSTOM_VJP: "inside a function with a custom_vjp",
    Kind.CUSTOM_JVP: "inside a function with a custom_jvp",
    Kind.WHILE: "inside a while loop, which reverse-mode differentiation does not enter",
    Kind.CHOICE: "inside the code that may replace a kernel",
    Kind.KERNEL: "inside a Pallas kernel",
    Kind.OPAQUE: "inside a function with its own recomputation rules",
}
"""Operations inside which the policy of a `jax.checkpoint` does not see names, with the text for messages."""
NameSelection = str | Sequence[str]
"""Exact names, or one regular expression that has to match whole names."""


# `tag` traces a function and adds a `checkpoint_name` to its jaxpr after every matrix product, convolution and
# attention. Everything else in the jaxpr (loops, branches, inner `jit`s and checkpoints, effects, custom derivative
# rules) stays the same. A repeated name gets a number: `attn/q_proj_1`. Several results of one call get the suffixes
# `/0`, `/1`.
#
# Limits: a product inside a `while` loop or a custom derivative rule gets no name, because checkpoint policies do not
# see it there. JAX's attention is recognised by the traceback that JAX stores with an operation. Outside `jax.jit`,
# each call traces the function again, and inner `jit`s compile again.

_Origin = tuple[str, ...] | None
"""Path of the parameter that a value is computed from; empty for an activation, None for a constant."""

_PRODUCTS = {
    "dot_general": "dot",
    "transposed_product": "dot",
    "conv_general_dilated": "conv",
    "ragged_dot": "dot",
    "ragged_dot_general": "dot",
}
_CUDNN_ATTENTION = {"dot_product_attention_fwd_wrapper"}
"""Operations whose results have no names. `checkpoint` treats both results, output and log-sum-exp, as ``attn_out``."""
_KERNELS = {"pallas_call", "scaled_matmul_wrapper", *_CUDNN_ATTENTION}
_ATTENTION = "dot_product_attention"


def tag(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Name the matrix products, convolutions and attention outputs of a function for `checkpoint`.

    The names are:

    - Product with a parameter: the parameter's path, without a final ``weight``, ``kernel`` or ``value``.
    - JAX's attention: ``dot_product_attention``, and ``dot_product_attention/scores`` if XLA computes the scores.
    - Kernel, or function with a custom derivative rule and a product inside: the name of the kernel or function.
    - Any other product: ``dot_0``, … (a convolution: ``conv_0``, …) after its named scopes, as in ``mlp/dot_0``.

    Existing names are kept; a product with one of Lowtide's `lowtide.core.LAYER_NAMES` gets a name in addition. If the
    only use of a product is a cast to a smaller dtype, the result of the cast gets the name. `lowtide.offload.names`
    lists the names of a function.

    Args:
        fn: a function of any arguments. Array arguments are traced as by `jax.jit`; `fn` receives other arguments
            (numbers, text, functions) unchanged.

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
        traced = _trace(fn, args, kwargs)
        namer = _Namer()
        origins = [tuple(path.split("/")) if path else () for path in traced.paths]
        jaxpr = namer.jaxpr(traced.closed.jaxpr, origins, ())
        if not namer.has_names:
            problem = f"{getattr(fn, '__qualname__', type(fn).__name__)!r} computes nothing that tag can name"
            expected = "a matrix product, a convolution or attention, outside of while loops"
            hint = "name values in the function with jax.ad_checkpoint.checkpoint_name"
            raise SelectionError(problem, expected=expected, hint=hint)
        results = jex.jaxpr_as_fun(traced.closed.replace(jaxpr=jaxpr))(*traced.arrays)
        return jax.tree.unflatten(traced.out_tree, results)

    return tagged


class _Namer:
    """Rewrites the jaxprs of a function and records the names that are in use."""

    def __init__(self) -> None:
        self.has_names = False
        self._name_counts = collections.Counter[str]()
        self._attention_products = 0

    def jaxpr(self, jaxpr: Any, origins: Sequence[_Origin], scope: tuple[str, ...]) -> Any:
        """Name values in the jaxpr, given the origins of its arguments and the scopes around it."""
        consumers: dict[Any, list[Any]] = {}
        for eqn in jaxpr.eqns:
            for var in eqn.invars:
                if isinstance(var, jex.Var):
                    consumers.setdefault(var, []).append(eqn)
        names: dict[Any, str] = {}
        eqns: list[Any] = []
        fresh = jex.gensym()

        def apply(old: Any, operand_origins: list[_Origin]) -> list[_Origin]:
            eqn = self._name_inside(old, operand_origins, scope)
            # A function with a custom derivative rule is named if it contains a product or a kernel.
            candidates = [eqn, *(equations(called(eqn)) if _is_custom(eqn) else ())]
            if any(candidate.primitive.name in (*_PRODUCTS, *_KERNELS) for candidate in candidates):
                self.has_names = True
                values = [_narrowing_cast(var, consumers, jaxpr.outvars) for var in eqn.outvars]
                uses = [use for v in (*eqn.outvars, *values) for use in consumers.get(v, []) if _is_name(use)]
                if all(use.params["name"] in LAYER_NAMES for use in uses):
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

    def _name_inside(self, eqn: Any, operand_origins: list[_Origin], scope: tuple[str, ...]) -> Any:
        """Name values in the jaxprs that an operation calls, unless a checkpoint policy would not see them."""
        inner = bodies(eqn)
        if not inner or kind_of(eqn) in _HIDING or any(body.reads is None for body in inner):
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

    def _names(self, eqn: Any, operand_origins: list[_Origin], scope: tuple[str, ...]) -> list[str]:
        """Return one name for each result of a product, a kernel, or a function with a custom derivative rule."""
        primitive = eqn.primitive.name
        scope = (*scope, *_scopes(eqn))
        frames = getattr(eqn.source_info.traceback, "frames", None) or ()
        if any(frame.function_name == _ATTENTION and "jax" in frame.file_name for frame in frames):
            if primitive not in _PRODUCTS:
                return self._result_names(eqn, (*scope, _ATTENTION))
            self._attention_products += 1  # XLA computes two products: the scores, then scores times values
            leaf = [_ATTENTION, "scores"] if self._attention_products % 2 else [_ATTENTION]
            return [self._unique_name("/".join((*scope, *leaf)))]
        if primitive in _PRODUCTS:
            parameters = [path for path in operand_origins[:2] if path]
            if parameters:
                path = max(reversed(parameters), key=len)  # the longest; of equally long ones, the right operand's
                while len(path) > 1 and path[-1] in ("weight", "kernel", "value"):
                    path = path[:-1]
                return [self._unique_name("/".join(path))]
            return [self._unique_name("/".join((*scope, _PRODUCTS[primitive])), first="_0")]
        function_name = opened(called(eqn)).debug_info.func_name if _is_custom(eqn) else eqn.params.get("name")
        return self._result_names(eqn, (*scope, _unqualified_name(function_name) or primitive))

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


def _origin(eqn: Any, operand_origins: list[_Origin]) -> _Origin:
    """Return the origin of a result: the common beginning of its operands' paths, constants left out."""
    if eqn.primitive.name in _PRODUCTS or kind_of(eqn) is not None:
        return ()
    paths = [path for path in operand_origins if path is not None]
    if not paths:
        return None
    common = min(paths, key=len)
    while any(path[: len(common)] != common for path in paths):
        common = common[:-1]
    return common


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


def _is_custom(eqn: Any) -> bool:
    kind = kind_of(eqn)
    return kind is not None and kind.is_custom


# The FLOPs of a value are those of the operations that compute it from the function's arguments and from other named
# values. Inside a loop, they are counted from the start of the iteration. If a value needs the result of a loop, the
# whole loop counts, even if values inside it have names.
#
# Limit: names in the forward function of a `custom_vjp` exist only under differentiation, and are not listed.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Name:
    """All values of one name, shape and dtype."""

    name: str
    """The name from `checkpoint_name` or `lowtide.offload.tag`."""
    shape: tuple[int, ...]
    """Shape of one value."""
    dtype: str
    """Dtype of one value."""
    count: int
    """Number of values: iterations of the enclosing loops times places with the name."""
    bytes: int
    """Bytes of all values together, without a device's padding."""
    flops: int
    """FLOPs to compute all values again from the arguments and the other named values."""
    hidden: str = ""
    """Why `lowtide.offload.checkpoint` cannot save or offload the values; empty if it can."""


@dataclasses.dataclass(frozen=True)
class Names:
    """The named values of a function, in program order; iterates over its rows."""

    rows: tuple[Name, ...]
    """One row for each name, shape and dtype."""

    def __iter__(self) -> Iterator[Name]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> Name:
        """Return the first row of a name; raise `KeyError` for an unknown name."""
        return {row.name: row for row in reversed(self.rows)}[name]

    def __str__(self) -> str:
        if not self.rows:
            return "no value has a name; hint: lt.offload.tag(fn) names the results of matrix products and attention"
        table = [("name", "values", "bytes", "FLOPs to recompute", "")]
        for row in self.rows:
            values = f"{row.count} x {row.dtype}{list(row.shape)}"
            table.append((row.name, values, format_bytes(row.bytes), f"{row.flops:.3g}", row.hidden))
        widths = [max(len(line[column]) for line in table) for column in range(5)]
        marks = "<<>><"  # text to the left, figures to the right
        lines = [
            "  ".join(f"{cell:{mark}{width}}" for cell, mark, width in zip(line, marks, widths, strict=True))
            for line in table
        ]
        return "\n".join(line.rstrip() for line in lines)


def names(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Names:
    """List the named values of a function, with their bytes and the FLOPs to compute them again.

    FLOPs are counted on the traced function: 2mnk for a matrix product, one for each element that another operation
    computes or reduces, none for moving data. XLA may remove some operations and add others.

    Args:
        fn: a function with values named by `jax.ad_checkpoint.checkpoint_name` or `lowtide.offload.tag`.
        *args: arguments of `fn`: arrays or `jax.ShapeDtypeStruct`s. Nothing is computed.
        **kwargs: keyword arguments of `fn`.

    Returns:
        One row for each name, shape and dtype; `str` formats them as a table.

    Memory:
        None. `bytes` of a row is what its values take if they are saved on the device or offloaded to the host. Inside
        a `jax.shard_map`, it counts one device.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> def loss(w, x):
        ...     def body(h, w):
        ...         return jnp.tanh(checkpoint_name(h @ w, "up")), None
        ...     return jax.lax.scan(body, x, w)[0].sum()
        >>> print(names(loss, jax.ShapeDtypeStruct((3, 8, 8), "float32"), jnp.ones((4, 8))))
        name  values              bytes  FLOPs to recompute
        up    3 x float32[4, 8]   384 B            1.54e+03
    """
    closed = _trace(fn, args, kwargs).closed
    graph = _Graph(1)
    graph.add(closed, [graph.new_value() for _ in closed.in_avals])
    merged: dict[tuple[Any, ...], Name] = {}
    for row in graph.rows():
        key = (row.name, row.shape, row.dtype, row.hidden)
        if (other := merged.get(key)) is not None:
            count, num_bytes, flops = row.count + other.count, row.bytes + other.bytes, row.flops + other.flops
            row = dataclasses.replace(row, count=count, bytes=num_bytes, flops=flops)
        merged[key] = row
    return Names(tuple(merged.values()))


class _Graph:
    """Operations of a function or of one loop iteration, with calls inlined; values are numbered."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._num_values = 0
        self._producers: dict[int, tuple[list[int], int, bool]] = {}
        self._order: list[Any] = []  # (operation, value, hidden) for a name; a graph for a loop or branch

    def new_value(self) -> int:
        self._num_values += 1
        return self._num_values

    def add(self, jaxpr: Any, arguments: list[int], hidden: str = "") -> list[int]:
        """Add the operations of a jaxpr; return the values of its results."""

        def apply(eqn: Any, operands: list[int]) -> list[int]:
            inner_hidden = hidden or _HIDING.get(kind_of(eqn), "")
            if (inner := called(eqn)) is not None:
                return self.add(inner, operands, inner_hidden)
            for body in bodies(eqn):  # loops and branches have separate graphs, whose arguments need no FLOPs
                graph = _Graph(self._count * body.times)
                graph.add(body.jaxpr, [graph.new_value() for _ in body.jaxpr.in_avals], inner_hidden)
                self._order.append(graph)
            results = [self.new_value() for _ in eqn.outvars]
            producer = (operands, eqn_flops(eqn), _is_name(eqn))
            self._producers.update((result, producer) for result in results)
            if _is_name(eqn):
                self._order.append((eqn, operands[0], hidden))
            return results

        return fold(jaxpr, arguments, apply, lambda *_: self.new_value())

    def rows(self) -> Iterator[Name]:
        """Yield a row for each place with a name, in program order."""
        for entry in self._order:
            if isinstance(entry, _Graph):
                yield from entry.rows()
                continue
            eqn, operand, hidden = entry
            aval = eqn.outvars[0].aval
            yield Name(
                name=eqn.params["name"],
                shape=tuple(aval.shape),
                dtype=str(aval.dtype),
                count=self._count,
                bytes=self._count * leaf_bytes(aval),
                flops=self._count * self._flops(operand),
                hidden=hidden,
            )

    def _flops(self, value: int) -> int:
        """Return the FLOPs of all operations that a value needs, back to arguments and named values."""
        visited, operations, worklist = {value}, dict[int, int](), [value]
        while worklist:
            operands, flops, is_name = self._producers.get(worklist.pop(), ([], 0, True))
            # The key is the operand list, so an operation with several results counts once.
            if is_name:
                continue
            operations[id(operands)] = flops
            worklist += [operand for operand in operands if operand not in visited]
            visited.update(operands)
        return sum(operations.values())


# --- choices by name -------------------------------------------------------------------------------------------------

# JAX's policies by name (`jax.checkpoint_policies.save_and_offload_only_these_names`) take lists, and a name that the
# function does not contain changes nothing, without an error. Here every name has to be in the function when it is
# traced, in a place that JAX's policies can see.
#
# Limits: a function with a custom derivative rule is traced one more time than by `jax.checkpoint` if an argument is a
# pattern, only `recompute` is given, or a name is not in the jaxpr. Even with ``jax_remat3``, the earlier
# implementation of `jax.checkpoint` is used, because XLA does not compile the offloading of the new one (JAX 0.11.2).


def checkpoint(
    fn: Callable[..., Any],
    *,
    save: NameSelection | None = None,
    offload: NameSelection | None = None,
    recompute: NameSelection | None = None,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
) -> Callable[..., Any]:
    """Apply `jax.checkpoint`, and choose by name which values to save, offload or recompute.

    A value gets its name from `jax.ad_checkpoint.checkpoint_name` or `lowtide.offload.tag`. Values without a name, and
    values whose name no argument selects, are recomputed in the backward pass. If only `recompute` is given, all other
    named values are saved.

    Args:
        fn: the function, with any arguments that `jax.checkpoint` accepts.
        save: names of values that stay on the device until the backward pass. A sequence holds exact names; a single
            string is a regular expression that has to match a whole name (`re.fullmatch`).
        offload: names of values that move to pinned host memory in the forward pass and back in the backward pass.
        recompute: names of values that are recomputed.
        prevent_cse: as in `jax.checkpoint`, which advises False when `fn` is the body of a `jax.lax.scan`.
        static_argnums: as in `jax.checkpoint`.

    Returns:
        A function with the values and gradients of `fn`.

    Raises:
        ConfigError: when no values are selected, a selection is invalid, or two arguments select one name.
        SelectionError: when the result is traced, for a name or pattern that matches no value.
        PlacementError: when the result is traced, for a value to save or offload that policies do not see, such as one
            inside a `custom_vjp`. If the pattern also matches visible values, there is only a `PlacementWarning`. The
            error is also raised when a value to offload is already on the host, or when this GPU's XLA reads offloaded
            values in a wrong order.

    Memory:
        Between forward and backward pass the device holds the arguments of `fn` and the saved values, and the host
        holds the offloaded values (`lowtide.offload.names` lists their bytes). Values inside a scan exist once per
        iteration. Values that the backward pass does not read (a product that is only added to something) are neither
        kept nor moved. If `fn` itself scans over layers, the backward pass still holds the residuals of all layers;
        apply `checkpoint` to the block instead.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> def block(x, w):
        ...     return x + jnp.tanh(checkpoint_name(x @ w, "up"))
        >>> block_offloaded = checkpoint(block, offload=["up"])
        >>> jax.grad(lambda w: block_offloaded(jnp.ones((2, 2)), w).sum())(jnp.zeros((2, 2))).tolist()
        [[2.0, 2.0], [2.0, 2.0]]

    References:
        The JAX guide "Gradient checkpointing with jax.checkpoint", and its host-offloading guide.
    """
    claims = _claims(save=save, offload=offload, recompute=recompute)
    make_checkpoint = functools.partial(jax.checkpoint, prevent_cse=prevent_cse, static_argnums=static_argnums)
    is_exact = not any(claim.is_regex or claim.argument == "recompute" for claim in claims)
    exact = frozenset(pattern for claim in claims for pattern in claim.patterns)

    @functools.cache
    def keeping(names: frozenset[str] | None) -> Callable[..., Any]:
        return recomputed(fn, names)

    @functools.wraps(fn)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        # JAX caches how a checkpointed function traced, so tracing here costs no second trace of `fn`.
        with classic_remat():
            traced = _trace(make_checkpoint(keeping(exact if is_exact else None)), args, kwargs)
            fn_name = getattr(fn, "__qualname__", type(fn).__name__)
            save, offload = _decide(claims, traced, fn_name)
            if offload:
                check_host_slices()
            return make_checkpoint(keeping(save | offload), policy=_policy(save, offload))(*args, **kwargs)

    return checkpointed


@dataclasses.dataclass(frozen=True)
class _Claim:
    """One of the arguments `save`, `offload` and `recompute` of `checkpoint`."""

    argument: str
    patterns: tuple[str, ...]
    is_regex: bool

    def matches(self, pattern: str, names: Sequence[str]) -> list[str]:
        return [name for name in names if (re.fullmatch(pattern, name) if self.is_regex else pattern == name)]


def _claims(**arguments: Any) -> tuple[_Claim, ...]:
    claims: list[_Claim] = []
    for argument, selection in arguments.items():
        if selection is None:
            continue
        patterns: tuple[Any, ...] = (selection,) if isinstance(selection, str) else tuple(selection)
        if not all(isinstance(pattern, str) for pattern in patterns):
            problem = f"{argument} must be a list of names or a regular expression, not {selection!r}"
            raise ConfigError(problem, hint=f'pass for instance {argument}=["attn_out"]')
        if isinstance(selection, str):
            try:
                re.compile(selection)
            except re.error as error:
                hint = f"for exact names pass a list: {argument}=[{selection!r}]"
                problem = f"{argument}={selection!r} is not a regular expression: {error}"
                raise ConfigError(problem, hint=hint) from error
        claims.append(_Claim(argument, patterns, isinstance(selection, str)))
    if not claims:
        hint = "use jax.checkpoint(fn) to recompute everything"
        raise ConfigError("none of save=, offload= and recompute= selects values", hint=hint)
    _refuse_two_claims([(claim.argument, name) for claim in claims if not claim.is_regex for name in claim.patterns])
    return tuple(claims)


def _refuse_two_claims(claimed: Sequence[tuple[str, str]]) -> None:
    claimants: dict[str, str] = {}
    for argument, name in claimed:
        if claimants.setdefault(name, argument) != argument:
            hint = "remove it from one of them; a value that no argument selects is recomputed"
            raise ConfigError(f"{claimants[name]} and {argument} both select the value {name!r}", hint=hint)


def _decide(claims: tuple[_Claim, ...], traced: _Traced, fn_name: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names to save and the names to offload."""
    values = list(_named_values(traced.closed.jaxpr))
    visible = {name for name, _, reason in values if not reason}
    requested = {pattern for claim in claims for pattern in claim.patterns if not claim.is_regex}
    is_exclusion = {claim.argument for claim in claims} == {"recompute"}
    # Differentiation replaces functions with custom derivative rules by code that the jaxpr does not contain. If all
    # names are exact and visible, no second trace for such rules is needed.
    is_resolved = requested <= visible and not is_exclusion and not any(claim.is_regex for claim in claims)
    if not is_resolved and any(map(_is_custom, equations(traced.closed.jaxpr))):
        with contextlib.suppress(Exception):  # the user's own differentiation raises the same error
            visible.update(_names_under_differentiation(jex.jaxpr_as_fun(traced.closed), traced))
    reasons = {name: reason for name, _, reason in values if name not in visible}
    claimed: dict[str, list[str]] = {"save": [], "offload": [], "recompute": []}
    for claim in claims:
        for pattern in claim.patterns:
            claimed[claim.argument] += _match_names(claim, pattern, sorted(visible), reasons, fn_name)
    _refuse_two_claims([(argument, name) for argument, names in claimed.items() for name in names])
    for name, aval, _ in values:
        if name in claimed["offload"] and aval.memory_space == jax.memory.Space.Host:
            hint = "leave it out: a value on the host costs no device memory until the backward pass"
            raise PlacementError(f"offload: {name!r} in {fn_name} is already on the host", hint=hint)
    save = visible.difference(claimed["recompute"]) if is_exclusion else claimed["save"]
    return frozenset(save), frozenset(claimed["offload"])


def _match_names(claim: _Claim, pattern: str, visible: list[str], reasons: dict[str, str], fn_name: str) -> list[str]:
    """Return the visible names that a pattern of a claim matches; raise or warn if JAX would ignore the pattern."""
    visible_matches, hidden_matches = claim.matches(pattern, visible), claim.matches(pattern, list(reasons))
    if not visible_matches and not hidden_matches:
        names = sorted({*visible, *reasons})
        problem = f"{claim.argument}: {pattern!r} matches no named value of {fn_name}"
        got = f"{len(names)} names: {', '.join(names[:8])}{', …' if len(names) > 8 else ''}" if names else "no name"
        raise SelectionError(problem, got=got, hint=_near_misses(pattern, names))
    if hidden_matches and claim.argument != "recompute":
        name, reason = hidden_matches[0], reasons[hidden_matches[0]]
        message = f"{claim.argument}: {name!r} in {fn_name} is {reason}; checkpoint policies do not see it"
        hint = (
            "use the value that checkpoint_name returned"
            if reason.startswith("dead")
            else "name a residual in the rule's forward function, or name the function's result (lowtide.offload.tag)"
        )
        if not visible_matches:
            raise PlacementError(message, hint=hint)
        warnings.warn(f"{message}\nhint: {hint}", PlacementWarning, stacklevel=4)
    return visible_matches


def _near_misses(pattern: str, names: Sequence[str]) -> str:
    if not names:
        return "name values with jax.ad_checkpoint.checkpoint_name, or all matrix products with lowtide.offload.tag(fn)"
    if any(re.escape(name) != name and name == pattern for name in names):
        return f"for exact names pass a list: [{pattern!r}]"
    close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
    close += [name for name in names if pattern in name and name not in close]
    if close:
        return f"near misses: {', '.join(close[:5])}"
    return "list the names with lowtide.offload.names(fn, *args), or add names with lowtide.offload.tag(fn)"


@functools.cache
def _policy(save: frozenset[str], offload: frozenset[str]) -> Callable[..., Any]:
    """Return JAX's policy; equal names give the same object, because JAX's caches compare policies by identity."""
    name_policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=sorted({*save, LAYER_INPUT}),
        names_which_can_be_offloaded=sorted(offload),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive.name in _CUDNN_ATTENTION:
            primitive, params = name_p, {"name": "attn_out"}
        # XLA cannot slice a stack of scalars in a TPU's host memory, so scalars stay on the device.
        if params.get("name") in offload and not avals[0].ndim:
            return jax.checkpoint_policies.everything_saveable(primitive, *avals, **params)
        return name_policy(primitive, *avals, **params)

    return policy


# --- names in a traced function ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A traced function of its array arguments; all other arguments are constants."""

    closed: Any
    arrays: tuple[Any, ...]
    """The traced leaves, which are the arguments of the jaxpr."""
    paths: tuple[str, ...]
    """Path of each leaf within its argument; empty for an argument that is an array itself."""
    out_tree: Any


def _trace(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Traced:
    """Trace a function of its array arguments; Python numbers, text and functions are passed to it unchanged."""
    named_leaves = leaves_with_paths((args, dict(kwargs)))
    leaves, treedef = jax.tree.flatten((args, dict(kwargs)))
    array_indices = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
    ]

    def call_with_arrays(*arrays: Any) -> Tree:
        new_leaves = dict(enumerate(leaves)) | dict(zip(array_indices, arrays, strict=True))
        positional, keywords = treedef.unflatten(new_leaves.values())
        return fn(*positional, **keywords)

    arrays = tuple(leaves[i] for i in array_indices)
    closed, shape = make_jaxpr(call_with_arrays)(*arrays)
    # A path starts with 0 or 1 (positional or keyword), then the position or name of the argument.
    paths = tuple("/".join(named_leaves[i][0].split("/")[2:]) for i in array_indices)
    return _Traced(closed, arrays, paths, jax.tree.structure(shape))


def _is_name(eqn: Any) -> bool:
    """Return whether an operation is a `checkpoint_name` with a name that is not internal to Lowtide."""
    return eqn.primitive is name_p and not is_own_name(eqn.params["name"])


def _named_values(jaxpr: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield the name and aval of each named value, and why policies do not see the name (empty if they do)."""
    read = variables_read(jaxpr)
    for eqn, hidden in walk(jaxpr, "", lambda eqn, _, hidden: hidden or _HIDING.get(kind_of(eqn), "")):
        if _is_name(eqn):
            unread = "" if eqn.outvars[0] in read else "dead code: the result of checkpoint_name is not used"
            yield eqn.params["name"], eqn.outvars[0].aval, hidden or unread


def named_residuals(fn: Callable[..., Any], *args: Any) -> dict[str, int]:
    """Return the bytes of each name that the policy of a `jax.checkpoint` around `fn` sees, also in tiles and rules.

    `args` are arrays or their shapes. Values with the same name are added up.
    """
    traced = _trace(recomputed(fn, None), args, {})
    return _names_under_differentiation(jex.jaxpr_as_fun(traced.closed), traced)


def _names_under_differentiation(fn: Callable[..., Any], traced: _Traced) -> dict[str, int]:
    """Return the names that a checkpoint policy sees when `fn` is linearised, with their bytes.

    Names inside custom derivative rules appear only under differentiation.
    """
    names = dict[str, int]()

    def record(primitive: Any, *avals: Any, **params: Any) -> bool:
        if primitive.name in _CUDNN_ATTENTION:  # its first result has the shape of the queries
            names["attn_out"] = names.get("attn_out", 0) + leaf_bytes(avals[0])
        if primitive is name_p and not is_own_name(params["name"]):
            names[params["name"]] = names.get(params["name"], 0) + leaf_bytes(avals[0])
        return False

    is_floating = [jax.numpy.issubdtype(array.dtype, jax.numpy.inexact) for array in traced.arrays]

    def linearise(*arrays: Any) -> Any:
        def call_with_floats(*floats: Any) -> Any:
            return fn(*(array if value is None else value for value, array in zip(floats, arrays, strict=True)))

        floats = [array if is_float else None for is_float, array in zip(is_floating, arrays, strict=True)]
        return jax.linearize(jax.checkpoint(call_with_floats, policy=record), *floats)[0]

    if any(is_floating):
        make_jaxpr(linearise)(*traced.arrays)
    return names
