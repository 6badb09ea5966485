"""The program of the process that makes and tries grammars for `grammar_process`."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from corolla.chassis.errors import InvalidRequest
from corolla.client.text.bounded_worker import Answer, serve
from corolla.client.text.formats import AnswerFormat, FormGrammar, form_of, grammar_of
from corolla.decoding.grammar_text import UnreadableGrammar, grammar_text, grammar_tokenizer, read_grammar


def begin(first: Sequence[Any]) -> Answer:
    """Takes the arguments of `grammar_tokenizer`; returns the function that makes grammars."""
    tokenizer = grammar_tokenizer(*first)

    def tried(request: Sequence[Any]) -> Mapping[str, Any]:
        """Makes the grammar of a form, and checks an answer's first tokens. Returns it, or what is wrong by field."""
        text, token_ids = request
        try:
            made, matcher = _read(tokenizer, form_of(text))
        except InvalidRequest as refusal:
            return {"violations": refusal.violations}
        except RecursionError:
            return {"violations": [(form_of(text).field, "must not be so complex")]}
        fits = not token_ids or matcher.consume_tokens(token_ids)
        return {"grammar": made.text, "ignored": made.ignored, "fits": fits}

    return tried


def _read(tokenizer: LLTokenizer, form: AnswerFormat) -> tuple[FormGrammar, LLMatcher]:
    """The grammar of a form without the regular expressions that llguidance refuses. Raises InvalidRequest."""
    made = grammar_of(form)
    try:
        return made, _matcher(tokenizer, made.text)
    except UnreadableGrammar as error:
        problem = str(error)
    if unreadable := _unreadable(made.patterns):
        made = grammar_of(form, unreadable)
        try:
            return made, _matcher(tokenizer, made.text)
        except UnreadableGrammar as error:
            problem = str(error)
    if len(form.parts) > 1:
        for name, text in (made.schemas or {}).items():
            try:
                _matcher(tokenizer, text)
            except UnreadableGrammar as error:
                raise InvalidRequest(name, str(error)) from None
    raise InvalidRequest(form.field, problem)


def _matcher(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """A matcher that allows a first token. Raises UnreadableGrammar."""
    matcher = read_grammar(tokenizer, text)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise UnreadableGrammar("must not be too complex, and must allow at least one text")
    return matcher


def _unreadable(patterns: Collection[str]) -> set[str]:
    """The regular expressions that no grammar can follow, such as those that look ahead."""
    alone = {each: grammar_text({"json_schema": {"type": "string", "pattern": each}}) for each in sorted(patterns)}
    return {pattern for pattern, text in alone.items() if LLMatcher.validate_grammar(text)}


if __name__ == "__main__":
    raise SystemExit(serve(begin))
