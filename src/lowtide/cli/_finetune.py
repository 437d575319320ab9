"""``lowtide finetune``: tune a language model, with adapters or in full, and report the bytes of the step.

The settings are fields of `FinetuneConfig` in `finetune/_config.py`, and `_config_flags` derives their flags. To add a
setting, add a field there. This module adds flags that are not settings of a run, such as ``--resume``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core import ConfigError, LowtideError, OutOfMemoryError, format_bytes
from . import _config_flags, _data_report, _distributed
from ._arguments import check_not_empty
from ._output import print_labelled, progress_bar
from ._plan import add_plan_arguments, read_budget, show_on

_RESERVE = 0.03
"""Share of a device's memory that a plan without --budget leaves free, for the allocator's fragmentation."""
_CLIP_TEXTS = {
    "exact": "clipped by the exact norm of all gradients",
    "previous": "clipped by the norm of the previous step",
    "layer": "each layer clipped by its own norm",
}


def register(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "finetune",
        help="tune a language model, with LoRA or in full",
        description="Tune a language model with LoRA: only the adapters have gradients and optimizer state. --full "
        "tunes all parameters, with each layer updated inside the backward pass and kept on the host. The run writes a "
        "PEFT adapter (or the model), metrics and the bytes of every role. The settings are also keys of a TOML file.",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings; flags override it")
    parser.add_argument("--out", metavar="DIR", help="folder of the run (default: a new folder in runs/)")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="also compile the naive step at the end, and show its bytes next to those of the run",
    )
    parser.add_argument(
        "--report-only", action="store_true", help="only write report.html of the run in --out, from its files"
    )
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help='plan the fastest step that needs at most this device memory, such as "16 GiB" (default: the memory of an '
        "accelerator, less 3 %%; on a CPU nothing is planned)",
    )
    add_plan_arguments(parser)
    parser.add_argument(
        "--plan",
        choices=("auto", "off"),
        default="auto",
        help="off: take the step of the settings, which recomputes each layer (default: auto)",
    )
    _config_flags.register(parser)
    _distributed.register(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # Unless this variable is set, tokenizers disables its threads after a fork and prints a warning.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if args.report_only:
        return _report_only(args)
    budget = read_budget(args)
    import jax

    from ..finetune import open_run, read_config

    if args.resume and args.out is None:
        raise ConfigError("--resume needs --out", hint="name the folder of the run to continue")
    check_not_empty(args, "config", "out")
    values = read_config(args.config) if args.config else {}
    values |= _config_flags.flag_settings(args)
    # This must precede `_distributed.start` and `jax.process_index`, which start JAX's backends: libtpu reads its flags
    # once, when it starts.
    _choose_tiles(Path(args.out) if args.resume else None, values)
    sharding = _distributed.start(args)
    is_first = jax.process_index() == 0
    console = Console(highlight=False, quiet=not is_first)
    if args.out is None and jax.process_count() > 1:
        raise ConfigError("several processes need --out", hint="name one folder that all processes can access")
    out = Path(args.out or f"runs/finetune-{time.strftime('%Y%m%d-%H%M%S')}")
    config = open_run(out, values, args.config or "the command line", resume=args.resume)
    interrupted = _remember_interrupts()
    try:
        plan = {"plan": _plan(console, config, budget, args, sharding), "keeps_plan": args.plan != "off"}
        _finetune(console, config, out, interrupted, sharding, plan, compare=args.compare)
    except LowtideError:
        with contextlib.suppress(OSError):
            if is_first:
                out.rmdir()  # fails, and is ignored, unless the folder is empty
        raise
    except KeyboardInterrupt:
        if (out / "config.toml").is_file():
            console.print(f"\nStopped. Continue with: {_program()} finetune --out {out} --resume", soft_wrap=True)
        raise
    return 0


def _choose_tiles(run_dir: Path | None, values: Mapping[str, Any]) -> None:
    """Set a libtpu flag for runs that may stream 8-bit or 4-bit arrays from the host, before libtpu reads its flags."""
    from ..core import choose_low_tiles
    from ..finetune import read_config

    saved_settings: dict[str, Any] = {}
    if run_dir is not None:
        with contextlib.suppress(LowtideError, OSError):  # a broken file is reported later, where the run reads it
            saved_settings = read_config(run_dir / "config.toml")
    settings = {**saved_settings, **values}
    is_narrow = settings.get("state_dtype", "float32") != "float32" and "optimizer" in str(settings.get("offload"))
    if settings.get("full") is True or is_narrow or "parameters" in str(settings.get("offload")):
        choose_low_tiles()


def _finetune(
    console: Console, config: Any, out: Path, interrupted: threading.Event, sharding: Any, plan: Any, *, compare: bool
) -> None:
    from ..finetune import Finetune

    with progress_bar(console) as progress:
        task = progress.add_task("reading model and data", total=None)

        def show(completed: int, total: int) -> None:
            progress.update(task, completed=completed, total=total)

        job = Finetune(config, out, on_tokenise=show, sharding=sharding, **plan)
        progress.update(task, description="compiling the step", total=None)
        table = job.memory()
        progress.remove_task(task)
    saved_bytes = None if compare else job.saved_bytes
    _print_plan(console, job, table, saved_bytes)
    # Full tuning updates the model in place, so sample from the untuned model now.
    before = job.sample_before() if config.full else None
    early_samples = {"before": before} if before is not None else {}
    # Write the page before training, so that a run that is killed has one, too.
    job.write_report(table, early_samples)
    try:
        _train(console, job, table, interrupted)
    except BaseException as error:
        try:
            job.write_report(table, early_samples)
        except LowtideError as failure:
            error.add_note(str(failure))
        raise
    num_steps = job.config.num_steps  # derived from the number of epochs when the data is read
    if config.early_stopping_patience is not None and job.trainer.step < num_steps:
        console.print(
            f"Stopped early at step {job.trainer.step:,} of {num_steps:,}: the held-out loss did not decrease in "
            f"{config.early_stopping_patience} evaluations."
        )
    if (best := job.load_best()) is not None:
        console.print(f"The run writes the weights of step {best}, which has the lowest held-out loss.")
    job.finish(table)
    samples: dict[str, Any] = {}
    if job.samples:
        samples = {"before": before if config.full else job.sample_before(), "after": job.sample(job.trainer.model)}
        samples = {title: sample for title, sample in samples.items() if sample is not None}
        for title, (prompt, text) in samples.items():
            console.rule(f"sample {title}", align="left")
            console.print(Text(prompt, style="dim") + Text(text))
        console.rule()
    with progress_bar(console) as progress:
        progress.add_task("writing the page", total=None, visible=config.report)
        page = job.write_report(table, samples, timeline=True)
    # Compile the naive step last: it then takes no memory from training, and the files of the run are already written.
    if compare:
        with progress_bar(console) as progress:
            progress.add_task("compiling the naive step for comparison", total=None)
            table = job.compare(table)
        job.write_memory(table)
    _print_bytes(console, config, table, saved_bytes)
    if losses := job.eval_losses():
        (_, first), (_, last) = losses[0], losses[-1]
        last = last if best is None else dict(losses).get(best, last)
        change = f" ({(last - first) / first:+.1%})" if first else ""
        console.print(f"Held-out loss {first:.4f} → {last:.4f} {config.loss_unit}{change}.")
    console.print(f"{'Model' if config.full else 'Adapter'}, metrics and memory table are in {out}", soft_wrap=True)
    if page is not None:
        console.print(f"The page of the run is {page}", soft_wrap=True)
    console.print(f"Next: {_next_command(job)}", markup=False, soft_wrap=True)


def _next_command(job: Any) -> str:
    config = job.config
    if config.num_scores:
        base = f"from_pretrained({str(job.directory)!r}, num_labels={config.num_scores})"
        folder = str(job.out / "adapter")
        return f"peft.PeftModel.from_pretrained(AutoModelForSequenceClassification.{base}, {folder!r})"
    if config.full:
        parts = ["--model", str(job.out / "model")]
    else:
        parts = [*(["--model", config.model] if config.model else []), "--adapter", str(job.out / "adapter")]
    if config.objective == "embedding":
        command = f"{_program()} merge {shlex.join([*parts, '--out', str(job.out / 'merged')])}"
        return f"{command}; then SentenceTransformer({str(job.out / 'merged')!r})"
    names = ("quantize", "quantize_embeddings", "tokenizer", "chat_template")
    # A fully tuned model needs no quantisation flags: only the base of an adapter is quantised.
    for name in names[2 * config.full :]:
        if (value := getattr(config, name)) is not None:
            parts += [f"--{name.replace('_', '-')}", value]
    is_chat = job.data.report is not None and job.data.report.template
    prompt_flags = ["--chat"] if is_chat else ["--prompt", "..."]
    return f"{_program()} generate {shlex.join([*parts, *prompt_flags])}"


def _plan(console: Console, config: Any, budget: int | None, args: argparse.Namespace, sharding: Any) -> Any:
    """Return the fastest step that fits the budget; None for the step of the settings."""
    from ..finetune import plan_within
    from ..targets import limit_bytes, resolve_target

    is_explicit = budget is not None or args.target is not None or bool(args.allow)
    obstacle = "--plan off" if args.plan == "off" else "several devices" if sharding is not None else None
    if obstacle is not None and is_explicit:
        hint = "leave --budget, --target and --allow out"
        raise ConfigError(f"--budget, --target and --allow plan a step, which excludes {obstacle}", hint=hint)
    # A resumed run reads its plan from its folder.
    if obstacle is not None or (args.resume and not is_explicit):
        return None
    target = resolve_target(args.target)
    if not is_explicit and (not config.remat or config.layers_per_remat > 1):
        return None
    if budget is None and target.budget_bytes is None and not is_explicit:
        return None
    if budget is None:
        budget = int((1 - _RESERVE) * limit_bytes(target, None))
    with progress_bar(console) as progress:
        try:
            return plan_within(config, budget, target, allow=args.allow or (), on_compile=show_on(progress))
        except OutOfMemoryError as error:
            if is_explicit:
                raise
            print_labelled(console, "warning", f"the step is not planned: {error.message}")
            return None


def _report_only(args: argparse.Namespace) -> int:
    from ..finetune import write_report

    if not args.out:
        raise ConfigError("--report-only needs --out", hint="name the folder of the run")
    if args.resume or args.compare:
        raise ConfigError("--report-only does not train", hint="leave --resume and --compare out")
    Console(highlight=False).print(f"The page of the run is {write_report(args.out)}", soft_wrap=True)
    return 0


def _remember_interrupts() -> threading.Event:
    """Return an event that every interrupt sets. Python drops a KeyboardInterrupt inside a runtime callback."""
    interrupted = threading.Event()

    def handle(signum: int, frame: Any) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    # Python accepts signal handlers only in the main thread.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handle)
    return interrupted


def _program() -> str:
    """Return the program name for a command in a hint."""
    if Path(sys.argv[0]).name != "lowtide":
        return "python -m lowtide"
    return "lowtide" if shutil.which("lowtide") == sys.argv[0] else sys.argv[0]


def _accuracy(record: dict[str, Any], prefix: str = "") -> str:
    """Format the share of pairs ranked as preferred, or of texts classified right; empty for other objectives."""
    share = record.get(f"{prefix}rewards/accuracies", record.get(f"{prefix}accuracy"))
    return "" if share is None else f"  accuracy {share:.1%}"


def _train(console: Console, job: Any, table: Any, interrupted: threading.Event) -> None:
    from ..train import LossLines

    tokens, lines = job.config.batch_size * job.config.seq_len, LossLines(job.config.num_steps)
    report = table.ours
    host = f"  {format_bytes(report.host_bytes)} on the host" if report.host_bytes else ""
    with progress_bar(console) as progress:
        task = progress.add_task("training", total=job.config.num_steps, completed=job.resumed_at or 0)

        def show(record: dict[str, Any]) -> None:
            # Raise an interrupt that Python dropped. During an exception it was not dropped: the run is already ending.
            if interrupted.is_set() and sys.exception() is None:
                raise KeyboardInterrupt
            if "eval_loss" in record:
                accuracy = _accuracy(record, "eval_")
                console.print(f"  step {record['step']:>5}  held-out loss {record['eval_loss']:.4f}{accuracy}")
            else:
                rate = tokens / record["seconds"]
                if not console.is_terminal and lines.is_due(record["step"]):
                    accuracy = _accuracy(record)
                    line = f"  step {record['step']:>5}  loss {record['loss']:.4f}{accuracy}  {rate:,.0f} tokens/s"
                    console.print(line)
                text = f"training  loss {record['loss']:.3f}  {rate:,.0f} tokens/s{host}"
                progress.update(task, completed=record["step"], description=text)

        job.run(show)


def _print_plan(console: Console, job: Any, table: Any, saved_bytes: int | None) -> None:
    config, base, data = job.config, job.base, job.data
    target = table.ours.target
    saved = f"{format_bytes(saved_bytes or 0)} of gradients and optimizer state for the frozen weights (counted)"
    grid = Table.grid(padding=(0, 2))
    rows = {
        "model": f"{config.model or 'embedded base'}: {base.config.num_layers} layers of {base.config.hidden_size}, "
        f"{format_bytes(table.frozen_bytes or table.trainable_bytes)} {'trainable' if config.full else 'frozen'}, "
        f"computed in {base.compute_dtype}",
        "data": f"{config.data or 'the Python language reference'}: {data.num_documents:,} documents, "
        f"{data.num_train_tokens:,} tokens to train on, {data.num_held_out_tokens:,} held out",
        **_data_report.describe(data.report, config),
        "answers end": _data_report.describe_ends(job.ends, job.tokenizer),
        **_tuning_lines(job, table),
        "attention": _attention(base, config),
        "steps": f"{job.resumed_at or 0} of {config.num_steps} done, {config.batch_size} × {config.seq_len} tokens each"
        + (f", in {config.num_microbatches} microbatches" if config.num_microbatches > 1 else "")
        + _final_rate(config),
        **({} if job.plan is None else {"plan": job.plan.summary}),
        **_distributed.describe(job.trainer.sharding),
        **_pipeline_lines(job.trainer.stages),
        "predicted": f"{format_bytes(table.ours.device_bytes)} on the device ({target.chip}"
        + (f", {format_bytes(target.budget_bytes)} usable" if target.budget_bytes is not None else "")
        + ")"
        + _host_text(table.ours),
        **({} if saved_bytes is None else {"saved": saved}),
        "host memory": _host_memory(base, job.trainer.state),
        "out": str(job.out),
    }
    for name, text in rows.items():
        grid.add_row(Text(name, style="bold"), Text(text))
    if (problem := _data_report.lost_tokens_warning(data.report, config)) is not None:
        print_labelled(console, "warning", problem)
    console.print(grid)
    for note in data.notes:
        print_labelled(console, "note", note)
    if (problem := _data_report.missing_end_warning(data.report, job.ends)) is not None:
        print_labelled(console, "warning", problem)
    _data_report.print_examples(console, data.report)
    if config.seq_len > base.config.max_position_embeddings:
        console.print(
            f"[bold yellow]warning[/] --seq-len {config.seq_len} is longer than the model's "
            f"{base.config.max_position_embeddings} positions"
        )
    for problem in _shortages(config, table.ours, _offload_words(job.trainer)):
        console.print(f"[bold yellow]warning[/] {problem}")


def _attention(base: Any, config: Any) -> str:
    import jax.numpy as jnp

    from ..ops import IMPLEMENTATIONS, AttentionMask, attention_implementation

    blocks, ids = base.config.pattern, jnp.zeros((1, 1), jnp.int32)
    # The layers that read the most tokens; layers of other kinds may have other heads and windows.
    model_config = next((block for block in reversed(blocks) if not block.is_delta_net), None)
    if model_config is None:
        return "none: all layers are delta nets"
    # If the layers have different windows, the step traces the window.
    windows = jnp.int32(1) if isinstance(model_config.windows, tuple) else model_config.windows
    options: dict[str, Any] = {"soft_cap": model_config.attention_soft_cap, "has_sinks": model_config.attention_sinks}
    options["mask"] = AttentionMask(
        window=windows, windows=model_config.window_sizes, segment_ids=ids if config.is_packed else None
    )
    options["is_grouped"] = model_config.num_heads != model_config.num_kv_heads
    choice = attention_implementation(base.compute_dtype, model_config.head_dim, num_tokens=config.seq_len, **options)
    return str(choice) if base.attention is None else IMPLEMENTATIONS[base.attention]


def _pipeline_lines(stages: Any) -> dict[str, str]:
    """Return the row ``pipeline`` of the printed plan, with its simulated time; empty without a pipeline."""
    if stages is None:
        return {}
    sizes = f"{len(stages.ranks)} stages, {stages.num_microbatches} microbatches"
    time_text = f"{stages.time_over_ideal:.2f} times the time without waiting, by FLOPs"
    return {"pipeline": f"{sizes}: {time_text} (a differentiated scan: {stages.scan_over_ideal:.2f})"}


def _tuning_lines(job: Any, table: Any) -> dict[str, str]:
    """Return the rows of the printed plan, by label, about the trained parameters and the arrays on the host."""
    from ..adapters import lora

    config = job.config
    if config.full:
        lines = {"tuning": f"all parameters, layer by layer inside the backward pass, {_CLIP_TEXTS[config.clip_mode]}"}
    else:
        lines = {"adapter": f"{config.adapter_text}, {format_bytes(table.trainable_bytes)} trainable"}
        has_experts = job.base.config.experts is not None
        if has_experts and not any("/experts/" in match.path for match in lora.report(job.trainer.model).matched):
            lines["adapter"] += ", experts frozen"
    if config.full and config.offload is None:
        return {**lines, "host": "layers, optimizer, activations"}
    return {**lines, "host": ", ".join(config.offload)} if config.offload else lines


def _final_rate(config: Any) -> str:
    """Describe the learning rate after its schedule; return "" if the schedule covers all steps or never ends."""
    steps = config.schedule_steps or config.num_steps
    if steps >= config.num_steps or config.schedule in ("constant", "inverse_sqrt"):
        return ""
    return f"; from step {steps} on, the learning rate stays at {config.final_rate_fraction:g} of its peak"


def _host_text(report: Any) -> str:
    if not report.host_bytes:
        return ""
    usable = report.target.host_bytes
    usable_text = "" if usable is None else f", {format_bytes(usable)} usable"
    return f", {format_bytes(report.host_bytes)} on the host (pinned{usable_text})"


_OFFLOAD_WORDS = ("parameters", "optimizer", "activations")


def _offload_words(trainer: Any) -> Sequence[str]:
    """Return the values that ``--offload`` accepts for the devices of a run."""
    if trainer.sharding is None:
        return _OFFLOAD_WORDS
    return () if trainer.stages is None else ("activations",)


def _shortages(config: Any, report: Any, words: Sequence[str] = _OFFLOAD_WORDS) -> list[str]:
    """Return up to two warnings with remedies: the device memory is too small; the host memory is too small."""
    messages: list[str] = []
    if report.margin_bytes is not None and report.margin_bytes < 0:
        other_words = [word for word in words if word not in (config.offload or ())]
        messages.append(
            "the step does not fit: lower --batch-size or --seq-len, raise --num-microbatches"
            + (f", or use --offload {','.join(other_words)}" if other_words and not config.full else "")
        )
    if report.host_bytes and report.host_margin_bytes is not None and report.host_margin_bytes < 0:
        messages.append(
            f"the step does not fit the host: {format_bytes(report.host_bytes)} of "
            f"{format_bytes(report.target.host_bytes)} for each device; remove a word from --offload, or use a machine "
            "with more memory"
        )
    return messages


def _host_memory(base: Any, state: Any) -> str:
    """Describe the host memory that loading and checkpoints need."""
    from .. import models, train

    model, copies = models.host_bytes(base), train.checkpoint_bytes(state)
    return (
        f"at most {format_bytes(model.loading)} to load, in addition to the model; {format_bytes(copies.saving)} to "
        f"save a checkpoint and {format_bytes(copies.restoring)} to restore one, in addition to the state"
    )


def _print_bytes(console: Console, config: Any, table: Any, saved_bytes: int | None) -> None:
    """Print the bytes of the step by role; with --compare, next to the bytes of the naive step."""
    ours, naive = table.ours, table.naive
    naive_roles = {} if naive is None else naive.by_role
    view = Table(title="Bytes", show_footer=True)
    view.add_column("role", footer="total (compiled)")
    if table.is_compared:
        total = "does not fit" if naive is None else format_bytes(naive.device_bytes)
        view.add_column("AdamW + remat" if config.full else "AdamW + stop_gradient", justify="right", footer=total)
    view.add_column("Lowtide", justify="right", footer=format_bytes(ours.device_bytes))
    if table.is_compared:
        ratio = "" if naive is None else _ratio(ours.device_bytes, naive.device_bytes)
        view.add_column("", justify="right", footer=ratio)
    if ours.host_bytes:
        view.add_column("on the host", justify="right", footer=format_bytes(ours.host_bytes))

    def add(label: str, naive_bytes: int | None, our_bytes: int, host_bytes: int) -> None:
        naive_cells = ["" if naive_bytes is None else format_bytes(naive_bytes)] if table.is_compared else []
        ratio = [_ratio(our_bytes, naive_bytes or 0)] if table.is_compared else []
        host_cells = [format_bytes(host_bytes) if host_bytes else ""] if ours.host_bytes else []
        view.add_row(label, *naive_cells, format_bytes(our_bytes), *ratio, *host_cells)

    names = {
        "frozen": "frozen weights",
        "trainable": "weights" if config.full else "adapters",
        "optimizer": "optimizer state",
        "batch": "batch",
        "temporaries": "temporaries (activations, gradients)",
        "outputs": "outputs not written in place",
    }
    other_roles = {*ours.by_role, *naive_roles, *ours.host_by_role} - set(names)
    roles_by_label = {**{role: (role,) for role in names}, "everything else": tuple(other_roles)}
    for label, roles in roles_by_label.items():
        bytes_by_role = (naive_roles, ours.by_role, ours.host_by_role)
        naive_bytes, our_bytes, host_bytes = (
            sum(role_bytes.get(role, 0) for role in roles) for role_bytes in bytes_by_role
        )
        add(names.get(label, label), None if naive is None else naive_bytes, our_bytes, host_bytes)
    view.add_section()
    gradient_label = "gradients held at once (counted)" if config.full else "gradient tree (counted)"
    add(gradient_label, table.naive_gradient_bytes, table.gradient_bytes, 0)
    console.print(view)
    if saved_bytes is not None:
        text = f"Training all weights would need {format_bytes(saved_bytes)} more for gradients and optimizer state"
        console.print(f"{text} (counted; --compare compiles that step).", soft_wrap=True)


def _ratio(num_bytes: int, reference: int) -> str:
    return f"{num_bytes / reference:.0%}" if reference else ""
