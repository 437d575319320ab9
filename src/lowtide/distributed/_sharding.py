"""Sharding rules: how arrays are sharded over a mesh of named axes, by the path of a pytree leaf.

Every array has a `jax.sharding.NamedSharding`, and XLA inserts the collectives. Mesh axis ``data`` replicates the model
and shards the batch. ``fsdp`` shards the model and the batch; the weights of a block are gathered where they are used
(https://arxiv.org/abs/1910.02054, stage 3). ``tensor`` shards pairs of a column-parallel and a row-parallel projection,
and the activations between them, as in Megatron-LM (https://arxiv.org/abs/1909.08053). ``stage``, the axis of a
pipeline, shards the layers of a stack. ``expert`` shards the batch and, by rules of the user, the experts of a mixture
of experts, whose block exchanges the tokens. ``context`` shards the tokens of each row; `lowtide.ops.attention`
exchanges this sharding for a sharding of the heads.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import (
    BATCH_AXES,
    CONTEXT,
    ConfigError,
    DataError,
    SelectionError,
    StructureError,
    Tree,
    canonical_array,
    check_integer,
    is_array_like,
    is_key,
    leaves_with_paths,
    map_with_paths,
    put,
    refuse_objects,
)

STAGE = "stage"
"""Mesh axis of pipelines."""
# PyTorch stores a projection as ``weight`` [out, in], Flax and Keras as ``kernel`` [in, out].
_COLUMN = r"(?:.*/)?(?:[qkvz]_proj|qkvz?_proj|gate_proj|up_proj|gate_up_proj|fc1|c_fc|embed|embed_tokens|lm_head)"
_ROW = r"(?:.*/)?(?:o_proj|out_proj|down_proj|fc2|c_proj)"
_DEFAULT_TENSOR_DIMS = (
    (rf"{_COLUMN}/weight(?:/weight)?", -2),
    (rf"{_ROW}/weight(?:/weight)?", -1),
    (rf"{_COLUMN}/kernel", -1),
    (rf"{_ROW}/kernel", -2),
)


def make_mesh(
    *,
    stage: int | None = None,
    data: int = 1,
    fsdp: int | None = None,
    expert: int | None = None,
    context: int | None = None,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> jax.sharding.Mesh:
    """Make a mesh with the axes ``data``, ``fsdp``, ``tensor``, and optionally ``stage``, ``expert``, ``context``.

    Args:
        stage: ranks of a pipeline; by default the mesh has no such axis.
        data: number of copies of the model, each of which trains on a part of the batch.
        fsdp: parts of weights, optimizer state and batch; by default all remaining devices, or 1 if another size is -1.
        expert: parts of a batch, and of the experts if rules shard them; by default the mesh has no such axis.
        context: parts into which the tokens of each row are sharded; by default the mesh has no such axis.
        tensor: parts into which each projection is sharded; keep it within one host, whose links are fast.
        devices: devices of the mesh; by default all devices of all processes.

    Returns:
        The mesh. One of the sizes may be -1, which takes all remaining devices.

    Raises:
        ConfigError: for a size that is not an integer, and when the sizes do not multiply to the number of devices.

    Examples:
        >>> dict(make_mesh(tensor=1, devices=jax.devices()[:1]).shape)
        {'data': 1, 'fsdp': 1, 'tensor': 1}
    """
    devices = list(jax.devices() if devices is None else devices)
    default = 1 if -1 in (stage, data, expert, context, tensor) else -1
    axes = {STAGE: stage, "data": data, "fsdp": default if fsdp is None else fsdp, "expert": expert, CONTEXT: context}
    axes |= {"tensor": tensor}
    sizes = {name: size for name, size in axes.items() if size is not None}
    for name, size in sizes.items():
        check_integer(f"make_mesh: {name}", size, -1, hint="use 1 or more, or -1 for all remaining devices")
    free_axes = [name for name, size in sizes.items() if size == -1]
    product = math.prod(size for size in sizes.values() if size != -1)
    if len(free_axes) == 1 and product > 0 and len(devices) % product == 0:
        sizes[free_axes[0]] = len(devices) // product
    if any(size < 1 for size in sizes.values()) or math.prod(sizes.values()) != len(devices):
        axes_text = " × ".join(f"{name} {size}" for name, size in sizes.items())
        problem = f"the sizes of the mesh axes, {axes_text}, do not multiply to the number of devices, {len(devices)}"
        hint = "pass -1 for one axis to use all remaining devices, or devices=jax.devices()[:n] to use n devices"
        raise ConfigError(problem, hint=hint)
    axis_types = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=axis_types, devices=devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """Shardings of the leaves of a model and of its batches.

    The first of `rules` that matches the path of a leaf gives its partition spec. Without a match, ``stage`` shards the
    first dimension of leaves below ``layers/``. In leaves of at least `min_bytes`, ``tensor`` shards projections with
    known names. ``fsdp`` then shards the largest remaining dimension that its size divides. In leaves with three or
    more dimensions, this is never the first dimension. Optimizer state is sharded like its parameter.

    Raises:
        ConfigError: for a mesh with axes that are not automatic, an axis that the mesh does not have, ``context`` in
            `batch_axes`, an invalid expression or partition spec, and when no axis can shard batches.

    Examples:
        >>> rules = ShardingRules(mesh=make_mesh(devices=jax.devices()[:1]), rules={r".*/router": jax.P()})
        >>> rules.spec("layers/q_proj/weight", (4, 256, 128))
        P(None, 'tensor', 'fsdp')
    """

    mesh: jax.sharding.Mesh
    """Devices with named axes; `make_mesh` makes a mesh."""
    rules: Mapping[str, jax.P] = dataclasses.field(default_factory=dict[str, jax.P])
    """Map from a regular expression for whole paths to the partition spec of the leaves that it matches."""
    batch_axes: str | Sequence[str] = ()
    """Mesh axes that shard the leading axis of batches; by default ``expert``, ``data`` and ``fsdp``."""
    context_leaves: str = ".*"
    """Regular expression for whole paths of batch leaves in which ``context`` shards the second axis, the tokens.
    Leaves with one axis have no tokens."""
    min_bytes: int = 2**16
    """Smaller leaves that no rule matches are replicated, but layers are still sharded along ``stage``."""
    local_batches: bool = False
    """Whether the data of a process has only the rows of this process (`data_shard`). Otherwise each process loads
    whole batches and takes its rows from them."""
    timeout_seconds: int = 300
    """Time that processes wait for one another before an error lists the missing ones."""

    def __post_init__(self) -> None:
        axes = tuple(self.mesh.axis_names)
        if any(kind != jax.sharding.AxisType.Auto for kind in self.mesh.axis_types):
            problem = f"the mesh must have axes of type Auto, not explicit or manual axes: {self.mesh.axis_types}"
            raise ConfigError(problem, hint="make the mesh with lowtide.train.make_mesh")
        names = (self.batch_axes,) if isinstance(self.batch_axes, str) else tuple(self.batch_axes)
        batch_axes = names or tuple(name for name in BATCH_AXES if name in axes)
        object.__setattr__(self, "batch_axes", batch_axes)
        if CONTEXT in batch_axes:
            problem = f"batch_axes: {CONTEXT!r} shards the tokens of rows, not the rows"
            raise ConfigError(problem, hint="leave it out of batch_axes, or rename the axis")
        _check_expression(f"context_leaves {self.context_leaves!r}", self.context_leaves)
        settings = {name: "batch_axes" for name in batch_axes}
        for pattern, spec in self.rules.items():
            _check_rule(pattern, spec)
            settings |= dict.fromkeys(_axis_names(spec), f"the rule {pattern!r}")
        for name, setting in settings.items():
            if name not in axes:
                raise ConfigError(f"{setting}: the mesh has no axis {name!r}", hint=f"use one of {', '.join(axes)}")
        if not batch_axes and STAGE not in axes and CONTEXT not in axes:
            problem = f"the axes that shard batches are unknown: the mesh has the axes {', '.join(axes)}"
            hint = f'pass ShardingRules(mesh=mesh, batch_axes=({axes[0]!r},)), or name an axis "data" or "fsdp"'
            raise ConfigError(problem, hint=hint)

    # --- leaves ----------------------------------------------------------------------------------------------------

    def spec(self, path: str, shape: Sequence[int], itemsize: int = 4) -> jax.P:
        """Return the partition spec of a leaf.

        Args:
            path: path of the leaf.
            shape: shape of the leaf.
            itemsize: bytes of one number of the leaf.

        Raises:
            StructureError: when a rule shards a dimension that its axes do not divide.
        """
        rule_spec = self._rule_spec(path, shape)
        if rule_spec is not None:
            return rule_spec
        dims: list[str | None] = [None] * len(shape)
        if shape and path.startswith("layers/") and shape[0] % self.mesh.shape.get(STAGE, shape[0] + 1) == 0:
            dims[0] = STAGE
        if math.prod(shape) * itemsize < self.min_bytes:
            return jax.P(STAGE) if STAGE in dims else jax.P()
        if "tensor" in self.mesh.axis_names and len(shape) >= 2:
            for pattern, dim in _DEFAULT_TENSOR_DIMS:
                if re.fullmatch(pattern, path) and shape[dim] % self.mesh.shape["tensor"] == 0:
                    dims[dim] = "tensor"
        if "fsdp" in self.mesh.axis_names:
            size = self.mesh.shape["fsdp"]
            # A loop over layers slices the leading axis of a stack. If that axis were sharded, each slice would gather
            # the whole stack.
            first = 1 if len(shape) > 2 else 0
            fits = [dim for dim in range(first, len(shape)) if dims[dim] is None and shape[dim] % size == 0]
            if fits:
                dims[max(fits, key=lambda dim: (shape[dim], dim))] = "fsdp"
        while dims and dims[-1] is None:
            dims.pop()
        return jax.P(*dims)

    def _rule_spec(self, path: str, shape: Sequence[int]) -> jax.P | None:
        """Return the spec of the first rule that matches, or None."""
        for pattern, spec in self.rules.items():
            if not re.fullmatch(pattern, path):
                continue
            for dim, entry in enumerate(spec):
                size = math.prod(self.mesh.shape[name] for name in _axis_names((entry,)))
                if dim >= len(shape) or shape[dim] % size:
                    expected = f"a multiple of {size} at axis {dim}" if size > 1 else f"at least {dim + 1} axes"
                    problem = f"{path}: the rule {pattern!r}, {spec}, cannot shard the shape {list(shape)}"
                    raise StructureError(problem, expected=expected, hint="change the rule, or the sizes of the mesh")
            return spec
        return None

    def of(self, path: str, leaf: Any) -> jax.sharding.NamedSharding:
        """Return the sharding for an array or shape; a leaf on the mesh that no rule matches keeps its sharding."""
        if self._is_on_mesh(leaf) and self._rule_spec(path, leaf.shape) is None:
            return leaf.sharding
        itemsize = 4 if is_key(leaf) else leaf.dtype.itemsize
        sharding = jax.sharding.NamedSharding(self.mesh, self.spec(path, leaf.shape, itemsize))
        memory_kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
        return sharding if memory_kind is None else sharding.with_memory_kind(memory_kind)

    def place(self, tree: Tree) -> Tree:
        """Put the arrays of a tree on their devices; other leaves are returned unchanged.

        Args:
            tree: arrays that every process holds as a whole, or that are on the mesh already.

        Raises:
            SelectionError: when a rule matches no path.
            StructureError: when a rule shards a dimension that its axes do not divide.

        Memory:
            Each device holds its shards. While a leaf is moved, its source also exists.
        """
        paths = [path for path, leaf in leaves_with_paths(tree) if is_array_like(leaf)]
        for pattern in self.rules:
            if not any(re.fullmatch(pattern, path) for path in paths):
                got, hint = f"paths such as {', '.join(paths[:3])}", "begin it with .* to match any prefix"
                raise SelectionError(f"the sharding rule {pattern!r} matches no leaf", got=got, hint=hint)
        placed: dict[int, Any] = {}  # an array at two paths stays one array, with the sharding of the first path

        def place_leaf(path: str, leaf: Any) -> Any:
            if not is_array_like(leaf) or not hasattr(leaf, "dtype"):
                return leaf  # `settle` places Python numbers, together with counters
            if id(leaf) not in placed:
                placed[id(leaf)] = put(leaf, self.of(path, leaf))
            return placed[id(leaf)]

        return map_with_paths(place_leaf, tree)

    def settle(self, tree: Tree) -> Tree:
        """Replicate leaves that are not on the mesh yet, such as counters that belong to no parameter."""
        return jax.tree.map(lambda leaf: leaf if self._is_on_mesh(leaf) else put(leaf, self.replicated()), tree)

    def _is_on_mesh(self, leaf: Any) -> bool:
        sharding = getattr(leaf, "sharding", None)
        return isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh == self.mesh

    def replicated(self) -> jax.sharding.NamedSharding:
        """Return the sharding of arrays that every device holds as a whole."""
        return jax.sharding.NamedSharding(self.mesh, jax.P())

    def gather(self, tree: Tree) -> Tree:
        """Replicate arrays on every device, so that every process can read them.

        Memory:
            The whole tree on every device.
        """
        return self._gather(tree)

    @functools.cached_property
    def _gather(self) -> Any:
        return jax.jit(lambda leaves: leaves, out_shardings=self.replicated())

    # --- batches ---------------------------------------------------------------------------------------------------

    @property
    def num_batch_shards(self) -> int:
        """Number of parts into which a batch is sharded."""
        return math.prod(self.mesh.shape[name] for name in self.batch_axes)

    @property
    def num_context_shards(self) -> int:
        """Number of parts into which the tokens of a row are sharded."""
        return self.mesh.shape.get(CONTEXT, 1)

    @functools.cached_property
    def data_shard(self) -> tuple[int, int]:
        """Index of this process's part of the data, and the number of parts: the arguments of a data loader.

        Processes that share their rows (along ``tensor``) have the same part.

        Raises:
            ConfigError: when the rows of processes overlap in any other way.
        """
        count = self.num_batch_shards
        rows_by_process: dict[int, set[int]] = {}
        # Distinct sets of rows overlap exactly when their sizes add up to more than the number of shards.
        row_sharding = self._named_sharding(tuple(self.batch_axes))
        for device, index in row_sharding.devices_indices_map((count,)).items():
            rows_by_process.setdefault(device.process_index, set()).update(range(count)[index[0]])
        parts = sorted({tuple(sorted(rows)) for rows in rows_by_process.values()})
        if sum(map(len, parts)) != count:
            problem = f"processes share some, but not all, of their rows: the mesh is {dict(self.mesh.shape)}"
            raise ConfigError(problem, hint="list the devices of a process one after the other, or use whole batches")
        return parts.index(tuple(sorted(rows_by_process[jax.process_index()]))), len(parts)

    def batch(self, batch: Tree, num_microbatches: int | None = 1) -> Tree:
        """Put a batch on the mesh, sharded along its leading axis and, with an axis ``context``, along its tokens.

        Args:
            batch: arrays in this process's memory: whole ones or, with `local_batches`, the rows of this process.
            num_microbatches: number of microbatches, each of which is sharded evenly. None, for use outside of
                training: rows that cannot be sharded evenly are replicated.

        Raises:
            ConfigError: with `local_batches`, when `data_shard` raises it.
            DataError: when rows or tokens cannot be sharded evenly, or a leaf does not hold numbers.
            SelectionError: when ``context`` would shard no leaf.
        """
        self._check_tokens(batch)

        def put_leaf(path: str, leaf: Any) -> Any:
            shape, sharding = self._global_shape(path, leaf, num_microbatches)
            if not isinstance(leaf, jax.Array) and jax.default_backend() == "cpu":
                leaf = np.array(leaf)  # jax shares the buffer on a CPU, and a loader may refill it during the step
            if self._is_local(leaf) and jax.process_count() > 1 and shape:
                return jax.make_array_from_process_local_data(sharding, canonical_array(leaf), shape)
            return put(leaf, sharding)

        return map_with_paths(put_leaf, batch)

    def batch_shapes(self, batch: Tree, num_microbatches: int | None = 1) -> Tree:
        """Return the result of `batch` as `jax.ShapeDtypeStruct`s; nothing is moved.

        Args:
            batch: as in `batch`, or structs of whole arrays.
            num_microbatches: as in `batch`.

        Raises:
            DataError: when rows or tokens cannot be sharded evenly. Other errors are those of `batch`.
        """
        self._check_tokens(batch)

        def leaf_struct(path: str, leaf: Any) -> Any:
            shape, sharding = self._global_shape(path, leaf, num_microbatches)
            dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
            if not jnp.issubdtype(dtype, jax.dtypes.extended):  # the dtype of a random key is already canonical
                dtype = jax.dtypes.canonicalize_dtype(dtype)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        return map_with_paths(leaf_struct, batch)

    def _is_local(self, leaf: Any) -> bool:
        """Return whether a leaf of a batch holds only the rows of this process."""
        return self.local_batches and not is_global(leaf)

    def _global_shape(
        self, path: str, leaf: Any, num_microbatches: int | None
    ) -> tuple[tuple[int, ...], jax.sharding.NamedSharding]:
        """Return the shape and the sharding of a leaf of the whole batch."""
        refuse_objects({path: leaf})
        shape = tuple(np.shape(leaf))
        if not shape:
            return shape, self.replicated()
        token_axes = self._token_axes(path, shape)
        rows = shape[0] * (self.data_shard[1] if self._is_local(leaf) else 1)
        divisor = self.num_batch_shards * (num_microbatches or 1)
        if rows % divisor == 0:
            return (rows, *shape[1:]), self._named_sharding(tuple(self.batch_axes), *token_axes)
        if num_microbatches is None and not (self._is_local(leaf) and jax.process_count() > 1):
            return shape, self._named_sharding(None, *token_axes)
        parts = [f"{name} {self.mesh.shape[name]}" for name in self.batch_axes if self.mesh.shape[name] > 1]
        parts += [f"{num_microbatches} microbatches"] if (num_microbatches or 1) > 1 else []
        problem = f"batch leaf {path or '(root)'}: its rows cannot be sharded evenly over the devices"
        expected = f"a multiple of {divisor} ({' × '.join(parts)})"
        hint = "choose another batch size, or drop the remainder"
        raise DataError(problem, expected=expected, got=f"{rows} rows", hint=hint)

    def constrain(self, rows: Tree) -> Tree:
        """Shard a microbatch or activations like batches, along their first axis; call it inside a jitted function.

        ``context`` shards the second axis of leaves with three or more axes, because activations have tokens there.
        Without the constraint, XLA chooses the sharding. With weights sharded along ``fsdp``, every device may then
        compute all rows. `Trainer` adds the constraint between layers of a `lowtide.LayerStack`; other models should
        call this method between their layers.

        Args:
            rows: arrays with the batch as first axis; arrays that cannot be sharded are returned unchanged.
        """
        num_parts, unconstrained = self.num_context_shards, jax.P.UNCONSTRAINED

        def constrain_leaf(leaf: Any) -> Any:
            shape = jnp.shape(leaf)
            is_rows, is_tokens = shape and not shape[0] % self.num_batch_shards, False
            if num_parts > 1 and len(shape) > 1:
                is_tokens = len(shape) > 2 and not shape[1] % num_parts
            if not is_rows and not is_tokens:
                return leaf
            first = tuple(self.batch_axes) if is_rows else unconstrained
            # The second of two axes may be tokens, or, for example, one number of each expert: XLA decides there.
            second = [] if num_parts == 1 or len(shape) < 2 else [CONTEXT if is_tokens else unconstrained]
            return jax.lax.with_sharding_constraint(leaf, self._named_sharding(first, *second))

        return jax.tree.map(constrain_leaf, rows)

    def _named_sharding(self, *spec: Any) -> jax.sharding.NamedSharding:
        return jax.sharding.NamedSharding(self.mesh, jax.P(*spec))

    def _check_tokens(self, batch: Tree) -> None:
        leaves = {path: np.shape(leaf) for path, leaf in leaves_with_paths(batch)}
        if self.num_context_shards > 1 and not any(self._token_axes(*pair) for pair in leaves.items()):
            raise SelectionError(
                f"context_leaves {self.context_leaves!r} selects no leaf of the batch with tokens in its second axis",
                got=", ".join(f"{path} {list(shape)}" for path, shape in leaves.items()),
                hint="leave it out if all leaves have tokens there, or make a mesh without context",
            )

    def _token_axes(self, path: str, shape: tuple[int, ...]) -> list[str]:
        """Return ``["context"]`` if this mesh axis shards the second axis of a batch's leaf, otherwise []."""
        size = self.num_context_shards
        if size == 1 or len(shape) < 2 or not re.fullmatch(self.context_leaves, path):
            return []
        if shape[1] % size:
            problem = f"batch leaf {path or '(root)'}: its tokens cannot be sharded evenly over the devices"
            expected, got = f"a multiple of {size} ({CONTEXT} {size})", f"{shape[1]} tokens per row"
            hint = 'pad the rows, or exclude a leaf that has no tokens: ShardingRules(context_leaves="tokens|labels")'
            raise DataError(problem, expected=expected, got=got, hint=hint)
        return [CONTEXT]


