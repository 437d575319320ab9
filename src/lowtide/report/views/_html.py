"""Reports and differences as one HTML file that needs no network, and as a table for notebooks.

The page holds the buffers as lists of numbers and a table of strings, and its script computes the sums. Text from a
program (paths, scopes, operations) is always escaped: it enters the page as ASCII JSON without ``<``, ``>`` and ``&``,
and the script inserts it as text nodes.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from ...core import format_bytes
from .._facts import SPACES, Buffer, DiffFacts, ReportFacts, Space, signed, space_total, sum_by_role
from ._content import (
    at_peak,
    drawn_buffers,
    fit_text,
    group_buffers,
    peak_moment,
    peak_text,
    percent,
    role_order,
    shorten,
    timeline,
)
from ._styles import styles

MAX_PAYLOAD_BYTES = 8_000_000
"""Largest JSON of a report's page; above this size, `_fold` replaces the smallest buffers."""
_MAX_TEXT = 2_000
_TEXTS = ("role", "path", "phase", "scope", "operation", "source", "shape", "dtype")
_COMMON = ("units.js", "timeline.js", "table.js")
_DIFF_COLUMNS = 900
_CHECKS = """<label class="check"><input type="checkbox" id="changed" checked> only changed owners</label>
        <label class="check"><input type="checkbox" id="group" checked> group equal owners</label>"""


def report_page(report: ReportFacts) -> bytes:
    """Make the page of a report: a whole HTML file in UTF-8."""
    payload, folded = report_payload(report)
    notes = [*report.notes, *folded]
    if not report.buffers and (report.device_bytes or report.host_bytes):
        notes.append("this report has no single buffers: each role is drawn as one buffer that is always alive")
    state = {True: "good", False: "bad", None: "unknown"}[report.fits]
    symbol = {"good": "✓", "bad": "✗", "unknown": ""}[state]
    verdict = fit_text(report)
    texts = {
        "title": f"{format_bytes(report.device_bytes)} on {report.target.name} · memory report",
        "kind": "Memory report",
        "target": report.target.name,
        "verdict": verdict[0].upper() + verdict[1:],
        "rows": "Buffers",
        "filter": "Filter by name, scope, source, type …",
    }
    markup = {
        "mark": f'<span class="mark {state}" aria-hidden="true">{symbol}</span>',
        "charts": asset("report.html"),
        "checks": "",
        "facts": definition_list(_report_facts(report)),
        "footer": _footer(notes, report.versions),
        "static": roles_table(report),
    }
    return _page(texts, markup, payload, (*_COMMON, "model.js", "treemap.js", "report.js"))


def diff_page(difference: DiffFacts) -> bytes:
    """Make the page of a difference: a whole HTML file in UTF-8."""
    before, after = difference.before, difference.after
    sizes = f"{format_bytes(before.device_bytes)} before, {format_bytes(after.device_bytes)} after"
    names = dict.fromkeys([before.target.name, after.target.name])
    texts = {
        "title": f"{signed(difference.delta_bytes())} on {after.target.name} · memory difference",
        "kind": "Difference of two memory reports",
        "target": " → ".join(names),
        "verdict": f"{signed(difference.delta_bytes())} on the device: {sizes}",
        "rows": "Owners",
        "filter": "Filter by name, role, type …",
    }
    facts = [("Before", fit_text(before)), ("After", fit_text(after))]
    if before.host_bytes or after.host_bytes:
        hosts = f"{format_bytes(before.host_bytes)} → {format_bytes(after.host_bytes)}"
        facts.append(("Host", f"{hosts} ({signed(difference.delta_bytes(space='host'))})"))
    rows = [
        [space, role, format_bytes(role_before), format_bytes(role_after), signed(role_after - role_before)]
        for space in SPACES
        for role, (role_before, role_after) in difference.by_role(space=space).items()
    ]
    markup = {
        "mark": "",
        "charts": asset("difference.html"),
        "checks": _CHECKS,
        "facts": definition_list(facts),
        "footer": _footer(difference.notes, after.versions),
        "static": _table(("memory", "role", "before", "after", "change"), rows),
    }
    return _page(texts, markup, diff_payload(difference), (*_COMMON, "difference.js"))


