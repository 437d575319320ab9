"""Search for NVIDIA's assembler, without which XLA compiles nothing for a GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil


def find_ptxas() -> str | None:
    """Find NVIDIA's assembler, which XLA starts for every kernel, or None; put it on PATH if XLA would miss it.

    XLA searches ``--xla_gpu_cuda_data_dir``, PATH, ``/usr/local/cuda``, ``/opt/cuda``, and the wheels next to its
    plugin. It does not find wheels elsewhere on `sys.path` (a user's folder below a virtual environment).
    """
    folders = re.findall(r"--xla_gpu_cuda_data_dir=(\S+)", os.environ.get("XLA_FLAGS", ""))
    toolkits = [f"{root}/bin" for root in (*folders, "/usr/local/cuda", "/opt/cuda")]
    path = shutil.which("ptxas") or shutil.which("ptxas", path=os.pathsep.join(toolkits))
    if path is not None:
        return path
    plugin_parents = {os.path.dirname(folder) for folder in _package_folders("jax_plugins")}
    for root in _package_folders("nvidia"):
        folder = os.pathsep.join((f"{root}/cu13/bin", f"{root}/cuda_nvcc/bin"))
        if (path := shutil.which("ptxas", path=folder)) is not None:
            if os.path.dirname(root) not in plugin_parents:
                os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), os.path.dirname(path)))
            return path
    return None


def _package_folders(package: str) -> list[str]:
    spec = importlib.util.find_spec(package)
    return list(spec.submodule_search_locations or []) if spec else []
