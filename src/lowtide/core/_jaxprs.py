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

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend import core as jex
from jax.extend.core.primitives import name_p, remat_p

from ._compat import classic_remat

CALLS: Mapping[str, str] = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
"""Operations that only group others, by the names of all versions, and which parameter holds their jaxpr."""


def is_closed(value: Any) -> bool:
    """Whether a value is a jaxpr that may hold constants, in `consts`."""
    return isinstance(value, jex.ClosedJaxpr)  # pyright: ignore[reportPrivateImportUsage]


def close(jaxpr: Any) -> Any:
    """An open jaxpr without constants as a closed one."""
    return jex.ClosedJaxpr(jaxpr, [])  # pyright: ignore[reportPrivateImportUsage]


def is_jaxpr(value: Any) -> bool:
    """Whether a value is a jaxpr, open or closed."""
    return is_closed(value) or isinstance(value, jex.Jaxpr)


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
    """A jaxpr in which `jax.checkpoint` and `checkpoint_name` are operations with the parameters that they always had.

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

    def replaced(value: Any) -> Any:
        if is_jaxpr(value):
            return plain(value)
        if isinstance(value, tuple):
            new = tuple(map(replaced, value))
            return new if any(a is not b for a, b in zip(new, value, strict=True)) else value
        return value

    params = {key: replaced(value) for key, value in eqn.params.items()}
    return eqn.replace(params=params) if any(params[key] is not eqn.params[key] for key in params) else eqn


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


def policy_names(policy: Any) -> set[str]:
    """The checkpoint names that a policy of `jax.checkpoint_policies` asks for.

    Policies are opaque functions; JAX keeps their names in attributes or in the closure, which is read here.

    Args:
        policy: the policy of a `jax.checkpoint`.

    Returns:
        The names to save or to offload; empty for a policy without names.
    """
    held = [*vars(policy).values()] if hasattr(policy, "__dict__") else []
    held += [cell.cell_contents for cell in getattr(policy, "__closure__", None) or ()]
    # save_and_offload_only_these_names also closes over the two memory kinds: text, not sets of it.
    names = {name for value in held if isinstance(value, (set, frozenset, list, tuple)) for name in value}
    inner = [policy_names(value) for value in held if callable(value)]
    return {name for name in names if isinstance(name, str)}.union(*inner)
