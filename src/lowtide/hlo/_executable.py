"""Arguments of a compiled executable: padded bytes, memory space, donation and aliasing.

This file reads only public interfaces of `jax.stages.Compiled`: `input_formats` (layout and sharding per leaf),
`args_info` (shape, dtype, donation) and the first line of `as_text()`, which lists the aliased parameters.

- `jit` drops a leaf that the program does not read (unless `keep_unused`). The format of such a leaf has no layout. The
  leaf is no parameter of the program and costs no bytes in XLA's figures.
- Parameters are numbered over the kept leaves, after any constants that JAX hoisted into arguments. TPU programs with
  thousands of arguments take one tuple parameter, whose entries are the leaves.
- XLA's text of a layout lists dimensions from minor to major, and then tiles: ``{0,1:T(8,128)(2,1)}`` of
  ``bf16[1000,5]`` pads 5 to 8 and 1000 to 1024. XLA chooses the tile sizes, so they are read and never assumed.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core import leaf_bytes, leaves_with_paths, on_host, path_str
from ..core._compat import kept_arguments
from ._graph import HOST_COLOR

_ALIAS_ENTRY = re.compile(r"\{([\d,\s]*)\}:\s*\((\d+),\s*\{([\d,\s]*)\}")
_BRACKETS = {"{": "}", "(": ")", "[": "]"}

ParameterIndex = tuple[int, tuple[int, ...]]
"""A parameter's number, and an index into the parameter if it is a tuple."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgumentLeaf:
    """One leaf of a compiled function's arguments."""

    path: str
    """The argument's number, name or keyword, then the tree path (``0/params/w``)."""
    argument: int | str
    """Keyword or name of the argument, or its position; a compiled program counts no static arguments."""
    num_bytes: int
    """Bytes of one device's shard, padded to whole tiles; 0 when the program dropped the leaf."""
    logical_bytes: int
    """Bytes of all elements of the whole leaf, without padding."""
    on_host: bool
    """Whether the program takes the leaf in host memory."""
    donated: bool
    """Whether the caller donates the leaf."""
    kept: bool
    """Whether the program reads the leaf."""
    num_replicas: int = 1
    """Number of devices that hold the whole leaf; 1 when it is sharded or there is one device."""


def argument_leaves(compiled: Any) -> list[ArgumentLeaf]:
    """Return the leaves of a `jax.stages.Compiled`'s arguments in flattening order, including dropped leaves."""
    infos = jax.tree_util.tree_leaves_with_path(compiled.args_info)
    leaves: list[ArgumentLeaf] = []
    for (path, info), fmt in zip(infos, jax.tree.leaves(compiled.input_formats), strict=True):
        is_read = fmt.layout is not None
        sharding, size = (fmt.sharding, _compiled_bytes(info, fmt)) if is_read else (None, 0)
        leaves.append(_make_leaf(path, info, sharding, size=size, is_hosted=on_host(sharding), is_read=is_read))
    return leaves


def _make_leaf(path: Any, info: Any, sharding: Any, *, size: int, is_hosted: bool, is_read: bool) -> ArgumentLeaf:
    return ArgumentLeaf(
        path=path_str(path[1:]),
        argument=argument_of(path),
        num_bytes=size,
        logical_bytes=leaf_bytes(info),
        on_host=is_hosted,
        donated=bool(info.donated),
        kept=is_read,
        num_replicas=len(sharding.device_set) if sharding is not None and sharding.is_fully_replicated else 1,
    )


def argument_of(path: Any) -> int | str:
    """Return the position or the keyword of the argument that contains a leaf, from the leaf's path."""
    return path[1].idx if hasattr(path[1], "idx") else path[1].key


def host_outputs(compiled: Any) -> dict[str, int]:
    """Map the tree paths of outputs in host memory to their bytes on one device, padding included."""
    if not any(on_host(sharding) for sharding in jax.tree.leaves(compiled.output_shardings)):
        return {}  # JAX has no output formats if tokens of ordered effects are among the outputs
    shapes = leaves_with_paths(compiled.out_info)
    formats = jax.tree.leaves(compiled.output_formats)
    return {
        path: _compiled_bytes(info, fmt)
        for (path, info), fmt in zip(shapes, formats, strict=True)
        if fmt.layout is not None and on_host(fmt.sharding)
    }


