"""Settings of `lowtide finetune` from flags and a TOML file, checked field by field.

The fields of `FinetuneConfig` are the only table of settings. The command derives a flag from each field: its type
gives the parser, and the docstring below it is the help text. In the field's metadata, ``flag`` overrides the name of
the flag, and ``metavar`` the name of its value in help texts.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen, Predicate

from ..core import ConfigError, require_extra, shown
from ..ops import IMPLEMENTATIONS, Implementation
from .objectives import ObjectiveName

if TYPE_CHECKING:
    from pydantic import BaseModel

_NEW_ADAPTER_FIELDS = ("method", "rank", "alpha", "targets", "modules_to_save", "bias", "lora_init")
"""Settings that the files of `adapter` determine; none of them can be changed together with `adapter`."""
_ADAPTER_FIELDS = (*_NEW_ADAPTER_FIELDS, "adapter", "lora_dropout", "loraplus_ratio", "quantize", "quantize_embeddings")
_METHODS = {"lora": "LoRA", "rslora": "rsLoRA", "dora": "DoRA", "ia3": "(IA)³", "vera": "VeRA"}
LORA_VARIANTS: dict[str, dict[str, Any]] = {"rslora": {"rslora": True}, "dora": {"dora": True}}
"""Values of `method` that are variants of LoRA, and the fields of `lowtide.lora.Config` that select them."""
_DECAYING_SCHEDULES = ("cosine", "linear", "warmup_stable_decay")
"""Schedules that end at `final_rate_fraction`."""
_HINTS = {
    "qlora": "leave method out, and set --quantize nf4; QLoRA is LoRA on a quantised base",
    "loftq": 'call lt.lora.loftq(model, config, "nf4", key=key), and train with lt.Trainer; quantize = "nf4" alone '
    "trains an adapter with the usual start on quantised weights",
}
"""Hints for values that other libraries accept, by the value in lower case."""
_MOST_TOKENS, _EMBEDDED_TOKENS, _ROUND_TOKENS = 2048, 128, 64
"""Largest default sequence length, its value for the included model, and the multiple to which lengths are rounded."""
_EDITABLE = {"editable": True}
"""Metadata of settings that may change in a resumed run: they affect outputs, times and bytes, but no losses."""
_PATH = {"path": True, **_EDITABLE}
"""Metadata of paths, which a run stores as absolute paths. They may change, since files may be moved."""


def _is_name(text: str) -> bool:
    return bool(text.strip())


# Types with ranges, which pydantic checks. They use `annotated_types` instead of `pydantic.Field`, since the import of
# pydantic takes a quarter of a second.
Count = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Lt(1)]
PathText = Annotated[str, MinLen(1)]
Name = Annotated[str, Predicate(_is_name)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Format = Literal["nf4", "int4", "mxfp4", "int8", "fp8"]
FOUR_BITS = ("nf4", "int4", "mxfp4")
"""The names in `Format` whose codes are 4-bit arrays."""
Offload = Literal["activations", "optimizer", "parameters"]
TrackerName = Literal["tensorboard", "wandb", "trackio"]
Schedule = Literal["cosine", "linear", "constant", "inverse_sqrt", "warmup_stable_decay"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """All settings of a fine-tuning run, with their defaults; each field is a key of the TOML file and a flag.

    The constructor raises ConfigError for a value of the wrong type or out of range, and without the extra
    ``finetune``. It also raises ConfigError for settings that contradict each other, or make another setting useless.
    """

    model: PathText | None = dataclasses.field(default=None, metadata={"metavar": "DIR", **_PATH})
    """A Hugging Face model directory, or a GGUF file; by default the model embedded in Lowtide."""
    tokenizer: PathText | None = dataclasses.field(default=None, metadata={"metavar": "DIR", **_PATH})
    """The folder of the tokenizer and chat template; by default the model's directory. A GGUF file needs it."""
    data: PathText | None = dataclasses.field(default=None, metadata={"metavar": "PATH", **_PATH})
    """Training data; by default Python's language reference. Text: a file, or a folder of text or source. Records:
    JSONL, JSON, CSV, TSV or Parquet, a folder of such files, or a folder that Hugging Face datasets saved."""
    eval_data: PathText | None = dataclasses.field(default=None, metadata={"metavar": "PATH", **_PATH})
    """Evaluation data; by default a part of `data`."""
    columns: tuple[str, ...] | None = dataclasses.field(default=None, metadata={"metavar": "WORDS"})
    """Names of the data's columns, as words field=column: messages=chat reads the field messages from the column chat.
    If set, other columns are not read."""
    chat_template: PathText | None = dataclasses.field(default=None, metadata={"metavar": "FILE", **_PATH})
    """A file with a Jinja chat template; by default the model's template."""
    loss_on: Literal["completion", "all"] = "completion"
    """Tokens of records that count in the loss: completion (the assistant's turns, completions and outputs) or all."""
    objective: ObjectiveName = "sft"
    """The loss that the run minimises. sft: supervised tuning. dpo, orpo, simpo and cpo tune on pairs of a chosen and a
    rejected answer, kto on answers with a label, true or false. The reference of dpo and kto is the model without
    adapters, or with `full` the untuned model in host memory. distillation: imitate the probabilities of a teacher.
    reward and classification train a head on the last token: on pairs of answers, or on texts with a class. embedding:
    embed pairs of similar texts, with the other texts of the batch as negatives."""
    beta: Positive | None = None
    """Strength of the preference; the default is 0.1, and 2 for simpo."""
    preference_loss: Literal["sigmoid", "hinge", "ipo", "robust"] = "sigmoid"
    """Variant of dpo: sigmoid, hinge (SLiC), ipo (squared distance, per token) or robust (for wrong labels)."""
    label_smoothing: Share = 0.0
    """Share of pairs whose labels are wrong, below 0.5; for dpo (sigmoid and robust), simpo and cpo."""
    preference_margin: NotNegative = 1.0
    """Least difference of the rewards in simpo."""
    desirable_weight: NotNegative = 1.0
    """Weight of desirable answers in kto."""
    undesirable_weight: NotNegative = 1.0
    """Weight of undesirable answers in kto."""
    nll_weight: NotNegative | None = None
    """Weight of the cross-entropy: in cpo of chosen answers, 1 by default; in distillation of learned tokens, 0."""
    num_labels: Annotated[int, Ge(2), Le(254)] = 2
    """Number of classes in classification; the field label of a record is a number from 0."""
    reward_margin: NotNegative = 0.0
    """Least difference of the scores of a chosen and a rejected answer in reward."""
    teacher: PathText | None = dataclasses.field(default=None, metadata={"metavar": "DIR", **_PATH})
    """The model that distillation imitates: a folder or GGUF file of a model with the same tokenizer. Its weights are
    in host memory, and run layer by layer before each step."""
    teacher_top_k: Count = 64
    """Number of the teacher's most probable tokens that distillation imitates at each position."""
    temperature: Positive | None = None
    """Divisor of the logits of both models in distillation, by default 1; of the similarities in embedding, 0.05."""
    pooling: Literal["mean", "last"] = "mean"
    """The embedding of a text in embedding: the mean of its tokens' activations, or the activations of its last token.
    """
    packing: Literal["auto", "best-fit", "none", "contiguous"] = "auto"
    """How documents are arranged in rows of seq_len tokens. best-fit: several whole documents a row, without attention
    between them; none: one document a row; contiguous: windows over one stream of text; auto: contiguous for plain
    text, best-fit for records."""
    too_long: Literal["cut", "split", "drop"] = "cut"
    """Treatment of documents longer than a row: cut (keep the first tokens), split (into several documents) or drop.
    Applies to the packings best-fit and none."""
    full: bool = False
    """Whether to tune all parameters instead of adapters. Each layer is updated inside the backward pass."""
    offload: tuple[Offload, ...] | None = dataclasses.field(default=None, metadata={"metavar": "WORDS", **_EDITABLE})
    """Data to keep in host memory: any of activations, optimizer and parameters. activations: the input of each block,
    until the backward pass. optimizer: its state, updated block by block. parameters: the layers, streamed one at a
    time; with `full` also embedding and head. The default is nothing; with `full` it is the layers, the optimizer state
    and the activations. As a flag: words separated by commas, or none."""
    num_steps: Count = dataclasses.field(default=300, metadata={"flag": "--steps", **_EDITABLE})
    """Optimizer steps."""
    num_epochs: Positive | None = dataclasses.field(default=None, metadata=_EDITABLE)
    """Passes over the training data, instead of `num_steps`; may be a fraction."""
    method: Literal["lora", "rslora", "dora", "ia3", "vera", "full"] = "lora"
    """The kind of adapter: lora, rslora, dora, ia3 or vera; the word full sets `full`."""
    adapter: PathText | None = dataclasses.field(default=None, metadata={"metavar": "DIR"})
    """A folder with an adapter to continue training, instead of a new adapter. Its files determine method, rank, alpha,
    targets, modules_to_save, bias and lora_init, which must be left out."""
    rank: Count = 16
    """Rank of the adapter; (IA)³ has none."""
    alpha: Positive = 32.0
    """LoRA scale: the adapter's product is multiplied by alpha / rank, in rslora by alpha / the square root of rank."""
    targets: str | tuple[str, ...] = dataclasses.field(default="layers/**/*_proj", metadata={"metavar": "GLOB"})
    """Globs on the paths of modules that get an adapter; by default all seven projections of a block. As a flag: one
    glob; repeat the flag for more."""
    modules_to_save: str | tuple[str, ...] | None = dataclasses.field(default=None, metadata={"metavar": "GLOB"})
    """Globs on the paths of modules to train in full and save with the adapter, such as outer/lm_head, outer/embed or
    layers/*_norm. As a flag: one glob; repeat the flag for more."""
    bias: Literal["none", "lora_only", "all"] = "none"
    """Which biases train with the adapter: none, lora_only (those of the targets) or all."""
    lora_init: Literal["peft", "gaussian", "orthogonal", "pissa", "olora", "eva"] = "peft"
    """Initialisation of the adapter's factors: peft, gaussian or orthogonal (random), pissa or olora (a part of the
    weight), or eva (the directions in which the inputs of the first batches vary most)."""
    lora_dropout: Share = 0.0
    """Dropout rate of the adapter's inputs in a training step."""
    loraplus_ratio: Positive = 1.0
    """LoRA+: ratio of the learning rate of the adapter's factors B to that of all other parameters; 16 is usual."""
    quantize: Format | None = None
    """Quantise the frozen projections of the layers while they are loaded: nf4 (4.1 bits a weight, as in QLoRA), int4,
    mxfp4, int8 or fp8."""
    quantize_embeddings: Format | None = None
    """Quantise the frozen embedding and head in the same way. int8 rounds by at most half a percent of a row's largest
    entry."""
    batch_size: Count = 8
    """Sequences in a batch."""
    seq_len: Annotated[int, Ge(0)] = 0
    """Tokens in a sequence. 0: the length of the longest record (for plain text, a sixteenth of all tokens), rounded up
    to a multiple of 64, up to 2,048 tokens and the model's context; for the embedded model up to 128 tokens. Each
    document of a pair gets half of it."""
    num_microbatches: Count = dataclasses.field(default=1, metadata=_EDITABLE)
    """Parts of a batch that run one after the other, to save activation memory. The load-balancing loss of a mixture of
    experts, and the divergence in kto, are computed for each part."""
    learning_rate: Positive | None = None
    """Peak learning rate; by default 2e-4 (with `full` 1e-5), for the embedded model 5e-3 (with `full` 1e-3)."""
    schedule: Schedule = "cosine"
    """Learning rate after the warm-up: cosine, linear (both fall over all steps), constant, inverse_sqrt, or
    warmup_stable_decay (constant, then linear at the end)."""
    final_rate_fraction: Annotated[float, Ge(0), Le(1)] = 0.1
    """Final learning rate as a fraction of the peak. Applies to cosine, linear and warmup_stable_decay."""
    decay_fraction: Annotated[float, Gt(0), Le(1)] = 0.1
    """Fraction of the steps in which the learning rate falls, at the end of warmup_stable_decay."""
    schedule_steps: Count | None = None
    """Length of the schedule in steps; by default all steps. Afterwards the learning rate stays constant, except with
    inverse_sqrt. A run resumed with more steps keeps the original length."""
    warmup_ratio: Share = 0.1
    """Linear warm-up as a fraction of the schedule's steps."""
    warmup_steps: Annotated[int, Ge(0)] | None = None
    """Steps of linear warm-up, instead of `warmup_ratio`."""
    weight_decay: NotNegative = 0.0
    """AdamW's decoupled weight decay of the trained parameters."""
    adam_beta1: Share = 0.9
    """Decay of AdamW's mean of gradients."""
    adam_beta2: Share = 0.999
    """Decay of AdamW's mean of squared gradients."""
    adam_epsilon: Positive = 1e-8
    """Number that AdamW adds to the square root of the mean of squared gradients."""
    max_grad_norm: NotNegative = 1.0
    """Gradients with a larger global norm are scaled down to this norm; 0 disables clipping."""
    clip_mode: Literal["exact", "previous", "layer"] = "exact"
    """With `full`, the norm for clipping: exact (of all gradients, with a second backward pass), previous (of the
    previous step) or layer (of each layer separately), as in `lowtide.offload.Clip`."""
    save_dtype: Dtype = "auto"
    """With `full`, dtype of the saved model: auto (as the base is stored), float32, bfloat16 or float16."""
    state_dtype: Literal["float32", "bfloat16", "8bit", "companded", "fp8", "4bit"] = "float32"
    """Storage format of AdamW's moments: float32, bfloat16, 8bit (bitsandbytes' map, blocks of 256), companded (8 bits
    with codes closer together near 0, blocks of 128), fp8 (e4m3) or 4bit (companded, blocks of 64)."""
    param_dtype: Dtype = "auto"
    """Dtype of the frozen base: auto (as stored; float32 on a CPU), float32, bfloat16 or float16. Trained parameters
    are float32. With `full`, bfloat16 stores them in bfloat16 plus an 8-bit residual for each weight."""
    compute_dtype: Dtype = "auto"
    """Dtype of activations: auto (bfloat16 on an accelerator, float32 on a CPU), float32, bfloat16 or float16."""
    remat: bool = dataclasses.field(default=True, metadata=_EDITABLE)
    """Whether to recompute each block in the backward pass instead of keeping its activations."""
    layers_per_remat: Count = dataclasses.field(default=1, metadata=_EDITABLE)
    """Number of consecutive blocks that keep one activation; the backward pass recomputes the others. Above 1, this
    saves memory for long sequences and costs one more forward pass. The fewest bytes are near the square root of the
    number of layers."""
    tile_tokens: Count | None = dataclasses.field(default=None, metadata=_EDITABLE)
    """Tokens in a tile of a recomputed block, of all rows of a device together; by default enough to keep the device
    busy. Smaller tiles take fewer bytes, and on a GPU more time."""
    attention: Literal["auto", Implementation] = dataclasses.field(
        default="auto", metadata={"metavar": f"{{{','.join(('auto', *IMPLEMENTATIONS))}}}", **_EDITABLE}
    )
    """Implementation of attention, described in `lowtide.ops.attention`; auto selects one for the device."""
    eval_every: Count = dataclasses.field(default=100, metadata=_EDITABLE)
    """Steps between held-out evaluations. The run also evaluates before the first step and after the last one."""
    held_out_fraction: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Fraction of the data kept for evaluation."""
    checkpoint_every: Count = dataclasses.field(default=50, metadata=_EDITABLE)
    """Steps between checkpoints; the last step is always saved."""
    max_to_keep: Count = dataclasses.field(default=2, metadata=_EDITABLE)
    """Number of newest checkpoints to keep."""
    keep_best: bool = dataclasses.field(default=False, metadata=_EDITABLE)
    """Whether to also keep the checkpoint with the lowest held-out loss."""
    load_best_at_end: bool = dataclasses.field(default=False, metadata=_EDITABLE)
    """Whether to write the adapter or model with the lowest held-out loss at the end, instead of the last one. Its
    checkpoint is kept, too."""
    early_stopping_patience: Count | None = dataclasses.field(default=None, metadata=_EDITABLE)
    """End the run after this many evaluations in a row without a lower held-out loss; by default, never end early."""
    early_stopping_threshold: NotNegative = dataclasses.field(default=0.0, metadata=_EDITABLE)
    """Least decrease of the held-out loss that counts as lower."""
    sample_tokens: Annotated[int, Ge(0)] = dataclasses.field(default=48, metadata=_EDITABLE)
    """Tokens of the text sampled before and after training; 0 disables the sample."""
    track: tuple[TrackerName, ...] | None = dataclasses.field(default=None, metadata={"metavar": "WORDS", **_EDITABLE})
    """Trackers that receive every record: any of tensorboard, wandb and trackio. Each needs the extra of its name."""
    project: Name = dataclasses.field(default="lowtide", metadata=_EDITABLE)
    """Project of the run in wandb and trackio."""
    run_name: Name | None = dataclasses.field(default=None, metadata=_EDITABLE)
    """Name of the run in wandb and trackio; by default the name of its folder."""
    report: bool = dataclasses.field(default=False, metadata=_EDITABLE)
    """Whether the run writes report.html: one page with its curves, samples and memory."""
    seed: Annotated[int, Ge(0), Lt(2**32)] = 0
    """Seed of the data order, the adapters and the sample."""

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
    def loss_unit(self) -> str:
        """Unit of the loss: nats per token, or per pair of a preference."""
        units = {"classification": "nats/text", "kto": "nats/answer"}
        return units.get(self.objective, "nats/pair" if self.objective in _PAIRED else "nats/token")

    @property
    def document_tokens(self) -> int:
        """Largest number of tokens of a document; both documents of a pair are in one row."""
        return self.seq_len // (2 if self.objective in _PAIRED else 1)

    @property
    def step_microbatches(self) -> int:
        """Number of parts in which a step computes the loss; the objective embedding splits its batch itself."""
        return 1 if self.objective == "embedding" else self.num_microbatches

    @property
    def num_scores(self) -> int:
        """Number of outputs of the head of reward and classification; 0 for other objectives."""
        return {"reward": 1, "classification": self.num_labels}.get(self.objective, 0)

    @property
    def is_packed(self) -> bool:
        """Whether batches have segment ids and positions. With auto packing, this is a guess: True if `data` is set."""
        return self.packing != "contiguous" and (self.packing != "auto" or self.data is not None)

    @property
    def adapter_text(self) -> str:
        """Description of the adapter for messages."""
        if self.adapter is not None:
            return f"that of {self.adapter}"
        targets = self.targets if isinstance(self.targets, str) else ", ".join(self.targets)
        rank = "" if self.method == "ia3" else f" rank {self.rank}"
        return f"{_METHODS[self.method]}{rank} on {targets}"


def config_from_dict(values: Mapping[str, Any], where: str) -> FinetuneConfig:
    """Build a configuration from plain values.

    Args:
        values: field names and values, as in TOML.
        where: source of the values, for messages.

    Returns:
        The configuration.

    Raises:
        ConfigError: for an unknown field (with near misses), and as the constructor of `FinetuneConfig`.
    """
    names = [field.name for field in dataclasses.fields(FinetuneConfig)]
    for name in values:
        if name not in names:
            raise ConfigError(f"{where}: unknown key {name!r}", hint=_suggest_setting(name, names))
    if values.get("method") == "full":
        if values.get("full") is False:
            _refuse_both("method", "full", "full = false selects an adapter")
        values = {**{name: value for name, value in values.items() if name != "method"}, "full": True}
    if values.get("full") is True:
        _refuse_with_full([name for name in _ADAPTER_FIELDS if name in values])
    arguments: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return FinetuneConfig(**arguments)


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
        raise ConfigError(f"{path}: cannot be read", got=str(error), hint="name a TOML file with --config") from error
    except tomllib.TOMLDecodeError as error:
        hint = 'write lines such as: rank = 16, targets = "**/q_proj"'
        raise ConfigError(f"{path}: not a TOML file", got=str(error), hint=hint) from error


def flag_of(field: str) -> str:
    """Return the command-line flag of a field of `FinetuneConfig`, such as ``--seq-len``."""
    flag = FinetuneConfig.__dataclass_fields__[field].metadata.get("flag")
    return flag or f"--{field.replace('_', '-')}"


def config_to_toml(config: FinetuneConfig) -> str:
    """Return the fields that are not None as TOML, except adapter settings with `full`, and `num_steps` with epochs."""
    omitted = [*_ADAPTER_FIELDS] if config.full else []
    omitted += ["num_steps"] if config.num_epochs is not None else []
    import tomli_w

    return tomli_w.dumps({k: v for k, v in dataclasses.asdict(config).items() if v is not None and k not in omitted})


def with_steps(config: FinetuneConfig, num_sequences: int) -> FinetuneConfig:
    """Return the configuration with `num_epochs` converted to `num_steps`; an epoch has `num_sequences` sequences."""
    if config.num_epochs is None:
        return config
    num_steps = max(1, math.ceil(config.num_epochs * num_sequences / config.batch_size))
    return dataclasses.replace(config, num_epochs=None, num_steps=num_steps)


def with_seq_len(config: FinetuneConfig, context: int, longest: int | None = None) -> FinetuneConfig:
    """Return the configuration; a `seq_len` of 0 is replaced by a default for the model and the data.

    `context` is the model's number of positions. `longest` is the needed length, such as the length of the longest
    record. If it is None, the largest default length replaces 0.
    """
    if config.seq_len:
        return config
    max_len = min(_MOST_TOKENS, context) if config.model is not None else _EMBEDDED_TOKENS
    needed_len = max_len if longest is None else max(1, math.ceil(longest / _ROUND_TOKENS)) * _ROUND_TOKENS
    return dataclasses.replace(config, seq_len=min(max_len, needed_len))


@functools.cache
def _schema() -> type[BaseModel]:
    """Return the fields and their types as a strict pydantic model, which converts no value to another type."""
    from pydantic import ConfigDict, create_model

    kinds: dict[str, Any] = typing.get_type_hints(FinetuneConfig, include_extras=True)
    fields: dict[str, Any] = {name: (kind, ...) for name, kind in kinds.items()}
    return create_model("Settings", __config__=ConfigDict(strict=True, allow_inf_nan=False), **fields)


def _validate(config: FinetuneConfig) -> None:
    """Raise ConfigError for the first field with a value of the wrong type, or out of range."""
    require_extra("finetune")
    from pydantic import ValidationError

    try:
        _schema().model_validate(vars(config))
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        field, value, error_type = str(details["loc"][0]), details["input"], details["type"]
        expected = details["msg"].removeprefix("Input should be ").replace("greater than or equal to", "at least")
        if error_type == "literal_error":
            words = details.get("ctx", {})["expected"].replace(" or ", ", ").replace("'", "")
            if isinstance(value, str):
                raise _unknown_word(field, value, words, is_one=len(details["loc"]) == 1) from None
        if error_type == "string_too_short":
            hint = f"leave {field} out, or check whether a variable of your script is unset"
            raise ConfigError(f"{field} is empty", hint=hint) from None
        if error_type == "predicate_failed":
            raise _out_of_range(field, value, "a name") from None
        if error_type in ("finite_number", "greater_than", "greater_than_equal", "less_than", "less_than_equal"):
            raise _out_of_range(field, value, expected) from None
        raise ConfigError(f"{field} must be {expected}, not {shown(getattr(config, field))}") from None


def _out_of_range(field: str, value: Any, expected: str) -> ConfigError:
    hint = f"change {field} in the TOML file, or {flag_of(field)}"
    return ConfigError(f"{field} is out of range", expected=expected, got=value, hint=hint)


def _unknown_word(field: str, word: str, words: str, *, is_one: bool) -> ConfigError:
    close = difflib.get_close_matches(word, words.split(", "), n=2, cutoff=0.4)
    suggestion = (
        f"did you mean {' or '.join(close)}?" if close else f"use for instance {flag_of(field)} {words.split(', ')[0]}"
    )
    return ConfigError(
        f"{field} is out of range" if is_one else f"{field}: unknown word {word!r}",
        expected=f"{'one' if is_one else 'any'} of {words}",
        got=word,
        hint=_HINTS.get(word.lower(), suggestion),
    )


def _check_combination(config: FinetuneConfig) -> None:
    """Raise ConfigError for settings that contradict each other, or of which one would have no effect."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    changed = {name for name, value in defaults.items() if getattr(config, name) != value}
    _refuse_contradictions(config, changed)
    if config.lora_init == "orthogonal" and config.rank % 2:
        raise _out_of_range("rank", config.rank, "an even number, with lora_init = orthogonal")
    if config.full:
        _refuse_with_full([name for name in _ADAPTER_FIELDS if name in changed])
    _refuse_training_settings(config, changed)
    _refuse_for_objective(config, changed)


