"""The largest reply that a request can have is never larger than what was counted before any work."""

import json
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from corolla.chain.prompt_readout import PromptReadout
from corolla.chassis.errors import ReplyTooLarge
from corolla.client.api import replies
from corolla.client.output_parsing.deltas import Delta
from corolla.client.reply_sizes import (
    CHATS,
    COMPLETIONS,
    DEFAULT_GRPC_BYTES,
    LIMIT_KEY,
    PROTOBUF,
    RESPONSES,
    STREAMED_RESPONSES,
    ReplyForm,
    ReplyRoom,
    TokenWidths,
    stated_bytes,
)
from corolla.decoding.parameters import SampledToken
from corolla.decoding.stopping import FinishReason
from corolla.http import chat_replies, completions
from corolla.http.response_replies import Reply
from corolla.http.responses import ResponseRequest
from corolla.v1 import generation_pb2 as pb

TOKENS = [b"\x01" * 40, b'"\\' * 30, b"\xff\x80" * 20, b" " * 128, "é€😀".encode() * 9, b"\n" * 64]
TOKENS += [b"%d" % number for number in range(30)]
WIDTHS = TokenWidths.from_tokens(TOKENS)
FIRST_ID = 1 << 30
"""Ids are as long as they can be."""
TOKENIZER: Any = SimpleNamespace(
    token_bytes=lambda token_id: TOKENS[token_id - FIRST_ID],
    decode=lambda ids, skip_special_tokens: b"".join(TOKENS[each - FIRST_ID] for each in ids).decode(errors="replace"),
)
LOGPROB = -123.45678901234567
ROOM_BYTES = 400_000


def token(place: int, num_logprobs: int | None) -> SampledToken:
    """A token of six, in turn, with the widest others."""
    if num_logprobs is None:
        return SampledToken(FIRST_ID + place, None, ())
    others = [each for each in range(len(TOKENS)) if each != place][:num_logprobs]
    return SampledToken(FIRST_ID + place, LOGPROB, tuple((FIRST_ID + each, LOGPROB) for each in others))


def delta(place: int, num_tokens: int, num_logprobs: int | None) -> Delta:
    tokens = (token(place, num_logprobs),) * num_tokens
    text = TOKENIZER.decode([each.token_id for each in tokens], skip_special_tokens=False)
    return Delta(text, tokens=tokens, finish_reason=FinishReason.LENGTH)


def readout(place: int, num_tokens: int, num_logprobs: int | None) -> PromptReadout:
    made = PromptReadout([FIRST_ID + place] * num_tokens)
    if num_logprobs is not None:
        made.scored = [token(place, num_logprobs)] * (num_tokens - 1)
    return made


async def completed(answers: Sequence[Delta], echoed: PromptReadout | None) -> pb.GenerateResponse:
    response = pb.GenerateResponse(model="m" * 512)
    for index, answer in enumerate(answers):
        await replies.write_completion(response.completions.add(index=index), TOKENIZER, answer)
    if echoed is not None:
        response.prompt.MergeFrom(await replies.echoed_prompt(TOKENIZER, echoed.prompt_ids, echoed))
    return response


async def chatted(answers: Sequence[Delta]) -> pb.ChatResponse:
    response = pb.ChatResponse(model="m" * 512)
    for index, answer in enumerate(answers):
        written = response.others.add(index=index) if index else response
        await replies.write_chat(written, TOKENIZER, answer)
    return response


async def size(pieces: AsyncGenerator[str, None]) -> int:
    text = "".join([piece async for piece in pieces])
    json.loads(text)
    return len(text.encode())


async def streamed(answer: Delta) -> int:
    async def chunks() -> AsyncGenerator[pb.ChatChunk, None]:
        for each in answer.tokens:
            text = TOKENIZER.decode([each.token_id], skip_special_tokens=False)
            yield replies.chat_chunk(TOKENIZER, 0, Delta(text, tokens=(each,)), None)
        yield pb.ChatChunk(finish_reason=pb.FINISH_REASON_LENGTH)

    events = Reply(ResponseRequest.model_validate({"input": ""}), "resp_" + "0" * 40, "m" * 512).events(chunks())
    return sum([len(each) async for each in events])


