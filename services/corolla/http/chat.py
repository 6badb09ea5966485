"""`/v1/chat/completions`: its request, and the conversion to the protocol of gRPC."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Self

from annotated_types import MaxLen
from google.protobuf.struct_pb2 import Struct
from pydantic import AfterValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator

from corolla.chassis.errors import InvalidRequest
from corolla.client.api.conversations import (
    MAX_ARGUMENT_DEPTH,
    MAX_ARGUMENTS,
    MAX_ARGUMENTS_BYTES,
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_TOOLS,
)
from corolla.client.text.schemas import depth_of
from corolla.http.field_paths import Paths
from corolla.http.fields import (
    ANOTHER,
    MAX_NAMES,
    AnswerFields,
    Fields,
    Flag,
    Int32,
    ListOf,
    Skipped,
    Text,
    Tolerated,
    Unheeded,
    as_json,
    tag_of,
)
from corolla.http.foreign_fields import OF_CHATS, OF_MESSAGES, Ignored, unread
from corolla.v1 import generation_pb2 as pb

_TEXTS: Final = ("text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text")
MAX_EFFORT_CHARS: Final = 64
_THOUGHTS: Final = ("thinking", "redacted_thinking")


def _known_type(kind: str) -> str:
    if kind not in (*_TEXTS, *_THOUGHTS) and unread(kind) is None:
        raise ValueError(f"must be {', '.join(map(repr, _TEXTS))} or the type of a thought")
    return kind


class ContentPart(Fields):
    """A part of a message. Parts that hold no text of the conversation, such as signatures of thoughts, are skipped."""

    type: Annotated[str, AfterValidator(_known_type), WithJsonSchema({"enum": [*_TEXTS, *_THOUGHTS], "type": "string"})]
    text: Text = ""
    refusal: Text = ""
    annotations: Any = Tolerated
    logprobs: Any = Tolerated
    cache_control: Any = Tolerated

    @model_validator(mode="after")
    def _is_read(self) -> Self:
        """Refuses media as a whole, since they have other fields."""
        if (problem := unread(self.type)) is not None:
            raise ValueError(problem)
        return self

    @property
    def is_skipped(self) -> bool:
        return self.type in _THOUGHTS

    @property
    def spoken(self) -> str:
        """The part's text, which is empty for thoughts of a model."""
        return "" if self.is_skipped else self.text or self.refusal


ContentParts = Annotated[ListOf[ContentPart], MaxLen(MAX_MESSAGES)]


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
    content: str | ContentParts | None = None
    name: str | None = None
    tool_calls: Annotated[ListOf[ToolCall], MaxLen(MAX_CALLS)] | None = None
    function_call: CalledFunction | None = Field(None, description="OpenAI's older form of one call.")
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")
    refusal: Text = Field("", description="The content of an assistant's message without one.")
    annotations: Any = Tolerated

    def paths(self, place: str) -> Paths:
        """The paths of the message's parts in the body, by those in the protocol; `place` is the message's own."""
        found = {f"{place}.content_parts": f"{place}.content"}
        if self.reasoning_content is not None:
            found[f"{place}.reasoning"] = f"{place}.reasoning_content"
        calls = self.tool_calls or ()
        for path, call in ((f"{place}.tool_calls[{index}]", each) for index, each in enumerate(calls)):
            is_custom = call.custom is not None
            found[f"{path}.name"] = f"{path}.custom.name" if is_custom else f"{path}.function.name"
            found[f"{path}.arguments"] = f"{path}.custom.input" if is_custom else f"{path}.function.arguments"
        found[f"{place}.tool_calls[{len(calls)}]"] = f"{place}.function_call"
        return found


class Function(Fields):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_protocol(self) -> pb.Tool:
        """The tool in the protocol of gRPC."""
        return pb.Tool(
            name=self.name,
            description=self.description or "",
            parameters="" if self.parameters is None else as_json(self.parameters),
            strict=bool(self.strict),
        )


class Tool(Fields):
    """A function that the model may call."""

    type: Literal["function"] | None = None
    function: Function


FUNCTION: Final = "a function"
BY_KIND_OF_TOOL: Final = Discriminator(lambda tool: tag_of(tool, {"function": FUNCTION}, FUNCTION))
AnyTool = Annotated[Annotated[Tool, Tag(FUNCTION)] | Annotated[Skipped, Tag(ANOTHER)], BY_KIND_OF_TOOL]
"""Tools of other types than functions are skipped."""

Tools = Annotated[ListOf[AnyTool], MaxLen(MAX_TOOLS)]
Messages = Annotated[ListOf[ChatMessage], MaxLen(MAX_MESSAGES)]


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
    tools: Annotated[ListOf[AllowedName], MaxLen(MAX_TOOLS)]


class ChatAllowedTools(Fields):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[NamedTool | ChatAllowedTools, Field(discriminator="type")]


