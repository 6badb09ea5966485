"""The tables of who may ask for what leave nothing out."""

import pytest

from corolla.chassis.errors import RoleDenied
from corolla.trust.authorisation import FRAMES, METHODS, check_frame, check_method
from corolla.trust.workload import Role, Workload
from corolla.v1 import admin_pb2, blocks_pb2, router_pb2
from corolla.wire.frames import CONTROL_CLASSES

# Frames of a connection itself, and those with which block servers answer.
OF_STREAMS = {blocks_pb2.Ping, blocks_pb2.Pong, blocks_pb2.End, blocks_pb2.GoAway}
ANSWERS = {
    blocks_pb2.Welcome, blocks_pb2.Opened, blocks_pb2.Result, blocks_pb2.Fault, blocks_pb2.Moved,
    blocks_pb2.HandoverAnswer, blocks_pb2.Met, blocks_pb2.Part,
}  # fmt: skip


def test_every_method_between_services_has_a_row() -> None:
    files = (router_pb2, blocks_pb2, admin_pb2)
    methods = {
        f"{service.name}/{method.name}"
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert methods == METHODS.keys()


def test_every_kind_of_frame_has_a_row_or_is_an_answer() -> None:
    assert set(CONTROL_CLASSES.values()) == FRAMES.keys() | OF_STREAMS | ANSWERS
    assert not FRAMES.keys() & (OF_STREAMS | ANSWERS)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("role", [*Role, None])
def test_methods_are_for_their_roles(method: str, role: Role | None) -> None:
    caller = Workload("test", role, "1") if role is not None else None
    if role in METHODS[method]:
        check_method(method, caller)
        return
    with pytest.raises(RoleDenied):
        check_method(method, caller)


def test_no_stranger_sends_what_only_servers_may() -> None:
    for kind in (blocks_pb2.Next, blocks_pb2.Handover, blocks_pb2.HandoverTokens):
        check_frame(kind, Workload("test", Role.BLOCK, "1"))
        for role in set(Role) - {Role.BLOCK}:
            with pytest.raises(RoleDenied):
                check_frame(kind, Workload("test", role, "1"))
