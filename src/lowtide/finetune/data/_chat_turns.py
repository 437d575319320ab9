"""The process that renders chat templates and finds the assistant's turns; `_chat` starts it as a script.

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
    _limit_memory(most_bytes)
    first = json.loads(sys.stdin.readline())
    try:
        render, has_generation = _compile(first["template"], first["special"], first["day"])
    except Exception as error:
        _answer({"error": _error_text(error)})
        return
    _answer({"has_generation": has_generation})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            _answer(_render_request(render, has_generation, request, first["special"].get("eos_token", "")))
        except Exception as error:
            _answer({"error": _error_text(error)})


def _render_request(render: Any, has_generation: bool, request: dict[str, Any], eos: str) -> dict[str, Any]:
    """Render a conversation, and find the assistant's turns if the template does not mark them."""
    messages, tools = request["messages"], request["tools"]
    text, spans = render(messages, tools, False)
    _check_tool_calls(lambda conversation: render(conversation, tools, False)[0], messages)
    answer: dict[str, Any] = {"text": text, "spans": spans}
    if request["first"]:
        answer["prompt"] = render(messages[: request["first"]], tools, True)[0]
    if not has_generation and request["turns"]:
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= request["first"]]
        finder = _TurnFinder(lambda conversation, prompt: render(conversation, tools, prompt)[0], messages, text, eos)
        answer["turns"], answer["astray"] = finder.spans(turns), finder.misplaced_message()
    return answer


