"""Checks of adapters for the experts of an MoE: a pair of factors for each expert of each layer.

The node is `LoRAWeight` with one more leading axis for the experts: W [L, E, out, in], A [L, E, r, in], B
[L, E, out, r]. Activation rows come sorted by their expert. The grouped product multiplies them by the factors as it
does by the weights, so W + B A is not materialised for any expert. Experts that are stored as [in, out] read with B and
write with A, as other matrices of that layout do.

Other kinds are refused. DoRA would compute the norms of every expert in every product. No source defines (IA)³'s
vectors or VeRA's projections for experts. As in PEFT, there is no dropout.
"""

from __future__ import annotations

from pathlib import Path

from ...core import ConfigError, LinearWeight, ModelFileError, StructureError
from ._config import WEIGHT_INITS, AnyConfig, Config
from ._peft import PeftConfig
from ._sites import Site


def check_experts(site: Site, config: AnyConfig) -> None:
    """Check that experts support a configuration: LoRA on all layers, on a weight that is not quantised."""
    is_lora = isinstance(config, Config)
    kinds = {"DoRA": is_lora and config.dora, config.init: config.init in WEIGHT_INITS} if is_lora else {}
    kinds |= {type(config).__name__: not is_lora, "layers": config.layers is not None}
    if kind := next((name for name, is_used in kinds.items() if is_used), None):
        raise ConfigError(
            f"{site.path}: experts support only LoRA and rsLoRA, on all layers",
            expected="no DoRA, (IA)³ or VeRA, no init that takes a part of the weight, and no choice of layers",
            got=kind,
            hint=f'leave them out of the targets, for instance with the pattern "!{site.module}"',
        )
    if isinstance(site.weight, LinearWeight):
        raise StructureError(
            f"{site.path}: quantised experts do not support adapters",
            expected="an array [num_layers, num_experts, out, in]",
            got=type(site.weight).__name__,
            hint="do not quantise the experts, or leave them out of the targets",
        )


def check_expert_file(path: Path, site: Site, config: PeftConfig, num_adapted: int, num_expected: int) -> None:
    """Check that a file's adapters of experts are LoRA of all experts of all layers, on weights that take adapters."""
    kind = config.kind if config.kind != "LORA" else "DoRA" if config.dora else "LoRA"
    if config.file.init_lora_weights in WEIGHT_INITS:
        kind = str(config.file.init_lora_weights)
    if kind != "LoRA" or num_adapted != num_expected or isinstance(site.weight, LinearWeight):
        raise ModelFileError(
            f"{path}: its adapters of {site.path} cannot be used",
            expected=f"LoRA of all {num_expected} experts, on weights that are not quantised",
            got=f"{kind} of {num_adapted}, on a {type(site.weight).__name__}",
            hint="merge this adapter with the software that made it",
        )
