"""Are plans right? Exhaustive searches, full compilations of plans, and CPU seconds of policies.

    python benchmarks/plan_truth.py exhaustive --target h100
    python benchmarks/plan_truth.py models --target v5e
    python benchmarks/plan_truth.py cpu

`exhaustive` compiles all 32 policies of two blocks, with LoRA and with all weights, and compares `search` at 20 budgets
with the best policy in order of estimated time. For a TPU, policies are first compiled cheaply, and policies that may
fit a budget are compiled whole. `models` plans six models at five budgets each, and compiles each plan again through
`Trainer`. `published` plans steps of published shapes, and counts CPU seconds. `cpu` measures paired CPU seconds of 20
policies, and of the plans at five budgets.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import numpy as np
from _common import MIB, ROOT, header, write
from _plan_programs import ALL, LORA, MODELS, TPU_SCALE, Program, decoder, gated, one_billion
from will_it_fit import CONFIG

import lowtide as lt
from lowtide import finetune, planning, train
from lowtide.core import OutOfMemoryError
from lowtide.memory import Job
from lowtide.planning import Placement, Problem
from lowtide.planning import _search as searching

BLOCKS = {"decoder": decoder, "gated": gated}
NUM_BUDGETS, NUM_WHOLE = 20, 12
NUM_POLICIES, NUM_ROUNDS = 20, 7


def job_of(program: Program, number: int = 1) -> Job:
    options: dict[str, Any] = {"num_microbatches": number, "drops_updates": True}
    return train.step_job(program.model, program.loss, program.tx, program.wrt, program.batch, **options)


def exhaustive(target_name: str) -> dict[str, Any]:
    target = lt.target(target_name)
    rows: list[dict[str, Any]] = []
    searching._limited = _most_flops
    for wrt in (LORA, ALL):
        for name, build in BLOCKS.items():
            program = build(wrt, TPU_SCALE if target.platform == "tpu" else 1)
            rows.append(_exhaustive(name, program, wrt, target))
            print(rows[-1], flush=True)
            save(target_name, "exhaustive", {"rows": rows})
    return {"rows": rows}


def _most_flops(measured: Any) -> Any:
    """Return the five decisions that save the most FLOPs, so that there are 32 policies."""
    best = sorted(measured.decisions, key=lambda item: -item.flops)[:5]
    return dataclasses.replace(measured, decisions=tuple(item for item in measured.decisions if item in best))


def save(target_name: str, part: str, content: dict[str, Any]) -> None:
    command = f"plan_truth.py {part} --target {target_name}"
    write(ROOT / "results" / f"plan_truth-{part}-{target_name}.json", {**header(command), **content})


class _Cache:
    """Compilations of one step by policy; a search of it compiles nothing twice. Mutable."""

    def __init__(self, compile_step: Any, probe_step: Any) -> None:
        self._compile_step, self._probe_step = compile_step, probe_step
        self.sizes: dict[Any, Any] = {}
        self.probes: dict[Any, int | None] = {}
        self.num_probes = 0

    def compile(self, job: Any, hidden: Any, goal: Any) -> Any:
        if hidden not in self.sizes:
            self.sizes[hidden] = self._compile_step(job, hidden, goal)
        return self.sizes[hidden]

    def probe(self, job: Any, hidden: Any, goal: Any) -> Any:
        self.num_probes += 1
        if hidden not in self.probes:
            self.probes[hidden] = self._probe_step(job, hidden, goal)
        return self.probes[hidden]


def _exhaustive(name: str, program: Program, wrt: str, target: Any) -> dict[str, Any]:
    jobs = {Placement(): job_of(program)}
    problem = Problem(jobs.__getitem__, [Placement()], target, 2**60)
    run = searching._Search(problem, None)
    choices = [choice for choice in run.choices() if choice.layers_per_remat == 1]
    assert len(choices) == 32, len(choices)
    cache = _Cache(searching.compile_step, searching.probe_step)
    sizes, compiled, probed = cache.sizes, cache.compile, cache.probe
    compile_step, probe_step = searching.compile_step, searching.probe_step
    original = searching._Search._choices_of
    measured = run.measured
    measure, searching.measure = searching.measure, lambda *_: measured
    searching.compile_step, searching.probe_step = compiled, probed
    searching._Search._choices_of = lambda self, placement: iter(choices)  # the 32 policies, without groups
    job = jobs[Placement()]
    is_tpu = target.platform == "tpu"

    def estimate(choice: Any) -> float:
        hidden = run._hidden(choice)
        return probed(job, hidden, target) if is_tpu else compiled(job, hidden, target).device_bytes

    estimates = {choice: estimate(choice) for choice in choices}
    low, high = min(estimates.values()), max(estimates.values())
    if is_tpu:  # budgets are sizes of whole compilations
        ends = (
            compiled(job, run._hidden(min(choices, key=estimate)), target)
            for estimate in (lambda c: estimates[c], lambda c: -estimates[c])
        )
        low, high = (size.device_bytes for size in ends)
    budgets = np.linspace(low, high, NUM_BUDGETS).astype(int)
    seconds = lambda choice: run.seconds(choice)[1]  # noqa: E731
    num_right, numbers, whole, peaks, regrets = 0, [], [], [], []
    for budget in map(int, budgets):
        possible = (
            choice
            for choice in sorted(choices, key=seconds)
            if not is_tpu or estimates[choice] * (1 - searching._PROBE_ERROR) <= budget
        )
        fits = lambda choice: compiled(job, run._hidden(choice), target).device_bytes <= budget  # noqa: B023, E731
        best = next(filter(fits, possible), None)
        cache.num_probes = 0
        try:
            plan = planning.search(Problem(jobs.__getitem__, [Placement()], target, budget))
        except OutOfMemoryError:
            num_right += best is None
            continue
        num_right += best is not None and plan.seconds[1] <= seconds(best)
        regrets.append(plan.seconds[1] / seconds(best) - 1)
        if plan.seconds[1] > seconds(best):
            print("missed", budget, best.actions, plan.choice, flush=True)
        whole.append(sum(attempt.is_compiled for attempt in plan.attempts))
        numbers.append(cache.num_probes if is_tpu else whole[-1])
        peaks.append(plan.device_bytes / budget)
    for choice in sorted(choices, key=lambda choice: estimates[choice])[:: max(len(choices) // NUM_WHOLE, 1)]:
        compiled(job, run._hidden(choice), target)
    by_hidden = {run._hidden(choice): estimates[choice] for choice in choices}
    errors = [by_hidden[hidden] / size.device_bytes - 1 for hidden, size in sizes.items()]
    searching.compile_step, searching.probe_step, searching.measure = compile_step, probe_step, measure
    searching._Search._choices_of = original
    return {
        "block": name,
        "trainable": "LoRA" if wrt == LORA else "all weights",
        "policies": len(choices),
        "whole_compilations": len(sizes),
        "span_mib": [round(low / MIB, 2), round(high / MIB, 2)],
        "right": f"{num_right} of {NUM_BUDGETS}",
        "compilations_per_search": {"median": float(np.median(numbers)), "most": max(numbers)},
        "whole_per_search": {"median": float(np.median(whole)), "most": max(whole)},
        "probe_error": [round(min(errors), 4), round(max(errors), 4)] if is_tpu else None,
        "largest_regret": round(max(regrets), 6),
        "most_of_budget": round(max(peaks), 4),
    }


def plan_models(target_name: str) -> dict[str, Any]:
    target = lt.target(target_name)
    rows: list[dict[str, Any]] = []
    for name, build in MODELS.items():
        program = build()
        arguments: dict[str, Any] = {"loss_fn": program.loss, "wrt": program.wrt, "target": target}
        start = time.process_time()
        whole = lt.plan(program.model, program.batch, program.tx, budget=2**40, **arguments)
        least = _least_bytes(program, arguments)
        for share in (1, 0.75, 0.5, 0.25, 0):
            budget = int(least + share * (whole.device_bytes - least))
            plan = lt.plan(program.model, program.batch, program.tx, budget=budget, **arguments)
            # A whole compilation for a TPU takes a minute, so one plan of each model is compiled again.
            verified = _verified_bytes(program, plan, target) if target.platform != "tpu" or share == 0.5 else None
            rows.append(
                {
                    "model": name,
                    "budget_mib": round(budget / MIB, 2),
                    "plan_mib": round(plan.device_bytes / MIB, 2),
                    "verified_mib": verified and round(verified / MIB, 2),
                    "choice": plan.choice,
                    "compilations": len(plan.attempts),
                }
            )
            print(rows[-1], flush=True)
        save(target_name, "models", {"rows": rows})
        print(f"{name}: {time.process_time() - start:.0f} CPU s", flush=True)
    errors = [abs(row["plan_mib"] / row["verified_mib"] - 1) for row in rows if row["verified_mib"]]
    summary = {"verified": len(errors), "median": float(np.median(errors)), "worst": max(errors)}
    print("bytes of plans compared with those of other compilations:", summary)
    return {"rows": rows, "error_of_bytes": summary}


def _least_bytes(program: Program, arguments: dict[str, Any]) -> int:
    try:
        plan = lt.plan(program.model, program.batch, program.tx, budget=1024, **arguments)
    except OutOfMemoryError as error:
        number, unit = str(error.got).split()[:2]
        return int(float(number.replace(",", "")) * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit] * 1.005)
    return plan.device_bytes


def _verified_bytes(program: Program, plan: Any, target: Any) -> int:
    """Compile the step of a trainer for the target, from arrays, without the planner's cache."""
    return _trainer(program, plan).memory(program.batch, target=target).device_bytes


