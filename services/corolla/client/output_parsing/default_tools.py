"""Tools and their calls as text, for models whose chat template knows no tools. Pure."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from corolla.client.output_parsing.formats import CallFormat
from corolla.client.text.conversation import Message, Tool, ToolCall, arguments_of, tool_values

_INTRODUCTION: Final = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments in this form:\n{call}"
)
"""The templates of Hermes and Qwen introduce tools with these words."""
_EXAMPLE: Final = ToolCall("", "<function-name>", "<args-json-object>")


def written_out(
    earlier: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool], calls: CallFormat
) -> tuple[list[Message], list[Message]]:
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
    (shown[0] or shown[1]).insert(0, Message("system", text))
    return shown


def _without_roles(messages: Iterable[Message], calls: CallFormat) -> Iterator[Message]:
    """Yields the messages without calls and without the role `tool`; consecutive results become one message."""
    results: list[str] = []
    for message in messages:
        if message.role == "tool":
            results.append(f"<tool_response>\n{_text_of(message)}\n</tool_response>")
            continue
        if results:
            yield Message("user", "\n".join(results))
            results = []
        if message.tool_calls:
            written = "\n".join(_written_call(call, calls) for call in message.tool_calls)
            message = replace(_with_text(message, "", written, gap="\n"), tool_calls=())
        yield message
    if results:
        yield Message("user", "\n".join(results))


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


def _with_text(message: Message, before: str, after: str, gap: str = "\n\n") -> Message:
    return replace(message, content=gap.join(each for each in (before, _text_of(message), after) if each))


def _text_of(message: Message) -> str:
    return message.content if isinstance(message.content, str) else "\n".join(message.content)
