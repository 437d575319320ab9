"""What is wrong with GGUF files that are not read: by name, and before anything is allocated."""

from __future__ import annotations

import dataclasses
import os
import random
import struct
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from lowtide import models
from lowtide.core import ConfigError, LowtideError, ModelFileError
from lowtide.models.gguf import map_tensors
from lowtide.models.gguf._header import Long, read_header

from .kinds import KINDS

gguf = pytest.importorskip("gguf", reason="needs lowtide[gguf]")

from .gguf_files import write_gguf  # noqa: E402

FUZZ = int(os.environ.get("LOWTIDE_FUZZ", "200"))
SIZES = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_layers": 2}
HEADS = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("small") / "model"
    config = dataclasses.replace(KINDS["llama"], **SIZES, **HEADS, attention_bias=False, mlp_bias=False, bos_token_id=1)
    models.save(models.init(config, key=jax.random.key(0), dtype="float32"), made)
    return made


@pytest.fixture(scope="module")
def good(folder: Path) -> bytes:
    write_gguf(folder.parent / "good.gguf", folder)
    return (folder.parent / "good.gguf").read_bytes()


def _refused(file: Path, *words: str) -> None:
    with pytest.raises(ModelFileError) as error:
        models.load(file)
    for word in words:
        assert word in str(error.value), (word, str(error.value))


def _patched(content: bytes, at: int, form: str, *values: Any) -> bytes:
    changed = bytearray(content)
    struct.pack_into(form, changed, at, *values)
    return bytes(changed)


def _behind(content: bytes, text: bytes) -> int:
    """Where a text of the file ends, whose length stands before it."""
    return content.index(struct.pack("<Q", len(text)) + text) + 8 + len(text)


def _damages(content: bytes) -> dict[str, tuple[bytes, tuple[str, ...]]]:
    key = _behind(content, b"llama.block_count")
    tensor = _behind(content, b"token_embd.weight")
    norm = content.index(b"blk.0.attn_norm.weight")
    tokens = _behind(content, b"tokenizer.ggml.tokens")
    return {
        "empty": (b"", ("at least 24 bytes",)),
        "magic": (b"GGML" + content[4:], ("not a GGUF file", "b'GGML'")),
        "big": (_patched(content, 4, ">I", 3), ("big-endian",)),
        "version": (_patched(content, 4, "<I", 1), ("version 1",)),
        "many tensors": (_patched(content, 8, "<Q", 2**60), ("counts that fit",)),
        "many keys": (_patched(content, 16, "<Q", 2**63), ("counts that fit",)),
        "long key": (_patched(content, 24, "<Q", 2**63), ("a key of at most",)),
        "value": (_patched(content, key, "<I", 99), ("99, of 'llama.block_count'",)),
        "long array": (_patched(content, tokens + 8, "<Q", 2**61), ("strings, inside the file",)),
        "nested": (_patched(content, tokens + 4, "<I", 9), ("an array of numbers or strings",)),
        "long token": (_patched(content, tokens + 16, "<Q", 2**62), ("more bytes at byte",)),
        "axes": (_patched(content, tensor, "<I", 2**31), ("1 to 4 axes",)),
        "zero": (_patched(content, tensor + 4, "<Q", 0), ("rows of a multiple of",)),
        "wide": (_patched(content, tensor + 4, "<QQ", 2**40, 2**40), ("rows of a multiple of",)),
        "other shape": (_patched(content, tensor + 4, "<QQ", 4, 16), ("the shape of",)),
        "type": (_patched(content, tensor + 20, "<I", 1000), ("is not supported", "type 1000")),
        "Q8_K": (_patched(content, tensor + 20, "<I", 15), ("is not supported", "Q8_K", "Q8_0")),
        "blocks": (_patched(content, tensor + 20, "<I", 8), ("a multiple of 32 in Q8_0",)),
        "offset": (_patched(content, tensor + 24, "<Q", 2**62), ("inside the file",)),
        "odd offset": (_patched(content, tensor + 24, "<Q", 4), ("multiples of 32",)),
        "beside": (_patched(content, tensor + 24, "<Q", 0), ("inside another",)),
        "twice": (content[:norm] + b"blk.0.ffn__norm.weight" + content[norm + 22 :], ("lacks", "attn_norm")),
        "truncated": (content[:-600], ("inside the file",)),
        "no header": (content[:90], ("not a complete GGUF file",)),
        "layers": (_patched(content, key + 4, "<I", 3), ("lacks", "blk.2.")),
        "many layers": (_patched(content, key + 4, "<I", 9999), ("lacks", "9999 layers")),
        "fewer layers": (_patched(content, key + 4, "<I", 1), ("does not describe", "blk.1.")),
    }


