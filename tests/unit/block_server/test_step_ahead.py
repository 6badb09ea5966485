"""A step that is launched before the present one's tokens are read changes no token, whatever comes in between.

The device is a CPU that replays recorded operators (`tests.recorded_steps`), so all that is launched is computed at
once; or a GPU that computes as late as it may (`tests.gpu_double`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import pytest
import torch
from google.protobuf.message import Message
from torch import Tensor
from transformers import AutoModelForCausalLM

from corolla.block_server.boundary_activations import BoundaryActivations
from corolla.block_server.engine import Engine
from corolla.block_server.frame_checks import Identity
from corolla.block_server.handover.receiver import HandoverReceiver
from corolla.block_server.hop_session import HopSession, OpenRequest, RingPlace
from corolla.block_server.metrics import BlockServerMetrics
from corolla.block_server.peers import PeerTable
from corolla.block_server.relay import Relay
from corolla.block_server.row_sampling import NOTHING_SHARED, ChosenTokens, RowLogits, SessionSampler, SharedBySamplers
from corolla.block_server.scheduler import Scheduler
from corolla.block_server.servicer import BlockServicer
from corolla.block_server.sessions import SessionTable
from corolla.block_server.step_admission import AdmittedStep, StepWork
from corolla.block_server.step_ahead import StepAhead, next_rows
from corolla.cache.store import SessionCache
from corolla.chassis.errors import StepFailed
from corolla.chassis.metrics import TaskMetrics, new_registry
from corolla.chassis.tasks import TaskGroup
from corolla.compute.base import Embed, LaunchedBatch, RowWork
from corolla.compute.compute_thread import ComputeThread
from corolla.compute.span_runner import SpanRunner
from corolla.decoding.draft_model import DraftModel
from corolla.models.checkpoint import Checkpoint
from corolla.models.cuda_capture import CudaCapture
from corolla.models.edges import Edges, load_edges
from corolla.v1 import blocks_pb2 as pb
from corolla.v1.common_pb2 import SamplingParameters
from corolla.wire.device_copies import Reading
from corolla.wire.frames import Buffer, Frame
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint
from tests.gpu_double import GPU, Gpu, a_gpu
from tests.philox import services_draws
from tests.tiers import quick
from tests.unit.compute.on_gpu import move, runner_on
from tests.unit.compute.replaying import choose, make_runner
from tests.unread_stream import UnreadStream

CLIENT = b"c" * 16
NUM_BLOCKS = 2
WHOLE = Span(0, NUM_BLOCKS)
NUM_TOKENS = 24
ADDRESS = "here:1"


NOTHING: Mapping[str, Any] = MappingProxyType({})


class Tokens(UnreadStream):
    """The client's end: the tokens and faults of each session, and what waits for them."""

    def __init__(self) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self.tokens: dict[bytes, list[int]] = {}
        self.faults: dict[bytes, str] = {}
        self.has_ended: set[bytes] = set()
        self.num_opened = 0
        self.changed = asyncio.Event()

    def send(self, control: Message, payload: Buffer = b"") -> None:
        if isinstance(control, pb.Opened):
            self.num_opened += 1
        elif isinstance(control, pb.Fault):
            self.faults.update((row.session_id, control.reason) for row in control.rows)
        elif isinstance(control, pb.Result):
            for row, sampled in zip(control.rows, control.sampled, strict=True):
                self.tokens.setdefault(row.session_id, []).extend(token.token_id for token in sampled.tokens)
                if sampled.is_last:
                    self.has_ended.add(row.session_id)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class Model:
    """A tiny model: its ends, and a runner of all its blocks that replays its decode steps.

    Args:
        gpu: where all of it lies; None: on the CPU.
    """

    def __init__(self, folder: Path, gpu: Gpu | None = None) -> None:
        path = make_tiny_checkpoint("llama", folder, num_blocks=NUM_BLOCKS)
        self.checkpoint = Checkpoint.from_pretrained(str(path))
        self.edges: Edges = load_edges(self.checkpoint, dtype=torch.float32)
        self._unsplit: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        if gpu is None:
            self.runner = make_runner(path, span=WHOLE)
            assert choose(self.runner) is not None
            return
        move(gpu, [module for model in self.edges.modules for module in model.modules()])
        self.edges.find_device()
        self.runner = runner_on(gpu, path, WHOLE, num_pages=60)
        assert choose(self.runner, CudaCapture(GPU), (1, 2, 4)) is not None

    def truth(self, name: int, **options: Any) -> list[int]:
        """The answer to a session's prompt: greedy, or drawn with the session's seed by the options."""
        ids = torch.tensor([prompt(name)])
        with services_draws(name):
            found = self._unsplit.generate(
                ids, max_new_tokens=NUM_TOKENS, do_sample=bool(options), eos_token_id=None, **options
            )
        answer: list[int] = found[0, ids.shape[1] :].tolist()
        return answer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


