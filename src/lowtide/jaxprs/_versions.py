"""Jaxprs as `jax.extend.core` shows them, where versions of JAX say the same thing otherwise.

| what | 0.10.2 | 0.11.2 | 0.12.0.1 |
|---|---|---|---|
| a closed jaxpr | another class than an open one | the same class | the same class |
| a call of a traced function | dissolved | `eval_jaxpr` | `eval_jaxpr` |
| parameters of a `scan` | `num_consts`, `num_carry` | `ft_in` | `ft_in` |
| names in a checkpoint policy | attributes, closures | attributes | closures |
| checkpoint, name with `jax_remat3` | `call_hi_primitive`, not in gradients | `call_hi_primitive` | the same |
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
    """Whether a value is a jaxpr that may hold constants, in `consts`."""
    return isinstance(value, jex.ClosedJaxpr)  # pyright: ignore[reportPrivateImportUsage]


def close(jaxpr: Any) -> Any:
    """Close an open jaxpr without constants."""
    return jex.ClosedJaxpr(jaxpr, [])  # pyright: ignore[reportPrivateImportUsage]


def is_jaxpr(value: Any) -> bool:
    """Whether a value is a jaxpr, open or closed."""
    return is_closed(value) or isinstance(value, jex.Jaxpr)


def opened(jaxpr: Any) -> Any:
    """Return a jaxpr, open or closed, without its constants."""
    return jaxpr.jaxpr if is_closed(jaxpr) else jaxpr


def consts_of(jaxpr: Any) -> Sequence[Any]:
    """Return the constants that a jaxpr holds; none of an open one."""
    return jaxpr.consts if is_closed(jaxpr) else ()


def with_jaxprs(eqn: Any, change: Callable[[Any], Any]) -> Any:
    """Put other jaxprs into an operation's parameters, and tuples there; the operation itself when nothing changed.

    Args:
        eqn: the operation.
        change: of a jaxpr another one, or the same.
    """

    def changed(value: Any) -> Any:
        if is_jaxpr(value):
            return change(value)
        if not isinstance(value, tuple):
            return value
        new = tuple(map(changed, value))
        if all(a is b for a, b in zip(new, value, strict=True)):
            return value
        return type(value)(*new) if hasattr(value, "_fields") else new

    params = {key: changed(value) for key, value in eqn.params.items()}
    return eqn.replace(params=params) if any(params[key] is not eqn.params[key] for key in params) else eqn


def make_jaxpr(fn: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """`jax.make_jaxpr` with shapes, with recomputation and names as operations that can be read.

    Args:
        fn: what `jax.make_jaxpr` takes.

    Returns:
        A function of its arguments, which gives the `ClosedJaxpr` and the shapes of the result.
    """

    def make(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        with classic_remat():
            closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args, **kwargs)
        return plain(closed), shapes  # what was given to jax.checkpoint before is still of the other kind

    return make


def plain(jaxpr: Any) -> Any:
    """Rewrite a jaxpr so that `jax.checkpoint` and `checkpoint_name` have the parameters that they always had.

    With ``jax_remat3`` they are objects inside of a ``call_hi_primitive``, whose jaxpr, policy and name nobody sees.

    Args:
        jaxpr: a `Jaxpr` or `ClosedJaxpr`.

    Returns:
        One that computes the same; the same object when there is nothing to replace.
    """
    if not isinstance(jaxpr, jex.Jaxpr):  # closed, where that is another class
        inner = plain(jaxpr.jaxpr)
        return jaxpr if inner is jaxpr.jaxpr else jaxpr.replace(jaxpr=inner)
    eqns = [_plain_equation(eqn) for eqn in jaxpr.eqns]
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    is_high = any(eqn.primitive.name == "call_hi_primitive" for eqn in eqns)
    return jaxpr.replace(eqns=eqns, is_high=is_high)


def _plain_equation(eqn: Any) -> Any:
    if eqn.primitive.name == "call_hi_primitive":
        held = eqn.params["_prim"]
        if type(held).__name__ == "RematTraced":
            inner = plain(held.jaxpr)
            params = {"jaxpr": getattr(inner, "jaxpr", inner), "policy": held.policy, "differentiated": False}
            prevent_cse = getattr(held, "prevent_cse", True)  # 0.10 always does
            return eqn.replace(primitive=remat_p, params={**params, "prevent_cse": prevent_cse})
        if type(held).__name__ in ("CheckpointName", "CheckpointNameFwd"):
            return eqn.replace(primitive=name_p, params={"name": held.name})
        return eqn
    return with_jaxprs(eqn, plain)


def source_line(eqn: Any, *, own: bool = False) -> str:
    """Return the innermost line of the source, JAX's own apart, that an operation comes from.

    Args:
        eqn: of a jaxpr; of a backward pass, the line is that of the forward pass.
        own: whether lines of Lowtide are left out, too, which traced a function of somebody's.

    Returns:
        The file, from the working directory where it is in it, with the number of the line; empty if nobody knows.
    """
    frames = getattr(eqn.source_info.traceback, "frames", None) or ()
    folders = [os.path.dirname(jax.__file__), os.path.dirname(os.path.dirname(__file__))][: 1 + own]
    for frame in frames:
        if not frame.file_name.startswith(("<", *(f"{folder}{os.sep}" for folder in folders))):
            path = os.path.relpath(frame.file_name)
            return f"{frame.file_name if path.startswith(os.pardir) else path}:{frame.line_num}"
    return ""


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many inputs of a `scan` are the same in every iteration, and how many are its carry.

    Args:
        params: of the equation.

    Returns:
        The two numbers; the inputs that are left are sliced along their first axis.
    """
    if "ft_in" in params:
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def policy_names(policy: Any) -> dict[str, bool]:
    """Return the checkpoint names of which a policy of `jax.checkpoint` knows, and whether it saves them.

    A policy is an opaque function, so what it holds is read (attributes, closure, defaults, constants), and then it is
    asked: a text is a name where the answer is another one than for a name that nobody gives. Other texts, such as the
    memory kinds of an offload, are none.

    Args:
        policy: the policy of a `jax.checkpoint`.

    Returns:
        True for each name to save or to offload, False for those that a policy which saves all others leaves out; empty
        for a policy without names.
    """
    others = saves_name(policy, _NOBODYS_NAME)
    return {text: not others for text in _texts(policy) if saves_name(policy, text) != others}


