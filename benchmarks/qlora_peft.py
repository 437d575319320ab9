"""QLoRA, DoRA and rsLoRA on packed chats versus `transformers`, `peft` and bitsandbytes, on Qwen3's shapes.

    python benchmarks/qlora_peft.py [--case 8b-qlora-4x2048-remat-lowtide] [--rehearse]

The files, the rows and both steps are those of `sft_peft.py`, with Qwen3-1.7B's and Qwen3-8B's shapes. QLoRA stores the
projections of all layers in nf4 with double quantisation. This library and bitsandbytes both quantise the weights while
they read them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from _gpu import main
from lora_peft import OURS, THEIRS
from sft_peft import LENGTH, ROWS, prepare, run_lowtide, run_peft

PART = "qlora"
METHODS = {"1.7b": ("qlora", "dora", "rslora"), "8b": ("qlora", "dora")}


def _cases() -> dict[str, Callable[[bool], dict[str, Any]]]:
    cases: dict[str, Callable[[bool], dict[str, Any]]] = {}
    for model, methods in METHODS.items():
        cases[f"prepare-{model}"] = functools.partial(prepare, model)
        for method in methods:
            for side, run in (("lowtide", run_lowtide), ("peft", run_peft)):
                cases[f"{model}-{method}-{ROWS}x{LENGTH}-remat-{side}"] = functools.partial(run, model, method=method)
    return cases


CASES = _cases()
_PACKAGES = ("torch", "transformers", "peft", "accelerate")
NEEDS = {
    name: (*_PACKAGES, "bitsandbytes") if "-qlora-" in name else _PACKAGES for name in CASES if name.endswith("-peft")
}

if __name__ == "__main__":
    limits = dict.fromkeys(CASES, 4.0)
    places = {} if "--rehearse" in sys.argv else {name: THEIRS if name in NEEDS else OURS for name in CASES}
    main(PART, CASES, __doc__, minutes=limits, needs=NEEDS, env=places)