def _refuse_for_objective(config: FinetuneConfig, changed: set[str]) -> None:
    """Raise ConfigError for settings of another objective, and for settings that contradict the objective."""
    for name, objectives in _OBJECTIVES_WITH.items():
        if name in changed and config.objective not in objectives:
            hint = f"leave {name} out, or tune with --objective {objectives[0]}"
            raise ConfigError(f"{name} applies only to {', '.join(objectives)}", hint=hint)
    if (config.objective == "distillation") != (config.teacher is not None):
        raise ConfigError("distillation needs a teacher", hint="name its folder with --teacher DIR")
    if config.objective in ("sft", "distillation"):
        return
    for name, (objectives, reason) in _OBJECTIVES_WITHOUT.items():
        if name in changed and config.objective in objectives:
            _refuse_both("objective", name, f"in {config.objective}, {reason}")
    if config.packing in _REFUSED_PACKINGS.get(config.objective, ("contiguous",)) or config.too_long == "split":
        name = "too_long" if config.too_long == "split" else "packing"
        _refuse_both("objective", name, f"{config.objective} needs whole documents in one row")
    if config.data is None:
        fields = {
            "kto": "prompt, completion and label",
            "classification": "text and label",
            "embedding": "anchor and positive",
        }
        fields = fields.get(config.objective, "prompt, chosen and rejected")
        hint = f"name a file of records with {fields}: --data pairs.jsonl"
        raise ConfigError(
            f"objective {config.objective} needs data: the built-in corpus has no such records", hint=hint
        )
    if config.objective == "embedding" and config.batch_size == 1:
        raise _out_of_range("batch_size", 1, "at least 2, since other pairs of the batch are the negatives")
    if config.label_smoothing >= 0.5:
        raise _out_of_range("label_smoothing", config.label_smoothing, "a share below 0.5")
    if config.label_smoothing and config.preference_loss not in ("sigmoid", "robust"):
        _refuse_both("label_smoothing", "preference_loss", f"{config.preference_loss} has no smoothing")


