"""What `lowtide finetune` was asked to do: flags and a TOML file, checked field by field.

The fields of `FinetuneConfig` are the one table of settings: the command makes a flag of each, by its type, with the
docstring below it as help. `metadata` says what the type does not: another name of the flag, or of its value.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tomli_w
from annotated_types import Ge, Gt, Le, Lt, MinLen, Predicate

from ..core import ConfigError, shown
from ._foreign import setting_of

if TYPE_CHECKING:
    from pydantic import BaseModel

_OF_NEW_ADAPTERS = ("method", "rank", "alpha", "targets", "modules_to_save", "bias", "lora_init")
"""What the files of an adapter say."""
_OF_ADAPTERS = (*_OF_NEW_ADAPTERS, "adapter", "lora_dropout", "loraplus_ratio", "quantize", "quantize_embeddings")
_METHODS = {"lora": "LoRA", "rslora": "rsLoRA", "dora": "DoRA", "ia3": "(IA)³", "vera": "VeRA"}
FOUR_BITS = ("nf4", "int4", "mxfp4")
_FALLING = ("cosine", "linear", "warmup_stable_decay")
"""Schedules that have an end."""
_HINTS = {
    "qlora": "QLoRA is LoRA on a quantised base: leave method out, and give --quantize nf4",
    "loftq": 'lt.lora.loftq(model, config, "nf4", key=key), and lt.Trainer trains it; without it quantize = "nf4" '
    "trains an adapter that begins as usual on weights in few bits",
}
"""Remedies for values that are known in other libraries."""


def _is_name(text: str) -> bool:
    return bool(text.strip())


# Ranges of values as types, which pydantic checks. `annotated_types` is imported in the place of `pydantic.Field`,
# which takes a quarter of a second.
Count = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Lt(1)]
PathText = Annotated[str, MinLen(1)]
Name = Annotated[str, Predicate(_is_name)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Format = Literal["nf4", "int4", "mxfp4", "int8", "fp8"]
Offload = Literal["activations", "optimizer", "parameters"]
TrackerName = Literal["tensorboard", "wandb", "trackio"]
Schedule = Literal["cosine", "linear", "constant", "inverse_sqrt", "warmup_stable_decay"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Every choice of a fine-tuning run, with defaults; the fields are the keys of the TOML file, and flags."""

    model: PathText | None = dataclasses.field(default=None, metadata={"metavar": "DIR"})
    """A Hugging Face directory of a model, or a GGUF file; by default the model embedded in Lowtide."""
    tokenizer: PathText | None = dataclasses.field(default=None, metadata={"metavar": "DIR"})
    """The folder of the model's tokenizer and chat template, if it is another one; a GGUF file needs it."""
    data: PathText | None = dataclasses.field(default=None, metadata={"metavar": "PATH"})
    """A text file, a folder of text or source; records in JSONL, JSON, CSV, TSV or Parquet, a folder of such files, or
    one that Hugging Face datasets saved; by default Python's language reference."""
    eval_data: PathText | None = dataclasses.field(default=None, metadata={"metavar": "PATH"})
    """Data to evaluate, in place of a part of `data`."""
    columns: tuple[str, ...] | None = dataclasses.field(default=None, metadata={"metavar": "WORDS"})
    """Which columns of the records stand for which fields: words such as messages=chat or prompt=question; other
    columns are not read then."""
    chat_template: PathText | None = dataclasses.field(default=None, metadata={"metavar": "FILE"})
    """A file with a chat template in Jinja, in place of the model's."""
    loss_on: Literal["completion", "all"] = "completion"
    """What of records is learned: completion (the assistant's turns, completions and outputs) or all."""
    packing: Literal["auto", "best-fit", "none", "contiguous"] = "auto"
    """How documents become rows: best-fit (whole documents, several a row, which do not see each other), none (one a
    row), contiguous (windows over one stream of text), or auto: contiguous for plain text, best-fit for records."""
    too_long: Literal["cut", "split", "drop"] = "cut"
    """What becomes of documents longer than a row, where packing is best-fit or none: cut, split or drop."""
    full: bool = False
    """Whether to tune all parameters, each layer updated inside the backward pass, instead of adapters."""
    offload: tuple[Offload, ...] | None = dataclasses.field(default=None, metadata={"metavar": "WORDS"})
    """What lives in host memory: any of activations (what enters each block waits there for the backward pass),
    optimizer (its state, updated there block by block) and parameters (streamed a layer at a time). Nothing by default;
    with `full` the layers, the optimizer's state and the activations, but not embedding and head, which the word
    parameters includes. As a flag: words with commas between them, or none."""
    num_steps: Count = dataclasses.field(default=300, metadata={"flag": "--steps"})
    """Optimizer steps."""
    num_epochs: Positive | None = None
    """Passes over the training data, in place of `num_steps`; may be a fraction."""
    method: Literal["lora", "rslora", "dora", "ia3", "vera", "full"] = "lora"
    """The kind of adapter: lora, rslora, dora, ia3 or vera; the word full sets `full`."""
    adapter: PathText | None = dataclasses.field(default=None, metadata={"metavar": "DIR"})
    """A folder with an adapter that training goes on from, in place of a new one; it says what the settings of adapters
    say otherwise."""
    rank: Count = 16
    """Rank of the adapter; (IA)³ has none."""
    alpha: Positive = 32.0
    """LoRA scale: the adapter's product is multiplied by alpha / rank."""
    targets: str | tuple[str, ...] = dataclasses.field(default="layers/**/*_proj", metadata={"metavar": "GLOB"})
    """Globs on module paths: which projections get an adapter (by default all seven of a block). As a flag: one glob,
    and the flag again for another."""
    modules_to_save: str | tuple[str, ...] | None = dataclasses.field(default=None, metadata={"metavar": "GLOB"})
    """Globs on paths of modules that train as a whole beside the adapter and are saved with it, such as outer/lm_head,
    outer/embed or layers/*_norm. As a flag: one glob, and the flag again for another."""
    bias: Literal["none", "lora_only", "all"] = "none"
    """Which biases train with the adapter: none, lora_only (those of the targets) or all."""
    lora_init: Literal["peft", "gaussian", "orthogonal", "pissa", "olora", "eva"] = "peft"
    """How the adapter's factors begin: peft, gaussian, orthogonal, as a part of the weight (pissa or olora), or as the
    directions in which the inputs of the first batches vary most (eva)."""
    lora_dropout: Share = 0.0
    """Part of its inputs that the adapter does not see in a training step."""
    loraplus_ratio: Positive = 1.0
    """LoRA+: the learning rate of the adapter's factors B as a multiple of that of all else; 16 is usual."""
    quantize: Format | None = None
    """Store the frozen projections of the layers in few bits while they are read: nf4 (4.1 bits each, as QLoRA), int4,
    mxfp4, int8 or fp8."""
    quantize_embeddings: Format | None = None
    """Store the frozen embedding and head in few bits, likewise; int8 rounds by at most half a percent of a row's
    largest entry."""
    batch_size: Count = 8
    """Sequences in a batch."""
    seq_len: Annotated[int, Ge(0)] = 0
    """Tokens in a sequence. 0 takes the longest record, up to 2,048 tokens and the model's context; and 128 tokens for
    the embedded model."""
    num_microbatches: Count = 1
    """Parts of a batch that are run one after the other, to save activation memory. The loss that balances a mixture's
    routers, where the model has it, is of each part."""
    learning_rate: Positive | None = None
    """Peak of the schedule. By default 2e-4, or 5e-3 for the embedded model; with `full` 1e-5 and 1e-3."""
    schedule: Schedule = "cosine"
    """How the learning rate goes on after its warm-up: cosine, linear (both fall over all steps), constant,
    inverse_sqrt, or warmup_stable_decay (constant, and linear at the end)."""
    final_rate_fraction: Annotated[float, Ge(0), Le(1)] = 0.1
    """Part of the peak at which the learning rate ends and stays, with a schedule that has an end."""
    decay_fraction: Annotated[float, Gt(0), Le(1)] = 0.1
    """Part of the steps in which the learning rate falls, at the end of warmup_stable_decay."""
    schedule_steps: Count | None = None
    """Steps until the learning rate is at its end, where it stays; by default all. A run that is resumed with more
    steps keeps those that it began with."""
    warmup_ratio: Share = 0.1
    """Linear warm-up, as a part of the schedule's steps."""
    warmup_steps: Annotated[int, Ge(0)] | None = None
    """Steps of linear warm-up, in place of `warmup_ratio`."""
    weight_decay: NotNegative = 0.0
    """AdamW's decoupled weight decay, on what trains."""
    adam_beta1: Share = 0.9
    """Decay of AdamW's mean of gradients."""
    adam_beta2: Share = 0.999
    """Decay of AdamW's mean of squared gradients."""
    adam_epsilon: Positive = 1e-8
    """What AdamW adds to the root of that mean."""
    max_grad_norm: NotNegative = 1.0
    """Gradients with a larger global norm are scaled down to it; 0 leaves them as they are."""
    clip_mode: Literal["exact", "previous", "layer"] = "exact"
    """With `full`, which norm that is: exact (of all gradients, by a second backward pass), previous (of the step
    before) or layer (of each layer by itself), as in `lowtide.offload.Clip`."""
    save_dtype: Dtype = "auto"
    """With `full`, dtype of the model that is written: auto (as the base is stored), float32, bfloat16 or float16."""
    state_dtype: Literal["float32", "bfloat16", "8bit", "companded", "fp8", "4bit"] = "float32"
    """What AdamW's moments are stored as: float32, bfloat16, 8bit (bitsandbytes' map, blocks of 256), companded (8 bits
    of roots, blocks of 128), fp8 or 4bit."""
    param_dtype: Dtype = "auto"
    """Dtype of the frozen base: auto (as stored; float32 on a CPU), float32, bfloat16 or float16. What trains is
    float32; with `full` it may be bfloat16, with what each weight lacks of the number that it stands for kept beside it
    in 8 bits."""
    compute_dtype: Dtype = "auto"
    """Dtype of activations: auto (bfloat16 on an accelerator, float32 on a CPU), float32, bfloat16 or float16."""
    remat: bool = True
    """Whether to recompute each block in the backward pass instead of keeping its activations."""
    layers_per_remat: Count = 1
    """Of how many blocks one activation is kept, and those between are recomputed, too: for fewer bytes of long
    sequences at the cost of another forward pass. About the root of the number of layers takes the fewest."""
    tile_tokens: Count | None = None
    """Tokens of a tile of a recomputed block, of one device's rows; by default what keeps the device busy. Fewer take
    fewer bytes, and on a GPU more time."""
    attention: Literal["auto", "cudnn", "splash", "blocks", "xla"] = "auto"
    """Who computes attention: cudnn, splash (on a TPU), blocks (of XLA's operations), xla (all scores at once), or
    auto, what the device has."""
    eval_every: Count = 100
    """Steps between held-out evaluations; the first and the last step are always evaluated."""
    held_out_fraction: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Part of the data kept for evaluation."""
    checkpoint_every: Count = 50
    """Steps between checkpoints; the last step is always saved."""
    max_to_keep: Count = 2
    """How many of the newest checkpoints stay."""
    keep_best: bool = False
    """Whether the checkpoint with the least held-out loss stays beside them."""
    load_best_at_end: bool = False
    """Whether the adapter or model that is written at the end is that with the least held-out loss, instead of the last
    one; keeps its checkpoint, too."""
    early_stopping_patience: Count | None = None
    """Evaluations in a row without a lower held-out loss at which the run ends; by default it goes to its last step."""
    early_stopping_threshold: NotNegative = 0.0
    """By how much a held-out loss has to be lower to count as such."""
    sample_tokens: Annotated[int, Ge(0)] = 48
    """Length of the text sampled before and after; 0 samples nothing."""
    track: tuple[TrackerName, ...] | None = dataclasses.field(default=None, metadata={"metavar": "WORDS"})
    """Trackers that are given every record: any of tensorboard, wandb and trackio, each an extra of that name."""
    project: Name = "lowtide"
    """The project that wandb and trackio put the run under."""
    run_name: Name | None = None
    """What they call the run; by default the name of its folder."""
    report: bool = False
    """Whether the run writes report.html: one page of its curves, samples and memory."""
    seed: Annotated[int, Ge(0), Lt(2**32)] = 0
    """Of the data order, the adapters and the sample."""

    def __post_init__(self) -> None:
        _validate(self)
        if self.method == "full":
            object.__setattr__(self, "full", True)
            object.__setattr__(self, "method", "lora")
        if self.batch_size % self.num_microbatches:
            raise _out_of_range("num_microbatches", self.num_microbatches, f"a divisor of batch_size {self.batch_size}")
        _check_combination(self)
        if self.columns is not None:
            from .data import parse_columns

            parse_columns(self.columns)

    @property
    def is_packed(self) -> bool:
        """Whether rows have documents that do not see each other; of texts that are looked at, it may turn out not."""
        return self.packing != "contiguous" and (self.packing != "auto" or self.data is not None)

    @property
    def adapter_text(self) -> str:
        """What trains, in words."""
        if self.adapter is not None:
            return f"that of {self.adapter}"
        targets = self.targets if isinstance(self.targets, str) else ", ".join(self.targets)
        rank = "" if self.method == "ia3" else f" rank {self.rank}"
        return f"{_METHODS[self.method]}{rank} on {targets}"


def config_from_dict(values: Mapping[str, Any], where: str) -> FinetuneConfig:
    """Make a configuration from plain values.

    Args:
        values: field names and values, as in TOML.
        where: where they come from, for messages.

    Returns:
        The configuration.

    Raises:
        ConfigError: for an unknown field (with near misses), a value of the wrong type or out of range.
    """
    known = [field.name for field in dataclasses.fields(FinetuneConfig)]
    for name in values:
        if name not in known:
            raise ConfigError(
                f"{where}: unknown key {name!r}", expected=f"one of {', '.join(known)}", hint=_nearest(name, known)
            )
    if values.get("method") == "full":
        if values.get("full") is False:
            _refuse_both("method", "full", "full = false asks for an adapter")
        values = {**{name: value for name, value in values.items() if name != "method"}, "full": True}
    if values.get("full") is True:
        _refuse_with_full([name for name in _OF_ADAPTERS if name in values])
    fixed: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return FinetuneConfig(**fixed)


def read_config(path: str | Path) -> dict[str, Any]:
    """Read a TOML file as plain values.

    Args:
        path: the file.

    Returns:
        Keys and values, unchecked (see `config_from_dict`).

    Raises:
        ConfigError: when the file is missing or not TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read", got=str(error), hint="--config takes a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path}: not TOML", got=str(error), hint='lines like: rank = 16, targets = "**/q_proj"'
        ) from error


