"""Predicted versus measured peak of steps that run on the current accelerator.

    python benchmarks/measured_peak.py [--case NAME ...] [--json FILE]
    python benchmarks/measured_peak.py --rehearse

Every program is compiled and run in a separate process: with JAX's defaults (three quarters of the memory preallocated)
and, as `NAME-growing`, without preallocation. `predicted` is the compiled step's device bytes. `measured` is the peak
of JAX's allocator (`peak_bytes_in_use`), including the arguments. `error` is their difference over the measured bytes.

Arguments are created on the host, so that this leaves no peak; they are small numbers that differ. `peak_before_bytes`
is the memory that compilation allocated earlier, to find the fastest kernels. If neither prediction nor measurement
exceeds it, the step's own peak is invisible and has no error (`covered`). A temporary folder keeps the kernels, so the
second process of a program does not search again. Each row also has all counters of the allocator, and the bytes that
`nvidia-smi` reports for the process.
"""

from __future__ import annotations

import inspect
import math
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import _programs
import jax
import numpy as np
from _gpu import main, peak_bytes
from _peak_programs import MORE
from _programs import PROGRAMS

import lowtide as lt

REHEARSAL_SCALE = 16
CONSTANT_BYTES = 2**26
"""Larger arguments hold one repeated number, because drawing them would take longer than the step."""
STEPS = {**{name: make for name, make in PROGRAMS.items() if name != "fsdp"}, **MORE}


def measure(name: str, rehearsal: bool) -> dict[str, Any]:
    """Predict one step, run it, and read the allocator's counters."""
    _programs.scale = REHEARSAL_SCALE if rehearsal else 1
    target = lt.target("here")
    make = STEPS[name]
    job = make(target) if "target" in inspect.signature(make).parameters else make()
    donate = job.get("donate_argnums", ())
    program = lt.memory.compile(job["fn"], *job["args"], target=target, donate_argnums=donate)
    report = program.report(job["roles"])
    before = peak_bytes()
    # Functions inside a module are constants of the compiled program.
    arrays = jax.block_until_ready([jax.tree.map(_filled, arg) for arg in job["args"]])
    results = jax.block_until_ready(program.compiled(*arrays))
    measured = peak_bytes()
    counted = {key: value for key, value in (_device().memory_stats() or {}).items() if isinstance(value, int)}
    covered = is_covered(before, measured, report.device_bytes)
    row = {
        "predicted_bytes": report.device_bytes,
        "measured_bytes": measured,
        "error": None if not measured or covered else (report.device_bytes - measured) / measured,
        "allocator_adds_bytes": None if not measured else measured - report.device_bytes,
        "peak_before_bytes": before,
        "covered": covered,
        "predicted": {
            key: getattr(report.device, f"{key}_bytes") for key in ("argument", "output", "alias", "temp", "code")
        },
        "host_bytes": report.host_bytes,
        "by_role": dict(report.peak_by_role),
        "memory_stats": counted,
        "nvidia_smi_bytes": _process_bytes(),
    }
    del results
    return row


def is_covered(before: int | None, measured: int | None, predicted: int) -> bool:
    """Return whether the step's own peak is invisible. A prediction above the earlier peak still counts as an error."""
    return measured is not None and before is not None and before >= max(measured, predicted)


def _device() -> jax.Device:
    return jax.local_devices()[0]


def _filled(leaf: Any) -> Any:
    """Create an argument where the program takes it: on the device, or in the host memory that the shape names."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return None
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    kind = getattr(leaf.sharding, "memory_kind", None)
    place = jax.sharding.SingleDeviceSharding(_device(), memory_kind=kind)
    size = math.prod(leaf.shape)
    if not jax.dtypes.issubdtype(leaf.dtype, np.floating):
        return jax.device_put(np.ones(leaf.shape, leaf.dtype), place)
    if size * leaf.dtype.itemsize > CONSTANT_BYTES:
        return jax.device_put(np.broadcast_to(np.asarray(0.01, leaf.dtype), leaf.shape), place)
    drawn = 0.02 * np.random.default_rng(0).standard_normal(min(size, 2**16), np.float32)
    return jax.device_put(np.resize(drawn, leaf.shape).astype(leaf.dtype), place)


def _process_bytes() -> int | None:
    """Return the driver's bytes for this process, including its context, or for the device if it lists no process."""
    query = ["nvidia-smi", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(
            [*query, "--query-compute-apps=pid,used_memory"], capture_output=True, text=True, check=True, timeout=30
        ).stdout.splitlines()
        own = [line.split(",")[1] for line in lines if line.split(",")[0].strip() == str(os.getpid())]
        if not own:  # in a container that does not see the driver's process ids
            command = [*query, "--query-gpu=memory.used"]
            own = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
        return int(own[0]) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _environment(growing: bool) -> dict[str, str]:
    kernels = Path(tempfile.gettempdir(), f"lowtide-kernels-{os.getuid()}")
    kernels.mkdir(exist_ok=True)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_per_fusion_autotune_cache_dir={kernels}".strip()
    return {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false" if growing else "true"}


GROWING = {f"{name}-growing": name for name in STEPS}
if "--rehearse" in sys.argv:  # a CPU preallocates nothing, so one program is enough to check this kind of case
    GROWING = dict([*GROWING.items()][:1])
CASES = {name: partial(measure, name) for name in STEPS}
CASES |= {name: partial(measure, program) for name, program in GROWING.items()}

if __name__ == "__main__":
    main(
        "peak",
        CASES,
        __doc__,
        minutes={name: 3.0 if "8b" in name else 1.5 for name in CASES},
        needs={name: ["keras"] for name in CASES if name.startswith("keras")},
        env={name: _environment(name in GROWING) for name in CASES},
    )
