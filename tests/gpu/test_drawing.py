"""Random numbers that threads draw and copy while the device computes are those that a choice draws for itself."""

from concurrent.futures import ThreadPoolExecutor

import torch

from corolla.decoding.batched_sampling import sample_together
from corolla.decoding.parameters import SampledToken, SamplingParams
from corolla.decoding.sampling import Sampler
from corolla.wire.device_copies import await_copies
from tests.gpu.devices import Device, on_float32

NUM_ROWS, NUM_STEPS = 16, 12
PROMPT = (3, 1, 4)


def samplers() -> list[Sampler]:
    return [
        Sampler(SamplingParams(1.5, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.2, seed=seed), PROMPT)
        for seed in range(NUM_ROWS)
    ]


@on_float32()
def test_numbers_that_are_copied_while_the_device_computes_give_the_same_tokens(device: Device) -> None:
    place = torch.zeros(1, device=device.name).device
    plain, ahead = samplers(), samplers()
    # Only a device can be slower than its copies.
    num_logits, side = (128_000, 4096) if device.is_gpu else (500, 128)
    busy = torch.ones(side, side, device=place) / side
    with ThreadPoolExecutor(4) as threads:
        for step in range(NUM_STEPS):
            logits = torch.randn(NUM_ROWS, num_logits, generator=torch.Generator().manual_seed(step)).to(place)
            for _ in range(8):
                busy = busy @ busy
            list(threads.map(lambda sampler: sampler.draw_ahead(num_logits, place, like_gpu=True), ahead))
            await_copies(place)
            found = sample_together(ahead, logits, like_gpu=True)
            assert all(isinstance(token, SampledToken) for token in found)
            assert found == sample_together(plain, logits, like_gpu=True)
            # A row's token does not depend on the others, nor on which step it shares with them.
            if step % 3 == 2:
                plain, ahead = plain[1:] + plain[:1], ahead[1:] + ahead[:1]
    assert [sampler.state() for sampler in ahead] == [sampler.state() for sampler in plain]
