"""Turns the messages of a conversation, as a caller gives them, into messages of a request."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from corolla.chassis.errors import InvalidRequest
from corolla.sdk.fields import extend_field, set_field
from corolla.sdk.results import Message, ToolCall
from corolla.v1 import generation_pb2 as pb

AnyMessage = Message | Mapping[str, Any]
"""A message, or a mapping as in the OpenAI API: `role`, `content` (a text, or parts of it), `name`, `tool_calls`,
`tool_call_id`, `reasoning`."""

Turn = str | Sequence[AnyMessage]
"""A user's text, or messages, for example the results of tools that the model has called."""

_KEYS: Final = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"})


def add_messages(target: Any, messages: Sequence[AnyMessage]) -> None:
    """Adds messages to `target`, a repeated field of a request. Raises InvalidRequest if one is not a message."""
    if isinstance(messages, str | bytes | Mapping):
        raise InvalidRequest("messages", "must be a sequence of messages")
    for position, message in enumerate(messages):
        _add_message(target.add(), message, f"messages[{position}]")


def _add_message(added: pb.ChatMessage, message: object, place: str) -> None:
    values = _values(message, place)
    set_field(added, "role", values.get("role"), f"{place}.role")
    content = values.get("content")
    if content is None or isinstance(content, str):
        set_field(added, "content", content, f"{place}.content")
    elif isinstance(content, Sequence) and not isinstance(content, bytes):
        extend_field(added, "content_parts", [_part(part, place) for part in content], f"{place}.content")
    else:
        raise InvalidRequest(f"{place}.content", "must be a text, or a sequence of parts of text")
    for key in ("name", "tool_call_id"):
        set_field(added, key, values.get(key), f"{place}.{key}")
    set_field(added, "reasoning", values.get("reasoning") or values.get("reasoning_content"), f"{place}.reasoning")
    for number, call in enumerate(values.get("tool_calls") or ()):
        _add_call(added.tool_calls.add(), call, f"{place}.tool_calls[{number}]")


def _values(message: object, place: str) -> Mapping[str, Any]:
    if isinstance(message, Message):
        return {key: getattr(message, key) for key in Message.__dataclass_fields__}
    if isinstance(message, Mapping) and {"role"} < message.keys() <= _KEYS:
        return message
    raise InvalidRequest(place, f"must be a Message, or a mapping with 'role', 'content' and others of {sorted(_KEYS)}")


def _part(part: object, place: str) -> object:
    if isinstance(part, Mapping):
        if part.get("type") != "text":
            raise InvalidRequest(f"{place}.content", "parts can only be text")
        return part.get("text")
    return part


def _add_call(added: pb.ToolCall, call: object, place: str) -> None:
    if isinstance(call, ToolCall):
        call = {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidRequest(place, "must be a ToolCall, or a mapping with 'id' and 'function'")
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    set_field(added, "id", call.get("id"), f"{place}.id")
    set_field(added, "name", function.get("name"), f"{place}.function.name")
    set_field(added, "arguments", arguments, f"{place}.function.arguments")
