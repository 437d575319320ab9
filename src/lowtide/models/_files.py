"""Load and save models in Hugging Face directories.

A directory has `config.json` and weights in `model.safetensors`, or in shards that `model.safetensors.index.json`
lists. All names and shapes in the headers are checked against the config before any weight is read. So a wrong
directory fails at once, with the name of the tensor. `_safetensors` reads and writes weights in pieces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core import (
    PIECE_BYTES,
    ConfigError,
    ModelFileError,
    OutputError,
    Selector,
    StructureError,
    Tree,
    check_choice,
    check_integer,
    format_bytes,
    gguf_file,
    input_file,
    is_staged,
    leaves_with_paths,
    parse_json,
    path_str,
    read_input,
    refuse_consumed,
    select,
    shortened,
    tree_bytes,
    validate,
)
from ..quant import Format, QuantizedWeight, abstract, build, format_named, matrices, placed
from ..quant import quantize as quantize_leaves
from ._config import DecoderConfig
from ._config_file import config_from_hf, config_to_hf, quantization_from_hf
from ._decoder import Decoder, init
from ._quantized import Packed, Scheme, Stored, group_tensors
from ._safetensors import (
    CONFIG,
    DTYPES,
    INDEX,
    SINGLE,
    ExpertSource,
    Source,
    Tensor,
    open_tensors,
    pieces,
    read_leaf,
    write_model,
)
from ._shapes import parameter_shapes, split_block, with_settings, without_settings
from .families import family_of
from .families._family import PREFIXES

_MOST_CONFIG_BYTES, _MOST_INDEX_BYTES = 16 * 1024**2, 256 * 1024**2
_HEAD = "lm_head.weight"
_COPY_HINT = "copy the file from the model's source again"
_OTHER_MODEL_HINT = "check that config.json and the weights are of one model"
_LACKING_HINT = f"{_OTHER_MODEL_HINT}, and that no shard is missing"


def load(
    directory: str | Path,
    *,
    dtype: Any = "auto",
    compute_dtype: Any = "float32",
    host: Selector | None = None,
    sharding: Callable[[str, Any], jax.sharding.Sharding] | None = None,
    quantize: str | Mapping[str, str] | None = None,
) -> Decoder:
    """Load a decoder from a Hugging Face directory or a GGUF file.

    Weights that other software quantised keep the file's exact codes and scales, if one `lowtide.QuantizedWeight` can
    hold the weights of all layers. Otherwise they become an array, with a warning. Weights of a GGUF file are
    dequantised while they are read.

    Args:
        directory: the folder with `config.json` and safetensors weights, or a GGUF file (see `gguf_file`).
        dtype: dtype of the parameters. ``"auto"`` keeps the stored dtype, and for quantised weights their dtype before
            quantisation. If the file does not record that dtype, the weights get the stored dtype of the embedding, or
            bfloat16 if the embedding is also quantised.
        compute_dtype: dtype of activations and products.
        host: leaves to keep in the host memory of their devices, from which `lowtide.offload` streams them. Globs on
            paths such as ``"layers/**"``, or a predicate ``(path, shape) -> bool``. The model may be larger than device
            memory: these leaves take none, except for one matrix at a time while `quantize` quantises it.
        sharding: function from a leaf's path and shape (`jax.ShapeDtypeStruct`) to its sharding, such as
            `lowtide.train.ShardingRules.of`. Each process reads the parts that its devices hold.
        quantize: a format of `lowtide.quantize` for the projections of all layers, such as ``"nf4"``. Or a dict from
            globs to formats, whose first match applies: ``{"layers/**/*_proj": "nf4", "outer/**": "int8"}`` also stores
            embedding and head in 8 bits. Weights are quantised while they are read, and quantised weights are frozen.

    Returns:
        The decoder, placed by `sharding` or on JAX's default device, except for leaves that `host` selects.

    Raises:
        ModelFileError: when a file is missing, truncated or malformed, the architecture is unknown, or weights and
            configuration disagree; the message names the file and the tensor.
        ConfigError: for a dtype that is not floating-point, an unknown format, weights to quantise that are quantised
            already, and a GGUF file without the library `gguf`.
        SelectionError: when `host` or a glob of `quantize` selects nothing.
        StructureError: when a glob of `quantize` selects no matrix, or a weight to quantise is not finite.

    Warns:
        UserWarning: for quantised weights that become arrays, and for ignored dropout, image modules and input scales.

    Memory:
        The parameters, and a few pieces of 64 MiB on the host. For leaves that `host` selects, also the bytes that one
        device holds of the largest leaf. Quantised weights are made one matrix at a time on the default device,
        even if `sharding` shards them. A matrix needs a few float32 copies there, in addition to the codes.
    """
    _check_dtypes(dtype, compute_dtype)
    directory = Path(directory)
    config, scheme = _read_config(directory)
    with _open_plans(directory, config, scheme, dtype) as (plans, treedef, notes):
        for note in notes:
            warnings.warn(f"{directory}: {note}", stacklevel=2)
        likes = [jax.ShapeDtypeStruct(leaf_plan.like.shape, leaf_plan.like.dtype) for leaf_plan in plans]
        # Selection by path: a weight that is already quantised counts as one leaf here.
        shapes = treedef.unflatten(likes)
        hosted = [False] * len(plans) if host is None else select(shapes, host)
        formats = _formats(
            shapes, dict.fromkeys(config.projections, quantize) if isinstance(quantize, str) else quantize
        )
        for leaf_plan in plans:
            # Weights that the software left unquantised may be quantised.
            if leaf_plan.path in formats and any(isinstance(source, Packed) for source in leaf_plan.sources):
                assert scheme is not None
                problem = f"{directory}: {leaf_plan.path} is already quantised, by {scheme.method}"
                raise ConfigError(problem, hint="leave quantize out, or load the unquantised checkpoint")
        leaves: list[Any] = []
        for leaf_plan, like, is_hosted in zip(plans, likes, hosted, strict=True):
            place = None if sharding is None else sharding(leaf_plan.path, like)
            if is_hosted:  # a place of None is JAX's default device
                place = (jnp.zeros(()).sharding if place is None else place).with_memory_kind("pinned_host")
            if form := formats.get(leaf_plan.path):
                leaves.append(_read_quantized(leaf_plan, like, form, place))
            else:
                leaves.append(leaf_plan.read(place))
    params = treedef.unflatten(leaves)
    return Decoder(params["outer"], with_settings(params["layers"], config), config, jnp.dtype(compute_dtype).name)


def _formats(shapes: Tree, quantize: Mapping[str, str] | None) -> dict[str, Format]:
    """Return the format of each weight to quantise, by path; the first glob that matches applies."""
    formats: dict[str, Format] = {}
    for glob, name in (quantize or {}).items():
        form = format_named(name)
        formats = dict.fromkeys(matrices(shapes, glob), form) | formats
    return formats


def load_shapes(directory: str | Path, *, dtype: Any = "auto", compute_dtype: Any = "float32") -> Decoder:
    """Return the result of `load` with `jax.ShapeDtypeStruct`s as leaves.

    Args:
        directory: as in `load`. If it has no weights, shapes follow from `config.json`. The projections of the layers
            then have the quantised format that `config.json` names, if Lowtide can keep that format.
        dtype: as in `load`; ``"auto"`` without weights is bfloat16.
        compute_dtype: as in `load`.

    Returns:
        The decoder's shapes, with `QuantizedWeight` nodes of shapes for quantised weights.

    Raises:
        ModelFileError: as in `load`, for errors in `config.json` and headers.
        ConfigError: for a dtype that is not floating-point; for a GGUF file without the library `gguf`.

    Memory:
        Headers of files. If the head is tied but stored, it is compared with the embedding in pieces.
    """
    _check_dtypes(dtype, compute_dtype)
    directory = Path(directory)
    config, scheme = _read_config(directory)
    if gguf_file(directory) is None and not any(os.path.lexists(directory / name) for name in (SINGLE, INDEX)):
        options = {"dtype": "bfloat16" if dtype == "auto" else dtype, "compute_dtype": compute_dtype}
        shapes = jax.eval_shape(lambda: init(config, key=jax.random.key(0), **options))
        if scheme is None or scheme.form is None:
            return shapes
        for glob in config.projections:
            shapes = quantize_leaves(shapes, glob, scheme.form.name, block=scheme.form.block)
        return shapes
    with _open_plans(directory, config, scheme, dtype) as (plans, treedef, _):
        params = treedef.unflatten([leaf_plan.like for leaf_plan in plans])
    layers = jax.eval_shape(lambda layers: with_settings(layers, config), params["layers"])
    return Decoder(params["outer"], layers, config, jnp.dtype(compute_dtype).name)


class StoredWeight(NamedTuple):
    """A weight in the files of a directory."""

    format: str
    """Dtype in the files, such as ``"BF16"``, or the format of a quantised weight, such as ``"NF4"`` or ``"FP8"``."""
    shape: tuple[int, ...]
    """Shape of the weight."""
    num_bytes: int
    """Bytes in the files, including scales."""


def stored_weights(directory: str | Path) -> dict[str, StoredWeight]:
    """Return the stored format, shape and size of each weight of a directory, by Hugging Face name.

    Args:
        directory: the folder with `config.json` and safetensors weights, or a GGUF file.

    Raises:
        ModelFileError: when a file is missing or damaged, or scales or codes do not fit their quantised weight.
        ConfigError: for a GGUF file without the library `gguf`.

    Memory:
        Headers of files; no weight is read.
    """
    directory = Path(directory)
    config, scheme = _read_config(directory)
    with _open_weights(directory, config, scheme, []) as tensors:
        return {name: StoredWeight(weight.dtype, weight.shape, weight.num_bytes) for name, weight in tensors.items()}


def quantization_of(directory: str | Path) -> str | None:
    """Return the quantisation method of a directory's weights, such as ``bitsandbytes`` or ``fp8``, or None.

    Args:
        directory: the folder with `config.json`. A GGUF file gives None, because its weights become arrays.

    Raises:
        ModelFileError, ConfigError: as in `load_config`.
    """
    scheme = _read_config(Path(directory))[1]
    return None if scheme is None else scheme.method


@contextlib.contextmanager
def _open_weights(
    directory: Path, config: DecoderConfig, scheme: Scheme | None, notes: list[str]
) -> Generator[Mapping[str, Stored], None, None]:
    """Yield all weights by Hugging Face name, while the files are open; append messages for the user to `notes`."""
    if (file := gguf_file(directory)) is not None:
        from .gguf import map_tensors  # imported here to keep `import lowtide.models` fast

        experts = 1 if config.experts is None else config.experts.num_experts
        heads = {"q": config.num_heads, "k": config.num_kv_heads}
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(parameter_shapes(config))]
        # Names are generated lazily, because a damaged GGUF file may ask for more names than it has tensors.
        names = (name for path in paths for _, name in _iter_names(path, config))
        yield map_tensors(file, layers=config.num_layers, experts=experts, heads=heads, names=names)
        return
    with open_tensors(_weight_files(directory)) as sources:
        # transformers 4 prefixes "language_model." to the names of a multimodal model's text model, and transformers 5
        # puts it after "model.".
        is_nested = family_of(config).text_of is not None
        weights = {
            re.sub(r"^(model\.)?language_model\.", r"\1", name) if is_nested else name: source
            for name, source in sources.items()
            if not _is_skipped(name, config)
        }
        weights = _split_experts(weights, config)
        embedding = _embedding(config)
        if embedding not in weights and embedding.removeprefix(PREFIXES[0]) in weights:
            # Embedding models are saved without their head, and so without the prefix.
            weights = {PREFIXES[0] + name: source for name, source in weights.items()}
        # A file may store the tied tensor under the head's name.
        if config.tie_embeddings and embedding not in weights and _HEAD in weights:
            weights = {embedding if name == _HEAD else name: source for name, source in weights.items()}
        yield weights if scheme is None else group_tensors(weights, scheme, notes)


@contextlib.contextmanager
def _open_plans(
    directory: Path, config: DecoderConfig, scheme: Scheme | None, dtype: Any
) -> Generator[tuple[list[_LeafPlan], Any, list[str]], None, None]:
    """Check all names and shapes, then yield the plan for reading each leaf, while the files are open."""
    notes: list[str] = []
    with _open_weights(directory, config, scheme, notes) as tensors:
        _check_tensors(tensors, config, directory)
        _check_tied_head(tensors, config)
        leaves, treedef = jax.tree_util.tree_flatten_with_path(parameter_shapes(config))
        default_dtype = DTYPES.get(tensors[_embedding(config)].dtype, "bfloat16")
        leaf_dtype = None if dtype == "auto" else jnp.dtype(dtype)
        plans: list[_LeafPlan] = []
        for path, leaf in leaves:
            sources = [tensors[name] for _, name in _iter_names(path, config)]
            plans.append(_plan_leaf(path_str(path), sources, leaf.shape, leaf_dtype, default_dtype))
        yield plans, treedef, [*notes, *_dequantization_notes(plans)]


def _is_skipped(name: str, config: DecoderConfig) -> bool:
    """Return whether a tensor is not part of the decoder: it is for images, or predicts a later token."""
    family = family_of(config)
    layer = re.match(r"model\.layers\.(\d+)\.", name) if family.skips_extra_layers else None
    is_extra = layer is not None and int(layer[1]) >= config.num_layers
    return is_extra or name.removeprefix("model.").startswith(family.ignored)


def _split_experts(weights: Mapping[str, Source], config: DecoderConfig) -> Mapping[str, Source]:
    """Replace tensors of all experts of a layer by parts, if the family's names are those of single experts.

    Folders of multimodal models store such tensors, and folders of the text models a tensor for each expert.
    """
    family, experts = family_of(config), config.experts
    split = dict(weights)
    for template, paths in family.expert_parameters.items() if experts is not None else ():
        modules = [family.names.get(path, "") for path in paths]
        for layer in range(config.num_layers):
            name = template.format(layer=layer)
            if "{expert}" not in modules[0] or name not in split or len(split[name].shape) != 3:
                continue
            source = split.pop(name)
            count, rows = source.shape[0], source.shape[1] // len(modules)
            for expert, (part, module) in itertools.product(range(count), enumerate(modules)):
                expert_name = f"{module.format(layer=layer, expert=expert)}.weight"
                split[expert_name] = ExpertSource(source, expert, part * rows, (part + 1) * rows)
    return split


def _read_quantized(
    leaf_plan: _LeafPlan, like: jax.ShapeDtypeStruct, form: Format, place: jax.sharding.Sharding | None
) -> QuantizedWeight:
    """Read and quantise one leaf, a matrix at a time."""
    stack_shape = like.shape[:-2]

    def matrix(position: tuple[int, ...]) -> jax.Array:
        index = int(np.ravel_multi_index(position, stack_shape)) if position else 0
        return read_leaf([leaf_plan.sources[index]], like.shape[-2:], like.dtype, None)

    return build(leaf_plan.path, like, form, matrix, _places(abstract(like.shape, form, like.dtype), place))


def _places(node: QuantizedWeight, place: jax.sharding.Sharding | None) -> Any:
    """Return the shardings of a quantised weight's leaves, or None for JAX's default device."""
    if place is None or isinstance(place, jax.sharding.NamedSharding):
        return placed(node, place)
    return jax.tree.map(lambda _: place, node)


def load_config(directory: str | Path) -> DecoderConfig:
    """Load only the configuration of a model directory.

    Args:
        directory: the folder with `config.json`, or a GGUF file.

    Raises:
        ModelFileError: when `config.json` is missing or malformed, or its decoder or quantisation is not supported.
        ConfigError: for a GGUF file without the library `gguf`.
    """
    return _read_config(Path(directory))[0]


def _read_config(directory: Path) -> tuple[DecoderConfig, Scheme | None]:
    if (file := gguf_file(directory)) is not None:
        from .gguf import config_of, read_header

        return config_from_hf(config_of(read_header(file)), str(file)), None
    expected = "a Hugging Face model directory with config.json and model.safetensors"
    hint = "give a local folder that holds the model; nothing is downloaded"
    path = input_file(directory, CONFIG, expected=expected, hint=hint)
    raw = parse_json(read_input(path, most_bytes=_MOST_CONFIG_BYTES), str(path))
    return config_from_hf(raw, str(path)), quantization_from_hf(raw, str(path))


def base_path() -> Path:
    """Return the folder of the model included in Lowtide: a small Llama, pretrained on Python's standard library."""
    return Path(__file__).parent / "base"


