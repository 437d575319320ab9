"""Inspect a model's or adapter's directory, a weights file, a run, or data, without reading a weight.

Names, shapes and dtypes come from the files' headers. Content that Lowtide cannot handle is listed as a problem, not
raised; a damaged file is an error. Headers are read without JAX. Data is read as a run would read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..core import ModelFileError, format_bytes, gguf_file, input_file, parse_json, read_input, require_extra, shortened
from ._config import FinetuneConfig, read_config, with_seq_len

_COPY_HINT = "copy the file from its source again"
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
_FOREIGN_SUFFIXES = _PICKLE_SUFFIXES | {".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".npz"}
"""Suffixes of weights in formats other than safetensors."""
_HEAD = "lm_head.weight"
_SINGLE_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_MOST_JSON_BYTES = 256 * 1024**2
_GROUPS = (
    ("norms", re.compile(r"norm\.(weight|bias)$")),
    ("embedding", re.compile(r"(^|\.)(embed_tokens|wte)\.")),
    ("head", re.compile(r"(^|\.)lm_head\.")),
    ("router", re.compile(r"(\.router\.|\.mlp\.gate\.|\.block_sparse_moe\.gate\.)")),
    ("experts", re.compile(r"\.experts\.")),
    ("attention", re.compile(r"\.(self_attn|attention)\.")),
    ("MLP", re.compile(r"\.mlp\.")),
)
_BATCH_RECORDS = 256
"""Number of records that are tokenised together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """Content of an inspected folder or file."""

    kind: str
    """One of model, adapter, weights, run, checkpoints, data."""
    path: str
    """The inspected folder or file."""
    facts: Mapping[str, Any]
    """Facts by name; plain values, lists and objects."""
    problems: tuple[str, ...] = ()
    """Content that Lowtide cannot handle, one sentence each."""
    notes: tuple[str, ...] = ()
    """Facts that a user may not expect and that are not problems."""
    parts: tuple[Inspection, ...] = ()
    """The checkpoints and outputs of a run; empty for other kinds."""

    def to_dict(self) -> dict[str, Any]:
        """Return all content as plain values, for JSON."""
        lists = {"problems": [*self.all_problems()], "notes": [*self.notes]}
        return {**vars(self), **lists, "parts": [part.to_dict() for part in self.parts]}

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
        ModelFileError: when the path does not exist, is of another kind, or contains a damaged file.

    Memory:
        Holds file headers only; no weight is read.
    """
    path = Path(path)
    if (file := gguf_file(path)) is not None:
        return _inspect_gguf(path, file)
    if path.is_dir():
        kinds = {"config.toml": _inspect_run, "adapter_config.json": _inspect_adapter, "config.json": _inspect_model}
        for name, inspect_kind in kinds.items():
            if os.path.lexists(path / name):
                return inspect_kind(path)
        if any(step.name.isdigit() and step.is_dir() for step in _list_entries(path)):
            return _inspect_checkpoints(path)
        if any(entry.suffix.lower() in {*_FOREIGN_SUFFIXES, ".safetensors"} for entry in _list_entries(path)):
            return _inspect_model(path)
    elif os.path.lexists(path):
        if path.suffix.lower() in _FOREIGN_SUFFIXES:
            facts = {"bytes": path.stat().st_size}
            return Inspection(kind="weights", path=str(path), facts=facts, problems=_format_problems([path]))
        file = input_file(path.parent, path.name, hint=_COPY_HINT)
        if path.suffix != ".safetensors":
            hint = f"name a .safetensors or .gguf file; to inspect a whole model, name its folder: {path.parent}"
            raise ModelFileError(f"{path}: the file cannot be inspected", hint=hint)
        tensors = _read_headers([file])
        facts, problems = _weight_facts([file], tensors), _dtype_problems(tensors)
        return Inspection(kind="weights", path=str(path), facts=facts, problems=problems)
    expected = "a folder with config.json, adapter_config.json or config.toml; a .gguf or .safetensors file; or data"
    hint = "name the folder of the model, the adapter or the run; for data, a file or a folder of one format"
    problem = "the path cannot be inspected" if os.path.lexists(path) else "no such file or folder"
    raise ModelFileError(f"{path}: {problem}", expected=expected, hint=hint)


def inspect_data(config: FinetuneConfig) -> Inspection:
    """Read and tokenise all data of a run, and report how the run would use it.

    Args:
        config: the settings; `data` is required. `model`, `tokenizer`, `chat_template`, `columns`, `loss_on` and
            `seq_len` have the same effect as in a run.

    Returns:
        An inspection with counts of records, tokens, columns, duplicates, empty turns, and records longer than a row.

    Raises:
        DataError: for data that a run would refuse.
        ModelFileError: for an unusable tokenizer or chat template.

    Memory:
        Holds 256 records at a time, and a digest and two numbers of every record. Plain text is held as a whole.
    """
    from .. import models
    from ._base import directory_of, load_end_tokens, tokenizer_folder
    from .data import load_chat_template, parse_columns, read_records
    from .data._encode import Encoder, text_examples
    from .data._load import is_read_as_records, named_documents, notes_on

    assert config.data is not None
    directory = directory_of(config)
    model_config, folder = models.load_config(directory), tokenizer_folder(directory, config.tokenizer)
    tokenizer, template = models.load_tokenizer(folder), load_chat_template(folder, config.chat_template)
    ends = load_end_tokens(
        model_config, tokenizer, directory, tokenizer_dir=config.tokenizer, chat_template=config.chat_template
    )
    columns = parse_columns(config.columns)
    is_plain = not is_read_as_records(config.data, config.columns)
    examples = text_examples(named_documents(config.data)) if is_plain else read_records(Path(config.data), columns)
    encoder = Encoder(
        tokenizer, template, end_token=ends.text, loss_on=config.loss_on, vocab_size=model_config.vocab_size
    )
    counts, unread, digests = Counter[str](), Counter[str](), set[bytes]()
    kinds, lengths, starts, num_learned = Counter[str](), list[int](), list[float](), 0
    with contextlib.closing(encoder):
        while batch := list(islice(examples, _BATCH_RECORDS)):
            records = [example for example in batch if example is not None]
            counts["blank"] += len(batch) - len(records)
            for example in records:
                kinds[example.kind] += 1
                unread.update([*example.unread, *encoder.unread_in(example)])
                contents = [(turn.get("content") or "").strip() or turn.get("tool_calls") for turn in example.messages]
                counts["empty turns"] += sum(not content for content in contents)
                content = (example.text, example.prompt, example.more, example.messages, example.tools)
                digest = hashlib.sha256(repr(content).encode("utf-8", "surrogatepass")).digest()
                counts["duplicates"] += digest in digests
                digests.add(digest)
            for ids, mask in encoder.encode(records) if records else ():
                lengths.append(len(ids))
                num_learned += int(mask.sum())
                starts.append(int(np.argmax(mask)) if mask.any() else np.inf)  # first learned token
    facts: dict[str, Any] = {
        "records": dict(kinds),
        "tokens": {"total": sum(lengths), "learned": num_learned},
        **{name: counts[name] for name in ("blank", "duplicates", "empty turns")},
        "columns not read": dict(unread) or None,
        "chat template": template.where if template is not None and {"chat", "alpaca"} & kinds.keys() else None,
    }
    notes = list(notes_on(config.data, config.columns))
    if counts["duplicates"]:
        notes.append(f"{counts['duplicates']:,} records are duplicates, and are learned again")
    if counts["empty turns"]:
        notes.append(f"turns without text: {counts['empty turns']:,}")
    problems: list[str] = []
    if lengths and not is_plain:  # windows over plain text lose no tokens
        context = model_config.max_position_embeddings
        length_facts, length_notes = _length_facts(config, context, np.asarray(lengths), np.asarray(starts))
        facts |= length_facts
        notes += length_notes
        if facts["without a token to learn"] == len(lengths):
            problems.append("no record has a token to learn within a row, so a run refuses this data")
    if not lengths:
        problems.append("no record has text")
    return Inspection(kind="data", path=str(config.data), facts=facts, problems=tuple(problems), notes=tuple(notes))


def _inspect_model(folder: Path) -> Inspection:
    from .. import models

    problems, notes, facts, raw = list[str](), list[str](), dict[str, Any](), dict[str, Any]()
    config: Any = None
    if os.path.lexists(folder / "config.json"):
        raw = _read_json(folder, "config.json")
        names = raw.get("architectures")
        facts["architecture"] = names[0] if isinstance(names, list) and names else names
        facts["family"] = raw.get("model_type")
        try:
            with warnings.catch_warnings(action="ignore"):
                config = models.load_config(folder)
            facts |= {"layers": config.num_layers, "context": config.max_position_embeddings}
            facts |= {"vocabulary": config.vocab_size, "attention": _attention_facts(config)}
        except ModelFileError as error:
            problems.append(_message(error))
    else:
        problems.append("config.json is missing")
    expected_parameters = None if config is None else _count_parameters(config)
    is_tied = raw.get("tie_word_embeddings") if config is None else config.tie_embeddings
    files = _find_weight_files(folder)
    if files and not any(os.path.lexists(folder / name) for name in (_SINGLE_FILE, _INDEX_FILE)):
        names = shortened(", ".join(file.name for file in files))
        problems.append(f"without {_SINGLE_FILE} or {_INDEX_FILE}, shards are not read: {names}")
    if not files:
        foreign_files = [path for path in _list_entries(folder) if path.suffix.lower() in _FOREIGN_SUFFIXES]
        problems += _format_problems(foreign_files)
    tensors = _read_headers(files)
    num_tensors = len(tensors)
    is_quantized = bool(raw.get("quantization_config"))
    if files and expected_parameters is not None:
        try:
            # The tensors of one weight (codes, scales) under its name, without those that loading skips.
            with warnings.catch_warnings(action="ignore"):
                weights = models.stored_weights(folder)
            tensors = {name: (weight.format, weight.shape) for name, weight in weights.items()}
            if is_quantized:
                method = models.quantization_of(folder)
                facts["quantization"] = {"method": method, **_bits_per_weight(weights)}
        except ModelFileError as error:
            problems.append(_message(error))
    if not is_quantized:
        problems += _dtype_problems(tensors)
    tied = {_HEAD} & tensors.keys() if is_tied and "model.embed_tokens.weight" in tensors else set[str]()
    if tied:
        notes.append(f"config.json ties the head to the embedding, but {_HEAD} is stored: a different head is refused")
    facts |= _weight_facts(
        files, {name: tensor for name, tensor in tensors.items() if name not in tied}, getattr(config, "experts", None)
    )
    facts["tensors"] = num_tensors - len(tied)
    if expected_parameters is not None and not files:
        del facts["groups"], facts["dtypes"]
        facts.pop("active_parameters", None)
        facts["parameters"] = expected_parameters
    elif expected_parameters is not None and facts["parameters"] != expected_parameters:
        got = f"{facts['parameters']:,} parameters in the weights, {expected_parameters:,} in config.json"
        problems.append(f"weights and config.json are of different models: {got}")
    facts |= _tokenizer_facts(folder, problems, notes, facts.get("vocabulary"))
    return Inspection(kind="model", path=str(folder), facts=facts, problems=tuple(problems), notes=tuple(notes))


def _attention_facts(config: Any) -> dict[str, str]:
    """Return the implementation of attention on an H100 with cuDNN 9.14 and on a v5e, for rows of 4,096 tokens."""
    import jax

    from ..ops import AttentionCase, choose_attention

    facts = {"for": f"rows of 4,096 tokens in bfloat16, JAX {jax.__version__}, cuDNN 9.14"}
    chips: dict[str, dict[str, Any]] = {
        "H100": {"platform": "gpu", "capability": (9, 0), "cudnn_version": 91400},
        "v5e": {"platform": "tpu"},
    }
    # The layers that read the most tokens; layers of other kinds may have other heads and windows.
    config = next((block for block in reversed(config.pattern) if not block.is_delta_net), config)
    has_windows = config.window_sizes is not None
    for chip, device in chips.items():
        for rows, segments in (("", "none"), (", packed rows", "shared")):
            case = AttentionCase(
                **device,
                head_dim=config.head_dim,
                is_grouped=config.num_heads != config.num_kv_heads,
                window=None if has_windows else config.windows,
                has_traced_window=has_windows,
                windows=config.window_sizes,
                segments=segments,  # pyright: ignore[reportArgumentType]
                has_soft_cap=config.attention_soft_cap is not None,
                has_sinks=config.attention_sinks,
            )
            facts[chip + rows] = str(choose_attention(case))
    return facts


def _inspect_gguf(path: Path, file: Path) -> Inspection:
    """Inspect a GGUF file; an unreadable header is an error."""
    from .. import models
    from ..models.gguf import read_header

    read_header(file)
    problems, notes = list[str](), list[str]()
    facts: dict[str, Any] = {}
    tensors: dict[str, models.StoredWeight] = {}
    try:
        with warnings.catch_warnings(action="ignore"):
            config = models.load_config(path)
        facts = {"family": config.family, "layers": config.num_layers, "context": config.max_position_embeddings}
        facts["vocabulary"] = config.vocab_size
        tensors = models.stored_weights(path)
        facts["quantization"] = {"method": "GGUF", **_bits_per_weight(tensors)}
        shapes = {name: (weight.format, weight.shape) for name, weight in tensors.items()}
        facts |= _weight_facts([file], shapes, config.experts)
    except ModelFileError as error:
        problems.append(_message(error))
        facts |= {"bytes": file.stat().st_size}
    if path.is_dir() and os.path.lexists(path / "tokenizer.json"):
        facts |= _tokenizer_facts(path, problems, notes, facts.get("vocabulary"))
    else:
        facts["tokenizer"] = "not read from the file; name that of the original model with --tokenizer"
    return Inspection(kind="model", path=str(path), facts=facts, problems=tuple(problems), notes=tuple(notes))


def _bits_per_weight(stored_weights: Mapping[str, Any]) -> dict[str, str]:
    """Return, by quantised format, a text with the average stored bits of a weight, including its scales."""
    counts, sizes = Counter[str](), Counter[str]()
    for weight in stored_weights.values():
        if weight.format not in _BITS:
            counts[weight.format] += math.prod(weight.shape)
            sizes[weight.format] += weight.num_bytes
    return {name: f"{8 * sizes[name] / counts[name]:.2f} bits each" for name in counts}


def _count_parameters(config: Any) -> int:
    import jax
    import jax.numpy as jnp

    from .. import models

    shapes = jax.eval_shape(lambda: models.init(config, key=jax.random.key(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes) if jnp.issubdtype(leaf.dtype, jnp.floating))


def _inspect_adapter(folder: Path) -> Inspection:
    from ..adapters import lora

    raw = _read_json(folder, "adapter_config.json")
    problems: list[str] = []
    try:
        with warnings.catch_warnings(action="ignore"):
            lora.check(folder)
    except ModelFileError as error:
        problems.append(_message(error))
    variants = sorted((name for name in raw if re.fullmatch(r"use_\w+", name)), reverse=True)  # such as "use_dora"
    names = "target_modules target_parameters rank_pattern alpha_pattern modules_to_save bias".split()
    facts = {name: raw[name] for name in ("peft_type", "r", "lora_alpha", *variants, *names) if raw.get(name)}
    facts["base"] = raw.get("base_model_name_or_path")
    name = "adapter_model.safetensors"
    pickled = [entry for entry in _list_entries(folder) if entry.suffix in _PICKLE_SUFFIXES]
    if pickled and not os.path.lexists(folder / name):
        problems += _format_problems(pickled)
        return Inspection(kind="adapter", path=str(folder), facts=facts, problems=tuple(problems))
    file = input_file(folder, name, hint="save the adapter with safe_serialization=True, PEFT's default")
    tensors = _read_headers([file])
    facts |= _weight_facts([file], tensors)
    facts.pop("groups")
    modules: dict[str, list[int]] = {}
    for tensor, (_, shape) in tensors.items():
        if match := re.fullmatch(r"(?:base_model\.model\.)?(.+)\.(?:lora_A\.weight|lora_embedding_A)", tensor):
            if raw.get("target_parameters") and re.search(r"\.experts(\.base_layer)*$", match[1]):
                continue  # PEFT stacks the rows of all experts, and the tensor does not state the number of experts
            modules.setdefault(re.sub(r"\.\d+\.", ".*.", match[1]), []).append(shape[0])
    facts["modules"] = {key: {"layers": len(ranks), "ranks": sorted(set(ranks))} for key, ranks in modules.items()}
    return Inspection(kind="adapter", path=str(folder), facts=facts, problems=(*problems, *_dtype_problems(tensors)))


def _inspect_run(folder: Path) -> Inspection:
    from ._run_folder import ADAPTER, CHECKPOINTS, METRICS, MODEL, read_records

    facts: dict[str, Any] = {"settings": read_config(folder / "config.toml")}
    if (folder / METRICS).is_file():
        records = [record for record in read_records(folder / METRICS) if type(record["step"]) is int]
        facts["steps"] = max((record["step"] for record in records), default=0)
        losses = [record["eval_loss"] for record in records if "eval_loss" in record]
        facts["held_out_loss"] = [losses[0], losses[-1]] if losses else []
    inspectors = {CHECKPOINTS: _inspect_checkpoints, ADAPTER: _inspect_adapter, MODEL: _inspect_model}
    parts = [inspect_kind(folder / name) for name, inspect_kind in inspectors.items() if (folder / name).is_dir()]
    return Inspection(kind="run", path=str(folder), facts=facts, parts=tuple(parts))


def _inspect_checkpoints(folder: Path) -> Inspection:
    steps = [entry for entry in _list_entries(folder) if entry.name.isdigit() and entry.is_dir()]
    steps.sort(key=lambda step: int(step.name))
    sizes = {step.name: sum(file.stat().st_size for file in step.rglob("*") if file.is_file()) for step in steps}
    facts = {"steps": [int(step.name) for step in steps], "bytes": sizes}
    return Inspection(kind="checkpoints", path=str(folder), facts=facts)


def _find_weight_files(folder: Path) -> list[Path]:
    if os.path.lexists(folder / _SINGLE_FILE):
        return [input_file(folder, _SINGLE_FILE, hint=_COPY_HINT)]
    if not os.path.lexists(folder / _INDEX_FILE):
        shards = [entry.name for entry in _list_entries(folder) if entry.suffix == ".safetensors"]
        return [input_file(folder, name, hint=_COPY_HINT) for name in shards]
    weight_map = _read_json(folder, _INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        raise ModelFileError(f"{folder / _INDEX_FILE}: weight_map is not a table of names", hint=_COPY_HINT)
    names: set[str] = {*weight_map.values()}  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    return [input_file(folder, name, hint="copy the missing shard, too") for name in sorted(names)]


def _read_headers(files: Sequence[Path]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Read the dtype and shape of each tensor from the headers, which also verify the length of each file."""
    require_extra("finetune")
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in files:
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    view = file.get_slice(name)
                    tensors[name] = (str(view.get_dtype()), tuple(view.get_shape()))
        except (SafetensorError, OSError) as error:
            got = f"{shortened(error)} ({format_bytes(path.stat().st_size)} on disk)"
            hint = "copy it again; the file is truncated or damaged"
            raise ModelFileError(f"{path}: not a complete safetensors file", got=got, hint=hint) from error
    return tensors


