"""LoRA on Llama shapes versus `transformers` and `peft`: tokens per second, peak bytes, and equal losses.

    python benchmarks/lora_peft.py [--case 1b-4x2048-remat-lowtide] [--rehearse]

Both sides read the same files. The weights are random bfloat16 of Llama 3.2 1B's or Llama 3 8B's shapes, written once
to a scratch folder with `lowtide.models.save`. The adapters have rank 16 on all projections, in float32, from
`lowtide.lora.save`. Both sides train the adapters with AdamW (1e-4, betas 0.9 and 0.999, weight decay 0.01) on one
batch of random tokens. So the losses of the first five steps should agree except for rounding. `remat` recomputes each
layer in the backward pass. The files (17 GiB, in `LOWTIDE_SCRATCH` or the system's temporary folder) stay for the next
call; delete them when done.

    lowtide       the decoder of this library: cuDNN's attention on a GPU (the row names it), chunked loss
    peft          bfloat16 base, SDPA, fused AdamW, non-reentrant checkpointing, under `torch.autocast` as the Trainer
                  of transformers runs `bf16=True`
    peft_bf16     the same with the adapters in bfloat16 (`autocast_adapter_dtype=False`), without autocast
    peft_compile  `peft` under `torch.compile`

Seconds are wall-clock seconds of a step, with the device idle before and after. Peaks are those of each side's
allocator since the process began, weights included. Running out of memory is a result, and the row of that case records
it. Cases of PyTorch do not import JAX, so neither side takes the other's memory.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _gpu import check_child, main, peak_bytes, timed

PART = "lora"
RANK, ALPHA, LEARNING_RATE, WEIGHT_DECAY = 16, 32.0, 1e-4, 0.01
LOSSES, WARMUP, REPEATS = 5, 2, 10
TOLERANCE = 0.02
"""Nats by which two sides in bfloat16 may differ in a rehearsal; the summary checks measurements."""
OURS = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".95"}
THEIRS = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # in case one of their imports starts JAX
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


# --- what both sides read ------------------------------------------------------------------------------------------


def place(model: str, rehearsal: bool) -> Path:
    """Return the folder for the files of a model."""
    home = os.environ.get("LOWTIDE_SCRATCH", tempfile.gettempdir())
    return Path(home, f"lowtide-lora-{os.getuid()}", f"{model}{'-toy' * rehearsal}")


def fingerprint() -> str:
    """Return a digest of the code that writes the files, so that changed code does not train on old weights."""
    sources = [Path(__file__), Path(__file__).with_name("_decoders.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def is_complete(folder: Path) -> bool:
    """Return whether this code wrote all files of a model."""
    mark = folder / "complete"
    return mark.is_file() and mark.read_text(encoding="utf-8") == fingerprint()


def prepare(model: str, rehearsal: bool) -> dict[str, Any]:
    """Write weights and adapters, unless they exist."""
    model = "1b" if rehearsal else model
    folder = place(model, rehearsal)
    started, there = time.perf_counter(), is_complete(folder)
    if not there:
        _write(model, rehearsal, folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {"model": model, "file_bytes": size, "was_there": there, "write_seconds": time.perf_counter() - started}


def _write(model: str, rehearsal: bool, folder: Path) -> None:
    import jax
    import jax.numpy as jnp
    from _decoders import LLAMA_1B, LLAMA_8B, toy

    import lowtide as lt

    config = toy() if rehearsal else {"1b": LLAMA_1B, "8b": LLAMA_8B}[model]
    shutil.rmtree(folder, ignore_errors=True)  # files of a killed process
    make = functools.partial(lt.models.init, config, dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    made = jax.jit(make)(key=jax.random.key(0))
    lt.models.save(made, folder)
    adapted = lt.lora.add(made, adapters(), key=jax.random.key(1))
    lt.lora.save(adapted, folder / "adapter", base_model_name_or_path=str(folder))
    (folder / "complete").write_text(fingerprint(), encoding="utf-8")


def adapters() -> Any:
    """Return the configuration of rank 16 on all projections."""
    import lowtide as lt

    return lt.lora.Config(rank=RANK, alpha=ALPHA, targets="layers/**/*_proj")


def ensure(model: str, rehearsal: bool) -> Path:
    """Return the folder of a model. Another process writes missing files, as this one may run PyTorch on the GPU."""
    folder = place(model, rehearsal)
    if not is_complete(folder):
        words = [sys.executable, "-c", f"import lora_peft; lora_peft.prepare({model!r}, {rehearsal})"]
        check_child(f"writing the weights of {model}", words, cwd=Path(__file__).parent)
    return folder


def tokens_of(folder: Path, batch_size: int, seq_len: int) -> Any:
    """Return random tokens [batch, sequence]."""
    import numpy as np

    vocab_size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    return np.random.default_rng(0).integers(0, vocab_size, (batch_size, seq_len), np.int32)


def figures(row: dict[str, Any], seconds: list[float]) -> None:
    """Add the times of the steps to a row."""
    row |= {"seconds_per_step": statistics.median(seconds), "step_seconds": seconds}
    row["tokens_per_second"] = row["tokens"] / row["seconds_per_step"]


# --- this library --------------------------------------------------------------------------------------------------


def lowtide(row: dict[str, Any], folder: Path, remat: bool, rehearsal: bool) -> None:
    """Load, compile, train and time this library's model."""
    import jax
    import numpy as np
    import optax
    from _decoders import compiled

    import lowtide as lt

    tokens = tokens_of(folder, row["batch_size"], row["seq_len"])
    labels = np.concatenate([tokens[:, 1:], np.full((len(tokens), 1), -100, np.int32)], 1)
    batch = jax.device_put({"tokens": tokens, "labels": labels}, jax.devices()[0])
    model = lt.models.load(folder, compute_dtype="bfloat16")
    model = lt.lora.load(model, folder / "adapter")
    trainable, frozen = lt.partition(model, "**/lora_*")
    del model
    tx = optax.adamw(LEARNING_RATE, b1=0.9, b2=0.999, eps=1e-8, weight_decay=WEIGHT_DECAY)

    def step(trainable: Any, state: Any, frozen: Any, batch: Any) -> Any:
        def loss(trainable: Any) -> Any:
            return lt.models.loss(lt.combine(trainable, frozen), batch, remat=remat)[0]

        value, grads = jax.value_and_grad(loss)(trainable)
        updates, state = tx.update(grads, state, trainable)
        return optax.apply_updates(trainable, updates), state, value

    held = [trainable, jax.jit(tx.init)(trainable)]
    row["num_trained"] = sum(leaf.size for leaf in jax.tree.leaves(trainable))
    row["num_parameters"] = sum(leaf.size for leaf in jax.tree.leaves(frozen))
    program = compiled(row, step, *held, frozen, batch, donate_argnums=(0, 1))
    del trainable

    def one() -> Any:
        held[0], held[1], value = program(*held, frozen, batch)
        return value

    row["losses"] = [float(one()) for _ in range(LOSSES)]
    figures(row, timed(one, warmup=WARMUP, repeats=2 if rehearsal else REPEATS))


