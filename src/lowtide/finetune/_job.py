"""Build the training step of a fine-tuning job from its settings: model, loss, optimizer, learning rate and batch.

A run makes a `JobPlan` from the weights that it loads. `lowtide fits`, `lowtide explain` and ``--budget`` make a
`JobPlan` of shapes from `config.json`, and compile its step for any target. The words of ``FinetuneConfig.offload``
decide which leaves are loaded onto the host, and where the inputs of blocks and the optimizer state are kept. They are
also arguments of the layerwise step of ``full``.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from .. import models, offload, quant, train
from ..adapters import lora
from ..core import ConfigError, LayerStack, Tree, hidden_pass, leaves_with_paths, memory_space, tree_bytes
from ..memory import Job, Target
from ..optim import low_precision
from ..planning import Memory, Remat
from ..targets import resolve_target
from ._base import directory_of, dtypes, formats, open_base, refuse_for_model, training_dtype, with_implementation
from ._config import LORA_VARIANTS, FinetuneConfig, config_from_dict, with_seq_len
from .data._pack import TextData
from .objectives import objective

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WRT = "**/lora_*"
"""Glob of the trainable leaves of a model with adapters."""
_NUM_EVA_BATCHES = 8
"""Number of training batches that EVA reads."""


def step_job(model: str | Path, *, target: Target | str | None = None, **settings: Any) -> Job:
    """Return the training step of `lowtide finetune`, with shapes instead of arrays.

    Args:
        model: a folder with `config.json`, or a GGUF file. Weights are not read and need not exist. If the folder's
            weights are quantised, the base has their format.
        target: device that the step will be compiled for, which decides the meaning of the dtype ``auto``. None: the
            hardware at hand.
        **settings: fields of `FinetuneConfig`, such as `batch_size`, `seq_len`, `quantize`, `full` and `offload`.
            Batches have the columns ``segment_ids`` and ``positions``, unless `packing` is ``contiguous``.

    Returns:
        The job, for `lowtide.memory.Job.analyze`.

    Raises:
        ModelFileError: when `config.json` cannot be read.
        ConfigError: for an unknown setting or a value out of range.
        SelectionError: when `targets` matches nothing.
        TargetError: when `target` is an unknown device.

    Examples:
        >>> from lowtide import models
        >>> step_job(models.base_path(), batch_size=2, seq_len=32).analyze("cpu").by_role["batch"]
        1024
    """
    packing = "none" if settings.get("objective") == "embedding" else "best-fit"
    config = config_from_dict({"packing": packing, **settings, "model": str(model)}, "the settings")
    return JobPlan.from_shapes(config, target).job()


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobPlan:
    """The parts of a job's training step, as arrays or as shapes."""

    config: FinetuneConfig
    base: models.Decoder
    model: models.Decoder
    """The base with its adapters; with `full` the base itself."""

    @classmethod
    def make(cls, config: FinetuneConfig, base: models.Decoder) -> JobPlan:
        """Add the configured adapter to a base, and the head of the objective."""
        if config.num_scores:
            base = models.with_score_head(base, config.num_scores, key=jax.random.key(config.seed))
        return cls(config=config, base=base, model=base if config.full else add_adapter(base, config))

    @classmethod
    def from_shapes(cls, config: FinetuneConfig, target: Target | str | None = None) -> JobPlan:
        """Make the plan from `config.json`, without weights; dtypes, formats and memory spaces are as in a run.

        `target` decides what the dtype ``auto`` means; None stands for the hardware at hand.
        """
        directory = directory_of(config)
        refuse_for_model(config, directory)
        platform = None if target is None else resolve_target(target).platform
        weights_dtype, activations_dtype = dtypes(training_dtype(config), config.compute_dtype, platform)
        base = models.load_shapes(directory, dtype=weights_dtype, compute_dtype=activations_dtype)
        base = with_implementation(base, config.attention, config.tile_tokens)
        for glob, format_name in (formats(config) or {}).items():
            base = quant.quantize(base, glob, format_name)
        if (select_hosted := is_hosted(config)) is not None:
            base = offload.to_host(base, select_hosted)
        return cls.make(with_seq_len(config, base.config.max_position_embeddings), base)

    @property
    def schedule(self) -> optax.Schedule:
        """The learning rate by step."""
        return learning_rate(self.config)

    @property
    def loss_fn(self) -> Callable[..., Any]:
        """The loss function of the step; with dropout it also takes a random key."""
        loss_fn, rate = objective_loss(self.config), self.config.lora_dropout
        return partial(_loss_with_dropout, loss_fn, rate) if rate else loss_fn

    @property
    def tx(self) -> Any:
        """The optimizer; with `full` a `lowtide.offload.LayerwiseStep`, which also computes the loss."""
        if self.config.full:
            return full_step(self.config, objective_stack(self.base, self.config), self.schedule)
        return optimizer(self.config, self.schedule)

    def job(self, *, drops_updates: bool = False) -> Job:
        """Return the step; its roles are as in `train.step_job`, or with `full` ``state``, ``frozen`` and ``batch``.

        `drops_updates` is that of `train.step_job`; it has no effect with `full`.
        """
        config, tx = self.config, self.tx
        names = ("tokens", "labels", *(("segment_ids", "positions") if config.is_packed else ()))
        names += ("targets",) if objective(config.objective).targets else ()
        batch = {name: jax.ShapeDtypeStruct((config.batch_size, config.seq_len), jnp.int32) for name in names}
        if has_reference(config):
            batch |= jax.eval_shape(reference_columns(config), self.base, batch)
        if config.full:
            args = (*tx.init(self.base.outer, self.base.layers), batch)
            return Job(fn=tx, args=args, roles={"state": 0, "frozen": 1, "batch": 2}, donate_argnums=0)
        weight = objective(config.objective).weight
        options: dict[str, Any] = {"num_microbatches": config.step_microbatches, "weight": weight}
        return train.step_job(self.model, self.loss_fn, tx, WRT, batch, drops_updates=drops_updates, **options)

    def saved_bytes(self) -> int | None:
        """Count the bytes of gradients and optimizer state that training the frozen weights of the base would need.

        Each weight counts in its dtype, a quantised weight in the dtype of the weight that it replaces. A weight with a
        trainable copy (`modules_to_save`) does not count. None with `full`, where no weight is frozen.
        """
        if self.config.full:
            return None
        model_paths = {path for path, _ in leaves_with_paths(self.model)}
        weights = leaves_with_paths(self.base, is_leaf=lambda node: isinstance(node, quant.QuantizedWeight))
        frozen = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for path, leaf in weights
            if is_weight(path, leaf) and f"{path}/lora_saved" not in model_paths
        ]
        tx = _with_state_format(self.config, adamw(self.config, self.schedule))  # clipping and LoRA+ have no state
        state = jax.tree.leaves(jax.eval_shape(tx.init, frozen))
        # Scalars are counters of steps, which the state of the adapters has, too.
        return tree_bytes([frozen, [leaf for leaf in state if leaf.ndim]])


