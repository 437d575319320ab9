"""Select by name which values the backward pass keeps, offloads to the host or recomputes.

`jax.checkpoint` takes a policy. Its policies by name take lists, and a name that the function does not contain changes
nothing, without an error. Here every name has to be in the function when it is traced, in a place that JAX's policies
can see.

Policies see names inside `jit`, `scan`, `cond`, `vmap` and other checkpoints. They do not see names inside the primal
function of a `custom_vjp` or `custom_jvp`: differentiation replaces it by its rule, and policies see the names of the
rule.

Limits: a function with a custom derivative rule is traced one more time than by `jax.checkpoint`. This happens if an
argument is a pattern, or one of its names is not found at first. With ``jax_remat3``, too, the earlier implementation
of `jax.checkpoint` is used: XLA does not compile the offloading of the new one (JAX 0.11.2).

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
from ._names import NamedValue, Traced, has_custom_rule, named_values, names_under_differentiation, trace

NameSelection = str | Sequence[str]
"""Exact names, or one regular expression that has to match whole names."""


def checkpoint(
    fn: Callable[..., Any],
    *,
    save: NameSelection | None = None,
    offload: NameSelection | None = None,
    recompute: NameSelection | None = None,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
) -> Callable[..., Any]:
    """Apply `jax.checkpoint` with a decision for each named value.

    A value gets its name from `jax.ad_checkpoint.checkpoint_name` or `lowtide.offload.tag`. Values without a name, and
    names that no argument mentions, are recomputed in the backward pass. If only `recompute` is given, all other named
    values are saved.

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
        ConfigError: when no argument is given, a regular expression is invalid, or two arguments claim one name.
        SelectionError: while tracing: for a name or pattern that no value has.
        PlacementError: while tracing: for a value that JAX cannot keep (inside a `custom_vjp`, whose rule decides), or
            that is already on the host; on a GPU, if XLA reads offloaded values of a scan in the wrong order.

    Memory:
        Between forward and backward pass the device holds the arguments of `fn` and the saved values, and the host
        holds the offloaded values (`lowtide.offload.names` lists bytes). Inside a scan, each counts once per iteration.
        Values that the backward pass does not read (a product that is only added to something) are neither kept nor
        moved. If `fn` itself scans over layers, the backward pass still holds the residuals of all layers; apply
        `checkpoint` to the block instead.

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
    make_checkpoint = functools.partial(jax.checkpoint, fn, prevent_cse=prevent_cse, static_argnums=static_argnums)

    @functools.wraps(fn)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        # JAX caches how a checkpointed function traced, so tracing here costs no second trace of `fn`.
        with classic_remat():
            traced = trace(make_checkpoint(), args, kwargs)
            fn_name = getattr(fn, "__qualname__", type(fn).__name__)
            save, offload = _decide(claims, traced, fn_name)
            if offload:
                check_host_slices()
            return make_checkpoint(policy=_policy(save, offload))(*args, **kwargs)

    return checkpointed


@dataclasses.dataclass(frozen=True)
class _Claim:
    """One argument of `checkpoint`."""

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
            raise ConfigError(
                f"{argument} does not select values by name",
                expected="a list of names, or one regular expression",
                got=repr(selection),
                hint=f'pass for instance {argument}=["attn_out"]',
            )
        if isinstance(selection, str):
            try:
                re.compile(selection)
            except re.error as error:
                raise ConfigError(
                    f"{argument} is not a regular expression",
                    got=f"{selection!r}: {error}",
                    hint=f"for exact names pass a list: {argument}=[{selection!r}]",
                ) from error
        claims.append(_Claim(argument, patterns, isinstance(selection, str)))
    if not claims:
        raise ConfigError(
            "no argument selects values to keep",
            expected="save=, offload= or recompute=",
            got="none of them",
            hint="use jax.checkpoint(fn) to recompute everything",
        )
    _refuse_two_claims([(claim.argument, name) for claim in claims if not claim.is_regex for name in claim.patterns])
    return tuple(claims)


