"""Views of reports: what they say adds up to the report, and what is read back equals what was written."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from lowtide.core import ConfigError, OutputError, ReportError, format_bytes
from lowtide.memory import MemoryReport, SpaceBytes, Target, analyze, diff
from lowtide.report._facts import DERIVED_ROLES, Buffer, live_bytes
from lowtide.report.views._content import common_label, fit_text
from lowtide.report.views._png import byte_ticks
from lowtide.report.views._styles import (
    _DERIVED_STYLES,
    contrast,
    stacking_order,
    styles,
)


def test_a_buffer_is_alive_in_its_last_operation() -> None:
    buffers = [
        Buffer(space="device", role="temporaries", num_bytes=num_bytes, start=start, end=start + 2)
        for num_bytes, start in ((3, 0), (4, 2))
    ]
    assert live_bytes(buffers, 6) == [3, 3, 7, 4, 4, 0]


# --- JSON ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llm", "small", "empty"])
def test_a_report_is_read_back_as_it_was_written(kind: str, reports: Any, tmp_path: Path) -> None:
    report = reports.make([], [""]) if kind == "empty" else getattr(reports, kind)(versions={"lowtide": "0.0.9"})
    report.to_json(tmp_path / "report.json")
    again = MemoryReport.from_json(tmp_path / "report.json")
    assert again == report
    assert again.versions == report.versions
    assert again.peak == report.peak


def test_json_of_a_large_program_stays_small(reports: Any, tmp_path: Path) -> None:
    report = reports.llm()
    report.to_json(tmp_path / "report.json")
    assert len(report.buffers) > 2_300
    assert (tmp_path / "report.json").stat().st_size < 1_000_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot be read\n  got: No such file[\s\S]*hint: give a file that"),
        ("not json", r"the file is not JSON\n  got: Expecting value"),
        (b"\xff\xfe{", r"the file is not JSON"),
        ("[1, 2]", r"not a memory report\nhint: give a file that"),
        ('{"loss": 1}', r"not a memory report"),
        ('{"schema_version": 1}', r"has schema_version 1, not 2\nhint: make the report"),
        ('{"schema_version": 2}', r"damaged or incomplete\n  got: missing key 'device'"),
    ],
)
def test_what_is_no_report_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ReportError, match=message):
        MemoryReport.from_json(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("peak_moment", 9, "outside of the 4 moments"),
        ("buffers", [{"space": "device", "role": "x", "num_bytes": 1, "start": 0, "end": 4}], "outside of the 4"),
        ("buffers", [{"size": 1}], "damaged"),
        ("device", {"argument_bytes": 1, "total_bytes": 2}, "the parts of device add up to 1, not 2"),
        ("target", {"name": "v9", "wings": 2}, "unexpected keyword argument 'wings'"),
        ("moments", None, "damaged"),
    ],
)
def test_a_damaged_report_is_refused(key: str, value: Any, message: str, reports: Any, tmp_path: Path) -> None:
    data = {**reports.small().to_dict(), key: value}
    (tmp_path / "report.json").write_text(json.dumps(data))
    with pytest.raises(ReportError, match=message):
        MemoryReport.from_json(tmp_path / "report.json")


@pytest.mark.parametrize("view", ["to_json", "to_html"])
@pytest.mark.parametrize("place", ["missing/report", "folder"])
def test_a_view_that_cannot_be_written_is_an_output_error(view: str, place: str, reports: Any, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match=r"report cannot be written\n  got: .*\nhint: give a file"):
        getattr(reports.small(), view)(tmp_path / place)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


# --- terminal ------------------------------------------------------------------------------------------------------


def printed(report: MemoryReport, width: int, path: Path, **options: Any) -> str:
    from rich.console import Console

    with path.open("w", encoding="utf-8") as file:
        report.print(Console(width=width, file=file), **options)
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 200])
@pytest.mark.parametrize("kind", ["llm", "small", "empty"])
def test_the_terminal_view_keeps_to_its_width(kind: str, width: int, reports: Any, tmp_path: Path) -> None:
    report = reports.make([], [""]) if kind == "empty" else getattr(reports, kind)()
    lines = printed(report, width, tmp_path / "out.txt").splitlines()
    assert max(map(len, lines)) <= width
    assert any(format_bytes(report.device_bytes) in line for line in lines)


def test_the_terminal_view_says_what_matters(reports: Any, tmp_path: Path) -> None:
    text = printed(reports.llm(), 140, tmp_path / "out.txt", top=3)
    assert "fits: 40.16 GiB of 95.73 GiB, 55.57 GiB free" in text
    assert "moment 2,151 of 6,000, fusion copy-start.2150" in text
    assert "▲ peak 40.16 GiB" in text
    assert "32 × layers/*/residual" in text and "llama.py:141 (block)" in text and "26 more" in text
    assert "On the host: 42.00 GiB" in text
    assert "note: loop bodies are counted once" in text
    short = printed(reports.llm(capacity=30 * 2**30), 80, tmp_path / "out.txt")
    assert "does not fit: 40.16 GiB of 30.00 GiB, 10.16 GiB too much" in short
    assert "llama.py:141" in short, "the line of what has no path of its own"


def test_the_shares_of_the_terminal_view_add_up(reports: Any, tmp_path: Path) -> None:
    text = printed(reports.llm(), 80, tmp_path / "out.txt")
    legend = text[text.index("At the peak") : text.index("Live bytes")]
    shares = [float(share) for share in re.findall(r"(?<!<)\b(\d+\.\d) %", legend)]
    assert sum(shares) == pytest.approx(100, abs=0.3)
    bar = legend.splitlines()[1]
    assert len(bar) == 80 and set(bar) == {"█", "▓"}


def test_names_are_not_markup(reports: Any, tmp_path: Path) -> None:
    buffers = [Buffer(space="device", role="[red]x", path="a[bold]/b", num_bytes=8, start=0, end=0)]
    text = printed(reports.make(buffers, ["[link=x]"], notes=("[i]",)), 100, tmp_path / "out.txt")
    assert "[red]x" in text and "a[bold]/b" in text and "note: [i]" in text


def test_repr_is_short(reports: Any) -> None:
    assert repr(reports.small()) == str(reports.small())
    assert repr(reports.small()).splitlines() == [
        "MemoryReport: 145 B of 200 B on v5p:1x1x1, fits, 60 B on the host",
        "  5 buffers; at the peak params 100 B, activations 30 B, temporaries 10 B, fragmentation 5 B",
    ]
    assert repr(reports.make([], [""])) == "MemoryReport: 0 B on v5p:1x1x1"


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        (["a/1/b/2", "a/2/b/2"], "a/*/b/2"),
        (["w"], "w"),
        (["l/10", "l/9", "l/9"], "l/*"),
        (["7", "8"], "7, 8"),
    ],
)
def test_names_that_differ_in_numbers(labels: list[str], text: str) -> None:
    assert common_label(labels) == text


# --- roles ---------------------------------------------------------------------------------------------------------


USUAL = ["params", "frozen", "opt_state", "batch", "other", *DERIVED_ROLES]


@pytest.mark.parametrize("background", ["#f6f7f9", "#1b1f26", "#ffffff", "#121519"])
def test_every_colour_stands_out_from_the_page(background: str) -> None:
    for role, style in styles([*USUAL, *(f"role{at}" for at in range(8))]).items():
        assert contrast(style.color, background) >= 3, role
        assert contrast(style.color, style.ink) >= 4.5, role


# What protanopes and deuteranopes see, in linear RGB (Machado, Oliveira, Fernandes 2009).
SIGHT = {
    "normal": np.eye(3),
    "protan": np.array([[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]]),
    "deutan": np.array([[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]),
}


def lab(color: str, sight: np.ndarray) -> np.ndarray:
    rgb = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.clip(sight @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4), 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    x, y, z = np.cbrt(xyz / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHT)
def test_roles_differ_in_colour_or_texture_for_everybody(sight: str) -> None:
    found = list(styles(USUAL).items())
    for at, (role, style) in enumerate(found):
        for other, another in found[:at]:
            apart = np.linalg.norm(lab(style.color, SIGHT[sight]) - lab(another.color, SIGHT[sight]))
            assert apart >= 6 or style.texture != another.texture, (role, other)


def test_arbitrary_roles_get_stable_and_different_styles() -> None:
    names = ["encoder", "decoder", "ema", "états", "cache"]
    assert styles(names) == styles(reversed(names)) == styles(names)
    assert len({(s.color, s.texture) for s in styles(names).values()}) == len(names)
    assert len(styles(f"r{at}" for at in range(40))) == 40
    assert stacking_order(["fragmentation", "temporaries", "b", "code", "a"]) == [
        "b",
        "a",
        "code",
        "temporaries",
        "fragmentation",
    ]


# --- page ----------------------------------------------------------------------------------------------------------


def payload_of(page: str) -> Any:
    return json.loads(page.split('id="payload">')[1].split("</script>")[0])


def test_nothing_from_a_program_becomes_markup(reports: Any, tmp_path: Path) -> None:
    evil = reports.small()
    target = dataclasses.replace(evil.target, name='v5e"><script>alert(1)</script>{{payload}}')
    report = dataclasses.replace(evil, target=target)
    for view in (report, diff(evil, report)):
        view.to_html(tmp_path / "page.html")
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        # The page's own two, and no third.
        assert page.count("<script") == page.count("</script") == 2
        assert "<!--" not in page and "\u2028" not in page
        assert "<note>" not in page and "a &lt;note&gt; &amp; more" in page
    names = payload_of(page)["rows"]
    assert any("</script><!-- <b>&\"'\u2028 ü/w" == row["owner"] for row in names)
    html = report._repr_html_()
    assert "<script" not in html and "&lt;/script&gt;" in html


def test_the_page_needs_nothing_else(reports: Any, tmp_path: Path) -> None:
    reports.llm().to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)|@import|\bfetch\(|url\((?!#)""", page) == []
    assert set(re.findall(r"""https?://[^"']*""", page)) == {"http://www.w3.org/2000/svg"}, "a name, no address"
    assert "<noscript>" in page and "13.00 GiB" in page.split('id="static">')[1].split("</table>")[0]


