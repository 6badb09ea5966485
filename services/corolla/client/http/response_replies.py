"""`/v1/responses`: replies and events of streams."""

import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, Literal

from pydantic import BaseModel

from corolla.client.http.answers import compact, escaped, now_s
from corolla.client.http.log_probabilities import logprob_facts
from corolla.client.http.responses import ResponseRequest
from corolla.v1 import generation_pb2 as pb
from corolla.v1 import router_pb2


class InputDetails(BaseModel):
    cached_tokens: int


class OutputDetails(BaseModel):
    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """What a response cost."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    recoveries: int
    stall_seconds: float
    may_differ_from_token: int | None = None


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
"""The fields of a response that are no options of its request."""
_CUT_OFF: Final = frozenset({pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_TIME_LIMIT, pb.FINISH_REASON_CANCELLED})


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

    def whole(self, answer: pb.ChatResponse) -> bytes:
        """The body of a reply that is not streamed."""
        writer = _Writer(self._id)
        writer.take(_as_chunk(answer))
        writer.end(is_cut=answer.finish_reason in _CUT_OFF)
        return self._ended(writer.output, answer.finish_reason, answer.usage).model_dump_json().encode()

    async def replayed(self, answer: pb.ChatResponse, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Yields the events of a finished answer that come after the event of a number."""
        writer = _Writer(self._id, after)
        text = self._begun(writer) + writer.take(_as_chunk(answer))
        yield (text + self._end(writer, answer.finish_reason, answer.usage)).encode()

    async def events(self, chunks: AsyncGenerator[pb.ChatChunk, None]) -> AsyncGenerator[bytes, None]:
        """Yields the events of a stream: its beginning, the items of the answer, and its end."""
        writer = _Writer(self._id)
        is_begun = False
        async with aclosing(chunks):
            async for chunk in chunks:
                text = ""
                if not is_begun:
                    is_begun = True
                    text += self._begun(writer)
                text += writer.take(chunk)
                if chunk.finish_reason:
                    text += self._end(writer, chunk.finish_reason, chunk.usage)
                if text:
                    yield text.encode()

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
                    recoveries=usage.recoveries,
                    stall_seconds=usage.stall_seconds,
                    may_differ_from_token=(
                        usage.may_differ_from_token if usage.HasField("may_differ_from_token") else None
                    ),
                ),
            }
        )


class _Writer:
    """Makes the events of one answer. Its items follow one another, so at most one is open.

    An event's number is one more than that of the event before it; that of a delta, as many more as it has characters.
    So the numbers do not depend on how an answer was divided into deltas, and a replay may begin behind any of them.

    Args:
        after: the number of the last event that the reader has.

    Attributes:
        output: the completed items in OpenAI's form.
    """

    def __init__(self, make_id: Callable[[str, int], str], after: int = -1) -> None:
        self.output: list[dict[str, Any]] = []
        self._make_id = make_id
        self._after = after
        self._number = 0
        self._open: _OpenItem | None = None

    def event(self, kind: str, **facts: Any) -> str:
        """The text of an event; empty if the reader has it."""
        number = self._number
        self._number += 1
        if number <= self._after:
            return ""
        return f"event: {kind}\ndata: {compact({'type': kind, 'sequence_number': number, **facts})}\n\n"

    def take(self, chunk: pb.ChatChunk) -> str:
        """The events for a chunk."""
        text = ""
        if chunk.reasoning_delta:
            text += self._extend("reasoning", chunk.reasoning_delta)
        if chunk.text_delta:
            text += self._extend("message", chunk.text_delta, logprob_facts(chunk.logprobs))
        for call in chunk.tool_calls:
            if call.id:
                text += self._begin(self._item("function_call", self._next_index, call.id, call.name))
            text += self._extend("function_call", call.arguments_delta)
        return text

    def end(self, *, is_cut: bool = False) -> str:
        """The events that end the last item. An answer without items gets an empty message."""
        text = "" if self._open is not None or self.output else self._begin(self._item("message", 0))
        return text + self._close("incomplete" if is_cut else "completed")

    def _item(self, kind: str, index: int, call_id: str = "", name: str = "") -> "_OpenItem":
        prefix = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}[kind]
        return _OpenItem(self._make_id(prefix, index), kind, index, call_id, name)

    def _extend(self, kind: str, delta: str, logprobs: list[dict[str, Any]] | None = None) -> str:
        item, text = self._open, ""
        if item is None or item.kind != kind:
            text = self._begin(self._item(kind, self._next_index))
            item = self._open
        if item is None or not delta:
            return text
        item.parts.append(delta)
        item.logprobs += logprobs or ()
        self._number += len(delta)
        if (num_new := self._number - 1 - self._after) <= 0:
            return text
        more = f',"logprobs":{compact(logprobs)}' if logprobs else item.no_logprobs
        new = escaped(delta[-num_new:])
        return text + f'{item.delta_head}{self._number - 1}{item.delta_place}"delta":{new}{more}}}\n\n'

    @property
    def _next_index(self) -> int:
        """The index of the next item, which comes after the open one, if any."""
        return len(self.output) + (self._open is not None)

    def _begin(self, item: "_OpenItem") -> str:
        text = self._close()
        self._open = item
        text += self.event("response.output_item.added", output_index=item.index, item=item.facts("in_progress"))
        if item.part_kind:
            text += self.event("response.content_part.added", **item.place, part=item.part(""))
        return text

    def _close(self, status: str = "completed") -> str:
        item, self._open = self._open, None
        if item is None:
            return ""
        whole, text = "".join(item.parts), ""
        for kind, facts in item.ends(whole):
            text += self.event(kind, **facts)
        self.output.append(item.facts(status))
        return text + self.event("response.output_item.done", output_index=item.index, item=self.output[-1])


