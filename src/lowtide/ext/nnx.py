"""Train Flax NNX modules with `lowtide.Trainer`.

A module is a graph of objects whose variables hold arrays. The step builds a new module from the graph definition and
the step's arrays (`nnx.merge`). It calls the loss function with this module and then reads the module's variables. So
the step also returns batch statistics, counters of `nnx.Rngs`, caches and arrays outside of variables. A shared
variable is one array, and random keys are stored as their key data. Values that a layer sows (`nnx.Intermediate`) exist
only inside the step. Any other attribute that a call sets is an error, because it would be lost with the step's module.

Checked with Flax 0.12.8.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..core import SelectionError, StructureError, Tree, among, is_key, key_numbers, leaves_with_paths, shared_leaves
from ._placeholders import Placeholder, check_placeholders, check_trainable, refuse_changes


class Bridge:
    """An `nnx.Module` for `lowtide.Trainer`; a `lowtide.train.ModelObject`.

    Args:
        model: the module, which holds placeholders while the trainer has its arrays. The first step consumes these
            arrays, so an `nnx.clone` or an array that was read from the module becomes invalid. NumPy arrays in the
            module become JAX arrays, and so do trainable numbers. A frozen parameter stays unchanged, even if a call
            writes into it.
        wrt: NNX filter of the trainable variables, such as `nnx.LoRAParam`. Other parameters are frozen and stay in the
            module.

    Raises:
        SelectionError: when the filter selects no variable, or the model is a class.
        StructureError: for an array in a tuple, which placeholders cannot replace, or for one array at two places. From
            a step: when a call sets attributes that the module did not have.

    Warns:
        UserWarning: when the module is in ``eval()`` mode, because it would train in this mode. A step uses the mode,
            and all other attributes that are not variables, as they were when the bridge was made. From a step: when a
            call writes into trainable parameters, as `nnx.WeightNorm` does. Their update starts from the value before
            the call, while an NNX training loop continues from the written value.

    Memory:
        No copy: the trainer uses the arrays of the module.

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
        if isinstance(model, type):
            hint = f"call the class: Bridge({model.__name__}(..., rngs=nnx.Rngs(0)))"
            raise SelectionError("the model is a class, not a module", hint=hint)
        self.model = model
        """The module."""
        _warn_of_eval(model)
        wrt_names = set(_leaves_by_name(dict(nnx.to_flat_state(nnx.state(model, wrt)))))
        for name, place in _places(model).items():
            value = place.get()
            is_number = isinstance(value, float | complex | np.generic)
            is_trainable = name in wrt_names and is_number and jnp.issubdtype(jnp.result_type(value), jnp.inexact)
            if isinstance(value, np.ndarray) or is_trainable:  # not trainable as they are
                place.put(jnp.array(np.asarray(value)))
        places = _places(model)
        for names in shared_leaves({name: place.get() for name, place in places.items()}):
            hint = "share an nnx.Variable(array), which NNX knows as shared; or copy with jnp.array(array, copy=True)"
            raise StructureError(f"{names[0]} and {names[1]} are the same array", hint=hint)
        self._place_names = places.keys()
        self._graphdef, state = nnx.split(model)
        variables = dict(nnx.to_flat_state(state))
        leaves = _leaves_by_name(variables)
        self._names = {name for name, leaf in leaves.items() if isinstance(leaf, jax.Array)}
        self._variables = {path: _without_arrays(value) for path, value in variables.items()}
        self._impls = {name: jax.random.key_impl(leaves[name]) for name in self._names if is_key(leaves[name])}
        self._trainable = wrt_names & self._names
        params = _leaves_by_name({path: value for path, value in variables.items() if isinstance(value, nnx.Param)})
        self._mutable_names = self._names - params.keys() - self._trainable
        self.wrt = among(self._trainable)
        """Selects the trainable leaves: the variables that the argument `wrt` selects."""
        self.mutable = among(self._mutable_names) if self._mutable_names else None
        """Selects leaves that a call may change: all but parameters and trainable leaves. None without such leaves."""
        self._borrowed = set[str]()
        self._attributes_before: dict[str, Any] = {}
        """Attributes of the step's module before the user's function is called."""
        kinds = sorted({type(leaf).__name__ for leaf in variables.values()})
        check_trainable(self._trainable, "variable", kinds, "nnx.LoRAParam")

    def arrays(self) -> Tree:
        """See `lowtide.train.ModelObject`.

        Raises:
            StructureError: when variables were added or removed since the bridge was made.
        """
        places = _places(self.model)
        changes = {
            "added": sorted(places.keys() - self._place_names),
            "removed": sorted(self._place_names - places.keys()),
        }
        hint = "make a new Bridge and a new Trainer after layers are added or replaced"
        refuse_changes(changes, "the module has changed since its bridge was made", hint)
        return {name: key_numbers(place.get()) for name, place in self._array_places().items()}

    def lend(self, arrays: Tree) -> None:
        """See `lowtide.train.ModelObject`."""
        placeholders = {name: Placeholder(name, leaf) for name, leaf in arrays.items() if leaf is not None}
        places = self._array_places()
        for name, placeholder in placeholders.items():
            places[name].put(placeholder)
        self._borrowed = set(placeholders)

    def give_back(self, arrays: Tree) -> None:
        """See `lowtide.train.ModelObject`."""
        values: dict[str, Any] = {}
        for name, place in self._array_places().items():
            if arrays[name] is not None:
                values[name] = place.get()
                place.put(self._wrap_key(name, arrays[name]))
        borrowed, self._borrowed = self._borrowed, set[str]()
        check_placeholders(values, borrowed)

    def bind(self, fn: Callable[..., Any], *, training: bool) -> Callable[..., tuple[Any, Tree]]:
        """See `lowtide.train.ModelObject`; outside of training the module is in ``eval`` mode."""

        def run(arrays: Tree, *args: Any) -> tuple[Any, Tree]:
            values = {path: self._fill_variable(path, value, arrays) for path, value in self._variables.items()}
            module: Any = nnx.merge(self._graphdef, nnx.from_flat_state(values))
            if not training:
                module.eval()
            self._attributes_before = _attributes(module)
            writes = _record_writes(module, self._trainable) if training else []
            result = fn(module, *args)
            _check_attributes(self._attributes_before, _attributes(module))
            # Read the variables of the module that the function got, so that the step returns what the function wrote.
            leaves = _leaves_by_name(dict(nnx.to_flat_state(nnx.state(module))))
            new_arrays = {name: key_numbers(leaves[name]) for name in self._names}
            # An untouched variable still holds the identical tracer. This check alone is not enough, since `nnx.remat`
            # replaces tracers without a write: `writes` has to show that something was assigned.
            written = [name for name in self._trainable if writes and new_arrays[name] is not arrays[name]]
            if written:
                warnings.warn(
                    f"a call writes into trainable parameters: {', '.join(sorted(written)[:4])}; the written value "
                    "applies only to that call, and the update starts from the value before it\n"
                    "hint: ignore this for weight normalisation, which computes the weights again in each call",
                    stacklevel=1,
                )
            return result, new_arrays

        return run

    def lowered(self, module: Any, dtype: Any) -> Any:
        """Set the compute dtype of a module's layers, except those whose ``dtype`` is already set; return the module.

        A layer without a dtype computes in the widest dtype of its arrays. Float32 batch statistics would therefore
        make all following layers compute in float32.

        Args:
            module: the module that the trainer passes to a function; it is modified.
            dtype: the compute dtype.
        """
        layers: list[Any] = [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Module)]
        for layer in layers:
            if getattr(layer, "dtype", "none") is None:
                layer.dtype = dtype
        self._attributes_before = _attributes(module)  # attributes set here are not changes by the user's function
        return module

    def _array_places(self) -> dict[str, _Place]:
        """Return, by path, the places of the module's arrays, also while a trainer has borrowed the arrays."""
        places = sorted(_places(self.model, borrowed=self._borrowed).items())
        return {name: place for name, place in places if name in self._names}

    def _fill_variable(self, path: tuple[Any, ...], variable: Any, arrays: Tree) -> Any:
        """Return the step's value at a path: an array, or a variable with a tree of arrays."""
        leaves_by_name = _leaves_by_name({path: variable})
        leaves = [
            self._wrap_key(name, arrays[name]) if name in self._names else leaf for name, leaf in leaves_by_name.items()
        ]
        value = jax.tree.unflatten(jax.tree.structure(_raw(variable)), leaves)
        return variable.replace(value) if _is_tree(variable) else value

    def _wrap_key(self, name: str, leaf: Any) -> Any:
        return jax.random.wrap_key_data(leaf, impl=self._impls[name]) if name in self._impls else leaf