DAMAGES = [
    *("empty", "magic", "big", "version", "many tensors", "many keys", "long key", "value", "long array", "nested"),
    *("long token", "axes", "zero", "wide", "other shape", "type", "Q8_K", "blocks", "offset", "odd offset", "beside"),
    *("twice", "truncated", "no header", "layers", "many layers", "fewer layers"),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(damage: str, good: bytes, tmp_path: Path) -> None:
    content, words = _damages(good)[damage]
    (tmp_path / "x.gguf").write_bytes(content)
    _refused(tmp_path / "x.gguf", "x.gguf", *words)
    assert set(_damages(good)) == set(DAMAGES)


def test_names_that_stand_twice(good: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(good.replace(b"llama.attention.key_length", b"llama.attention.head_count"))
    _refused(file, "unique keys", "'llama.attention.head_count' twice")
    file.write_bytes(good.replace(b"blk.1.attn_norm.weight", b"blk.0.attn_norm.weight"))
    _refused(file, "unique tensors", "blk.0.attn_norm.weight")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope.scaling.type": "longrope"}, ("rope.scaling.type", "longrope")),
        ({"rope.scaling.type": "quadratic"}, ("rope.scaling.type", "quadratic")),
        ({"rope.dimension_sections": [1, 2]}, ("rope.dimension_sections",)),
        ({"rope.dimension_count": 2}, ("partial_rotary_factor",)),
        ({"rope.scaling.yarn_log_multiplier": 0.1}, ("yarn_log_multiplier",)),
        ({"attention.value_length": 8}, ("attention.value_length", "4, the length of keys")),
        ({"attention.head_count": [2, 1]}, ("attention.head_count", "the same for all layers")),
        ({"attention.head_count": None}, ("attention.head_count",)),
        ({"attention.causal": False}, ("attention.causal", "True, or no such key")),
        ({"attention.scale": 0.3}, ("attention.scale",)),
        ({"expert_weights_norm": False}, ("expert_weights_norm",)),
        ({"expert_gating_func": 2}, ("expert_gating_func",)),
        ({"rope.scaling.yarn_ext_factor": 0.0}, ("yarn_ext_factor",)),
        (
            {"attention.key_length": None, "attention.head_count": 16, "rope.dimension_count": 4},
            ("attention.head_count", "at most 8", "16"),
        ),
        ({"attention.key_length": 5, "attention.value_length": 5}, ("rope.dimension_count", "even")),
        ({"logit_scale": 0.5}, ("logit_scale",)),
        ({"feed_forward_length": 2**31}, ("intermediate_size",)),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, ("layer_norm_rms_epsilon",)),
        ({"rope.freq_base": float("inf")}, ("rope.freq_base",)),
        ({"rope.freq_base": 0.0}, ("rope.freq_base", "of at least 1")),
        ({"expert_count": 60_000, "expert_used_count": 2}, ("lacks", "_exps")),
    ],
)
def test_metadata_that_is_not_computed_is_named(
    change: dict[str, Any], words: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    table = {"rope_freqs__weight": np.ones(2, np.float32)} if "rope.freq_base" in change else {}
    write_gguf(tmp_path / "x.gguf", folder, change=change, **table)
    _refused(tmp_path / "x.gguf", "x.gguf", *words)


def test_values_that_change_nothing_are_read(folder: Path, tmp_path: Path) -> None:
    scales = ("expert_weights_scale", "embedding_scale", "residual_scale", "logit_scale")
    for change in (
        {"attention.causal": True, "expert_weights_norm": True, "expert_gating_func": 1, **dict.fromkeys(scales, 1.0)},
        {"attention.scale": 0.0, "expert_gating_func": 0, **dict.fromkeys(scales, 0.0)},
    ):
        write_gguf(tmp_path / "x.gguf", folder, change=change)
        assert models.load_config(tmp_path / "x.gguf") == models.load_config(folder)


def test_experts_are_counted_before_they_are_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.gguf"
    write_gguf(file, folder, blk__0__ffn_up_exps__weight=np.zeros((4, 8, 8), np.float32))
    never = (pytest.fail("a name was made") for _ in range(1))
    for layers, experts, words in ((2, 60_000, "the shape of .*ffn_up_exps"), (2**17, 4, "131072 layers")):
        with pytest.raises(ModelFileError, match=f"(?s){words}"):
            map_tensors(file, layers=layers, experts=experts, heads={}, names=never)
    monkeypatch.setattr("lowtide.models.gguf._tensors._MOST_EXPERTS", 7)
    with pytest.raises(ModelFileError, match=r"(?s)too many experts.*2 layers of 4"):
        map_tensors(file, layers=2, experts=4, heads={}, names=never)


def _with_values(file: Path, keys: int, size: int, of: bytes) -> None:
    """Write a file of keys alone, with values of zeros; the disk holds next to nothing of them."""
    with file.open("wb") as out:
        out.write(struct.pack("<4sIQQ", b"GGUF", 3, 0, keys))
        for key in range(keys):
            out.write(struct.pack("<Q4s", 4, b"%04d" % key) + of + struct.pack("<Q", size))
            out.seek(size, os.SEEK_CUR)
        out.truncate()


def test_what_is_kept_has_a_limit_in_all(tmp_path: Path) -> None:
    """Arrays and texts that are short, but many: the rest of them is counted and not kept."""
    file = tmp_path / "x.gguf"
    for keys, size, of, kept in (
        (66, 2**14, struct.pack("<II", 9, 7), 64),
        (66, 2**14, struct.pack("<II", 9, 0), 64),
        (258, 2**16, struct.pack("<I", 8), 256),
    ):
        _with_values(file, keys, size, of)
        values = list(read_header(file).fields.values())
        assert [isinstance(each, Long) for each in values] == [False] * kept + [True] * (keys - kept)
        assert values[-1] == Long(size) and len(values[0]) == size
    with file.open("wb") as out:
        out.write(struct.pack("<4sIQQ", b"GGUF", 3, 0, 300))
        for key in range(300):
            out.write(struct.pack("<Q4s", 2**16, b"%04d" % key))
            out.seek(2**16 - 4, os.SEEK_CUR)
            out.write(struct.pack("<IB", 0, 0))
    _refused(file, "names of at most 16.00 MiB in total")


def test_truth_values_of_an_array_are_0_or_1(folder: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", folder, change={"odd": [True, False, True]})
    content = (tmp_path / "x.gguf").read_bytes()
    at = _behind(content, b"llama.odd") + 16
    (tmp_path / "x.gguf").write_bytes(_patched(content, at, "BBB", 1, 2, 0))
    _refused(tmp_path / "x.gguf", "booleans, 0 or 1")


def test_what_is_no_whole_model_is_named(good: bytes, tmp_path: Path) -> None:
    for words in (("adapter",), ("mamba", "general.architecture")):
        writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
        if words == ("adapter",):
            writer.add_type("adapter")
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            write()
        writer.close()
        _refused(tmp_path / "x.gguf", *words)
    (tmp_path / "y.gguf").write_bytes(good)
    with pytest.raises(ModelFileError, match="several GGUF files"):
        models.load(tmp_path)
    with pytest.raises(ModelFileError, match=r"gone\.gguf: no such file"):
        models.load(tmp_path / "gone.gguf")
    link = tmp_path / "folder" / "z.gguf"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "y.gguf")
    with pytest.raises(ModelFileError, match="leads out of the folder"):
        models.load(link.parent)


def test_without_the_library_the_extra_is_named(good: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.gguf").write_bytes(good)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"lowtide\[gguf\]"):
        models.load_config(tmp_path)


def test_random_damage_is_an_error_or_a_model(good: bytes, tmp_path: Path) -> None:
    """The header is a third of the file; each mutation has a seed of its own."""
    header = good.index(b"output_norm.weight") + 200
    numbers = [0, 1, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1, 255, 12, 9]
    file, refused = tmp_path / "x.gguf", 0
    for seed in range(FUZZ):
        rng, content = random.Random(seed), bytearray(good)
        for _ in range(rng.choice((1, 1, 1, 4))):
            at = rng.randrange(header)
            match rng.randrange(4):
                case 0:
                    content[at] ^= 1 << rng.randrange(8)
                case 1:
                    content[at : at + 8] = struct.pack("<Q", rng.choice(numbers))
                case 2:
                    del content[at : at + rng.choice((1, 8, 100))]
                case _:
                    content[at:at] = rng.randbytes(rng.choice((1, 8)))
        file.write_bytes(content)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                shapes = models.load_shapes(file)
            assert shapes.config.num_layers == 2, seed
            assert sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) < 10_000, seed
        except LowtideError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    assert refused > FUZZ // 2
