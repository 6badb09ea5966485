"""`/v1/messages` and `/v1/messages/count_tokens` in Anthropic's dialect: their requests, in the protocol of gRPC."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal, Self

from annotated_types import MaxLen
from pydantic import Discriminator, Field, Tag, model_validator

from corolla.client.api.conversations import MAX_MESSAGES, MAX_TOOLS
from corolla.client.api.requests import MAX_STOP_SEQUENCES
from corolla.http.chat import (
    FUNCTION,
    MAX_EFFORT_CHARS,
    Function,
    FunctionName,
    ToolMode,
    allowed_places,
    choice_of,
    struct_of,
    tools_of,
)
from corolla.http.field_paths import Paths
from corolla.http.fields import (
    ANOTHER,
    Body,
    Fields,
    Flag,
    Form,
    Int32,
    ListOf,
    ModelName,
    SamplingFields,
    Skipped,
    Text,
    Tolerated,
    as_json,
    tag_of,
)
from corolla.http.foreign_fields import OF_ANTHROPIC, unread
from corolla.http.responses import JsonSchemaText
from corolla.v1 import generation_pb2 as pb

_THINKING_ARGUMENTS: Final = ("enable_thinking", "thinking")
"""Names by which chat templates ask whether the model thinks."""
_ERROR: Final = "Error: "


class TextBlock(Fields):
    type: Literal["text"]
    text: str
    citations: Any = Tolerated


class ThinkingBlock(Fields):
    """What an assistant thought. Signatures are not checked."""

    type: Literal["thinking"]
    thinking: Text = ""
    signature: Any = Tolerated


class RedactedThinkingBlock(Fields):
    """What an assistant of Anthropic's thought, which only Anthropic can read. It is left out."""

    type: Literal["redacted_thinking"]
    data: Any = Tolerated


class ToolUseBlock(Fields):
    """A call that an assistant made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = Tolerated


class ToolReferenceBlock(Fields):
    """A tool that a search found. The model gets its name."""

    type: Literal["tool_reference"]
    text: str = Field(alias="tool_name")


class MediaBlock(Fields):
    """What no model of this service reads."""

    type: Literal["image", "document"]

    @model_validator(mode="after")
    def _is_refused(self) -> Self:
        raise ValueError(unread(self.type))


ResultBlock = Annotated[TextBlock | ToolReferenceBlock | MediaBlock, Field(discriminator="type")]


class ToolResultBlock(Fields):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[ListOf[ResultBlock], MaxLen(MAX_MESSAGES)] | None = None
    is_error: Flag = Field(False, description="The model reads `Error: ` in front of the result.")

    @property
    def texts(self) -> list[str]:
        """Its texts, as the model reads them."""
        given = self.content or ""
        texts = [given] if isinstance(given, str) else [each.text for each in given if not isinstance(each, MediaBlock)]
        texts = texts or [""]
        return [_ERROR + texts[0], *texts[1:]] if self.is_error else texts


UserBlock = Annotated[TextBlock | ToolResultBlock | MediaBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")
]


class UserMessage(Fields):
    """A message of the user's, with the results of calls."""

    role: Literal["user"]
    content: str | Annotated[ListOf[UserBlock], MaxLen(MAX_MESSAGES)]


class AssistantMessage(Fields):
    role: Literal["assistant"]
    content: str | Annotated[ListOf[AssistantBlock], MaxLen(MAX_MESSAGES)]


class SystemMessage(Fields):
    role: Literal["system"]
    content: str | Annotated[ListOf[TextBlock], MaxLen(MAX_MESSAGES)]


InputMessage = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class CustomTool(Function):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    parameters: dict[str, Any] = Field(alias="input_schema")


# OpenAI's form of a function is a mistake, not a tool of Anthropic's.
_TAGS: Final = {"custom": FUNCTION, "function": FUNCTION}
AnyMessageTool = Annotated[
    Annotated[CustomTool, Tag(FUNCTION)] | Annotated[Skipped, Tag(ANOTHER)],
    Discriminator(lambda tool: tag_of(tool, _TAGS, FUNCTION)),
]
"""Tools that Anthropic's servers run or describe are skipped."""


class ToolRule(Fields):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: Flag = False


class NamedToolRule(FunctionName):
    type: Literal["tool"]
    disable_parallel_tool_use: Flag = False


_TOOL_MODES: Final[dict[str, ToolMode]] = {"auto": "auto", "any": "required", "none": "none"}


class Thinking(Fields):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class OutputConfig(Fields):
    effort: str | None = Field(
        None, max_length=MAX_EFFORT_CHARS, description="Handed to the chat template as `reasoning_effort`."
    )
    format: JsonSchemaText | None = None


