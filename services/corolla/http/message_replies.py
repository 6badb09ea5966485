"""`/v1/messages` in Anthropic's dialect: replies and events of streams."""

from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field

from corolla.client.text.conversation import arguments_of
from corolla.http.answer_items import Item, ItemEvents, ItemKind, as_chunk
from corolla.http.answers import Disturbances, compact, disturbances, escaped, new_id
from corolla.v1 import generation_pb2 as pb

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]

_STOP_REASONS: Final[Mapping["pb.FinishReason.ValueType", StopReason | None]] = {
    pb.FINISH_REASON_UNSPECIFIED: None,
    pb.FINISH_REASON_EOS: "end_turn",
    pb.FINISH_REASON_STOP_SEQUENCE: "stop_sequence",
    pb.FINISH_REASON_LENGTH: "max_tokens",
    pb.FINISH_REASON_TIME_LIMIT: "max_tokens",
    pb.FINISH_REASON_CANCELLED: "max_tokens",
    pb.FINISH_REASON_TOOL_CALLS: "tool_use",
}
_SIGNATURE: Final = "unsigned"
"""Clients drop thoughts without a signature. This service checks none."""

_BROKEN: Final = "INVALID_JSON"
"""Anthropic's name for arguments that are not JSON."""


class AnsweredText(BaseModel):
    type: Literal["text"] = "text"
    text: str


class AnsweredThinking(BaseModel):
    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = Field(description="Without meaning: this service checks no signatures.")


class AnsweredToolUse(BaseModel):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


AnsweredBlock = Annotated[AnsweredText | AnsweredThinking | AnsweredToolUse, Field(discriminator="type")]


class MessageUsage(Disturbances):
    """What a message cost. Its three numbers of input tokens together are the prompt's."""

    input_tokens: int = Field(description="Tokens of the prompt that were computed.")
    cache_creation_input_tokens: Literal[0] = 0
    cache_read_input_tokens: int = Field(
        description="Tokens of the prompt whose keys and values were still on the servers."
    )
    output_tokens: int

    @classmethod
    def from_message(cls, usage: pb.Usage) -> "MessageUsage":
        return cls(
            input_tokens=usage.prompt_tokens - usage.cached_tokens,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            **disturbances(usage),
        )


class Message(BaseModel):
    """An answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnsweredBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """The number of tokens of a conversation."""

    input_tokens: int


def reply(answer: pb.ChatResponse, *, shows_thinking: bool) -> Message:
    """A reply that is not streamed."""
    writer = _Writer(shows_thinking=shows_thinking)
    writer.take(as_chunk(answer))
    writer.end()
    return Message(
        id=new_id("msg_"),
        model=answer.model,
        content=[_block(item) for item in writer.items],
        stop_reason=_STOP_REASONS[answer.finish_reason],
        stop_sequence=answer.stop_sequence or None,
        usage=MessageUsage.from_message(answer.usage),
    )


def events(
    chunks: AsyncGenerator[pb.ChatChunk, None], model: str, *, shows_thinking: bool
) -> AsyncGenerator[bytes, None]:
    """Yields the events of a stream: the message without content, its blocks, and how it ended.

    Args:
        chunks: each one has the usage so far.
    """
    writer = _Writer(shows_thinking=shows_thinking)

    def begin(chunk: pb.ChatChunk) -> str:
        usage = MessageUsage.from_message(chunk.usage)
        begun = Message(id=new_id("msg_"), model=model, content=[], stop_reason=None, stop_sequence=None, usage=usage)
        return _event("message_start", message=begun.model_dump())

    def end(chunk: pb.ChatChunk) -> str:
        delta = {"stop_reason": _STOP_REASONS[chunk.finish_reason], "stop_sequence": chunk.stop_sequence or None}
        ended = _event("message_delta", delta=delta, usage=MessageUsage.from_message(chunk.usage).model_dump())
        return writer.end() + ended + _event("message_stop")

    return writer.stream(chunks, begin, end)


class _Writer(ItemEvents):
    """Makes the events of one answer.

    Args:
        shows_thinking: whether reasoning becomes items.
    """

    def __init__(self, *, shows_thinking: bool) -> None:
        super().__init__()
        self._shows_thinking = shows_thinking
        self._head = ""

    def take(self, chunk: pb.ChatChunk) -> str:
        if not self._shows_thinking:
            chunk.ClearField("reasoning_delta")
        return super().take(chunk)

    def begun(self, item: Item) -> str:
        kind, name = {
            ItemKind.TEXT: ("text_delta", "text"),
            ItemKind.REASONING: ("thinking_delta", "thinking"),
            ItemKind.CALL: ("input_json_delta", "partial_json"),
        }[item.kind]
        # Each token has an event, so all of it that is known before is made once.
        self._head = (
            'event: content_block_delta\ndata: {"type":"content_block_delta",'
            f'"index":{item.index},"delta":{{"type":"{kind}","{name}":'
        )
        block = _block(item).model_dump()
        if item.kind is ItemKind.REASONING:
            block["signature"] = ""
        return _event("content_block_start", index=item.index, content_block=block)

    def grown(self, item: Item, delta: str, logprobs: list[dict[str, Any]]) -> str:
        return f"{self._head}{escaped(delta)}}}}}\n\n"

    def ended(self, item: Item, *, is_cut: bool) -> str:
        text = ""
        if item.kind is ItemKind.REASONING:
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            text = _event("content_block_delta", index=item.index, delta=delta)
        return text + _event("content_block_stop", index=item.index)


def _block(item: Item) -> AnsweredText | AnsweredThinking | AnsweredToolUse:
    """An item in Anthropic's form. Arguments that were cut off keep what they have."""
    match item.kind:
        case ItemKind.TEXT:
            return AnsweredText(text=item.text)
        case ItemKind.REASONING:
            return AnsweredThinking(thinking=item.text, signature=_SIGNATURE)
        case ItemKind.CALL:
            arguments = arguments_of(item.text)
            given = arguments if isinstance(arguments, dict) else {_BROKEN: item.text}
            return AnsweredToolUse(id=item.call_id, name=item.name, input=given)


def _event(kind: str, **facts: Any) -> str:
    return f"event: {kind}\ndata: {compact({'type': kind, **facts})}\n\n"
