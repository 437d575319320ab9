"""Chat templates: render a conversation as the model's text, and find the assistant's turns in it.

The template is the tokenizer's own Jinja template, rendered as in `transformers`: token ids and masks equal those of
its ``apply_chat_template(..., return_assistant_tokens_mask=True)``. Many templates do not mark the assistant's turns
with ``{% generation %}``. Then `_chat_turns` finds them by comparing renderings: a turn begins after the header that
the generation prompt writes, and includes the text that closes it. If a turn cannot be determined, the template is
refused. `Renderer.render` returns the spans of the turns. `_encode.Encoder` turns them into a loss mask of the tokens.

One deviation: if the bytes of a turn's last character are several tokens, all of them belong to the turn. transformers
leaves the later ones out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core import DataError, ModelFileError, input_file, parse_json, read_input, shortened, shown
from ...models import load_special_tokens
from ._normalize import Example

_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_MOST_BYTES, _MOST_CONFIG_BYTES = 1024**2, 64 * 1024**2
_MOST_MEMORY_BYTES = 1024**3
_SECONDS = 20.0
"""Time limit for one conversation; a large one takes milliseconds."""
Spans = list[tuple[int, int]]
Tools = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A chat template that is not compiled yet, and its variables."""

    source: str
    """Jinja source."""
    special: dict[str, str]
    """``bos_token``, ``eos_token`` and other special tokens, by name."""
    where: str
    """The file that the template comes from."""
    day: str | None = None
    """Date, such as ``2025-01-31``, at whose midnight the template is rendered; None: the current time."""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Other variables of the template, such as ``enable_thinking``."""
    system: str | None = None
    """System prompt that is added to conversations without a system message; None: nothing is added."""

    @property
    def writes_date(self) -> bool:
        """Whether the rendered text depends on the date."""
        return "strftime_now" in self.source


def load_chat_template(directory: str | Path, file: str | Path | None = None) -> ChatTemplate | None:
    """Read the chat template of a model directory.

    Args:
        directory: a directory with `chat_template.jinja`, or with ``chat_template`` in `tokenizer_config.json`: a text,
            or a list of named templates, of which ``default`` is used.
        file: a template file to use instead.

    Returns:
        The template; None when the directory has none.

    Raises:
        ModelFileError: for files that are damaged, too large, or have several templates without a default.
    """
    directory = Path(directory)
    config, special = dict[str, Any](), load_special_tokens(directory)
    if (directory / _CONFIG).is_file():
        path = input_file(directory, _CONFIG, hint="copy the model's files again")
        config = parse_json(read_input(path, most_bytes=_MOST_CONFIG_BYTES), str(path))
    if file is not None or (directory / _TEMPLATE).is_file():
        template_file = Path(directory / _TEMPLATE if file is None else file)
        path = input_file(template_file.parent, template_file.name, hint="name a file with a Jinja template")
        content = read_input(path, most_bytes=_MOST_BYTES)
        try:
            return ChatTemplate(source=content.decode("utf-8"), special=special, where=str(path))
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{path}: not UTF-8 text", got=shortened(error), hint="copy it again") from error
    source = config.get("chat_template")
    location = f"{directory / _CONFIG}: chat_template"
    if isinstance(source, list):
        source = _default_template(source, location)
    if source is None:
        return None
    if not isinstance(source, str) or len(source) > _MOST_BYTES:
        hint = "copy the file again, or name a Jinja template: --chat-template FILE"
        raise ModelFileError(f"{location} is not a template", got=shown(source), hint=hint)
    return ChatTemplate(source=source, special=special, where=location)


class Renderer:
    """Renderer of conversations in a separate process, which runs until `close`.

    The process takes at most 1 GiB of host memory. A template that is not valid Jinja raises ModelFileError.
    """

    def __init__(self, template: ChatTemplate) -> None:
        import jinja2
        import markupsafe

        package_folders = {str(Path(str(module.__file__)).parents[1]) for module in (jinja2, markupsafe)}
        script = str(Path(__file__).with_name("_chat_turns.py"))
        self._template = template
        # The process reports errors of the template in its answers. stderr is discarded, because a full pipe without a
        # reader would block the process.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", script, *sorted(package_folders), str(_MOST_MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            variables = {**template.special, **template.arguments}
            answer = self._exchange({"template": template.source, "special": variables, "day": template.day})
            if "error" in answer:
                raise self._template_error(answer["error"])
        except BaseException:
            self.close()
            raise
        self._has_generation = bool(answer["has_generation"])

    def close(self) -> None:
        """Stop the process."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # closing flushes unwritten bytes, which have no reader any more
                    pipe.close()
        self._process.wait()

    def render(self, example: Example, *, turns: bool = True) -> tuple[str, Spans]:
        """Render a chat; return its text and, with `turns`, the character spans (start, end) of the assistant's turns.

        A conversation that the template refuses, or whose turns cannot be determined, raises DataError. A template that
        violates the sandbox, does not finish, or takes too much memory raises ModelFileError.
        """
        messages = self._with_system(example.messages)
        first = example.first and example.first + len(messages) - len(example.messages)
        example = dataclasses.replace(example, messages=messages, first=first)
        request = {"messages": messages, "tools": example.tools, "first": first, "turns": turns}
        answer = self._request_answer(request, example.where)
        text = str(answer["text"])
        if not turns:
            return text, []
        zero_weight = {number for number, message in enumerate(example.messages) if message.get("weight") == 0}
        if not self._has_generation:
            learned = [(number, span) for number, span in answer["turns"] if number not in zero_weight]
            for number, span in learned:
                if span is None:
                    raise self._unclear_error(example.where, f"message {number + 1}", answer["astray"])
            return text, [(start, end) for _, (start, end) in learned]
        start = 0
        if example.first:  # the prompt and the completion are messages
            start = len(answer["prompt"])
            if not text.startswith(answer["prompt"]):
                raise self._unclear_error(example.where, "the completion")
        spans = self._drop_zero_weight(answer["spans"], example, zero_weight)
        return text, [(max(a, start), b) for a, b in spans if b > start]

    def prompt(self, messages: Sequence[Mapping[str, Any]], location: str, tools: Tools | None = None) -> str:
        """Render a conversation with the header of the next answer (the generation prompt); errors as in `render`."""
        messages = self._with_system(messages)
        request = {"messages": messages, "tools": tools, "first": len(messages), "turns": False}
        return str(self._request_answer(request, location)["prompt"])

    def _with_system(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
        """Return the messages; the template's system prompt comes first if they have no system or developer message."""
        if self._template.system is None or any(message["role"] in ("system", "developer") for message in messages):
            return tuple(messages)
        return ({"role": "system", "content": self._template.system}, *messages)

    def _request_answer(self, request: dict[str, Any], location: str) -> dict[str, Any]:
        try:
            answer = self._exchange(request)
            reason = str(answer.get("error", ""))
            # These errors mean an unusable template. Any other error is the template's refusal of this conversation.
            if reason.startswith(("SecurityError", "MemoryError", "OverflowError", "RecursionError")):
                raise self._template_error(reason)
        except ModelFileError as error:
            raise ModelFileError(f"{location}: {error.message}", got=error.got, hint=error.hint) from error
        if reason:
            problem = f"{location}: the chat template refuses this conversation"
            hint = f"check its messages, their roles and their order; the template is {self._template.where}"
            raise DataError(problem, got=shortened(reason), hint=hint)
        return answer

    def _drop_zero_weight(self, spans: Any, example: Example, zero_weight: set[int]) -> Spans:
        """Remove the turns with a weight of 0 from the spans of a template with ``{% generation %}``.

        The template's spans have no message numbers, so there has to be one span for each assistant turn.
        """
        turns = [number for number, message in enumerate(example.messages) if message["role"] == "assistant"]
        if not zero_weight.intersection(turns):
            return spans
        if len(spans) != len(turns):
            problem = "the chat template does not show which part is the turn with a weight of 0"
            got = f"{{% generation %}} {len(spans)} times for {len(turns)} turns in {self._template.where}"
            hint = "name a template that marks each turn once: --chat-template FILE"
            raise DataError(f"{example.where}: {problem}", got=got, hint=hint)
        return [span for number, span in zip(turns, sorted(spans), strict=True) if number not in zero_weight]

    def _unclear_error(self, location: str, subject: str, misplaced: int | None = None) -> DataError:
        details = "" if misplaced is None else f", which leaves message {misplaced + 1} out or moves it"
        return DataError(
            f"{location}: the chat template does not show where {subject} begins and ends",
            expected="a template with {% generation %} around the assistant's turns, or one that renders the beginning "
            "of a conversation as in the whole conversation",
            got=f"{self._template.where}{details}",
            hint="name a template that marks them (--chat-template FILE), or learn all tokens (--loss-on all)",
        )

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        timed_out = threading.Event()

        def kill() -> None:
            timed_out.set()
            self._process.kill()

        # A template may loop without output, which would block `readline`. Killing the process unblocks it.
        timer = threading.Timer(_SECONDS, kill)
        timer.start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request, default=str).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (BrokenPipeError, ValueError):
            line = b""
        finally:
            timer.cancel()
        if not line.endswith(b"\n"):
            reason = f"it did not finish within {_SECONDS:g} s" if timed_out.is_set() else "its process ended"
            raise self._template_error(reason)
        return json.loads(line)

    def _template_error(self, reason: str) -> ModelFileError:
        return ModelFileError(
            f"{self._template.where}: the chat template cannot be used",
            got=shortened(reason),
            hint="shorten a very large conversation, copy the file again, or name another: --chat-template FILE",
        )


