"""Models whose template knows no tools see them in words, and read their own calls as they wrote them."""

import json

import pytest

from corolla.client.output_parsing.default_tools import written_out
from corolla.client.output_parsing.formats import HERMES, LLAMA, MISTRAL, MISTRAL_V11, CallFormat
from corolla.client.output_parsing.parser import MarkupParser
from corolla.client.text.conversation import Tool
from corolla.v1.common_pb2 import ToolCall
from tests.conversations import message

TOOL = Tool("weather", "Tells it.", {"type": "object", "properties": {"city": {"type": "string"}}})
ASKED = message("user", "Where?")


def test_tools_stand_in_the_system_message_or_before_the_first_question() -> None:
    for first in (message("system", "Be kind."), message("developer", ("Be", "kind."))):
        earlier, (system, user) = written_out([], [first, ASKED], [TOOL], HERMES)
        assert (earlier, system.role, user) == ([], first.role, ASKED)
        assert str(system.content).startswith("Be")
        assert '"name": "weather"' in system.content
    (user,) = written_out([], [ASKED], [TOOL], HERMES)[1]
    assert (user.role, str(user.content).endswith("\n\nWhere?")) == ("user", True)
    earlier, new = written_out([ASKED], [message("user", "More.")], [TOOL], HERMES)
    assert "weather" in earlier[0].content
    assert new == [message("user", "More.")]
    (system, answer) = written_out([], [message("assistant", "Hm.")], [TOOL], HERMES)[1]
    assert (system.role, answer) == ("system", message("assistant", "Hm."))


@pytest.mark.parametrize("calls", [HERMES, LLAMA, MISTRAL, MISTRAL_V11], ids=["hermes", "llama", "mistral", "v11"])
def test_a_call_is_written_as_the_parser_reads_it(calls: CallFormat) -> None:
    called = message("assistant", tool_calls=(ToolCall(id="1", name="weather", arguments='{"city": "R\u00f6m"}'),))
    answer = written_out([], [ASKED, called], [TOOL], calls)[1][1]
    assert not answer.tool_calls
    parser = MarkupParser(calls, None, {"weather"})
    (call,) = parser.push(str(answer.content)).calls
    assert (call.name, json.loads(call.arguments_delta)) == ("weather", {"city": "R\u00f6m"})


def test_results_are_a_message_of_the_user() -> None:
    heard = [message("tool", "sunny", tool_call_id="1"), message("tool", ("warm", "dry"), tool_call_id="2")]
    new = written_out([], [ASKED, *heard, ASKED], [TOOL], HERMES)[1]
    assert [each.role for each in new] == ["user", "user", "user"]
    assert new[1].content == ("<tool_response>\nsunny\n</tool_response>\n<tool_response>\nwarm\ndry\n</tool_response>")
