"""Owners: the roles, phases, paths and lifetimes of a program whose parts are known, on every compiler."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from lowtide.hlo._graph import Graph, segments
from lowtide.memory import Buffer, Program, compile
from lowtide.memory._analysis import examine
from lowtide.memory._dataflow import Passes

LAYERS, WIDTH, ROWS = 8, 2048, 8192
"""So large that a TPU does not hold what the layers keep in its on-chip memory."""
FEW = 512
"""Rows where it may: its compiler takes a fraction of the time."""
MIB = 2**20
TARGETS = [
    "cpu",
    pytest.param("v5e", marks=pytest.mark.tpu_aot),
    pytest.param("h100", marks=pytest.mark.gpu_aot),
]


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def train_step(donate: bool = True, rows: int = ROWS) -> dict[str, Any]:
    """Adam over a scan of layers that compute in bfloat16; the batch's targets are not differentiated."""
    tx = optax.adam(1e-3)

    def block(h: Any, layer: Any) -> tuple[Any, None]:
        return jnp.tanh(h @ layer["w"].astype(jnp.bfloat16)), None

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            h, _ = jax.lax.scan(block, batch["x"].astype(jnp.bfloat16), params)
            return jnp.mean((h.astype(jnp.float32) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = {"w": shape(LAYERS, WIDTH, WIDTH)}
    batch = {"x": shape(rows, WIDTH), "y": shape(rows, WIDTH)}
    job = {"fn": step, "args": (params, jax.eval_shape(tx.init, params), batch)}
    return {**job, "donate_argnums": (0, 1)} if donate else job


ROLES = {"params": 0, "opt_state": 1, "batch": 2}
SLOW_ON_TPU = [
    "cpu",
    pytest.param("v5e", marks=[pytest.mark.tpu_aot, pytest.mark.slow]),
    pytest.param("h100", marks=pytest.mark.gpu_aot),
]


@pytest.fixture(scope="module")
def compiled() -> Any:
    """Programs by target, compiled once."""
    programs: dict[str, Program] = {}

    def of(name: str) -> Program:
        if name not in programs:
            job = train_step()
            programs[name] = compile(job.pop("fn"), *job.pop("args"), target=name, **job)
        return programs[name]

    return of


def only(buffers: tuple[Buffer, ...], **wanted: Any) -> list[Buffer]:
    return [b for b in buffers if all(getattr(b, name) == value for name, value in wanted.items())]


@pytest.mark.parametrize("name", TARGETS)
def test_arguments_keep_their_roles_paths_and_shapes(compiled: Any, name: str) -> None:
    report = compiled(name).report(ROLES)
    (weights,) = only(report.peak, role="params")
    assert (weights.path, weights.shape, weights.dtype) == ("params/w", (LAYERS, WIDTH, WIDTH), "f32")
    assert weights.num_bytes == LAYERS * WIDTH * WIDTH * 4
    assert {b.path for b in only(report.peak, role="opt_state")} == {
        f"opt_state/0/{name}" for name in ("count", "mu/w", "nu/w")
    }
    assert {b.path for b in only(report.peak, role="batch")} == {"batch/x", "batch/y"}
    arguments = only(report.buffers, phase="argument")
    assert len(arguments) == 6
    assert {(b.start, b.end) for b in arguments} == {(0, len(report.moments) - 1)}


@pytest.mark.parametrize(
    ("fn", "keywords", "paths"),
    [
        (lambda params, x: x @ params["w"], (), {"params/w", "x"}),
        (jax.grad(lambda params, x: jnp.sum((x @ params["w"]) ** 2)), (), {"params/w", "x"}),
        (lambda params, *batch: sum(batch) @ params["w"], (), {"0/w", "1", "2"}),
        (lambda params, **batch: batch["x"] @ params["w"], ("x",), {"params/w", "x"}),
        (lambda params, **batch: (batch["x"] + batch["y"]) @ params["w"], ("x", "y"), {"params/w", "x", "y"}),
    ],
)
def test_paths_begin_with_the_names_of_the_signature(fn: Any, keywords: tuple[str, ...], paths: set[str]) -> None:
    rest = [shape(4, 8)] * (len(paths) - 1)
    named: dict[str, Any] = dict(zip(keywords, rest, strict=False))
    report = compile(fn, {"w": shape(8, 8)}, *rest[len(named) :], **named).report()
    assert {b.path for b in only(report.buffers, phase="argument")} == paths


@pytest.mark.parametrize("name", TARGETS)
def test_the_parts_at_the_peak_add_up_and_all_have_an_owner(compiled: Any, name: str) -> None:
    report = compiled(name).report(ROLES)
    assert sum(b.num_bytes for b in report.peak) == report.device_bytes == sum(report.peak_by_role.values())
    assert report.peak_by_role.get("unattributed", 0) <= 0.02 * report.device_bytes
    live = report.live_bytes()
    assert live[report.peak_moment] == max(live)
    assert max(live) + report.peak_by_role.get("fragmentation", 0) == report.device_bytes
    stats = compiled(name).compiled.memory_analysis()
    device = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert report.device_bytes == device + stats.temp_size_in_bytes + stats.generated_code_size_in_bytes


@pytest.mark.parametrize("name", TARGETS)
def test_gradients_are_named_after_their_parameters(compiled: Any, name: str) -> None:
    report = compiled(name).report(ROLES)
    stacked = [b for b in only(report.buffers, role="gradients") if b.shape == (LAYERS, WIDTH, WIDTH)]
    assert stacked
    assert {(b.path, b.phase, b.num_bytes) for b in stacked} == {("params/w", "backward", LAYERS * WIDTH * WIDTH * 4)}


@pytest.mark.parametrize("name", TARGETS)
def test_activations_are_what_the_backward_pass_reads(compiled: Any, name: str) -> None:
    report = compiled(name).report(ROLES)
    stacked = [b for b in only(report.buffers, role="activations") if b.shape == (LAYERS, ROWS, WIDTH)]
    assert stacked
    assert all(b.phase == "forward" and b.num_bytes >= LAYERS * ROWS * WIDTH * 2 for b in stacked)
    assert any("test_owners.py" in b.source and "(train_step.<locals>.block)" in b.source for b in stacked)
    last_read = max(b.end for b in stacked)
    assert any(Passes([scope]).phase(scope) == "backward" for scope in report.moments[: last_read + 1])


@pytest.mark.parametrize("name", TARGETS)
def test_casts_of_weights_are_copies(compiled: Any, name: str) -> None:
    copies = only(compiled(name).report(ROLES).buffers, role="copies", path="params/w")
    assert copies
    assert {b.dtype for b in copies} <= {"bf16", "f32"}


@pytest.mark.parametrize("name", TARGETS)
def test_no_byte_has_two_owners_at_once(compiled: Any, name: str) -> None:
    hlo = compiled(name).hlo
    graph = Graph(hlo.module)
    checked = 0
    for allocation in hlo.assignment.allocations:
        fixed = allocation.is_entry_parameter or allocation.maybe_live_out or allocation.is_constant
        if fixed or allocation.is_thread_local:
            continue
        found = segments(graph, hlo.assignment, allocation)
        for at, one in enumerate(found):
            assert 0 <= one.start <= one.end < len(graph.order)
            assert one.offset + one.size <= allocation.size
            for other in found[at + 1 :]:
                in_bytes = one.offset < other.offset + other.size and other.offset < one.offset + one.size
                assert not (in_bytes and one.start <= other.end and other.start <= one.end)
                checked += 1
    assert checked > 100


@pytest.mark.parametrize("name", TARGETS)
def test_the_peak_lies_between_xla_s_own_and_the_heap(compiled: Any, name: str) -> None:
    # XLA's list of buffers at the peak leaves out those that share another one's bytes: a lower bound.
    hlo = compiled(name).hlo
    sizes = {b.id: b.size for b in hlo.assignment.logical_buffers}
    graph = Graph(hlo.module)
    heap = max((a for a in hlo.assignment.allocations if not (a.is_entry_parameter or a.color)), key=lambda a: a.size)
    peak = next(p for p in hlo.assignment.peak_buffers if p.allocation == heap.index)
    found = segments(graph, hlo.assignment, heap)
    mine = max(sum(s.size for s in found if s.start <= p <= s.end) for p in range(len(graph.order)))
    assert sum(sizes[b] for b in peak.logical_buffer_ids) <= mine <= heap.size
    assert mine >= 0.85 * heap.size


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["cpu", pytest.param("h100", marks=pytest.mark.gpu_aot)])
def test_an_update_that_is_not_donated_is_an_output_with_its_path(name: str) -> None:
    job = train_step(donate=False, rows=FEW)
    report = compile(job["fn"], *job["args"], target=name).report(ROLES)
    outputs = {b.path: b for b in only(report.peak, role="outputs") if b.dtype}
    assert set(outputs) == {"0/w", "1/0/count", "1/0/mu/w", "1/0/nu/w", "2"}
    assert outputs["1/0/mu/w"].num_bytes == LAYERS * WIDTH * WIDTH * 4


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", SLOW_ON_TPU)
@pytest.mark.usefixtures("little_optimized")
def test_recomputation_is_a_phase_of_its_own(name: str) -> None:
    def loss(w: Any, x: Any) -> Any:
        block = jax.checkpoint(lambda h, w: jnp.square(jnp.tanh(h @ w) @ w.T))
        for layer in range(2):
            x = block(x, w[layer])
        return jnp.sum(x)

    # Short rows, which take the compiler for TPUs less time, and more of them than its on-chip memory holds.
    report = compile(jax.grad(loss), shape(2, 128, 128), shape(2**19, 128), target=name).report()
    assert {"forward", "recompute", "backward"} <= {b.phase for b in report.buffers if b.num_bytes > MIB}


@pytest.mark.parametrize("name", SLOW_ON_TPU)
def test_a_program_without_gradients_has_one_phase(name: str) -> None:
    report = compile(
        lambda w, x: jnp.sort(jnp.tanh(x @ w), axis=0), shape(WIDTH, WIDTH), shape(FEW, WIDTH), target=name
    ).report({"params": 0})
    assert {b.phase for b in report.buffers if b.dtype} == {"argument", "forward"}
    assert sum(b.num_bytes for b in report.peak) == report.device_bytes


@pytest.mark.parametrize(
    ("scope", "phase"),
    [
        ("jit(step)/jvp(mlp)/dot_general", "forward"),
        ("jit(step)/jvp()/transpose", "forward"),
        ("jit(step)/transpose(jvp(mlp))/dot_general", "backward"),
        ("jit(step)/vmap(jvp())/while/body/dot_general", "forward"),
        ("jit(step)/transpose(jvp())/checkpoint/rematted_computation/tanh", "recompute"),
        ("jit(step)/transpose(jvp(jit(take)))/scatter-add", "backward"),
        ("jit(step)/vmap(transpose(jvp()))/dot_general", "backward"),
        ("jit(step)/jvp(transpose(jvp(mlp)))/dot_general", "backward"),
        ("jit(step)/vmap(vmap(jvp(mlp)))/dot_general", "forward"),
        ("jit(transpose)/add", None),
        ("jit(jvp_like)/mul", None),
        ("params['jvp(x)/y']", None),
        ("", None),
    ],
)
def test_phases_are_read_from_transformations_not_from_names(scope: str, phase: str | None) -> None:
    assert Passes([scope]).phase(scope) == phase


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", TARGETS)
def test_large_constants_are_counted_and_named(name: str) -> None:
    table = jnp.arange(MIB, dtype=jnp.float32).reshape(1024, 1024)
    report = compile(lambda x: jnp.tanh(x @ table) @ table, shape(FEW, 1024), target=name).report({"batch": 0})
    assert sum(b.num_bytes for b in report.peak) == report.device_bytes
    assert report.peak_by_role.get("unattributed", 0) <= 0.02 * report.device_bytes


def test_a_loss_is_read_in_a_while_loop_and_in_branches() -> None:
    def fn(w: Any, x: Any, flag: Any) -> Any:
        def body(carry: Any) -> Any:
            at, h = carry
            return at + 1, jax.lax.cond(flag, lambda h: jnp.tanh(h @ w), lambda h: h @ w.T, h)

        return jnp.sum(jax.lax.while_loop(lambda carry: carry[0] < 4, body, (0, x))[1])

    report = compile(fn, shape(WIDTH, WIDTH), shape(ROWS, WIDTH), shape(dtype=jnp.bool_)).report({"params": 0})
    assert sum(b.num_bytes for b in report.peak) == report.device_bytes
    assert report.peak_by_role.get("unattributed", 0) == 0


def two_layers(w: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ w["one"]) @ w["two"]) ** 2)


