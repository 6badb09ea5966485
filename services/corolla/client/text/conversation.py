"""The messages and tools of a conversation, and the values that chat templates get for them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, Final

from pydantic_core import from_json

from corolla.chassis.errors import InvalidRequest
from corolla.v1.common_pb2 import ChatMessage

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_MOST_QUOTATIONS: Final = 2
"""How often arguments may have been written as JSON: some clients send the text of an object as a text in JSON."""
_NO_PARAMETERS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call; `parameters` is a JSON Schema of an object, or None.

    Attributes:
        is_strict: whether the arguments of all calls fit the schema.
        is_lenient: whether they fit it only as far as grammars can follow it.
        field: the request's field that holds the schema.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False
    is_lenient: bool = False
    field: str = dataclass_field(default="parameters", compare=False)

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of the arguments; without `parameters`, there are none."""
        return _NO_PARAMETERS if self.parameters is None else self.parameters


@dataclass(frozen=True, slots=True)
class ChatSetting:
    """The settings of a whole conversation.

    Attributes:
        continues_last: whether the answer continues the last message, which must be an assistant's.
        template_arguments: arguments for the template by name.
    """

    tools: tuple[Tool, ...] = ()
    continues_last: bool = False
    template_arguments: Mapping[str, Any] = dataclass_field(default_factory=dict)


def check_roles(messages: Sequence[ChatMessage]) -> None:
    """Refuses messages that no template can use; the template itself may refuse their order.

    Raises:
        InvalidRequest: a field is wrong; the error names the first such field.
    """
    for index, message in enumerate(messages):
        for name, problem in _problems(message):
            raise InvalidRequest(f"messages[{index}].{name}", problem)


def with_instructions(
    instructions: str, earlier: Sequence[ChatMessage], new: Sequence[ChatMessage]
) -> tuple[Sequence[ChatMessage], Sequence[ChatMessage]]:
    """The messages of a conversation with instructions in front of the first one, in a system message's text.

    Many templates accept only one system message, so that of the conversation is joined to the instructions.
    """
    if not instructions:
        return earlier, new
    first, rest = [instructions], earlier or new
    if rest and rest[0].role in ("system", "developer"):
        first, rest = [instructions, *texts_of(rest[0])], rest[1:]
    begun = [ChatMessage(role="system", content="\n\n".join(first)), *rest]
    return (begun, new) if earlier else ([], begun)


def check_conversation(messages: Sequence[ChatMessage], setting: ChatSetting) -> None:
    """Refuses a conversation without a message to answer, or to continue if `setting` says so.

    Raises InvalidRequest.
    """
    if not messages:
        raise InvalidRequest("messages", "must not be empty")
    if setting.continues_last and (messages[-1].role != "assistant" or messages[-1].tool_calls):
        raise InvalidRequest("continue_last_message", "the last message must be the assistant's, and call no tools")


def _problems(message: ChatMessage) -> list[tuple[str, str]]:
    if message.role not in ROLES:
        return [("role", "must be system, developer, user, assistant or tool")]
    rules = (
        (
            message.role != "assistant" and message.tool_calls,
            "tool_calls",
            "must be empty unless the role is assistant",
        ),
        (message.role != "assistant" and message.reasoning, "reasoning", "must be empty unless the role is assistant"),
        (message.role != "tool" and message.tool_call_id, "tool_call_id", "must be empty unless the role is tool"),
    )
    return [(name, problem) for is_broken, name, problem in rules if is_broken]


def texts_of(message: ChatMessage) -> Sequence[str]:
    """The parts of a message's content, or its only text."""
    return message.content_parts or [message.content]


def message_values(message: ChatMessage) -> dict[str, Any]:
    """The values that a template gets for a message."""
    values: dict[str, Any] = {"role": message.role, "content": list(message.content_parts) or message.content}
    if message.reasoning:
        values["reasoning_content"] = message.reasoning
    if message.tool_calls:
        values["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_of(call.arguments)},
            }
            for call in message.tool_calls
        ]
    for name in ("tool_call_id", "name"):
        if value := getattr(message, name):
            values[name] = value
    return values


def tool_values(tool: Tool) -> dict[str, Any]:
    """The values that a template gets for a tool."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = dict(tool.schema)
    return {"type": "function", "function": function}


def arguments_of(text: str) -> Any:
    """Returns a call's arguments as an object, which templates expect, even if a model or caller wrote another text.

    Arguments that were cut off keep what they have. Text that does not begin an object stays text.
    """
    arguments: Any = text
    for _ in range(_MOST_QUOTATIONS):
        if not isinstance(arguments, str):
            break
        if not arguments.strip():
            return {}
        try:
            arguments = _from_json(arguments)
        except ValueError:
            break
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) else text


def _from_json(text: str) -> Any:
    """The value of a text in JSON, or of its beginning. Raises ValueError if it is neither."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        if not str(error).startswith("EOF"):
            raise
    return from_json(text, allow_inf_nan=False, allow_partial="trailing-strings")
