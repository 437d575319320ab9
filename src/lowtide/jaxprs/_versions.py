"""Access to jaxprs through `jax.extend.core` that hides the differences between JAX versions.

| what | 0.10.2 | 0.11.2 | 0.12.0.1 |
|---|---|---|---|
| classes of open and closed jaxprs | two | one | one |
| a call of a traced function | inlined | `eval_jaxpr` | `eval_jaxpr` |
| parameters of a `scan` | `num_consts`, `num_carry` | `ft_in` | `ft_in` |
| names in a checkpoint policy | attributes, closures | attributes | closures |
| checkpoints, names with `jax_remat3` | `call_hi_primitive`, except in gradients | `call_hi_primitive` | as in 0.11.2 |
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend import core as jex
from jax.extend.core.primitives import name_p, remat_p

from ..core._compat import classic_remat


def is_closed(value: Any) -> bool:
    """Return whether a value is a closed jaxpr, which may hold constants in `consts`."""
    return isinstance(value, jex.ClosedJaxpr)  # pyright: ignore[reportPrivateImportUsage]


def close(jaxpr: Any) -> Any:
    """Close an open jaxpr without constants."""
    return jex.ClosedJaxpr(jaxpr, [])  # pyright: ignore[reportPrivateImportUsage]


def is_jaxpr(value: Any) -> bool:
    """Return whether a value is a jaxpr, open or closed."""
    return is_closed(value) or isinstance(value, jex.Jaxpr)


def opened(jaxpr: Any) -> Any:
    """Return the open jaxpr inside a closed jaxpr, without constants; return an open jaxpr unchanged."""
    return jaxpr.jaxpr if is_closed(jaxpr) else jaxpr


def consts_of(jaxpr: Any) -> Sequence[Any]:
    """Return the constants that a closed jaxpr holds; empty for an open jaxpr."""
    return jaxpr.consts if is_closed(jaxpr) else ()


def with_jaxprs(eqn: Any, change: Callable[[Any], Any]) -> Any:
    """Replace every jaxpr in an operation's parameters, also in tuples; return `eqn` itself if none changes."""

    def replace(value: Any) -> Any:
        if is_jaxpr(value):
            return change(value)
        if not isinstance(value, tuple):
            return value
        new = tuple(map(replace, value))
        if all(a is b for a, b in zip(new, value, strict=True)):
            return value
        # A named tuple's constructor takes separate fields.
        return type(value)(*new) if hasattr(value, "_fields") else new

    params = {key: replace(value) for key, value in eqn.params.items()}
    return eqn.replace(params=params) if any(params[key] is not eqn.params[key] for key in params) else eqn


