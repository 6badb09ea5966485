"""Accepted and redrawn tokens have the target's distribution, for good and bad draft tokens."""

import pytest
import torch

from corolla.hf.speculative import checked_draft_token

VOCABULARY_SIZE = 6
NUM_DRAWS = 6000
# Chi-square with 5 degrees of freedom exceeds this in one case of ten thousand; the draws are seeded.
MOST_CHI_SQUARE = 25.7


def distribution(seed: int, temperature: float, num_tokens: int = VOCABULARY_SIZE) -> torch.Tensor:
    logits = torch.randn(VOCABULARY_SIZE, generator=torch.Generator().manual_seed(seed)) / temperature
    logits[num_tokens:] = -torch.inf
    return logits.softmax(dim=-1)


@pytest.mark.parametrize(
    "target, draft",
    [
        (distribution(1, 1.0), distribution(2, 1.0)),
        (distribution(1, 0.5), distribution(2, 0.3)),
        (distribution(1, 1.0), distribution(1, 1.0)),
        (distribution(3, 1.0, num_tokens=3), distribution(4, 1.0)),
        (distribution(3, 1.0), distribution(4, 1.0, num_tokens=2)),
    ],
    ids=["unlike", "sharp", "same", "target leaves out", "draft leaves out"],
)
def test_the_result_has_the_targets_distribution(target: torch.Tensor, draft: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(7)
    draft_tokens = torch.multinomial(draft, NUM_DRAWS, replacement=True, generator=generator)
    drawn = torch.tensor(
        [checked_draft_token(target, draft, int(draft_token), generator) for draft_token in draft_tokens]
    )
    counts = torch.bincount(drawn, minlength=VOCABULARY_SIZE)
    possible = target > 0
    assert not counts[~possible].any()
    expected = NUM_DRAWS * target[possible]
    assert float(((counts[possible] - expected) ** 2 / expected).sum()) < MOST_CHI_SQUARE
    # The most draft tokens stay that can: the part that both distributions have in common.
    stayed = float((drawn == draft_tokens).float().mean())
    assert stayed == pytest.approx(float(torch.minimum(target, draft).sum()), abs=0.03)


def test_a_rejected_draft_token_is_never_drawn_again() -> None:
    target, draft = distribution(1, 0.5), distribution(2, 0.3)
    generator = torch.Generator().manual_seed(7)
    worst = int((draft - target).argmax())
    drawn = [checked_draft_token(target, draft, worst, generator) for _ in range(500)]
    assert worst in drawn
    others = {token for token in drawn if token != worst}
    assert others <= {int(token) for token in (target > draft).nonzero()}
