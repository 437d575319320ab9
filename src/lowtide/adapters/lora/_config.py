"""Configurations of adapters: the kind, the target modules, the rank and the scale."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...core import ConfigError, Pattern, check_choice, is_count, is_pattern

ALL_LINEAR = "all-linear"
BIASES = ("none", "lora_only", "all")
WEIGHT_INITS = ("pissa", "olora")
"""Values of `Config.init` whose first factors are a part of the weight."""
_INITS = ("peft", "gaussian", "orthogonal", *WEIGHT_INITS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A LoRA configuration; `rslora` and `dora` select variants.

    Raises:
        ConfigError: for a rank below 1, an alpha that is not positive and finite, an unknown `init`, or invalid
            patterns or layers.

    Examples:
        >>> Config(rank=8, targets="**/{q,k,v,o}_proj").scaling
        4.0
    """

    rank: int = 16
    """Inner dimension of the correction B A; its parameters are ``rank * (out + in)`` for each matrix."""
    alpha: float = 32.0
    """The correction is scaled by ``alpha / rank``, so that a change of rank needs no new learning rate."""
    targets: Pattern | Sequence[Pattern] = "**/{q,v}_proj"
    """Globs, or compiled regular expressions, on the paths of modules (any node with a leaf named ``weight``) or on the
    paths of the weights themselves; globs that start with ``!`` exclude. The model has to multiply by these weights
    through `lowtide.core.linear`. ``"all-linear"`` stands for every such matrix of a decoder's layers, without
    embeddings, head, routers and experts."""
    exclude: Pattern | Sequence[Pattern] = ()
    """Patterns of targets that get no adapter, like globs of `targets` with ``!``."""
    rank_pattern: Mapping[str, int] | Sequence[tuple[str, int]] = ()
    """Other ranks, by glob on the path of the module or the weight; the first match decides."""
    alpha_pattern: Mapping[str, float] | Sequence[tuple[str, float]] = ()
    """Other alphas, likewise."""
    layers: Sequence[int] | None = None
    """Indices of the layers that have an adapter, counted from 0; None for all. A stack stays one stack: its other
    layers have factors of zeros, which do not train and are not saved. They cost as many bytes of gradients and
    optimizer state as any other layer."""
    rslora: bool = False
    """Whether the scale is ``alpha / sqrt(rank)``, which keeps the size of updates as the rank grows."""
    dora: bool = False
    """Whether the norm of each output's weights trains separately from their direction."""
    modules_to_save: Pattern | Sequence[Pattern] = ()
    """Patterns on the paths of modules (any node that holds a leaf) that train as a whole in addition to the adapters,
    such as ``"outer/lm_head"``. As in PEFT, targets among them get no adapter."""
    bias: str = "none"
    """Which biases train as a whole: "none", "lora_only" (those of modules with a target) or "all"."""
    init: str = "peft"
    """First values. "peft" draws A uniformly in ±1/sqrt(in), "gaussian" with standard deviation 1/rank; B is zero in
    both. "orthogonal" (even ranks only) draws A and B whose product is zero. "pissa" takes the largest singular values
    of the weight and their vectors, "olora" the first columns of its QR decomposition. These two subtract their first
    product from the correction: nothing changes at first, the weight itself stays, and files have twice the rank."""

    def __post_init__(self) -> None:
        """Check the fields, and turn lists and mappings into tuples."""
        check_rank(self.rank, "rank")
        _check_alpha(self.alpha, "alpha")
        _normalize_fields(self, self.targets, self.exclude, self.layers, self.modules_to_save)
        check_choice(f"bias: {self.bias!r} is unknown", self.bias, BIASES, 'leave it out for "none"')
        if self.bias == "lora_only" and self.layers is not None:
            raise ConfigError(
                'bias = "lora_only" contradicts layers: the biases of a stack train together',
                expected='all layers, or bias = "all"',
                got=f"layers={self.layers}",
                hint="leave one of them out",
            )
        for field, check in (("rank_pattern", check_rank), ("alpha_pattern", _check_alpha)):
            pairs: Any = getattr(self, field)
            pairs = tuple(pairs.items() if isinstance(pairs, Mapping) else (tuple(pair) for pair in pairs))
            for pair in pairs:
                if len(pair) != 2 or not isinstance(pair[0], str) or not pair[0]:
                    raise ConfigError(
                        f"{field}: {pair!r} is not a glob with a value",
                        expected=f'a mapping such as {{"**/down_proj": {8 if field == "rank_pattern" else 16.0}}}',
                        got=repr(pairs),
                        hint="use globs on module paths as keys, as in targets",
                    )
                check(pair[1], f"{field}[{pair[0]!r}]")
            object.__setattr__(self, field, pairs)
        if self.dora and self.init in WEIGHT_INITS:
            raise ConfigError(
                f"init: {self.init!r} contradicts dora, which needs the norms of the weight plus B A",
                expected="another init, or dora=False",
                got="both",
                hint="leave one of them out",
            )
        if self.init == "orthogonal" and any(rank % 2 for rank in (self.rank, *dict(self.rank_pattern).values())):
            raise ConfigError(
                'init: "orthogonal" uses half of the rank for A, and half for B',
                expected="even ranks",
                got=f"rank={self.rank}",
                hint="make the rank even",
            )
        check_choice(f"init: {self.init!r} is unknown", self.init, _INITS, 'leave it out for "peft"')
        for field in ("rslora", "dora"):
            _check_flag(field, getattr(self, field))
        object.__setattr__(self, "rank", int(self.rank))
        object.__setattr__(self, "alpha", float(self.alpha))

    @property
    def scaling(self) -> float:
        """The factor of B A: ``alpha / rank``, or with `rslora` ``alpha / sqrt(rank)``."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IA3Config:
    """An (IA)³ configuration: a vector that scales the outputs, or the inputs, of each target.

    Raises:
        ConfigError: for invalid patterns or layers.

    Examples:
        >>> IA3Config(targets="**/{k,v}_proj", feedforward=()).layers is None
        True
    """

    targets: Pattern | Sequence[Pattern] = ("**/{k,v}_proj", "**/down_proj")
    """Patterns, as in `Config.targets`."""
    feedforward: Pattern | Sequence[Pattern] = "**/down_proj"
    """Targets whose inputs are scaled instead of their outputs; ``()`` for none."""
    exclude: Pattern | Sequence[Pattern] = ()
    """Patterns, as in `Config.exclude`."""
    layers: Sequence[int] | None = None
    """Indices of layers, as in `Config.layers`."""
    modules_to_save: Pattern | Sequence[Pattern] = ()
    """Patterns, as in `Config.modules_to_save`."""

    def __post_init__(self) -> None:
        """Check the fields, and turn lists into tuples."""
        _normalize_fields(self, self.targets, self.exclude, self.layers, self.modules_to_save)
        object.__setattr__(self, "feedforward", _to_patterns("feedforward", self.feedforward, may_be_empty=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class VeRAConfig:
    """A VeRA configuration: random projections that all targets share, and two trainable vectors per target.

    Raises:
        ConfigError: for a rank below 1, a `d_initial` that is zero or not finite, or invalid patterns or layers.

    Examples:
        >>> VeRAConfig(rank=64).d_initial
        0.1
    """

    rank: int = 256
    """Inner dimension of the projections."""
    d_initial: float = 0.1
    """Initial value of the vector of the inner dimension; the other vector begins as zero."""
    targets: Pattern | Sequence[Pattern] = "**/{q,v}_proj"
    """Patterns, as in `Config.targets`."""
    exclude: Pattern | Sequence[Pattern] = ()
    """Patterns, as in `Config.exclude`."""
    layers: Sequence[int] | None = None
    """Indices of layers, as in `Config.layers`."""
    modules_to_save: Pattern | Sequence[Pattern] = ()
    """Patterns, as in `Config.modules_to_save`."""

    def __post_init__(self) -> None:
        """Check the fields, and turn lists into tuples."""
        check_rank(self.rank, "rank")
        d: Any = self.d_initial
        if isinstance(d, bool) or not isinstance(d, numbers.Real) or not math.isfinite(float(d)) or float(d) == 0:
            raise ConfigError(
                f"d_initial: {self.d_initial!r} is not a valid initial value",
                expected="a finite number other than 0 (with 0 the adapter would never train)",
                got=repr(self.d_initial),
                hint="use 0.1 or less, as the authors of VeRA advise",
            )
        _normalize_fields(self, self.targets, self.exclude, self.layers, self.modules_to_save)
        object.__setattr__(self, "rank", int(self.rank))
        object.__setattr__(self, "d_initial", float(d))


AnyConfig = Config | IA3Config | VeRAConfig


def check_rank(rank: Any, name: str) -> None:
    """Check that a value is a valid rank."""
    if not is_count(rank, 1):
        raise ConfigError(
            f"{name}: {rank!r} is not a rank",
            expected="an integer of at least 1",
            got=repr(rank),
            hint="use for instance 8, 16 or 64; to train no adapter, do not add one",
        )


def _check_alpha(alpha: Any, name: str) -> None:
    if isinstance(alpha, bool) or not isinstance(alpha, numbers.Real) or not 0 < float(alpha) < math.inf:
        raise ConfigError(
            f"{name}: {alpha!r} is not a valid scale",
            expected="a finite number above 0 (with 0 the adapter would have no effect and no gradient)",
            got=repr(alpha),
            hint="use for instance twice the rank",
        )


def _check_flag(name: str, flag: Any) -> None:
    if not isinstance(flag, bool):
        raise ConfigError(
            f"{name}: {flag!r} is not a boolean", expected="True or False", got=repr(flag), hint="pass True or False"
        )


def _normalize_fields(config: Any, targets: Any, exclude: Any, layers: Any, modules_to_save: Any) -> None:
    """Check the fields that all configurations have, and make them hashable."""
    object.__setattr__(config, "modules_to_save", _to_patterns("modules_to_save", modules_to_save, may_be_empty=True))
    object.__setattr__(config, "targets", _to_patterns("targets", targets))
    object.__setattr__(config, "exclude", _to_patterns("exclude", exclude, may_be_empty=True))
    if layers is None:
        return
    indices = tuple(layers) if isinstance(layers, Sequence) and not isinstance(layers, str) else ()
    if not indices or not all(is_count(layer, 0) for layer in indices):
        raise ConfigError(
            f"layers: {layers!r} is not a list of layer indices",
            expected="at least one index, counted from 0",
            got=repr(layers),
            hint="pass for instance layers=range(8, 16), or None for all layers",
        )
    object.__setattr__(config, "layers", tuple(sorted({int(layer) for layer in indices})))


def _to_patterns(name: str, value: Any, *, may_be_empty: bool = False) -> Any:
    patterns: Any = value if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    is_allowed = may_be_empty and patterns == ()
    if not is_allowed and (not patterns or not all(is_pattern(pattern) and pattern for pattern in patterns)):
        raise ConfigError(
            f"{name}: {value!r} is not a pattern",
            expected="at least one glob or compiled regular expression",
            got=repr(value),
            hint='pass for instance "**/{q,v}_proj", or "**/*_proj" for every projection',
        )
    return patterns