def make_jaxpr(fn: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """Wrap `jax.make_jaxpr`; the new function returns a closed jaxpr, rewritten by `plain`, and the result's shapes."""

    def make(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        with classic_remat():
            closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args, **kwargs)
        return plain(closed), shapes  # functions that were wrapped in `jax.checkpoint` earlier need `plain`

    return make


def plain(jaxpr: Any) -> Any:
    """Rewrite a jaxpr so that `jax.checkpoint` and `checkpoint_name` have the parameters of JAX 0.10.

    JAX's option ``jax_remat3`` puts both into a ``call_hi_primitive``, which hides their jaxpr, policy and name. If
    there is nothing to replace, the result is `jaxpr` itself.
    """
    if not isinstance(jaxpr, jex.Jaxpr):  # closed, in versions where that is another class
        inner = plain(jaxpr.jaxpr)
        return jaxpr if inner is jaxpr.jaxpr else jaxpr.replace(jaxpr=inner)
    eqns = [_plain_equation(eqn) for eqn in jaxpr.eqns]
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    is_high = any(eqn.primitive.name == "call_hi_primitive" for eqn in eqns)
    return jaxpr.replace(eqns=eqns, is_high=is_high)


def _plain_equation(eqn: Any) -> Any:
    if eqn.primitive.name == "call_hi_primitive":
        operation = eqn.params["_prim"]
        if type(operation).__name__ == "RematTraced":
            inner = plain(operation.jaxpr)
            # `remat_p` takes an open jaxpr; where open and closed ones are one class, there is nothing to open.
            params = {"jaxpr": getattr(inner, "jaxpr", inner), "policy": operation.policy, "differentiated": False}
            prevent_cse = getattr(operation, "prevent_cse", True)  # JAX 0.10 always prevents CSE
            return eqn.replace(primitive=remat_p, params={**params, "prevent_cse": prevent_cse})
        if type(operation).__name__ in ("CheckpointName", "CheckpointNameFwd"):
            return eqn.replace(primitive=name_p, params={"name": operation.name})
        return eqn
    return with_jaxprs(eqn, plain)


def source_line(eqn: Any, *, own: bool = False) -> str:
    """Return file and line of the innermost source line outside of JAX that an operation comes from; empty if unknown.

    An operation of a backward pass has the line of its forward operation. `own` also skips lines of Lowtide, for a
    user's function that Lowtide traces. Paths of files below the working directory are relative.
    """
    frames = getattr(eqn.source_info.traceback, "frames", None) or ()
    folders = [os.path.dirname(jax.__file__), os.path.dirname(os.path.dirname(__file__))][: 1 + own]
    for frame in frames:
        if not frame.file_name.startswith(("<", *(f"{folder}{os.sep}" for folder in folders))):
            path = os.path.relpath(frame.file_name)
            return f"{frame.file_name if path.startswith(os.pardir) else path}:{frame.line_num}"
    return ""


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many inputs of a `scan` are the same in every iteration, and how many are its carry.

    The remaining inputs are sliced along their first axis.
    """
    if "ft_in" in params:
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def policy_names(policy: Any) -> dict[str, bool]:
    """Find the checkpoint names in a policy of `jax.checkpoint`; map each name to whether the policy saves it.

    A policy is an opaque function. So its attributes, closure, defaults and constants are searched for strings. The
    policy is then called with each string as a name. A string is a checkpoint name if the answer differs from the
    answer for a name that nobody uses. Other strings, such as the memory kinds of an offload, are not names. The value
    of a name is False if the policy does not save it.
    """
    # The policy's answer for all names that it does not know.
    default = saves_name(policy, _UNUSED_NAME)
    return {text: not default for text in _collect_texts(policy) if saves_name(policy, text) != default}


def saves_name(policy: Any, name: str) -> bool:
    """Return whether a policy of `jax.checkpoint` saves or offloads a value of this name; False if the policy raises.

    The policy is called for a matrix of 4 GiB, because policies may ignore small values, and for a scalar.
    """
    for shape in ((2**15, 2**15), ()):
        try:
            case = policy(name_p, jax.core.ShapedArray(shape, jnp.float32), name=name)
        except Exception:  # a user's policy may take other arguments
            continue
        if case and type(case).__name__ != "RecomputeType":
            return True
    return False


_UNUSED_NAME = "lowtide: a name that nobody gives"
_MAX_NAMES = 1000
"""Most entries of a container that is searched for names; a larger container is skipped."""


def _collect_texts(policy: Any) -> set[str]:
    """Return the strings that a policy holds, also inside of functions and policies that it holds."""
    texts, visited, pending = set[str](), dict[int, Any](), [policy]
    while pending:
        value = pending.pop()
        if id(value) in visited or isinstance(value, (type, types.ModuleType)):
            continue
        visited[id(value)] = value  # kept alive, so that no other object gets its id
        if isinstance(value, str):
            texts.add(value)
        elif isinstance(value, (set, frozenset, list, tuple, Mapping)):
            pending += value if len(value) <= _MAX_NAMES else ()
        elif callable(value):
            pending += _referenced_values(value)
    return texts


def _referenced_values(value: Any) -> Iterator[Any]:
    """Yield the values that a function, method, partial function or callable object holds."""
    yield from vars(value).values() if hasattr(value, "__dict__") else ()
    yield from (getattr(value, name, None) for name in getattr(type(value), "__slots__", ()))
    if isinstance(value, functools.partial):
        yield from (value.func, value.args, *value.keywords.values())
    if isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    if isinstance(value, types.FunctionType):
        yield from (value.__defaults__, *(value.__kwdefaults__ or {}).values(), value.__code__.co_consts)
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                yield cell.cell_contents
