"""What the backward pass keeps, moves to the host or computes again, said by name.

`jax.checkpoint` takes a policy; its policies by name take lists, and a name that is nowhere in the function changes
nothing, silently. Here every name has to be in the function when it is traced, and where JAX's policies cannot see it.

Policies see names inside `jit`, `scan`, `cond`, `vmap` and other checkpoints. They do not see those inside the primal
function of a `custom_vjp` or `custom_jvp`: differentiation replaces it by the rule, whose own names they do see.

Limits: a function is traced once more than by `jax.checkpoint` when a claim is a pattern, or not found at first sight,
and the function has a custom derivative rule. Also with ``jax_remat3`` the implementation is the one without it: XLA
does not compile what the new one offloads (JAX 0.11.2).

Source: `jax.checkpoint_policies.save_and_offload_only_these_names`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from ..core import ConfigError, PlacementError, PlacementWarning, SelectionError, check_host_slices
from ..core._compat import classic_remat
from ._trace import NamedValue, Traced, has_custom_rule, named_values, names_under_differentiation, trace

Which = str | Sequence[str]
"""Exact names, or one regular expression that has to match whole names."""


def checkpoint(
    fn: Callable[..., Any],
    *,
    save: Which | None = None,
    offload: Which | None = None,
    recompute: Which | None = None,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
) -> Callable[..., Any]:
    """`jax.checkpoint`, with what happens to each named value said by name.

    A value has a name from `jax.ad_checkpoint.checkpoint_name`, or from `lowtide.offload.tag`. Values that no argument
    mentions, and those without a name, are computed again in the backward pass. When `recompute` alone is given, all
    other named values are saved.

    Args:
        fn: the function; of any arguments that `jax.checkpoint` takes.
        save: names of values that stay on the device until the backward pass. A sequence holds exact names; a single
            text is a regular expression that has to match a whole name (`re.fullmatch`).
        offload: names of values that go to pinned host memory in the forward pass and come back in the backward pass.
        recompute: names of values that are computed again.
        prevent_cse: as in `jax.checkpoint`, which advises False when `fn` is the body of a `jax.lax.scan`.
        static_argnums: as in `jax.checkpoint`.

    Returns:
        A function with the values and gradients of `fn`.

    Raises:
        ConfigError: when nothing is said, a regular expression is none, or two arguments claim one name.
        SelectionError: when the function is traced: a name or pattern that no value has.
        PlacementError: when the function is traced: a value that is to be kept where JAX cannot keep it (inside a
            `custom_vjp`, whose own rule decides), or is on the host already; on a GPU, if XLA reads offloaded values
            of a scan in the wrong order.

    Memory:
        Between forward and backward pass: the arguments of `fn`, the saved values, and on the host the offloaded ones
        (`lowtide.offload.names` lists bytes). Inside a scan, each once per iteration. What the backward pass does not
        read (a product that is only added to something) is neither kept nor moved. Around a function that itself
        scans over layers, the backward pass still holds all layers' residuals: put it on the block instead.

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
    make = functools.partial(jax.checkpoint, fn, prevent_cse=prevent_cse, static_argnums=static_argnums)

    @functools.wraps(fn)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        # JAX remembers how a checkpointed function traced: doing so here costs no second trace of `fn`.
        with classic_remat():
            traced = trace(make(), args, kwargs)
            where = getattr(fn, "__qualname__", type(fn).__name__)
            save, offload = _decide(claims, traced, where)
            if offload:
                check_host_slices()
            return make(policy=_policy(save, offload))(*args, **kwargs)

    return checkpointed


@dataclasses.dataclass(frozen=True)
class _Claim:
    """One argument of `checkpoint`."""

    argument: str
    patterns: tuple[str, ...]
    is_regex: bool

    def matches(self, pattern: str, names: Sequence[str]) -> list[str]:
        return [name for name in names if (re.fullmatch(pattern, name) if self.is_regex else pattern == name)]


def _claims(**given: Any) -> tuple[_Claim, ...]:
    claims: list[_Claim] = []
    for argument, which in given.items():
        if which is None:
            continue
        patterns: tuple[Any, ...] = (which,) if isinstance(which, str) else tuple(which)
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise ConfigError(
                f"{argument}: a value is chosen by its name",
                expected="a list of names, or one regular expression",
                got=repr(which),
                hint=f'for instance {argument}=["attn_out"]',
            )
        if isinstance(which, str):
            try:
                re.compile(which)
            except re.error as error:
                raise ConfigError(
                    f"{argument}: not a regular expression",
                    got=f"{which!r}: {error}",
                    hint=f"for exact names pass a list: {argument}=[{which!r}]",
                ) from error
        claims.append(_Claim(argument, patterns, isinstance(which, str)))
    if not claims:
        raise ConfigError(
            "nothing says what to keep",
            expected="save=, offload= or recompute=",
            got="none of them",
            hint="to compute everything again, use jax.checkpoint(fn)",
        )
    _refuse_two_claims([(claim.argument, name) for claim in claims if not claim.is_regex for name in claim.patterns])
    return tuple(claims)


