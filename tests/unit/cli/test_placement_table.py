"""A placement as people and programs see it."""

import json

from rich.console import Console

from corolla.cli.placement_table import loss_lines, placement_facts, placement_table, uncovered_text
from corolla.v1 import common_pb2, router_pb2


def placement(
    *servers: tuple[int, int, "router_pb2.ServerState.ValueType"], num_blocks: int = 30
) -> router_pb2.Placement:
    placed = [
        router_pb2.PlacedServer(
            server=router_pb2.ServerDescription(
                server_id=str(number), address=f"127.0.0.1:{20_000 + number}", dtype="float32",
                prefill_tokens_per_second=1000,
            ),
            span=common_pb2.BlockSpan(start=start, end=end),
            state=state,
            load=router_pb2.ServerLoad(num_sessions=number, num_pages=2184, num_free_pages=2000),
        )
        for number, (start, end, state) in enumerate(servers)
    ]  # fmt: skip
    return router_pb2.Placement(model="m", num_model_blocks=num_blocks, servers=placed)


def drawn(shown: router_pb2.Placement) -> str:
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(placement_table(shown, 2))
    return capture.get()


def test_the_table_fits_a_terminal_and_is_in_order_of_blocks() -> None:
    text = drawn(placement((15, 30, router_pb2.SERVER_STATE_READY), (0, 15, router_pb2.SERVER_STATE_READY)))
    assert "m: 30 blocks, 2 sessions" in text
    assert text.index("0:15") < text.index("15:30")
    assert "2000/2184" in text
    assert "…" not in text
    assert f"{'1' * 30} 30 of 30 blocks" in text


def test_what_standbys_got_is_shown() -> None:
    shown = placement((0, 15, router_pb2.SERVER_STATE_READY), (15, 30, router_pb2.SERVER_STATE_READY))
    assert "copies" not in drawn(shown)
    shown.servers[0].load.standby_bytes, shown.servers[0].load.standby_state_bytes = 3 << 20, 1 << 19
    assert "copies   127.0.0.1:20000 gave standbys 3.0 MiB, 0.5 MiB of it states" in drawn(shown)
    facts = placement_facts(shown, None)["servers"]
    assert [(each["standby_bytes"], each["standby_state_bytes"]) for each in facts] == [(3 << 20, 1 << 19), (0, 0)]


def test_only_ready_servers_cover() -> None:
    text = drawn(
        placement(
            (0, 20, router_pb2.SERVER_STATE_READY),
            (5, 10, router_pb2.SERVER_STATE_READY),
            (20, 30, router_pb2.SERVER_STATE_JOINING),
        )
    )
    assert f"{'1' * 5}{'2' * 5}{'1' * 10}{'·' * 10} 20 of 30 blocks" in text
    assert "joining" in text


def test_many_blocks_share_cells_that_show_the_worst() -> None:
    text = drawn(placement((0, 119, router_pb2.SERVER_STATE_READY), num_blocks=120))
    assert f"{'1' * 39}· 119 of 120 blocks" in text


def test_an_empty_placement_names_the_command_that_starts_a_server() -> None:
    empty = router_pb2.Placement()
    assert "no model yet" in drawn(empty)
    assert "corolla block-server" in uncovered_text(empty)


def test_uncovered_blocks_are_named() -> None:
    shown = placement((0, 20, router_pb2.SERVER_STATE_READY))
    shown.uncovered.add(start=20, end=30)
    assert "20:30" in uncovered_text(shown)
    facts = placement_facts(shown, 4)
    assert facts["uncovered"] == [[20, 30]]
    assert facts["num_sessions"] == 4
    assert facts["servers"][0]["span"] == [0, 20]
    assert facts["servers"][0]["state"] == "ready"


READY = router_pb2.SERVER_STATE_READY


def lines_of(shown: router_pb2.Placement) -> list[str]:
    return [line.plain for line in loss_lines(shown)]


def test_the_losses_name_spans_without_a_standby_and_what_servers_would_cost() -> None:
    shown = placement((0, 10, READY), (0, 10, READY), (10, 30, READY))
    shown.servers[1].load.num_tokens_at_risk = 250
    shown.servers[2].load.num_tokens_at_risk = 1
    assert lines_of(shown) == [
        "standby  only on the same node for 0:10",
        "standby  none for 10:30: no other server has these blocks",
        "loss     sessions of 127.0.0.1:20002 would wait for a new server",
        "loss     2.5 s for 127.0.0.1:20001",
    ]
    facts = placement_facts(shown, 4)
    assert facts["without_standby"] == [[0, 10], [10, 30]]
    assert [(each["loss_seconds"], each["lacks_standby"]) for each in facts["servers"]] == [
        (0.0, "node"), (2.5, "node"), (None, "server"),
    ]  # fmt: skip
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts


def test_nothing_is_said_of_losses_where_spans_have_standbys_and_no_session_runs() -> None:
    shown = placement((0, 30, READY), (0, 30, READY))
    shown.servers[0].server.address = "127.0.0.2:20000"
    assert lines_of(shown) == []


def test_a_server_that_joins_says_how_far_it_is_and_pairs_are_named_once() -> None:
    shown = placement((0, 10, READY), (10, 20, READY), (20, 30, router_pb2.SERVER_STATE_JOINING))
    one, other, joining = shown.servers
    joining.load.start_share, joining.load.start_seconds_left = 0.437, 11.2
    one.load.unreachable.append(other.server.address)
    one.load.spare_spans.add(start=10, end=20)
    one.load.spare_spans.add(start=20, end=30)
    other.load.unreachable.extend([one.server.address, "10.0.0.9:50052"])
    text = drawn(shown)
    assert "joining 43 %, 12 s" in text
    assert "…" not in text
    assert f"spare    {one.server.address} also keeps 10:20, 20:30" in text
    assert f"apart    {one.server.address} and {other.server.address} do not reach each other" in text
    facts = placement_facts(shown, 0)
    assert facts["apart"] == [[one.server.address, other.server.address]]
    assert facts["servers"][2]["start_share"] == 0.437
    assert facts["servers"][0]["spare_spans"] == [[10, 20], [20, 30]]
