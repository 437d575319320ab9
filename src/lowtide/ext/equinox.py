"""Train Equinox modules with `lowtide.Trainer`, including their state and inference mode.

A module that has no state, Python numbers or ``inference`` flags is a pytree of arrays: a trainer takes it directly.
`Bridge` handles other modules. Only arrays reach the compiled step, so a dropout probability or an ``inference`` flag
stays a Python value. The step takes and returns `equinox.nn.State`. ``evaluate`` and ``predict`` set
`equinox.nn.inference_mode`.

The bridge makes no copy: the first step donates the trainable arrays and the state of the given module. `Bridge.model`
is a module with the current arrays, or ``(model, state)``.

Checked with Equinox 0.13.8.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax

from ..core import (
    ConfigError,
    StructureError,
    Tree,
    among,
    is_key,
    is_pattern,
    key_numbers,
    leaves_with_paths,
    partition,
    products_explained,
)
from ._placeholders import Placeholder, check_trainable


class Bridge:
    """An `equinox.Module`, with its state, for `lowtide.Trainer`; a `lowtide.train.ModelObject`.

    With a state, functions of the trainer take and return it as Equinox layers do. The loss function is
    ``loss_fn(model, state, batch)``, with optional arguments ``key`` and ``training``; it returns ``(loss, state)`` or
    ``(loss, metrics, state)``. The function of ``predict`` is ``fn(model, state, batch)`` and returns outputs or
    ``(outputs, state)``. Without a state, functions have no argument ``state``: ``loss_fn(model, batch)``.

    Args:
        model: the module. The first step consumes its trainable arrays, so that it cannot be used any more.
        state: the state from `equinox.nn.make_with_state`, or None. The first step also consumes it.
        wrt: trainable arrays: an Equinox filter (``eqx.is_inexact_array``, or a tree of booleans and functions that is
            a prefix of the module), or glob patterns on paths such as ``"layers/1/*"``. All other arrays are frozen and
            stay in the module.

    Raises:
        ConfigError: for a class, a Flax NNX module, or a module with state without the argument `state`.
        SelectionError: when `wrt` selects no array.
        StructureError: for two leaves with the same path. In a step: for a missing or mismatched state from `loss_fn`.

    Memory:
        No copy: the trainer uses the arrays of the module.

    Examples:
        >>> import jax.numpy as jnp
        >>> import lowtide as lt
        >>> import optax
        >>> model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, axis_name="batch", mode="ema")
        >>> def loss_fn(model, state, batch):
        ...     outputs, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(batch, state)
        ...     return jnp.mean((outputs - 1.0) ** 2), state
        >>> trainer = lt.Trainer(Bridge(model, state), loss_fn, optax.sgd(0.1))
        >>> history = trainer.fit([jnp.eye(2)] * 2, num_steps=2)
        >>> history[1]["loss"] < history[0]["loss"]
        True
        >>> model, state = trainer.model

    References:
        https://docs.kidger.site/equinox/examples/stateful/
    """

    def __init__(
        self, model: Any, state: eqx.nn.State | None = None, *, wrt: Any | str | Sequence[str] = eqx.is_inexact_array
    ) -> None:
        nnx: Any = sys.modules.get("flax.nnx")  # NNX modules are pytrees, too
        if isinstance(model, type) or (nnx is not None and isinstance(model, nnx.Module)):
            kind = repr(model)[:80] if isinstance(model, type) else f"a {type(model).__name__} of Flax NNX"
            hint = "use lowtide.ext.nnx.Bridge for modules of NNX; call a class to get a module"
            raise ConfigError(f"the model must be an eqx.Module, not {kind}", hint=hint)
        is_index = lambda node: isinstance(node, eqx.nn.StateIndex)  # noqa: E731
        if state is None and any(map(is_index, jax.tree.leaves(model, is_leaf=is_index))):
            hint = "pass Bridge(model, state), with model, state = eqx.nn.make_with_state(Model)(...)"
            raise ConfigError("the module has state, but no state is given", hint=hint)
        self._has_state = state is not None
        leaves = _leaves_by_name(model, state)
        self._structure = jax.tree.structure((model, state))
        self._arrays: dict[str, Any] = {name: key_numbers(leaf) for name, leaf in leaves.items() if eqx.is_array(leaf)}
        self._static: dict[str, Any] = {name: leaf for name, leaf in leaves.items() if name not in self._arrays}
        self._impls = {name: jax.random.key_impl(leaves[name]) for name in self._arrays if is_key(leaves[name])}
        self._names = list(leaves)
        self._state_names = _leaves_by_name(None, state).keys() & self._arrays.keys()
        if is_pattern(wrt) or (isinstance(wrt, Sequence) and all(is_pattern(pattern) for pattern in wrt)):
            candidates = {name: leaf for name, leaf in self._arrays.items() if name not in self._state_names}
            trainable = {name for name, leaf in partition(candidates, wrt)[0].items() if leaf is not None}
        else:
            trainable = set(_leaves_by_name(eqx.filter(model, wrt), None)) & set(self._arrays)
        self.wrt = among(trainable)
        """Selects the trainable leaves: the arrays that the argument `wrt` selects."""
        self.mutable = among(self._state_names) if self._state_names else None
        """Selects the leaves that a call may change: the arrays of the state; None without a state."""
        check_trainable(trainable, "array", self._arrays, "eqx.is_inexact_array")

    @property
    def model(self) -> Any:
        """The module, or ``(model, state)``, with current arrays; arrays borrowed by a trainer are placeholders."""
        model, state = self._combine(self._arrays)
        return (model, state) if self._has_state else model

    def replace(self, model: Any) -> None:
        """Replace the module by one of the same structure, such as from `equinox.tree_at`; `Trainer.update` calls this.

        Args:
            model: the module, or ``(model, state)``. Its trainable arrays and state then belong to the trainer.

        Raises:
            StructureError: when anything other than arrays differs.
        """
        pair = model if self._has_state else (model, None)
        leaves = _leaves_by_name(*pair) if isinstance(pair, tuple) and len(pair) == 2 else {}
        static = {name: leaf for name, leaf in leaves.items() if name in self._static}
        if jax.tree.structure(pair) != self._structure or static != self._static:
            problem = "the module's structure differs from that of the trainer's module"
            expected = "(model, state)" if self._has_state else "a module"
            hint = "change only arrays, with eqx.tree_at, or make a new Trainer"
            raise StructureError(problem, expected=expected, got=type(model).__name__, hint=hint)
        self._arrays = {name: key_numbers(leaf) for name, leaf in leaves.items() if name not in self._static}

    def arrays(self) -> Tree:
        """See `lowtide.train.ModelObject`."""
        return dict(self._arrays)

    def lend(self, arrays: Tree) -> None:
        """See `lowtide.train.ModelObject`."""
        self._arrays |= {name: Placeholder(name, leaf) for name, leaf in arrays.items() if leaf is not None}

    def give_back(self, arrays: Tree) -> None:
        """See `lowtide.train.ModelObject`."""
        self._arrays |= {name: leaf for name, leaf in arrays.items() if leaf is not None}

    def bind(self, fn: Callable[..., Any], *, training: bool) -> Callable[..., tuple[Any, Tree]]:
        """See `lowtide.train.ModelObject`; outside of training the module is in inference mode."""

        def run(arrays: Tree, *args: Any) -> tuple[Any, Tree]:
            model, state = self._combine(arrays)
            model = model if training else eqx.nn.inference_mode(model)
            with products_explained(model):
                result = fn(model, state, *args) if self._has_state else fn(model, *args)
            if not self._has_state:
                return result, arrays
            if isinstance(result, tuple) and result and isinstance(result[-1], eqx.nn.State):
                # If the last value is a State, it is the new state, also in `predict`, whose function may leave it out.
                *values, new_state = result
                leaves = _leaves_by_name(None, new_state)
                new = {name: key_numbers(leaf) for name, leaf in leaves.items() if name not in self._static}
                if set(new) != self._state_names:
                    got = f"{len(new)} arrays in place of {len(self._state_names)}"
                    hint = "update a part of the state with state.update(substate)"
                    raise StructureError("the loss function returns a state of another structure", got=got, hint=hint)
                return values[0] if len(values) == 1 else tuple(values), arrays | new
            if training:
                got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
                hint = "return (loss, state) or (loss, metrics, state), with the state that the layers returned"
                raise StructureError("the loss function does not return the state", got=got, hint=hint)
            return result, arrays

        return run

    def _combine(self, arrays: dict[str, Any]) -> tuple[Any, Any]:
        values: dict[str, Any] = {**arrays, **self._static}

        def leaf(name: str) -> Any:
            value = values[name]
            if name not in self._impls or isinstance(value, Placeholder):
                return value
            return jax.random.wrap_key_data(value, impl=self._impls[name])

        return jax.tree.unflatten(self._structure, map(leaf, self._names))


def _leaves_by_name(model: Any, state: Any) -> dict[str, Any]:
    """Return leaves by path in the module, in JAX's order; a leaf of the state has a path ``State/...``."""
    pairs = leaves_with_paths((model, state))
    leaves = {(path[2:] if path[0] == "0" else f"State{path[1:]}"): leaf for path, leaf in pairs}
    if len(leaves) != len(pairs):
        got = ", ".join(path for path, _ in pairs)
        hint = "use keys of one type in each dictionary, and no field with the name State"
        raise StructureError("two leaves of the module have the same path", got=got, hint=hint)
    return leaves
