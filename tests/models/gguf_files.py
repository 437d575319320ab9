"""GGUF files of small models, changed as llama.cpp's conversion changes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INNER = {
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    **{f"self_attn.{one}_norm": f"attn_{one}_norm" for one in "qk"},
    **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_EXPERTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def metadata(config: dict[str, Any]) -> dict[str, Any]:
    """What the conversion says of a configuration, without the architecture before it."""
    keys = {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
        "attention.sliding_window": config.get("sliding_window"),
        "expert_count": config.get("num_local_experts", config.get("num_experts")),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }
    kind = config["model_type"]
    if kind.startswith("qwen"):
        del keys["attention.sliding_window"]
    if kind == "phi3":
        keys["rope.dimension_count"] = int(config["head_dim"] * config["partial_rotary_factor"])
        keys["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        keys["rope.scaling.type"], keys["rope.scaling.factor"] = scaling["rope_type"], float(scaling["factor"])
        keys["rope.scaling.original_context_length"] = scaling.get("original_max_position_embeddings")
    return {name: value for name, value in keys.items() if value is not None}


def tensors(folder: Path, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a directory in float32, by the names of the file, as the conversion changes them."""
    kind = config["model_type"]
    found: dict[str, Any] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, values in sorted(load_file(folder / "model.safetensors").items(), key=_by_number):
        values, (module, leaf) = values.astype(np.float32), name.rsplit(".", 1)
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if ARCHITECTURES.get(kind, kind) == "llama" and (half := re.search(r"self_attn\.([qk])_proj", name)):
            heads = config["num_attention_heads" if half[1] == "q" else "num_key_value_heads"]
            parts = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = parts.swapaxes(1, 2).reshape(values.shape)
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
        if match is None:
            found[f"{_OUTER[module]}.{leaf}"] = values
        elif one := re.search(r"experts\.\d+\.(\w+)$", match[2]):
            experts.setdefault(f"blk.{match[1]}.ffn_{_EXPERTS[one[1]]}_exps.{leaf}", []).append(values)
        else:
            table = {**_INNER, **(_NORMS if kind.startswith("gemma") or kind == "olmo2" else {})}
            found[f"blk.{match[1]}.{table[match[2]]}.{leaf}"] = values
    scaling = config.get("rope_scaling") or {}
    for word in ("long", "short"):
        if factors := scaling.get(f"{word}_factor"):
            found[f"rope_factors_{word}.weight"] = np.asarray(factors, np.float32)
    if scaling.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = _llama3(config, scaling)
    return found | {name: np.stack(each) for name, each in experts.items()}


def write_gguf(
    path: Path, folder: Path, quantised: Kind = Kind.F32, change: dict[str, Any] | None = None, **replace: np.ndarray
) -> dict[str, np.ndarray]:
    """Write the file of a directory's model, and return its tensors as they can be read from it.

    Args:
        path: of the file.
        folder: a Hugging Face directory.
        quantised: the type of matrices whose rows are whole blocks of it; others are float32.
        change: keys of the architecture that are other, or None for none.
        replace: tensors that are other, by name with ``__`` for dots.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (metadata(config) | (change or {})).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if value is not None:
            add.get(type(value), writer.add_array)(f"{architecture}.{name}", value)
    writer.add_token_list(["a", "潮", "<s>"])
    for name in ("bos", "eos"):
        if config.get(f"{name}_token_id") is not None:
            getattr(writer, f"add_{name}_token_id")(config[f"{name}_token_id"])
    given = {name.replace("__", "."): values for name, values in replace.items()}
    read: dict[str, np.ndarray] = {}
    for name, values in (tensors(folder, config) | given).items():
        block, _ = gguf.GGML_QUANT_SIZES[quantised]
        if values.ndim < 2 or values.shape[-1] % block:
            writer.add_tensor(name, values)
            read[name] = values
            continue
        raw = gguf.quants.quantize(values, quantised)
        writer.add_tensor(name, raw, raw_dtype=quantised)
        read[name] = gguf.quants.dequantize(raw, quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


def _llama3(config: dict[str, Any], scaling: dict[str, Any]) -> np.ndarray:
    """What frequencies are divided by, one by one, as the conversion of Llama 3.1 writes it."""
    dim, factors = config["head_dim"], []
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    for index in range(0, dim, 2):
        length = 2 * np.pi * config["rope_theta"] ** (index / dim)
        if length < original / high:
            factors.append(1)
        elif length > original / low:
            factors.append(factor)
        else:
            smooth = (original / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.asarray(factors, np.float32)


def _by_number(item: tuple[str, Any]) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", item[0])]
