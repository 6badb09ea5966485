"""Tools and their calls as text, for models whose chat template knows no tools. Pure."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from corolla.client.output_parsing.formats import CallFormat
from corolla.client.text.conversation import Tool, arguments_of, texts_of, tool_values
from corolla.v1.common_pb2 import ChatMessage, ToolCall

_INTRODUCTION: Final = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments in this form:\n{call}"
)
"""The templates of Hermes and Qwen introduce tools with these words."""
_EXAMPLE: Final = ToolCall(name="<function-name>", arguments="<args-json-object>")


def written_out(
    earlier: Sequence[ChatMessage], new: Sequence[ChatMessage], tools: Sequence[Tool], calls: CallFormat
) -> tuple[list[ChatMessage], list[ChatMessage]]:
    """A conversation whose messages say in their texts which tools there are, what was called, and what came back.

    The tools stand at the end of the system message or, without one, before the first message of a user.
    """
    shown = [*_without_roles(earlier, calls)], [*_without_roles(new, calls)]
    lines = "\n".join(json.dumps(tool_values(tool), ensure_ascii=False) for tool in tools)
    text = _INTRODUCTION.format(tools=lines, call=_written_call(_EXAMPLE, calls))
    for messages in shown:
        for index, message in enumerate(messages):
            if message.role in ("system", "developer", "user"):
                before, after = (text, "") if message.role == "user" else ("", text)
                messages[index] = _with_text(message, before, after)
                return shown
    (shown[0] or shown[1]).insert(0, ChatMessage(role="system", content=text))
    return shown


def _without_roles(messages: Iterable[ChatMessage], calls: CallFormat) -> Iterator[ChatMessage]:
    """Yields the messages without calls and without the role `tool`; consecutive results become one message."""
    results: list[str] = []
    for message in messages:
        if message.role == "tool":
            results.append(f"<tool_response>\n{_text_of(message)}\n</tool_response>")
            continue
        if results:
            yield ChatMessage(role="user", content="\n".join(results))
            results = []
        if message.tool_calls:
            written = "\n".join(_written_call(call, calls) for call in message.tool_calls)
            message = _with_text(message, "", written, gap="\n")
            message.ClearField("tool_calls")
        yield message
    if results:
        yield ChatMessage(role="user", content="\n".join(results))


def _written_call(call: ToolCall, calls: CallFormat) -> str:
    """A call as the model writes it."""
    arguments: Any = call.arguments if call is _EXAMPLE else arguments_of(call.arguments)
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if calls.infix:
        return f"{calls.opening}{call.name}{calls.infix}{text}"
    name = call.name if call is _EXAMPLE else json.dumps(call.name)
    written = f'{{"name": {name}, "{calls.arguments_key}": {text}}}'
    if calls.is_list:
        return f"{calls.opening}[{written}{calls.closing}"
    return f"{calls.opening}\n{written}\n{calls.closing}" if calls.closing else f"{calls.opening}{written}"


def _with_text(message: ChatMessage, before: str, after: str, gap: str = "\n\n") -> ChatMessage:
    changed = ChatMessage()
    changed.CopyFrom(message)
    changed.ClearField("content_parts")
    changed.content = gap.join(each for each in (before, _text_of(message), after) if each)
    return changed


def _text_of(message: ChatMessage) -> str:
    return "\n".join(texts_of(message))
