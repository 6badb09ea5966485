"""Penalties of rows that come together and part."""

import gc
import itertools
import weakref

import torch

from corolla.decoding.penalties import StackedPenalties, TokenPenalties
from tests.gpu_double import GPU, a_gpu

CPU = torch.device("cpu")
WIDTH = 23
KINDS = ((1.3, 0.0, 0.0), (1.0, 0.5, 0.0), (0.8, -0.2, 0.4), (1.0, 0.0, 0.7), (1.2, 0.1, 0.0))


def penalties() -> list[TokenPenalties]:
    return [
        TokenPenalties(
            (3, 4), (number,), repetition=each, presence=presence, frequency=frequency, vocabulary_size=WIDTH
        )
        for number, (each, presence, frequency) in enumerate(KINDS)
    ]


def scores_of(one: TokenPenalties, logits: torch.Tensor) -> torch.Tensor:
    return StackedPenalties.stacked([one], CPU).apply(logits.unsqueeze(0))[0]


def add(one: TokenPenalties, token_id: int) -> None:
    StackedPenalties.stacked([one], CPU).add(torch.tensor([token_id]), torch.tensor([True]))


def logits_of(num_rows: int, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def test_rows_have_their_own_penalties_whatever_company_they_had() -> None:
    alone, together = penalties(), penalties()
    steps = [rows for size in (5, 3, 5, 1, 4) for rows in itertools.permutations(range(5), size)][::17]
    for step, rows in enumerate(steps):
        # A batch often has the rows of the one before.
        for repeat in range(2):
            logits = logits_of(len(rows), step + repeat)
            expected = torch.stack([scores_of(alone[row], own) for row, own in zip(rows, logits, strict=True)])
            stack = StackedPenalties.stacked([together[row] for row in rows], CPU)
            assert torch.equal(stack.apply(logits), expected)
            tokens = torch.arange(step, step + len(rows)) % WIDTH
            are_added = torch.arange(len(rows)) != 1
            stack.add(tokens, are_added)
            for row, token, is_added in zip(rows, tokens.tolist(), are_added.tolist(), strict=True):
                if is_added:
                    add(alone[row], token)
        if step % 5 == 0:
            logits, original = logits_of(1, step)[0], together[rows[0]]
            expected, copied = scores_of(original, logits), original.copy()
            for token in range(WIDTH):
                add(copied, token)
            assert not torch.equal(scores_of(copied, logits), expected)
            assert torch.equal(scores_of(original, logits), expected)


@torch.inference_mode()
def test_a_batch_of_the_same_rows_has_the_same_stack_and_rows_that_leave_keep_none() -> None:
    many = penalties()
    stack = StackedPenalties.stacked(many, CPU)
    assert StackedPenalties.stacked(many, CPU) is stack
    assert StackedPenalties.stacked(many[:4], CPU) is not stack
    is_kept = weakref.ref(stack)
    del stack
    gc.collect()
    assert is_kept() is None


def test_stacking_waits_for_no_device() -> None:
    plain, there = penalties(), penalties()
    logits = logits_of(5, 1)
    with torch.inference_mode():
        expected = StackedPenalties.stacked(plain, CPU).apply(logits)
    with a_gpu() as gpu, torch.inference_mode():
        on_gpu = gpu.put(logits)
        found = [StackedPenalties.stacked(there[start:], GPU).apply(on_gpu[start:]) for start in (0, 1, 0)]
        assert not gpu.waits
        for start, scores in zip((0, 1, 0), found, strict=True):
            assert torch.equal(gpu.numbers(scores), expected[start:])