def abstract(sharding: jax.sharding.NamedSharding) -> jax.sharding.NamedSharding:
    """Return the sharding over an abstract mesh: a program that uses it runs on the devices of its arguments."""
    mesh: Any = sharding.mesh.abstract_mesh
    return jax.sharding.NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def is_global(leaf: Any) -> bool:
    """Return whether a leaf has the rows of all processes: a shape, or an array with shards in other processes."""
    return isinstance(leaf, jax.ShapeDtypeStruct) or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable)


def _check_expression(description: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        hint = 'begin it with ".*", not with "*"'
        raise ConfigError(f"{description} is not a regular expression", got=error, hint=hint) from error


def _check_rule(pattern: str, spec: Any) -> None:
    _check_expression(f"the sharding rule {pattern!r}", pattern)
    entries = tuple(spec) if isinstance(spec, jax.P) else (0,)
    is_valid = all(entry is None or isinstance(entry, str | tuple) for entry in entries)
    if not is_valid or len(set(_axis_names(entries))) != len(_axis_names(entries)):
        expected = 'jax.P of axis names, tuples of them and None, each name once, such as jax.P(None, "fsdp")'
        problem = f"the sharding rule {pattern!r} has an invalid partition spec, {spec!r}"
        raise ConfigError(problem, expected=expected, hint="use jax.P() to replicate the leaf on every device")


def _axis_names(spec: Any) -> list[str]:
    return [name for entry in spec for name in ((entry,) if isinstance(entry, str) else entry or ())]
