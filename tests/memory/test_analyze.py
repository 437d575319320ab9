"""analyze: figures that are XLA's, split by role without a remainder, and refusals that name the argument."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from lowtide.core import ConfigError, OutputError, StructureError, TargetError
from lowtide.hlo._executable import padded_bytes
from lowtide.memory import MemoryReport, SpaceBytes, Target, analyze, analyze_compiled, compile, target

TPU = pytest.param("v5e:2x2", marks=pytest.mark.tpu_aot)


def shape(*dims: int, dtype: Any = jnp.float32, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)


def pinned() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def assert_adds_up(report: MemoryReport) -> None:
    assert sum(b.num_bytes for b in report.peak) == report.device_bytes
    assert sum(b.num_bytes for b in report.host_peak) == report.host_bytes
    assert min((b.num_bytes for b in report.buffers), default=0) >= 0
    assert sum(report.by_role.values()) == report.device_bytes == report.device.total_bytes
    assert sum(report.host_by_role.values()) == report.host_bytes == report.host.total_bytes
    assert min(*report.by_role.values(), *report.host_by_role.values()) >= 0


def test_the_total_is_argument_plus_output_minus_alias_plus_temp_plus_code() -> None:
    space = SpaceBytes(argument_bytes=100, output_bytes=30, alias_bytes=20, temp_bytes=7, code_bytes=3)
    assert space.total_bytes == 120


@pytest.mark.parametrize("capacity", [None, 119, 120])
def test_fits_needs_a_capacity(capacity: int | None) -> None:
    goal = Target(name="cpu", platform="cpu", chip="cpu", num_devices=1, device_bytes=capacity)
    space = SpaceBytes(argument_bytes=120)
    report = MemoryReport(target=goal, device=space, host=SpaceBytes(), by_role={}, host_by_role={})
    assert report.fits is (None if capacity is None else capacity >= 120)


@pytest.mark.parametrize("name", ["cpu", "here"])
def test_cpu_bytes_by_role(name: str) -> None:
    report = analyze(
        lambda params, x, *, scale: {"w": params["w"] * scale + jnp.sum(x)},
        {"w": jnp.ones((1000, 3))},
        np.ones((5, 7), np.float64),
        target=name,
        roles={"params": 0, "batch": (1, "scale")},
        donate_argnums=0,
        scale=3.0,
    )
    assert report.by_role["params"] == 12_000
    assert report.by_role["batch"] == 35 * 4 + 4
    assert report.by_role["outputs"] == report.device.output_bytes - 12_000
    assert report.by_role["unattributed"] == report.by_role["other"] == 0
    assert report.device.alias_bytes == 12_000
    assert report.fits is None
    assert_adds_up(report)


@pytest.mark.slow_after(8)
@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("dims", "dtype", "num_bytes"),
    [
        ((1000, 3), jnp.float32, 4 * 1024 * 4),
        ((3, 5), jnp.float32, 4 * 128 * 4),
        ((1000, 5), jnp.bfloat16, 8 * 1024 * 2),
        ((1030,), jnp.bfloat16, 2048 * 2),
        ((), jnp.float32, 128 * 4),
        ((5, 7), jnp.bool_, 8 * 128),
        ((100, 300), jnp.int4, 304 * 128 // 2),
        ((10, 10), jnp.complex64, 16 * 128 * 8),
        ((3, 1030, 5, 2), jnp.int8, 5 * 2 * 4 * 1152),
        ((0, 3), jnp.float32, 0),
        ((65536, 1024), jnp.float32, 2**28),
    ],
)
def test_tpu_argument_bytes_are_padded_and_equal_xla_s(dims: Any, dtype: Any, num_bytes: int) -> None:
    report = analyze(
        lambda x: ~x if x.dtype == bool else x + x, shape(*dims, dtype=dtype), target="v5e", roles={"x": 0}
    )
    assert report.by_role["x"] == report.device.argument_bytes == num_bytes
    assert report.by_role["unattributed"] == 0
    assert_adds_up(report)


@pytest.mark.parametrize("name", ["cpu", TPU])
def test_random_keys_count_their_words(name: str) -> None:
    report = analyze(lambda key: jax.random.normal(key, (3,)), jax.random.key(0), target=name, roles={"key": 0})
    assert report.by_role["key"] == report.device.argument_bytes == (8 if name == "cpu" else 512)


@pytest.mark.parametrize("name", ["cpu", TPU])
def test_an_argument_that_is_not_read_costs_nothing(name: str) -> None:
    report = analyze(lambda a, b: b * 2, shape(64, 128), shape(8, 128), target=name, roles={"dead": 0, "live": 1})
    assert report.by_role["dead"] == 0
    assert report.by_role["live"] == report.device.argument_bytes == 4096
    keeping = jax.jit(lambda a, b: b * 2, keep_unused=True)
    kept = analyze(keeping, shape(64, 128), shape(8, 128), target=name, roles={"dead": 0, "live": 1})
    assert kept.by_role["dead"] == 64 * 128 * 4
    assert_adds_up(kept)


@pytest.mark.parametrize("name", ["cpu", TPU])
def test_programs_without_a_placed_array_compile_for_the_target(name: str) -> None:
    padded = 4 if name == "cpu" else 512
    assert analyze(lambda unused, x: x * 2, shape(10, 10), 3.0, target=name).device.argument_bytes == padded
    report = analyze(lambda: jnp.ones((10, 10)), target=name)
    assert report.device.argument_bytes == 0
    assert report.device.output_bytes == (400 if name == "cpu" else 16 * 128 * 4)


@pytest.mark.parametrize("name", ["cpu", TPU])
def test_host_arguments_count_for_the_host(name: str) -> None:
    def step(on_host: Any, x: Any) -> Any:
        fresh = jax.device_put(on_host, jax.memory.Space.Device) + x
        return jax.device_put(fresh, jax.memory.Space.Host), fresh * 2

    arguments = (shape(1000, 128, sharding=pinned()), shape(1000, 128))
    report = analyze(step, *arguments, target=name, roles={"state": 0, "x": 1}, donate_argnums=0)
    num_bytes = 1000 * 128 * 4
    assert report.by_role["state"] == 0
    assert report.host_by_role["state"] == report.host.argument_bytes == num_bytes
    assert report.host.alias_bytes == report.host.output_bytes == report.host_bytes == num_bytes
    assert report.by_role["x"] == report.device.argument_bytes == num_bytes
    assert num_bytes <= report.device.output_bytes < num_bytes + 1024
    assert len(report.notes) == (1 if name == "cpu" else 0)
    assert_adds_up(report)


@pytest.mark.parametrize("name", ["cpu", TPU])
def test_arguments_on_a_mesh_are_moved_and_counted_per_device(name: str) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    w = jax.device_put(jnp.ones((512, 256)), NamedSharding(mesh, PartitionSpec("data", "model")))
    x = shape(16, 512, sharding=NamedSharding(mesh, PartitionSpec("data")))
    report = analyze(lambda w, x, scale: x @ w * scale, w, x, 2.0, target=name, roles={"w": 0, "x": 1})
    assert report.by_role["w"] == 512 * 256 * 4 // 4
    assert report.by_role["x"] == 16 * 512 * 4 // 2
    assert_adds_up(report)


@pytest.mark.tpu_aot
def test_a_host_argument_beside_a_mesh_stays_on_the_host() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    x = shape(64, 128, sharding=NamedSharding(mesh, PartitionSpec("data")))
    h = shape(64, 128, sharding=pinned())
    report = analyze(lambda x, h: x + jax.device_put(h, jax.memory.Space.Device), x, h, target="v5e:2x2")
    assert report.host.argument_bytes == 64 * 128 * 4


@pytest.mark.tpu_aot
def test_a_mesh_larger_than_the_target_is_refused() -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    x = {"w": shape(64, 128, sharding=NamedSharding(mesh, PartitionSpec("data")))}
    message = (
        r"argument 0 at w: its mesh \{'data': 4, 'model': 2\} needs more than the 4 devices of target 'v5e:2x2'.*hint"
    )
    with pytest.raises(TargetError, match=message.replace(".*hint", r"[\s\S]*hint")):
        analyze(lambda x: x, x, target="v5e:2x2")


@pytest.mark.tpu_aot
def test_a_function_bound_to_other_devices_is_refused() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    bound = jax.jit(lambda x: x * 2, in_shardings=NamedSharding(mesh, PartitionSpec("data")))
    with pytest.raises((StructureError, ValueError), match="device"):
        analyze(bound, shape(4), target="v5e:2x2")


@pytest.mark.tpu_aot
@pytest.mark.slow
def test_thousands_of_arguments_leave_their_pointer_table_unattributed() -> None:
    jitted = jax.jit(lambda xs: xs[0] + xs[-1], keep_unused=True)
    report = analyze(jitted, [shape(8, 128)] * 2100, target="v5e", roles={"xs": 0})
    assert report.by_role["xs"] == 2100 * 4096
    assert 0 < report.by_role["unattributed"] == report.device.argument_bytes - 2100 * 4096 < 2100 * 8
    assert_adds_up(report)


@pytest.mark.tpu_aot
def test_a_program_that_does_not_fit_is_reported_all_the_same() -> None:
    def step(w: Any, dead: Any, x: Any) -> Any:
        return jnp.tanh(x @ w) @ w.T

    arguments = (shape(2**14, 2**15), shape(3), shape(3 * 2**15, 2**14))
    program = compile(step, *arguments, target="v5e")
    report = program.report(roles={"params": 0, "dead": 1, "batch": 2})
    assert report.fits is False
    assert report.by_role["params"] == 2**31
    assert report.by_role["dead"] == 0
    assert report.by_role["batch"] == report.device.output_bytes == 3 * 2**31
    assert report.by_role["temporaries"] >= 3 * 2**31
    assert_adds_up(report)
    with pytest.raises(Exception, match=r"exceeds available HBM") as error:
        _ = program.compiled
    required = float(re.search(r"temporaries \(([\d.]+)G\)", str(error.value))[1])  # pyright: ignore
    assert report.device_bytes == pytest.approx(required * 2**30, rel=1e-3)


def test_a_jitted_function_keeps_its_donation_and_static_arguments() -> None:
    def step(mode: str, state: Any, x: Any, power: int) -> Any:
        assert mode == "fast"
        return state + x**power

    jitted = jax.jit(step, donate_argnums=1, static_argnums=(0, 3))
    arguments = ("fast", shape(100), shape(100), 2)
    report = analyze(jitted, *arguments, roles={"state": 1, "x": 2}, static_argnums=(0, 3))
    assert report.by_role == {**report.by_role, "state": 400, "x": 400, "outputs": 0}
    plain = analyze(step, *arguments, roles={"state": 1, "x": -2}, donate_argnums=1, static_argnums=(0, -1))
    assert plain.by_role == report.by_role
    with pytest.raises(ConfigError, match=r"has 2 static positional arguments, but static_argnums is \(\)\nhint"):
        analyze(jitted, *arguments, roles={"state": 1})
    with pytest.raises(ConfigError, match=r"donate_argnums was given for a function that is already jitted[\s\S]*hint"):
        analyze(jitted, *arguments, donate_argnums=1)


def test_a_compiled_program_can_be_read() -> None:
    compiled = jax.jit(lambda w, x: w @ x).lower(shape(4, 4), shape(4, 4)).compile()
    report = analyze_compiled(compiled, roles={"w": 0})
    assert (report.by_role["w"], report.by_role["other"], report.by_role["outputs"]) == (64, 64, 64)
    assert_adds_up(report)


@pytest.mark.tpu_aot
def test_a_program_of_another_platform_is_refused() -> None:
    compiled = jax.jit(lambda w: w * 2).lower(shape(4)).compile()
    with pytest.raises(TargetError, match=r"compiled for cpu, not for target 'v5e:1x1'"):
        analyze_compiled(compiled, target="v5e")


@pytest.mark.parametrize(
    ("leaf", "got"),
    [("text", "str"), (np.array(["a"]), "ndarray of dtype <U1"), (object(), "object")],
)
def test_a_leaf_that_jit_does_not_take_is_named(leaf: Any, got: str) -> None:
    with pytest.raises(StructureError) as error:
        analyze(lambda x, y: x, shape(3), {"cfg": [leaf]})
    assert f"argument 1 at cfg/0: a compiled function does not support its type, {got}\n" in str(error.value)
    assert "hint: name the argument in static_argnums" in str(error.value)
    with pytest.raises(StructureError, match="argument 'cfg': a compiled function does not support"):
        analyze(lambda x, cfg: x, shape(3), cfg=leaf)


def test_a_jitted_function_s_refusal_is_translated() -> None:
    with pytest.raises(StructureError, match=r"an argument has a type that[\s\S]*type <class 'str'>[\s\S]*hint: make"):
        analyze(jax.jit(lambda x, y: x), shape(3), {"cfg": "text"})


@pytest.mark.parametrize("name", ["cpu", TPU])
def test_functions_in_a_module_are_constants(name: str) -> None:
    module = {"w": shape(8, 128), "activation": jax.nn.relu, "use_bias": False}

    def fn(module: Any, x: Any, *, head: Any, batch: Any) -> Any:
        assert module["use_bias"] is False and head["f"] is jnp.sum
        return head["f"](module["activation"](x @ module["w"]) * batch["scale"])

    others = {"head": {"f": jnp.sum}, "batch": {"scale": shape(8, 1)}}
    report = analyze(fn, module, shape(8, 8), **others, target=name, roles={"params": 0})
    assert report.by_role["params"] == 8 * 128 * 4
    with pytest.raises(StructureError, match=r"argument has a type that[\s\S]*hint"):
        analyze(jax.jit(fn), module, shape(8, 8), **others)


def test_errors_of_the_function_itself_pass_through() -> None:
    def broken(x: Any) -> Any:
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        analyze(broken, shape(3))
    with pytest.raises(ValueError, match="other"):
        analyze(lambda x: (_ for _ in ()).throw(ValueError("other")), shape(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"roles": {"a": 2}},
            r"role 'a' names argument 2, which is static or does not exist\n.*positions \[0, 1\] or key",
        ),
        ({"roles": {"a": "z"}}, r"role 'a' names argument 'z'[\s\S]*keywords \['scale'\]"),
        ({"roles": {"a": 0, "b": (1, -2)}}, r"argument -2 has two roles, 'a' and 'b'[\s\S]*hint"),
        ({"roles": {"outputs": 0}}, r"role name 'outputs' is reserved[\s\S]*hint: reserved: other"),
        ({"donate_argnums": 2}, r"donate_argnums names argument 2[\s\S]*hint: count from 0"),
        ({"static_argnums": (-3,)}, r"static_argnums names argument -3"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        analyze(lambda x, y, *, scale: x * y * scale, shape(3), shape(3), scale=1.0, **options)


def test_json_has_the_figures(tmp_path: Path) -> None:

    report = analyze(lambda w, x: w @ x, shape(4, 4), shape(4, 4), roles={"params": 0, "absent": ()}, target="cpu")
    report.to_json(tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["schema_version"] == 2
    assert data["figures"] == "compiled"
    assert data["device_bytes"] == report.device_bytes == sum(data["by_role"].values())
    assert data["device"]["argument_bytes"] == 128
    assert data["target"]["name"] == "cpu"
    assert data["versions"]["jax"] == jax.__version__
    with pytest.raises(OutputError, match=r"report cannot be written[\s\S]*hint: give a file"):
        report.to_json(tmp_path / "missing" / "report.json")


@pytest.mark.parametrize(
    ("dims", "major_to_minor", "tiling", "bits", "num_bytes"),
    [
        ((1000, 3), (1, 0), ((4, 128),), 32, 16384),
        ((1000, 3), (0, 1), ((8, 128),), 32, 1000 * 128 * 4),
        ((1000, 5), (1, 0), ((8, 128), (2, 1)), 16, 16384),
        ((), (), ((128,),), 32, 512),
        ((7,), (0,), (), 4, 4),
        ((7, 3), (0, 1), ((-1, 128),), 8, 21),
        ((7, 3), (0, 1), None, 8, 21),
    ],
)
def test_padding(dims: Any, major_to_minor: Any, tiling: Any, bits: int, num_bytes: int) -> None:
    assert padded_bytes(dims, bits, Layout(major_to_minor, tiling)) == num_bytes


def test_the_same_target_object_is_accepted() -> None:
    goal = target("cpu")
    assert analyze(lambda x: x + 1, shape(3), target=goal).target is goal


@pytest.mark.tpu_aot
def test_a_shape_in_host_memory_is_traced_in_the_host_space() -> None:
    spaces: list[object] = []

    def step(w: jax.Array) -> jax.Array:
        spaces.append(jax.typeof(w).memory_space)
        return jax.device_put(w, jax.memory.Space.Device) * 2

    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    report = analyze(step, jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=host), target="v5e")
    assert spaces == [jax.memory.Space.Host]
    assert report.host_bytes == 256 * 256 * 4


def test_several_targets_and_roles_that_are_no_mapping_are_named() -> None:
    with pytest.raises(TargetError, match=r"target must be one name such as .*\nhint: call the function once"):
        analyze(lambda x: x, shape(3), target=["cpu", "v5e"])  # pyright: ignore
    for roles in (("params",), "params"):
        with pytest.raises(ConfigError, match=r"roles must be a mapping(.|\n)*hint: name the position"):
            analyze(lambda x: x, shape(3), target="cpu", roles=roles)  # pyright: ignore


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_constants_of_a_tpu_program_are_counted_as_code() -> None:
    constant = np.random.default_rng(0).normal(size=(1024, 2048)).astype(np.float32)
    report = analyze(lambda x: x @ constant, shape(8, 1024), target="v5e:1x1")
    assert report.device.code_bytes >= 1024 * 2048 * 2  # in bfloat16, as the product reads it
    assert any("counted as code" in note for note in report.notes)
