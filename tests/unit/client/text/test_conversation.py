"""Conversations with tools, reasoning and parts of text render as in transformers; only the template is a template."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment

from corolla.chassis.errors import InvalidRequest
from corolla.client.text.chat import ChatTemplate, TemplateProcess
from corolla.client.text.conversation import (
    ChatSetting,
    Tool,
    check_conversation,
    check_roles,
    message_values,
    tool_values,
    with_instructions,
)
from corolla.client.text.template import Template
from corolla.client.text.template_facts import facts_of
from corolla.client.text.tokenizer import TextTokenizer
from corolla.models.checkpoint import Checkpoint
from corolla.v1.common_pb2 import ChatMessage, ToolCall
from tests.chat_templates import LLAMA, MISTRAL, PARTS, QWEN
from tests.conversations import message
from tests.tiers import quick

TEMPLATES = {"qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL, "parts": PARTS}
WEATHER = Tool(
    "get_weather",
    'The weather of a "city" <b>&</b> 你好.',
    {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", 'Zü"rich']}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
CLOCK = Tool("now")
CALL = ToolCall(id="abcdefgh1", name="get_weather", arguments='{"city":"Paris", "days": 2, "x": [1.5, null, true]}')
CONVERSATION = (
    message("system", "Be <brief>."),
    message("user", "How is the weather?"),
    message("assistant", "", reasoning="They ask for\nweather.", tool_calls=(CALL,)),
    message("tool", '{"sky": "blue"}', tool_call_id="abcdefgh1", name="get_weather"),
    message("assistant", "It is blue."),
    message("user", "And tomorrow?"),
)


def template_of(tokenizer: TextTokenizer, source: str, renderer: Any = Template) -> ChatTemplate:
    hf_tokenizer: Any = copy.copy(tokenizer.hf_tokenizer)
    hf_tokenizer.chat_template = source
    return ChatTemplate(TextTokenizer(hf_tokenizer), renderer)


def transformers_text(tokenizer: TextTokenizer, source: str | None, messages: Any, **options: Any) -> str:
    text = tokenizer.hf_tokenizer.apply_chat_template(
        [message_values(each) for each in messages], chat_template=source, tokenize=False, **options
    )
    return str(text)


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("tools", [(), (WEATHER,), (WEATHER, CLOCK)], ids=["none", "one", "two"])
@pytest.mark.parametrize("length", [2, 3, 4, 6])
def test_conversations_with_tools_equal_transformers(
    byte_level_tokenizer: TextTokenizer, source: str, tools: tuple[Tool, ...], length: int
) -> None:
    setting = ChatSetting(tools, template_arguments={"enable_thinking": False, "date_string": "1 May 2031"})
    messages = CONVERSATION[:length]
    expected = transformers_text(
        byte_level_tokenizer, source, messages, tools=[tool_values(tool) for tool in tools] or None,
        add_generation_prompt=True, **setting.template_arguments,
    )  # fmt: skip
    chat = template_of(byte_level_tokenizer, source)
    assert chat.render(messages, setting, add_generation_prompt=True) == expected
    assert chat.prompt_ids(messages, setting) == byte_level_tokenizer.encode(expected, add_special_tokens=False)
    own = template_of(byte_level_tokenizer, source, TemplateProcess)
    assert own.render(messages, setting, add_generation_prompt=True) == expected
    own.close()


@pytest.mark.model
def test_the_demo_models_template_equals_transformers() -> None:
    tokenizer = TextTokenizer.load(Checkpoint.from_pretrained("demo").folder)
    setting = ChatSetting((WEATHER,))
    expected = transformers_text(
        tokenizer, None, CONVERSATION, tools=[tool_values(WEATHER)], add_generation_prompt=True
    )
    assert ChatTemplate(tokenizer).render(CONVERSATION, setting, add_generation_prompt=True) == expected


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("begun", ["It is", "It is ", " It is\n", "{", "It is blue."])
def test_a_message_is_continued_as_in_transformers(
    byte_level_tokenizer: TextTokenizer, source: str, begun: str
) -> None:
    messages = [message("user", "How is it?"), message("assistant", begun)]
    expected = transformers_text(byte_level_tokenizer, source, messages, continue_final_message=True)
    chat = template_of(byte_level_tokenizer, source)
    setting = ChatSetting(continues_last=True)
    assert chat.render(messages, setting, add_generation_prompt=False) == expected
    assert chat.prompt_ids(messages, setting) == byte_level_tokenizer.encode(expected, add_special_tokens=False)


def test_a_message_that_the_template_changes_is_not_continued(byte_level_tokenizer: TextTokenizer) -> None:
    chat = template_of(byte_level_tokenizer, "{% for m in messages %}{{ m.role + m.content[:2] }}{% endfor %}")
    with pytest.raises(InvalidRequest, match="changes the message"):
        chat.prompt_ids([message("assistant", "It is")], ChatSetting(continues_last=True))


def test_parts_are_a_list_where_the_template_iterates_and_one_text_elsewhere(
    byte_level_tokenizer: TextTokenizer,
) -> None:
    messages = [message("user", ("Look:", "two parts"))]
    parts = template_of(byte_level_tokenizer, PARTS).render(messages, add_generation_prompt=False)
    assert parts == "<|im_start|>user\n[text]Look:[text]two parts<|im_end|>\n"
    joined = template_of(byte_level_tokenizer, QWEN).render(messages, add_generation_prompt=False)
    assert joined == "<|im_start|>user\nLook:\ntwo parts<|im_end|>\n"


@pytest.mark.parametrize(
    "source, iterates",
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for part in m.content %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for part in m['content'][1:] %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set c = m['content'] %}{% for p in c %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m.content | selectattr('type') %}{% endfor %}{% endfor %}", True),
        ("{% macro say(c) %}{% for p in c %}{% endfor %}{% endmacro %}{{ say(messages[0].content) }}", True),
        ("{% macro say(c) %}{% for p in c %}{% endfor %}{% endmacro %}{{ say(tools) }}", False),
        (LLAMA, False),
        (MISTRAL, False),
        (QWEN, False),
        (PARTS, True),
    ],
)
def test_templates_that_iterate_over_parts_are_known_by_their_syntax(source: str, iterates: bool) -> None:
    assert facts_of(Environment().parse(source)).iterates_content == iterates


def test_developers_are_systems_where_the_template_does_not_know_them(byte_level_tokenizer: TextTokenizer) -> None:
    messages = [message("developer", "Be brief."), message("user", "Hi")]
    text = template_of(byte_level_tokenizer, QWEN).render(messages, add_generation_prompt=False)
    assert text.startswith("<|im_start|>system\nBe brief.")
    knowing = "{% if messages[0].role in ['developer', 'x'] %}{{ messages[0].role }}{% endif %}"
    assert template_of(byte_level_tokenizer, knowing).render(messages, add_generation_prompt=False) == "developer"


@pytest.mark.parametrize("renderer", [Template, TemplateProcess])
def test_a_templates_refusal_is_its_sentence(byte_level_tokenizer: TextTokenizer, renderer: Any) -> None:
    chat = template_of(byte_level_tokenizer, MISTRAL, renderer)
    with pytest.raises(InvalidRequest, match="roles must alternate user/assistant") as caught:
        chat.prompt_ids([message("user", "a"), message("user", "b")])
    assert [field for field, _ in caught.value.violations] == ["messages"]
    chat.close()
    long = template_of(byte_level_tokenizer, "{{ raise_exception('a\n\x1b[1m\u202e' + 'x' * 9999) }}")
    with pytest.raises(InvalidRequest) as caught:
        long.prompt_ids([message("user", "a")])
    assert r"a\n\x1b[1m\u202ex" in caught.value.message
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 500


def test_a_template_of_its_own_for_tools_is_taken(byte_level_tokenizer: TextTokenizer) -> None:
    hf_tokenizer: Any = copy.copy(byte_level_tokenizer.hf_tokenizer)
    hf_tokenizer.chat_template = {"default": "plain", "tool_use": "{{ tools[0].function.name }}"}
    chat = ChatTemplate(TextTokenizer(hf_tokenizer))
    messages = [message("user", "a")]
    assert chat.render(messages, add_generation_prompt=True) == "plain"
    assert chat.render(messages, ChatSetting((WEATHER,)), add_generation_prompt=True) == "get_weather"


PIECES = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", 'a"b', "\\", "\n", "system", "é😀", " ")
SPELLED = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join)
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


@st.composite
def spelled_conversations(draw: st.DrawFn) -> tuple[list[ChatMessage], ChatSetting]:
    """A caller that writes special tokens wherever it can write at all."""
    schema = {"type": "object", "properties": {draw(SPELLED): {"type": "string", "description": draw(SPELLED)}}}
    call = ToolCall(id="abcdefgh1", name="get_weather", arguments=json.dumps({draw(SPELLED): [draw(SPELLED)]}))
    messages = [
        message("user", draw(SPELLED), name=draw(SPELLED)),
        message("assistant", draw(SPELLED), reasoning=draw(SPELLED), tool_calls=(call,)),
        message("tool", draw(SPELLED), tool_call_id=draw(SPELLED), name=draw(SPELLED)),
    ]
    tool = Tool("get_weather", draw(SPELLED), schema)
    return messages, ChatSetting((tool,), template_arguments={"date_string": draw(SPELLED)})


@pytest.mark.parametrize("source", quick(TEMPLATES.values(), TEMPLATES["llama"]), ids=TEMPLATES.keys())
@given(conversation=spelled_conversations())
def test_only_the_template_writes_special_tokens_wherever_a_caller_writes(
    byte_level_tokenizer: TextTokenizer, source: str, conversation: tuple[list[ChatMessage], ChatSetting]
) -> None:
    messages, setting = conversation
    chat = template_of(byte_level_tokenizer, source)
    special_ids = {byte_level_tokenizer.hf_tokenizer.convert_tokens_to_ids(text) for text in SPECIALS}
    harmless = [
        message("user", "x", name="x"),
        message(
            "assistant", "x", reasoning="x", tool_calls=(ToolCall(id="abcdefgh1", name="get_weather", arguments="{}"),)
        ),
        message("tool", "x", tool_call_id="x", name="x"),
    ]

    def specials(ids: list[int]) -> list[int]:
        return [token_id for token_id in ids if token_id in special_ids]

    ids = chat.prompt_ids(messages, setting)
    assert specials(ids) == specials(chat.prompt_ids(harmless, ChatSetting((WEATHER,))))
    # And its text is what it would be otherwise, inside of JSON, too.
    assert byte_level_tokenizer.decode(ids, skip_special_tokens=False) == chat.render(
        messages, setting, add_generation_prompt=True
    )


@pytest.mark.parametrize(
    "refused, field",
    [
        (message("robot", "x"), "role"),
        (message("", "x"), "role"),
        (message("user", "x", tool_calls=(CALL,)), "tool_calls"),
        (message("tool", "x", reasoning="x"), "reasoning"),
        (message("assistant", "x", tool_call_id="x"), "tool_call_id"),
    ],
)
def test_messages_that_no_template_can_read_are_refused(refused: ChatMessage, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_roles([message("user", "x"), refused])
    assert caught.value.violations[0][0] == f"messages[1].{field}"


def test_conversations_in_any_order_are_the_templates_to_judge() -> None:
    check_roles([message("assistant"), message("tool"), message("user", ("x", "")), message("system", "x")])
    check_conversation([message("assistant", "x")], ChatSetting(continues_last=True))
    for messages, field in [((), "messages"), ((message("user", "x"),), "continue_last_message")]:
        with pytest.raises(InvalidRequest) as caught:
            check_conversation(messages, ChatSetting(continues_last=True))
        assert caught.value.violations[0][0] == field


@pytest.mark.parametrize(
    "written, expected",
    [
        ("", {}),
        (" \n", {}),
        ("null", {}),
        ('{"city": "Rome"}', {"city": "Rome"}),
        ('{"city":', {}),
        ('{"city": "Ro', {"city": "Ro"}),
        ('{"cities": ["Rome", "Os', {"cities": ["Rome", "Os"]}),
        (json.dumps('{"city": "Rome"}'), {"city": "Rome"}),
        ('""', {}),
        ("Rome", "Rome"),
        ("[1]", "[1]"),
        ('{"a": 1} {"b": 2}', '{"a": 1} {"b": 2}'),
        ('{"a": NaN}', '{"a": NaN}'),
    ],
)
def test_templates_get_an_object_whatever_the_arguments_of_a_call_were(written: str, expected: Any) -> None:
    called = message("assistant", tool_calls=[ToolCall(id="1", name="weather", arguments=written)])
    (call,) = message_values(called)["tool_calls"]
    assert call["function"]["arguments"] == expected


def test_instructions_are_the_only_system_message_and_are_not_kept() -> None:
    asked = message("user", "Where?")
    assert with_instructions("", [], [asked]) == ([], [asked])
    assert with_instructions("Be brief.", [], [asked]) == ([], [message("system", "Be brief."), asked])
    begun = [message("developer", ("Be kind.", "Rhyme.")), asked]
    joined = message("system", "Be brief.\n\nBe kind.\n\nRhyme.")
    assert with_instructions("Be brief.", [], begun) == ([], [joined, asked])
    assert with_instructions("Be brief.", begun, [asked]) == ([joined, asked], [asked])