class _Place:
    """Place of a value in a module: a variable or a leaf of its tree, an attribute, or an item of a list."""

    def __init__(self, name: str, parent: Any, key: Any, node: Any) -> None:
        self.name, self.parent, self.key, self.node = name, parent, key, node

    def get(self) -> Any:
        """Return the value: an array, or any other content of a variable."""
        return _raw(self.node)

    def put(self, value: Any) -> None:
        """Set the value without NNX's type checks; raise `StructureError` in a tuple or another immutable node."""
        if isinstance(self.node, nnx.Variable):
            self.node.set_raw_value(value, _unsafe_bypass_check=True)
            return
        if isinstance(self.parent, nnx.Variable):
            leaves, structure = jax.tree.flatten(_raw(self.parent))
            leaves[self.key] = value
            self.parent.set_raw_value(jax.tree.unflatten(structure, leaves), _unsafe_bypass_check=True)
        elif isinstance(self.parent, nnx.Pytree):
            vars(self.parent)[str(self.key)] = value
        elif isinstance(self.parent, dict | list):
            self.parent[self.key] = value
        else:
            hint = "put the array into a variable, nnx.Variable(array), or the arrays into an nnx.List"
            kind = type(self.parent).__name__
            raise StructureError(f"{self.name}: an array in a {kind} cannot be replaced", hint=hint)
        self.node = value


