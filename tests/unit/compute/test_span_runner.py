"""Rows of different sessions run through uneven spans and come out as the unsplit model has them."""

import math
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from corolla.cache.store import SessionCache
from corolla.cache.transfer import check_tokens, read_tokens, write_tokens
from corolla.chassis.errors import MalformedMessage, NonFiniteOutput
from corolla.compute.base import RowWork
from corolla.compute.prompts import BlockPrompts
from corolla.compute.span_runner import SpanRunner
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import Edges, load_edges
from corolla.models.families import FAMILIES
from corolla.models.loading import LOADING
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.checkpoints import (
    LONG_ROPE_LENGTH,
    RECURRENT_FAMILIES,
    YARN,
    make_long_rope_checkpoint,
    make_tiny_checkpoint,
)
from tests.families import family_cases
from tests.tiers import quick

UNEVEN = (Span(0, 1), Span(1, 4), Span(4, 5))


class Chain:
    """Edges and runners of one checkpoint, and the unsplit model."""

    def __init__(self, folder: Path, spans: Sequence[Span] = UNEVEN, **runner_options: Any) -> None:
        checkpoint = Checkpoint.from_pretrained(str(folder))
        self.family = checkpoint.family
        self.edges: Edges = load_edges(checkpoint, dtype=torch.float32)
        self.runners = [
            SpanRunner(load_span(checkpoint, span, dtype=torch.float32), page_tokens=8, **runner_options)
            for span in spans
        ]
        library: Any = AutoModelForCausalLM
        with LOADING:
            # Parameters of servers need no gradients either: `torch.matmul` takes another way where one needs them.
            self.unsplit = library.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)

    def open(self, num_tokens: int = 64) -> list[SessionCache]:
        caches = [runner.new_cache() for runner in self.runners]
        for cache in caches:
            # Pages in one run: then sums are made in the same order as over contiguous keys.
            cache.allocate(num_tokens)
        return caches

    def step(
        self, work: Sequence[tuple[list[SessionCache], int, Sequence[int]]], long_factors: Collection[int] = ()
    ) -> list[Tensor]:
        """Runs (caches, position, new tokens) rows as one batch; gives each row's logits."""
        lengths = [len(new) for _, _, new in work]
        return list(torch.split(self.edges.head(self.run(work, long_factors)), lengths))

    def run(
        self, work: Sequence[tuple[list[SessionCache], int, Sequence[int]]], long_factors: Collection[int] = ()
    ) -> Tensor:
        """`long_factors`: the numbers of the rows with such texts."""
        token_ids = torch.tensor([token for _, _, new in work for token in new])
        positions = torch.cat([torch.arange(position, position + len(new)) for _, position, new in work])
        hidden = self.edges.embed(token_ids, positions)
        for hop, runner in enumerate(self.runners):
            rows = [
                RowWork(caches[hop], position, len(new), long_factors=number in long_factors)
                for number, (caches, position, new) in enumerate(work)
            ]
            hidden = runner.forward(rows, hidden, runner.span)
        return hidden

    @torch.inference_mode()
    def truth(self, tokens: Sequence[int]) -> Tensor:
        logits: Tensor = self.unsplit(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return logits

    @torch.inference_mode()
    def truth_in_chunks(self, tokens: Sequence[int], bounds: Sequence[tuple[int, int]]) -> Tensor:
        if self.family.past.continues_singly:
            # In chunks the unsplit model forgets what was before.
            return self.truth(tokens)
        cache = DynamicCache(config=self.unsplit.config)
        held = {self.family.past.cache_argument: cache}
        parts = [
            self.unsplit(
                input_ids=torch.tensor([tokens[start:end]]), position_ids=torch.arange(start, end)[None], **held
            ).logits[0]
            for start, end in bounds
        ]
        return torch.cat(parts)


MakeChain = Callable[..., Chain]

# The family's own code, with the library's own attention.
REFERENCE: Mapping[str, Any] = {"is_fused": False, "attention": "sdpa"}


@pytest.fixture(scope="module")
def make_chain(tmp_path_factory: pytest.TempPathFactory) -> MakeChain:
    """Makes chains, and keeps those of one family, whose tests follow each other; each holds its shards open."""
    made: dict[str, Chain] = {}

    def make(family: str, runner_options: Mapping[str, Any] | None = None, **config_changes: Any) -> Chain:
        options = runner_options or {}
        key = f"{family} {sorted(options.items())} {sorted(config_changes.items())}"
        if key not in made:
            for other in [each for each in made if not each.startswith(f"{family} ")]:
                del made[other]
            folder = tmp_path_factory.mktemp("checkpoint") / family
            made[key] = Chain(make_tiny_checkpoint(family, folder, config_changes=config_changes), **options)
        return made[key]

    return make


def tokens(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(4, 256, (num_tokens,), generator=generator).tolist()
    return drawn


def assert_close(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


# All tests of a family come together.
every_family = pytest.mark.parametrize("family", family_cases(), scope="module")
# Where the table's flags decide what runs, and not the family's own code.
every_kind = pytest.mark.parametrize("family", family_cases(every=False), scope="module")
recurrent_family = pytest.mark.parametrize("family", family_cases(RECURRENT_FAMILIES), scope="module")


@every_family
def test_one_session_is_bit_equal_to_generate(make_chain: MakeChain, family: str) -> None:
    # These multiply by a share of the softmax, where others divide by a sum with the sink.
    rounds_otherwise = family in ("granite_swa", "granitemoe_swa")
    are_equal = partial(torch.allclose, rtol=1e-5, atol=1e-5) if rounds_otherwise else torch.equal
    assert_equal_to_generate(make_chain(family, REFERENCE), are_equal)


@every_family
def test_the_fast_way_gives_the_same_tokens(make_chain: MakeChain, family: str) -> None:
    assert_equal_to_generate(make_chain(family), partial(torch.allclose, rtol=1e-4, atol=1e-4))


@pytest.mark.kind
@pytest.mark.parametrize(
    "family, config_changes",
    [
        pytest.param("falcon", {"alibi": True}, id="falcon with alibi"),
        pytest.param("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, id="falcon of the second kind"),
        pytest.param("gpt_neox", {"use_parallel_residual": False}, id="gpt_neox in sequence"),
        pytest.param("llama", {"num_key_value_heads": 1, "head_dim": 32}, id="llama with one key head"),
        pytest.param("stablelm", {"use_parallel_residual": True, "qk_layernorm": False}, id="stablelm in parallel"),
        pytest.param("phi", {"qk_layernorm": True}, id="phi with norms of queries and keys", marks=pytest.mark.full),
        pytest.param("gpt_bigcode", {"multi_query": False}, id="gpt_bigcode with many key heads"),
        pytest.param("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy"}, id="deepseek_v2 lite"),
        pytest.param("deepseek_v3", {"rope_parameters": YARN}, id="deepseek_v3 with far positions"),
        pytest.param("olmoe", {"clip_qkv": None}, id="olmoe with whole blocks"),
        pytest.param("hyperclovax", {"use_post_norm": True}, id="hyperclovax with norms of outputs"),
        pytest.param("ernie4_5_moe", {"moe_layer_interval": 2}, id="ernie4_5_moe with every other block dense"),
        pytest.param(
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            id="llama with stretched positions",
        ),
    ],
)
def test_variants_are_bit_equal_to_generate(make_chain: MakeChain, family: str, config_changes: dict[str, Any]) -> None:
    assert_equal_to_generate(make_chain(family, REFERENCE, **config_changes), torch.equal)
    assert_equal_to_generate(make_chain(family, **config_changes), partial(torch.allclose, rtol=1e-4, atol=1e-4))


def assert_equal_to_generate(chain: Chain, are_equal: Callable[[Tensor, Tensor], bool]) -> None:
    prompt, num_new = tokens(20), 16
    expected = chain.unsplit.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=num_new,
        do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    caches, log, new = chain.open(), list(prompt), list(prompt)
    for index in range(num_new):
        # The head sees one row, as in `generate`: a product of several rows rounds differently.
        logits = chain.edges.head(chain.run([(caches, len(log) - len(new), new)])[-1:])[0]
        assert are_equal(logits, expected.logits[index][0])
        new = [int(logits.argmax())]
        log += new
    assert log == expected.sequences[0].tolist()
    assert len(set(log[len(prompt) :])) > 3, "a continuation that repeats one token proves little"


@pytest.mark.parametrize("family", family_cases(FAMILIES.keys() - RECURRENT_FAMILIES), scope="module")
def test_chunks_then_rollback_then_other_tokens(make_chain: MakeChain, family: str) -> None:
    chain = make_chain(family)
    first, second = tokens(40, seed=1), tokens(20, seed=2)
    caches = chain.open()
    chunks = [
        chain.step([(caches, start, first[start:end])])[0] for start, end in ((0, 7), (7, 30), (30, 31), (31, 40))
    ]
    assert_close(torch.cat(chunks), chain.truth(first))
    assert_close(chain.step([(caches, 25, second)])[0], chain.truth(first[:25] + second)[25:])
    assert [cache.num_tokens for cache in caches] == [45, 45, 45]


@recurrent_family
def test_a_recurrent_state_goes_back_by_one_step_or_to_the_start(make_chain: MakeChain, family: str) -> None:
    chain = make_chain(family)
    first, second = tokens(100, seed=1), tokens(20, seed=2)
    caches = chain.open()
    bounds = ((0, 1), (1, 3), (3, 80), (80, 81), (81, 100))
    chunks = [chain.step([(caches, start, first[start:end])])[0] for start, end in bounds]
    # Where chunks begin decides how the delta rule rounds, in the unsplit model as well.
    assert_close(torch.cat(chunks), chain.truth_in_chunks(first, bounds))
    # The last step again, with other tokens and with the same ones.
    assert_close(chain.step([(caches, 81, second)])[0], chain.truth(first[:81] + second)[81:])
    assert torch.equal(chain.step([(caches, 81, first[81:])])[0], chunks[-1])
    assert [cache.num_tokens for cache in caches] == [100, 100, 100]
    recurrent = [cache for cache in caches if cache.states is not None]
    assert recurrent
    for cache in recurrent:
        assert (cache.min_position, cache.nearest_position(99), cache.nearest_position(80)) == (100, 81, 0)
        with pytest.raises(ValueError, match="cannot truncate"):
            cache.truncate(99)
    assert_close(chain.step([(caches, 0, second)])[0], chain.truth(second))
    single = chain.step([(caches, 20, first[:1])])[0]
    assert_close(single, chain.truth([*second, first[0]])[20:])
    assert {cache.min_position for cache in recurrent} == {20}


@recurrent_family
def test_a_fork_goes_on_by_itself_from_where_its_source_stood(make_chain: MakeChain, family: str) -> None:
    chain = make_chain(family)
    log, one, other = tokens(30, seed=1), tokens(7, seed=2), tokens(9, seed=3)
    caches = chain.open()
    chain.step([(caches, 0, log)])
    twins = [cache.fork() for cache in caches]
    assert_close(chain.step([(caches, 30, one)])[0], chain.truth(log + one)[30:])
    takers = chain.open()
    for taker, twin in zip(takers, twins, strict=True):
        taker.adopt(twin)
    assert_close(chain.step([(takers, 30, other)])[0], chain.truth(log + other)[30:])
    assert_close(chain.step([(caches, 37, other)])[0], chain.truth(log + one + other)[37:])


@recurrent_family
def test_states_travel_with_the_last_part_of_a_session(make_chain: MakeChain, family: str) -> None:
    chain = make_chain(family)
    log, rest = tokens(30, seed=1), tokens(5, seed=2)
    caches, takers = chain.open(), chain.open()
    chain.step([(caches, 0, log)])
    for runner, cache, taker in zip(chain.runners, caches, takers, strict=True):
        layers = runner.span.indices(runner.span)
        for start, count, is_last in ((0, 8, False), (8, 20, False), (28, 2, True), (30, 0, True)):
            assert taker.can_take(start)
            copy = read_tokens(cache, layers, start, count, has_states=is_last)()
            write_tokens(taker, check_tokens(taker.store, layers, copy))
        taker.blocks = runner.span
    assert torch.equal(chain.step([(takers, 30, rest)])[0], chain.step([(caches, 30, rest)])[0])


@recurrent_family
def test_states_that_do_not_fit_or_are_not_finite_are_refused(make_chain: MakeChain, family: str) -> None:
    chain = make_chain(family)
    caches, takers = chain.open(), chain.open()
    chain.step([(caches, 0, tokens(9))])
    layers = chain.runners[1].span.indices(chain.runners[1].span)
    copy = read_tokens(caches[1], layers, 0, 9, has_states=True)()
    payload = bytes(copy.payload)
    infinite = payload[:-4] + struct.pack("<f", math.inf)
    for bad in (replace(copy, payload=payload[:-4]), replace(copy, has_states=False), replace(copy, payload=infinite)):
        with pytest.raises(MalformedMessage):
            check_tokens(takers[1].store, layers, bad)


@every_family
def test_rows_of_different_lengths_share_a_batch(make_chain: MakeChain, family: str) -> None:
    chain = make_chain(family)
    held = (30, 5, 0, 1, 17)
    new = (1, 9, 21, 1, 4)
    logs = [tokens(before + count, seed=before) for before, count in zip(held, new, strict=True)]
    sessions = [chain.open() for _ in held]
    for caches, before, log in zip(sessions, held, logs, strict=True):
        if before:
            chain.step([(caches, 0, log[:before])])
    rows = list(zip(sessions, held, (log[before:] for before, log in zip(held, logs, strict=True)), strict=True))
    for logits, before, log in zip(chain.step(rows), held, logs, strict=True):
        assert_close(logits, chain.truth(log)[before:])


@every_kind
def test_laid_out_weights_give_the_same_products(make_chain: MakeChain, family: str) -> None:
    chain = make_chain(family, {"products": "panels"})
    chain.edges.choose_products("onednn")
    first, second = tokens(25), tokens(17, seed=1)
    one, other = chain.open(), chain.open()
    logits = [chain.step([(one, start, first[start:end])])[0] for start, end in ((0, 16), (16, 23))]
    assert_close(torch.cat(logits), chain.truth(first)[:23])
    chain.step([(other, 0, second[:8])])
    together = chain.step([(one, 23, first[23:24]), (other, 8, second[8:16])])
    assert_close(together[0], chain.truth(first)[23:24])
    assert_close(together[1], chain.truth(second)[8:16])
    singles = chain.step([(one, 24, first[24:]), (other, 16, second[16:])])
    assert_close(torch.cat(singles), torch.cat([chain.truth(first)[24:], chain.truth(second)[16:]]))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "bloom", "lfm2", "qwen3_next", "longcat_flash"])
def test_a_run_of_some_blocks_equals_a_span_of_them(tmp_path: Path, family: str) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint(family, tmp_path / family, num_blocks=7)))
    wide, narrow = Span(1, 7), Span(3, 6)
    hidden = torch.randn(12, checkpoint.hidden_size, generator=torch.Generator().manual_seed(0))
    outputs = []
    for held in (wide, narrow):
        runner = SpanRunner(load_span(checkpoint, held, dtype=torch.float32), products="library")
        cache = runner.new_cache()
        parts = [runner.forward([RowWork(cache, start, 4)], hidden[start : start + 4], narrow) for start in (0, 4, 8)]
        outputs.append((torch.cat(parts), cache.nbytes))
        layers, each = runner.store.layers_of(held, narrow), FAMILIES[family].past.attentions
        assert (layers.start, len(layers)) == ((narrow.start - held.start) * each, len(narrow) * each)
    assert torch.equal(outputs[0][0], outputs[1][0])
    if family != "gemma3_text":  # whose pages hold some layers only, and more pages are taken for more of them
        assert outputs[0][1] == outputs[1][1], "blocks that a session does not run take no memory"