def chat_prompts(
    template: ChatTemplate,
    conversations: Mapping[str, Sequence[Mapping[str, Any]]],
    tools: Mapping[str, Tools] | None = None,
) -> list[str]:
    """Render conversations, each followed by the header of the next answer (the generation prompt).

    Args:
        template: the model's template.
        conversations: dict from names, which errors contain, to lists of messages with ``role`` and ``content``.
        tools: the template's variable ``tools`` for each conversation, by the same names; missing names have no tools.

    Returns:
        The texts. They contain their special tokens, so the tokenizer must not add any.

    Raises:
        DataError: when the template refuses a conversation.
        ModelFileError: when the template cannot be used.

    Memory:
        At most 1 GiB on the host, in a separate process.
    """
    with contextlib.closing(Renderer(template)) as renderer:
        return [renderer.prompt(messages, name, (tools or {}).get(name)) for name, messages in conversations.items()]


def chat_turn(template: ChatTemplate, answer: str) -> str:
    """Render a question and an answer, including the text that closes the answer's turn.

    Args:
        template: the model's template.
        answer: content of the assistant's message.

    Raises:
        DataError: when the template refuses the conversation.
        ModelFileError: when the template cannot be used.
    """
    messages = ({"role": "user", "content": "Name a tide."}, {"role": "assistant", "content": answer})
    with contextlib.closing(Renderer(template)) as renderer:
        return renderer.render(Example(kind="chat", where="a turn", messages=messages), turns=False)[0]


def _default_template(templates: list[Any], location: str) -> Any:
    by_name = {
        template["name"]: template.get("template")
        for template in templates
        if isinstance(template, dict) and isinstance(template.get("name"), str)
    }
    if "default" not in by_name and len(by_name) != 1:
        got = shortened(", ".join(map(shown, by_name)), 300) or "no named template"
        hint = "write the right one into a file, and name it: --chat-template FILE"
        raise ModelFileError(f"{location} has several templates and none is named default", got=got, hint=hint)
    return by_name.get("default", next(iter(by_name.values())))
