"""Search for NVIDIA's assembler, without which XLA compiles nothing for a GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil


def find_ptxas() -> str | None:
    """Find NVIDIA's assembler, which XLA starts for every kernel, and put it on PATH if XLA would miss it.

    XLA searches ``--xla_gpu_cuda_data_dir``, PATH, ``/usr/local/cuda``, ``/opt/cuda``, and the wheels next to its
    plugin. It does not find wheels elsewhere on `sys.path` (a user's folder below a virtual environment).

    Returns:
        Its path, or None if it is not found.
    """
    folders = re.findall(r"--xla_gpu_cuda_data_dir=(\S+)", os.environ.get("XLA_FLAGS", ""))
    toolkits = [f"{root}/bin" for root in (*folders, "/usr/local/cuda", "/opt/cuda")]
    found = shutil.which("ptxas") or shutil.which("ptxas", path=os.pathsep.join(toolkits))
    if found is not None:
        return found
    beside = {os.path.dirname(folder) for folder in _folders_of("jax_plugins")}
    for root in _folders_of("nvidia"):
        folder = os.pathsep.join((f"{root}/cu13/bin", f"{root}/cuda_nvcc/bin"))
        if (found := shutil.which("ptxas", path=folder)) is not None:
            if os.path.dirname(root) not in beside:
                os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), os.path.dirname(found)))
            return found
    return None


def _folders_of(package: str) -> list[str]:
    spec = importlib.util.find_spec(package)
    return list(spec.submodule_search_locations or []) if spec else []