def save(
    model: Decoder,
    directory: str | Path,
    *,
    tokenizer: str | Path | None = None,
    max_shard_bytes: int = 5 * 1024**3,
    dtype: str | None = None,
) -> None:
    """Save a model as a Hugging Face directory that `transformers` loads.

    An older model in the folder stays until the new one is complete on the disk. If the process is killed, the folder
    holds the old or the new model, with one exception. If `config.json` or the tokenizer changes, a process that is
    killed during the last few renames leaves no model. Older shards are deleted.

    Args:
        model: a decoder of plain arrays (merge adapters first).
        directory: the folder; created when missing.
        tokenizer: a `tokenizer.json` to copy into the folder.
        max_shard_bytes: most bytes per file; a larger model is sharded with an index.
        dtype: dtype that weights are rounded to while they are written; None: unchanged.

    Raises:
        ModelFileError: when the parameters do not match ``model.config``, as with adapters.
        ConfigError: when a `config.json` of the model's family cannot express ``model.config``; for an unknown `dtype`,
            and a `max_shard_bytes` below 1.
        StructureError: for the result of `unstack`.
        StateError: when a trainer, or another function that donates its arguments, has consumed the parameters.
        OutputError: when the folder is not writable or has too little space, or the tokenizer cannot be read.

    Memory:
        On the host a few pieces of 64 MiB, regardless of the sizes of tensors and files.
    """
    check_integer("max_shard_bytes", max_shard_bytes, hint="leave it out for files of at most 5 GiB")
    if dtype is not None:
        check_choice("dtype", dtype, [*DTYPES.values()])
    if isinstance(model.layers, tuple):
        hint = "save the stacked decoder; only generate accepts the result of lowtide.models.unstack"
        raise StructureError("the decoder's layers are not stacked", hint=hint)
    directory = Path(directory)
    expected = {path: leaf.shape for path, leaf in leaves_with_paths(parameter_shapes(model.config))}
    params = {"outer": model.outer, "layers": without_settings(model.layers)}
    refuse_consumed(params)
    got = {path: tuple(leaf.shape) for path, leaf in leaves_with_paths(params)}
    if got != expected:
        path, shape = sorted(set(got.items()) ^ set(expected.items()))[0]
        problem = f"{path} of shape {shape}: the parameters do not match the model's configuration"
        hint = "dequantise weights with lt.dequantize; merge adapters with lt.lora.merge, or use lt.lora.save"
        raise ModelFileError(problem, hint=hint)
    tensors = [
        Tensor(name, leaf, index, dtype)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        for index, name in _iter_names(path, model.config)
    ]
    stored = dtype or jnp.dtype(model.outer["embed"]["weight"].dtype).name
    files = {CONFIG: (json.dumps(config_to_hf(model.config, stored), indent=2) + "\n").encode()}
    if tokenizer is not None:
        try:
            files["tokenizer.json"] = Path(tokenizer).read_bytes()
        except OSError as error:
            raise OutputError(f"the tokenizer cannot be copied: {error}") from error
    write_model(directory, tensors, files, max_shard_bytes=max_shard_bytes)