class ChatCompletionRequest(AnswerFields):
    """A conversation to be answered."""

    refused_fields = OF_CHATS

    messages: Messages = Field(description="With a session_id: what is new since its last turn.")
    max_completion_tokens: Int32 | None = Field(None, description="Another name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: Int32 | None = Field(None, description="Number of alternatives to report for each token, 0 to 20.")
    tools: Tools | None = None
    tool_choice: ToolMode | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Handed to the chat template.")
    reasoning_effort: str | None = Field(
        None, max_length=MAX_EFFORT_CHARS, description="Handed to the chat template by this name."
    )
    continue_final_message: Flag = Field(
        False, description="The last message is an assistant's, and the answer continues it."
    )
    add_generation_prompt: bool | None = Field(
        None, description="The opposite of continue_final_message; other values are refused."
    )
    modalities: Annotated[ListOf[Literal["text"]], MaxLen(MAX_NAMES)] | None = Tolerated
    verbosity: Annotated[Any, Ignored(("medium",))] = Unheeded
    prediction: Annotated[Any, Ignored()] = Unheeded

    def paths(self, number: int = 0) -> Paths:
        found = {**super().paths(), "logprobs": "top_logprobs", "prompt": "messages", "text": "messages"}
        found["tool_choice.mode"] = "tool_choice"
        found["tool_choice.name"] = "tool_choice.function.name"
        if self.max_completion_tokens is not None:
            found["stopping.max_tokens"] = "max_completion_tokens"
        if "reasoning_effort" not in (self.chat_template_kwargs or {}):
            found["template_arguments.reasoning_effort"] = "reasoning_effort"
        for index, message in enumerate(self.messages):
            found |= message.paths(f"messages[{index}]")
        for index, place in enumerate(allowed_places(self.tools, self._choice)):
            found[f"tools[{index}]"] = f"tools[{place}].function"
        return found

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
            messages=[message_of(each, f"messages[{index}]") for index, each in enumerate(self.messages)],
            logprobs=self._num_logprobs(),
            tools=tools_of(self.tools, self._choice),
            tool_choice=choice_of(self._choice),
            parallel_tool_calls=self.parallel_tool_calls,
            continue_last_message=self.continue_final_message,
            template_arguments=struct_of(arguments),
        )

    @property
    def _choice(self) -> ToolMode | NamedTool | AllowedTools | None:
        choice = self.tool_choice
        return choice.allowed_tools if isinstance(choice, ChatAllowedTools) else choice

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
    set_text(message, given.content or given.refusal)
    return message


def set_text(message: pb.ChatMessage, content: str | Sequence[ContentPart]) -> None:
    """Sets the text of a message, which may come in parts."""
    parts = [content] if isinstance(content, str) else [part.spoken for part in content]
    if len(parts) == 1:
        message.content = parts[0]
    else:
        message.content_parts.extend(parts)


AnyChoice = ToolMode | FunctionName | NamedTool | AllowedTools | Skipped | None


def allowed_places(given: Sequence[Tool | Function | Skipped] | None, choice: AnyChoice = None) -> list[int]:
    """The places of the functions that the answer may call, in the list of all tools."""
    functions = [(place, _function(each)) for place, each in enumerate(given or ()) if not isinstance(each, Skipped)]
    if not isinstance(choice, AllowedTools):
        return [place for place, _ in functions]
    names = {each.function_name for each in choice.tools}
    return [place for place, function in functions if function.name in names]


def tools_of(given: Sequence[Tool | Function | Skipped] | None, choice: AnyChoice = None) -> list[pb.Tool]:
    """The functions that the answer may call, in the protocol of gRPC."""
    allowed = [(given or ())[place] for place in allowed_places(given, choice)]
    return [_function(each).as_protocol() for each in allowed if not isinstance(each, Skipped)]


def _function(tool: Tool | Function) -> Function:
    return tool.function if isinstance(tool, Tool) else tool


def choice_of(choice: AnyChoice) -> pb.ToolChoice | None:
    """Translates whether the answer must call a function, and which one. Without any tool, the answer is text.

    Raises InvalidRequest if a call is required of a tool that this service skips.
    """
    match choice:
        case None:
            return None
        case Skipped():
            raise InvalidRequest("tool_choice.type", "must be for functions, since this service knows no other tools")
        case NamedTool(function=FunctionName(name=name)) | FunctionName(name=name):
            return pb.ToolChoice(mode=pb.ToolChoice.MODE_NAMED, name=name)
        case AllowedTools(mode=mode) | mode:
            pass
    return pb.ToolChoice(mode=pb.ToolChoice.Mode.Value(f"MODE_{(mode or 'auto').upper()}"))


def struct_of(arguments: dict[str, Any]) -> Struct | None:
    """The arguments as protobuf's `Struct`. Raises InvalidRequest for a value that a `Struct` cannot hold."""
    if not arguments:
        return None
    # Protobuf itself fails on too deep values only when it copies the message.
    if depth_of(arguments) > MAX_ARGUMENT_DEPTH:
        raise InvalidRequest("chat_template_kwargs", f"must be at most {MAX_ARGUMENT_DEPTH} deep")
    if len(arguments) > MAX_ARGUMENTS or len(as_json(arguments)) > MAX_ARGUMENTS_BYTES:
        raise InvalidRequest(
            "chat_template_kwargs", f"must be at most {MAX_ARGUMENTS}, of {MAX_ARGUMENTS_BYTES} bytes together"
        )
    struct = Struct()
    try:
        struct.update(arguments)
    except (ValueError, TypeError, OverflowError):
        raise InvalidRequest("chat_template_kwargs", "must hold values of JSON") from None
    return struct
