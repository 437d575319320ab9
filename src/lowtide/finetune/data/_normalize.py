"""Turn raw records into `Example`s: the fields of a record determine its kind, and pydantic checks their types.

ShareGPT's ``conversations`` become messages. A prompt and a completion that are lists of messages become one chat,
whose turns before the completion have no loss. Turns with a ``weight`` of 0, a field of OpenAI's records, have no loss
either. Fields that other trainers read are rewritten or refused (`_normalize_record`).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ...core import ConfigError, DataError, ModelFileError, parse_json, parse_json_value, shortened, shown, validate

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation"), "tool"),
}
_TOOL_CALL_SPEAKERS = ("function_call", "tool_call")
"""Speakers whose turns are tool calls of the assistant, as LLaMA-Factory writes them."""
_SHAREGPT_ROLES = ("human", "gpt", "chatgpt")
_KNOWN_ROLES = ("assistant", "user", "system", "tool")
_CHAT = '{"messages": [{"role": "user", "content": "..."}, ...]}'
_HINT = f'write one object a record, such as {{"text": "..."}} or {_CHAT}'
_CHAT_HINT = f"write one object a record, such as {_CHAT}"
_SYSTEM_FIELDS = ("system", "system_prompt")
_FLAGS = {"train": False, "trainable": False, "loss": False, "loss_mask": False, "masked": True}
"""Flags of a turn, each with the value that excludes the turn from the loss."""
_MEDIA_FIELDS = ("image", "images", "video", "videos", "audio", "audios")
_PLACEHOLDERS = ("<image>", "<video>", "<audio>")
_TEXT_PARTS = ("text", "input_text", "output_text")
_FIELD_NAMES = {"alpaca": "instruction and output", "prompt": "prompt and completion"}
_TURN_FIELDS = ("conversations", "messages")
_LIST_FIELDS = ("messages", "conversations", "prompt", "completion")


class _StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _Turn(_StrictModel):
    model_config = ConfigDict(strict=True, extra="allow")  # templates read more: tool_calls, name, reasoning_content
    role: str = Field(min_length=1)
    content: str | None = None


class _ShareGPTTurn(_StrictModel):
    speaker: str = Field(alias="from")
    value: str = ""  # may be absent: `_normalize_record` drops null fields, and the content of a message may be null


class _Messages(_StrictModel):
    messages: list[_Turn] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None


class _Conversations(_StrictModel):
    conversations: list[_ShareGPTTurn] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None


class _Prompt(_StrictModel):
    prompt: str | list[_Turn]
    completion: str | list[_Turn]
    tools: list[dict[str, Any]] | None = None


class _Preference(_StrictModel):
    """Two answers to one prompt; each answer is checked with the prompt, as a record of another kind."""

    chosen: Any
    rejected: Any
    prompt: Any = None
    instruction: Any = None
    input: Any = None
    conversations: Any = None
    messages: Any = None
    tools: list[dict[str, Any]] | None = None


class _Pair(_StrictModel):
    anchor: str
    positive: str


class _Alpaca(_StrictModel):
    instruction: str
    input: str | None = None
    output: str


class _Text(_StrictModel):
    text: str


_SCHEMAS: dict[str, type[BaseModel]] = {
    "messages": _Messages,
    "conversations": _Conversations,
    "prompt": _Prompt,
    "preference": _Preference,
    "pair": _Pair,
    "alpaca": _Alpaca,
    "text": _Text,
}
_KINDS = {
    kind: tuple(name for name, field in schema.model_fields.items() if field.is_required())
    for kind, schema in _SCHEMAS.items()
}
"""Required fields of each kind."""
_FIELDS = (*(field for fields in _KINDS.values() for field in fields), "input", "tools", "system", "label")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A checked record."""

    kind: str
    """One of ``text``, ``pair``, ``prompt`` (with its completion), ``alpaca`` (instruction, output) and ``chat``."""
    where: str
    """File and line or row, for errors."""
    text: str = ""
    """The text, the completion of a prompt, or the output of an Alpaca record."""
    prompt: str = ""
    """The prompt, or the instruction of an Alpaca record."""
    more: str = ""
    """The input of an Alpaca record."""
    messages: tuple[dict[str, Any], ...] = ()
    """The messages of a chat."""
    tools: list[dict[str, Any]] | None = None
    """The variable ``tools`` of a chat's template."""
    first: int = 0
    """Index of the first message of a chat that may have a loss."""
    rejected: Example | None = None
    """For a preference: the prompt with the answer that is not preferred. This example has the preferred answer. For a
    pair of similar texts: the second text."""
    target: bool | int | None = None
    """The record's field ``label``: whether the answer is desirable, or the number of a class."""

    @property
    def label(self) -> str:
        """The kind for messages, such as ``preference of the kind chat``."""
        return self.kind if self.rejected is None else f"preference of the kind {self.kind}"

    unread: tuple[str, ...] = ()
    """Columns of the record that are not read."""


