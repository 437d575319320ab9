"""Chat templates: a conversation becomes the text that the model was made for, and which of it is the assistant's.

The template is the tokenizer's own, in Jinja as `transformers` renders it: token ids and masks are those of its
``apply_chat_template(..., return_assistant_tokens_mask=True)``. Where a template does not mark the assistant's turns
with ``{% generation %}``, they are found from its renderings (`_render`): from after the header that the generation
prompt writes to what closes a turn. A template for which that cannot be told is refused, never guessed at.

One deviation: a character whose bytes are several tokens belongs to a turn with all of them. transformers leaves the
later ones out where such a character ends a turn.
"""

from __future__ import annotations

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
from ._schema import Example

_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_MOST_BYTES, _MOST_CONFIG_BYTES = 1024**2, 64 * 1024**2
_MOST_MEMORY_BYTES = 1024**3
_SECONDS = 20.0
"""For one conversation; a large one takes milliseconds."""
Spans = list[tuple[int, int]]
Tools = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template and what it is rendered with; nothing of it has run yet."""

    source: str
    """Jinja."""
    special: dict[str, str]
    """``bos_token``, ``eos_token`` and other special tokens, by name."""
    where: str
    """The file that it is from."""
    day: str | None = None
    """What a template that writes the date takes for today, such as ``2025-01-31``, from its midnight; None: now."""

    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Other variables of the template, such as ``enable_thinking``."""

    @property
    def writes_date(self) -> bool:
        """Whether what it renders depends on the day."""
        return "strftime_now" in self.source


def load_chat_template(directory: str | Path, file: str | Path | None = None) -> ChatTemplate | None:
    """Read the chat template of a model directory.

    Args:
        directory: with `chat_template.jinja`, or `tokenizer_config.json` and ``chat_template`` in it: a text, or a list
            of named ones, of which ``default`` is taken.
        file: a template to take instead.

    Returns:
        The template; None when the directory has none.

    Raises:
        ModelFileError: for files that are damaged, too large, or have several templates and no default.
    """
    directory = Path(directory)
    config, special = dict[str, Any](), load_special_tokens(directory)
    if (directory / _CONFIG).is_file():
        path = input_file(directory, _CONFIG, hint="copy the model's files again")
        config = parse_json(read_input(path, most_bytes=_MOST_CONFIG_BYTES), str(path))
    if file is not None or (directory / _TEMPLATE).is_file():
        given = Path(directory / _TEMPLATE if file is None else file)
        path = input_file(given.parent, given.name, hint="name a file with a Jinja template")
        content = read_input(path, most_bytes=_MOST_BYTES)
        try:
            return ChatTemplate(source=content.decode("utf-8"), special=special, where=str(path))
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{path}: not UTF-8 text", got=shortened(error), hint="copy it again") from error
    source = config.get("chat_template")
    where = f"{directory / _CONFIG}: chat_template"
    if isinstance(source, list):
        source = _default(source, where)
    if source is None:
        return None
    if not isinstance(source, str) or len(source) > _MOST_BYTES:
        raise ModelFileError(
            f"{where} is no template",
            expected="a text in Jinja, or a list of objects with name and template",
            got=shown(source),
            hint="copy the file again, or name a template: --chat-template FILE",
        )
    return ChatTemplate(source=source, special=special, where=where)


