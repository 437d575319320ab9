"""extrapolate: the answer is compiled, the next size does not fit, and a poor fit only costs compilations."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lowtide.core import ConfigError, TargetError
from lowtide.memory import ByteFit, Extrapolation, Job, SizePoint, extrapolate, target
from lowtide.memory.advice._extrapolation import _Search, fit_bytes


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def row(n: int) -> Any:
    """2 KiB a unit, nothing else."""
    return jnp.negative, (shape(n, 256),)


def square(n: int) -> Any:
    """Scores of attention: 8 n² bytes and a little."""
    return lambda x: jnp.tanh(x @ x.T), (shape(n, 4),), {"x": 0}


def steps(n: int) -> Any:
    """Jumps: only every eighth unit costs anything."""
    return jnp.negative, (shape(-(-n // 8) * 8, 256),)


def printed(found: Extrapolation) -> str:
    file = io.StringIO()
    found.print(Console(file=file, width=200))
    return file.getvalue()


def assert_closed(found: Extrapolation, limit: int, multiple_of: int = 1) -> None:
    points = {point.size: point for point in found.points}
    assert points[found.answer].fits
    assert points[found.answer].device_bytes == found.report.device_bytes <= limit
    assert found.following is not None
    assert found.following == points[found.following.size]
    assert found.answer < found.following.size <= found.answer + multiple_of
    assert not found.following.fits


@pytest.mark.parametrize("limit", [2048 * 2, 2048 * 5 + 1, 2048 * 517, 2048 * 1000 - 1])
def test_the_answer_of_a_line_is_exact(limit: int) -> None:
    found = extrapolate(row, limit=limit, target="cpu")
    assert found.answer == limit // 2048
    assert_closed(found, limit)
    assert found.fit.is_good
    assert found.predicted_bytes == found.report.device_bytes
    assert len(found.points) <= 5


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("make", [row, square, steps])
@pytest.mark.parametrize("multiple_of", [1, 8, 7])
def test_the_next_size_never_fits(make: Any, multiple_of: int) -> None:
    limit = 2**20 + 12345
    found = extrapolate(make, limit=limit, target="cpu", multiple_of=multiple_of)
    assert found.answer % multiple_of == 0
    assert_closed(found, limit, multiple_of)


@pytest.mark.slow
def test_a_parabola_is_found_where_a_line_is_poor() -> None:
    found = extrapolate(square, (16, 32, 64, 128), limit="16 MiB", target="cpu")
    assert len(found.fit.coefficients) == 3
    assert found.fit.is_good
    assert abs(found.predicted_bytes - found.report.device_bytes) < 0.02 * found.report.device_bytes
    assert "n²" in printed(found)


@pytest.mark.slow
def test_a_poor_fit_is_said_and_the_answer_holds() -> None:
    found = extrapolate(steps, (2, 3, 4), limit=2048 * 2 * 100, target="cpu", maximum=10_000)
    assert found.answer % 8 == 0
    assert_closed(found, 2048 * 2 * 100)


def test_the_maximum_bounds_the_answer() -> None:
    found = extrapolate(row, limit="1 GiB", target="cpu", maximum=100, multiple_of=8, variable="batch")
    assert (found.answer, found.following) == (96, None)
    assert found.report.device_bytes == 96 * 2048
    assert "batch 96 fits cpu" in printed(found)
    assert "it is the maximum" in printed(found)
    assert extrapolate(row, limit="1 GiB", target="cpu", maximum=3).answer == 3


def test_what_does_not_grow_needs_a_maximum() -> None:
    def flat(n: int) -> Any:
        return jnp.negative, (shape(256),)

    with pytest.raises(ConfigError, match=r"do not grow with the size[\s\S]*2.00 KiB at 2[\s\S]*hint: set a maximum"):
        extrapolate(flat, limit="1 MiB", target="cpu")
    assert extrapolate(flat, limit="1 MiB", target="cpu", maximum=12).answer == 12


def test_two_sizes_leave_the_fit_unchecked() -> None:
    found = extrapolate(row, (4, 8), limit="64 KiB", target="cpu")
    assert (found.answer, found.fit.residual, found.fit.is_good) == (32, None, False)
    assert "the fit was not checked" in printed(found)


@pytest.mark.slow
def test_it_prints_what_it_found_and_gives_it_as_data() -> None:
    found = extrapolate(square, (16, 32, 64, 128), limit="1 MiB", target="cpu", variable="tokens")
    text = printed(found)
    assert text.startswith(f"tokens {found.answer} fits cpu: ")
    assert re.search(rf"{found.answer} .* yes <-", text)
    assert re.search(r"per tokens", text)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["answer"] == found.answer
    assert data["next"]["size"] == found.answer + 1
    assert repr(found) == text.splitlines()[0]


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_a_tpu_knows_its_limit_and_the_maker_its_target() -> None:
    seen = list[str]()

    def make(n: int, target: Any) -> Any:
        seen.append(target.name)
        return {"fn": lambda x: jnp.tanh(x), "args": (shape(n, 2**20),), "donate_argnums": 0, "roles": {"x": 0}}

    found = extrapolate(make, (8, 16, 32), target="v5e:1x1", multiple_of=8)
    assert found.limit_bytes == target("v5e:1x1").device_bytes
    assert set(seen) == {"v5e:1x1"}
    assert 3900 < found.answer < 4040
    assert_closed(found, found.limit_bytes, 8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sizes": (4, 4, 8)}, "sizes must be two or more"),
        ({"sizes": (4,)}, "two or more positive whole numbers"),
        ({"sizes": (0, 2)}, "sizes must be two or more"),
        ({"limit": None}, r"the capacity of 'cpu' is unknown[\s\S]*hint: set the limit"),
        ({"limit": "1 KiB"}, r"does not fit, even at size 2[\s\S]*got: 4.00 KiB"),
        ({"limit": "lots"}, "'lots' is not a size"),
        ({"multiple_of": 0}, "multiple_of must be an integer of at least 1, not 0"),
        ({"maximum": 4, "multiple_of": 8}, "maximum must be an integer of at least 8, not 4"),
        ({"multiple_of": 1000}, "no multiple of 1000 fits 1.00 MiB"),
    ],
)
def test_what_cannot_be_answered_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        extrapolate(row, **{"limit": "1 MiB", "target": "cpu", **given})
    with pytest.raises(TargetError):
        extrapolate(row, target="v9")


class Imagined(_Search):
    """A search on a function of bytes instead of compiled programs."""

    def __init__(self, curve: Callable[[int], int], limit: int, multiple_of: int, most: int | None) -> None:
        super().__init__(row, target("cpu"), limit, multiple_of, most)
        self.curve = curve

    def measure(self, size: int, predicted: int | None = None) -> bool:
        num_bytes = self.curve(size)
        fits = num_bytes <= self.limit_bytes
        self.points[size] = SizePoint(
            size=size, device_bytes=num_bytes, host_bytes=0, fits=fits, predicted_bytes=predicted
        )
        return fits


@given(
    fixed=st.integers(0, 10**6),
    slope=st.integers(1, 5000),
    bend=st.integers(0, 50),
    tile=st.sampled_from([1, 2, 8, 100]),
    jump=st.tuples(st.integers(1, 5000), st.integers(0, 10**7)),
    sizes=st.lists(st.integers(1, 64), min_size=2, max_size=4, unique=True).map(sorted),
    room=st.integers(0, 10**8),
    multiple_of=st.sampled_from([1, 3, 8]),
    maximum=st.none() | st.integers(8, 5000),
)
def test_the_search_ends_at_the_largest_size_whatever_the_curve(
    fixed: int, slope: int, bend: int, tile: int, jump: tuple[int, int], sizes: list[int], room: int, multiple_of: int,
    maximum: int | None,
) -> None:  # fmt: skip
    def curve(size: int) -> int:
        padded = -(-size // tile) * tile
        return fixed + slope * padded + bend * padded**2 + (jump[1] if size >= jump[0] else 0)

    limit = curve(sizes[0]) + room
    search = Imagined(curve, limit, multiple_of, None if maximum is None else maximum // multiple_of)
    try:
        answer = search.run(*search.fit(sizes))
    except ConfigError as error:
        if "no multiple" in str(error):
            assert curve(multiple_of) > limit
        else:
            assert "do not grow" in str(error)
            assert maximum is None
            assert tile > 1, "a curve without steps grows"
        return
    assert answer % multiple_of == 0
    assert curve(answer) <= limit
    assert answer in search.points
    if maximum is None or answer + multiple_of <= maximum:
        assert curve(answer + multiple_of) > limit
        following = search.following(answer)
        assert following is not None
        assert not following.fits
    assert len(search.points) < 60


def test_fits_hold_out_the_largest_size() -> None:
    line = fit_bytes([(1, 110), (2, 120), (4, 140)])
    assert [line.predict(size) for size in (0, 10)] == [100, 200]
    assert line.residual == pytest.approx(0, abs=0.04)
    parabola = fit_bytes([(n, 7 + 3 * n * n) for n in (1, 2, 3, 4)])
    assert len(parabola.coefficients) == 3
    assert parabola.predict(100) == 30_007
    flattening = fit_bytes([(1, 100), (2, 200), (3, 280), (4, 340)])
    assert len(flattening.coefficients) == 2, "a parabola that bends down would predict that nothing ever fits less"
    assert not flattening.is_good
    assert ByteFit(coefficients=(1.0, 0.5), residual=None).predict(2) == 2


def test_jobs_are_read_or_refused_by_name() -> None:
    job = Job.of((jnp.negative, [shape(4)], None))
    assert job.args == (shape(4),)
    assert Job.of(job) is job
    assert Job.make(lambda n, scale: (jnp.negative, (shape(n * scale),)), 2, scale=3).args == (shape(6),)
    for value, message in (
        (None, r"the job is not a job\n  expected: \(fn, args\)[\s\S]*got: None"),
        ((jnp.negative, shape(4)), "args of the job must be a tuple of .*, not ShapeDtypeStruct"),
        ((jnp.negative, (), ["x"]), "roles of the job must be a dict such as .*, not a list of 1: str"),
        ({}, "has no key 'fn'"),
        ({"fn": jnp.negative, "kwargs": {"target": 1}}, "contains parameter names of lowtide.memory.analyze"),
        ({"fn": jnp.negative, "kwargs": 3}, "kwargs of the job must be a dict of .*, not int"),
        ({"fn": jnp.negative, "role": {}}, "did you mean 'roles'?"),
    ):
        with pytest.raises(ConfigError, match=message):
            Job.of(value)
    with pytest.raises(ConfigError, match="is not a function"):
        Job.make(3)  # pyright: ignore[reportArgumentType]


def test_a_program_that_stops_growing_needs_a_maximum() -> None:
    # It grows at the sizes that are fitted, and never again: no size is too large.
    def make(n: int) -> Any:
        return jnp.negative, (jax.ShapeDtypeStruct((min(n, 40), 256), jnp.float32),)

    with pytest.raises(ConfigError, match="do not grow with the size"):
        extrapolate(make, limit="1 MiB", target="cpu")
    assert extrapolate(make, limit="1 MiB", target="cpu", maximum=1000).answer == 1000


def test_the_next_size_says_how_much_is_missing() -> None:
    def make(n: int) -> Any:
        return jnp.negative, (jax.ShapeDtypeStruct((n, 4), jnp.float32),)

    found = extrapolate(make, limit="1 MiB", target="cpu")
    assert repr(found).endswith("32,769 needs 1.00 MiB, 32 B too much")