def load_base(config: FinetuneConfig, directory: Path, sharding: Any) -> tuple[models.Decoder, Tokenizer]:
    """Load the base of a job and its tokenizer; `JobPlan.from_shapes` makes the same base as shapes."""
    refuse_for_model(config, directory)
    return open_base(
        directory,
        tokenizer=config.tokenizer,
        param_dtype=training_dtype(config),
        compute_dtype=config.compute_dtype,
        host=is_hosted(config),
        sharding=sharding,
        quantize=formats(config),
        attention=config.attention,
        tile_tokens=config.tile_tokens,
    )


def add_adapter(base: models.Decoder, config: FinetuneConfig) -> models.Decoder:
    """Add the configured adapter to a model, or load `config.adapter`.

    With EVA the factors are random until `add_eva_adapter` initialises them; a target that it cannot initialise raises
    StructureError here, before any data is read.
    """
    if config.adapter is not None:
        with warnings.catch_warnings():
            if config.lora_dropout:  # the warning tells the user to set a dropout, and here it is set
                warnings.filterwarnings("ignore", r".*_dropout .* is not applied")
            return lora.load(base, config.adapter)
    key, config = jax.random.key(config.seed), _with_leading_targets(config, base)
    shared_kwargs: dict[str, Any] = {"modules_to_save": _modules_to_save(config)}
    if config.method == "ia3":
        # (IA)³ scales the inputs of `down_proj` and the outputs of all other targets. A `feedforward` pattern that
        # matches no target is an error. So first find the targets, then pass the paths of those that are `down_proj`.
        without_feedforward = lora.IA3Config(targets=config.targets, feedforward=())
        paths = [match.path for match in lora.report(lora.add(base, without_feedforward)).matched]
        feedforward = tuple(path for path in paths if path.endswith("/down_proj/weight"))
        return lora.add(base, lora.IA3Config(targets=config.targets, feedforward=feedforward, **shared_kwargs))
    if config.method == "vera":
        return lora.add(base, lora.VeRAConfig(rank=config.rank, targets=config.targets, **shared_kwargs), key=key)
    model = lora.add(base, _lora_config(config), key=key)
    if config.lora_init == "eva":
        lora.check_eva(base, model)
    return model


