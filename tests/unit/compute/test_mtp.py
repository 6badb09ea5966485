"""The multi-token prediction block computes what transformers' own code computes, however a text is cut."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from corolla.block_server.mtp_drafts import FollowedRow, MtpDrafts
from corolla.block_server.row_sampling import SessionSampler
from corolla.cache.store import SessionCache
from corolla.chassis.errors import OutOfPages, StartupError
from corolla.compute.base import RowWork
from corolla.compute.span_runner import SpanRunner
from corolla.decoding.parameters import SamplingParams
from corolla.decoding.sampler_record import SamplerRecord
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import Edges, load_edges
from corolla.models.mtp import MtpParts, check_has_mtp, load_mtp_parts, mtp_tensors
from corolla.models.read_ahead import tensors_of
from corolla.models.span_model import load_span
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.span import Span
from tests.checkpoints import VOCAB_SIZE, make_tiny_checkpoint
from tests.mtp_models import WholeMtp, make_mtp_checkpoint
from tests.quantized_checkpoints import FORMATS, pack_checkpoint
from tests.tiers import quick

NUM_BLOCKS, NUM_TOKENS = 4, 40
DRAFTS = pb.Drafts(source=pb.Drafts.SOURCE_DRAFT_MODEL, max_tokens=3)


class Chain:
    """A server of all blocks, with the block that drafts."""

    def __init__(self, folder: Path, *, is_fused: bool = True, quantization: str = "none") -> None:
        checkpoint = Checkpoint.from_pretrained(str(folder))
        span = Span(0, NUM_BLOCKS)
        model = load_span(checkpoint, span, dtype=torch.float32, has_mtp_layer=True, quantization=quantization)
        self.edges: Edges = load_edges(checkpoint, dtype=torch.float32)
        self.parts: MtpParts = load_mtp_parts(
            checkpoint, model.layers[-1], self.edges, self.edges, dtype=torch.float32, products="library"
        )
        self.runner = SpanRunner(model, num_pages=64, page_tokens=16, is_fused=is_fused, products="library")
        self.runner.warm_up_mtp()
        self.drafts = MtpDrafts(self.runner, self.parts, NUM_BLOCKS)

    def new_cache(self, num_tokens: int) -> SessionCache:
        cache = self.runner.new_cache()
        cache.reserve(num_tokens)
        return cache

    def step(self, caches: Sequence[SessionCache], token_ids: Sequence[Tensor], position: int) -> list[Tensor]:
        """Computes new tokens of sessions together, and returns the last block's outputs, `[T, H]` each."""
        lengths = [len(each) for each in token_ids]
        positions = torch.cat([torch.arange(position, position + length) for length in lengths])
        rows = [RowWork(cache, position, length) for cache, length in zip(caches, lengths, strict=True)]
        hidden = self.edges.embed(torch.cat(list(token_ids)), positions)
        return list(torch.split(self.runner.forward(rows, hidden, self.runner.span), lengths))