_COPIES = 5
"""Most copies of a piece in host memory: the copy by the safetensors library, the array, the result of the cast, and
the copy that is sent. The fifth copy stands for what JAX allocates on its first run. In pieces of quantised weights, a
4-bit code takes a byte. `tests/models/test_load_memory.py` measures these bounds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostBytes:
    """Most bytes of host memory that a process needs, without the bytes of the model's own leaves on the host."""

    loading: int
    """Bytes while `lowtide.models.load` reads the model."""
    saving: int
    """Bytes while `lowtide.models.save` writes the model."""


def host_bytes(model: Tree) -> HostBytes:
    """Predict the host memory of this process for loading and saving a model, in addition to the model.

    File pages that the operating system caches are not counted, because it reclaims them on demand.

    Args:
        model: the model or its shapes: arrays or `jax.ShapeDtypeStruct`s. A leaf without a sharding is assumed
            to be whole on one device.

    Examples:
        >>> host_bytes({"w": jax.ShapeDtypeStruct((80, 4096, 4096), jnp.bfloat16)}).loading // 2**20
        320
    """
    largest = staged = 0
    for leaf in jax.tree.leaves(model):
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        size = math.prod(shape) * jnp.dtype(leaf.dtype).itemsize
        largest = max(largest, size)
        if sharding is not None and is_staged(sharding):
            staged = max(staged, size)
    pieces = _COPIES * min(PIECE_BYTES, largest)
    return HostBytes(loading=staged + pieces, saving=pieces)