def _places(module: nnx.Module, borrowed: Collection[str] = ()) -> dict[str, _Place]:
    """Return the places of variables and of other arrays in a module by path; a shared variable has only one place."""
    values = dict(nnx.to_flat_state(nnx.state(module)))
    nodes = dict(nnx.iter_graph(module))
    # `nnx.iter_graph` lists an array or number at two places only once, so look at the items of each node, too.
    item_places = {
        (*path, key): _Place(_path_name((*path, key)), node, key, value)
        for path, node in nodes.items()
        for key, value in _items(node)
        if (*path, key) in values or _path_name((*path, key)) in borrowed
    }
    state_places = {
        path: _Place(_path_name(path), nodes.get(path[:-1]), path[-1], leaf) for path, leaf in values.items()
    }
    return {inner.name: inner for place in {**state_places, **item_places}.values() for inner in _inner_places(place)}


def _inner_places(place: _Place) -> list[_Place]:
    """Return the places of the leaves if a variable holds a tree, otherwise the place itself."""
    if not _is_tree(place.node):
        return [place]
    leaves = leaves_with_paths(_raw(place.node))
    return [_Place(f"{place.name}/{name}", place.node, index, leaf) for index, (name, leaf) in enumerate(leaves)]


def _is_tree(node: Any) -> bool:
    """Return whether a node is a variable that holds a tree, such as a dictionary or a tuple of arrays."""
    raw = _raw(node)
    is_variable = raw is not node and not isinstance(raw, nnx.Pytree)
    return is_variable and bool(jax.tree.leaves(raw)) and not jax.tree_util.all_leaves([raw])


def _without_arrays(variable: Any) -> Any:
    """Return a variable with `_ARRAY` in place of its arrays; if it holds no tree, return only its value."""
    value = jax.tree.map(lambda leaf: _ARRAY if isinstance(leaf, jax.Array) else leaf, _raw(variable))
    return variable.replace(value) if _is_tree(variable) else value


_ARRAY = object()
"""Marks the position of an array, which the trainer has."""


