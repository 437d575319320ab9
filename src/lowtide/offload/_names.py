"""Names of activations: give them to a function (`tag`), list them (`names`), and trace them for `checkpoint`.

The choice between saving, offloading and recomputing an activation is made by its name (`jax.ad_checkpoint`'s
`checkpoint_name`). The functions here read and rewrite jaxprs through `jax.extend.core`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex
from jax.extend.core.primitives import name_p

from ..core import SelectionError, Tree, format_bytes, is_own_name, leaf_bytes, leaves_with_paths
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
"""Operations into which the policy of a `jax.checkpoint` cannot see."""


# `tag` traces the function, and its jaxpr gets a `checkpoint_name` after every matrix product, convolution and
# attention. Everything else in it (loops, branches, inner `jit`s and checkpoints, effects, custom derivative rules)
# stays the same. Names are meant to be written by hand:
#
# | value | name | example |
# |---|---|---|
# | a product with a parameter | the parameter's path, without a final `weight` or `kernel` | `attn/q_proj` |
# | the result of `jax.nn.dot_product_attention`, and its scores where they exist | | `dot_product_attention` |
# | a result of a custom-derivative function that contains a product or kernel | its name | `flash_attention` |
# | any other product | `dot_0`, `dot_1`, … after named scopes and names of inner `jit`s | `mlp/dot_0` |
#
# A repeated name gets a number: `attn/q_proj_1`. Several results of one call get the suffixes `/0`, `/1`.
#
# Limits: a product inside a `while` loop or a custom derivative rule gets no name, because checkpoint policies do not
# see it there. JAX's attention is recognised by the traceback that JAX stores with an operation. Outside `jax.jit`, the
# function is traced at every call, which costs time, and inner `jit`s compile again.

_Origin = tuple[str, ...] | None
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
            if _should_name(eqn):
                self.has_names = True
                values = [_narrowing_cast(var, consumers, jaxpr.outvars) for var in eqn.outvars]
                if not any(_is_name(use) for v in (*eqn.outvars, *values) for use in consumers.get(v, [])):
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


def _origin(eqn: Any, operand_origins: list[_Origin]) -> _Origin:
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


# `names` lists bytes, and the FLOPs to compute values again. Both matter for the choice between saving, offloading and
# recomputing. FLOPs count the operations between a value and the values that exist anyway: the function's arguments and
# the other named values. Inside a loop, the FLOPs of a value are counted from the start of the iteration. A loop on the
# way to a value counts whole, with or without named values inside.
#
# Limit: names in the forward function of a `custom_vjp` exist only under differentiation, and are not listed.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Name:
    """One name, and all values of one shape that have it."""

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
    """FLOPs to compute all of them again from the arguments and the other named values."""
    hidden: str = ""
    """Why `lowtide.offload.checkpoint` cannot act on it; empty if it can."""


@dataclasses.dataclass(frozen=True)
class Names:
    """The named values of a function, in program order; iterates over its rows."""

    rows: tuple[Name, ...]
    """One row for each name and shape."""

    def __iter__(self) -> Iterator[Name]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> Name:
        """Return the first row of a name."""
        return next(row for row in self.rows if row.name == name)

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
    computes or reduces, none for moving data. XLA's fusion may remove some of them, and XLA may add others.

    Args:
        fn: a function with values named by `jax.ad_checkpoint.checkpoint_name` or `lowtide.offload.tag`.
        *args: its arguments: arrays or `jax.ShapeDtypeStruct`s. Nothing is computed.
        **kwargs: its keyword arguments.

    Returns:
        One row for each name and shape; `str` formats them as a table.

    Memory:
        None. `bytes` of a row is the cost of saving it on the device or offloading it to the host. Inside a
        `jax.shard_map` it counts one device.

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
    closed = trace(fn, args, kwargs).closed
    graph = _Graph(1, "")
    graph.add(closed, [graph.new_value() for _ in closed.in_avals])
    merged: dict[tuple[Any, ...], Name] = {}
    for row in graph.rows():
        key = (row.name, row.shape, row.dtype, row.hidden)
        previous = merged.get(key)
        merged[key] = (
            row
            if previous is None
            else dataclasses.replace(
                previous,
                count=previous.count + row.count,
                bytes=previous.bytes + row.bytes,
                flops=previous.flops + row.flops,
            )
        )
    return Names(tuple(merged.values()))


class _Graph:
    """Operations of one iteration, with calls inlined. A value is a number, computed by one operation or given."""

    def __init__(self, count: int, hidden: str) -> None:
        self._count, self._hidden = count, hidden
        self._num_values = 0
        self._producers: dict[int, tuple[list[int], int, bool]] = {}
        self._order: list[Any] = []  # (operation, value, hidden) for a name, a graph for a body

    def new_value(self) -> int:
        """Return the number of a new given value."""
        self._num_values += 1
        return self._num_values

    def add(self, jaxpr: Any, arguments: list[int], hidden: str = "") -> list[int]:
        """Add the operations of a jaxpr; return the values of its results."""
        hidden = hidden or self._hidden

        def apply(eqn: Any, operands: list[int]) -> list[int]:
            inner_hidden = hidden or _HIDING.get(kind_of(eqn), "")
            if (inner := called(eqn)) is not None:
                return self.add(inner, operands, inner_hidden)
            for body in bodies(eqn):  # loops and branches have separate graphs with given arguments
                graph = _Graph(self._count * body.times, inner_hidden)
                graph.add(body.jaxpr, [graph.new_value() for _ in body.jaxpr.in_avals])
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


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function of its array arguments; all other arguments are constants."""

    closed: Any
    """The `ClosedJaxpr`."""
    arrays: tuple[Any, ...]
    """The traced leaves, which are the arguments of the jaxpr."""
    paths: tuple[str, ...]
    """Path of each leaf within its argument; empty for an argument that is an array itself."""
    out_tree: Any
    """The structure of the result."""


