"""Tokens that a device draws are those of a processor, but where two of them are as close as roundings."""

import torch

from corolla.decoding.parameters import SampledToken, SamplingParams
from corolla.decoding.race import drawn, drawn_by_operators, exponential_numbers, racers
from corolla.decoding.sampling import Sampler, sample_together
from tests.gpu.devices import Device, on_float32

NUM_ROWS, NUM_STEPS = 16, 12
PROMPT = (3, 1, 4)


def samplers() -> list[Sampler]:
    return [
        Sampler(SamplingParams(1.5, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.2, seed=seed), PROMPT)
        for seed in range(NUM_ROWS)
    ]


@on_float32()
def test_numbers_and_draws_have_the_bits_of_a_processor(device: Device) -> None:
    place = torch.zeros(1, device=device.name).device
    keys, positions = torch.arange(-5, 5) * 10**17, torch.arange(10)
    numbers = exponential_numbers(keys.to(place), positions.to(place), 9001)
    assert torch.equal(numbers.cpu(), exponential_numbers(keys, positions, 9001))
    rows = (3 * torch.randn(10, 9001, generator=torch.Generator().manual_seed(0))).softmax(dim=-1)
    top_p, min_p = [1.0, 0.95, 0.5, 0.01, 0.9] * 2, [0.0] * 8 + [0.1, 0.05]
    here, there = (racers(each, range(10), range(10), top_p, min_p) for each in (rows, rows.to(place)))
    assert drawn(rows.to(place), there).tolist() == drawn_by_operators(rows, here).tolist()


@on_float32()
def test_tokens_of_a_device_are_those_of_a_processor(device: Device) -> None:
    """And a row's token does not depend on the others, nor on which step it shares with them."""
    place = torch.zeros(1, device=device.name).device
    here, there = samplers(), samplers()
    num_logits = 128_000 if device.is_gpu else 500
    num_different = 0
    for step in range(NUM_STEPS):
        logits = torch.randn(NUM_ROWS, num_logits, generator=torch.Generator().manual_seed(step))
        expected, found = sample_together(here, logits), sample_together(there, logits.to(place))
        assert all(isinstance(token, SampledToken) for token in found)
        num_different += sum(one != other for one, other in zip(expected, found, strict=True))
        if step % 3 == 2:
            here, there = here[1:] + here[:1], there[1:] + there[:1]
    assert num_different <= 1
