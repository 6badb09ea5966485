"""Sends what an iteration computed: outputs to next hops and clients, faults for rows without an output."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from corolla.block_server.batch_executor import BatchResult, error_of
from corolla.block_server.boundary_activations import BoundaryActivations
from corolla.block_server.peers import PeerTable, StepFaults, rows_by_client, step_fault
from corolla.block_server.relay import Relay
from corolla.block_server.ring.last_hop import LastHop, RowChoice
from corolla.block_server.row_sampling import ChosenTokens
from corolla.block_server.step_admission import AdmittedStep, StepWork
from corolla.chassis import failpoints
from corolla.chassis.errors import CorollaError, HopSessionLost, NonFiniteOutput
from corolla.chassis.handlers import call_path
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer
from corolla.wire.tensors import tensor_type, to_payload

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Delivery:
    """Sends the outputs of an iteration to the next hops, the first hop or the clients of its steps."""

    outputs: BoundaryActivations
    peers: PeerTable
    relay: Relay
    last_hop: LastHop
    faults: StepFaults

    def prepare(self, admitted: Sequence[AdmittedStep]) -> None:
        """Makes the messages to next hops while a device computes the outputs."""
        for batch in admitted:
            if batch.work.step.route:
                batch.onward = _onward(batch.work.step, [row for row, _, _ in batch.rows])

    def deliver(self, admitted: list[AdmittedStep], result: BatchResult) -> int:
        """Sends outputs on, and faults to the clients whose rows have none.

        Returns:
            The number of rows that failed, without those whose output was computed but not finite.
        """
        outputs = iter(result.outputs)
        num_undelivered = 0
        for batch in admitted:
            parts: list[torch.Tensor] = []
            chosen: list[RowChoice] = []
            rows: list[pb.StepRow] = []
            kept: set[bytes] = set()
            failed: dict[str, tuple[CorollaError, list[pb.StepRow]]] = {}
            for row, session, _ in batch.rows:
                output = next(outputs)
                if isinstance(output, CorollaError):
                    failed.setdefault(output.reason, (output, []))[1].append(row)
                    num_undelivered += not isinstance(output, NonFiniteOutput)
                    continue
                rows.append(row)
                if isinstance(output, ChosenTokens):
                    chosen.append((row, session, output))
                    continue
                parts.append(output)
                if session.request.keep_activations:
                    kept.add(row.session_id)
            for error, failed_rows in failed.values():
                self.faults.send(batch.work.step, error, failed_rows, batch.work.sender)
            if not rows:
                self.relay.give_up(batch.work.step)
                continue
            failpoints.passed("before_send")
            try:
                if batch.samples:
                    self._send_tokens(batch.work, chosen)
                else:
                    self._send_on(batch, rows, parts, kept)
            except Exception as failure:
                # The output is copied from its device only now, and that may fail.
                log.error("could not send the output of a step", extra={"where": call_path(failure)})
                self.faults.send(batch.work.step, error_of(failure), rows, batch.work.sender)
                self.relay.give_up(batch.work.step)
                num_undelivered += len(rows)
            failpoints.passed("after_send")
        return num_undelivered

    def _send_tokens(self, work: StepWork, chosen: list[RowChoice]) -> None:
        """Sends the rows of the next steps to the first hop, which waits for them, and then tokens to the clients."""
        step = work.step
        sampled = {id(row): choice.sampled for row, _, choice in chosen}
        if step.HasField("ring"):
            self.last_hop.send_next(step, self.last_hop.next_rows(chosen))
        for client_id, rows in rows_by_client(step, [row for row, _, _ in chosen]).items():
            result = pb.Result(step_id=step.step_id, rows=rows, sampled=[sampled[id(row)] for row in rows])
            self._answer(work, client_id, result)

    def _send_on(
        self, batch: AdmittedStep, rows: list[pb.StepRow], parts: list[torch.Tensor], kept: set[bytes]
    ) -> None:
        work, step, route = batch.work, batch.work.step, batch.work.step.route
        dtype, hidden_size = tensor_type(parts[0].dtype), parts[0].shape[1]
        if kept or route:
            payload = _joined(parts)
        if route:
            onward = batch.onward
            if onward is None or len(rows) < len(onward.rows):
                onward = _onward(step, rows)
            onward.dtype, onward.hidden_size = dtype, hidden_size
            self.relay.send(route[0].address, onward, payload)
        else:
            result = pb.Result(step_id=step.step_id, rows=rows, dtype=dtype, hidden_size=hidden_size)
            wanted = [part[len(part) - row.num_result_tokens :] for part, row in zip(parts, rows, strict=True)]
            self._answer(work, step.client_id, result, _joined(wanted))
        if kept:
            self._keep(rows, payload, kept)

    def _answer(self, work: StepWork, client_id: bytes, result: pb.Result, payload: Buffer = b"") -> None:
        """Sends a result to a client, over the client's own stream to this last hop."""
        for row in result.rows:
            row.ClearField("token_ids")
            row.ClearField("client_id")
            row.ClearField("readout")
        peer = self.peers.get(client_id)
        if peer is not None:
            peer.send(result, payload)
        elif work.sender is not None:
            error = HopSessionLost("the last hop has no stream from the client")
            work.sender.send(step_fault(work.step, error, result.rows, client_id))

    def _keep(self, rows: list[pb.StepRow], payload: Buffer, kept: set[bytes]) -> None:
        """Keeps the outputs of the sessions in `kept`; those for which a scratch session ran are not among them."""
        row_bytes = len(payload) // sum(row.num_tokens for row in rows)
        start = 0
        for row in rows:
            end = start + row.num_tokens * row_bytes
            if row.session_id in kept:
                self.outputs.append(row.session_id, row.position, row.num_tokens, bytes(payload[start:end]))
            start = end


def onward_step(step: pb.Step) -> pb.Step:
    """Returns a copy of a step for the next hop of its route, with that hop's blocks and the hops after it."""
    onward = pb.Step()
    onward.CopyFrom(step)
    onward.blocks.CopyFrom(step.route[0].span)
    del onward.route[0]
    return onward


def _onward(step: pb.Step, rows: Sequence[pb.StepRow]) -> pb.Step:
    """Returns the message with some rows of a step for the next hop, without the type and size of hidden states."""
    onward = onward_step(step)
    if len(rows) < len(onward.rows):
        del onward.rows[:]
        onward.rows.extend(rows)
    for row in onward.rows:
        # After the first hop, only draft tokens are needed: the last hop compares its choices with them.
        if row.token_ids and not (step.samples and row.num_result_tokens > 1):
            row.ClearField("token_ids")
    onward.scratch_hops >>= 1
    return onward


def _joined(parts: list[torch.Tensor]) -> memoryview:
    return to_payload(parts[0] if len(parts) == 1 else torch.cat(parts))