def flag_of(field: str) -> str:
    """Return the flag of a field of `FinetuneConfig`."""
    named = FinetuneConfig.__dataclass_fields__[field].metadata.get("flag")
    return named or f"--{field.replace('_', '-')}"


def config_to_toml(config: FinetuneConfig) -> str:
    """Write the configuration as TOML, every field that is set and means something; `read_config` reads it back."""
    left_out = [*_OF_ADAPTERS] if config.full else []
    left_out += ["num_steps"] if config.num_epochs is not None else []
    return tomli_w.dumps({k: v for k, v in dataclasses.asdict(config).items() if v is not None and k not in left_out})


def _nearest(name: str, known: list[str]) -> str:
    """Say which setting an unknown one may be."""
    if (here := setting_of(name)) is not None:
        return f"what other libraries call {name} is {here} here"
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else "see the reference of FinetuneConfig"


@functools.cache
def _schema() -> type[BaseModel]:
    """Return the fields and their types as a pydantic model, which takes no value for another."""
    from pydantic import ConfigDict, create_model

    kinds: dict[str, Any] = typing.get_type_hints(FinetuneConfig, include_extras=True)
    fields: dict[str, Any] = {name: (kind, ...) for name, kind in kinds.items()}
    return create_model("Settings", __config__=ConfigDict(strict=True, allow_inf_nan=False), **fields)


