"""`/v1/chat/completions`: its request, and the conversion to the protocol of gRPC."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from google.protobuf.struct_pb2 import Struct
from pydantic import Discriminator, Field, Tag

from corolla.chassis.errors import InvalidRequest
from corolla.client.api.conversations import MAX_ARGUMENT_DEPTH, depth_of
from corolla.client.http.fields import (
    AnswerFields,
    Fields,
    Flag,
    Int32,
    ListOf,
    Skipped,
    Text,
    Tolerated,
    as_json,
)
from corolla.client.http.foreign_fields import OF_CHATS, OF_MESSAGES
from corolla.v1 import generation_pb2 as pb


class ContentPart(Fields):
    """A part of a message. Parts that hold no text of the conversation, such as signatures of thoughts, are skipped."""

    type: Literal[
        "text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text",
        "thinking", "redacted_thinking",
    ]  # fmt: skip
    text: Text = ""
    refusal: Text = ""
    annotations: Any = Tolerated
    logprobs: Any = Tolerated
    cache_control: Any = Tolerated

    @property
    def spoken(self) -> str:
        """The part's text, which is empty for thoughts of a model."""
        return "" if self.type in ("thinking", "redacted_thinking") else self.text or self.refusal


class CalledFunction(Fields):
    name: str
    arguments: Text = Field("", description="An object in JSON; a call that was cut off may have the beginning of one.")


class CalledCustomTool(Fields):
    name: str
    input: Text = ""


class ToolCall(Fields):
    """A call that an assistant made."""

    id: Text = ""
    type: Literal["function", "custom"] | None = None
    index: Any = Tolerated
    function: CalledFunction | None = None
    custom: CalledCustomTool | None = None

    def as_protocol(self, field: str) -> pb.ToolCall:
        """The call in the protocol of gRPC. Raises InvalidRequest if it calls nothing."""
        if self.custom is not None:
            arguments = as_json({"input": self.custom.input})
            return pb.ToolCall(id=self.id, name=self.custom.name, arguments=arguments)
        if self.function is None:
            raise InvalidRequest(f"{field}.function", "must be set")
        return pb.ToolCall(id=self.id, name=self.function.name, arguments=self.function.arguments)


class ChatMessage(Fields):
    """A message of a conversation, in any order that the model's chat template accepts."""

    refused_fields = OF_MESSAGES

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | ListOf[ContentPart] | None = None
    name: str | None = None
    tool_calls: ListOf[ToolCall] | None = None
    function_call: CalledFunction | None = Field(None, description="OpenAI's older form of one call.")
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")
    refusal: Any = Tolerated
    annotations: Any = Tolerated


class Function(Fields):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A function that the model may call."""

    type: Literal["function"] | None = None
    function: Function


def kind_of_tool(tool: Any) -> str:
    """The tag of a tool: `function`, or `other` for a type that this service does not know."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "other" if isinstance(kind, str) and kind != "function" else "function"


AnyTool = Annotated[Annotated[Tool, Tag("function")] | Annotated[Skipped, Tag("other")], Discriminator(kind_of_tool)]
"""Tools of other types than functions are skipped."""


class FunctionName(Fields):
    name: str


class NamedTool(Fields):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


ToolMode = Literal["none", "auto", "required"]


class AllowedName(Fields):
    """A tool that may be called: in chats its name is within `function`, in responses next to `type`."""

    type: str
    name: str | None = None
    function: FunctionName | None = None

    @property
    def function_name(self) -> str:
        return self.function.name if self.function is not None else self.name or ""


class AllowedTools(Fields):
    """The only tools that may be called."""

    mode: Literal["auto", "required"] | None = None
    tools: ListOf[AllowedName]