def notebook(report: ReportFacts) -> str:
    """Make a compact static table for notebooks: verdict, roles and the largest owners at the peak."""
    peak = at_peak(report, "device")
    groups = group_buffers(peak) if report.buffers else []
    total = sum(b.num_bytes for b in peak)
    rows = [
        [format_bytes(g.num_bytes), percent(g.num_bytes, total), g.buffers[0].role, g.text, g.array]
        for g in groups[:10]
    ]
    owners = _table(("bytes", "share", "role", "owner", "array"), rows) if rows else ""
    head = html.escape(f"{report.target.name}: {fit_text(report)}")
    return f"<div><p><b>{head}</b></p>{roles_table(report)}{owners}</div>"


def report_payload(report: ReportFacts, *, limit: int = MAX_PAYLOAD_BYTES) -> tuple[str, list[str]]:
    """Return the data of a report's page as JSON, and notes on what was left out to stay within `limit` bytes."""
    buffers = sorted((b for space in SPACES for b in drawn_buffers(report, space)), key=lambda b: -b.num_bytes)
    text = _report_json(report, buffers, [])
    if len(text) <= limit:
        return text, []
    num_kept = len(buffers)
    while len(text) > limit and num_kept:
        # Folded buffers still need some bytes, so the number to keep is estimated again until the text is short enough.
        num_kept = min(num_kept - 1, int(num_kept * 0.9 * limit / len(text)))
        text = _report_json(report, buffers[:num_kept], buffers[num_kept:])
    folded = f"{len(buffers) - num_kept:,} buffers of {format_bytes(buffers[num_kept].num_bytes)} or less"
    return text, [f"the {folded} are one row per role, to keep this file small"]


def _report_json(report: ReportFacts, buffers: Sequence[Buffer], folded: Sequence[Buffer]) -> str:
    # Each text is stored once, and buffers hold its index, because many buffers have the same scope and source.
    strings: dict[str, int] = {}

    def index(value: str) -> int:
        return strings.setdefault(_truncate(value), len(strings))

    rows = [{**vars(b), "shape": ",".join(map(str, b.shape))} for b in buffers]
    table: dict[str, list[int]] = {name: [index(row[name]) for row in rows] for name in _TEXTS}
    roles = role_order(report)
    return _embed_json(
        {
            "capacity": report.target.budget_bytes,
            "totals": {space: space_total(report, space) for space in SPACES},
            "peaks": {space: peak_moment(report, space) for space in SPACES},
            "roles": roles,
            "styles": _styles(roles),
            "buffers": {
                **table,
                "space": [SPACES.index(b.space) for b in buffers],
                "bytes": [b.num_bytes for b in buffers],
                "padding": [b.padding_bytes for b in buffers],
                "start": [b.start for b in buffers],
                "end": [b.end for b in buffers],
            },
            "rest": _fold(folded),
            "moments": [_truncate(name) for name in report.moments],
            "strings": list(strings),
        }
    )


def _fold(buffers: Sequence[Buffer]) -> list[dict[str, Any]]:
    """Sum buffers by space and role; an entry keeps the changes of its live bytes by position, but no names."""
    buffers_by_role: dict[tuple[Space, str], list[Buffer]] = {}
    for buffer in buffers:
        buffers_by_role.setdefault((buffer.space, buffer.role), []).append(buffer)
    largest = max((b.num_bytes for b in buffers), default=0)
    entries: list[dict[str, Any]] = []
    for (space, role), role_buffers in buffers_by_role.items():
        # Changes of the live bytes at each position, as in `report.live_bytes`; the page sums them up.
        steps: dict[int, int] = {}
        for b in role_buffers:
            steps[b.start] = steps.get(b.start, 0) + b.num_bytes
            steps[b.end + 1] = steps.get(b.end + 1, 0) - b.num_bytes
        flat = [value for moment in sorted(steps) if steps[moment] for value in (moment, steps[moment])]
        entries.append({"space": space, "role": role, "limit": largest + 1, "count": len(role_buffers), "steps": flat})
    return entries


def diff_payload(difference: DiffFacts) -> str:
    """Return the data of a difference's page as JSON: timelines at up to `_DIFF_COLUMNS` positions, and all owners."""
    roles = role_order(difference.before, difference.after)
    all_roles = dict.fromkeys([*roles, *(row.role for row in difference.rows)])
    rows = [
        {
            "space": row.space,
            "role": row.role,
            "owner": _truncate(row.owner),
            "dtype": row.dtype,
            "before": row.before_bytes,
            "after": row.after_bytes,
            "count": [row.before_count, row.after_count],
        }
        for row in difference.rows
    ]
    return _embed_json(
        {
            "roles": list(all_roles),
            "styles": _styles(all_roles),
            "sides": {"before": _diff_side(difference.before), "after": _diff_side(difference.after)},
            "by_role": {s: [[role, *pair] for role, pair in difference.by_role(space=s).items()] for s in SPACES},
            "rows": rows,
        }
    )