def _weight_facts(
    files: Sequence[Path], tensors: Mapping[str, tuple[str, tuple[int, ...]]], experts: Any = None
) -> dict[str, Any]:
    """Return facts such as numbers of parameters, tensors and bytes; `experts` is ``config.experts``, or None."""
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
        # Each token uses `num_used` of `num_experts` experts of equal size, and all other weights.
        num_used, num_experts = experts.num_experts_per_token, experts.num_experts
        facts["experts_per_token"] = f"{num_used} of {num_experts}"
        facts["active_parameters"] = total - counts["experts"] + counts["experts"] * num_used // num_experts
    return {**facts, "tensors": len(tensors), "bytes": sum(file.stat().st_size for file in files), "files": len(files)}


def _tokenizer_facts(folder: Path, problems: list[str], notes: list[str], vocabulary: int | None) -> dict[str, Any]:
    from .. import models

    facts: dict[str, Any] = {"tokenizer": None, "chat_template": os.path.lexists(folder / "chat_template.jinja")}
    if os.path.lexists(folder / "tokenizer.json"):
        content = _read_json(folder, "tokenizer.json").get("model")
        model: dict[str, Any] = content if isinstance(content, dict) else {}
        kind, vocab = model.get("type") or "unknown", model.get("vocab")
        size = len(vocab) if isinstance(vocab, dict | list) else 0  # pyright: ignore[reportUnknownArgumentType]
        facts["tokenizer"] = f"{kind}, {size:,} tokens"
        try:
            tokenizer = models.load_tokenizer(folder)
            facts["tokenizer"] = f"{kind}, {tokenizer.get_vocab_size():,} tokens"
            largest = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=0)
            if vocabulary is not None and largest >= vocabulary:
                problem = f"tokenizer.json has ids up to {largest:,}, but the model has {vocabulary:,} embeddings"
                problems.append(problem)
            elif vocabulary is not None:
                added = tokenizer.get_vocab()
                if without_embedding := sorted(name for name, number in added.items() if number >= vocabulary):
                    note = f"tokenizer.json adds tokens beyond the {vocabulary:,} embeddings"
                    notes.append(f"{note}, which are refused in a text: {shortened(', '.join(without_embedding))}")
        except ModelFileError as error:
            problems.append(_message(error))
    else:
        problems.append("tokenizer.json is missing, so text cannot be tokenised; transformers' AutoTokenizer writes it")
    if os.path.lexists(folder / "tokenizer_config.json") and not facts["chat_template"]:
        facts["chat_template"] = bool(_read_json(folder, "tokenizer_config.json").get("chat_template"))
    if facts["chat_template"]:
        from .data import chat_prompts, load_chat_template

        try:
            template = load_chat_template(folder)
            _ = template and chat_prompts(template, {})  # compiles the template without rendering a message
        except ModelFileError as error:
            problems.append(_message(error))
    return facts


