"""`corolla status`."""

import json
import sys

import grpc

from corolla.chassis.errors import RouterUnavailable
from corolla.cli.control_channel import open_control_channel
from corolla.cli.placement_table import placement_facts, placement_table, uncovered_text
from corolla.sdk.transport import error_of
from corolla.v1 import router_pb2
from corolla.v1.router_pb2_grpc import RouterServiceStub

_TIMEOUT_S = 5.0


def run_status(router: str, model: str, *, as_json: bool) -> int:
    """Prints the placement. Returns 1 when a block has no ready server, else 0."""
    with open_control_channel(router) as channel:
        stub = RouterServiceStub(channel)
        try:
            placement = stub.GetPlacement(router_pb2.GetPlacementRequest(model=model), timeout=_TIMEOUT_S)
            count = router_pb2.CountSessionRecordsRequest(model=placement.model)
            num_sessions = stub.CountSessionRecords(count, timeout=_TIMEOUT_S).num_sessions
        except grpc.RpcError as failure:
            error = error_of(failure, router)
            if error.reason == "SERVICE_UNAVAILABLE":
                raise RouterUnavailable(f"no router answers at {router}") from None
            raise error from None
    if as_json:
        sys.stdout.write(json.dumps(placement_facts(placement, num_sessions)) + "\n")
    else:
        from rich.console import Console

        console = Console(highlight=False)
        console.print(placement_table(placement, num_sessions))
        if placement.uncovered or not placement.servers:
            console.print(uncovered_text(placement), style="bold red")
    return 1 if placement.uncovered or not placement.servers else 0
