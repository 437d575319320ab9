"""`benchmarks/gpu.py` loses nothing: resumed, killed, out of time, without packages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _gpu  # noqa: E402
import _overlap  # noqa: E402
import _summary  # noqa: E402
import gpu  # noqa: E402

sys.path.remove(str(BENCHMARKS))

PART = f"""
import os, sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
from _gpu import main

def good(rehearsal):
    with open(os.environ["LOG"], "a") as log:
        log.write("good\\n")
    return {{"figure": 1.5, "flag": os.environ.get("FLAG"), "rehearsal": rehearsal}}

def bad(rehearsal):
    raise ValueError("no such luck")

def late(rehearsal):
    with open(os.environ["LOG"], "a") as log:
        log.write("late\\n")
    time.sleep(float(os.environ.get("SLEEP", 0)))
    return {{"figure": 2}}

cases = {{"good": good, "bad": bad, "late": late, "peer": good}}
if "BAD" not in os.environ:
    del cases["bad"]
minutes = {{"late": float(os.environ.get("LIMIT", 1))}}
main("stub", cases, __doc__, minutes=minutes, needs={{"peer": ["no_such_module"]}}, env={{"good": {{"FLAG": "1"}}}})
"""


class Stub:
    """A part that imports no JAX, and the file that it writes."""

    def __init__(self, folder: Path) -> None:
        self.script, self.json, self.log = folder / "stub.py", folder / "stub.json", folder / "log"
        self.script.write_text(PART)
        self.log.touch()

    def command(self, *flags: str) -> list[str]:
        return [sys.executable, str(self.script), "--rehearse", "--json", str(self.json), *flags]

    def environment(self, **variables: str) -> dict[str, str]:
        return {**os.environ, "LOG": str(self.log), **variables}

    def run(self, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = self.environment(**variables)
        return subprocess.run(self.command(*flags), env=env, capture_output=True, text=True, check=False, timeout=60)

    @property
    def content(self) -> dict[str, Any]:
        return json.loads(self.json.read_text())

    @property
    def ran(self) -> list[str]:
        return self.log.read_text().split()


@pytest.fixture
def stub(tmp_path: Path) -> Stub:
    return Stub(tmp_path)


def until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


# --- a part --------------------------------------------------------------------------------------------------------


def test_a_second_call_skips_what_is_there_and_again_does_not(stub: Stub) -> None:
    assert stub.run().returncode == 0
    content = stub.content
    assert content["complete"] and content["rehearsal"] and content["part"] == "stub"
    assert content["rows"]["good"] | {"ok": True, "figure": 1.5, "flag": "1"} == content["rows"]["good"]
    assert content["rows"]["peer"] == {"ok": False, "not_here": ["no_such_module"]}
    assert {"commit", "date", "versions", "gpu", "host", "python", "command"} <= set(content)
    second = stub.run()
    assert (second.returncode, stub.ran) == (0, ["good", "late"])
    assert "stub/good: there already" in second.stdout
    stub.run("--case", "late", "--again")
    assert stub.ran == ["good", "late", "late"]
    assert stub.content["rows"]["good"] == content["rows"]["good"]


def test_a_case_that_fails_is_recorded_and_the_others_go_on(stub: Stub) -> None:
    done = stub.run(BAD="1")
    assert done.returncode == 1
    rows = stub.content["rows"]
    assert not rows["bad"]["ok"] and rows["bad"]["error"].endswith("ValueError: no such luck")
    assert rows["late"]["ok"] and not stub.content["complete"]


def test_a_case_at_its_limit_is_killed_and_says_so(stub: Stub) -> None:
    assert stub.run("--case", "late", SLEEP="60", LIMIT="0.01").returncode == 1
    assert stub.content["rows"]["late"]["error"].startswith("killed at its limit of 1 s")


def test_a_case_that_cannot_end_in_time_is_not_started(stub: Stub) -> None:
    done = stub.run("--minutes", "0.3")  # enough for none that may take a minute, or five
    assert done.returncode == 1 and stub.ran == []
    assert stub.content["not_started"] == ["good", "late"]
    assert "not started, 18 s left of 120" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_kill_in_a_case_leaves_valid_results_and_no_process(stub: Stub, number: signal.Signals) -> None:
    process = subprocess.Popen(stub.command(), env=stub.environment(SLEEP="60"), stdout=subprocess.DEVNULL)
    until(lambda: stub.ran == ["good", "late"])
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(number)
    assert process.wait(timeout=30) == (143 if number == signal.SIGTERM else -number)
    assert len(children) == 1
    until(lambda: is_gone(int(children[0])))
    assert stub.content["rows"].keys() == {"good", "peer"} and not stub.content["complete"]
    assert stub.run().returncode == 0
    assert stub.ran == ["good", "late", "late"]


def test_a_measurement_says_of_what_and_no_rehearsal_takes_its_place(stub: Stub, tmp_path: Path) -> None:
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.1, 143771 MiB, 700 W, 1980 MHz, 5'\n")
    smi.chmod(0o755)
    path = {"PATH": f"{smi.parent}{os.pathsep}{os.environ['PATH']}"}
    command = [word for word in stub.command() if word != "--rehearse"]
    env = {name: value for name, value in stub.environment(**path).items() if name != "JAX_PLATFORMS"}
    subprocess.run(command, env=env, check=True)
    content = stub.content
    assert (content["device_kind"], content["rehearsal"], content["complete"]) == ("NVIDIA H200", False, True)
    assert content["gpu"]["driver_version"] == "580.1" and content["gpu"]["memory.total"] == "143771 MiB"
    assert not content["rows"]["good"]["rehearsal"]
    assert "is a measurement of another device" in stub.run().stdout
    assert stub.content == content
    env.pop("PATH")
    assert subprocess.run([*command, "--again"], env={**env, "PATH": str(tmp_path)}, check=False).returncode == 2
    assert stub.content == content


def test_again_erases_nothing_before_it_is_measured(stub: Stub) -> None:
    stub.run()
    before = stub.content
    stub.run("--again", "--minutes", "0.3")  # enough for none
    assert stub.content["rows"] == before["rows"] and stub.content["date"] == before["date"]
    done = stub.run("--again", "--case", "late", SLEEP="60", LIMIT="0.01")
    row = stub.content["rows"]["late"]
    assert done.returncode == 1 and row["ok"] and not row.pop("again")["ok"] and row == before["rows"]["late"]


def test_a_case_that_the_end_cuts_short_is_taken_up_again(stub: Stub) -> None:
    done = stub.run("--case", "late", "--minutes", "0.05", SLEEP="60", LIMIT="0.08")
    assert done.returncode == 1 and "stub/late: cut after" in done.stdout
    assert "late" not in stub.content["rows"] and stub.content["not_started"] == ["late"]
    assert stub.run("--case", "late").returncode == 0 and stub.content["rows"]["late"]["ok"]


def test_a_case_that_failed_twice_goes_to_the_end(stub: Stub) -> None:
    stub.run("--case", "bad", BAD="1")
    stub.run("--case", "bad", BAD="1")
    assert stub.content["rows"]["bad"]["failures"] == 2
    printed = stub.run(BAD="1").stdout
    assert printed.index("stub/late: started") < printed.index("stub/bad: started")


def test_each_row_says_with_what_it_was_made(stub: Stub) -> None:
    stub.run(LOWTIDE_COMMIT="abc")
    row = stub.content["rows"]["good"]
    assert (row["commit"], row["code_commit"], row["driver"]) == ("abc", None, None)
    assert row["versions"]["jax"] == stub.content["versions"]["jax"]


def test_an_unknown_commit_says_nothing_of_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gpu, "_git", lambda *arguments: None)
    moment = _gpu._moment()
    assert (moment["commit"], moment["uncommitted_changes"]) == (None, None)


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "x"])
def test_minutes_are_positive_numbers(stub: Stub, minutes: str) -> None:
    done = stub.run(f"--minutes={minutes}")
    assert done.returncode == 2 and "argument --minutes" in done.stderr and not stub.json.exists()


@pytest.mark.parametrize(
    "text", ['{"part": "stub", "dev', '{"part": "stub", "device_kind": "cpu", "rows": []}', '{"rows": {}}']
)
def test_a_damaged_file_is_moved_aside(stub: Stub, text: str, tmp_path: Path) -> None:
    stub.json.write_text(text)
    assert gpu.results(tmp_path) == {} and not stub.json.exists()
    stub.json.write_text(text)
    done = stub.run()
    assert done.returncode == 0 and "is damaged" in done.stderr
    assert (tmp_path / "stub.json.damaged").read_text() == text


def test_what_a_case_lacked_and_is_here_now_is_due() -> None:
    rows = {"a": {"ok": True}, "b": {"ok": False, "not_here": ["no_such_module"]}}
    assert _gpu.is_complete({"complete": True, "rows": rows})
    rows["b"]["not_here"] = ["json"]
    assert not _gpu.is_complete({"complete": True, "rows": rows})


def test_a_measurement_is_not_sent_to_the_cpu(stub: Stub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for inherited, found in (("cpu", "cuda,cpu"), ("", "cuda,cpu"), ("cuda", "cuda")):
        monkeypatch.setenv("JAX_PLATFORMS", inherited)
        assert _gpu.environment(False)["JAX_PLATFORMS"] == found
    command = [word for word in stub.command() if word != "--rehearse"]
    env = stub.environment(JAX_PLATFORMS="cpu", PATH=str(tmp_path))
    assert subprocess.run(command, env=env, check=False).returncode == 2 and not stub.json.exists()


def test_what_a_case_started_dies_with_a_killed_part(tmp_path: Path) -> None:
    script = tmp_path / "deep.py"
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}} '); time.sleep(60)"
    script.write_text(f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from _gpu import main, run_child

def deep(rehearsal):
    run_child([sys.executable, "-c", {child!r}])

main("deep", {{"deep": deep}}, __doc__)
""")
    process = subprocess.Popen([sys.executable, str(script), "--rehearse", "--json", str(tmp_path / "deep.json")])
    pid = tmp_path / "pid"
    until(lambda: pid.exists() and pid.read_text().endswith(" "))
    process.kill()
    process.wait()
    until(lambda: is_gone(int(pid.read_text())))


