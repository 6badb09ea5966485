"""The parts of an answer as they arrive: text, reasoning and calls of tools. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from corolla.chain.prompt_readout import PromptReadout
from corolla.decoding.parameters import SampledToken
from corolla.decoding.stopping import FinishReason
from corolla.v1.common_pb2 import ChatMessage, ToolCall
from corolla.v1.generation_pb2 import ToolCallDelta


@dataclass(frozen=True, slots=True)
class Delta:
    """The part that one piece of model output, or several pieces that came together, add to an answer.

    Attributes:
        text: whole characters that can no longer become part of a stop sequence.
        reasoning, calls: in a chat, new reasoning, which is not in `text`, and calls of tools. The first part of a call
            has its id and name.
        tokens: the new tokens; empty if the delta is only the end.
        finish_reason: set on the last delta.
        readout: what hops reported about the prompt, if the request asks for that; on one of the first deltas.
        stop_sequence: on the last delta of an answer that a stop sequence ended: which one.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    tokens: tuple[SampledToken, ...] = ()
    finish_reason: FinishReason | None = None
    readout: PromptReadout | None = None
    stop_sequence: str = ""

    @property
    def message(self) -> ChatMessage:
        """A whole answer as the next message of a conversation."""
        calls = [ToolCall(id=call.id, name=call.name, arguments=call.arguments_delta) for call in self.calls]
        return ChatMessage(role="assistant", content=self.text, reasoning=self.reasoning, tool_calls=calls)


def joined(deltas: Sequence[Delta]) -> Delta:
    """Joins consecutive deltas to one."""
    if len(deltas) == 1:
        return deltas[0]
    builder = MessageBuilder()
    for delta in deltas:
        builder.add(delta)
    last = deltas[-1] if deltas else Delta()
    return replace(
        last,
        text="".join(builder.texts),
        reasoning="".join(builder.reasonings),
        calls=tuple(builder.calls),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        readout=next((delta.readout for delta in deltas if delta.readout is not None), None),
    )


@dataclass(slots=True)
class MessageBuilder:
    """Collects the deltas of an answer, and builds one delta from them."""

    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        if delta.text:
            self.texts.append(delta.text)
        if delta.reasoning:
            self.reasonings.append(delta.reasoning)
        for call in delta.calls:
            last = self.calls[-1] if self.calls else None
            if last is not None and last.index == call.index:
                self.calls.pop()
                arguments = last.arguments_delta + call.arguments_delta
                call = ToolCallDelta(index=last.index, id=last.id, name=last.name, arguments_delta=arguments)
            self.calls.append(call)

    @property
    def delta(self) -> Delta:
        return Delta("".join(self.texts), "".join(self.reasonings), tuple(self.calls))
