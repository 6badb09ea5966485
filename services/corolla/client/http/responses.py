"""`/v1/responses`: its request. A stored response is a turn of a session, and its id names session and turn."""

import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag

from corolla.chassis.errors import ResourceNotFound
from corolla.client.http.chat import (
    AllowedTools,
    ContentPart,
    Function,
    FunctionName,
    ToolMode,
    chosen_tools,
    kind_of_tool,
    set_text,
    struct_of,
    tool_of,
)
from corolla.client.http.fields import (
    UNLIMITED,
    Fields,
    Int32,
    JsonObjectFormat,
    JsonSchema,
    ListOf,
    SamplingFields,
    Skipped,
    Text,
    TextFormat,
    Tolerated,
    json_schema_format,
)
from corolla.client.http.foreign_fields import OF_RESPONSES
from corolla.v1 import generation_pb2 as pb

_ID: Final = re.compile(r"resp_([0-9a-f]{32})([0-9a-f]{8})")


class Item(Fields):
    """A part of a conversation."""

    id: Any = Tolerated
    status: Any = Tolerated


class MessageItem(Item):
    type: Literal["message"] | None = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | ListOf[ContentPart] | None = None
    phase: Any = Tolerated


class FunctionCallItem(Item):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Text = ""


class FunctionOutputItem(Item):
    """The result of a called function."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | ListOf[ContentPart] | None = None


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: ListOf[ContentPart] | None = None
    content: ListOf[ContentPart] | None = None
    encrypted_content: Any = Tolerated


_KINDS: Final = ("message", "function_call", "function_call_output", "reasoning")


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    if kind is None or not isinstance(kind, str):
        return "message"
    return kind if kind in _KINDS else "other"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[Skipped, Tag("other")],
    Discriminator(_kind),
]
"""Items of other kinds, such as calls of tools that run at OpenAI, are skipped."""


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]

    def as_protocol(self) -> pb.Tool:
        """The tool in the protocol of gRPC.

        Unless `strict` is set, arguments fit the schema as far as grammars can follow it, as at OpenAI.
        """
        tool = tool_of(self)
        if self.strict is None and self.parameters is not None:
            tool.strict = tool.lenient = True
        return tool


AnyResponseTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[Skipped, Tag("other")], Discriminator(kind_of_tool)
]


class NamedFunction(FunctionName):
    type: Literal["function"]


class ResponseAllowedTools(AllowedTools):
    type: Literal["allowed_tools"]


class JsonSchemaText(JsonSchema):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class TextOptions(Fields):
    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaText, Field(discriminator="type")] | None = None
    verbosity: Any = Tolerated


class ReasoningOptions(Fields):
    effort: str | None = Field(None, description="Handed to the chat template as `reasoning_effort`.")
    summary: Any = Tolerated
    generate_summary: Any = Tolerated


class ResponseRequest(SamplingFields):
    """A conversation to be answered, or its new items since an earlier response."""

    refused_fields = OF_RESPONSES

    input: str | ListOf[InputItem] | None = None
    instructions: str | None = Field(
        None, description="A system message in front of the whole conversation, for this response only."
    )
    previous_response_id: str | None = Field(None, description="Any stored response, which this one continues.")
    store: bool | None = Field(None, description="Unset: true. Only a stored response can be continued.")
    stream: bool | None = None
    stream_options: Any = Tolerated
    max_output_tokens: Int32 | None = Field(None, description="Unset or -1: as many as context and quota allow.")
    tools: ListOf[AnyResponseTool] | None = None
    tool_choice: ToolMode | NamedFunction | ResponseAllowedTools | Skipped | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: ListOf[str] | None = Field(None, description="`message.output_text.logprobs`; others have no effect.")
    top_logprobs: Int32 | None = Field(None, description="0 to 20.")
    truncation: Any = Field(None, description="Without effect: conversations are never cut.")
    background: Literal[False] | None = Field(None, description="Responses are made while their callers wait.")
    max_tool_calls: Any = Tolerated

    @property
    def is_stored(self) -> bool:
        """Whether the response can be continued."""
        return self.store is not False

    @property
    def has_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())

    def as_protocol(self, turn: "StoredTurn | None", earlier: Sequence[pb.ChatMessage] = ()) -> pb.ChatRequest:
        """The request in the protocol of gRPC. Raises InvalidRequest.

        Args:
            turn: the turn of a session that the response becomes; None: it is not stored.
            earlier: the messages that the session does not hold, in front of the input.
        """
        effort = self.reasoning.effort if self.reasoning is not None else None
        stopping = pb.StoppingParameters()
        if self.max_output_tokens not in (None, UNLIMITED):
            stopping.max_tokens = self.max_output_tokens or 0
        functions = [each for each in self.tools or () if isinstance(each, FunctionTool)]
        tools, choice = chosen_tools([each.as_protocol() for each in functions], self.tool_choice)
        return pb.ChatRequest(
            model=self.model,
            messages=[*earlier, *self._messages()],
            instructions=self.instructions or "",
            session_id=turn.session_id if turn is not None else "",
            expected_turns=turn.number - 1 if turn is not None else None,
            sampling=self.sampling(),
            stopping=stopping,
            logprobs=(self.top_logprobs or 0) if self.has_logprobs else None,
            cache_salt=self.cache_salt,
            response_format=_format_of(self.text),
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            template_arguments=struct_of({"reasoning_effort": effort} if effort is not None else {}),
        )

    def _messages(self) -> Iterator[pb.ChatMessage]:
        if isinstance(self.input, str):
            yield pb.ChatMessage(role="user", content=self.input)
            return
        yield from _joined([each for each in self.input or () if not isinstance(each, Skipped)])


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """The turn of a session that made a stored response; the session's first turn is number 1."""

    session_id: str
    number: int

    @classmethod
    def of(cls, response_id: str) -> "StoredTurn":
        """The turn of a response. Raises ResourceNotFound if the id does not have the form of a stored response."""
        found = _ID.fullmatch(response_id)
        if found is None:
            raise ResourceNotFound("no response with this id is stored")
        return cls(found[1], int(found[2], 16))

    @property
    def response_id(self) -> str:
        return f"resp_{self.session_id}{self.number:08x}"