def adam(params: Any, opt_state: Any, x: Any) -> Any:
    grads = jax.grad(two_layers)(params, x)
    updates, opt_state = optax.adam(1e-3).update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("name", "donate"),
    [
        ("cpu", False),
        ("cpu", True),
        pytest.param("v5e", True, marks=pytest.mark.tpu_aot),
        pytest.param("h100", True, marks=pytest.mark.gpu_aot),
    ],
)
@pytest.mark.usefixtures("little_optimized")
def test_outputs_replace_the_arguments_they_are_computed_from(name: str, donate: bool) -> None:
    # The state comes first and the parameters are returned first: JAX hands each the other one's buffer.
    params = {key: shape(WIDTH, WIDTH) for key in ("one", "two")}
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    program = compile(
        lambda state, params, x: adam(params, state, x),
        state,
        params,
        shape(ROWS, WIDTH),
        target=name,
        donate_argnums=(0, 1) if donate else (),
    )
    owners = examine(program)[1]
    assert owners is not None
    replaced = {owners.path_of(v): owners.leaves[at].path for v, at in owners.replaced.items()}
    expected = {f"0/{key}": f"params/{key}" for key in params}
    expected |= {f"1/0/{kind}/{key}": f"state/0/{kind}/{key}" for kind in ("mu", "nu") for key in params}
    assert {path: leaf for path, leaf in replaced.items() if "count" not in path} == expected
    gradients = {b.path for b in owners.buffers if b.role == "gradients"}
    assert gradients <= {"params/one", "params/two"}


