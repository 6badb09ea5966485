"""One HTTP request and its reply. An exchange reads the body within limits, and sends the reply whole or as events."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from corolla.chassis.addresses import host_port
from corolla.chassis.calls import x_request_id
from corolla.chassis.errors import CallerStalled, CorollaError, DeadlineExceeded, MalformedMessage, MessageTooLarge
from corolla.chassis.ignored_places import IGNORED, ignored_places, ignored_text
from corolla.client.held_bytes import HeldBytes, Holding
from corolla.http import body_faults
from corolla.http.answers import PIECE_CHARS
from corolla.http.body_values import check_values
from corolla.http.connections import connection_of
from corolla.http.errors import OPENAI, Dialect, headers_of, status_of
from corolla.http.field_paths import callers_path, shown
from corolla.http.fields import Body as Fields
from corolla.http.foreign_fields import ignored_fields
from corolla.http.metrics import HttpMetrics

JSON: Final = "application/json"
_OF_STREAMS: Final = MappingProxyType(
    {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
)
_LINGER_S: Final = 1.0
_MOST_QUERY_NAMES: Final = 16

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an exchange.

    Attributes:
        max_bytes: the most bytes of a body.
        held: the budget for the bytes of all requests and replies.
        read_timeout_s: seconds within which a body must arrive.
        reader_timeout_s: seconds after which a reply ends because its caller reads nothing of it.
        headers_after_s: seconds after which a stream begins although no event has come.
        comment_interval_s: seconds without an event after which a stream sends a comment or a ping.
    """

    max_bytes: int
    held: HeldBytes
    read_timeout_s: float
    reader_timeout_s: float
    headers_after_s: float = 1.0
    comment_interval_s: float = 10.0


