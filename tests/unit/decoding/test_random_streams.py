"""Random streams that lie on a device and come back from it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from corolla.decoding import batched_sampling
from corolla.decoding.batched_sampling import sample_together
from corolla.decoding.device_rows import DeviceRows, indices_of
from corolla.decoding.parameters import SampledToken, SamplingParams
from corolla.decoding.random_jump import with_words, words_of
from corolla.decoding.random_streams import NUM_WORDS, RandomStreams, draws_as_a_cpu
from corolla.decoding.sampling import Sampler
from tests.gpu_double import GPU, a_gpu

CPU = torch.device("cpu")
SOME_STATE = torch.Generator().get_state().numpy().tobytes()


def defined_numbers(streams: Tensor, slots: Tensor, width: int) -> Tensor:
    """What the kernel computes, by generators."""
    drawn = torch.empty(len(slots), width, dtype=torch.float64)
    for place, slot in zip(drawn, slots.tolist(), strict=True):
        words = streams[slot].numpy().view("uint32")
        state = with_words(SOME_STATE, words[:NUM_WORDS], int(words[NUM_WORDS]))
        generator = torch.Generator().set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        place.copy_(-torch.rand(width, dtype=torch.float64, generator=generator))
        words[:NUM_WORDS], words[NUM_WORDS] = words_of(generator.get_state().numpy().tobytes())
    return drawn


def samplers(num: int) -> list[Sampler]:
    return [Sampler(SamplingParams(1.2, top_p=0.9, seed=seed), (), num_skipped=seed % 2) for seed in range(num)]


def test_the_definition_passes_the_trial() -> None:
    assert draws_as_a_cpu(CPU, defined_numbers)


def test_rows_that_come_and_go_keep_their_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = RandomStreams(CPU, defined_numbers)
    plain, there = samplers(5), samplers(5)
    all_logits = torch.randn(9, 5, 97, generator=torch.Generator().manual_seed(0))
    for step, logits in enumerate(all_logits):
        rows = [(step + index) % 5 for index in range(5 - step % 3)]
        if step == 3:
            # The place of one that ends goes to a new one.
            plain[rows[0]], there[rows[0]] = *samplers(1), *samplers(1)
        if step == 5:
            # A thread draws for one of them, so this step's numbers come from the CPU.
            there[rows[0]].draw_ahead(97, CPU, like_gpu=True)
        expected = sample_together([plain[row] for row in rows], logits[rows], like_gpu=True)
        with monkeypatch.context() as patch:
            patch.setattr(batched_sampling, "streams_of", lambda _device: streams)
            found = sample_together([there[row] for row in rows], logits[rows], like_gpu=True)
        assert all(isinstance(each, SampledToken) for each in found)
        assert found == expected
        assert [each.state() for each in there] == [each.state() for each in plain]


def test_copies_and_choices_on_the_cpu_go_on_where_the_device_was(monkeypatch: pytest.MonkeyPatch) -> None:
    (plain,), (there,) = samplers(1), samplers(1)
    streams = RandomStreams(CPU, defined_numbers)
    monkeypatch.setattr(batched_sampling, "streams_of", lambda _device: streams)
    logits = torch.randn(1, 97, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        plain.random_outputs(97, CPU)
        sample_together([there], logits, like_gpu=True)
        assert torch.equal(there.fork().random_numbers(97, CPU), plain.fork().random_numbers(97, CPU))
        assert torch.equal(there.random_numbers(97, CPU), plain.random_numbers(97, CPU))
        plain.random_outputs(97, CPU)
        sample_together([there], logits, like_gpu=True)
        # A copy that chooses on the device moves no other stream.
        sample_together([there.fork()], logits, like_gpu=True)


def test_a_row_is_free_again_once_nothing_holds_it() -> None:
    rows = DeviceRows(2, torch.int32, CPU)
    slots = [rows.take(torch.tensor([number, -number])) for number in range(5)]
    assert rows.numbers[list(indices_of(slots))].tolist() == [[number, -number] for number in range(5)]
    kept = slots.pop(2)
    freed = indices_of(slots)
    slots.clear()
    size = len(rows.numbers)
    again = [rows.take(torch.tensor([9, 9])) for _ in range(size - 1)]
    assert len(rows.numbers) == size
    assert set(freed) <= set(indices_of(again))
    assert rows.numbers[kept.index].tolist() == [2, -2]


def test_numbers_drawn_during_a_step_are_there_for_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come and go between the draw and the choice, and no work is out of order."""
    params = [SamplingParams(1.2, top_p=0.9, seed=seed) for seed in range(4)]
    plain, there = ([Sampler(each, ()) for each in params] for _ in range(2))
    all_logits = torch.randn(6, 4, 50, generator=torch.Generator().manual_seed(0))

    def moving(streams: Tensor, slots: Tensor, width: int) -> Tensor:
        # Operators move the streams, so that the double sees the order: each draws shifts of its seed's words.
        rows = streams[slots]
        streams.index_copy_(0, slots, torch.cat((rows[:, :NUM_WORDS].roll(1, dims=1), rows[:, NUM_WORDS:]), dim=1))
        return -((rows[:, :width] & 0xFFFF).double() + 1) / (1 << 17)

    def tokens(device: torch.device, put: Callable[[Tensor], Tensor], samplers: list[Sampler]) -> list[object]:
        streams = RandomStreams(device, moving)
        monkeypatch.setattr(batched_sampling, "streams_of", lambda _device: streams)
        found: list[object] = []
        for step, logits in enumerate(all_logits):
            rows = [(step + index) % 4 for index in range(4 - step % 3)]
            ahead = rows[: len(rows) - step % 2]
            with torch.inference_mode():
                busy = put(logits) @ put(logits.T)
                if device == GPU:
                    streams.draw_ahead([samplers[row] for row in ahead], 50)
                rows = rows[::-1] if step == 4 else rows
                own = put(logits[rows])
                found.append(sample_together([samplers[row] for row in rows], own + 0 * busy.sum(), like_gpu=True))
        return found

    expected = tokens(CPU, lambda numbers: numbers, plain)
    with a_gpu() as gpu:
        assert tokens(GPU, gpu.put, there) == expected
        assert not gpu.waits
    assert [each.state() for each in there] == [each.state() for each in plain]


def test_a_draw_waits_for_nothing_but_its_reading() -> None:
    def there(streams: Tensor, slots: Tensor, width: int) -> Tensor:
        return streams[slots, :1].double().repeat(1, width)

    with a_gpu() as gpu, torch.inference_mode():
        streams = RandomStreams(GPU, there)
        slots = [streams.begin(SOME_STATE) for _ in range(3)]
        draw = streams.draw(slots, 9)
        assert not gpu.waits
        words, num_used = words_of(SOME_STATE)
        for found, found_used in draw.moved():
            assert found_used == num_used
            assert found.tolist() == words.tolist()
