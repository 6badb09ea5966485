"""SPIFFE ids of workloads, read and written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.trust.workload import Role, Workload

NAMES = st.from_regex(r"[A-Za-z0-9._-]{1,60}", fullmatch=True)


@given(st.from_regex(r"[a-z0-9._-]{1,60}", fullmatch=True), st.sampled_from(Role), NAMES)
def test_what_is_written_is_read(trust_domain: str, role: Role, name: str) -> None:
    workload = Workload(trust_domain, role, name)
    assert Workload.parse(str(workload)) == workload


@given(st.text())
def test_whatever_is_no_id_is_nobody(text: str) -> None:
    workload = Workload.parse(text)
    assert workload is None or str(workload) == text


@pytest.mark.parametrize(
    "uri",
    ["", "spiffe://test/block", "spiffe://test/block/", "spiffe://test/king/1", "spiffe://test/block/1/2",
     "spiffe://test/block/1\n", "https://test/block/1", "spiffe:///block/1", "spiffe://test/block/" + "a" * 3000],
)  # fmt: skip
def test_other_uris_name_nobody(uri: str) -> None:
    assert Workload.parse(uri) is None


def test_a_certificate_with_two_names_names_nobody() -> None:
    assert Workload.only_one(["spiffe://test/block/1", "spiffe://test/client/1"]) is None
    assert Workload.only_one([]) is None


def test_client_services_share_their_sessions_and_libraries_do_not() -> None:
    one, two = (Workload("test", Role.CLIENT, name) for name in ("1", "2"))
    assert one.owner == two.owner
    ours, theirs = (Workload("test", Role.LIBRARY, name) for name in ("ours", "theirs"))
    assert len({one.owner, ours.owner, theirs.owner}) == 3
