"""Drafts with the multi-token prediction block of the model, on the last hop, for all rows of an iteration at once.

The block keeps its keys and values in the pages of the session, as one more layer. The number for a token follows from
this token and the earlier ones, as with every layer, so prefixes, forks, standbys and handovers have them, too. For a
token at position `i` the block needs the last block's output for the token before. A session that has come from another
server, or begins with the prefix of another session, lacks it for one token, which the block then computes from zeros:
no answer depends on that, and drafts hardly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from corolla.block_server.row_sampling import PredictedRow, SessionSampler
from corolla.block_server.step_admission import AdmittedStep
from corolla.cache.store import SessionCache
from corolla.chassis.errors import CorollaError
from corolla.compute.base import RowWork
from corolla.compute.span_runner import SpanRunner
from corolla.decoding.sampling import sample_together
from corolla.decoding.speculator import MtpDrafter
from corolla.models.mtp import MtpParts
from corolla.v1 import blocks_pb2 as pb


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
        return None if self.sampler is None else self.sampler.mtp_drafter

    @property
    def held(self) -> int:
        """Where the row ends; draft tokens that were wrong lie before it."""
        return self.position + len(self.output)

    @property
    def first(self) -> int:
        """The first position that the block computes: no output precedes the first token of a text."""
        return max(1, self.position)

    @property
    def last(self) -> int:
        """The last position that the block computes before draft tokens: a draft needs that of the newest token."""
        return self.end if self.num_drafts else self.end - 1


@dataclass(frozen=True, slots=True)
class _Followed:
    """A row for which the block drafts.

    Attributes:
        token_ids: the tokens that the block reads.
        outputs: the last block's outputs for the tokens before these, `[len(token_ids), H]` in the model's dtype.
    """

    row: FollowedRow
    sampler: SessionSampler
    drafter: MtpDrafter
    token_ids: Sequence[int]
    outputs: Tensor


@dataclass(frozen=True, eq=False)
class MtpDrafts:
    """Runs the block for rows of different sessions.

    Attributes:
        runner: runs the decoder layer of the block.
        num_model_blocks: how many blocks the model has; the last one's outputs are what the block takes.
    """

    runner: SpanRunner
    parts: MtpParts
    num_model_blocks: int

    @torch.inference_mode()
    def follow(self, rows: Sequence[FollowedRow]) -> list[tuple[FollowedRow, Exception]]:
        """Computes the block for the tokens that the rows hold, and drafts what follows.

        All other tokens of the rows get zeros: other sessions may share their pages, and other servers take them.

        Returns:
            The rows that could not be prepared, and why.
        """
        followed: list[_Followed] = []
        failed: list[tuple[FollowedRow, Exception]] = []
        for row in rows:
            row.num_drafts = max(0, min(row.num_drafts, row.cache.num_reserved_tokens - row.end))
            try:
                if (prepared := self._prepared(row)) is not None:
                    followed.append(prepared)
            except Exception as failure:
                failed.append((row, failure))
        computed = {id(each.row) for each in followed}
        cleared = [(row.cache, row.position, row.held) for row in rows if id(row) not in computed]
        cleared += [(each.row.cache, each.row.position, each.row.first) for each in followed]
        cleared += [(each.row.cache, each.row.last + 1, each.row.held) for each in followed]
        self.runner.store.clear_predicted(cleared)
        self._draft(*self._computed(followed))
        return failed

    def _prepared(self, row: FollowedRow) -> _Followed | None:
        """Prepares what the block reads of a row, and the pages that it writes; None if nothing drafts for it."""
        sampler, drafter = row.sampler, row.drafter
        # A client may have sent a shorter text than it has steps for.
        if sampler is None or drafter is None or len(drafter.token_ids) <= row.last:
            return None
        cache, end = row.cache, row.end + row.num_drafts
        if end > cache.num_tokens:
            cache.prepare(cache.num_tokens, end - cache.num_tokens)
        output = row.output.to(self.parts.device)
        outputs = output[: row.last - row.position]
        if row.position:
            outputs = torch.cat((self._before(row, output), outputs))
        newest = row.end - row.position
        # A view would keep the outputs of the whole step in memory.
        cache.newest_output = row.end, output[newest - 1 : newest].clone()
        return _Followed(row, sampler, drafter, drafter.token_ids[row.first : row.last + 1], outputs)

    def _computed(self, followed: Sequence[_Followed]) -> tuple[list[_Followed], Tensor]:
        """Computes the block for the tokens of all rows.

        Returns:
            The rows that draft, and the block's output for their newest tokens, `[rows, H]` in the model's dtype.
        """
        works = [RowWork(each.row.cache, each.row.first, len(each.token_ids)) for each in followed if each.token_ids]
        if not works:
            return [], torch.empty(0, 0)
        token_ids = [token_id for each in followed for token_id in each.token_ids]
        inputs = self._inputs(token_ids, self.parts.normed(torch.cat([each.outputs for each in followed])))
        predicted = self.runner.predict(works, inputs)
        are_finite = predicted.isfinite().all(-1).tolist()
        spoilt: list[tuple[SessionCache, int, int]] = []
        drafting: list[_Followed] = []
        newest: list[int] = []
        end = 0
        for each in followed:
            start, end = end, end + len(each.token_ids)
            if not all(are_finite[start:end]):
                # Servers refuse such numbers, and other sessions would have them from shared pages.
                spoilt.append((each.row.cache, each.row.first, each.row.held))
            elif each.row.num_drafts:
                drafting.append(each)
                newest.append(end - 1)
        self.runner.store.clear_predicted(spoilt)
        return drafting, self.parts.output(predicted[newest])

    def _before(self, row: FollowedRow, output: Tensor) -> Tensor:
        """The last block's output for the token before a row, `[1, H]`; zeros where it is not known."""
        known = row.cache.newest_output
        return known[1] if known is not None and known[0] == row.position else torch.zeros_like(output[:1])

    def _draft(self, drafting: Sequence[_Followed], output: Tensor) -> None:
        """Drafts for all rows, token by token, with forks of their samplers; see `ModelDrafter`.

        Args:
            output: the block's output for the newest token of each row, `[rows, H]` in the model's dtype.
        """
        going = [(each, each.sampler.sampler.fork()) for each in drafting]
        number = 0
        while going:
            chosen = sample_together([sampler for _, sampler in going], self.parts.logits(output))
            number += 1
            kept: list[int] = []
            for index, ((each, _), token) in enumerate(zip(going, chosen, strict=True)):
                # An error is the draft's alone: the numbers of the block are not finite.
                if isinstance(token, CorollaError):
                    continue
                each.drafter.drafted.append(token.token_id)
                if number < each.row.num_drafts:
                    kept.append(index)
            going = [going[index] for index in kept]
            if going:
                works = [RowWork(each.row.cache, each.row.end + number, 1) for each, _ in going]
                newest = [each.drafter.drafted[-1] for each, _ in going]
                output = self.parts.output(self.runner.predict(works, self._inputs(newest, output[kept])))

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
            failed = self._drafts.follow(rows)
        except Exception as failure:
            self._error_of(failure)
            failed = [(row, failure) for row in rows]
            self._drafts.runner.store.clear_predicted([(row.cache, row.position, row.held) for row in rows])
        for row, reason in failed:
            self._error_of(reason)
            if row.drafter is not None and row.sampler is not None:
                row.sampler.stop_drafting(reason)
