"""Compile a function for a target; the compiled program reports its memory."""

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
        """Bytes that a call moves to and from a device's memory; a loop body counts once per iteration.

        The operands and results of each kernel count once. Divided by the chip's bandwidth, this is a lower bound on
        the time of the program under any schedule.

        Raises:
            StructureError: for a loop whose number of iterations depends on data.
        """
        return Traffic(self.hlo.module).total()

    def report(self, roles: Mapping[str, Role] | None = None) -> MemoryReport:
        """Report the bytes of the program and their owners.

        Args:
            roles: role names and their arguments, as in `lowtide.memory.analyze`.

        Returns:
            The report, even for a program that does not fit.
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
    """Compile a function for present or absent hardware.

    Args:
        fn: a function, or the result of `jax.jit` (its donation and static arguments apply).
        *args: its arguments: arrays, `jax.ShapeDtypeStruct`s, or trees of them. Only shape, dtype, sharding and memory
            kind are read. In an argument that contains functions (an Equinox module), everything except arrays is
            constant, as in `equinox.filter_jit`. Arrays on a mesh are moved to a mesh of the same axes over the
            target's devices.
        target: a `Target`, a name for `lowtide.memory.target`, or None for the hardware at hand.
        donate_argnums: as in `jax.jit`; not for a function that is already jitted.
        static_argnums: as in `jax.jit`. For a jitted function with static positional arguments, repeat its value.
        **kwargs: keyword arguments of `fn`, except those with the name of a parameter above.

    Returns:
        The program. A program that does not fit a TPU is also returned: its `report()` gives the bytes, and its
        `compiled` raises the compiler's error.

    Raises:
        TargetError: when the target is unknown, or too small for an argument's mesh.
        StructureError: for an argument that a compiled function does not take, with its path.
        ConfigError: for `donate_argnums` or `static_argnums` that do not fit the arguments.
        PlacementError: when the function computes with values in host memory, with their paths.
        Exception: any other exception of the compiler, unchanged.

    Warns:
        PlacementWarning: when JAX aliases a donated argument on the host to a result on the device, or the reverse.

    Memory:
        Nothing is allocated on the target. This process keeps the compiler's memory; `analyze` can compile in a
        separate process.
    """
    program = compile_program(
        fn, args, kwargs, target=target, donate_argnums=donate_argnums, static_argnums=static_argnums
    )
    return Program(**{field.name: getattr(program, field.name) for field in dataclasses.fields(program)})
