"""Shows a placement as a table, or as facts for programs; `corolla status` does it for the placement of a router."""

import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from corolla.cli.control_channel import router_stub
from corolla.planning.losses import lacks, loss_seconds
from corolla.planning.standbys import Lack
from corolla.v1 import router_pb2
from corolla.v1.router_pb2_grpc import RouterServiceStub
from corolla.wire.span import Span

_TIMEOUT_S = 5.0
_STATES = {
    router_pb2.SERVER_STATE_JOINING: ("joining", "yellow"),
    router_pb2.SERVER_STATE_READY: ("ready", "green"),
    router_pb2.SERVER_STATE_DRAINING: ("draining", "magenta"),
}
_LOADS = (
    "num_sessions", "num_pages", "num_free_pages", "num_queued_steps", "decode_step_seconds", "num_tokens_at_risk",
    "start_share", "start_seconds_left", "standby_bytes", "standby_state_bytes",
)  # fmt: skip
_BAR_WIDTH = 50
_LACKS = {
    Lack.SERVER: "none for {}: no other server has these blocks",
    Lack.NUMERICS: "none for {}: the others have other numerics",
    Lack.ROOM: "none for {}: the others have no room",
    Lack.NODE: "only on the same node for {}",
}
_LEAST_S = 0.05
"""A loss that costs less is not worth a line."""
_NUMERICS_CHARS = 8
"""So much of the digest for the blocks is enough to tell servers apart; the digest for the head is not shown."""


def run_status(router: str, model: str, *, as_json: bool) -> int:
    """Prints the placement. Returns 1 when a block has no ready server, else 0."""
    with router_stub(router) as stub:
        placement = stub.GetPlacement(router_pb2.GetPlacementRequest(model=model), timeout=_TIMEOUT_S)
        num_sessions = _num_sessions(stub, placement.model)
    is_covered = bool(placement.servers) and not placement.uncovered
    if as_json:
        sys.stdout.write(json.dumps(placement_facts(placement, num_sessions)) + "\n")
    else:
        console = Console(highlight=False)
        console.print(placement_table(placement, num_sessions))
        console.print(*loss_lines(placement), sep="\n")
        if not is_covered:
            console.print(uncovered_text(placement), style="bold red")
    return 0 if is_covered else 1


def placement_table(placement: router_pb2.Placement, num_sessions: int | None = None) -> RenderableType:
    """A table of servers with their spans, a bar with the number of ready servers of each block, and the dtypes.

    All of it fits 80 columns: dtypes stand below the table, since the dtype of a GGUF file takes half a line.
    """
    table = Table(
        title=_title(placement, num_sessions),
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    # A long name continues in the next line and is not cut off.
    table.add_column("server", overflow="fold")
    table.add_column("state", no_wrap=True)
    for heading in ("blocks", "sessions", "free pages", "step"):
        table.add_column(heading, justify="right", no_wrap=True)
    for placed in _in_order(placement):
        state, colour = _STATES.get(placed.state, ("unknown", "red"))
        load = placed.load
        table.add_row(
            placed.server.address,
            Text(state + progress_text(load), style=colour),
            f"{placed.span.start}:{placed.span.end}",
            str(load.num_sessions),
            f"{load.num_free_pages}/{load.num_pages}" if load.num_pages else "",
            f"{load.decode_step_seconds * 1000:.1f} ms" if load.decode_step_seconds else "",
        )
    lines = _grouped(placement, "dtype", lambda placed: placed.server.dtype)
    lines += _grouped(placement, "numerics", lambda placed: placed.load.numerics[:_NUMERICS_CHARS])
    lines += _grouped(placement, "kernels", lambda placed: placed.load.kernels)
    lines += [
        _line("spare", f"{placed.server.address} also keeps {', '.join(spares)}")
        for placed in _in_order(placement)
        if (spares := [f"{each.start}:{each.end}" for each in placed.load.spare_spans])
    ]
    lines += [
        _line("copies", f"{placed.server.address} gave standbys {_mib(placed.load.standby_bytes)}, "
              f"{_mib(placed.load.standby_state_bytes)} of it states")
        for placed in _in_order(placement)
        if placed.load.standby_bytes
    ]  # fmt: skip
    lines += [_line("apart", f"{one} and {other} do not reach each other") for one, other in apart(placement)]
    return Group(table, _coverage(placement), *lines)


def progress_text(load: router_pb2.ServerLoad) -> str:
    """How far a server that joins has come, as ` 43 %, 12 s`; empty if that is not known."""
    if not load.start_share:
        return ""
    left = f", {math.ceil(load.start_seconds_left)} s" if load.start_seconds_left else ""
    return f" {math.floor(100 * load.start_share)} %{left}"


def apart(placement: router_pb2.Placement) -> list[tuple[str, str]]:
    """The pairs of addresses that do not reach each other, each once."""
    placed = {each.server.address for each in placement.servers}
    pairs = {
        (min(pair), max(pair))
        for each in placement.servers
        for pair in ((each.server.address, other) for other in each.load.unreachable)
        if placed.issuperset(pair)
    }
    return sorted(pairs)


def placement_facts(placement: router_pb2.Placement, num_sessions: int | None) -> dict[str, Any]:
    """The facts that `corolla status --json` prints. `loss_seconds` is null where a block has no other server."""
    seconds, lacking = loss_seconds(placement.servers), lacks(placement.servers)
    return {
        "model": placement.model,
        "version": placement.version,
        "num_blocks": placement.num_model_blocks,
        "num_sessions": num_sessions,
        "uncovered": [[span.start, span.end] for span in placement.uncovered],
        "apart": [list(pair) for pair in apart(placement)],
        "without_standby": [[span.start, span.end] for span in _by_span(placement, lacking)],
        "servers": [
            {
                "server_id": placed.server.server_id,
                "address": placed.server.address,
                "span": [placed.span.start, placed.span.end],
                "state": _STATES.get(placed.state, ("unknown", ""))[0],
                "dtype": placed.server.dtype,
                "numerics": placed.load.numerics,
                "kernels": placed.load.kernels,
                "fingerprint": placed.server.fingerprint,
                **{name: getattr(placed.load, name) for name in _LOADS},
                "spare_spans": [[span.start, span.end] for span in placed.load.spare_spans],
                "loss_seconds": _finite(seconds.get(placed.server.server_id)),
                "lacks_standby": lacking.get(placed.server.server_id),
            }
            for placed in _in_order(placement)
        ],
    }


def uncovered_text(placement: router_pb2.Placement) -> str:
    """A sentence that names the blocks without a ready server."""
    if not placement.servers:
        return "No block server has registered this model; start one with `corolla block-server`, or correct --model."
    spans = ", ".join(f"{span.start}:{span.end}" for span in placement.uncovered)
    return f"Blocks {spans} have no ready server; start one with `corolla block-server --blocks start:end`."


def loss_lines(placement: router_pb2.Placement) -> list[Text]:
    """The lines about standbys, and about servers whose loss would cost their sessions time."""
    spans: dict[Lack, list[str]] = {}
    for span, lack in _by_span(placement, lacks(placement.servers)).items():
        spans.setdefault(lack, []).append(str(span))
    lines = [_line("standby", _LACKS[lack].format(", ".join(names))) for lack, names in spans.items()]
    addresses = {each.server.server_id: each.server.address for each in placement.servers}
    costs = sorted(loss_seconds(placement.servers).items(), key=lambda cost: -cost[1])
    endless = [addresses[server_id] for server_id, seconds in costs if math.isinf(seconds)]
    dear = [
        f"{seconds:.1f} s for {addresses[server_id]}" for server_id, seconds in costs if _LEAST_S <= seconds < math.inf
    ]
    if endless:
        lines.append(_line("loss", f"sessions of {', '.join(endless)} would wait for a new server"))
    if dear:
        lines.append(_line("loss", ", ".join(dear)))
    return lines


def _by_span(placement: router_pb2.Placement, lacking: Mapping[str, Lack]) -> dict[Span, Lack]:
    """Maps each span that has a server without a standby to what that server lacks first."""
    found: dict[Span, Lack] = {}
    for placed in _in_order(placement):
        if (lack := lacking.get(placed.server.server_id)) is not None:
            span = Span.from_message(placed.span)
            found[span] = min(lack, found.get(span, lack), key=list(Lack).index)
    return found


def _finite(seconds: float | None) -> float | None:
    return None if seconds is None or math.isinf(seconds) else seconds


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.1f} MiB"


