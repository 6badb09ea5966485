"""Which block server of a local stack gets which span."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.chassis.errors import SettingsError
from corolla.local.options import StackOptions, server_blocks, server_devices
from corolla.local.ports import Ports, is_free
from corolla.local.processes import block_server_process


def options(**given: object) -> StackOptions:
    return StackOptions(log_folder=Path("/unused"), **given)  # type: ignore[arg-type]


@given(st.integers(1, 130), st.data())
def test_parts_are_even_and_leave_nothing_out(num_blocks: int, data: st.DataObject) -> None:
    num_servers = data.draw(st.integers(1, num_blocks))
    spans = [tuple(map(int, span.split(":"))) for span in server_blocks(options(num_servers=num_servers), num_blocks)]
    assert len(spans) == num_servers
    assert [block for start, end in spans for block in range(start, end)] == list(range(num_blocks))
    lengths = [end - start for start, end in spans]
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 130), st.floats(0, 200), st.data())
def test_the_server_of_the_head_has_as_much_work_as_the_others(
    num_blocks: int, head_blocks: float, data: st.DataObject
) -> None:
    num_servers = data.draw(st.integers(1, num_blocks))
    given_spans = server_blocks(options(num_servers=num_servers), num_blocks, head_blocks)
    spans = [tuple(map(int, span.split(":"))) for span in given_spans]
    assert len(spans) == num_servers
    assert [block for start, end in spans for block in range(start, end)] == list(range(num_blocks))
    *others, last = [end - start for start, end in spans]
    part = (num_blocks + head_blocks) / num_servers
    assert all(each <= part + 1 for each in others)
    assert last == 1 or last + head_blocks <= part + 1


def test_given_spans_are_kept_and_may_overlap() -> None:
    assert server_blocks(options(blocks="0:10, 5:30,0:30"), 30) == ["0:10", "5:30", "0:30"]


def test_auto_asks_the_router() -> None:
    assert server_blocks(options(blocks="auto", num_servers=3), 30) == ["auto"] * 3


def test_a_shared_stack_may_begin_with_a_part_and_lets_its_servers_move() -> None:
    assert server_blocks(options(blocks="0:10", shared_host="192.168.1.10"), 30) == ["0:10"]
    assert server_blocks(options(shared_host="192.168.1.10", num_servers=2), 30) == ["auto"] * 2
    with pytest.raises(SettingsError, match="'0:31'"):
        server_blocks(options(blocks="0:31", shared_host="192.168.1.10"), 30)


def test_servers_of_a_shared_stack_have_ports_that_a_firewall_can_name() -> None:
    ports, shared = Ports(), options(shared_host="127.0.0.1")
    addresses = [block_server_process(shared, number, "auto", 15, ports).address for number in (1, 2)]
    taken = {"127.0.0.1:50052", "127.0.0.1:50060"} - set(addresses)
    assert all(not is_free(int(each.rpartition(":")[2]), "0.0.0.0") for each in taken)
    ports.close()


@pytest.mark.parametrize(
    "blocks, complaint",
    [
        ("0:10,12:30", "block 10"), ("0:31", "'0:31'"), ("0:10,10", "'10'"), ("10:0,0:30", "'10:0'"), ("a:b", "'a:b'"),
        ("0:30,", "''"), ("-1:30", "'-1:30'"),
    ],
)  # fmt: skip
def test_other_spans_are_refused(blocks: str, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        server_blocks(options(blocks=blocks), 30)


def test_more_servers_than_blocks_are_refused() -> None:
    with pytest.raises(SettingsError, match="31 servers"):
        server_blocks(options(num_servers=31), 30)


@pytest.mark.parametrize(
    "device, num_devices, num_servers", [("cpu", 0, 2), ("cuda", 1, 1), ("cuda", 3, 3), ("cuda", 64, 30)]
)
def test_each_device_gets_a_server(device: str, num_devices: int, num_servers: int) -> None:
    assert len(server_blocks(options(device=device), 30, num_devices=num_devices)) == num_servers


@pytest.mark.parametrize(
    "device, num_devices, expected",
    [
        ("cpu", 0, ["cpu", "cpu", "cpu"]),
        ("cuda", 1, ["cuda:0", "cuda:0", "cuda:0"]),
        ("cuda", 2, ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda:1", 0, ["cuda:1", "cuda:1", "cuda:1"]),
    ],
)
def test_servers_take_the_devices_in_turn(device: str, num_devices: int, expected: list[str]) -> None:
    assert server_devices(options(device=device), 3, num_devices) == expected


@pytest.mark.parametrize(
    "device, dtype, expected", [("cpu", None, "float32"), ("cuda", None, "bfloat16"), ("cuda", "float16", "float16")]
)
def test_gpus_compute_with_bfloat16_unless_another_dtype_is_given(
    device: str, dtype: str | None, expected: str
) -> None:
    assert options(device=device, dtype=dtype).dtype_name == expected


@pytest.mark.parametrize("device, is_forked", [("cpu", True), ("cuda:0", False)])
def test_servers_on_a_gpu_start_an_interpreter_of_their_own(device: str, is_forked: bool) -> None:
    with_device = options(device=device)
    server = block_server_process(with_device, 1, "0:30", 30, Ports(), device=device)
    assert server.is_forked is is_forked
    assert "--kv-cache-mib" not in server.arguments


def test_servers_that_share_a_gpu_do_not_take_all_of_its_memory() -> None:
    shared = block_server_process(options(device="cuda"), 1, "0:15", 15, Ports(), device="cuda:0", shares_device=True)
    assert shared.arguments[-2:] == ("--kv-cache-mib", "1024")