def test_new_values_of_equal_arguments_are_told_apart_by_what_they_are_made_of() -> None:
    def step(one: Any, two: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(two_layers)({"one": one, "two": two}, x)
        return loss, one - grads["one"], two - 0.5 * grads["two"]

    def only_gradients(one: Any, two: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(two_layers)({"one": one, "two": two}, x)
        return loss, grads["one"], grads["two"]

    for fn in (step, only_gradients):
        owners = examine(compile(fn, shape(WIDTH, WIDTH), shape(WIDTH, WIDTH), shape(ROWS, WIDTH)))[1]
        assert owners is not None
        assert {owners.path_of(v): at for v, at in owners.replaced.items()} == {"1": 0, "2": 1}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", SLOW_ON_TPU[::2])  # a TPU keeps them in its other memory
def test_accumulators_of_a_loop_are_gradients(name: str) -> None:
    def step(w: Any, xs: Any) -> Any:
        def body(total: Any, x: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.grad(two_layers)(w, x)), None

        grads, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, w), xs)
        return jax.tree.map(lambda leaf, grad: leaf - grad, w, grads)

    wide = 2 * WIDTH
    w = {key: shape(wide, wide) for key in ("one", "two")}
    report = compile(step, w, shape(4, FEW, wide), target=name, donate_argnums=0).report({"params": 0})
    found = [b for b in report.peak if b.shape == (wide, wide) and b.role in ("gradients", "temporaries")]
    if name == "cpu":
        assert found
    assert {(b.role, b.path) for b in found} <= {("gradients", "w/one"), ("gradients", "w/two")}


