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


def find_copies(init: Callable[..., Tree], args: Sequence[Tree]) -> list[bool]:
    """Return for each leaf of ``init(*args)`` whether it is a copy of an argument; [] if `init` cannot be traced."""
    try:
        program, _ = traced_program(init, args)
    except Exception:  # as in `init_filled`
        return []
    producers, num_args = {value: eqn for eqn in program.equations for value in eqn.outputs}, len(jax.tree.leaves(args))

    def is_copy(value: int) -> bool:
        if (equation := producers.get(value)) is None:
            return value < num_args
        return equation.primitive.name in (*_UNCHANGED, "convert_element_type") and is_copy(equation.inputs[0])

    return list(map(is_copy, program.outputs))


def init_filled(init: Callable[..., Tree], args: Sequence[Tree], can_fill: Callable[[Tree], Sequence[bool]]) -> Tree:
    """Call ``init(*args)``, with a `Filled` in place of each array that is filled with one number.

    `can_fill` takes the state's tree of shapes and returns whether each leaf may become a `Filled`. Only the other
    arrays of the state are allocated.
    """
    try:
        if explicit_mesh(args) is not None:  # a `Filled` has no sharding
            return _to_arrays(init(*args))
        program, structure = traced_program(init, args)
    except Exception:  # not traceable, or invalid arguments: calling init raises its own error
        return _to_arrays(init(*args))
    producers = {value: equation for equation in program.equations for value in equation.outputs}
    fillable = can_fill(structure.unflatten([program.avals[value] for value in program.outputs]))
    filled = dict[int, Filled]()
    for index, (is_fillable, value) in enumerate(zip(fillable, program.outputs, strict=True)):
        aval = program.avals[value]
        if is_fillable and (number := _fill_value(producers, program.constants, value)) is not None:
            filled[index] = Filled(aval.shape, aval.dtype, jnp.asarray(number, aval.dtype))
    if not filled or program.effects:
        return _to_arrays(init(*args))
    # Run only the equations that the remaining leaves need; a filled array is never computed.
    remaining = {value for index, value in enumerate(program.outputs) if index not in filled}
    values: dict[int, Any] = dict(enumerate(map(as_array, jax.tree.leaves(args))))
    values.update({value: jnp.asarray(program.constants[value]) for value in program.constants.keys() & remaining})
    program.run(program.needed_for(remaining, known=values), values)
    return structure.unflatten([filled.get(index) or values[value] for index, value in enumerate(program.outputs)])


def as_array(leaf: Any) -> Any:
    """Convert a Python number to an array, since Optax accepts both; return other leaves unchanged."""
    return jnp.asarray(leaf) if isinstance(leaf, (bool, int, float, complex)) else leaf


def _to_arrays(state: Tree) -> Tree:
    return jax.tree.map(as_array, state)


def _fill_value(producers: Mapping[int, Any], constants: Mapping[int, Any], value: int) -> Any:
    """Return the scalar constant that the array `value` is filled with, or None."""
    if (equation := producers.get(value)) is None:
        return None
    name, operand = equation.primitive.name, equation.inputs[0] if equation.inputs else -1
    if name in _UNCHANGED:
        return _fill_value(producers, constants, operand)
    if name == "convert_element_type":  # repeat every conversion of the program, because each may round
        number = _fill_value(producers, constants, operand)
        return None if number is None else jnp.asarray(number).astype(equation.params["new_dtype"])
    number = constants.get(operand) if name == "broadcast_in_dim" else None
    return number if number is not None and not jnp.shape(number) else None


def pack_fill(leaf: Filled, form: str, is_positive: bool, key: Any) -> PackedArray:
    """Pack an array that is filled with one number, by packing a single block; `key` as in `PackedArray.rounded`."""
    pack = functools.partial(PackedArray.stored, format=form, key=key, is_positive=is_positive)
    block = pack(jnp.full(1 if form == BFLOAT16 else FORMATS[form].block, leaf.value))
    template = jax.eval_shape(pack, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    scales = None if block.scales is None else jnp.full(template.scales.shape, block.scales[0])
    return dataclasses.replace(template, codes=jnp.full(leaf.shape, block.codes[0]), scales=scales)


def pack_array(leaf: Any, form: str, is_positive: bool, key: Any) -> PackedArray:
    """Pack an array and keep its sharding over the axes of an explicit mesh; arguments as in `pack_fill`."""

    def pack(leaf: Any, key: Any) -> PackedArray:
        return PackedArray.stored(leaf, form, key, is_positive=is_positive)

    sharding = jax.typeof(leaf).sharding
    if not sharding.mesh.explicit_axes:
        return pack(leaf, key)
    spec = (*sharding.spec, *(None,) * leaf.ndim)[: leaf.ndim]

    def part_sharding(struct: Any) -> Any:
        if struct.shape == leaf.shape:
            return sharding
        # Scales have the leading axes of the array, and one axis of blocks in place of its last axis.
        has_rows = struct.shape[:-1] == leaf.shape[:-1]
        return jax.NamedSharding(sharding.mesh, jax.P(*spec[:-1], None) if has_rows else jax.P())

    shapes = jax.eval_shape(pack, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (leaf, key)))
    pack_sharded: Any = jax.sharding.auto_axes(
        pack, axes=sharding.mesh.explicit_axes, out_sharding=jax.tree.map(part_sharding, shapes)
    )
    return pack_sharded(leaf, key)
