"""Pretrain the base model that ships inside Lowtide on the source of Python's standard library.

    python scripts/pretrain_base.py --out src/lowtide/models/base

The script trains a byte-level BPE tokenizer and a Llama decoder of just under 2 million parameters, with Lowtide's own
`Trainer`; every leaf trains. It writes a Hugging Face directory, with a `training.json` that describes the run, and
measures the held-out loss of the saved model. The corpus is every module of the running Python's standard library,
except tests, IDLE, generated tables and `pydoc_data`. `lowtide finetune` tunes on `pydoc_data`, so the base must not
have seen it.

A run that is started again with the same `--work` folder continues from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import json
import platform
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import lowtide as lt
from lowtide.finetune import TextData, text_data
from lowtide.models import DecoderConfig, init, load, loss, save
from lowtide.train import Trainer

END = "<|endoftext|>"
EXCLUDED = {"test", "tests", "idlelib", "site-packages", "dist-packages", "pydoc_data", "encodings", "lib2to3"}
SEQ_LEN, BATCH_SIZE, SEED, VOCAB_SIZE = 128, 16, 0, 2048
PEAK_LEARNING_RATE, WARMUP_STEPS = 3e-3, 200
console = Console()


def corpus() -> list[str]:
    """Return the source files of the standard library, one document each."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in sorted(root.rglob("*.py")) if not EXCLUDED & set(f.relative_to(root).parts)]
    return [text for f in files if (text := f.read_text(encoding="utf-8", errors="replace")).strip()]


def train_tokenizer(documents: list[str], path: Path) -> Tokenizer:
    """Train a byte-level BPE tokenizer whose id 0 is the end-of-document token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def model_config() -> DecoderConfig:
    return DecoderConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_layers=4,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        tie_embeddings=True,
        max_position_embeddings=SEQ_LEN,
        bos_token_id=0,
        eos_token_id=0,
    )


def optimizer(num_steps: int) -> optax.GradientTransformation:
    """Return AdamW with linear warm-up, cosine decay to a twentieth, and weight decay on the layers' matrices only."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, PEAK_LEARNING_RATE, WARMUP_STEPS, num_steps, end_value=PEAK_LEARNING_RATE / 20
    )
    decayed = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 2, p))
    return optax.chain(optax.clip_by_global_norm(1.0), decayed)


def num_targets(batch: dict[str, jax.Array]) -> jax.Array:
    """Return the weight of a batch in the held-out loss; the last batch is not full."""
    return jnp.sum(batch["labels"] != -100)


def train(trainer: Trainer, data: TextData, args: argparse.Namespace) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress, (args.work / "metrics.jsonl").open("a") as metrics:
        task = progress.add_task("pretraining", total=args.steps, completed=trainer.step)

        def on_record(record: dict[str, float | int]) -> None:
            metrics.write(json.dumps(record) + "\n")
            metrics.flush()
            if "eval_loss" in record:
                console.print(f"step {record['step']}: held-out loss {record['eval_loss']:.4f}")
            progress.update(task, completed=record["step"])

        trainer.fit(
            data.train,
            num_steps=args.steps,
            eval_data=data.held_out,
            eval_every=250,
            checkpoint_every=250,
            on_record=on_record,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where to write the model directory")
    parser.add_argument("--work", type=Path, default=Path("runs/pretrain"), help="checkpoints and metrics")
    parser.add_argument("--steps", type=int, default=3000, help="training steps")
    args = parser.parse_args()

    documents = corpus()
    tokenizer = train_tokenizer(documents, args.work / "tokenizer.json")
    data = text_data(
        documents, tokenizer, seq_len=SEQ_LEN, batch_size=BATCH_SIZE, seed=SEED, end_token=0, held_out_fraction=0.02
    )
    console.print(
        f"{data.num_documents} files, {data.num_train_tokens:,} training tokens, {data.num_held_out_tokens:,} held out"
    )
    model = init(model_config(), key=jax.random.key(SEED))
    trainer = Trainer(model, loss, optimizer(args.steps), weight=num_targets, checkpoint_dir=args.work / "checkpoints")
    resumed = trainer.restore()
    if resumed:
        console.print(f"continuing from step {resumed}")
    started = time.perf_counter()
    train(trainer, data, args)
    stored = jax.tree.map(lambda x: x.astype(jnp.bfloat16), trainer.model)
    save(stored, args.out, tokenizer=args.work / "tokenizer.json")
    (args.out / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}, indent=2) + "\n"
    )
    reloaded = Trainer(load(args.out), loss, optax.set_to_zero(), weight=num_targets)
    record = {
        "script": "scripts/pretrain_base.py",
        "corpus": f"standard library source of CPython {platform.python_version()} "
        f"(without {', '.join(sorted(EXCLUDED))})",
        "num_documents": data.num_documents,
        "num_train_tokens": data.num_train_tokens,
        "num_held_out_tokens": data.num_held_out_tokens,
        "num_parameters": sum(x.size for x in jax.tree.leaves(stored)),
        "steps": args.steps,
        "seq_len": SEQ_LEN,
        "batch_size": BATCH_SIZE,
        "peak_learning_rate": PEAK_LEARNING_RATE,
        "seed": SEED,
        "held_out_loss_nats_per_token": round(reloaded.evaluate(data.held_out), 4),
        "held_out_batches_of": BATCH_SIZE,
        "seconds": None if resumed else round(time.perf_counter() - started),
        "versions": {"jax": jax.__version__, "lowtide": lt.__version__},
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    console.print_json(data=record)


if __name__ == "__main__":
    main()
