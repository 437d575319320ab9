"""The process that renders chat templates; `_chat` starts it as a script and never imports it.

A template is a third-party program. Jinja's sandbox blocks access to Python objects, but a template can still multiply
strings and nest loops without limit. So it runs in this process, whose memory is limited, and `_chat` kills the process
if an answer takes too long. Input and output are lines of JSON.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
import sys
from datetime import date, datetime
from typing import Any

_MOST_CHARACTERS = 16 * 1024**2


def main() -> None:
    """Read a template, then conversations, and write a line of JSON for each."""
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
    """Render a conversation, and find the assistant's turns if the template does not mark them."""
    messages, tools = request["messages"], request["tools"]
    text, spans = render(messages, tools, False)
    _check_all_said(lambda given: render(given, tools, False)[0], messages)
    answer: dict[str, Any] = {"text": text, "spans": spans}
    if request["first"]:
        answer["prompt"] = render(messages[: request["first"]], tools, True)[0]
    if not has_generation and request["turns"]:
        turns = [i for i, each in enumerate(messages) if each["role"] == "assistant" and i >= request["first"]]
        found = _Turns(lambda given, prompt: render(given, tools, prompt)[0], messages, text, eos)
        answer["turns"], answer["astray"] = found.spans(turns), found.astray()
    return answer


