"""`/v1/responses`: its request. A stored response is a turn of a session, and its id names session and turn."""

import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self

from annotated_types import MaxLen
from pydantic import Discriminator, Field, Tag, model_validator

from corolla.chassis.errors import InvalidRequest, ResourceNotFound
from corolla.client.api.conversations import MAX_MESSAGES, MAX_TOOLS
from corolla.http.chat import (
    BY_KIND_OF_TOOL,
    FUNCTION,
    MAX_EFFORT_CHARS,
    AllowedTools,
    ContentParts,
    Function,
    FunctionName,
    ToolMode,
    allowed_places,
    choice_of,
    set_text,
    struct_of,
    tools_of,
)
from corolla.http.field_paths import Paths, shown
from corolla.http.fields import (
    ANOTHER,
    MAX_NAMES,
    Body,
    Fields,
    Form,
    Int32,
    JsonObjectFormat,
    JsonSchema,
    ListOf,
    SamplingFields,
    Skipped,
    Text,
    TextFormat,
    Tolerated,
    Unheeded,
    schema_form,
    tag_of,
)
from corolla.http.foreign_fields import OF_RESPONSES, Ignored, unread
from corolla.v1 import generation_pb2 as pb

_LOGPROBS: Final = "message.output_text.logprobs"
_ID: Final = re.compile(r"resp_([0-9a-f]{32})([0-9a-f]{8})")


class Item(Fields):
    """A part of a conversation."""

    id: Any = Tolerated
    status: Any = Tolerated


class MessageItem(Item):
    type: Literal["message"] | None = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | ContentParts | None = None
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
    output: str | ContentParts | None = None


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: ContentParts | None = None
    content: ContentParts | None = None
    encrypted_content: Annotated[Any, Ignored()] = Unheeded


class OtherItem(Skipped):
    """An item of another kind, such as a call of a tool that runs at OpenAI."""

    @model_validator(mode="after")
    def _is_no_part(self) -> Self:
        """Refuses what must not be lost: media, which belong to a message, and items that the service does not have."""
        if (problem := unread(self.type)) is not None:
            raise ValueError(problem)
        if self.type == "item_reference":
            raise ValueError("must be the item itself; previous_response_id continues a stored conversation")
        return self


_ITEMS: Final = {each: each for each in ("message", "function_call", "function_call_output", "reasoning")}
InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[OtherItem, Tag(ANOTHER)],
    Discriminator(lambda item: tag_of(item, _ITEMS, "message")),
]
"""Items of other kinds are skipped."""


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]

    def as_protocol(self) -> pb.Tool:
        """The tool in the protocol of gRPC.

        Unless `strict` is set, arguments fit the schema as far as a grammar can follow it, as at OpenAI.
        """
        tool = super().as_protocol()
        if self.strict is None and self.parameters is not None:
            tool.strict = tool.lenient = True
        return tool


AnyResponseTool = Annotated[Annotated[FunctionTool, Tag(FUNCTION)] | Annotated[Skipped, Tag(ANOTHER)], BY_KIND_OF_TOOL]


class NamedFunction(FunctionName):
    type: Literal["function"]


class ResponseAllowedTools(AllowedTools):
    type: Literal["allowed_tools"]


class JsonSchemaText(JsonSchema):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")

    def forms(self, place: str) -> Iterator[Form]:
        yield schema_form(self.json_schema, f"{place}.schema", is_strict=self.strict)


_CHOICES: Final = {"function": FUNCTION, "allowed_tools": "some tools"}
ResponseToolChoice = Annotated[
    Annotated[ToolMode, Tag("a word")]
    | Annotated[NamedFunction, Tag(FUNCTION)]
    | Annotated[ResponseAllowedTools, Tag("some tools")]
    | Annotated[Skipped, Tag(ANOTHER)],
    Discriminator(lambda choice: "a word" if isinstance(choice, str) else tag_of(choice, _CHOICES)),
]


class TextOptions(Fields):
    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaText, Field(discriminator="type")] | None = None
    verbosity: Annotated[Any, Ignored(("medium",))] = Unheeded


