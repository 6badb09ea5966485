"""The next token of a sampler alone."""

from torch import Tensor

from corolla.chassis.errors import CorollaError
from corolla.decoding.parameters import SampledToken
from corolla.decoding.sampling import Sampler, sample_together


def sample(sampler: Sampler, logits: Tensor) -> SampledToken:
    """Chooses and takes the next token, of float32 `[V]` logits. Raises the error of a row without a token."""
    (token,) = sample_together([sampler], logits.unsqueeze(0))
    if isinstance(token, CorollaError):
        raise token
    return token