def _iter_names(path: Any, config: DecoderConfig) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield pairs of a stack index and a Hugging Face name, one for each tensor of a leaf.

    The index is ``()``, ``(layer,)`` or ``(layer, expert)``.
    """
    names = family_of(config).names
    leaf_path, stride, offset = split_block("/".join(entry.key for entry in path), config)
    module, _, leaf = leaf_path.rpartition("/")
    template = names[leaf_path] if leaf_path in names else f"{names[module]}.{leaf}"
    sizes = [config.num_groups] if "{layer}" in template and stride else []
    sizes += [config.experts.num_experts] if config.experts is not None and "{expert}" in template else []
    for index in np.ndindex(*sizes):
        layer, expert = (*index, 0, 0)[:2] if stride else (0, *index, 0)[:2]
        yield index, template.format(layer=offset + stride * layer, expert=expert)


def _weight_files(directory: Path) -> list[Path]:
    from ._schema import IndexFile

    names = [SINGLE]
    # With both an index and a single file, transformers reads the single file.
    if os.path.lexists(directory / INDEX) and not os.path.lexists(directory / SINGLE):
        path = input_file(directory, INDEX, hint=_COPY_HINT)
        contents = parse_json(read_input(path, most_bytes=_MOST_INDEX_BYTES), str(path))
        index = validate(IndexFile, contents, str(path), hint="copy the index again")
        names = sorted(set(index.weight_map.values()))
    expected = f"{SINGLE}, or the shards that {INDEX} lists"
    hint = "convert pickled weights with transformers' save_pretrained; Lowtide reads only safetensors"
    return [input_file(directory, name, expected=expected, hint=hint) for name in names]


def _check_tensors(tensors: Mapping[str, Stored], config: DecoderConfig, directory: Path) -> None:
    # Compare counts first: a wrong config.json could ask for hundreds of millions of names below.
    experts_per_layer = 1 if config.experts is None or config.experts.clamped else config.experts.num_experts
    if (config.num_layers - config.num_dense_layers) * experts_per_layer > len(tensors):
        layers = f"{config.num_layers} layers" + (f" of {experts_per_layer} experts" if experts_per_layer > 1 else "")
        problem = f"{directory}: config.json requires {layers}, but the weights have only {len(tensors)} tensors"
        raise ModelFileError(problem, hint=_LACKING_HINT)
    expected = {
        name: leaf.shape[len(index) :]
        for path, leaf in jax.tree_util.tree_leaves_with_path(parameter_shapes(config))
        for index, name in _iter_names(path, config)
    }
    if missing := [name for name in expected if name not in tensors]:
        problem = f"{len(missing)} of {len(expected)} tensors of config.json are missing, first {missing[0]}"
        raise ModelFileError(f"{directory}: {problem}", hint=_LACKING_HINT)
    # A tied checkpoint may repeat the embedding as lm_head. Old checkpoints store RoPE's constant frequencies.
    ignored = {_HEAD} if config.tie_embeddings else set[str]()
    for name in sorted(tensors):
        if name not in expected and name not in ignored and not name.endswith("rotary_emb.inv_freq"):
            problem = f"{directory}: the weights have {shortened(name)}, which config.json does not describe"
            raise ModelFileError(problem, hint=_OTHER_MODEL_HINT)
    for name, shape in expected.items():
        source = tensors[name]
        if source.shape != shape:
            problem = f"{source.file}: the shape of {name} is {source.shape}, but config.json requires {shape}"
            raise ModelFileError(problem, hint=_OTHER_MODEL_HINT)
        if isinstance(source, Source):
            hint = "load the unquantised checkpoint"
            check_choice(f"{source.file}: dtype of {name}", source.dtype, [*DTYPES], hint=hint, error=ModelFileError)


def _check_tied_head(tensors: Mapping[str, Stored], config: DecoderConfig) -> None:
    """Raise if the config ties the head to the embedding, but the file has another head, which would be ignored."""
    head = tensors.get(_HEAD)
    if not config.tie_embeddings or head is None:
        return
    embedding = tensors[_embedding(config)]
    itemsize = max(head.itemsize, embedding.itemsize)
    if head.shape != embedding.shape or not all(
        np.array_equal(head.read(piece), embedding.read(piece)) for piece in pieces(head.shape, itemsize)
    ):
        problem = f"{head.file}: {_HEAD} is not the embedding, but config.json ties them"
        hint = "set tie_word_embeddings to false in config.json if the head was trained separately"
        raise ModelFileError(problem, hint=hint)


def _embedding(config: DecoderConfig) -> str:
    return f"{family_of(config).names['outer/embed']}.weight"


def _check_dtypes(dtype: Any, compute_dtype: Any) -> None:
    for name in (compute_dtype,) if dtype == "auto" else (dtype, compute_dtype):
        if not _is_floating(name):
            raise ConfigError(f"the dtype must be floating-point, such as float32 or bfloat16, not {name!r}")


def _is_floating(name: Any) -> bool:
    try:
        return jnp.issubdtype(jnp.dtype(name), jnp.floating)
    except TypeError:
        return False


@dataclasses.dataclass(frozen=True)
class _LeafPlan:
    """How to read a leaf, as decided from the headers."""

    path: str
    sources: Sequence[Stored]
    like: Any
    """Shape and dtype of the leaf: one `jax.ShapeDtypeStruct`, or a `QuantizedWeight` of them."""
    why: str = ""
    """Reason why quantised weights become an array; empty otherwise."""

    def read(self, place: jax.sharding.Sharding | None) -> Any:
        """Read the leaf into arrays; a `place` of None is JAX's default device. Memory: as in `read_leaf`."""
        if not isinstance(self.like, QuantizedWeight):
            return read_leaf(self.sources, self.like.shape, self.like.dtype, place)
        packed = [source for source in self.sources if isinstance(source, Packed)]
        places = _places(self.like, place)
        shapes, treedef = jax.tree.flatten(self.like)
        shardings = [None] * len(shapes) if places is None else treedef.flatten_up_to(places)
        leaves: list[Any] = []
        for index, (leaf, leaf_sharding) in enumerate(zip(shapes, shardings, strict=True)):
            leaves.append(read_leaf([weight.parts[index] for weight in packed], leaf.shape, leaf.dtype, leaf_sharding))
        return treedef.unflatten(leaves)


