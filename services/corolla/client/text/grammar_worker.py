"""Tries grammars for a client service, whose other end is `grammar_process`."""

from collections.abc import Sequence
from typing import Any

from corolla.client.text.bounded_worker import Answer, serve
from corolla.decoding.grammar_text import UnreadableGrammar, grammar_tokenizer, read_grammar


def begin(first: Sequence[Any]) -> Answer:
    """Takes what `grammar_tokenizer` does, and reads the tokenizer."""
    tokenizer = grammar_tokenizer(*first)

    def problem(request: Sequence[Any]) -> Sequence[str] | None:
        """Takes a grammar and the tokens of an answer that has begun; what is wrong with which of both, if anything."""
        text, token_ids = request
        try:
            matcher = read_grammar(tokenizer, text)
        except UnreadableGrammar as error:
            return "grammar", str(error)
        matcher.compute_bitmask()
        if matcher.is_error():
            return "grammar", "is too complex, or no text fits it"
        if token_ids and not matcher.consume_tokens(token_ids):
            return "token_ids", "are no beginning of an answer of this form"
        return None

    return problem


if __name__ == "__main__":
    raise SystemExit(serve(begin))
