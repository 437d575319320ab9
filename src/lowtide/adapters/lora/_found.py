"""Find how a function uses the weights that get adapters, from its program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ...core import StructureError, Tree
from .._adapted import uses
from .._uses import Use, probe
from ._adapter import named_sharding
from ._sites import Site, replace


def find_uses(model: Tree, targets: Sequence[Site], fn: Callable[..., Any], args: Sequence[Any]) -> dict[int, Use]:
    """Return how a function uses each target weight, by `Site.index`.

    Targets that already have an adapter, that are not floating-point, or that have fewer than two axes are left out.

    Raises:
        StructureError: for a weight that it does not use, uses in several ways, or does more with than to multiply.
    """
    probed = [site for site in targets if site.is_floating and site.node is site.weight and len(site.weight.shape) > 1]
    shapes = {site.index: _shape(site.weight) for site in probed}
    found = uses(fn, replace(model, {index: probe(shape) for index, shape in shapes.items()}), *args)
    return {site.index: _one(site, of_site) for site, of_site in zip(probed, found, strict=True)}


def _shape(weight: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of a weight, with its sharding in device memory."""
    sharding = named_sharding(weight)
    place = None if sharding is None else sharding.with_memory_kind("device")
    return jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=place)


def _one(site: Site, found: set[Use]) -> Use:
    """Return the common form of all uses of a weight."""
    groups = {use[:3] for use in found}
    if len(groups) == 1:
        one = min(found, key=lambda use: use.is_product)  # the adapter of a table can be multiplied, too
        return one._replace(over_rows=any(use.over_rows for use in found))
    shape = list(site.weight.shape)
    if not groups:
        raise StructureError(
            f"{site.path}: the function does not multiply by this weight",
            expected="a product, a convolution, or rows of a table",
            got=f"a {site.weight.dtype}{shape} that it does not use",
            hint=f'leave it out of the targets, for instance with the pattern "!{site.path}"',
        )
    ways = ", ".join(f"{list(shape[s : s + m])} by {list(shape[s + m :])}" for s, m, _ in sorted(groups))
    raise StructureError(
        f"{site.path}: the function uses this weight in several ways",
        expected=f"one way to divide the axes of {shape} in rows and columns",
        got=ways,
        hint=f'leave it out of the targets, for instance with the pattern "!{site.path}"',
    )
