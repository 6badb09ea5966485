"""Checks frames from clients and other servers before they cost memory or time."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from corolla.block_server import readouts
from corolla.block_server.hop_session import OpenRequest
from corolla.block_server.peers import Peer
from corolla.block_server.row_sampling import NOTHING_SHARED, SessionSampler, SharedBySamplers
from corolla.cache.prefixes import ExpectedText, salt_of
from corolla.chassis.errors import CapabilityDenied, HopSessionLost, MalformedMessage
from corolla.chassis.tracing import spans
from corolla.chassis.tracing.carriers import PARENT_HEADER, STATE_HEADER, TraceParent, trace_parent
from corolla.compute.prompts import BlockPrompts
from corolla.trust.capabilities import Capabilities
from corolla.trust.workload import Role
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.adapter_version import AdapterVersion
from corolla.wire.frames import MAX_TENANT_CHARS, Buffer
from corolla.wire.page_hashes import HASH_BYTES
from corolla.wire.span import Span
from corolla.wire.tensors import check_payload

ID_BYTES = 16
MAX_LEASE_S = 24 * 3600.0
MAX_VERIFIED_TOKENS = 65

_SPAN_ID_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Identity:
    """Facts about this server and its model, which frames have to match.

    Attributes:
        cuts_are_equal: see `KernelChoices`.
        keeps_states: whether blocks of the span have recurrent states.
    """

    server_id: str
    span: Span
    model: str
    fingerprint: str
    dtype_name: str
    dtype: pb.TensorType.ValueType
    hidden_size: int
    max_tokens_per_frame: int
    prefix_page_tokens: int
    num_model_blocks: int
    vocab_size: int
    context_length: int
    cuts_are_equal: bool = False
    keeps_states: bool = False


@dataclass(eq=False, repr=False)
class FrameChecks:
    """Checks what frames ask of this server. All methods raise MalformedMessage, which names the wrong field.

    Args:
        shared: objects that all samplers of this server use.
        capabilities: verifies who opens sessions of the model; None without mutual TLS.
    """

    identity: Identity
    shared: SharedBySamplers = NOTHING_SHARED
    capabilities: Capabilities | None = None

    def open_request(self, control: pb.Open, payload: Buffer, peer: Peer) -> OpenRequest:
        """Returns the request that an Open makes. Raises CapabilityDenied or RoleDenied if the peer may not make it."""
        if len(control.session_id) != ID_BYTES or not peer.client_id:
            raise MalformedMessage("session_id", f"must have {ID_BYTES} bytes, on a client's stream")
        request = self._session("open", control, payload, peer.client_id)
        if control.HasField("sampler") and control.blocks.end != self.identity.num_model_blocks:
            raise MalformedMessage("sampler", "must be sent to the last hop only, which chooses the tokens")
        if request.owner != peer.owner:
            raise CapabilityDenied("the session's capability belongs to another owner than this stream")
        transfer_id = control.standby_transfer_id
        if len(transfer_id) not in (0, ID_BYTES) or (transfer_id and control.HasField("sampler")):
            raise MalformedMessage("standby_transfer_id", f"must have {ID_BYTES} bytes, and a standby has no sampler")
        text = self._text(control, request.blocks)
        return replace(
            request, resume=control.resume, text=text, stream=peer.number, trace=_trace(control, peer),
            standby_transfer_id=transfer_id, write_start=control.write_start, only_cached=control.only_cached,
        )  # fmt: skip

    def standby(self, control: pb.Standby) -> None:
        """Checks the frame that names a session's standby."""
        if len(control.session_id) != ID_BYTES or len(control.transfer_id) != (
            ID_BYTES if control.HasField("hop") else 0
        ):
            raise MalformedMessage("transfer_id", f"must have {ID_BYTES} bytes, like the session's id")

    def handover_request(self, control: pb.Handover, payload: Buffer, peer: Peer) -> OpenRequest:
        """Returns the request for a session that another server offers. Raises CapabilityDenied or RoleDenied."""
        ids = (control.session_id, control.client_id, control.transfer_id)
        if peer.client_id or any(len(each) != ID_BYTES for each in ids):
            raise MalformedMessage("handover", f"must come from a block server, with ids of {ID_BYTES} bytes")
        request = self._session("handover", control, payload, control.client_id)
        text = self._text(control, request.blocks) if control.page_tokens == self.identity.prefix_page_tokens else None
        write_start = 0 if text is None else control.write_start
        return replace(request, sender=peer.name, text=text, write_start=write_start)

    def _session(self, field: str, control: pb.Open | pb.Handover, payload: Buffer, client_id: bytes) -> OpenRequest:
        """Reads the fields that an Open and a Handover have in common."""
        blocks = self._blocks(control.blocks)
        if control.epoch == 0 or control.max_tokens == 0 or control.lease_ms == 0:
            raise MalformedMessage(field, "epoch, max_tokens and lease_ms must be positive")
        if len(control.tenant) > MAX_TENANT_CHARS:
            raise MalformedMessage("tenant", f"has more than {MAX_TENANT_CHARS} characters")
        owner, capability = self._opener(control)
        return OpenRequest(
            session_id=control.session_id,
            epoch=control.epoch,
            tenant=control.tenant,
            client_id=client_id,
            resume=False,
            max_tokens=control.max_tokens,
            blocks=blocks,
            lease_s=min(control.lease_ms / 1000, MAX_LEASE_S),
            transient=control.transient,
            keep_activations=control.keep_activations,
            prompts=self._prompts(control, payload, len(blocks)),
            owner=owner,
            capability=capability,
            adapter_version=_adapter(control),
            long_factors=control.long_factors,
        )

    def _opener(self, control: pb.Open | pb.Handover) -> tuple[str, pb.SignedCapability | None]:
        """Returns the session's owner, and the signed capability that proves it."""
        if self.capabilities is None:
            return "", None
        owner = self.capabilities.verify(control).owner
        # The capability is copied because a reference to a part of a message keeps the whole message alive.
        capability = pb.SignedCapability()
        capability.CopyFrom(control.capability)
        return owner, capability

    def renewed(self, request: OpenRequest, capability: pb.SignedCapability, peer: Peer) -> OpenRequest:
        """Returns a session's request with a fresh capability. Raises RoleDenied if that covers less."""
        asked = pb.Open(
            session_id=request.session_id, epoch=request.epoch, tenant=request.tenant, max_tokens=request.max_tokens,
            blocks=request.blocks.to_message(), capability=capability,
        )  # fmt: skip
        owner, fresh = self._opener(asked)
        if not owner == request.owner == peer.owner:
            raise CapabilityDenied("the session's capability belongs to another owner than this stream")
        return replace(request, capability=fresh)

    def _text(self, control: pb.Open | pb.Handover, blocks: Span) -> ExpectedText | None:
        if not control.HasField("text"):
            return None
        if control.HasField("block_prompts"):
            raise MalformedMessage("text", "must not be set in a session with trained prompts")
        hashes = self.page_hashes(control.text)
        if len(hashes) * self.identity.prefix_page_tokens > control.max_tokens:
            raise MalformedMessage("text", "has more tokens than the session reserves")
        if not self.identity.prefix_page_tokens:
            return None
        salt = salt_of(control.tenant, blocks, _adapter(control), long_factors=control.long_factors)
        return ExpectedText(salt, hashes, control.text.num_tokens)

    def sampler(self, control: pb.Open) -> SessionSampler:
        """Makes the sampler that chooses a session's tokens. May take long, and may run in any thread."""
        return SessionSampler.read(
            control.sampler,
            self.shared.draft_model,
            vocab_size=self.identity.vocab_size,
            max_tokens=control.max_tokens,
            grammars=self.shared.grammars,
        )

    def page_hashes(self, text: pb.ExpectedText) -> tuple[bytes, ...]:
        """The digests of a text's whole pages, one by one."""
        hashes = text.page_hashes
        num_pages, rest = divmod(len(hashes), HASH_BYTES)
        if rest or num_pages * self.identity.prefix_page_tokens > text.num_tokens:
            raise MalformedMessage("text", f"must have {HASH_BYTES} bytes for each page that its tokens fill")
        return tuple(hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES))

    def _prompts(self, control: pb.Open | pb.Handover, payload: Buffer, num_blocks: int) -> BlockPrompts | None:
        if control.HasField("block_prompts"):
            identity = self.identity
            return BlockPrompts.read(control.block_prompts, payload, num_blocks, identity.dtype, identity.hidden_size)
        if payload:
            raise MalformedMessage("payload", "must be empty, because no field of the frame describes it")
        return None

    def _blocks(self, span: common_pb2.BlockSpan) -> Span:
        start, end = span.start, span.end
        if start >= end or not self.identity.span.covers(blocks := Span(start, end)):
            raise MalformedMessage("blocks", "must be within the span of this server")
        return blocks

    def step_blocks(self, step: pb.Step, peer: Peer) -> Span:
        """Returns the blocks that a step computes here, after checking that the step is for this server.

        Raises:
            HopSessionLost: the step is for an earlier server at this address, which held the session and other blocks.
        """
        span, held, route = step.blocks, self.identity.span, step.route
        if span.end > held.end or span.start < held.start:
            raise HopSessionLost("this server holds other blocks")
        blocks = self._blocks(span)
        if route and route[0].span.start != blocks.end:
            raise MalformedMessage("route", "must begin with the block after this hop's last one")
        if peer.client_id and step.client_id != peer.client_id:
            raise MalformedMessage("client_id", "must be the one of this stream")
        if step.HasField("ring"):
            self._ring(step)
        return blocks

    def _ring(self, step: pb.Step) -> None:
        ring = step.ring
        if not step.samples or not ring.first_address or step.scratch_hops:
            raise MalformedMessage("ring", "must name the first hop, and the last hop of the step must choose tokens")
        if ring.microbatch:
            if step.client_id or any(len(row.client_id) != ID_BYTES for row in step.rows):
                raise MalformedMessage("client_id", "must be set in each row of a microbatch, and only there")
            return
        has_results = [row.num_result_tokens > 0 for row in step.rows]
        if not step.client_id or not ring.max_step_tokens or has_results != [True]:
            raise MalformedMessage("ring", "must begin with one row with results, a client_id and max_step_tokens")

    def next_rows(self, message: pb.Next, peer: Peer) -> None:
        """Checks a Next: rows that a last hop sends to this first hop."""
        if peer.client_id:
            raise MalformedMessage("next", "must be sent by a last hop to a first hop")
        if self.identity.span.start != 0:
            raise HopSessionLost("this server holds other blocks")
        for row in message.rows:
            if len(row.client_id) != ID_BYTES or row.source_session_id or row.scratch_session_id:
                raise MalformedMessage("client_id", "must be set in each row, and no other session's id")
            if row.HasField("readout"):
                raise MalformedMessage("readout", "must be in a prompt's steps only, which the client sends")
            if not 1 <= row.num_tokens == row.num_result_tokens == len(row.token_ids) <= MAX_VERIFIED_TOKENS:
                raise MalformedMessage("rows", "must have one id for each token, and a result for each token")
        self._token_ids(message.rows)

    def inputs(self, step: pb.Step, payload: Buffer, num_tokens: int) -> None:
        """Checks the inputs of a step: hidden states of its rows or, for block 0, their token ids."""
        identity = self.identity
        if step.samples and not step.route and step.blocks.end != identity.num_model_blocks:
            raise MalformedMessage("samples", "must be sent to the last hop only, which chooses the tokens")
        self._results(step)
        if step.dtype != pb.TENSOR_TYPE_UNSPECIFIED:
            if step.dtype != identity.dtype or step.hidden_size != identity.hidden_size:
                raise MalformedMessage("dtype", "dtype and hidden size must be those of the model")
            check_payload(payload, step.dtype, num_tokens, step.hidden_size)
            return
        if step.blocks.start != 0 or len(payload) or any(len(row.token_ids) != row.num_tokens for row in step.rows):
            raise MalformedMessage("rows", "must have hidden states or, for block 0, one id for each token")
        self._token_ids(step.rows)

    def _token_ids(self, rows: Iterable[pb.StepRow]) -> None:
        """Checks ids and positions of rows that have an id for each token."""
        identity = self.identity
        for row in rows:
            if max(row.token_ids) >= identity.vocab_size:
                raise MalformedMessage("token_ids", f"must be ids below {identity.vocab_size}")
            if row.position + row.num_tokens > identity.context_length:
                raise MalformedMessage("position", f"the model's context has {identity.context_length} tokens")

    def _results(self, step: pb.Step) -> None:
        """Checks what the rows of a step ask of the last hop."""
        samples, has_states = step.samples, step.dtype != pb.TENSOR_TYPE_UNSPECIFIED
        for row in step.rows:
            if row.HasField("readout"):
                if not samples:
                    raise MalformedMessage("readout", "must be in a step whose last hop chooses tokens")
                readouts.check(row.readout, row.num_tokens, self.identity.vocab_size)
            num_result_tokens = row.num_result_tokens if samples else 0
            if num_result_tokens > MAX_VERIFIED_TOKENS:
                raise MalformedMessage("rows", f"at most {MAX_VERIFIED_TOKENS} tokens of a row are checked in one step")
            if num_result_tokens > 1:
                if len(row.token_ids) != row.num_tokens:
                    raise MalformedMessage("rows", "must have the id of each token if draft tokens are checked")
            elif has_states and row.token_ids:
                raise MalformedMessage("rows", "must not have both ids and hidden states unless drafts are checked")

    def resent(self, step: pb.Step) -> None:
        """Checks a request to send boundary activations again."""
        if not step.route:
            raise MalformedMessage("route", "must name the hop to send to")
        if step.samples or any(row.token_ids or row.num_result_tokens for row in step.rows):
            raise MalformedMessage("rows", "must not ask for results when boundary activations are sent again")

    def rows(self, step: pb.Step) -> "CheckedRows":
        """Checks the rows of a step, whatever they bring."""
        session_ids: set[bytes] = set()
        num_tokens, are_next = 0, True
        for row in step.rows:
            num_row_tokens, num_result_tokens = row.num_tokens, row.num_result_tokens
            if num_row_tokens == 0 or num_result_tokens > num_row_tokens:
                raise MalformedMessage("rows", "must have at least one token each, and no more results than tokens")
            session_ids.add(row.session_id)
            num_tokens += num_row_tokens
            are_next = are_next and (num_row_tokens == 1 or is_decode(row))
        if not session_ids or len(session_ids) != len(step.rows):
            raise MalformedMessage("rows", "must be at least one, and at most one for each session")
        if len(step.span_id) not in (0, _SPAN_ID_BYTES):
            raise MalformedMessage("span_id", "must have eight bytes")
        if num_tokens > self.identity.max_tokens_per_frame:
            raise MalformedMessage("rows", f"must have at most {self.identity.max_tokens_per_frame} tokens together")
        return CheckedRows(num_tokens, frozenset(session_ids), are_next)

    def scratch_ids(self, step: pb.Step) -> frozenset[bytes]:
        """The ids of the scratch sessions in which the rows of a step run here."""
        if any(row.source_session_id for row in step.rows):
            raise MalformedMessage("rows", "must have no source_session_id in a scratch session")
        session_ids = frozenset([row.scratch_session_id for row in step.rows])
        if len(session_ids) != len(step.rows):
            raise MalformedMessage("rows", "must all run in different sessions")
        return session_ids


