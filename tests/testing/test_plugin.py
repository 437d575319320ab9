"""The pytest plugin, in separate runs of pytest: what passes, what fails, and what the failures say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = "pytester"

pytestmark = pytest.mark.processes


def test_importing_the_plugin_imports_neither_jax_nor_lowtide() -> None:
    program = "import sys, lowtide_pytest; print([m for m in ('jax', 'numpy', 'lowtide', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_the_project_announces_the_plugin_to_pytest() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'lowtide_pytest = "lowtide_pytest"' in text
    assert '"src/lowtide_pytest.py"' in text, "the wheel would lack it"


LIMITS = """
@pytest.mark.device_memory_limit("1 GiB", target="cpu")
def test_within(device_memory):
    assert device_memory(step, PARAMS, X).target.name == "cpu"


@pytest.mark.device_memory_limit("300 KiB", target="cpu")
def test_beyond(device_memory):
    device_memory(step, PARAMS, X, roles={"params": 0, "batch": 1})


@pytest.mark.device_memory_limit("1 GiB")
def test_measured_nothing(device_memory):
    pass


@pytest.mark.device_memory_limit("1 GiB")
def test_without_the_fixture():
    pass


@pytest.mark.device_memory_limit("1 GiB")
class TestClass:
    def test_within(self, device_memory):
        device_memory(step, PARAMS, X)

    @pytest.mark.device_memory_limit("1 KiB")
    def test_the_closest_marker_holds(self, device_memory):
        device_memory(step, PARAMS, X)

    def test_a_failure_of_its_own_is_told_first(self, device_memory):
        assert 1 == 2


def test_without_a_marker(device_memory):
    device_memory(step, PARAMS, X)
"""


def test_limits(run: Any) -> None:
    result = run(LIMITS)
    result.assert_outcomes(passed=3, failed=5)
    result.stdout.fnmatch_lines_random(
        [
            "*test was limited to 300.00 KiB but needs *KiB on cpu",
            "*largest owners at the peak:",
            "* 256.00 KiB  params  argument  w  f32[[]256,256[]]",
            "*test was limited to 1.00 KiB but needs *",
            "the test is limited to 1.00 GiB but measured nothing: it never called the fixture device_memory",
            "the test is limited to 1.00 GiB but measured nothing: it does not have the fixture device_memory",
            "*assert 1 == 2",
        ]
    )
    assert "_memory.py" not in result.stdout.str(), "frames of the plugin are no news to the user"
    assert result.stdout.str().count("measured nothing") == 2


MARKERS = """
@pytest.mark.device_memory_limit()
def test_no_size(device_memory): ...

@pytest.mark.device_memory_limit("a lot")
def test_nonsense(device_memory): ...

@pytest.mark.device_memory_limit("1 GiB", "2 GiB")
def test_two_sizes(device_memory): ...

@pytest.mark.device_memory_limit("1 GiB", traget="cpu")
def test_unknown_keyword(device_memory): ...

@pytest.mark.device_memory_limit("1 GiB", target="v9")
def test_unknown_target(device_memory): ...

@pytest.mark.device_memory_limit("1 GiB", target="v9", optional=True)
def test_unknown_optional_target(device_memory): ...

@pytest.mark.device_memory_limit("1 GiB", target=3)
def test_no_target(device_memory): ...

@pytest.mark.device_memory_limit("1 GiB", optional="yes")
def test_no_boolean(device_memory): ...

@pytest.mark.device_memory_limit(-1)
def test_negative(device_memory): ...

@pytest.mark.device_memory_limit(size=2**30)
def test_good(device_memory):
    device_memory(step, PARAMS, X)
"""


MISSING = """
import importlib.util

find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "libtpu" else find(name, *rest)


@pytest.mark.device_memory_limit("1 GiB", target="v5e:2x2", optional=True)
def test_optional(device_memory):
    device_memory(step, PARAMS, X)


@pytest.mark.device_memory_limit("1 GiB", target="v5e:2x2")
def test_needed(device_memory):
    device_memory(step, PARAMS, X)
"""


def test_bad_markers_and_missing_compilers_are_errors_of_their_tests_alone(run: Any) -> None:
    result = run(MARKERS + MISSING)
    result.assert_outcomes(passed=1, errors=10, skipped=1)
    result.stdout.fnmatch_lines_random(
        [
            "test_user.py::test_no_size: bad marker @pytest.mark.device_memory_limit",
            "*the marker needs one size",
            "*'a lot' is not a size",
            '*an argument of the marker must be "size", "target" or "optional", not \'traget\'',
            'hint: did you mean "target"[?]',
            "*unknown target 'v9'",
            "*target of the marker must be a name or a Target, not 3",
            "*optional of the marker must be True or False, not 'yes'",
            "*-1 is not a size",
        ]
    )
    assert "Traceback" not in result.stdout.str()
    assert "INTERNALERROR" not in result.stdout.str()
    result.stdout.fnmatch_lines(["SKIPPED*optional=True*needs libtpu*"])
    result.stdout.fnmatch_lines(["*'v5e:2x2' needs libtpu*", 'hint: pip install "lowtide[[]tpu-aot[]]"'])


ASSERTIONS = """
def scan(num_layers):
    def fn(ws, x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]
    return fn, (S((num_layers, 256, 256), jnp.float32), X), {"params": 0, "batch": 1}