def published(target_name: str) -> dict[str, Any]:
    """Plan LoRA on 1B shapes (8 x 2048 tokens) and both methods of Llama 3.1 8B (2 x 2048 tokens), in CPU seconds."""
    target = lt.target(target_name)
    assert target.budget_bytes is not None
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOWTIDE_CACHE"] = folder  # nothing is compiled before
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        settings = {"model": folder, "batch_size": 2, "seq_len": 2048, "packing": "best-fit"}
        configs = {"LoRA": {}, "QLoRA": {"quantize": "nf4", "quantize_embeddings": "int8"}}
        for name, changes in configs.items():
            start = time.process_time()
            config = finetune.FinetuneConfig(**settings, **changes)
            plan = finetune.plan_within(config, target.budget_bytes, target)
            rows[f"Llama 3.1 8B, {name}"] = _figures(plan, start)
        start = time.process_time()
        program = one_billion()
        arguments: dict[str, Any] = {"loss_fn": program.loss, "wrt": program.wrt, "target": target}
        rows["1B, LoRA"] = _figures(lt.plan(program.model, program.batch, program.tx, **arguments), start)
    return {"budget_bytes": target.budget_bytes, "rows": rows}


def _figures(plan: Any, start: float) -> dict[str, Any]:
    saved = sum(item.flops for item in plan.decisions if item.action != "recompute")
    figures = {
        "choice": plan.choice,
        "device_bytes": plan.device_bytes,
        "host_bytes": plan.host_bytes,
        "flops": plan.flops,
        "share_of_flops_saved": round(saved / (saved + plan.flops), 4),
        "compilations": len(plan.attempts),
        "cpu_seconds": round(time.process_time() - start, 1),
    }
    print(figures, flush=True)
    return figures