def lowered_leaves(lowered: Any, hlo: Any, compiled: Any = None) -> list[ArgumentLeaf]:
    """Return the leaves of a program's arguments in flattening order, from its dumped buffer assignment.

    JAX does not expose the layouts of programs that the compiler refused, nor of programs with ordered effects. This
    function serves these programs. Without `compiled`, `num_replicas` is 1.
    """
    infos = jax.tree_util.tree_leaves_with_path(lowered.args_info)
    shardings = [] if compiled is None else jax.tree.leaves(compiled.input_shardings, is_leaf=lambda leaf: leaf is None)
    if len(shardings) != len(infos):
        shardings = [None] * len(infos)
    parameters, allocations = parameter_arrays(hlo), _parameter_allocations(hlo)
    kept_indices = kept_arguments(lowered, len(infos))
    assert kept_indices is not None, "all versions in the table of core._compat list the kept arguments"
    offset = max(len(parameters) - len(kept_indices), 0)  # hoisted constants and tokens come before the arguments
    parameter_of = {
        index: parameter_index for index, (parameter_index, _) in zip(kept_indices, parameters[offset:], strict=False)
    }
    leaves: list[ArgumentLeaf] = []
    for index, (path, info) in enumerate(infos):
        allocation = allocations.get(parameter_of.get(index, (-1, ())))
        size, is_hosted = (0, False) if allocation is None else (allocation.size, allocation.color == HOST_COLOR)
        is_read = index in parameter_of
        leaves.append(_make_leaf(path, info, shardings[index], size=size, is_hosted=is_hosted, is_read=is_read))
    return leaves


def parameter_arrays(hlo: Any) -> list[tuple[ParameterIndex, str]]:
    """List index and name of each array in a program's parameters; arrays in a tuple parameter have empty names."""
    entry = next(c for c in hlo.module.computations if c.id == hlo.module.entry_computation_id)
    parameters = [i for i in entry.instructions if i.opcode == "parameter"]
    parameters.sort(key=lambda i: i.parameter_number)
    if len(parameters) == 1 and parameters[0].shape.tuple_shapes:
        return [((0, (index,)), "") for index in range(len(parameters[0].shape.tuple_shapes))]
    return [((i.parameter_number, ()), i.metadata.op_name) for i in parameters]


def _parameter_allocations(hlo: Any) -> dict[ParameterIndex, Any]:
    allocations = (a for a in hlo.assignment.allocations if a.is_entry_parameter)
    return {(a.parameter_number, tuple(a.parameter_shape_index)): a for a in allocations}


def named_leaves(hlo: Any) -> list[ArgumentLeaf]:
    """Reconstruct the argument leaves of a program from its dump alone, by the names that JAX gave its parameters.

    ``params['layers'][0].w`` becomes the path ``params/layers/0/w`` of the argument ``params``. A dump records neither
    donation nor logical sizes. So a leaf counts as donated when an output reuses its buffer, and its logical bytes
    include padding.
    """
    allocations = _parameter_allocations(hlo)
    leaves: list[ArgumentLeaf] = []
    for number, (parameter_index, name) in enumerate(parameter_arrays(hlo)):
        path = _path_of_name(name or f"argument {number}")
        allocation = allocations.get(parameter_index)
        size, is_hosted = (0, False) if allocation is None else (allocation.size, allocation.color == HOST_COLOR)
        leaves.append(
            ArgumentLeaf(
                path=path,
                argument=path.partition("/")[0],
                num_bytes=size,
                logical_bytes=size,
                on_host=is_hosted,
                donated=allocation is not None and allocation.is_parameter_aliased_with_output,
                kept=True,
            )
        )
    return leaves


def _path_of_name(name: str) -> str:
    """Rewrite ``params['a'][0].b`` as ``params/a/0/b``."""
    return re.sub(r"\[['\"]?(.*?)['\"]?\]|\.", lambda match: f"/{match[1] or ''}", name.replace("\\'", "'")).strip("/")


