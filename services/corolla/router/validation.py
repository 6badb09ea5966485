"""Checks requests before the router asks the store: a table has the rule of each field.

A failed check raises an InvalidRequest that names the field.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from corolla.chassis.errors import InvalidRequest, SpanRefused
from corolla.planning.spares import MOST_SPARE_SPANS
from corolla.router.settings import ExpectedModel
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.wire.adapter_version import AdapterVersion
from corolla.wire.beginnings import DIGEST_BYTES

MOST_MODEL_BLOCKS: Final = 1024
MOST_TEXT: Final = 256
MOST_SOURCE: Final = 1024
MOST_BEGINNINGS: Final = 64
MOST_SPEED: Final = 1e9
MOST_TAKES: Final = 1024
MOST_USES: Final = 16
MOST_AMOUNT: Final = 10**12

_ADDRESS: Final = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]):(?P<port>[0-9]{1,5})")
_STATES: Final = frozenset({pb.SERVER_STATE_JOINING, pb.SERVER_STATE_READY, pb.SERVER_STATE_DRAINING})

Rule = Callable[[str, Any], None]
"""Checks the value of a field, given the field's name."""
Request = TypeVar("Request", bound=Message)


def check(request: Request, place: str = "") -> Request:
    """Checks the fields of a message and of the messages in it, and returns the message.

    Args:
        place: the name of the field that has the message, with a dot.
    """
    for name, rule, is_inner, is_optional in _checked_fields(request.DESCRIPTOR):
        value = getattr(request, name)
        if rule is not None:
            rule(place + name, value)
        if is_inner and (not is_optional or request.HasField(name)):
            for each in (value,) if isinstance(value, Message) else value:
                check(each, f"{place}{name}.")
    if (whole := _WHOLE.get(request.DESCRIPTOR.name)) is not None:
        whole(place, request)
    return request


@cache
def _checked_fields(kind: Descriptor) -> list[tuple[str, Rule | None, bool, bool]]:
    """The names of fields, their rules, whether they have messages with rules, and whether these may be missing."""
    found = []
    for field in kind.fields:
        name = f"{kind.name}.{field.name}"
        rule = _RULES.get(name) or _RULES.get(field.name)
        is_inner = field.message_type is not None and field.message_type.name in _INNER
        if rule is not None or is_inner:
            found.append((field.name, rule, is_inner, name in _OPTIONAL))
    return found


def check_placed(placed: pb.PlacedServer) -> pb.PlacedServer:
    """Checks those fields of a server's stored record that placement and planner calculate with."""
    check(placed.span, "span.")
    check(placed.load, "load.")
    if not placed.span.end <= placed.server.num_model_blocks <= MOST_MODEL_BLOCKS:
        raise InvalidRequest("span", "reaches beyond the model")
    _spare_spans(placed.load, placed.server.num_model_blocks)
    for field in ("decode_tokens_per_second", "head_blocks", "weight_blocks", "draft_blocks"):
        _speed(f"server.{field}", getattr(placed.server, field))
    return placed


def check_expected(server: pb.ServerDescription, models: Mapping[str, ExpectedModel]) -> None:
    """Checks a server against the expected models; if there are none, any server is accepted. Raises SpanRefused."""
    if not models:
        return
    expected = models.get(server.model)
    if expected is None:
        raise SpanRefused("this router accepts only the models in COROLLA_MODELS")
    if expected.num_blocks not in (0, server.num_model_blocks):
        raise SpanRefused(
            f"the model has {expected.num_blocks} blocks, but this server's model has {server.num_model_blocks}"
        )
    if expected.fingerprint not in ("", server.fingerprint):
        raise SpanRefused("the server's weights differ from those that COROLLA_MODELS requires")


def _text(field: str, text: str, most: int = MOST_TEXT) -> None:
    if not text:
        raise InvalidRequest(field, "is required")
    if len(text) > most:
        raise InvalidRequest(field, f"has {len(text)} characters; at most {most} are accepted")
    if not text.isprintable():
        raise InvalidRequest(field, "has characters that cannot be printed")


def _matches(pattern: str, description: str) -> Rule:
    def rule(field: str, text: str) -> None:
        if not re.fullmatch(pattern, text):
            raise InvalidRequest(field, description)

    return rule


def _if_given(rule: Rule) -> Rule:
    return lambda field, value: rule(field, value) if value else None


def _at_most(most: int, rule: Rule = lambda _field, _value: None) -> Rule:
    """The rule of a list: it has at most so many entries, and each fulfils a rule."""

    def check_all(field: str, values: Sequence[Any]) -> None:
        if len(values) > most:
            raise InvalidRequest(field, f"has {len(values)}; at most {most} are accepted")
        for each in values:
            rule(field, each)

    return check_all


def _between(least: float, most: float) -> Rule:
    def rule(field: str, number: float) -> None:
        if not least <= number <= most:
            raise InvalidRequest(field, f"must be a number from {least} to {most}")

    return rule


def _address(field: str, address: str) -> None:
    found = _ADDRESS.fullmatch(address)
    if len(address) > MOST_TEXT or found is None or not 0 < int(found["port"]) < 65536:
        raise InvalidRequest(field, "must be host:port")


def _state(field: str, state: int) -> None:
    if state not in _STATES:
        raise InvalidRequest(field, "must be JOINING, READY or DRAINING")


def _fingerprint_parts(field: str, parts: Mapping[str, str]) -> None:
    _at_most(64, _text)(field, [*parts, *parts.values()])