@every_kind
def test_prompts_reach_their_row_at_their_positions_and_no_other(make_chain: MakeChain, family: str) -> None:
    runner = make_chain(family).runners[1]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, runner.model.hidden_size, generator=generator)
    prompts = BlockPrompts(torch.randn(3, 6, runner.model.hidden_size, generator=generator))
    given = hidden.clone()

    def by_hand(tokens: Tensor) -> Tensor:
        """One pass of each block from the start, with the additions in between."""
        for index in range(3):
            tokens = tokens.clone()
            tokens[:6] += prompts.values[index]
            tokens = runner.forward([RowWork(runner.new_cache(), 0, len(tokens))], tokens, Span(1 + index, 2 + index))
        return tokens

    expected = by_hand(hidden), runner.forward([RowWork(runner.new_cache(), 0, 11)], hidden, runner.span)
    prompted, plain = runner.new_cache(), runner.new_cache()
    outputs: list[list[Tensor]] = [[], []]
    # In a batch with a row that has none, in chunks that end before, behind and just where the prompts do.
    for start, end in ((0, 1), (1, 4), (4, 6), (6, 9), (9, 11)):
        count = end - start
        rows = [RowWork(plain, start, count), RowWork(prompted, start, count, prompts)]
        mixed = runner.forward(rows, torch.cat([hidden[start:end]] * 2), runner.span)
        outputs[0].append(mixed[count:])
        outputs[1].append(mixed[:count])
    for parts, whole in zip(outputs, expected, strict=True):
        assert_close(torch.cat(parts), whole)
    again = 9 if family in RECURRENT_FAMILIES else 2
    rows = [RowWork(prompted, again, 11 - again, prompts)]
    assert_close(runner.forward(rows, hidden[again:], runner.span), expected[0][again:])
    assert (expected[0] - expected[1]).abs().max() > 0.1, "prompts that change nothing prove nothing"
    assert torch.equal(hidden, given)


