"""Compile and analyze in a child process.

A process that has compiled for a TPU keeps hundreds of megabytes, and a crash of the compiler ends the process. The
child receives the function (by cloudpickle), its arguments with shapes in place of arrays, and this process's JAX
configuration. The child returns the report. Arrays that the function closes over are sent in full, as constants.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..core import StructureError, TargetError
from ..report import MemoryReport
from ..targets import Target


def run_isolated(
    analyze: Callable[..., MemoryReport],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    options: Mapping[str, Any],
    target: Target,
) -> MemoryReport:
    """Return the report of `lowtide.memory.analyze`, run in a child process that receives shapes in place of arrays."""
    shapes = [_arrays_to_shapes(arg) for arg in args]
    call = {**options, "kwargs": {key: _arrays_to_shapes(value) for key, value in options["kwargs"].items()}}
    # JAX's current options, including those set by a context manager.
    values = {name: getattr(jax.config, name, None) for name in jax.config.values}
    configuration = {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str))}
    try:
        payload = pickle.dumps(configuration) + _pickle((analyze, fn, shapes, call, target), target)
    except (TypeError, pickle.PicklingError, AttributeError, ValueError) as error:
        raise StructureError(
            f"the function or its arguments cannot be sent to a separate process: {str(error).splitlines()[0]}",
            hint="leave isolate out, or make the function and the values it closes over picklable with cloudpickle",
        ) from error
    with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
        source, result = Path(folder) / "call.pkl", Path(folder) / "result.pkl"
        source.write_bytes(payload)
        command = [sys.executable, "-m", "lowtide.memory._isolation", str(source), str(result)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path)])}
        child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not result.exists():
            raise TargetError(
                f"the process that compiled for {target.name!r} ended without a report (status {child.returncode})",
                got=(child.stderr or child.stdout).strip()[-2000:] or None,
                hint="leave isolate out, to compile in this process",
            )
        outcome = pickle.loads(result.read_bytes())
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _pickle(value: Any, target: Target) -> bytes:
    """Pickle a value for the child; a device becomes a lookup in the child, since devices cannot be pickled."""
    import cloudpickle

    device_indices = {device: index for index, device in enumerate(target.devices())}

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, jax.Device):
                if obj in device_indices:
                    return _target_device, (target, device_indices[obj])
                return _local_device, (obj.platform, obj.id)
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _target_device(target: Target, index: int) -> Any:
    return target.devices()[index]


def _local_device(platform: str, device_id: int) -> Any:
    return next(device for device in jax.devices(platform) if device.id == device_id)


def _arrays_to_shapes(tree: Any) -> Any:
    """Replace arrays in a tree with `jax.ShapeDtypeStruct`s; committed arrays keep their sharding and memory kind."""

    def shape(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
        if not isinstance(leaf, jax.Array):
            return leaf
        sharding = leaf.sharding if getattr(leaf, "committed", True) else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)

    return jax.tree.map(shape, tree)


def _main(source: str, result: str) -> None:
    import cloudpickle

    # Load the configuration first, since JAX's options affect how the other values are unpickled.
    payload = io.BytesIO(Path(source).read_bytes())
    for name, value in pickle.load(payload).items():
        if getattr(jax.config, name, value) != value:
            jax.config.update(name, value)
    analyze, fn, args, call, target = pickle.load(payload)
    kwargs = call.pop("kwargs")
    try:
        outcome: Any = analyze(fn, *args, target=target, **call, **kwargs)
    except Exception as error:
        try:
            # Some exceptions can be pickled but not unpickled. Then send their text.
            pickle.loads(cloudpickle.dumps(error))
            outcome = error
        except Exception:
            outcome = RuntimeError(f"{type(error).__name__}: {error}")
    Path(result).write_bytes(cloudpickle.dumps(outcome))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
