"""Writes grammars, which describe the form of an answer, as text, and has llguidance read them.

The module imports no other library.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_GRAMMAR_BYTES: Final = 192 << 10

# Under llguidance's own, higher limits, the choice of one token could take seconds. Under these, the costliest choices
# in the tests take about 10 ms, and the states of one answer some megabytes; ordinary schemas take a hundredth of that.
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
    """A grammar that llguidance does not accept. The message says why, in one sentence for the grammar's author."""


def grammar_text(*parts: Mapping[str, Any]) -> str:
    """The text of a grammar with these parts: each has `json_schema` or `lark_grammar`, llguidance's keys."""
    return json.dumps({"grammars": parts}, ensure_ascii=False, separators=(",", ":"))


def regex_rule(expression: str) -> str:
    """A grammar in Lark's notation for answers that the regular expression matches as a whole."""
    (part,) = json.loads(LLMatcher.grammar_from_regex(expression))["grammars"]
    return str(part["lark_grammar"])


def grammar_tokenizer(text: str, vocab_size: int, end_token_ids: Sequence[int]) -> LLTokenizer:
    """A model's tokens in the form that llguidance needs. Building it takes about a second.

    Args:
        text: the tokenizer, as `models.tokenizer.tokenizer_text` returns it.
        end_token_ids: at least one; grammars allow these tokens only where an answer is complete.

    Raises:
        ValueError: llguidance cannot read the tokenizer.
    """
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(end_token_ids))
    except ValueError:
        try:
            return LLTokenizer(_without_missing(text, vocab_size), n_vocab=vocab_size, eos_token=list(end_token_ids))
        except ValueError:
            return LLTokenizer(text, eos_token=list(end_token_ids))


def _without_missing(text: str, vocab_size: int) -> str:
    """The tokenizer without added tokens for which the model has no logits: a grammar could allow nothing but these."""
    tokenizer = json.loads(text)
    tokenizer["added_tokens"] = [each for each in tokenizer.get("added_tokens") or () if each["id"] < vocab_size]
    return json.dumps(tokenizer, ensure_ascii=False)


def read_grammar(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """A matcher at the beginning of an answer; each answer takes a copy of it.

    llguidance recurses as deep as the grammar's rules are nested.

    Raises:
        UnreadableGrammar: the text is not a grammar or is too large, or no answer can ever fit the grammar.
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
    """The first error in llguidance's message, shortened: the message may quote the whole grammar."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    gist = next(
        (line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0] if lines else ""
    )
    return f"cannot be a grammar: {gist[:_MAX_PROBLEM_CHARS]}"
