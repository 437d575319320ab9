"""Random damage to every file that the loaders read: it loads with sane values, or a Lowtide error says what is wrong.

Each mutation has a seed of its own, which a failure names. ``LOWTIDE_FUZZ=4000`` sets how many there are.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import random
import shutil
import signal
import struct
import warnings
from collections import Counter

import jax
import numpy as np
import pytest

from lowtide import lora
from lowtide.core import LowtideError, read_input
from lowtide.finetune import read_documents
from lowtide.models import Decoder, DecoderConfig, init, load, load_tokenizer, save

CONFIG, INDEX, TOKENIZER = "config.json", "model.safetensors.index.json", "tokenizer.json"
SHARD, ADAPTER, WEIGHTS = "model-00001-of-00002.safetensors", "adapter_config.json", "adapter_model.safetensors"
LINES = "data.jsonl"
SHARES = {CONFIG: 6, INDEX: 2, TOKENIZER: 2, SHARD: 3, ADAPTER: 4, WEIGHTS: 2, LINES: 1}
SECONDS = 30
"""No single file may take longer, whatever it says."""

VALUES = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    2**31,
    2**63,
    10**39,
    0.5,
    -0.0,
    1e308,
    1e-320,
    "",
    "false",
    "1",
    "\0",
    "a/../b",
]
VALUES += [
    "\ud800",
    "x" * 10**5,
    "(([a-z]|[a-z._0-9])+)+[!?]",
    "../x.safetensors",
    "/dev/zero",
    "潮",
    [],
    [1],
    ["a", None],
    {},
    {"a": 1},
]
RAW = ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "[" * 500 + "]" * 500, '{"a":' * 90 + "1" + "}" * 90, "\\"]
FIELDS = ["sliding_window", "attn_logit_softcapping", "use_dora", "rope_parameters", "target_modules", "rank_pattern"]
FIELDS += ["head_dim", "quantization_config", "text", "", "\0", "é" * 300, "__class__", "metadata", "exclude_modules"]
FIELDS += ["modules_to_save", "bias", "ensure_weight_tying", "lowtide_kernels", "init_lora_weights"]
FIELDS += ["target_parameters"]


@pytest.fixture(scope="module")
def good(tmp_path_factory, tiny_model_dir):
    folder = tmp_path_factory.mktemp("good")
    sizes = {"vocab_size": 300, "hidden_size": 8, "intermediate_size": 8, "num_layers": 2}
    config = DecoderConfig(**sizes, num_heads=2, num_kv_heads=1, head_dim=4, eos_token_id=(1, 2))
    model = init(config, key=jax.random.key(0))
    save(model, folder, max_shard_bytes=16_000, tokenizer=f"{tiny_model_dir}/tokenizer.json")
    assert (folder / SHARD).exists()
    config = lora.Config(rank=2, modules_to_save=["outer/norm", "layers/mlp/up_proj"])
    lora.save(lora.add(model, config, key=jax.random.key(1)), folder)
    (folder / LINES).write_text('{"text": "the tide"}\n{"text": "goes out", "id": 3}\n')
    return folder, model


def places(value, path=()):
    """Every place in a parsed JSON file."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def mutate_json(raw, rng):
    """Another value, a name more, less, twice or spelt otherwise, one level more: somewhere in the file."""
    raw, spots = copy.deepcopy(raw), [path for path in places(raw) if path]
    tokens = {}
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        *parents, last = rng.choice(spots)
        holder = raw
        with contextlib.suppress(KeyError, IndexError, TypeError):  # an earlier change took the place away
            for key in parents:
                holder = holder[key]
            value = holder[last]
            how = rng.choice(["value", "value", "raw", "gone", "more", "renamed", "wrapped", "grown"])
            if how == "value":
                holder[last] = rng.choice(VALUES)
            elif how == "raw":
                token = f"@{len(tokens)}@"
                tokens[f'"{token}"'], holder[last] = rng.choice(RAW), token
            elif how == "gone":
                del holder[last]
            elif how == "more" and isinstance(holder, dict):
                holder[rng.choice(FIELDS)] = rng.choice(VALUES)
            elif how == "renamed" and isinstance(holder, dict):
                holder[rng.choice([last.upper(), last + "\ud800", "潮" + last])] = holder.pop(last)
            elif how == "wrapped":
                holder[last] = rng.choice([[value], {"a": value}, str(value)])
            elif how == "grown" and isinstance(value, int | float):
                holder[last] = value * rng.choice([-1, 0, 1000, 2**40, 0.5])
    text = json.dumps(raw, ensure_ascii=rng.random() < 0.8)
    for token, instead in tokens.items():
        text = text.replace(token, instead)
    if rng.random() < 0.1 and "{" in text:  # a name twice
        text = text.replace("{", '{"r": 1, "r": 2, "hidden_size": 4, ', 1)
    return text.encode("utf-8", "surrogatepass")


