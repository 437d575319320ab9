"""Flax NNX modules in a `lowtide.Trainer`.

A module is a graph of objects whose variables hold arrays. Inside the step it is made anew from its definition and the
step's arrays (`nnx.merge`), the loss function uses it as it is, and afterwards its variables are read again: batch
statistics, counters of `nnx.Rngs` and caches are state of the step. Shared variables are one array; random keys are
kept as their numbers.

Checked with Flax 0.12.8.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..core import SelectionError, StructureError, Tree
from ._lent import Lent, refuse_edits


class Bridge:
    """An `nnx.Module` for `lowtide.Trainer`; a `lowtide.train.ModelObject`.

    Args:
        model: the module, which holds placeholders while the trainer has its arrays. What shares its arrays (an
            `nnx.clone`, an array that was read from it) is gone with the first step; NumPy arrays in it become JAX's,
            and so do numbers that train. A parameter that is frozen stays as it is, whatever a call writes into it.
        wrt: an NNX filter of what trains, such as `nnx.LoRAParam`. Other parameters are frozen, and stay in the module.

    Raises:
        SelectionError: when the filter selects no variable.

    Warns:
        UserWarning: when the module is in ``eval()`` mode, in which it would train: a step has the mode, and all else
            that is no variable, as they were when the bridge was made.

    Memory:
        No copy: the trainer's arrays are those of the module.

    Examples:
        >>> import lowtide as lt
        >>> import optax
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> trainer = lt.Trainer(Bridge(model), lambda m, x: jnp.mean(m(x) ** 2), optax.sgd(0.1))
        >>> history = trainer.fit([jnp.ones((4, 2))] * 2, num_steps=2)
        >>> history[1]["loss"] < history[0]["loss"], model.kernel[...].shape
        (True, (2, 1))

    References:
        https://flax.readthedocs.io/en/latest/guides/filters_guide.html
    """

    def __init__(self, model: nnx.Module, *, wrt: Any = nnx.Param) -> None:
        self.model = model
        """The module."""
        _warn_of_eval(model)
        wanted = {_name(path) for path, _ in nnx.to_flat_state(nnx.state(model, wrt))}
        for name, variable in _all_variables(model).items():
            value = variable.get_raw_value()
            if isinstance(value, np.ndarray) or (name in wanted and _is_number(value)):  # as such no leaf that trains
                variable.set_raw_value(jnp.array(np.asarray(value)), _unsafe_bypass_check=True)
        self._known = _all_variables(model).keys()
        self._graphdef, state = nnx.split(model)
        variables = dict(nnx.to_flat_state(state))
        values = {path: leaf.get_raw_value() for path, leaf in variables.items()}
        self._paths = {_name(path): path for path, value in values.items() if isinstance(value, jax.Array)}
        self._static = {path: value for path, value in values.items() if not isinstance(value, jax.Array)}
        self._impls = {
            name: jax.random.key_impl(values[path]) for name, path in self._paths.items() if _is_key(values[path])
        }
        self._trains = wanted & set(self._paths)
        params = {_name(path) for path, leaf in variables.items() if isinstance(leaf, nnx.Param)}
        self._changes = set(self._paths) - params - self._trains
        self._lent = set[str]()
        if not self._trains:
            raise SelectionError(
                "the filter selects no variable of the module",
                expected="a filter of variables that hold arrays, such as nnx.Param",
                got=", ".join(sorted({type(leaf).__name__ for leaf in variables.values()})) or "no variables",
                hint="pass Bridge(model, wrt=nnx.LoRAParam), for instance",
            )

    def wrt(self, path: str, leaf: Any) -> bool:
        """What trains: the variables of the filter."""
        return path in self._trains

    @property
    def mutable(self) -> Callable[[str, Any], bool] | None:
        """What a call may change: all variables that are no parameters."""
        return (lambda path, leaf: path in self._changes) if self._changes else None

    def arrays(self) -> Tree:
        """See `lowtide.train.ModelObject`.

        Raises:
            StructureError: when the module has other variables than when the bridge was made.
        """
        now = _all_variables(self.model).keys()
        if now != self._known:
            changes = {"added": sorted(now - self._known), "removed": sorted(self._known - now)}
            raise StructureError(
                "the module has changed since its bridge was made",
                expected="the variables of then",
                got="; ".join(f"{what}: {', '.join(names[:4])}" for what, names in changes.items() if names),
                hint="make a new Bridge and a new Trainer after layers are added or replaced",
            )
        return {name: _numbers(variable.get_raw_value()) for name, variable in self._variables().items()}

    def lend(self, arrays: Tree) -> None:
        """See `lowtide.train.ModelObject`."""
        lent, variables = {n: Lent(n, leaf) for n, leaf in arrays.items() if leaf is not None}, self._variables()
        for name, placeholder in lent.items():
            variables[name].set_raw_value(placeholder, _unsafe_bypass_check=True)
        self._lent = set(lent)

    def give_back(self, arrays: Tree) -> None:
        """See `lowtide.train.ModelObject`."""
        found: dict[str, Any] = {}
        for name, variable in self._variables().items():
            if arrays[name] is not None:
                found[name] = variable.get_raw_value()
                variable.set_raw_value(self._typed(name, arrays[name]), _unsafe_bypass_check=True)
        lent, self._lent = self._lent, set[str]()
        refuse_edits(found, lent)

    def bind(self, fn: Callable[..., Any], *, training: bool) -> Callable[..., tuple[Any, Tree]]:
        """See `lowtide.train.ModelObject`; outside of training the module is in its ``eval`` mode."""

        def run(arrays: Tree, *args: Any) -> tuple[Any, Tree]:
            values = {self._paths[name]: self._typed(name, leaf) for name, leaf in arrays.items()}
            module: Any = nnx.merge(self._graphdef, nnx.from_flat_state({**self._static, **values}))
            if not training:
                module.eval()
            result = fn(module, *args)
            after = dict(nnx.to_flat_state(nnx.state(module)))
            return result, {name: _numbers(after[path].get_raw_value()) for name, path in self._paths.items()}

        return run

    def lowered(self, module: Any, dtype: Any) -> Any:
        """Have the layers of a module compute in a dtype, except those with a ``dtype`` of their own.

        A layer without one computes in the widest dtype of its arrays: after statistics in float32, all in float32.

        Args:
            module: the module that a function of the trainer is about to get, which is changed.
            dtype: what to compute in.
        """
        layers: list[Any] = [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Module)]
        for layer in layers:
            if getattr(layer, "dtype", "none") is None:
                layer.dtype = dtype
        return module

    def _variables(self) -> dict[str, Any]:
        """The variables of the module that hold arrays, each once."""
        found = sorted(_all_variables(self.model).items())
        return {name: variable for name, variable in found if name in self._paths}

    def _typed(self, name: str, leaf: Any) -> Any:
        return jax.random.wrap_key_data(leaf, impl=self._impls[name]) if name in self._impls else leaf


def _all_variables(module: nnx.Module) -> dict[str, Any]:
    """The variables of a module by their paths, each once."""
    return {_name(path): node for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Variable)}


def _warn_of_eval(module: nnx.Module) -> None:
    """Warn when all layers that have a mode are in that of evaluation: one alone may be meant so."""
    modes = {
        f"{_name(path)}.{flag}".lstrip("."): getattr(node, flag)
        for path, node in nnx.iter_graph(module)
        if isinstance(node, nnx.Module)
        for flag in ("deterministic", "use_running_average")
        if isinstance(getattr(node, flag, None), bool)
    }
    if modes and all(modes.values()):
        warnings.warn(
            f"the module is in eval() mode, and would train in it: {', '.join(list(modes)[:4])}; "
            "call module.train() before its bridge is made",
            stacklevel=3,
        )


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))


def _is_number(value: Any) -> bool:
    """Whether it is a number of Python or NumPy that can train."""
    return isinstance(value, float | complex | np.generic) and jnp.issubdtype(jnp.result_type(value), jnp.inexact)


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _numbers(value: Any) -> Any:
    return jax.random.key_data(value) if isinstance(value, jax.Array) and _is_key(value) else value
