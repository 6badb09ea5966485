"""How a mixture of experts chooses the experts of a token, as data. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Routing:
    """The rule of a router, which has a logit for each expert.

    Attributes:
        num_experts: how many experts there are.
        num_chosen: how many of them a token gets.
        score: what becomes of the logits: `softmax` or `sigmoid`, over all experts; `chosen`: the logits are the
            scores, and the softmax of those that were chosen are the weights; or `near`: the logits are the scores,
            and each chosen one's weight is its share in the softmax of those that are near it and not chosen before.
        normalises: whether the weights of a token are divided by their sum.
        epsilon: added to that sum.
        least_sum: what the sum is at least.
        nearness: how far a near score is below the chosen one, as a part of the larger of the chosen one and its own
            absolute number.
        scaling: the factor of the weights after that.
        num_groups: of how many groups of neighbours the experts are; a group's score is that of its two best experts.
        num_chosen_groups: experts are chosen from so many groups, which have the greatest scores.
    """

    num_experts: int
    num_chosen: int
    score: str
    normalises: bool = False
    epsilon: float = 0.0
    least_sum: float = 0.0
    nearness: float = 0.0
    scaling: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
