"""The bytes that the Lua scripts append to serialised messages are the fields that their comments name."""

import re
from typing import Final

from corolla.router.store import script_text
from corolla.v1 import router_pb2 as pb

MARK: Final = re.compile(r"^local (\w+) = string\.char\(([^)]*)\)", re.MULTILINE)


def marks(script: str) -> dict[str, bytes]:
    """The bytes that a script writes, by the name that it gives them."""
    return {name: bytes(int(each, 0) for each in given.split(",")) for name, given in MARK.findall(script_text(script))}


def test_the_marks_of_a_snapshot_are_fields_of_a_placed_server() -> None:
    assert marks("snapshot") == {
        "SUSPECTED": pb.PlacedServer(suspected=True).SerializeToString(),
        "DOUBTED": pb.PlacedServer(doubted=True).SerializeToString(),
        "DRAINING": pb.PlacedServer(state=pb.SERVER_STATE_DRAINING).SerializeToString(),
    }


def test_a_heartbeat_names_states_by_their_numbers() -> None:
    states = re.search(r"^local IS_READY, IS_DRAINING = '(\d)', '(\d)'", script_text("heartbeat"), re.MULTILINE)
    assert states is not None
    assert [int(each) for each in states.groups()] == [pb.SERVER_STATE_READY, pb.SERVER_STATE_DRAINING]