def _refuse_contradictions(config: FinetuneConfig, changed: set[str]) -> None:
    """Raise ConfigError for a changed setting that another setting makes useless or invalid."""
    unused = {
        "ia3": ("rank", "alpha", "bias", "lora_init", "lora_dropout", "loraplus_ratio"),
        "vera": ("alpha", "bias", "lora_init", "loraplus_ratio"),
    }.get(config.method, ())
    has_final_rate, has_stable_part = config.schedule in _DECAYING_SCHEDULES, config.schedule == "warmup_stable_decay"
    is_split = config.method == "dora" and config.lora_init in ("pissa", "olora")
    contradictions = (
        ("num_steps" in changed, "num_epochs", "num_steps", "num_epochs replaces num_steps"),
        ("warmup_steps" in changed, "warmup_ratio", "warmup_steps", "warmup_ratio replaces warmup_steps"),
        (not has_final_rate, "final_rate_fraction", "schedule", f"the schedule {config.schedule} has no final rate"),
        (not has_stable_part, "decay_fraction", "schedule", f"the schedule {config.schedule} has no stable part"),
        (config.max_grad_norm == 0, "clip_mode", "max_grad_norm", "max_grad_norm = 0 disables clipping"),
        *((config.adapter is not None, name, "adapter", "the adapter's files set it") for name in _NEW_ADAPTER_FIELDS),
        *((True, name, "method", f"{config.method} has no {name}") for name in unused),
        (is_split, "lora_init", "method", f"dora takes norms of the whole weight, which {config.lora_init} splits"),
    )
    for is_conflict, first, second, reason in contradictions:
        if is_conflict and first in changed:
            _refuse_both(first, second, reason)