@pytest.fixture(scope="module", params=["deepseek_v3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_checkpoint(request.param, tmp_path_factory.mktemp("mtp") / "tiny", num_blocks=NUM_BLOCKS)


@pytest.fixture(scope="module")
def text() -> Tensor:
    return torch.randint(4, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))


def sampler_of(
    prompt: Sequence[int], drafts: pb.Drafts | None = DRAFTS, parts: MtpParts | None = None
) -> SessionSampler:
    record = SamplerRecord(SamplingParams(), 0, prompt, max_new_tokens=50, drafts=drafts)
    return SessionSampler.read(record.message(), parts, vocab_size=VOCAB_SIZE, max_tokens=200)


@pytest.mark.parametrize("folder", quick(["deepseek_v3", "glm4_moe"], "deepseek_v3"), indirect=True)
@pytest.mark.parametrize("is_fused", quick([True, False], True))
def test_hidden_states_are_those_of_transformers(folder: Path, text: Tensor, is_fused: bool) -> None:
    whole, chain = WholeMtp.of(folder), Chain(folder, is_fused=is_fused)
    outputs = whole.outputs(text[None])
    expected = whole.predicted(text[None], outputs)[0]
    cache = chain.new_cache(NUM_TOKENS)
    (own,) = chain.step([cache], [text], 0)
    normed = chain.parts.normed(own)
    torch.testing.assert_close(normed, outputs[0], atol=2e-4, rtol=2e-4)
    found = []
    for start, end in ((1, 2), (2, 19), (19, 20), (20, NUM_TOKENS)):
        inputs = chain.parts.input(text[start:end], normed[start - 1 : end - 1])
        found.append(chain.parts.output(chain.runner.predict([RowWork(cache, start, end - start)], inputs)))
    torch.testing.assert_close(torch.cat(found), expected, atol=5e-4, rtol=5e-4)
    logits = whole.logits(expected)
    torch.testing.assert_close(chain.parts.logits(torch.cat(found)), logits, atol=2e-3, rtol=2e-3)


@pytest.mark.full
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("quantization", ["none", "packed"])
@pytest.mark.parametrize("kind", ["fp8-blocks", "gptq", "ct-fp8-outputs"])
def test_a_block_whose_weights_are_packed_computes_what_expanded_weights_do(
    tmp_path: Path, text: Tensor, family: str, kind: str, quantization: str
) -> None:
    source = make_mtp_checkpoint(family, tmp_path / "source", num_blocks=NUM_BLOCKS)
    folders = tmp_path / "packed", tmp_path / "expanded"
    # No group of numbers fits the narrow projections of latent attention.
    pack_checkpoint(source, *folders, FORMATS[kind](), plain=("shared_head", "embed_tokens", "self_attn"))
    chains = Chain(folders[0], quantization=quantization), Chain(folders[1])
    assert bool(chains[0].runner.model.packed_layers) == (quantization == "packed")
    found = []
    for chain in chains:
        cache = chain.new_cache(NUM_TOKENS)
        (own,) = chain.step([cache], [text], 0)
        inputs = chain.parts.input(text[1:], chain.parts.normed(own)[:-1])
        found.append(chain.parts.output(chain.runner.predict([RowWork(cache, 1, NUM_TOKENS - 1)], inputs)))
    torch.testing.assert_close(*found, atol=5e-4, rtol=5e-4)


@pytest.mark.full
def test_drafts_are_the_choices_of_transformers_however_the_text_came(folder: Path, text: Tensor) -> None:
    """Two sessions in one step: a prompt in chunks with a draft at its end, and one for which nothing drafts."""
    whole, chain = WholeMtp.of(folder), Chain(folder)
    newest = 7
    extended = torch.cat((text, torch.tensor([newest])))
    outputs = whole.outputs(extended[None])
    expected = int(whole.logits(whole.predicted(extended[None], outputs)[0, -1]).argmax())
    cache, other = chain.new_cache(NUM_TOKENS + 4), chain.new_cache(NUM_TOKENS)
    sampler = sampler_of(text.tolist(), parts=chain.parts)
    silent = sampler_of(text.tolist(), None)
    for start, end in ((0, 1), (1, 17), (17, NUM_TOKENS)):
        own = chain.step([cache, other], [text[start:end]] * 2, start)
        is_last = end == NUM_TOKENS
        if is_last:
            assert sampler.speculator is not None
            sampler.speculator.begin([newest], 20)
        rows = [
            FollowedRow(cache, start, end, own[0], sampler, 3 if is_last else 0),
            FollowedRow(other, start, end, own[1], silent),
        ]
        chain.drafts.follow(rows)
    drafter = rows[0].drafter
    assert drafter is not None
    assert rows[1].drafter is None
    assert (drafter.drafted[0], len(drafter.drafted)) == (expected, 3)
    layer = chain.runner.model.mtp_layer
    assert layer is not None
    keys, values = other.gather(layer, NUM_TOKENS)
    assert not torch.cat((keys.flatten(), values.flatten())).any(), "others may share it"
    # The first token of a text has no slot there.
    keys, _ = cache.gather(layer, NUM_TOKENS)
    assert not keys[:, 0].any()
    assert keys[:, 1:].any(-1).all()


@pytest.mark.full
def test_a_session_that_comes_from_elsewhere_lacks_one_output_and_goes_on(folder: Path, text: Tensor) -> None:
    chain = Chain(folder)
    cache = chain.new_cache(NUM_TOKENS + 4)
    sampler = sampler_of(text.tolist(), parts=chain.parts)
    (own,) = chain.step([cache], [text[:20]], 0)
    chain.drafts.follow([FollowedRow(cache, 0, 20, own, sampler)])
    assert cache.newest_output is not None
    assert cache.newest_output[0] == 20
    fork = chain.new_cache(NUM_TOKENS)
    fork.adopt(cache.fork())
    assert fork.newest_output is cache.newest_output
    cache.newest_output = None
    (own,) = chain.step([cache], [text[20:30]], 20)
    chain.drafts.follow([FollowedRow(cache, 20, 30, own, sampler)])
    (forked,) = chain.step([fork], [text[20:30]], 20)
    chain.drafts.follow([FollowedRow(fork, 20, 30, forked, sampler)])
    layer = chain.runner.model.mtp_layer
    assert layer is not None
    (keys, _), (others, _) = cache.gather(layer, 30), fork.gather(layer, 30)
    differs = (keys - others).abs().amax(dim=(0, 2)) > 0
    assert differs.nonzero().flatten().tolist() == [20]


@pytest.mark.full
def test_rows_that_fail_or_are_not_finite_are_zeros_and_the_others_draft(
    folder: Path, text: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So are the places of draft tokens that were wrong: a handover sends each token that a session holds."""
    chain = Chain(folder)
    layer = chain.runner.model.mtp_layer
    assert layer is not None
    with torch.inference_mode():
        for tensor in chain.runner.store.layer(layer):
            tensor.fill_(torch.nan)
    caches = [chain.new_cache(NUM_TOKENS + 4) for _ in range(3)]
    samplers = [sampler_of(text.tolist(), parts=chain.parts) for _ in caches]
    good, spoilt, failing = chain.step(caches, [text[:24]] * 3, 0)
    rows = [
        FollowedRow(cache, 0, 22, output, sampler, 1)
        for cache, output, sampler in zip(caches, (good, spoilt * torch.nan, failing), samplers, strict=True)
    ]

    def fail(_position: int, _num_tokens: int) -> None:
        raise OutOfPages("no page is left")

    monkeypatch.setattr(caches[2], "prepare", fail)
    rows[2].num_drafts = 3
    failed = chain.drafts.follow(rows)
    assert [(row is rows[2], type(failure)) for row, failure in failed] == [(True, OutOfPages)]
    assert [len(row.drafter.drafted) for row in rows if row.drafter is not None] == [1, 0, 0]
    held = [torch.cat(cache.gather(layer, 24), dim=-1) for cache in caches]
    assert [each.isfinite().all().item() for each in held] == [True] * 3
    assert held[0].any(-1).any(0).tolist() == [False] + [True] * 22 + [False]
    assert not held[1].any()
    assert not held[2].any()


@pytest.mark.full
def test_a_text_that_is_shorter_than_its_steps_is_not_drafted_for(folder: Path, text: Tensor) -> None:
    chain = Chain(folder)
    cache = chain.new_cache(NUM_TOKENS)
    sampler = sampler_of(text[:5].tolist(), parts=chain.parts)
    (own,) = chain.step([cache], [text], 0)
    row = FollowedRow(cache, 0, NUM_TOKENS, own, sampler, 3)
    chain.drafts.follow([row])
    assert row.drafter is not None
    assert not row.drafter.drafted


@pytest.mark.full
def test_what_a_server_reads_has_the_block_only_if_it_drafts(folder: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.from_pretrained(str(folder))
    span = Span(2, NUM_BLOCKS)
    plain, more = set(tensors_of(checkpoint, span)), set(tensors_of(checkpoint, span, has_mtp=True))
    parts = {f"model.layers.{NUM_BLOCKS}.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")}
    assert plain < more
    assert parts <= more - plain
    assert "model.embed_tokens.weight" in more - plain
    copies = {f"model.layers.{NUM_BLOCKS}.{name}.weight" for name in ("shared_head.head", "embed_tokens")}
    assert not copies & more
    assert set(tensors_of(checkpoint, Span(0, 2), has_mtp=True)) == set(tensors_of(checkpoint, Span(0, 2)))
    without = Checkpoint.from_pretrained(str(make_tiny_checkpoint("deepseek_v3", tmp_path / "without", num_blocks=2)))
    assert not mtp_tensors(without)
    with pytest.raises(StartupError, match="multi-token prediction block"):
        check_has_mtp(without)