def _validate(config: FinetuneConfig) -> None:
    """Raise ConfigError for the first field with a value of the wrong type, or out of range."""
    from pydantic import ValidationError

    try:
        _schema().model_validate(vars(config))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field, value, kind = str(first["loc"][0]), first["input"], first["type"]
        expected = first["msg"].removeprefix("Input should be ").replace("greater than or equal to", "at least")
        if kind == "literal_error":
            words = first.get("ctx", {})["expected"].replace(" or ", ", ").replace("'", "")
            if isinstance(value, str):
                raise _unknown_word(field, value, words, is_one=len(first["loc"]) == 1) from None
        if kind == "string_too_short":
            raise ConfigError(
                f"{field} is empty",
                expected="a path, or nothing for what is embedded",
                got='""',
                hint=f"leave {field} out, or look whether a variable of your script is unset",
            ) from None
        if kind == "predicate_failed":
            raise _out_of_range(field, value, "a name") from None
        if kind in ("finite_number", "greater_than", "greater_than_equal", "less_than", "less_than_equal"):
            raise _out_of_range(field, value, expected) from None
        raise ConfigError(
            f"{field} has the wrong type",
            expected=expected,
            got=shown(getattr(config, field)),
            hint=f"change {field} in the configuration",
        ) from None


def _out_of_range(field: str, value: Any, expected: str) -> ConfigError:
    hint = f"change {field} in the TOML file, or {flag_of(field)}"
    return ConfigError(f"{field} is out of range", expected=expected, got=value, hint=hint)