class CheckedRows(NamedTuple):
    """What was found while the rows of a step were checked.

    Attributes:
        num_tokens: the number of tokens that they have together.
        session_ids: the ids of their sessions.
        is_decode: whether each row is a next token, with or without draft tokens to check, and not a chunk of a prompt.
    """

    num_tokens: int
    session_ids: frozenset[bytes]
    is_decode: bool


def _adapter(control: pb.Open | pb.Handover) -> AdapterVersion | None:
    if not control.HasField("adapter"):
        return None
    try:
        return AdapterVersion.from_proto(control.adapter)
    except ValueError as failure:
        raise MalformedMessage("adapter", str(failure)) from None


def _trace(control: pb.Open, peer: Peer) -> TraceParent | None:
    """The trace of the session's request; None if this process does not collect spans, or the trace is not sampled.

    Traces from a library are ignored: the library runs in a tenant's process, which must not fill the operator's
    collector.
    """
    if not control.HasField("trace") or not spans.is_collected():
        return None
    if peer.workload is not None and peer.workload.role is Role.LIBRARY:
        return None
    parent = trace_parent({PARENT_HEADER: control.trace.parent, STATE_HEADER: control.trace.state})
    return parent if parent is not None and parent.is_sampled else None


def is_decode(row: pb.StepRow) -> bool:
    """A row is a next token, with or without draft tokens to check, rather than a chunk of a prompt."""
    return row.num_tokens == 1 or row.num_tokens == row.num_result_tokens <= MAX_VERIFIED_TOKENS
