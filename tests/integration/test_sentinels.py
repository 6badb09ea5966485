"""Redis changes its primary under load: answers do not notice, and conversations go on where they were."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import pytest
from pydantic import SecretStr

from corolla.chassis.errors import CorollaError
from corolla.client.transcripts import Turn
from corolla.sdk.async_client import AsyncClient
from tests.integration.swarm import Swarm
from tests.integration.test_control_plane_loss import PROMPT, SEEDED, after, check_retryable, tokens_of
from tests.integration.waiting import until
from tests.sentinels import WatchedRedis

pytestmark = pytest.mark.full

NUM_TOKENS: Final = 400
NUM_TURN_TOKENS: Final = 20


async def killed(redis: WatchedRedis) -> None:
    redis.kill(await redis.primary())


async def killed_and_back_empty(redis: WatchedRedis) -> None:
    """What comes back is a primary that knows nothing, until the Sentinels make a replica of it."""
    lost = await redis.primary()
    redis.kill(lost)
    redis.start(lost)


async def frozen(redis: WatchedRedis) -> None:
    await redis.freeze()


async def demoted(redis: WatchedRedis) -> None:
    """The primary lives on as a replica, which refuses writes."""
    await redis.demote()


CHANGES: Final[list[Callable[[WatchedRedis], Awaitable[None]]]] = [killed_and_back_empty, frozen, demoted, killed]


async def test_answers_and_conversations_outlive_each_primary(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A turn that is written just before its primary dies is lost with it: a replica has it a moment later.
    is_changed = asyncio.Event()
    monkeypatch.setattr(Turn, "commit", after(is_changed, Turn.commit))
    with WatchedRedis(tmp_path / "redis") as redis:
        router = {"redis_url": SecretStr(redis.url), "redis_timeout_ms": 1000}
        async with Swarm(tmp_path, model, ["0:2", "2:5"], router=router) as swarm, swarm.connect() as client:
            is_changed.set()
            expected = (await client.generate(PROMPT, max_tokens=NUM_TOKENS, **SEEDED)).token_ids
            async with client.session() as calm:
                turns = [await turn_of(client, await calm.open()) for _ in range(2 * len(CHANGES))]
            session = (await client.create_session()).session_id
            for number, change in enumerate(CHANGES):
                is_changed.clear()
                streams = [client.stream(PROMPT, max_tokens=NUM_TOKENS, **SEEDED) for _ in range(3)]
                turn = client.stream(PROMPT, max_tokens=NUM_TURN_TOKENS, session=session, **SEEDED)
                firsts = [await anext(stream) for stream in (*streams, turn)]
                answers = asyncio.gather(*map(tokens_of, (*streams, turn)))
                await change(redis)
                is_changed.set()
                *others, ended = [(*first.token_ids, *rest) for first, rest in zip(firsts, await answers, strict=True)]
                assert others == [expected] * len(streams)
                assert ended == turns[2 * number]
                assert await again(lambda: turn_of(client, session)) == turns[2 * number + 1]
            await client.delete_session(session)
            await swarm.until_empty()


async def turn_of(client: AsyncClient, session: str) -> tuple[int, ...]:
    return (await client.generate(PROMPT, max_tokens=NUM_TURN_TOKENS, session=session, **SEEDED)).token_ids


async def again(ask: Callable[[], Awaitable[tuple[int, ...]]]) -> tuple[int, ...]:
    """What is answered once the store answers."""
    answers: list[tuple[int, ...]] = []

    async def answered() -> bool:
        try:
            answers.append(await ask())
        except CorollaError as error:
            check_retryable(error)
            return False
        return True

    await until(answered)
    return answers[0]
