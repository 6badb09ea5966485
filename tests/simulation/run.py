"""Runs the scenario of a seed from beginning to end."""

import asyncio
import gc
import hashlib
import random
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from corolla.block_server.hop_session import SessionEvent, SessionState
from tests.simulation.callers import Answer, Caller
from tests.simulation.cluster import LEASE_S, Cluster
from tests.simulation.faults import Faults
from tests.simulation.invariants import Fence, Invariants, touched
from tests.simulation.loop import Stuck, VirtualLoop
from tests.simulation.scenario import Scenario, draw
from tests.simulation.standbys import StandbyInvariants

_WARM_UP_S: Final = 2.0
_MOST_SECONDS: Final = 400.0


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a run.

    Attributes:
        broken: what did not hold; empty for a good run.
        digest: of all that happened; the same for the same seed.
        num_late: how often a session left a silent hop whose token was late.
        num_standbys: how often a hop had the standby that it should have.
        num_used_standbys: how many losses ended at a standby that was filled.
        transitions: how often each event happened to a session in each state, on all servers.
    """

    seed: int
    broken: tuple[str, ...]
    digest: str
    seconds: float
    num_tokens: int
    num_recoveries: int
    num_late: int
    num_standbys: int
    num_used_standbys: int
    num_errors: int
    num_lies: int
    transitions: Counter[tuple[SessionState, SessionEvent]]


def replay_command(seed: int) -> str:
    """The command that repeats this run and shows it."""
    return f"python -m tests.simulation --seed {seed}"


def run(seed: int, say: Callable[[str], None] = lambda line: None) -> Report:
    """Runs the scenario of a seed.

    Args:
        say: called with each line of the log of the run.
    """
    scenario = draw(seed)
    is_collecting = gc.isenabled()
    gc.disable()  # when it comes by depends on everything that ran before
    gc.freeze()  # each later collection would go through all that is there
    loop = VirtualLoop()
    try:
        with _entropy(seed):
            return loop.run_until_complete(_run(loop, scenario, say))
    finally:
        loop.close()
        gc.collect()  # only what this run left
        if is_collecting:
            gc.enable()


async def _run(loop: VirtualLoop, scenario: Scenario, say: Callable[[str], None]) -> Report:
    return await _Run(loop, scenario, say).run()


class _Run:
    def __init__(self, loop: VirtualLoop, scenario: Scenario, say: Callable[[str], None]) -> None:
        self._loop = loop
        self._scenario = scenario
        self._say = say
        self._digest = hashlib.blake2b(digest_size=8)
        self._cluster = Cluster(loop, scenario)
        self._invariants = Invariants(self._cluster)
        self._standbys = StandbyInvariants(self._cluster, self._invariants.fault, touched)
        self._fence = Fence(self._cluster, self._invariants.fault)
        self._cluster.network.tamper = self._fence.tamper
        self._callers = [
            Caller(
                number, conversation, scenario.model, lambda client: self._cluster.clients[client],
                self._invariants.fault, self._delivered, self._ended, pages_are_scarce=scenario.is_tight,
            )
            for number, conversation in enumerate(scenario.conversations)
        ]  # fmt: skip

    async def run(self) -> Report:
        scenario, invariants = self._scenario, self._invariants
        started_s = self._loop.time()
        self._say(f"spans {', '.join(map(str, scenario.spans))}; {scenario}")
        for fault in scenario.faults:
            self._say(f"from {_WARM_UP_S:.0f} s on {fault}")
        with (
            invariants.no_errors_logged(),
            invariants.sessions_follow_their_table(),
            invariants.only_silent_hops_are_late(),
            self._standbys.losses_are_cheap(),
        ):
            try:
                async with asyncio.timeout(_MOST_SECONDS):
                    await self._live()
            except TimeoutError:
                invariants.fault("the run does not end")
            except Stuck as stuck:
                invariants.fault(str(stuck))
        answers = [answer for caller in self._callers for answer in caller.answers]
        seconds = self._loop.time() - started_s
        await self._cluster.dissolve()
        return Report(
            seed=scenario.seed, broken=tuple(invariants.broken), digest=self._digest.hexdigest(), seconds=seconds,
            num_tokens=sum(len(each.token_ids) for answer in answers for each in answer.completions),
            num_recoveries=sum(answer.usage.recoveries for answer in answers),
            num_late=invariants.num_late,
            num_standbys=self._standbys.num_seen, num_used_standbys=self._standbys.num_used,
            num_errors=sum(answer.error is not None for answer in answers), num_lies=self._fence.num_lies,
            transitions=invariants.transitions,
        )  # fmt: skip

    async def _live(self) -> None:
        scenario = self._scenario
        await asyncio.sleep(_WARM_UP_S)
        faults = Faults(
            self._cluster, self._callers, self._fence.damage, lambda mishap: self._note(f"mishap: {mishap}")
        )
        self._invariants.happened = faults.happened
        for fault in scenario.faults:
            faults.schedule(fault)
        await asyncio.gather(*(caller.run() for caller in self._callers))
        if not scenario.faults:
            await asyncio.sleep(1.0)
            self._invariants.nothing_left(is_calm=True)
        over_s = max((fault.at_s + fault.seconds for fault in scenario.faults), default=0.0)
        # Killed servers that would come back in a minute may stay away.
        rest_s = min(over_s, 20.0) + _WARM_UP_S + 1000.0 - self._loop.time()
        await asyncio.sleep(max(0.0, rest_s) + LEASE_S + 2.0)
        self._invariants.nothing_left(is_calm=False)

    def _delivered(self, answer: Answer, index: int) -> None:
        completion = answer.completions[index]
        of = f"conversation {answer.conversation}" + (f", completion {index}" if index else "")
        self._note(f"token {len(completion.token_ids)} of {of}: {completion.token_ids[-1]}")
        # The first of several answers waits until the others have forked, which may take longer than a lease.
        if len(answer.completions) == 1 or len(completion.token_ids) > 1:
            self._invariants.delivered(completion)
            if completion.session is not None and not completion.finish_reason:
                self._standbys.delivered(completion.session)

    def _ended(self, answer: Answer) -> None:
        self._invariants.ended(answer)
        end = ", ".join(each.finish_reason for each in answer.completions)
        if answer.error is not None:
            end = answer.error.reason
        self._note(f"conversation {answer.conversation}: {end}, {answer.usage.recoveries} recoveries")

    def _note(self, text: str) -> None:
        line = f"{self._loop.time() - 1000:8.3f} s  {text}"
        self._digest.update(line.encode())
        self._say(line)


@contextmanager
def _entropy(seed: int) -> Iterator[None]:
    """All randomness of the services comes from the seed."""
    stream = random.Random(f"entropy of {seed}")
    state = random.getstate()
    given = secrets.token_bytes, secrets.token_hex
    random.seed(seed)
    secrets.token_bytes = lambda nbytes=None: stream.randbytes(nbytes or 32)
    secrets.token_hex = lambda nbytes=None: stream.randbytes(nbytes or 32).hex()
    try:
        yield
    finally:
        random.setstate(state)
        secrets.token_bytes, secrets.token_hex = given
