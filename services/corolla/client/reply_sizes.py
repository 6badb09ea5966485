"""How large a reply can become, counted before any work. Pure.

A reply that is sent whole takes memory until its caller has read it, and a caller of gRPC loses one that is larger than
it receives. So a request whose reply could be larger than its caller's limit is refused, and a request that sets no
number of tokens gets as many as surely fit. Streams need no such limit for their answers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

from corolla.chassis.errors import ReplyTooLarge
from corolla.decoding.parameters import MAX_LOGPROBS

MIB: Final = 1 << 20
DEFAULT_GRPC_BYTES: Final = 4 * MIB
"""What clients of gRPC receive by default."""
LIMIT_KEY: Final = "x-corolla-max-reply-bytes"
"""The metadata in which a caller of gRPC states how large a reply it receives."""

_REPLY_BYTES: Final = 4096
"""What a reply has once: names, ids, usage."""
_NUM_KEPT: Final = MAX_LOGPROBS + 1


@dataclass(frozen=True, slots=True)
class TokenWidths:
    """How many bytes the tokens of a vocabulary take, the widest ones first.

    Attributes:
        plain: as text and as bytes, together.
        quoted: as a text in JSON.
        listed: as a text and as a list of bytes in JSON.
    """

    plain: tuple[int, ...]
    quoted: tuple[int, ...]
    listed: tuple[int, ...]

    @classmethod
    def from_tokens(cls, tokens: Iterable[bytes]) -> Self:
        """The widths of the tokens with these bytes."""
        widths = [_widths(token) for token in set(tokens)] or [(0, 0, 0)]
        plain, quoted, listed = (sorted(each, reverse=True)[:_NUM_KEPT] for each in zip(*widths, strict=True))
        return cls(tuple(plain), tuple(quoted), tuple(listed))


def _widths(token: bytes) -> tuple[int, int, int]:
    try:
        text = token.decode()
        # Control characters take six characters, quotation marks and backslashes two.
        num_quoted = len(token) + sum(1 if each in '"\\' else 5 for each in text if each in '"\\' or each < " ")
        num_text = len(token)
    except UnicodeDecodeError:
        # Bytes that are only a part of a character are spelled \xff in names, and U+FFFD in texts.
        num_quoted, num_text = 6 * len(token), 3 * len(token)
    return len(token) + num_text, num_quoted, num_quoted + 5 * len(token)


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """What the parts of a reply take in one form, in bytes and at most.

    Attributes:
        measure: the attribute of TokenWidths that tells the width of a token with its log probability.
        answer: for each answer.
        token: for each token, without its text.
        entry: for each log probability, without the token.
        repeats_prompt: whether each answer has the prompt that is echoed.
        copies: how often the answer stands in the reply.
    """

    measure: str
    answer: int
    token: int
    entry: int
    repeats_prompt: bool = False
    copies: int = 1

    def token_bytes(self, widths: TokenWidths, num_logprobs: int | None) -> int:
        """The bytes of one token of an answer, with `num_logprobs` alternatives; None: without log probabilities."""
        text = widths.plain[0] if self.measure == "plain" else widths.quoted[0]
        if num_logprobs is None:
            return self.copies * (self.token + text)
        own: Sequence[int] = getattr(widths, self.measure)
        # The chosen token comes with its alternatives, of which it may be one more.
        entries = (num_logprobs + 2) * self.entry + own[0] + sum(own[: num_logprobs + 1])
        return self.copies * (self.token + text + entries)


PROTOBUF: Final = ReplyForm("plain", answer=64, token=5, entry=24)
CHATS: Final = ReplyForm("listed", answer=512, token=11, entry=80)
COMPLETIONS: Final = ReplyForm("quoted", answer=256, token=11, entry=64, repeats_prompt=True)
RESPONSES: Final = ReplyForm("listed", answer=1024, token=11, entry=80)
STREAMED_RESPONSES: Final = ReplyForm("listed", answer=1024, token=256, entry=80, copies=5)
"""The last events of the stream have the whole answer again."""


@dataclass(frozen=True, slots=True)
class ReplyRoom:
    """The room for one reply.

    Attributes:
        num_bytes: how large it may be.
        is_streamed: whether only a prompt that is echoed comes in one piece.
    """

    form: ReplyForm
    num_bytes: int
    is_streamed: bool = False

    def most_tokens(
        self, widths: TokenWidths, num_answers: int, num_logprobs: int | None, num_echoed: int = 0
    ) -> int | None:
        """How many tokens each answer may have; None: any number.

        Args:
            num_echoed: the number of the prompt's tokens that come back.

        Raises ReplyTooLarge if there is no room for all but the answers' tokens.
        """
        form = self.form
        token_bytes = form.token_bytes(widths, num_logprobs)
        echo_bytes = self.echo_bytes(widths, num_answers, num_logprobs, num_echoed)
        left = self.num_bytes - _REPLY_BYTES - num_answers * form.answer - echo_bytes
        if left < 0:
            field = "echo" if num_echoed and num_answers == 1 and num_logprobs is None else "logprobs"
            field = "num_completions" if num_answers > 1 and num_logprobs is None else field
            raise self.refusal(field, self.num_bytes - left)
        return None if self.is_streamed else left // (num_answers * token_bytes)

    def echo_bytes(self, widths: TokenWidths, num_answers: int, num_logprobs: int | None, num_echoed: int) -> int:
        """How many bytes the prompt takes in the reply."""
        num_prompts = num_answers if self.form.repeats_prompt and not self.is_streamed else 1
        return num_prompts * num_echoed * self.form.token_bytes(widths, num_logprobs)

    def check_tokens(
        self, num_tokens: int, widths: TokenWidths, num_answers: int, num_logprobs: int | None, num_echoed: int = 0
    ) -> None:
        """Refuses answers of so many tokens if the reply could be too large. Raises ReplyTooLarge."""
        most = self.most_tokens(widths, num_answers, num_logprobs, num_echoed)
        if most is not None and num_tokens > most:
            more = (num_tokens - most) * num_answers * self.form.token_bytes(widths, num_logprobs)
            raise self.refusal("stopping.max_tokens", self.num_bytes + more)

    def check_bytes(self, num_bytes: int, field: str) -> None:
        """Refuses a reply whose size is known. Raises ReplyTooLarge."""
        if num_bytes + _REPLY_BYTES > self.num_bytes:
            raise self.refusal(field, num_bytes)

    def refusal(self, field: str, num_bytes: int) -> ReplyTooLarge:
        return ReplyTooLarge(
            field,
            f"must be less: the reply could have {-(-num_bytes // MIB)} MiB, and {self.num_bytes / MIB:.4g} MiB are "
            "sent at most; ask for less at a time, or for a stream",
        )


ANY_ROOM: Final = ReplyRoom(PROTOBUF, 1 << 62, is_streamed=True)


def stated_bytes(metadata: Iterable[tuple[str, str | bytes]], most_bytes: int) -> int:
    """How large a reply a caller of gRPC receives, by its metadata, and never more than `most_bytes`."""
    given = next((value for name, value in metadata if name == LIMIT_KEY), "")
    is_number = isinstance(given, str) and given.isascii() and given.isdecimal() and len(given) < 16
    return min(most_bytes, int(given) if is_number else DEFAULT_GRPC_BYTES)