def _refuse_training_settings(config: FinetuneConfig, changed: set[str]) -> None:
    """Raise ConfigError for invalid combinations of `full`, `offload`, `remat` and other settings of the step."""
    is_streamed = "parameters" in (config.offload or ())
    if config.early_stopping_patience is None and "early_stopping_threshold" in changed:
        problem = "early_stopping_threshold has no effect without early_stopping_patience"
        raise ConfigError(problem, hint="set early_stopping_patience, too; 3 is usual")
    if config.full and config.param_dtype == "float16":
        hint = 'leave param_dtype out; to compute in half precision, set compute_dtype = "float16"'
        raise ConfigError("param_dtype: full trains the parameters, which cannot be float16", hint=hint)
    for name in ("clip_mode", "save_dtype"):
        if not config.full and name in changed:
            hint = f"leave {name} out, or tune with --full"
            raise ConfigError(f"{name} applies only to full-parameter tuning", hint=hint)
    for name in ("quantize", "quantize_embeddings"):
        if is_streamed and getattr(config, name) in FOUR_BITS:
            problem = f"{name} contradicts offload of parameters: JAX runs no program on 4-bit arrays in host memory"
            hint = "leave parameters out of offload, or use int8; 4 bits take a quarter of bfloat16's bytes"
            raise ConfigError(problem, hint=hint)
    if not config.remat and config.tile_tokens is not None:
        problem = "tile_tokens applies to blocks that the backward pass recomputes, and remat = false recomputes none"
        raise ConfigError(problem, hint="leave tile_tokens out, or remat = false")
    for is_conflict, name, reason in (
        (not config.remat, "remat = false", "remat = false, which recomputes nothing"),
        (config.full, "full", "full, whose layers are updated one by one, each from its own input"),
        (is_streamed, "parameters", "offload of parameters, which streams layers, each from its own input"),
    ):
        if config.layers_per_remat > 1 and is_conflict:
            hint = f"leave out one of them: layers_per_remat, or {name}"
            raise ConfigError(f"layers_per_remat contradicts {reason}", hint=hint)
    remat_users = ["full"] * config.full + [w for w in config.offload or () if w in ("activations", "parameters")]
    if remat_users and not config.remat:
        problem = f"remat = false contradicts {remat_users[0]}, which recomputes each block in the backward pass"
        hint = "leave remat out; to keep activations on the device, use neither --full nor --offload for them"
        raise ConfigError(problem, hint=hint)