def test_of_latent_attention_latents_are_kept(make_chain: MakeChain) -> None:
    """Not the keys and values of four heads that they expand to, `4 * (16 + 8 + 12)` numbers."""
    chain = make_chain("deepseek_v3")
    caches = chain.open()
    chain.step([(caches, 0, tokens(8))])
    for cache in caches:
        assert [tuple(tensor.shape[1:]) for tensor in cache.store.layer(0)] == [(1, 16), (1, 8)]


@pytest.mark.parametrize("family", quick(["phi3", "phimoe"], "phi3"))
def test_each_row_has_the_factors_of_its_own_text(tmp_path: Path, family: str) -> None:
    """Also where a long text comes in chunks, of which the first ones alone would be short texts."""
    chain = Chain(make_long_rope_checkpoint(family, tmp_path / family))
    assert chain.runners[0].model.fused is not None
    short, long = tokens(50, seed=3), tokens(LONG_ROPE_LENGTH + 40, seed=4)
    short_caches, long_caches = chain.open(), chain.open(160)
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for start in range(0, len(short), 10):
        chunk = (short_caches, start, short[start : start + 10]), (long_caches, 2 * start, long[2 * start :][:20])
        for row, logits in enumerate(chain.step(chunk, long_factors=[1])):
            parts[row].append(logits)
    parts[1].extend(chain.step([(long_caches, 100, long[100:])], long_factors=[0]))
    assert_close(torch.cat(parts[0]), chain.truth(short))
    assert_close(torch.cat(parts[1]), chain.truth(long))


