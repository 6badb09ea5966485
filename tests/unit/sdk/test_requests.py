"""Each option lands in its field; invalid values are refused under the caller's own name for them."""

from typing import Any

import pytest

from corolla.chassis.errors import InvalidRequest
from corolla.sdk.requests import chat_request, generate_request, tokenize_request
from corolla.sdk.results import Message
from corolla.v1 import generation_pb2 as pb


def test_unset_options_stay_unset() -> None:
    request = generate_request("hello", {})
    assert request.WhichOneof("prompt") == "text"
    assert not request.sampling.ListFields()
    assert not request.stopping.ListFields()
    assert not request.HasField("num_completions")
    assert not request.HasField("logprobs")
    assert not request.speculation.ListFields()


def test_an_answer_is_resumed_by_its_tokens_or_by_their_number() -> None:
    for request in (
        generate_request("hello", {"request_id": "a", "resume_from": [7, 8]}),
        chat_request([], {"request_id": "a", "resume_from": (7, 8)}),
    ):
        assert (request.request_id, request.resume_from_index, list(request.received.ids)) == ("a", 2, [7, 8])
    request = generate_request("hello", {"request_id": "a", "resume_from": 2})
    assert (request.resume_from_index, request.HasField("received")) == (2, False)
    assert generate_request("hello", {"request_id": "a"}).resume_from_index == 0


@pytest.mark.parametrize("received", [-1, "7", b"7", [1.5], 2**32])
def test_an_invalid_received_answer_is_refused(received: Any) -> None:
    with pytest.raises(InvalidRequest, match="resume_from"):
        generate_request("hello", {"request_id": "a", "resume_from": received})


def test_zero_is_not_unset() -> None:
    sampling = generate_request("hello", {"temperature": 0, "seed": 0, "top_k": 0}).sampling
    assert {field.name for field, _ in sampling.ListFields()} == {"temperature", "seed", "top_k"}


def test_every_option_has_its_field() -> None:
    sampling: dict[str, Any] = {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": -9}
    sampling |= {"repetition_penalty": 1.1, "presence_penalty": -1.0, "frequency_penalty": 0.25}
    stopping: dict[str, Any] = {"max_tokens": 5, "stop": ["a", "b"], "ignore_eos": True}
    others: dict[str, Any] = {"time_limit_s": 1.5, "speculation": "draft_model", "max_draft_tokens": 7, "logprobs": 3}
    others |= {"standby": "off", "n": 2, "session": "ab", "model": "m", "timeout": 9.0}
    every: Any = {**sampling, **stopping, **others}
    request = generate_request([1, 2, 3], every)
    assert list(request.tokens.ids) == [1, 2, 3]
    assert {field.name: value for field, value in request.sampling.ListFields()} == pytest.approx(sampling)
    assert request.stopping == pb.StoppingParameters(time_limit_ms=1500, **stopping)
    assert request.speculation.mode == pb.SPECULATION_MODE_DRAFT_MODEL
    assert request.speculation.max_draft_tokens == 7
    assert request.standby == pb.STANDBY_MODE_OFF
    assert (request.logprobs, request.num_completions, request.session_id, request.model) == (3, 2, "ab", "m")


def test_one_stop_text_is_a_list_of_one_and_no_ids_are_still_ids() -> None:
    assert list(generate_request("a", {"stop": "END"}).stopping.stop) == ["END"]
    assert generate_request([], {}).WhichOneof("prompt") == "tokens"


@pytest.mark.parametrize(
    "options, field",
    [
        ({"temperature": "hot"}, "temperature"), ({"max_tokens": 2**40}, "max_tokens"), ({"seed": 2**70}, "seed"),
        ({"stop": [1]}, "stop"), ({"time_limit_s": float("nan")}, "time_limit_s"),
        ({"speculation": "sometimes"}, "speculation"), ({"speculation": ["off"]}, "speculation"),
        ({"max_draft_tokens": "many"}, "max_draft_tokens"), ({"model": 5}, "model"),
    ],
)  # fmt: skip
def test_a_value_of_a_wrong_kind_is_refused(options: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        generate_request("hello", options)  # type: ignore[arg-type]
    assert [name for name, _ in refused.value.violations] == [field]


@pytest.mark.parametrize("prompt", [None, 5, b"bytes", [-1], ["a"], "\ud800"])
def test_a_prompt_of_a_wrong_kind_is_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        generate_request(prompt, {})  # type: ignore[arg-type]
    assert [name for name, _ in refused.value.violations] == ["prompt"]


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match="max_token"):
        generate_request("hello", {"max_token": 5})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(TypeError, match="unknown option 'session'"):
        chat_request([Message("user", "hello")], {"session": "ab"})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(TypeError, match="unknown option 'tools'"):
        generate_request("hello", {"tools": []})  # type: ignore[typeddict-unknown-key]


def test_messages_are_objects_or_mappings() -> None:
    request = chat_request([Message("system", "s"), {"role": "user", "content": "u"}], {"seed": 1}, "ab")
    assert [(each.role, each.content) for each in request.messages] == [("system", "s"), ("user", "u")]
    assert (request.session_id, request.sampling.seed) == ("ab", 1)


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": "a", "nam": "b"}, "hello", None])
def test_a_message_of_another_shape_is_refused(message: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat_request([Message("user", "a"), message], {})  # type: ignore[list-item]
    assert refused.value.violations[0][0] == "messages[1]"


def test_a_conversation_is_tokenised_as_one() -> None:
    assert tokenize_request("a", special_tokens=False).without_special_tokens
    assert tokenize_request([Message("user", "a")]).WhichOneof("input") == "chat"


@pytest.mark.parametrize("arguments", [{"a": 10**400}, {"a": object()}, 7])
def test_template_arguments_are_values_of_json(arguments: Any) -> None:
    with pytest.raises(InvalidRequest, match="template_arguments"):
        chat_request([], {"template_arguments": arguments})
    with pytest.raises(InvalidRequest, match="template_arguments"):
        tokenize_request([], template_arguments=arguments)
