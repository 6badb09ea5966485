"""The answer that a stream has received so far. It uses no socket, so blocking and asyncio streams share the code."""

from corolla.sdk import responses
from corolla.sdk.results import Chunk, Completion, FinishReason, FirstCompletion, TokenLogprob, ToolCall, Usage
from corolla.v1 import generation_pb2 as pb


class _Growing:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.reasonings: list[str] = []
        self.calls: dict[int, ToolCall] = {}
        self.finish_reason: FinishReason | None = None


class Answer(FirstCompletion):
    """The chunks of a stream, put together. All properties but `completions` describe the first completion.

    Attributes:
        usage: what the answer cost; None until the last chunk came.
        ignored: the places in the request that had no effect; empty until the stream has ended.
    """

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.ignored: tuple[str, ...] = ()
        self._parts: dict[int, _Growing] = {}

    @property
    def completions(self) -> tuple[Completion, ...]:
        """All completions so far, in order of their index."""
        return tuple(self.completion(index) for index in sorted(self._parts))

    def completion(self, index: int) -> Completion:
        part = self._parts.get(index) or _Growing()
        return Completion(
            index=index,
            text="".join(part.texts),
            token_ids=tuple(part.token_ids),
            finish_reason=part.finish_reason,
            logprobs=tuple(part.logprobs),
            reasoning="".join(part.reasonings),
            tool_calls=tuple(part.calls[number] for number in sorted(part.calls)),
        )

    def _add(self, message: pb.GenerateChunk | pb.ChatChunk) -> Chunk:
        chunk = responses.chunk(message)
        part = self._parts.setdefault(chunk.index, _Growing())
        part.texts.append(chunk.text)
        part.token_ids.extend(chunk.token_ids)
        part.logprobs.extend(chunk.logprobs)
        part.reasonings.append(chunk.reasoning)
        for delta in chunk.tool_calls:
            begun = part.calls.get(delta.index, ToolCall("", "", ""))
            part.calls[delta.index] = ToolCall(
                begun.id or delta.id, begun.name or delta.name, begun.arguments + delta.arguments
            )
        part.finish_reason = chunk.finish_reason or part.finish_reason
        self.usage = chunk.usage or self.usage
        return chunk