def test_lone_surrogates_are_written(reports: Any, tmp_path: Path) -> None:
    buffers = [Buffer(space="device", role="a\udc80", path="b\udcff", num_bytes=8, start=0, end=0)]
    report = reports.make(buffers, ["\ud800"])
    report.to_html(tmp_path / "page.html")
    report.to_json(tmp_path / "report.json")
    assert MemoryReport.from_json(tmp_path / "report.json") == report


def test_large_programs_stay_below_ten_megabytes(reports: Any, tmp_path: Path) -> None:
    num, names = (
        20_000,
        "jit(train_step)/transpose(jvp(checkpoint))/rematted_computation/model/decoder/layers_{}/self_attention",
    )
    buffers = [
        Buffer(
            space="device",
            role=("activations", "temporaries")[at % 2],
            scope=f"{names.format(at)}/{'x' * 300}/{at}",
            operation=f"fusion loop_multiply_reduce_fusion.{at}",
            shape=(at + 1, 128),
            dtype="bf16",
            num_bytes=256 * (at + 1),
            phase="forward",
            start=at,
            end=at + 9,
        )
        for at in range(num - 10)
    ]
    report = reports.make(buffers, [f"fusion loop_multiply_reduce_fusion.{at}" for at in range(num)])
    report.to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 10_000_000
    payload = payload_of((tmp_path / "page.html").read_text(encoding="utf-8"))
    kept, rest = payload["buffers"], payload["rest"]
    assert len(kept["bytes"]) + sum(entry["count"] for entry in rest) == len(buffers)
    assert max(entry["limit"] for entry in rest) <= min(kept["bytes"]) + 1
    for moment in (0, 5, 9_999, report.peak_moment):
        alive = sum(
            b for b, low, high in zip(kept["bytes"], kept["start"], kept["end"], strict=True) if low <= moment <= high
        )
        folded = sum(
            size for e in rest for at, size in zip(e["steps"][::2], e["steps"][1::2], strict=True) if at <= moment
        )
        assert alive + folded == sum(b.num_bytes for b in report.alive_at(moment))


