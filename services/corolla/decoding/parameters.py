"""The parameters by which tokens are chosen, and the chosen tokens. Pure."""

from dataclasses import dataclass
from typing import Final, Self

from corolla.chassis.errors import InvalidRequest
from corolla.v1 import common_pb2 as pb

MAX_LOGPROBS: Final = 20
MAX_BIASED_TOKENS: Final = 1024

_MIN_TEMPERATURE: Final = 1e-4
"""Lower temperatures, apart from 0, make `logits / temperature` too large for a meaningful float32 softmax."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. The defaults are greedy, without penalties and without log probabilities.

    The fields are those of the message `SamplingParameters`, in which parameters travel, and `num_logprobs`. Each
    process reads the message once, where it enters.

    Args:
        temperature: 0 is greedy, which makes top-k, top-p and min-p irrelevant; else from 0.0001 to 100.
        top_k: keeps the k most probable tokens; 0 switches it off.
        top_p: keeps the most probable tokens that together reach this probability; 1 switches it off.
        min_p: keeps tokens with at least this share of the highest probability; 0 switches it off.
        repetition_penalty: penalises tokens of prompt and answer as `transformers` does, from 0.01 to 100; 1 switches
            it off.
        presence_penalty: penalises tokens of the answer as the OpenAI API does, from -2 to 2; 0 switches it off.
        frequency_penalty: like the presence penalty, times the number of occurrences.
        seed: equal seeds give equal answers; None draws a fresh seed.
        num_logprobs: None for no log probabilities, 0 for the chosen token's only, up to 20 for as many alternatives.
        logit_bias: at most 1024 pairs of a token id and a number from -100 to 100, which is added to the token's logit
            before all other changes; each token id occurs once.

    Raises:
        InvalidRequest: fields are out of range; the error has one violation per field.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    num_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        # Comparisons with NaN are false, so each row names the values that are allowed.
        in_range = {
            "temperature": (
                self.temperature == 0 or _MIN_TEMPERATURE <= self.temperature <= 100,
                "must be 0 (greedy) or between 0.0001 and 100",
            ),
            "top_k": (self.top_k >= 0, "must not be negative; 0 switches it off"),
            "top_p": (0 < self.top_p <= 1, "must be more than 0 and at most 1; 1 switches it off"),
            "min_p": (0 <= self.min_p <= 1, "must be between 0 and 1; 0 switches it off"),
            "repetition_penalty": (
                0.01 <= self.repetition_penalty <= 100,
                "must be between 0.01 and 100; 1 switches it off",
            ),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "must be between -2 and 2; 0 switches it off"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "must be between -2 and 2; 0 switches it off"),
            "seed": (self.seed is None or -(2**63) <= self.seed < 2**64, "must be a 64 bit integer"),
            "num_logprobs": (
                self.num_logprobs is None or 0 <= self.num_logprobs <= MAX_LOGPROBS,
                f"must be between 0 and {MAX_LOGPROBS}",
            ),
            "logit_bias": (
                len(self.logit_bias) <= MAX_BIASED_TOKENS and all(-100 <= bias <= 100 for _, bias in self.logit_bias),
                f"must be at most {MAX_BIASED_TOKENS} numbers between -100 and 100",
            ),
        }
        violations = [(field, text) for field, (is_allowed, text) in in_range.items() if not is_allowed]
        if violations:
            raise InvalidRequest(*violations[0], *violations[1:])

    @classmethod
    def read(
        cls, message: pb.SamplingParameters, vocab_size: int, num_logprobs: int | None = None, seed: int | None = None
    ) -> Self:
        """Reads a message.

        Args:
            vocab_size: the number of tokens that biases may name.
            seed: a seed in place of the message's.

        Raises:
            InvalidRequest: fields are out of range; the error has one violation per field.
        """
        values = {descriptor.name: value for descriptor, value in message.ListFields()}
        if "temperature" not in values and values.keys() & {"top_k", "top_p", "min_p", "seed"}:
            values["temperature"] = 1.0
        if seed is not None:
            values["seed"] = seed
        if len(message.logit_bias) > MAX_BIASED_TOKENS:
            raise InvalidRequest("logit_bias", f"must be for at most {MAX_BIASED_TOKENS} tokens")
        values["logit_bias"] = tuple(sorted(message.logit_bias.items()))
        if max(message.logit_bias, default=0) >= vocab_size:
            raise InvalidRequest("logit_bias", f"must be for tokens below the vocabulary's size, {vocab_size}")
        return cls(**values, num_logprobs=num_logprobs)

    def message(self) -> pb.SamplingParameters:
        """The message that `read` reads, without the seed."""
        values = {each.name: getattr(self, each.name) for each in pb.SamplingParameters.DESCRIPTOR.fields}
        return pb.SamplingParameters(**values | {"seed": None, "logit_bias": dict(self.logit_bias)})

    @property
    def is_greedy(self) -> bool:
        """The most probable token is taken, so that no random number is drawn."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """The tokens seen so far matter to the choice."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One chosen token.

    `logprob` and `top_logprobs` (id and log probability, most probable first) belong to the model's own
    distribution, before penalties, temperature and filters. If the caller asked for none, `logprob` has the value
    None, and `top_logprobs` is empty.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