def _dtype_problems(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[str, ...]:
    counts = Counter(dtype for dtype, _ in tensors.values() if dtype not in _BITS)
    reason = "which is quantised or not floating-point"
    return tuple(f"{number} tensors have dtype {dtype}, {reason}" for dtype, number in counts.items())


def _format_problems(paths: Sequence[Path]) -> tuple[str, ...]:
    """Describe files of weights in other formats, GGUF files last; without files, say that weights are missing."""
    problems, gguf_problems = list[str](), list[str]()
    for path in paths:
        if path.suffix.lower() == ".gguf":
            gguf_problems.append(f"{path.name}: a GGUF file; to read it, name the file itself")
        else:
            is_pickle = path.suffix.lower() in _PICKLE_SUFFIXES
            description = "pickled weights, which can run code" if is_pickle else "another format"
            problems.append(f"{path.name}: {description}; Lowtide reads safetensors")
    return (*problems, *gguf_problems) or ("weights are missing: there is no .safetensors file",)


def _message(error: ModelFileError) -> str:
    return f"{error.message}: {error.got}" if error.got is not None else error.message


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = input_file(folder, name, hint=_COPY_HINT)
    return parse_json(read_input(path, most_bytes=_MOST_JSON_BYTES), str(path))


def _list_entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise ModelFileError(f"{folder}: cannot be read", got=error.strerror, hint="check its permissions") from error


def _length_facts(
    config: FinetuneConfig, context: int, lengths: np.ndarray[Any, Any], starts: np.ndarray[Any, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return statistics of record lengths and of lost tokens, and a note if more than 2 % are lost."""
    seq_len = with_seq_len(config, context, int(lengths.max())).seq_len
    total, long_lengths = int(lengths.sum()), lengths[lengths > seq_len]
    num_lost = int((long_lengths - seq_len).sum())
    percentiles = {"median": 50, "95th percentile": 95, "longest": 100}
    facts = {
        "tokens of a record": {name: int(np.percentile(lengths, share)) for name, share in percentiles.items()},
        "longer than a row": {f"of {seq_len:,} tokens": len(long_lengths), "tokens lost": num_lost},
        "without a token to learn": int((starts >= seq_len).sum()),
    }
    share = f"{num_lost:,} of {total:,} tokens, in {len(long_lengths):,} records"
    note = f"{share}, are lost at --seq-len {seq_len}; raise it"
    return facts, [note] if num_lost > 0.02 * total else []
