"""Whether the files of PEFT have a place for a model's adapters."""

from __future__ import annotations

from ...core import Tree
from ._kernel import LoRAKernel
from ._kernel_files import kernel_name
from ._parameters import check_scales, expert_parameters, is_adapted, written
from ._saved import SavedWeight
from ._sites import adapted_sites, layer_names


def check_names(model: Tree) -> None:
    """Raise where `save` would find no names for an adapter, before anybody trains it.

    Args:
        model: a model with adapters; shapes are enough.

    Raises:
        StructureError: for an adapter that the files of PEFT have no place for.

    Memory:
        None.
    """
    for each in expert_parameters(model):
        if is_adapted(each):
            check_scales(each)
    of_parameters = {site.index for each in written(model) for site in each.sites}
    for site in adapted_sites(model):
        if site.index in of_parameters:
            continue
        if isinstance(site.node, LoRAKernel):
            kernel_name(model, site)
        elif not isinstance(site.node, SavedWeight):
            layer_names(model, site)
