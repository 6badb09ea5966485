"""What conversations may hold is bounded before anything is made of them."""

from typing import Any

import pytest

from corolla.chassis.errors import InvalidRequest
from corolla.client.api import conversations
from corolla.client.output_parsing.formats import ReasoningFormat
from corolla.client.text.conversation import ChatSetting
from corolla.v1 import generation_pb2 as pb
from corolla.v1 import router_pb2
from corolla.v1.common_pb2 import ChatMessage, ToolCall
from tests.conversations import message

LARGE = '{"a":[' + ",".join(["[]"] * 21_000) + "]}"


def a_call(arguments: str) -> pb.ToolCall:
    return pb.ToolCall(name="f", arguments=arguments)


@pytest.mark.parametrize("num_calls, is_refused", [(4, False), (5, True)])
def test_arguments_are_bounded_together(num_calls: int, is_refused: bool) -> None:
    messages = [pb.ChatMessage(role="assistant", tool_calls=[a_call(LARGE)]) for _ in range(num_calls)]
    if not is_refused:
        conversations.check_messages(messages)
        return
    with pytest.raises(InvalidRequest, match="together"):
        conversations.check_messages(messages)


@pytest.mark.parametrize("num_tools, is_refused", [(4, False), (5, True)])
def test_schemas_are_bounded_together(num_tools: int, is_refused: bool) -> None:
    request = pb.ChatRequest(tools=[pb.Tool(name=f"f{i}", parameters=LARGE) for i in range(num_tools)])
    if not is_refused:
        assert len(conversations.setting(request, frozenset()).tools) == num_tools
        return
    with pytest.raises(InvalidRequest, match="together"):
        conversations.setting(request, frozenset())


def test_template_arguments_are_values_of_json() -> None:
    request = pb.ChatRequest()
    given: Any = {"a": 1, "b": 1.5, "c": [True, None, {"d": "e"}], "f": 2.0**60}
    request.template_arguments.update(given)
    read = conversations.setting(request, frozenset()).template_arguments
    assert read == given
    assert [type(read[name]) for name in "abf"] == [int, float, float]


THINK = ReasoningFormat("<think>", "</think>")
CONTINUING = ChatSetting(continues_last=True)


@pytest.mark.parametrize(
    "begun, answer, expected",
    [
        (message("assistant", "It "), message("assistant", "is."), message("assistant", "It is.")),
        (message("assistant", ("It", "is ")), message("assistant", "so."), message("assistant", ("It", "is so."))),
        (
            message("assistant", "<think>\nHm, "),
            message("assistant", "Yes.", "well"),
            message("assistant", "Yes.", "Hm, well"),
        ),
        (
            message("assistant", "It ", "Hm"),
            message("assistant", "is", tool_calls=(ToolCall(id="c", name="f", arguments="{}"),)),
            message("assistant", "It is", "Hm", (ToolCall(id="c", name="f", arguments="{}"),)),
        ),
    ],
)
def test_a_message_is_recorded_with_what_continued_it(
    begun: ChatMessage, answer: ChatMessage, expected: ChatMessage
) -> None:
    question = message("user", "a", name="ann")
    record = router_pb2.SessionRecord()
    conversations.record_messages(record, [question, begun], answer, CONTINUING, THINK)
    assert record.transcript == [question, expected]
    # The same where the message that is continued has been recorded.
    record = router_pb2.SessionRecord()
    conversations.record_messages(record, [question], begun, ChatSetting(), THINK)
    conversations.record_messages(record, [], answer, CONTINUING, THINK)
    assert record.transcript == [question, expected]
