"""`Job`: a function, its arguments and their roles as one value, ready for analysis.

A role is a category of memory in a report, such as ``params``.
The command line, the pytest plugin and `extrapolate` call a user's function that returns a job in one of several forms.
This module converts the returned value to a `Job`. A value of another form raises an error that names the function.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from ..core import ConfigError
from ..report import MemoryReport
from ..targets import Target, resolve_target
from ._analysis import analyze
from ._roles import Role

_FORMS = (
    "(fn, args), (fn, args, roles), or a dict with the keys fn, args, kwargs, roles, donate_argnums, static_argnums"
)
_HINT = 'return (step, (params, batch), {"params": 0, "batch": 1}), with jax.ShapeDtypeStructs for the arrays'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A function and its arguments, ready to be analysed for any target.

    Examples:
        >>> import jax.numpy as jnp
        >>> job = Job.of((lambda w, x: x @ w, (jnp.ones((4, 4)), jnp.ones((2, 4))), {"params": 0}))
        >>> job.analyze("cpu").by_role["params"]
        64
    """

    fn: Callable[..., Any]
    """The function, jitted or not."""
    args: tuple[Any, ...] = ()
    """Positional arguments of the function: arrays, or `jax.ShapeDtypeStruct`s in their place."""
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Keyword arguments of the function."""
    roles: Mapping[str, Role] | None = None
    """Role names and their arguments, as in `analyze`."""
    donate_argnums: int | Sequence[int] | None = None
    """As in `analyze`."""
    static_argnums: int | Sequence[int] | None = None
    """As in `analyze`."""

    @classmethod
    def of(cls, value: Any, what: str = "the job") -> Job:
        """Convert the return value of a user's function to a job.

        Args:
            value: a `Job`; a tuple or list ``(fn, args)`` or ``(fn, args, roles)``; or a mapping whose keys are fields
                of this class.
            what: name of the value in an error.

        Returns:
            The job.

        Raises:
            ConfigError: for a value of another form; for a field of a wrong type; or when `kwargs` has a key
                ``target``, ``roles``, ``donate_argnums`` or ``static_argnums``.
        """
        if isinstance(value, Job):
            return value
        if isinstance(value, Mapping):
            fields: dict[str, Any] = dict(cast("Mapping[str, Any]", value))
            field_names = [field.name for field in dataclasses.fields(cls)]
            for key in fields:
                if key not in field_names:
                    matches = difflib.get_close_matches(str(key), field_names, n=1)
                    raise ConfigError(
                        f"{what} has the unknown key {key!r}",
                        expected=", ".join(field_names),
                        hint=f"did you mean {matches[0]!r}?" if matches else _HINT,
                    )
            if "fn" not in fields:
                raise ConfigError(f"{what} has no key 'fn'", got=", ".join(fields) or "an empty dict", hint=_HINT)
        elif isinstance(value, tuple | list) and len(cast("Sequence[Any]", value)) in (2, 3):
            names: tuple[str, ...] = ("fn", "args", "roles")
            fields = dict(zip(names, cast("Sequence[Any]", value), strict=False))
        else:
            raise ConfigError(f"{what} is not a job", expected=_FORMS, got=_describe(value), hint=_HINT)
        return cls(**_check_fields(fields, what))

    @classmethod
    def make(
        cls,
        maker: Callable[..., Any],
        *values: Any,
        target: Target | str | None = None,
        what: str | None = None,
        **settings: Any,
    ) -> Job:
        """Call a user's function, and convert its return value to a job.

        Args:
            maker: a function that returns a value that `of` accepts. If it has a parameter ``target``, it receives the
                `Target`, to build meshes on its devices.
            *values: positional arguments of `maker`.
            target: the target for the function's parameter ``target``. The job does not store it, so pass it again to
                `analyze`.
            what: the name of `maker` in an error; None for its ``__name__``.
            **settings: keyword arguments of `maker`.

        Returns:
            The job.

        Raises:
            ConfigError: when `maker` is not callable, or returns a value that `of` refuses.
            TargetError: for an unknown target, if the function takes a target.
            Exception: any exception of the function, unchanged.
        """
        what = what or getattr(maker, "__name__", "the function")
        if not callable(maker):
            raise ConfigError(f"{what} is not a function", got=_describe(maker), hint=f"write one returning {_FORMS}")
        try:
            takes_target = "target" in inspect.signature(maker).parameters
        except (TypeError, ValueError):  # a builtin without a signature
            takes_target = False
        if takes_target:
            settings["target"] = resolve_target(target)
        return cls.of(maker(*values, **settings), f"the return value of {what}")

    def analyze(self, target: Target | str | None = None) -> MemoryReport:
        """Compile the function for a target and report its bytes; nothing is allocated on the target.

        Args:
            target: as in `lowtide.memory.analyze`.

        Returns:
            The report.

        Raises:
            Exception: any exception of `lowtide.memory.analyze`.
        """
        options: dict[str, Any] = {"donate_argnums": self.donate_argnums, "static_argnums": self.static_argnums}
        return analyze(self.fn, *self.args, target=target, roles=self.roles, **options, **self.kwargs)


def _check_fields(fields: dict[str, Any], description: str) -> dict[str, Any]:
    checks = (
        ("fn", callable(fields["fn"]), "a function"),
        ("args", isinstance(fields.get("args", ()), tuple | list), "a tuple of the function's positional arguments"),
        ("roles", isinstance(fields.get("roles") or {}, Mapping), 'a dict such as {"params": 0, "batch": 1}, or None'),
        ("kwargs", isinstance(fields.get("kwargs", {}), Mapping), "a dict of the function's keyword arguments"),
    )
    for name, is_valid, expected in checks:
        if not is_valid:
            problem = f"{name} of {description} must be {expected}, not {_describe(fields[name])}"
            raise ConfigError(problem, hint=_HINT)
    reserved = {"target", "roles", "donate_argnums", "static_argnums"} & set(fields.get("kwargs", {}))
    if reserved:
        names = ", ".join(sorted(reserved))
        problem = f"kwargs of {description} contains parameter names of lowtide.memory.analyze: {names}"
        raise ConfigError(problem, hint="wrap the function, and give the argument another name")
    return {**fields, "args": tuple(fields.get("args", ()))}


def _describe(value: Any) -> str:
    if isinstance(value, tuple | list):
        kinds = ", ".join(type(item).__name__ for item in cast("Sequence[Any]", value)[:5])
        return f"a {type(value).__name__} of {len(cast('Sequence[Any]', value))}: {kinds}"
    return "None" if value is None else type(value).__name__