class ReasoningOptions(Fields):
    effort: str | None = Field(
        None, max_length=MAX_EFFORT_CHARS, description="Handed to the chat template as `reasoning_effort`."
    )
    summary: Annotated[Any, Ignored()] = Unheeded
    generate_summary: Annotated[Any, Ignored()] = Unheeded


class ResponseRequest(SamplingFields):
    """A conversation to be answered, or its new items since an earlier response."""

    refused_fields = OF_RESPONSES

    input: str | Annotated[ListOf[InputItem], MaxLen(MAX_MESSAGES)] | None = None
    instructions: str | None = Field(
        None, description="A system message in front of the whole conversation, for this response only."
    )
    previous_response_id: str | None = Field(None, description="Any stored response, which this one continues.")
    store: bool | None = Field(None, description="Unset: true. Only a stored response can be continued.")
    stream: bool | None = None
    stream_options: Annotated[Any, Ignored(({"include_obfuscation": False},))] = Unheeded
    max_output_tokens: Int32 | None = Field(None, description="Unset or -1: as many as context and quota allow.")
    tools: Annotated[ListOf[AnyResponseTool], MaxLen(MAX_TOOLS)] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[ListOf[str], MaxLen(MAX_NAMES)] | None = Field(
        None, description=f"`{_LOGPROBS}`; others are ignored."
    )
    top_logprobs: Int32 | None = Field(None, description="Number of alternatives to report for each token, 0 to 20.")
    truncation: Annotated[Any, Ignored(("disabled",))] = Field(
        None, description="Without effect: conversations are never cut."
    )
    background: Literal[False] | None = Field(None, description="Responses are made while their callers wait.")
    max_tool_calls: Annotated[Any, Ignored()] = Unheeded

    def paths(self, number: int = 0) -> Paths:
        """`number`: how many earlier messages the request of the protocol has."""
        found = {
            **super().paths(),
            "expected_turns": "previous_response_id",
            "logprobs": "top_logprobs",
            "messages": "input",
            "prompt": "input",
            "response_id": "previous_response_id",
            "session_id": "previous_response_id",
            "stopping.max_tokens": "max_output_tokens",
            "template_arguments.reasoning_effort": "reasoning.effort",
            "text": "input",
            "tool_choice.mode": "tool_choice",
        }
        for index, (_, places) in enumerate(self._messages(), start=number):
            found |= {f"messages[{index}]{part}": place for part, place in places.items()}
        for index, place in enumerate(allowed_places(self.tools, self.tool_choice)):
            found[f"tools[{index}]"] = f"tools[{place}]"
        return found

    @property
    def ignored_values(self) -> Sequence[str]:
        given = enumerate(self.include or ())
        return [f"include[{index}] ({shown(each)})" for index, each in given if each != _LOGPROBS]

    @property
    def is_stored(self) -> bool:
        """The response can be continued."""
        return self.store is not False

    @property
    def has_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())

    def as_protocol(self, turn: "StoredTurn | None", earlier: Sequence[pb.ChatMessage] = ()) -> pb.ChatRequest:
        """The request in the protocol of gRPC. Raises InvalidRequest.

        Args:
            turn: the turn of a session that the response becomes; None: it is not stored.
            earlier: the messages that the session does not hold, in front of the input.
        """
        effort = self.reasoning.effort if self.reasoning is not None else None
        return pb.ChatRequest(
            model=self.model,
            messages=[*earlier, *(message for message, _ in self._messages())],
            instructions=self.instructions or "",
            session_id=turn.session_id if turn is not None else "",
            expected_turns=turn.number - 1 if turn is not None else None,
            sampling=self.sampling(),
            stopping=self.stopping(self.max_output_tokens, None),
            logprobs=(self.top_logprobs or 0) if self.has_logprobs else None,
            cache_salt=self.cache_salt,
            response_format=self.form(),
            tools=tools_of(self.tools, self.tool_choice),
            tool_choice=choice_of(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            template_arguments=struct_of({"reasoning_effort": effort} if effort is not None else {}),
        )

    def _forms(self) -> Iterator[Form]:
        if self.text is not None and self.text.format is not None:
            yield from self.text.format.forms("text.format")

    def _messages(self) -> Iterator[tuple[pb.ChatMessage, Paths]]:
        """Yields each message of the input with the paths of its parts, by those below the message."""
        if isinstance(self.input, str):
            yield pb.ChatMessage(role="user", content=self.input), {"": "input", ".content": "input"}
            return
        given = enumerate(self.input or ())
        yield from _joined([(f"input[{index}]", each) for index, each in given if not isinstance(each, Skipped)])


class ReplayQuery(Body):
    """How a stored response is read."""

    stream: bool | None = Field(None, description="True sends the events of the response again.")
    starting_after: int | None = Field(
        None, ge=0, lt=1 << 31, description="With stream: only events with a higher sequence number."
    )


class ItemsQuery(Body):
    """A page of a list of items."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = Field("desc", description="desc: the newest item comes first.")
    after: str | None = Field(None, description="The id of the item before the page.")

    def page(self, items: Sequence[dict[str, Any]]) -> tuple[Sequence[dict[str, Any]], bool]:
        """The items of the page, and whether more follow. Raises InvalidRequest."""
        found = items if self.order == "asc" else items[::-1]
        first = 0
        if self.after is not None:
            first = next((index + 1 for index, each in enumerate(found) if each["id"] == self.after), -1)
        if first < 0:
            raise InvalidRequest("after", "must be the id of an item of the list")
        return found[first : first + self.limit], len(found) > first + self.limit


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """The turn of a session that made a stored response; the session's first turn is number 1."""

    session_id: str
    number: int

    @classmethod
    def from_response_id(cls, response_id: str) -> "StoredTurn":
        """The turn of a response. Raises ResourceNotFound if the id does not have the form of a stored response."""
        found = _ID.fullmatch(response_id)
        if found is None:
            raise not_stored()
        return cls(found[1], int(found[2], 16))

    @property
    def response_id(self) -> str:
        return f"resp_{self.session_id}{self.number:08x}"


def not_stored() -> ResourceNotFound:
    """The error where no response has an id."""
    return ResourceNotFound("no response with this id is stored", field="response_id")


def new_response_id() -> str:
    """An id for a response that is not stored."""
    return f"resp_{secrets.token_hex(20)}"


AnyItem = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem


def _joined(items: Sequence[tuple[str, AnyItem]]) -> Iterator[tuple[pb.ChatMessage, Paths]]:
    """Converts items to messages. Consecutive reasoning, text and calls of an assistant become one message.

    Args:
        items: the items, each with its path.
    """
    assistant: pb.ChatMessage | None = None
    places: dict[str, str] = {}
    for place, item in items:
        is_spoken = assistant is not None and (assistant.content or assistant.content_parts or assistant.tool_calls)
        ends = isinstance(item, FunctionOutputItem | ReasoningItem) or (
            isinstance(item, MessageItem) and (item.role != "assistant" or bool(is_spoken))
        )
        if assistant is not None and ends:
            yield assistant, places
            assistant = None
        if isinstance(item, FunctionOutputItem):
            message = pb.ChatMessage(role="tool", tool_call_id=item.call_id)
            set_text(message, item.output or "")
            output = f"{place}.output"
            below = {".tool_call_id": f"{place}.call_id", ".content": output, ".content_parts": output}
            yield message, {"": place, **below}
            continue
        if isinstance(item, MessageItem) and item.role != "assistant":
            message = pb.ChatMessage(role=item.role)
            set_text(message, item.content or "")
            yield message, {"": place, ".content_parts": f"{place}.content"}
            continue
        if assistant is None:
            assistant, places = pb.ChatMessage(role="assistant"), {"": place}
        match item:
            case MessageItem():
                set_text(assistant, item.content or "")
                places |= {".content": f"{place}.content", ".content_parts": f"{place}.content"}
            case FunctionCallItem():
                call = f".tool_calls[{len(assistant.tool_calls)}]"
                places |= {call: place, f"{call}.id": f"{place}.call_id"}
                assistant.tool_calls.add(id=item.call_id, name=item.name, arguments=item.arguments)
            case ReasoningItem():
                assistant.reasoning = "".join(part.spoken for part in item.content or item.summary or ())
    if assistant is not None:
        yield assistant, places
