"""Executes one iteration: it computes the rows of some steps as one batch, or one by one if the batch fails.

On the first hop an iteration begins with the embedding; on the last hop it ends with the head and chosen tokens.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from corolla.block_server.mtp_drafts import IterationDrafts, MtpDrafts
from corolla.block_server.readouts import read_out
from corolla.block_server.row_sampling import (
    ChosenTokens,
    RowLogits,
    SamplingRow,
    all_logits_of,
    in_parts,
    likeliest_of,
    logits_of,
    sample_rows,
)
from corolla.block_server.step_admission import AdmittedStep
from corolla.block_server.step_ahead import StepAhead, next_rows
from corolla.chassis.errors import CorollaError, InternalError, NonFiniteOutput, OutOfMemory, StepFailed
from corolla.chassis.handlers import call_path
from corolla.compute.base import BlockRunner, LaunchedBatch, RowWork
from corolla.compute.device import is_out_of_memory
from corolla.compute.threads import single_threaded_pool
from corolla.decoding.parameters import SamplingParams
from corolla.decoding.sampling import Sampler, sample_together
from corolla.models.edges import Edges
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.device_copies import begin_reading, copied_numbers, picked, to_device
from corolla.wire.span import Span
from corolla.wire.tensors import from_payload

log = logging.getLogger(__name__)

# A sampler with these settings runs everything that chooses tokens.
_EVERYTHING: Final = SamplingParams(1.0, top_p=0.5, min_p=0.1, seed=0, repetition_penalty=1.1, presence_penalty=0.1)


RowOutput = Tensor | ChosenTokens | CorollaError
"""The output of a row: `[num_tokens, H]` in the model's dtype, or chosen tokens, or an error.