def parse_columns(words: tuple[str, ...] | None) -> dict[str, str]:
    """Parse words such as ``messages=chat``, which map the fields of a record to columns of the data.

    A word without ``=``, an unknown field and a repeated field raise ConfigError.
    """
    column_of: dict[str, str] = {}
    for word in words or ():
        field, separator, column = word.partition("=")
        if not separator or field not in _FIELDS or not column or field in column_of:
            hint = f"write for instance --columns messages=chat, each field once; the fields are {', '.join(_FIELDS)}"
            raise ConfigError(f"columns: {shown(word)} does not map a field to a column", hint=hint)
        column_of[field] = column
    return column_of


def parse_record(raw: Mapping[str, Any], where: str, columns: Mapping[str, str]) -> Example | None:
    """Determine the kind of a record and check it; return None if the part to learn is missing or white space.

    `where` is the file and the line or row. If `columns`, from `parse_columns`, is not empty, other columns are not
    read. Missing fields, fields that fit several kinds, and values of a wrong type raise DataError.
    """
    kind, record = _kind_of(raw, where, columns)
    fields_used = {*columns.values()} or {*_SCHEMAS[kind].model_fields, *_extra_fields(kind)}
    target = record.get("label")
    if isinstance(target, str):  # as in CSV files
        target = int(target) if target.isdecimal() else {"true": True, "false": False}.get(target.lower())
    if not columns and not isinstance(target, bool):
        fields_used.discard("label")  # no verdict on the answer, but for example the number of a class
    if kind == "preference" and not columns and record.get("prompt") is not None:
        fields_used -= {"instruction", "input", *_TURN_FIELDS}
    example = _parse_example(kind, record, where)
    if example and example.kind == "alpaca" and not columns:
        fields_used -= {"tools", "functions", *_TURN_FIELDS}
    unread = tuple(name for name in raw if name not in fields_used)
    target = target if isinstance(target, int) else None
    return example and dataclasses.replace(example, target=target, unread=unread)


@contextmanager
def as_data_error(hint: str | None = None) -> Generator[None]:
    """Convert ModelFileError to DataError, around functions that also read model files; `hint` replaces the hint."""
    try:
        yield
    except ModelFileError as error:
        raise DataError(error.message, expected=error.expected, got=error.got, hint=hint or error.hint) from error


