"""Ports of servers that are stopped."""

import socket

import pytest

from corolla.chassis.rpc_server import RpcServer


@pytest.mark.parametrize("has_started", [True, False])
async def test_a_server_that_is_stopped_lets_go_of_its_port(has_started: bool) -> None:
    server = RpcServer("127.0.0.1", 0, with_reflection=False)
    if has_started:
        await server.start()
    assert is_open(server.port)
    await server.stop(0)
    assert not is_open(server.port)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
