"""The HTML pages in a real browser: what they show adds up to the report, and they ask the network for nothing."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowtide.core import format_bytes
from lowtide.memory import MemoryReport, diff
from lowtide.report._facts import Buffer

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = [
    name
    for name, there in (
        ("chromium", CHROMIUM),
        ("chromedriver", DRIVER),
        ("selenium", importlib.util.find_spec("selenium")),
    )
    if not there
]
pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: install chromium-driver and the dev extra"),
    # Of selenium's own making, on some versions of Python.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]
OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1400,1000"
).split()


class Page:
    """One open page, and what a reader does with it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path) -> None:
        self.driver.get_log("performance")
        self.driver.get_log("browser")
        self.driver.get(path.as_uri())
        self.settle()

    def js(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        twice = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
        self.driver.execute_async_script(twice)

    def at(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def click(self, selector: str) -> None:
        self.js("document.querySelector(arguments[0]).click()", selector)
        self.settle()

    def press(self, selector: str, *keys: str) -> None:
        self.at(selector).send_keys(*keys)
        self.settle()

    def type(self, text: str) -> None:
        script = (
            "const f = document.getElementById('filter'); f.value = arguments[0]; f.dispatchEvent(new Event('input'))"
        )
        self.js(script, text)
        self.settle()

    def select(self, moment: int) -> None:
        """Choose a moment with the mouse, then with the arrow keys what a pixel is too coarse for."""
        from selenium.webdriver import Keys

        self.point(moment, "pointerdown")
        shown = int(self.at("#timeline").get_attribute("aria-valuenow")) - 1
        key = Keys.ARROW_RIGHT if moment > shown else Keys.ARROW_LEFT
        self.press("#timeline", *[key] * abs(moment - shown))

    def point(self, moment: int, event: str = "pointermove", chart: str = "timeline", moments: int = 0) -> None:
        script = """
        const chart = document.getElementById(arguments[2]), box = chart.getBoundingClientRect();
        const num = arguments[3] || Number(chart.getAttribute("aria-valuemax"));
        const left = box.left + 64, width = box.width - 64 - 12;
        chart.setPointerCapture = () => {};
        chart.dispatchEvent(new PointerEvent(arguments[1], {clientX: left + width * (arguments[0] + 0.5) / num,
          clientY: box.top + 60, bubbles: true, pointerId: 1}));"""
        self.js(script, moment, event, chart, moments)
        self.settle()

    def sums(self) -> tuple[int, int, int]:
        """Bytes that the readout, the cells of the treemap and the rows of the table add up to."""
        while self.js("return !document.getElementById('more').hidden"):
            self.click("#more")
        script = "return [...document.querySelectorAll(arguments[0])].reduce((a, n) => a + Number(n.dataset.bytes), 0)"
        selectors = ("#alive", "#treemap .cell", "#table tbody tr[data-bytes]")
        alive, cells, rows = (self.js(script, selector) for selector in selectors)
        return alive, cells, rows

    def column(self, name: str) -> list[str]:
        script = """
        const at = [...document.querySelectorAll("#table th")].findIndex((th) => th.dataset.key === arguments[0]);
        return [...document.querySelectorAll("#table tbody tr[data-id]")].map((tr) => tr.children[at].textContent)"""
        return self.js(script, name)

    def row_bytes(self) -> list[int]:
        return self.js("return [...document.querySelectorAll('#table tbody tr[data-id]')].map((r) => +r.dataset.bytes)")

    def background(self) -> str:
        return self.js("return getComputedStyle(document.body).backgroundColor")

    def assert_quiet(self) -> None:
        """No error on the console, and no request but the page itself."""
        assert self.driver.get_log("browser") == []
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        assert [p["request"]["url"] for p in sent if p["request"]["url"].startswith(("http", "ws", "ftp"))] == []
        # The rest is the browser's own, such as its start page.
        ours = [p["request"]["url"] for p in sent if p["documentURL"].startswith("file:")]
        assert [url for url in ours if not url.startswith("data:")] == [self.driver.current_url]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    try:
        yield Page(driver)
    finally:
        driver.quit()


@pytest.fixture
def llm(reports: Any) -> MemoryReport:
    return reports.llm(num_layers=32, num_moments=6000)


def alive(report: MemoryReport, moment: int, space: Any = "device") -> int:
    return sum(b.num_bytes for b in report.alive_at(moment, space=space))


@pytest.mark.sentinel
def test_every_moment_shows_its_live_bytes(browser: Page, llm: MemoryReport, tmp_path: Path) -> None:
    llm.to_html(tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    assert "Fits: 40.16 GiB of 95.73 GiB" in browser.at("h1").text
    assert browser.sums() == (llm.device_bytes,) * 3
    live = llm.live_bytes()
    for moment in (0, 1, 777, 2150, 2151, 4001, 5999):
        browser.select(moment)
        assert browser.sums() == (alive(llm, moment),) * 3
        assert alive(llm, moment) - live[moment] == (341 * 2**20 if moment == llm.peak_moment else 0)
        assert f"Moment {moment + 1:,} of 6,000" in browser.at("#readout").text
        assert llm.moments[moment] in browser.at("#readout").text
    browser.click("#group")
    assert browser.sums() == (alive(llm, 5999),) * 3
    assert len(browser.row_bytes()) == len(llm.alive_at(5999))
    browser.click("#to-peak")
    assert browser.sums() == (llm.device_bytes,) * 3
    browser.assert_quiet()


def test_keys_choose_moments_and_cells(browser: Page, reports: Any, tmp_path: Path) -> None:
    from selenium.webdriver import Keys

    report = reports.small()
    report.to_html(tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    for key, moment in ((Keys.HOME, 0), (Keys.ARROW_RIGHT, 1), (Keys.END, 3), (Keys.ARROW_LEFT, 2), (Keys.PAGE_UP, 3)):
        browser.press("#timeline", key)
        assert browser.at("#timeline").get_attribute("aria-valuenow") == str(moment + 1)
        assert browser.sums() == (alive(report, moment),) * 3
    browser.press("#treemap", Keys.ARROW_RIGHT, Keys.ENTER)
    assert "</script>" in browser.at("#table tr.chosen").text
    assert "Path" in browser.at("#table tr.detail").text
    browser.assert_quiet()


def test_hovering_the_timeline_names_the_moment_and_its_bytes(browser: Page, reports: Any, tmp_path: Path) -> None:
    report = reports.small()
    report.to_html(tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    browser.point(1)
    text = browser.at("#tooltip").text
    assert text.splitlines()[0] == format_bytes(130)
    assert "Moment 2 of 4 · fusion.1 <script>alert(1)</script>" in text
    assert "params\n100 B" in text and "activations\n30 B" in text and "fragmentation" not in text
    assert browser.sums()[0] == 145, "to hover is not to select"
    browser.point(1, "pointerleave")
    assert not browser.at("#tooltip").is_displayed()
    browser.assert_quiet()


def test_a_cell_of_the_treemap_leads_to_its_row(browser: Page, llm: MemoryReport, tmp_path: Path) -> None:
    llm.to_html(tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    cell = browser.js("return [...document.querySelectorAll('.cell')].find((c) => c.textContent.includes('attn/q4'))")
    identity = cell.get_attribute("data-id")
    browser.js("arguments[0].dispatchEvent(new PointerEvent('pointerenter'))", cell)
    assert browser.at("#table tr.chosen").get_attribute("data-id") == identity
    browser.js("arguments[0].dispatchEvent(new PointerEvent('pointerleave'))", cell)
    assert browser.driver.find_elements("css selector", "#table tr.chosen") == []
    browser.type("nothing has this name")
    assert browser.sums()[2] == 0
    browser.js("arguments[0].click()", cell)
    browser.settle()
    assert browser.at("#table tr.chosen").get_attribute("data-id") == identity
    assert "32 buffers of 128.00 MiB" in browser.at("#table tr.detail").text
    assert browser.at(f'.cell[data-id="{identity}"]').get_attribute("aria-selected") == "true"
    browser.assert_quiet()


def test_columns_sort_and_filters_narrow(browser: Page, llm: MemoryReport, tmp_path: Path) -> None:
    llm.to_html(tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    browser.click("#group")
    browser.sums()
    sizes = browser.row_bytes()
    assert sizes == sorted(sizes, reverse=True)
    browser.click('#table th[data-key="bytes"] button')
    assert browser.row_bytes()[:5] == sorted(sizes)[:5]
    assert browser.at('#table th[data-key="bytes"]').get_attribute("aria-sort") == "ascending"
    browser.click('#table th[data-key="owner"] button')
    owners = browser.column("owner")
    layers = [
        int(name.split("/")[2])
        for name in owners
        if name.startswith("model/layers/") and name.endswith("attn/q_proj/weight")
    ]
    assert layers == sorted(layers), "numbers in names sort as numbers"
    browser.type("layers/7/ q_proj bf16")
    expected = [b for b in llm.peak if b.dtype == "bf16" and "layers/7/" in b.path and "q_proj" in b.path]
    assert browser.column("owner") == [b.path for b in expected] == ["model/layers/7/attn/q_proj/weight"]
    browser.type("")
    browser.click('#legend [data-role="activations"]')
    assert browser.sums()[2] == llm.peak_by_role["activations"]
    assert set(browser.column("role")) == {"activations"}
    browser.click('#legend [data-role="activations"]')
    assert browser.sums()[2] == llm.device_bytes
    browser.assert_quiet()


def test_the_host_has_its_own_timeline_and_peak(browser: Page, reports: Any, tmp_path: Path) -> None:
    report = reports.small()
    report.to_html(tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    browser.click('#space-switch input[value="host"]')
    assert browser.sums() == (60, 60, 60) == (report.host_bytes,) * 3
    assert browser.column("owner") == ["opt/mu"]
    browser.click('#space-switch input[value="device"]')
    assert browser.sums() == (145, 145, 145)
    reports.make([], [""]).to_html(tmp_path / "empty.html")
    browser.open(tmp_path / "empty.html")
    assert not browser.at("#space-switch").is_displayed()
    assert browser.sums() == (0, 0, 0)
    assert "Nothing" in browser.at("#treemap").text
    browser.assert_quiet()


def test_light_and_dark_follow_the_system_and_the_button(browser: Page, reports: Any, tmp_path: Path) -> None:
    reports.small().to_html(tmp_path / "report.html")

    def prefer(scheme: str) -> str:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        return browser.background()

    browser.open(tmp_path / "report.html")
    light, dark = prefer("light"), prefer("dark")
    assert light != dark
    browser.click("#theme")
    assert browser.background() == light
    browser.click("#theme")
    assert browser.background() == dark
    assert prefer("light") == dark, "the button outlasts the system's choice"
    browser.assert_quiet()


def test_sizes_are_printed_as_in_python(browser: Page, reports: Any, tmp_path: Path) -> None:
    from lowtide.report.views import _html

    reports.make([], [""]).to_html(tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    sizes = [
        0,
        1,
        1023,
        1024,
        1025,
        1029,
        1030,
        1152,
        1280,
        1408,
        1664,
        2**20 - 1,
        2**20 - 6,
        2**30 + 2**23,
        2**43,
        2**52,
    ]
    sizes += [7**n for n in range(1, 16)] + [1024 + 64 * n for n in range(40)]
    sizes += [-size for size in sizes[2:]]
    script = f"{_html.asset('units.js')}\nreturn arguments[0].map(formatBytes)"
    assert browser.js(script, sizes) == [format_bytes(size) for size in sizes]


def test_a_folded_page_says_so_and_still_adds_up(
    browser: Page, llm: MemoryReport, tmp_path: Path, monkeypatch: Any
) -> None:
    from lowtide.report.views import _html

    payload, _ = _html.report_payload(llm)
    folded = _html.report_payload(llm, limit=len(payload) * 3 // 4)
    monkeypatch.setattr(_html, "report_payload", lambda report: folded)
    llm.to_html(tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    assert "are one row per role, to keep this file small" in browser.at("footer").text
    browser.sums()
    assert any(name.startswith("everything smaller than") for name in browser.column("owner"))
    for moment in (0, llm.peak_moment, 4001):
        browser.select(moment)
        assert browser.sums() == (alive(llm, moment),) * 3
    browser.assert_quiet()


def test_nothing_is_wider_than_a_phone(browser: Page, llm: MemoryReport, reports: Any, tmp_path: Path) -> None:
    llm.to_html(tmp_path / "report.html")
    diff(llm, reports.small()).to_html(tmp_path / "diff.html")
    metrics = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        for name in ("report.html", "diff.html"):
            browser.open(tmp_path / name)
            assert browser.js("return document.documentElement.scrollWidth") <= 400
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_page_of_a_difference_adds_up(browser: Page, llm: MemoryReport, reports: Any, tmp_path: Path) -> None:
    after = reports.llm(num_layers=24, num_moments=5000, name="v5e:2x2", capacity=31 * 2**30)
    difference = diff(llm, after)
    difference.to_html(tmp_path / "diff.html")
    browser.open(tmp_path / "diff.html")
    assert f"on the device: {format_bytes(llm.device_bytes)} before" in browser.at("h1").text
    for space, delta in (("device", difference.delta_bytes()), ("host", difference.delta_bytes(space="host"))):
        browser.click(f'#space-switch input[value="{space}"]')
        browser.sums()
        assert sum(browser.row_bytes()) == delta
        assert int(browser.at("#bars [data-bytes]").get_attribute("data-bytes")) == delta
    browser.click('#space-switch input[value="device"]')
    browser.click("#changed")
    browser.click("#group")
    browser.sums()
    assert len(browser.row_bytes()) == sum(row.space == "device" for row in difference.rows)
    browser.type("embed")
    assert browser.row_bytes() == [0]
    browser.point(after.peak_moment, chart="after", moments=5000)
    assert browser.at("#tooltip").text.splitlines()[0] == format_bytes(after.device_bytes)
    assert "the targets differ: v5p:1x1x1 before, v5e:2x2 after" in browser.at("footer").text
    common: dict[str, Any] = {"space": "device", "role": "other", "start": 0, "end": 0}
    sides = [
        reports.make([Buffer(path=path, num_bytes=size, **common) for path in ("2", "3", "w1", "w2")], [""])
        for size in (2**20, 2**21)
    ]
    for view in (sides[0], diff(*sides)):
        view.to_html(tmp_path / "numbers.html")
        browser.open(tmp_path / "numbers.html")
        assert browser.column("owner") == ["2, 3", "2 × w*"]
    browser.assert_quiet()


def test_the_table_shows_file_and_line_whole(browser: Page, reports: Any, tmp_path: Path) -> None:
    source = "a/long/way/to/the/attention.py:1241 (Model.attend.<locals>.scores)"
    report = reports.small()
    report = dataclasses.replace(report, buffers=tuple(dataclasses.replace(b, source=source) for b in report.buffers))
    report.to_html(tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    cell = browser.at("td.source")
    assert cell.text == "attention.py:1241 (scores)"
    assert cell.get_attribute("title") == source
    assert browser.js("return arguments[0].scrollWidth <= arguments[0].clientWidth", cell), "it is cut"


def test_a_scrollbar_that_comes_late_cuts_nothing(browser: Page, reports: Any, tmp_path: Path) -> None:
    # The page grows as it is drawn: here the last part makes it higher than its window.
    reports.small().to_html(tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    before = browser.driver.get_window_size()
    try:
        browser.driver.set_window_size(1400, browser.js("return document.documentElement.scrollHeight") + 60)
        browser.open(tmp_path / "page.html")
        assert browser.js("return innerWidth > document.documentElement.clientWidth"), "room is kept for a scrollbar"
    finally:
        browser.driver.set_window_size(before["width"], before["height"])