def _parse_example(kind: str, record: dict[str, Any], location: str) -> Example | None:
    """Check a record of a known kind, and return it; None for a blank one."""
    if kind in ("preference", "pair"):
        return _preference(record, location) if kind == "preference" else _pair(record, location)
    record = dict(record)
    for name in ("messages", "conversations", "tools", "functions"):  # a table stores lists as JSON text
        value = record.get(name)
        if isinstance(value, str) and value.strip():
            record[name] = parse_list(value.encode("utf-8", "surrogatepass"), f"{location}: {name}")
    if kind == "conversations":
        _check_speakers(record, location)
    record = _normalize_record(kind, record, location)
    if _is_blank(record[_KINDS[kind][-1]]):
        return None
    with as_data_error():
        validate(_SCHEMAS[kind], record, location, hint=_CHAT_HINT if kind == "messages" else _HINT)
    _check_values({name: record[name] for name in _SCHEMAS[kind].model_fields if name in record}, location)
    for name in _KINDS[kind]:
        _check_turns(record[name], location)
    if kind == "text":
        return Example(kind="text", where=location, text=record["text"])
    if kind == "alpaca":
        if not _is_blank(record.get("history")):  # the answer may depend on it
            words = ",".join(f"{field}={field}" for field in ("instruction", "input", "output") if field in record)
            hint = f"write earlier turns and the record as messages, or leave history out: --columns {words}"
            raise DataError(f"{location}: history is not read with instruction and output", hint=hint)
        prompt, more, text = record["instruction"], record.get("input") or "", record["output"]
        return Example(kind="alpaca", where=location, prompt=prompt, more=more, text=text)
    tools = record.get("tools")
    if kind == "messages":
        return Example(kind="chat", where=location, messages=tuple(record["messages"]), tools=tools)
    if kind == "conversations":
        turns = tuple(_message_of_turn(turn, location) for turn in record["conversations"])
        return Example(kind="chat", where=location, messages=turns, tools=tools)
    return _prompt_example(record, location, tools)


def _pair(record: Mapping[str, Any], location: str) -> Example | None:
    """Check two similar texts; the second one is the field `rejected` of the example."""
    with as_data_error():
        validate(_Pair, record, location, hint='write {"anchor": "...", "positive": "..."}')
    _check_values({name: record[name] for name in ("anchor", "positive")}, location)
    if any(_is_blank(record[name]) for name in ("anchor", "positive")):
        return None
    texts = [Example(kind="pair", where=location, text=record[name]) for name in ("anchor", "positive")]
    return dataclasses.replace(texts[0], rejected=texts[1])


def _preference(record: Mapping[str, Any], location: str) -> Example:
    """Check a prompt with two answers, which may be text or messages; messages may contain the prompt themselves."""
    answers = {name: record[name] for name in ("chosen", "rejected")}
    for name, answer in answers.items():
        if isinstance(answer, str) and answer.lstrip().startswith("[") and not isinstance(record.get("prompt"), str):
            answers[name] = parse_list(answer.encode("utf-8", "surrogatepass"), f"{location}: {name}")
        contents = ("value", "content", "tool_calls", "function_call")
        has_text = not isinstance(answer, Mapping) or not all(_is_blank(answer.get(content)) for content in contents)
        if _is_blank(answers[name]) or not has_text:
            hint = "remove the record, or write the answer"
            raise DataError(f"{location}: {name} is empty, but a preference needs two answers", hint=hint)
    chosen, rejected = answers.values()
    if chosen == rejected:
        hint = "remove the record: equal answers express no preference"
        raise DataError(f"{location}: chosen and rejected are equal", hint=hint)
    other_fields = ("tools", "functions", *_SYSTEM_FIELDS, *_MEDIA_FIELDS)
    shared = {name: record[name] for name in other_fields if record.get(name) is not None}
    kind, records = _answered_prompts(record, answers, location)
    examples: list[Example] = []
    for name, fields in records.items():
        example = _parse_example(kind, shared | fields, f"{location}: {name}")
        if example is None:
            hint = "write the instruction, or the turns before the answer"
            raise DataError(f"{location}: a preference without a prompt", got=_list_fields(record), hint=hint)
        if kind in _TURN_FIELDS:
            example = dataclasses.replace(example, first=len(example.messages) - 1)
        examples.append(dataclasses.replace(example, where=location))
    return dataclasses.replace(examples[0], rejected=examples[1])


