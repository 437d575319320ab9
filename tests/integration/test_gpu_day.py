"""`benchmarks/gpu.py` loses nothing: resumed, killed, out of time, without packages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _gpu  # noqa: E402
import _summary  # noqa: E402
import gpu  # noqa: E402

sys.path.remove(str(BENCHMARKS))

pytestmark = pytest.mark.slow  # they start and kill processes all the time

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
    command = [word for word in stub.command("--usable") if word != "--rehearse"]
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
def test_a_damaged_file_is_moved_aside_where_a_result_takes_its_place(stub: Stub, text: str, tmp_path: Path) -> None:
    (tmp_path / "stub.json.damaged").write_text("an earlier one")
    stub.json.write_text(text)
    assert _gpu.read_result(stub.json) == {} and stub.json.read_text() == text
    done = stub.run("--case", "good")
    assert "is damaged" in done.stderr and stub.content["rows"]["good"]["ok"]
    assert (tmp_path / "stub.json.damaged").read_text() == "an earlier one"
    assert (tmp_path / "stub.json.damaged-2").read_text() == text


def test_a_folder_and_a_file_that_nobody_may_read_stay(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.json.mkdir()
    done = stub.run()
    assert done.returncode == 1 and done.stderr == f"{stub.json} is a folder, and should be a file\n"
    assert stub.json.is_dir()
    file = stub.json / "good.json"
    file.write_text("{}")

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(SystemExit, match=r"good.json cannot be read and written: Permission denied"):
        _gpu.check_writable(file)
    assert file.exists()


def test_a_case_that_was_added_since_is_run(
    parts: list[gpu.Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    gpu.measure(parts[:1], options(out=out))
    monkeypatch.setenv("BAD", "1")  # one case more
    content = json.loads((out / "one.json").read_text())
    _gpu.write(out / "one.json", content | {"cases_of": "other scripts"})
    assert gpu.measure(parts[:1], options(out=out)) == 1
    content = json.loads((out / "one.json").read_text())
    assert "bad" in content["rows"] and content["cases_of"] == _gpu.cases_of()
    assert (tmp_path / "log").read_text().split() == ["good", "late"]


def test_a_gpu_that_jax_does_not_use_is_said_before_anything_runs(
    parts: list[gpu.Part],
    stub: Stub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fake = tmp_path / "fake/jax.py"
    fake.parent.mkdir()
    fake.write_text("""
import sys
print("Traceback\\nRuntimeError: the driver is too old\\nhint", file=sys.stderr)
class Device:
    platform = "cpu"
def devices():
    return [Device]
""")
    monkeypatch.setattr(_gpu, "SRC", fake.parent)
    assert _gpu.why_not_usable() == "JAX does not use the GPU here: RuntimeError: the driver is too old"
    # Of another size: what Python compiled of a module of the same size and second counts as this one's.
    fake.write_text(fake.read_text().replace('"cpu"', '"gpu"  # now'))
    assert _gpu.why_not_usable() == ""
    monkeypatch.setattr(gpu, "gpu", lambda: {"name": "NVIDIA H200"})
    monkeypatch.setattr(gpu, "why_not_usable", lambda: "no such luck")
    assert gpu.measure(parts[:1], options(rehearse=False, out=tmp_path / "out")) == 2
    assert "no such luck" in capfd.readouterr().out and stub.ran == []


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
        {
            **{"complete": True, "rehearsal": False, "part": "one", "device_kind": "x"},
            **{"cases": ["a"], "cases_of": _gpu.cases_of(), "rows": {"a": {"ok": True}}},
        },
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


# --- the command line -----------------------------------------------------------------------------------------------


def test_what_stops_a_command_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: list[gpu.Part]
) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(SystemExit, match="out cannot be written to: Operation not permitted"):
        gpu.measure(parts, options(out=tmp_path / "out"))
    _gpu.write(tmp_path / "peak.json", {"part": "peak", "rehearsal": True, "device_kind": "cpu", "rows": {}})
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--summary", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="peak is a rehearsal on cpu"):
        gpu.main()


def test_ctrl_c_says_that_a_second_call_goes_on(
    parts: list[gpu.Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def stop(*args: Any, **options: Any) -> Any:
        raise _gpu.Stopped(130)

    monkeypatch.setattr(gpu, "run", stop)
    with pytest.raises(SystemExit, match="130"):
        gpu.measure(parts, options(out=tmp_path / "out"))
    last = capfd.readouterr().out.splitlines()[-1]
    assert last == f"stopped: what was measured is in {tmp_path / 'out'}, and a second call goes on from there"


def test_minutes_of_a_rehearsal_are_none_of_a_measurement(tmp_path: Path) -> None:
    content = {"part": "one", "device_kind": "cpu", "rehearsal": True, "complete": False, "spent_seconds": 301.0}
    _gpu.write(tmp_path / "one.json", content)
    part = gpu.Part("one", "one.py", "one", 5)
    assert gpu._before(part, tmp_path, options(rehearse=False)) == {}
    assert gpu._before(part, tmp_path, options())["spent_seconds"] == 301.0


def test_a_rehearsal_that_stands_for_another_is_told_apart(stub: Stub) -> None:
    stub.script.write_text(PART.replace('"figure": 2', '"rehearsed_as": "good"'))
    printed = stub.run("--case", "late").stdout
    assert re.search(r"late +as good\n", printed) and "0 of 0 ok, 1 rehearsed as others" in printed


# --- the whole -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_part_can_be_rehearsed(tmp_path: Path) -> None:
    """But those of which test_gpu_peers.py rehearses both sides."""
    parts = [part.name for part in gpu.PARTS if part.name not in ("sft", "qlora", "generate")]
    words = [word for name in parts for word in ("--part", name)]
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--rehearse", *words, "--out", str(tmp_path)]
    env = {**os.environ, "XLA_FLAGS": os.environ["QUICK_CPU_FLAGS"]}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    written = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert written.keys() == {*parts}
    assert all(content["rehearsal"] and content["complete"] for content in written.values())
