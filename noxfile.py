"""Tests on all supported versions: `nox` runs the fast tests on every installed Python.

    nox                                  the fast tests: oldest set on 3.11, newest on 3.12 to 3.14
    nox -s tests-3.13 -- --all           with the slow ones; other arguments go to pytest
    nox -s jax011                        Python 3.12 with JAX 0.11.2
    nox -s remat3                        the same, with JAX's new implementation of recomputation
    nox -s install                       a user's `pip install .[finetune]`, without constraints, and two commands
    nox -s rehearse                      the GPU day at toy size, on JAX and the list of wheels alone

Warnings, including deprecations, are errors in the tests. nox skips an interpreter that is not installed, and reports
it.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import nox

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
JAX_011 = "0.11.2"
NEEDED = "jax jaxlib numpy scipy ml_dtypes opt_einsum"
"""Dependencies of JAX, which a machine for the GPU day has."""

nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False


def constraints(session: nox.Session) -> str:
    """Return the set of versions that fits the session's Python, as `make` selects it."""
    return "constraints/oldest.txt" if session.python == "3.11" else "constraints/newest.txt"


def run_tests(session: nox.Session, **env: str) -> None:
    """Run the fast tests, or all tests with `--all`, in two processes that use at most 12 GiB together."""
    arguments = [argument for argument in session.posargs if argument != "--all"]
    fast = "" if "--all" in session.posargs else " and (sentinel or not slow)"
    markers = ["-m", f"not peers and not gpu and not rehearsal{fast}"]
    # `session.create_tmp` points TMPDIR into this folder. Some tests write and run other tests; pytest would print
    # their paths relative to its root.
    outside = {"TMPDIR": tempfile.gettempdir()}
    command = ["python", "-m", "pytest", "-n", "2", "--dist", "worksteal", *markers, *arguments]
    session.run(*command, env={**outside, **env})


def use_jax_011(session: nox.Session) -> None:
    """Install the newest set with JAX 0.11.2 instead of its JAX. JAX would not load plugins of another version."""
    folder = Path(session.create_tmp())
    lines = Path("constraints/newest.txt").read_text(encoding="utf-8").splitlines()
    own = ("jax==", "jaxlib==", "jax-cuda13-plugin==", "jax-cuda13-pjrt==")
    changed = [f"{line.partition('==')[0]}=={JAX_011}" if line.startswith(own) else line for line in lines]
    chosen = folder / "constraints.txt"
    chosen.write_text("\n".join(changed) + "\n", encoding="utf-8")
    session.install("--constraint", str(chosen), "--editable", ".[dev]")


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """The tests, on the set of versions that fits the Python."""
    session.install("--constraint", constraints(session), "--editable", ".[dev]")
    run_tests(session)


@nox.session(python="3.12")
def jax011(session: nox.Session) -> None:
    """The tests with JAX 0.11.2, whose jaxprs, policies and recomputation differ from those of the other versions."""
    use_jax_011(session)
    run_tests(session)


@nox.session(python="3.12")
def remat3(session: nox.Session) -> None:
    """The same with ``jax_remat3``, which is going to become JAX's default."""
    use_jax_011(session)
    run_tests(session, JAX_REMAT3="1")


@nox.session(python=PYTHONS, reuse_venv=False)
def install(session: nox.Session) -> None:
    """A user's first steps: `pip install .[finetune]` with the newest versions, a short run, and an explained step."""
    session.install(".[finetune,tpu-aot]")
    out = Path(session.create_tmp()) / "run"
    shutil.rmtree(out, ignore_errors=True)
    env = {"JAX_PLATFORMS": "cpu"}
    session.run("lowtide", "finetune", "--steps", "3", "--out", str(out), env=env)
    job = "benchmarks/_programs.py:scan_remat_names"
    session.run("lowtide", "explain", job, "--target", "v5e", env=env)
    session.run("python", "-m", "pip", "check")


@nox.session(python=PYTHONS)
def rehearse(session: nox.Session) -> None:
    """The GPU day at toy size, in an environment with only JAX and the listed wheels."""
    session.install("--constraint", constraints(session), *NEEDED.split())
    work = Path(session.create_tmp()) / "rehearsal"
    shutil.rmtree(work, ignore_errors=True)  # existing results would count as done
    wheels = work / "wheels"
    command = ["python", "benchmarks/gpu.py"]
    session.run(*command, "--wheels", str(wheels), "--python", str(session.python))
    session.install("--no-index", "--no-deps", *map(str, sorted(wheels.glob("*.whl"))))
    if missing := session.run(*command, "--missing", silent=True):
        session.error(f"missing after the list is installed: {missing}")
    session.run(*command, "--rehearse", "--out", str(work / "results"))
