"""LoRA for embeddings, tables whose rows are looked up, and the tables in PEFT's files.

The node is `LoRAWeight`, as for a matrix: W [V, D], A [r, D], B [V, r]. A row is the row of W plus the row of B times
A. PEFT calls Bᵀ ``lora_embedding_A`` [r, V] and Aᵀ ``lora_embedding_B`` [D, r]. If PEFT adapts an embedding or a head,
it also writes the frozen weight to the file; here it has to equal the model's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.core
import numpy as np

from ...core import ConfigError, LinearWeight, ModelFileError, StructureError, Tree
from ._kinds import AnyConfig
from ._lora import Config
from ._peft import PREFIX, WEIGHT_INITS, PeftConfig, check_tensor, read_tensor
from ._sites import Site, external_name, is_table, tied_names

_CHUNK_SIZE = 2**22
"""Elements that are compared at once."""

_TIED_MESSAGE = "is also the model's head, and an adapter would change both"
_TIED_DETAILS = {
    "expected": "an embedding that is not tied",
    "got": "tie_word_embeddings = true",
    "hint": "adapt other weights, or train it as a whole with modules_to_save",
}


def check_table(model: Tree, site: Site, config: AnyConfig) -> None:
    """Check that an embedding has its own array, and that its adapter is LoRA that begins at random."""
    if not is_table(model, site):
        return
    is_plain = isinstance(config, Config) and not config.dora and config.init in ("peft", "gaussian")
    if not is_plain:
        kind = type(config).__name__ if not isinstance(config, Config) else "DoRA" if config.dora else config.init
        raise ConfigError(
            f"{site.path}: an embedding supports only LoRA and rsLoRA",
            expected='no DoRA, (IA)³ or VeRA, and init = "peft" or "gaussian"',
            got=kind,
            hint=f'leave it out of the targets, for instance with the pattern "!{site.module}"',
        )
    if external_name(model, site) in tied_names(model):
        raise StructureError(f"{site.path} {_TIED_MESSAGE}", **_TIED_DETAILS)


def check_tables(path: Path, model: Tree, tables: Sequence[Site], config: PeftConfig) -> None:
    """Check that embeddings have their own arrays, and that a file's adapters of them are LoRA that began at random."""
    for site in tables:
        if not config.is_lora or config.dora or config.file.init_lora_weights in WEIGHT_INITS:
            raise ModelFileError(
                f"{path}: its adapter of the embedding {site.path} cannot be used",
                expected="LoRA or rank-stabilised LoRA with random initial values",
                got="DoRA"
                if config.dora
                else config.file.init_lora_weights
                if config.is_lora
                else config.kind.peft_type,
                hint="merge this adapter with PEFT (merge_and_unload)",
            )
        if external_name(model, site) in tied_names(model):
            raise ModelFileError(f"{path}: {site.path} {_TIED_MESSAGE}", **_TIED_DETAILS)


def base_keys(modules: Collection[str], keys: Collection[str]) -> dict[str, str]:
    """Return the tensors of a file that are frozen weights of adapted modules, with the modules' names."""
    names_by_key = {f"{PREFIX}{name}.base_layer.weight": name for name in modules}
    return {key: name for key, name in names_by_key.items() if key in keys}


def stored_tables(model: Tree, tables: Mapping[str, Site], keys: Collection[str]) -> dict[str, Site | None]:
    """Return the tensors of a file that are an embedding or a head without an adapter, as PEFT stores resized ones.

    Each has its site of `tables`, or None for the second place of a tied embedding. There are none for a model without
    ``with_vocabulary``, which changes the number of rows.
    """
    if not hasattr(model, "with_vocabulary"):
        return {}
    tied_sites = {tied: None for module, tied in tied_names(model).items() if module in tables}
    by_key = {f"{PREFIX}{name}.weight": site for name, site in {**tables, **tied_sites}.items()}
    return {key: site for key, site in by_key.items() if key in keys and (site is None or len(site.weight.shape) == 2)}


def read_table(file: Any, path: Path, key: str, site: Site) -> Any:
    """Read an embedding or a head with any number of rows, in the dtype of the one that it replaces."""
    weight: Any = site.weight
    shape = (file.get_slice(key).get_shape()[0], weight.shape[1])
    values = read_tensor(file, path, key, shape)
    dtype = values.dtype if isinstance(weight, LinearWeight) else weight.dtype
    if isinstance(weight, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, dtype)
    sharding = weight.sharding if isinstance(weight, jax.Array) and shape == weight.shape else None
    return jax.device_put(values.astype(dtype), sharding)


def check_base(file: Any, path: Path, site: Site, key: str) -> None:
    """Check that a frozen weight in a file equals that of the model; some rows at a time are copied to the host.

    Quantised weights, shapes without values, and weights that other processes hold in part are not compared.
    """
    shape, weight = tuple(site.weight.shape), site.weight
    check_tensor(file, path, key, shape)
    if isinstance(weight, jax.core.Tracer) or not isinstance(weight, (jax.Array, np.ndarray)):
        return
    if isinstance(weight, jax.Array) and not weight.is_fully_addressable:
        return
    tensor = file.get_slice(key)
    # Some rows at a time, because an embedding may be large.
    num_rows = max(1, _CHUNK_SIZE // max(shape[1], 1))
    for start in range(0, shape[0], num_rows):
        stored = tensor[start : min(start + num_rows, shape[0])]
        base = np.asarray(weight[start : start + num_rows])
        # Either may have been rounded to the dtype of the other.
        if not any(np.array_equal(base.astype(dtype), stored.astype(dtype)) for dtype in (base.dtype, stored.dtype)):
            difference = np.abs(base.astype(np.float32) - stored.astype(np.float32)).max()
            raise ModelFileError(
                f"{path}: its {key} differs from {site.path} of the model",
                expected="the base that the adapter was trained on",
                got=f"a difference of {float(difference):.3g}, and maybe more, from row {start} on",
                hint="load it into that base; list an embedding that was trained or resized in modules_to_save",
            )
