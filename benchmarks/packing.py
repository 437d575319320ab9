"""Utilisation of packed rows, versus TRL's packing of the same lengths if TRL is installed, and memory of tokenising.

    python benchmarks/packing.py                      # utilisation
    python benchmarks/packing.py --documents 100000   # also resident memory while so many chats are tokenised

TRL packs within each thousand documents that `datasets` maps over; `trl, all at once` is its packing of all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.finetune.data import ChatTemplate, best_fit, record_data
from lowtide.models import base_path, load_tokenizer


def utilisation(seq_len: int, num_documents: int) -> dict[str, Any]:
    lengths = np.random.default_rng(0).lognormal(5.5, 0.9, num_documents).astype(np.int64) + 1
    lengths = np.minimum(lengths, seq_len)
    started = time.perf_counter()
    rows = best_fit(lengths, seq_len)
    found: dict[str, Any] = {"seq_len": seq_len, "documents": num_documents}
    found["lowtide"] = lengths.sum() / (len(rows) * seq_len)
    found["lowtide_seconds"] = time.perf_counter() - started
    try:
        from datasets import Dataset
        from trl.data_utils import pack_dataset
    except ImportError as error:
        return {**found, "trl": f"not installed: {error}"}
    documents = Dataset.from_dict({"input_ids": [[0] * length for length in lengths]})
    for name, options in {"trl": {}, "trl, all at once": {"map_kwargs": {"batch_size": num_documents}}}.items():
        started = time.perf_counter()
        packed = pack_dataset(documents, seq_len, "bfd", **options)
        found[name] = lengths.sum() / (len(packed) * seq_len)
        found[f"{name}, seconds"] = time.perf_counter() - started
    return found


def memory(num_documents: int) -> dict[str, Any]:
    """Return peak resident memory before and after tokenising, and after a hundred batches, in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOWTIDE_CACHE"] = folder
        file = Path(folder, "chat.jsonl")
        words = "the tide goes out and the tide comes in again " * 20
        with open(file, "w") as out:
            for i in range(num_documents):
                turns = [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": words}]
                out.write(json.dumps({"messages": turns}) + "\n")
        source = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
        source += "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
        template = ChatTemplate(source=source, special={}, where="template")
        tokenizer = load_tokenizer(base_path())
        few = Path(folder, "few.jsonl")
        few.write_text("".join(open(file).readlines(2**20)))
        # Loads the libraries that do the work.
        record_data(few, tokenizer, template, seq_len=1024, batch_size=8, seed=0)
        before, started = _peak(), time.perf_counter()
        data = record_data(file, tokenizer, template, seq_len=1024, batch_size=8, seed=0)
        seconds, tokenised = time.perf_counter() - started, _peak()
        for step in range(100):
            data.train[step]
        size = file.stat().st_size / 2**20
        return {
            "documents": num_documents,
            "file_mib": size,
            "tokens": data.report.num_tokens,
            "before_mib": before,
            "tokenised_mib": tokenised,
            "batches_mib": _peak(),
            "seconds": seconds,
        }


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=0, help="chats to tokenise")
    args = parser.parse_args()
    print(json.dumps([utilisation(seq_len, 20_000) for seq_len in (1024, 2048, 4096)], indent=2))
    if args.documents:
        print(json.dumps(memory(args.documents), indent=2))