class Here(ComputeThread):
    """Computes in the thread of the event loop: the double of a GPU is that of one thread."""

    def run(self, work: Callable[..., Any], *arguments: Any, **options: Any) -> "asyncio.Future[Any]":
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        done.set_result(work(*arguments, **options))
        return done


class Server:
    """A block server without sockets that has the whole model."""

    def __init__(
        self,
        model: Model,
        compute_thread: ComputeThread | None = None,
        vocab_size: int | None = None,
        shared: SharedBySamplers = NOTHING_SHARED,
    ) -> None:
        checkpoint, runner = model.checkpoint, model.runner
        self.client, peers, metrics = Tokens(), PeerTable(), BlockServerMetrics(new_registry())
        sessions: SessionTable[SessionCache] = SessionTable(runner.store.pool, runner.new_cache)
        outputs = BoundaryActivations(0)
        self.engine = Engine(
            runner, Scheduler(64, 64), sessions, outputs, peers, partial(Relay, "", peers), metrics,
            fail=lambda: None, edges=model.edges,
            launches_head_early=True, compute_thread=compute_thread,
        )  # fmt: skip
        identity = Identity(
            server_id="s", span=WHOLE, model="m", fingerprint="", dtype_name="float32", dtype=pb.TENSOR_TYPE_FLOAT32,
            hidden_size=checkpoint.hidden_size, max_tokens_per_frame=64, prefix_page_tokens=0,
            num_model_blocks=NUM_BLOCKS, vocab_size=vocab_size or checkpoint.vocab_size, context_length=64,
        )  # fmt: skip
        tasks = TaskGroup(lambda: None, TaskMetrics(new_registry()))
        receiver = HandoverReceiver(WHOLE, sessions, self.engine, metrics, tasks, max_part_tokens=64)
        servicer = BlockServicer(
            identity, self.engine, sessions, outputs, peers, runner.store, receiver, tasks, shared
        )  # fmt: skip
        self.opened: set[int] = set()
        self._receive = servicer.accept(self.client)
        self.tell(pb.Hello(client_id=CLIENT))

    def tell(self, control: Message) -> None:
        self._receive(Frame(control, b""))

    async def open(self, name: int, epoch: int = 1, parameters: Mapping[str, Any] = NOTHING, **sampler: Any) -> None:
        wanted = self.client.num_opened + 1
        self.opened.add(name)
        sampler = {"num_tokens_left": NUM_TOKENS, "seed": name, **sampler}
        request = pb.Sampler(parameters=SamplingParameters(**parameters), **sampler)
        self.tell(
            pb.Open(
                session_id=session_id(name), epoch=epoch, tenant="t", max_tokens=48, lease_ms=60_000,
                blocks=WHOLE.to_message(), sampler=request,
            )
        )  # fmt: skip
        await self.client.until(lambda: self.client.num_opened == wanted)

    def begin(self, name: int, epoch: int = 1, credit_end: int = 64, max_step_tokens: int = 64) -> None:
        """Sends a session's prompt, with which its tokens begin to go round."""
        ids = prompt(name)
        row = pb.StepRow(
            session_id=session_id(name), epoch=epoch, num_tokens=len(ids), num_result_tokens=1, token_ids=ids
        )
        ring = pb.Ring(first_address=ADDRESS, credit_end=credit_end, max_step_tokens=max_step_tokens)
        self.tell(pb.Step(client_id=CLIENT, rows=[row], blocks=WHOLE.to_message(), samples=True, ring=ring))

    def num_of(self, name: int) -> int:
        return len(self.client.tokens.get(session_id(name), ()))

    async def all_of(self, names: Iterable[int]) -> dict[int, list[int]]:
        """The tokens of sessions whose answers have ended."""
        wanted = {session_id(name) for name in names}
        await self.client.until(lambda: wanted <= self.client.has_ended | self.client.faults.keys())
        assert not self.client.faults
        return {name: self.client.tokens[session_id(name)] for name in names}


