"""The addresses at which a block server may register."""

import pytest

from corolla.chassis.errors import AddressNotYours
from corolla.trust.addresses import CallerAddress

CALLS_FROM = "ipv4:10.0.0.7:4711"


def caller(*names: str, peer: str = CALLS_FROM) -> CallerAddress:
    found = [b"spiffe://test/block/1", *(name.encode() for name in names)]
    return CallerAddress.from_call({"x509_subject_alternative_name": found}, peer)


@pytest.mark.parametrize(
    "names, address",
    [
        ((), "10.0.0.7:50052"),
        (("10.0.0.9",), "10.0.0.9:50052"),
        (("server-0.blocks.default.svc",), "Server-0.blocks.default.svc:50052"),
        (("*.blocks.default.svc",), "server-1.blocks.default.svc:50052"),
        (("fd00:0:0::1",), "[fd00::1]:50052"),
        (("::ffff:10.0.0.9",), "10.0.0.9:50052"),
    ],
)
def test_addresses_of_the_certificate_or_the_call_are_its_own(names: tuple[str, ...], address: str) -> None:
    caller(*names).check(address)


@pytest.mark.parametrize(
    "names, address",
    [
        ((), "10.0.0.8:50052"),
        ((), "localhost:50052"),
        (("10.0.0.9",), "10.0.0.7:50052"),
        (("*.blocks.default.svc",), "blocks.default.svc:50052"),
        (("*.blocks.default.svc",), "a.b.blocks.default.svc:50052"),
        (("server-0.blocks.default.svc",), "server-1.blocks.default.svc:50052"),
    ],
)
def test_other_addresses_are_not(names: tuple[str, ...], address: str) -> None:
    with pytest.raises(AddressNotYours):
        caller(*names).check(address)


def test_a_call_over_ipv6_says_where_it_comes_from() -> None:
    caller(peer="ipv6:%5Bfd00::7%5D:4711").check("[fd00::7]:50052")
    with pytest.raises(AddressNotYours):
        caller(peer="unix:/tmp/socket").check("10.0.0.7:50052")
