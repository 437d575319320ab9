"""Numbers and codes: against the closed definition of each format, and against bitsandbytes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide.core import ConfigError, leaf_bytes
from lowtide.memory import compile
from lowtide.optim import PackedArray
from lowtide.optim._formats import FORMATS
from tests.peers import Peer


def dynamic_map(is_positive: bool) -> np.ndarray:
    """The map of Dettmers et al.: level i of 7 in even steps between a tenth of its power of ten and the whole."""
    numbers = [0.0, 1.0]
    for level in range(7):
        count = 2**level * (2 if is_positive else 1)
        edges = np.linspace(0.1, 1, count + 1)
        middles = 10.0 ** (level - 6) * (edges[:-1] + edges[1:]) / 2
        numbers += [*middles, *([] if is_positive else -middles)]
    return np.sort(np.array(numbers))


TABLES = {
    ("8bit", False): dynamic_map(False),
    ("8bit", True): dynamic_map(True),
    ("companded", False): (lambda y: y / (2 - np.abs(y)))(np.arange(-127, 128) / 127),
    ("companded", True): (np.arange(256) / 255) ** 2,
    ("4bit", False): (lambda y: y / (3 - 2 * np.abs(y)))(np.arange(-7, 8) / 7),
    ("4bit", True): (np.arange(1, 17) / 16) ** 2,
}


def over_decades(seed: int, shape: tuple[int, ...], is_positive: bool) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.choice([-1, 1], shape) * 10 ** rng.uniform(-9, 0, shape)
    return (np.abs(x) if is_positive else x).astype(np.float32)


@pytest.mark.parametrize(("name", "is_positive"), TABLES)
def test_every_code_has_the_number_of_the_definition_and_back(name: str, is_positive: bool) -> None:
    table, form = TABLES[name, is_positive], FORMATS[name]
    codes = (jnp.arange(len(table)) - (len(table) // 2 if name == "4bit" else 0)).astype(form.codes)
    got = np.asarray(form.decode(codes, is_positive))
    np.testing.assert_allclose(got, table, rtol=5e-7, atol=1e-12)
    assert np.array_equal(np.asarray(form.encode(jnp.asarray(got), is_positive)), np.asarray(codes))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("name", "is_positive"), [key for key in TABLES if key[0] == "8bit"])
def test_a_number_gets_the_nearest_code(name: str, is_positive: bool) -> None:
    table, form = TABLES[name, is_positive], FORMATS[name]
    x = over_decades(0, (50_000,), is_positive)
    x = x[x >= table[1]] if is_positive and table[0] == 0 else x  # below none is 0: see the next test
    got = table[np.asarray(form.encode(jnp.asarray(x), is_positive)).astype(int)]
    nearest = table[np.abs(x[:, None] - table).argmin(axis=1)]
    # At a tie in float32 either neighbour is the nearest.
    np.testing.assert_allclose(np.abs(x - got), np.abs(x - nearest), rtol=1e-4, atol=1e-9)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", FORMATS)
def test_no_second_moment_becomes_0(name: str) -> None:
    x = jnp.asarray(10.0 ** np.random.default_rng(8).uniform(-30, 0, (8, 256)), jnp.float32).at[:, 3].set(0)
    got = np.asarray(PackedArray.of(x, name, is_positive=True).dense())
    assert (got[np.asarray(x) > 0] > 0).all()
    assert name == "4bit" or not got[:, 3].any()


@pytest.mark.parametrize(("name", "is_positive"), [("8bit", False), ("8bit", True)])
def test_the_dynamic_map_is_that_of_bitsandbytes(name: str, is_positive: bool, peer: Peer) -> None:
    def compute() -> dict[str, np.ndarray]:
        from bitsandbytes import functional

        return {"table": functional.create_dynamic_map(signed=not is_positive).numpy()}

    table = peer.answer("map", compute, {"signed": not is_positive})["table"]
    form = FORMATS[name]
    got = np.asarray(form.decode(jnp.arange(len(table), dtype=jnp.uint8), is_positive))
    np.testing.assert_allclose(got, table, rtol=2e-6, atol=1e-12)
    x = over_decades(1, (64, 256), is_positive)
    x /= np.abs(x).max(axis=1, keepdims=True)
    # Its kernel for CPUs with AVX-512 is not exact; the nearest number of its table is the exact answer.
    theirs = np.searchsorted((table[1:] + table[:-1]) / 2, x)
    theirs = np.maximum(theirs, x > 0) if is_positive else theirs  # no number becomes 0 here
    ours = np.asarray(form.encode(jnp.asarray(x), is_positive)).astype(int)
    assert (ours != theirs).mean() < 1e-3  # ties in float32
    assert np.abs(ours - theirs).max() <= 1


LARGEST_ERROR = {"8bit": 0.00704, "companded": 0.0079, "fp8": 0.036, "4bit": 0.1876}
"""Relative to the largest number of a block: half of the widest distance between two codes, or the smallest code."""
LARGEST_POSITIVE = {"8bit": 0.00353, "companded": 0.00393, "fp8": 0.07, "4bit": 0.0617}


@pytest.mark.slow_after(5)
@pytest.mark.parametrize(
    ("name", "is_positive", "shape"),
    [
        *((name, is_positive, (3, 256 + 15)) for name in FORMATS for is_positive in (False, True)),
        *(("8bit", False, shape) for shape in ((300,), (2, 3, 256), (5, 1024))),
        ("4bit", False, (5, 1024)),
    ],
)
def test_what_is_stored_is_near_in_every_block(name: str, is_positive: bool, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    x = np.abs(x) if is_positive else x
    packed = PackedArray.of(jnp.asarray(x), name, is_positive=is_positive)
    block = FORMATS[name].block
    assert packed.shape == shape
    assert packed.scales.shape == (*shape[:-1], -(-shape[-1] // block))
    largest = np.repeat(np.abs(np.asarray(packed.scales)), block, axis=-1)[..., : shape[-1]]
    bound = (LARGEST_POSITIVE if is_positive else LARGEST_ERROR)[name]
    assert (np.abs(np.asarray(packed.dense()) - x) <= bound * largest).all()


@pytest.mark.slow
@pytest.mark.parametrize("is_positive", [False, True])
@pytest.mark.parametrize("name", ["8bit", "companded"])
def test_arrays_come_back_as_flashoptim_asks_of_them(name: str, is_positive: bool) -> None:
    """Shapes, scales and bounds are those of FlashOptim's test of a round trip; squared errors are from its paper."""
    kinds = {"random": (1.0, 1.0), "small": (0.01, 0.01), "mixed": (0.1, 2.0)}
    for shape in ((1, 5), (1, 12), (1, 16), (1, 17), (1, 32), (17, 32), (1024, 16)):
        for kind, (first, last) in kinds.items():
            rng = np.random.default_rng([*shape, len(kind)])
            x = rng.random(shape) if kind == "small" else rng.normal(size=shape)
            half = max(1, shape[0] // 2)
            x[:half] *= first
            x[half:] *= last
            x = (np.abs(x) if is_positive else x).astype(np.float32)
            got = np.asarray(PackedArray.of(jnp.asarray(x), name, is_positive=is_positive).dense())
            case = f"{shape} {kind}"
            assert (x * got).sum() / np.sqrt((x**2).sum() * (got**2).sum()) > 0.9999, case
            assert np.abs(x - got).mean() <= 1.6 * np.abs(x).max() / 255, case
            assert ((x - got) ** 2).sum() / (x**2).sum() <= (1e-4 if is_positive else 5e-4), case


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("is_positive", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_stored_again_does_not_change(name: str, is_positive: bool) -> None:
    x = over_decades(3, (16, 300), is_positive)
    once = PackedArray.of(jnp.asarray(x), name, is_positive=is_positive)
    again = PackedArray.of(once.dense(), name, is_positive=is_positive)
    assert np.array_equal(np.asarray(again.dense()), np.asarray(once.dense()))


def test_another_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="format must be .*, not '8bits'\nhint: did you mean \"8bit\""):
        PackedArray.of(jnp.zeros((4, 4)), "8bits")
    with pytest.raises(ConfigError, match="a scalar cannot be packed"):
        PackedArray.of(jnp.zeros(()), "8bit")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", FORMATS)
def test_arrays_of_nothing_are_stored(name: str) -> None:
    for shape in ((0, 128), (0,), (4, 0), (0, 3, 3)):
        assert PackedArray.of(jnp.zeros(shape), name).dense().shape == shape


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_the_largest_number_of_a_block_are_exact(name: str) -> None:
    assert not np.asarray(PackedArray.of(jnp.zeros((2, 300)), name).dense()).any()
    for sign in (1, -1):
        x = jnp.zeros((1, 300)).at[0, 7].set(sign * 0.3)
        got = np.asarray(PackedArray.of(x, name).dense())
        assert got[0, 7] == np.float32(sign * 0.3)


@pytest.mark.slow_after(7)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_positive", [False, True])
def test_a_block_with_a_number_that_is_not_finite_is_nan_and_others_are_as_they_were(
    name: str, bad: float, is_positive: bool
) -> None:
    block = FORMATS[name].block
    x = np.abs(np.random.default_rng(4).normal(size=(2, 2 * block))).astype(np.float32)
    spoilt = x.copy()
    spoilt[1, block + 3] = -abs(bad) if bad < 0 and not is_positive else abs(bad)
    want = np.asarray(PackedArray.of(jnp.asarray(x), name, is_positive=is_positive).dense())
    got = np.asarray(PackedArray.of(jnp.asarray(spoilt), name, is_positive=is_positive).dense())
    assert np.isnan(got[1, block:]).all()
    assert np.array_equal(got[0], want[0])
    assert np.array_equal(got[1, :block], want[1, :block])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", FORMATS)
def test_short_axes_make_blocks_together(name: str) -> None:
    kernel = np.random.default_rng(6).normal(size=(8, 40, 3, 3)).astype(np.float32)
    packed = PackedArray.of(jnp.asarray(kernel), name)
    rows = PackedArray.of(jnp.asarray(kernel.reshape(8, 360)), name)
    assert packed.shape == kernel.shape and packed.row == (40, 3, 3)
    assert np.array_equal(packed.scales, rows.scales)
    assert np.array_equal(np.asarray(packed.dense()).reshape(8, 360), rows.dense())
    alone = PackedArray.of(jnp.asarray(kernel[..., :1, 0]), name)
    assert alone.shape == (8, 40, 1) and alone.scales.size == -(-320 // FORMATS[name].block)


@pytest.mark.slow
def test_two_codes_of_4_bits_are_a_byte() -> None:
    for size in (1, 2, 255, 256, 257, 271, 512, 600):
        packed = PackedArray.of(jnp.ones((3, size)), "4bit")
        assert leaf_bytes(packed.codes) == -(-3 * size // 2)
        assert packed.dense().shape == (3, size) and (packed.dense() == 1).all()
    program = compile(lambda packed: packed.dense(), PackedArray.of(jnp.ones((8, 256)), "4bit"))
    assert program.report().device.argument_bytes == 8 * 256 // 2 + 8 * 4 * 4


@pytest.mark.slow
def test_tiny_numbers_stay_finite() -> None:
    x = jnp.full((1, 256), 1e-42).at[0, 0].set(-1e-39)
    for name in FORMATS:
        got = np.asarray(PackedArray.of(x, name).dense())
        assert np.isfinite(got).all()
        assert np.abs(got).max() <= 1.1e-39, name


@pytest.mark.slow
def test_bfloat16_is_rounded_without_bias_and_by_the_key_alone() -> None:
    x = np.random.default_rng(5).normal(size=64).astype(np.float32)
    rounded = jax.jit(lambda key: PackedArray.rounded(jnp.asarray(x), key).dense())
    keys = jax.random.bits(jax.random.key(0), (1000,), jnp.uint32)
    draws = np.asarray(jax.vmap(rounded)(keys), np.float64)
    step = np.exp2(np.floor(np.log2(np.abs(x))) - 7)
    assert ((draws == draws.min(0)) | (draws == draws.max(0))).all()
    assert (np.abs(draws - x) < step).all()
    # Five standard deviations of the mean of 1,000 draws for each, and for all of them together.
    assert (np.abs(draws.mean(0) - x) < 5 * step / 2 / np.sqrt(1000)).all()
    assert abs(((draws.mean(0) - x) / step).mean()) < 5 / 2 / np.sqrt(64_000)
    assert np.array_equal(np.asarray(rounded(keys[0])), np.asarray(rounded(keys[0])))
    special = jnp.array([np.nan, np.inf, -np.inf, 0.0])
    assert np.array_equal(np.asarray(PackedArray.rounded(special, keys[0]).dense()), special, equal_nan=True)
