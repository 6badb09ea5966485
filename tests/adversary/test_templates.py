"""A chat template that runs away on some conversations: their callers learn so, and everybody else's answers go on."""

import asyncio

import grpc
import pytest

from corolla.chassis.channels import open_channel
from corolla.v1 import generation_pb2 as pb
from corolla.v1.generation_pb2_grpc import GenerationServiceStub
from tests.checkpoints import CHAT_TEMPLATE
from tests.integration.refusals import refusal_of
from tests.integration.swarm import Swarm, tiny_swarm

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUNS_AWAY = (
    "{% if messages[0].content == 'forever' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}"
    "{% if messages[0].content == 'huge' %}{{ 'x' * 10 ** (11 if add_generation_prompt else 1) }}{% endif %}"
)


swarm = tiny_swarm(["0:5"], edit=lambda model: (model / "chat_template.jinja").write_text(RUNS_AWAY + CHAT_TEMPLATE))


def a_chat(content: str) -> pb.ChatRequest:
    return pb.ChatRequest(
        messages=[pb.ChatMessage(role="user", content=content)], stopping=pb.StoppingParameters(max_tokens=4)
    )


async def test_conversations_that_run_away_are_refused_and_answers_go_on(swarm: Swarm) -> None:
    async with open_channel(swarm.address) as channel, swarm.connect() as client:
        stub = GenerationServiceStub(channel)
        expected = (await stub.Chat(a_chat("hi"))).token_ids
        loop = asyncio.get_running_loop()

        async def refused(content: str) -> str:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stub.Chat(a_chat(content), timeout=60)
            assert refusal_of(failure.value).fields == ("messages",)
            return refusal_of(failure.value).message

        async def longest_gap_s() -> float:
            """Between two tokens of an answer, while conversations run away."""
            longest_s, last_s = 0.0, 0.0
            running = asyncio.gather(refused("forever"), refused("huge"), refused("forever"))
            async with client.stream([1, 2, 3], max_tokens=400, ignore_eos=True) as stream:
                async for _ in stream:
                    now_s = loop.time()
                    longest_s, last_s = max(longest_s, now_s - (last_s or now_s)), now_s
            messages = await running
            assert ["too long" in each for each in messages] == [True, False, True]
            assert "too much memory" in messages[1]
            return longest_s

        # The process that serves answers is not the one that renders: where it waited for a second of a processor that
        # a rendering has, it would do so each time. A machine pauses some times only.
        for _ in range(5):
            if (longest_s := await longest_gap_s()) < 0.5:
                break
        assert longest_s < 0.5
        assert (await stub.Chat(a_chat("hi"))).token_ids == expected