def test_a_gradient_under_vmap_is_of_the_backward_pass() -> None:
    each = jax.vmap(jax.grad(two_layers), (None, 0))
    w = {key: shape(WIDTH, WIDTH) for key in ("one", "two")}
    report = compile(each, w, shape(4, ROWS, WIDTH)).report()
    assert {b.phase for b in only(report.buffers, role="outputs") if b.dtype} == {"backward"}


@pytest.mark.parametrize("name", SLOW_ON_TPU[:2])
def test_ordered_effects_leave_arguments_and_outputs_their_owners(name: str) -> None:
    def step(w: Any, unread: Any, x: Any) -> Any:
        y = jnp.tanh(x @ w)
        jax.debug.print("{}", jnp.sum(y), ordered=True)
        return {"w": w - x.T @ y}

    arguments = (shape(1024, 1024), shape(1024, 1024), shape(FEW, 1024))
    program = compile(step, *arguments, target=name, donate_argnums=0)
    report = program.report({"params": 0, "unread": 1, "batch": 2})
    assert report.by_role["params"] == 4 * MIB
    assert report.by_role["unread"] == 0
    assert report.by_role["batch"] == FEW * 1024 * 4
    assert report.device.alias_bytes >= 4 * MIB
    assert sum(b.num_bytes for b in report.peak) == report.device_bytes


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_thousands_of_arguments_of_a_program_that_does_not_fit_have_owners() -> None:
    def step(leaves: Any, x: Any) -> Any:
        return [leaf * jnp.sum(x) for leaf in leaves[::100]]

    leaves = [shape(8, 128) for _ in range(2100)]
    program = compile(jax.jit(step, keep_unused=True), leaves, shape(2**16, 2**16), target="v5e")
    assert program.error is not None
    report = program.report({"params": 0})
    assert report.by_role["params"] == 2100 * 4096
    assert {b.path for b in report.buffers if b.role == "params"} == {f"leaves/{at}" for at in range(2100)}
    assert sum(b.num_bytes for b in report.peak) == report.device_bytes