def new_response_id() -> str:
    """An id for a response that is not stored."""
    return f"resp_{secrets.token_hex(20)}"


def _joined(
    items: Sequence[MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem],
) -> Iterator[pb.ChatMessage]:
    """Converts items to messages. Consecutive reasoning, text and calls of an assistant become one message."""
    assistant: pb.ChatMessage | None = None
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                if assistant is not None and (assistant.content or assistant.content_parts or assistant.tool_calls):
                    yield assistant
                    assistant = None
                assistant = assistant or pb.ChatMessage(role="assistant")
                set_text(assistant, item.content or "")
                continue
            case FunctionCallItem():
                assistant = assistant or pb.ChatMessage(role="assistant")
                assistant.tool_calls.add(id=item.call_id, name=item.name, arguments=item.arguments)
                continue
            case ReasoningItem():
                if assistant is not None:
                    yield assistant
                thoughts = "".join(part.spoken for part in item.content or item.summary or ())
                assistant = pb.ChatMessage(role="assistant", reasoning=thoughts)
                continue
        if assistant is not None:
            yield assistant
            assistant = None
        if isinstance(item, FunctionOutputItem):
            message = pb.ChatMessage(role="tool", tool_call_id=item.call_id)
            set_text(message, item.output or "")
        else:
            message = pb.ChatMessage(role=item.role)
            set_text(message, item.content or "")
        yield message
    if assistant is not None:
        yield assistant


def _format_of(options: TextOptions | None) -> pb.ResponseFormat | None:
    match options.format if options is not None else None:
        case JsonObjectFormat(json_schema=None):
            return pb.ResponseFormat(json_object=pb.JsonObject())
        case JsonObjectFormat(json_schema=schema) | JsonSchemaText(json_schema=schema):
            return json_schema_format(schema, "text.format.schema")
    return None
