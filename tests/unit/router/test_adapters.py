"""What a library learns of the adapters and texts of others: nothing."""

from corolla.router.servicer import shown_to
from corolla.trust.workload import Workload
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb


def adapter(name: str, *tenants: str) -> pb.RegisteredAdapter:
    return pb.RegisteredAdapter(version=common_pb2.AdapterVersion(name=name), source="/secret", tenants=tenants)


def test_a_library_is_shown_its_tenants_adapters_without_their_folders() -> None:
    placement = pb.Placement(adapters=[adapter("all"), adapter("ours", "acme", "beta"), adapter("theirs", "beta")])
    library = Workload.parse("spiffe://corolla/library/acme")
    shown = shown_to(library, placement)
    assert [(each.version.name, [*each.tenants]) for each in shown.adapters] == [("all", []), ("ours", [])]
    assert "secret" not in str(shown)
    for caller in (None, Workload.parse("spiffe://corolla/operator/1"), Workload.parse("spiffe://corolla/block/1")):
        assert shown_to(caller, placement) == placement


def test_only_client_services_learn_which_texts_servers_hold() -> None:
    placement = pb.Placement(servers=[pb.PlacedServer(load=pb.ServerLoad(num_sessions=3, beginnings=bytes(16)))])
    assert shown_to(Workload.parse("spiffe://corolla/client/1"), placement) == placement
    (shown,) = shown_to(Workload.parse("spiffe://corolla/library/acme"), placement).servers
    assert (shown.load.num_sessions, shown.load.beginnings) == (3, b"")


def test_a_client_service_is_shown_all_of_them_without_their_folders() -> None:
    placement = pb.Placement(adapters=[adapter("all"), adapter("ours", "acme", "beta")])
    shown = shown_to(Workload.parse("spiffe://corolla/client/1"), placement)
    assert [(each.version.name, [*each.tenants]) for each in shown.adapters] == [
        ("all", []),
        ("ours", ["acme", "beta"]),
    ]
    assert "secret" not in str(shown)
