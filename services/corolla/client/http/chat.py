"""`/v1/chat/completions`: its request, and the conversion to the protocol of gRPC."""

from collections.abc import Sequence
from typing import Any, Literal

from google.protobuf.struct_pb2 import Struct
from pydantic import Field

from corolla.chassis.errors import InvalidRequest
from corolla.client.api.conversations import MAX_ARGUMENT_DEPTH, depth_of
from corolla.client.http.fields import (
    AnswerFields,
    Fields,
    Int32,
    ListOf,
    ResponseFormat,
    Tolerated,
    as_json,
    response_format,
)
from corolla.v1 import generation_pb2 as pb


class TextPart(Fields):
    """A part of a message."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = Tolerated


class CalledFunction(Fields):
    name: str
    arguments: str = Field(description="An object in JSON.")


class ToolCall(Fields):
    """A call that an assistant made."""

    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = Tolerated
    function: CalledFunction


class ChatMessage(Fields):
    """A message of a conversation, in any order that the model's chat template accepts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ListOf[TextPart] | None = None
    name: str | None = None
    tool_calls: ListOf[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")
    refusal: str | None = Tolerated
    annotations: list[Any] | None = Tolerated
    audio: None = Tolerated
    function_call: None = Tolerated


class Function(Fields):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Fields):
    name: str


class NamedTool(Fields):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


ToolMode = Literal["none", "auto", "required"]


class ChatCompletionRequest(AnswerFields):
    """A conversation to be answered."""

    messages: ListOf[ChatMessage] = Field(description="With a session_id: what is new since its last turn.")
    max_completion_tokens: Int32 | None = Field(None, description="Another name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: Int32 | None = Field(None, description="0 to 20.")
    response_format: ResponseFormat | None = None
    tools: ListOf[Tool] | None = None
    tool_choice: ToolMode | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Handed to the chat template.")
    reasoning_effort: str | None = Field(None, description="Handed to the chat template by this name.")
    continue_final_message: bool = Field(
        False, description="The last message is an assistant's, and the answer continues it."
    )
    add_generation_prompt: bool | None = Field(None, description="Must be the contrary of continue_final_message.")
    modalities: ListOf[Literal["text"]] | None = Tolerated
    verbosity: str | None = Tolerated

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
        return pb.ChatRequest(
            **self.shared(max_tokens),
            messages=[message_of(each) for each in self.messages],
            logprobs=self._num_logprobs(),
            response_format=response_format(self.response_format),
            tools=tools_of(self.tools),
            tool_choice=tool_choice_of(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            continue_last_message=self.continue_final_message,
            template_arguments=struct_of(arguments),
        )

    def _num_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


def message_of(given: ChatMessage) -> pb.ChatMessage:
    """The message in the protocol of gRPC."""
    parts = [part.text for part in given.content] if isinstance(given.content, list) else []
    is_one = len(parts) == 1
    return pb.ChatMessage(
        role=given.role,
        content=parts[0] if is_one else given.content if isinstance(given.content, str) else "",
        content_parts=[] if is_one else parts,
        tool_calls=[
            pb.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in given.tool_calls or ()
        ],
        tool_call_id=given.tool_call_id or "",
        name=given.name or "",
        reasoning=given.reasoning_content or given.reasoning or "",
    )


def tools_of(given: Sequence[Tool] | None) -> list[pb.Tool]:
    return [tool_of(tool.function, is_strict=bool(tool.function.strict)) for tool in given or ()]


def tool_of(function: Function, *, is_strict: bool) -> pb.Tool:
    parameters = "" if function.parameters is None else as_json(function.parameters)
    return pb.Tool(
        name=function.name,
        description=function.description or "",
        parameters=parameters,
        strict=is_strict,
    )


def tool_choice_of(given: ToolMode | NamedTool | FunctionName | None) -> pb.ToolChoice | None:
    match given:
        case None:
            return None
        case NamedTool(function=FunctionName(name=name)) | FunctionName(name=name):
            return pb.ToolChoice(mode=pb.ToolChoice.MODE_NAMED, name=name)
        case mode:
            return pb.ToolChoice(mode=pb.ToolChoice.Mode.Value(f"MODE_{mode.upper()}"))


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
