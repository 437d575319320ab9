"""Shared by all tests: the platform, strict JAX settings, skips that say why, and a compile counter."""

from __future__ import annotations

import collections
import contextlib
import gc
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Set before JAX is imported. `JAX_PLATFORMS=cuda,cpu pytest -m gpu` runs the GPU tests.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
for flag, value in (
    ("xla_force_host_platform_device_count", "8"),
    # Collectives in one order on every device: else those of a pipeline with FSDP may wait for one another.
    ("xla_cpu_enable_concurrency_optimized_scheduler", "false"),
):
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{flag}={value}".strip()
# Without these libtpu asks an absent metadata server, and refuses to load in two test processes at once.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Plans keep compiled bytes on disk; tests must not read those of an earlier version of the code.
os.environ["LOWTIDE_CACHE"] = tempfile.mkdtemp(prefix="lowtide-tests-")
os.environ.setdefault("KERAS_BACKEND", "jax")
# Threads of NumPy and PyTorch wait for their next product by spinning, on the core of the other worker.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from . import peers  # noqa: E402

# Without LLVM's optimisations, and without MLIR's fusions, CPU programs compile in half the time. Nor is one small
# program split among threads. `COMPILE_AS_USERS=1 pytest` compiles as users do. Only the CPU compiler of JAX 0.10 knows
# the flags of UNFUSED; the TPU compiler, which reads the same variable later, does not.
UNFUSED = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ >= (0, 11):
    UNFUSED = ""
# Flags for the processes that tests start and that compile for CPUs alone.
os.environ["QUICK_CPU_FLAGS"] = f"--xla_backend_optimization_level=0 {UNFUSED}".strip()
if IS_UNOPTIMIZED := "COMPILE_AS_USERS" not in os.environ and os.environ["JAX_PLATFORMS"] == "cpu":
    if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
        os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    flags = os.environ["XLA_FLAGS"]
    os.environ["XLA_FLAGS"] = f"{flags} {UNFUSED}".strip()
    jax.devices("cpu")  # reads the flags, once
    os.environ["XLA_FLAGS"] = flags

jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("quick", max_examples=30, deadline=None)
hypothesis.settings.register_profile("slow", max_examples=150, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Answers of torch, transformers and other peers come from recordings or from the peers; see tests/peers.py."""
    parser.addoption("--peers", choices=peers.MODES, default=peers.MODES[0], help="where answers of peers come from")


collected = collections.Counter[str]()
"""Number of collected cases of each test function."""
_PROCESSES = re.compile(r"\bprocesses\b")  # as the Makefile greps it


def pytest_sessionstart() -> None:
    """Forget the counts of an earlier collection in this process."""
    collected.clear()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests with recorded answers, so that `make peers` can select them, and the cases after `slow_after`.

    Raises:
        pytest.UsageError: if a test has the marker `processes` and its file lacks the word that the Makefile greps.
    """
    if item.get_closest_marker("processes") and not _PROCESSES.search(item.path.read_text(encoding="utf-8")):
        raise pytest.UsageError(f"{item.nodeid} has the marker `processes`, and its file does not contain the word")
    if "peer" in getattr(item, "fixturenames", ()):
        item.add_marker("recorded")
    function = item.nodeid.partition("[")[0]
    collected[function] += 1
    marker = item.get_closest_marker("slow_after")
    if marker and collected[function] > marker.args[0]:
        item.add_marker("slow")


def pytest_configure(config: pytest.Config) -> None:
    """Few examples where slow tests are left out; `--hypothesis-profile` chooses otherwise."""
    config.addinivalue_line(
        "markers", "recorded: compares with recorded answers of peers (added by the fixture `peer`)"
    )
    if config.getoption("--peers") != peers.MODES[0] and (reason := _reason_to_skip("peers")):
        raise pytest.UsageError(f"--peers={config.getoption('--peers')} {reason}")
    if config.getoption("--hypothesis-profile", None) is None:
        hypothesis.settings.load_profile("quick" if "not slow" in config.option.markexpr else "slow")


def pytest_collection_finish() -> None:
    """Exempt the imported modules from garbage collection, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def _missing(*modules: str) -> list[str]:
    def is_there(module: str) -> bool:
        with contextlib.suppress(ModuleNotFoundError):  # of the parent package
            return importlib.util.find_spec(module) is not None
        return False

    return [module for module in modules if not is_there(module)]


def _reason_to_skip(marker: str) -> str | None:
    if marker == "tpu_aot" and _missing("libtpu"):
        return "needs libtpu: install the tpu-aot extra"
    if marker == "gpu_aot" and _missing("jax_cuda13_plugin"):
        return "needs the CUDA plugin: install the gpu-aot extra"
    if marker == "gpu_aot" and _missing("nvidia.cu13") and shutil.which("ptxas") is None:
        return "needs ptxas: install the gpu-aot extra or put a CUDA toolkit on PATH"
    if marker == "gpu" and jax.default_backend() != "gpu":
        return "needs a GPU: run with JAX_PLATFORMS=cuda,cpu on a machine that has one"
    if marker == "peers" and (missing := _missing("torch", "transformers", "peft")):
        return f"needs {', '.join(missing)}: install the peers extra"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    started.clear()
    for marker in ("tpu_aot", "gpu_aot", "gpu", "peers"):
        if item.get_closest_marker(marker) and (reason := _reason_to_skip(marker)):
            pytest.skip(reason)


@pytest.fixture
def peer(request: pytest.FixtureRequest) -> Iterator[peers.Peer]:
    """Answers of other software, recorded or live."""
    with peers.peer_of(request) as answers:
        yield answers


HELPERS = {"bash", "git", "ldconfig", "ldd", "lscpu", "nvidia-smi", "uname"}
"""Programs that a test starts without the marker `processes`: they answer at once."""
started: list[str] = []
"""Commands that the current test has started, `HELPERS` left out."""


def _note_start(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("os.fork", "os.system"):
        started.append(event)
    elif event == "subprocess.Popen":
        words = [os.fsdecode(word) for word in arguments[1]]
        # Lowtide reads tokenizers and chat templates in an isolated Python (-I), which imports almost nothing.
        if Path(words[0]).name not in HELPERS and "-I" not in words:
            started.append(" ".join(words)[:200])


sys.addaudithook(_note_start)


@pytest.fixture(autouse=True)
def processes_are_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that starts a process in the wrong lane: markers alone select the lane."""
    yield
    markers = map(request.node.get_closest_marker, ("processes", "peers", "rehearsal", "gpu"))
    if started and not any(markers):
        pytest.fail(f"the test starts a process and has no marker: add @pytest.mark.processes\n  {started[0]}", False)


MANY_MAPS = 20_000
"""Memory maps of a process; Linux gives it 65,530, and XLA's CPU compiler ends the process at the limit."""


@pytest.fixture(autouse=True)
def own_libtpu_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the arguments of libtpu after a test: a command sets them for its whole process."""
    monkeypatch.setenv("LIBTPU_INIT_ARGS", os.environ.get("LIBTPU_INIT_ARGS", ""))


@pytest.fixture
def little_optimized(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile for TPUs at `O1`, in a third to a half of the time; processes of the test do so, too.

    Temporaries are those of another schedule. `make test-all` sets TPU_AS_USERS, and compiles as users do.
    """
    before = jax.config.jax_optimization_level
    if IS_UNOPTIMIZED and "TPU_AS_USERS" not in os.environ:
        jax.config.update("jax_optimization_level", "O1")
        monkeypatch.setenv("JAX_OPTIMIZATION_LEVEL", "O1")
    yield
    jax.config.update("jax_optimization_level", before)


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps() -> Iterator[None]:
    """Drop compiled programs when there are many: each has up to dozens of memory maps."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MANY_MAPS:
        jax.clear_caches()
        gc.collect()


class Compilations:
    """Counts programs that XLA compiled, eager operations included."""

    def __init__(self) -> None:
        self.count = 0

    def listen(self, event: str, duration_secs: float, **kwargs: object) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"

    @contextlib.contextmanager
    def none(self) -> Iterator[None]:
        """Fail when anything is compiled inside the block."""
        before = self.count
        yield
        assert self.count == before, f"{self.count - before} programs were compiled where none should be"


@pytest.fixture
def compilations() -> Iterator[Compilations]:
    """A counter of compiled programs: call once, then again inside ``with compilations.none():``."""
    counter = Compilations()
    jax.monitoring.register_event_duration_secs_listener(counter.listen)
    yield counter
    jax.monitoring.unregister_event_duration_listener(counter.listen)


@pytest.fixture(scope="session")
def tpu_device() -> jax.Device:
    """One chip of a v5e that is not there, to compile for (mark the test `tpu_aot`)."""
    from lowtide.core import _compat

    return _compat.tpu_topology_devices("v5e:2x2")[0]


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Hugging Face directory of a random Llama of a few thousand parameters, with a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from lowtide.models import DecoderConfig, init, save

    directory = tmp_path_factory.mktemp("tiny")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the tide goes out and the tide comes in"] * 4, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = DecoderConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        tie_embeddings=True,
        eos_token_id=0,
    )
    save(init(config, key=jax.random.key(0)), directory)
    return str(directory)
