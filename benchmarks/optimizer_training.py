"""Held-out losses of trainings with low-precision optimizer state, versus those with float32 state.

    python benchmarks/optimizer_training.py [--part pretrain] [--part finetune] [--part convolutions] [--part embedding]
                                            [--part mixture] [--seeds 3] [--json FILE]

Each part is trained with AdamW for every format and seed, from the same parameters over the same batches:

`pretrain`: the decoder that Lowtide embeds, from scratch, 1,000 steps of 8 x 128 tokens of Python's standard library.
`finetune`: `lowtide finetune` with its defaults, 300 steps of LoRA on that decoder.
`convolutions`: a convolutional net that learns the classes of a random net, 600 steps.
`embedding`: an embedding of 2,048 rows of 128, many of which a text rarely uses, and a head; 1,000 steps.
`mixture`: a decoder with 16 experts, two per token, 400 steps.

``split`` is 8 bits with bfloat16 weights that are updated as if they were wider. All figures are from a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import ROOT, header, write
from rich.console import Console
from rich.table import Table

import lowtide as lt
from lowtide.finetune import open_base, text_data
from lowtide.models import DecoderConfig, Experts, init, loss
from lowtide.optim import low_precision

Tree = Any
FORMATS = ("float32", "8bit", "companded", "fp8", "4bit", "split")
ROWS, LENGTH, VOCABULARY = 8, 128, 2048
FOLDERS = ("json", "asyncio", "email", "http", "logging", "unittest", "xml", "concurrent")


def optimizer(form: str, peak: float, num_steps: int) -> optax.GradientTransformation:
    """Return AdamW with warm-up, cosine decay and clipping, and its state in a format."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, num_steps // 10, num_steps, end_value=peak / 20)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
    if form == "split":
        adamw = low_precision(adamw, "8bit", weights="split")
    elif form != "float32":
        adamw = low_precision(adamw, form)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def stored(form: str, params: Tree) -> Tree:
    """Return the parameters in the dtype that the format stores."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params) if form == "split" else params


def wide(params: Tree) -> Tree:
    """Return the parameters in the dtype of the computation."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)


def held_out(form: str, params: Tree, loss_fn: Any, train: list[Tree], test: list[Tree], peak: float) -> float:
    """Train over batches in order, and return the mean loss of the test batches."""
    tx = optimizer(form, peak, len(train))
    params = stored(form, params)
    state = jax.jit(tx.init)(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Tree, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        grads = jax.grad(lambda params: loss_fn(wide(params), batch))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for batch in train:
        params, state = step(params, state, batch)
    evaluate = jax.jit(lambda params, batch: loss_fn(wide(params), batch))
    return statistics.fmean(float(evaluate(params, batch)) for batch in test)


@cache
def text(seed: int) -> Any:
    """Return rows of tokens from the standard library."""
    _, words = open_base(None)
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted([*root.glob("*.py"), *(file for folder in FOLDERS for file in (root / folder).glob("*.py"))])
    documents = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    return text_data(
        [document for document in documents if document.strip()],
        words,
        seq_len=LENGTH,
        batch_size=ROWS,
        seed=seed,
        end_token=0,
        held_out_fraction=0.02,
    )


def rows_of_text(seed: int, num_steps: int) -> tuple[list[Tree], list[Tree]]:
    """Return training batches and evaluation batches."""
    data = text(seed)
    train = [data.train[at % len(data.train)] for at in range(num_steps)]
    return train, [data.held_out[at] for at in range(min(len(data.held_out), 16))]


def of_decoder(config: DecoderConfig, num_steps: int, form: str, seed: int) -> float:
    """Train a decoder from scratch."""
    model = init(config, key=jax.random.key(seed))
    leaves, static = lt.core.partition(model, "**")

    def loss_fn(leaves: Tree, batch: Tree) -> Any:
        return loss(lt.core.combine(leaves, static), batch)[0]

    return held_out(form, leaves, loss_fn, *rows_of_text(seed, num_steps), 3e-3)


SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 32,
    "tie_embeddings": True,
}


def pretrain(form: str, seed: int) -> float:
    """Train a decoder of the embedded model's shapes."""
    return of_decoder(DecoderConfig(**SMALL, num_layers=4, family="llama"), 1000, form, seed)


def mixture(form: str, seed: int) -> float:
    """Train a mixture of experts, most of which see few tokens."""
    experts = Experts(num_experts=16, num_experts_per_token=2, intermediate_size=128)
    config = DecoderConfig(**SMALL, num_layers=2, family="qwen3_moe", qk_norm="head", experts=experts)
    return of_decoder(config, 400, form, seed)


def finetune(form: str, seed: int) -> float:
    """Run the main example of the README."""
    words = ["--state-dtype", form]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "lowtide", "finetune", *words, "--seed", str(seed), "--sample-tokens", "0"]
        subprocess.run([*command, "--out", str(out)], check=True, capture_output=True)
        lines = (out / "metrics.jsonl").read_text().splitlines()
    return [record["eval_loss"] for line in lines if "eval_loss" in (record := json.loads(line))][-1]


