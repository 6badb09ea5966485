"""Servers that compute alike come before cheaper ones, and a chain knows whether its hops computed alike all along."""

import pytest

from corolla.chain.cache_salts import salt_behind
from corolla.chassis.errors import NoChain
from corolla.planning.numerics import continued, with_numerics
from corolla.planning.planner import plan_replacements
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.wire.numerics import UNKNOWN, Numerics, digest_of
from corolla.wire.span import Span
from tests.unit.planning.test_planner import server

A, B = Numerics("a"), Numerics("b")


def chain_of(*hops: str, **facts: object) -> common_pb2.Chain:
    """A chain of hops such as `s 0:2`."""
    chain = common_pb2.Chain(fingerprint="f", **facts)  # type: ignore[arg-type]
    for hop in hops:
        name, _, span = hop.partition(" ")
        chain.hops.append(common_pb2.Hop(server_id=name, address=f"{name}:1", span=Span.parse(span).to_message()))
    return chain


def placed(**numerics: str) -> dict[str, pb.PlacedServer]:
    return {
        name: pb.PlacedServer(server=pb.ServerDescription(server_id=name), load=pb.ServerLoad(numerics=each))
        for name, each in numerics.items()
    }


def test_a_digest_depends_on_each_fact_and_not_on_their_order() -> None:
    facts = {"dtype": "bfloat16", "attention": "compiled"}
    assert digest_of(facts) == digest_of(dict(reversed(facts.items())))
    others = [{**facts, "dtype": "float16"}, {**facts, "more": ""}, {"dtype": "bfloat16"}, {"dtypeb": "float16"}]
    assert len({digest_of(each) for each in [facts, *others]}) == 5
    assert digest_of({"a": "b\nc=d"}) != digest_of({"a": "b", "c": "d"})


def test_heads_count_only_if_both_servers_have_one() -> None:
    whole, other_head = Numerics.parse("a+x"), Numerics.parse("a+y")
    assert (str(whole), str(A)) == ("a+x", "a")
    assert whole.agrees_with(A)
    assert A.agrees_with(other_head)
    assert not whole.agrees_with(other_head)
    assert not whole.agrees_with(Numerics.parse("b+x"))


def test_a_replacement_of_the_same_numerics_comes_before_a_cheaper_one() -> None:
    cheap = server("cheap", "0:4", 1.0, numerics=B)
    slow = server("slow", "0:4", 50.0, numerics=A)
    lost = [(Span(0, 4), A)]
    for order in ([cheap, slow], [slow, cheap]):
        assert [hop.server.server_id for hop in plan_replacements(order, lost).hops] == ["slow"]
    assert [hop.server.server_id for hop in plan_replacements([cheap], lost).hops] == ["cheap"]
    full = server("full", "0:4", 50.0, numerics=A, has_pages=False)
    assert [hop.server.server_id for hop in plan_replacements([cheap, full], lost).hops] == ["cheap"]
    # Servers of an older release are best replaced by each other.
    old = server("old", "0:4", 50.0)
    assert [hop.server.server_id for hop in plan_replacements([cheap, old], [(Span(0, 4), UNKNOWN)]).hops] == ["old"]


def test_neighbours_of_several_numerics_are_each_replaced_by_their_own() -> None:
    servers = [
        server("whole", "0:6", 0.1, numerics=B), server("b1", "0:3", numerics=B), server("b2", "3:6", numerics=B),
        server("a1", "0:3", numerics=A), server("a2", "3:6", numerics=A),
    ]  # fmt: skip
    planned = plan_replacements(servers, [(Span(0, 3), A), (Span(3, 6), B)])
    assert [hop.server.server_id for hop in planned.hops] == ["a1", "whole"]
    assert [hop.span for hop in planned.hops] == [Span(0, 3), Span(3, 6)]
    # If one of them has no like, cost alone decides about all.
    planned = plan_replacements(servers[:3], [(Span(0, 3), A), (Span(3, 6), B)])
    assert [hop.server.server_id for hop in planned.hops] == ["whole"]
    with pytest.raises(NoChain):
        plan_replacements(servers[1:2], [(Span(0, 3), A), (Span(3, 6), B)])


@pytest.mark.parametrize(
    "after, servers, is_mixed",
    [
        (["y 0:2", "z 2:6"], {"y": "a", "z": "a+h"}, False),
        (["y 0:2", "z 2:6"], {"y": "b", "z": "a+h"}, True),
        (["x 0:2", "y 2:4", "w 4:6"], {"y": "a", "w": "a+h"}, False),
        (["x 0:2", "y 2:4", "w 4:6"], {"y": "a", "w": "a+other"}, True),
        (["x 0:2", "w 2:6"], {}, True),
        (["x 0:2", "z 2:6"], {}, False),
    ],
    ids=["alike", "another kind", "cut otherwise", "another head", "unknown", "nothing changed"],
)
def test_a_chain_knows_whether_blocks_went_to_a_server_that_computes_otherwise(
    after: list[str], servers: dict[str, str], is_mixed: bool
) -> None:
    """The lost servers are not in the placement any more, but the chain still has their names."""
    before = with_numerics(chain_of("x 0:2", "z 2:6"), placed(x="a", z="a+h"))
    chain = continued(before, chain_of(*after), placed(**servers))
    assert chain.mixes_numerics == is_mixed
    assert set(chain.numerics) <= {hop.server_id for hop in chain.hops}
    # What happened once remains true.
    assert continued(chain, chain_of("x 0:2", "z 2:6"), placed(x="a", z="a+h")).mixes_numerics >= is_mixed


def test_a_server_of_an_older_release_promises_nothing() -> None:
    before = with_numerics(chain_of("x 0:2"), placed(x=""))
    assert continued(before, chain_of("y 0:2"), placed(x="", y="")).mixes_numerics
    assert continued(before, chain_of("y 0:2"), placed(x="", y="a")).mixes_numerics
    assert not continued(chain_of(), chain_of("y 0:2"), placed(y="a")).mixes_numerics, "a first turn has no past"


def test_pages_behind_other_numerics_are_shared_apart() -> None:
    salts = [salt_behind(b"s", each) for each in (["a"], ["a", "a"], ["b", "a"], ["a", "b"], ["b", "a", "a"])]
    assert salts[:2] == [b"s", b"s"], "where all are equal, servers of an older release find the same pages"
    assert len(set(salts)) == 4