def aliased(compiled: Any, leaves: Sequence[ArgumentLeaf]) -> list[bool]:
    """Return for every leaf of `argument_leaves(compiled)` whether the executable writes an output into its buffer.

    XLA cannot print the text of some TPU programs with asynchronous operations. For such a program, all donated leaves
    get True if XLA's total of reused bytes is at least the bytes of these leaves, else False.
    """
    try:
        header = (compiled.as_text() or "").split("\n", 1)[0]
    except jax.errors.JaxRuntimeError:
        stats = compiled.memory_analysis()
        reused = stats.alias_size_in_bytes + stats.host_alias_size_in_bytes
        is_complete = reused >= sum(leaf.num_bytes for leaf in leaves if leaf.kept and leaf.donated)
        return [leaf.kept and leaf.donated and is_complete for leaf in leaves]
    shapes = _split_top_level(_bracketed_text(header, "entry_computation_layout={"))
    if len(shapes) == 1 and shapes[0].startswith("("):
        places = [(0, (index,)) for index in range(len(_split_top_level(shapes[0][1:-1])))]
    else:
        places = [(index, ()) for index in range(len(shapes))]
    return _reused(leaves, places, aliased_parameters(header))


def aliased_in(hlo: Any, leaves: Sequence[ArgumentLeaf]) -> list[bool]:
    """Return for every leaf whether a dumped program writes an output into its buffer."""
    entries = hlo.module.input_output_alias.entries
    parameters = {(entry.parameter_number, tuple(entry.parameter_shape_index)) for entry in entries}
    return _reused(leaves, [place for place, _ in parameter_arrays(hlo)], parameters)


def _reused(
    leaves: Sequence[ArgumentLeaf], places: Sequence[ParameterIndex], parameters: set[ParameterIndex]
) -> list[bool]:
    """Return for every leaf whether its parameter is in `parameters`; `places` lists all parameters in order."""
    # Hoisted constants and tokens of ordered effects come before the arguments.
    remaining = iter(places[max(len(places) - sum(leaf.kept for leaf in leaves), 0) :])
    return [leaf.kept and next(remaining, None) in parameters for leaf in leaves]


def aliased_parameters(header: str) -> set[ParameterIndex]:
    """Return the parameters that an HLO module header (the first line of an executable's text) aliases to an output.

    ``input_output_alias={ {0, 1}: (2, {}, may-alias), {}: (0, {5}) }`` gives ``{(2, ()), (0, (5,))}``.
    """
    body = _bracketed_text(header, "input_output_alias=")
    return {
        (int(parameter), tuple(int(part) for part in index.split(",") if part.strip()))
        for _, parameter, index in _ALIAS_ENTRY.findall(body)
    }


def padded_bytes(shape: Sequence[int], item_bits: int, layout: Any) -> int:
    """Return the bytes of an array in an XLA layout, including the padding to whole tiles.

    `shape` is the physical shape on one device, in logical dimension order. `item_bits` is the size of a stored
    element. `layout` is a `jax.experimental.layout.Layout`, whose `tiling` lists the outermost tile first.
    """
    dims = [shape[dim] for dim in layout.major_to_minor]
    tiling = layout.tiling or ()
    if any(size <= 0 for tile in tiling for size in tile):
        tiling = ()  # a negative tile size means "combine with the next dimension": no padding to compute
    for tile in tiling:
        dims = [1] * (len(tile) - len(dims)) + dims
        head, tail = dims[: -len(tile)], dims[-len(tile) :]
        dims = [*head, *(-(-dim // size) for dim, size in zip(tail, tile, strict=True)), *tile]
    return (math.prod(dims) * item_bits + 7) // 8


def _compiled_bytes(info: Any, fmt: Any) -> int:
    shape, dtype = fmt.sharding.shard_shape(tuple(info.shape)), info.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        # A typed random key is stored as its key data.
        physical = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        shape, dtype = physical.shape, physical.dtype
    return padded_bytes(shape, fmt.layout.sub_byte_element_size_in_bits or dtype.itemsize * 8, fmt.layout)


def _bracketed_text(text: str, key: str) -> str:
    """Return the text between the bracket that follows `key` and its closing bracket."""
    start = text.find(key) + len(key)
    if start < len(key) or text[start : start + 1] not in _BRACKETS:
        return ""
    depth = 0
    for end in range(start, len(text)):
        depth += (text[end] in _BRACKETS) - (text[end] in _BRACKETS.values())
        if depth == 0:
            return text[start + 1 : end]
    return ""


def _split_top_level(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char in _BRACKETS) - (char in _BRACKETS.values())
        if char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]
