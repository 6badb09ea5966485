"""A client service plans around pairs of servers that do not reach each other, and keeps both servers."""

from typing import cast

from corolla.chain.control import ControlPlane
from corolla.chain.placement import PlacementWatch
from corolla.chain.routes import Routes
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from tests.unit.chain.test_placement import Router, watched

SPANS = {"a": (0, 3), "b": (3, 5), "c": (5, 7)}


def placed(name: str, *unreachable: str) -> pb.PlacedServer:
    start, end = SPANS[name[0]]
    return pb.PlacedServer(
        server=pb.ServerDescription(server_id=name, address=f"{name}:1", fingerprint="f"),
        span=common_pb2.BlockSpan(start=start, end=end), state=pb.SERVER_STATE_READY,
        load=pb.ServerLoad(max_session_tokens=1000, unreachable=[f"{each}:1" for each in unreachable]),
    )  # fmt: skip


def chain_of(*names: str) -> common_pb2.Chain:
    hops = [common_pb2.Hop(server_id=name, address=f"{name}:1", span=placed(name).span) for name in names]
    return common_pb2.Chain(hops=hops, fingerprint="f")


def ids(chain: common_pb2.Chain | None) -> list[str]:
    return [hop.server_id for hop in chain.hops] if chain is not None else []


async def planned(routes: Routes, num_plans: int = 20) -> set[str]:
    """The chains of so many sessions."""
    asked = {"num_tokens": 10, "asks_router": False}
    return {" ".join(ids(await routes.plan(**asked))) for _ in range(num_plans)}  # type: ignore[arg-type]


async def routes_over(router: Router, watch: PlacementWatch, *servers: pb.PlacedServer) -> Routes:
    await router.push(pb.Placement(servers=servers, cheapest_chain=common_pb2.Chain()))
    return Routes(cast(ControlPlane, router), watch, "f", 5)


@watched
async def test_chains_lead_around_pairs_that_the_placement_names(router: Router, watch: PlacementWatch) -> None:
    everyone = [placed(name) for name in ("a1", "a2", "b1", "b2")]
    routes = await routes_over(router, watch, placed("a1", "b1"), *everyone[1:])
    assert "a1 b1" not in (chains := await planned(routes))
    assert {*" ".join(chains).split()} == {"a1", "a2", "b1", "b2"}, "both are of use with others"
    await router.push(pb.Placement(servers=[everyone[0], *everyone[2:]], cheapest_chain=common_pb2.Chain()))
    assert "a1 b1" in await planned(routes), "a server that reaches it again is taken"
    await router.push(pb.Placement(servers=[placed("a1", "b1"), placed("b1")], cheapest_chain=common_pb2.Chain()))
    assert await planned(routes) == {"a1 b1"}, "there is no other chain"


@watched
async def test_a_broken_link_costs_the_pair_and_no_server(router: Router, watch: PlacementWatch) -> None:
    routes = await routes_over(router, watch, *(placed(name) for name in ("a1", "a2", "b1", "b2")))
    routes.keep_apart("b2", "a2")
    assert "a2 b2" not in (chains := await planned(routes))
    assert {*" ".join(chains).split()} == {"a1", "a2", "b1", "b2"}
    assert routes.apart_from(["a2"]) == {"b2"}
    assert routes.quarantine.count(0.0) == 0
    assert routes.may_use(chain_of("a2").hops[0])


@watched
async def test_a_lost_hop_is_replaced_by_one_that_reaches_the_others(router: Router, watch: PlacementWatch) -> None:
    routes = await routes_over(router, watch, placed("a1", "b2"), *(placed(name) for name in ("a2", "b1", "b2", "b3")))
    replaced = await routes.replace_lost(chain_of("a1", "b1"), {"b1"}, num_tokens=1, patience_s=0)
    assert ids(replaced) == ["a1", "b3"]
    # Where none of them does, another hop goes, too.
    routes.keep_apart("a1", "b3")
    replaced = await routes.replace_lost(chain_of("a1", "b1"), {"b1"}, num_tokens=1, patience_s=0)
    assert ids(replaced)[0] == "a2"
    # The only server of its blocks stays, and its neighbour goes.
    routes = await routes_over(router, watch, *(placed(name) for name in ("a1", "a2", "b1")))
    routes.keep_apart("a1", "b1")
    replaced = await routes.replace_lost(
        chain_of("a1", "b1"), {"b1"}, num_tokens=1, patience_s=0, retryable=lambda now_s: {"b1"}
    )
    assert ids(replaced) == ["a2", "b1"]
    # Neighbours that stay have reached each other, whatever one of them says of the other.
    names = ("a2", "b1", "b2", "c1", "c2")
    routes = await routes_over(router, watch, placed("a1", "b1"), *(placed(name) for name in names))
    replaced = await routes.replace_lost(chain_of("a1", "b1", "c1"), {"c1"}, num_tokens=1, patience_s=0)
    assert ids(replaced) == ["a1", "b1", "c2"]


@watched
async def test_the_chain_of_the_last_turn_is_left_where_its_hops_are_apart(
    router: Router, watch: PlacementWatch
) -> None:
    routes = await routes_over(router, watch, placed("a1", "b1"), placed("b1"), placed("b2"))
    assert ids(routes.replan_recorded(chain_of("a1", "b2"), (), num_tokens=1)) == ["a1", "b2"]
    assert ids(routes.replan_recorded(chain_of("a1", "b1"), (), num_tokens=1)) == ["a1", "b2"]
    routes = await routes_over(router, watch, placed("a1", "b1"), placed("a2"), placed("b1"))
    assert ids(routes.replan_recorded(chain_of("a1", "b1"), (), num_tokens=1)) == ["a2", "b1"]
    routes = await routes_over(router, watch, placed("a1", "b1"), placed("b1"))
    assert ids(routes.replan_recorded(chain_of("a1", "b1"), (), num_tokens=1)) == ["a1", "b1"]
