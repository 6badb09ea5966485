"""Records trace spans of the work for traced sessions: each chunk of a prompt, and some decode steps.

Each hop selects the decode steps that complete a run of `DECODE_RUN_TOKENS` positions. So all hops of a chain select
the same steps without a message.
"""

from collections.abc import Sequence
from typing import Final

from corolla.block_server.batch_executor import RowOutput
from corolla.block_server.frame_checks import is_decode
from corolla.block_server.step_admission import AdmittedStep
from corolla.chassis.errors import CorollaError
from corolla.chassis.tracing import spans
from corolla.v1 import blocks_pb2 as pb

DECODE_RUN_TOKENS: Final = 32
"""One decode step in a run of this many tokens has a span."""


class StepSpans:
    """Records trace spans of steps.

    Args:
        server_id, address: the id and address of this server.
    """

    def __init__(self, server_id: str, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._server: dict[str, spans.Fact] = {
            "corolla.server_id": server_id, "server.address": host, "server.port": int(port),
        }  # fmt: skip

    def record(self, admitted: Sequence[AdmittedStep], outputs: Sequence[RowOutput], seconds: float) -> None:
        """Records the spans of an iteration that has just ended.

        Args:
            outputs: the outputs of all rows, in order.
            seconds: how long the iteration took.
        """
        index = -1
        for batch in admitted:
            for row, session, _ in batch.rows:
                index += 1
                trace = session.request.trace
                if trace is None or not is_shown(batch.work.step, row):
                    continue
                output = outputs[index]
                attributes = {
                    **self._server,
                    "corolla.blocks": str(session.request.blocks),
                    "corolla.position": row.position,
                    "corolla.tokens": row.num_tokens,
                    "corolla.batch_rows": len(outputs),
                }
                failure = output if isinstance(output, CorollaError) else None
                name: spans.SpanName = "decode" if is_decode(row) else "prefill"
                spans.record(name, trace.at(batch.work.step.span_id), seconds, attributes, failure)


def is_shown(step: pb.Step, row: pb.StepRow) -> bool:
    """A row has a trace span: it is a chunk of a prompt, or begins a ring, or completes a run of tokens."""
    if step.span_id and (step.samples or not is_decode(row)):
        return True
    return row.position // DECODE_RUN_TOKENS != (row.position + row.num_tokens) // DECODE_RUN_TOKENS
