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
            _answer(_rendered(render, has_generation, request, first["special"].get("eos_token", "")))
        except Exception as error:
            _answer({"error": _said(error)})


def _rendered(render: Any, has_generation: bool, request: dict[str, Any], eos: str) -> dict[str, Any]:
    """Render a conversation, and say where each turn of the assistant is where the template does not mark them."""
    messages, tools = request["messages"], request["tools"]
    text, spans = render(messages, tools, False)
    answer: dict[str, Any] = {"text": text, "spans": spans}
    if request["first"]:
        answer["prompt"] = render(messages[: request["first"]], tools, True)[0]
    if not has_generation and request["turns"]:
        turns = [i for i, each in enumerate(messages) if each["role"] == "assistant" and i >= request["first"]]
        found = _Turns(lambda given, prompt: render(given, tools, prompt)[0], messages, text, eos)
        answer["turns"] = [(i, found.span(i)) for i in turns]
    return answer


class _Turns:
    """Where turns begin and end in a text whose template does not say it.

    Marks at the end of what messages say are rendered with it: the header of a turn, which the generation prompt tells,
    comes after the mark of the message before, and what closes a turn after its own. Where marks change the text, or
    are not in it, the conversation is rendered up to the turn and up to its end, which have to be beginnings of the
    whole.
    """

    def __init__(self, render: Any, messages: list[Any], text: str, eos: str) -> None:
        self._render, self._messages, self._text, self._eos = render, messages, text, eos
        self._nonce = secrets.token_hex(8)
        self._tails: list[str] | None = None
        self._ends, self._starts = self._marked(messages, text)
        asked = max((i for i, each in enumerate(messages) if each["role"] != "assistant"), default=-1) + 1
        self._header = ""
        if self._ends and asked:
            closed, opened = (render(messages[:asked], prompt) for prompt in (False, True))
            closed = closed if opened.startswith(closed) else closed.removesuffix(eos)
            self._header = opened[len(closed) :] if opened.startswith(closed) else ""

    def span(self, i: int) -> tuple[int, int] | None:
        """Return where a turn is, or None where that cannot be told."""
        begin = self._begin(i)
        end = None if begin is None else self._end(i, begin)
        if begin is None or end is None:
            before, upto = self._render(self._messages[:i], True), self._render(self._messages[: i + 1], False)
            is_clear = upto.startswith(before) and self._text.startswith(upto)
            return (len(before), len(upto)) if is_clear else None
        return begin, end

    def _begin(self, i: int) -> int | None:
        if i - 1 not in self._ends or not self._header:
            return None
        most = self._starts.get(i) or min((at for j, at in self._ends.items() if j >= i), default=len(self._text))
        # Of a header that says more than is in the text, such as the beginning of a thought, the most that is there.
        cuts = [cut.end() for cut in re.finditer(r"[>\]:\n]|\Z", self._header)]
        for size in (cut for cut in reversed(cuts) if cut > len(self._header) // 2):
            at = self._text.find(self._header[:size], self._ends[i - 1], most)
            if at >= 0:
                return at + size
        return None

    def _end(self, i: int, begin: int) -> int | None:
        if i + 1 == len(self._messages):
            return len(self._text)
        tails, said = [tail for tail in self._tails_of(i) if tail], self._ends.get(i)
        if said is None:  # nothing is said, or shown; the first that closes a turn closes this one
            places = [(self._text.find(tail, begin), len(tail)) for tail in tails]
            at, size = min(((at, size) for at, size in places if at >= 0), default=(-1, 0))
            calls_unseen = self._messages[i].get("tool_calls") and at != begin
            return None if at < 0 or calls_unseen else at + size
        for own in (_trailing(self._messages[i]), ""):
            for tail in tails:
                if self._text.startswith(own + tail, said):
                    return said + len(own + tail)
        return None

    def _tails_of(self, i: int) -> list[str]:
        """Return what may close a turn; the same for all that call no tools."""
        if i in self._ends and self._messages[i].get("tool_calls"):
            return self._closing(i)
        if self._tails is None:
            alike = (j for j in self._ends if _closes_alike(self._messages[j]))
            self._tails = next((tails for j in alike if (tails := self._closing(j))), [])
        return self._tails

    def _closing(self, i: int) -> list[str]:
        upto, found = self._messages[: i + 1], list[str]()
        for prompt in (True, False):
            text = self._render(upto, prompt)
            ends, _ = self._marked(upto, text, prompt)
            if i in ends:
                tail = text[ends[i] :].removesuffix(self._header if prompt else self._eos)
                found.append(tail.removeprefix(_trailing(upto[-1])))
        return found

    def _marked(self, messages: list[Any], text: str, prompt: bool = False) -> tuple[dict[int, int], dict[int, int]]:
        """Return where what messages say ends, and where what the assistant says begins, of those that are told."""
        for with_starts in (True, False):
            given = [self._with_marks(i, each, with_starts) for i, each in enumerate(messages)]
            try:
                parts = re.split(rf"\ue000{self._nonce}([(.])(\d+);", self._render(given, prompt))
            except Exception:  # the template does not take such a text
                continue
            places: dict[str, dict[int, list[int]]] = {"(": {}, ".": {}}
            place = len(parts[0])
            for kind, number, piece in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
                places[kind].setdefault(int(number), []).append(place)
                place += len(piece)
            ends, starts = ({i: at[0] for i, at in places[kind].items() if len(at) == 1} for kind in ".(")
            if "".join(parts[::3]) == text and ends:
                return ends, starts
        return {}, {}

    def _with_marks(self, i: int, message: Any, with_starts: bool) -> Any:
        content, calls = message.get("content"), message.get("tool_calls")
        end = f"\ue000{self._nonce}.{i};"  # a character that filters to JSON leave as it is
        if isinstance(content, str) and content.strip():
            core = content.strip()
            before, after = content.split(core, 1)
            start = f"\ue000{self._nonce}({i};" if with_starts and message["role"] == "assistant" else ""
            return {**message, "content": f"{before}{start}{core}{end}{after}"}
        if calls and isinstance(calls, list) and isinstance(calls[-1], dict):
            function = calls[-1].get("function")
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                last = {**calls[-1], "function": {**function, "name": function["name"] + end}}
                return {**message, "tool_calls": [*calls[:-1], last]}
        return message


def _trailing(message: Any) -> str:
    """Return the white space that ends what a message says, which a template may leave out."""
    content = message.get("content")
    return content[len(content.rstrip()) :] if isinstance(content, str) else ""


def _closes_alike(message: Any) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls")


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
