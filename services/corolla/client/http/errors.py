"""Errors of the tree in OpenAI's form: one row for each label. Pure."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from pydantic import BaseModel, Field

from corolla.chassis.errors import CorollaError, InvalidRequest, ResourceNotFound


@dataclass(frozen=True, slots=True)
class Row:
    """How an error looks: the HTTP status, and OpenAI's words for its kind."""

    status: int
    type: str
    code: str


_BAD: Final = "invalid_request_error"
_DENIED: Final = "permission_error"
_MANY: Final = "rate_limit_error"
_OURS: Final = "server_error"
_AWAY: Final = "service_unavailable_error"

ROWS: Final[Mapping[str, Row]] = MappingProxyType(
    {
        "INTERNAL": Row(500, _OURS, "internal_error"),
        "NON_FINITE": Row(500, _OURS, "non_finite"),
        "STEP_FAILED": Row(500, _OURS, "step_failed"),
        "OUT_OF_MEMORY": Row(503, _AWAY, "out_of_memory"),
        "REQUEST_KILLS_SERVERS": Row(500, _OURS, "request_kills_servers"),
        "INVALID_REQUEST": Row(400, _BAD, "invalid_request"),
        "MALFORMED_MESSAGE": Row(400, _BAD, "malformed_message"),
        "CONTEXT_LENGTH_EXCEEDED": Row(400, _BAD, "context_length_exceeded"),
        "MESSAGE_TOO_LARGE": Row(413, _BAD, "message_too_large"),
        "UNAUTHENTICATED": Row(401, "authentication_error", "invalid_api_key"),
        "QUOTA_EXCEEDED": Row(429, _MANY, "rate_limit_exceeded"),
        "SCOPE_DENIED": Row(403, _DENIED, "scope_denied"),
        "ADAPTER_DENIED": Row(403, _DENIED, "adapter_denied"),
        "ROLE_DENIED": Row(403, _DENIED, "role_denied"),
        "ADDRESS_NOT_YOURS": Row(403, _DENIED, "address_not_yours"),
        "CAPABILITY_DENIED": Row(403, _DENIED, "capability_denied"),
        "NOT_FOUND": Row(404, _BAD, "not_found"),
        "MODEL_NOT_FOUND": Row(404, _BAD, "model_not_found"),
        "SESSION_NOT_FOUND": Row(404, _BAD, "session_not_found"),
        "ADAPTER_NOT_FOUND": Row(404, _BAD, "adapter_not_found"),
        "LEASE_LOST": Row(503, _AWAY, "lease_lost"),
        "LEASE_TAKEN": Row(503, _AWAY, "lease_taken"),
        "SESSION_BUSY": Row(409, "conflict_error", "session_busy"),
        "OUT_OF_PAGES": Row(503, _AWAY, "out_of_pages"),
        "NO_ADAPTER_ROOM": Row(503, _AWAY, "no_adapter_room"),
        "QUEUE_FULL": Row(429, _MANY, "queue_full"),
        "POSITION_GAP": Row(503, _AWAY, "position_gap"),
        "STALE_EPOCH": Row(503, _AWAY, "stale_epoch"),
        "HOP_SESSION_LOST": Row(503, _AWAY, "hop_session_lost"),
        "OUTPUTS_NOT_KEPT": Row(503, _AWAY, "outputs_not_kept"),
        "FINGERPRINT_MISMATCH": Row(503, _AWAY, "fingerprint_mismatch"),
        "NO_CHAIN": Row(503, _AWAY, "no_chain"),
        "HOP_UNAVAILABLE": Row(503, _AWAY, "hop_unavailable"),
        "ROUTE_UNKNOWN": Row(503, _AWAY, "route_unknown"),
        "HOP_LEAVING": Row(503, _AWAY, "hop_leaving"),
        "ADAPTER_NOT_LOADED": Row(503, _AWAY, "adapter_not_loaded"),
        "CHECKSUM_MISMATCH": Row(500, _OURS, "checksum_mismatch"),
        "SERVICE_STOPPING": Row(503, _AWAY, "service_stopping"),
        "ROUTER_UNAVAILABLE": Row(503, _AWAY, "router_unavailable"),
        "SERVICE_UNAVAILABLE": Row(503, _AWAY, "service_unavailable"),
        "STORE_UNAVAILABLE": Row(503, _AWAY, "store_unavailable"),
        "DEADLINE_EXCEEDED": Row(504, "timeout_error", "deadline_exceeded"),
        "CALLER_STALLED": Row(408, "timeout_error", "caller_stalled"),
        # These end processes. No call fails of them.
        "STARTUP": Row(500, _OURS, "startup"),
        "SETTINGS": Row(500, _OURS, "settings"),
        "CHECKPOINT": Row(500, _OURS, "checkpoint"),
        "UNSUPPORTED_FAMILY": Row(500, _OURS, "unsupported_family"),
        "ADAPTER": Row(500, _OURS, "adapter"),
        "HUB_UNAVAILABLE": Row(500, _OURS, "hub_unavailable"),
        "SPAN_REFUSED": Row(500, _OURS, "span_refused"),
    }
)
"""By the label of the error tree."""

CLIENT_CLOSED: Final = 499
"""What metrics say of a request whose caller has left."""

_FIELDS: Final = MappingProxyType(
    {
        "text": "prompt",
        "tokens.ids": "prompt",
        "token_ids": "tokens",
        "num_completions": "n",
        "resume_from_index": "resume_from",
        "received.ids": "received",
        "template_arguments": "chat_template_kwargs",
        "continue_last_message": "continue_final_message",
        "speculation.mode": "speculation",
        "speculation.max_draft_tokens": "max_draft_tokens",
        "expected_turns": "previous_response_id",
    }
)
"""Names of the protocol, and of HTTP where it has another one."""
_GROUPS: Final = re.compile(r"^(?:sampling|stopping)\.")


class ErrorFacts(BaseModel):
    """What went wrong."""

    message: str
    type: str = Field(description="Its kind, in OpenAI's words.")
    param: str | None = Field(description="The field that is wrong.")
    code: str | None = Field(description="Its label in Corolla's error tree, or OpenAI's name of that.")


class ErrorReply(BaseModel):
    """The body of every reply that is no success."""

    error: ErrorFacts


def row_of(error: CorollaError) -> Row:
    """The row of an error's label."""
    return ROWS[error.reason]


def facts_of(error: CorollaError) -> dict[str, Any]:
    """`{"message", "type", "param", "code"}`."""
    row = row_of(error)
    message, param = error.message, None
    if isinstance(error, InvalidRequest) and error.violations:
        violations = [(_field(name), text) for name, text in error.violations]
        message, param = "; ".join(f"{name}: {text}" for name, text in violations), violations[0][0]
    elif isinstance(error, ResourceNotFound):
        param = error.resource_type if error.resource_type != "session" else "session_id"
    return {"message": message, "type": row.type, "param": param, "code": row.code}


def body_of(error: CorollaError) -> bytes:
    """The body of a reply, or the data of an event."""
    return json.dumps({"error": facts_of(error)}, ensure_ascii=False).encode()


def headers_of(error: CorollaError) -> dict[str, str]:
    """What else a reply says: when the same call may succeed."""
    if error.retry_after_s is None:
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}


def _field(name: str) -> str:
    """A field as callers over HTTP know it."""
    head, bracket, rest = name.partition("[")
    return _GROUPS.sub("", _FIELDS.get(head, head)) + bracket + rest
