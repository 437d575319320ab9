"""Initial state in low precision, without dense arrays: optimizer states nearly always begin as zeros.

For a jitted ``init``, XLA packs 4096 x 4096 zeros at compile time, which takes one to two minutes (jax 0.10.2). For
larger arrays, the program holds several float32 copies: 27 bytes a number on a TPU. Called eagerly, Optax first makes
the float32 state of all parameters. So this module traces ``init``, and packs an array that is filled with one number
from that number alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core import Tree, explicit_mesh
from ..offload import traced_program
from ._formats import FORMATS
from ._packed import BFLOAT16, PackedArray

_UNCHANGED = ("copy", "copy_p", "stop_gradient")


@dataclasses.dataclass(frozen=True)
class Filled:
    """Placeholder for an array that is filled with one number."""

    shape: tuple[int, ...]
    dtype: Any
    value: Any
    """The number, a scalar array."""

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def copied(init: Callable[..., Tree], args: Sequence[Tree]) -> list[bool]:
    """Return whether each leaf of ``init(*args)``, in order, is a copy of an argument; [] if `init` cannot be traced.

    Args:
        init: makes the state of an optimizer.
        args: trees of arrays.
    """
    try:
        program, _ = traced_program(init, args)
    except Exception:  # as in `first_state`
        return []
    of, num_args = {at: each for each in program.equations for at in each.outputs}, len(jax.tree.leaves(args))

    def is_copy(value: int) -> bool:
        if (equation := of.get(value)) is None:
            return value < num_args
        return equation.primitive.name in (*_UNCHANGED, "convert_element_type") and is_copy(equation.inputs[0])

    return list(map(is_copy, program.outputs))


def first_state(init: Callable[..., Tree], args: Sequence[Tree], wanted: Callable[[Tree], Sequence[bool]]) -> Tree:
    """Call ``init(*args)``, with a `Filled` in place of each array that is filled with one number.

    Args:
        init: makes the state of an optimizer.
        args: trees of arrays.
        wanted: given the state's tree of shapes, returns whether each leaf may become a `Filled`.

    Returns:
        The state.

    Memory:
        The arrays of the state that are not `Filled`.
    """
    try:
        if explicit_mesh(args) is not None:  # a `Filled` has no sharding
            return _arrays(init(*args))
        program, structure = traced_program(init, args)
    except Exception:  # not traceable, or invalid arguments: calling init raises its own error
        return _arrays(init(*args))
    of = {value: equation for equation in program.equations for value in equation.outputs}
    are_wanted = wanted(structure.unflatten([program.avals[value] for value in program.outputs]))
    filled = dict[int, Filled]()
    for at, (is_wanted, value) in enumerate(zip(are_wanted, program.outputs, strict=True)):
        aval = program.avals[value]
        if is_wanted and (number := _number(of, program.constants, value)) is not None:
            filled[at] = Filled(aval.shape, aval.dtype, jnp.asarray(number, aval.dtype))
    if not filled or program.effects:
        return _arrays(init(*args))
    # Run only the equations that the remaining leaves need; a filled array is never computed.
    others = {value for at, value in enumerate(program.outputs) if at not in filled}
    values: dict[int, Any] = dict(enumerate(map(as_array, jax.tree.leaves(args))))
    values.update({at: jnp.asarray(program.constants[at]) for at in program.constants.keys() & others})
    program.run(program.needed_for(others, known=values), values)
    return structure.unflatten([filled.get(at) or values[value] for at, value in enumerate(program.outputs)])


def as_array(leaf: Any) -> Any:
    """Convert a Python number to an array, since Optax accepts both; return other leaves unchanged."""
    return jnp.asarray(leaf) if isinstance(leaf, (bool, int, float, complex)) else leaf


def _arrays(state: Tree) -> Tree:
    return jax.tree.map(as_array, state)


def _number(of: Mapping[int, Any], constants: Mapping[int, Any], value: int) -> Any:
    """Return the scalar constant that the array `value` is filled with, or None."""
    if (equation := of.get(value)) is None:
        return None
    name, first = equation.primitive.name, equation.inputs[0] if equation.inputs else -1
    if name in _UNCHANGED:
        return _number(of, constants, first)
    if name == "convert_element_type":  # repeat every conversion of the program, because each may round
        number = _number(of, constants, first)
        return None if number is None else jnp.asarray(number).astype(equation.params["new_dtype"])
    number = constants.get(first) if name == "broadcast_in_dim" else None
    return number if number is not None and not jnp.shape(number) else None


def packed_fill(leaf: Filled, form: str, is_positive: bool, key: Any) -> PackedArray:
    """Pack an array that is filled with one number, by packing a single block.

    Args:
        leaf: the array.
        form: name of a format.
        is_positive: as in `PackedArray.of`.
        key: as in `PackedArray.rounded`.
    """
    make = functools.partial(PackedArray.stored, format=form, key=key, is_positive=is_positive)
    one = make(jnp.full(1 if form == BFLOAT16 else FORMATS[form].block, leaf.value))
    like = jax.eval_shape(make, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    scales = None if one.scales is None else jnp.full(like.scales.shape, one.scales[0])
    return dataclasses.replace(like, codes=jnp.full(leaf.shape, one.codes[0]), scales=scales)


def packed_array(leaf: Any, form: str, is_positive: bool, key: Any) -> PackedArray:
    """Pack an array and keep its sharding over the axes of an explicit mesh; arguments as in `packed_fill`."""

    def make(leaf: Any, key: Any) -> PackedArray:
        return PackedArray.stored(leaf, form, key, is_positive=is_positive)

    own = jax.typeof(leaf).sharding
    if not own.mesh.explicit_axes:
        return make(leaf, key)
    spec = (*own.spec, *(None,) * leaf.ndim)[: leaf.ndim]

    def like(part: Any) -> Any:
        if part.shape == leaf.shape:
            return own
        # Scales have the leading axes of the array, and one axis of blocks in place of its last axis.
        is_of_rows = part.shape[:-1] == leaf.shape[:-1]
        return jax.NamedSharding(own.mesh, jax.P(*spec[:-1], None) if is_of_rows else jax.P())

    shapes = jax.eval_shape(make, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (leaf, key)))
    made: Any = jax.sharding.auto_axes(make, axes=own.mesh.explicit_axes, out_sharding=jax.tree.map(like, shapes))
    return made(leaf, key)