def run_lowtide(model: str, batch_size: int, seq_len: int, remat: bool, rehearsal: bool) -> dict[str, Any]:
    """Measure this library and return a row."""
    folder, row = _begin("lowtide", model, batch_size, seq_len, remat, rehearsal)
    from _decoders import memory_may_run_out

    with memory_may_run_out(row):
        lowtide(row, folder, remat, rehearsal)
        _losses(folder, row).write_text(json.dumps(row["losses"]), encoding="utf-8")
    return {**row, "peak_bytes": peak_bytes()}


# --- transformers and peft -----------------------------------------------------------------------------------------


def device_of(torch: Any, rehearsal: bool) -> str:
    """Return the GPU; a rehearsal uses the CPU."""
    if rehearsal:
        return "cpu"
    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch finds no GPU here: a measurement needs one, --rehearse does without")
    return "cuda"


def peft(row: dict[str, Any], folder: Path, remat: bool, rehearsal: bool) -> None:
    """Load, train and time the PyTorch model."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    device = device_of(torch, rehearsal)
    in_bf16 = row["side"] == "peft_bf16"
    torch.set_float32_matmul_precision("high")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").to(device)
    row["num_parameters"] = sum(parameter.numel() for parameter in model.parameters())
    model.config.use_cache = False
    if remat:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True, autocast_adapter_dtype=not in_bf16)
    if in_bf16:
        model.to(torch.bfloat16)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    row["num_trained"] = sum(parameter.numel() for parameter in trained)
    row["adapter_dtype"] = str(trained[0].dtype).removeprefix("torch.")
    options = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": WEIGHT_DECAY, "fused": True}
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, **options)
    run_model = torch.compile(model) if row["side"] == "peft_compile" else model
    ids = torch.from_numpy(tokens_of(folder, row["batch_size"], row["seq_len"])).long().to(device)

    def one() -> Any:
        # `labels=ids` are not shifted here: the model of transformers shifts them.
        with torch.autocast(device, torch.bfloat16, enabled=not in_bf16):
            loss = run_model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    started = time.perf_counter()
    losses = [float(one())]
    row["first_step_seconds"] = round(time.perf_counter() - started, 2)
    row["losses"] = [*losses, *(float(one()) for _ in range(LOSSES - 1))]
    seconds: list[float] = []
    for index in range(WARMUP + (2 if rehearsal else REPEATS)):
        started = time.perf_counter()
        one()
        wait()
        if index >= WARMUP:
            seconds.append(time.perf_counter() - started)
    figures(row, seconds)


def run_peft(side: str, model: str, batch_size: int, seq_len: int, remat: bool, rehearsal: bool) -> dict[str, Any]:
    """Measure PyTorch and return a row."""
    folder, row = _begin(side, model, batch_size, seq_len, remat, rehearsal)
    import torch

    try:
        peft(row, folder, remat, rehearsal)
    except torch.OutOfMemoryError as error:
        row |= {"out_of_memory": True, "error": str(error)[:1000]}
    else:
        row |= {"out_of_memory": False, **_against_ours(folder, row)}
        if rehearsal and row["loss_difference"] is not None and not row["loss_difference"] <= TOLERANCE:
            raise AssertionError(f"losses differ: {row}")
    if rehearsal:
        return {"device_kind": "cpu", **row, "peak_bytes": None}
    return {
        "device_kind": torch.cuda.get_device_name(),
        **row,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _begin(
    side: str, model: str, batch_size: int, seq_len: int, remat: bool, rehearsal: bool
) -> tuple[Path, dict[str, Any]]:
    """Return the folder of the files, and a row with the settings."""
    folder = ensure(model, rehearsal)
    seq_len = 32 if rehearsal else seq_len
    row = {
        "side": side,
        "model": model,
        "batch_size": batch_size,
        "seq_len": seq_len,
        "tokens": batch_size * seq_len,
        "remat": remat,
        "rank": RANK,
        "base_dtype": "bfloat16",
        "adapter_dtype": "float32",
        "attention": "sdpa",
    }
    return folder, row


def _losses(folder: Path, row: dict[str, Any]) -> Path:
    return folder / f"losses-{row['batch_size']}.json"  # with and without recomputation the losses are the same


def _against_ours(folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Return the loss differences from this library, if its case has run on this machine."""
    path = _losses(folder, row)
    if not path.is_file():
        return {"loss_difference": None, "first_loss_difference": None}
    ours = json.loads(path.read_text(encoding="utf-8"))
    apart = [abs(a - b) for a, b in zip(ours, row["losses"], strict=True)]
    return {"loss_difference": max(apart), "first_loss_difference": apart[0]}