def test_a_text_with_short_factors_does_not_become_long(tmp_path: Path) -> None:
    chain = Chain(make_long_rope_checkpoint("phi3", tmp_path / "phi3"))
    caches = chain.open(160)
    chain.step([(caches, 0, tokens(LONG_ROPE_LENGTH))])
    with pytest.raises(ValueError, match="short factors has at most 64 tokens"):
        chain.step([(caches, LONG_ROPE_LENGTH, tokens(1))])


@pytest.mark.parametrize("family", ["llama", "bloom", "deepseek_v3", "lfm2", "qwen3_next"])
def test_a_row_that_is_not_finite_harms_no_other(make_chain: MakeChain, family: str) -> None:
    runner = make_chain(family).runners[1]
    sound, bad, solo = runner.new_cache(), runner.new_cache(), runner.new_cache()
    hidden = torch.randn(5, runner.model.hidden_size, generator=torch.Generator().manual_seed(0))
    spoilt = hidden.clone()
    spoilt[3, 0] = torch.nan
    rows = [RowWork(sound, 0, 3), RowWork(bad, 0, 2)]
    output = runner.launch(rows, spoilt, runner.span)
    assert runner.finish(output, range(2), runner.span) == (True, False)
    assert (sound.num_tokens, bad.num_tokens) == (3, 0)
    assert_close(output.hidden[:3], runner.forward([RowWork(solo, 0, 3)], hidden[:3], runner.span))
    again = runner.forward([RowWork(bad, 0, 2)], hidden[3:], runner.span)
    assert torch.isfinite(again).all()
    position = 2 if family in RECURRENT_FAMILIES else 1
    with pytest.raises(NonFiniteOutput):
        runner.forward([RowWork(bad, position, 2)], spoilt[3:], runner.span)
    assert bad.num_tokens == position
    after = runner.forward([RowWork(bad, position, 1)], hidden[2:3], runner.span)
    log = torch.cat([hidden[3:5][:position], hidden[2:3]])
    assert_close(after, runner.forward([RowWork(runner.new_cache(), 0, len(log))], log, runner.span)[-1:])