def _unknown_word(field: str, word: str, words: str, *, is_one: bool) -> ConfigError:
    close = difflib.get_close_matches(word, words.split(", "), n=2, cutoff=0.4)
    near = f"did you mean {' or '.join(close)}?" if close else f"for instance {flag_of(field)} {words.split(', ')[0]}"
    return ConfigError(
        f"{field} is out of range" if is_one else f"{field}: unknown word {word!r}",
        expected=f"{'one' if is_one else 'any'} of {words}",
        got=word,
        hint=_HINTS.get(word.lower(), near),
    )


def _check_combination(config: FinetuneConfig) -> None:
    """Refuse settings that are right by themselves and contradict each other."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    _check_recipe(config, {name for name, value in defaults.items() if getattr(config, name) != value})
    changed = [name for name in _OF_ADAPTERS if getattr(config, name) != defaults[name]]
    if config.adapter is not None and (others := [name for name in changed if name in _OF_NEW_ADAPTERS]):
        _refuse_both(others[0], "adapter", "the adapter's files say it")
    unused = {
        "ia3": ("rank", "alpha", "bias", "lora_init", "lora_dropout", "loraplus_ratio"),
        "vera": ("alpha", "bias", "lora_init", "loraplus_ratio"),
    }.get(config.method, ())
    if others := [name for name in unused if name in changed]:
        _refuse_both(others[0], "method", f"{config.method} has no {others[0]}")
    if config.method == "dora" and config.lora_init in ("pissa", "olora"):
        _refuse_both("lora_init", "method", f"dora's norms are those of the weight, which {config.lora_init} divides")
    if config.lora_init == "orthogonal" and config.rank % 2:
        raise _out_of_range("rank", config.rank, "an even number, with lora_init = orthogonal")
    if config.full:
        _refuse_with_full(changed)
        if config.param_dtype == "float16":
            raise ConfigError(
                "param_dtype: with full the parameters are what trains",
                expected="float32, or bfloat16, which is updated as if it were wider",
                got=config.param_dtype,
                hint='leave param_dtype out; compute_dtype = "float16" computes in half precision all the same',
            )
    else:
        _refuse_settings_of_full(config)
    for field in ("quantize", "quantize_embeddings"):
        form = getattr(config, field)
        if form in FOUR_BITS and "parameters" in (config.offload or ()):
            raise ConfigError(
                f"{field} = {form} and offload of parameters contradict each other",
                expected="int8 or fp8, or parameters on the device: JAX runs no program on 4-bit arrays in host memory",
                got=f"{form}, with parameters on the host",
                hint="4 bits are a quarter of bfloat16's bytes: leave parameters out of offload, or take int8",
            )
    recomputing = ["full"] * config.full + [w for w in config.offload or () if w in ("activations", "parameters")]
    if not config.remat and config.tile_tokens is not None:
        raise ConfigError(
            "tile_tokens is of blocks that are computed again in the backward pass, and remat = false has none",
            expected="remat = true",
            got=f"remat = false, tile_tokens = {config.tile_tokens}",
            hint="leave tile_tokens out",
        )
    _check_groups(config)
    if not config.remat and recomputing:
        raise ConfigError(
            f"remat = false contradicts {recomputing[0]}, which computes each block again in the backward pass",
            expected="remat = true",
            got="remat = false",
            hint="leave remat out; to keep activations on the device, use neither --full nor --offload for them",
        )


def _check_groups(config: FinetuneConfig) -> None:
    """Refuse groups of layers where each layer's input is kept, or none is."""
    if config.layers_per_remat == 1:
        return
    streamed = "parameters" in (config.offload or ())
    reasons = (
        (not config.remat, "remat = false", "which recomputes nothing", "remat = false"),
        (config.full, "full", "whose layers are updated one by one, each from its own input", "full"),
        (streamed, "offload of parameters", "which streams single layers, each from its own input", "parameters"),
    )
    for holds, name, why, other in reasons:
        if holds:
            raise ConfigError(
                f"layers_per_remat contradicts {name}, {why}",
                expected="layers_per_remat = 1",
                got=f"layers_per_remat = {config.layers_per_remat}",
                hint=f"leave out one of them: layers_per_remat, or {other}",
            )