class Renderer:
    """Render conversations in a process of its own, which ends when this is closed.

    Args:
        template: what to render.

    Raises:
        ModelFileError: when the template is no Jinja.

    Memory:
        On the host at most 1 GiB, in the other process.
    """

    def __init__(self, template: ChatTemplate) -> None:
        import jinja2
        import markupsafe

        homes = {str(Path(str(module.__file__)).parents[1]) for module in (jinja2, markupsafe)}
        script = str(Path(__file__).with_name("_render.py"))
        self._template = template
        # Its messages go nowhere: an error of the template is an answer, and a full pipe would stop it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", script, *sorted(homes), str(_MOST_MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            given = {**template.special, **template.arguments}
            answer = self._ask({"template": template.source, "special": given, "day": template.day})
            if "error" in answer:
                raise self._refused(answer["error"])
        except BaseException:
            self.close()
            raise
        self._has_generation = bool(answer["has_generation"])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # what was not yet written has no reader any more
                    pass
        self._process.wait()

    def render(self, example: Example, *, turns: bool = True) -> tuple[str, Spans]:
        """Render a chat.

        Args:
            example: whose kind is ``chat``.
            turns: whether the assistant's turns are asked for.

        Returns:
            The text, and the characters of the assistant's turns, from and to.

        Raises:
            DataError: when the template refuses the conversation, or the turns cannot be told.
            ModelFileError: when the template leaves the sandbox, does not end, or takes too much memory.
        """
        request = {"messages": example.messages, "tools": example.tools, "first": example.first, "turns": turns}
        answer = self._answer(request, example.where)
        text = str(answer["text"])
        if not turns:
            return text, []
        silent = {number for number, each in enumerate(example.messages) if each.get("weight") == 0}
        if not self._has_generation:
            where, astray = example.where, answer["astray"]
            learned = [each for each in answer["turns"] if each[0] not in silent]
            return text, [self._turn(number, span, where, astray) for number, span in learned]
        start = self._start(text, answer, example)
        spans = self._with_weight(answer["spans"], example, silent)
        return text, [(max(a, start), b) for a, b in spans if b > start]

    def prompt(self, messages: Sequence[Mapping[str, Any]], where: str, tools: Tools | None = None) -> str:
        """Render a conversation with the beginning of the answer that is asked for.

        Args:
            messages: objects with ``role`` and ``content``.
            where: what the conversation is called in messages.
            tools: what the template is given as ``tools``.

        Raises:
            DataError: as in `render`.
            ModelFileError: as in `render`.
        """
        request = {"messages": [*messages], "tools": tools, "first": len(messages), "turns": False}
        return str(self._answer(request, where)["prompt"])

    def _answer(self, request: dict[str, Any], where: str) -> dict[str, Any]:
        try:
            answer = self._ask(request)
            said = str(answer.get("error", ""))
            if said.startswith(("SecurityError", "MemoryError", "OverflowError", "RecursionError")):
                raise self._refused(said)
        except ModelFileError as error:
            raise ModelFileError(f"{where}: {error.message}", got=error.got, hint=error.hint) from error
        if said:
            raise DataError(
                f"{where}: the chat template refuses this conversation",
                got=shortened(said),
                hint=f"look at its messages, their roles and their order; the template is {self._template.where}",
            )
        return answer

    def _start(self, text: str, answer: dict[str, Any], example: Example) -> int:
        """Return where the completion begins, of a prompt and a completion that are messages."""
        if not example.first:
            return 0
        if not text.startswith(answer["prompt"]):
            raise self._unclear(example.where, "the completion")
        return len(answer["prompt"])

    def _with_weight(self, spans: Any, example: Example, silent: set[int]) -> Spans:
        """Leave out turns that have no loss, of a template that marks what is learned."""
        turns = [number for number, each in enumerate(example.messages) if each["role"] == "assistant"]
        if not silent.intersection(turns):
            return spans
        if len(spans) != len(turns):
            raise DataError(
                f"{example.where}: the chat template does not say what of it is the turn with a weight of 0",
                expected=f"{{% generation %}} once for each of the assistant's {len(turns)} turns",
                got=f"{len(spans)} times, by {self._template.where}",
                hint="name a template that marks each turn once: --chat-template FILE",
            )
        return [span for number, span in zip(turns, sorted(spans), strict=True) if number not in silent]

    def _turn(self, number: int, span: Sequence[int] | None, where: str, astray: int | None) -> tuple[int, int]:
        if span is None:
            raise self._unclear(where, f"message {number + 1}", astray)
        return span[0], span[1]

    def _unclear(self, where: str, what: str, astray: int | None = None) -> DataError:
        besides = "" if astray is None else f", which leaves message {astray + 1} out or moves it"
        return DataError(
            f"{where}: the chat template does not say where {what} begins and ends",
            expected="a template with {% generation %} around the assistant's turns, or one that renders the beginning "
            "of a conversation as it does within the whole",
            got=f"{self._template.where}{besides}",
            hint="name a template that marks them (--chat-template FILE), or learn all tokens (--loss-on all)",
        )

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        late = threading.Event()

        def end() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(_SECONDS, end)
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
            raise self._refused(f"it did not end in {_SECONDS:g} s" if late.is_set() else "its process ended")
        return json.loads(line)

    def _refused(self, why: str) -> ModelFileError:
        return ModelFileError(
            f"{self._template.where}: a chat template that cannot be used",
            got=shortened(why),
            hint="shorten a very large conversation; else copy the file again, or name another: --chat-template FILE",
        )


def chat_prompts(
    template: ChatTemplate,
    conversations: Mapping[str, Sequence[Mapping[str, Any]]],
    tools: Mapping[str, Tools] | None = None,
) -> list[str]:
    """Render conversations, each with the beginning of the answer that is asked for.

    Args:
        template: of the model.
        conversations: messages, objects with ``role`` and ``content``, by what a conversation is called in errors.
        tools: what the template is given as ``tools`` with a conversation, by the same names; without it, none.

    Returns:
        The texts; special tokens are in them, so that a tokenizer should add none.

    Raises:
        DataError: when the template refuses a conversation.
        ModelFileError: when the template cannot be used.

    Memory:
        On the host at most 1 GiB, in a process of its own.
    """
    renderer = Renderer(template)
    try:
        return [renderer.prompt(each, where, (tools or {}).get(where)) for where, each in conversations.items()]
    finally:
        renderer.close()


def chat_turn(template: ChatTemplate, answer: str) -> str:
    """Render a question and an answer, with what the template writes after the answer.

    Args:
        template: of the model.
        answer: what the assistant says.

    Raises:
        DataError: when the template refuses the conversation.
        ModelFileError: when the template cannot be used.
    """
    messages = ({"role": "user", "content": "Name a tide."}, {"role": "assistant", "content": answer})
    renderer = Renderer(template)
    try:
        return renderer.render(Example(kind="chat", where="a turn", messages=messages), turns=False)[0]
    finally:
        renderer.close()


def _default(templates: list[Any], where: str) -> Any:
    named = {
        each["name"]: each.get("template")
        for each in templates
        if isinstance(each, dict) and isinstance(each.get("name"), str)
    }
    if "default" not in named and len(named) != 1:
        raise ModelFileError(
            f"{where} has several templates and none is named default",
            got=shortened(", ".join(map(shown, named)), 300) or "none with a name",
            hint="put the one that is meant into a file, and name it: --chat-template FILE",
        )
    return named.get("default", next(iter(named.values())))