def trace(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Traced:
    """Trace a function of its arrays; Python numbers, text and functions among its arguments stay unchanged."""
    named_leaves = leaves_with_paths((args, dict(kwargs)))
    leaves, treedef = jax.tree.flatten((args, dict(kwargs)))
    array_indices = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
    ]

    def call_with_arrays(*arrays: Any) -> Tree:
        new_leaves = list(leaves)
        for i, array in zip(array_indices, arrays, strict=True):
            new_leaves[i] = array
        positional, keywords = treedef.unflatten(new_leaves)
        return fn(*positional, **keywords)

    arrays = tuple(leaves[i] for i in array_indices)
    closed, shape = make_jaxpr(call_with_arrays)(*arrays)
    # A path starts with 0 or 1 (positional or keyword), then the position or name of the argument.
    paths = tuple("/".join(named_leaves[i][0].split("/")[2:]) for i in array_indices)
    return Traced(closed, arrays, paths, jax.tree.structure(shape))


@dataclasses.dataclass(frozen=True)
class NamedValue:
    """One `checkpoint_name` in a traced function."""

    name: str
    aval: Any
    hidden: str
    """Why a checkpoint policy cannot see the value; empty if it can."""


def _is_name(eqn: Any) -> bool:
    """Return whether an operation gives a name that is not one of the library's own."""
    return eqn.primitive is name_p and not is_own_name(eqn.params["name"])


def named_values(jaxpr: Any) -> Iterator[NamedValue]:
    """Yield all named values of a jaxpr and the jaxprs inside it, in program order."""
    read = variables_read(jaxpr)
    for eqn, hidden in walk(jaxpr, "", lambda eqn, _, hidden: hidden or _HIDING.get(kind_of(eqn), "")):
        if _is_name(eqn):
            unread = "" if eqn.outvars[0] in read else "dead code: the result of checkpoint_name is not used"
            yield NamedValue(eqn.params["name"], eqn.outvars[0].aval, hidden or unread)


def has_custom_rule(jaxpr: Any) -> bool:
    """Return whether differentiation replaces a part of the jaxpr by code that the jaxpr does not contain."""
    kinds = map(kind_of, equations(jaxpr))
    return any(kind is not None and kind.is_custom for kind in kinds)


def names_under_differentiation(fn: Callable[..., Any], traced: Traced) -> set[str]:
    """Return the names that reach a checkpoint policy when `fn`, traced before, is linearised.

    Custom derivative rules add names that only differentiation shows. Empty if the function cannot be linearised, or
    has no argument to differentiate.
    """
    names = set[str]()

    def record(primitive: Any, *_: Any, **params: Any) -> bool:
        if primitive is name_p and not is_own_name(params["name"]):
            names.add(params["name"])
        return False

    is_floating = [jax.numpy.issubdtype(array.dtype, jax.numpy.inexact) for array in traced.arrays]

    def linearise(*arrays: Any) -> Any:
        def call_with_floats(*floats: Any) -> Any:
            return fn(*(array if value is None else value for value, array in zip(floats, arrays, strict=True)))

        floats = [array if is_float else None for is_float, array in zip(is_floating, arrays, strict=True)]
        return jax.linearize(jax.checkpoint(call_with_floats, policy=record), *floats)[0]

    if any(is_floating):
        try:
            make_jaxpr(linearise)(*traced.arrays)
        except Exception:  # the user's own differentiation raises the same error
            return set()
    return names
