"""Checks requests before the router asks the store. A failed check raises an InvalidRequest that names the field."""

import itertools
import re
from collections.abc import Mapping
from typing import Final

from corolla.chassis.errors import InvalidRequest, SpanRefused
from corolla.router.settings import ExpectedModel
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.wire.adapter_version import AdapterVersion
from corolla.wire.span import Span

MOST_MODEL_BLOCKS: Final = 1024
MOST_TEXT: Final = 256
MOST_STEP_SECONDS: Final = 3600
MOST_BATCH_ROWS: Final = 1 << 20
MOST_SESSION_TTL_MS: Final = 30 * 24 * 3600 * 1000
MOST_LOCK_MS: Final = 3_600_000
MOST_EXCLUDED: Final = 4096
MOST_SOURCE: Final = 1024
MOST_FINGERPRINT_PARTS: Final = 32
MOST_ADAPTER_TENANTS: Final = 64

_SESSION_ID: Final = re.compile(r"[0-9a-f]{32}")
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PLANNED_WITH: Final = ("decode_tokens_per_second", "head_blocks", "weight_blocks", "draft_blocks")
_ADDRESS: Final = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]):(?P<port>[0-9]{1,5})")


def check_text(field: str, text: str, *, may_be_empty: bool = False) -> str:
    if not text and not may_be_empty:
        raise InvalidRequest(field, "is required")
    if len(text) > MOST_TEXT:
        raise InvalidRequest(field, f"has {len(text)} characters; at most {MOST_TEXT} are accepted")
    if not text.isprintable():
        raise InvalidRequest(field, "has characters that cannot be printed")
    return text


def check_session_id(field: str, session_id: str) -> str:
    if not _SESSION_ID.fullmatch(session_id):
        raise InvalidRequest(field, "must be 32 lower-case hexadecimal digits")
    return session_id


def check_name(field: str, name: str) -> str:
    """Checks an id that its owner has made, such as that of a server or a turn."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(field, "must be 1 to 64 letters, digits, dots, dashes or underscores")
    return name


def check_duration(field: str, milliseconds: int, most: int, default: int) -> int:
    """Returns the duration, or `default` if it is 0."""
    if milliseconds > most:
        raise InvalidRequest(field, f"is {milliseconds}; at most {most} ms are accepted")
    return milliseconds or default


def check_span(field: str, span: common_pb2.BlockSpan) -> Span:
    if span.start >= span.end:
        raise InvalidRequest(field, f"{span.start}:{span.end} holds no block")
    return Span.of(span)


def check_server(server: pb.ServerDescription) -> pb.ServerDescription:
    check_name("server.server_id", server.server_id)
    check_text("server.model", server.model)
    check_text("server.fingerprint", server.fingerprint)
    for field in ("dtype", "zone", "pod_uid", "device_id"):
        check_text(f"server.{field}", getattr(server, field), may_be_empty=True)
    if len(server.fingerprint_parts) > MOST_FINGERPRINT_PARTS:
        raise InvalidRequest("server.fingerprint_parts", f"has more than {MOST_FINGERPRINT_PARTS} entries")
    for text in itertools.chain.from_iterable(server.fingerprint_parts.items()):
        check_text("server.fingerprint_parts", text)
    address = _ADDRESS.fullmatch(server.address)
    if len(server.address) > MOST_TEXT or address is None or not 0 < int(address["port"]) < 65536:
        raise InvalidRequest("server.address", "must be host:port")
    if not 0 < server.num_model_blocks <= MOST_MODEL_BLOCKS:
        raise InvalidRequest("server.num_model_blocks", f"must be from 1 to {MOST_MODEL_BLOCKS}")
    if server.capacity_blocks == 0:
        raise InvalidRequest("server.capacity_blocks", "must be at least 1")
    for field in (*_PLANNED_WITH, "prefill_tokens_per_second"):
        _check_speed(f"server.{field}", getattr(server, field))
    return server


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


def check_self_description(beat: pb.HeartbeatRequest) -> None:
    server = check_server(beat.server)
    if (server.model, server.server_id) != (beat.model, beat.server_id):
        raise InvalidRequest("server", "is of another server or model than the heartbeat")
    check_span("span", beat.span)


def check_load(load: pb.ServerLoad) -> pb.ServerLoad:
    if not 0 <= load.decode_step_seconds <= MOST_STEP_SECONDS:
        raise InvalidRequest("load.decode_step_seconds", f"must be a number from 0 to {MOST_STEP_SECONDS}")
    if not 0 <= load.decode_batch_rows <= MOST_BATCH_ROWS:
        raise InvalidRequest("load.decode_batch_rows", f"must be a number from 0 to {MOST_BATCH_ROWS}")
    _check_speed("load.decode_tokens_per_second", load.decode_tokens_per_second)
    check_text("load.numerics", load.numerics, may_be_empty=True)
    check_text("load.kernels", load.kernels, may_be_empty=True)
    if load.num_free_pages > load.num_pages:
        raise InvalidRequest("load.num_free_pages", "is more than num_pages")
    return load


def check_placed(placed: pb.PlacedServer) -> pb.PlacedServer:
    """Checks those fields of a server's stored record that placement and planner calculate with."""
    if not check_span("span", placed.span).end <= placed.server.num_model_blocks <= MOST_MODEL_BLOCKS:
        raise InvalidRequest("span", "reaches beyond the model")
    for field in _PLANNED_WITH:
        _check_speed(f"server.{field}", getattr(placed.server, field))
    check_load(placed.load)
    return placed


def check_record(record: pb.SessionRecord) -> pb.SessionRecord:
    check_text("record.model", record.model)
    check_session_id("record.session_id", record.session_id)
    check_text("record.tenant", record.tenant, may_be_empty=True)
    if record.position > len(record.token_log):
        raise InvalidRequest("record.position", "is beyond the token log")
    boundary = 0
    for hop in record.chain.hops:
        span = check_span("record.chain", hop.span)
        if span.start != boundary:
            raise InvalidRequest("record.chain", "must cover all blocks once, in order")
        boundary = span.end
    return record


def check_hop(hop: common_pb2.Hop) -> common_pb2.Hop:
    check_name("hop.server_id", hop.server_id)
    if not _ADDRESS.fullmatch(hop.address):
        raise InvalidRequest("hop.address", "must be host:port")
    check_span("hop.span", hop.span)
    return hop


def check_adapter(adapter: pb.RegisteredAdapter) -> pb.RegisteredAdapter:
    try:
        AdapterVersion.from_proto(adapter.version)
    except ValueError as failure:
        raise InvalidRequest("adapter.version", str(failure)) from None
    if len(adapter.source) > MOST_SOURCE or not adapter.source.isprintable() or not adapter.source:
        raise InvalidRequest("adapter.source", f"must be 1 to {MOST_SOURCE} characters that can be printed")
    check_text("adapter.revision", adapter.revision, may_be_empty=True)
    if len(adapter.tenants) > MOST_ADAPTER_TENANTS:
        raise InvalidRequest("adapter.tenants", f"must be at most {MOST_ADAPTER_TENANTS}")
    for tenant in adapter.tenants:
        check_text("adapter.tenants", tenant)
    return adapter


def check_excluded(server_ids: list[str]) -> frozenset[str]:
    if len(server_ids) > MOST_EXCLUDED:
        raise InvalidRequest("excluded_server_ids", f"has more than {MOST_EXCLUDED} entries")
    return frozenset(server_ids)


def _check_speed(field: str, speed: float) -> None:
    if not 0 <= speed <= 1e9:
        raise InvalidRequest(field, "must be a number from 0 to 1e9")
