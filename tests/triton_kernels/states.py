"""Kernels of recurrent states against their definitions, and against themselves for the same rows in other calls."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from corolla.cache.store import SessionCache
from corolla.compute import graph_choice
from corolla.compute.base import RowWork
from corolla.compute.span_runner import SpanRunner
from corolla.compute.state_kernels import StateKernels
from corolla.kernels.recurrence_source import HeadSizes
from corolla.kernels.state_rows import StateRows
from corolla.kernels.triton import launches, state_launches
from corolla.kernels.triton.state_launches import convolve, norm_gated, run_delta_rule, run_state_space
from corolla.kernels.triton.variants import Grid, Variant
from corolla.models.cuda_capture import CudaCapture
from corolla.wire.span import Span
from tests.reference import Unsplit
from tests.tiers import quick
from tests.triton_kernels import DEVICE, STATE_FAMILIES
from tests.triton_kernels.recorded_launches import record
from tests.triton_kernels.spans import NUM_TOKENS, PROMPT, Chain, make_checkpoint, make_runner, products

__all__ = ["products"]  # the fixture

NUM_SLOTS = 9


@pytest.fixture(autouse=True, scope="module")
def on_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(*shape, generator=generator, device="cpu").to(DEVICE)


def rows_of(lengths: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> StateRows:
    first_tokens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    of_tokens = torch.tensor([row for row, length in enumerate(lengths) for _ in range(length)], dtype=torch.int32)
    return StateRows(torch.tensor(sources), torch.tensor(targets), first_tokens, of_tokens)


class Part:
    """A part with states, whose tokens run in any cut.

    Args:
        states: what the part keeps in `NUM_SLOTS` slots; in the second slot is the state before the text.
    """

    def __init__(self, tokens: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        self.tokens, self.states = tokens, states

    def compute(self, tokens: Sequence[Tensor], rows: StateRows) -> Tensor:
        raise NotImplementedError

    def run(self, cuts: Sequence[tuple[int, int]], sources: Sequence[int], targets: Sequence[int]) -> list[Tensor]:
        """Runs parts of the text as rows of one call. Returns their outputs."""
        given = [torch.cat([each[start:end] for start, end in cuts]) for each in self.tokens]
        lengths = [end - start for start, end in cuts]
        return list(torch.split(self.compute(given, rows_of(lengths, sources, targets)), lengths))

    def has_bits_of_its_own_in_every_cut(self, length: int) -> tuple[Tensor, Tensor]:
        """Returns the outputs of a text that begins, and of one that continues at the second slot."""
        others = [each[[0, 1, 2]].clone() for each in self.states]
        (begun,) = self.run([(0, length)], [-1], [3])
        (whole,) = self.run([(0, length)], [1], [4])
        middle = length // 2
        first, again = self.run([(0, middle), (0, length)], [1, -1], [5, 6])
        assert torch.equal(first, whole[:middle])
        assert torch.equal(again, begun)
        source, found = 5, []
        for turn, place in enumerate(range(middle, length)):
            target = (7, 8)[turn % 2]
            company = [(0, 2)] if turn % 3 == 0 else []
            parts = self.run(
                [*company, (place, place + 1)], [*[2] * len(company), source], [*[0] * len(company), target]
            )
            found.append(parts[-1])
            source = target
        assert torch.equal(torch.cat(found), whole[middle:])
        for each, before in zip(self.states, others, strict=True):
            assert torch.equal(each[source], each[4])
            assert torch.equal(each[3], each[6])
            assert torch.equal(each[[1, 2]], before[1:]), "a slot that was only read has changed"
        return begun, whole


class Convolving(Part):
    def __init__(self, channels: int, kernel: int, *, has_bias: bool, has_activation: bool) -> None:
        super().__init__([draw(12, channels)], [draw(NUM_SLOTS, channels, kernel)])
        self.weight, self.bias = draw(channels, kernel), draw(channels) if has_bias else None
        self._has_activation = has_activation

    def compute(self, tokens: Sequence[Tensor], rows: StateRows) -> Tensor:
        (windows,) = self.states
        return convolve(tokens[0], self.weight, self.bias, windows, rows, has_activation=self._has_activation)


@pytest.mark.parametrize("case", quick([(24, 4, True), (300, 3, False)], (24, 4, True)))
def test_a_convolution_continues_where_a_row_ended(case: tuple[int, int, bool]) -> None:
    channels, kernel, has_bias = case
    part = Convolving(channels, kernel, has_bias=has_bias, has_activation=has_bias)
    window = part.states[0][1].clone()
    outputs = part.has_bits_of_its_own_in_every_cut(12)
    for found, before in zip(outputs, (torch.zeros_like(window), window), strict=True):
        inputs = torch.cat((before[:, 1:], part.tokens[0].T), dim=1)
        expected = functional.conv1d(inputs[None], part.weight[:, None], part.bias, groups=channels)[0].T
        torch.testing.assert_close(found, functional.silu(expected) if has_bias else expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(part.states[0][4], part.tokens[0][-kernel:].T, rtol=0, atol=0)


class Ruled(Part):
    """The delta rule."""

    def __init__(self, heads: HeadSizes, *, is_wide: bool) -> None:
        keys = heads.num_key_heads * heads.key_size
        width = 2 * keys + heads.num_heads * heads.value_size
        num_decays = heads.num_heads * (heads.key_size if is_wide else 1)
        super().__init__(
            [draw(9, width), draw(9, heads.num_heads), 4 * draw(9, num_decays)],
            [draw(NUM_SLOTS, heads.num_heads, heads.key_size, heads.value_size)],
        )
        self.offsets, self.factors = draw(num_decays), -draw(heads.num_heads).exp()
        self._heads = heads

    def compute(self, tokens: Sequence[Tensor], rows: StateRows) -> Tensor:
        (states,) = self.states
        mixed, rates, decays = tokens
        return run_delta_rule(
            mixed, rates, decays, self.offsets, self.factors, states, rows, self._heads, most_rate=1.0
        )


@pytest.mark.parametrize(
    "case",
    quick(
        [(HeadSizes(4, 2, 8, 48), False), (HeadSizes(3, 3, 32, 16), True), (HeadSizes(2, 1, 128, 128), False)],
        (HeadSizes(4, 2, 8, 48), False),
    ),
)
def test_the_delta_rule_is_that_of_transformers(case: tuple[HeadSizes, bool]) -> None:
    heads, is_wide = case
    part = Ruled(heads, is_wide=is_wide)
    before = part.states[0][1].clone()
    begun, whole = part.has_bits_of_its_own_in_every_cut(9)
    mixed, rates, decays = part.tokens
    keys = heads.num_key_heads * heads.key_size
    query, key, value = torch.split(mixed, [keys, keys, heads.num_heads * heads.value_size], dim=1)
    repeats = heads.num_heads // heads.num_key_heads
    query, key = (
        functional.normalize(each.view(9, -1, heads.key_size), dim=-1, eps=1e-6).repeat_interleave(repeats, 1)
        for each in (query, key)
    )
    summed = functional.softplus(decays + part.offsets)
    if is_wide:
        expected, state = [], before
        decay = (summed.view(9, heads.num_heads, -1) * part.factors[:, None]).exp()
        for token in range(9):
            state = state * decay[token, :, :, None]
            held = torch.einsum("hkv,hk->hv", state, key[token])
            change = (value[token].view(heads.num_heads, -1) - held) * rates[token].sigmoid()[:, None]
            state = state + key[token][:, :, None] * change[:, None, :]
            expected.append(torch.einsum("hkv,hk->hv", state, query[token]) * heads.key_size**-0.5)
        torch.testing.assert_close(whole, torch.stack(expected), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(part.states[0][4], state, rtol=1e-4, atol=1e-4)
        return
    for found, initial, slot in ((begun, torch.zeros_like(before), 3), (whole, before, 4)):
        expected_output, expected_state = torch_recurrent_gated_delta_rule(
            query[None], key[None], value.view(1, 9, heads.num_heads, -1), (summed * part.factors)[None],
            rates.sigmoid()[None], initial_state=initial[None], output_final_state=True,
        )  # fmt: skip
        torch.testing.assert_close(found, expected_output[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(part.states[0][slot], expected_state[0], rtol=1e-4, atol=1e-4)


class Spaced(Part):
    """A state space."""

    def __init__(self, heads: HeadSizes) -> None:
        width = heads.num_heads * heads.value_size + 2 * heads.num_key_heads * heads.key_size
        super().__init__(
            [draw(9, width), draw(9, heads.num_heads)],
            [draw(NUM_SLOTS, heads.num_heads, heads.value_size, heads.key_size)],
        )
        self.offsets, self.factors, self.skips = draw(3, heads.num_heads)
        self.factors = -self.factors.exp()
        self._heads = heads

    def compute(self, tokens: Sequence[Tensor], rows: StateRows) -> Tensor:
        (states,) = self.states
        mixed, steps = tokens
        return run_state_space(mixed, steps, self.offsets, self.factors, self.skips, states, rows, self._heads)


@pytest.mark.parametrize("heads", quick([HeadSizes(4, 2, 16, 24), HeadSizes(2, 1, 256, 64)], HeadSizes(4, 2, 16, 24)))
def test_a_state_space_is_that_of_transformers(heads: HeadSizes) -> None:
    part = Spaced(heads)
    before = part.states[0][1].clone()
    begun, whole = part.has_bits_of_its_own_in_every_cut(9)
    mixed, steps = part.tokens
    keys = heads.num_key_heads * heads.key_size
    value, key, query = torch.split(mixed, [heads.num_heads * heads.value_size, keys, keys], dim=1)
    value = value.view(1, 9, heads.num_heads, -1)
    for found, initial, slot in ((begun, torch.zeros_like(before), 3), (whole, before, 4)):
        expected, state = mamba2_chunk_scan(
            value, functional.softplus(steps + part.offsets)[None], part.factors,
            *(each.view(1, 9, heads.num_key_heads, -1) for each in (key, query)), 64,
            initial_states=initial[None], return_final_states=True,
        )  # fmt: skip
        expected = expected + value * part.skips[:, None]
        torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(part.states[0][slot], state[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "gates_first, activation, shares", [(False, "silu", True), (True, "silu", False), (False, "sigmoid", True)]
)
def test_a_gate_opens_what_is_normalised(gates_first: bool, activation: str, shares: bool) -> None:
    x, gate, weight = draw(5, 3, 24), 3 * draw(5, 100)[:, :72], draw(24 if shares else 72)
    opening = (functional.silu if activation == "silu" else torch.sigmoid)(gate)
    found = norm_gated(x, gate, weight, 1e-5, torch.float32, activation=activation, gates_first=gates_first)
    value = x * opening.view(x.shape) if gates_first else x
    value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + 1e-5)
    expected = (value * (weight if shares else weight.view(3, 24))).flatten(1)
    torch.testing.assert_close(found, expected if gates_first else expected * opening, rtol=1e-5, atol=1e-5)
    alone = norm_gated(x[2:3], gate[2:3], weight, 1e-5, torch.float32, activation=activation, gates_first=gates_first)
    assert torch.equal(alone, found[2:3])


@pytest.mark.full
@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_a_chain_with_states_or_latents_gives_the_tokens_of_transformers(tmp_path: Path, family: str) -> None:
    checkpoint = make_checkpoint(tmp_path, family)
    expected = Unsplit(tmp_path / family).generate(PROMPT, NUM_TOKENS, ignore_eos=True).token_ids
    assert Chain(checkpoint).answer(PROMPT, NUM_TOKENS) == expected


@pytest.mark.parametrize("family", quick(STATE_FAMILIES, STATE_FAMILIES[0]))
def test_rows_of_states_have_their_bits_in_every_mixture_and_in_recorded_steps(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path, family)
    span = Span(0, 3)
    runner = make_runner(checkpoint, span, has_scratch_page=True, max_step_tokens=32)
    assert isinstance(runner.blocks, StateKernels)
    runner.warm_up()
    num_tokens, first = 21, 6
    generator = torch.Generator().manual_seed(0)
    texts = [
        torch.randn(num_tokens, runner.model.hidden_size, generator=generator, device="cpu").to(DEVICE)
        for _ in range(2)
    ]

    def opened() -> SessionCache:
        cache = runner.new_cache()
        cache.allocate(num_tokens)
        return cache

    def run(cache: SessionCache, text: Tensor, start: int, end: int) -> Tensor:
        return runner.forward([RowWork(cache, start, end - start)], text[start:end], span)

    whole = []
    for text in texts:
        cache = opened()
        whole.append(run(cache, text, 0, num_tokens))
        cache.clear()
    monkeypatch.setattr(graph_choice, "SIZES", (1, 2))
    graph_choice.choose_graphs(runner, lambda: record if DEVICE == "cpu" else CudaCapture(torch.device(DEVICE)))
    assert runner.decode_graphs is not None
    launched: list[str] = []

    def launch(of: Variant, grid: Grid, *arguments: Any) -> None:
        launched.append(of.kernel.__name__)
        launches.launch(of, grid, *arguments)

    monkeypatch.setattr(state_launches, "launch", launch)
    caches = [opened() for _ in texts]
    for cache, text, expected in zip(caches, texts, whole, strict=True):
        assert torch.equal(run(cache, text, 0, first), expected[:first])
    num_replays = runner.decode_graphs.num_replays
    # Both together, the other one alone, in another order, and anew from the token before.
    for position in range(first, first + 4):
        order = [0, 1] if position % 2 else [1, 0]
        for again in range(2 if position == first + 2 else 1):
            rows = [RowWork(caches[each], position, 1) for each in order]
            found = runner.forward(rows, torch.stack([texts[each][position] for each in order]), span)
            assert torch.equal(found, torch.stack([whole[each][position] for each in order])), again
    twin = caches[0].fork()
    twin.allocate(num_tokens)
    position = first + 4
    for cache in (caches[0], twin):
        assert torch.equal(run(cache, texts[0], position, position + 1), whole[0][position : position + 1])
    assert runner.decode_graphs.num_replays == num_replays + 4 + 1 + 2
    # A single token next to a chunk is not recorded; all of them share each launch.
    launched.clear()
    rows = [RowWork(caches[0], position + 1, 1), RowWork(caches[1], position, num_tokens - position)]
    found = runner.forward(rows, torch.cat((texts[0][position + 1 : position + 2], texts[1][position:])), span)
    assert torch.equal(found, torch.cat((whole[0][position + 1 : position + 2], whole[1][position:])))
    assert launched.count("convolve") == len(runner.store.recurrent)
    for cache in (*caches, twin):
        cache.clear()
    assert_that_no_slot_is_taken(runner)


def assert_that_no_slot_is_taken(runner: SpanRunner) -> None:
    """The sessions of a runner are gone."""
    table = runner.store.state_table
    assert (table is not None) == bool(runner.store.recurrent)
    if table is not None:
        assert len([table.take() for _ in range(table.scratch_slot)]) == table.scratch_slot
