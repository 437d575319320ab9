"""The table "Will it fit?" of the README: Llama 3.1 8B with three methods on three chips. Compiled, never run.

    python benchmarks/will_it_fit.py [--case QLoRA] ...

Each case is one call of `lowtide fits` for a folder with the model's config.json: packed rows of 2 x 2048 tokens,
AdamW, LoRA of rank 16 on all projections. With --case the other rows of the result file stay.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _common import ROOT, header, write

# meta-llama/Llama-3.1-8B, config.json
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
CASES = {"QLoRA": ["--quantize", "nf4", "--quantize-embeddings", "int8"], "LoRA": [], "full": ["--full"]}
TARGETS = ("rtx4090", "v5e", "h100")
RESULT = ROOT / "results" / "will_it_fit.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="a row of the table (default: all)")
    cases = parser.parse_args().case or [*CASES]
    rows = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        model, table = Path(folder) / "Llama-3.1-8B", Path(folder) / "table.json"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG))
        for case in cases:
            targets = [argument for target in TARGETS for argument in ("--target", target)]
            lengths = ["--seq-len", "2048", "--batch-size", "2"]
            command = [sys.executable, "-m", "lowtide", "fits", str(model), *targets, *lengths, *CASES[case]]
            table.unlink(missing_ok=True)
            # Status 1 means that a target does not suffice.
            subprocess.run([*command, "--json", str(table)], env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False)
            if not table.exists():
                sys.exit(f"error: lowtide fits wrote no table for {case}; its error is above")
            rows[case] = json.loads(table.read_text())
            write(RESULT, {**header("python benchmarks/will_it_fit.py"), "rows": rows})


if __name__ == "__main__":
    main()
