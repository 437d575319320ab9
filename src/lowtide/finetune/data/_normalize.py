"""Rewrite fields that other trainers read into the fields that chat templates read.

Records come from many tools, and an ignored field changes what a model learns. Some fields have one meaning: a system
prompt next to messages, flags that exclude a turn from the loss, OpenAI's older function calls, and tool-call arguments
as JSON text. They are rewritten. Rejected answers and images are refused.

Sources: OpenAI's function calling, TRL's KTO records, and the turn flags of Axolotl and ms-swift.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core import DataError, ModelFileError, parse_json, shown

_SYSTEM_FIELDS = ("system", "system_prompt")
_FLAGS = {"train": False, "trainable": False, "loss": False, "loss_mask": False, "masked": True}
"""Flags of a turn, each with the value that excludes the turn from the loss."""
_MEDIA_FIELDS = ("image", "images", "video", "videos", "audio", "audios")
_PLACEHOLDERS = ("<image>", "<video>", "<audio>")
_TEXT_PARTS = ("text", "input_text", "output_text")
_FIELD_NAMES = {"alpaca": "instruction and output", "prompt": "prompt and completion"}
_LIST_FIELDS = ("messages", "conversations", "prompt", "completion")


def extra_fields(kind: str) -> tuple[str, ...]:
    """Return the additional fields that `normalize_record` reads for a kind of record."""
    return () if kind == "text" else (*_SYSTEM_FIELDS, "functions", "label", *_MEDIA_FIELDS)


def normalize_record(kind: str, record: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Rewrite the unchecked fields of a record into those that chat templates read.

    `kind` is a key of `_schema._KINDS`. The result has no `extra_fields`, and its turns have no null fields. A rejected
    answer, images, two different system prompts, and a flag, function or tool-call argument of another type raise
    DataError.
    """
    if kind == "text":
        _refuse_media(kind, record, location)
        return dict(record)
    if str(record.get("label")).lower() == "false":
        raise DataError(
            f"{location}: label is false, so the answer was rejected",
            expected="answers to learn",
            hint="remove such records: training on them would teach what was rejected",
        )
    _refuse_media(kind, record, location)
    fields = {name: value for name, value in record.items() if name not in extra_fields(kind)}
    for name in _LIST_FIELDS:
        if isinstance(turns := fields.get(name), list):
            fields[name] = [_normalize_turn(turn, location) if isinstance(turn, Mapping) else turn for turn in turns]
    if isinstance(tools := fields.get("tools"), str) and not tools.strip():
        fields["tools"] = None
    if functions := record.get("functions"):
        fields["tools"] = _tools_from_functions(functions, fields.get("tools"), location)
    return _prepend_system(kind, fields, record, location)


def _refuse_media(kind: str, record: Mapping[str, Any], location: str) -> None:
    """Refuse images, video and audio; a plain text may have them in columns that it does not mention."""
    text = str(record.get("text"))
    if kind == "text" and not any(mark in text for mark in _PLACEHOLDERS):
        return
    for name in _MEDIA_FIELDS:
        if record.get(name):
            raise DataError(
                f"{location}: the record has {name}, which text models do not read",
                expected="records of text only",
                got=shown(record[name]),
                hint="remove such records; if the text is complete without them, name the columns with --columns",
            )


def _tools_from_functions(functions: Any, tools: Any, location: str) -> list[dict[str, Any]]:
    """Rewrite OpenAI's older ``functions`` as ``tools``."""
    if tools:
        hint = "remove functions from the record"
        raise DataError(f"{location}: a record has both tools and functions", expected="one of them", hint=hint)
    if not isinstance(functions, list):
        raise DataError(
            f"{location}: functions is not a list",
            expected="a list of objects with name and parameters",
            got=shown(functions),
            hint="write a list, or name the columns with --columns",
        )
    return [{"type": "function", "function": function} for function in functions]


def _prepend_system(kind: str, fields: dict[str, Any], record: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Prepend the system prompt that stands next to the turns."""
    systems = {name: record[name] for name in _SYSTEM_FIELDS if _has_text(record.get(name))}
    if not systems:
        return fields
    name, system = next(iter(systems.items()))
    turns = fields.get(kind)
    if len(systems) > 1 or not isinstance(system, str) or not isinstance(turns, list):
        raise DataError(
            f"{location}: {' and '.join(systems)} next to {_FIELD_NAMES.get(kind, kind)} cannot be read",
            expected="messages, where a system prompt is the first turn; or one text next to messages",
            got=shown(system),
            hint="write the record as messages; to train without the system prompt, name the columns with --columns",
        )
    first = turns[0] if turns and isinstance(turns[0], Mapping) else {}
    if first.get("role", first.get("from")) == "system":
        if first.get("content", first.get("value")) == system:
            return fields
        raise DataError(
            f"{location}: {name} differs from the system prompt in the first message",
            expected="one system prompt",
            got=shown(system),
            hint=f"remove {name} or the first message",
        )
    turn = {"from": "system", "value": system} if kind == "conversations" else {"role": "system", "content": system}
    return {**fields, kind: [turn, *turns]}


def _has_text(value: Any) -> bool:
    return value is not None and not (isinstance(value, str) and not value.strip())


def _normalize_turn(turn: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Rewrite flags, parts and older function calls of a turn, and drop null fields."""
    # A template prints None, or asks whether a field is defined: null means absent, as in a table.
    fields = {name: value for name, value in turn.items() if value is not None and name not in _FLAGS}
    for name, excluding_value in _FLAGS.items():
        value = turn.get(name)
        if value is None:
            continue
        if value not in (0, 1):  # True and False equal 1 and 0
            raise DataError(
                f"{location}: a turn has {name} = {shown(value)}",
                expected="true or false, 1 or 0",
                got=shown(value),
                hint=f"remove {name}, which says whether a turn is learned, or write weight: 0",
            )
        if bool(value) is excluding_value:
            fields["weight"] = 0
    if isinstance(parts := fields.get("content"), list):
        _refuse_other_parts(parts, location)
        if all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
            fields["content"] = "".join(part["text"] for part in parts)
    if "function_call" in fields:
        call = fields.pop("function_call")
        if "tool_calls" in fields or not isinstance(call, Mapping):
            raise DataError(
                f"{location}: the function_call of a turn cannot be read",
                expected="an object with name and arguments, in a turn without tool_calls",
                got=shown(call),
                hint="write tool_calls instead",
            )
        fields["tool_calls"] = [{"type": "function", "function": call}]
    if fields.get("role") == "function":
        fields["role"] = "tool"
    if isinstance(calls := fields.get("tool_calls"), list):
        fields["tool_calls"] = [
            _normalize_call(call, location) if isinstance(call, Mapping) else call for call in calls
        ]
    return fields


def _refuse_other_parts(parts: list[Any], location: str) -> None:
    """Refuse images, sounds and thoughts among the parts of a message."""
    for part in parts:
        if isinstance(part, Mapping) and part.get("type", "text") not in _TEXT_PARTS:
            raise DataError(
                f"{location}: a part of a message has the type {shown(part['type'])}, which text models do not read",
                expected='text, or parts such as {"type": "text", "text": "..."}, which are joined',
                got=shown(part),
                hint="remove such records, or these parts of them",
            )


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
        raise DataError(
            f"{location}: the arguments of a tool call are text, but not a JSON object",
            expected='an object, or the text of an object such as "{\\"city\\": \\"Kiel\\"}"',
            got=shown(arguments),
            hint="write the arguments as an object; without arguments, write {}",
        ) from error
