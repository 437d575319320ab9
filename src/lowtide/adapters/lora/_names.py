"""Check that PEFT's files have a place for a model's adapters."""

from __future__ import annotations

from collections.abc import Sequence

from ...core import StructureError, Tree
from ._adapter import kind_of
from ._kernel import LoRAKernel
from ._kernel_files import kernel_name
from ._parameters import check_scales, expert_parameters, is_adapted, written
from ._peft import IA3, LORA, VERA
from ._saved import SavedWeight
from ._saved_files import check_whole
from ._sites import Site, adapted_sites, layer_names
from ._vectors import IA3Weight, VeRAWeight
from ._weight import LoRAWeight
from ._whole import owners

_PEFT_TYPES = {LoRAWeight: LORA, LoRAKernel: LORA, IA3Weight: IA3, VeRAWeight: VERA}


def check_names(model: Tree) -> None:
    """Check, before training, that `save` has a name for every adapter.

    Args:
        model: a model with adapters; shapes are enough.

    Raises:
        StructureError: for an adapter that PEFT's files have no place for.

    Memory:
        None.
    """
    adapted = [site for site in adapted_sites(model) if not isinstance(site.node, SavedWeight)]
    for each in expert_parameters(model):
        if is_adapted(each):
            check_scales(each)
    names: set[str] = {name for each in written(model) for name in each.names}
    of_parameters = {site.index for each in written(model) for site in each.sites}
    for site in adapted:
        if site.index not in of_parameters:
            is_kernel = isinstance(site.node, LoRAKernel)
            names |= {kernel_name(model, site)} if is_kernel else {*layer_names(model, site)}
    if adapted:
        check_whole(model, owners(model, names, {site.index for site in adapted}), one_kind(adapted))


def one_kind(adapted: Sequence[Site]) -> str:
    """Return PEFT's name of the kind that all adapters have."""
    kinds = {(_PEFT_TYPES[type(site.node)], getattr(site.node, "lora_magnitude", None) is not None) for site in adapted}
    if len(kinds) > 1:
        raise StructureError(
            "the model has adapters of several kinds, and a directory of PEFT's has one",
            expected="LoRA, DoRA, (IA)³ or VeRA",
            got=" and ".join(sorted({kind_of(site.node) for site in adapted})),
            hint="merge some of them with lt.lora.merge",
        )
    return next(iter(kinds))[0]