@asynccontextmanager
async def serving(
    model: Model,
    compute_thread: ComputeThread | None = None,
    vocab_size: int | None = None,
    shared: SharedBySamplers = NOTHING_SHARED,
) -> AsyncIterator[Server]:
    made = Server(model, compute_thread, vocab_size, shared)
    running = asyncio.create_task(made.engine.run())
    try:
        yield made
    finally:
        for name in made.opened:
            made.tell(pb.Close(session_id=session_id(name), epoch=9))
        for _ in range(10_000):
            if model.runner.store.pool.num_available == model.runner.store.pool.num_pages:
                break
            await asyncio.sleep(0.001)
        assert model.runner.store.pool.num_available == model.runner.store.pool.num_pages
        running.cancel()
        made.engine.close()


def session_id(name: int) -> bytes:
    return name.to_bytes(16, "big")


def prompt(name: int) -> Sequence[int]:
    return torch.randint(3, 60, (3 + name % 5,), generator=torch.Generator().manual_seed(name)).tolist()


def counted(monkeypatch: pytest.MonkeyPatch, runner: SpanRunner) -> list[str]:
    """A list that grows with each step that is launched ahead, and with each such step that is used."""
    events: list[str] = []
    launch, finish = runner.launch, runner.finish
    ahead = set[Reading]()

    def noted_launch(rows: Sequence[RowWork], hidden: Tensor | Embed, blocks: Span) -> LaunchedBatch:
        launched = launch(rows, hidden, blocks)
        if not isinstance(hidden, Tensor):
            events.append("launched")
            ahead.add(launched.reading)
        return launched

    def noted_finish(launched: LaunchedBatch, *others: Any) -> tuple[bool, ...]:
        if launched.reading in ahead:
            events.append("used")
        return finish(launched, *others)

    monkeypatch.setattr(runner, "launch", noted_launch)
    monkeypatch.setattr(runner, "finish", noted_finish)
    return events


