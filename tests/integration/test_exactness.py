"""Chains of 1, 2, 3 and 5 hops answer the demo model's prompts as the unsplit model does, token for token.

The unsplit model's answers are kept in `tests/golden/`; the tests compute some of them again as a proof.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from corolla.client.service import ClientBounds
from corolla.models.demo import demo_checkpoint
from corolla.sdk.async_client import AsyncClient
from corolla.sdk.results import Completion, FinishReason, Usage
from tests.golden import NUM_NEW_TOKENS, SAFE_GAP, SAMPLINGS, GoldenAnswer, cases, golden_answers, prompt_texts
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm
from tests.reference import Sampling, Unsplit, smallest_gap

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

CHAINS = {
    "one hop": ["0:30"],
    "two hops": ["0:13", "13:30"],
    "three hops": ["0:7", "7:20", "20:30"],
    "five hops": ["0:7", "7:9", "9:20", "20:21", "21:30"],
}
MAX_STREAMS = 40
# Servers in production choose their kernels by the rule.
TUNED = {"products": "auto"}
# Nothing dies here, and this runs with what others leave of the processors: slowness is never a loss.
PATIENT_ROUTER = {"lease_ms": 120_000, "redis_timeout_ms": 10_000}
PATIENT_CLIENT = {"step_timeout_s": 600.0}
PATIENCE = ClientBounds(silence_s=120.0, open_timeout_s=120.0)


@pytest.fixture(scope="module")
def unsplit() -> Iterator[Unsplit]:
    """Computes in another thread than the event loop, which renews the servers' leases."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Unsplit.demo()
    torch.set_num_threads(num_threads)


def patient_swarm(
    folder: Path, chain: str, *, server: dict[str, Any] | None = None, client: dict[str, Any] | None = None
) -> Swarm:
    """A swarm of the demo model that takes no slowness for a loss."""
    patient_client = {**PATIENT_CLIENT, **(client or {})}
    patient: dict[str, Any] = {"client": patient_client, "bounds": PATIENCE, "router": PATIENT_ROUTER}
    return Swarm(folder, demo_checkpoint(), CHAINS[chain], server=server, **patient)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_hops(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncClient]:
    """A client of a chain of two hops."""
    async with patient_swarm(tmp_path_factory.mktemp("two_hops"), "two hops") as swarm, swarm.connect() as client:
        yield client


# --- the matrix -------------------------------------------------------------------------------------------------------


async def test_a_chain_equals_the_unsplit_model(tmp_path: Path, unsplit: Unsplit) -> None:
    """A fifth of the answers. They are kept greedy and sampled by turns, so an odd distance takes both."""
    answers = golden_answers()[::5]
    assert {bool(answer.sampling) for answer in answers} == {False, True}
    await assert_chain_equals(tmp_path, "two hops", answers, unsplit)


