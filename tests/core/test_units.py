from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.core import ConfigError, format_bytes, parse_bytes

FACTORS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}


@given(st.integers(min_value=0, max_value=2**60))
def test_what_is_printed_reads_back_within_half_of_the_last_digit(num_bytes: int) -> None:
    text = format_bytes(num_bytes)
    unit = text.split()[1]
    half_digit = 0 if unit == "B" else FACTORS[unit] * 0.005
    assert abs(parse_bytes(text) - num_bytes) <= half_digit + 1


@given(st.integers(min_value=0, max_value=2**60))
def test_the_figure_printed_is_below_the_next_unit(num_bytes: int) -> None:
    number, unit = format_bytes(num_bytes).split()
    assert float(number) < 1024 or unit == "TiB"
    assert float(number) >= 1 or unit == "B"


@given(st.integers(min_value=1, max_value=2**60))
def test_a_saving_keeps_its_sign(num_bytes: int) -> None:
    assert format_bytes(-num_bytes) == f"-{format_bytes(num_bytes)}"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1024**2 - 1024 * 5, "1019.00 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (16_911_433_728, "15.75 GiB"),
        (1024**4, "1.00 TiB"),
        (3000 * 1024**4, "3000.00 TiB"),
    ],
)
def test_format(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (7, 7),
        ("7", 7),
        (" 7 b ", 7),
        ("1_000", 1000),
        ("5.0KiB", 5120),
        ("5 kib", 5120),
        ("512MB", 512_000_000),
        ("14 GiB", 14 * 1024**3),
        ("14 GB", 14 * 1000**3),
        ("1.5 TiB", 3 * 1024**4 // 2),
        ("2 TB", 2 * 1000**4),
    ],
)
def test_parse(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "14 GiBs", "-3 MiB", "1e9", "14G", "1.5.2 MB", True, -1])
def test_text_that_is_no_size_is_named(text: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{text!r} is not a size")) as error:
        parse_bytes(text)
    assert 'hint: write it like "14 GiB" (1024-based) or "14 GB" (1000-based)' in str(error.value)
