"""The steps of a replay: cut like a prompt where cuts change no token, else as they were."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from corolla.chain.history import TokenHistory
from corolla.chain.identity import SessionIdentity
from corolla.chain.pending import HiddenStates, RowFuture
from corolla.chain.recovery_plan import CLIENT, ReplaySegment
from corolla.chain.replay import Replayer
from corolla.chain.reservations import ChainBinding, ChainLimits, OpenOptions, Reservations
from corolla.chain.streams import DataPlane
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.adapter_version import AdapterVersion
from corolla.wire.page_hashes import TextDigests

HOPS = [common_pb2.Hop(server_id=name, address=f"{name}:1") for name in "ab"]
MOST = 128
AS_THEY_WERE = [(0, 20), (20, 40), (40, 50)]


class Plane:
    """Answers each step at once."""

    def __init__(self, equal: Sequence[str] = (), *, is_shared: bool = False) -> None:
        self.steps: list[tuple[int, int]] = []
        self._equal = equal
        self._is_shared = is_shared

    def welcome(self, address: str) -> pb.Welcome:
        return pb.Welcome(cuts_are_equal=address in self._equal)

    def has_ring(self, hops: Sequence[common_pb2.Hop]) -> bool:
        return self._is_shared

    def step(self, hops: Any, rows: Sequence[pb.StepRow], *_inputs: Any, **_options: Any) -> list[RowFuture]:
        (row,) = rows
        assert list(row.token_ids) == list(range(row.position, row.position + row.num_tokens))
        self.steps.append((row.position, row.position + row.num_tokens))
        answer: RowFuture = asyncio.get_running_loop().create_future()
        answer.set_result(HiddenStates(b"", 0, pb.TENSOR_TYPE_FLOAT32, 0))
        return [answer]


async def steps_of(
    plane: Plane, segment: ReplaySegment | None = None, reservations: Any = None, *, end: int = 50,
    follows_numerics: bool = True, **options: Any
) -> list[Any]:  # fmt: skip
    """Those of a prompt of two chunks and ten tokens one by one."""
    history = TokenHistory()
    for start, count, is_prompt in [(0, 20, True), (20, 20, True), *((40 + number, 1, False) for number in range(10))]:
        history.append(range(start, start + count), is_prompt=is_prompt)
    limits = ChainLimits(MOST, step_timeout_s=60.0, lease_ms=60_000, follows_numerics=follows_numerics)
    binding = ChainBinding(
        (SessionIdentity(bytes(16), 1, "tenant"),), common_pb2.Chain(hops=HOPS),
        OpenOptions(max_tokens=64, transient=True, **options), MOST,
    )  # fmt: skip
    replayer = Replayer(cast(Reservations, reservations), cast(DataPlane, plane), limits)
    await replayer.replay(binding, 0, history, segment or ReplaySegment(CLIENT, 0, 1, 0, end, frozenset()))
    return plane.steps


async def test_in_float32_a_text_is_cut_like_a_prompt() -> None:
    assert await steps_of(Plane(), follows_numerics=False) == [(0, 50)]
    assert await steps_of(Plane(), follows_numerics=False, end=30) == [(0, 30)]
    shared = await steps_of(Plane(is_shared=True), follows_numerics=False)
    assert shared == [(0, 32), (32, 50)], "chunks are smaller beside sessions that decode"


async def test_elsewhere_chunks_of_prompts_stay_as_they_were_unless_no_cut_changes_bits() -> None:
    adapter = AdapterVersion("name", "0" * 64)
    assert await steps_of(Plane()) == AS_THEY_WERE
    assert await steps_of(Plane(), end=30) == [(0, 20), (20, 30)]
    assert await steps_of(Plane(["a:1"])) == AS_THEY_WERE, "one of the hops says nothing of cuts"
    assert await steps_of(Plane(["a:1", "b:1"])) == [(0, 50)]
    assert await steps_of(Plane(["a:1", "b:1"]), adapter=adapter) == AS_THEY_WERE


async def test_a_scratch_session_begins_where_its_pages_end() -> None:
    opened = list[Any]()

    class Pages:
        """Hops that find 16 tokens of a text."""

        async def open_scratch(self, _identity: Any, options: OpenOptions, *_hops: Any) -> int:
            opened.append(options)
            return 16 if options.texts else 0

        def give_back(self, *_sessions: Any) -> None:
            pass

    segment = ReplaySegment(CLIENT, 0, 1, 0, 50, frozenset({0}), range(1, 25))
    steps = await steps_of(Plane(), segment, Pages(), follows_numerics=False, texts=[TextDigests()])
    assert steps == [(16, 50)]
    assert [len(text) for text in opened[-1].texts] == [25]
    assert await steps_of(Plane(), segment, Pages(), follows_numerics=False) == [(0, 50)], "a text without names"
    held = replace(segment, begins=range(20, 25))
    assert await steps_of(Plane(), held, Pages(), follows_numerics=False, texts=[TextDigests()]) == [(0, 50)]