def add_eva_adapter(base: models.Decoder, config: FinetuneConfig, batches: Any) -> models.Decoder:
    """Add a LoRA adapter that EVA initialises from the first training batches, one microbatch at a time.

    `batches` maps the number of a step to its batch.
    """
    num_rows = config.batch_size // config.num_microbatches
    microbatches = [
        {name: leaf[index * num_rows : (index + 1) * num_rows] for name, leaf in batches[step].items()}
        for step in range(_NUM_EVA_BATCHES)
        for index in range(config.num_microbatches)
    ]
    key, config = jax.random.key(config.seed), _with_leading_targets(config, base)
    # EVA runs no backward pass, and reads the inputs of supervised tuning.
    loss_fn = objective_loss(dataclasses.replace(config, layers_per_remat=1), name="sft")
    return lora.eva(base, _lora_config(config), loss_fn, microbatches, key=key, has_aux=True)


def _with_leading_targets(config: FinetuneConfig, base: models.Decoder) -> FinetuneConfig:
    """Extend the default targets to leading layers, whose weights are not in the stack."""
    if base.config.num_dense_layers and config.targets == FinetuneConfig.targets:
        return dataclasses.replace(config, targets=base.config.projections)
    return config


def _modules_to_save(config: FinetuneConfig) -> tuple[str, ...]:
    globs = config.modules_to_save or ()
    globs = (globs,) if isinstance(globs, str) else globs
    return (*globs, "outer/score") if config.num_scores else globs


def _lora_config(config: FinetuneConfig) -> lora.Config:
    return lora.Config(
        rank=config.rank,
        alpha=config.alpha,
        targets=config.targets,
        bias=config.bias,
        init="peft" if config.lora_init == "eva" else config.lora_init,
        modules_to_save=_modules_to_save(config),
        **LORA_VARIANTS.get(config.method, {}),
    )


def objective_loss(config: FinetuneConfig, inputs: Memory | None = None, name: str | None = None) -> Callable[..., Any]:
    """Return the loss of the objective, with layers that run as the settings say.

    `inputs` replaces the memory that the settings select for the kept inputs of layers, and `name` the objective.
    """
    inputs, loss_of_objective = inputs or inputs_place(config), objective(name or config.objective).loss
    is_recomputed = config.remat or inputs == "host"
    remat = Remat(layer_inputs=inputs, layers_per_remat=config.layers_per_remat) if is_recomputed else None

    def hidden_of(model: models.Decoder, batch: Tree) -> Any:
        return _hidden(model, _on_device(model.outer), batch, remat)

    def loss_fn(model: models.Decoder, batch: Tree) -> tuple[Any, Tree]:
        model = dataclasses.replace(model, outer=_on_device(model.outer))
        return loss_of_objective(model, batch, hidden_of, config)

    return loss_fn


def objective_stack(model: models.Decoder, config: FinetuneConfig) -> LayerStack:
    """Return the model as a stack whose last function computes the loss of the objective."""
    loss_of_objective, empty = objective(config.objective).loss, dataclasses.replace(model, outer={}, layers={})

    def last(outer: Tree, h: Any, batch: Tree) -> tuple[Any, Tree]:
        return loss_of_objective(dataclasses.replace(empty, outer=outer), batch, lambda *_: h, config)

    # The chunks of `chunked_log_probs` use the head in a loop, so only supervised tuning keeps running totals.
    return empty.stack if config.objective == "sft" else dataclasses.replace(empty.stack, last=last, running=())


def reference_columns(config: FinetuneConfig) -> Callable[[models.Decoder, Tree], Tree]:
    """Return a compiled function that computes the columns of the objective's reference from a model and a batch."""
    columns = objective(config.objective).reference
    assert columns is not None

    @jax.jit
    def compute(model: models.Decoder, batch: Tree) -> Tree:
        model = dataclasses.replace(model, outer=_on_device(model.outer))
        # As many parts as in the step, so that this program has no more activations.
        parts = jax.tree.map(lambda leaf: leaf.reshape(config.num_microbatches, -1, *leaf.shape[1:]), batch)
        results = jax.lax.map(lambda part: columns(model, part, hidden, config), parts)
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), results)

    return compute


def has_reference(config: FinetuneConfig) -> bool:
    """Return whether a frozen model in host memory computes columns of each batch before the step.

    With adapters, the reference of preferences is the base, which the step has anyway.
    """
    return config.teacher is not None or (config.full and objective(config.objective).reference is not None)


