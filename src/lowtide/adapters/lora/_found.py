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
    """
    probed = [site for site in targets if site.is_floating and site.node is site.weight and len(site.weight.shape) > 1]
    shapes = {site.index: _abstract_weight(site.weight) for site in probed}
    use_sets = uses(fn, replace(model, {index: probe(shape) for index, shape in shapes.items()}), *args)
    return {site.index: _common_use(site, site_uses) for site, site_uses in zip(probed, use_sets, strict=True)}


def _abstract_weight(weight: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of a weight, with its sharding in device memory."""
    sharding = named_sharding(weight)
    device_sharding = None if sharding is None else sharding.with_memory_kind("device")
    return jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=device_sharding)


def _common_use(site: Site, site_uses: set[Use]) -> Use:
    """Return the common form of all uses of a weight."""
    groups = {use[:3] for use in site_uses}
    if len(groups) == 1:
        common = min(site_uses, key=lambda use: use.is_product)  # the adapter of a table can be multiplied, too
        return common._replace(over_rows=any(use.over_rows for use in site_uses))
    shape = list(site.weight.shape)
    if not groups:
        raise StructureError(
            f"{site.path}: the function does not multiply by this weight",
            expected="a product, a convolution, or rows of a table",
            got=f"a {site.weight.dtype}{shape} that it does not use",
            hint=f'leave it out of the targets, for instance with the pattern "!{site.path}"',
        )
    groupings = ", ".join(f"{list(shape[s : s + m])} by {list(shape[s + m :])}" for s, m, _ in sorted(groups))
    raise StructureError(
        f"{site.path}: the function uses this weight in several ways",
        expected=f"one way to divide the axes of {shape} in rows and columns",
        got=groupings,
        hint=f'leave it out of the targets, for instance with the pattern "!{site.path}"',
    )