def _plan_leaf(path: str, sources: Sequence[Stored], shape: tuple[int, ...], dtype: Any, otherwise: str) -> _LeafPlan:
    """Decide how to read a leaf; `sources` are in the order of its stack.

    If `dtype` is None, the leaf gets JAX's promotion of the dtypes of its sources, so no source loses digits. The dtype
    of a quantised source is its dtype before quantisation, or `otherwise` if the file does not record that dtype.
    """
    leaf_dtype = dtype
    if dtype is None:
        stored_dtypes = {
            DTYPES[weight.dtype] if isinstance(weight, Source) else weight.weight_dtype or otherwise
            for weight in sources
        }
        leaf_dtype = jnp.result_type(*sorted(stored_dtypes))
    packed = [weight for weight in sources if isinstance(weight, Packed) and weight.form is not None]
    forms = {(weight.form, len(weight.parts)) for weight in packed}
    is_matrix = "experts" not in path.split("/")
    if len(packed) == len(sources) and len(forms) == 1 and is_matrix:
        return _LeafPlan(path, sources, _quantized_shapes(packed[0], shape, leaf_dtype))
    reason = "" if not forms else "their layers are quantised differently" if is_matrix else "they are experts"
    return _LeafPlan(path, sources, jax.ShapeDtypeStruct(shape, jnp.dtype(leaf_dtype)), reason)