def _check_recipe(config: FinetuneConfig, changed: set[str]) -> None:
    """Refuse settings of the recipe of which one would do nothing."""
    pairs = [("num_epochs", "num_steps"), ("warmup_ratio", "warmup_steps")]
    for first, second in pairs:
        if {first, second} <= changed:
            _refuse_both(first, second, f"{first} stands in place of {second}")
    if config.schedule not in _FALLING and "final_rate_fraction" in changed:
        _refuse_both("final_rate_fraction", "schedule", f"the schedule {config.schedule} has no end")
    if config.schedule != "warmup_stable_decay" and "decay_fraction" in changed:
        _refuse_both("decay_fraction", "schedule", f"the schedule {config.schedule} has no stable part")
    if config.early_stopping_patience is None and "early_stopping_threshold" in changed:
        raise ConfigError(
            "early_stopping_threshold without early_stopping_patience: nothing is stopped early",
            expected="both, or none",
            got=f"early_stopping_threshold = {config.early_stopping_threshold}",
            hint="give early_stopping_patience, too: 3 is usual",
        )
    if config.max_grad_norm == 0 and "clip_mode" in changed:
        _refuse_both("clip_mode", "max_grad_norm", "max_grad_norm = 0 clips nothing")


def _refuse_both(first: str, second: str, why: str) -> None:
    raise ConfigError(
        f"{first} contradicts {second}: {why}",
        expected=f"{first} or {second}",
        got="both",
        hint="leave one of them out",
    )


def _refuse_settings_of_full(config: FinetuneConfig) -> None:
    for field, default in (("clip_mode", "exact"), ("save_dtype", "auto")):
        if (value := getattr(config, field)) != default:
            raise ConfigError(
                f"{field} is for full-parameter tuning",
                expected=default,
                got=value,
                hint=f"leave {field} out, or tune with --full",
            )


def _refuse_with_full(names: list[str]) -> None:
    if names:
        raise ConfigError(
            f"{names[0]} is a setting of adapters, and full tunes all parameters without any",
            expected=f"full, or {' and '.join(names)}",
            got="both",
            hint=f"leave out {', '.join(names)}, or full",
        )
