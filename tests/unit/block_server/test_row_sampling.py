"""The last hop chooses the tokens of all rows together: each by its own sampler, and no row disturbs another."""

import gc
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corolla.block_server.row_sampling import ChosenTokens, SamplingRow, SessionSampler, in_parts, sample_rows
from corolla.chassis.errors import CorollaError, InternalError, MalformedMessage, NonFiniteOutput
from corolla.decoding.parameters import SamplingParams
from corolla.decoding.prompt_lookup import PromptLookup
from corolla.decoding.sampler_record import SamplerRecord
from corolla.decoding.sampling import Sampler
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import Edges, load_edges
from corolla.v1 import blocks_pb2 as pb
from corolla.v1.common_pb2 import SamplingParameters
from tests.checkpoints import make_tiny_checkpoint
from tests.sampled import sample

VOCABULARY_SIZE = 30
PROMPT = (3, 1, 4, 1, 5)
LOOKUP = pb.Drafts(source=pb.Drafts.SOURCE_PROMPT_LOOKUP, max_tokens=4)
ADAPTIVE = pb.Drafts(source=pb.Drafts.SOURCE_PROMPT_LOOKUP, max_tokens=4, is_adaptive=True)

NUM_TOKENS = 4000
WINDOW = 400
# What grows with the text would be sixteen times as much; memory that no cache holds any more costs some.
MAX_RATIO = 2.0
NUM_TRIES = 8

PARAMS = [
    SamplingParams(),
    SamplingParams(num_logprobs=3),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(0.9, seed=5),
    SamplingParams(1.0, top_k=7, top_p=0.9, presence_penalty=0.5, repetition_penalty=0.8, seed=2**63 + 1),
]


