"""The blocking client against a real gRPC server."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from corolla import Client, errors
from corolla.sdk.results import FinishReason, Message
from tests.generation_server import API_KEY, GenerationServer


@pytest.fixture
def client(server: GenerationServer) -> Iterator[Client]:
    with Client(server.address) as opened:
        yield opened


def test_a_completion_carries_all_that_the_service_said(client: Client) -> None:
    generation = client.generate("one two", n=2, logprobs=1)
    assert generation.text == str(generation) == "one two"
    assert generation.token_ids == (0, 1)
    assert generation.finish_reason is FinishReason.LENGTH
    assert [each.index for each in generation.completions] == [0, 1]
    assert generation.logprobs[0].logprob == -0.5
    assert generation.logprobs[0].top[0].text == "b"
    assert generation.usage.tokens_per_s == pytest.approx(1.0)


def test_a_stream_grows_to_the_whole_answer(client: Client) -> None:
    with client.stream("one two three") as stream:
        pieces = []
        for chunk in stream:
            pieces.append(chunk.text)
            assert stream.text == "".join(pieces)
    assert pieces == ["one", " two", " three"]
    assert stream.token_ids == (0, 1, 2)
    assert stream.finish_reason is FinishReason.EOS
    assert stream.usage is not None
    assert stream.usage.completion_tokens == 3


def test_leaving_a_stream_early_cancels_the_call(client: Client, server: GenerationServer) -> None:
    with client.stream("endless") as stream:
        next(stream)
    assert server.servicer.cancelled.wait(30)
    assert list(stream) == []
    assert stream.usage is None


def test_a_timeout_is_deadline_exceeded(client: Client) -> None:
    with pytest.raises(errors.DeadlineExceeded):
        list(client.stream("endless", timeout=0.1))


def test_an_error_comes_back_as_its_class(client: Client, server: GenerationServer) -> None:
    server.servicer.failure = errors.NoChain(
        "blocks 3 to 7 have no server", metadata={"uncovered_blocks": "3:7"}, retry_after_s=2.5
    )
    with pytest.raises(errors.NoChain) as raised:
        client.generate("hello")
    assert raised.value.reason == "NO_CHAIN"
    assert raised.value.retry_after_s == 2.5
    assert raised.value.metadata == {"uncovered_blocks": "3:7"}
    with pytest.raises(errors.NoChain):
        next(client.stream("hello"))


def test_a_field_of_the_request_is_named(client: Client, server: GenerationServer) -> None:
    server.servicer.failure = errors.InvalidRequest("sampling.top_p", "must be in (0, 1]")
    with pytest.raises(errors.InvalidRequest) as raised:
        client.generate("hello", top_p=2)
    assert raised.value.violations == (("sampling.top_p", "must be in (0, 1]"),)


def test_an_unreachable_service_is_reported_with_its_address() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(errors.ServiceUnavailable, match=r"127\.0\.0\.1:1"):
        client.generate("hello")


def test_the_key_is_sent(server: GenerationServer) -> None:
    with Client(server.address, api_key=API_KEY) as client:
        assert client.models()[0].num_blocks == 30
    with Client(server.address, api_key="another") as client, pytest.raises(errors.Unauthenticated):
        client.models()


def test_the_key_of_now_is_sent_with_each_call(server: GenerationServer) -> None:
    keys = iter([API_KEY, "expired", API_KEY])
    with Client(server.address, api_key=lambda: next(keys)) as client:
        client.models()
        with pytest.raises(errors.Unauthenticated):
            client.models()
        assert "".join(chunk.text for chunk in client.stream("one two")) == "one two"
        with pytest.raises(StopIteration):
            client.stream("one two")


def test_models_and_tokens(client: Client) -> None:
    assert client.model("echo").context_length == 8192
    with pytest.raises(errors.ModelNotFound) as raised:
        client.model("nobody")
    assert raised.value.resource_name == "nobody"
    assert client.tokenize("a b").pieces == ("a", "b")
    assert len(client.tokenize([Message("user", "a b c")])) == 3


def test_a_chat_sends_only_new_messages(client: Client, server: GenerationServer) -> None:
    with client.chat(system="be brief", max_tokens=9) as chat:
        assert chat.send("hello").text == "hello"
        assert "".join(chunk.text for chunk in chat.stream("and now", seed=4)) == "and now"
        assert chat.usage is not None
        assert chat.usage.cached_tokens == 10
        chat.send("the third")
        assert chat.info().num_turns == 3
    first, second, third = server.servicer.requests[1:]
    assert [each.role for each in first.messages] == ["system", "user"]
    assert [each.role for each in second.messages] == [each.role for each in third.messages] == ["user"]
    assert first.session_id == second.session_id != ""
    assert (second.stopping.max_tokens, second.sampling.seed) == (9, 4)
    assert server.servicer.sessions == {}


def test_a_turn_left_early_does_not_count(client: Client, server: GenerationServer) -> None:
    with client.chat(system="be brief") as chat:
        for _ in chat.stream("endless"):
            break
        assert chat.send("hello").text == "hello"
    assert [each.role for each in server.servicer.requests[-1].messages] == ["system", "user"]
    assert server.servicer.cancelled.is_set()


def test_a_refused_turn_does_not_count(client: Client, server: GenerationServer) -> None:
    with client.chat(system="be brief") as chat:
        chat.info()
        server.servicer.failure = errors.QueueFull("too many requests wait")
        with pytest.raises(errors.QueueFull):
            chat.send("hello")
        server.servicer.failure = None
        chat.send("hello")
    assert [each.role for each in server.servicer.requests[-1].messages] == ["system", "user"]


def test_an_existing_session_is_not_deleted(client: Client, server: GenerationServer) -> None:
    info = client.create_session()
    with client.chat(session=info.session_id) as chat:
        chat.send("hello")
    with client.session(info.session_id) as session:
        session.generate("more")
        assert session.info().session_id == info.session_id
    assert list(server.servicer.sessions) == [info.session_id]
    client.delete_session(info.session_id)
    with pytest.raises(errors.SessionNotFound):
        client.get_session(info.session_id)


def test_a_session_of_its_own_is_deleted(client: Client, server: GenerationServer) -> None:
    with client.session() as session:
        session.generate("one")
        assert "".join(str(chunk) for chunk in session.stream("two")) == "two"
        assert server.servicer.requests[-1].session_id == session.session_id
    assert server.servicer.sessions == {}


def test_a_chat_without_a_session(client: Client, server: GenerationServer) -> None:
    reply = client.complete_chat([{"role": "user", "content": "hello"}])
    assert reply.message == Message("assistant", "hello")
    assert "".join(map(str, client.stream_chat([Message("user", "hello you")]))) == "hello you"
    assert server.servicer.sessions == {}


def test_threads_that_use_a_session_first_at_the_same_time_share_it(client: Client, server: GenerationServer) -> None:
    with client.session() as session, ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(lambda _: session.session_id, range(8)))) == 1
    assert server.servicer.sessions == {}