def _refuse_two_claims(claimed: Sequence[tuple[str, str]]) -> None:
    first: dict[str, str] = {}
    for argument, name in claimed:
        if first.setdefault(name, argument) != argument:
            raise ConfigError(
                f"two arguments claim the value {name!r}",
                expected="each name in one of save, offload, recompute",
                got=f"{first[name]} and {argument}",
                hint="a value that no argument mentions is recomputed",
            )


def _decide(claims: tuple[_Claim, ...], traced: Traced, where: str) -> tuple[frozenset[str], frozenset[str]]:
    """Decide the names to save and those to offload, of a function as it was traced."""
    values = list(named_values(traced.closed.jaxpr))
    visible = {value.name for value in values if not value.hidden}
    asked = {pattern for claim in claims for pattern in claim.patterns if not claim.is_regex}
    by_exclusion = {claim.argument for claim in claims} == {"recompute"}
    sure = asked <= visible and not by_exclusion and not any(claim.is_regex for claim in claims)
    if not sure and has_custom_rule(traced.closed.jaxpr):
        visible |= names_under_differentiation(jaxpr_as_fun(traced.closed), traced)
    hidden = {value.name: value for value in values if value.name not in visible}
    claimed: dict[str, list[str]] = {"save": [], "offload": [], "recompute": []}
    for claim in claims:
        for pattern in claim.patterns:
            claimed[claim.argument] += _find(claim, pattern, sorted(visible), hidden, where)
    _refuse_two_claims([(argument, name) for argument, names in claimed.items() for name in names])
    _refuse_host_values([value for value in values if value.name in claimed["offload"]], where)
    save = visible.difference(claimed["recompute"]) if by_exclusion else claimed["save"]
    return frozenset(save), frozenset(claimed["offload"])


def _find(claim: _Claim, pattern: str, visible: list[str], hidden: dict[str, NamedValue], where: str) -> list[str]:
    """Find the names that one pattern of a claim means; nothing silent when JAX would do nothing about them."""
    found, lost = claim.matches(pattern, visible), claim.matches(pattern, list(hidden))
    if not found and not lost:
        known = sorted({*visible, *hidden})
        raise SelectionError(
            f"{claim.argument}: {pattern!r} matches no named value of {where}",
            expected="names as checkpoint_name gave them",
            got=f"{len(known)} names: {', '.join(known[:8])}{', …' if len(known) > 8 else ''}" if known else "no name",
            hint=_near_misses(pattern, known),
        )
    if lost and claim.argument != "recompute":
        value = hidden[lost[0]]
        message = f"{claim.argument}: {value.name!r} in {where} is {value.hidden}; JAX asks no policy about it"
        hint = (
            "use the value that checkpoint_name returned"
            if value.hidden.startswith("dead")
            else "name a residual in the rule's forward function, or name the function's result (lowtide.offload.tag)"
        )
        if not found:
            raise PlacementError(message, expected="a value that JAX's checkpointing sees", got=pattern, hint=hint)
        warnings.warn(f"{message}\nhint: {hint}", PlacementWarning, stacklevel=4)
    return found


def _near_misses(pattern: str, known: Sequence[str]) -> str:
    if not known:
        return "name values with jax.ad_checkpoint.checkpoint_name, or all matrix products with lowtide.offload.tag(fn)"
    if any(re.escape(name) != name and name == pattern for name in known):
        return f"for exact names pass a list: [{pattern!r}]"
    close = difflib.get_close_matches(pattern, known, n=3, cutoff=0.5)
    close += [name for name in known if pattern in name and name not in close]
    if close:
        return f"near misses: {', '.join(close[:5])}"
    return "lowtide.offload.names(fn, *args) lists the names; lowtide.offload.tag(fn) gives more"


def _refuse_host_values(values: Sequence[NamedValue], where: str) -> None:
    for value in values:
        if value.aval.memory_space == jax.memory.Space.Host:
            raise PlacementError(
                f"offload: {value.name!r} in {where} is on the host already",
                expected="a value in device memory",
                got=value.aval.str_short(),
                hint="leave it out: a value on the host costs no device memory until the backward pass",
            )


@functools.cache
def _policy(save: frozenset[str], offload: frozenset[str]) -> Callable[..., Any]:
    """JAX's policy; the same object for the same names, because JAX compares policies by identity when it caches."""
    by_name = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=sorted(save),
        names_which_can_be_offloaded=sorted(offload),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        # XLA slices no stack of single numbers in a TPU's host memory: they stay on the device.
        if params.get("name") in offload and not avals[0].ndim:
            return jax.checkpoint_policies.everything_saveable(primitive, *avals, **params)
        return by_name(primitive, *avals, **params)

    return policy
