"""Mistakes that a change could make, each as a patch of the real code. The simulation must find every one of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest.mock import patch

from corolla.block_server.boundary_activations import BoundaryActivations
from corolla.block_server.hop_session import HopSession, OpenRequest, SessionEvent
from corolla.block_server.ring.last_hop import LastHop
from corolla.block_server.sessions import SessionTable
from corolla.cache.prefixes import PrefixPages
from corolla.chain.history import StepShapes
from corolla.chain.recovery import Recovery
from corolla.chain.recovery_plan import HopState
from corolla.chain.routes import Routes
from corolla.chain.session import ChainSession
from corolla.chain.token_stream import RoundTokens, TokenStream
from corolla.decoding.sampler_record import SamplerRecord
from corolla.v1 import blocks_pb2 as pb

Mutant = Callable[[], AbstractContextManager[object]]


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    with patch.object(owner, name, make(getattr(owner, name))):
        yield


def _no_fence() -> AbstractContextManager[object]:
    """A client accepts a result of any step of the session, of any epoch and position."""

    def make(_right: Callable[..., Any]) -> Callable[..., Any]:
        def push(self: TokenStream, row: pb.StepRow, sampled: pb.SampledRow) -> bool:
            self._rounds.append(RoundTokens(row.num_result_tokens - 1, sampled))
            self._wake()
            return True

        return push

    return _replaced(TokenStream, "push", make)


def _stale_epoch() -> AbstractContextManager[object]:
    """A hop computes steps of epochs that are over."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def for_step(self: Any, session_id: bytes, epoch: int, *args: Any, **options: Any) -> Any:
            held = self.get(session_id)
            return right(self, session_id, held.request.epoch if held is not None else epoch, *args, **options)

        return for_step

    @contextmanager
    def both() -> Iterator[None]:
        with (
            _replaced(SessionTable, "for_step", make),
            _replaced(SessionTable, "has_ended", lambda _right: lambda self, session_id, epoch: False),
        ):
            yield

    return both()


def _step_again() -> AbstractContextManager[object]:
    """A hop computes a step as often as it comes."""
    return _replaced(SessionTable, "note_step", lambda _right: lambda self, *_step: True)


def _round_again() -> AbstractContextManager[object]:
    """A token goes round as often as it comes."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def note_ring_step(self: HopSession[Any], epoch: int, client_id: bytes, position: int) -> bool:
            right(self, epoch, client_id, position)
            self.newest_ring_position = -1
            return True

        return note_ring_step

    return _replaced(HopSession, "note_ring_step", make)


def _credit_forgotten() -> AbstractContextManager[object]:
    """The last hop does not take in what a client grants."""
    return _replaced(LastHop, "on_credit", lambda _right: lambda self, credit, peer: None)


def _first_hop_of_before() -> AbstractContextManager[object]:
    """A session that is opened anew goes round to the first hop that it had before."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        addresses: dict[bytes, str] = {}

        def send_next(self: LastHop, step: pb.Step, rows: Sequence[pb.StepRow]) -> None:
            for row in rows:
                step.ring.first_address = addresses.setdefault(row.session_id, step.ring.first_address)
            right(self, step, rows)

        return send_next

    return _replaced(LastHop, "send_next", make)


