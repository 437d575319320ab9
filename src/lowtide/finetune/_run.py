"""A whole fine-tuning run, from model and data files to files that other software reads.

`Finetune` tunes adapters or the whole model through the public interfaces of the other packages. The command
`lowtide finetune` parses arguments, calls this class and prints.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import models
from ..adapters import lora
from ..core import ConfigError, NonFiniteError, Tree, combine, num_layers, partition, tree_bytes, write_files
from ..distributed import STAGE, Processes, ShardingRules, call_on_first, check_shared_folder
from ..memory import Target
from ..offload import to_device
from ..pipeline import Pipeline, schedule, value_and_grad
from ..planning import Plan
from ..train import Callback, EarlyStopping, Record, Tracker, Trainer, analyze_naive
from ._base import directory_of, load_end_tokens, read_auxiliary_files, tokenizer_folder, write_model
from ._budget import current_plan, planned_config
from ._config import FinetuneConfig, config_to_toml, with_steps
from ._job import (
    WRT,
    JobPlan,
    add_eva_adapter,
    hidden,
    inputs_place,
    is_weight,
    load_base,
    objective_loss,
    objective_stack,
    optimizer,
    with_reference,
)
from ._run_folder import (
    ADAPTER,
    CHECKPOINTS,
    MEMORY,
    METRICS,
    MODEL,
    PLAN,
    MemoryTable,
    MetricsFile,
    check_checkpoint,
    check_same_run,
    read_plan,
    read_records,
    save_report_inputs,
    start_day,
    write_config,
    write_report,
)
from .data._encode import decode_after
from .data._load import load_data
from .data._pack import IGNORE
from .objectives import objective
from .objectives._embedding import write_modules

_PROMPT_TOKENS = 24
"""Tokens of the prompt for a sample from plain text."""


class Finetune:
    """A fine-tuning run. Mutable: `run` trains its model.

    Args:
        config: the settings.
        out: the run's folder, checked by `open_run`.
        on_tokenise: called with the number of finished documents and the total. For records the total is unknown, so
            both arguments are the number of finished records.
        sharding: rules that shard the work over the devices of one or more processes.
        plan: the result of `plan_within` for these settings. If the data make sequences shorter than it assumed, the
            step is planned again. Without `plan`, a resumed run keeps its plan, or plans again if settings changed.
        keeps_plan: whether a resumed run without `plan` keeps its plan.

    Raises:
        ModelFileError: for an unusable model directory.
        DataError: for unusable data.
        SelectionError: when ``config.targets`` matches no module.
        ConfigError: when a resumed run's data changed, processes have different data or settings, `sharding` is
            combined with ``full`` or ``offload``, or a tracker is not installed.
        OutputError: for a run's folder that cannot be written, or has lost its checkpoints.
        StructureError: when a checkpoint is of another model, or EVA cannot initialise a target.
    """

    def __init__(
        self,
        config: FinetuneConfig,
        out: str | Path,
        *,
        on_tokenise: Callable[[int, int], None] | None = None,
        sharding: ShardingRules | None = None,
        plan: Plan | None = None,
        keeps_plan: bool = True,
    ) -> None:
        if sharding is not None:
            _refuse_for_sharding(config, is_pipeline=STAGE in sharding.mesh.shape)
        self._processes = Processes(sharding)
        self.out = Path(out)
        self._trackers = _trackers(config, self.out, self._with_rate)  # first, so that a missing package raises at once
        self.directory = directory_of(config)
        self.tokenizer_dir = tokenizer_folder(self.directory, config.tokenizer)
        known = plan or (read_plan(self.out) if sharding is None and keeps_plan else None)
        run_config, config = config, config if known is None else planned_config(config, known)
        self.base, self.tokenizer = load_base(config, self.directory, None if sharding is None else sharding.of)
        parts = JobPlan.make(config, self.base)  # before the data, whose preparation may take hours
        if not config.full:
            lora.check_names(parts.model)
        template_kwargs = {"tokenizer_dir": self.tokenizer_dir, "chat_template": config.chat_template}
        self.ends = load_end_tokens(self.base.config, self.tokenizer, self.directory, **template_kwargs)
        day = call_on_first(lambda: start_day(self.out))
        options: dict[str, Any] = {"end_token": self.ends.text, "day": day, "on_progress": on_tokenise}
        options |= {"vocab_size": self.base.config.vocab_size, "context": self.base.config.max_position_embeddings}
        self.data = load_data(config, self.tokenizer_dir, self.tokenizer, **options)
        self.data = with_reference(self.data, config, self.base, self.tokenizer)
        run_config = dataclasses.replace(run_config, seq_len=self.data.seq_len)
        self.plan = None if known is None else current_plan(known, run_config, config)
        """What the step keeps of each layer, and its number of microbatches; None for the step of the settings."""
        config = with_steps(run_config, self.data.num_train_sequences)
        if self.plan is not None:
            config = planned_config(config, self.plan)
        self.config, parts = config, dataclasses.replace(parts, config=config)
        # An adapter on a weight that the model cannot adapt raises here, before anything is written.
        loss_fn: Any = parts.loss_fn
        loss_kwargs: dict[str, Any] = {"key": jax.random.key(0), "training": True} if config.lora_dropout else {}
        jax.eval_shape(partial(loss_fn, **loss_kwargs), parts.model, self.data.train[0])
        if sharding is not None:
            sharding.batch_shapes(self.data.train[0], config.num_microbatches)  # raises if rows cannot be sharded
        self._processes.agree(config=config_to_toml(config), data=self.data.digest)
        check_shared_folder(self._processes, self.out)
        # Write these files before the trainer creates the checkpoint folder. A run killed with that folder but without
        # config.toml could neither be resumed nor started again.
        call_on_first(
            lambda: (
                write_config(self.out, run_config),
                check_same_run(self.out, config, self.data.digest, day),
                self.plan and self.plan.to_json(self.out / PLAN),
            )
        )
        self.saved_bytes: int | None = parts.saved_bytes()
        """Bytes of gradients and optimizer state that frozen weights save, on all devices; None with `full`."""
        self.schedule = parts.schedule
        # The learning rates for records are computed here, in one program. Computed after a step, they would delay the
        # record until the device is free. An interrupt during this wait could lose the record.
        self._rates = np.asarray(jax.jit(jax.vmap(self.schedule))(jnp.arange(config.num_steps)))
        # Only dropout uses the trainer's key; pipelines and layerwise steps take no seed.
        options = {"wrt": WRT, "seed": config.seed}
        if self.plan is None:
            options["num_microbatches"] = config.step_microbatches
        else:  # `parts` has the placement and the formats already
            applied: dict[str, Any] = {"optimizer": "device", "parameters": "device", "formats": ()}
            applied["num_microbatches"] = config.step_microbatches
            options |= {"plan": dataclasses.replace(self.plan, **applied)}
        if sharding is not None and STAGE in sharding.mesh.shape:
            options, loss_fn = {"pipeline": _pipeline(config, parts.model, sharding)}, None  # the stack has a loss
        self.trainer = Trainer(
            parts.model,
            loss_fn,
            parts.tx,
            weight=objective(config.objective).weight,
            checkpoint_dir=self.out / CHECKPOINTS,
            max_to_keep=config.max_to_keep,
            best="eval_loss" if config.keep_best or config.load_best_at_end else None,
            sharding=sharding,
            # Without a plan, an error ends the process, and a resume continues from a checkpoint.
            rollback=self.plan is not None and not config.full,
            **({} if config.full else options),
        )
        self.resumed_at = self.trainer.restore()
        if config.full:
            self.base = self.trainer.model  # drops the last other reference to arrays that training donates
        check_checkpoint(self.out, config, self.resumed_at)
        if config.lora_init == "eva" and self.resumed_at is None:
            self.trainer.update(add_eva_adapter(parts.base, config, self.data.train))

    def memory(self, target: Target | str | None = None) -> MemoryTable:
        """Compile the step of `run` for a target, None for the hardware at hand; `compare` adds the naive step."""
        state = self.trainer.state
        return MemoryTable(
            ours=self.trainer.memory(self.data.train[0], target=target),
            trainable_bytes=tree_bytes(state.trainable),
            frozen_bytes=tree_bytes(self.trainer.frozen),
            gradient_bytes=_layerwise_bytes(state.trainable) if self.config.full else _device_bytes(state.trainable),
            optimizer_bytes=tree_bytes(state.opt_state),
        )

    def compare(self, table: MemoryTable, target: Target | str | None = None) -> MemoryTable:
        """Compile a naive training step for comparison, and add its bytes to the table.

        The naive step differentiates and updates the whole model on the device, with frozen weights behind
        `jax.lax.stop_gradient`.

        `table` and `target` are those of `memory`. The report of the naive step is None if it does not compile for lack
        of memory. The process keeps the compiler's memory, so a run compares after training.
        """
        batch, sharding = self.data.train[0], self.trainer.sharding
        batch = batch if sharding is None else sharding.batch_shapes(batch, self.config.num_microbatches)
        model = self.trainer.model
        try:
            naive = analyze_naive(
                model,
                objective_loss(dataclasses.replace(self.config, layers_per_remat=1), "device"),
                optimizer(dataclasses.replace(self.config, offload=()), self.schedule),
                is_weight if self.config.full else WRT,
                batch,
                num_microbatches=self.config.step_microbatches,
                weight=objective(self.config.objective).weight,
                target=target,
            )
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            naive = None
        return dataclasses.replace(table, naive=naive, naive_gradient_bytes=_device_bytes(model))

    def run(self, on_record: Callable[[Record], None] | None = None) -> None:
        """Train to the last step, and write metrics and checkpoints on the way.

        Args:
            on_record: called with every record, including the learning rate.

        Raises:
            NonFiniteError: when a loss or gradients are not finite. The run stops, skips this step's update, and saves
                the state.
        """
        metrics = MetricsFile(self.out / METRICS, self.resumed_at)

        def record_step(record: Record) -> None:
            if not np.isfinite(record.get("eval_loss", 0.0)):
                raise NonFiniteError(f"step {record['step']}: eval_loss is not finite", got=record["eval_loss"])
            if not np.isfinite([record.get("loss", 0.0), record.get("grad_norm", 0.0)]).all():
                return  # JSON has no such numbers; the trainer raises
            record = self._with_rate(record)
            metrics.append(record)
            if on_record is not None:
                on_record(record)

        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="fit took no step")  # the user may resume a finished run
                self.trainer.fit(
                    self.data.train,
                    num_steps=self.config.num_steps,
                    eval_data=self.data.held_out,
                    eval_every=self.config.eval_every,
                    checkpoint_every=self.config.checkpoint_every,
                    callbacks=[metrics, *stopping_callbacks(self.config), *self._trackers],
                    on_record=record_step,
                    progress=False,
                )
        except NonFiniteError as error:
            hint = "lower learning_rate, or look for NaN in the model's weights; the last checkpoint is finite"
            raise NonFiniteError(f"{error.message}, so the run was stopped", got=error.got, hint=hint) from error
        finally:
            metrics.close()

    def _with_rate(self, record: Record) -> Record:
        """Add the learning rate to the record of a step."""
        if "loss" not in record:
            return record
        return {**record, "learning_rate": float(self._rates[int(record["step"]) - 1])}

    def load_best(self) -> int | None:
        """Restore the weights with the lowest held-out loss if `load_best_at_end` is set; call it after `run`.

        Returns:
            Step of these weights, or None if the last weights stay.

        Memory:
            As `Trainer.restore`: never two copies on the device.
        """
        if not self.config.load_best_at_end:
            return None
        step = self.trainer.restore(best=True)
        if self.config.full:
            self.base = self.trainer.model
        return step

    def finish(self, table: MemoryTable) -> None:
        """Write the adapter, or with ``config.full`` the model, and `memory.json`.

        Args:
            table: the result of `memory`.

        Memory:
            A whole model takes a few pieces of 64 MiB on the host. Sharded adapters are gathered on every device.
        """
        model, sharding = self.trainer.model, self.trainer.sharding
        if sharding is not None:
            trainable, frozen = partition(model, WRT)
            model = combine(sharding.gather(trainable), frozen)
        if not self._processes.is_first:
            return
        if self.config.full:
            dtype = self.config.save_dtype
            if dtype == "auto":
                dtype = jnp.dtype(models.load_shapes(self.directory).outer["embed"]["weight"].dtype).name
            files = read_auxiliary_files(self.tokenizer_dir, self.config.chat_template)
            tokenizer = self.tokenizer_dir / "tokenizer.json"
            write_model(model, self.directory, self.out / MODEL, files, self.ends, tokenizer=tokenizer, dtype=dtype)
        else:
            task_type = "SEQ_CLS" if self.config.num_scores else "CAUSAL_LM"
            lora.save(model, self.out / ADAPTER, base_model_name_or_path=self.config.model, task_type=task_type)
            if self.config.objective == "embedding":
                sizes = model.config.hidden_size, self.config.seq_len // 2
                write_modules(self.out / ADAPTER, self.config.pooling, *sizes)
        self.write_memory(table)

    def write_memory(self, table: MemoryTable) -> None:
        """Write `memory.json`, or overwrite it after a comparison; only the first process writes."""
        if self._processes.is_first:
            write_files(self.out, {MEMORY: (json.dumps(table.to_dict(), indent=2) + "\n").encode()})

    def tables(self) -> dict[str, list[tuple[str, str]]]:
        """Return the tables of the run's HTML page except the settings: rows of (name, text), by title of the table."""
        rows = {
            "documents": f"{self.data.num_documents:,}",
            "tokens to train on": f"{self.data.num_train_tokens:,}",
            "tokens held out": f"{self.data.num_held_out_tokens:,}",
        }
        if (report := self.data.report) is not None:
            rows |= {
                "rows to train on": f"{report.num_rows:,}",
                "non-padding share of the tokens": f"{report.utilisation:.1%}",
                "learned share of these tokens": f"{report.loss_share:.1%}",
                "blank records (skipped)": f"{report.num_blank:,}",
                "parts without a token to learn (skipped)": f"{report.num_without_loss:,}",
                "documents longer than a row (dropped)": f"{report.num_dropped:,}",
                "documents longer than a row (cut or split)": f"{report.num_cut:,}",
                "training tokens lost": f"{report.num_lost_tokens:,}",
                "held-out documents skipped": f"{report.num_held_out_left_out:,}",
                "held-out tokens lost": f"{report.num_held_out_lost_tokens:,}",
            }
        return {"Data": list(rows.items())}

    def write_report(
        self, table: MemoryTable, samples: Mapping[str, tuple[str, str]] | None = None, *, timeline: bool = False
    ) -> Path | None:
        """Write the page of the finished or unfinished run if `report` is set.

        Args:
            table: the result of `memory`.
            samples: prompt and continuation by title.
            timeline: whether to compile the step again and show its live bytes; ignored with several processes.

        Returns:
            Path of the page; None without `report`, or in any process except the first.

        Memory:
            None on a device. The process keeps the compiler's memory, so a run adds its timeline at the end.
        """
        if not (self.config.report and self._processes.is_first):
            return None
        report = self.memory("here").ours if timeline and self._processes.count == 1 else table.ours
        save_report_inputs(self.out, report, self.tables(), samples or {})
        return write_report(self.out)

    def eval_losses(self) -> list[tuple[int, float]]:
        """Return the held-out losses so far: step and loss, in the unit of the objective."""
        records = read_records(self.out / METRICS)
        return [(record["step"], record["eval_loss"]) for record in records if "eval_loss" in record]

    def sample_before(self) -> tuple[str, str] | None:
        """Sample from the untuned model, as `sample` does; with ``config.full`` call it before `run`.

        Adapters leave the base unchanged. So with adapters, a run can call this at its end, and training starts sooner.

        Returns:
            Prompt and continuation. None without `sample_tokens`, with several processes, or for a resumed run with
            ``config.full``, which has only the tuned model.
        """
        is_base_lost = self.config.full and self.resumed_at is not None
        return None if is_base_lost or not self.samples else self.sample(self.base)

    @property
    def samples(self) -> bool:
        """Whether text is sampled before and after training."""
        writes_text = self.config.objective not in ("reward", "classification", "embedding")
        return bool(self.config.sample_tokens) and self._processes.count == 1 and writes_text

    def sample(self, model: Tree) -> tuple[str, str]:
        """Return a held-out text and its continuation, or the first question of a held-out record and an answer.

        Layers in host memory are streamed once for each token. Embedding and head are copied to the device.
        """
        batch = self.data.held_out[0]
        row = batch["tokens"][0]
        if "segment_ids" in batch:
            row = row[batch["segment_ids"][0] == 1]  # the first document of the packed row, without padding
        is_learned = np.asarray(batch["labels"][0])[: len(row)] != IGNORE
        # The label of a token is the next token. So the first token with a learned label is the question's last token.
        question_length = int(np.argmax(is_learned)) + 1
        prompt = row[: question_length if question_length > 1 else min(_PROMPT_TOKENS, self.config.seq_len)]
        key = jax.random.fold_in(jax.random.key(self.config.seed), 1)
        model = dataclasses.replace(model, outer=to_device(model.outer))
        tokens = models.generate(model, jnp.asarray(prompt), self.config.sample_tokens, key=key, hidden=hidden)
        answer = np.asarray(tokens)[len(prompt) :].tolist()
        if question_length > 1:
            answer = list(itertools.takewhile(lambda token: token not in self.ends.answer, answer))
        return self.tokenizer.decode(prompt.tolist()), decode_after(self.tokenizer, prompt.tolist(), answer)


