"""A GenerationService without a model: it answers with the prompt's own words, over real gRPC."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from types import TracebackType
from typing import Any, Self

from prometheus_client import CollectorRegistry

from corolla.chassis import errors
from corolla.chassis.channels import CallerBounds
from corolla.chassis.handlers import service_handler
from corolla.chassis.loop_thread import LoopThread
from corolla.chassis.metrics import RpcMetrics
from corolla.chassis.rpc_server import RpcServer
from corolla.v1 import generation_pb2 as pb

API_KEY = "key-of-the-tests"


class Servicer:
    """Remembers what it was asked; sessions count their turns. The prompt "endless" is answered without an end.

    Attributes:
        failure: what each request fails of, before anything is done.
        loses_answers: whether turns of chats are kept, and then fail.
    """

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.sessions: dict[str, pb.Session] = {}
        self.cancelled = threading.Event()
        self.failure: errors.CorollaError | None = None
        self.loses_answers = False
        self.ignored: tuple[str, ...] = ()
        self._numbers = itertools.count(1)

    async def Generate(self, request: pb.GenerateRequest, call: Any) -> pb.GenerateResponse:
        self._note(request)
        call.name_ignored(self.ignored)
        words = request.text.split() or [str(each) for each in request.tokens.ids]
        completions = [
            pb.Completion(
                index=index,
                text=" ".join(words),
                token_ids=range(len(words)),
                finish_reason=pb.FINISH_REASON_LENGTH,
                logprobs=[pb.TokenLogprob(token_id=0, text="a", logprob=-0.5, top=[pb.TokenLogprob(text="b")])],
            )
            for index in range(request.num_completions or 1)
        ]
        return pb.GenerateResponse(model="echo", completions=completions, usage=_usage(len(words)))

    async def GenerateStream(self, request: pb.GenerateRequest, call: Any) -> AsyncIterator[pb.GenerateChunk]:
        self._note(request)
        call.name_ignored(self.ignored)
        async for number, word, is_last in self._words(request.text):
            chunk = pb.GenerateChunk(token_ids=[number], text_delta=word)
            if is_last:
                chunk.finish_reason = pb.FINISH_REASON_EOS
                chunk.usage.CopyFrom(_usage(number + 1))
            yield chunk

    async def Chat(self, request: pb.ChatRequest, call: Any) -> pb.ChatResponse:
        self._note(request)
        session = self._begin(request.session_id)
        cached = session.num_tokens
        self._end(session)
        if self.loses_answers:
            raise errors.RouterUnavailable("the answer is lost")
        if request.tools and request.messages[-1].role == "user":
            calls = [
                pb.ToolCall(id=f"c{i}", name=tool.name, arguments='{"a": 1}') for i, tool in enumerate(request.tools)
            ]
            return pb.ChatResponse(
                model="echo",
                message=pb.ChatMessage(role="assistant", reasoning="hm", tool_calls=calls),
                finish_reason=pb.FINISH_REASON_TOOL_CALLS,
                usage=_usage(1, cached),
                others=[
                    pb.ChatCompletion(index=index, message=pb.ChatMessage(role="assistant", content="or"))
                    for index in range(1, request.num_completions)
                ],
            )
        return pb.ChatResponse(
            model="echo",
            message=pb.ChatMessage(role="assistant", content=request.messages[-1].content),
            finish_reason=pb.FINISH_REASON_EOS,
            usage=_usage(1, cached),
        )

    async def ChatStream(self, request: pb.ChatRequest, call: Any) -> AsyncIterator[pb.ChatChunk]:
        self._note(request)
        session = self._begin(request.session_id)
        cached = session.num_tokens
        if request.tools and request.messages[-1].role == "user":
            session.busy = False
            for chunk in _called(request.tools):
                yield chunk
            self._end(session)
            usage = _usage(1, cached)
            yield pb.ChatChunk(finish_reason=pb.FINISH_REASON_TOOL_CALLS, usage=usage)
            return
        try:
            async for number, word, is_last in self._words(request.messages[-1].content):
                chunk = pb.ChatChunk(token_ids=[number], text_delta=word)
                if is_last:
                    self._end(session)
                    chunk.finish_reason = pb.FINISH_REASON_EOS
                    chunk.usage.CopyFrom(_usage(number + 1, cached))
                yield chunk
        finally:
            session.busy = False

    async def CreateSession(self, request: pb.CreateSessionRequest, call: Any) -> pb.Session:
        self._note(request)
        session = pb.Session(session_id=f"{next(self._numbers):032x}", model="echo", expires_in_seconds=60)
        self.sessions[session.session_id] = session
        return session

    async def GetSession(self, request: pb.GetSessionRequest, call: Any) -> pb.Session:
        return self._find(request.session_id)

    async def DeleteSession(self, request: pb.DeleteSessionRequest, call: Any) -> pb.DeleteSessionResponse:
        self._find(request.session_id)
        del self.sessions[request.session_id]
        return pb.DeleteSessionResponse()

    async def Tokenize(self, request: pb.TokenizeRequest, call: Any) -> pb.TokenizeResponse:
        self._note(request)
        words = (request.text or " ".join(each.content for each in request.chat.messages)).split()
        return pb.TokenizeResponse(token_ids=range(len(words)), tokens=words)

    async def Detokenize(self, request: pb.DetokenizeRequest, call: Any) -> pb.DetokenizeResponse:
        self._note(request)
        return pb.DetokenizeResponse(text=" ".join(map(str, request.token_ids)))

    async def ListModels(self, request: pb.ListModelsRequest, call: Any) -> pb.ListModelsResponse:
        if dict(call.context.invocation_metadata()).get("authorization", "") not in ("", f"Bearer {API_KEY}"):
            raise errors.Unauthenticated("the key is not known here")
        return pb.ListModelsResponse(models=[await self.GetModel(pb.GetModelRequest(), call)])

    async def GetModel(self, request: pb.GetModelRequest, call: Any) -> pb.Model:
        if request.model not in ("", "echo"):
            raise errors.ModelNotFound(f"there is no model {request.model!r}", request.model)
        return pb.Model(name="echo", family="llama", num_blocks=30, context_length=8192, has_chat_template=True)

    def _note(self, request: Any) -> None:
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure

    async def _words(self, text: str) -> AsyncIterator[tuple[int, str, bool]]:
        try:
            if text == "endless":
                for number in itertools.count():
                    yield number, "on and ", False
                    await asyncio.sleep(0.005)
            words = text.split(" ")
            for number, word in enumerate(words):
                yield number, word if number == 0 else f" {word}", number == len(words) - 1
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    def _find(self, session_id: str) -> pb.Session:
        if session_id not in self.sessions:
            raise errors.SessionNotFound("there is no such session", session_id)
        return self.sessions[session_id]

    def _begin(self, session_id: str) -> pb.Session:
        session = self._find(session_id) if session_id else pb.Session()
        if session.busy:
            raise errors.SessionBusy("another turn is running")
        session.busy = True
        return session

    def _end(self, session: pb.Session) -> None:
        session.num_turns += 1
        session.num_tokens += 10
        session.busy = False


def _called(tools: Iterable[pb.Tool]) -> Iterator[pb.ChatChunk]:
    """Reasoning, and a call of each tool in two parts."""
    yield pb.ChatChunk(reasoning_delta="hm")
    for index, tool in enumerate(tools):
        yield pb.ChatChunk(
            tool_calls=[pb.ToolCallDelta(index=index, id=f"c{index}", name=tool.name, arguments_delta='{"a": ')]
        )
        yield pb.ChatChunk(tool_calls=[pb.ToolCallDelta(index=index, arguments_delta="1}")])


def _usage(completion_tokens: int, cached_tokens: int = 0) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=7,
        completion_tokens=completion_tokens,
        cached_tokens=cached_tokens,
        time_to_first_token_seconds=0.5,
        total_seconds=1.5,
    )


class GenerationServer:
    """Serves a `Servicer` from a thread with an event loop of its own."""

    def __init__(self) -> None:
        self.servicer = Servicer()
        self._thread: LoopThread

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.port}"

    def __enter__(self) -> Self:
        self._thread = LoopThread("generation server")
        self._thread.call(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.stop(lambda: self._server.stop(0))

    async def _start(self) -> None:
        self._server = RpcServer("127.0.0.1", 0, with_reflection=False, callers=CallerBounds(4 << 20, 4096, 3600))
        service = pb.DESCRIPTOR.services_by_name["GenerationService"]
        self._server.add(service, service_handler(service, self.servicer, RpcMetrics(CollectorRegistry())))
        await self._server.start()
        await self._server.ready()