def mutate_bytes(data, rng):
    """Flipped, cut, repeated, or filled."""
    data = bytearray(data)
    how = rng.choice(["flip", "flip", "cut", "repeat", "fill", "empty", "insert"])
    at = rng.randrange(min(len(data), rng.choice([10, 400, len(data)])))
    if how == "flip":
        for _ in range(rng.choice([1, 3, 30])):
            data[rng.randrange(at + 1)] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del data[at:]
    elif how == "repeat":
        data[at:at] = data[at : at + rng.randrange(1, 60)]
    elif how == "fill":
        data[at : at + rng.randrange(1, 60)] = bytes([rng.choice([0, 0xFF, 0x7B])]) * rng.randrange(60)
    elif how == "insert":
        data[at:at] = rng.choice([b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"}", b"{" * 3000, b"[" * 10**5])
    else:
        data = bytearray(rng.choice([b"", b"{}", b"[]", b"null", b"\0" * 16]))
    return bytes(data)


def mutate(name, data, rng):
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    if name.endswith(".safetensors"):
        (length,) = struct.unpack("<Q", data[:8])
        header = mutate_json(json.loads(data[8 : 8 + length]), rng)
        size = len(header) if rng.random() < 0.9 else rng.choice([0, 2**63, 2**32, len(header) + 1])
        return struct.pack("<Q", size) + header + data[8 + length :]
    if name == LINES:
        return b"\n".join(mutate_json(json.loads(line), rng) for line in data.splitlines())
    return mutate_json(json.loads(data), rng)


def try_file(name, folder, model):
    """Load what a file belongs to; raise AssertionError when that succeeds with values that nobody could use."""
    if name == TOKENIZER:
        ids = load_tokenizer(folder).encode("the tide").ids
        assert all(0 <= each < 2**24 for each in ids)
    elif name == LINES:
        assert all(isinstance(text, str) and text.encode() is not None for text in read_documents(folder / name))
    elif name in (ADAPTER, WEIGHTS):
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(lora.load(model, folder))]
        assert all(np.isfinite(leaf).all() for leaf in leaves)
    else:
        loaded = load(folder)
        assert isinstance(loaded, Decoder)
        numbers = [value for value in vars(loaded.config).values() if isinstance(value, int | float)]
        assert all(math.isfinite(value) and 0 <= value < 1e16 for value in numbers)


