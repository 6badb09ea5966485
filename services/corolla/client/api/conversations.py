"""Reads conversations in requests, or refuses them with an error that names the field. Pure."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from google.protobuf import struct_pb2

from corolla.chassis.errors import InvalidRequest
from corolla.client.output_parsing.call_rules import CallRules
from corolla.client.output_parsing.formats import ReasoningFormat
from corolla.client.text.conversation import ChatSetting, Tool, arguments_of, check_roles, texts_of
from corolla.client.text.schemas import depth_of, parsed
from corolla.v1 import generation_pb2 as pb
from corolla.v1 import router_pb2
from corolla.v1.common_pb2 import ChatMessage, ToolCall

MAX_MESSAGES: Final = 2048
"""The limit for messages, their parts and their calls together. A template takes some microseconds for each message,
during which no other Python code runs."""
MAX_TOOLS: Final = 128
MAX_CALLS: Final = 128
MAX_CALL_CHARS: Final = 64 << 10
MAX_JSON_CHARS: Final = 256 << 10
"""The limit for all schemas together, and for the arguments of all calls together. No other Python code runs while they
are parsed."""
MAX_JSON_DEPTH: Final = 32
MAX_ARGUMENTS: Final = 32
MAX_ARGUMENTS_BYTES: Final = 16 << 10
MAX_ARGUMENT_DEPTH: Final = 8
MAX_ID_CHARS: Final = 256
_REQUIRING_MODES: Final = frozenset({pb.ToolChoice.MODE_REQUIRED, pb.ToolChoice.MODE_NAMED})
_MODES: Final = _REQUIRING_MODES | {
    pb.ToolChoice.MODE_UNSPECIFIED,
    pb.ToolChoice.MODE_NONE,
    pb.ToolChoice.MODE_AUTO,
}
TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_messages(given: Sequence[ChatMessage]) -> None:
    """Checks messages. Raises InvalidRequest."""
    num_parts = sum(len(message.content_parts) + len(message.tool_calls) for message in given)
    if len(given) + num_parts > MAX_MESSAGES:
        raise InvalidRequest("messages", f"must be at most {MAX_MESSAGES}, parts and calls included")
    if sum(len(call.arguments) for message in given for call in message.tool_calls) > MAX_JSON_CHARS:
        raise InvalidRequest("messages", f"calls must have arguments of at most {MAX_JSON_CHARS} characters together")
    for index, message in enumerate(given):
        _check_message(message, f"messages[{index}]")
    check_roles(given)


def _check_message(given: ChatMessage, field: str) -> None:
    if given.content and given.content_parts:
        raise InvalidRequest(f"{field}.content_parts", "must be empty if content is set")
    for name in ("tool_call_id", "name"):
        if len(getattr(given, name)) > MAX_ID_CHARS:
            raise InvalidRequest(f"{field}.{name}", f"must have at most {MAX_ID_CHARS} characters")
    if len(given.tool_calls) > MAX_CALLS:
        raise InvalidRequest(f"{field}.tool_calls", f"must be at most {MAX_CALLS}")
    for index, call in enumerate(given.tool_calls):
        _check_call(call, f"{field}.tool_calls[{index}]")


def _check_call(given: ToolCall, field: str) -> None:
    if not TOOL_NAME.fullmatch(given.name):
        raise InvalidRequest(f"{field}.name", "must be 1 to 64 letters, digits, dashes or underscores")
    if len(given.id) > MAX_ID_CHARS:
        raise InvalidRequest(f"{field}.id", f"must have at most {MAX_ID_CHARS} characters")
    if len(given.arguments) > MAX_CALL_CHARS:
        raise InvalidRequest(f"{field}.arguments", f"must have at most {MAX_CALL_CHARS} characters")
    num_brackets = given.arguments.count("{") + given.arguments.count("[")
    if num_brackets > MAX_JSON_DEPTH and depth_of(arguments_of(given.arguments)) > MAX_JSON_DEPTH:
        raise InvalidRequest(f"{field}.arguments", f"must be at most {MAX_JSON_DEPTH} deep")


def setting(given: pb.ChatRequest | pb.Conversation, reserved_names: frozenset[str]) -> ChatSetting:
    """The settings of a conversation: its tools and how the template renders it. Raises InvalidRequest."""
    return ChatSetting(
        tools=_tools(given.tools),
        continues_last=given.continue_last_message,
        template_arguments=_template_arguments(given.template_arguments, reserved_names),
    )


def call_rules(request: pb.ChatRequest, tools: Sequence[Tool]) -> CallRules:
    """The rules for the tools that the answer may or must call. Raises InvalidRequest."""
    choice = request.tool_choice
    several = request.parallel_tool_calls if request.HasField("parallel_tool_calls") else True
    if choice.mode not in _MODES:
        raise InvalidRequest("tool_choice.mode", "is unknown to this service")
    if choice.name and choice.mode != pb.ToolChoice.MODE_NAMED:
        raise InvalidRequest("tool_choice.name", "must be empty unless mode is MODE_NAMED")
    if choice.mode not in _REQUIRING_MODES:
        is_none = choice.mode == pb.ToolChoice.MODE_NONE
        has_form = request.response_format.WhichOneof("format") is not None
        return CallRules(() if is_none else tuple(tools), may_be_several=several, has_form=has_form)
    if not tools:
        raise InvalidRequest("tool_choice.mode", "requires a call, but the request has no tools")
    if choice.mode == pb.ToolChoice.MODE_REQUIRED:
        return CallRules(tuple(tools), is_required=True, may_be_several=several)
    named = tuple(tool for tool in tools if tool.name == choice.name)
    if not named:
        raise InvalidRequest("tool_choice.name", "must be the name of one of the tools")
    return CallRules(named, is_required=True, may_be_several=False)


def _tools(given: Sequence[pb.Tool]) -> tuple[Tool, ...]:
    if len(given) > MAX_TOOLS:
        raise InvalidRequest("tools", f"must be at most {MAX_TOOLS}")
    if sum(len(tool.parameters) for tool in given) > MAX_JSON_CHARS:
        raise InvalidRequest("tools", f"must have parameters of at most {MAX_JSON_CHARS} characters together")
    names: set[str] = set()
    tools = []
    for index, tool in enumerate(given):
        if not TOOL_NAME.fullmatch(tool.name):
            raise InvalidRequest(f"tools[{index}].name", "must be 1 to 64 letters, digits, dashes or underscores")
        if tool.name in names:
            raise InvalidRequest(f"tools[{index}].name", "must differ from the names of the other tools")
        names.add(tool.name)
        field = f"tools[{index}].parameters"
        parameters = parsed(tool.parameters, field) if tool.parameters else None
        tools.append(Tool(tool.name, tool.description, parameters, tool.strict, tool.lenient, field))
    return tuple(tools)


def _template_arguments(given: struct_pb2.Struct, reserved_names: frozenset[str]) -> dict[str, Any]:
    field = "template_arguments"
    if given.ByteSize() > MAX_ARGUMENTS_BYTES or len(given.fields) > MAX_ARGUMENTS:
        raise InvalidRequest(field, f"must be at most {MAX_ARGUMENTS}, of {MAX_ARGUMENTS_BYTES} bytes together")
    for name in given.fields:
        if not name.isidentifier() or name.startswith("_"):
            raise InvalidRequest(field, "must have names of letters, digits and underscores that begin with a letter")
        if name in reserved_names:
            raise InvalidRequest(f"{field}.{name}", "must not be set, because the service itself sets it")
    return {
        name: _plain(value, f"{field}.{name}", MAX_ARGUMENT_DEPTH - 1) for name, value in sorted(given.fields.items())
    }


def _plain(value: struct_pb2.Value, field: str, max_depth: int) -> Any:
    """A JSON value. Whole numbers become int, since a Struct has only floating-point numbers."""
    if max_depth < 0:
        raise InvalidRequest(field, f"must be at most {MAX_ARGUMENT_DEPTH} deep")
    readers: dict[str | None, Callable[[], Any]] = {
        "struct_value": lambda: {
            name: _plain(each, field, max_depth - 1) for name, each in sorted(value.struct_value.fields.items())
        },
        "list_value": lambda: [_plain(each, field, max_depth - 1) for each in value.list_value.values],
        "number_value": lambda: _number(value.number_value, field),
        "string_value": lambda: value.string_value,
        "bool_value": lambda: value.bool_value,
    }
    reader = readers.get(value.WhichOneof("kind"))
    return None if reader is None else reader()


def _number(number: float, field: str) -> int | float:
    if not math.isfinite(number):
        raise InvalidRequest(field, "must be a finite number")
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def record_messages(
    record: router_pb2.SessionRecord,
    new: Sequence[ChatMessage],
    answer: ChatMessage,
    chat: ChatSetting,
    reasoning: ReasoningFormat | None,
) -> None:
    """Writes a finished turn's messages into the session's record."""
    written = [*new]
    if chat.continues_last:
        begun = written.pop() if written else record.transcript.pop()
        answer = _continued(begun, answer, reasoning)
    record.transcript.extend([*written, answer])


def _continued(begun: ChatMessage, answer: ChatMessage, reasoning: ReasoningFormat | None) -> ChatMessage:
    """The begun message, continued by the answer. If it had begun to reason, that text moves to its `reasoning`."""
    *parts, last = texts_of(begun)
    thought = ""
    if answer.reasoning and reasoning is not None and reasoning.opening in last:
        last, _, thought = last.rpartition(reasoning.opening)
    continued = ChatMessage()
    continued.CopyFrom(begun)
    continued.reasoning += thought.lstrip() + answer.reasoning
    continued.tool_calls.MergeFrom(answer.tool_calls)
    if begun.content_parts:
        continued.content_parts[:] = [*parts, last + answer.content]
    else:
        continued.content = last + answer.content
    return continued
