"""Flags for runs on several devices, and the start of `jax.distributed` for runs with several processes."""

from __future__ import annotations

import argparse
import math
from typing import Any

from ..core import ConfigError, check_integer

_HEARTBEAT_SECONDS = 30
"""JAX ends the run if a process sends no heartbeat for this many seconds. JAX's default of 100 wastes more time."""


def register(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several devices", "Processes find each other under Slurm, Open MPI and on Cloud TPU; otherwise use the flags."
    )
    group.add_argument(
        "--distributed",
        nargs="?",
        const="",
        metavar="MESH",
        help="use all devices of all processes: fsdp over all of them, or a mesh such as data=2,fsdp=4,tensor=2",
    )
    group.add_argument(
        "--pipeline",
        type=int,
        metavar="N",
        help="split the layers into N pipeline stages on separate devices; microbatches: --num-microbatches (default: "
        "as many as the rows of a batch allow); fsdp uses the remaining devices",
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of the first process")
    group.add_argument("--num-processes", type=int, metavar="N", help="number of processes")
    group.add_argument("--process-id", type=int, metavar="I", help="index of this process, from 0")


def start(args: argparse.Namespace) -> Any:
    """Connect the processes if --distributed is given, and return the `ShardingRules` of the run.

    If neither --distributed nor --pipeline is given, return None: the run then uses one device.
    """
    flags = {"--coordinator": args.coordinator, "--num-processes": args.num_processes, "--process-id": args.process_id}
    missing = [name for name, value in flags.items() if value is None]
    if args.pipeline is not None:
        check_integer("--pipeline", args.pipeline, hint="use, for instance, --pipeline 4")
    if args.distributed is None:
        if len(missing) < len(flags):
            raise ConfigError("the flags of several processes need --distributed", hint="add --distributed")
        return None if args.pipeline is None else _rules({"stage": args.pipeline}, "")
    sizes = _sizes(args.distributed) | ({} if args.pipeline is None else {"stage": args.pipeline})
    if missing and len(missing) < len(flags):
        raise ConfigError(f"{', '.join(missing)} is missing", hint="give all three, or none of them under a scheduler")
    import jax

    try:
        jax.distributed.initialize(
            args.coordinator,
            args.num_processes,
            args.process_id,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_HEARTBEAT_SECONDS,
        )
    except ValueError as error:
        if not missing:
            raise ConfigError(f"the processes cannot connect: {error}", hint=f"check {', '.join(flags)}") from error
        # JAX found no scheduler: continue as one process with all devices of this machine. The printed plan shows this.
    return _rules(sizes, args.distributed)


def _rules(sizes: dict[str, Any], distributed: str) -> Any:
    import jax

    from ..train import ShardingRules, make_mesh

    _check_mesh(sizes, distributed, jax.device_count())
    return ShardingRules(mesh=make_mesh(**sizes))


def _check_mesh(sizes: dict[str, Any], distributed: str, count: int) -> None:
    """Raise ConfigError, naming the flags, when the mesh does not match the number of devices."""
    # A number of stages fits when its product with the given axes equals the number of devices. If an axis takes the
    # remaining devices (fsdp by default, or a size of -1), the product only has to divide it.
    other_axes = {name: size for name, size in sizes.items() if name != "stage"}
    known_size = math.prod(size for size in other_axes.values() if size != -1)
    has_free_axis = "fsdp" not in other_axes or -1 in other_axes.values()
    valid_stages: list[int] = []
    if known_size > 0 and [*other_axes.values()].count(-1) < 2:
        valid_products = [n for n in range(1, count + 1) if count % n == 0] if has_free_axis else [count]
        valid_stages = [product // known_size for product in valid_products if product % known_size == 0]
    stages = sizes.get("stage", 1)
    if stages in valid_stages:
        return
    flag = f"--distributed {distributed}"
    if valid_stages and "stage" in sizes:
        suffix = f" with {flag}" if distributed else ""
        verb = "divides" if has_free_axis else "is"
        raise ConfigError(
            f"--pipeline {stages}: {count} devices cannot be split into {stages} stages{suffix}",
            expected=f"{', '.join(map(str, valid_stages))}: the product with the axes of --distributed {verb} {count}",
            hint=f"use --pipeline {min(valid_stages, key=lambda n: (abs(n - stages), -n))}",
        )
    mesh = " × ".join(f"{name} {size}" for name, size in sizes.items())
    raise ConfigError(
        f"{flag}: the mesh does not match {count} devices: {mesh}",
        expected=f"sizes whose product is {count}; at most one size is -1 and takes the remaining devices",
        hint="use --distributed without a mesh, which shards along fsdp over all devices",
    )


def describe(sharding: Any) -> dict[str, str]:
    """Return the row ``devices`` of the printed plan: devices, processes and mesh axes; empty without a sharding."""
    if sharding is None:
        return {}
    import jax

    count = jax.process_count()
    shape = ", ".join(f"{name} {size}" for name, size in sharding.mesh.shape.items())
    return {"devices": f"{sharding.mesh.size} in {count} process{'es' if count > 1 else ''}: {shape}"}


def _sizes(text: str) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        is_known = name in ("data", "fsdp", "context", "tensor") and name not in sizes
        if not is_known or not (size == "-1" or (size.isascii() and size.isdigit())):
            raise ConfigError(
                f"--distributed: {part!r} is not a mesh axis; the axes are data, fsdp, context and tensor, each once",
                hint="use, for instance, --distributed fsdp=4,tensor=2; -1 stands for all other devices",
            )
        sizes[name] = int(size)
    return sizes