def _dequantization_notes(plans: Sequence[_LeafPlan]) -> list[str]:
    """Return a message for each reason why a stack of quantised weights becomes an array.

    `group_tensors` adds the messages about formats that always become arrays.
    """
    notes: list[str] = []
    for reason in dict.fromkeys(leaf_plan.why for leaf_plan in plans if leaf_plan.why):
        affected = {leaf_plan.path: leaf_plan.like for leaf_plan in plans if leaf_plan.why == reason}
        size = format_bytes(tree_bytes([*affected.values()]))
        notes.append(f"{', '.join(affected)} are loaded as arrays of {size}, because {reason}")
    return notes


def _quantized_shapes(weight: Packed, shape: tuple[int, ...], dtype: Any) -> QuantizedWeight:
    """Return the `QuantizedWeight` of a stack of weights, with shapes as leaves."""
    assert weight.form is not None
    scales = jnp.uint8 if len(weight.parts) == 4 else weight.form.scales
    dtypes = (weight.form.codes, scales, jnp.float32, jnp.float32)
    leaves = [
        jax.ShapeDtypeStruct((*shape[:-2], *part.shape), jnp.dtype(part_dtype))
        for part, part_dtype in zip(weight.parts, dtypes, strict=False)
    ]
    nested, offset = leaves[2:] or (None, None)
    name = jnp.dtype(dtype).name
    return QuantizedWeight(leaves[0], leaves[1], nested, offset, weight.form.name, weight.form.block, name)
