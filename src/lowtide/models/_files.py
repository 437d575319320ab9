"""Reading and writing a Hugging Face model directory.

`config.json`, weights in `model.safetensors` or in shards listed by `model.safetensors.index.json`. All names and
shapes are checked against the configuration from the files' headers before any weight is read, so a wrong directory
fails at once and by name. Weights are stacked one leaf at a time: the host never holds a second copy of the model.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..core import (
    ConfigError,
    ModelFileError,
    OutputError,
    Tree,
    Where,
    format_bytes,
    input_file,
    leaves_with_paths,
    parse_json,
    path_str,
    read_input,
    select,
    shortened,
    shown,
    validate,
)
from ._config import DecoderConfig
from ._config_file import config_from_hf, config_to_hf
from ._decoder import Decoder, parameter_shapes, with_windows, without_windows
from .families import family_of

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST_CONFIG_BYTES, _MOST_INDEX_BYTES = 16 * 1024**2, 256 * 1024**2
_AGAIN = "copy the file from the model's source again"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def load(
    directory: str | Path,
    *,
    dtype: Any = "auto",
    compute_dtype: Any = "float32",
    host: Where | None = None,
    sharding: Callable[[str, Any], jax.sharding.Sharding] | None = None,
) -> Decoder:
    """Read a decoder from a Hugging Face directory.

    Args:
        directory: the folder with `config.json` and safetensors weights.
        dtype: dtype of the parameters; ``"auto"`` keeps the one they are stored in.
        compute_dtype: dtype of activations and products.
        host: which leaves to keep in the host memory of JAX's default device, where `lowtide.offload` streams them
            from: globs on paths such as ``"layers/**"``, or a predicate. They are never on the device, so the model
            may be larger than it.
        sharding: where the leaf of a path and a shape (`jax.ShapeDtypeStruct`) belongs on several devices, such as
            `lowtide.train.ShardingRules.of`. Each process reads what its devices hold.

    Returns:
        The decoder, on JAX's default device but for the leaves that `host` selects, or as `sharding` says.

    Raises:
        ModelFileError: when a file is missing, truncated or malformed, the architecture is unknown, or weights and
            configuration disagree; the message names the file and the tensor.
        ConfigError: for a dtype that is not floating-point.
        SelectionError: when `host` selects nothing.

    Memory:
        The parameters where they belong, and beside them on the host one stacked leaf at a time, with `sharding` the
        parts of it that this process's devices hold.
    """
    for name in (compute_dtype,) if dtype == "auto" else (dtype, compute_dtype):
        if not _is_floating(name):
            raise ConfigError(
                f"{name!r} is no dtype to compute in", expected="float32, bfloat16, ...", hint="check the dtype"
            )
    directory = Path(directory)
    config = load_config(directory)
    files = _weight_files(directory)
    with _open_all(files) as tensors:
        _check_tensors(tensors, config, directory)
        shapes = parameter_shapes(config)
        flat, treedef = jax.tree_util.tree_flatten_with_path(shapes)
        hosted = [False] * len(flat) if host is None else select(shapes, host)
        leaves: list[jax.Array] = []
        for (path, leaf), on_the_host in zip(flat, hosted, strict=True):
            shape, names = leaf.shape, _tensor_names(path, config)
            # The layers of a stack may be stored in different dtypes: none of them loses digits.
            stored = {_DTYPES[tensors[name][1].get_slice(name).get_dtype()] for name in names}
            kind = jnp.result_type(*sorted(stored)) if dtype == "auto" else jnp.dtype(dtype)
            read = functools.partial(_read, [(name, tensors[name][1]) for name in names], shape, kind)
            if sharding is None:
                leaves.append(jax.device_put(read(), _host_memory()) if on_the_host else jnp.asarray(read()))
                continue
            place = sharding(path_str(path), jax.ShapeDtypeStruct(shape, kind))
            place = place.with_memory_kind("pinned_host") if on_the_host else place
            leaves.append(jax.make_array_from_callback(shape, place, _once(read)))
    params = treedef.unflatten(leaves)
    return Decoder(params["outer"], with_windows(params["layers"], config), config, jnp.dtype(compute_dtype).name)


def load_config(directory: str | Path) -> DecoderConfig:
    """Read only the sizes of a model directory.

    Args:
        directory: the folder with `config.json`.

    Returns:
        The configuration.

    Raises:
        ModelFileError: when `config.json` is missing, malformed, or not of a decoder that Lowtide knows.
    """
    path = input_file(
        directory,
        "config.json",
        expected="a Hugging Face model directory with config.json and model.safetensors",
        hint="give a local folder that holds the model; nothing is downloaded",
    )
    return config_from_hf(_json(path, _MOST_CONFIG_BYTES), str(path))


def base_path() -> Path:
    """Return the folder of the model embedded in Lowtide: a small Llama, pretrained on Python's standard library."""
    return Path(__file__).parent / "base"


