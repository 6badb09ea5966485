"""A caller whose fingerprint no server has learns what differs."""

from corolla.planning.fingerprints import what_differs
from corolla.v1 import router_pb2 as pb

OWN = {"dtype": "float32", "quantization": "none", "weights": "aa", "template": "bb"}


def a_server(**parts: str) -> pb.PlacedServer:
    return pb.PlacedServer(server=pb.ServerDescription(dtype="bfloat16", fingerprint_parts=parts))


def test_settings_are_named_with_both_values_and_the_rest_by_name() -> None:
    sentence = what_differs(OWN, [a_server(**{**OWN, "dtype": "bfloat16", "template": "cc"})])
    assert "differ in dtype (bfloat16 there, float32 here), template: see COROLLA_DTYPE" in sentence


def test_the_server_that_differs_least_counts() -> None:
    servers = [a_server(**{**OWN, "weights": "x", "template": "y"}), a_server(**{**OWN, "weights": "x"})]
    assert what_differs(OWN, servers) == "the block servers differ in weights"


def test_servers_of_an_earlier_release_are_named_by_their_dtype() -> None:
    assert "their dtype is bfloat16" in what_differs(OWN, [a_server()])
