"""The program of the process that checks grammars for `grammar_process`."""

from collections.abc import Sequence
from typing import Any

from corolla.client.text.bounded_worker import Answer, serve
from corolla.decoding.grammar_text import UnreadableGrammar, grammar_tokenizer, read_grammar


def begin(first: Sequence[Any]) -> Answer:
    """Takes the arguments of `grammar_tokenizer`; returns the function that checks grammars."""
    tokenizer = grammar_tokenizer(*first)

    def problem(request: Sequence[Any]) -> Sequence[str] | None:
        """Checks a grammar and an answer's first tokens. Returns the faulty one's name and its problem, or None."""
        text, token_ids = request
        try:
            matcher = read_grammar(tokenizer, text)
        except UnreadableGrammar as error:
            return "grammar", str(error)
        matcher.compute_bitmask()
        if matcher.is_error():
            return "grammar", "must not be too complex, and must allow at least one text"
        if token_ids and not matcher.consume_tokens(token_ids):
            return "token_ids", "must be the beginning of an answer in this response format"
        return None

    return problem


if __name__ == "__main__":
    raise SystemExit(serve(begin))