def _answered_prompts(
    record: Mapping[str, Any], answers: Mapping[str, Any], location: str
) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the kind of the prompt of a preference, and for each answer a record of this kind."""
    prompt, lists = record.get("prompt"), all(isinstance(answer, list) for answer in answers.values())
    if prompt is None and not lists:
        if isinstance(record.get("instruction"), str):
            fields = {name: record[name] for name in ("instruction", "input") if name in record}
            if not _is_blank(record.get("history")):
                hint = "write earlier turns and the instruction as conversations, next to chosen and rejected"
                raise DataError(f"{location}: history is not read with instruction, chosen and rejected", hint=hint)
            return "alpaca", {name: fields | {"output": answer} for name, answer in answers.items()}
        turns = next((record[name] for name in _TURN_FIELDS if not _is_blank(record.get(name))), None)
        if isinstance(turns, str):
            turns = parse_list(turns.encode("utf-8", "surrogatepass"), f"{location}: the turns")
        if isinstance(turns, list):
            has_roles = any(isinstance(turn, Mapping) and "role" in turn for turn in turns)
            kind, speaker, text = ("messages", "role", "content") if has_roles else ("conversations", "from", "value")
            author = "assistant" if has_roles else "gpt"
            records: dict[str, dict[str, Any]] = {}
            for name, answer in answers.items():
                turn = {speaker: author, text: answer} if isinstance(answer, str) else answer
                records[name] = {kind: [*turns, turn]}
            return kind, records
    if lists and not isinstance(prompt, list):  # the answers may repeat the prompt, next to the prompt as text
        chosen, rejected = answers.values()
        pairs = enumerate(zip(chosen, rejected, strict=False))
        num_common = next((index for index, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
        if num_common and num_common not in (len(chosen), len(rejected)):
            prompt = chosen[:num_common]
            answers = {name: answer[num_common:] for name, answer in answers.items()}
        elif prompt is None:
            hint = "begin both with the messages of one prompt, and add one answer to each"
            raise DataError(f"{location}: chosen and rejected have different prompts, or no answer", hint=hint)
    if prompt is None:
        hint = "write the prompt in its own field, or both answers as messages that begin with the prompt"
        raise DataError(f"{location}: a preference without a prompt", got=_list_fields(record), hint=hint)
    return "prompt", {name: {"prompt": prompt, "completion": answer} for name, answer in answers.items()}


def _check_speakers(record: Mapping[str, Any], location: str) -> None:
    """Raise DataError if ``conversations`` has messages with a ``role``, instead of turns with ``from``."""
    turns = record["conversations"]
    if isinstance(turns, list) and any(isinstance(turn, Mapping) and "role" in turn for turn in turns):
        fields = {"tools": "tools", "system": "system", "system_prompt": "system"}
        extra_columns = "".join(f",{field}={name}" for name, field in fields.items() if record.get(name))
        hint = f"read them as messages: --columns messages=conversations{extra_columns}"
        raise DataError(f"{location}: conversations has turns with a role, instead of from and value", hint=hint)


def _kind_of(raw: Mapping[str, Any], location: str, columns: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    missing = [column for column in columns.values() if column not in raw]
    if missing:
        hint = "write the field, or name a column of the record with --columns"
        raise DataError(f"{location}: the record has no field {shown(missing[0])}", got=_list_fields(raw), hint=hint)
    record = {field: raw[column] for field, column in columns.items()} if columns else dict(raw)
    kinds = [kind for kind, fields in _KINDS.items() if all(field in record for field in fields)]
    if "preference" in kinds:
        return "preference", record
    if len(kinds) == 1:
        return kinds[0], record
    if kinds:
        fields = [" and ".join(_KINDS[kind]) for kind in kinds]
        optional = [name for name in _SCHEMAS[kinds[0]].model_fields if name in record and name not in _KINDS[kinds[0]]]
        names = [*_KINDS[kinds[0]], *optional]
        hint = f"select one of them: --columns {','.join(f'{name}={columns.get(name, name)}' for name in names)}"
        raise DataError(f"{location}: the record matches several kinds: {'; '.join(fields)}", hint=hint)
    delimiters = [delimiter for delimiter in (";", "\t", "|") if len(raw) == 1 and delimiter in next(iter(raw))]
    expected = "text; prompt and completion; instruction and output; messages; or conversations; for other objectives "
    expected += "also prompt, chosen and rejected, or anchor and positive"
    hint = "name the columns, for instance --columns messages=chat or --columns prompt=question,completion=answer"
    if delimiters:
        hint = "write the file with commas, or as .tsv with tabs; columns seem to be separated by "
        hint += shown(delimiters[0])
    problem = "the record matches no known kind"
    raise DataError(f"{location}: {problem}", expected=expected, got=_list_fields(raw), hint=hint)


def parse_list(content: bytes, where: str, *, allow_nan: bool = False) -> list[Any]:
    """Parse a JSON list with the strictness of `parse_json_value`; anything else raises DataError."""
    try:
        value = parse_json_value(content, where, allow_nan=allow_nan)
    except ModelFileError as error:
        raise DataError(error.message, got=error.got, hint=_remedy(content)) from error
    if not isinstance(value, list):
        raise DataError(f"{where}: not a list", hint="write a list of objects, or one object a line in a .jsonl file")
    return value  # pyright: ignore[reportUnknownVariableType]


def _remedy(content: bytes) -> str:
    if re.match(rb"\s*\[\s*(\{\s*)?'", content):
        return "write it with json.dumps, not with str; this is Python's notation"
    if re.search(rb",\s*[\]}]\s*$", content):
        return "remove the comma before the closing bracket"
    return "write the file again; it is truncated or damaged"


def _prompt_example(record: Mapping[str, Any], location: str, tools: Any) -> Example:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Example(kind="prompt", where=location, prompt=prompt, text=completion)
    if isinstance(prompt, str) or isinstance(completion, str):
        hint = "write both as messages, or both as text"
        raise DataError(f"{location}: one of prompt and completion is text, the other a list of messages", hint=hint)
    return Example(kind="chat", where=location, messages=(*prompt, *completion), tools=tools, first=len(prompt))


def _message_of_turn(turn: Mapping[str, Any], location: str) -> dict[str, Any]:
    weight = {"weight": turn["weight"]} if "weight" in turn else {}
    if turn["from"] in _TOOL_CALL_SPEAKERS:
        return {"role": "assistant", "tool_calls": _parse_calls(turn.get("value", ""), location), **weight}
    role = _ROLES.get(turn["from"])
    if role is None:
        names = ", ".join((*_ROLES, *_TOOL_CALL_SPEAKERS))
        hint = f"rename it to one of {names}, or write messages with role and content"
        raise DataError(f"{location}: conversations has an unknown speaker {shown(turn['from'])}", hint=hint)
    return {"role": role, "content": turn.get("value", ""), **weight}


def _parse_calls(value: str, location: str) -> list[dict[str, Any]]:
    """Parse the tool calls of a turn: a JSON object with name and arguments, or a list of them."""
    text = value.strip().encode("utf-8", "surrogatepass")
    calls = parse_list(text if text.startswith(b"[") else b"[" + text + b"]", f"{location}: a tool call")
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        hint = 'write {"name": "...", "arguments": {...}}, a list of such objects, or messages with tool_calls'
        raise DataError(f"{location}: the tool call cannot be read", got=shown(value), hint=hint)
    return [{"type": "function", "function": _normalize_call(call, location)} for call in calls]


def _check_turns(turns: Any, location: str) -> None:
    """Raise DataError for a weight other than 0 and 1, and for a misspelt role or a role of ShareGPT.

    Such a weight would have no effect. A template would write such a role, but the turn would not be learned. Other
    roles, such as ``developer`` or ``ipython``, are passed to the template.
    """
    for turn in turns if isinstance(turns, list) else ():
        weight = turn.get("weight")
        if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
            hint = "write 0 for a turn that is read and not learned, or 1, the default"
            raise DataError(f"{location}: a turn has the weight {shown(weight)}, which is neither 0 nor 1", hint=hint)
        role = turn.get("role", "user")  # a turn of ShareGPT has a speaker, which `_message_of_turn` checks
        if role in _KNOWN_ROLES:
            continue
        name = role.strip().lower()
        matches = difflib.get_close_matches(name, _KNOWN_ROLES, n=1, cutoff=0.8)
        if name in _SHAREGPT_ROLES or matches:
            close = _ROLES[name] if name in _SHAREGPT_ROLES else matches[0]
            raise DataError(f"{location}: unknown role {shown(role)}", hint=f"write {close}")


def _is_blank(value: Any) -> bool:
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def _check_values(fields: Mapping[str, Any], location: str) -> None:
    """Raise for text that is not Unicode, and for tools and calls that JSON cannot hold."""
    try:
        json.dumps(fields, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError as error:
        hint = "write the file again; half of a surrogate pair (\\ud800 to \\udfff) is not a character"
        raise DataError(f"{location}: the text is not valid Unicode", got=str(error), hint=hint) from error
    # Templates write tools and calls as JSON, which has no NaN. Numbers in other columns and fields are not read.
    turns = [turn for name in _LIST_FIELDS if isinstance(fields.get(name), list) for turn in fields[name]]
    calls = [turn.get("tool_calls") for turn in turns if isinstance(turn, Mapping)]
    try:
        json.dumps([fields.get("tools"), calls], allow_nan=False, default=str)
    except ValueError as error:
        hint = "replace NaN and Infinity with null or a finite number"
        raise DataError(f"{location}: a number in a tool is not finite", got=str(error), hint=hint) from error


def _list_fields(raw: Mapping[str, Any]) -> str:
    return f"fields {shortened(', '.join(map(shown, raw)), 300)}" if raw else "no fields"


def _extra_fields(kind: str) -> tuple[str, ...]:
    """Return the additional fields that `_normalize_record` reads for a kind of record."""
    return () if kind == "text" else (*_SYSTEM_FIELDS, "functions", "label", *_MEDIA_FIELDS)


def _normalize_record(kind: str, record: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Rewrite the unchecked fields of a record into fields that chat templates read.

    `kind` is a key of `_KINDS`. The result has no `_extra_fields`, and its turns have no null fields.
    """
    # Records come from many tools, and an ignored field changes what a model learns. Some fields have one meaning: a
    # system prompt next to messages, flags that exclude a turn from the loss, OpenAI's older function calls, and
    # tool-call arguments as JSON text. They are rewritten, and images are refused. Sources: OpenAI's function calling,
    # and the turn flags of Axolotl and ms-swift.
    _refuse_media(kind, record, location)
    if kind == "text":
        return dict(record)
    fields = {name: value for name, value in record.items() if name not in _extra_fields(kind)}
    for name in _LIST_FIELDS:
        if isinstance(turns := fields.get(name), list):
            fields[name] = [_normalize_turn(turn, location) if isinstance(turn, Mapping) else turn for turn in turns]
    if isinstance(tools := fields.get("tools"), str) and not tools.strip():
        fields["tools"] = None
    if functions := record.get("functions"):
        if fields.get("tools"):
            hint = "remove functions from the record"
            raise DataError(f"{location}: a record has both tools and functions", hint=hint)
        if not isinstance(functions, list):
            hint = "write objects with name and parameters, or name the columns with --columns"
            raise DataError(f"{location}: functions must be a list, not {shown(functions)}", hint=hint)
        fields["tools"] = [{"type": "function", "function": function} for function in functions]
    return _prepend_system(kind, fields, record, location)


