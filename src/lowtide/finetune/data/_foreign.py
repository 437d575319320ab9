"""Fields of records that other trainers read: each is read with its one meaning, or refused.

Records come from many tools, and a field that nobody reads changes what a model learns. Systems beside messages, flags
of turns without loss, OpenAI's older function calls and arguments that are JSON text become the fields that chat
templates know. Answers that were rejected and images are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core import DataError, ModelFileError, parse_json, shown

SYSTEMS = ("system", "system_prompt")
_FLAGS = {"train": False, "trainable": False, "loss": False, "loss_mask": False, "masked": True}
"""Fields of a turn, with the value that means that the turn is read and not learned."""
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
READ = (*SYSTEMS, "functions", "label", *_MEDIA)
"""Fields of a record that are read here."""
_FIELDS = {"alpaca": "instruction and output", "prompt": "prompt and completion"}
_LISTS = ("messages", "conversations", "prompt", "completion")


def normalized(kind: str, record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Write a record in the fields that chat templates know.

    Args:
        kind: of the record, a key of `_schema._KINDS`.
        record: its fields; lists of turns may hold anything yet.
        where: file and line or row.

    Returns:
        The record without the fields in `READ`. Turns lack fields that are null.

    Raises:
        DataError: for a rejected answer, images, a flag or arguments that mean nothing, and two systems.
    """
    _refuse(record, where)
    found = {name: value for name, value in record.items() if name not in READ}
    for name in _LISTS:
        if isinstance(found.get(name), list):
            found[name] = [_turn(turn, where) if isinstance(turn, Mapping) else turn for turn in found[name]]
    if isinstance(found.get("tools"), str) and not found["tools"].strip():
        found["tools"] = None
    if record.get("functions"):
        if found.get("tools"):
            raise DataError(f"{where}: tools and functions at once", expected="one of them", hint="leave functions out")
        found["tools"] = [{"type": "function", "function": each} for each in record["functions"]]
    return _with_system(kind, found, record, where)


def _refuse(record: Mapping[str, Any], where: str) -> None:
    if record.get("label") is False or record.get("label") in ("false", "False"):
        raise DataError(
            f"{where}: label is false, so the answer is one that was rejected",
            expected="answers to learn",
            hint="leave such records out: training on them would teach what was rejected",
        )
    for name in _MEDIA:
        if record.get(name):
            raise DataError(
                f"{where}: {name} beside the text, which models of text do not read",
                expected="records of text alone",
                got=shown(record[name]),
                hint=f"leave such records out; if the text does not need them, leave {name} out",
            )


def _with_system(kind: str, found: dict[str, Any], record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Put a system that stands beside the turns before them."""
    given = {name: record[name] for name in SYSTEMS if _is_said(record.get(name))}
    if not given:
        return found
    name, system = next(iter(given.items()))
    turns = found.get("prompt" if kind == "prompt" else kind)
    if len(given) > 1 or not isinstance(system, str) or not isinstance(turns, list):
        raise DataError(
            f"{where}: {' and '.join(given)} beside {_FIELDS.get(kind, kind)}, which is not read",
            expected="messages, which have systems; or one text beside messages",
            got=shown(system),
            hint="write the record as messages with a first turn of the role system; to train without it, "
            "name the columns that are read with --columns",
        )
    first = turns[0] if turns and isinstance(turns[0], Mapping) else {}
    if first.get("role", first.get("from")) == "system":
        if first.get("content", first.get("value")) == system:
            return found
        raise DataError(
            f"{where}: {name} beside messages that begin with another system",
            expected="one system",
            got=shown(system),
            hint=f"leave {name} or the first message out",
        )
    turn = {"from": "system", "value": system} if kind == "conversations" else {"role": "system", "content": system}
    return {**found, "prompt" if kind == "prompt" else kind: [turn, *turns]}


def _is_said(value: Any) -> bool:
    return value is not None and not (isinstance(value, str) and not value.strip())


def _turn(turn: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Write a turn without nulls, flags and older function calls."""
    found = {name: value for name, value in turn.items() if value is not None and name not in _FLAGS}
    for name, silent in _FLAGS.items():
        value = turn.get(name)
        if value is None:
            continue
        if value not in (0, 1):  # True and False are 1 and 0
            raise DataError(
                f"{where}: a turn has {name} = {shown(value)}",
                expected="true or false, 1 or 0",
                got=shown(value),
                hint=f"{name} says whether a turn is learned; leave it out, or write weight: 0",
            )
        if bool(value) is silent:
            found["weight"] = 0
    if "function_call" in found:
        if "tool_calls" in found:
            raise DataError(f"{where}: tool_calls and function_call in a turn", expected="one of them", got=None)
        found["tool_calls"] = [{"type": "function", "function": found.pop("function_call")}]
    if found.get("role") == "function":
        found["role"] = "tool"
    if isinstance(calls := found.get("tool_calls"), list):
        found["tool_calls"] = [_call(call, where) if isinstance(call, Mapping) else call for call in calls]
    return found


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Write a call of a tool without nulls, and with its arguments as an object."""
    found = {name: value for name, value in call.items() if value is not None}
    if isinstance(found.get("function"), Mapping):
        return {**found, "function": _call(found["function"], where)}
    arguments = found.get("arguments")
    if not isinstance(arguments, str):
        return found
    try:  # OpenAI's form; a template that writes JSON would quote the text again
        return {**found, "arguments": parse_json(arguments.encode("utf-8", "surrogatepass"), where)}
    except ModelFileError as error:
        raise DataError(
            f"{where}: the arguments of a tool call are text that is no JSON object",
            expected='an object, or the text of one such as "{\\"city\\": \\"Kiel\\"}"',
            got=shown(arguments),
            hint="write the arguments as an object; for a call without arguments {}",
        ) from error