def save(
    model: Decoder, directory: str | Path, *, tokenizer: str | Path | None = None, max_shard_bytes: int = 5 * 1024**3
) -> None:
    """Write a model as a Hugging Face directory that `transformers` loads.

    Args:
        model: a decoder of plain arrays (merge adapters first).
        directory: the folder; made when missing.
        tokenizer: a `tokenizer.json` to copy beside the weights.
        max_shard_bytes: the most bytes in one file; a larger model is sharded with an index.

    Raises:
        ModelFileError: when the parameters are not those of ``model.config`` (adapters, for instance).
        OutputError: when the folder cannot be written.

    Memory:
        One shard on the host at a time.
    """
    directory = Path(directory)
    expected = {path: leaf.shape for path, leaf in leaves_with_paths(parameter_shapes(model.config))}
    params = {"outer": model.outer, "layers": without_windows(model.layers)}
    got = {path: tuple(leaf.shape) for path, leaf in leaves_with_paths(params)}
    if got != expected:
        wrong = sorted(set(got.items()) ^ set(expected.items()))[0]
        raise ModelFileError(
            f"{wrong[0]}: the parameters are not those of the model's configuration",
            got=f"shape {wrong[1]}",
            hint="merge adapters with lt.lora.merge, or save them alone with lt.lora.save",
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        weights = _write_shards(params, model.config, directory, max_shard_bytes)
        dtype = jnp.dtype(model.outer["embed"]["weight"].dtype).name
        (directory / "config.json").write_text(json.dumps(config_to_hf(model.config, dtype), indent=2) + "\n")
        for name in weights:  # safetensors lets nobody but the owner read them, whatever the umask says
            shutil.copymode(directory / "config.json", directory / name)
        if tokenizer is not None:
            (directory / "tokenizer.json").write_bytes(Path(tokenizer).read_bytes())
    except OSError as error:
        raise OutputError(
            f"{directory}: cannot write the model", got=str(error), hint="choose a folder that you may write to"
        ) from error


def _write_shards(params: Tree, config: DecoderConfig, directory: Path, max_shard_bytes: int) -> set[str]:
    """Write the weights; returns the files' names."""
    shards: list[list[tuple[str, Any, Any]]] = [[]]
    size = total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = _tensor_names(path, config)
        for index, name in enumerate(names):
            tensor_bytes = leaf.nbytes // len(names)
            if size and size + tensor_bytes > max_shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(
                (
                    name,
                    leaf,
                    np.unravel_index(index, stacked) if (stacked := _stacked_shape(path, len(names), config)) else None,
                )
            )
            size, total = size + tensor_bytes, total + tensor_bytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = _SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: np.ascontiguousarray(leaf if i is None else _layer(leaf, i)) for name, leaf, i in shard}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    # Weights of an earlier model in the other layout would be read in place of these, here or by other software.
    (directory / (_INDEX if len(shards) == 1 else _SINGLE)).unlink(missing_ok=True)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return set(weight_map.values())


def _read(tensors: list[tuple[str, Any]], shape: tuple[int, ...], dtype: Any, index: Any = ()) -> np.ndarray:
    """Read a part of a leaf, which is one tensor or a stack of one a layer."""
    index = (*index, *(slice(None) for _ in shape[len(index) :]))
    if len(shape) == len(tensors[0][1].get_slice(tensors[0][0]).get_shape()):
        return np.asarray(tensors[0][1].get_slice(tensors[0][0])[index]).astype(dtype)
    one = len(tensors[0][1].get_slice(tensors[0][0]).get_shape())
    grid = np.arange(len(tensors)).reshape(shape[: len(shape) - one])[index[: len(shape) - one]]
    rest = index[len(shape) - one :]
    sizes = [len(range(size)[part]) for size, part in zip(shape[len(shape) - one :], rest, strict=True)]
    part = np.empty((*grid.shape, *sizes), dtype)
    for at, number in np.ndenumerate(grid):
        name, file = tensors[number]
        part[at] = file.get_slice(name)[tuple(rest)]
    return part