def test_a_report_without_buffers_is_drawn_by_role(tmp_path: Path) -> None:
    report = analyze(lambda w: w * 2, jnp.ones((64, 64)), target="cpu", roles={"params": 0})
    bare = dataclasses.replace(report, buffers=(), moments=("",), peak_moment=0, host_peak_moment=0)
    bare.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert sum(payload_of(page)["buffers"]["bytes"]) == bare.device_bytes + bare.host_bytes
    assert "this report has no single buffers" in page


# --- picture -------------------------------------------------------------------------------------------------------


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["llm", "small", "empty"])
def test_the_picture_is_1600_by_900(kind: str, reports: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: install the report extra")
    report = reports.make([], [""]) if kind == "empty" else getattr(reports, kind)(notes=("$x_{1$",))
    for view in (report, diff(report, report), diff(reports.small(), report)):
        view.to_png(tmp_path / "picture.png")
        content = (tmp_path / "picture.png").read_bytes()
        assert content.startswith(b"\x89PNG") and struct.unpack(">II", content[16:24]) == (1600, 900)


def test_the_picture_without_matplotlib_names_the_extra(reports: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'needs matplotlib[\s\S]*hint: pip install "lowtide\[report\]"'):
        reports.small().to_png(tmp_path / "picture.png")


@pytest.mark.parametrize(
    ("top", "ticks"),
    [(1, [0, 1]), (145, [0, 50, 100]), (2**30, None), (40 * 2**30, [at * 10 * 2**30 for at in range(5)])],
)
def test_ticks_are_round(top: int, ticks: list[int] | None) -> None:
    found = byte_ticks(top)
    assert found[0] == 0 and found[-1] <= top and 2 <= len(found) <= 7
    assert ticks is None or found == ticks


@pytest.mark.slow
@pytest.mark.processes
def test_importing_lowtide_imports_no_drawing_package() -> None:
    program = "import sys, lowtide.memory; print(sorted({'matplotlib', 'selenium', 'rich.table'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout == "[]\n"


# --- verdict -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "host", "usable", "reserve", "host_usable", "text"),
    [
        (60, 0, 100, 0, 48, "fits: 60 B of 100 B, 40 B free"),
        (60, 40, 100, 40, 48, "fits: 60 B of 100 B, 40 B in reserve, 0 B free"),
        (60, 90, 100, 0, None, "fits: 60 B of 100 B, 40 B free"),
        (60, 0, 100, 50, None, "does not fit: 60 B of 100 B, 50 B in reserve, 10 B too much"),
        (101, 0, 100, 0, None, "does not fit: 101 B of 100 B, 1 B too much"),
        (60, 0, None, 0, 48, "60 B; the capacity is unknown"),
        (
            60,
            90,
            100,
            0,
            48,
            "does not fit: 60 B of 100 B on the device; the host's share of a box is too small: 90 B of 48 B, "
            "42 B too much",
        ),
        (
            60,
            90,
            None,
            0,
            48,
            "does not fit: 60 B on the device; the host's share of a box is too small: 90 B of 48 B, 42 B too much",
        ),
    ],
)
def test_the_verdict_keeps_reserve_and_host(
    device: int, host: int, usable: int | None, reserve: int, host_usable: int | None, text: str
) -> None:
    report = MemoryReport(
        target=Target(
            name="cpu",
            platform="cpu",
            chip="cpu",
            num_devices=1,
            device_bytes=usable,
            reserve_bytes=reserve,
            host_bytes=host_usable,
            machine="box",
        ),
        device=SpaceBytes(argument_bytes=device),
        host=SpaceBytes(argument_bytes=host),
        by_role={"other": device},
        host_by_role={"other": host},
    )
    assert fit_text(report) == text
    assert report.fits is (None if usable is None and "does not" not in text else text.startswith("fits"))
    assert report.margin_bytes == (None if usable is None else usable - reserve - device)
    assert report.host_margin_bytes == (None if host_usable is None else host_usable - host)


