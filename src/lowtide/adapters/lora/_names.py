"""Check that PEFT's files have a place for a model's adapters."""

from __future__ import annotations

from collections.abc import Sequence

from ...core import StructureError, Tree
from ._adapter import kind_of
from ._kernel import LoRAKernel
from ._kernel_files import kernel_name
from ._modules_to_save import adapter_modules
from ._parameters import check_scales, expert_parameters, is_adapted, written_parameters
from ._peft import IA3, LORA, VERA
from ._saved import SavedWeight
from ._saved_files import select_saved
from ._sites import Site, adapted_sites, layer_names
from ._vectors import IA3Weight, VeRAWeight
from ._weight import LoRAWeight

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
    for parameter in expert_parameters(model):
        if is_adapted(parameter):
            check_scales(parameter)
    names: set[str] = {name for parameter in written_parameters(model) for name in parameter.names}
    parameter_indices = {site.index for parameter in written_parameters(model) for site in parameter.sites}
    for site in adapted:
        if site.index not in parameter_indices:
            is_kernel = isinstance(site.node, LoRAKernel)
            names |= {kernel_name(model, site)} if is_kernel else {*layer_names(model, site)}
    if adapted:
        select_saved(model, adapter_modules(model, names, {site.index for site in adapted}), common_peft_type(adapted))


def common_peft_type(adapted: Sequence[Site]) -> str:
    """Return PEFT's name of the kind that all adapters have."""
    kinds = {(_PEFT_TYPES[type(site.node)], getattr(site.node, "lora_magnitude", None) is not None) for site in adapted}
    if len(kinds) > 1:
        raise StructureError(
            "the model has adapters of several kinds, but a PEFT directory stores one kind",
            expected="LoRA, DoRA, (IA)³ or VeRA",
            got=" and ".join(sorted({kind_of(site.node) for site in adapted})),
            hint="merge some of them with lt.lora.merge",
        )
    return next(iter(kinds))[0]
