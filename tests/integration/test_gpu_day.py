"""The runner of a GPU day: resumed, killed, out of time, without packages; and the rehearsal of all parts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _gpu  # noqa: E402
import _packages  # noqa: E402
import _processes  # noqa: E402
import _summary  # noqa: E402
import gpu  # noqa: E402
import gpu_tests  # noqa: E402

sys.path.remove(str(BENCHMARKS))

CARD = {"name": "NVIDIA H200", "driver_version": "580.1", "memory.total": "143771 MiB"}


# --- a part, whose processes are calls ------------------------------------------------------------------------------


class Stub:
    """A part, called with its command line. It is mutated: tests set how long cases take and how they fail."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.monkeypatch = path, monkeypatch
        self.seconds, self.errors = dict[str, float](), dict[str, str]()
        self.runs: list[str] = []
        self.files: list[list[str]] = []
        monkeypatch.setattr(_gpu, "run", self.run)
        monkeypatch.setattr(_gpu, "gpu", lambda: CARD)
        monkeypatch.setattr(_gpu, "_git", lambda *arguments: None)

    def run(self, command: Sequence[str], env: Mapping[str, str], seconds: float, stderr: Any) -> int | None:
        """Stand in for a process: write the row of a case, or fail, or be killed."""
        name, row = command[command.index("--case") + 1], command[command.index("--child") + 1]
        self.runs.append(name)
        self.files.append(list(self.rows))
        if seconds < self.seconds.get(name, 0.0):
            return None
        if name in self.errors:
            stderr.write(self.errors[name].encode())
            return 1
        _gpu.write(Path(row), {"ok": True, "seconds": 0.0, "flag": env.get("FLAG")})
        return 0

    def __call__(self, *words: str, cases: tuple[str, ...] = ("good", "late", "peer")) -> int | str | None:
        functions = dict.fromkeys(cases, lambda rehearsal: {"figure": 1.5, "rehearsal": rehearsal})
        self.monkeypatch.setattr(sys, "argv", ["stub.py", "--json", str(self.path), *words])
        with pytest.raises(SystemExit) as stop:
            _gpu.main(
                "stub",
                functions,
                "doc",
                minutes={"late": 1.0},
                needs={"peer": ["no_such_module"]},
                env={"good": {"FLAG": "1"}},
            )
        return stop.value.code

    @property
    def content(self) -> dict[str, Any]:
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    @property
    def rows(self) -> dict[str, Any]:
        return self.content.get("rows", {})


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    return Stub(tmp_path / "stub.json", monkeypatch)