# --- all parts -----------------------------------------------------------------------------------------------------


def options(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"rehearse": True, "minutes": None, "out": None, "again": False, **given})


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[gpu.Part]:
    """Two stubs with a script between them that cannot be imported."""
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(PART.replace('main("stub"', f'main("{name}"'))
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    (tmp_path / "log").touch()
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    return [gpu.Part(name, f"{name}.py", name, 5) for name in ("one", "broken", "two")]


def test_a_part_that_fails_does_not_stop_the_others(
    parts: list[gpu.Part], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert gpu.measure(parts, options(out=out, minutes=5)) == 1
    printed = capfd.readouterr().out
    assert re.search(r"one +complete after \d+ s\n +broken +failed after \d+ s; exit status 1\n +two +compl", printed)
    assert {path.name for path in out.iterdir()} == {"one.json", "two.json"}
    assert gpu.measure([parts[0], parts[2]], options(out=out)) == 0
    assert "one: there already" in capfd.readouterr().out


def test_a_part_is_not_started_without_time(
    parts: list[gpu.Part], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert gpu.measure(parts, options(out=tmp_path / "out", minutes=0.1)) == 1
    assert capfd.readouterr().out.count("not started: no time left") == 3


def test_what_found_no_time_in_its_part_runs_at_the_end(
    parts: list[gpu.Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BAD", "1")
    out = tmp_path / "out"
    short = parts[0]._replace(minutes=0.9)  # for `late`, not for `good`, nor for `bad`
    assert gpu.measure([short, parts[2]], options(out=out, minutes=5)) == 1
    printed = capfd.readouterr().out
    assert printed.count("one/good: not started") == 1 and printed.count("one/late: started") == 1
    assert printed.index("one/late: started") < printed.index("two/good: started")
    assert printed.index("two/good: started") < printed.index("one/good: started")  # with all that is left
    content = json.loads((out / "one.json").read_text())
    assert content["not_started"] == [] and content["rows"]["good"]["ok"] and content["rows"]["bad"]["failures"] == 1


def test_minutes_of_a_part_count_once_over_calls(
    parts: list[gpu.Part], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    content = {"part": "one", "device_kind": "cpu", "rehearsal": True, "complete": False, "spent_seconds": 301.0}
    _gpu.write(tmp_path / "out/one.json", {**content, "rows": {"late": {"ok": True}}})
    assert gpu.measure([parts[0], parts[2]], options(out=tmp_path / "out", minutes=9)) == 0
    printed = capfd.readouterr().out
    assert "one: its minutes are spent" in printed
    assert printed.index("two/good: started") < printed.index("one/good: started")


def test_without_a_gpu_only_a_rehearsal_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "gpu", dict)
    assert gpu.measure(gpu.PARTS, options(rehearse=False)) == 2
    assert "--rehearse runs toy sizes on the CPU" in capsys.readouterr().out


def test_what_was_measured_before_counts_in_another_folder(
    parts: list[gpu.Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "gpu", lambda: {"name": "NVIDIA H200"})
    monkeypatch.setattr(gpu, "folder", lambda kind: tmp_path / "results" / kind)
    _gpu.write(
        tmp_path / "results/NVIDIA H200/one.json",
        {"complete": True, "rehearsal": False, "part": "one", "device_kind": "x"},
    )
    assert gpu.measure(parts[:1], options(rehearse=False, out=tmp_path / "back")) == 0
    assert "one: there already" in capfd.readouterr().out
    assert (tmp_path / "back/one.json").is_file()


def test_every_part_has_its_script_and_its_lines() -> None:
    assert [part.name for part in gpu.PARTS] == list(_summary.PARTS)
    assert [part.script for part in gpu.PARTS] == [script for _, script in _summary.PARTS.values()]
    assert [part.script for part in gpu.PARTS if not (BENCHMARKS / part.script).is_file()] == []


def test_folders_are_named_after_devices() -> None:
    assert _gpu.folder("NVIDIA H200") == BENCHMARKS / "results/gpu/nvidia-h200"


# --- packages ------------------------------------------------------------------------------------------------------


def test_nothing_but_the_standard_library_is_needed_to_say_what_is_missing() -> None:
    """In a Python that sees no installed package."""
    program = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import gpu; "
    command = [sys.executable, "-I", "-S", "-c", program + "sys.exit(gpu.main())"]
    done = subprocess.run([*command, "--missing"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == gpu.wanted(gpu.WHEELS.read_text(), sys.version_info[:2])
    assert any(line.startswith("optax==") for line in done.stdout.split())
    done = subprocess.run([*command, "--rehearse"], capture_output=True, text=True, check=False)
    assert (done.returncode, "JAX is not here" in done.stdout) == (2, True)


def test_markers_and_mistakes_of_the_list() -> None:
    text = 'a==1.0 # why\n\nb_c==2 ; python_version < "3.12"\nb-c==3; python_version >= "3.12"\n'
    assert gpu.wanted(text, (3, 11)) == ["a==1.0", "b_c==2"]
    assert gpu.wanted(text, (3, 13)) == ["a==1.0", "b-c==3"]
    for line in ("a>=1", "a", 'a==1; sys_platform == "linux"'):
        with pytest.raises(ValueError, match="is not"):
            gpu.wanted(line, (3, 12))


def normal(requirement: str) -> str:
    name, equal, version = requirement.partition("==")
    return re.sub(r"[-_.]+", "-", name).lower() + equal + version


def test_the_list_agrees_with_the_constraints_and_has_what_lowtide_requires() -> None:
    text = gpu.WHEELS.read_text()
    lines = {line for python in ((3, 11), (3, 14)) for line in gpu.wanted(text, python)}
    listed = {normal(line) for line in lines}
    pinned = [word for path in ROOT.glob("constraints*/**/*.txt") for word in path.read_text().split()]
    pinned += [word for path in ROOT.glob("constraints*.txt") for word in path.read_text().split()]
    assert {line.split("==")[0] for line in listed} == {
        line.split("==")[0] for line in listed & {normal(word) for word in pinned}
    }
    project = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)\]", project, flags=re.DOTALL | re.MULTILINE)
    assert block is not None
    required = set(re.findall(r'"([\w-]+)>=', block[1])) - {"jax", "numpy", "scipy"}  # the last two come with JAX
    assert {normal(name) for name in required} <= {line.split("==")[0] for line in listed}


def test_a_version_below_the_bound_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"optax": "0.2.7", "rich": "14.10"}
    monkeypatch.setattr(gpu.metadata, "version", versions.__getitem__)
    for packaging in (True, False):
        if not packaging:
            monkeypatch.setitem(sys.modules, "packaging.version", None)
        assert gpu.lacking("optax==0.2.8\nrich==15.0.0") == ["optax==0.2.8"]
        assert not gpu._is_older("14.2.0", "14.2") and gpu._is_older("0.9", "0.10")


def test_a_python_without_its_second_number_is_refused() -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--wheels", "x", "--python", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "'3' is not a version such as 3.12" in done.stderr


def test_wheels_that_are_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.whl").write_bytes(b"x" * 1000)
    assert gpu.total_bytes(tmp_path.glob("*.whl")) == 1000
    monkeypatch.setattr(gpu, "MAX_WHEEL_BYTES", 999)
    with pytest.raises(SystemExit, match="too large"):
        gpu.total_bytes(tmp_path.glob("*.whl"))


# --- copies under kernels ------------------------------------------------------------------------------------------


def test_copies_are_hidden_where_a_kernel_runs() -> None:
    events = [
        *[("gemm", 0.0, 2.0), ("loop_fusion", 1.0, 3.0), ("gemm", 5.0, 6.0)],  # kernels from 0 to 3 and from 5 to 6
        *[("MemcpyH2D", 2.0, 4.0), ("MemcpyH2D", 3.5, 5.5)],  # from 2 to 5.5; hidden 2 to 3 and 5 to 5.5
        *[("MemcpyD2H", 7.0, 8.0), ("MemcpyD2D", 0.0, 9.0), ("Memset", 0.0, 9.0)],
    ]
    found = _overlap.hidden(events)
    assert found == pytest.approx(
        {
            "kernel_seconds": 4.0,
            "h2d_seconds": 3.5,
            "d2h_seconds": 1.0,
            "copy_seconds": 4.5,
            "h2d_hidden_seconds": 1.5,
            "d2h_hidden_seconds": 0.0,
            "copy_hidden_seconds": 1.5,
        }
    )


PLANE = """
planes {{ id: {id} name: "{name}"
  lines {{ id: 1 name: "{line}" timestamp_ns: 1000
    events {{ metadata_id: 1 offset_ps: 0 duration_ps: 3000000 }}
    events {{ metadata_id: 2 offset_ps: 2000000 duration_ps: 2000000 }} }}
  event_metadata {{ key: 1 value {{ id: 1 name: "loop_fusion" }} }}
  event_metadata {{ key: 2 value {{ id: 2 name: "MemcpyD2H" }} }} }}
"""


def test_a_trace_is_read_by_the_streams_of_its_gpus(tmp_path: Path) -> None:
    from jax.profiler import ProfileData

    planes = [("/device:GPU:0", "Stream #7(Compute,MemcpyD2H)"), ("/device:GPU:0", "XLA Ops"), ("/host:CPU", "Stream")]
    text = "".join(PLANE.format(id=at, name=name, line=line) for at, (name, line) in enumerate(planes))
    folder = tmp_path / "plugins/profile/now"
    folder.mkdir(parents=True)
    (folder / "machine.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    found = _overlap.overlap(tmp_path)
    assert found["kernel_seconds"] == pytest.approx(3e-6) and found["d2h_seconds"] == pytest.approx(2e-6)
    assert found["hidden_share"] == pytest.approx(0.5)
    assert _overlap.overlap(tmp_path / "nothing") == {}


def test_intervals() -> None:
    assert _overlap.union([(3, 4), (0, 1), (1, 2), (0.5, 0.6)]) == [(0, 2), (3, 4)]
    assert _overlap.common([(0, 2), (3, 4)], [(1, 3.5), (3.7, 9)]) == [(1, 2), (3, 3.5), (3.7, 4)]
    assert _overlap.common([], [(0, 1)]) == []
    assert _overlap.length([(0, 2), (3, 4.5)]) == 3.5


# --- the whole -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_part_can_be_rehearsed(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--rehearse", "--out", str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    written = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert written.keys() == {part.name for part in gpu.PARTS}
    assert all(content["rehearsal"] and content["complete"] for content in written.values())