class _OpenItem:
    """An item that grows: a message, reasoning, or a call."""

    def __init__(self, item_id: str, kind: str, index: int, call_id: str = "", name: str = "") -> None:
        self.kind, self.index = kind, index
        self.parts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self._call_id, self._name = call_id, name
        self._id = item_id
        self.part_kind = {"message": "output_text", "reasoning": "reasoning_text", "function_call": ""}[kind]
        self.place: dict[str, Any] = {"item_id": self._id, "output_index": index}
        if self.part_kind:
            self.place["content_index"] = 0
        self._events = f"response.{self.part_kind or 'function_call_arguments'}"
        # The text before and after the sequence number in each delta's event.
        self.delta_head = f'event: {self._events}.delta\ndata: {{"type":"{self._events}.delta","sequence_number":'
        self.delta_place = "," + compact(self.place)[1:-1] + ","
        self.no_logprobs = ',"logprobs":[]' if kind == "message" else ""

    def part(self, text: str) -> dict[str, Any]:
        """The item's only content part, with this text."""
        if self.kind == "message":
            return _text_part(text, self.logprobs)
        return {"type": "reasoning_text", "text": text}

    def facts(self, status: str) -> dict[str, Any]:
        """The item so far, in OpenAI's form."""
        text = "".join(self.parts)
        if self.kind == "function_call":
            return _call(self._id, self._call_id, self._name, text, status)
        if self.kind == "reasoning":
            return _reasoning(self._id, text, status)
        facts = _message(self._id, text, self.logprobs, status)
        return {**facts, "content": []} if status == "in_progress" else facts

    def ends(self, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields kind and facts of the events that complete the item, except `response.output_item.done`."""
        if self.kind == "function_call":
            yield f"{self._events}.done", {**self.place, "name": self._name, "arguments": text}
            return
        more = {"logprobs": self.logprobs} if self.kind == "message" else {}
        yield f"{self._events}.done", {**self.place, "text": text, **more}
        yield "response.content_part.done", {**self.place, "part": self.part(text)}


def _as_chunk(answer: pb.ChatResponse) -> pb.ChatChunk:
    """A whole answer as the only chunk of a stream."""
    message = answer.message
    calls = (
        pb.ToolCallDelta(index=index, id=each.id, name=each.name, arguments_delta=each.arguments)
        for index, each in enumerate(message.tool_calls)
    )
    return pb.ChatChunk(
        reasoning_delta=message.reasoning, text_delta=message.content, logprobs=answer.logprobs, tool_calls=calls
    )


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


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _message(item_id: str, text: str, logprobs: list[dict[str, Any]], status: str = "completed") -> dict[str, Any]:
    content = [_text_part(text, logprobs)]
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
