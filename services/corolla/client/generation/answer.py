"""An answer as it grows: tokens in, text and the end out. Time is passed in."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from corolla.client.speech.pieces import CallDelta, Piece, Said, joined_pieces
from corolla.client.speech.reading import AnswerParser
from corolla.client.text.conversation import Message
from corolla.client.text.detokenizer import Detokenizer
from corolla.client.text.tokenizer import TextTokenizer
from corolla.decoding.parameters import SampledToken
from corolla.decoding.stopping import FinishReason, StopDecider, StopMatcher


@dataclass(frozen=True, slots=True)
class Delta:
    """What a token adds to an answer, or several that came together.

    Attributes:
        tokens: none where the delta is only the end.
        text: whole characters that can no longer become part of a stop sequence.
        finish_reason: set on the last one.
        reasoning, calls: in a chat, what of the text is reasoning, and the tools that are called.
    """

    tokens: tuple[SampledToken, ...]
    text: str
    finish_reason: FinishReason | None
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


def joined(deltas: Sequence[Delta]) -> Delta:
    """One or more deltas that follow each other, as one."""
    if len(deltas) == 1:
        return deltas[0]
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    said = joined_pieces(Piece(delta.text, delta.reasoning, delta.calls) for delta in deltas)
    return Delta(tokens, said.text, deltas[-1].finish_reason, said.reasoning, said.calls)


class Answer:
    """One answer: `finish_reason` is None while it continues.

    `accept` decides at each token whether the answer ends; the text is decoded later, while the next step is under way,
    unless a stop sequence may end the answer.

    Args:
        parser: tells what the text is; None: it is text.
        shown_ids: special tokens that the parser has to see.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        prompt_ids: Sequence[int],
        decider: StopDecider,
        stop_sequences: Sequence[str],
        parser: AnswerParser | None = None,
        shown_ids: Container[int] = (),
    ) -> None:
        self.tokens: list[SampledToken] = []
        self.finish_reason: FinishReason | None = None
        self._said = Said()
        self._decider = decider
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, shown_ids)
        self._parser = parser
        self._matcher = StopMatcher(stop_sequences)
        self._ends_by_text = bool(stop_sequences)
        self._undecoded: list[SampledToken] = []
        self._deltas: list[Delta] = []

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far, in a list of the caller's own."""
        return [token.token_id for token in self.tokens]

    @property
    def text(self) -> str:
        """All text of the deltas so far."""
        return "".join(self._said.texts)

    @property
    def message(self) -> Message:
        """The answer so far as the next message of a conversation."""
        return self._said.message

    def accept(self, token: SampledToken, elapsed_s: float) -> None:
        """Takes the next token, `elapsed_s` seconds after the request began, and decides whether the answer ends."""
        self.tokens.append(token)
        self.finish_reason = self._decider.finish_reason(token.token_id, len(self.tokens), elapsed_s)
        self._undecoded.append(token)
        if self._ends_by_text:
            self._decode()

    def deltas(self) -> list[Delta]:
        """What each of the tokens since the last call adds."""
        self._decode()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _decode(self) -> None:
        tokens, self._undecoded = self._undecoded, []
        for index, token in enumerate(tokens):
            new_text = self._detokenizer.push(token.token_id)
            is_last = self.finish_reason is not None and index == len(tokens) - 1
            if is_last:
                new_text += self._detokenizer.flush()
            text, matched = self._matcher.push(new_text)
            if matched:
                self.finish_reason = FinishReason.STOP_SEQUENCE
            elif is_last:
                text += self._matcher.flush()
            piece = self._read(text, is_last=matched or is_last)
            self._said.add(piece)
            finish_reason = self.finish_reason if matched or is_last else None
            self._deltas.append(Delta((token,), piece.text, finish_reason, piece.reasoning, piece.calls))

    def _read(self, text: str, *, is_last: bool) -> Piece:
        """What the text is; an answer that calls tools and ends by itself ends for that."""
        parser = self._parser
        if parser is None:
            return Piece(text)
        piece = parser.push(text)
        if not is_last:
            return piece
        piece = joined_pieces((piece, parser.finish()))
        if self.finish_reason is FinishReason.EOS and parser.num_calls:
            self.finish_reason = FinishReason.TOOL_CALLS
        return piece
