"""The process that renders chat templates; started by `_chat` as a script, never imported.

A template is a program of whoever made the model. Jinja's sandbox keeps it from Python's objects, but it may still
multiply strings and nest loops for as long as it likes; so it runs here, where memory is limited, and whoever waits
for an answer ends the process when none comes. Lines of JSON go in and out.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
from datetime import date, datetime
from typing import Any

_MOST_CHARACTERS = 16 * 1024**2


def main() -> None:
    """Read a template, then conversations, and answer each with a line."""
    paths, most_bytes = sys.argv[1:-1], int(sys.argv[-1])
    sys.path[:0] = paths
    _limit(most_bytes)
    first = json.loads(sys.stdin.readline())
    try:
        render, has_generation = _compiled(first["template"], first["special"], first["day"])
    except Exception as error:
        _answer({"error": _said(error)})
        return
    _answer({"has_generation": has_generation})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            _answer(_rendered(render, has_generation, request))
        except Exception as error:
            _answer({"error": _said(error)})


def _rendered(render: Any, has_generation: bool, request: dict[str, Any]) -> dict[str, Any]:
    """Render a conversation, and what stands before and with each turn where the template does not mark them."""
    messages, tools = request["messages"], request["tools"]
    text, spans = render(messages, tools, False)
    answer: dict[str, Any] = {"text": text, "spans": spans}
    if request["first"]:
        answer["prompt"] = render(messages[: request["first"]], tools, True)[0]
    if not has_generation and request["turns"]:
        cuts = [i for i, each in enumerate(messages) if each["role"] == "assistant" and i >= request["first"]]
        answer["cuts"] = [
            (i, render(messages[:i], tools, True)[0], render(messages[: i + 1], tools, False)[0]) for i in cuts
        ]
    return answer


def _compiled(source: str, special: dict[str, str], day: str | None) -> tuple[Any, bool]:
    """Compile a template with all that transformers gives one."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    nonce = secrets.token_hex(8)
    begin, end = f"\x00{nonce}(", f"\x00{nonce})"
    found: list[int] = []

    class Environment(ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            raise SecurityError(f"the template asks for {attribute!r} of a {type(obj).__name__}")

    class Generation(Extension):
        """Mark what the tag encloses, wherever it is: text of a macro or a variable may move."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            number = next(parser.stream).lineno
            found.append(number)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(number)

        def _marked(self, caller: Any) -> str:
            return f"{begin}{caller()}{end}"

    def fail(message: Any) -> None:
        raise TemplateError(str(message))

    def now() -> datetime:
        return datetime.now() if day is None else datetime.combine(date.fromisoformat(day), datetime.min.time())

    def tojson(
        x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = fail  # pyright: ignore[reportArgumentType]
    environment.globals["strftime_now"] = lambda form: now().strftime(form)  # pyright: ignore
    template = environment.from_string(source)
    marks = re.compile(re.escape(f"\x00{nonce}") + r"([()])")

    def render(messages: Any, tools: Any, add_generation_prompt: bool) -> tuple[str, list[tuple[int, int]]]:
        pieces: list[str] = []
        size = 0
        given = {**special, "messages": messages, "tools": tools, "documents": None}
        for piece in template.generate(**given, add_generation_prompt=add_generation_prompt):
            size += len(piece)
            if size > _MOST_CHARACTERS:
                raise MemoryError(f"more than {_MOST_CHARACTERS} characters")
            pieces.append(piece)
        return _unmarked("".join(pieces), marks)

    return render, bool(found)


def _unmarked(text: str, marks: re.Pattern[str]) -> tuple[str, list[tuple[int, int]]]:
    """Take the marks out of a text, and say what they enclosed."""
    parts = marks.split(text)
    pieces, spans, place, starts = [parts[0]], list[tuple[int, int]](), len(parts[0]), list[int]()
    for mark, piece in zip(parts[1::2], parts[2::2], strict=True):
        if mark == "(":
            starts.append(place)
        elif starts:
            spans.append((starts.pop(), place))
        pieces.append(piece)
        place += len(piece)
    return "".join(pieces), spans


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def _answer(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _limit(most_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # not on Windows; the limit of time holds there, too
        return
    for what, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, most_bytes)):
        hard = resource.getrlimit(what)[1]
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()
