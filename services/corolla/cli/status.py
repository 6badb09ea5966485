"""`corolla status`: shows which server holds which blocks."""

import json
import sys

from corolla.cli.control_channel import router_stub
from corolla.cli.placement_table import placement_facts, placement_table, uncovered_text
from corolla.v1 import router_pb2

_TIMEOUT_S = 5.0


def run_status(router: str, model: str, *, as_json: bool) -> int:
    """Prints the placement. Returns 1 when a block has no ready server, else 0."""
    with router_stub(router) as stub:
        placement = stub.GetPlacement(router_pb2.GetPlacementRequest(model=model), timeout=_TIMEOUT_S)
        count = router_pb2.CountSessionRecordsRequest(model=placement.model)
        num_sessions = stub.CountSessionRecords(count, timeout=_TIMEOUT_S).num_sessions
    if as_json:
        sys.stdout.write(json.dumps(placement_facts(placement, num_sessions)) + "\n")
    else:
        from rich.console import Console

        console = Console(highlight=False)
        console.print(placement_table(placement, num_sessions))
        if placement.uncovered or not placement.servers:
            console.print(uncovered_text(placement), style="bold red")
    return 1 if placement.uncovered or not placement.servers else 0