def report_of(device_memory):
    return device_memory(step, PARAMS, X, target="cpu", roles={"params": 0, "batch": 1})


def test_good(device_memory):
    report = report_of(device_memory)
    device_memory.limit(report, "256 KiB", role="params")
    device_memory.limit(report, report.device_bytes)
    device_memory.limits(report, {"params": "256 KiB", "batch": 65536, "copies": "1 GiB"})
    slope = device_memory.slope(scan, [2, 3, 5], target="cpu", role="params")
    assert slope.bytes_per_unit == 256 * 256 * 4
    slope.assert_slope_at_most("256 KiB")
    device_memory.slope(scan, [2, 3, 5], target="cpu", role="batch").assert_flat()
    device_memory.ratio(step, loss, PARAMS, X, target="cpu").assert_at_most(3)
    assert device_memory.ratio(report, scan(2), target="cpu", role="params").value == 0.5


def test_role_limit(device_memory):
    device_memory.limit(report_of(device_memory), "255 KiB", role="params")


def test_role_limits(device_memory):
    device_memory.limits(report_of(device_memory), {"params": "255 KiB", "batch": 1, "copies": "1 GiB"})


def test_unknown_role(device_memory):
    device_memory.limit(report_of(device_memory), "1 GiB", role="parms")


def test_slope(device_memory):
    slope = device_memory.slope(scan, [2, 4], target="cpu", role="params", variable="layer")
    slope.assert_slope_at_most("255 KiB")


def test_flat(device_memory):
    device_memory.slope(scan, [2, 4], target="cpu", variable="layer").assert_flat("1 %")


def test_sizes(device_memory):
    device_memory.slope(scan, [4, 4], target="cpu")


def test_ratio(device_memory):
    device_memory.ratio(scan(4), scan(2), target="cpu", role="params").assert_at_most(1.5)


def test_ratio_to_nothing(device_memory):
    report = report_of(device_memory)
    device_memory.ratio(report, report, role="constants").assert_at_most(1.5)


def test_offloaded_on_a_cpu(device_memory):
    device_memory.assert_offloaded(report_of(device_memory), "params")


@pytest.mark.device_memory_limit("600 KiB", target="cpu")
def test_the_limit_holds_for_slopes(device_memory):
    device_memory.slope(scan, [1, 2])
"""


@pytest.mark.slow
def test_assertions_name_the_owners(run: Any) -> None:
    result = run(ASSERTIONS)
    result.assert_outcomes(passed=1, failed=10)
    result.stdout.fnmatch_lines_random(
        [
            "*role 'params' was limited to 255.00 KiB but needs 256.00 KiB at the peak on cpu",
            "*role 'batch' was limited to 1 B but needs 64.00 KiB at the peak on cpu",
            "*largest owners at the peak of role 'batch':",
            "*the report has no role 'parms'",
            "*hint: near misses: params",
            "*device memory of role 'params' on cpu was limited to 255.00 KiB per layer but grows by 256.00 KiB",
            "* 512.00 KiB  at 2",
            "*Owners that changed most",
            "*should not depend on the number of layers but differs by *",
            "*sizes must be two or more increasing numbers*",
            "*ratio of role 'params' was limited to 1.5 but is 2: 1.00 MiB to 512.00 KiB on cpu",
            "*the second program has no bytes of role 'constants'*",
            "*a report for 'cpu' does not prove placement in host memory",
            "*test was limited to 600.00 KiB but needs *",
        ]
    )


OFFLOADED = """
from jax.sharding import SingleDeviceSharding


def state(device_memory, kind):
    import lowtide as lt

    device = lt.target("v5e:1x1").devices()[0]
    host, here = (SingleDeviceSharding(device, memory_kind=k) for k in (kind, "device"))

    def update(mu, g):
        new = jax.device_put(mu, here) * 0.9 + g
        return jax.device_put(new, host)

    shape = S((1024, 1024), jnp.float32)
    mu = S(shape.shape, shape.dtype, sharding=host)
    return device_memory(update, mu, shape, roles={"opt_state": 0}, donate_argnums=0, target="v5e:1x1")


def test_good(device_memory):
    report = state(device_memory, "pinned_host")
    device_memory.assert_offloaded(report, "opt_state", at_least="4 MiB", copies_at_most="8 MiB")


def test_on_the_device(device_memory):
    device_memory.assert_offloaded(state(device_memory, "device"), "opt_state")


