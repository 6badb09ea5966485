"""Addresses as `host:port`, with brackets around addresses of IPv6."""

import pytest

from corolla.chassis.addresses import host_port, split_address


@pytest.mark.parametrize(
    "written, host, port",
    [
        ("192.168.1.10:50054", "192.168.1.10", 50054),
        ("first.machine:1", "first.machine", 1),
        ("[2001:db8::10]:65535", "2001:db8::10", 65535),
    ],
)
def test_an_address_is_written_and_read(written: str, host: str, port: int) -> None:
    assert split_address(written) == (host, port)
    assert host_port(host, port) == written
    assert host_port(written.rpartition(":")[0], port) == written


@pytest.mark.parametrize(
    "written", ["", "host", ":1", "host:", "host:0", "host:65536", "2001:db8::10:1", "[host]:1", "http://host:1", "h:²"]
)
def test_what_is_no_address_is_none(written: str) -> None:
    assert split_address(written) is None