def _cases() -> dict[str, Callable[[bool], dict[str, Any]]]:
    """Return models and shapes, the most important first, and this library before its peer."""
    cases: dict[str, Callable[[bool], dict[str, Any]]] = {}

    def add(model: str, batch_size: int, remat: bool, *sides: str) -> None:
        for side in sides:
            fn = run_lowtide if side == "lowtide" else functools.partial(run_peft, side)
            name = f"{model}-{batch_size}x2048-{'remat' if remat else 'plain'}-{side}"
            cases[name] = functools.partial(_skipping, name, functools.partial(fn, model, batch_size, 2048, remat))

    pair, others = ("lowtide", "peft"), ("peft_bf16", "peft_compile")
    for model in ("1b", "8b"):
        cases[f"prepare-{model}"] = functools.partial(prepare, model)
        add(model, 4, True, *pair)
    for batch_size, remat in ((16, True), (4, False)):
        for model in ("1b", "8b"):
            add(model, batch_size, remat, *pair)
    for model in ("1b", "8b"):
        add(model, 4, True, *others)
        add(model, 4, False, *others)
    for model in ("1b", "8b"):
        add(model, 16, False, *pair)
    return cases


def _skipping(name: str, case: Callable[[bool], dict[str, Any]], rehearsal: bool) -> dict[str, Any]:
    """In a rehearsal all toys are the same: run one of each side, and one without recomputation."""
    words = name.split("-", 2)
    alike = words[0] != "1b" or words[1] != "4x2048" or words[2] in ("plain-lowtide", "plain-peft_bf16")
    if rehearsal and (alike or "compile" in name):
        return {"rehearsed_as": f"1b-4x2048-remat-{words[2].split('-')[1].removesuffix('_compile')}"}
    return case(rehearsal)


CASES = _cases()
NEEDS = {name: ("torch", "transformers", "peft", "accelerate") for name in CASES if "peft" in name}

if __name__ == "__main__":
    limits = {name: 4.0 if name.startswith(("8b", "prepare-8b")) else 3.0 for name in CASES}
    places = {} if "--rehearse" in sys.argv else {name: THEIRS if name in NEEDS else OURS for name in CASES}
    main(PART, CASES, __doc__, minutes=limits, needs=NEEDS, env=places)