@contextlib.contextmanager
def time_limit(seconds):
    def stop(signum, frame):
        raise AssertionError(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(seed, good, folder):
    """What became of one mutation: `loaded`, the code of an error, or a sentence that says what is wrong."""
    rng = random.Random(seed)
    source, model = good
    name = rng.choices(list(SHARES), SHARES.values())[0]
    (folder / name).unlink()
    (folder / name).write_bytes(mutate(name, (source / name).read_bytes(), rng))
    try:
        with warnings.catch_warnings(), time_limit(SECONDS):
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", UserWarning)  # dropout that is not applied
            try_file(name, folder, model)
        return name, "loaded"
    except LowtideError as error:
        text = str(error)
        if len(text) > 4000 or text.count("hint:") != 1 or text.encode("utf-8", "replace").decode() != text:
            return name, f"seed {seed}, {name}: a message that nobody reads: {text[:300]!r} ({len(text)})"
        return name, error.code
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return name, f"seed {seed}, {name}: {type(error).__module__}.{type(error).__name__}: {error}"[:400]
    finally:
        shutil.copy(source / name, folder / name)


def run(good, folder, seeds, monkeypatch):
    monkeypatch.setattr("lowtide.adapters.lora._peft.MOST_SECONDS", 0.5)
    shutil.copytree(good[0], folder, dirs_exist_ok=True)
    found = Counter(outcome(seed, good, folder) for seed in seeds)
    for (name, what), count in sorted(found.items()):
        print(f"{count:5} {name}: {what}")
    wrong = [what for _, what in found if what != "loaded" and not what.startswith("LT")]
    assert not wrong, "\n".join(wrong)


def test_damaged_files_are_refused_by_lowtide_or_load(good, tmp_path, monkeypatch):
    run(good, tmp_path / "m", range(int(os.environ.get("LOWTIDE_FUZZ", "250"))), monkeypatch)


@pytest.mark.slow
def test_many_damaged_files(good, tmp_path, monkeypatch):
    run(good, tmp_path / "m", range(10_000, 11_000), monkeypatch)


def _index(folder, name):
    raw = json.loads((folder / INDEX).read_text())
    raw["weight_map"] = dict.fromkeys(raw["weight_map"], name)
    (folder / INDEX).write_text(json.dumps(raw))


@pytest.mark.parametrize("name", ["../other/x.safetensors", "/etc/x.safetensors", "a\\b.safetensors", "", ".", "x.bin"])
def test_an_index_names_files_of_its_own_folder(good, tmp_path, name):
    shutil.copytree(good[0], tmp_path / "m")
    _index(tmp_path / "m", name)
    with pytest.raises(LowtideError, match=r"weight_map(.|\n)*has an unusable value(.|\n)*hint:"):
        load(tmp_path / "m")


@pytest.mark.parametrize("name", [CONFIG, INDEX, SHARD, TOKENIZER, ADAPTER, WEIGHTS])
@pytest.mark.parametrize("kind", ["link out", "pipe", "device", "folder", "loop"])
def test_a_file_that_is_none_or_elsewhere_is_refused(good, tmp_path, name, kind):
    folder = tmp_path / "m"
    shutil.copytree(good[0], folder)
    shutil.move(folder / name, tmp_path / "elsewhere")
    targets = {"link out": "../elsewhere", "device": "/dev/zero", "loop": name}
    if kind in targets:
        (folder / name).symlink_to(targets[kind])
    elif kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).mkdir()
    message = {"link out": "the link leads out", "device": "the link leads out", "loop": "cannot be read"}
    with pytest.raises(LowtideError, match=rf"{name}: {message.get(kind, 'not a regular file')}(.|\n)*hint:"):
        with time_limit(SECONDS):
            try_file(name, folder, good[1])


def test_a_snapshot_of_a_hugging_face_cache_is_read_and_no_other_repository(good, tmp_path):
    repository, other = tmp_path / "models--a--b", tmp_path / "models--c--d"
    snapshot = repository / "snapshots" / "0123abcd"
    for folder in (snapshot, repository / "blobs", other / "blobs"):
        folder.mkdir(parents=True)
    for number, file in enumerate(sorted(good[0].iterdir())):
        shutil.copy(file, repository / "blobs" / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    (tmp_path / "named").symlink_to(snapshot)  # the folder itself may be reached by a link
    for name in (CONFIG, TOKENIZER, ADAPTER):
        try_file(name, tmp_path / "named", good[1])
    shutil.copy(good[0] / CONFIG, other / "blobs" / "0")
    (snapshot / CONFIG).unlink()
    (snapshot / CONFIG).symlink_to("../../../models--c--d/blobs/0")
    with pytest.raises(LowtideError, match=r"config.json: the link leads out of the folder(.|\n)*hint:"):
        load(snapshot)


def test_a_link_inside_of_the_folder_is_read(good, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(good[0], folder)
    (folder / CONFIG).rename(folder / "config.original.json")
    (folder / CONFIG).symlink_to("config.original.json")
    assert load(folder).config.vocab_size == 300


def test_a_file_larger_than_its_kind_is_not_read(tmp_path):
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(LowtideError, match=r"config.json: too large(.|\n)*1.00 TiB(.|\n)*hint:"):
        read_input(tmp_path / "config.json", most_bytes=100)


def test_two_shards_with_one_tensor_are_refused(good, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(good[0], folder)
    shutil.copy(folder / SHARD, folder / SHARD.replace("00001-", "00002-"))
    with pytest.raises(LowtideError, match=r"is also in another shard(.|\n)*hint:"):
        load(folder)
