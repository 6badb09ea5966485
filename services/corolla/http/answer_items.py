"""The items of an answer, which follow one another: reasoning, text and calls.

Each API but that of chats has events for the beginning, the growth and the end of an item.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from enum import Enum
from typing import Any

from corolla.http.log_probabilities import logprob_facts
from corolla.v1 import generation_pb2 as pb


class ItemKind(Enum):
    """What an item is."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class Item:
    """An item of an answer, perhaps one that still grows.

    Attributes:
        index: its number among the items of the answer.
        call_id, name: of a call.
        parts: its text, or the call's arguments.
        logprobs: of its tokens, where the caller wants them, in the form of chats.
    """

    def __init__(self, kind: ItemKind, index: int, call_id: str = "", name: str = "", text: str = "") -> None:
        self.kind, self.index, self.call_id, self.name = kind, index, call_id, name
        self.parts = [text] if text else []
        self.logprobs: list[dict[str, Any]] = []

    @property
    def text(self) -> str:
        """Its whole text so far, or all arguments."""
        return "".join(self.parts)


def as_chunk(answer: pb.ChatResponse) -> pb.ChatChunk:
    """A whole answer as the only chunk of a stream."""
    message = answer.message
    calls = (
        pb.ToolCallDelta(index=index, id=each.id, name=each.name, arguments_delta=each.arguments)
        for index, each in enumerate(message.tool_calls)
    )
    return pb.ChatChunk(
        reasoning_delta=message.reasoning, text_delta=message.content, logprobs=answer.logprobs, tool_calls=calls
    )


class ItemEvents(ABC):
    """Makes the events of one answer's items from its chunks. At most one item is open.

    Attributes:
        items: all items, of which the last one may be open.
    """

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._is_open = False

    @abstractmethod
    def begun(self, item: Item) -> str:
        """The events that begin an item."""

    @abstractmethod
    def grown(self, item: Item, delta: str, logprobs: list[dict[str, Any]]) -> str:
        """The event for what is new in an item."""

    @abstractmethod
    def ended(self, item: Item, *, is_cut: bool) -> str:
        """The events that end an item; `is_cut`: the answer was cut off within it."""

    async def stream(
        self,
        chunks: AsyncGenerator[pb.ChatChunk, None],
        begin: Callable[[pb.ChatChunk], str],
        end: Callable[[pb.ChatChunk], str],
    ) -> AsyncGenerator[bytes, None]:
        """Yields the events of a stream: those before its items, those of the items, and those that end it.

        Args:
            begin: makes the first events, with the first chunk.
            end: ends the last item and makes the last events, with the last chunk.
        """
        is_begun = False
        async with aclosing(chunks):
            async for chunk in chunks:
                text = "" if is_begun else begin(chunk)
                is_begun = True
                text += self.take(chunk)
                if chunk.finish_reason:
                    text += end(chunk)
                if text:
                    yield text.encode()

    def take(self, chunk: pb.ChatChunk) -> str:
        """The events for a chunk."""
        text = ""
        if chunk.reasoning_delta:
            text += self._extend(ItemKind.REASONING, chunk.reasoning_delta)
        if chunk.text_delta:
            text += self._extend(ItemKind.TEXT, chunk.text_delta, logprob_facts(chunk.logprobs))
        for call in chunk.tool_calls:
            if call.id:
                text += self._begin(ItemKind.CALL, call.id, call.name)
            if call.arguments_delta:
                text += self._extend(ItemKind.CALL, call.arguments_delta)
        return text

    def end(self, *, is_cut: bool = False) -> str:
        """The events that end the last item. An answer of nothing gets an empty text."""
        text = "" if self.items else self._begin(ItemKind.TEXT)
        return text + self._close(is_cut=is_cut)

    def _extend(self, kind: ItemKind, delta: str, logprobs: list[dict[str, Any]] | None = None) -> str:
        text = "" if self._is_open and self.items[-1].kind is kind else self._begin(kind)
        item = self.items[-1]
        item.parts.append(delta)
        item.logprobs += logprobs or ()
        return text + self.grown(item, delta, logprobs or [])

    def _begin(self, kind: ItemKind, call_id: str = "", name: str = "") -> str:
        text = self._close()
        item = Item(kind, len(self.items), call_id, name)
        self.items.append(item)
        self._is_open = True
        return text + self.begun(item)

    def _close(self, *, is_cut: bool = False) -> str:
        if not self._is_open:
            return ""
        self._is_open = False
        return self.ended(self.items[-1], is_cut=is_cut)