class _TurnFinder:
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
        self._ends, self._starts = self._content_positions(messages, text)
        self._headers = list[str]()
        # The header is the difference between the renderings with and without the generation prompt. They end at the
        # last user message, since after a tool's result some templates write no header and continue the turn.
        other_roles = [i for i, message in enumerate(messages) if message["role"] != "assistant"]
        question_end = max([i for i in other_roles if messages[i]["role"] == "user"] or other_roles, default=-1) + 1
        prefix, prompted = (self._try_render(messages[:question_end], prompt) for prompt in (False, True))
        if self._ends and question_end and prefix is not None and prompted is not None:
            prefix = prefix if prompted.startswith(prefix) else prefix.removesuffix(eos)
            self._headers = self._header_variants(prompted[len(prefix) :]) if prompted.startswith(prefix) else []

    def spans(self, turns: list[int]) -> list[tuple[int, tuple[int, int] | None]]:
        """Return the span of each turn; None if it is unknown, or overlaps the span of another turn."""
        spans = [(i, self._find_span(i)) for i in turns]
        known_spans = sorted((span, i) for i, span in spans if span)
        overlapping = {i for a, b in itertools.pairwise(known_spans) if b[0][0] < a[0][1] for i in (a[1], b[1])}
        return [(i, None if i in overlapping else span) for i, span in spans]

    def misplaced_message(self) -> int | None:
        """Return the index of the first message that the template omits, or writes before an earlier one; or None."""
        last = 0
        for i, message in enumerate(self._messages if self._ends else ()):
            if (message.get("content") or "").strip() and self._ends.get(i, -1) < last:
                return i
            last = max(last, self._ends.get(i, 0))
        return None

    def _find_span(self, i: int) -> tuple[int, int] | None:
        begin = self._find_begin(i)
        end = None if begin is None else self._find_end(i, begin)
        if begin is not None and end is not None:
            return begin, end
        prefix, rendered = self._try_render(self._messages[:i], True), self._try_render(self._messages[: i + 1], False)
        if prefix is None or rendered is None or not (rendered.startswith(prefix) and self._text.startswith(rendered)):
            return None
        return len(prefix), len(rendered)

    def _header_variants(self, header: str) -> list[str]:
        """Return a header and prefixes of it that may occur alone, for example without the start of a thought."""
        # A prefix is longer than half of the header. It must not occur before messages of other roles: a prefix that
        # ends before the name of the role would.
        cuts = [cut.end() for cut in re.finditer(r"[>\]:\n]", header) if len(header) // 2 < cut.end() < len(header)]
        texts_before = [
            self._text[self._ends.get(j - 1, 0) : self._starts.get(j, end)]
            for j, end in self._ends.items()
            if self._messages[j]["role"] != "assistant" and (not j or j - 1 in self._ends)
        ]
        shorter = [header[:size] for size in reversed(cuts)] if texts_before else []
        shorter = [variant for variant in shorter if not any(variant in text for text in texts_before)]
        return [header, *shorter] if header else []

    def _find_begin(self, i: int) -> int | None:
        content_start = self._starts.get(i, self._ends.get(i))
        limit = self._starts.get(i + 1, len(self._text)) if content_start is None else content_start
        previous_end = self._ends.get(i - 1) if i else 0
        is_unlimited = content_start is None and i + 1 < len(self._messages) and i + 1 not in self._starts
        if previous_end is None or is_unlimited:
            return None
        # The content may start with the characters that end the header, so the search ends after the content's start.
        # A thought before the content may quote the header, so the first match counts.
        matches = [
            (self._text.find(header, previous_end, limit + len(header) - 1), -len(header)) for header in self._headers
        ]
        position, size = min((match for match in matches if match[0] >= 0), default=(-1, 0))
        return None if position < 0 else position - size

    def _find_end(self, i: int, begin: int) -> int | None:
        if i + 1 == len(self._messages):
            return len(self._text)
        content_end, start = self._ends.get(i), self._starts.get(i + 1, -1)
        opening = self._openings.get(self._messages[i + 1]["role"])
        if content_end is None:  # no visible content: the first closing text after the header closes this turn
            matches = [(self._text.find(tail, begin), len(tail)) for tail in self._closing_texts(i) if tail]
            position, size = min(((position, size) for position, size in matches if position >= 0), default=(-1, 0))
            has_hidden_calls = self._messages[i].get("tool_calls") and position != begin
            return None if position < 0 or has_hidden_calls else position + size
        is_plain = _is_plain_answer(self._messages[i])
        if not is_plain and opening and self._text.endswith(opening, content_end, max(start, 0)):
            return start - len(opening)  # tool-call arguments vary, so measure back from the next message's header
        for space in (_trailing_space(self._messages[i]), ""):
            for tail in filter(None, self._closing_texts(i)):
                if self._text.startswith(space + tail, content_end):
                    end = content_end + len(space + tail)
                    if end < start and not is_plain:
                        self._openings.setdefault(self._messages[i + 1]["role"], self._text[end:start])
                    return end
        return None

    def _closing_texts(self, i: int) -> list[str]:
        """Return texts that may close a turn; turns without tool calls share them."""
        if i in self._ends and self._messages[i].get("tool_calls"):
            return self._render_closings(i)
        if self._tails is None:
            turns = (j for j in self._ends if _is_plain_answer(self._messages[j]))
            self._tails = next((tails for j in turns if (tails := self._render_closings(j))), [])
        return self._tails

    def _render_closings(self, i: int) -> list[str]:
        """Render the messages up to i, with and without a next header; return what follows the content of message i."""
        beginning, tails = self._messages[: i + 1], list[str]()
        for prompt in (True, False):
            text = self._try_render(beginning, prompt)
            ends = {} if text is None else self._content_positions(beginning, text, prompt, max_marks=0)[0]
            if text is not None and i in ends:
                header = self._headers[0] if self._headers else ""
                tail = text[ends[i] :].removesuffix(header if prompt else self._eos)
                tails.append(tail.removeprefix(_trailing_space(beginning[-1])))
        return tails

    def _try_render(self, messages: list[Any], prompt: bool) -> str | None:
        """Render a part of the conversation; None if the template refuses it."""
        try:
            return self._render(messages, prompt)
        except Exception:
            return None

    def _content_positions(
        self, messages: list[Any], text: str, prompt: bool = False, max_marks: int = 2
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Return the ends, and the starts, of contents in the text, by message; unknown positions are absent."""
        # A template may test how a content begins, or whether it is empty. So try fewer marks until the rendering
        # without its marks equals the text.
        for marks in range(max_marks, -1, -1):
            marked = [self._mark_message(i, message, marks) for i, message in enumerate(messages)]
            parts = re.split(rf"\ue000{self._nonce}([(.!])(\d+);", self._try_render(marked, prompt) or "")
            positions: dict[str, dict[int, list[int]]] = {"(": {}, ".": {}, "!": {}}
            position = len(parts[0])
            for kind, number, piece in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
                positions[kind].setdefault(int(number), []).append(position)
                position += len(piece)
            ends, starts = (
                {i: occurrences[0] for i, occurrences in positions[kind].items() if len(occurrences) == 1}
                for kind in ".("
            )
            # A template may repeat the name of a call at the tool's result, so the first mark of a call counts.
            calls = {i: occurrences[0] for i, occurrences in positions["!"].items()}
            if "".join(parts[::3]) == text and ends | calls:
                return ends | calls, starts
        return {}, {}

    def _mark_message(self, i: int, message: Any, marks: int) -> Any:
        """Write marks at the end of a message's stripped content, and after the name of its last tool call.

        With ``marks=1`` also mark the start of assistant contents, with ``marks=2`` the start of all contents.
        """
        content, calls = message.get("content"), message.get("tool_calls")
        is_other = message["role"] != "assistant"
        marked = dict(message)
        end = f"\ue000{self._nonce}.{i};"  # the JSON filter does not escape this character
        if (content or "").strip() or (isinstance(content, str) and is_other and marks == 2):
            start = f"\ue000{self._nonce}({i};" if marks == 2 or (marks and not is_other) else ""
            stripped = content.strip()
            before, after = content.split(stripped, 1) if stripped else (content, "")
            marked["content"] = f"{before}{start}{stripped}{end}{after}"
        last = len(calls) - 1 if isinstance(calls, list) else 0
        return _mark_calls(marked, lambda j: f"\ue000{self._nonce}!{i};" if j == last else "")


def _check_tool_calls(render: Any, messages: list[Any]) -> None:
    """Raise ValueError for a tool call that the template omits; the error names the call and its message."""
    nonce, conversation, descriptions = secrets.token_hex(8), list[Any](), dict[str, str]()
    for i, message in enumerate(messages):
        marked_message = _mark_calls(message, lambda j, i=i: f"\ue000{nonce}!{i},{j};")
        if marked_message is not message:
            calls = range(len(message["tool_calls"]))
            descriptions |= {f"\ue000{nonce}!{i},{j};": f"tool call {j + 1} of message {i + 1}" for j in calls}
        conversation.append(marked_message)
    if not descriptions:
        return
    try:
        text = render(conversation)
    except Exception:  # the template rejects the marked names
        return
    for mark, description in descriptions.items():
        if mark not in text:
            raise ValueError(f"it does not write {description}")


def _mark_calls(message: Any, mark: Any) -> Any:
    """Append a mark to the name of each tool call; return the message unchanged if a call has no name."""
    calls = message.get("tool_calls")
    if not calls or not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        return message
    marked = list[Any]()
    for j, call in enumerate(calls):
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return message
        renamed = {**function, "name": function["name"] + mark(j)}
        marked.append({**call, "function": renamed} if "function" in call else renamed)
    return {**message, "tool_calls": marked}


def _trailing_space(message: Any) -> str:
    """Return the trailing white space of a message's content, which a template may strip."""
    text = message.get("content") or ""
    return text[len(text.rstrip()) :]


def _is_plain_answer(message: Any) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls")


def _compile(source: str, special: dict[str, str], day: str | None) -> tuple[Any, bool]:
    """Compile a template as transformers does; return a renderer, and whether it has ``{% generation %}``."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    nonce = secrets.token_hex(8)
    begin, end = f"\x00{nonce}(", f"\x00{nonce})"
    generation_lines: list[int] = []

    class Environment(ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            raise SecurityError(f"the template accesses {attribute!r} of a {type(obj).__name__}")

    class Generation(Extension):
        """The ``{% generation %}`` tag; its marks stay around the text when a macro or variable moves the text."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            number = next(parser.stream).lineno
            generation_lines.append(number)
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
        variables = {**special, "messages": messages, "tools": tools, "documents": None}
        for piece in template.generate(**variables, add_generation_prompt=add_generation_prompt):
            size += len(piece)
            if size > _MOST_CHARACTERS:
                raise MemoryError(f"more than {_MOST_CHARACTERS} characters")
            pieces.append(piece)
        return _remove_marks("".join(pieces), marks)

    return render, bool(generation_lines)


def _remove_marks(text: str, marks: re.Pattern[str]) -> tuple[str, list[tuple[int, int]]]:
    """Remove the marks from a text, and return the spans that they enclosed."""
    parts = marks.split(text)
    pieces, spans, position, starts = [parts[0]], list[tuple[int, int]](), len(parts[0]), list[int]()
    for mark, piece in zip(parts[1::2], parts[2::2], strict=True):
        if mark == "(":
            starts.append(position)
        elif starts:
            spans.append((starts.pop(), position))
        pieces.append(piece)
        position += len(piece)
    return "".join(pieces), spans


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def _answer(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _limit_memory(most_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # Windows has no `resource`; there only the time limit applies
        return
    for resource_id, limit in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, most_bytes)):
        hard = resource.getrlimit(resource_id)[1]
        resource.setrlimit(resource_id, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    main()