class _Turns:
    """Finder of turns in a text whose template does not mark them.

    The conversation is rendered again with marks around the contents of its messages, which gives the position of each
    content in the text. A turn begins after its header, which follows the content of the previous message; the
    generation prompt gives the header. A turn ends after the text that closes it, which follows its own content.

    If the marks change the text or are missing in it, the conversation is rendered up to the turn, and up to the turn's
    end. Both renderings have to be prefixes of the whole text.
    """

    def __init__(self, render: Any, messages: list[Any], text: str, eos: str) -> None:
        self._render, self._messages, self._text, self._eos = render, messages, text, eos
        self._nonce = secrets.token_hex(8)
        self._tails: list[str] | None = None
        self._openings: dict[str, str] = {}
        self._ends, self._starts = self._marked(messages, text)
        self._headers = list[str]()
        # The header is the difference between the renderings with and without the generation prompt. They end at the
        # last user message, since after a tool's result some templates write no header and continue the turn.
        others = [i for i, each in enumerate(messages) if each["role"] != "assistant"]
        asked = max([i for i in others if messages[i]["role"] == "user"] or others, default=-1) + 1
        closed, opened = (self._tried(messages[:asked], prompt) for prompt in (False, True))
        if self._ends and asked and closed is not None and opened is not None:
            closed = closed if opened.startswith(closed) else closed.removesuffix(eos)
            self._headers = self._cut(opened[len(closed) :]) if opened.startswith(closed) else []

    def spans(self, turns: list[int]) -> list[tuple[int, tuple[int, int] | None]]:
        """Return the span of each turn; None if it is unknown, or overlaps the span of another turn."""
        spans = [(i, self._span(i)) for i in turns]
        told = sorted((span, i) for i, span in spans if span)
        twice = {i for a, b in itertools.pairwise(told) if b[0][0] < a[0][1] for i in (a[1], b[1])}
        return [(i, None if i in twice else span) for i, span in spans]

    def astray(self) -> int | None:
        """Return the first message that the template omits, or writes before an earlier message."""
        last = 0
        for i, each in enumerate(self._messages if self._ends else ()):
            if (each.get("content") or "").strip() and self._ends.get(i, -1) < last:
                return i
            last = max(last, self._ends.get(i, 0))
        return None

    def _span(self, i: int) -> tuple[int, int] | None:
        begin = self._begin(i)
        end = None if begin is None else self._end(i, begin)
        if begin is not None and end is not None:
            return begin, end
        before, upto = self._tried(self._messages[:i], True), self._tried(self._messages[: i + 1], False)
        if before is None or upto is None or not (upto.startswith(before) and self._text.startswith(upto)):
            return None
        return len(before), len(upto)

    def _cut(self, header: str) -> list[str]:
        """Return a header and prefixes of it that may occur alone, for example without the start of a thought.

        A prefix is longer than half of the header. It must not occur before messages of other roles, as the text before
        the name of the role does.
        """
        cuts = [cut.end() for cut in re.finditer(r"[>\]:\n]", header) if len(header) // 2 < cut.end() < len(header)]
        others = [
            self._text[self._ends.get(j - 1, 0) : self._starts.get(j, end)]
            for j, end in self._ends.items()
            if self._messages[j]["role"] != "assistant" and (not j or j - 1 in self._ends)
        ]
        shorter = [header[:size] for size in reversed(cuts)] if others else []
        return [header] * bool(header) + [each for each in shorter if not any(each in other for other in others)]

    def _begin(self, i: int) -> int | None:
        own = self._starts.get(i, self._ends.get(i))
        most = self._starts.get(i + 1, len(self._text)) if own is None else own
        before = self._ends.get(i - 1) if i else 0
        if before is None or (own is None and i + 1 < len(self._messages) and i + 1 not in self._starts):
            return None
        # The content may start with the characters that end the header, so the search ends after the content's start.
        # A thought before the content may quote the header, so the first match counts.
        places = [(self._text.find(each, before, most + len(each) - 1), -len(each)) for each in self._headers]
        at, size = min((place for place in places if place[0] >= 0), default=(-1, 0))
        return None if at < 0 else at - size

    def _end(self, i: int, begin: int) -> int | None:
        if i + 1 == len(self._messages):
            return len(self._text)
        said, start = self._ends.get(i), self._starts.get(i + 1, -1)
        opening = self._openings.get(self._messages[i + 1]["role"])
        if said is None:  # no visible content: the first closing text after the header closes this turn
            places = [(self._text.find(tail, begin), len(tail)) for tail in self._tails_of(i) if tail]
            at, size = min(((at, size) for at, size in places if at >= 0), default=(-1, 0))
            calls_unseen = self._messages[i].get("tool_calls") and at != begin
            return None if at < 0 or calls_unseen else at + size
        if not _closes_alike(self._messages[i]) and opening and self._text.endswith(opening, said, max(start, 0)):
            return start - len(opening)  # tool-call arguments vary, so measure back from the next message's header
        for own in (_trailing(self._messages[i]), ""):
            for tail in filter(None, self._tails_of(i)):
                if self._text.startswith(own + tail, said):
                    end = said + len(own + tail)
                    if end < start and not _closes_alike(self._messages[i]):
                        self._openings.setdefault(self._messages[i + 1]["role"], self._text[end:start])
                    return end
        return None

    def _tails_of(self, i: int) -> list[str]:
        """Return texts that may close a turn; turns without tool calls share them."""
        if i in self._ends and self._messages[i].get("tool_calls"):
            return self._closing(i)
        if self._tails is None:
            alike = (j for j in self._ends if _closes_alike(self._messages[j]))
            self._tails = next((tails for j in alike if (tails := self._closing(j))), [])
        return self._tails

    def _closing(self, i: int) -> list[str]:
        """Return the text after the last content in renderings up to message i, with and without a next header."""
        upto, found = self._messages[: i + 1], list[str]()
        for prompt in (True, False):
            text = self._tried(upto, prompt)
            ends = {} if text is None else self._marked(upto, text, prompt, most=0)[0]
            if text is not None and i in ends:
                header = self._headers[0] if self._headers else ""
                tail = text[ends[i] :].removesuffix(header if prompt else self._eos)
                found.append(tail.removeprefix(_trailing(upto[-1])))
        return found

    def _tried(self, messages: list[Any], prompt: bool) -> str | None:
        """Render a part of the conversation; None if the template refuses it."""
        try:
            return self._render(messages, prompt)
        except Exception:
            return None

    def _marked(
        self, messages: list[Any], text: str, prompt: bool = False, most: int = 2
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Return the ends and the starts of the messages' contents in the text, as far as marks show them."""
        # A template may test how a content begins, or whether it is empty. So try fewer marks until the rendering
        # without its marks equals the text.
        for marks in range(most, -1, -1):
            given = [self._with_marks(i, each, marks) for i, each in enumerate(messages)]
            parts = re.split(rf"\ue000{self._nonce}([(.!])(\d+);", self._tried(given, prompt) or "")
            places: dict[str, dict[int, list[int]]] = {"(": {}, ".": {}, "!": {}}
            place = len(parts[0])
            for kind, number, piece in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
                places[kind].setdefault(int(number), []).append(place)
                place += len(piece)
            ends, starts = ({i: at[0] for i, at in places[kind].items() if len(at) == 1} for kind in ".(")
            # A template may repeat the name of a call at the tool's result, so the first mark of a call counts.
            calls = {i: at[0] for i, at in places["!"].items()}
            if "".join(parts[::3]) == text and ends | calls:
                return ends | calls, starts
        return {}, {}

    def _with_marks(self, i: int, message: Any, marks: int) -> Any:
        """Write marks at the end of a message's content, and after the name of its last tool call.

        With ``marks=1`` also mark the start of assistant contents, with ``marks=2`` the start of all contents.
        """
        content, calls = message.get("content"), message.get("tool_calls")
        is_other = message["role"] != "assistant"
        given = dict(message)
        end = f"\ue000{self._nonce}.{i};"  # the JSON filter does not escape this character
        if (content or "").strip() or (isinstance(content, str) and is_other and marks == 2):
            start = f"\ue000{self._nonce}({i};" if marks == 2 or (marks and not is_other) else ""
            given["content"] = _wrapped(content, start, end)
        last = len(calls) - 1 if isinstance(calls, list) else 0
        return _with_marked_calls(given, lambda j: f"\ue000{self._nonce}!{i};" if j == last else "")


def _check_all_said(render: Any, messages: list[Any]) -> None:
    """Refuse a conversation whose tool calls the template omits.

    Raises:
        ValueError: with the call and the message.
    """
    nonce, marked, wanted = secrets.token_hex(8), list[Any](), dict[str, str]()
    for i, each in enumerate(messages):
        given = _with_marked_calls(each, lambda j, i=i: f"\ue000{nonce}!{i},{j};")
        if given is not each:
            calls = range(len(each["tool_calls"]))
            wanted |= {f"\ue000{nonce}!{i},{j};": f"call {j + 1} of tools in message {i + 1}" for j in calls}
        marked.append(given)
    if not wanted:
        return
    try:
        found = render(marked)
    except Exception:  # the template rejects the marked names
        return
    for mark, what in wanted.items():
        if mark not in found:
            raise ValueError(f"it does not write {what}")


def _with_marked_calls(message: Any, mark: Any) -> Any:
    """Append a mark to the name of each tool call; return the message unchanged if a call has no name."""
    calls = message.get("tool_calls")
    if not calls or not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        return message
    marked = list[Any]()
    for j, call in enumerate(calls):
        called = call.get("function", call)
        if not isinstance(called, dict) or not isinstance(called.get("name"), str):
            return message
        named = {**called, "name": called["name"] + mark(j)}
        marked.append({**call, "function": named} if "function" in call else named)
    return {**message, "tool_calls": marked}


def _wrapped(content: str, start: str, end: str) -> str:
    """Write marks around a content, inside its leading and trailing white space."""
    core = content.strip()
    before, after = content.split(core, 1) if core else (content, "")
    return f"{before}{start}{core}{end}{after}"


def _trailing(message: Any) -> str:
    """Return the trailing white space of a message's content, which a template may strip."""
    text = message.get("content") or ""
    return text[len(text.rstrip()) :]


def _closes_alike(message: Any) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls")


def _compiled(source: str, special: dict[str, str], day: str | None) -> tuple[Any, bool]:
    """Compile a template with the globals, filters and extensions of transformers.

    Returns:
        A function that renders messages, and whether the template has ``{% generation %}``.
    """
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
        """The ``{% generation %}`` tag, which writes marks around its text.

        Marks stay with the text when a macro or a variable moves it.
        """

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
    """Remove the marks from a text, and return the spans that they enclosed."""
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
    except ImportError:  # Windows has no `resource`; there only the time limit applies
        return
    for what, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, most_bytes)):
        hard = resource.getrlimit(what)[1]
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()
