"""Errors in the words of OpenAI's dialect and Anthropic's, and what else the endpoints of a dialect share. Pure."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from pydantic import BaseModel, Field

from corolla.chassis.errors import (
    ContextLengthExceeded,
    CorollaError,
    InvalidRequest,
    MessageTooLarge,
    QueueFull,
    ResourceNotFound,
    StartupError,
)

_CALLERS_FAULTS: Final = MappingProxyType(
    {
        "INVALID_ARGUMENT": 400,
        "UNAUTHENTICATED": 401,
        "PERMISSION_DENIED": 403,
        "NOT_FOUND": 404,
        "DEADLINE_EXCEEDED": 408,
        "ABORTED": 409,
        "RESOURCE_EXHAUSTED": 429,
        "UNIMPLEMENTED": 405,
    }
)
"""HTTP statuses of errors that are the caller's fault, by gRPC's code."""
_OTHER_FAULTS: Final = MappingProxyType({"INTERNAL": 500, "DATA_LOSS": 500, "DEADLINE_EXCEEDED": 504})
"""HTTP statuses of all other errors, by gRPC's code. Errors with any other code get 503."""
TYPES: Final = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "invalid_request_error",
        405: "invalid_request_error",
        408: "timeout_error",
        409: "conflict_error",
        413: "invalid_request_error",
        429: "rate_limit_error",
        500: "server_error",
        503: "service_unavailable_error",
        504: "timeout_error",
    }
)
"""OpenAI's words for the kind of an error, by HTTP status."""
_CODES: Final = MappingProxyType(
    {"INTERNAL": "internal_error", "QUOTA_EXCEEDED": "rate_limit_exceeded", "UNAUTHENTICATED": "invalid_api_key"}
)
"""OpenAI's codes by the label of the error tree, where the two differ."""

CLIENT_CLOSED: Final = 499
"""The status in metrics for a request whose caller has left."""


class ErrorFacts(BaseModel):
    """An error."""

    message: str
    type: str = Field(description="The kind of the error, in OpenAI's words.")
    param: str | None = Field(description="The field that is wrong.")
    code: str | None = Field(description="The reason of the error in Corolla, or OpenAI's name for it.")


class ErrorReply(BaseModel):
    """The body of every reply to a failed request."""

    error: ErrorFacts


def status_of(error: CorollaError) -> int:
    """The HTTP status of an error, which depends on gRPC's code and on whether the caller is at fault."""
    match error:
        case MessageTooLarge():
            return 413
        case QueueFull():
            return 429
        case StartupError():  # it ends a process, and no call raises it
            return 500
    if error.is_callers_fault:
        return _CALLERS_FAULTS[error.code.name]
    return _OTHER_FAULTS.get(error.code.name, 503)


def facts_of(error: CorollaError) -> dict[str, Any]:
    """The error's facts: `{"message", "type", "param", "code"}`."""
    message, param = error.message, None
    if isinstance(error, InvalidRequest) and error.violations:
        param = error.violations[0][0]
        if isinstance(error, ContextLengthExceeded):
            # Programs look for the first sentence of the message.
            message = error.violations[0][1]
    elif isinstance(error, ResourceNotFound):
        param = error.field or None
    code = _CODES.get(error.reason, error.reason.lower())
    return {"message": message, "type": TYPES[status_of(error)], "param": param, "code": code}


def body_of(error: CorollaError) -> bytes:
    """An error in JSON: the body of a reply, or the data of an event."""
    return json.dumps({"error": facts_of(error)}, ensure_ascii=False).encode()


def headers_of(error: CorollaError) -> dict[str, str]:
    """The additional headers of an error's reply: `retry-after`, if the error says when to retry."""
    if error.retry_after_s is None:
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}


@dataclass(frozen=True, slots=True)
class Dialect:
    """What an API's errors and streams look like.

    Attributes:
        error_reply: the body of a reply to a failed request, as the OpenAPI document describes it.
        error_body: that body in JSON, for an error and the id of the request.
        silence: what a stream sends while no event comes; proxies close connections on which they see nothing.
        id_headers: the headers of each reply that have the id of the request.
    """

    error_reply: type[BaseModel]
    error_body: Callable[[CorollaError, str], bytes]
    silence: bytes
    id_headers: tuple[str, ...]


_ANTHROPICS_TYPES: Final = MappingProxyType(
    TYPES | {404: "not_found_error", 413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
)
"""Anthropic's words for the kind of an error, by HTTP status."""


class MessageErrorFacts(BaseModel):
    """An error in Anthropic's dialect."""

    type: str = Field(description="The kind of the error, in Anthropic's words.")
    message: str


class MessageErrorReply(BaseModel):
    """The body of every reply to a failed request for a message."""

    type: Literal["error"] = "error"
    error: MessageErrorFacts
    request_id: str


def _anthropics_body(error: CorollaError, request_id: str) -> bytes:
    message = facts_of(error)["message"]
    if isinstance(error, ContextLengthExceeded) and "prompt_tokens" in error.metadata:
        # Programs that shorten a conversation look for this sentence.
        message = "prompt is too long: {prompt_tokens} tokens > {context_length} maximum".format(**error.metadata)
    elif isinstance(error, ContextLengthExceeded):
        message = f"prompt is too long: {message}"
    facts = {"type": _ANTHROPICS_TYPES[status_of(error)], "message": message}
    return json.dumps({"type": "error", "error": facts, "request_id": request_id}, ensure_ascii=False).encode()


OPENAI: Final = Dialect(
    error_reply=ErrorReply,
    error_body=lambda error, request_id: body_of(error),
    silence=b": the answer is being prepared\n\n",
    id_headers=("x-request-id",),
)
ANTHROPIC: Final = Dialect(
    error_reply=MessageErrorReply,
    error_body=_anthropics_body,
    silence=b'event: ping\ndata: {"type":"ping"}\n\n',
    id_headers=("x-request-id", "request-id"),
)
