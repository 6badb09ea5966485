"""Sessions and chats for asyncio."""

import asyncio
import time
from types import TracebackType
from typing import Self, Unpack

from corolla.chassis.errors import CorollaError, SessionBusy
from corolla.sdk.async_calls import AsyncCalls
from corolla.sdk.conversation import SETTLE_INTERVAL_S, SETTLE_S, Conversation, Turn
from corolla.sdk.requests import ChatOptions, GenerateOptions, Prompt
from corolla.sdk.results import Generation, Reply, SessionInfo, Usage
from corolla.sdk.streams import AsyncStream


class AsyncSession:
    """A sequence that the service keeps: each prompt is appended to what it holds. Made at the first use."""

    def __init__(self, client: AsyncCalls, *, session_id: str | None, model: str, adapter: str = "") -> None:
        self._client = client
        self._model = model
        self._adapter = adapter
        self._id = session_id
        self._is_own = session_id is None
        # Where several use it first at the same time, one of them makes it.
        self._opening = asyncio.Lock()

    async def open(self) -> str:
        """The session's id, 128 random bits in hexadecimal. The first use makes the session."""
        async with self._opening:
            if self._id is None:
                self._id = (await self._client.create_session(self._model, self._adapter)).session_id
            return self._id

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        return await self._client.generate(prompt, **await self._turn(options))

    async def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncStream:
        return self._client.stream(prompt, **await self._turn(options))

    async def _turn(self, options: GenerateOptions) -> GenerateOptions:
        """Each turn names what the session was made with: a key may be for that alone."""
        return {"model": self._model, "adapter": self._adapter, **options, "session": await self.open()}

    async def info(self) -> SessionInfo:
        return await self._client.get_session(await self.open())

    async def delete(self) -> None:
        """Deletes the session; the next use would make a new one."""
        if self._id is not None:
            await self._client.delete_session(self._id)
            self._id, self._is_own = None, True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_own:
            return
        try:
            await self.delete()
        except CorollaError:
            # It expires by itself; an error that is on its way says more than this one.
            if failure is None:
                raise


class AsyncChat:
    """A conversation. Each turn sends only what is new; the service keeps the rest.

    async with client.chat(system="Answer in one sentence.") as chat:
        print(await chat.send("What is a corolla?"))
        async for chunk in await chat.stream("And a petal?"):
            print(chunk.text, end="")
        print(chat.usage.cached_tokens)
    """

    def __init__(self, client: AsyncCalls, *, system: str | None, session_id: str | None, options: ChatOptions) -> None:
        self._client = client
        self._options = options
        self._session = AsyncSession(
            client, session_id=session_id, model=options.get("model", ""), adapter=options.get("adapter", "")
        )
        self._conversation = Conversation(system, resumed=session_id is not None)
        self._running: AsyncStream | None = None

    @property
    def usage(self) -> Usage | None:
        """Of the last turn that came to its end."""
        return self._conversation.usage

    async def open(self) -> str:
        """The session's id. The first use makes the session."""
        return await self._session.open()

    async def send(self, turn: Turn, **options: Unpack[ChatOptions]) -> Reply:
        """One turn, answered at once: what a user says, or messages."""
        await self._settle()
        messages = self._conversation.messages(turn)
        merged: ChatOptions = {**self._options, **options}
        session_id = await self._session.open()
        # If no answer comes, the service may have kept the turn all the same.
        self._conversation.begin()
        reply = await self._client.complete_chat(messages, session=session_id, **merged)
        self._conversation.end(reply.usage)
        return reply

    async def stream(self, turn: Turn, **options: Unpack[ChatOptions]) -> AsyncStream:
        """One turn, chunk by chunk. Closing the stream early ends the turn there."""
        await self._settle()
        messages = self._conversation.messages(turn)
        merged: ChatOptions = {**self._options, **options}
        self._running = self._client.stream_chat(messages, session=await self._session.open(), **merged)
        self._conversation.begin(self._running)
        return self._running

    async def info(self) -> SessionInfo:
        return await self._session.info()

    async def close(self) -> None:
        """Ends a running turn, and deletes the session unless it existed before."""
        await self.__aexit__(None, None, None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is not None:
            self._running.close()
        await self._session.__aexit__(kind, failure, trace)

    async def _settle(self) -> None:
        """Waits until the service has wound up a turn that was left early, and learns what it kept."""
        if self._conversation.is_settled:
            self._conversation.end()
            return
        if self._running is not None:
            self._running.close()
        give_up = time.monotonic() + SETTLE_S
        while (info := await self._session.info()).busy:
            if time.monotonic() > give_up:
                raise SessionBusy("the turn before was cancelled but has not ended yet")
            await asyncio.sleep(SETTLE_INTERVAL_S)
        self._conversation.settle(info)