def _refuse_for_sharding(config: FinetuneConfig, *, is_pipeline: bool) -> None:
    """Raise ConfigError for settings that sharded runs, or pipelines, do not support."""
    if config.objective in ("distillation", "embedding"):
        hint = "leave out --distributed and --pipeline"
        raise ConfigError(f"objective {config.objective} runs on one device", hint=hint)
    words = [word for word in config.offload or () if word != "activations" or not is_pipeline]
    if config.full or words:
        setting = "--full" if config.full else f"--offload {','.join(words)}"
        hint = f"leave out --distributed and --pipeline, or {setting}"
        if words == ["activations"]:
            hint += "; with --pipeline activations can be offloaded"
        raise ConfigError(f"{setting} cannot be sharded over devices yet", hint=hint)
    if is_pipeline and objective(config.objective).reference is not None:
        hint = "leave out --pipeline, or tune with --objective orpo, simpo or cpo"
        raise ConfigError(f"objective {config.objective} runs a reference, which stages of a pipeline lack", hint=hint)
    if is_pipeline and config.layers_per_remat > 1:
        problem = "layers_per_remat contradicts --pipeline, whose stages keep the input of each layer"
        hint = "leave layers_per_remat out; --offload activations moves those inputs to the host"
        raise ConfigError(problem, hint=hint)
    if config.lora_init == "eva":
        hint = "leave lora_init out, or start on one device and continue with --adapter"
        raise ConfigError("lora_init: EVA reads whole batches, on one device", hint=hint)
    if is_pipeline and config.lora_dropout:
        hint = "leave lora_dropout or --pipeline out"
        raise ConfigError("lora_dropout: the loss of a pipeline takes no random key", hint=hint)


