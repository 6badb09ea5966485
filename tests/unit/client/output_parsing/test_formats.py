"""The format of a checkpoint."""

import pytest

from corolla.client.output_parsing.formats import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_V11,
    CallFormat,
    call_format,
    reasoning_format,
)
from tests.chat_templates import LLAMA as LLAMA_TEMPLATE
from tests.chat_templates import MISTRAL as MISTRAL_TEMPLATE
from tests.chat_templates import PARTS, QWEN


@pytest.mark.parametrize(
    "template, tokens, expected",
    [
        (QWEN, (), HERMES),
        (LLAMA_TEMPLATE, (), LLAMA),
        (MISTRAL_TEMPLATE, (), MISTRAL),
        # The template says more than the tokens.
        (QWEN, ("[TOOL_CALLS]",), HERMES),
        (PARTS, ("[TOOL_CALLS]",), MISTRAL),
        (PARTS, ("[TOOL_CALLS]", "[ARGS]"), MISTRAL_V11),
        ("{{ '[TOOL_CALLS]' + call.name + '[ARGS]' }}", (), MISTRAL_V11),
        (PARTS, ("<|python_tag|>",), LLAMA),
        (PARTS, ("<tool_call>", "<|python_tag|>"), HERMES),
        (PARTS, (), HERMES),
        ("", (), HERMES),
    ],
)
def test_calls_are_written_as_the_template_or_the_tokens_say(
    template: str, tokens: tuple[str, ...], expected: CallFormat
) -> None:
    assert call_format(template, tokens) is expected


@pytest.mark.parametrize(
    "template, tokens, opening",
    [
        (QWEN, (), "<think>"),
        (PARTS, ("<think>", "</think>"), "<think>"),
        (PARTS, ("<think>",), None),
        (PARTS, ("[THINK]", "[/THINK]"), "[THINK]"),
        (LLAMA_TEMPLATE, (), None),
    ],
)
def test_reasoning_is_marked_as_the_template_or_the_tokens_say(
    template: str, tokens: tuple[str, ...], opening: str | None
) -> None:
    found = reasoning_format(template, tokens)
    assert (found.opening if found else None) == opening