def test_too_little(device_memory):
    device_memory.assert_offloaded(state(device_memory, "pinned_host"), "opt_state", at_least="5 MiB")


def test_nothing(device_memory):
    device_memory.assert_offloaded(state(device_memory, "pinned_host"), "gradients")
"""


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_offloading_is_held_against_a_compiler_that_knows_host_memory(run: Any) -> None:
    result = run(OFFLOADED)
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines_random(
        [
            "*'opt_state' is not offloaded on v5e:1x1: 4.00 MiB of it are on the device, 0 B on the host",
            "*'opt_state' is not offloaded on v5e:1x1: 4.00 MiB are on the host, not 5.00 MiB",
            "*'gradients' is not offloaded on v5e:1x1: it has no bytes on the host",
            "*4.00 MiB  opt_state  argument  mu  f32[[]1024,1024[]]",
        ]
    )


SNAPSHOTS = """
ROWS = 64


def report_of(device_memory):
    return device_memory(step, PARAMS, S((ROWS, 256), jnp.float32), target="cpu", roles={"params": 0, "batch": 1})


@pytest.mark.parametrize("case", ["a", "b/c"])
def test_exact(device_memory, case):
    device_memory.snapshot(report_of(device_memory))


def test_tolerant(device_memory):
    device_memory.snapshot(report_of(device_memory), "rough", tolerance="80 %")
    device_memory.snapshot(report_of(device_memory), "bytes", tolerance="1 MiB")
"""


@pytest.fixture
def folder(pytester: pytest.Pytester) -> Path:
    return pytester.path / "__memory_snapshots__" / "test_user"


@pytest.mark.slow
def test_snapshots_are_missing_made_unchanged_changed_and_updated(run: Any, folder: Path) -> None:
    result = run(SNAPSHOTS)
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(
        ["*no memory snapshot for cpu, jax *, jaxlib *", "*hint: run pytest --memory-snapshot-update*"]
    )
    assert not folder.exists(), "a missing snapshot must not be written silently"

    result = run(SNAPSHOTS, "--memory-snapshot-update")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["made */test_exact[[]a[]].json", "memory snapshots: 4 made"])
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 4
    assert {"test_exact[a].json", "test_tolerant.bytes.json", "test_tolerant.rough.json"} < set(names)
    before = {path: path.read_bytes() for path in folder.iterdir()}

    changed = SNAPSHOTS.replace("ROWS = 64", "ROWS = 64 + 32")  # Python caches a file of the same size and second
    result = run(changed)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines_random(
        [
            "*memory differs from the snapshot*KiB -> *KiB on the device",
            "*Owners that changed most",
            "*+32.00 KiB * batch *",
        ]
    )
    assert {path: path.read_bytes() for path in folder.iterdir()} == before

    result = run(changed, "--memory-snapshot-update", "-n", "2")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["updated */test_exact[[]a[]].json", "memory snapshots: 4 updated"])

    result = run(changed)
    result.assert_outcomes(passed=3)
    assert "memory snapshots" not in result.stdout.str()


@pytest.mark.slow
def test_snapshots_of_other_versions_stay_and_damaged_ones_are_refused(run: Any, folder: Path) -> None:
    body = (
        SNAPSHOTS
        + """

class TestTwice:
    def test_same_name(self, device_memory):
        device_memory.snapshot(report_of(device_memory))
        device_memory.snapshot(report_of(device_memory))
"""
    )
    run(body, "--memory-snapshot-update", "-k", "exact").assert_outcomes(passed=2, deselected=2)
    file = folder / "test_exact[a].json"
    data = json.loads(file.read_text())
    (key,) = data["snapshots"]
    data["snapshots"] = {f"{key}.old": data["snapshots"][key]}
    file.write_text(json.dumps(data))
    result = run(body, "-k", "exact and not b")
    result.assert_outcomes(failed=1, deselected=3)
    result.stdout.fnmatch_lines([f"*stored: {key}.old"])
    run(body, "--memory-snapshot-update", "-k", "exact and not b").assert_outcomes(passed=1, deselected=3)
    assert set(json.loads(file.read_text())["snapshots"]) == {key, f"{key}.old"}

    file.write_text("{}")
    result = run(body, "-k", "exact and not b or Twice", "--memory-snapshot-update")
    result.assert_outcomes(failed=2, deselected=2)
    result.stdout.fnmatch_lines(["*the memory snapshot cannot be read", "*hint: delete it and run pytest *"])
    result.stdout.fnmatch_lines(["*the test takes two snapshots for cpu, *"])
    assert (folder / "TestTwice.test_same_name.json").exists()


def test_help_and_markers_name_the_defaults(run: Any) -> None:
    result = run("", "--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.device_memory_limit(size, *, target=None, optional=False): *"])
    result = run("", "--help")
    result.stdout.fnmatch_lines(["*--memory-snapshot-update*", "*(default: they fail)*"])