def embedding(form: str, seed: int) -> float:
    """Predict the next token from the mean of the last eight: almost all parameters are rows of embeddings."""
    table, head = jax.random.split(jax.random.key(seed))
    params = {
        "table": jax.random.normal(table, (VOCABULARY, 128)) / 8,
        "hidden": jax.random.normal(head, (128, 128)) / 12,
        "head": jax.random.normal(head, (128, VOCABULARY)) / 12,
    }

    def loss_fn(params: Tree, batch: Tree) -> Any:
        rows = params["table"][batch["tokens"]]
        before = jnp.cumsum(rows, axis=1)
        mean = (before[:, 8:] - before[:, :-8]) / 8
        logits = jnp.tanh(mean @ params["hidden"]) @ params["head"]
        labels = batch["labels"][:, 8:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
        return jnp.sum(losses * (labels >= 0)) / jnp.maximum(jnp.sum(labels >= 0), 1)

    return held_out(form, params, loss_fn, *rows_of_text(seed, 1000), 3e-3)


def convolve(params: Tree, images: Any) -> Any:
    """Classify images."""
    for name in ("first", "second"):
        images = jax.lax.conv_general_dilated(
            images, params[name], (2, 2), "SAME", dimension_numbers=("NHWC", "OIHW", "NHWC")
        )
        images = jax.nn.relu(images + params[f"{name}_bias"])
    return images.mean((1, 2)) @ params["head"]


def convolutions(form: str, seed: int) -> float:
    """Train kernels with short last axes, as in PyTorch and Equinox; a random net gives the labels."""

    def net(key: Any, spread: float) -> Tree:
        first, second, head = jax.random.split(key, 3)
        return {
            "first": jax.random.normal(first, (32, 3, 5, 5)) * spread / 9,
            "first_bias": jnp.zeros((1, 1, 1, 32)),
            "second": jax.random.normal(second, (64, 32, 3, 3)) * spread / 17,
            "second_bias": jnp.zeros((1, 1, 1, 64)),
            "head": jax.random.normal(head, (64, 10)) * spread / 8,
        }

    teacher, num_steps = net(jax.random.key(100), 2.0), 600

    def images(*at: int) -> Any:
        rng = np.random.default_rng(at)
        return (rng.normal(size=(64, 16, 16, 3)) + 2 * rng.normal(size=(64, 1, 1, 3))).astype(np.float32)

    many = jnp.concatenate([convolve(teacher, images(0, at)) for at in range(16)])
    middle, width = many.mean(0, keepdims=True), many.std(0, keepdims=True)
    label = jax.jit(lambda images: jnp.argmax((convolve(teacher, images) - middle) / width, axis=-1))

    def batch(at: int) -> Tree:
        made = images(1 + seed, at)
        return {"images": made, "labels": label(made)}

    def loss_fn(params: Tree, batch: Tree) -> Any:
        logits = convolve(params, batch["images"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    train, test = ([batch(at) for at in range(*bounds)] for bounds in ((num_steps,), (num_steps, num_steps + 16)))
    return held_out(form, net(jax.random.key(seed), 1.0), loss_fn, train, test, 3e-3)


PARTS: dict[str, Callable[[str, int], float]] = {
    "pretrain": pretrain,
    "finetune": finetune,
    "convolutions": convolutions,
    "embedding": embedding,
    "mixture": mixture,
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One part in one format."""

    part: str
    format: str
    losses: list[float]
    """Held-out loss of each seed."""
    apart: float
    """Relative difference of the mean loss from that of float32."""
    most_apart: float
    """Relative difference of the seed that is farthest from its own float32 loss."""
    seconds: float
    commit: str
    """Commit of the training; rows of other parts and formats are kept from earlier commits."""


def rows_of(part: str, forms: list[str], num_seeds: int, commit: str, console: Console) -> Iterator[Row]:
    """Train one part in every format."""
    plain: list[float] = []
    for form in forms:
        if part == "finetune" and form == "split":
            continue  # the adapters are float32
        begin = time.perf_counter()
        losses = [PARTS[part](form, seed) for seed in range(num_seeds)]
        if form == "float32":
            plain = losses
        ratio = [ours / theirs - 1 for ours, theirs in zip(losses, plain, strict=True)]
        mean = statistics.fmean(losses) / statistics.fmean(plain) - 1
        made = Row(part, form, losses, mean, max(ratio, key=abs), time.perf_counter() - begin, commit)
        console.print(f"{part:13} {form:10} {statistics.fmean(losses):.4f}  {mean:+.2%}  {made.seconds:.0f} s")
        yield made


def main() -> None:
    """Train, print and write the raw results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--format", action="append", choices=FORMATS, help="beside float32; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "optimizer_training-cpu.json")
    options = parser.parse_args()
    console = Console(width=120)
    forms = ["float32", *(form for form in FORMATS[1:] if form in (options.format or FORMATS))]
    parts = options.part or list(PARTS)
    kept = json.loads(options.json.read_text())["rows"] if options.json.is_file() else []
    rows = [Row(**row) for row in kept if row["part"] not in parts or row["format"] not in forms]
    command = " ".join(["python benchmarks/optimizer_training.py", *(f"--part {part}" for part in options.part or ())])
    for part in parts:  # written after each part, so that an interrupt loses only the current part
        rows += rows_of(part, forms, options.seeds, header(command)["commit"], console)
        rows.sort(key=lambda row: (list(PARTS).index(row.part), FORMATS.index(row.format)))
        content = {"label": "measured", "cores": os.cpu_count(), "rows": [dataclasses.asdict(row) for row in rows]}
        write(options.json, {**header(command), **content})
    table = Table(title="held-out loss, mean of seeds, and what it is apart from float32 state")
    forms = [form for form in FORMATS if any(row.format == form for row in rows)]
    for column in ("part", *forms):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part in dict.fromkeys(row.part for row in rows):
        own = {row.format: row for row in rows if row.part == part}
        cells = [
            f"{statistics.fmean(own[form].losses):.4f} ({own[form].apart:+.2%})" if form in own else ""
            for form in forms
        ]
        table.add_row(part, *cells)
    console.print(table)


if __name__ == "__main__":
    main()