class Exchange:
    """A request and its reply over ASGI.

    Args:
        dialect: what errors and streams look like.

    Attributes:
        request: the framework's request: method, path, headers and query. `read` reads its body.
        request_id: the caller's id of the request, or a new one.
        is_left: whether the caller has left.
        has_begun: whether a stream of events has begun, after which the status cannot change.
        more_headers: headers that every reply has.
        held: counts the bytes of the body and of a reply that is not streamed.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        limits: Limits,
        metrics: HttpMetrics,
        dialect: Dialect = OPENAI,
    ) -> None:
        self.request = Request(scope, receive)
        self.headers = self.request.headers
        self._send = send
        self._limits = limits
        self._metrics = metrics
        self._dialect = dialect
        self.request_id = x_request_id(self.headers.items()) or f"req_{secrets.token_hex(16)}"
        self.is_left = False
        self.has_begun = False
        self.more_headers: Mapping[str, str] = {}
        self.held = Holding(limits.held, "")
        self._is_read = False
        self._ignored: Sequence[str] = ()
        self._known_query: Collection[str] = ()
        self._fields: BaseModel | None = None
        self._without_effect: Sequence[str] = ()
        self._is_silent = False
        self._watching: asyncio.Task[None] | None = None

    # --- what a `Call` asks of its connection --------------------------------------------------------------------

    def peer(self) -> str:
        host, port = self.request.client or ("", 0)
        return f"{'ipv6' if ':' in host else 'ipv4'}:{host_port(host, port)}"

    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        # The first of equal names counts. A look-up for each name would take the square of the head's time.
        return [("x-request-id", self.request_id), *self.headers.items()]

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return {}

    def set_trailing_metadata(self, metadata: tuple[tuple[str, str], ...], /) -> None:
        paths = self._fields.paths() if isinstance(self._fields, Fields) else {}
        if places := [callers_path(each, paths) for each in ignored_places(metadata)]:
            self._without_effect = (ignored_text(places),)

    # --- the request ---------------------------------------------------------------------------------------------

    async def read(self, kind: type[Body], *, may_be_empty: bool = False) -> Body:
        """Reads the body as a `kind`. Raises InvalidRequest, MessageTooLarge, QueueFull, DeadlineExceeded.

        Args:
            may_be_empty: whether a request without a body is one whose fields are all unset.
        """
        data = await self._body()
        if may_be_empty and not data:
            return kind.model_validate({})
        media = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != JSON:
            raise MalformedMessage("content-type", f"must be {JSON}")
        check_values(data)
        try:
            body = kind.model_validate_json(data)
        except ValidationError as failure:
            raise body_faults.refusal(data, failure) from None
        self._ignored = ignored_fields(body)
        self._fields = body
        return body

    def query(self, kind: type[Body]) -> Body:
        """Reads the parameters behind the path as a `kind`. Raises InvalidRequest."""
        self._known_query = kind.model_fields.keys()
        given = {name: value for name, value in self.request.query_params.items() if name in self._known_query}
        try:
            return kind.model_validate_strings(given)
        except ValidationError as failure:
            raise body_faults.refusal(given, failure) from None

    async def without_body(self) -> None:
        """Drops the body. Afterwards, the current task is cancelled if the caller leaves."""
        await self._body()
        self.held.let_go()

    async def _body(self) -> bytes:
        """Reads the whole body. Afterwards, the current task is cancelled if the caller leaves."""
        limits, parts, num_bytes = self._limits, [], 0
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise MalformedMessage("content-encoding", "must be identity; compressed bodies are not accepted")
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limits.max_bytes:
            raise self._too_large(int(length))
        try:
            async with asyncio.timeout(limits.read_timeout_s):
                async for part in self.request.stream():
                    num_bytes += len(part)
                    if num_bytes > limits.max_bytes:
                        raise self._too_large(num_bytes)
                    self.held.take(len(part))
                    parts.append(part)
        except ClientDisconnect:
            self._leave()
        except TimeoutError:
            raise DeadlineExceeded(f"the request did not come within {limits.read_timeout_s:g} seconds") from None
        self._is_read = True
        self._watching = asyncio.create_task(self._watch(asyncio.current_task()))
        return b"".join(parts)

    def _too_large(self, num_bytes: int) -> MessageTooLarge:
        return MessageTooLarge(
            f"the request has {num_bytes} bytes or more; at most {self._limits.max_bytes} are accepted",
            metadata={"max_request_bytes": str(self._limits.max_bytes)},
        )

    async def _watch(self, handling: asyncio.Task[Any] | None) -> None:
        """Cancels the task that handles the request when its caller leaves."""
        while (await self.request.receive())["type"] != "http.disconnect":
            pass
        self.is_left = True
        if handling is not None:
            handling.cancel()

    # --- the reply -----------------------------------------------------------------------------------------------

    async def reply(self, content: bytes, *, kind: str = JSON, status: int = 200, **headers: str) -> None:
        """Sends a whole reply."""
        self.held.add_reply(len(content))
        await self._reply([content], kind, status, headers)

    async def reply_in_pieces(self, pieces: AsyncGenerator[str, None]) -> None:
        """Sends a whole reply that is made in pieces, between which other tasks run."""
        parts: list[bytes] = []
        waiting: list[str] = []
        num_chars = 0
        async with aclosing(pieces):
            async for piece in pieces:
                waiting.append(piece)
                num_chars += len(piece)
                if num_chars >= PIECE_CHARS:
                    parts.append("".join(waiting).encode())
                    self.held.add_reply(len(parts[-1]))
                    waiting, num_chars = [], 0
                    await asyncio.sleep(0)
        await self._reply([*parts, "".join(waiting).encode()], JSON, 200, {})

    async def _reply(self, parts: Sequence[bytes], kind: str, status: int, headers: dict[str, str]) -> None:
        self.end_watch()
        if not self._is_read:
            headers["connection"] = "close"
        lines = {"content-type": kind, "content-length": str(sum(map(len, parts))), **headers}
        await self._send_out(self._start(status, lines))
        for number, part in enumerate(parts, start=1):
            has_more = number < len(parts) or not self._is_read
            await self._send_out({"type": "http.response.body", "body": part, "more_body": has_more})
        if not self._is_read:
            await self._linger()
            await self._send_out({"type": "http.response.body", "body": b""})

    async def reply_error(self, error: CorollaError, **headers: str) -> None:
        """Sends an error as the reply, or as the last event of a stream that has begun."""
        body = self._dialect.error_body(error, self.request_id)
        if not self.has_begun:
            headers |= headers_of(error)
            await self._reply([body], JSON, status_of(error), headers)
            return
        self.end_watch()
        event = b"event: error\ndata: " + body + b"\n\n"
        await self._send_out({"type": "http.response.body", "body": event})

    async def stream(self, events: AsyncGenerator[bytes, None], *, is_watch: bool = False) -> None:
        """Sends events as they come. The reply begins with the first event, or after a second without one.

        A failure in this second sets the status, as that of a bad request does. Comments or pings bridge later
        silences.

        Args:
            is_watch: whether the stream has no end of its own and counts as a watcher, not as an answer.
        """
        with (self._metrics.watchers if is_watch else self._metrics.open_streams).track_inprogress():
            await self._stream(events)
        self.end_watch()
        await self._send_out({"type": "http.response.body", "body": b""})

    async def _stream(self, events: AsyncGenerator[bytes, None]) -> None:
        keeping = asyncio.create_task(self._keep_alive())
        try:
            async with aclosing(events):
                async for data in events:
                    await self._begin_stream()
                    self._is_silent = False
                    await self._send_out({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            keeping.cancel()

    async def _begin_stream(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._send_out(self._start(200, _OF_STREAMS))

    async def _keep_alive(self) -> None:
        """Begins the reply if no event comes soon, and sends what stands for silence while none comes.

        Proxies and clients give up on a reply of which they see nothing, as while a long prompt is computed.
        """
        await asyncio.sleep(self._limits.headers_after_s)
        with suppress(CallerStalled):  # the next event meets the same fate
            await self._begin_stream()
            while True:
                self._is_silent = True
                await asyncio.sleep(self._limits.comment_interval_s)
                if self._is_silent:
                    await self._send_out(
                        {"type": "http.response.body", "body": self._dialect.silence, "more_body": True}
                    )

    def end_watch(self) -> None:
        """Stops watching whether the caller leaves, because the reply is ready or has failed."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    def abort(self) -> None:
        """Ends the connection and drops its buffers."""
        if (connection := connection_of(self.request.scope)) is not None:
            connection.abort()

    def _start(self, status: int, headers: Mapping[str, str]) -> Message:
        lines = {**headers, **self.more_headers, **dict.fromkeys(self._dialect.id_headers, self.request_id)}
        unread = (name for name in self.request.query_params if name not in self._known_query)
        ignored = [
            *self._ignored,
            *self._without_effect,
            *(f"?{shown(name)}" for name in islice(unread, _MOST_QUERY_NAMES)),
        ]
        if ignored:
            lines[IGNORED] = ", ".join(ignored)
            self._metrics.ignored_fields.inc()
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in lines.items()]
        return {"type": "http.response.start", "status": status, "headers": encoded}

    async def _send_out(self, message: Message) -> None:
        """Sends a part of the reply. Raises CallerStalled, or CancelledError if the caller has left before its end."""
        connection, timeout_s = connection_of(self.request.scope), self._limits.reader_timeout_s
        if connection is not None and connection.lost.done():
            self._leave()
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(message)
            if is_last and connection is not None:
                await connection.sent(timeout_s)
        except TimeoutError:
            raise CallerStalled(f"the caller read nothing of the answer for {timeout_s:g} seconds") from None
        if connection is not None and connection.failure is not None:
            self._leave()

    def _leave(self) -> NoReturn:
        """Ends the exchange with a caller that has left before it had the whole reply."""
        self.is_left = True
        raise asyncio.CancelledError

    async def _linger(self) -> None:
        """Drops the rest of a refused request for up to a second: a caller cut off while sending may miss the reply."""
        if "expect" in self.headers:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while (message := await self.request.receive())["type"] == "http.request" and message.get("more_body"):
                    pass
