"""The parts that replies of several HTTP routes share, and JSON text for events.

A token's event is joined from prepared texts and one escaped string, because each token has one and it must be cheap.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any, Final, TypeVar

from pydantic import BaseModel, Field

from corolla.v1 import generation_pb2 as pb

Item = TypeVar("Item")

PIECE_CHARS: Final = 1 << 16
DONE: Final = b"data: [DONE]\n\n"

FINISH_REASONS: Final[Mapping["pb.FinishReason.ValueType", str | None]] = {
    pb.FINISH_REASON_UNSPECIFIED: None,
    pb.FINISH_REASON_EOS: "stop",
    pb.FINISH_REASON_STOP_SEQUENCE: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TIME_LIMIT: "length",
    pb.FINISH_REASON_CANCELLED: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}

# Server-sent events do not end lines with these characters, but many functions that split lines do.
_LINE_ENDS: Final = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="Tokens of the prompt whose keys and values were still on the servers.")


class Disturbances(BaseModel):
    """What the loss of hops did to an answer. A part of each usage."""

    recoveries: int = Field(description="How often a hop was replaced during the answer.")
    stall_seconds: float = Field(description="How many seconds recoveries stalled the answer.")
    may_differ_from_token: int | None = Field(
        description="Set if a hop was replaced by a server of other numerics: how many first tokens of an answer are "
        "surely equal to an undisturbed answer's."
    )


def disturbances(*counted: pb.Usage) -> dict[str, Any]:
    """The fields of `Disturbances`, over all calls of a request."""
    differing = (each.may_differ_from_token for each in counted if each.HasField("may_differ_from_token"))
    return {
        "recoveries": sum(each.recoveries for each in counted),
        "stall_seconds": sum(each.stall_seconds for each in counted),
        "may_differ_from_token": min(differing, default=None),
    }


class CompletionUsage(Disturbances):
    """What a request cost."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    time_to_first_token_seconds: float
    total_seconds: float
    drafted_tokens: int
    accepted_tokens: int


def usage_of(*counted: pb.Usage) -> CompletionUsage:
    """The usage of one call, or of several calls that belong to one request."""
    prompt, completion = (sum(getattr(each, f"{kind}_tokens") for each in counted) for kind in ("prompt", "completion"))
    return CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(each.cached_tokens for each in counted)),
        time_to_first_token_seconds=max(each.time_to_first_token_seconds for each in counted),
        total_seconds=max(each.total_seconds for each in counted),
        drafted_tokens=sum(each.drafted_tokens for each in counted),
        accepted_tokens=sum(each.accepted_tokens for each in counted),
        **disturbances(*counted),
    )


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(16)}"


def now_s() -> int:
    return int(time.time())


def escaped(text: str) -> str:
    """The text as a JSON string with its quotes, without any character that a reader may take for an end of line."""
    quoted = encode_basestring(text)
    return quoted if text.isascii() else quoted.translate(_LINE_ENDS)


def compact(value: Any) -> str:
    """JSON without blanks, and without any character that a reader may take for an end of line."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if text.isascii() else text.translate(_LINE_ENDS)


async def list_texts(
    values: Sequence[Item], size: int, facts: Callable[[Sequence[Item]], list[Any]] = list
) -> AsyncGenerator[str, None]:
    """A list in JSON without its brackets, in pieces of `size` values between which other tasks run."""
    for start in range(0, len(values), size):
        yield ("," if start else "") + compact(facts(values[start : start + size]))[1:-1]
        await asyncio.sleep(0)


def ids_text(token_ids: Iterable[int]) -> str:
    """A list of token ids in JSON."""
    return f"[{','.join(map(str, token_ids))}]"