@pytest.mark.parametrize(
    "position, num_tokens, width, blocks",
    [
        pytest.param(1, 2, 64, Span(1, 4), id="gap"),
        pytest.param(-1, 2, 64, Span(1, 4), id="negative position"),
        pytest.param(0, 0, 64, Span(1, 4), id="no tokens"),
        pytest.param(0, 3, 64, Span(1, 4), id="too few hidden states"),
        pytest.param(0, 2, 63, Span(1, 4), id="another width"),
        pytest.param(0, 2, 64, Span(0, 4), id="blocks of another server"),
    ],
)
def test_misuse_is_refused(make_chain: MakeChain, position: int, num_tokens: int, width: int, blocks: Span) -> None:
    runner = make_chain("llama").runners[1]
    with pytest.raises(ValueError, match=r"."):
        runner.forward([RowWork(runner.new_cache(), position, num_tokens)], torch.zeros(2, width), blocks)


def test_one_cache_is_no_two_rows(make_chain: MakeChain) -> None:
    runner = make_chain("llama").runners[1]
    row = RowWork(runner.new_cache(), 0, 1)
    with pytest.raises(ValueError, match="same cache"):
        runner.forward([row, row], torch.zeros(2, 64), runner.span)


def test_a_session_keeps_its_blocks(make_chain: MakeChain) -> None:
    runner = make_chain("llama").runners[1]
    cache = runner.new_cache()
    runner.forward([RowWork(cache, 0, 2)], torch.ones(2, 64), Span(1, 3))
    with pytest.raises(ValueError, match="keeps its blocks"):
        runner.forward([RowWork(cache, 2, 1)], torch.ones(1, 64), Span(2, 4))
    assert cache.num_tokens == 2
