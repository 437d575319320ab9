"""Bytes of models with layers of different kinds: delta nets and attention, tuning on one chip and on several.

    python benchmarks/families.py [--case NAME] ...

`layer`: four layers of Qwen3.5-9B's shapes, LoRA of rank 16, one row, recomputed layers; all delta nets, all attention,
or three delta nets and one attention layer. The figure is what the step needs in addition to its arguments. `tune`:
steps of `lowtide finetune` for the published Qwen3.5-9B, 2 x 2,048 tokens. `experts`: LoRA on the published Gemma 4
26B-A4B on eight TPU v5e chips, 2,048 tokens per chip, with the experts sharded along the mesh axis `expert` and the
other weights along all chips. Compiled, never run. With --case the other cases of the result file stay.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from _common import ROOT, header, write
from jax import P

import lowtide as lt
from lowtide import finetune, models
from lowtide.core import tree_bytes
from lowtide.distributed import ShardingRules, make_mesh

PUBLISHED = json.loads((ROOT.parent / "tests" / "golden" / "published_configs.json").read_text())
RESULT = ROOT / "results" / "families.json"
KINDS = {"delta": (True,) * 4, "attention": None, "both": (True, True, True, False)}


def config_of(name: str) -> models.DecoderConfig:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(PUBLISHED[name]["config"]))
        return models.load_config(folder)


def decoder(config: models.DecoderConfig) -> Any:
    def make() -> models.Decoder:
        return models.init(config, key=jax.random.key(0), dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)

    return lt.lora.add(
        jax.eval_shape(make), lt.lora.Config(rank=16, alpha=32, targets="layers/**/*_proj"), key=jax.random.key(0)
    )


def loss(model: models.Decoder, batch: Any) -> Any:
    return models.loss(model, batch, remat=True)[0]


def batch_of(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    names = ("tokens", "labels", "segment_ids", "positions")
    return {name: jax.ShapeDtypeStruct((rows, length), jnp.int32) for name in names}


def layers() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for target in ("v5e", "h100"):
        for kind, delta_layers in KINDS.items():
            for length in (4096, 8192):
                config = config_of("qwen3.5-9b")
                delta_net = None if delta_layers is None else config.delta_net
                sizes = {"num_layers": 4, "vocab_size": 32_000, "delta_net": delta_net, "delta_layers": delta_layers}
                model, batch = decoder(dataclasses.replace(config, **sizes)), batch_of(1, length)
                report = lt.memory.analyze(lt.value_and_grad(loss, wrt="**/lora_*"), model, batch, target=target)
                row = {"target": target, "layers": kind, "tokens": length, "code_bytes": report.device.code_bytes}
                row["step_bytes"] = report.device_bytes - tree_bytes((model, batch))
                rows.append(row)
                print(row, flush=True)
    return rows


def tune() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for target in ("rtx4090", "v5e", "h100"):
        for name, settings in {"QLoRA": {"quantize": "nf4", "quantize_embeddings": "int8"}, "LoRA": {}}.items():
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "config.json").write_text(json.dumps(PUBLISHED["qwen3.5-9b"]["config"]))
                job = finetune.step_job(folder, target=target, batch_size=2, seq_len=2048, rank=16, **settings)
                report = job.analyze(target)
            row = {"target": target, "method": name, "device_bytes": report.device_bytes, "fits": report.fits}
            rows.append(row)
            print(row, flush=True)
    return rows


def experts() -> list[dict[str, Any]]:
    target = lt.target("v5e:2x4")
    mesh = make_mesh(expert=8, devices=target.devices())
    rules = ShardingRules(mesh=mesh, rules={r"layers/.*experts/.*": P(None, "expert")})
    model = decoder(config_of("gemma-4-26b-a4b-it"))
    tx = optax.adamw(1e-4)
    trainable, frozen = lt.partition(model, "**/lora_*")

    def placed(path: str, leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rules.of(path, leaf))

    def step(trainable: Any, state: Any, frozen: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(lambda trainable: loss(lt.combine(trainable, frozen), batch))(trainable)
        updates, state = tx.update(grads, state, trainable)
        return optax.apply_updates(trainable, updates), state, value

    trainable, frozen = (lt.core.map_with_paths(placed, tree) for tree in (trainable, frozen))
    state = lt.core.map_with_paths(placed, jax.eval_shape(tx.init, trainable))
    batch = rules.batch_shapes(batch_of(8, 2048))
    with jax.set_mesh(mesh):
        report = lt.memory.analyze(step, trainable, state, frozen, batch, target=target, donate_argnums=(0, 1))
    row = {"target": target.name, "model": "gemma-4-26b-a4b-it", "tokens_per_chip": 2048}
    return [{**row, "device_bytes": report.device_bytes, "fits": report.fits}]


CASES: dict[str, Callable[[], list[dict[str, Any]]]] = {"layer": layers, "tune": tune, "experts": experts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="a case to compile (default: all)")
    names = parser.parse_args().case or [*CASES]
    cases = json.loads(RESULT.read_text())["cases"] if RESULT.exists() else {}
    for name in names:
        cases[name] = CASES[name]()
        print(json.dumps(cases[name], indent=1))
        write(RESULT, {**header("python benchmarks/families.py"), "cases": cases})


if __name__ == "__main__":
    main()