def _line(heading: str, text: str) -> Text:
    return Text.assemble((f"{heading:9}", "dim"), text)


def _num_sessions(stub: RouterServiceStub, model: str) -> int | None:
    """The number of stored sessions; None on a machine that joined as a block server, which may not count them."""
    try:
        count = router_pb2.CountSessionRecordsRequest(model=model)
        return stub.CountSessionRecords(count, timeout=_TIMEOUT_S).num_sessions
    except grpc.RpcError as failure:
        if isinstance(failure, grpc.Call) and failure.code() is grpc.StatusCode.PERMISSION_DENIED:
            return None
        raise


def _title(placement: router_pb2.Placement, num_sessions: int | None) -> str:
    sessions = "" if num_sessions is None else f", {num_sessions} session{'' if num_sessions == 1 else 's'}"
    return f"{placement.model or 'no model yet'}: {placement.num_model_blocks} blocks{sessions}"


def _in_order(placement: router_pb2.Placement) -> list[router_pb2.PlacedServer]:
    return sorted(placement.servers, key=lambda placed: (placed.span.start, placed.span.end, placed.server.address))


def _grouped(
    placement: router_pb2.Placement, heading: str, fact_of: Callable[[router_pb2.PlacedServer], str]
) -> list[Text]:
    """The lines about a fact: one line if it is the same of all servers, else one for each value with its servers."""
    addresses: dict[str, list[str]] = {}
    for placed in _in_order(placement):
        addresses.setdefault(fact_of(placed) or "not known", []).append(placed.server.address)
    if addresses.keys() == {"not known"}:
        return []
    if len(addresses) == 1:
        return [_line(heading, fact) for fact in addresses]
    return [
        Text.assemble((f"{heading:9}", "dim"), fact, (f" on {', '.join(servers)}", "dim"))
        for fact, servers in addresses.items()
    ]


def _coverage(placement: router_pb2.Placement) -> Text:
    num_blocks = placement.num_model_blocks
    bar = Text("coverage ", style="dim")
    if not num_blocks:
        return bar
    replicas = [0] * num_blocks
    for placed in placement.servers:
        if placed.state == router_pb2.SERVER_STATE_READY:
            for block in range(placed.span.start, min(placed.span.end, num_blocks)):
                replicas[block] += 1
    # Each block has a cell. If there are more blocks than cells, a cell shows the fewest servers of several blocks.
    per_cell = -(-num_blocks // _BAR_WIDTH)
    for first in range(0, num_blocks, per_cell):
        fewest = min(replicas[first : first + per_cell])
        bar.append("·" if fewest == 0 else str(min(fewest, 9)), style="bold red" if fewest == 0 else "green")
    covered = sum(1 for count in replicas if count)
    bar.append(f" {covered} of {num_blocks} blocks", style="dim")
    return bar
