"""A conversation over HTTP, as `corolla chat --http` has it: in a session of the service, by OpenAI's dialect."""

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx2

from corolla.chassis.errors import CorollaError, ServiceUnavailable
from corolla.chassis.status import from_reason
from corolla.client.http.errors import ROWS
from corolla.sdk.conversation import Turn
from corolla.sdk.results import Chunk, FinishReason, Message, Reply, ToolCall, Usage
from corolla.sdk.transport import ApiKey

_REASONS: Final = {row.code: reason for reason, row in ROWS.items()}
_ENDS: Final = {
    "stop": FinishReason.EOS,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
}
_TOOL_CHOICES: Final = ("none", "auto", "required")


class HttpClient:
    """What `corolla chat` asks of a service.

    Args:
        api_key: shown with each request.
        url: such as `http://127.0.0.1:8080`, with or without `/v1`.
        timeout: seconds for each part of an answer; None waits for ever.
        ca_file: authorities of the service's certificate; None: those of the web.
    """

    def __init__(self, url: str, *, api_key: ApiKey, timeout: float | None, ca_file: Path | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        verify: Any = str(ca_file) if ca_file is not None else True
        self._api_key = api_key
        self._http = httpx2.Client(base_url=self.url, auth=self._authorised, timeout=timeout, verify=verify)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    @property
    def model(self) -> str:
        """The name of the model that the service has."""
        return str(self.ask("GET", "/v1/models")["data"][0]["id"])

    def chat(self, *, system: str | None, session: str | None, **options: Any) -> "HttpChat":
        """A conversation; in a new session, or in one that exists."""
        return HttpChat(self, system, session, options)

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The reply of a request. Raises errors of the tree."""
        try:
            reply = self._http.request(method, path, json=body)
            if reply.is_success:
                return reply.json()
        except (httpx2.HTTPError, ValueError):
            raise self.unreachable() from None
        raise _error_of(reply.content)

    def open(self, path: str, body: Mapping[str, Any]) -> httpx2.Response:
        """The reply of a request as a stream. Raises errors of the tree."""
        try:
            reply = self._http.send(self._http.build_request("POST", path, json=body), stream=True)
            if reply.is_success:
                return reply
            reply.read()
        except httpx2.HTTPError:
            raise self.unreachable() from None
        raise _error_of(reply.content)

    def _authorised(self, request: httpx2.Request) -> httpx2.Request:
        key = self._api_key() if callable(self._api_key) else self._api_key
        if key:
            request.headers["authorization"] = f"Bearer {key}"
        return request

    def unreachable(self) -> ServiceUnavailable:
        return ServiceUnavailable(f"no client service speaks HTTP at {self.url}")


class HttpChat:
    """A conversation.

    Attributes:
        session_id: of the service's session.
    """

    def __init__(self, client: HttpClient, system: str | None, session: str | None, options: Mapping[str, Any]) -> None:
        self._client = client
        self._system = system if session is None else None
        self._options = _fields(options)
        self._is_own = session is None
        self.session_id = session or str(client.ask("POST", "/v1/sessions", {})["id"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_own:
            with suppress(CorollaError):  # it expires by itself
                self._client.ask("DELETE", f"/v1/sessions/{self.session_id}")

    def send(self, turn: Turn) -> Reply:
        """One turn, answered at once."""
        found = self._client.ask("POST", "/v1/chat/completions", self._body(turn, return_token_ids=True))
        choice, self._system = found["choices"][0], None
        ids = tuple(choice["token_ids"])
        message = choice["message"]
        calls = [(each["id"], each["function"]) for each in message.get("tool_calls") or ()]
        return Reply(
            found["model"], message["content"] or "", ids, _ENDS.get(choice["finish_reason"]), (),
            _usage(found["usage"]),
            reasoning=message.get("reasoning_content") or "",
            tool_calls=tuple(ToolCall(call_id, each["name"], each["arguments"]) for call_id, each in calls),
        )  # fmt: skip

    def stream(self, turn: Turn) -> "HttpStream":
        """One turn, chunk by chunk."""
        body = self._body(turn, stream=True, stream_options={"include_usage": True}, return_token_ids=True)
        return HttpStream(self._client, self._client.open("/v1/chat/completions", body), self._begun)

    def _begun(self) -> None:
        """The session has had a turn, whose messages it keeps."""
        self._system = None

    def _body(self, turn: Turn, **more: Any) -> Mapping[str, Any]:
        messages = [{"role": "user", "content": turn}] if isinstance(turn, str) else [_message(each) for each in turn]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        return {**self._options, "messages": messages, "session_id": self.session_id, **more}


class HttpStream:
    """Iterates over chunks. Errors of the tree are raised while iterating.

    Attributes:
        usage: once it has ended.
        finish_reason: likewise.
        tool_calls: that the answer makes, as far as it has come.
    """

    def __init__(self, client: HttpClient, reply: httpx2.Response, on_end: Callable[[], None]) -> None:
        self._client = client
        self._on_end = on_end
        self._reply = reply
        self._is_closed = False
        self.usage: Usage | None = None
        self.finish_reason: FinishReason | None = None
        self.tool_calls: tuple[ToolCall, ...] = ()

    def close(self) -> None:
        """Ends it where it is, also from a handler of signals: whoever reads finds the end of the connection."""
        self._is_closed = True
        connection = self._reply.extensions["network_stream"].get_extra_info("socket")
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def __iter__(self) -> Iterator[Chunk]:
        try:
            for line in self._reply.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield from self._chunks(json.loads(line.removeprefix("data: ")))
        except httpx2.HTTPError:
            if not self._is_closed:
                raise self._client.unreachable() from None
        finally:
            self._reply.close()

    def _chunks(self, facts: Mapping[str, Any]) -> Iterator[Chunk]:
        if "error" in facts:
            raise _error_of(json.dumps(facts).encode())
        if facts.get("usage"):
            self.usage = _usage(facts["usage"])
            self._on_end()
        for choice in facts["choices"]:
            self.finish_reason = _ENDS.get(choice["finish_reason"], self.finish_reason)
            delta, ids = choice["delta"], choice.get("token_ids", ())
            self._take_calls(delta.get("tool_calls") or ())
            reasoning = delta.get("reasoning_content") or ""
            yield Chunk(
                choice["index"], delta.get("content") or "", tuple(ids), (), self.finish_reason, None, reasoning
            )

    def _take_calls(self, deltas: Sequence[Mapping[str, Any]]) -> None:
        calls = dict(enumerate(self.tool_calls))
        for delta in deltas:
            function = delta["function"]
            begun = calls.get(delta["index"]) or ToolCall(delta["id"], function["name"], "")
            arguments = begun.arguments + (function.get("arguments") or "")
            calls[delta["index"]] = replace(begun, arguments=arguments)
        self.tool_calls = tuple(calls.values())


def _fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the command line by the names of HTTP."""
    fields = dict(options)
    if (seconds := fields.pop("time_limit_s", None)) is not None:
        fields["time_limit_ms"] = round(1000 * seconds)
    if isinstance(stop := fields.get("stop"), Sequence):
        fields["stop"] = list(stop)
    if isinstance(choice := fields.get("tool_choice"), str) and choice not in _TOOL_CHOICES:
        fields["tool_choice"] = {"type": "function", "function": {"name": choice}}
    return fields


def _message(given: Any) -> dict[str, Any]:
    if not isinstance(given, Message):
        return dict(given)
    return {"role": given.role, "content": given.content, "tool_call_id": given.tool_call_id}


def _usage(facts: Mapping[str, Any]) -> Usage:
    return Usage(
        prompt_tokens=facts["prompt_tokens"],
        completion_tokens=facts["completion_tokens"],
        cached_tokens=facts["prompt_tokens_details"]["cached_tokens"],
        recoveries=facts["recoveries"],
        stall_s=facts["stall_seconds"],
        time_to_first_token_s=facts["time_to_first_token_seconds"],
        total_s=facts["total_seconds"],
        drafted_tokens=facts["drafted_tokens"],
        accepted_tokens=facts["accepted_tokens"],
    )


def _error_of(body: bytes) -> CorollaError:
    """The error behind a reply; of one that is none of ours, that the service is not reachable."""
    try:
        error = json.loads(body)["error"]
        return from_reason(_REASONS.get(error["code"], "INTERNAL"), str(error["message"]))
    except (ValueError, KeyError, TypeError):
        return ServiceUnavailable("what answers there does not speak OpenAI's dialect")