Outputs that leave this server are on the CPU if they were copied there; others are on the model's device."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of an iteration.

    Attributes:
        outputs: one output for each row, in order.
        has_raised: whether the batch raised; its rows were then computed one by one.
        edge_seconds: the seconds that embedding, head and choice of tokens took.
        began_s: when the device began, if that was before the iteration; else None.
    """

    outputs: tuple[RowOutput, ...]
    has_raised: bool = False
    edge_seconds: float = 0.0
    began_s: float | None = None


@dataclass(frozen=True, slots=True)
class LaunchedIteration:
    """An iteration that a device may not have computed yet.

    Attributes:
        kept: the indices of its rows in the batch.
        to_host: waits for a copy of all outputs on the CPU, `[tokens, H]` in the model's dtype; None: none leave, or
            they are there.
        early: the logits of its rows, if the head was launched, too.
        embed_seconds: the seconds that embedding took.
        began_s: when the device began, if that was before the iteration.
    """

    admitted: Sequence[AdmittedStep]
    blocks: Span
    batch: LaunchedBatch
    kept: Sequence[int]
    to_host: Callable[[], Tensor] | None
    early: "_EarlyLogits | None"
    embed_seconds: float
    began_s: float | None


@dataclass(eq=False, repr=False)
class BatchExecutor:
    """Computes the batches of iterations.

    Args:
        runner: computes the blocks.
        edges: embedding and head, as far as this server has them; None if it has neither.
        num_sampling_threads: how many threads find what grammars allow while a step is computed.
        launches_head_early: whether to launch the head before it is known which rows are finite; None: only if its
            device is not a CPU.
        mtp: drafts with the model's own block; None: this server does not.
    """

    runner: BlockRunner
    edges: Edges | None = None
    clock: Callable[[], float] = time.monotonic
    num_sampling_threads: int = 1
    launches_head_early: bool | None = None
    mtp: MtpDrafts | None = None

    def __post_init__(self) -> None:
        if self.launches_head_early is None:
            self.launches_head_early = self.edges is not None and self.edges.device.type != "cpu"
        self._sampling_threads = (
            single_threaded_pool(self.num_sampling_threads, "sampling") if self.num_sampling_threads > 1 else None
        )
        self._ahead: StepAhead | None = None

    @property
    def is_ahead(self) -> bool:
        """True if the next step of the decoding sessions is launched already, so that nothing should join it."""
        return self._ahead is not None

    def close(self) -> None:
        """Ends the sampling threads."""
        if self._sampling_threads is not None:
            self._sampling_threads.shutdown()

    def compute(
        self, admitted: Sequence[AdmittedStep], blocks: Span, may_go_ahead: Callable[[], bool] = lambda: False
    ) -> BatchResult:
        """Launches all rows as one batch and finishes it; if that raises, computes row by row: a bad row fails alone.

        Computing a row again gives the same numbers: the failed batch wrote only to positions that no session counts as
        held, and these positions are written again. Tokens are chosen once, after all rows have been computed.

        Args:
            may_go_ahead: is asked, once this batch is launched, whether to launch the next step, too.
        """
        preparing = self._prepare_choices(admitted)
        launched: LaunchedIteration | None = None
        try:
            launched = self._launched(admitted, _row_works(admitted), blocks, preparing, may_go_ahead)
            result = self._finished(launched)
        except Exception as failure:
            error, place = error_of(failure), call_path(failure)
        else:
            return self._with_choices(result, admitted, launched.early, preparing)
        has_chosen = launched is not None and launched.early is not None and launched.early.has_chosen
        # The exception has been released, too: nothing holds tensors in a device's memory that may be full, nor the
        # step that was launched on what the failed batch wrote.
        launched = self._ahead = None
        rows = [AdmittedStep(batch.work, [row]) for batch in admitted for row in batch.rows]
        log.error("iteration failed", extra={"rows": len(rows), "reason": error.reason, "where": place})
        if has_chosen:
            # Samplers have chosen, which they must not do again, so clients recover their sessions with new ones.
            failed = StepFailed("a block server could not compute a step")
            return BatchResult((failed,) * len(rows), has_raised=True)
        result = BatchResult(tuple(self._alone(row, blocks) for row in rows), has_raised=True)
        return self._with_choices(result, admitted, None, preparing)

    def launch(self, admitted: Sequence[AdmittedStep], blocks: Span) -> LaunchedIteration | None:
        """Launches what `compute` computes, and waits for nothing. `finish` must follow before any other iteration.

        Its rows take the most probable token if any.

        Returns:
            None if `compute` must compute the steps: no recorded step fits, the next step of a row can be launched
            ahead, or a model drafts, for which an event loop would wait.
        """
        work = _row_works(admitted)
        if (
            self._drafts(admitted)
            or any(batch.comes_round_here for batch in admitted)
            or any(row.adapter is not None or row.prompts is not None for row in work)
        ):
            return None
        try:
            if not self.runner.may_be_recorded(work, blocks):
                return None
            return self._launched(admitted, work, blocks)
        except Exception as failure:
            error_of(failure)
            log.warning("a step could not be launched", extra={"where": call_path(failure)})
            return None

    def finish(self, iteration: LaunchedIteration) -> BatchResult | None:
        """Waits for an iteration of `launch`. Returns None if that fails; then `compute` must compute its steps."""
        try:
            result = self._finished(iteration)
        except Exception as failure:
            error_of(failure)
            log.warning("a step that was launched failed", extra={"where": call_path(failure)})
            return None
        return self._with_choices(result, iteration.admitted, iteration.early, ())

    def prepare_next(self, iteration: LaunchedIteration) -> None:
        """Prepares the next step of the rows of an iteration, which comes once the other hops have computed this one.

        It is called when nothing else waits.
        """
        expected = [row._replace(position=row.position + 1) for row in iteration.batch.rows]
        try:
            self.runner.prepare(expected, iteration.blocks)
        except Exception as failure:
            error_of(failure)
            log.warning("the next step could not be prepared", extra={"where": call_path(failure)})

    @torch.inference_mode()
    def _launched(
        self,
        admitted: Sequence[AdmittedStep],
        work: Sequence[RowWork],
        blocks: Span,
        preparing: Sequence[Future[bytes | None]] = (),
        may_go_ahead: Callable[[], bool] = lambda: False,
    ) -> LaunchedIteration:
        """Launches an iteration, or takes the step that was launched ahead; then goes ahead of its tokens, if it can.

        The head runs before it is known which rows are finite, so that a device has more to compute meanwhile.
        """
        to_host, embed_seconds, began_s = None, 0.0, None
        ahead, kept = self._take_ahead(admitted)
        if ahead is not None:
            batch, began_s = ahead.launched, ahead.began_s
            early: _EarlyLogits | None = _EarlyLogits.launched_before(admitted, ahead.logits.part(kept))
        else:
            hidden, embed_seconds = self._inputs(admitted)
            batch, kept, early = self.runner.launch(work, hidden, blocks), range(len(work)), None
            if batch.hidden.device.type != "cpu" and any(each.sends_all_outputs for each in admitted):
                # It begins before it is known which outputs are finite.
                to_host = begin_reading(batch.hidden)
            if self.launches_head_early and self.edges is not None:
                early = _EarlyLogits.launched(self.edges, admitted, batch)
            batch.reading.begin()
        # A model drafts for the next step once the tokens of this one are known.
        if not self._drafts(admitted) and early is not None and early.has_one_of_each_row and may_go_ahead():
            early = self._go_ahead(admitted, blocks, preparing, early)
        return LaunchedIteration(admitted, blocks, batch, kept, to_host, early, embed_seconds, began_s)

    @torch.inference_mode()
    def _finished(self, iteration: LaunchedIteration) -> BatchResult:
        """Waits for an iteration. Its result has no tokens yet."""
        batch, kept = iteration.batch, iteration.kept
        finite = self.runner.finish(batch, kept, iteration.blocks)
        lengths = [row.num_tokens for row in batch.rows]
        parts = _split(batch.hidden, lengths)
        if iteration.to_host is not None:
            leave = [each.sends_all_outputs for each in iteration.admitted for _ in each.rows]
            copied = zip(_split(iteration.to_host(), lengths), parts, leave, strict=True)
            parts = [on_host if leaves else part for on_host, part, leaves in copied]
        outputs = tuple(_row_outputs([parts[index] for index in kept], finite))
        return BatchResult(outputs, edge_seconds=iteration.embed_seconds, began_s=iteration.began_s)

    def _with_choices(
        self,
        result: BatchResult,
        admitted: Sequence[AdmittedStep],
        early: "_EarlyLogits | None",
        preparing: Sequence[Future[bytes | None]],
    ) -> BatchResult:
        """The result, with the tokens of the rows for which tokens are chosen here."""
        drafts = None
        if self.mtp is not None and admitted[0].work.step.blocks.end == self.mtp.num_model_blocks:
            drafts = IterationDrafts(self.mtp, admitted, result.outputs, error_of)
        if drafts is None and not any(batch.samples for batch in admitted):
            return result
        wait(preparing)
        began_s = self.clock()
        outputs = self._with_tokens(admitted, result.outputs, None if result.has_raised else early, drafts)
        if drafts is not None:
            drafts.finish()
        ended_s = self.clock()
        if self._ahead is not None:
            self._ahead.expect(outputs, ended_s)
        return replace(result, outputs=outputs, edge_seconds=result.edge_seconds + ended_s - began_s)

    def _drafts(self, admitted: Sequence[AdmittedStep]) -> bool:
        """A model drafts for one of the rows."""
        samplers = (session.request.sampler for batch in admitted for _, session, _ in batch.rows)
        return any(each is not None and each.runs_model for each in samplers)

    def _take_ahead(self, admitted: Sequence[AdmittedStep]) -> tuple[StepAhead | None, Sequence[int]]:
        """Takes the step that was launched ahead, with the indices of its rows that were admitted.

        If a row was admitted that it lacks, it is dropped.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None, ()
        indices = ahead.indices_of(admitted)
        return (None, ()) if indices is None else (ahead, indices)

    def _go_ahead(
        self,
        admitted: Sequence[AdmittedStep],
        blocks: Span,
        preparing: Sequence[Future[bytes | None]],
        early: "_EarlyLogits",
    ) -> "_EarlyLogits":
        """Launches the next step of the rows if the device can know its input, and before it the choice of its tokens.

        Returns the logits, with the tokens that were chosen.
        """
        edges, rows = self.edges, next_rows(admitted)
        work = [row.work() for row in rows]
        if edges is None or not edges.has_embedding or not rows or not self.runner.may_be_recorded(work, blocks):
            return early
        wait(preparing)
        samplers = [batch.sampler_for(row, session) for batch in admitted for row, session, _ in batch.rows]
        choosing = [each for each in samplers if each is not None]
        try:
            logits, token_ids = early.logits.with_choices(choosing)
        except Exception as failure:
            # Penalties may count the chosen tokens already, so samplers must not choose again.
            log.error("choosing tokens failed", extra={"rows": len(choosing), "where": call_path(failure)})
            return replace(early, logits=early.logits.with_failed_choices(choosing, error_of(failure)))
        try:
            token_ids = picked(token_ids, [row.index for row in rows])
            launched = self.runner.launch(work, partial(edges.embed, token_ids), blocks)
            has_likeliest = any((each := row.session.request.sampler) and each.takes_likeliest for row in rows)
            hidden, reading = launched.hidden, launched.reading
            head = likeliest_of(edges, hidden, reading) if has_likeliest else all_logits_of(edges, hidden)
            reading.begin()
            self._ahead = StepAhead(rows, launched, head)
        except Exception as failure:
            error_of(failure)
            log.warning("the next step could not be launched ahead", extra={"where": call_path(failure)})
        return replace(early, logits=logits)

    def _prepare_choices(self, admitted: Sequence[AdmittedStep]) -> Sequence[Future[bytes | None]]:
        """Lets threads find what grammars allow while a step runs."""
        if self._sampling_threads is None:
            return ()
        samplers = [batch.sampler_for(row, session) for batch in admitted for row, session, _ in batch.rows]
        return [
            self._sampling_threads.submit(each.sampler.allowed)
            for each in samplers
            if each is not None and each.sampler.has_grammar
        ]

    def _alone(self, row: AdmittedStep, blocks: Span) -> Tensor | CorollaError:
        try:
            hidden, _ = self._inputs([row])
            launched = self.runner.launch(_row_works([row]), hidden, blocks)
            (output,) = _row_outputs([launched.hidden], self.runner.finish(launched, (0,), blocks))
            return output
        except Exception as failure:
            error, place = error_of(failure), call_path(failure)
        log.error("row failed", extra={"reason": error.reason, "where": place})
        return error

    def warm_up(self) -> None:
        """Computes one token that belongs to no session: the blocks, and embedding and head if this server has them.

        Raises:
            OutOfPages: all pages are promised to sessions.
        """
        self.runner.warm_up()
        if self.edges is None:
            return
        if self.edges.has_embedding:
            self.edges.embed(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        if self.edges.has_head:
            logits = self.edges.head(torch.zeros(1, self.edges.hidden_size))
            # What chooses tokens is compiled now, not while the first caller waits.
            sample_together([Sampler(_EVERYTHING, ())], logits)
            logits.cpu()

    def _inputs(self, admitted: Sequence[AdmittedStep]) -> tuple[Tensor, float]:
        """Returns the inputs of all rows, `[tokens, H]` in the model's dtype, and the seconds that embedding took."""
        began_s = self.clock()
        embedded = self._embedded([batch for batch in admitted if batch.brings_ids])
        embed_seconds = self.clock() - began_s if embedded else 0.0
        parts = iter(embedded)
        hidden = [part for batch in admitted for part in ([next(parts)] if batch.brings_ids else _received(batch))]
        if len(hidden) == 1:
            return hidden[0], embed_seconds
        # Hidden states from the wire lie on the CPU.
        device = embedded[0].device if embedded else hidden[0].device
        return torch.cat([to_device(part, device, part.dtype) for part in hidden]), embed_seconds

    def _embedded(self, batches: Sequence[AdmittedStep]) -> Sequence[Tensor]:
        """Embeds the token ids of all steps at once. Returns `[tokens, H]` for each step, on the embedding's device."""
        if not batches:
            return ()
        if self.edges is None:
            raise InternalError("a server without embedding admitted a step of token ids")
        token_ids: list[int] = []
        positions: list[int] = []
        lengths: list[int] = []
        for batch in batches:
            for row, _, _ in batch.rows:
                token_ids.extend(row.token_ids)
                positions.extend(range(row.position, row.position + row.num_tokens))
            lengths.append(len(token_ids) - sum(lengths))
        numbers = [(token_ids, torch.int64), (positions, torch.int64)]
        return _split(self.edges.embed(*copied_numbers(numbers, self.edges.device)), lengths)

    def _with_tokens(
        self,
        admitted: Sequence[AdmittedStep],
        outputs: Sequence[RowOutput],
        early: "_EarlyLogits | None",
        drafts: IterationDrafts | None,
    ) -> tuple[RowOutput, ...]:
        """Returns the outputs, with tokens in place of the outputs of steps that sample."""
        replaced = list(outputs)
        waiting: list[tuple[int, SamplingRow]] = []
        read: dict[int, pb.SampledRow | CorollaError] = {}
        index = 0
        for batch in admitted:
            if not batch.samples:
                index += len(batch.rows)
                continue
            for row, session, _ in batch.rows:
                output = replaced[index]
                if isinstance(output, Tensor):
                    if row.HasField("readout"):
                        read[index] = self._read_out(row.readout, output)
                    if (sampler := batch.sampler_for(row, session)) is None:
                        replaced[index] = ChosenTokens()
                    else:
                        waiting.append((index, SamplingRow(row, output, row.num_result_tokens, sampler)))
                index += 1
        if waiting:
            logits = None if early is None else early.part([row for _, row in waiting])
            chosen = self._sampled([row for _, row in waiting], logits, drafts)
            for (index, _), sampled in zip(waiting, chosen, strict=True):
                replaced[index] = sampled
        for index, found in read.items():
            replaced[index] = _with_readout(replaced[index], found)
        return tuple(replaced)

    def _read_out(self, readout: pb.Readout, hidden: Tensor) -> pb.SampledRow | CorollaError:
        """What a readout asks for; `hidden` is `[num_tokens, H]` in the model's dtype on its device."""
        if self.edges is None:
            return InternalError("a server without head admitted a step that samples")
        try:
            return read_out(self.edges, readout, hidden)
        except Exception as failure:
            log.error("reading out failed", extra={"where": call_path(failure)})
            return error_of(failure)

    def _sampled(
        self, rows: Sequence[SamplingRow], logits: RowLogits | None, drafts: IterationDrafts | None
    ) -> Sequence[ChosenTokens | CorollaError]:
        """Chooses the tokens of all rows. If the `logits` of all rows are not given, it computes the head first."""
        if self.edges is None:
            return [InternalError("a server without head admitted a step that samples")] * len(rows)
        sampled: list[ChosenTokens | CorollaError] = []
        predict = None if drafts is None else drafts.predict
        for part in (rows,) if logits is not None else in_parts(rows):
            try:
                sampled.extend(sample_rows(self.edges, part, error_of, logits, predict))
            except Exception as failure:
                log.error("head failed", extra={"rows": len(part), "where": call_path(failure)})
                sampled.extend([error_of(failure)] * len(part))
        return sampled


@dataclass(frozen=True, slots=True)
class _EarlyLogits:
    """The logits of an iteration's rows, before it is known which outputs are finite.

    Attributes:
        rows: the rows for which tokens are chosen.
        num_choices: how many of the logits each of them has.
        has_one_of_each_row: whether each row of the iteration has exactly one of the logits.
    """

    rows: Sequence[pb.StepRow]
    num_choices: Sequence[int]
    logits: RowLogits
    has_one_of_each_row: bool

    @property
    def has_chosen(self) -> bool:
        """True if samplers have chosen tokens, which they must not do again."""
        return len(self.logits.slow) > 0

    @classmethod
    def launched(cls, edges: Edges, admitted: Sequence[AdmittedStep], batch: LaunchedBatch) -> "_EarlyLogits | None":
        """Launches the head behind a batch, whose reading then brings the most probable tokens.

        Returns None if no tokens are chosen, or if the logits of all rows at a time would take too much memory.
        """
        pairs = [(row, step.sampler_for(row, session)) for step in admitted for row, session, _ in step.rows]
        outputs = _split(batch.hidden, [row.num_tokens for row, _ in pairs])
        rows = [
            SamplingRow(row, output, row.num_result_tokens, sampler)
            for (row, sampler), output in zip(pairs, outputs, strict=True)
            if sampler is not None
        ]
        if not rows or len(list(in_parts(rows))) > 1:
            return None
        num_choices = [row.num_choices for row in rows]
        whole = batch.hidden if sum(num_choices) == len(batch.hidden) else None
        try:
            logits = logits_of(edges, rows, batch.reading, whole)
        except Exception as failure:
            error_of(failure)
            # Once it is known which outputs are finite, the head is tried again, and says what fails.
            log.warning("the head could not be launched early", extra={"where": call_path(failure)})
            return None
        return cls([row.row for row in rows], num_choices, logits, len(rows) == len(pairs) == sum(num_choices))

    @classmethod
    def launched_before(cls, admitted: Sequence[AdmittedStep], logits: RowLogits) -> "_EarlyLogits":
        """The logits of all rows, one for each, which were launched before."""
        rows = [row for step in admitted for row, _, _ in step.rows]
        return cls(rows, [1] * len(rows), logits, True)

    def part(self, rows: Sequence[SamplingRow]) -> RowLogits | None:
        """The logits of these rows, if they were launched; `rows` lacks those whose output is not finite."""
        if len(rows) == len(self.rows):
            return self.logits
        wanted = {id(row.row) for row in rows}
        indices: list[int] = []
        start = num_found = 0
        for row, num_choices in zip(self.rows, self.num_choices, strict=True):
            if id(row) in wanted:
                indices.extend(range(start, start + num_choices))
                num_found += 1
            start += num_choices
        return self.logits.part(indices) if num_found == len(rows) else None


def _row_outputs(parts: Sequence[Tensor], finite: Sequence[bool]) -> Iterator[Tensor | CorollaError]:
    for part, is_finite in zip(parts, finite, strict=True):
        yield part if is_finite else NonFiniteOutput("a block's output is not finite")


def _with_readout(output: RowOutput, found: pb.SampledRow | CorollaError) -> RowOutput:
    """Adds what was read out to the chosen tokens of a row. An error of either is the row's error."""
    if isinstance(found, CorollaError):
        return found
    if isinstance(output, ChosenTokens):
        output.sampled.MergeFrom(found)
    return output


def _row_works(admitted: Sequence[AdmittedStep]) -> list[RowWork]:
    """The rows of all steps, as a runner takes them."""
    work = []
    for batch in admitted:
        for row, session, _ in batch.rows:
            request = session.request
            products = None if request.adapter is None else request.adapter.products
            work.append(
                RowWork(session.cache, row.position, row.num_tokens, request.prompts, products, request.long_factors)
            )
    return work


def _split(hidden: Tensor, lengths: list[int]) -> Sequence[Tensor]:
    """The parts of `[sum of lengths, H]`, of any dtype and device; views of it, unless it is one part."""
    # `torch.split` passes through three functions of Python first.
    return (hidden,) if len(lengths) == 1 else hidden.split_with_sizes(lengths)


def _received(batch: AdmittedStep) -> Iterator[Tensor]:
    """Yields the hidden states `[tokens, H]` of the admitted rows of a step, on the CPU, in the dtype of the wire."""
    step = batch.work.step
    num_tokens = sum(row.num_tokens for row in step.rows)
    states = from_payload(batch.work.payload, step.dtype, num_tokens, step.hidden_size)
    if len(batch.rows) == len(step.rows):
        yield states
        return
    for row, _, offset in batch.rows:
        yield states[offset : offset + row.num_tokens]


def error_of(failure: Exception) -> CorollaError:
    """Returns the error for the clients of failed rows, without the exception's text, which may contain their data.

    Raises:
        AcceleratorError: `failure` is one, and says something else than that memory is too small. Every later call of
            the device would fail, too, so the engine ends, and with it the process; clients recover their sessions
            elsewhere.
    """
    if isinstance(failure, torch.AcceleratorError) and not is_out_of_memory(failure):
        # The driver's message contains no data of clients.
        log.critical("the device failed", extra={"failure": str(failure).partition("\n")[0]})
        raise failure
    if isinstance(failure, CorollaError):
        return failure.with_traceback(None)
    if is_out_of_memory(failure):
        return OutOfMemory("a block server has too little memory to compute a step")
    return StepFailed("a block server could not compute a step")