async def test_answers_that_begin_and_end_at_different_times(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    events = counted(monkeypatch, model.runner)
    truth = {name: model.truth(name) for name in range(6)}
    ends = {1: truth[1][7], 4: truth[4][3]}
    # The logits of several rows of such a vocabulary take much memory, and steps go ahead all the same.
    async with serving(model, vocab_size=1 << 24) as server:
        for name in truth:
            await server.open(
                name, num_tokens_left=NUM_TOKENS - name, end_token_ids=[ends[name]] if name in ends else []
            )
        for name in (0, 1, 2):
            server.begin(name)
        await server.client.until(lambda: server.num_of(0) > 4)
        for name in (3, 4, 5):
            server.begin(name)
        answers = await server.all_of(truth)
    for name, answer in answers.items():
        expected = truth[name][: NUM_TOKENS - name]
        if name in ends:
            expected = expected[: expected.index(ends[name]) + 1]
        assert answer == expected
    assert events.count("used") > NUM_TOKENS // 2


def has_begun(server: Server, name: int) -> bool:
    return server.num_of(name) > 2


async def test_no_step_is_launched_ahead_of_rows_that_come_first(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five sessions in microbatches of at most three rows; they begin and end one by one."""
    events = counted(monkeypatch, model.runner)
    truth = {name: model.truth(name) for name in range(5)}
    async with serving(model) as server:
        for name in truth:
            await server.open(name)
        for begun in truth:
            server.begin(begun, max_step_tokens=3)
            await server.client.until(partial(has_begun, server, begun))
        assert await server.all_of(truth) == truth
    assert events.count("launched") == events.count("used") > 6


DRAWN: dict[int, dict[str, Any]] = {
    1: {},
    2: {"temperature": 0.9, "top_k": 40, "top_p": 0.8},
    3: {"temperature": 1.3, "top_k": 0, "repetition_penalty": 1.4},
}


async def test_answers_that_are_drawn(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    events = counted(monkeypatch, model.runner)
    async with serving(model) as server:
        for name, options in DRAWN.items():
            ids = prompt(name)
            await server.open(
                name, parameters=options, token_ids=ids, num_prompt_tokens=len(ids), num_tokens_left=18 + name
            )
            server.begin(name)
        answers = await server.all_of(DRAWN)
    assert answers == {name: model.truth(name, **options)[: 18 + name] for name, options in DRAWN.items()}
    assert events.count("used") > NUM_TOKENS // 2


@pytest.mark.full
async def test_a_server_on_a_gpu_waits_for_its_tokens_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, recorded steps and steps ahead of their tokens, some of which are drawn: no buffer is used too early."""
    with a_gpu() as gpu:
        model = Model(tmp_path, gpu)
        truth = {name: model.truth(name, **DRAWN.get(name, {})) for name in range(4)}
        events = counted(monkeypatch, model.runner)
        gpu.waits.clear()
        async with serving(model, Here()) as server:
            gpu.num_read = 0
            await server.open(9)
            server.begin(9)
            assert await server.all_of([9]) == {9: model.truth(9)}
            # One copy tells a step's tokens, and which outputs are finite.
            assert gpu.num_read == NUM_TOKENS
            for name in truth:
                ids = prompt(name)
                await server.open(name, parameters=DRAWN.get(name, {}), token_ids=ids, num_prompt_tokens=len(ids))
            for name in truth:
                server.begin(name)
            assert await server.all_of(truth) == truth
        assert not gpu.waits
        assert events.count("used") > NUM_TOKENS // 2


@pytest.mark.full
async def test_a_draft_model_on_a_gpu_changes_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model itself drafts; answers that are drawn have penalties, whose numbers lie on the GPU, too."""
    drafts = pb.Drafts(source=pb.Drafts.SOURCE_DRAFT_MODEL, max_tokens=3)
    with a_gpu() as gpu:
        model = Model(tmp_path, gpu)
        drafting = DraftModel.load(model.checkpoint, model.checkpoint, dtype=torch.float32, device="cpu")
        move(gpu, drafting.causal_model.modules())
        assert drafting.causal_model.device == GPU
        truth = {name: model.truth(name, **DRAWN.get(name, {})) for name in (0, 2, 3)}
        lengths: list[int] = []
        launch = model.runner.launch

        def noted(rows: Sequence[RowWork], *others: Any) -> LaunchedBatch:
            lengths.extend(row.num_tokens for row in rows if row.position)
            return launch(rows, *others)

        monkeypatch.setattr(model.runner, "launch", noted)
        async with serving(model, Here(), shared=SharedBySamplers(drafting)) as server:
            for name in truth:
                ids = prompt(name)
                await server.open(
                    name, parameters=DRAWN.get(name, {}), token_ids=ids, num_prompt_tokens=len(ids), drafts=drafts
                )
            for name in truth:
                server.begin(name)
            assert await server.all_of(truth) == truth
        # Each step of greedy answers checks three draft tokens, all of which are right.
        assert lengths.count(4) > NUM_TOKENS // 2
        assert len(lengths) < 3 * NUM_TOKENS // 2


async def test_a_step_that_fails_when_tokens_are_drawn_ends_with_a_fault(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that were drawn must not be drawn again: the client recovers the session with a new sampler."""
    finish, calls = model.runner.finish, []

    def fail_third(*args: Any) -> tuple[bool, ...]:
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("out of something")
        return finish(*args)

    monkeypatch.setattr(model.runner, "finish", fail_third)
    async with serving(model) as server:
        await server.open(2, parameters=DRAWN[2])
        server.begin(2)
        await server.client.until(lambda: session_id(2) in server.client.faults)
        assert server.client.faults[session_id(2)] == StepFailed.reason
        assert server.client.tokens[session_id(2)] == model.truth(2, **DRAWN[2])[: server.num_of(2)]


async def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = counted(monkeypatch, model.runner)

    add = Reading.add

    def noted(reading: Reading, numbers: Tensor) -> Callable[[], Tensor]:
        read = add(reading, numbers)

        def read_and_note() -> Tensor:
            events.append("read")
            return read()

        return read_and_note

    monkeypatch.setattr(Reading, "add", noted)
    async with serving(model) as server:
        await server.open(1, num_tokens_left=4)
        server.begin(1)
        assert (await server.all_of([1])) == {1: model.truth(1)[:4]}
    prompt_step, last_step = ["launched", "read", "read"], ["used", "read", "read"]
    step = ["launched", *last_step]
    # No step follows the last token, which the limit makes known.
    assert events == [*prompt_step, *step, *step, *last_step]


@pytest.mark.parametrize("what", quick(["close", "reopen", "credit", "bias", "draft"], "credit", "draft"))
async def test_what_happens_between_two_steps(model: Model, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Another session ends, begins anew, waits for credit, or joins with tokens that the device does not know."""
    events = counted(monkeypatch, model.runner)
    async with serving(model) as server:
        await server.open(1)
        await server.open(2)
        server.begin(1)
        server.begin(2, credit_end=12 if what == "credit" else 64)
        await server.client.until(lambda: server.num_of(2) > 4 and server.num_of(1) > 4)
        if what == "close":
            server.tell(pb.Close(session_id=session_id(2), epoch=1))
        elif what == "reopen":
            await server.open(2, epoch=2)
            del server.client.tokens[session_id(2)]
            server.begin(2, epoch=2)
        elif what == "credit":
            await server.client.until(lambda: server.num_of(1) > 12)
            server.tell(pb.Credit(session_id=session_id(2), epoch=1, end=64))
        else:
            drafts = pb.Drafts(source=pb.Drafts.SOURCE_PROMPT_LOOKUP, max_tokens=3)
            ids = prompt(3)
            options: dict[str, Any] = {"drafts": drafts, "token_ids": ids, "num_prompt_tokens": len(ids)}
            if what == "bias":
                options = {"parameters": {"logit_bias": {model.truth(3)[0]: 0.5}}, "num_logprobs": 2}
            await server.open(3, **options)
            server.begin(3)
        names = {"close": [1], "draft": [1, 2, 3]}.get(what, [1, 2])
        assert await server.all_of(names) == {name: model.truth(name) for name in names}
    assert events.count("used") > 2


@pytest.mark.parametrize("fails", quick(["launch", "finish"], "finish"))
async def test_a_step_that_cannot_be_launched_ahead_or_fails_is_computed_in_its_turn(
    model: Model, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    work, calls = getattr(model.runner, fails), []

    def fail_first(*args: Any) -> Any:
        if isinstance(args[1], Tensor):
            return work(*args)  # it is not launched ahead
        calls.append(fails)
        if len(calls) in (1, 4):
            raise RuntimeError("out of something")
        return work(*args)

    monkeypatch.setattr(model.runner, fails, fail_first)
    async with serving(model) as server:
        await server.open(1)
        server.begin(1)
        assert await server.all_of([1]) == {1: model.truth(1)}
    assert len(calls) > 4


def stepped(model: Model) -> HopSession[SessionCache]:
    """A session that holds three tokens."""
    table: SessionTable[SessionCache] = SessionTable(model.runner.store.pool, model.runner.new_cache)
    sampler = SessionSampler.read(pb.Sampler(num_tokens_left=9), None, vocab_size=9, max_tokens=20)
    request = OpenRequest(
        session_id=session_id(1), epoch=1, tenant="t", client_id=CLIENT, resume=False, max_tokens=20, blocks=WHOLE,
        lease_s=60.0, transient=True, sampler=sampler,
    )  # fmt: skip
    session = table.open(request, 0.0)
    session.ring = RingPlace(ADDRESS, (), 64, 64)
    session.cache.commit(3)
    return session


@pytest.mark.parametrize(
    "change",
    ["nothing", "position", "token", "more tokens", "fork", "readout", "opened again", "truncated", "not of a ring"],
)
def test_a_launched_step_is_used_only_if_exactly_that_step_is_asked_for(model: Model, change: str) -> None:
    session = stepped(model)

    def step(position: int, token_ids: Sequence[int]) -> AdmittedStep:
        row = pb.StepRow(
            session_id=session_id(1), epoch=1, position=position, num_tokens=len(token_ids),
            num_result_tokens=len(token_ids), token_ids=token_ids,
        )  # fmt: skip
        message = pb.Step(rows=[row], blocks=WHOLE.to_message(), samples=True, ring=pb.Ring(first_address=ADDRESS))
        return AdmittedStep(StepWork(message, b"", None), [(message.rows[0], session, 0)])

    rows = next_rows([step(3, [5])])
    assert [(row.index, row.position) for row in rows] == [(0, 4)]
    ahead = StepAhead(rows, cast(LaunchedBatch, None), RowLogits(torch.zeros(1, 9)))
    ahead.expect([ChosenTokens(pb.SampledRow(tokens=[pb.SampledToken(token_id=7)]))], 0.0)
    session.cache.commit(4)
    following = step(3 if change == "position" else 4, [7, 7] if change == "more tokens" else [7])
    row = following.rows[0][0]
    if change == "token":
        row.token_ids[0] = 8
    elif change == "fork":
        row.source_session_id = session_id(2)
    elif change == "readout":
        row.readout.SetInParent()
    elif change == "opened again":
        session.version += 1
    elif change == "truncated":
        session.cache.truncate(3)
    elif change == "not of a ring":
        following.work.step.ClearField("ring")
    assert ahead.indices_of([following]) == ([0] if change == "nothing" else None)
    session.cache.clear()