def _refuse_two_claims(claimed: Sequence[tuple[str, str]]) -> None:
    claimants: dict[str, str] = {}
    for argument, name in claimed:
        if claimants.setdefault(name, argument) != argument:
            raise ConfigError(
                f"two arguments select the value {name!r}",
                expected="each name in one of save, offload, recompute",
                got=f"{claimants[name]} and {argument}",
                hint="remove it from one of them; a value that no argument selects is recomputed",
            )


def _decide(claims: tuple[_Claim, ...], traced: Traced, fn_name: str) -> tuple[frozenset[str], frozenset[str]]:
    """Decide which names to save and which to offload, for a traced function."""
    values = list(named_values(traced.closed.jaxpr))
    visible = {value.name for value in values if not value.hidden}
    requested = {pattern for claim in claims for pattern in claim.patterns if not claim.is_regex}
    is_exclusion = {claim.argument for claim in claims} == {"recompute"}
    # If all names are exact and visible, no second trace for custom derivative rules is needed.
    is_resolved = requested <= visible and not is_exclusion and not any(claim.is_regex for claim in claims)
    if not is_resolved and has_custom_rule(traced.closed.jaxpr):
        visible |= names_under_differentiation(jaxpr_as_fun(traced.closed), traced)
    hidden = {value.name: value for value in values if value.name not in visible}
    claimed: dict[str, list[str]] = {"save": [], "offload": [], "recompute": []}
    for claim in claims:
        for pattern in claim.patterns:
            claimed[claim.argument] += _match_names(claim, pattern, sorted(visible), hidden, fn_name)
    _refuse_two_claims([(argument, name) for argument, names in claimed.items() for name in names])
    _refuse_host_values([value for value in values if value.name in claimed["offload"]], fn_name)
    save = visible.difference(claimed["recompute"]) if is_exclusion else claimed["save"]
    return frozenset(save), frozenset(claimed["offload"])


def _match_names(
    claim: _Claim, pattern: str, visible: list[str], hidden: dict[str, NamedValue], fn_name: str
) -> list[str]:
    """Return the names that one pattern of a claim matches; raise or warn where JAX would ignore the pattern."""
    visible_matches, hidden_matches = claim.matches(pattern, visible), claim.matches(pattern, list(hidden))
    if not visible_matches and not hidden_matches:
        names = sorted({*visible, *hidden})
        raise SelectionError(
            f"{claim.argument}: {pattern!r} matches no named value of {fn_name}",
            expected="names that checkpoint_name gave",
            got=f"{len(names)} names: {', '.join(names[:8])}{', …' if len(names) > 8 else ''}" if names else "no name",
            hint=_near_misses(pattern, names),
        )
    if hidden_matches and claim.argument != "recompute":
        value = hidden[hidden_matches[0]]
        message = f"{claim.argument}: {value.name!r} in {fn_name} is {value.hidden}; checkpoint policies do not see it"
        hint = (
            "use the value that checkpoint_name returned"
            if value.hidden.startswith("dead")
            else "name a residual in the rule's forward function, or name the function's result (lowtide.offload.tag)"
        )
        if not visible_matches:
            raise PlacementError(message, expected="a value that checkpoint policies see", got=pattern, hint=hint)
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


def _refuse_host_values(values: Sequence[NamedValue], fn_name: str) -> None:
    for value in values:
        if value.aval.memory_space == jax.memory.Space.Host:
            raise PlacementError(
                f"offload: {value.name!r} in {fn_name} is already on the host",
                expected="a value in device memory",
                got=value.aval.str_short(),
                hint="leave it out: a value on the host costs no device memory until the backward pass",
            )


@functools.cache
def _policy(save: frozenset[str], offload: frozenset[str]) -> Callable[..., Any]:
    """Return JAX's policy. The same names give the same object, because JAX's caches compare policies by identity."""
    name_policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=sorted(save),
        names_which_can_be_offloaded=sorted(offload),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        # XLA cannot slice a stack of scalars in a TPU's host memory, so scalars stay on the device.
        if params.get("name") in offload and not avals[0].ndim:
            return jax.checkpoint_policies.everything_saveable(primitive, *avals, **params)
        return name_policy(primitive, *avals, **params)

    return policy
