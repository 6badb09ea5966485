"""What goes on to the next hop if the message was made before the outputs."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from prometheus_client import CollectorRegistry

from corolla.block_server.batch_executor import BatchResult
from corolla.block_server.boundary_activations import BoundaryActivations
from corolla.block_server.delivery import Delivery
from corolla.block_server.metrics import BlockServerMetrics
from corolla.block_server.peers import PeerTable, StepFaults
from corolla.block_server.step_admission import AdmittedStep, StepWork
from corolla.chassis.errors import NonFiniteOutput
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.frames import Buffer

SESSION = SimpleNamespace(request=SimpleNamespace(keep_activations=False))


def admitted_step() -> AdmittedStep:
    """A step of two rows with token ids, for this hop and another one."""
    rows = [pb.StepRow(session_id=name, num_tokens=1, num_result_tokens=1, token_ids=[7]) for name in (b"a", b"b")]
    step = pb.Step(rows=rows, samples=True, client_id=b"c", blocks=common_pb2.BlockSpan(start=0, end=2))
    step.route.add(address="next:1", span=common_pb2.BlockSpan(start=2, end=4))
    return AdmittedStep(StepWork(step, b"", None), [(row, cast(Any, SESSION), 0) for row in step.rows])


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("names", [[b"a", b"b"], [b"b"]])
def test_rows_with_an_output_go_on_without_ids_and_their_step_stays_as_it_was(
    names: list[bytes], is_prepared: bool
) -> None:
    sent: list[tuple[str, pb.Step, bytes]] = []

    class Links:
        def send(self, address: str, step: pb.Step, payload: Buffer) -> None:
            sent.append((address, step, bytes(payload)))

    delivery = Delivery(
        BoundaryActivations(0),
        PeerTable(),
        cast(Any, Links()),
        cast(Any, None),
        StepFaults(PeerTable(), BlockServerMetrics(CollectorRegistry()).faults),
    )
    admitted = admitted_step()
    outputs = {b"a": torch.ones(1, 3), b"b": torch.full((1, 3), 2.0)}
    if is_prepared:
        delivery.prepare([admitted])
    found = [outputs[name] if name in names else NonFiniteOutput("not finite") for name in (b"a", b"b")]
    assert delivery.deliver([admitted], BatchResult(tuple(found))) == 0
    ((address, onward, payload),) = sent
    assert address == "next:1"
    assert [(row.session_id, list(row.token_ids)) for row in onward.rows] == [(name, []) for name in names]
    assert (onward.blocks.start, len(onward.route), onward.hidden_size) == (2, 0, 3)
    assert payload == torch.cat([outputs[name] for name in names]).numpy().tobytes()
    assert all(list(row.token_ids) == [7] for row in admitted.work.step.rows), "a step may be computed again"