# --- files -----------------------------------------------------------------------------------------------------------


def test_links_stay_links_and_pipes_stay_pipes(reports: Any, tmp_path: Path) -> None:
    report = reports.small()
    link, real = tmp_path / "link.json", tmp_path / "real.json"
    real.write_text("old")
    link.symlink_to(real)
    report.to_json(link)
    assert link.is_symlink()
    assert MemoryReport.from_json(real) == report
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        report.to_json(pipe)
        assert pipe.is_fifo(), "the report took the place of the pipe"
        assert os.read(reader, 100).startswith(b"{")
    finally:
        os.close(reader)


# --- narrow terminals ------------------------------------------------------------------------------------------------


def _printed(report: MemoryReport, width: int, top: int = 20) -> str:
    out = io.StringIO()
    report.print(Console(file=out, width=width, highlight=False), top=top)
    return out.getvalue()


def _made(**fields: Any) -> Buffer:
    return Buffer(**{"space": "device", "start": 0, "end": 1, "num_bytes": 1002 * 2**20, **fields})


def _report_of(*buffers: Buffer) -> MemoryReport:
    total = sum(b.num_bytes for b in buffers)
    moments = ("jvp()/while/body/closed_call/checkpoint/vmap(jit(_where))/select_n" * 2, "end")
    return MemoryReport(
        target=Target(name="cpu", platform="cpu", chip="cpu", num_devices=1, device_bytes=None),
        device=SpaceBytes(temp_bytes=total),
        host=SpaceBytes(),
        by_role={"temporaries": total},
        host_by_role={},
        buffers=buffers,
        moments=moments,
    )


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160, 200])
def test_file_and_line_of_what_has_no_path_are_shown(width: int) -> None:
    source = "some/long/folder/of/a/project/attention.py:241 (Model.attend.<locals>.scores)"
    scope = "transpose(jvp())/while/body/closed_call/checkpoint/rematted_computation/vmap(BNTS,BSNH->BTNH)/dot_general"
    report = _report_of(_made(role="temporaries", phase="recompute", scope=scope, source=source, dtype="f32"))
    assert "attention.py:241" in _printed(report, width)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_size_and_no_count_is_cut(width: int) -> None:
    report = _report_of(*(_made(role="code", operation=name, phase="") for name in ("one", "two", "three")))
    text = _printed(report, width, top=1)
    assert re.search(r"^ *1002\.00 MiB ", text, flags=re.MULTILINE), "a size is cut"
    assert re.search(r" 2 more *$", text, flags=re.MULTILINE)
    assert "2.94 GiB, moment 1 of 2, jvp()" in text
    out = io.StringIO()
    diff(_report_of(), report).print(Console(file=out, width=width, highlight=False), top=1)
    assert re.search(r"\+1002\.00 MiB ", out.getvalue())
    assert re.search(r" 2 more *$", out.getvalue(), flags=re.MULTILINE)