def _once(read: Callable[[Any], np.ndarray]) -> Callable[[Any], np.ndarray]:
    """Read a part that several devices hold once."""
    parts: dict[str, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        if str(index) not in parts:
            parts[str(index)] = read(index)
        return parts[str(index)]

    return part


def _host_memory() -> jax.sharding.Sharding:
    """Host memory that JAX's default device reads by itself."""
    return jnp.zeros(()).sharding.with_memory_kind("pinned_host")


def _layer(leaf: Any, index: tuple[int, ...]) -> Any:
    """One layer of a stack, or one expert of one, wherever the stack is."""
    return leaf[index] if isinstance(leaf, np.ndarray) else _layer_on_device(leaf, index)


@jax.jit
def _layer_on_device(leaf: Any, index: Any) -> Any:
    # Of a whole array in host memory NumPy would keep a second copy there.
    for each in index:
        leaf = jax.lax.dynamic_index_in_dim(leaf, each, keepdims=False)
    return jax.device_put(leaf, jax.memory.Space.Device)


def _stacked_shape(path: Any, num_tensors: int, config: DecoderConfig) -> tuple[int, ...]:
    """Shape of the grid of tensors that a leaf is a stack of: none, [layers], or [layers, experts]."""
    if not _is_stacked(path):
        return ()
    layers = config.num_layers
    return (layers,) if num_tensors == layers else (layers, num_tensors // layers)


def _is_stacked(path: Any) -> bool:
    return path[0].key == "layers"


def _tensor_names(path: Any, config: DecoderConfig) -> list[str]:
    """Hugging Face names of the tensors of one leaf, in stacking order: layers, and experts of each."""
    names = family_of(config).names
    *module, leaf = (entry.key for entry in path)
    whole = "/".join([*module, leaf])
    template = names[whole] if whole in names else f"{names['/'.join(module)]}.{leaf}"
    layers = range(config.num_layers if _is_stacked(path) else 1)
    experts = range(config.experts.num_experts if config.experts is not None and "{expert}" in template else 1)
    return [template.format(layer=layer, expert=expert) for layer in layers for expert in experts]


def _weight_files(directory: Path) -> list[Path]:
    """List the safetensors files of a folder; none of them elsewhere."""
    from ._schema import IndexFile

    names = [_SINGLE]
    if os.path.lexists(directory / _INDEX):
        path = input_file(directory, _INDEX, hint=_AGAIN)
        index = validate(IndexFile, _json(path, _MOST_INDEX_BYTES), str(path), hint="copy the index again")
        names = sorted(set(index.weight_map.values()))
    return [
        input_file(
            directory,
            name,
            expected=f"{_SINGLE}, or the shards that {_INDEX} lists",
            hint="Lowtide reads safetensors only; convert pickled weights with transformers' save_pretrained",
        )
        for name in names
    ]


@contextlib.contextmanager
def _open_all(files: list[Path]) -> Generator[dict[str, tuple[Path, Any]], None, None]:
    """All tensors of some safetensors files: name to file and open handle."""
    with contextlib.ExitStack() as stack:
        tensors: dict[str, tuple[Path, Any]] = {}
        for file in files:
            try:
                handle = stack.enter_context(safe_open(file, framework="numpy"))
            except PermissionError as error:
                raise ModelFileError(
                    f"{file}: cannot be read", got=error.strerror or error, hint="check the file's permissions"
                ) from error
            except (SafetensorError, OSError) as error:
                raise ModelFileError(
                    f"{file}: not a complete safetensors file",
                    got=f"{shortened(error)} ({format_bytes(file.stat().st_size)} on disk)",
                    hint="the file is truncated or damaged; download it again",
                ) from error
            names = handle.keys()
            for name in tensors.keys() & set(names):
                raise ModelFileError(
                    f"{file}: {shown(name)} is in another shard, too",
                    got=f"{tensors[name][0].name} and {file.name}",
                    hint="shards of two models are in one folder; download it again",
                )
            tensors |= dict.fromkeys(names, (file, handle))
        yield tensors


def _check_tensors(tensors: dict[str, tuple[Path, Any]], config: DecoderConfig, directory: Path) -> None:
    expected = {
        name: leaf.shape[len(_stacked_shape(path, len(names), config)) :]
        for path, leaf in jax.tree_util.tree_leaves_with_path(parameter_shapes(config))
        for names in [_tensor_names(path, config)]
        for name in names
    }
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise ModelFileError(
            f"{directory}: config.json asks for tensors that the weights lack",
            got=f"{len(missing)} of {len(expected)} missing, first {missing[0]}",
            hint="config.json and weights are of different models, or a shard is missing",
        )
    # A tied checkpoint may repeat the embedding as lm_head; older ones store RoPE's constant frequencies.
    ignored = {"lm_head.weight"} if config.tie_embeddings else set[str]()
    for name in sorted(tensors):
        if name not in expected and name not in ignored and not name.endswith("rotary_emb.inv_freq"):
            raise ModelFileError(
                f"{directory}: the weights hold {shortened(name)}, which config.json has no place for",
                hint="config.json and weights are of different models",
            )
    for name, shape in expected.items():
        view = tensors[name][1].get_slice(name)
        if tuple(view.get_shape()) != shape:
            raise ModelFileError(
                f"{tensors[name][0]}: {name} has another shape than config.json says",
                expected=shape,
                got=tuple(view.get_shape()),
                hint="config.json and weights are of different models",
            )
        if view.get_dtype() not in _DTYPES:
            raise ModelFileError(
                f"{tensors[name][0]}: {name} has dtype {view.get_dtype()}",
                expected=f"one of {', '.join(_DTYPES)}",
                hint="load the unquantised checkpoint",
            )


def _is_floating(name: Any) -> bool:
    try:
        return jnp.issubdtype(jnp.dtype(name), jnp.floating)
    except TypeError:
        return False


def _json(path: Path, most_bytes: int) -> dict[str, Any]:
    return parse_json(read_input(path, most_bytes=most_bytes), str(path))