def _pipeline(config: FinetuneConfig, model: models.Decoder, sharding: ShardingRules) -> Pipeline:
    """Build the pipeline with `num_microbatches` microbatches; 1 means one microbatch for each row of a batch shard."""
    num_shards = math.prod(sharding.mesh.shape[axis] for axis in sharding.batch_axes)
    num_microbatches = (
        config.num_microbatches if config.num_microbatches > 1 else max(config.batch_size // num_shards, 1)
    )
    plan = schedule(num_stages=sharding.mesh.shape[STAGE], num_microbatches=num_microbatches)
    return value_and_grad(
        objective_stack(model, config),
        plan,
        mesh=sharding.mesh,
        wrt=WRT,
        weight=objective(config.objective).weight,
        remat=config.remat,
        batch_axes=sharding.batch_axes,
        inputs=inputs_place(config),
    )


def stopping_callbacks(config: FinetuneConfig) -> list[Callback]:
    """Build the callbacks that may end a run before its last step."""
    if config.early_stopping_patience is None:
        return []
    # `EarlyStopping` stops at evaluation `patience + 1` without improvement. Our setting counts that one, too.
    patience = config.early_stopping_patience - 1
    return [EarlyStopping("eval_loss", patience=patience, min_delta=config.early_stopping_threshold)]


def _trackers(config: FinetuneConfig, out: Path, values: Callable[[Record], Mapping[str, float]]) -> list[Callback]:
    """Build the callbacks that send records to trackers; raise ConfigError if a tracker's package is missing."""
    settings = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    return [
        Tracker(library, out, project=config.project, name=config.run_name, config=settings, values=values)
        for library in dict.fromkeys(config.track or ())
    ]


def _device_bytes(tree: Tree) -> int:
    """Return the bytes that a tree's arrays take on one device; gradients of equal shardings take as many bytes."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return tree_bytes([jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype) for x in arrays])


def _layerwise_bytes(trainable: Tree) -> int:
    """Return the largest number of gradient bytes that are live at the same time in a layerwise step."""
    # The step updates a layer or an outer leaf as soon as it has the gradient. Only a tied embedding waits: its head
    # makes the first part of the gradient and its lookup the last part, so the sum is live during all layers.
    outer, layers = trainable["outer"], trainable["layers"]
    layer = tree_bytes(layers) // num_layers(layers)
    largest = max((tree_bytes(leaf) for leaf in jax.tree.leaves(outer)), default=0)
    return max(layer, largest) if "lm_head" in outer else layer + tree_bytes(outer["embed"])
