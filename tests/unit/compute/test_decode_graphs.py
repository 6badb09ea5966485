"""Replayed decode steps give the outputs of ordinary ones, in any batch, and touch no other session.

The recordings are of operators on a CPU (`tests.recorded_steps`); that CUDA replays its own is checked at start, there.
"""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from corolla.cache.states import LayerState
from corolla.chassis.errors import OutOfPages
from corolla.compute.base import RowWork
from corolla.compute.decode_buffers import DecodeBuffers
from corolla.compute.decode_graphs import DecodeGraphs
from corolla.compute.prompts import BlockPrompts
from corolla.compute.state_kernels import StateKernels
from corolla.compute.triton_blocks import TritonBlocks
from corolla.models.fused import FusedSpan
from corolla.models.rotary_table import MIN_POSITIONS
from corolla.wire.span import Span
from tests.checkpoints import MIXTURES
from tests.tiers import quick
from tests.triton_kernels import FAMILIES
from tests.unit.compute.replaying import MAX_STEP_TOKENS, SIZES, SPAN, Pair, Session

# Those that together have every feature; mixtures of experts are recorded only where the Triton kernels run them.
FUSED = sorted({"llama", "qwen2", *FAMILIES} - MIXTURES)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair.of("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("family", quick(FUSED, "llama", "qwen2"))
def test_families_with_every_feature_replay_their_own_outputs(tmp_path: Path, family: str) -> None:
    pair = Pair.of(family, tmp_path)
    sessions = [pair.open() for _ in range(8)]
    for number, session in enumerate(sessions):
        pair.step([(session, 0, 1 + 2 * number)])
    # Past windows and ends of pages, by every number of rows, in changing order.
    for turn in range(40):
        together = [sessions[(turn + index) % 8] for index in range(1 + turn % 8)]
        assert pair.decode(together)
    for session in sessions:
        pair.assert_same_memory(session)
    longest = sessions[-1].replayed.tables
    assert all(table.first_token > 0 for table in longest if table.has_window), "nothing fell out of a window"


@pytest.mark.parametrize(
    "family", quick(["qwen3_5_text", "falcon_h1", "deepseek_v3"], kinds=["qwen3_5_text", "deepseek_v3"])
)
def test_states_and_latents_are_found_by_their_slots(tmp_path: Path, family: str) -> None:
    """Sessions begin, decode in changing order, go back, fork, and continue what the family's own code computed."""
    # Kernels alone run experts in a recorded step.
    pair = Pair.of(family, tmp_path, **({"first_k_dense_replace": 9} if family == "deepseek_v3" else {}))
    assert isinstance(pair.replaying.blocks, StateKernels)
    sessions = [pair.open() for _ in range(6)]
    for number, session in enumerate(sessions[:5]):
        pair.step([(session, 0, 1 + 2 * number)])
    for turn in range(14):
        together = [sessions[(turn + index) % 6] for index in range(1 + turn % 6)]
        assert pair.decode(together)
        if turn % 4 == 3:
            again = together[0]
            assert pair.step([(again, again.num_tokens - 1, 1)])
            pair.step([(together[0], together[0].num_tokens, 3), (together[-1], together[-1].num_tokens, 1)])
    for theirs, own in zip(sessions[1].caches, sessions[0].caches, strict=True):
        own.adopt(theirs.fork())
    states = sessions[2].replayed.states
    if states is not None:
        position = sessions[2].num_tokens
        elsewhere = {layer: LayerState(*map(Tensor.clone, each.tensors)) for layer, each in states.at(position).items()}
        states.arrive(position, elsewhere, pair.replaying.store.state_table)
    for _ in range(2):
        assert pair.decode([sessions[2], sessions[0], sessions[1]])
    for session in sessions:
        pair.assert_same_memory(session)
        for cache in session.caches:
            cache.clear()
    table = pair.replaying.store.state_table
    assert (table is None) == (family == "deepseek_v3")
    if table is not None:
        taken = [table.take() for _ in range(table.scratch_slot)]
        assert {each.number for each in taken} == set(range(table.scratch_slot)), "a slot is lost, or taken twice"
        with pytest.raises(OutOfPages):
            table.take()


def test_steps_without_a_recording_are_launched_operator_by_operator(llama: Pair) -> None:
    sessions = [llama.open() for _ in range(SIZES[-1] + 1)]
    assert not llama.step([(sessions[0], 0, 5)]), "a prompt"
    assert not llama.step([(sessions[0], 5, 1), (sessions[1], 0, 3)]), "a prompt with a decode step"
    assert not llama.decode(sessions), "more rows than the largest size"
    assert llama.decode(sessions[1:])
    part = llama.open()
    assert not llama.step([(part, 0, 1)], Span(2, 4)), "some of the blocks"


def test_a_session_longer_than_the_buffers_is_launched_operator_by_operator(tmp_path: Path) -> None:
    pair = Pair.of("llama", tmp_path, max_position_embeddings=30)
    session, other = pair.open(), pair.open()
    pair.step([(session, 0, 28), (other, 0, 1)])
    assert [pair.decode([session, other]) for _ in range(4)] == [True, True, False, False]
    assert pair.decode([other])


def test_prompts_are_added_before_a_replay_of_a_single_block(tmp_path: Path) -> None:
    """Between blocks there is no replay; a span of one block has no between."""
    pair = Pair.of("llama", tmp_path)
    hidden = torch.randn(1, pair.plain.model.hidden_size)
    prompts = BlockPrompts(torch.randn(len(SPAN), 2, pair.plain.model.hidden_size))
    outputs = []
    for runner in (pair.plain, pair.replaying):
        cache = runner.new_cache()
        outputs.append([runner.forward([RowWork(cache, place, 1, prompts)], hidden, SPAN) for place in range(4)])
    torch.testing.assert_close(*outputs)
    assert not torch.equal(outputs[0][0], outputs[0][2])


def test_an_output_is_the_callers_own(llama: Pair) -> None:
    cache = llama.replaying.new_cache()
    first, second = torch.randn(2, 1, llama.replaying.model.hidden_size)
    output = llama.replaying.forward([RowWork(cache, 0, 1)], first, SPAN)
    kept = output.clone()
    llama.replaying.forward([RowWork(cache, 1, 1)], second, SPAN)
    assert torch.equal(output, kept)
    cache.clear()


def test_a_recording_keeps_the_rotary_table_that_it_reads(tmp_path: Path) -> None:
    """A graph knows addresses only: memory that it reads must not be given back."""
    runner = Pair.of("llama", tmp_path, max_position_embeddings=24).replaying
    fused, blocks = runner.model.fused, runner.blocks
    assert isinstance(fused, FusedSpan)
    assert isinstance(blocks, TritonBlocks)
    with torch.inference_mode():
        buffers = DecodeBuffers(runner.store, 2, 24, torch.empty(0, runner.model.hidden_size))
        graphs = DecodeGraphs(blocks, buffers, runner.backend, lambda *_steps: lambda: None, (1, 2))
    runner.decode_graphs = None  # the recorder of operators keeps what they used
    table = weakref.ref(fused.rotary_tables[0])
    cache = runner.new_cache()
    for position in range(0, MIN_POSITIONS + 1, 64):
        runner.forward([RowWork(cache, position, 64)], torch.randn(64, runner.model.hidden_size), SPAN)
    assert fused.rotary_tables[0] is not table(), "the texts were not long enough"
    assert table() is not None
    del graphs
    assert table() is None


def test_padding_reads_and_writes_the_scratch_page_alone(llama: Pair) -> None:
    graphs, store = llama.graphs, llama.replaying.store
    sessions = [llama.open() for _ in range(5)]
    llama.step([(session, 0, 9) for session in sessions])
    llama.decode(sessions)
    llama.decode(sessions[:3])
    ((tables,),) = graphs.buffers.batch(4, llama.replaying.backend).prepared.values()
    assert tables.pages[3, 0] == store.scratch_page == store.pool.num_pages
    assert tables.num_keys.tolist() == [11, 11, 11, 1]
    held = {page for session in sessions for page in session.replayed.tables[0].pages}
    assert set(tables.pages[:3].flatten().tolist()) <= held | {store.scratch_page}
    assert store.scratch_page not in held


class Conversations(RuleBasedStateMachine):
    """Sessions open, decode in any company, take chunks, roll back, fork, rest and close."""

    pair: Pair

    @initialize()
    def begin(self) -> None:
        self.sessions: list[Session] = []

    def teardown(self) -> None:
        for session in getattr(self, "sessions", []):
            self.close(session)
        for runner in (self.pair.plain, self.pair.replaying):
            assert runner.store.pool.num_available == runner.store.pool.num_pages

    def close(self, session: Session) -> None:
        for cache in session.caches:
            cache.clear()

    @rule(room=st.integers(40, 64))
    def opens(self, room: int) -> None:
        if len(self.sessions) < 10:
            self.sessions.append(self.pair.open(room))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), num_tokens=st.integers(2, MAX_STEP_TOKENS))
    def takes_a_chunk(self, data: st.DataObject, num_tokens: int) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        if session.num_tokens + num_tokens <= 40:
            assert not self.pair.step([(session, session.num_tokens, num_tokens)])

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(self.sessions), min_size=1, max_size=10, unique_by=id))
        some = [session for session in some if session.num_tokens < 40]
        if some:
            assert self.pair.decode(some) == (len(some) <= SIZES[-1])

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def goes_back(self, data: st.DataObject) -> None:
        """Takes a session back, to an earlier position of its next step."""
        session = data.draw(st.sampled_from(self.sessions))
        if session.num_tokens:
            position = session.plain.nearest_position(data.draw(st.integers(0, session.num_tokens - 1)))
            assert self.pair.step([(session, position, 1)])

    @precondition(lambda self: len(self.sessions) > 1)
    @rule(data=st.data())
    def becomes_a_fork(self, data: st.DataObject) -> None:
        source, target = data.draw(st.lists(st.sampled_from(self.sessions), min_size=2, max_size=2, unique_by=id))
        if source.num_tokens <= 40:
            for theirs, own in zip(source.caches, target.caches, strict=True):
                own.adopt(theirs.fork())

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def closes(self, data: st.DataObject) -> None:
        self.close(self.sessions.pop(data.draw(st.integers(0, len(self.sessions) - 1))))

    @invariant()
    def all_remember_the_same(self) -> None:
        for session in getattr(self, "sessions", []):
            if session.num_tokens:
                self.pair.assert_same_memory(session)


@pytest.mark.parametrize("family", quick(["llama", "qwen2", "qwen3_5_text"], "qwen2"))
def test_conversations(tmp_path: Path, family: str) -> None:
    """qwen2 has layers with a window, and layers without; qwen3_5_text has states."""

    class Machine(Conversations):
        pair = Pair.of(family, tmp_path)

    test: Any = Machine.TestCase
    # Finding the shortest conversation that fails would take minutes.
    phases = [phase for phase in Phase if phase != Phase.shrink]
    test.settings = settings(max_examples=25, stateful_step_count=30, deadline=None, phases=phases)
    test("runTest").runTest()
