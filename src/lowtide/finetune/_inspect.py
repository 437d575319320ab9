"""Inspect a model's or adapter's directory, a weights file, or a run, without reading a weight.

Names, shapes and dtypes come from the files' headers. Content that Lowtide cannot handle is listed as a problem, not
raised; a damaged file is an error. `_inspect_data` does the same for data.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core import LowtideError, ModelFileError, format_bytes, gguf_file, input_file, parse_json, read_input, shortened

_AGAIN = "copy the file from its source again"
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
_PICKLED = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
_FOREIGN = {".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".npz"}
_HEAD = "lm_head.weight"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST_JSON = 256 * 1024**2
_GROUPS = (
    ("norms", re.compile(r"norm\.(weight|bias)$")),
    ("embedding", re.compile(r"(^|\.)(embed_tokens|wte)\.")),
    ("head", re.compile(r"(^|\.)lm_head\.")),
    ("router", re.compile(r"(\.router\.|\.mlp\.gate\.|\.block_sparse_moe\.gate\.)")),
    ("experts", re.compile(r"\.experts\.")),
    ("attention", re.compile(r"\.(self_attn|attention)\.")),
    ("MLP", re.compile(r"\.mlp\.")),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """Content of an inspected folder or file."""

    kind: str
    """One of model, adapter, weights, run, checkpoints."""
    path: str
    """The inspected folder or file."""
    facts: Mapping[str, Any]
    """Facts by name; plain values, lists and objects."""
    problems: tuple[str, ...] = ()
    """Content that Lowtide cannot handle, one sentence each."""
    notes: tuple[str, ...] = ()
    """Facts that a user may not expect and that are not problems."""
    parts: tuple[Inspection, ...] = ()
    """The outputs of a run; empty for other kinds."""

    def to_dict(self) -> dict[str, Any]:
        """Return all content as plain values, for JSON."""
        parts = [part.to_dict() for part in self.parts]
        own = {name: getattr(self, name) for name in ("kind", "path", "facts")}
        return {**own, "problems": [*self.all_problems()], "notes": [*self.notes], "parts": parts}

    def all_problems(self) -> Iterable[str]:
        """Return the problems of this inspection and of its parts."""
        return [*self.problems, *(problem for part in self.parts for problem in part.all_problems())]


def inspect(path: str | Path) -> Inspection:
    """Inspect a folder or a file.

    Args:
        path: a directory of a model or an adapter, a GGUF or safetensors file, a run or its checkpoints.

    Returns:
        The content, problems included.

    Raises:
        ModelFileError: when the path does not exist, has another kind, or contains a damaged file.

    Memory:
        Holds file headers only; no weight is read.
    """
    path = Path(path)
    if (file := gguf_file(path)) is not None:
        return _gguf(path, file)
    if path.is_dir():
        kinds = {"config.toml": _run, "adapter_config.json": _adapter, "config.json": _model}
        for name, look in kinds.items():
            if os.path.lexists(path / name):
                return look(path)
        if any(step.name.isdigit() and step.is_dir() for step in _entries(path)):
            return _checkpoints(path)
        if any(each.suffix.lower() in {*_PICKLED, *_FOREIGN, ".safetensors"} for each in _entries(path)):
            return _model(path)
    elif os.path.lexists(path):
        if path.suffix.lower() in {*_PICKLED, *_FOREIGN}:
            facts = {"bytes": path.stat().st_size}
            return Inspection(kind="weights", path=str(path), facts=facts, problems=_other_formats([path]))
        file = input_file(path.parent, path.name, hint=_AGAIN)
        if path.suffix != ".safetensors":
            raise ModelFileError(
                f"{path}: no file that can be inspected",
                expected="a .safetensors or .gguf file, or a folder of a model, an adapter or a run",
                got=path.suffix or "a name without a suffix",
                hint=f"for all of a model, name its folder: {path.parent}",
            )
        tensors = _tensors([file])
        return Inspection(kind="weights", path=str(path), facts=_weights([file], tensors), problems=_dtypes(tensors))
    raise ModelFileError(
        f"{path}: nothing that can be inspected" if os.path.lexists(path) else f"{path}: no such file or folder",
        expected="a folder with config.json, adapter_config.json or config.toml; a .gguf or .safetensors file; or data",
        hint="name the folder of the model, of the adapter or of the run; of data, a file or a folder of one format",
    )


def _model(folder: Path) -> Inspection:
    from .. import models

    problems, notes = list[str](), list[str]()
    facts: dict[str, Any] = {}
    raw: dict[str, Any] = {}
    is_tied = False
    experts: tuple[int, int] | None = None
    asked: int | None = None
    if os.path.lexists(folder / "config.json"):
        raw = _json(folder, "config.json")
        facts["architecture"] = _first(raw.get("architectures"))
        facts["family"] = raw.get("model_type")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config = models.load_config(folder)
            facts |= {"layers": config.num_layers, "context": config.max_position_embeddings}
            facts["vocabulary"] = config.vocab_size
            asked, is_tied = _asked_for(config), config.tie_embeddings
            if config.experts is not None:
                experts = (config.experts.num_experts_per_token, config.experts.num_experts)
        except ModelFileError as error:
            problems.append(_said(error))
            is_tied = bool(raw.get("tie_word_embeddings"))
    else:
        problems.append("config.json is missing")
    files = _weight_files(folder)
    if files and not any(os.path.lexists(folder / name) for name in (_SINGLE, _INDEX)):
        names = shortened(", ".join(file.name for file in files))
        problems.append(f"neither {_SINGLE} nor {_INDEX}, without which shards are not read: {names}")
    problems += _other_formats(
        [each for each in _entries(folder) if each.suffix.lower() in {*_PICKLED, *_FOREIGN}], files
    )
    tensors = _tensors(files)
    number = len(tensors)
    if raw.get("quantization_config") and files and asked is not None:
        tensors, facts["quantization"] = _quantized(folder, tensors, problems)
    else:
        problems += _dtypes(tensors)
    tied = {_HEAD} & tensors.keys() if is_tied and "model.embed_tokens.weight" in tensors else set[str]()
    if tied:
        notes.append(f"config.json ties the head to the embedding, and {_HEAD} is stored: one that differs is refused")
    facts |= _weights(files, {name: each for name, each in tensors.items() if name not in tied}, experts)
    facts["tensors"] = number - len(tied)
    if asked is not None and not files:
        del facts["groups"], facts["dtypes"]
        facts.pop("active_parameters", None)
        facts["parameters"] = asked
    elif asked is not None and facts["parameters"] != asked:
        got = f"{facts['parameters']:,} parameters in the weights, {asked:,} that config.json asks for"
        problems.append(f"weights and config.json are of different models: {got}")
    facts |= _tokenizer(folder, problems, notes, facts.get("vocabulary"))
    return Inspection(kind="model", path=str(folder), facts=facts, problems=tuple(problems), notes=tuple(notes))


def _gguf(path: Path, file: Path) -> Inspection:
    """Inspect a GGUF file; an unreadable header is an error."""
    from .. import models
    from ..models.gguf import read_header

    read_header(file)
    problems, notes = list[str](), list[str]()
    facts: dict[str, Any] = {}
    tensors: dict[str, models.StoredWeight] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = models.load_config(path)
        facts = {"family": config.family, "layers": config.num_layers, "context": config.max_position_embeddings}
        facts["vocabulary"] = config.vocab_size
        tensors = models.stored_weights(path)
        experts = config.experts and (config.experts.num_experts_per_token, config.experts.num_experts)
        facts["quantization"] = {"method": "GGUF", **_bits(tensors)}
        facts |= _weights([file], {name: (each.format, each.shape) for name, each in tensors.items()}, experts)
    except ModelFileError as error:
        problems.append(_said(error))
        facts |= {"bytes": file.stat().st_size}
    if path.is_dir() and os.path.lexists(path / "tokenizer.json"):
        facts |= _tokenizer(path, problems, notes, facts.get("vocabulary"))
    else:
        facts["tokenizer"] = "that in the file is not read; name the original's with --tokenizer"
    return Inspection(kind="model", path=str(path), facts=facts, problems=tuple(problems), notes=tuple(notes))


def _bits(found: Mapping[str, Any]) -> dict[str, str]:
    """Compute the average stored bits of a weight for each quantised format, scales included."""
    weights, stored = Counter[str](), Counter[str]()
    for each in found.values():
        if each.format not in _BITS:
            weights[each.format] += math.prod(each.shape)
            stored[each.format] += each.num_bytes
    return {name: f"{8 * stored[name] / weights[name]:.2f} bits each" for name in weights}


def _quantized(
    folder: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], problems: list[str]
) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, Any]]:
    """Group the tensors of one weight (codes, scales) under its name.

    Returns:
        Format and shape by weight name, and facts: the quantisation method and the bits of a weight in each format.
    """
    from .. import models

    method = models.quantization_of(folder)
    try:
        found = models.stored_weights(folder)
    except ModelFileError as error:
        problems.append(_said(error))
        return tensors, {"method": method}
    return {name: (each.format, each.shape) for name, each in found.items()}, {"method": method, **_bits(found)}


def _asked_for(config: Any) -> int:
    """Count the parameters that a model of this configuration has."""
    import jax
    import jax.numpy as jnp

    from .. import models

    shapes = jax.eval_shape(lambda: models.init(config, key=jax.random.key(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes) if jnp.issubdtype(leaf.dtype, jnp.floating))


def _adapter(folder: Path) -> Inspection:
    from ..adapters import lora

    raw = _json(folder, "adapter_config.json")
    problems: list[str] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lora.check(folder)
    except ModelFileError as error:
        problems.append(_said(error))
    names = (
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "target_modules",
        "target_parameters",
        "rank_pattern",
        "alpha_pattern",
        "modules_to_save",
        "bias",
    )
    facts = {name: raw[name] for name in names if raw.get(name)}
    facts["base"] = raw.get("base_model_name_or_path")
    name = "adapter_model.safetensors"
    pickled = [each for each in _entries(folder) if each.suffix in _PICKLED]
    if pickled and not os.path.lexists(folder / name):
        return Inspection(kind="adapter", path=str(folder), facts=facts, problems=(*problems, *_other_formats(pickled)))
    file = input_file(folder, name, hint="save the adapter with safe_serialization=True, PEFT's default")
    tensors = _tensors([file])
    facts |= _weights([file], tensors)
    facts.pop("groups")
    modules: dict[str, list[int]] = {}
    for tensor, (_, shape) in tensors.items():
        if match := re.fullmatch(r"(?:base_model\.model\.)?(.+)\.(?:lora_A\.weight|lora_embedding_A)", tensor):
            if raw.get("target_parameters") and re.search(r"\.experts(\.base_layer)*$", match[1]):
                continue  # PEFT stacks the rows of all experts, and the tensor does not state the number of experts
            modules.setdefault(re.sub(r"\.\d+\.", ".*.", match[1]), []).append(shape[0])
    facts["modules"] = {key: {"layers": len(found), "ranks": sorted(set(found))} for key, found in modules.items()}
    return Inspection(kind="adapter", path=str(folder), facts=facts, problems=(*problems, *_dtypes(tensors)))


def _run(folder: Path) -> Inspection:
    from ._config import read_config
    from ._runs import ADAPTER, CHECKPOINTS, METRICS, MODEL, read_records

    facts: dict[str, Any] = {"settings": read_config(folder / "config.toml")}
    if (folder / METRICS).is_file():
        records = [record for record in read_records(folder / METRICS) if type(record["step"]) is int]
        facts["steps"] = max((record["step"] for record in records), default=0)
        losses = [record["eval_loss"] for record in records if "eval_loss" in record]
        facts["held_out_loss"] = [losses[0], losses[-1]] if losses else []
    looks = {CHECKPOINTS: _checkpoints, ADAPTER: _adapter, MODEL: _model}
    parts = [look(folder / name) for name, look in looks.items() if (folder / name).is_dir()]
    return Inspection(kind="run", path=str(folder), facts=facts, parts=tuple(parts))


def _checkpoints(folder: Path) -> Inspection:
    steps = sorted(
        (each for each in _entries(folder) if each.name.isdigit() and each.is_dir()), key=lambda x: int(x.name)
    )
    sizes = {step.name: sum(file.stat().st_size for file in step.rglob("*") if file.is_file()) for step in steps}
    return Inspection(kind="checkpoints", path=str(folder), facts={"steps": [int(step.name) for step in steps],
                      "bytes": sizes})  # fmt: skip


def _weight_files(folder: Path) -> list[Path]:
    if os.path.lexists(folder / _SINGLE):
        return [input_file(folder, _SINGLE, hint=_AGAIN)]
    index = _INDEX
    if not os.path.lexists(folder / index):
        return [
            input_file(folder, each.name, hint=_AGAIN) for each in _entries(folder) if each.suffix == ".safetensors"
        ]
    listed = _json(folder, index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        raise ModelFileError(f"{folder / index}: weight_map is no table of names", hint=_AGAIN)
    names: set[str] = {*listed.values()}  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    return [input_file(folder, name, hint="a shard is missing; copy it, too") for name in sorted(names)]


def _tensors(files: Sequence[Path]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Read the dtype and shape of each tensor from the headers, which also verify the length of each file."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in files:
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    view = file.get_slice(name)
                    found[name] = (str(view.get_dtype()), tuple(view.get_shape()))
        except (SafetensorError, OSError) as error:
            raise ModelFileError(
                f"{path}: not a complete safetensors file",
                got=f"{shortened(error)} ({format_bytes(path.stat().st_size)} on disk)",
                hint="the file is truncated or damaged; copy it again",
            ) from error
    return found


def _weights(
    files: Sequence[Path],
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    experts: tuple[int, int] | None = None,
) -> dict[str, Any]:
    counts, dtypes = Counter[str](), Counter[str]()
    for name, (dtype, shape) in tensors.items():
        if name.endswith("rotary_emb.inv_freq"):  # older files store these constants
            continue
        group = next((group for group, pattern in _GROUPS if pattern.search(name)), "other")
        counts[group] += math.prod(shape)
        dtypes[dtype] += math.prod(shape)
    total = counts.total()
    facts: dict[str, Any] = {"parameters": total, "groups": dict(counts.most_common()), "dtypes": dict(dtypes)}
    if experts is not None:
        # Each token uses `chosen` of `number` experts of equal size, and all other weights.
        chosen, number = experts
        facts["experts_per_token"] = f"{chosen} of {number}"
        facts["active_parameters"] = total - counts["experts"] + counts["experts"] * chosen // number
    return {**facts, "tensors": len(tensors), "bytes": sum(each.stat().st_size for each in files), "files": len(files)}


def _tokenizer(folder: Path, problems: list[str], notes: list[str], vocabulary: int | None) -> dict[str, Any]:
    from .. import models

    facts: dict[str, Any] = {"tokenizer": None, "chat_template": os.path.lexists(folder / "chat_template.jinja")}
    if os.path.lexists(folder / "tokenizer.json"):
        model = _json(folder, "tokenizer.json").get("model")
        kind = model.get("type") if isinstance(model, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        vocab = model.get("vocab") if isinstance(model, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        size = len(vocab) if isinstance(vocab, dict | list) else 0  # pyright: ignore[reportUnknownArgumentType]
        facts["tokenizer"] = f"{kind or 'unknown'}, {size:,} tokens"
        try:
            tokenizer = models.load_tokenizer(folder)
            facts["tokenizer"] = f"{kind or 'unknown'}, {tokenizer.get_vocab_size():,} tokens"
            largest = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=0)
            if vocabulary is not None and largest >= vocabulary:
                problems.append(f"tokenizer.json has ids up to {largest:,}, and the model {vocabulary:,} embeddings")
            elif vocabulary is not None:
                added = tokenizer.get_vocab()
                if beyond := sorted(name for name, number in added.items() if number >= vocabulary):
                    what = f"tokenizer.json adds tokens that none of the {vocabulary:,} embeddings is of"
                    notes.append(f"{what}, and that are refused in a text: {shortened(', '.join(beyond))}")
        except ModelFileError as error:
            problems.append(_said(error))
    else:
        problems.append("tokenizer.json is missing: text cannot be read; transformers' AutoTokenizer writes it")
    if os.path.lexists(folder / "tokenizer_config.json") and not facts["chat_template"]:
        facts["chat_template"] = bool(_json(folder, "tokenizer_config.json").get("chat_template"))
    if facts["chat_template"]:
        from .data import chat_prompts, load_chat_template

        try:
            template = load_chat_template(folder)
            _ = template and chat_prompts(template, {})  # compiles the template without rendering a message
        except ModelFileError as error:
            problems.append(_said(error))
    return facts


def _dtypes(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[str, ...]:
    others = Counter(dtype for dtype, _ in tensors.values() if dtype not in _BITS)
    return tuple(
        f"{number} tensors of dtype {dtype}: not floating-point, or quantised" for dtype, number in others.items()
    )


def _other_formats(paths: Sequence[Path], read: Sequence[Path] = ()) -> tuple[str, ...]:
    """Describe weights in other formats; empty if a safetensors file was read."""
    if read:
        return ()
    what = {
        **dict.fromkeys(_PICKLED, "pickled weights, which can run code"),
        **dict.fromkeys(_FOREIGN, "another format"),
    }
    named = "a GGUF file, which is read when it is named itself"
    ours = [path for path in paths if path.suffix.lower() == ".gguf"]
    said = [
        f"{each.name}: {what[each.suffix.lower()]}; Lowtide reads safetensors" for each in paths if each not in ours
    ]
    return (*said, *(f"{path.name}: {named}" for path in ours)) or ("no weights: no .safetensors file is there",)


def _said(error: LowtideError) -> str:
    return f"{error.message}: {error.got}" if error.got is not None else error.message


def _json(folder: Path, name: str) -> dict[str, Any]:
    path = input_file(folder, name, hint=_AGAIN)
    return parse_json(read_input(path, most_bytes=_MOST_JSON), str(path))


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise ModelFileError(f"{folder}: cannot be read", got=error.strerror, hint="check its permissions") from error


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value  # pyright: ignore[reportUnknownVariableType]