class ChatAllowedTools(Fields):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ChatCompletionRequest(AnswerFields):
    """A conversation to be answered."""

    refused_fields = OF_CHATS

    messages: ListOf[ChatMessage] = Field(description="With a session_id: what is new since its last turn.")
    max_completion_tokens: Int32 | None = Field(None, description="Another name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: Int32 | None = Field(None, description="0 to 20.")
    tools: ListOf[AnyTool] | None = None
    tool_choice: ToolMode | NamedTool | ChatAllowedTools | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Handed to the chat template.")
    reasoning_effort: str | None = Field(None, description="Handed to the chat template by this name.")
    continue_final_message: Flag = Field(
        False, description="The last message is an assistant's, and the answer continues it."
    )
    add_generation_prompt: bool | None = Field(None, description="Must be the contrary of continue_final_message.")
    modalities: ListOf[Literal["text"]] | None = Tolerated
    verbosity: Any = Tolerated
    prediction: Any = Tolerated

    def as_protocol(self) -> pb.ChatRequest:
        """The request in the protocol of gRPC. Raises InvalidRequest if fields contradict each other."""
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise InvalidRequest("max_completion_tokens", "must not differ from max_tokens")
        if self.add_generation_prompt == self.continue_final_message:
            raise InvalidRequest("add_generation_prompt", "must be the contrary of continue_final_message")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        arguments = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            arguments.setdefault("reasoning_effort", self.reasoning_effort)
        tools, choice = self._tools()
        return pb.ChatRequest(
            **self.shared(max_tokens),
            messages=[message_of(each, f"messages[{index}]") for index, each in enumerate(self.messages)],
            logprobs=self._num_logprobs(),
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            continue_last_message=self.continue_final_message,
            template_arguments=struct_of(arguments),
        )

    def _tools(self) -> tuple[list[pb.Tool], pb.ToolChoice | None]:
        choice = self.tool_choice
        return chosen_tools(
            tools_of(self.tools), choice.allowed_tools if isinstance(choice, ChatAllowedTools) else choice
        )

    def _num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


def message_of(given: ChatMessage, field: str) -> pb.ChatMessage:
    """The message in the protocol of gRPC. Raises InvalidRequest."""
    calls = [call.as_protocol(f"{field}.tool_calls[{index}]") for index, call in enumerate(given.tool_calls or ())]
    if given.function_call is not None:
        calls.append(pb.ToolCall(name=given.function_call.name, arguments=given.function_call.arguments))
    message = pb.ChatMessage(
        role="tool" if given.role == "function" else given.role,
        tool_calls=calls,
        tool_call_id=given.tool_call_id or "",
        name=given.name or "",
        reasoning=given.reasoning_content or given.reasoning or "",
    )
    set_text(message, given.content or "")
    return message


def set_text(message: pb.ChatMessage, content: str | Sequence[ContentPart]) -> None:
    """Sets the text of a message, which may come in parts."""
    parts = [content] if isinstance(content, str) else [part.spoken for part in content]
    if len(parts) == 1:
        message.content = parts[0]
    else:
        message.content_parts.extend(parts)


def tools_of(given: Sequence[Tool | Skipped] | None) -> list[pb.Tool]:
    return [tool_of(tool.function) for tool in given or () if isinstance(tool, Tool)]


def tool_of(function: Function) -> pb.Tool:
    return pb.Tool(
        name=function.name,
        description=function.description or "",
        parameters="" if function.parameters is None else as_json(function.parameters),
        strict=bool(function.strict),
    )


def chosen_tools(
    tools: Sequence[pb.Tool], choice: ToolMode | FunctionName | NamedTool | AllowedTools | Skipped | None
) -> tuple[list[pb.Tool], pb.ToolChoice | None]:
    """The tools that the answer may call, and whether it must. Without any tool, the answer is text.

    Raises InvalidRequest if a call is required of a tool that this service skips.
    """
    found = list(tools)
    match choice:
        case None:
            return found, None
        case Skipped():
            raise InvalidRequest("tool_choice", "must be for functions, since this service knows no other tools")
        case NamedTool(function=FunctionName(name=name)) | FunctionName(name=name):
            return found, pb.ToolChoice(mode=pb.ToolChoice.MODE_NAMED, name=name)
        case AllowedTools(mode=mode, tools=allowed):
            names = {each.function_name for each in allowed}
            found = [tool for tool in found if tool.name in names]
        case mode:
            pass
    return found, pb.ToolChoice(mode=pb.ToolChoice.Mode.Value(f"MODE_{(mode or 'auto').upper()}"))


def struct_of(arguments: dict[str, Any]) -> Struct | None:
    """The arguments as protobuf's `Struct`. Raises InvalidRequest for a value that a `Struct` cannot hold."""
    if not arguments:
        return None
    # Protobuf itself fails on too deep values only when it copies the message.
    if depth_of(arguments) > MAX_ARGUMENT_DEPTH:
        raise InvalidRequest("chat_template_kwargs", f"must be at most {MAX_ARGUMENT_DEPTH} deep")
    struct = Struct()
    try:
        struct.update(arguments)
    except (ValueError, TypeError, OverflowError):
        raise InvalidRequest("chat_template_kwargs", "must hold values of JSON") from None
    return struct
