"""An answer as it grows: it takes tokens, and returns their text and the reason why it ends."""

import time
from collections.abc import Container, Sequence
from dataclasses import replace

from corolla.client.output_parsing.deltas import Delta, MessageBuilder, joined
from corolla.client.output_parsing.parser_choice import AnswerParser
from corolla.client.text.detokenizer import Detokenizer
from corolla.client.text.tokenizer import TextTokenizer
from corolla.decoding.parameters import SampledToken
from corolla.decoding.stopping import FinishReason, StopDecider, StopMatcher
from corolla.v1.common_pb2 import ChatMessage


class Answer:
    """One answer, which continues until it has a `finish_reason`.

    `accept` decides at each token whether the answer ends. The text is decoded later, while hops compute the next step,
    except in an answer with stop sequences, where `accept` needs the text.

    Args:
        parser: splits text into reasoning, calls and text; None: all is text.
        shown_ids: special tokens whose text the parser needs.
        started_s: when the request began, by `time.monotonic()`.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        prompt_ids: Sequence[int],
        decider: StopDecider,
        stop_sequences: Sequence[str],
        parser: AnswerParser | None = None,
        shown_ids: Container[int] = (),
        started_s: float = 0.0,
    ) -> None:
        self.tokens: list[SampledToken] = []
        self.finish_reason: FinishReason | None = None
        self._message = MessageBuilder()
        self._decider = decider
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, shown_ids)
        self._parser = parser
        self._matcher = StopMatcher(stop_sequences)
        self._ends_by_text = bool(stop_sequences)
        self._undecoded: list[SampledToken] = []
        self._deltas: list[Delta] = []
        self._started_s = started_s

    @property
    def token_ids(self) -> list[int]:
        """All token ids so far, in a new list."""
        return [token.token_id for token in self.tokens]

    @property
    def text(self) -> str:
        """All text of the deltas so far."""
        return "".join(self._message.texts)

    @property
    def stop_sequence(self) -> str:
        """The stop sequence that ended the answer; empty: none did."""
        return self._matcher.matched

    @property
    def message(self) -> ChatMessage:
        """The answer so far as the next message of a conversation."""
        return self._message.delta.message

    def read(self, token: SampledToken) -> bool:
        """Takes the next token when it comes from the chain. Returns whether the answer continues."""
        self.accept(token, time.monotonic() - self._started_s)
        return self.finish_reason is None

    def accept(self, token: SampledToken, elapsed_s: float, finish_reason: FinishReason | None = None) -> None:
        """Takes the next token, `elapsed_s` seconds after the request began, and decides whether the answer ends.

        An answer that ended before, and is replayed, gives the `finish_reason` of its last token.
        """
        self.tokens.append(token)
        self.finish_reason = finish_reason or self._decider.finish_reason(token.token_id, len(self.tokens), elapsed_s)
        self._undecoded.append(token)
        if self._ends_by_text:
            self._decode()

    def cut_off(self) -> None:
        """Ends the answer because the servers have no more room. Its last delta has no token."""
        self._decode()
        self.finish_reason = FinishReason.LENGTH
        text, matched = self._matcher.push(self._detokenizer.flush())
        if matched:
            self.finish_reason = FinishReason.STOP_SEQUENCE
        else:
            text += self._matcher.flush()
        parsed = self._read(text, is_last=True)
        self._add((), parsed, self.finish_reason)

    def deltas(self) -> list[Delta]:
        """The deltas of the tokens since the last call, one for each token; an answer that was cut off has one more."""
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
            parsed = self._read(text, is_last=matched or is_last)
            self._add((token,), parsed, self.finish_reason if matched or is_last else None)

    def _add(self, tokens: tuple[SampledToken, ...], parsed: Delta, finish_reason: FinishReason | None) -> None:
        self._message.add(parsed)
        self._deltas.append(
            replace(parsed, tokens=tokens, finish_reason=finish_reason, stop_sequence=self.stop_sequence)
        )

    def _read(self, text: str, *, is_last: bool) -> Delta:
        """Parses more text. An answer that calls tools and ends with an end token gets the reason TOOL_CALLS."""
        parser = self._parser
        if parser is None:
            return Delta(text)
        parsed = parser.push(text)
        if not is_last:
            return parsed
        parsed = joined((parsed, parser.finish(is_cut=self.finish_reason is not FinishReason.EOS)))
        if self.finish_reason is FinishReason.EOS and parser.num_calls:
            self.finish_reason = FinishReason.TOOL_CALLS
        return parsed