def _leaves_by_name(variables: Mapping[tuple[Any, ...], Any]) -> dict[str, Any]:
    """Return the leaves of variables by name; leaves of one variable are in the order of `jax.tree.leaves`."""
    return {
        _path_name((*path, *filter(None, [inner]))): leaf
        for path, value in variables.items()
        for inner, leaf in leaves_with_paths(_raw(value))
    }


def _items(node: Any) -> Iterable[tuple[Any, Any]]:
    """Return pairs of path key and value: a module's attributes, or the items of a list, tuple or dictionary."""
    if isinstance(node, nnx.Pytree):
        attributes = ((key, value) for key, value in vars(node).items() if not key.startswith("_pytree__"))
        return (
            (int(key), value) if isinstance(node, nnx.List) and key.isdigit() else (key, value)
            for key, value in attributes
        )
    return node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list | tuple) else ()


_MODES = ("deterministic", "use_running_average")
"""Attributes that ``train()`` and ``eval()`` set. A call may change them: each step starts from the bridge's mode."""


def _attributes(module: nnx.Module) -> dict[str, Any]:
    """Return the attributes of a module and its submodules by path, each as `_comparable` represents it."""
    return {
        _path_name((*path, key)): _comparable(value)
        for path, node in nnx.iter_graph(module)
        for key, value in _items(node)
        if not isinstance(value, nnx.Intermediate) and key not in _MODES
    }


def _comparable(value: Any) -> Any:
    """Return the form of an attribute that is compared before and after a call.

    Arrays, and containers that `_attributes` lists separately, become "held". A variable with any other value becomes
    a tuple of named leaves. All other attributes stay as they are.
    """
    raw = _raw(value)
    if raw is not value and not isinstance(raw, jax.Array):
        leaves = leaves_with_paths(raw, is_leaf=lambda leaf: leaf is None)
        return tuple((name, "held" if isinstance(leaf, jax.Array) else leaf) for name, leaf in leaves)
    return "held" if isinstance(raw, nnx.Pytree | dict | list | tuple | jax.Array | np.ndarray) else raw


def _check_attributes(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise if a function changed attributes of the step's module, because the changes would be lost with it."""
    changes = {
        "added": sorted(after.keys() - before.keys()),
        "removed": sorted(before.keys() - after.keys()),
        "changed": sorted(name for name in before.keys() & after.keys() if not _is_same(before[name], after[name])),
    }
    hint = "make it an nnx.Variable(jnp.zeros(...)) in __init__, return it as a metric, or sow an nnx.Intermediate"
    refuse_changes(changes, "a call changes attributes of the module, and the changes would be lost", hint)


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(_is_same, first, second))
    try:
        is_array = isinstance(first, jax.Array)
        return first is second or (type(first) is type(second) and not is_array and bool(first == second))
    except Exception:  # values that cannot be compared count as equal
        return True


def _raw(node: Any) -> Any:
    return node.get_raw_value() if isinstance(node, nnx.Variable) else node


def _warn_of_eval(module: nnx.Module) -> None:
    """Warn if all layers that have a mode are in evaluation mode; a single such layer may be intended."""
    modes = {
        f"{_path_name(path)}.{flag}".lstrip("."): getattr(node, flag)
        for path, node in nnx.iter_graph(module)
        if isinstance(node, nnx.Module)
        for flag in _MODES
        if isinstance(getattr(node, flag, None), bool)
    }
    if modes and all(modes.values()):
        warnings.warn(
            f"the module would train in eval() mode: {', '.join(list(modes)[:4])}; "
            "call module.train() before its bridge is made",
            stacklevel=3,
        )


def _record_writes(module: nnx.Module, names: Collection[str]) -> list[Any]:
    """Return a list that collects all values assigned from now on to the variables `names`, also in NNX transforms."""
    writes: list[Any] = []

    def record(_: Any, value: Any) -> Any:
        writes.append(value)
        return value

    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable) and _path_name(path) in names:
            hooks = node.get_metadata().get("on_set_value", ())
            node.set_metadata(on_set_value=(*(hooks if isinstance(hooks, tuple) else (hooks,)), record))
    return writes


def _path_name(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))