def _beginnings(field: str, announced: bytes) -> None:
    num_digests, rest = divmod(len(announced), DIGEST_BYTES)
    if rest or num_digests > MOST_BEGINNINGS:
        raise InvalidRequest(field, f"must be at most {MOST_BEGINNINGS} digests of {DIGEST_BYTES} bytes")


def _version(field: str, version: common_pb2.AdapterVersion) -> None:
    try:
        AdapterVersion.from_proto(version)
    except ValueError as failure:
        raise InvalidRequest(field, str(failure)) from None


def _chain(field: str, chain: common_pb2.Chain) -> None:
    boundary = 0
    for hop in chain.hops:
        if not hop.span.start == boundary < hop.span.end:
            raise InvalidRequest(field, "must cover all blocks once, in order")
        boundary = hop.span.end


def _span(place: str, span: common_pb2.BlockSpan) -> None:
    if span.start >= span.end:
        raise InvalidRequest(place.removesuffix("."), f"{span.start}:{span.end} holds no block")


def _in_a_model(field: str, span: common_pb2.BlockSpan) -> None:
    if span.end > MOST_MODEL_BLOCKS:
        raise InvalidRequest(field, f"ends after {MOST_MODEL_BLOCKS} blocks, which no model has")


def _record(place: str, record: pb.SessionRecord) -> None:
    if record.position > len(record.token_log):
        raise InvalidRequest(f"{place}position", "is beyond the token log")


def _load(place: str, load: pb.ServerLoad) -> None:
    if load.num_free_pages > load.num_pages:
        raise InvalidRequest(f"{place}num_free_pages", "is more than num_pages")


def _heartbeat(_place: str, beat: pb.HeartbeatRequest) -> None:
    if beat.HasField("server"):
        if (beat.server.model, beat.server.server_id) != (beat.model, beat.server_id):
            raise InvalidRequest("server", "is of another server or model than the heartbeat")
        _span("span", beat.span)
        _spare_spans(beat.load, beat.server.num_model_blocks)


def _spare_spans(load: pb.ServerLoad, num_model_blocks: int) -> None:
    if any(span.end > num_model_blocks for span in load.spare_spans):
        raise InvalidRequest("load.spare_spans", "reach beyond the model")


_name: Final = _matches(r"[A-Za-z0-9_.-]{1,64}", "must be 1 to 64 letters, digits, dots, dashes or underscores")
_session_id: Final = _matches(r"[0-9a-f]{32}", "must be 32 lower-case hexadecimal digits")
_speed: Final = _between(0, MOST_SPEED)

_RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(("model", "fingerprint", "QuotaTake.tenant"), _text),
    **dict.fromkeys(("server_id", "turn_id", "taker_id", "request_id", "quota", "RemoveAdapterRequest.name"), _name),
    **dict.fromkeys(
        ("tenant", "dtype", "zone", "node", "pod_uid", "device_id", "numerics", "kernels", "kind", "revision",
         "PlanChainRequest.fingerprint", "GetPlacementRequest.model"),
        _if_given(_text),
    ),
    **dict.fromkeys(
        ("decode_tokens_per_second", "prefill_tokens_per_second", "head_blocks", "weight_blocks", "draft_blocks"),
        _speed,
    ),
    "session_id": _session_id,
    "excluded_server_ids": _at_most(4096),
    "unreachable": _at_most(64, _text),
    "spare_spans": _at_most(MOST_SPARE_SPANS, _in_a_model),
    "start_share": _between(0, 1),
    "start_seconds_left": _between(0, 1 << 30),
    "address": _address,
    "state": _state,
    "num_model_blocks": _between(1, MOST_MODEL_BLOCKS),
    "capacity_blocks": _between(1, 2**32),
    "fingerprint_parts": _fingerprint_parts,
    "decode_step_seconds": _between(0, 3600),
    "decode_batch_rows": _between(0, 1 << 20),
    "ttl_ms": _between(0, 30 * 24 * 3600 * 1000),
    "lock_ms": _between(0, 3_600_000),
    "lease_ms": _between(0, 600_000),
    "period_ms": _between(0, 24 * 3600 * 1000),
    "amount": _between(0, MOST_AMOUNT),
    "limit": _between(1, MOST_AMOUNT),
    "takes": _at_most(MOST_TAKES),
    "uses": _at_most(MOST_USES),
    "chain": _chain,
    "version": _version,
    "source": partial(_text, most=MOST_SOURCE),
    "RegisteredAdapter.tenants": _at_most(64, _text),
    "beginnings": _beginnings,
}  # fmt: skip
"""The rules of fields by their names, or by the names of message and field."""
_WHOLE: Final[Mapping[str, Rule]] = {
    "BlockSpan": _span, "SessionRecord": _record, "ServerLoad": _load, "HeartbeatRequest": _heartbeat,
}  # fmt: skip
"""What the fields of a message must fulfil together."""
_INNER: Final = frozenset({
    "BlockSpan", "Hop", "QuotaTake", "QuotaUse", "RegisteredAdapter", "ServerDescription", "ServerLoad",
    "SessionRecord",
})  # fmt: skip
"""The messages whose fields are checked within others."""
_OPTIONAL: Final = frozenset(("RegisterServerRequest.span", "HeartbeatRequest.server", "HeartbeatRequest.span"))
"""The fields with such messages that may be missing."""