def _diff_side(report: ReportFacts) -> dict[str, Any]:
    return {
        "target": report.target.name,
        "capacity": report.target.budget_bytes,
        "totals": {space: space_total(report, space) for space in SPACES},
        "peaks": {space: peak_moment(report, space) for space in SPACES},
        "series": {space: _series_columns(report, space) for space in SPACES},
    }


def _series_columns(report: ReportFacts, space: Space) -> dict[str, Any]:
    series, _, moments = timeline(report, space, _DIFF_COLUMNS)
    return {
        "numMoments": len(report.moments),
        "moments": moments.tolist(),
        "names": [_truncate(report.moments[moment]) for moment in moments],
        "roles": [
            {"role": role, "values": series[role][moments].tolist()} for role in role_order(report) if role in series
        ],
    }


def _styles(roles: Iterable[str]) -> dict[str, dict[str, str]]:
    role_styles = styles(roles).items()
    return {role: {"color": style.color, "texture": style.texture, "ink": style.ink} for role, style in role_styles}


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else shorten(text, _MAX_TEXT)


def _embed_json(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, separators=(",", ":"))  # ASCII: no U+2028, no lone surrogate
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _page(texts: Mapping[str, str], markup: Mapping[str, str], payload: str, scripts: Sequence[str]) -> bytes:
    page = {
        **{name: html.escape(text) for name, text in texts.items()},
        **markup,
        "generator": "Lowtide",
        "style": asset("page.css"),
        "payload": payload,
        "script": "\n".join(asset(name) for name in scripts),
    }
    return fill_template(asset("page.html"), page).encode("utf-8", "xmlcharrefreplace")


def asset(name: str) -> str:
    """Read a file in the folder ``assets``."""
    return resources.files(__name__.rpartition(".")[0]).joinpath("assets", name).read_text(encoding="utf-8")


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """Replace ``{{name}}`` in a template by its value; names inside of values are not replaced."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def _report_facts(report: ReportFacts) -> list[tuple[str, str]]:
    target, free = report.target, report.margin_bytes
    facts = [("Total", format_bytes(report.device_bytes))]
    if target.device_bytes is not None:
        facts.append(("Usable", format_bytes(target.device_bytes)))
    if free is not None:
        share = percent(abs(free), target.budget_bytes or 0)
        facts.append(("Free" if free >= 0 else "Too much", f"{format_bytes(abs(free))} ({share})"))
    if target.reserve_bytes:
        facts.append(("Reserve", format_bytes(target.reserve_bytes)))
    if report.host_bytes:
        capacity = f" of {format_bytes(target.host_bytes)}" if target.host_bytes else ""
        facts.append(("Host", f"{format_bytes(report.host_bytes)}{capacity}"))
    facts.append(("Peak", shorten(peak_text(report, "device"), 90)))
    return facts


def definition_list(facts: Iterable[tuple[str, str]]) -> str:
    """Make the escaped entries of a ``dl`` element from (name, text) pairs."""
    return "".join(f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd></div>" for name, text in facts)


def _footer(notes: Iterable[str], versions: Mapping[str, str | None]) -> str:
    lines = [*(f"Note: {note}" for note in notes)]
    lines.append("Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items() if version))
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def roles_table(report: ReportFacts) -> str:
    """Make the HTML table of bytes by role at the peak."""
    sides = [sum_by_role(at_peak(report, space)) for space in SPACES]
    roles = list(dict.fromkeys([*sides[0], *sides[1]]))
    rows = [[role, *(format_bytes(side.get(role, 0)) for side in sides)] for role in roles]
    rows.append(["total", *(format_bytes(sum(side.values())) for side in sides)])
    return _table(("role", "device", "host"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def table_row(tag: str, cells: Iterable[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(table_row("td", row) for row in rows)
    return f'<table class="static"><thead>{table_row("th", head)}</thead><tbody>{body}</tbody></table>'