@pytest.mark.parametrize("width", [100, 110, 120, 129, 130, 200])
def test_no_phase_is_cut(width: int) -> None:
    phases = ("argument", "forward", "recompute", "backward", "update")
    scope = "transpose(jvp())/while/body/closed_call/checkpoint/dot_general"
    buffers = (_made(role=f"activations of {phase}", phase=phase, scope=scope, dtype="f32") for phase in phases)
    text = _printed(_report_of(*buffers), width)
    assert [phase for phase in phases if f" {phase} " not in text.partition("owner")[2]] == []


def test_a_print_is_one_output() -> None:
    """A notebook shows each write of a console as a cell's output of its own."""

    class Writes(io.StringIO):
        count = 0

        def write(self, text: str) -> int:
            self.count += 1
            return super().write(text)

    report = _report_of(_made(role="code", operation="one", phase=""))
    for view in (report, diff(_report_of(), report)):
        out = Writes()
        view.print(Console(file=out, width=100, highlight=False))
        assert (out.count, len(out.getvalue().splitlines()) > 5) == (1, True)


def test_copies_look_like_no_parameter() -> None:
    assert set(DERIVED_ROLES) <= set(_DERIVED_STYLES)
    assert set(_DERIVED_STYLES) <= set(DERIVED_ROLES), "a style for a role that no report has"
    assert stacking_order(["copies", "batch", "params"])[-1] == "copies"