def measure_cpu(_: str) -> dict[str, Any]:
    """Measure CPU seconds of 20 policies in interleaved rounds, and compare plans at five budgets with them."""
    program, target = decoder(LORA), lt.target("here")
    job = job_of(program)
    run = searching._Search(Problem(lambda _: job, [Placement()], target, 2**60), None)
    choices = [choice for choice in run.choices() if choice.layers_per_remat == 1]
    picked = [choices[round(index)] for index in np.linspace(0, len(choices) - 1, NUM_POLICIES)]
    for choice in picked:
        run.compile(choice)
    budgets = np.linspace(*_ends([run.sizes[choice].device_bytes for choice in picked]), 5).astype(int)
    problem = Problem(lambda _: job, [Placement()], target, 0)
    plans = [planning.search(dataclasses.replace(problem, budget_bytes=int(budget))) for budget in budgets]
    steps = {run.plan(choice).choice: (run.plan(choice), run.seconds(choice)[1]) for choice in picked}
    steps |= {plan.choice: (plan, plan.seconds[1]) for plan in plans if plan.choice not in steps}
    trainers = {name: _trainer(program, plan) for name, (plan, _) in steps.items()}
    batch = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), program.batch)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(NUM_ROUNDS + 1):  # the first round compiles
        for name in list(steps)[:: 1 if number % 2 else -1]:
            start = time.process_time()
            jax.block_until_ready(trainers[name].advance(batch))
            times[name] += [time.process_time() - start] if number else []
    medians = {name: float(np.median(values)) for name, values in times.items()}
    measured = [medians[name] for name in steps]
    estimated = [seconds for _, seconds in steps.values()]
    default = medians[next(name for name in steps if name.startswith("recompute all"))]
    rows: list[dict[str, Any]] = []
    for budget, plan in zip(map(int, budgets), plans, strict=True):
        fitting = [medians[name] for name, (item, _) in steps.items() if item.device_bytes <= budget]
        rows.append(
            {
                "budget_mib": round(budget / MIB, 2),
                "choice": plan.choice,
                "cpu_seconds": medians[plan.choice],
                "over_fastest_that_fits": round(medians[plan.choice] / min(fitting) - 1, 4),
                "over_default": round(medians[plan.choice] / default - 1, 4),
            }
        )
        print(rows[-1], flush=True)
    spearman = float(np.corrcoef(np.argsort(np.argsort(measured)), np.argsort(np.argsort(estimated)))[0, 1])
    print("Spearman", spearman)
    return {
        "policies": len(steps),
        "rounds": NUM_ROUNDS,
        "spearman": round(spearman, 4),
        "medians": medians,
        "rows": rows,
    }


def _ends(values: list[int]) -> tuple[int, int]:
    return min(values), max(values)


def _trainer(program: Program, plan: Any) -> lt.Trainer:
    zeros = jax.tree.map(lambda leaf: jax.numpy.full(leaf.shape, 0.01, leaf.dtype), program.model)
    return lt.Trainer(zeros, program.loss, program.tx, wrt=program.wrt, plan=plan, rollback=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("exhaustive", "models", "cpu", "published"))
    parser.add_argument("--target", default="h100")
    args = parser.parse_args()
    start = time.process_time()
    run = {"exhaustive": exhaustive, "models": plan_models, "cpu": measure_cpu, "published": published}[args.part]
    save(args.target, args.part, run(args.target))
    print(f"{time.process_time() - start:.0f} CPU s")


if __name__ == "__main__":
    main()