def _refuse_both(first: str, second: str, reason: str) -> None:
    raise ConfigError(f"{first} contradicts {second}: {reason}", hint="leave one of them out")


def _refuse_with_full(names: list[str]) -> None:
    if names:
        hint = f"leave out {', '.join(names)}, or full"
        raise ConfigError(f"{names[0]} is a setting of adapters, and full tunes all parameters without one", hint=hint)


_PREFERENCES = ("dpo", "kto", "orpo", "simpo", "cpo")
"""Objectives that compare answers."""
_OBJECTIVES_WITH = {
    "beta": _PREFERENCES,
    "preference_loss": ("dpo",),
    "label_smoothing": ("dpo", "simpo", "cpo"),
    "preference_margin": ("simpo",),
    "nll_weight": ("cpo", "distillation"),
    "num_labels": ("classification",),
    "reward_margin": ("reward",),
    **dict.fromkeys(("desirable_weight", "undesirable_weight"), ("kto",)),
    **dict.fromkeys(("teacher", "teacher_top_k"), ("distillation",)),
    "temperature": ("distillation", "embedding"),
    "pooling": ("embedding",),
}
"""Objectives that read a setting; `FinetuneConfig` refuses it with any other."""
_PAIRED = (*_PREFERENCES, "reward", "embedding")
_REFUSED_PACKINGS = {"embedding": ("contiguous", "best-fit")}  # in a row of several pairs, pairs would have no number
_HEADS = ("reward", "classification")
_OBJECTIVES_WITHOUT = {
    "loss_on": ((*_PREFERENCES, *_HEADS, "embedding"), "documents are compared as a whole"),
    "modules_to_save": (_PREFERENCES, "the reference is the model without adapters"),
    "full": ((*_HEADS, "embedding"), "an adapter is trained"),
    "adapter": (_HEADS, "the head is new"),
    "lora_dropout": (("embedding",), "parts of a batch would have the same mask"),
}
"""Objectives that contradict a setting, and the reason."""
_SYNONYMS = {
    "objective": "stage training_type rl rlhf trainer_type",
    "beta": "pref_beta dpo_beta rl_beta",
    "preference_loss": "loss_type pref_loss dpo_loss",
    "label_smoothing": "dpo_label_smoothing label_smoothing_factor",
    "preference_margin": "simpo_gamma gamma",
    "nll_weight": "cpo_alpha rpo_alpha",
    "model": "model_name model_name_or_path pretrained_model_name_or_path base_model checkpoint_dir",
    "tokenizer": "tokenizer_name tokenizer_name_or_path tokenizer_config",
    "data": "dataset datasets dataset_name dataset_path train_file train_data",
    "eval_data": "test_datasets eval_dataset validation_file",
    "packing": "sample_packing pad_to_sequence_len",
    "loss_on": "train_on_inputs train_on_input completion_only_loss assistant_only_loss",
    "full": "full_finetuning finetuning_type",
    "num_steps": "steps max_steps max_steps_per_epoch total_steps iterations num_iterations iters",
    "num_epochs": "epochs num_train_epochs epoch",
    "rank": "r lora_r lora_rank lora_dim",
    "alpha": "lora_alpha lora_scale",
    "lora_dropout": "dropout lora_drop adapter_dropout",
    "loraplus_ratio": "loraplus_lr_ratio loraplus lora_plus",
    "lora_init": "init_lora_weights peft_init_lora_weights",
    "modules_to_save": "additional_target lora_modules_to_save",
    "bias": "lora_bias train_bias",
    "targets": "target_modules lora_target_modules lora_attn_modules lora_target target_parameters",
    "batch_size": "per_device_train_batch_size train_batch_size micro_batch_size per_device_batch_size",
    "seq_len": "max_seq_length max_seq_len max_length model_max_length sequence_len sequence_length cutoff_len "
    "block_size context_length",
    "learning_rate": "lr max_lr peak_lr",
    "schedule": "lr_scheduler lr_scheduler_type lr_schedule scheduler",
    "final_rate_fraction": "min_lr min_lr_rate min_lr_ratio min_learning_rate lr_scheduler_kwargs cosine_min_lr_ratio",
    "decay_fraction": "num_decay_steps decay_steps lr_decay_steps decay_ratio",
    "schedule_steps": "lr_decay_iters num_training_steps",
    "warmup_steps": "num_warmup_steps warmup warmup_iters lr_warmup_steps",
    "warmup_ratio": "warmup_fraction",
    "max_grad_norm": "clip_grad_norm gradient_clipping grad_clip gradient_clip_val max_norm clip",
    "adam_beta1": "betas adam_betas beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps epsilon adam_eps",
    "weight_decay": "wd",
    "param_dtype": "torch_dtype dtype model_dtype",
    "state_dtype": "optim_bits optimizer_state_dtype adamw_8bit use_8bit_optimizer",
    "compute_dtype": "bf16 fp16 mixed_precision",
    "remat": "gradient_checkpointing activation_checkpointing enable_activation_checkpointing "
    "use_gradient_checkpointing",
    "layers_per_remat": "recompute_num_layers checkpoint_num_layers",
    "attention": "attn_implementation attn_impl flash_attention use_flash_attention",
    "tile_tokens": "tiled_mlp tiled_mlp_num_shards",
    "offload": "enable_activation_offloading optimizer_in_bwd cpu_offload offload_optimizer",
    "eval_every": "eval_steps eval_interval run_val_every_n_steps evaluation_strategy eval_strategy val_check_interval",
    "held_out_fraction": "val_set_size test_size validation_split val_fraction",
    "checkpoint_every": "save_steps save_interval save_every_n_steps save_strategy save_every",
    "max_to_keep": "save_total_limit keep_last_n_checkpoints num_checkpoints",
    "load_best_at_end": "load_best_model_at_end",
    "early_stopping_patience": "early_stopping patience",
    "seed": "random_state data_seed random_seed",
    "track": "report_to metric_logger logging_backend log_with tracker use_wandb",
    "project": "wandb_project project_name trackio_project",
    "run_name": "wandb_name wandb_run_name experiment_name",
}
"""Our settings with their names in PEFT, transformers, TRL, torchtune, Unsloth and Axolotl. The names serve only hints.
They are no aliases, because the settings differ in more than the name."""
_REMARKS = {
    "--quantize nf4": "load_in_4bit use_qlora",
    "--quantize int8": "load_in_8bit",
    "--method dora": "use_dora peft_use_dora",
    "--method rslora": "use_rslora peft_use_rslora",
    "num_microbatches, the parts of a batch; batch_size counts all parts together": "gradient_accumulation_steps "
    "gradient_accumulation grad_accum_steps accumulate_grad_batches",
    "--out, the folder of the run": "output_dir out_dir",
    "--resume, with the --out of the run": "resume_from_checkpoint",
}
"""Texts for hints, each with names of other libraries' settings for which `FinetuneConfig` has no equivalent field."""
_SETTING_OF_SYNONYM = {name: text for text, names in (_SYNONYMS | _REMARKS).items() for name in names.split()}


def setting_of(name: str) -> str | None:
    """Return our key or flag for a key or flag of another library, or a remark; None for an unknown name."""
    key = name.lstrip("-").partition("=")[0].replace("-", "_").lower()
    return _SETTING_OF_SYNONYM.get(key)


def _suggest_setting(name: str, names: list[str]) -> str:
    if (setting := setting_of(name)) is not None:
        return f"{name} is a setting of other libraries; use {setting}"
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"the keys are {', '.join(names)}"
