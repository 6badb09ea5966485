"""Drafts with the multi-token prediction block of the model, on the last hop, for all rows of an iteration at once.

The block keeps its keys and values in the pages of the session, as one more layer. The number for a token follows from
this token and the earlier ones, as with every layer, so prefixes, forks, standbys and handovers have them, too. For a
token at position `i` the block needs the last block's output for the token before. A session that has come from another
server, or begins with the prefix of another session, lacks it for one token, which the block then computes from zeros:
no answer depends on that, and drafts hardly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from corolla.block_server.row_sampling import PredictedRow, SessionSampler
from corolla.block_server.step_admission import AdmittedStep
from corolla.cache.store import SessionCache
from corolla.chassis.errors import CorollaError
from corolla.compute.base import RowWork
from corolla.decoding.sampling import sample_together
from corolla.decoding.speculator import MtpDrafter
from corolla.models.mtp import MtpParts
from corolla.v1 import blocks_pb2 as pb


class Predictor(Protocol):
    """Runs the decoder layer of the block: a `SpanRunner`."""

    def predict(self, rows: Sequence[RowWork], hidden: Tensor) -> Tensor:
        """See `SpanRunner.predict`. `hidden` and the result are `[tokens, H]` in the model's dtype on its device."""
        ...


@dataclass(slots=True)
class FollowedRow:
    """A row that the last block has computed.

    Attributes:
        cache: the session's cache, which holds the row's tokens.
        position: the position of the row's first token.
        end: where the session's next step begins.
        output: the last block's output, `[num_tokens, H]` in the model's dtype, on any device.
        sampler: the sampler of the session; None: it has none.
        num_drafts: how many tokens to draft after the token at `end`, which the sampler has chosen.
    """

    cache: SessionCache
    position: int
    end: int
    output: Tensor
    sampler: SessionSampler | None
    num_drafts: int = 0

    @property
    def drafter(self) -> MtpDrafter | None:
        """The drafter of the session; None: nothing drafts for it."""
        speculator = None if self.sampler is None else self.sampler.speculator
        return None if speculator is None else speculator.mtp

    @property
    def first(self) -> int:
        """The first position that the block computes: no output precedes the first token of a text."""
        return max(1, self.position)

    @property
    def last(self) -> int:
        """The last position that the block computes before draft tokens: a draft needs that of the newest token."""
        return self.end if self.num_drafts else self.end - 1


