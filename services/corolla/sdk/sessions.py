"""Sessions and chats for ordinary, blocking code."""

# Written by tools/sync_client.py from async_sessions.py; change that, then run `make sync-client`.

import threading
import time
from types import TracebackType
from typing import Self, Unpack

from corolla.chassis.errors import CorollaError, SessionBusy
from corolla.sdk.calls import Calls
from corolla.sdk.conversation import SETTLE_INTERVAL_S, SETTLE_S, Conversation, Turn
from corolla.sdk.requests import ChatOptions, GenerateOptions, Prompt
from corolla.sdk.results import Generation, Reply, SessionInfo, Usage
from corolla.sdk.streams import Stream


class Session:
    """A sequence that the service keeps: each prompt is appended to what it holds. Made at the first use."""

    def __init__(self, client: Calls, *, session_id: str | None, model: str, adapter: str = "") -> None:
        self._client = client
        self._model = model
        self._adapter = adapter
        self._id = session_id
        self._is_own = session_id is None
        # Where several use it first at the same time, one of them makes it.
        self._opening = threading.Lock()

    @property
    def session_id(self) -> str:
        """The session's id, 128 random bits in hexadecimal. The first use makes the session."""
        with self._opening:
            if self._id is None:
                self._id = (self._client.create_session(self._model, self._adapter)).session_id
            return self._id

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        return self._client.generate(prompt, **self._turn(options))

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        return self._client.stream(prompt, **self._turn(options))

    def _turn(self, options: GenerateOptions) -> GenerateOptions:
        """Each turn names what the session was made with: a key may be for that alone."""
        return {"model": self._model, "adapter": self._adapter, **options, "session": self.session_id}

    def info(self) -> SessionInfo:
        return self._client.get_session(self.session_id)

    def delete(self) -> None:
        """Deletes the session; the next use would make a new one."""
        if self._id is not None:
            self._client.delete_session(self._id)
            self._id, self._is_own = None, True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_own:
            return
        try:
            self.delete()
        except CorollaError:
            # It expires by itself; an error that is on its way says more than this one.
            if failure is None:
                raise


class Chat:
    """A conversation. Each turn sends only what is new; the service keeps the rest.

    with client.chat(system="Answer in one sentence.") as chat:
        print(chat.send("What is a corolla?"))
        for chunk in chat.stream("And a petal?"):
            print(chunk.text, end="")
        print(chat.usage.cached_tokens)
    """

    def __init__(self, client: Calls, *, system: str | None, session_id: str | None, options: ChatOptions) -> None:
        self._client = client
        self._options = options
        self._session = Session(
            client, session_id=session_id, model=options.get("model", ""), adapter=options.get("adapter", "")
        )
        self._conversation = Conversation(system, resumed=session_id is not None)
        self._running: Stream | None = None

    @property
    def usage(self) -> Usage | None:
        """Of the last turn that came to its end."""
        return self._conversation.usage

    @property
    def session_id(self) -> str:
        """The session's id. The first use makes the session."""
        return self._session.session_id

    def send(self, turn: Turn, **options: Unpack[ChatOptions]) -> Reply:
        """One turn, answered at once: what a user says, or messages."""
        self._settle()
        messages = self._conversation.messages(turn)
        merged: ChatOptions = {**self._options, **options}
        session_id = self._session.session_id
        # If no answer comes, the service may have kept the turn all the same.
        self._conversation.begin()
        reply = self._client.complete_chat(messages, session=session_id, **merged)
        self._conversation.end(reply.usage)
        return reply

    def stream(self, turn: Turn, **options: Unpack[ChatOptions]) -> Stream:
        """One turn, chunk by chunk. Closing the stream early ends the turn there."""
        self._settle()
        messages = self._conversation.messages(turn)
        merged: ChatOptions = {**self._options, **options}
        self._running = self._client.stream_chat(messages, session=self._session.session_id, **merged)
        self._conversation.begin(self._running)
        return self._running

    def info(self) -> SessionInfo:
        return self._session.info()

    def close(self) -> None:
        """Ends a running turn, and deletes the session unless it existed before."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is not None:
            self._running.close()
        self._session.__exit__(kind, failure, trace)

    def _settle(self) -> None:
        """Waits until the service has wound up a turn that was left early, and learns what it kept."""
        if self._conversation.is_settled:
            self._conversation.end()
            return
        if self._running is not None:
            self._running.close()
        give_up = time.monotonic() + SETTLE_S
        while (info := self._session.info()).busy:
            if time.monotonic() > give_up:
                raise SessionBusy("the turn before was cancelled but has not ended yet")
            time.sleep(SETTLE_INTERVAL_S)
        self._conversation.settle(info)