@pytest.mark.full
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.timeout(1800)
async def test_chains_equal_the_unsplit_model_in_every_case(tmp_path: Path, unsplit: Unsplit, chain: str) -> None:
    """Each prompt on each chain, greedy on one and sampled on the next; each answer on two of the chains."""
    answers = golden_answers()
    first = list(CHAINS).index(chain)
    taken = [answers[index + (index // 2 + first) % 2] for index in range(0, len(answers), 2)]
    await assert_chain_equals(tmp_path, chain, taken, unsplit)


async def assert_chain_equals(folder: Path, chain: str, answers: Sequence[GoldenAnswer], unsplit: Unsplit) -> None:
    """All cases, many at once; every wrong one is named."""
    places = asyncio.Semaphore(MAX_STREAMS)
    async with (
        patient_swarm(folder, chain, server=TUNED if len(CHAINS[chain]) <= 2 else None) as swarm,
        swarm.connect() as client,
    ):

        async def fault_of(answer: GoldenAnswer) -> str | None:
            async with places:
                given = await (streamed if answer.sampling else unary)(client, answer)
            return difference(answer, given, unsplit)

        # The longest prompts first: a late one would run alone.
        by_length = sorted(answers, key=lambda answer: -len(answer.prompt_ids))
        faults = await asyncio.gather(*(fault_of(answer) for answer in by_length))
        await swarm.until_empty()
    assert [fault for fault in faults if fault] == []


def prompt_of(answer: GoldenAnswer) -> str | list[int]:
    """The prompt as text, unless the kept prompt is only its beginning."""
    text = prompt_texts()[answer.prompt]
    return answer.prompt_ids if answer.prompt == LONGEST else text


LONGEST = "english-declaration"


@dataclass(frozen=True, slots=True)
class Given:
    """The chain's answer."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    usage: Usage


async def unary(client: AsyncClient, answer: GoldenAnswer, num_tokens: int = NUM_NEW_TOKENS) -> Given:
    generation = await client.generate(prompt_of(answer), max_tokens=num_tokens, ignore_eos=True, **answer.sampling)
    return Given(list(generation.token_ids), generation.text, generation.finish_reason, generation.usage)


async def streamed(client: AsyncClient, answer: GoldenAnswer, num_tokens: int = NUM_NEW_TOKENS) -> Given:
    texts: list[str] = []
    token_ids: list[int] = []
    async with client.stream(prompt_of(answer), max_tokens=num_tokens, ignore_eos=True, **answer.sampling) as stream:
        async for chunk in stream:
            texts.append(chunk.text)
            token_ids += chunk.token_ids
    assert stream.usage is not None
    assert sum(bool(text) for text in texts) > num_tokens // 10, "text comes in pieces"
    return Given(token_ids, "".join(texts), stream.finish_reason, stream.usage)


def difference(answer: GoldenAnswer, given: Given, unsplit: Unsplit) -> str | None:
    """The first difference of a complete answer, if any."""
    expected = answer.token_ids
    if given.token_ids != expected:
        pairs = enumerate(zip(given.token_ids, expected, strict=False))
        num_right = next((index for index, (one, other) in pairs if one != other), len(given.token_ids))
        return f"{answer.name}: {len(given.token_ids)} tokens, of which the first {num_right} are right"
    if given.text != unsplit.decode(expected):
        return f"{answer.name}: right tokens, wrong text"
    counted = (given.usage.prompt_tokens, given.usage.completion_tokens)
    if given.finish_reason is not FinishReason.LENGTH or counted != (len(answer.prompt_ids), NUM_NEW_TOKENS):
        return f"{answer.name}: ended by {given.finish_reason}, counted {counted}"
    return None


# --- everything at once -----------------------------------------------------------------------------------------------

PAGE_TOKENS = 16
NUM_CROWDED_TOKENS = 12
# Prompts are cut into small chunks, of which an iteration takes a few beside what decodes.
CROWDED_SERVER = {"page_tokens": PAGE_TOKENS, "max_batch_tokens": 64}
CROWDED_CLIENT = {"prefill_chunk_tokens": 24}


@pytest.mark.timeout(900)
@pytest.mark.full
async def test_reuse_small_chunks_and_full_batches_change_no_token(tmp_path: Path, unsplit: Unsplit) -> None:
    """All prompts at once: first new ones, then with cached prefixes, then as continuations."""
    kept = golden_answers()
    answers = [pair[number % 2] for number, pair in enumerate(zip(kept[::2], kept[1::2], strict=True))]
    swarm = patient_swarm(tmp_path, "three hops", server=CROWDED_SERVER, client=CROWDED_CLIENT)
    async with swarm, swarm.connect() as client:

        async def ask(answer: GoldenAnswer) -> Given:
            return await unary(client, answer, NUM_CROWDED_TOKENS)

        async def go_on(answer: GoldenAnswer) -> Completion:
            """The first tokens of a greedy answer come as a part of the prompt."""
            text = answer.prompt_ids + answer.token_ids[:NUM_CROWDED_TOKENS]
            generation = await client.generate(text, max_tokens=NUM_CROWDED_TOKENS, ignore_eos=True)
            assert generation.usage.cached_tokens == (len(text) - 1) // PAGE_TOKENS * PAGE_TOKENS
            return generation.completions[0]

        for round_number in range(2):
            for answer, given in zip(answers, await asyncio.gather(*map(ask, answers)), strict=True):
                assert given.token_ids == answer.token_ids[:NUM_CROWDED_TOKENS], (round_number, answer.name)
                assert given.text == unsplit.decode(given.token_ids)
                num_cached = (len(answer.prompt_ids) - 1) // PAGE_TOKENS * PAGE_TOKENS if round_number else 0
                assert given.usage.cached_tokens == num_cached, (round_number, answer.name)
        greedy = [answer for answer in answers if not answer.sampling]
        for answer, completion in zip(greedy, await asyncio.gather(*map(go_on, greedy)), strict=True):
            assert list(completion.token_ids) == answer.token_ids[NUM_CROWDED_TOKENS : 2 * NUM_CROWDED_TOKENS]
        port = swarm.servers[0].metrics_port
        num_batches = await sample(port, "corolla_hop_batch_rows_count")
        assert await sample(port, "corolla_hop_batch_rows_sum") / num_batches > 2, "sessions share iterations"
        await swarm.until_empty()


# --- what is kept is true ---------------------------------------------------------------------------------------------


async def test_golden_answers_are_complete(unsplit: Unsplit) -> None:
    answers = golden_answers()
    assert [(answer.prompt, answer.sampling) for answer in answers] == cases()
    texts = prompt_texts()
    for answer in answers:
        token_ids = unsplit.encode(texts[answer.prompt])
        assert answer.prompt_ids == (token_ids[:600] if answer.prompt == LONGEST else token_ids)
        assert len(answer.token_ids) == NUM_NEW_TOKENS
        assert answer.smallest_gap >= SAFE_GAP
    lengths = {len(answer.prompt_ids) for answer in answers}
    assert (len(texts), min(lengths), max(lengths)) == (20, 1, 600)


@pytest.mark.full
async def test_golden_answers_are_those_of_the_unsplit_model(unsplit: Unsplit) -> None:
    """The first tokens of each parameter combination's first answer, with end tokens in force."""
    num_tokens = 10
    seen: list[Sampling] = []
    for answer in golden_answers():
        combination: Sampling = {**answer.sampling}
        combination.pop("seed", None)
        if combination in seen:
            continue
        seen.append(combination)
        reference = await asyncio.to_thread(unsplit.generate, answer.prompt_ids, num_tokens, answer.sampling)
        assert reference.token_ids == until_eos(answer.token_ids, unsplit)[:num_tokens], answer.name
        assert smallest_gap(reference, answer.sampling) >= answer.smallest_gap - 1e-4
    assert len(seen) == 1 + len(SAMPLINGS)


def until_eos(token_ids: list[int], unsplit: Unsplit) -> list[int]:
    """The answer as it is where end tokens are in force, the end token included."""
    end = next((index for index, token_id in enumerate(token_ids) if token_id in unsplit.eos_token_ids), None)
    return token_ids if end is None else token_ids[: end + 1]


# --- ends, streams, log-probabilities ---------------------------------------------------------------------------------


@pytest.mark.full
async def test_answers_end_with_the_models_own_end(two_hops: AsyncClient, unsplit: Unsplit) -> None:
    ending = [answer for answer in golden_answers() if len(until_eos(answer.token_ids, unsplit)) <= 64]
    assert {bool(answer.sampling) for answer in ending} == {False, True}
    generations = await asyncio.gather(
        *(two_hops.generate(prompt_of(answer), max_tokens=NUM_NEW_TOKENS, **answer.sampling) for answer in ending)
    )
    for answer, generation in zip(ending, generations, strict=True):
        expected = until_eos(answer.token_ids, unsplit)
        assert list(generation.token_ids) == expected, answer.name
        assert generation.text == unsplit.decode(expected)
        assert generation.finish_reason is FinishReason.EOS
        assert unsplit.tokenizer.decode(expected[-1:]) not in generation.text


@pytest.mark.full
async def test_a_stop_sequence_cuts_where_the_text_has_it(two_hops: AsyncClient, unsplit: Unsplit) -> None:
    # Places within tokens, over several tokens, and within characters' tokens; the second stop is never met.
    cuts = [
        ("code-python", 17, 24),
        ("english-sonnet", 30, 37),
        ("russian", 9, 11),
        ("emoji", 6, 8),
        ("digits", 11, 16),
    ]
    greedy = {answer.prompt: answer for answer in golden_answers() if not answer.sampling}
    for prompt, start, end in cuts:
        answer = greedy[prompt]
        text = unsplit.decode(answer.token_ids)
        stop = text[start:end]
        visible = text[: text.index(stop)]
        needed = next(
            count for count in range(1, NUM_NEW_TOKENS + 1) if stop in unsplit.decode(answer.token_ids[:count])
        )
        async with two_hops.stream(
            prompt_of(answer), max_tokens=NUM_NEW_TOKENS, ignore_eos=True, stop=[stop, "never met"]
        ) as stream:
            deltas = [chunk.text async for chunk in stream]
        assert "".join(deltas) == visible, (prompt, stop)
        assert list(stream.token_ids) == answer.token_ids[:needed], (prompt, stop)
        assert stream.finish_reason is FinishReason.STOP_SEQUENCE


@pytest.mark.full
async def test_streamed_text_is_the_unary_text(two_hops: AsyncClient, unsplit: Unsplit) -> None:
    """Cut after any number of tokens, within characters too: the same text."""
    answer = next(each for each in golden_answers() if each.prompt == "emoji" and each.sampling)
    lengths = range(1, 12)
    pairs = await asyncio.gather(
        *(
            asyncio.gather(streamed(two_hops, answer, num_tokens), unary(two_hops, answer, num_tokens))
            for num_tokens in lengths
        )
    )
    expected = [unsplit.decode(answer.token_ids[:num_tokens]) for num_tokens in lengths]
    assert any(text.endswith("\ufffd") for text in expected)
    assert not all(text.endswith("\ufffd") for text in expected)
    for text, num_tokens, (stream, whole) in zip(expected, lengths, pairs, strict=True):
        assert stream.token_ids == whole.token_ids == answer.token_ids[:num_tokens]
        assert stream.text == whole.text == text


@pytest.mark.full
async def test_logprobs_are_those_of_the_unsplit_model(two_hops: AsyncClient, unsplit: Unsplit) -> None:
    num_tokens, num_top = 12, 5
    options: list[Sampling] = [
        {},
        {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.3, "seed": 7},
    ]
    prompt = prompt_texts()["english-fact"]
    for sampling in options:
        reference = await asyncio.to_thread(
            unsplit.generate, unsplit.encode(prompt), num_tokens, sampling, ignore_eos=True
        )
        expected = reference.logits.log_softmax(dim=-1)
        generation = await two_hops.generate(
            prompt, max_tokens=num_tokens, ignore_eos=True, logprobs=num_top, **sampling
        )
        assert list(generation.token_ids) == reference.token_ids
        assert len(generation.logprobs) == num_tokens
        for entry, token_id, row in zip(generation.logprobs, reference.token_ids, expected, strict=True):
            best = row.topk(num_top)
            assert entry.token_id == token_id
            assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            assert [top.token_id for top in entry.top] == best.indices.tolist()
            assert [top.logprob for top in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert entry.text == unsplit.tokenizer.decode([token_id])


# --- several at once --------------------------------------------------------------------------------------------------


@pytest.mark.full
async def test_completions_of_one_prompt_are_solo_runs_with_seeds_in_a_row(
    two_hops: AsyncClient, unsplit: Unsplit
) -> None:
    num_tokens, seed = 16, 40
    sampling: Sampling = {"temperature": 1.0, "top_p": 0.95, "seed": seed}
    prompt = prompt_texts()["english-sonnet"]
    generation = await two_hops.generate(prompt, max_tokens=num_tokens, ignore_eos=True, n=3, **sampling)
    prompt_ids = unsplit.encode(prompt)
    expected = []
    for solo_seed in (seed, seed + 1, seed + 2):
        solo: Sampling = {**sampling, "seed": solo_seed}
        reference = await asyncio.to_thread(unsplit.generate, prompt_ids, num_tokens, solo, ignore_eos=True)
        expected.append(reference.token_ids)
    assert [list(completion.token_ids) for completion in generation.completions] == expected
    assert [completion.text for completion in generation.completions] == [unsplit.decode(ids) for ids in expected]
    assert [completion.index for completion in generation.completions] == [0, 1, 2]
    assert len({tuple(ids) for ids in expected}) == 3
    usage = generation.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt_ids), 3 * num_tokens)


@pytest.mark.full
async def test_concurrent_streams_equal_their_solo_runs(two_hops: AsyncClient) -> None:
    """Streams that come one after the other and end at different times, some with a long prompt."""
    names = ["english-address", "one-token", "code-c", "emoji", "german", "chat-question", "digits", "code-sql"]
    plans: list[tuple[str, int, Sampling]] = [
        (name, 8 + 4 * (number % 4), {"temperature": 0.9, "seed": number} if number % 2 else {})
        for number, name in enumerate(names)
    ]

    async def run(plan: tuple[str, int, Sampling], delay_s: float) -> Completion:
        await asyncio.sleep(delay_s)
        prompt, num_tokens, sampling = plan
        text = prompt_texts()[prompt]
        generation = await two_hops.generate(text, max_tokens=num_tokens, ignore_eos=True, **sampling)
        return generation.completions[0]

    solo = [await run(plan, 0) for plan in plans]
    together = await asyncio.gather(*(run(plan, 0.15 * number) for number, plan in enumerate(plans)))
    assert together == solo
