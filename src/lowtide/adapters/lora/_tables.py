"""Adapters of embeddings: tables of which rows are looked up.

The node is `LoRAWeight` as of a matrix, W [V, D], A [r, D], B [V, r]; a row is that of W and that of B times A. PEFT
calls Bᵀ ``lora_embedding_A`` [r, V] and Aᵀ ``lora_embedding_B`` [D, r]. Where it adapts an embedding or a head it also
puts the frozen weight into the file, which here has to be that of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ...core import ConfigError, ModelFileError, StructureError, Tree
from ._config import IN_THE_WEIGHT, AnyConfig, Config
from ._peft import PeftConfig
from ._sites import Site, external_name
from ._tensors import read_tensor
from ._whole import tied_names


def table_names(model: Tree) -> frozenset[str]:
    """Return the names elsewhere of the modules whose rows a model looks up; none of a model that does not say."""
    return frozenset(getattr(model, "table_names", ()))


def check_table(model: Tree, site: Site, config: AnyConfig) -> None:
    """Raise for what an embedding does not take.

    Raises:
        ConfigError: for another adapter than LoRA that begins at random.
        StructureError: for an embedding that is the head, too.
    """
    name = external_name(model, site)
    if name not in table_names(model):
        return
    is_plain = isinstance(config, Config) and not config.dora and config.init in ("peft", "gaussian")
    if not is_plain:
        said = type(config).__name__ if not isinstance(config, Config) else "DoRA" if config.dora else config.init
        raise ConfigError(
            f"{site.path}: an embedding takes LoRA and rsLoRA alone",
            expected='no DoRA, no (IA)³, no VeRA, and init = "peft" or "gaussian"',
            got=said,
            hint=f'leave it out of the targets, for instance with the pattern "!{site.module}"',
        )
    if name in tied_names(model):
        raise StructureError(f"{site.path} {_TIED}", **_OF_TIED)


_TIED = "is the model's head, too, and an adapter would change both"
_OF_TIED = {
    "expected": "an embedding of its own",
    "got": "tie_word_embeddings = true",
    "hint": "adapt other weights, or train it as a whole: modules_to_save",
}


def check_tables(path: Path, model: Tree, tables: Sequence[Site], config: PeftConfig) -> None:
    """Raise for adapters of embeddings in a file that an embedding here does not take.

    Raises:
        ModelFileError: for one that is the head, too, and for other kinds than LoRA.
    """
    for site in tables:
        if config.kind != "LORA" or config.dora or config.file.init_lora_weights in IN_THE_WEIGHT:
            raise ModelFileError(
                f"{path}: its adapter of the embedding {site.path} cannot be used",
                expected="LoRA or rank-stabilised LoRA that began at random",
                got="DoRA" if config.dora else config.kind,
                hint="merge this adapter with PEFT (merge_and_unload)",
            )
        if external_name(model, site) in tied_names(model):
            raise ModelFileError(f"{path}: {site.path} {_TIED}", **_OF_TIED)


def base_keys(modules: Collection[str], keys: Collection[str]) -> dict[str, str]:
    """Return which tensors of a file are frozen weights of adapted modules, with the modules' names."""
    named = {f"base_model.model.{name}.base_layer.weight": name for name in modules}
    return {key: name for key, name in named.items() if key in keys}


def check_base(file: Any, path: Path, site: Site, key: str) -> None:
    """Raise where a frozen weight in a file is another one than that of the model.

    A weight in few bits, or one of which there is only the shape, is not compared.

    Raises:
        ModelFileError: for another weight.

    Memory:
        Two copies of the weight in float32, on the host.
    """
    values = read_tensor(file, path, key, tuple(site.weight.shape))
    if not isinstance(site.weight, (jax.Array, np.ndarray)) or isinstance(site.weight, jax.core.Tracer):
        return
    ours = np.asarray(site.weight, np.float32)
    # Either may have been rounded to the dtype of the other.
    dtypes = np.float32, site.weight.dtype, _dtype_of(file, key)
    if not any(np.array_equal(ours.astype(dtype), values.astype(dtype)) for dtype in dtypes):
        raise ModelFileError(
            f"{path}: its {key} is another weight than {site.path} of the model",
            expected="the base that the adapter was trained on",
            got=f"differences of up to {float(np.abs(ours - values).max()):.3g}",
            hint="load it into that base; an embedding that was trained or resized belongs into modules_to_save",
        )


def _dtype_of(file: Any, key: str) -> Any:
    names = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
    return names[file.get_slice(key).get_dtype()]
