"""`/v1/responses`: replies and events of streams."""

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Final, Literal

from pydantic import BaseModel

from corolla.http.answer_items import Item, ItemEvents, ItemKind, as_chunk
from corolla.http.answers import Disturbances, compact, disturbances, escaped, now_s
from corolla.http.log_probabilities import logprob_texts
from corolla.http.responses import ResponseRequest
from corolla.v1 import generation_pb2 as pb
from corolla.v1 import router_pb2


class InputDetails(BaseModel):
    cached_tokens: int


class OutputDetails(BaseModel):
    reasoning_tokens: int = 0


class ResponseUsage(Disturbances):
    """What a response cost."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(BaseModel):
    reason: Literal["max_output_tokens"]


class Response(BaseModel):
    """An answer, with the options of its request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: Any
    metadata: dict[str, Any]


class ItemList(BaseModel):
    """A page of a list of items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


_MOST_NOTE_BYTES: Final = 2048
_OF_ANSWERS: Final = {"id", "object", "status", "error", "incomplete_details", "output", "usage"}
"""What a response has apart from the options of its request."""
_NO_LOGPROBS: Final = '"logprobs":[]'
_CUT_OFF: Final = frozenset({pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_TIME_LIMIT, pb.FINISH_REASON_CANCELLED})
_ID_PREFIXES: Final = {ItemKind.REASONING: "rs_", ItemKind.TEXT: "msg_", ItemKind.CALL: "fc_"}
_EVENTS: Final = {
    ItemKind.REASONING: "response.reasoning_text",
    ItemKind.TEXT: "response.output_text",
    ItemKind.CALL: "response.function_call_arguments",
}


class Reply:
    """Writes the reply to a request of `/v1/responses`, whole or as events.

    Args:
        response_id: the response's id, by which a later request continues the response if it is stored.
    """

    def __init__(self, request: ResponseRequest, response_id: str, model: str) -> None:
        self.head = Response(
            id=response_id,
            created_at=now_s(),
            status="in_progress",
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            model=model,
            output=[],
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=request.previous_response_id,
            reasoning={"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            store=request.is_stored,
            temperature=request.sampling().temperature,
            text=_dumped(request.text) if request.text else {"format": {"type": "text"}},
            tool_choice=_dumped(request.tool_choice) if request.tool_choice else "auto",
            tools=[_dumped(each) for each in request.tools or ()],
            top_p=1.0 if request.top_p is None else request.top_p,
            user=request.user,
            metadata=request.metadata or {},
        )

    @classmethod
    def of_turn(cls, response_id: str, finished: router_pb2.FinishedTurn, model: str) -> "Reply":
        """The reply of a stored turn, with those options of its request that were noted."""
        reply = cls(ResponseRequest.model_validate({}), response_id, model)
        noted = json.loads(finished.note) if finished.note else {"created_at": finished.ended_s}
        reply.head = reply.head.model_copy(update=noted)
        return reply

    @property
    def note(self) -> bytes:
        """The options of the request, to be stored with the turn. Long ones are left out."""
        noted = self.head.model_dump(exclude=_OF_ANSWERS)
        for name in ("", "tools", "instructions", "text", "tool_choice", "metadata", "user"):
            noted.pop(name, None)
            if len(note := compact(noted).encode()) <= _MOST_NOTE_BYTES:
                return note
        return b""

    async def whole(self, answer: pb.ChatResponse) -> AsyncGenerator[str, None]:
        """The pieces of a reply that is not streamed, a `Response`."""
        writer, chunk = _Writer(self._id), as_chunk(answer)
        del chunk.logprobs[:]
        writer.take(chunk)
        writer.end(is_cut=answer.finish_reason in _CUT_OFF)
        text = self._ended(writer.output, answer.finish_reason, answer.usage).model_dump_json()
        # All that the caller chose and that is not a text comes behind the output, whose empty list is the first one.
        head, place, tail = text.partition(_NO_LOGPROBS)
        yield head + place[:-1]
        async for piece in logprob_texts(answer.logprobs if place else ()):
            yield piece
        yield place[-1:] + tail

    async def replayed(self, answer: pb.ChatResponse, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Yields the events of a finished answer that come after the event of a number."""
        writer = _Writer(self._id, after)
        text = self._begun(writer) + writer.take(as_chunk(answer))
        yield (text + self._end(writer, answer.finish_reason, answer.usage)).encode()

    def events(self, chunks: AsyncGenerator[pb.ChatChunk, None]) -> AsyncGenerator[bytes, None]:
        """Yields the events of a stream: its beginning, the items of the answer, and its end."""
        writer = _Writer(self._id)
        return writer.stream(
            chunks, lambda _first: self._begun(writer), lambda last: self._end(writer, last.finish_reason, last.usage)
        )

    def _begun(self, writer: "_Writer") -> str:
        head = self.head.model_dump()
        created = writer.event("response.created", response=head)
        return created + writer.event("response.in_progress", response=head)

    def _end(self, writer: "_Writer", reason: "pb.FinishReason.ValueType", usage: pb.Usage) -> str:
        text = writer.end(is_cut=reason in _CUT_OFF)
        ended = self._ended(writer.output, reason, usage)
        return text + writer.event(f"response.{ended.status}", response=ended.model_dump())

    def _id(self, prefix: str, index: int) -> str:
        """The id of an item of the output, which is the same whenever the response is read."""
        return f"{prefix}{self.head.id.removeprefix('resp_')}{index:02x}"

    def _ended(self, output: list[dict[str, Any]], reason: "pb.FinishReason.ValueType", usage: pb.Usage) -> Response:
        is_cut_off = reason in _CUT_OFF
        return self.head.model_copy(
            update={
                "status": "incomplete" if is_cut_off else "completed",
                "incomplete_details": Incomplete(reason="max_output_tokens") if is_cut_off else None,
                "output": output,
                "usage": ResponseUsage(
                    input_tokens=usage.prompt_tokens,
                    input_tokens_details=InputDetails(cached_tokens=usage.cached_tokens),
                    output_tokens=usage.completion_tokens,
                    output_tokens_details=OutputDetails(),
                    total_tokens=usage.prompt_tokens + usage.completion_tokens,
                    **disturbances(usage),
                ),
            }
        )