def _position_zero() -> AbstractContextManager[object]:
    """A hop that was opened again is taken to hold everything, though it begins at nothing."""

    def make(_right: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, position: position

    return _replaced(HopState, "start_for", make)


def _not_closed() -> AbstractContextManager[object]:
    """Sessions are not closed at the end of an answer."""
    return _replaced(ChainSession, "close", lambda _right: lambda self: None)


def _pages_not_freed() -> AbstractContextManager[object]:
    """A session that is freed keeps its pages."""

    def make(_right: Callable[..., Any]) -> Callable[..., Any]:
        def free(self: Any, held: Any) -> None:
            del self._sessions[held.request.session_id]
            self._on_forget(held.request.session_id)

        return free

    return _replaced(SessionTable, "_free", make)


def _leases_for_ever() -> AbstractContextManager[object]:
    """Leases do not end."""
    return _replaced(SessionTable, "expire", lambda _right: lambda self, now_s: 0)


def _token_twice() -> AbstractContextManager[object]:
    """A step that came back is written into the history twice."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        async def decode(self: Any, reader: Any) -> tuple[int, int]:
            recovered, newest_id = self._budget.num_attempts, self._newest_id
            taken: tuple[int, int] = await right(self, reader)
            if self._budget.num_attempts > recovered:
                self._history.append([newest_id], is_prompt=False)
            return taken

        return decode

    return _replaced(ChainSession, "decode", make)


def _replay_too_short() -> AbstractContextManager[object]:
    """A replay leaves its first token out."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, start, *args, **options: right(self, start + 1, *args, **options)

    return _replaced(StepShapes, "replay", make)


def _no_quarantine() -> AbstractContextManager[object]:
    """Servers that failed are not left out: a recovery goes back to the one that it lost."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def replace_now(self: Any, chain: Any, lost: Any, num_tokens: int) -> Any:
            return right(self, chain, (), num_tokens)

        return replace_now

    return _replaced(Routes, "_replace_now", make)


def _others_prefix() -> AbstractContextManager[object]:
    """The beginning of any text is taken for that of any other."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def find(self: PrefixPages, key: Any) -> int | None:
            found: int | None = right(self, key)
            others = (page for known, page in self._pages.items() if known.group == key.group)
            return found if found is not None else next(others, None)

        return find

    return _replaced(PrefixPages, "find", make)


def _boundary_activations_shifted() -> AbstractContextManager[object]:
    """A hop sends boundary activations of the wrong positions again."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: BoundaryActivations, session_id: bytes, start: int, end: int) -> bytes:
            shift = 1 if start > self.range(session_id)[0] else 0
            rows: bytes = right(self, session_id, start - shift, end - shift)
            return rows

        return read

    return _replaced(BoundaryActivations, "read", make)


def _always_stays() -> AbstractContextManager[object]:
    """A session whose handover failed always stays, in any state."""

    def make(_right: Callable[..., Any]) -> Callable[..., Any]:
        def cancel_leaving(self: Any, session_id: bytes, version: int) -> None:
            held = self.get(session_id)
            if held is not None:
                held.apply(SessionEvent.STAYS)

        return cancel_leaving

    return _replaced(SessionTable, "cancel_leaving", make)


def _sampler_one_token_off() -> AbstractContextManager[object]:
    """A hop that makes a sampler anew stands one token too early."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def message(self: SamplerRecord, max_tokens: int | None = None) -> pb.Sampler:
            sampler: pb.Sampler = right(self, max_tokens)
            sampler.position = max(0, sampler.position - 1)
            return sampler

        return message

    return _replaced(SamplerRecord, "message", make)


def _sampler_kept() -> AbstractContextManager[object]:
    """A hop that opens a session once more goes on with the sampler that it has."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def open_again(self: Any, request: OpenRequest, now_s: float) -> Any:
            held = self.get(request.session_id)
            if held is not None and held.request.sampler is not None:
                request = replace(request, sampler=held.request.sampler)
            return right(self, request, now_s)

        return open_again

    return _replaced(SessionTable, "open", make)


def _answer_forgotten_by_penalties() -> AbstractContextManager[object]:
    """A sampler that is made anew does not know what the answer has so far."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def message(self: SamplerRecord, max_tokens: int | None = None) -> pb.Sampler:
            sampler: pb.Sampler = right(self, max_tokens)
            del sampler.token_ids[sampler.num_prompt_tokens :]
            return sampler

        return message

    return _replaced(SamplerRecord, "message", make)


def _growth_forgotten() -> AbstractContextManager[object]:
    """A session forgets for how many tokens it has got room while it grew."""

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        async def grow(self: Recovery, binding: Any, *args: Any) -> None:
            held = binding.open_options
            await right(self, binding, *args)
            binding.open_options = held

        return grow

    return _replaced(Recovery, "grow", make)


MUTANTS: Final[Mapping[str, Mutant]] = {
    "no fence": _no_fence,
    "stale epoch": _stale_epoch,
    "step again": _step_again,
    "round again": _round_again,
    "credit forgotten": _credit_forgotten,
    "first hop of before": _first_hop_of_before,
    "position zero": _position_zero,
    "not closed": _not_closed,
    "pages not freed": _pages_not_freed,
    "leases for ever": _leases_for_ever,
    "token twice": _token_twice,
    "replay too short": _replay_too_short,
    "no quarantine": _no_quarantine,
    "others' prefix": _others_prefix,
    "boundary activations shifted": _boundary_activations_shifted,
    "always stays": _always_stays,
    "sampler one token off": _sampler_one_token_off,
    "sampler kept": _sampler_kept,
    "answer forgotten by penalties": _answer_forgotten_by_penalties,
    "growth forgotten": _growth_forgotten,
}
"""The mutants by name."""
