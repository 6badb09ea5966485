"""Grammars as text: how answers of a form are described, and read by llguidance. It needs nothing else."""

import json
from collections.abc import Sequence
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_GRAMMAR_BYTES: Final = 192 << 10

# Fewer than the library's own, with which the choice of one token could take seconds. With these the costliest choices
# that the tests know take some 10 ms and the states of one answer some megabytes; ordinary schemas take a hundredth.
_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=2_000,
    max_items_in_row=500,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
_MAX_PROBLEM_CHARS: Final = 200


class UnreadableGrammar(Exception):
    """Its text is what is wrong with the grammar, in one sentence for whoever wrote it."""


def as_grammar(kind: str, value: object) -> str:
    """The text of a grammar of one part, of a kind that llguidance has: `json_schema` or `lark_grammar`."""
    return json.dumps({"grammars": [{kind: value}]}, ensure_ascii=False, separators=(",", ":"))


def regex_grammar(expression: str) -> str:
    """The text of a grammar of all that an expression matches as a whole."""
    return LLMatcher.grammar_from_regex(expression)


def grammar_tokenizer(text: str, vocab_size: int, end_token_ids: Sequence[int]) -> LLTokenizer:
    """A model's tokens as grammars know them; it takes about a second.

    Args:
        text: as `models.tokenizer_text` gives it.
        vocab_size: how many logits there are for a token.
        end_token_ids: one at least; they may come where an answer is whole, and nowhere else.

    Raises:
        ValueError: llguidance cannot read it.
    """
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(end_token_ids))
    except ValueError:
        # The tokenizer may know more tokens than the head.
        return LLTokenizer(text, eos_token=list(end_token_ids))


def read_grammar(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """A matcher that has seen no token; copies of it follow answers. It recurses as deep as the grammar's rules do.

    Raises:
        UnreadableGrammar: it is none, is too large, or no answer can ever fit it.
    """
    if len(text.encode(errors="surrogatepass")) > MAX_GRAMMAR_BYTES:
        raise UnreadableGrammar(f"must have at most {MAX_GRAMMAR_BYTES >> 10} KiB as a grammar")
    try:
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)
    except ValueError as error:
        raise UnreadableGrammar(_problem(str(error))) from None
    if matcher.is_error():
        raise UnreadableGrammar(_problem(matcher.get_error()))
    return matcher


def _problem(message: str) -> str:
    """The gist of what llguidance says, which may quote the grammar at length."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    gist = next(
        (line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0] if lines else ""
    )
    return f"cannot be a grammar: {gist[:_MAX_PROBLEM_CHARS]}"