class _Writer(ItemEvents):
    """Makes the events of one answer.

    An event's number is one more than that of the event before it; that of a delta, as many more as it has characters.
    So the numbers do not depend on how an answer was divided into deltas, and a replay may begin behind any of them.

    Args:
        after: the number of the last event that the reader has.

    Attributes:
        output: the completed items in OpenAI's form.
    """

    def __init__(self, make_id: Callable[[str, int], str], after: int = -1) -> None:
        super().__init__()
        self.output: list[dict[str, Any]] = []
        self._make_id = make_id
        self._after = after
        self._number = 0
        self._place: dict[str, Any] = {}
        self._delta_head = self._delta_place = ""

    def event(self, kind: str, **facts: Any) -> str:
        """The text of an event; empty if the reader has it."""
        number = self._number
        self._number += 1
        if number <= self._after:
            return ""
        return f"event: {kind}\ndata: {compact({'type': kind, 'sequence_number': number, **facts})}\n\n"

    def begun(self, item: Item) -> str:
        facts = self._facts(item, "in_progress")
        self._place = {"item_id": facts["id"], "output_index": item.index}
        begun = {**facts, "content": []} if item.kind is ItemKind.TEXT else facts
        text = self.event("response.output_item.added", output_index=item.index, item=begun)
        if item.kind is not ItemKind.CALL:
            self._place["content_index"] = 0
            text += self.event("response.content_part.added", **self._place, part=facts["content"][0])
        # The text before and after the sequence number in each delta's event.
        kind = f"{_EVENTS[item.kind]}.delta"
        self._delta_head = f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":'
        self._delta_place = f',{compact(self._place)[1:-1]},"delta":'
        return text

    def grown(self, item: Item, delta: str, logprobs: list[dict[str, Any]]) -> str:
        self._number += len(delta)
        if (num_new := self._number - 1 - self._after) <= 0:
            return ""
        more = f',"logprobs":{compact(logprobs)}' if item.kind is ItemKind.TEXT else ""
        return f"{self._delta_head}{self._number - 1}{self._delta_place}{escaped(delta[-num_new:])}{more}}}\n\n"

    def ended(self, item: Item, *, is_cut: bool) -> str:
        facts = self._facts(item, "incomplete" if is_cut else "completed")
        self.output.append(facts)
        done = f"{_EVENTS[item.kind]}.done"
        if item.kind is ItemKind.CALL:
            text = self.event(done, **self._place, name=item.name, arguments=item.text)
        else:
            part = facts["content"][0]
            logprobs = {"logprobs": item.logprobs} if item.kind is ItemKind.TEXT else {}
            text = self.event(done, **self._place, text=item.text, **logprobs)
            text += self.event("response.content_part.done", **self._place, part=part)
        return text + self.event("response.output_item.done", output_index=item.index, item=facts)

    def _facts(self, item: Item, status: str) -> dict[str, Any]:
        """An item so far, in OpenAI's form."""
        item_id = self._make_id(_ID_PREFIXES[item.kind], item.index)
        match item.kind:
            case ItemKind.REASONING:
                return _reasoning(item_id, item.text, status)
            case ItemKind.TEXT:
                return _message(item_id, item.text, item.logprobs, status)
            case ItemKind.CALL:
                return _call(item_id, item.call_id, item.name, item.text, status)


def input_items(messages: Sequence[pb.ChatMessage], response_id: str) -> list[dict[str, Any]]:
    """The items of a conversation before a response, in OpenAI's form. Their ids depend on their places only."""
    items: list[dict[str, Any]] = []

    def item_id(prefix: str) -> str:
        return f"{prefix}{response_id.removeprefix('resp_')}i{len(items):04x}"

    for message in messages:
        texts = list(message.content_parts) or [message.content]
        if message.role == "tool":
            facts = {"id": item_id("fco_"), "type": "function_call_output", "call_id": message.tool_call_id}
            items.append({**facts, "output": "".join(texts), "status": "completed"})
            continue
        if message.role != "assistant":
            content = [{"type": "input_text", "text": text} for text in texts]
            facts = {"id": item_id("msg_"), "type": "message", "role": message.role}
            items.append({**facts, "content": content, "status": "completed"})
            continue
        if message.reasoning:
            items.append(_reasoning(item_id("rs_"), message.reasoning))
        if any(texts) or not message.tool_calls:
            items.append(_message(item_id("msg_"), "".join(texts), []))
        items += [_call(item_id("fc_"), each.id, each.name, each.arguments) for each in message.tool_calls]
    return items


def _message(item_id: str, text: str, logprobs: list[dict[str, Any]], status: str = "completed") -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}]
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def _reasoning(item_id: str, text: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}


def _call(item_id: str, call_id: str, name: str, arguments: str, status: str = "completed") -> dict[str, Any]:
    facts = {"id": item_id, "type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
    return {**facts, "status": status}


def _dumped(value: Any) -> Any:
    if not isinstance(value, BaseModel):
        return value
    dumped: Mapping[str, Any] = value.model_dump(by_alias=True, exclude_none=True)
    return dict(dumped)
