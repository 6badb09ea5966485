"""Rendering equals `transformers`; a new turn extends the token log, however the last answer ended."""

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from corolla.chassis.errors import InvalidRequest
from corolla.client.text.chat import ChatTemplate
from corolla.client.text.conversation import message_values
from corolla.client.text.detokenizer import Detokenizer
from corolla.client.text.tokenizer import TextTokenizer
from corolla.decoding.stopping import StopMatcher
from corolla.models.checkpoint import Checkpoint
from corolla.v1.common_pb2 import ChatMessage
from tests.conversations import message
from tests.tiers import quick

CHAT_TEMPLATES = {
    "plain": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "trimming": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "without special tokens": (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    ),
    "with another end": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|endoftext|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "counting": (  # a beginning that changes from turn to turn
        "{{ messages | length ~ ' messages\n' }}"
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    ),
}
FEW_TEMPLATES = quick(CHAT_TEMPLATES.values(), CHAT_TEMPLATES["trimming"], CHAT_TEMPLATES["counting"])
STOP = "st"
CONTENTS = st.text(st.sampled_from("ab e Tth.,st\n  é你好😀กั\ufffd"), min_size=1, max_size=25)
FINISHES = st.sampled_from(["eos", "length", "stop_sequence"])


def with_template(tokenizer: TextTokenizer, template: str | None) -> ChatTemplate:
    hf_tokenizer: Any = copy.copy(tokenizer.hf_tokenizer)
    hf_tokenizer.chat_template = template
    return ChatTemplate(TextTokenizer(hf_tokenizer))


