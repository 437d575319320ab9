"""What compiles a function and reports on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..hlo import CompiledProgram, Traffic, compile_program
from ..report import MemoryReport
from ..targets import Target
from ._analyze import Role, examine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program(CompiledProgram):
    """A function compiled for a target; made by `compile`.

    Examples:
        >>> import jax.numpy as jnp
        >>> program = compile(lambda w, x: x @ w, jnp.ones((4, 4)), jnp.ones((2, 4)))
        >>> program.report(roles={"params": 0}).by_role["params"]
        64
    """

    @property
    def bytes_accessed(self) -> int:
        """Bytes that a call moves to and from a device's memory, loops counted as often as they run.

        A kernel counts with its operands and results once. Over the chip's bandwidth it is a time that no schedule of
        this program beats.

        Raises:
            StructureError: for a loop that ends when the data say so.
        """
        return Traffic(self.hlo.module).total()

    def report(self, roles: Mapping[str, Role] | None = None) -> MemoryReport:
        """Report the bytes of the program and their owners.

        Args:
            roles: what to call which arguments, as in `lowtide.memory.analyze`.

        Returns:
            The report, also of a program that does not fit.
        """
        return examine(self, roles)[0]


def compile(
    fn: Callable[..., Any],
    *args: Any,
    target: Target | str | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Program:
    """Compile a function for hardware that is here or not.

    Args:
        fn: a function, or one that `jax.jit` returned (its donation and static arguments hold).
        *args: its arguments: arrays, `jax.ShapeDtypeStruct`s, or trees of them; nothing is read from them but shape,
            dtype, sharding and memory kind. In an argument that holds functions (an Equinox module) all but arrays are
            constants, as in `equinox.filter_jit`. Arrays on a mesh are moved to a mesh of the same axes over the
            target's devices.
        target: a `Target`, a name for `lowtide.memory.target`, or None for the hardware at hand.
        donate_argnums: as in `jax.jit`; not for a function that is jitted already.
        static_argnums: as in `jax.jit`. For a jitted function with static positional arguments, repeat its own.
        **kwargs: keyword arguments of `fn` (except those named like this function's own).

    Returns:
        The program. A program that does not fit a TPU is returned, too: its `report()` says where the bytes go, its
        `compiled` raises the compiler's error.

    Raises:
        TargetError: when the target is unknown, or too small for an argument's mesh.
        StructureError: for an argument that a compiled function does not take, with its path.
        ConfigError: for `donate_argnums` or `static_argnums` that do not fit the arguments.
        PlacementError: when the function computes with a value in host memory, with the paths of those.
        Exception: what the compiler raises for any other reason, unchanged.

    Warns:
        PlacementWarning: when JAX gives a donated argument on the host to a result on the device, or the other way
            round.

    Memory:
        Nothing is allocated on the target. The compiler's own memory stays with the process; `analyze` can compile in
        a process of its own.
    """
    program = compile_program(
        fn, args, kwargs, target=target, donate_argnums=donate_argnums, static_argnums=static_argnums
    )
    return Program(**{field.name: getattr(program, field.name) for field in dataclasses.fields(program)})
