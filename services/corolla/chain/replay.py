"""Runs the segments of a recovery: it sends a session's earlier steps again through the hops that lack them."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

from corolla.chain.history import History
from corolla.chain.recovery_plan import CLIENT, ReplaySegment
from corolla.chain.reservations import ChainBinding, ChainLimits, NotOpened, Reservations
from corolla.chain.step_window import StepWindow, chunk_tokens
from corolla.chain.streams import DataPlane
from corolla.chassis.errors import CorollaError, HopLeaving, OutOfPages
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.page_hashes import TextDigests


class Replayer:
    """Runs the segments of all recoveries of a process, and bounds the tokens that they replay at a time."""

    def __init__(self, reservations: Reservations, plane: DataPlane, limits: ChainLimits) -> None:
        self._reservations = reservations
        self._plane = plane
        self._limits = limits
        self._budget = _TokenBudget(limits.max_replayed_tokens)

    async def replay(self, binding: ChainBinding, number: int, sequence: History, segment: ReplaySegment) -> int:
        """Runs the segment; returns when its hops that lacked tokens hold `sequence` up to the segment's end.

        The hops in `segment.scratch` lacked none, and only pass outputs on to the next hop. `number` is the index of
        the sequence's identity in `binding.identities`.

        Returns:
            How many tokens were replayed.

        Raises:
            CorollaError: OutOfPages if a scratch hop has no room; OutputsNotKept if the source no longer keeps its
                outputs; or another failure of a step.
        """
        hops = list(binding.chain.hops[segment.first : segment.last + 1])
        async with (
            self._budget.of(segment.end - segment.start),
            self._scratch(binding, number, sequence, segment) as (scratch, num_held),
        ):
            if num_held in segment.begins:
                segment = replace(segment, start=num_held)
            with StepWindow[None](len(hops), self._limits.step_timeout_s, lambda _, results: None) as window:
                for start, end in self._steps(binding, sequence, segment):
                    await window.make_room()
                    row = pb.StepRow(
                        session_id=binding.identities[number].session_id,
                        epoch=binding.identities[number].epoch,
                        position=start,
                        num_tokens=end - start,
                        scratch_session_id=scratch,
                    )
                    if segment.source == CLIENT:
                        inputs = sequence.inputs(start, end)
                        row.token_ids.extend(inputs.token_ids)
                        sent = self._plane.step(hops, [row], inputs.hidden, scratch_hops=segment.scratch_mask)
                    else:
                        source = binding.chain.hops[segment.source]
                        sent = self._plane.resend(source, hops, [row], segment.scratch_mask)
                    window.add(None, sent)
                await window.drain()
        return segment.end - segment.start

    def _steps(self, binding: ChainBinding, sequence: History, segment: ReplaySegment) -> Iterable[tuple[int, int]]:
        """The steps of a segment, each as the first and the end of its tokens.

        Other cuts than a prompt's own ones may change bits, which count unless the model computes in float32.
        """
        limits, start, end = self._limits, segment.start, segment.end
        if limits.follows_numerics and not self._are_cuts_equal(binding, segment):
            steps = sequence.shapes.replay(start, limits.chunk_tokens(binding.max_step_tokens))
            return [(begin, min(until, end)) for begin, until in steps if begin < end]
        is_shared = self._plane.has_ring(binding.chain.hops)
        most = limits.chunk_tokens(binding.max_step_tokens, during_decode=is_shared)
        size = chunk_tokens(end - start, len(segment.hops), most)
        return [(begin, min(begin + size, end)) for begin in range(start, end, size)]

    def _are_cuts_equal(self, binding: ChainBinding, segment: ReplaySegment) -> bool:
        if binding.open_options.adapter is not None:
            return False
        return all(self._plane.welcome(binding.chain.hops[hop].address).cuts_are_equal for hop in segment.hops)

    @asynccontextmanager
    async def _scratch(
        self, binding: ChainBinding, number: int, sequence: History, segment: ReplaySegment
    ) -> AsyncIterator[tuple[bytes, int]]:
        """Opens a scratch session on the scratch hops. Yields its id, empty without such hops, and what it holds there.

        The hops compute in the scratch session, so that the session that they hold stays as it is.
        """
        if not segment.scratch:
            yield b"", 0
            return
        identity = replace(binding.identities[number], session_id=secrets.token_bytes(16))
        prompts = binding.open_options.prompts
        # A cached token produces no output, so pages are of use only for tokens that no later hop lacks. No hop finds
        # the last token of a text.
        texts = None
        if segment.begins and binding.open_options.texts is not None:
            texts = [TextDigests(sequence.inputs(0, segment.begins[-1] + 1).token_ids)]
        open_options = replace(
            binding.open_options,
            max_tokens=segment.end,
            transient=True,
            recorded_chain=None,
            texts=texts,
            write_start=0,
            prompts=None if prompts is None else [prompts[number]],
            samplers=None,
            keeps_outputs=False,
        )
        hops = [binding.chain.hops[hop] for hop in sorted(segment.scratch)]
        try:
            num_held = await self._reservations.open_scratch(
                identity, open_options, binding.chain, sorted(segment.scratch)
            )
            yield identity.session_id, num_held
        except NotOpened as refused:
            failure = refused.failures[0][1]
            if isinstance(failure, HopLeaving):
                # A leaving hop serves its sessions until it has handed them over, and opens no new ones. OutOfPages
                # makes the recovery go on without scratch sessions.
                raise OutOfPages("a hop that leaves takes no further session") from None
            raise failure if isinstance(failure, CorollaError) else refused from None
        finally:
            self._reservations.give_back([identity], hops)


class _TokenBudget:
    """Bounds the tokens that are replayed at a time; replays start in the order in which they ask."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_taken = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def of(self, num_tokens: int) -> AsyncIterator[None]:
        num_tokens = min(num_tokens, self._max_tokens)
        async with self._turn:
            while self._num_taken + num_tokens > self._max_tokens:
                self._freed.clear()
                await self._freed.wait()
            self._num_taken += num_tokens
        try:
            yield
        finally:
            self._num_taken -= num_tokens
            self._freed.set()