class ConversationBody(Body):
    """A conversation, and what its chat template needs to know."""

    refused_fields = OF_ANTHROPIC

    model: ModelName = ""
    messages: Annotated[ListOf[InputMessage], MaxLen(MAX_MESSAGES)]
    system: str | Annotated[ListOf[TextBlock], MaxLen(MAX_MESSAGES)] | None = Field(
        None, description="A system message in front of the others."
    )
    tools: Annotated[ListOf[AnyMessageTool], MaxLen(MAX_TOOLS)] | None = None
    tool_choice: Annotated[ToolRule | NamedToolRule, Field(discriminator="type")] | None = None
    thinking: Thinking | None = Field(
        None,
        description="Unset: disabled. Handed to the chat template as `enable_thinking` and `thinking`. What the model "
        "thinks all the same is left out.",
    )
    output_config: OutputConfig | None = None

    def paths(self, number: int = 0) -> Paths:
        found = {
            **super().paths(),
            **self._joined().paths,
            "continue_last_message": f"messages[{len(self.messages) - 1}]",
            "prompt": "messages",
            "stopping.stop": "stop_sequences",
            "template_arguments.reasoning_effort": "output_config.effort",
            "text": "messages",
            "tool_choice.mode": "tool_choice.type",
        }
        for index, place in enumerate(allowed_places(self.tools)):
            found |= {
                f"tools[{index}]": f"tools[{place}]",
                f"tools[{index}].parameters": f"tools[{place}].input_schema",
            }
        return found

    @property
    def thinks(self) -> bool:
        """The model may think, and the caller gets to see it."""
        return self.thinking is not None and self.thinking.type != "disabled"

    def as_conversation(self) -> pb.Conversation:
        """The conversation in the protocol of gRPC, whose last message is continued if it is the assistant's."""
        arguments: dict[str, Any] = dict.fromkeys(_THINKING_ARGUMENTS, self.thinks)
        if self.output_config is not None and self.output_config.effort is not None:
            arguments["reasoning_effort"] = self.output_config.effort
        return pb.Conversation(
            messages=self._joined().messages,
            tools=tools_of(self.tools),
            continue_last_message=bool(self.messages) and self.messages[-1].role == "assistant",
            template_arguments=struct_of(arguments),
        )

    def _joined(self) -> "_Conversation":
        return _Conversation(self.system or (), self.messages)


class CountTokensRequest(ConversationBody):
    """A conversation whose tokens are counted."""

    def as_protocol(self) -> pb.TokenizeRequest:
        """The request in the protocol of gRPC."""
        return pb.TokenizeRequest(model=self.model, chat=self.as_conversation())


class MessageRequest(ConversationBody, SamplingFields):
    """A conversation to be answered."""

    refused_fields = OF_ANTHROPIC

    max_tokens: Int32 | None = Field(None, description="Unset or -1: as many as context and quota allow.")
    stop_sequences: Annotated[ListOf[str], MaxLen(MAX_STOP_SEQUENCES)] | None = Field(
        None, description="The answer ends before the first of these texts."
    )
    stream: bool | None = None

    def as_protocol(self) -> pb.ChatRequest:
        """The request in the protocol of gRPC."""
        conversation = self.as_conversation()
        return pb.ChatRequest(
            model=self.model,
            messages=conversation.messages,
            continue_last_message=conversation.continue_last_message,
            template_arguments=conversation.template_arguments,
            tools=conversation.tools,
            tool_choice=choice_of(self._choice()),
            parallel_tool_calls=not (self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use),
            sampling=self.sampling(),
            stopping=self.stopping(self.max_tokens, self.stop_sequences),
            cache_salt=self.cache_salt,
            response_format=self.form(),
            # The first event has the number of tokens of the prompt.
            continuous_usage=bool(self.stream),
        )

    def _forms(self) -> Iterator[Form]:
        if self.output_config is not None and self.output_config.format is not None:
            yield from self.output_config.format.forms("output_config.format")

    def _choice(self) -> ToolMode | FunctionName | None:
        match self.tool_choice:
            case ToolRule(type=kind):
                return _TOOL_MODES[kind]
            case named:
                return named


class _Conversation:
    """Messages in the protocol of gRPC.

    Messages of one role that follow one another become one, as at Anthropic: many templates accept no others.

    Attributes:
        paths: where the caller's body has what the protocol has.
    """

    def __init__(self, system: str | Sequence[TextBlock], given: Sequence[InputMessage]) -> None:
        self.messages: list[pb.ChatMessage] = []
        self.paths: dict[str, str] = {}
        self._thoughts: list[list[str]] = []
        if system:
            self._add("system", system, "system")
            self.paths["messages[0].content"] = "system"
        for index, message in enumerate(given):
            self._add(message.role, message.content, f"messages[{index}]", f"messages[{index}].content")
        for joined, thoughts in zip(self.messages, self._thoughts, strict=True):
            # A text that grew by each block would be copied as often.
            joined.reasoning = "".join(thoughts)
            if len(joined.content_parts) == 1:
                joined.content = joined.content_parts.pop()

    def _add(self, role: str, content: str | Sequence[UserBlock | AssistantBlock], place: str, inner: str = "") -> None:
        """Adds a message, which is at `place` in the body, and its content at `inner`."""
        if isinstance(content, str):
            self._message(role, place).content_parts.append(content)
            return
        if not content:
            self._message(role, place)
        for index, block in enumerate(content):
            where = f"{inner or place}[{index}]"
            if isinstance(block, ToolResultBlock):
                message = self._message("tool", where)
                message.tool_call_id = block.tool_use_id
                message.content_parts.extend(block.texts)
                self.paths[f"messages[{len(self.messages) - 1}].tool_call_id"] = f"{where}.tool_use_id"
            else:
                self._add_block(self._message(role, place), block, where)

    def _add_block(self, message: pb.ChatMessage, block: UserBlock | AssistantBlock, place: str) -> None:
        match block:
            case TextBlock(text=text):
                message.content_parts.append(text)
            case ThinkingBlock(thinking=thoughts):
                self._thoughts[-1].append(thoughts)
            case ToolUseBlock():
                path = f"messages[{len(self.messages) - 1}].tool_calls[{len(message.tool_calls)}]"
                self.paths |= {path: place, f"{path}.arguments": f"{place}.input"}
                message.tool_calls.add(id=block.id, name=block.name, arguments=as_json(block.input))

    def _message(self, role: str, place: str) -> pb.ChatMessage:
        """The message to which a block belongs, which may be the last one. Each result has a message of its own."""
        if not self.messages or self.messages[-1].role != role or role == "tool":
            self.paths[f"messages[{len(self.messages)}]"] = place
            self.messages.append(pb.ChatMessage(role=role))
            self._thoughts.append([])
        return self.messages[-1]
