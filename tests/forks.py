"""Processes that tests fork from one server: it imports JAX and Lowtide once, which costs seconds per process."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CONTEXT: Any = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    "lowtide.adapters lowtide.cli lowtide.finetune lowtide.models lowtide.offload lowtide.pipeline.program "
    "lowtide.train lowtide.train._trainer optax orbax.checkpoint grain wcmatch.glob".split()
)


class Forked:
    """A script (``*.py``) or a module in a separate process.

    Args:
        argv: the script or the module, and its arguments.
        log: file that receives the output.
        programs: folder of compiled programs, shared by all processes.
        num_devices: number of CPU devices.
        flags: flags of XLA; the default ones are for programs of CPUs alone, and libtpu refuses them.
        folder: the current folder; by default that of the server.
    """

    def __init__(
        self,
        argv: list[str],
        *,
        log: Path,
        programs: Path,
        num_devices: int = 1,
        flags: str | None = None,
        folder: Path | None = None,
    ) -> None:
        self._log = log
        # This scheduler may order collectives differently on each device; a pipeline with FSDP then deadlocks.
        flags = (
            f"{flags or os.environ['QUICK_CPU_FLAGS']} --xla_force_host_platform_device_count={num_devices} "
            "--xla_cpu_enable_concurrency_optimized_scheduler=false"
        )
        config = {
            "jax_platforms": "cpu",
            "jax_compilation_cache_dir": str(programs),
            "jax_persistent_cache_min_compile_time_secs": 0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
        }
        job = {"argv": argv, "log": str(log), "folder": str(folder or "."), "xla_flags": flags, "config": config}
        script = str(Path(__file__).with_name("forked.py"))
        self._process = CONTEXT.Process(target=runpy.run_path, args=(script, {"JOB": job}))
        sys.audit("subprocess.Popen", script, argv, None, None)  # for the check of markers in tests/conftest.py
        self._process.start()

    @property
    def text(self) -> str:
        """Output so far."""
        return self._log.read_text() if self._log.exists() else ""

    @property
    def is_running(self) -> bool:
        """Whether it has no exit status yet."""
        return self._process.is_alive()

    def wait(self, timeout: float = 300) -> int:
        """Wait for the exit status; the negative number of a signal that ended the process."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"still running after {timeout} s:\n{self.text}"
        return self._process.exitcode

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()


@pytest.fixture(scope="session")
def fork_anywhere(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Forked]:
    """Start a `Forked` that its caller waits for."""
    folder = tmp_path_factory.mktemp("forked")
    counter = iter(range(10**6))

    def fork(*argv: Any, **options: Any) -> Forked:
        log = folder / f"{next(counter)}.log"
        return Forked([str(part) for part in argv], log=log, programs=folder / "programs", **options)

    return fork


@pytest.fixture
def fork(fork_anywhere: Callable[..., Forked]) -> Iterator[Callable[..., Forked]]:
    """Start a `Forked`. A failed test leaves processes, and the fixture kills them."""
    processes: list[Forked] = []

    def fork(*argv: Any, **options: Any) -> Forked:
        processes.append(fork_anywhere(*argv, **options))
        return processes[-1]

    yield fork
    for process in processes:
        process.kill()
        process.wait()