@dataclass(frozen=True, eq=False)
class MtpDrafts:
    """Runs the block for rows of different sessions.

    Attributes:
        num_model_blocks: how many blocks the model has; the last one's outputs are what the block takes.
    """

    predictor: Predictor
    parts: MtpParts
    num_model_blocks: int

    @torch.inference_mode()
    def follow(self, rows: Sequence[FollowedRow]) -> None:
        """Computes the block for the tokens that the rows hold, and drafts what follows.

        Sessions for which nothing drafts get zeros: others may share their pages.
        """
        followed: list[FollowedRow] = []
        for row in rows:
            row.num_drafts = max(0, min(row.num_drafts, row.cache.num_reserved_tokens - row.end))
            drafter = row.drafter
            # A client may have sent a shorter text than it has steps for.
            if drafter is not None and len(drafter.token_ids) > row.last:
                followed.append(row)
                row.cache.clear_predicted(row.position, row.first)
            else:
                row.cache.clear_predicted(row.position, row.end)
        self._draft([row for row in followed if row.num_drafts], self._computed(followed))

    def _computed(self, rows: Sequence[FollowedRow]) -> Tensor:
        """Computes the block for the tokens of all rows. Returns its output for the last token of drafting rows."""
        works = [RowWork(row.cache, row.first, row.last + 1 - row.first) for row in rows if row.last >= row.first]
        token_ids: list[int] = []
        hidden: list[Tensor] = []
        last: list[int] = []
        for row in rows:
            output, drafter = row.output.to(self.parts.device), row.drafter
            if drafter is None:
                continue
            if row.position:
                hidden.append(self._before(row, output))
            hidden.append(output[: row.last - row.position])
            token_ids += drafter.token_ids[row.first : row.last + 1]
            if row.num_drafts:
                last.append(len(token_ids) - 1)
            newest = row.end - row.position
            # A view would keep the outputs of the whole step in memory.
            row.cache.newest_output = row.end, output[newest - 1 : newest].clone()
        if not works:
            return torch.empty(0, 0)
        inputs = self._inputs(token_ids, self.parts.normed(torch.cat(hidden)))
        return self.parts.output(self.predictor.predict(works, inputs)[last])

    def _before(self, row: FollowedRow, output: Tensor) -> Tensor:
        """The last block's output for the token before a row, `[1, H]`; zeros where it is not known."""
        known = row.cache.newest_output
        return known[1] if known is not None and known[0] == row.position else torch.zeros_like(output[:1])

    def _draft(self, rows: Sequence[FollowedRow], output: Tensor) -> None:
        """Drafts for all rows, token by token, with forks of their samplers; see `ModelDrafter`.

        Args:
            output: the block's output for the newest token of each row, `[rows, H]` in the model's dtype.
        """
        going = [(row, row.sampler.sampler.fork(), row.drafter) for row in rows if row.sampler is not None]
        number = 0
        while going:
            chosen = sample_together([sampler for _, sampler, _ in going], self.parts.logits(output))
            number += 1
            kept: list[int] = []
            for index, ((row, _, drafter), token) in enumerate(zip(going, chosen, strict=True)):
                # An error is the draft's alone: the numbers of the block are not finite.
                if drafter is None or isinstance(token, CorollaError):
                    continue
                drafter.drafted.append(token.token_id)
                if number < row.num_drafts:
                    kept.append(index)
            going = [going[index] for index in kept]
            if going:
                works = [RowWork(row.cache, row.end + number, 1) for row, _, _ in going]
                newest = [drafter.drafted[-1] for _, _, drafter in going if drafter is not None]
                output = self.parts.output(self.predictor.predict(works, self._inputs(newest, output[kept])))

    def _inputs(self, token_ids: Sequence[int], normed: Tensor) -> Tensor:
        return self.parts.input(torch.tensor(token_ids, device=self.parts.device), normed)


class IterationDrafts:
    """The drafts of one iteration, whose rows hold their new tokens where they have an output.

    Args:
        outputs: the output of each row, in order, `[num_tokens, H]` in the model's dtype; or an error.
        error_of: raises what ends the server, such as the failure of a device.
    """

    def __init__(
        self,
        drafts: MtpDrafts,
        admitted: Sequence[AdmittedStep],
        outputs: Sequence[object],
        error_of: Callable[[Exception], CorollaError],
    ) -> None:
        self._drafts = drafts
        self._error_of = error_of
        self._choosing: dict[int, FollowedRow] = {}
        self._others: list[FollowedRow] = []
        rows = [(batch, row, session) for batch in admitted for row, session, _ in batch.rows]
        for (batch, row, session), output in zip(rows, outputs, strict=True):
            if not isinstance(output, Tensor):
                continue
            end = row.position + row.num_tokens
            followed = FollowedRow(session.cache, row.position, end, output, session.request.sampler)
            if batch.sampler_for(row, session) is None:
                self._others.append(followed)
            else:
                self._choosing[id(row)] = followed

    def predict(self, predicted: Sequence[PredictedRow]) -> None:
        """Drafts for rows that have their tokens; with the first of them come the rows for which none are chosen."""
        rows, self._others = self._others, []
        for each in predicted:
            row: pb.StepRow = each.row.row
            followed = self._choosing.pop(id(row))
            followed.end += len(each.sampled.tokens) - row.num_result_tokens
            followed.num_drafts = each.num_drafts
            rows.append(followed)
        self._follow(rows)

    def finish(self) -> None:
        """Ends with the rows that `predict` did not get. Nothing is drafted for those whose choice failed."""
        for row in self._choosing.values():
            row.sampler = None
        self._follow([*self._others, *self._choosing.values()])

    def _follow(self, rows: Sequence[FollowedRow]) -> None:
        if not rows:
            return
        try:
            self._drafts.follow(rows)
        except Exception as failure:
            self._error_of(failure)
            for row in rows:
                row.cache.clear_predicted(row.position, row.end)
                if row.drafter is not None and row.sampler is not None:
                    row.sampler.stop_drafting(failure)
