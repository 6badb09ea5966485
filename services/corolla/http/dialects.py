"""The dialects of HTTP: what the endpoints of one API have in common, apart from requests and answers. Pure."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from pydantic import BaseModel, Field

from corolla.chassis.errors import ContextLengthExceeded, CorollaError
from corolla.http.errors import TYPES, ErrorReply, body_of, facts_of, status_of


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
