"""Bytes of preference tuning and of its reference, compared with supervised tuning on as many tokens.

    python benchmarks/objectives.py [--json FILE]

Two pairs of 2,048 tokens an answer, in two rows of 4,096 tokens. LoRA on the shapes of Llama 3 8B is compiled for an
H100, and tuning of all parameters on the shapes of Llama 3.2 1B, in bfloat16, for a TPU v5e. For the latter, a row also
has the separate program that computes the reference from weights in host memory. Nothing runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from _common import ROOT, header, write

import lowtide as lt
from lowtide.finetune import FinetuneConfig
from lowtide.finetune._job import JobPlan, reference_columns
from lowtide.memory import Job

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
SIZES_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "tie_word_embeddings": False}
SIZES_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "LoRA, 8B": ("h100", SIZES_8B | {"head_dim": 128}, {}),
    "all parameters, 1B": ("v5e", SIZES_1B | {"head_dim": 64}, {"full": True, "param_dtype": "bfloat16"}),
}
PREFERENCES = {"objective": "dpo", "data": "pairs.jsonl"}


def measure(name: str, folder: Path) -> list[dict[str, Any]]:
    """Compile the steps of one case, and the program of a reference in host memory."""
    target_name, sizes, settings = CASES[name]
    target = lt.target(target_name)
    (folder / "config.json").write_text(json.dumps(LLAMA | sizes))
    shared: dict[str, Any] = {"model": str(folder), "batch_size": 2, "seq_len": 4096, "packing": "best-fit", **settings}
    jobs: dict[str, Job] = {}
    for objective, more in (("sft", {}), ("dpo", PREFERENCES)):
        config = FinetuneConfig(**shared, **more)
        jobs[objective] = JobPlan.from_shapes(config, target).job()
        if config.full and objective == "dpo":
            hosted = dataclasses.replace(config, offload=("parameters",))
            batch = {name: leaf for name, leaf in jobs[objective].args[-1].items() if name != "reference"}
            args = (JobPlan.from_shapes(hosted, target).base, batch)
            jobs["reference of dpo"] = Job(fn=reference_columns(config), args=args, roles={"base": 0, "batch": 1})
    rows: list[dict[str, Any]] = []
    for program, job in jobs.items():
        report = job.analyze(target)
        sizes = {"device_bytes": report.device_bytes, "host_bytes": report.host_bytes, "by_role": dict(report.by_role)}
        rows.append({"case": name, "target": target_name, "program": program, **sizes})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=ROOT / "results/objectives.json")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            rows += measure(name, Path(folder))
    for row in rows:
        sizes = f"{row['device_bytes'] / 2**30:.3f} GiB on the device, {row['host_bytes'] / 2**30:.3f} GiB on the host"
        print(f"{row['case']}, {row['target']}, {row['program']}: {sizes}")
    write(args.json, {**header("objectives.py"), "label": "compiled", "rows": rows})


if __name__ == "__main__":
    main()