def saves_name(policy: Any, name: str) -> bool:
    """Whether a policy keeps or offloads a value of this name; not where it answers with an error.

    Args:
        policy: the policy of a `jax.checkpoint`.
        name: as in `jax.ad_checkpoint.checkpoint_name`.

    Returns:
        Its answer for a matrix of 4 GiB, since a policy may leave small values alone, or for a scalar.
    """
    for shape in ((2**15, 2**15), ()):
        try:
            case = policy(name_p, jax.core.ShapedArray(shape, jnp.float32), name=name)
        except Exception:  # of somebody else's code, which takes other arguments
            continue
        if case and type(case).__name__ != "RecomputeType":
            return True
    return False


_NOBODYS_NAME = "lowtide: a name that nobody gives"
_MANY = 1000
"""A container of more texts than this is no list of names."""


def _texts(policy: Any) -> set[str]:
    """Return the texts that a policy holds, and that functions and policies in it hold."""
    texts, seen, border = set[str](), dict[int, Any](), [policy]
    while border:
        value = border.pop()
        if id(value) in seen or isinstance(value, (type, types.ModuleType)):
            continue
        seen[id(value)] = value  # alive, so that no other gets its number
        if isinstance(value, str):
            texts.add(value)
        elif isinstance(value, (set, frozenset, list, tuple, Mapping)):
            border += value if len(value) <= _MANY else ()
        elif callable(value):
            border += _held(value)
    return texts


def _held(value: Any) -> Iterator[Any]:
    """Return what a function, a method, a partial function or an object that can be called holds."""
    yield from vars(value).values() if hasattr(value, "__dict__") else ()
    yield from (getattr(value, name, None) for name in getattr(type(value), "__slots__", ()))
    if isinstance(value, functools.partial):
        yield from (value.func, value.args, *value.keywords.values())
    if isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    if isinstance(value, types.FunctionType):
        yield from (value.__defaults__, *(value.__kwdefaults__ or {}).values(), value.__code__.co_consts)
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # not filled yet
                yield cell.cell_contents