def _refuse_media(kind: str, record: Mapping[str, Any], location: str) -> None:
    """Refuse images, video and audio, unless the record is plain text that has no placeholder for them."""
    text = str(record.get("text"))
    if kind == "text" and not any(mark in text for mark in _PLACEHOLDERS):
        return
    for name in _MEDIA_FIELDS:
        if record.get(name):
            hint = "remove such records; if the text is complete without them, name the columns with --columns"
            raise DataError(f"{location}: the record has {name}, which text models do not read", hint=hint)


def _prepend_system(kind: str, fields: dict[str, Any], record: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Make the record's system prompt the first turn."""
    systems = {name: record[name] for name in _SYSTEM_FIELDS if not _is_blank(record.get(name))}
    if not systems:
        return fields
    name, system = next(iter(systems.items()))
    turns = fields.get(kind)
    if len(systems) > 1 or not isinstance(system, str) or not isinstance(turns, list):
        names = f"{' and '.join(systems)} next to {_FIELD_NAMES.get(kind, kind)}"
        hint = "write the system prompt as the first message; to train without it, name the columns with --columns"
        raise DataError(f"{location}: {names} cannot be read", got=shown(system), hint=hint)
    first = turns[0] if turns and isinstance(turns[0], Mapping) else {}
    if first.get("role", first.get("from")) == "system":
        if first.get("content", first.get("value")) == system:
            return fields
        hint = f"remove {name} or the first message"
        raise DataError(f"{location}: {name} differs from the system prompt in the first message", hint=hint)
    turn = {"from": "system", "value": system} if kind == "conversations" else {"role": "system", "content": system}
    return {**fields, kind: [turn, *turns]}


def _normalize_turn(turn: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Rewrite flags, parts and older function calls of a turn, and drop null fields."""
    # Null means absent, as in a table. A template would print None, or count the field as defined.
    fields = {name: value for name, value in turn.items() if value is not None and name not in _FLAGS}
    for name, excluding_value in _FLAGS.items():
        value = turn.get(name)
        if value is None:
            continue
        if value not in (0, 1):  # True and False equal 1 and 0
            hint = f"remove {name}, which says whether a turn is learned, or write weight: 0"
            raise DataError(f"{location}: a turn has {name} = {shown(value)}, not true, false, 1 or 0", hint=hint)
        if bool(value) is excluding_value:
            fields["weight"] = 0
    if isinstance(parts := fields.get("content"), list):
        _refuse_other_parts(parts, location)
        if all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
            fields["content"] = "".join(part["text"] for part in parts)
    if "function_call" in fields:
        call = fields.pop("function_call")
        if "tool_calls" in fields or not isinstance(call, Mapping):
            hint = "write tool_calls instead, or one object with name and arguments in a turn without tool_calls"
            raise DataError(f"{location}: the function_call of a turn cannot be read", got=shown(call), hint=hint)
        fields["tool_calls"] = [{"type": "function", "function": call}]
    if fields.get("role") == "function":
        fields["role"] = "tool"
    if isinstance(calls := fields.get("tool_calls"), list):
        fields["tool_calls"] = [
            _normalize_call(call, location) if isinstance(call, Mapping) else call for call in calls
        ]
    return fields


def _refuse_other_parts(parts: list[Any], location: str) -> None:
    """Refuse parts of a message that are not text, such as images."""
    for part in parts:
        if isinstance(part, Mapping) and part.get("type", "text") not in _TEXT_PARTS:
            hint = 'remove such records, or these parts of them; {"type": "text", "text": "..."} is read'
            raise DataError(f"{location}: a part of a message has the type {shown(part['type'])}, not text", hint=hint)


def _normalize_call(call: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Drop null fields of a tool call, and parse arguments that are JSON text."""
    fields = {name: value for name, value in call.items() if value is not None}
    if isinstance(fields.get("function"), Mapping):
        return {**fields, "function": _normalize_call(fields["function"], location)}
    arguments = fields.get("arguments")
    if not isinstance(arguments, str):
        return fields
    try:  # OpenAI writes text, which the filter `tojson` of a template would quote again
        return {**fields, "arguments": parse_json(arguments.encode("utf-8", "surrogatepass"), location)}
    except ModelFileError as error:
        problem = "tool-call arguments are not a JSON object"
        hint = 'write them as an object such as {"city": "Kiel"}; without arguments, write {}'
        raise DataError(f"{location}: {problem}", got=shown(arguments), hint=hint) from error
