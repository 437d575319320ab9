"""(IA)³, a trainable vector that scales the outputs or the inputs of a weight: configuration, node, and PEFT's files.

Source: Liu et al., "Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than In-Context Learning"
(arXiv:2205.05638).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...core import ExternalNames, ModelFileError, Pattern, StructureError, Tree, linear
from .._adapted import Use
from ._node import AdapterWeight, ScaledWeight, Variant, expand_like
from ._peft import AdapterKind, PeftConfig, TensorFile, mask_scale, stack_layers, target_modules
from ._sites import Site, layer_scale, make_leaf, match_field, normalize_fields, sites, to_patterns


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
        normalize_fields(self)
        object.__setattr__(self, "feedforward", to_patterns("feedforward", self.feedforward, may_be_empty=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IA3Weight(ScaledWeight, AdapterWeight):
    """A weight whose outputs, or inputs, are scaled by a trainable vector.

    Examples:
        >>> node = IA3Weight(jnp.ones((4, 3)), jnp.full((4,), 2.0))
        >>> node.linear(jnp.ones((1, 3))).tolist()
        [[6.0, 6.0, 6.0, 6.0]]
    """

    NAME: ClassVar[str] = "(IA)³"
    PEFT_TYPE: ClassVar[str | None] = "IA3"
    REQUIRED_LEAVES: ClassVar[tuple[str, ...]] = ("weight", "lora_scale")

    weight: Any
    """The base weight, [out, in] or stacked [L, out, in]: an array, or another `lowtide.core.LinearWeight`."""
    lora_scale: Any
    """The vector, float32: [out], or [in] with `feedforward`; in a stack [L, out] or [L, in]."""
    layer_scale: Any = None
    """Frozen array [L] of a stack: 1 for layers with an adapter, 0 for others. None: all layers have an adapter."""
    feedforward: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether inputs are scaled instead of outputs (static)."""

    __array_ufunc__ = None

    @property
    def AXES(self) -> dict[str, tuple[str, ...]]:  # noqa: N802 - as in the other nodes, where it is a class attribute
        """The axes of each leaf after the stack axes."""
        return {"lora_scale": ("in",) if self.feedforward else ("out",), "layer_scale": ()}

    @property
    def summary(self) -> str:
        """The kind, and whether it scales inputs or outputs, for messages."""
        return f"{self.NAME} on {'inputs' if self.feedforward else 'outputs'}"

    def linear(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Compute l * (x Wᵀ), or (l * x) Wᵀ with `feedforward`, in the dtype of `x`; l is `lora_scale`.

        Args:
            x: activations, shape [..., in].

        Returns:
            Shape [..., out].

        Memory:
            The backward pass keeps the array that was scaled: the product, or `x`.
        """
        if self.feedforward:
            return linear(x * expand_like(self._scale_vector(), x), self.weight)
        y = linear(x, self.weight)
        return y * expand_like(self._scale_vector(), y)

    def linear_with_bias(self, x: Float[Array, "*batch in"], bias: Float[Array, " out"]) -> Float[Array, "*batch out"]:
        """Compute l * (x Wᵀ + b), where l scales b as a part of the outputs; with `feedforward`, (l * x) Wᵀ + b."""
        if self.feedforward:
            y = self.linear(x)
            return y + expand_like(bias, y)
        y = linear(x, self.weight)
        return (y + expand_like(bias, y)) * expand_like(self._scale_vector(), y)

    def inverted(self) -> IA3Weight:
        """Return the inverse adapter, with 1 / `lora_scale`: merging it undoes the merge of this adapter."""
        return dataclasses.replace(self, lora_scale=1 / self.lora_scale)

    def _scale_vector(self) -> Array:
        scale = self.lora_scale.astype(jnp.float32)
        if self.layer_scale is None:
            return scale
        is_adapted = jnp.expand_dims(self.layer_scale != 0, tuple(range(self.layer_scale.ndim, scale.ndim)))
        return jnp.where(is_adapted, scale, 1.0)

    def folded(self) -> Float[Array, "out in"]:
        """Return the matrix by which `linear` multiplies, in float32, for merging; the node must not be a stack."""
        vector = self._scale_vector()
        return self.weight.astype(jnp.float32) * (vector[None, :] if self.feedforward else vector[:, None])

    def folded_bias(self, bias: Float[Array, "*L out"]) -> Float[Array, "*L out"]:
        """Return the bias after a merge: scaled, or unchanged with `feedforward`. The node may be a stack."""
        return bias if self.feedforward else (bias.astype(jnp.float32) * self._scale_vector()).astype(bias.dtype)


class _IA3(AdapterKind):
    name = IA3Weight.NAME
    peft_type = "IA3"
    config_type = IA3Config
    schema = "IA3File"
    needs_key = False
    default_options: ClassVar[Mapping[str, Any]] = {}

    def init(
        self, model: Tree, chosen: Sequence[Site], config: Any, key: Array | None, kernels: Mapping[int, Use]
    ) -> dict[int, Any]:
        names = [name for site in chosen for name in site.names] if config.feedforward != () else []
        feedforward_names = set(match_field("feedforward", names, config.feedforward)) if names else set[str]()
        paths = {site.path for site in sites(model)}
        nodes: dict[int, Any] = {}
        for site in chosen:
            is_feedforward = bool(feedforward_names.intersection(site.names))
            if not is_feedforward and f"{site.module}/bias" in paths and not isinstance(model, ExternalNames):
                message = f"{site.path}: its output has a bias, which (IA)³ would also have to scale"
                expected = "a model with an external_name that multiplies by lowtide.core.linear(x, weight, bias)"
                hint = "name the module in feedforward, which scales its input, or leave it out"
                raise StructureError(message, expected=expected, hint=hint)
            size = site.weight.shape[-1 if is_feedforward else -2]
            ones = make_leaf(site, (size,), lambda shape: jnp.ones(shape, jnp.float32))
            nodes[site.index] = IA3Weight(site.weight, ones, layer_scale(site, config.layers), is_feedforward)
        return nodes

    def patterns(self, file: Any) -> list[str]:
        return [file.feedforward_modules] if isinstance(file.feedforward_modules, str) else []

    def tensor_suffixes(self, variants: Sequence[Variant] = (), *, table: bool = False) -> dict[str, str]:
        return {"lora_scale": "ia3_l"}

    def entry(self, node: Any, scale: float, rank: int | None = None) -> dict[str, Any]:
        return {"feedforward": node.feedforward}

    def describe(self, adapted: Mapping[str, Mapping[str, Any]], modules: Sequence[str]) -> dict[str, Any]:
        scaled = [name for name, node in adapted.items() if node["feedforward"]]
        return {"feedforward_modules": target_modules(scaled, modules) if scaled else []}

    def to_file(self, values: np.ndarray, node: Any) -> np.ndarray:
        return values.reshape((1, -1) if node.feedforward else (-1, 1))

    def read(
        self, file: TensorFile, site: Site, names: Sequence[str], mask: Sequence[bool], config: PeftConfig, shared: Any
    ) -> IA3Weight:
        adapted_names = list(itertools.compress(names, mask))
        ends = config.file.feedforward_modules or ()
        if isinstance(ends, str):
            flags = {config.matcher.matches(ends, name) for name in adapted_names}
        else:
            flags = {name.endswith(tuple(ends)) for name in adapted_names}
        if len(flags) > 1:
            hint = "name all of them in feedforward_modules, and train the adapter again"
            raise ModelFileError(f"{file.path}: only some layers of {site.path} are feedforward modules", hint=hint)
        feedforward = flags.pop()
        out, inner = site.weight.shape[-2:]
        shape = (1, inner) if feedforward else (out, 1)
        vectors = {name: file.read(config.tensors(name)["lora_scale"], shape).reshape(-1) for name in adapted_names}
        vector = stack_layers(site, names, vectors, (inner if feedforward else out,))
        return IA3Weight(site.weight, vector, mask_scale(mask), feedforward)


IA3_KIND = _IA3()
