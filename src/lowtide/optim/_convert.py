"""Conversion of an optimizer's state between formats, to continue a run with another format."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core import StructureError, Tree
from ..offload import check_transformation
from ._low_precision import LowPrecisionState
from ._packed import PackedArray, is_packed
from ._weights import convert_residuals


def converted(state: Tree, tx: optax.GradientTransformation, params: Tree) -> Tree:
    """Convert an optimizer's state to the format of another transformation.

    Args:
        state: a state of `low_precision` around an optimizer, or of that optimizer alone. It may be nested in the
            states of other transformations.
        tx: the transformation that continues the run: `low_precision` around the same optimizer, or that optimizer
            alone.
        params: the current parameters.

    Returns:
        A state of `tx`. Residuals of bfloat16 weights are kept where both the old and the new state have them.

    Raises:
        StructureError: when the states are not of the same optimizer.

    Memory:
        Both states, and the new state in float32; under `jax.jit`, one leaf at a time in float32.

    Examples:
        >>> from lowtide.optim import low_precision
        >>> params = {"w": jnp.ones((64, 64))}
        >>> plain = optax.adam(1e-3)
        >>> state = converted(plain.init(params), low_precision(plain, "4bit"), params)
        >>> state.inner[0].mu["w"].format
        '4bit'
    """
    check_transformation(tx)
    old_states = iter([node for node in jax.tree.leaves(state, is_leaf=_is_stored) if _is_stored(node)])
    # The old state as the optimizer alone would hold it: the structure is then the same with and without packed leaves.
    dense = jax.tree.map(lambda node: _dense_inner(node) if _is_stored(node) else node, state, is_leaf=_is_stored)
    templates, structure = jax.tree.flatten(jax.eval_shape(tx.init, params), is_leaf=_is_stored)

    def convert_node(template: Any, value: Any) -> Any:
        if not _is_stored(template):
            return _cast_like(template, value)
        old = next(old_states, LowPrecisionState(jnp.zeros((), jnp.int32), ()))
        step = old.step
        key = jax.random.bits(jax.random.fold_in(jax.random.key(0), step), dtype=jnp.uint32)
        inner_templates, inner_structure = jax.tree.flatten(template.inner, is_leaf=is_packed)
        pairs = zip(inner_templates, inner_structure.flatten_up_to(value), strict=True)
        leaves = [
            _pack_like(struct, leaf, key) if is_packed(struct) else _cast_like(struct, leaf) for struct, leaf in pairs
        ]
        residuals = convert_residuals(params, old.rests, template.rests) if template.has_rests else ()
        return LowPrecisionState(jnp.asarray(step, jnp.int32), inner_structure.unflatten(leaves), residuals)

    try:
        return structure.unflatten(map(convert_node, templates, structure.flatten_up_to(dense)))
    except ValueError as error:
        raise _mismatch_error(structure, jax.tree.structure(dense)) from error


def _unpack(node: Any) -> Any:
    return node.dense() if is_packed(node) else node


def _is_stored(node: Any) -> bool:
    return isinstance(node, LowPrecisionState)


def _dense_inner(node: LowPrecisionState) -> Tree:
    return jax.tree.map(_unpack, node.inner, is_leaf=is_packed)


def _pack_like(template: PackedArray, leaf: Any, key: Any) -> PackedArray:
    if template.shape != getattr(leaf, "shape", None):
        raise _mismatch_error(template.shape, getattr(leaf, "shape", type(leaf).__name__))
    return PackedArray.stored(jnp.asarray(leaf, template.dtype), template.format, key, is_positive=template.is_positive)


def _cast_like(template: Any, leaf: Any) -> Any:
    if jnp.shape(leaf) != template.shape:
        raise _mismatch_error(template.shape, jnp.shape(leaf))
    return leaf if leaf.dtype == template.dtype else jnp.asarray(leaf, template.dtype)


def _mismatch_error(expected: Any, got: Any) -> StructureError:
    return StructureError(
        "the state belongs to another optimizer, or to other parameters",
        expected=expected,
        got=got,
        hint="pass a state of the same optimizer and parameters: converted only changes how a state is stored",
    )
