"""The parts of an answer as they arrive: text, reasoning and calls of tools. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from corolla.v1.common_pb2 import ChatMessage, ToolCall


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of a call. The first part has the call's id and name. `index` numbers the calls of an answer from 0."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """The text, reasoning and calls that one piece of model output adds to an answer."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


def joined_deltas(deltas: Iterable[AnswerDelta]) -> AnswerDelta:
    """Joins consecutive deltas into one."""
    builder = MessageBuilder()
    for delta in deltas:
        builder.add(delta)
    return builder.delta


@dataclass(slots=True)
class MessageBuilder:
    """Collects the deltas of an answer, and builds one delta or a message from them."""

    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)

    def add(self, delta: AnswerDelta) -> None:
        if delta.text:
            self.texts.append(delta.text)
        if delta.reasoning:
            self.reasonings.append(delta.reasoning)
        for call in delta.calls:
            last = self.calls[-1] if self.calls else None
            if last is not None and last.index == call.index:
                call = CallDelta(last.index, last.id, last.name, last.arguments + call.arguments)
                self.calls.pop()
            self.calls.append(call)

    @property
    def delta(self) -> AnswerDelta:
        return AnswerDelta("".join(self.texts), "".join(self.reasonings), tuple(self.calls))

    @property
    def message(self) -> ChatMessage:
        """The answer as the next message of a conversation."""
        calls = [ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in self.calls]
        text, reasoning = "".join(self.texts), "".join(self.reasonings)
        return ChatMessage(role="assistant", content=text, reasoning=reasoning, tool_calls=calls)
