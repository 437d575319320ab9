"""A fine-tuning step on packed chats, by this library and by `transformers` with `peft`, on the same files.

Rows are filled with chats: alternating prompts and answers of log-normal lengths. Only answers have labels. The
documents of a row do not attend to each other, and their positions restart. This library receives ``segment_ids`` and
``positions``. transformers receives only ``position_ids``: without an attention mask or a cache, its
`create_causal_mask` finds where they restart, and masks the other documents. Its labels are the tokens themselves,
which the model shifts.

Both sides train adapters on all projections that are separate layers, with AdamW. In a mixture of experts these are the
attention projections, because on both sides the experts are one parameter with three axes. Neither side imports the
other's framework.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RANK, ALPHA, LEARNING_RATE, WEIGHT_DECAY = 16, 32.0, 1e-4, 0.01
IGNORED = -100
METHODS: dict[str, dict[str, Any]] = {"lora": {}, "dora": {"dora": True}, "rslora": {"rslora": True}}

Rows = dict[str, np.ndarray]
Step = Callable[[], Any]


def packed(vocab_size: int, num_rows: int, length: int, *, seed: int = 0) -> Rows:
    """Return rows of chats, [rows, length] each: ``tokens``, ``segment_ids`` (0: padding), ``positions``, ``answers``.

    A chat that does not fit into the rest of a row is dropped: another is drawn, and after ten failures the rest is
    padding. ``answers`` marks the tokens of answers.
    """
    generator = np.random.default_rng(seed)
    shape = (num_rows, length)
    rows = {name: np.zeros(shape, np.int32) for name in ("segment_ids", "positions", "answers")}
    rows["tokens"] = generator.integers(0, vocab_size, shape, np.int32)
    for row in range(num_rows):
        begin, segment = 0, 1
        while length - begin >= 8:
            turns = _turns(generator, length - begin)
            if not turns:
                break
            size = sum(turns)
            rows["segment_ids"][row, begin : begin + size] = segment
            rows["positions"][row, begin : begin + size] = np.arange(size)
            rows["answers"][row, begin : begin + size] = np.repeat(np.arange(len(turns)) % 2, turns)
            begin, segment = begin + size, segment + 1
        rows["positions"][row, begin:] = np.arange(length - begin)
    return rows


def _turns(generator: np.random.Generator, room: int) -> list[int]:
    """Draw alternating lengths of prompts and answers that fit into `room`; empty if ten drawn chats do not fit."""
    for _ in range(10):
        pairs = int(generator.integers(1, 4))
        sizes = generator.lognormal((3.2, 4.0), 0.6, (pairs, 2))
        turns = [max(2, int(size)) for size in sizes.ravel()]
        if sum(turns) <= room:
            return turns
    return []


def facts(rows: Rows) -> dict[str, Any]:
    """Return the counts of the rows."""
    return {
        "rows": rows["tokens"].shape[0],
        "seq_len": rows["tokens"].shape[1],
        "tokens": rows["tokens"].size,
        "documents": int(rows["segment_ids"].max(axis=1).sum()),
        "share_of_padding": float(np.mean(rows["segment_ids"] == 0)),
        "share_of_answers": float(np.mean(rows["answers"])),
    }


def adapter_of(method: str) -> str:
    """Return the folder of a method's adapter."""
    return f"adapter-{'lora' if method == 'qlora' else method}"


# --- this library --------------------------------------------------------------------------------------------------


def write_model(config: Any, folder: Path, dtype: str) -> None:
    """Write random weights and adapters in the formats that both sides read."""
    import functools

    import jax

    import lowtide as lt

    make = functools.partial(lt.models.init, config, dtype=dtype, compute_dtype=dtype)
    model = jax.jit(make)(key=jax.random.key(0))
    lt.models.save(model, folder)
    for method, more in METHODS.items():
        adapters = lt.lora.Config(rank=RANK, alpha=ALPHA, targets="layers/**/*_proj", **more)
        adapted = lt.lora.add(model, adapters, key=jax.random.key(1))
        lt.lora.save(adapted, folder / f"adapter-{method}", base_model_name_or_path=str(folder))


def our_step(
    folder: Path, rows: Rows, *, remat: bool, dtype: str, compiled: Callable[..., Any], method: str = "lora"
) -> tuple[Step, dict]:
    """Return a function that takes one step and returns its loss, and the parameter counts.

    `compiled` compiles the step. `method` is one of `METHODS`, or ``qlora`` for LoRA on projections in nf4.
    """
    import jax
    import optax

    import lowtide as lt

    labels = np.where(rows["answers"] == 1, rows["tokens"], IGNORED)
    labels = np.concatenate([labels[:, 1:], np.full((len(labels), 1), IGNORED, np.int32)], 1)
    batch = {name: rows[name] for name in ("tokens", "segment_ids", "positions")} | {"labels": labels}
    batch = jax.device_put(batch, jax.devices()[0])
    base = lt.models.load(folder, compute_dtype=dtype, quantize="nf4" if method == "qlora" else None)
    model = lt.lora.load(base, folder / adapter_of(method))
    del base
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
    sizes = {
        "num_trained": sum(leaf.size for leaf in jax.tree.leaves(trainable)),
        "num_parameters": sum(leaf.size for leaf in jax.tree.leaves(frozen)),
    }
    program = compiled(step, *held, frozen, batch, donate_argnums=(0, 1))
    del trainable

    def one() -> Any:
        held[0], held[1], value = program(*held, frozen, batch)
        return value

    return one, sizes


# --- transformers and peft -----------------------------------------------------------------------------------------


def their_step(
    folder: Path, rows: Rows, *, remat: bool, dtype: str, device: str, options: dict[str, Any], method: str = "lora"
) -> tuple[Step, dict[str, Any]]:
    """Return the same for PyTorch, with bitsandbytes for ``qlora``; `options` are passed to ``from_pretrained``."""
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    if method == "qlora":
        from transformers import BitsAndBytesConfig

        four_bits: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        compute = getattr(torch, dtype)
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_compute_dtype=compute, **four_bits
        )
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **options).to(device)
    sizes = {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "attention": model.config._attn_implementation,
        "experts": getattr(model.config, "_experts_implementation", None),
    }
    model.config.use_cache = False
    if remat:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    config = LoraConfig.from_pretrained(folder / adapter_of(method))
    config.inference_mode = False
    model = get_peft_model(model, config)
    # PEFT 0.21.2 with Transformers 5.0.0 fails to load an adapter of a mixture of experts (it passes `loading_info`).
    factors = load_file(folder / adapter_of(method) / "adapter_model.safetensors")
    named = {_name(name): value for name, value in factors.items()}
    if unknown := model.load_state_dict(named, strict=False).unexpected_keys:
        raise ValueError(f"PEFT has no {unknown}")
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sizes["num_trained"] = sum(parameter.numel() for parameter in trained)
    optimizer = torch.optim.AdamW(
        trained, lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=WEIGHT_DECAY, fused=True
    )
    labels = np.where(rows["answers"] == 1, rows["tokens"], IGNORED)
    ids, positions, labels = (
        torch.from_numpy(each).long().to(device) for each in (rows["tokens"], rows["positions"], labels)
    )

    def one() -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(input_ids=ids, position_ids=positions, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return one, sizes


def _name(name: str) -> str:
    """Return the parameter name in a PEFT model for the name of a tensor in an adapter file."""
    vector = "lora_magnitude_vector"
    if name.endswith(vector):
        return f"{name}.default.weight"
    return f"{name.removesuffix('.weight')}.default.weight"