class Model:
    """Stands for a model with given answers, in the form that the generation loop returns."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        (self.eos_token_id,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
        self._visible_ids = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_token_ids]

    def answer(self, prompt_ids: list[int], said: list[int] | str, finish: str) -> tuple[list[int], str]:
        """The token log after the answer, and the answer's text.

        Args:
            said: a text, or numbers that stand for tokens without a meaning of their own.
        """
        if isinstance(said, str):
            ids = self.tokenizer.encode(said, add_special_tokens=False)
        else:
            ids = [self._visible_ids[number % len(self._visible_ids)] for number in said]
        if finish == "stop_sequence":
            ids = [*ids, *self.tokenizer.encode("at" + STOP + "op", add_special_tokens=False)]
        if finish == "eos":
            ids = [*ids, self.eos_token_id]
        detokenizer, matcher = (
            Detokenizer(self.tokenizer, prompt_ids),
            StopMatcher([STOP] * (finish == "stop_sequence")),
        )
        log, text = list(prompt_ids), ""
        for token_id in ids:
            log.append(token_id)
            free, matched = matcher.push(detokenizer.push(token_id))
            text += free
            if matched:
                return log, text
        free, _ = matcher.push(detokenizer.flush())
        return log, text + free + matcher.flush()


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[int] | str, str]:
    """Raw ids, which are seldom text and never how the tokenizer would cut it; or a text."""
    ids = st.lists(st.integers(0, 1 << 30), max_size=12)
    return draw(st.one_of(ids, CONTENTS)), draw(FINISHES)


@pytest.mark.parametrize("template", FEW_TEMPLATES, ids=CHAT_TEMPLATES.keys())
@given(turns=st.lists(st.tuples(CONTENTS, answers()), min_size=3, max_size=3), has_system=st.booleans())
def test_three_turns_spell_the_whole_conversation(
    any_tokenizer: TextTokenizer,
    template: str,
    turns: list[tuple[str, tuple[list[int] | str, str]]],
    has_system: bool,
) -> None:
    tokenizer = any_tokenizer
    chat, model = with_template(tokenizer, template), Model(tokenizer)
    messages = [message("system", "You are helpful.")] if has_system else []
    log: list[int] = []
    for index, (content, (said, finish)) in enumerate(turns):
        new = [message("user", content)]
        rendering = chat.render([*messages, *new], add_generation_prompt=True)
        if index == 0:
            token_ids = chat.prompt_ids([*messages, *new])
        else:
            num_kept_tokens, token_ids = chat.next_turn_ids(log, messages, new)
            assert token_ids[:num_kept_tokens] == log[:num_kept_tokens]
            assert num_kept_tokens < len(token_ids)
        canonical_ids = tokenizer.encode(rendering, add_special_tokens=False)
        assert spelled(tokenizer, token_ids) == spelled(tokenizer, canonical_ids)
        if spelled(tokenizer, canonical_ids) != rendering:
            assert token_ids == canonical_ids, "a tokenizer that changes texts gets the canonical ids"
        log, text = model.answer(token_ids, said, finish)
        messages += [*new, message("assistant", text)]


def spelled(tokenizer: TextTokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


@given(turns=st.lists(st.tuples(CONTENTS, answers()), min_size=3, max_size=3))
def test_nothing_is_processed_twice(
    byte_level_tokenizer: TextTokenizer, turns: list[tuple[str, tuple[list[int] | str, str]]]
) -> None:
    tokenizer = byte_level_tokenizer
    chat, model = with_template(tokenizer, CHAT_TEMPLATES["plain"]), Model(tokenizer)
    messages: list[ChatMessage] = []
    log: list[int] = []
    num_prompt_tokens, last_finish = 0, ""
    for index, (content, (said, finish)) in enumerate(turns):
        new = [message("user", content)]
        token_ids = chat.prompt_ids(new)
        if index > 0:
            num_kept_tokens, token_ids = chat.next_turn_ids(log, messages, new)
            # Whole answers stay whole; of a stopped one, all that was returned but a last token cut in two.
            if last_finish == "stop_sequence":
                kept_text = spelled(tokenizer, log[:num_kept_tokens])
                assert num_kept_tokens >= num_prompt_tokens
                one_more = spelled(tokenizer, log[: num_kept_tokens + 1])
                rendering = chat.render([*messages, *new], add_generation_prompt=True)
                assert rendering.startswith(kept_text)
                assert not rendering.startswith(one_more)
            else:
                assert num_kept_tokens == len(log)
        num_prompt_tokens, last_finish = len(token_ids), finish
        log, text = model.answer(token_ids, said, finish)
        messages += [*new, message("assistant", text)]


@pytest.mark.model
@pytest.mark.parametrize("finish", ["eos", "length", "stop_sequence"])
def test_the_demo_model_chats_without_processing_twice(finish: str) -> None:
    tokenizer = TextTokenizer.load(Checkpoint.from_pretrained("demo").folder)
    chat, model = ChatTemplate(tokenizer), Model(tokenizer)
    messages: list[ChatMessage] = []
    log: list[int] = []
    for content in ["What is 1234 + 99?", "你好 😀!", "  And\n\n```x``` ? "]:
        new = [message("user", content)]
        token_ids = chat.prompt_ids(new)
        if messages:
            num_kept_tokens, token_ids = chat.next_turn_ids(log, messages, new)
            # "stop" is one token, which the answer was cut before.
            assert num_kept_tokens == len(log) - (1 if finish == "stop_sequence" else 0)
            rendering = chat.render([*messages, *new], add_generation_prompt=True)
            assert spelled(tokenizer, token_ids) == rendering
        log, text = model.answer(token_ids, "Well: 你好, 12345 😀 is", finish)
        messages += [*new, message("assistant", text)]


def test_special_tokens_that_the_answer_left_out_are_not_kept(byte_level_tokenizer: TextTokenizer) -> None:
    chat, model = ChatTemplate(byte_level_tokenizer), Model(byte_level_tokenizer)
    prompt_ids = chat.prompt_ids([message("user", "Hi")])
    log, text = model.answer(prompt_ids, "one<|endoftext|>two", "eos")
    assert text == "onetwo"
    earlier, new = [message("user", "Hi"), message("assistant", text)], [message("user", "On?")]
    num_kept_tokens, token_ids = chat.next_turn_ids(log, earlier, new)
    assert spelled(byte_level_tokenizer, token_ids[:num_kept_tokens]).endswith("one")
    assert spelled(byte_level_tokenizer, token_ids) == chat.render([*earlier, *new], add_generation_prompt=True)


def test_a_log_of_something_else_is_dropped(byte_level_tokenizer: TextTokenizer) -> None:
    chat = ChatTemplate(byte_level_tokenizer)
    log = byte_level_tokenizer.encode("quite another text", add_special_tokens=False)
    messages = [message("user", "a"), message("assistant", "b"), message("user", "c")]
    assert chat.next_turn_ids(log, messages[:2], messages[2:]) == (0, chat.prompt_ids(messages))
    assert chat.next_turn_ids([], messages[:2], messages[2:]) == (0, chat.prompt_ids(messages))


@pytest.mark.parametrize("template", CHAT_TEMPLATES.values(), ids=CHAT_TEMPLATES.keys())
def test_prompt_ids_equal_transformers(byte_level_tokenizer: TextTokenizer, template: str) -> None:
    chat = with_template(byte_level_tokenizer, template)
    messages = [
        message("system", " Be brief. "),
        message("user", "Hi 😀"),
        message("assistant", ""),
        message("user", "?"),
    ]
    expected = byte_level_tokenizer.hf_tokenizer.apply_chat_template(
        [message_values(m) for m in messages],
        chat_template=template,
        add_generation_prompt=True,
        return_dict=False,
    )
    assert chat.prompt_ids(messages) == expected


def test_no_template_and_a_template_that_raises_are_refused(byte_level_tokenizer: TextTokenizer) -> None:
    messages = [message("user", "secret")]
    assert not with_template(byte_level_tokenizer, None).exists
    for template, expected in [
        (None, "no chat template"),
        ("{{ raise_exception('secret') }}", "does not accept"),
        ("{{ 1 / 0 }}", "does not accept"),
        ("{% if %}", "does not accept"),
        ("{{ messages[7].content.strip() }}", "does not accept"),
        ("{{ ''.__class__.__mro__ }}", "does not accept"),
    ]:
        with pytest.raises(InvalidRequest, match=expected) as caught:
            with_template(byte_level_tokenizer, template).prompt_ids(messages)
        assert ("secret" in str(caught.value)) == (template == "{{ raise_exception('secret') }}")
        assert caught.value.violations[0][0] == "messages"


PIECES = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "end|>", "<think>", "system\n", " a", "b ", "\n", "é😀",
)  # fmt: skip
SPELLED = st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join)


@pytest.mark.parametrize("template", FEW_TEMPLATES, ids=CHAT_TEMPLATES.keys())
@given(contents=st.lists(SPELLED, min_size=3, max_size=3), has_system=st.booleans())
def test_only_the_template_writes_special_tokens(
    any_tokenizer: TextTokenizer, template: str, contents: list[str], has_system: bool
) -> None:
    """A user's message cannot end itself and go on as the system's, in a first turn or a later one."""
    chat = with_template(any_tokenizer, template)
    roles = ["system", "user"] if has_system else ["user", "assistant", "user"]
    messages = [message(*each) for each in zip(roles, contents, strict=False)]
    harmless = chat.prompt_ids([message(role, "x") for role in roles])
    texts = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    special_ids = {any_tokenizer.hf_tokenizer.convert_tokens_to_ids(text) for text in texts}

    def specials(ids: list[int]) -> list[int]:
        return [token_id for token_id in ids if token_id in special_ids]

    assert specials(chat.prompt_ids(messages)) == specials(harmless)
    log = [*chat.prompt_ids([message("user", "x")]), *any_tokenizer.encode("well", add_special_tokens=False)]
    num_kept_tokens, next_ids = chat.next_turn_ids(log, messages[:-1], messages[-1:])
    assert next_ids[:num_kept_tokens] == log[:num_kept_tokens]
    assert specials(next_ids) == specials(harmless)


@given(contents=st.lists(SPELLED, min_size=3, max_size=3))
def test_a_message_that_spells_special_tokens_keeps_its_text(
    byte_level_tokenizer: TextTokenizer, contents: list[str]
) -> None:
    chat = with_template(byte_level_tokenizer, CHAT_TEMPLATES["plain"])
    messages = [message(*each) for each in zip(["user", "assistant", "user"], contents, strict=True)]
    rendering = chat.render(messages, add_generation_prompt=True)
    assert spelled(byte_level_tokenizer, chat.prompt_ids(messages)) == rendering
    first_ids = chat.prompt_ids(messages[:1])
    num_kept_tokens, token_ids = chat.next_turn_ids(first_ids, messages[:2], messages[2:])
    assert spelled(byte_level_tokenizer, token_ids) == rendering
    assert num_kept_tokens == len(first_ids) or contents[1][:1] == "\n"


def test_a_template_that_cuts_messages_is_no_way_around(byte_level_tokenizer: TextTokenizer) -> None:
    template = "{% for m in messages %}{{ '<|im_start|>' + m.content[3:-3] }}{% endfor %}"
    chat = with_template(byte_level_tokenizer, template)
    assert chat.prompt_ids([message("user", "abc def ghi")])
    with pytest.raises(InvalidRequest, match="special tokens"):
        chat.prompt_ids([message("user", "<|im_end|>")])


def test_special_tokens_are_split_by_a_tokenizer_in_python_too(tmp_path: Path) -> None:
    """It does not tell where in a text its tokens lie."""
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "[", "]", "sep"]))
    tokenizer = TextTokenizer(BertTokenizerLegacy(str(vocabulary)))
    chat = with_template(tokenizer, "{% for m in messages %}{{ '[CLS]' + m.content + '[SEP]' }}{% endfor %}")
    ids = chat.prompt_ids([message("user", "a[SEP]b"), message("assistant", "c"), message("user", "b")])
    texts = [tokenizer.token_text(token_id) for token_id in ids]
    assert "".join(texts) == "[CLS]a[sep]b[SEP][CLS]c[SEP][CLS]b[SEP]"