class _BatchesWithColumns(Sequence[Any]):
    """Batches by number, each with the columns that `columns` computes when the batch is read."""

    def __init__(self, batches: Any, columns: Callable[[Tree], Tree]) -> None:
        self._batches, self._columns = batches, columns

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: Any) -> Any:
        batch = self._batches[number]
        return {**batch, **self._columns(batch)}


def with_reference(data: TextData, config: FinetuneConfig, base: models.Decoder, tokenizer: Tokenizer) -> TextData:
    """Add the columns of a frozen model to the batches, if the objective reads them.

    A separate program computes them before each step. So the step holds neither the frozen model nor its activations.
    """
    if not has_reference(config):
        return data
    columns = partial(reference_columns(config), load_reference(config, base, tokenizer))
    train, held_out = (_BatchesWithColumns(batches, columns) for batches in (data.train, data.held_out))
    return dataclasses.replace(data, train=train, held_out=held_out)


def load_reference(config: FinetuneConfig, base: models.Decoder, tokenizer: Tokenizer) -> models.Decoder:
    """Load the frozen model of `has_reference`, with its matrices on the host: the teacher, or the untuned model."""
    directory = directory_of(config) if config.teacher is None else Path(config.teacher)
    refuse_for_model(FinetuneConfig(offload=("parameters",)), directory)
    is_other = (
        config.teacher is not None and models.gguf_file(directory) is None
    )  # a GGUF file needs a tokenizer's folder
    tokenizer_dir = None if is_other else config.tokenizer or directory_of(config)
    model, its_tokenizer = open_base(
        directory,
        tokenizer=tokenizer_dir,
        compute_dtype=config.compute_dtype,
        host=_matrices_of(("layers", "outer")),
        attention=config.attention,
        tile_tokens=config.tile_tokens,
    )
    if its_tokenizer.get_vocab() != tokenizer.get_vocab():
        hint = "name a teacher with the tokenizer of the model, such as a larger model of the same family"
        raise ConfigError(f"teacher: {directory} has another tokenizer than the model", hint=hint)
    # The heads of one family may have different numbers of rows that no token uses.
    return model.with_vocabulary(min(model.config.vocab_size, base.config.vocab_size))


def _loss_with_dropout(
    loss_fn: Callable[..., Any], rate: float, model: Tree, batch: Tree, *, key: Any, training: bool
) -> Any:
    """Compute the loss; in a training step, the inputs of the adapters get dropout."""
    return loss_fn(lora.dropout(model, rate, key=key) if training else model, batch)


def hidden(model: models.Decoder, batch: Tree) -> Any:
    """Compute the last block's output [B, T, D] for a model whose leaves may be in host memory.

    Text is sampled without a cache, so layers on the host are streamed once for each token.
    """
    return _hidden(model, _on_device(model.outer), batch, None)


def _hidden(model: models.Decoder, outer: Tree, batch: Tree, remat: Remat | None) -> Any:
    # A plan replaces `LayerStack.hidden`, and so the settings of the run.
    if hidden_pass.value is not None or (remat is None and not _on_host(model.layers)):
        return model.stack.hidden(outer, model.layers, batch)
    return (remat or Remat()).hidden(model.stack, outer, model.layers, batch)


def _on_host(tree: Tree) -> bool:
    return any(memory_space(leaf) == jax.memory.Space.Host for leaf in jax.tree.leaves(tree))


def _on_device(tree: Tree) -> Tree:
    return offload.to_device(tree) if _on_host(tree) else tree


def is_hosted(config: FinetuneConfig) -> Callable[[str, Any], bool] | None:
    """Return a predicate for `lowtide.models.load` that selects the leaves for host memory, or None for no leaf."""
    memories = _places(config) if config.full else {"layers": "host"} if "parameters" in (config.offload or ()) else {}
    return _matrices_of([name for name in ("layers", "outer") if memories.get(name) == "host"])


def _matrices_of(parts: Collection[str]) -> Callable[[str, Any], bool] | None:
    # Vectors stay on the device: they are small, and a TPU cannot slice a single half-precision row in host memory.
    # Leaves of `layers` have one more axis than a weight, the layer, so a stacked vector has two.
    min_ndim = {name: 3 if name == "layers" else 2 for name in parts}
    return (lambda path, leaf: leaf.ndim >= min_ndim.get(path.partition("/")[0], math.inf)) if min_ndim else None


def is_weight(path: str, leaf: Any) -> bool:
    """Return whether a leaf is a parameter, and not data such as the attention window of each layer.

    Gemma 4's ``layer_scalar`` and the router's ``correction`` of GLM-4.5 get no gradient. Weight decay would still
    change them, so they do not train.
    """
    return jnp.issubdtype(leaf.dtype, jnp.inexact) and not path.endswith(("layer_scalar/weight", "router/correction"))