# A head with weights of its own, and one that shares the embedding's.
@pytest.fixture(scope="module", params=["llama", "gpt2"])
def edges(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Edges:
    folder: Path = make_tiny_checkpoint(request.param, tmp_path_factory.mktemp("edges") / "tiny")
    return load_edges(Checkpoint.from_pretrained(str(folder)), dtype=torch.float32)


def states(edges: Edges, num_tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(num_tokens, edges.config.hidden_size, generator=torch.Generator().manual_seed(seed))


def sampler_of(record: SamplerRecord) -> SessionSampler:
    return SessionSampler.read(record.message(), None, vocab_size=VOCABULARY_SIZE, max_tokens=10_000)


def record_of(params: SamplingParams, **options: Any) -> SamplerRecord:
    return SamplerRecord(params, params.seed or 0, PROMPT, max_new_tokens=NUM_TOKENS + 1, **options)


def row(hidden: torch.Tensor, params: SamplingParams, draft_ids: Sequence[int] = ()) -> SamplingRow:
    step = pb.StepRow(position=9, num_tokens=len(hidden), num_result_tokens=len(hidden), token_ids=[7, *draft_ids])
    return SamplingRow(step, hidden, len(hidden), sampler_of(record_of(params)))


def as_error(failure: Exception) -> CorollaError:
    return failure if isinstance(failure, CorollaError) else InternalError("unexpected")


def choose(sampler: SessionSampler, logits: torch.Tensor, draft_ids: Sequence[int] = ()) -> ChosenTokens:
    """The next tokens after a step with draft tokens, of `[tokens, V]` logits, or after one without, of `[V]`."""
    rows = logits.view(-1, logits.shape[-1])
    step = pb.StepRow(num_tokens=len(rows), num_result_tokens=len(rows), token_ids=[7, *draft_ids])
    (chosen,) = sample_rows(GIVEN, [SamplingRow(step, rows, len(rows), sampler)], as_error)
    assert isinstance(chosen, ChosenTokens)
    return chosen


class Given(Edges):
    """A head whose logits are the hidden states."""

    def __init__(self) -> None:
        pass

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


GIVEN = Given()


def ids_of(chosen: ChosenTokens | CorollaError) -> list[int]:
    assert isinstance(chosen, ChosenTokens)
    return [token.token_id for token in chosen.sampled.tokens]


@pytest.mark.parametrize("params", PARAMS)
def test_each_row_gets_what_its_sampler_chooses_alone(edges: Edges, params: SamplingParams) -> None:
    hidden = [states(edges, 1, 1), states(edges, 4, 2), states(edges, 1, 3)]
    sampler = Sampler(params, PROMPT)
    expected = [sample(sampler, logits).token_id for logits in edges.head(hidden[1])]
    # Two draft tokens are right and the third is not.
    drafts = [*expected[:2], (expected[2] + 1) % VOCABULARY_SIZE]
    greedy = SamplingParams()
    first, drafted, last = sample_rows(
        edges, [row(hidden[0], greedy), row(hidden[1], params, drafts), row(hidden[2], greedy)], as_error
    )
    assert ids_of(drafted) == expected[:3]
    assert ids_of(first) == edges.head(hidden[0]).argmax(-1).tolist()
    assert ids_of(last) == edges.head(hidden[2]).argmax(-1).tolist()
    assert isinstance(drafted, ChosenTokens)
    assert [len(token.top_token_ids) for token in drafted.sampled.tokens] == [params.num_logprobs or 0] * 3


def test_a_row_that_is_not_finite_leaves_the_other_rows_unaffected(edges: Edges) -> None:
    spoilt = states(edges, 1, 1) * torch.nan
    for params in PARAMS:
        failed, sound = sample_rows(edges, [row(spoilt, params), row(states(edges, 1, 2), params)], as_error)
        assert isinstance(failed, NonFiniteOutput)
        assert len(ids_of(sound)) == 1


def test_rows_that_are_chosen_together_are_those_that_are_chosen_alone(edges: Edges) -> None:
    many = [(params, draft) for params in PARAMS for draft in (None, LOOKUP)] * 4
    alone, together = ([sampler_of(record_of(params, drafts=drafts)) for params, drafts in many] for _ in range(2))
    for number in range(5):
        hidden = [states(edges, 1, 100 * number + index) for index in range(len(many))]
        step = pb.StepRow(position=9 + number, num_tokens=1, num_result_tokens=1, token_ids=[7])

        def rows(
            side: list[SessionSampler], step: pb.StepRow = step, hidden: list[torch.Tensor] = hidden
        ) -> list[SamplingRow]:
            return [SamplingRow(step, part, len(part), sampler) for part, sampler in zip(hidden, side, strict=True)]

        expected = [ids_of(sample_rows(edges, [each], as_error)[0]) for each in rows(alone)]
        assert [ids_of(each) for each in sample_rows(edges, rows(together), as_error)] == expected


def test_draft_tokens_are_checked_together_as_in_turn(edges: Edges) -> None:
    """Those of rows that look back leave the batches one after the other, as their first wrong draft token comes."""
    params = [params for params in PARAMS for _ in range(3)]
    hidden = [states(edges, 4, index) for index in range(len(params))]
    samplers = [Sampler(each, PROMPT) for each in params]
    right = [
        [sample(sampler, row).token_id for row in edges.head(each)]
        for sampler, each in zip(samplers, hidden, strict=True)
    ]
    drafts = [[*ids[: index % 4], (ids[index % 4] + 1) % VOCABULARY_SIZE, 3, 3] for index, ids in enumerate(right)]

    rows = [row(*each) for each in zip(hidden, params, (ids[:3] for ids in drafts), strict=True)]
    together = [ids_of(each) for each in sample_rows(edges, rows, as_error)]
    assert together == [ids[: index % 4 + 1] for index, ids in enumerate(right)]


@given(st.sampled_from(PARAMS), st.lists(st.integers(1, 40), min_size=1, max_size=4), st.booleans())
def test_a_sampler_that_is_made_anew_continues_where_the_last_one_stood(
    params: SamplingParams, lengths: list[int], has_drafts: bool
) -> None:
    """Whatever chose the tokens before, and however many of its choices were lost with it."""
    logits = torch.randn(sum(lengths), VOCABULARY_SIZE, generator=torch.Generator().manual_seed(1)) * 3
    whole = Sampler(params, PROMPT)
    expected = [sample(whole, each).token_id for each in logits]
    record = record_of(params, drafts=LOOKUP if has_drafts else None)
    chosen: list[int] = []
    for length in lengths:
        sampler = sampler_of(record)
        for _ in range(length):
            choice = choose(sampler, logits[len(chosen)])
            assert len(choice.draft_token_ids) <= LOOKUP.max_tokens
            chosen.extend(ids_of(choice))
            record.accept(chosen[-1:])
        if len(chosen) < len(expected):
            choose(sampler, logits[len(chosen)])  # lost on its way
    assert chosen == expected


def test_tokens_that_nobody_took_are_chosen_again() -> None:
    params = PARAMS[3]
    logits = torch.randn(40, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(1))
    whole = Sampler(params, PROMPT)
    expected = [sample(whole, each).token_id for each in logits]
    record = record_of(params)
    sampler = sampler_of(record)
    # All at once, as when many draft tokens are right; the answer's reader wants three of them.
    choice = choose(sampler, logits[:20], expected[:19])
    assert ids_of(choice) == expected[:20]
    record.accept(expected[:3])
    assert ids_of(choose(sampler_of(record), logits[3])) == expected[3:4]


def test_draft_tokens_stop_before_the_end_of_the_answer() -> None:
    record = SamplerRecord(SamplingParams(), 0, [1, 2, 3, 1, 2, 3, 1], max_new_tokens=7, drafts=LOOKUP)
    sampler = sampler_of(record)
    logits = torch.eye(VOCABULARY_SIZE)
    num_drafted = []
    for token_id in (2, 3, 1, 2, 3, 1, 2):
        num_drafted.append(len(choose(sampler, logits[token_id]).draft_token_ids))
    assert num_drafted == [4, 4, 3, 2, 1, 0, 0]


@pytest.mark.parametrize(
    "end_token_ids, max_new_tokens, expected",
    [((), 5, [3, 1, 4, 1, 5]), ((4,), 9, [3, 1, 4]), ((9,), 4, [3, 1, 4, 1])],
    ids=["neither", "end token", "limit"],
)
@pytest.mark.parametrize("num_choices", [1, 3, 8])
def test_nothing_is_chosen_behind_the_token_that_ends_an_answer(
    end_token_ids: Sequence[int], max_new_tokens: int, expected: list[int], num_choices: int
) -> None:
    """However many draft tokens of one step are right."""
    wanted = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    sampler = sampler_of(
        SamplerRecord(SamplingParams(), 0, PROMPT, max_new_tokens=max_new_tokens, end_token_ids=end_token_ids)
    )
    logits = torch.eye(VOCABULARY_SIZE)
    chosen: list[int] = []
    is_last = False
    while not is_last:
        following = wanted[len(chosen) :]
        drafts = following[: num_choices - 1]
        choice = choose(sampler, logits[following[:num_choices]], drafts)
        chosen.extend(ids_of(choice))
        is_last = choice.sampled.is_last
    assert chosen == expected
    assert not choice.draft_token_ids


def test_an_answer_that_goes_on_elsewhere_has_as_many_tokens_left() -> None:
    record = SamplerRecord(SamplingParams(), 0, PROMPT, generated_ids=[1, 2], max_new_tokens=4)
    record.accept([3])
    choice = choose(sampler_of(record), torch.eye(VOCABULARY_SIZE)[5])
    assert choice.sampled.is_last


def test_a_text_that_pauses_does_so_before_the_end_of_the_answer() -> None:
    record = SamplerRecord(SamplingParams(), 0, PROMPT, max_new_tokens=9)
    record.pauses_at = len(PROMPT) + 3
    for num_left in (3, 2, 1):
        assert record.message().num_tokens_left == num_left
        record.accept([1])
    record.pauses_at = None
    assert record.message().num_tokens_left == 6


def test_a_drafter_that_fails_does_not_fail_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: PromptLookup, num_tokens: int, sampler: object) -> list[int]:
        raise MemoryError

    record = SamplerRecord(SamplingParams(), 0, [1, 2, 3, 1, 2, 3, 1], max_new_tokens=100, drafts=LOOKUP)
    sampler = sampler_of(record)
    logits = torch.eye(VOCABULARY_SIZE)
    assert len(choose(sampler, logits[2]).draft_token_ids) > 0
    with monkeypatch.context() as patch:
        patch.setattr(PromptLookup, "draft", fail)
        assert ids_of(choose(sampler, logits[3])) == [3]
    choice = choose(sampler, logits[1])
    assert (ids_of(choice), list(choice.draft_token_ids)) == ([1], [])


@pytest.mark.parametrize(
    "lengths, sizes",
    [([1] * 128, [128]), ([1] * 300, [128, 128, 44]), ([200, 100, 20, 9, 65, 54, 128, 1], [1, 2, 3, 1, 1])],
)
def test_rows_of_a_large_vocabulary_come_in_parts(lengths: Sequence[int], sizes: Sequence[int]) -> None:
    sampler = SessionSampler(Sampler(SamplingParams(), ()), None, 262_144, 100)
    rows = [SamplingRow(pb.StepRow(), torch.empty(length, 1), length, sampler) for length in lengths]
    parts = list(in_parts(rows))
    assert [len(part) for part in parts] == sizes
    assert list(itertools.chain(*parts)) == rows


REFUSED = {
    "temperature": pb.Sampler(parameters=SamplingParameters(temperature=-1)),
    "an id beyond the vocabulary": pb.Sampler(token_ids=[VOCABULARY_SIZE]),
    "a prompt longer than the text": pb.Sampler(token_ids=[1], num_prompt_tokens=2),
    "a position behind all tokens": pb.Sampler(parameters=SamplingParameters(temperature=1), position=10_001),
    "too many draft tokens": pb.Sampler(drafts=pb.Drafts(source=pb.Drafts.SOURCE_PROMPT_LOOKUP, max_tokens=65)),
}


@pytest.mark.parametrize("message", REFUSED.values(), ids=REFUSED)
def test_a_sampler_that_cannot_be_is_refused(message: pb.Sampler) -> None:
    with pytest.raises(MalformedMessage):
        SessionSampler.read(message, None, vocab_size=VOCABULARY_SIZE, max_tokens=10_000)


def choice_seconds(params: SamplingParams, drafts: pb.Drafts | None) -> list[float]:
    """Processor time of each choice of an answer, drafts included."""
    sampler = sampler_of(record_of(params, drafts=drafts))
    logits = torch.randn(4096, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(1))
    stamps = [time.process_time()]
    for index in range(NUM_TOKENS):
        choose(sampler, logits[index])
        stamps.append(time.process_time())
    return [later - earlier for earlier, later in itertools.pairwise(stamps)]


@pytest.mark.parametrize("drafts", [None, ADAPTIVE])
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.full
def test_token_4000_costs_as_much_as_token_40(params: SamplingParams, drafts: pb.Drafts | None) -> None:
    ratios = []
    for _ in range(NUM_TRIES):
        gc.collect()
        seconds = choice_seconds(params, drafts)
        ratios.append(statistics.median(seconds[-WINDOW:]) / statistics.median(seconds[40 : 40 + WINDOW]))
        # A neighbour on the machine can only disturb; work that grows with the text would show every time.
        if ratios[-1] <= MAX_RATIO:
            return
    pytest.fail(f"later tokens cost more: {ratios}")