def test_a_second_call_runs_what_is_not_measured(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    assert stub() == 0 and stub.runs == ["good", "late"]
    assert stub.files == [[], ["good"]]  # written after every case, so that a kill loses one
    content = stub.content
    assert content["complete"] and content["part"] == "stub" and content["device_kind"] == "NVIDIA H200"
    assert {"commit", "date", "versions", "gpu", "host", "python", "command"} <= set(content)
    assert stub.rows["good"]["flag"] == "1" and stub.rows["late"]["flag"] is None
    assert stub.rows["good"]["driver"] == "580.1" and stub.rows["good"]["versions"] == content["versions"]
    assert stub.rows["peer"] == {"ok": False, "not_here": ["no_such_module"]}
    assert stub() == 0 and stub.runs == ["good", "late"] and stub.content == content
    assert "stub/good: there already" in capsys.readouterr().out
    stub("--case", "late", "--again")
    assert stub.runs[2:] == ["late"] and stub.rows["good"] == content["rows"]["good"]
    assert stub(cases=("good", "new", "late")) == 0  # the script has gained a case, and lost one
    assert stub.runs[3:] == ["new"] and list(stub.rows) == ["good", "new", "late"]


def test_cases_of_another_commit_run_again(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_COMMIT", "e" * 40)
    assert stub() == 0 and stub("--stale") == 0 and stub.runs == ["good", "late"]
    monkeypatch.setenv("LOWTIDE_COMMIT", "f" * 40)
    assert stub("--stale", "--case", "late") == 0 and stub("--stale") == 0 and stub("--stale") == 0
    assert stub.runs[2:] == ["late", "good"]
    monkeypatch.delenv("LOWTIDE_COMMIT")
    monkeypatch.setattr(_gpu, "_git", lambda *arguments: None)
    assert "--stale needs code without uncommitted changes" in str(stub("--stale"))


def test_a_failed_case_is_recorded_and_run_again(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.errors["good"] = "log\nValueError: no such luck"
    assert stub() == 1 and stub.rows["late"]["ok"] and not stub.content["complete"]
    assert stub.rows["good"]["error"] == "exit status 1\nlog\nValueError: no such luck"
    assert "ValueError: no such luck" in capsys.readouterr().out
    stub.errors.clear()
    assert stub() == 0 and stub.runs == ["good", "late", "good"] and stub.content["complete"]
    measured = stub.content
    stub.errors["good"] = "ValueError: again"
    assert stub("--again", "--case", "good") == 1 and stub.content == measured  # a failure erases no measurement


def test_limits_of_a_case_and_of_the_day(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.seconds["late"] = 90.0
    assert stub("--case", "late") == 1
    assert stub.rows["late"]["error"].startswith("killed at its limit of 60 s")
    stub.path.unlink()
    stub.seconds["late"] = 50.0
    assert stub("--case", "late", "--minutes", "0.75") == 1  # the end of the day is no failure of the case
    assert stub.rows == {} and "stub/late: cut: no time left" in capsys.readouterr().out
    assert stub("--minutes", "0.2") == 1 and stub.runs == ["late", "late"]
    assert "stub/good: not started, 12 s left of 300" in capsys.readouterr().out


def test_results_of_another_kind_stay_as_they_are(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stub() == 0
    before = stub.content
    assert "holds results of NVIDIA H200" in str(stub("--rehearse", "--again")) and stub.content == before
    monkeypatch.setattr(_gpu, "gpu", dict)
    assert "no GPU here" in str(stub("--again")) and stub.content == before
    for text in ('{"part": "stub", "dev', "[]", '{"rows": {}}'):
        stub.path.write_text(text)
        assert "is not the result of a part" in str(stub()) and stub.path.read_text() == text


def test_a_rehearsal_runs_in_one_process(stub: Stub) -> None:
    assert stub("--rehearse") == 0 and stub.runs == []
    assert stub.content["rehearsal"] and stub.content["device_kind"] == "cpu" and stub.content["complete"]
    assert stub.rows["good"]["rehearsal"] and stub.rows["good"]["device_kind"] == "cpu"


def test_a_measurement_on_the_cpu_is_an_error() -> None:
    row = _gpu.attempt(lambda rehearsal: {}, rehearsal=False)  # the tests run on the CPU
    assert not row["ok"] and "a measurement needs a GPU" in row["error"]


def test_origin_of_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    for inherited, platforms in (("cpu", "cuda,cpu"), ("", "cuda,cpu"), ("cuda", "cuda")):
        monkeypatch.setenv("JAX_PLATFORMS", inherited)
        assert _gpu.environment(False)["JAX_PLATFORMS"] == platforms
    assert _gpu.environment(True)["JAX_PLATFORMS"] == "cpu"
    assert _gpu.home_of("NVIDIA H200", rehearsal=False) == BENCHMARKS / "results/gpu/nvidia-h200"
    monkeypatch.setattr(_gpu, "_git", lambda *arguments: None)
    assert (_gpu.moment()["commit"], _gpu.moment()["uncommitted_changes"]) == (None, None)
    monkeypatch.setenv("LOWTIDE_COMMIT", "abc")
    assert _gpu.moment()["commit"] == "abc"


# --- all parts -----------------------------------------------------------------------------------------------------


@pytest.fixture
def day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[str]]]:
    """Call `gpu.py` with words; its exit status and the parts that it started. The part `peak` fails."""
    started: list[str] = []

    def run(command: Sequence[str], env: Mapping[str, str], seconds: float) -> int:
        path = Path(command[command.index("--json") + 1])
        started.append(path.stem)
        fields = {"part": path.stem, "device_kind": "NVIDIA H200", "rehearsal": False, "rows": {}}
        _gpu.write(path, {**fields, "complete": path.stem != "peak"})
        return int(path.stem == "peak")

    def call(*words: str) -> tuple[int, list[str]]:
        started.clear()
        monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
        return gpu.main(), started

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu, "gpu", lambda: CARD)
    monkeypatch.setattr(gpu, "why_not_usable", lambda card: "")
    monkeypatch.setattr(gpu, "home_of", lambda kind, rehearsal: tmp_path / "home")
    parts = {part.name: part for part in gpu.PARTS}
    monkeypatch.setattr(gpu, "PARTS", [parts[name] for name in ("smoke", "peak", "lora")])
    return call


def test_parts_run_in_order_and_go_on_in_a_second_call(
    day: Callable[..., tuple[int, list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert day() == (1, ["smoke", "peak", "lora"])  # a part that fails stops no other
    assert "smoke      complete\n  peak       not complete\n" in capsys.readouterr().out
    assert day() == (1, ["peak"])
    assert day("--part", "smoke") == (0, ["smoke"])  # a part that is named looks for new cases
    assert day("--part", "lora", "--part", "smoke", "--again") == (0, ["smoke", "lora"])
    assert day("--stale") == (1, ["smoke", "peak", "lora"])  # each part looks for cases of another commit
    assert day("--minutes", "0.1") == (1, [])
    # Results of earlier days count in another folder, which comes back with all of them.
    assert day("--out", str(tmp_path / "back")) == (1, ["peak"])
    assert {path.name for path in (tmp_path / "back").iterdir()} == {"smoke.json", "peak.json", "lora.json"}


def test_nothing_runs_where_jax_does_not_use_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(out: str, err: str) -> Callable[..., Any]:
        return lambda command, **options: SimpleNamespace(returncode=0, stdout=out, stderr=err)

    assert "--rehearse runs toy sizes on the CPU" in gpu.why_not_usable({})
    monkeypatch.setattr(gpu, "run_child", answer("gpu\n", "a warning"))
    assert gpu.why_not_usable(CARD) == ""
    monkeypatch.setattr(gpu, "run_child", answer("cpu\n", "Traceback\nRuntimeError: the driver is too old\nhint"))
    assert gpu.why_not_usable(CARD) == "JAX does not use the GPU here: RuntimeError: the driver is too old"
    monkeypatch.setattr(gpu, "gpu", lambda: CARD)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == 2 and "the driver is too old" in capsys.readouterr().out


def test_every_part_has_its_script() -> None:
    names = [part.name for part in gpu.PARTS]
    assert [part.script for part in gpu.PARTS if not (BENCHMARKS / part.script).is_file()] == []
    assert {name.partition("/")[0] for name in _summary.RULES} <= {*names}


def test_the_reason_is_the_error_itself() -> None:
    assert _processes.reason("Traceback\nValueError: a\n\nhint: b") == "ValueError: a"
    assert _processes.reason("usage: x\nlowtide: error: no such flag") == "lowtide: error: no such flag"
    assert _processes.reason("killed at its limit\nsome log") == "killed at its limit"
    assert _processes.reason("") == "?"


REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_one" time="1"/>
<testcase classname="tests.a.TestX" name="test_one" time="2"><failure message="no">text</failure></testcase>
<testcase classname="tests.a.TestX" name="test_one" time="2"><error message="teardown">text</error></testcase>
<testcase classname="tests.b" name="test_one" time="3"><skipped message="why"/></testcase>
</testsuite></testsuites>"""


def test_outcomes_of_tests_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(REPORT)
    row = gpu_tests.outcomes(tmp_path / "junit.xml")
    assert (row["num_passed"], row["num_failed"], row["num_skipped"], row["ok"]) == (1, 1, 1, False)
    assert row["tests"]["tests.a.TestX.test_one"]["message"] == "no"


# --- wheels --------------------------------------------------------------------------------------------------------


def test_the_list_has_a_pin_for_each_requirement_and_agrees_with_the_constraints() -> None:
    lists = {python: [*_packages.wheels(python)] for python in ("3.11", "3.12", "3.14")}
    assert "flax==0.12.8" in lists["3.11"] and "flax==0.12.8" not in lists["3.12"]
    listed = {_packages.normal(pin) for pins in lists.values() for pin in pins}
    paths = [*ROOT.glob("constraints*/**/*.txt"), *ROOT.glob("constraints*.txt")]
    pinned = {_packages.normal(word) for path in paths for word in path.read_text().split()}
    names = {pin.partition("==")[0] for pin in listed}
    assert names == {pin.partition("==")[0] for pin in listed & pinned}
    project = _packages.tomllib.loads(_packages.PROJECT.read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in ("train", "finetune") for line in project["optional-dependencies"][extra]),
    ]
    needed = {_packages.normal(_packages.requirement(line).name) for line in lines}
    assert needed - {"jax", "lowtide"} <= names  # the machine has JAX


def test_missing_wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def install(**packages: tuple[str, list[str]]) -> None:
        found = [
            SimpleNamespace(metadata={"Name": name}, version=version, requires=requires)
            for name, (version, requires) in packages.items()
        ]
        monkeypatch.setattr(_packages.metadata, "distributions", lambda: found)

    monkeypatch.setattr(_packages, "LIST", tmp_path / "list.txt")
    _packages.LIST.write_text("optax==0.2.8\npydantic_core==2.50.4 # why\npydantic==2.14.3\nrich==15.0.0\n")
    install(optax=("0.2.7", []), rich=("14.10", []), pydantic=("2.10.3", ["pydantic-core==2.27.1"]))
    assert _packages.lacking() == ["optax==0.2.8", "pydantic_core==2.50.4", "pydantic==2.14.3"]
    partner = {"pydantic_core": ("2.27.1", [])}  # refused by the new pydantic
    install(optax=("0.2.8", []), rich=("14.10", []), pydantic=("2.14.3", ["pydantic-core==2.50.4"]), **partner)
    assert _packages.lacking() == ["pydantic_core==2.50.4"]
    install(optax=("0.2.8", []), rich=("14.10", []), pydantic=("2.14.3", []), **partner)
    assert _packages.lacking() == []


# --- with processes ------------------------------------------------------------------------------------------------

PART = f"""
import os, sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
from _gpu import check_child, main

def bad(rehearsal):
    check_child("the child", [sys.executable, "-c", "raise ValueError('no such luck')"])

def deep(rehearsal):
    check_child("the child", [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"],
                stdout=open(os.environ["PID"], "w"))

main("stub", {{"bad": bad, "deep": deep}}, __doc__)
"""


@pytest.mark.processes
def test_a_killed_part_leaves_results_and_no_process(tmp_path: Path) -> None:
    (tmp_path / "stub.py").write_text(PART)
    smi, pid = tmp_path / "nvidia-smi", tmp_path / "pid"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.1, 143771 MiB, 700 W, 1980 MHz, 5'\n")
    smi.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PID": str(pid)}
    command = [sys.executable, str(tmp_path / "stub.py"), "--json", str(tmp_path / "stub.json")]
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)

    def wait_for(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def is_gone(number: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return True

    wait_for(lambda: pid.exists() and pid.read_text().endswith("\n"))
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for(lambda: is_gone(int(pid.read_text())))  # the process of the case and what that started
    rows = json.loads((tmp_path / "stub.json").read_text())["rows"]
    assert rows.keys() == {"bad"} and rows["bad"]["error"].endswith(
        "the child ended with 1: ValueError: no such luck\n"
    )


@pytest.mark.processes
def test_the_runner_needs_the_standard_library_alone() -> None:
    """In a Python that sees no installed package."""
    program = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import gpu; sys.exit(gpu.main())"
    command = [sys.executable, "-I", "-S", "-c", program, "--list"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == [part.name for part in gpu.PARTS]


@pytest.mark.rehearsal
@pytest.mark.slow
def test_every_part_can_be_rehearsed(tmp_path: Path) -> None:
    """`make peers` rehearses both sides of the three others: see test_gpu_scripts.py."""
    parts = [part.name for part in gpu.PARTS if part.name not in ("sft", "qlora", "generate")]
    words = [word for name in parts for word in ("--part", name)]
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--rehearse", *words, "--out", str(tmp_path)]
    env = {**os.environ, "XLA_FLAGS": os.environ["QUICK_CPU_FLAGS"]}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    contents = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert contents.keys() == {*parts}
    for part, content in contents.items():
        assert content["rehearsal"] and content["complete"]
        rows = {name: row for name, row in content["rows"].items() if "rehearsed_as" not in row}
        reasons = [line.ratios for line in _summary.lines(part, {**content, "rows": rows, "rehearsal": False})]
        assert not [reason for reason in reasons if "apart" in reason or "not compared" in reason]