def _places(config: FinetuneConfig) -> dict[str, str]:
    """Return the `place` argument of `lowtide.offload.layerwise_step` for ``full``."""
    words = config.offload
    on_host = {
        "layers": words is None or "parameters" in words,
        "outer": words is not None and "parameters" in words,
        "opt_state": words is None or "optimizer" in words,
        "inputs": words is None or "activations" in words,
    }
    return {name: "host" if is_on_host else "device" for name, is_on_host in on_host.items()}


def inputs_place(config: FinetuneConfig) -> Memory:
    """Return the memory that holds the input of each block until the backward pass, in a step for adapters."""
    return "host" if "activations" in (config.offload or ()) else "device"


def optimizer(config: FinetuneConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Build AdamW with clipping and LoRA+, and with the moments in the configured memory and dtype."""
    clip = optax.clip_by_global_norm(config.max_grad_norm) if config.max_grad_norm else optax.identity()
    loraplus = [lora.plus(config.loraplus_ratio)] if config.loraplus_ratio != 1 else []
    tx = _with_state_format(config, optax.chain(clip, adamw(config, schedule), *loraplus))
    return offload.optimizer(tx) if "optimizer" in (config.offload or ()) else tx


def _with_state_format(config: FinetuneConfig, tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the optimizer with state in `state_dtype`; with `full`, bfloat16 parameters also get 8-bit residuals."""
    state_format = None if config.state_dtype == "float32" else config.state_dtype
    weights = "split" if config.full and config.param_dtype == "bfloat16" else None
    return tx if state_format is weights is None else low_precision(tx, state_format, weights=weights)


def full_step(config: FinetuneConfig, stack: LayerStack, schedule: optax.Schedule) -> offload.LayerwiseStep:
    """Build the step that applies AdamW to every parameter inside the backward pass."""
    mode: Any = config.clip_mode
    return offload.layerwise_step(
        stack,
        _with_state_format(config, adamw(config, schedule)),
        wrt=is_weight,
        place=_places(config),
        clip=offload.Clip(max_norm=config.max_grad_norm, mode=mode) if config.max_grad_norm else None,
        num_microbatches=config.num_microbatches,
        weight=objective(config.objective).weight,
    )


def adamw(config: FinetuneConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Build AdamW from the settings, without clipping."""
    return optax.adamw(
        schedule, b1=config.adam_beta1, b2=config.adam_beta2, eps=config.adam_epsilon, weight_decay=config.weight_decay
    )


def learning_rate(config: FinetuneConfig) -> optax.Schedule:
    """Build the learning-rate schedule: a linear warm-up, then the shape that `schedule` names.

    A warm-up of n steps begins at 1 / (n + 1) of the peak, since a first step with rate 0 would do nothing.
    """
    default, embedded = (1e-5, 1e-3) if config.full else (2e-4, 5e-3)
    peak = config.learning_rate or (default if config.model is not None else embedded)
    num_steps = config.schedule_steps or config.num_steps
    warmup_steps = round(config.warmup_ratio * num_steps) if config.warmup_steps is None else config.warmup_steps
    warmup = min(warmup_steps, num_steps - 1)
    main_schedule = _after_warmup(config, peak, warmup, max(num_steps - warmup, 1))
    if warmup == 0:
        return main_schedule
    warmup_schedule = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([warmup_schedule, main_schedule], [warmup])


def _after_warmup(config: FinetuneConfig, peak: float, warmup: int, num_steps: int) -> optax.Schedule:
    """Build the schedule of the `num_steps` steps after the warm-up; its step 0 is the first step after the warm-up."""
    if config.schedule == "cosine":
        return optax.cosine_decay_schedule(peak, num_steps, alpha=config.final_rate_fraction)
    if config.schedule == "linear":
        return optax.linear_schedule(peak, peak * config.final_rate_fraction, num_steps)
    if config.schedule == "constant":
        return optax.constant_schedule(peak)
    if config.schedule == "inverse_sqrt":
        # `step` counts from the end of the warm-up, so in steps s of the run this is peak * sqrt(warmup / s).
        shift = max(warmup, 1)
        return lambda step: peak * (shift / (shift + step)) ** 0.5
    # warmup_stable_decay: `decay_fraction` refers to all steps of the schedule, including the warm-up.
    decay_steps = min(num_steps, max(1, round(config.decay_fraction * (num_steps + warmup))))
    decay_schedule = optax.linear_schedule(peak, peak * config.final_rate_fraction, decay_steps)
    return optax.join_schedules([optax.constant_schedule(peak), decay_schedule], [num_steps - decay_steps])
