"""What replies of all kinds of answers have in common, and how an answer's chunks become events.

A token's event is put together from parts that are ready and one escaped string: it must cost next to nothing.
"""

import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any, Final

from pydantic import BaseModel, Field

from corolla.v1 import generation_pb2 as pb

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

# To the standard of events these end no line, but to what many callers split lines with.
_LINE_ENDS: Final = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="Whose keys and values were still on the servers.")


class Usage(BaseModel):
    """What a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    recoveries: int = Field(description="How often a hop was replaced during the answer.")
    stall_seconds: float = Field(description="How long that stalled it.")
    time_to_first_token_seconds: float
    total_seconds: float
    drafted_tokens: int
    accepted_tokens: int


def usage_of(*counted: pb.Usage) -> Usage:
    """Of one call, or of several that belong to one request."""
    prompt, completion = (sum(getattr(each, f"{kind}_tokens") for each in counted) for kind in ("prompt", "completion"))
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(each.cached_tokens for each in counted)),
        recoveries=sum(each.recoveries for each in counted),
        stall_seconds=sum(each.stall_seconds for each in counted),
        time_to_first_token_seconds=max(each.time_to_first_token_seconds for each in counted),
        total_seconds=max(each.total_seconds for each in counted),
        drafted_tokens=sum(each.drafted_tokens for each in counted),
        accepted_tokens=sum(each.accepted_tokens for each in counted),
    )


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(16)}"


def now_s() -> int:
    return int(time.time())


def escaped(text: str) -> str:
    """As JSON has it, quotes included, and in one line whoever reads it."""
    quoted = encode_basestring(text)
    return quoted if text.isascii() else quoted.translate(_LINE_ENDS)


def compact(value: Any) -> str:
    """JSON without blanks, in one line whoever reads it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if text.isascii() else text.translate(_LINE_ENDS)


def ids_text(token_ids: Iterable[int]) -> str:
    """A list of numbers in JSON."""
    return f"[{','.join(map(str, token_ids))}]"


def logprob_facts(entries: Sequence[pb.TokenLogprob]) -> list[dict[str, Any]]:
    """As chats have them. `bytes` are those of the text, which may be U+FFFD for a part of a character."""
    return [{**_token_facts(entry), "top_logprobs": [_token_facts(each) for each in entry.top]} for entry in entries]


def _token_facts(entry: pb.TokenLogprob) -> dict[str, Any]:
    return {"token": entry.text, "logprob": entry.logprob, "bytes": list(entry.text.encode())}