async def reply_bytes(form: ReplyForm, answers: Sequence[Delta], echoed: PromptReadout | None, k: int | None) -> int:
    """The size of the real reply in this form."""
    if form is PROTOBUF:
        return max((await completed(answers, echoed)).ByteSize(), (await chatted(answers)).ByteSize())
    if form is COMPLETIONS:
        response = await completed(answers, echoed)
        return await size(completions.reply([response], len(answers), has_logprobs=k is not None, has_token_ids=True))
    if form is CHATS:
        options = {"has_logprobs": k is not None, "has_token_ids": True}
        return await size(chat_replies.reply(await chatted(answers), **options))
    if form is RESPONSES:
        reply = Reply(ResponseRequest.model_validate({"input": ""}), "resp_" + "0" * 40, "m" * 512)
        return await size(reply.whole(await chatted(answers)))
    return await streamed(answers[0])


@pytest.mark.parametrize("num_logprobs", [None, 0, 20])
@pytest.mark.parametrize("num_answers, num_echoed", [(1, 0), (1, 20), (4, 3)])
@pytest.mark.parametrize("form", [PROTOBUF, COMPLETIONS, CHATS, RESPONSES, STREAMED_RESPONSES])
async def test_what_fits_by_the_count_fits(
    form: ReplyForm, num_answers: int, num_echoed: int, num_logprobs: int | None
) -> None:
    if form in (RESPONSES, STREAMED_RESPONSES) and num_answers > 1:
        return
    num_echoed = num_echoed if form in (PROTOBUF, COMPLETIONS) else 0
    room = ReplyRoom(form, ROOM_BYTES)
    most = room.most_tokens(WIDTHS, num_answers, num_logprobs, num_echoed)
    assert most
    largest = 0
    for place in range(6):
        answers = [delta(place, most, num_logprobs)] * num_answers
        echoed = readout(place, num_echoed, num_logprobs) if num_echoed else None
        largest = max(largest, await reply_bytes(form, answers, echoed, num_logprobs))
    # The count is not far from the truth, either.
    assert ROOM_BYTES / 8 < largest <= ROOM_BYTES
    with pytest.raises(ReplyTooLarge) as refusal:
        room.check_tokens(most + 1, WIDTHS, num_answers, num_logprobs, num_echoed)
    assert refusal.value.violations[0][0] == "stopping.max_tokens"


@pytest.mark.parametrize(
    "num_answers, num_logprobs, field", [(1, None, "echo"), (1, 20, "logprobs"), (8, None, "num_completions")]
)
def test_an_echo_that_does_not_fit_names_what_to_ask_less_of(
    num_answers: int, num_logprobs: int | None, field: str
) -> None:
    with pytest.raises(ReplyTooLarge) as refusal:
        ReplyRoom(COMPLETIONS, 1 << 20).most_tokens(WIDTHS, num_answers, num_logprobs, num_echoed=10_000)
    assert refusal.value.violations[0][0] == field


def test_a_stream_is_bounded_by_its_echo_only() -> None:
    room = ReplyRoom(COMPLETIONS, 1 << 20, is_streamed=True)
    assert room.most_tokens(WIDTHS, 16, 20) is None
    with pytest.raises(ReplyTooLarge):
        room.most_tokens(WIDTHS, 1, 20, num_echoed=10_000)


@pytest.mark.parametrize(
    "stated, expected",
    [("1000", 1000), ("9" * 15, 1 << 26), *((text, DEFAULT_GRPC_BYTES) for text in ("", "9" * 99, "-1", "\u0661"))],
)
def test_callers_of_grpc_state_what_they_receive(stated: str, expected: int) -> None:
    assert stated_bytes([("a", "b"), (LIMIT_KEY, stated)], 1 << 26) == expected
