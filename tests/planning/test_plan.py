"""Plans of training steps: the best choice within a budget, its bytes, and values as without a plan."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich
from jax.ad_checkpoint import checkpoint_name

import lowtide as lt
from lowtide import models
from lowtide.core import ConfigError, ModelFileError, OutOfMemoryError, SelectionError, StructureError
from lowtide.planning import Placement, Plan, Problem, plan_job, search
from lowtide.planning import _search as searching
from lowtide.train import step_job

SIZES = {"up": (64, 256), "mid": (256, 128), "down": (128, 192), "out": (192, 64)}


def block(layer: Any, h: Any, batch: Any) -> Any:
    """Four products, of which each costs and saves another number of bytes and FLOPs."""
    up = checkpoint_name(jnp.tanh(h) @ layer["up"], "up")
    mid = checkpoint_name(jax.nn.silu(up) @ layer["mid"], "mid")
    down = checkpoint_name(jax.nn.gelu(mid) @ layer["down"], "down")
    return h + jnp.sin(down) @ layer["out"]


STACK = lt.LayerStack(
    first=lambda outer, batch: batch["x"] @ outer["in"],
    block=block,
    last=lambda outer, h, batch: (jnp.mean((h @ outer["out"] - batch["x"]) ** 2), {}),
)


def parameters(num_layers: int = 4) -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def weight(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) / shape[-2] ** 0.5

    layers = {name: weight(num_layers, *shape) for name, shape in SIZES.items()}
    return {"outer": {"in": weight(32, 64), "out": weight(64, 32)}, "layers": layers}


def batch_of(rows: int) -> Any:
    return {"x": np.asarray(jax.random.normal(jax.random.key(1), (rows, 32)))}


TX = optax.adamw(1e-3)


def planned(budget: Any, rows: int = 1024, **options: Any) -> Plan:
    return lt.plan(parameters(), batch_of(rows), TX, loss_fn=STACK, wrt="**", budget=budget, target="cpu", **options)


@pytest.mark.slow
@pytest.mark.sentinel
def test_the_search_finds_the_best_of_all_choices_at_every_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = lambda params, batch: STACK.apply(params["outer"], params["layers"], batch)  # noqa: E731
    placements = [Placement(1), Placement(2)]
    jobs = {
        placement: step_job(parameters(), loss, TX, "**", batch_of(1024), num_microbatches=placement.num_microbatches)
        for placement in placements
    }
    compiled: dict[Any, Any] = {}
    real = searching._Search.compile

    def compile_once(self: Any, choice: Any) -> Any:
        if choice not in compiled:
            compiled[choice] = real(self, choice)
        elif choice not in self.sizes:
            self.sizes[choice] = compiled[choice]
            self._report(choice, compiled[choice].device_bytes, 0)
        return compiled[choice]

    monkeypatch.setattr(searching._Search, "compile", compile_once)
    problem = Problem(lambda placement: jobs[placement], placements, lt.target("cpu"), 2**50)
    run = searching._Search(problem, None)
    choices = list(run.choices())
    assert len(choices) == 2 * (2**3 + 1)  # one more with groups of two layers
    sizes = {choice: compile_once(run, choice).device_bytes for choice in choices}
    budgets = np.linspace(min(sizes.values()), max(sizes.values()), 20).astype(int)
    for budget in budgets:
        plan = search(dataclasses.replace(problem, budget_bytes=int(budget)))
        best = min(run.seconds(choice)[1] for choice in choices if sizes[choice] <= budget)
        assert plan.seconds[1] == best and plan.device_bytes <= budget
        assert len(plan.attempts) <= 12
    with pytest.raises(OutOfMemoryError, match=r"no choice fits(.|\n)*microbatches: 2(.|\n)*hint:"):
        search(dataclasses.replace(problem, budget_bytes=min(sizes.values()) - 1))


def test_a_trainer_runs_the_plan_with_its_bytes_and_the_losses_of_the_step_without_it() -> None:
    large = planned("100 MiB", num_microbatches=[2])
    small = planned(large.device_bytes - 2**20, num_microbatches=[2])
    assert small.device_bytes <= small.budget_bytes < large.device_bytes
    kept_bytes = {decision.label: decision.num_bytes for decision in large.decisions}
    assert kept_bytes["up"] == 4 * 512 * 256 * 4  # layers, rows of a microbatch, width, bytes of a number
    assert len(small.hidden.save) < len(large.hidden.save) == 3 and small.flops > large.flops
    assert Plan.from_json(large.to_json()) == large

    def loss(params: Any, batch: Any) -> Any:
        return STACK.apply(params["outer"], params["layers"], batch, remat=True)

    batches = [batch_of(1024)] * 3
    losses = []
    for options in ({"num_microbatches": 2}, {"plan": small}, {"plan": large}):
        trainer = lt.Trainer(parameters(), loss, TX, wrt="**", **options)
        if plan := options.get("plan"):
            assert trainer.memory(batches[0]).device_bytes == plan.device_bytes
        losses.append([record["loss"] for record in trainer.fit(batches, num_steps=3)])
        given = trainer, batches[0], options.get("tx")
        if "plan" not in options:
            assert lt.plan(*given, budget="100 MiB", num_microbatches=[2], target="cpu") == large
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"lt.plan cannot plan this trainer"):
        lt.plan(lt.Trainer(parameters(), loss, TX, wrt="layers/**", mutable="outer/in"), batches[0], budget="1 GiB")
    with pytest.raises(ConfigError, match="loss_fn must be a function"):
        lt.plan(parameters(), batches[0], TX, loss_fn="loss", budget="100 MiB")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="tx must be an Optax optimizer"):
        lt.plan(parameters(), batches[0], loss_fn=loss, budget="100 MiB")


@pytest.mark.slow
def test_a_decoder_is_planned_by_the_names_of_its_layers() -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2}
    config = models.DecoderConfig(**sizes, num_heads=2, num_kv_heads=1, head_dim=16)

    def make(key: Any) -> Any:
        return lt.lora.add(models.init(config, key=key), lt.lora.Config(rank=2, targets="layers/**/*_proj"), key=key)

    model = jax.eval_shape(make, jax.random.key(0))
    batch = {name: jax.ShapeDtypeStruct((4, 96), jnp.int32) for name in ("tokens", "labels")}
    plan = lt.plan(model, batch, TX, wrt="**/lora_*", budget="1 GiB", target="cpu", num_microbatches=[1])
    labels = ["attn_q", "attn_k", "attn_v", "attn_proj", "mlp_gate", "mlp_up", "attn_out + attn_lse"]
    assert [decision.label for decision in plan.decisions] == labels
    assert all(decision.action == "keep" and decision.flops > 0 for decision in plan.decisions)
    tokens = 2 * 4 * 96 * 4  # layers, tokens, bytes of a number
    assert {item.label: item.num_bytes for item in plan.decisions}["mlp_up"] == tokens * 64
    assert "keep attn_q" in str(plan) and plan.frontier[-1].device_bytes == plan.device_bytes


def test_blocks_without_names_are_named_after_their_weights() -> None:
    plain = dataclasses.replace(STACK, block=lambda layer, h, _: h + jnp.tanh(jnp.sin(h) @ layer["up"]) @ layer["down"])
    params = parameters()
    params["layers"] = {"up": params["layers"]["up"], "down": jnp.swapaxes(params["layers"]["up"], 1, 2)}
    plan = lt.plan(
        params, batch_of(64), TX, loss_fn=plain, wrt="**", budget="1 GiB", target="cpu", num_microbatches=[1]
    )
    assert [(item.label, item.action, item.flops > 0) for item in plan.decisions] == [
        ("up", "keep", True),
        ("down", "recompute", False),  # the backward pass does not need it
    ]


def test_a_trainer_with_a_compute_dtype_and_a_budget_is_planned_again_after_an_error() -> None:
    loss = lambda params, batch: STACK.apply(params["outer"], params["layers"], batch)  # noqa: E731
    trainer = lt.Trainer(parameters(), loss, TX, wrt="**", compute_dtype="bfloat16", budget="1 GiB")
    batch = batch_of(256)
    large = trainer.memory(batch).device_bytes
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.0MiB")
    with pytest.warns(UserWarning, match="planned again"):
        assert trainer._compiled.replan(error, batch)
    assert trainer.memory(batch).device_bytes < large
    trainer.fit([batch], num_steps=1)
    own = lt.plan(trainer, batch, target="cpu", num_microbatches=[1])
    assert own.budget_bytes == 2**30 and own.device_bytes == large
    with pytest.raises(ConfigError, match="a trainer already has tx"):
        lt.plan(trainer, batch, TX, budget="1 GiB")


def test_bad_input_is_one_clear_error() -> None:
    for options, message in (
        ({"budget": "12 parsecs"}, "12 parsecs"),
        ({"budget": 0}, "budget(.|\n)*hint:"),
        ({"budget": None}, "the memory of cpu is unknown(.|\n)*hint: set a limit"),
        ({"budget": 2**30, "num_microbatches": [3]}, "3, which does not divide the 64 rows"),
    ):
        with pytest.raises(ConfigError, match=message):
            planned(rows=64, **options)
    with pytest.raises(OutOfMemoryError, match=r"no choice fits the budget of 1.00 KiB on cpu(.|\n)*hint:"):
        planned("1 KiB", rows=64, num_microbatches=[1])
    with pytest.raises(ConfigError, match=r"no LayerStack in an attribute named stack(.|\n)*hint: pass loss_fn"):
        lt.plan(parameters(), batch_of(4), TX, wrt="**", budget="1 GiB", target="cpu")
    with pytest.raises(StructureError, match="same number of rows"):
        lt.plan(parameters(), {"x": np.ones((4, 2)), "y": np.ones(3)}, TX, loss_fn=STACK, wrt="**", budget="1 GiB")
    without_stack = {"loss_fn": lambda params, batch: jnp.mean(batch["x"] @ params["outer"]["in"])}
    plan = planned("1 GiB", rows=4, num_microbatches=[1])
    for arguments, message in (
        ({"num_microbatches": 2}, "a plan cannot be combined with another num_microbatches"),
        ({"pipeline": lt.pipeline.schedule("1f1b", num_stages=1, num_microbatches=2)}, "a pipeline"),
    ):
        with pytest.raises(ConfigError, match=message):
            lt.Trainer(parameters(), without_stack["loss_fn"], TX, wrt="outer/in", plan=plan, **arguments)
    trainer = lt.Trainer(parameters(), without_stack["loss_fn"], TX, wrt="outer/in", plan=plan)
    with pytest.raises(ConfigError, match=r"a plan has no effect(.|\n)*hint: compute the loss with lt.LayerStack"):
        trainer.fit([batch_of(4)], num_steps=1)
    for text, error in (("{}", ConfigError), ("[]", ModelFileError), ('{"decisions": 1}', ConfigError)):
        with pytest.raises(error):
            Plan.from_json(text)


def test_leaves_that_no_step_reads_count_as_in_a_trainer() -> None:
    params = {**parameters(2), "unread": jnp.ones((512, 512))}

    def loss(params: Any, batch: Any) -> Any:
        return STACK.apply(params["outer"], params["layers"], batch)

    options: dict[str, Any] = {"wrt": "layers/**", "compute_dtype": "bfloat16"}
    plan = lt.plan(
        params, batch_of(64), TX, loss_fn=loss, budget="1 GiB", target="cpu", num_microbatches=[1], **options
    )
    trainer = lt.Trainer(params, loss, TX, plan=plan, **options)
    assert trainer.memory(batch_of(64)).device_bytes == plan.device_bytes
    with pytest.raises(ConfigError, match="a plan cannot be combined with (.*)num_microbatches"):
        lt.Trainer(params, loss, TX, plan=plan, **options, num_microbatches=2)
    for numbers in ([], 2):
        with pytest.raises(ConfigError, match="num_microbatches"):
            lt.plan(params, batch_of(64), TX, loss_fn=loss, budget="1 GiB", num_microbatches=numbers, **options)


def test_a_loss_without_a_stack_gets_microbatches_and_placement() -> None:
    target = lt.target("cpu", host_link_bandwidth="20 GB/s")
    params = {"w": jnp.ones((256, 512)), "layers": {"frozen": jnp.ones((2, 512, 512))}}
    batch = {"x": np.ones((2048, 256), np.float32)}

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(jnp.tanh(jnp.tanh(batch["x"] @ params["w"]) @ params["layers"]["frozen"][0]) ** 2)

    options: dict[str, Any] = {"loss_fn": loss, "wrt": "w", "target": target}
    whole = lt.plan(params, batch, TX, budget="1 GiB", **options)
    assert (whole.num_microbatches, whole.optimizer, whole.decisions) == (1, "device", ())
    assert "placement only" in str(whole)
    small = lt.plan(params, batch, TX, budget=whole.device_bytes // 2, **options)
    assert small.num_microbatches > 1 and small.device_bytes <= small.budget_bytes
    trainer = lt.Trainer(params, loss, TX, wrt="w", plan=small)
    assert trainer.memory(batch).device_bytes == small.device_bytes


def test_two_stacks_with_different_names_are_planned_together() -> None:
    other = dataclasses.replace(
        STACK, block=lambda layer, h, _: h + jnp.sin(checkpoint_name(jnp.tanh(h) @ layer["up"], "wide")) @ layer["back"]
    )
    params = {"first": parameters(2), "second": parameters(3)}
    params["second"]["layers"] = {"up": jnp.ones((3, 64, 256)), "back": jnp.ones((3, 256, 64))}

    def loss(params: Any, batch: Any) -> Any:
        parts = (STACK, params["first"]), (other, params["second"])
        return sum(stack.apply(part["outer"], part["layers"], batch)[0] for stack, part in parts)

    plan = lt.plan(params, batch_of(64), TX, loss_fn=loss, wrt="**", budget="1 GiB", target="cpu", num_microbatches=[1])
    assert {item.label for item in plan.decisions} == {"up", "mid", "down", "wide"}
    lt.Trainer(jax.tree.map(jnp.copy, params), loss, TX, plan=plan).fit([batch_of(64)], num_steps=1)
    for part in ("first", "second"):  # a plan of one model does not fit another
        fn = (STACK if part == "first" else other).apply
        trainer = lt.Trainer(params[part], lambda p, b, fn=fn: fn(p["outer"], p["layers"], b), TX, plan=plan)
        with pytest.raises(SelectionError, match="a plan keeps values that no layer has"):
            trainer.fit([batch_of(64)], num_steps=1)


def test_estimates_of_a_tpu_are_reported_and_only_whole_compilations_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = lambda hidden: 2**20 * (4 + 2 * len(hidden.save))  # noqa: E731
    monkeypatch.setattr(searching, "probe_step", lambda job, hidden, target: sizes(hidden))
    compiled = lambda job, hidden, target: searching.Size(sizes(hidden) + 2**19, 0)  # noqa: E731
    monkeypatch.setattr(searching, "compile_step", compiled)
    loss = lambda params, batch: STACK.apply(params["outer"], params["layers"], batch)  # noqa: E731
    job, shown = step_job(parameters(), loss, TX, "**", batch_of(1024)), []
    target = dataclasses.replace(lt.target("cpu"), platform="tpu")
    for budget, number in ((9 * 2**20, 2), (2**22 + 2**19, 0)):
        shown.clear()
        plan = search(Problem(lambda _: job, [Placement()], target, budget), on_compile=shown.append)
        assert len(plan.hidden.save) == number and plan.device_bytes == 2**20 * (4 + 2 * number) + 2**19
        assert len(shown) == len(plan.attempts) + sum(item.is_compiled for item in plan.attempts)
        assert not all(item.is_compiled for item in plan.attempts) and all(item.is_compiled for item in plan.frontier)
        rich.print(plan, file=(text := io.StringIO()))
        assert "estimated " in text.getvalue() and "fits" in text.getvalue()
    plan.to_png(tmp_path / "frontier.png")
    job = step_job(parameters(), loss, TX, "**", batch_of(1024))
    none = Problem(lambda _: job, [Placement()], target, 2**22, has_stack=False)
    monkeypatch.setattr(searching, "probe_step", lambda job, hidden, target: 2**22 + 100)
    monkeypatch.setattr(searching, "compile_step", lambda job, hidden, target: searching.Size(2**22 + 100, 0))
    with pytest.raises(OutOfMemoryError, match="no choice fits"):  # the only choice is too large
        search(none)


def test_values_move_to_the_host_only_within_the_forward_pass() -> None:
    loss = lambda params, batch: STACK.apply(params["outer"], params["layers"], batch)  # noqa: E731
    job = step_job(parameters(), loss, TX, "**", batch_of(1024))
    placements = [Placement(), Placement(layer_inputs="host")]
    for link, allows, is_moved in (("20 GB/s", False, True), ("1 MB/s", False, False), ("1 MB/s", True, True)):
        target = lt.target("cpu", host_link_bandwidth=link)
        run = searching._Search(Problem(lambda _: job, placements, target, 2**30, True, allows), None)
        choices = run.choices()
        assert any("host" in choice.actions for choice in choices) == is_moved
        assert any(choice.placement.layer_inputs == "host" for choice in choices) == is_moved
        kept = [choice for choice in choices if "host" not in choice.actions and choice.placement == placements[0]]
        assert run.seconds(choices[0]) == run.seconds(kept[0])  # copies never make a step faster


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"layer_inputs": "host"}, {"layers_per_remat": 2}, {"optimizer": "host"}, {"formats": ("8bit_state",)}]
)
@pytest.mark.filterwarnings("ignore:low_precision.*fewer than least_size")
def test_every_choice_has_the_losses_of_the_step_without_a_plan(changes: dict[str, Any]) -> None:
    loss = lambda params, batch: STACK.apply(params["outer"], params["layers"], batch)  # noqa: E731
    plan = planned("1 GiB", rows=256, num_microbatches=[1])
    action = "recompute" if "layers_per_remat" in changes else "host"
    decisions = tuple(dataclasses.replace(item, action=action) for item in plan.decisions[:1])
    plan = dataclasses.replace(plan, decisions=decisions, **changes)
    losses: list[list[float]] = []
    for options in ({}, {"plan": plan}):
        trainer = lt.Trainer(parameters(), loss, TX, **options)
        losses.append([record["loss"] for record in trainer.fit([batch_of(256)] * 3, num_steps=3)])
        arguments = trainer._compiled._arguments(batch_of(256))
        assert ("<host>" in str(trainer.step_fn.trace(*arguments).jaxpr)) == bool(options and action == "host")
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize("is_alive", [True, False])
def test_an_out_of_memory_error_in_a_planned_run_makes_a_smaller_step(
    is_alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowtide.train._compilation import CompiledStep

    loss = lambda params, batch: STACK.apply(params["outer"], params["layers"], batch)  # noqa: E731
    batches = [batch_of(256)] * 8
    options: dict[str, Any] = {"num_microbatches": [1]}
    plan = lt.plan(parameters(), batch_of(256), TX, loss_fn=STACK, wrt="**", budget="1 GiB", **options)
    reference = lt.Trainer(parameters(), loss, TX, plan=plan)
    reference.fit(batches, num_steps=8)
    trainer = lt.Trainer(parameters(), loss, TX, plan=plan)
    dispatch, failures = CompiledStep.dispatch, []

    def fail_once(self: Any, batch: Any) -> Any:
        if self._store.step == 5 and not failures:
            failures.append(self)
            if not is_alive:
                jax.tree.map(lambda leaf: leaf.delete(), self._store.state)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.0MiB")
        return dispatch(self, batch)

    monkeypatch.setattr(CompiledStep, "dispatch", fail_once)
    with pytest.warns(UserWarning, match="ran out of memory, so the step was planned again"):
        records = trainer.fit(batches, num_steps=8)
    assert failures and [record["step"] for record in records] == list(range(1, 9))
    assert trainer.memory(batches[0]).device_bytes < plan.device_bytes
    for got, expected in zip(jax.tree.leaves(trainer.model), jax.tree.leaves(reference.model), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)
    failures.clear()  # a second error ends the run
    trainer.step = 5
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        trainer.fit(batches, num_steps=8)


def test_a_trainer_with_a_budget_plans_what_its_layers_keep() -> None:
    loss = lambda params, batch: STACK.apply(params["outer"], params["layers"], batch, remat=True)  # noqa: E731
    batch = batch_of(1024)
    plain = lt.Trainer(parameters(), loss, TX)
    least = plain.memory(batch).device_bytes
    rich = lt.Trainer(parameters(), loss, TX, budget=10 * least)
    assert rich.memory(batch).device_bytes > least  # it keeps values instead of computing them again
    close = lt.Trainer(parameters(), loss, TX, budget=least + 2**21)
    assert close.memory(batch).device_bytes <= least + 2**21
    losses = [[r["loss"] for r in t.fit([batch] * 2, num_steps=2)] for t in (plain, rich, close)]
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-5)
    rich.budget_bytes = least + 2**21
    assert rich.memory(batch).device_bytes <= least + 2**21
    small = lt.Trainer(parameters(), loss, TX, budget=2**16)
    with pytest.raises(OutOfMemoryError, match="before its first step"):
        small.preflight(batch)


def test_a_budget_plans_each_shape_of_a_batch_and_a_failed_evaluation_repeats_no_step() -> None:
    loss = lambda params, batch: STACK.apply(params["outer"], params["layers"], batch, remat=True)  # noqa: E731
    large, small = batch_of(1024), batch_of(256)
    least = lt.Trainer(parameters(), loss, TX).memory(large).device_bytes
    trainer = lt.Trainer(parameters(), loss, TX, budget=least + 2**21)
    assert trainer.memory(small).device_bytes <= least < 2 * trainer.memory(small).device_bytes
    trainer.fit([small, large, small], num_steps=3)
    assert trainer.step == 3

    class Failing:
        def __iter__(self) -> Any:
            yield small
            if trainer.step == 4:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1024 bytes")

    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        trainer.fit([small] * 6, num_steps=6, eval_data=Failing(), eval_every=1)
    assert trainer.step == 4


def test_inputs_that_the_caller_moves_may_be_exposed_and_jobs_may_have_keyword_arguments() -> None:
    loss = lambda params, batch: STACK.apply(params["outer"], params["layers"], batch)  # noqa: E731
    job = step_job(parameters(), loss, TX, "**", batch_of(64))
    slow = lt.target("cpu", host_link_bandwidth="1 MB/s")
    plan = search(Problem(lambda _: job, [Placement(layer_inputs="host")], slow, 2**40))
    assert plan.layer_inputs == "host" and not plan.hidden.offload
    grads = lambda params, *, batch: jax.grad(lambda params: loss(params, batch)[0])(params)  # noqa: E731
    with_keyword = lt.memory.Job(fn=grads, args=(parameters(),), kwargs={"batch": batch_of(64)})
    assert plan_job(with_keyword, lt.target("cpu"), 2**40).decisions
