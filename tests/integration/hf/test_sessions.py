"""Sessions: which one a call uses, how it continues, what it forgets, and what it refuses."""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TextIteratorStreamer

from corolla.chassis.errors import HopSessionLost, OutOfPages
from corolla.hf import AutoDistributedModelForCausalLM, InferenceSession
from corolla.hf.connection import Connection
from tests.checkpoints import make_tiny_checkpoint, make_tokenizer
from tests.integration.hf.models import Listing, ModelPair, draw_prompts, left_padding
from tests.integration.hf.stacks import Stacks

PROMPT = draw_prompts(1, 21)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, stacks: Stacks) -> ModelPair:
    folder = make_tiny_checkpoint("llama", tmp_path_factory.mktemp("llama") / "llama", seed=1)
    return ModelPair.load(folder, stacks.start(folder, ["0:2", "2:5"]))


@pytest.fixture(autouse=True)
def nothing_stays(llama: ModelPair) -> Iterator[None]:
    yield
    llama.stack.until_empty()


def answer_of(llama: ModelPair, text: Tensor, num_new_tokens: int, **options: Any) -> Tensor:
    answer: Tensor = llama.unsplit.generate(text, max_new_tokens=num_new_tokens, **options)
    return answer


# --- which session ------------------------------------------------------------------------------------------------


def test_the_given_session_comes_before_the_entered_one(llama: ModelPair) -> None:
    given = llama.remote.inference_session(max_length=40)
    with llama.remote.inference_session(max_length=40) as entered:
        assert llama.remote.active_session is entered
        llama.remote.generate(PROMPT, max_new_tokens=3, session=given)
        assert (given.position, entered.position) == (23, 0)
        llama.remote.generate(PROMPT, max_new_tokens=5)
        assert (given.position, entered.position) == (23, 25)
    assert llama.remote.active_session is None
    assert entered.is_closed
    given.close()


def test_calls_use_the_innermost_entered_session(llama: ModelPair) -> None:
    with llama.remote.inference_session() as outer:
        with llama.remote.inference_session() as inner:
            assert llama.remote.active_session is inner
        assert llama.remote.active_session is outer


def test_a_session_that_is_used_for_a_while_stays_open(llama: ModelPair) -> None:
    session = llama.remote.inference_session()
    with llama.remote.use_session(session) as used:
        assert used is session is llama.remote.active_session
        parts = [llama.remote.generate(PROMPT, max_new_tokens=3)]
    assert llama.remote.active_session is None
    with llama.remote.use_session(session):
        parts.append(llama.remote.generate(max_new_tokens=4))
    assert torch.cat(parts, dim=1).tolist() == answer_of(llama, PROMPT, 7).tolist()
    session.close()


def test_a_streamers_thread_is_in_the_session_of_its_starter(llama: ModelPair) -> None:
    tokenizer = make_tokenizer()
    expected = llama.unsplit.generate(PROMPT, max_new_tokens=8, do_sample=False)[0, PROMPT.shape[1] :]
    with llama.remote.inference_session() as session:
        texts = []
        for prompt in (PROMPT, None):
            streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
            call = {"inputs": prompt, "max_new_tokens": 4, "do_sample": False, "streamer": streamer}
            thread = threading.Thread(target=llama.remote.generate, kwargs=call)
            thread.start()
            texts.append("".join(streamer))
            thread.join()
        assert session.output_ids is not None
        assert session.output_ids[0, PROMPT.shape[1] :].tolist() == expected.tolist()
        found = llama.remote.generate
    assert found(PROMPT, max_new_tokens=2).shape == (1, PROMPT.shape[1] + 2), "a session that was left is not used"


def test_a_thread_that_is_not_in_the_session_says_so(llama: ModelPair, caplog: pytest.LogCaptureFixture) -> None:
    def answer() -> None:
        llama.remote.generate(PROMPT, max_new_tokens=2)

    with llama.remote.inference_session() as session:
        thread = threading.Thread(target=answer)
        thread.start()
        thread.join()
        assert session.position == 0
        assert "this thread is not in the session" in caplog.text
        caplog.clear()
        answer()
    assert "this thread" not in caplog.text


def test_another_models_session_is_not_entered_for_this_one(llama: ModelPair) -> None:
    router = llama.stack.router
    other = AutoDistributedModelForCausalLM.from_pretrained(str(llama.remote.config.name_or_path), router=router)
    with other.inference_session() as session:
        llama.remote.generate(PROMPT, max_new_tokens=2)
        assert session.position == 0


def test_a_session_of_other_blocks_is_refused(llama: ModelPair) -> None:
    with pytest.raises(ValueError, match="other blocks"):
        llama.remote.generate(PROMPT, max_new_tokens=1, session=llama.remote.blocks[1:3].inference_session())


# --- going on -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_entered", [True, False], ids=["entered", "given"])
def test_answers_in_pieces_are_the_answer(llama: ModelPair, is_entered: bool) -> None:
    whole = answer_of(llama, PROMPT, 20)
    session = llama.remote.inference_session(max_length=41)
    options: dict[str, Any] = {} if is_entered else {"session": session}
    if is_entered:
        session.__enter__()
    parts = [llama.remote.generate(PROMPT, max_new_tokens=1, **options)]
    parts += [llama.remote.generate(max_new_tokens=count, **options) for count in (1, 7, 11)]
    assert torch.cat(parts, dim=1).tolist() == whole.tolist()
    assert session.output_ids is not None
    assert session.output_ids.tolist() == whole.tolist()
    assert session.last_token_id is not None
    assert session.last_token_id.tolist() == whole[:, -1:].tolist()
    assert session.position == 40
    session.__exit__(None, None, None)


@pytest.mark.parametrize("gives_all", [True, False], ids=["all of the text", "what is new"])
def test_turns_process_only_new_tokens(llama: ModelPair, gives_all: bool) -> None:
    text = torch.empty(1, 0, dtype=torch.int64)
    with llama.remote.inference_session() as session:
        for turn in range(4):
            message = draw_prompts(1, 9, seed=turn)
            text = torch.cat([text, message], dim=1)
            expected = answer_of(llama, text, 6)
            held = session.position
            answer = llama.remote.generate(text if gives_all else message, max_new_tokens=6)
            assert answer.tolist() == (expected if gives_all else expected[:, text.shape[1] - 9 :]).tolist()
            assert session.position - held <= 9 + 6
            text = expected


def test_a_turn_of_beams_between_turns(llama: ModelPair) -> None:
    with llama.remote.inference_session():
        text = answer_of(llama, PROMPT, 5)
        assert llama.remote.generate(PROMPT, max_new_tokens=5).tolist() == text.tolist()
        turns: list[dict[str, Any]] = [{"num_beams": 4}, {"num_beams": 2}, {}, {"prompt_lookup_num_tokens": 3}]
        for options in turns:
            expected = answer_of(llama, text, 6, **options)
            assert llama.remote.generate(max_new_tokens=6, **options).tolist() == expected[:, text.shape[1] :].tolist()
            text = expected


def test_one_prompt_becomes_several_answers_that_go_on(llama: ModelPair) -> None:
    sampling: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3}
    with llama.remote.inference_session() as session:
        torch.manual_seed(5)
        text = answer_of(llama, PROMPT, 6, **sampling)
        torch.manual_seed(5)
        assert llama.remote.generate(PROMPT, max_new_tokens=6, **sampling).tolist() == text.tolist()
        assert session.batch_size == 3
        assert llama.remote.generate(max_new_tokens=4).tolist() == answer_of(llama, text, 4)[:, 27:].tolist()


def test_a_padded_batch_goes_on(llama: ModelPair) -> None:
    batch, mask, message = draw_prompts(3, 12), left_padding(12, 0, 5, 9), draw_prompts(3, 4, seed=1)
    text = answer_of(llama, batch, 5, attention_mask=mask)
    further = torch.cat([text, message], dim=1)
    later_mask = torch.cat([mask, torch.ones(3, 5, dtype=torch.int64), left_padding(4, 2, 0, 1)], dim=1)
    expected = answer_of(llama, further, 5, attention_mask=later_mask)
    with llama.remote.inference_session(max_length=30) as session:
        assert llama.remote.generate(batch, attention_mask=mask, max_new_tokens=5).tolist() == text.tolist()
        answer = llama.remote.generate(message, attention_mask=later_mask[:, 17:], max_new_tokens=5)
        assert answer.tolist() == expected[:, 17:].tolist()
        assert session.batch_size == 3
        # The whole text, with the whole mask, is the same.
        session.position = 17
        answer = llama.remote.generate(further, attention_mask=later_mask, max_new_tokens=5)
        assert answer.tolist() == expected.tolist()


def test_max_length_counts_the_whole_text(llama: ModelPair) -> None:
    with llama.remote.inference_session():
        first = llama.remote.generate(PROMPT, max_length=25)
        assert first.shape[1] == 25
        assert llama.remote.generate(max_length=31).shape[1] == 6
        with pytest.raises(ValueError, match="max_length"):
            llama.remote.generate(draw_prompts(1, 3), max_length=31)


def test_a_streamer_gets_the_prompt_and_the_new_tokens(llama: ModelPair) -> None:
    message = draw_prompts(1, 4, seed=9)
    with llama.remote.inference_session():
        llama.remote.generate(PROMPT, max_new_tokens=3)
        streamer = Listing()
        answer = llama.remote.generate(message, max_new_tokens=3, streamer=streamer)
    assert streamer.puts == [message[0].tolist(), *([token] for token in answer[0, 4:].tolist())]
    assert streamer.has_ended


def test_penalties_see_the_whole_text(llama: ModelPair) -> None:
    whole = answer_of(llama, PROMPT, 12, repetition_penalty=1.5, no_repeat_ngram_size=2)
    with llama.remote.inference_session():
        for count in (5, 7):
            given = PROMPT if count == 5 else None
            options: dict[str, Any] = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
            answer = llama.remote.generate(given, max_new_tokens=count, **options)
    assert answer.tolist() == whole[:, -7:].tolist()


def test_details_are_returned_in_a_session(llama: ModelPair) -> None:
    with llama.remote.inference_session() as session:
        llama.remote.generate(PROMPT, max_new_tokens=3)
        answer = llama.remote.generate(max_new_tokens=4, return_dict_in_generate=True, output_scores=True)
        assert answer.sequences.shape == (1, 4)
        assert len(answer.scores) == 4
        assert answer.past_key_values.session is session


def test_trained_prompts_stand_before_the_text(llama: ModelPair) -> None:
    prompts = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    embedding = llama.unsplit.get_input_embeddings()
    whole = torch.cat([prompts[None], embedding(PROMPT)], dim=1)
    expected = llama.unsplit.generate(inputs_embeds=whole, max_new_tokens=12)
    with llama.remote.inference_session(prompts=prompts) as session:
        parts = [llama.remote.generate(PROMPT, max_new_tokens=5)[:, 21:], llama.remote.generate(max_new_tokens=7)]
        assert torch.cat(parts, dim=1).tolist() == expected.tolist()
        assert (session.num_prefix, session.position) == (5, 5 + 21 + 11)
        session.position = 5
        again = llama.remote.generate(PROMPT, max_new_tokens=5, num_beams=2)
        expected_beams = llama.unsplit.generate(inputs_embeds=whole, max_new_tokens=5, num_beams=2)
        assert again[:, 21:].tolist() == expected_beams.tolist()
    # Nothing of it stays for others.
    assert llama.remote.generate(PROMPT, max_new_tokens=12).tolist() == answer_of(llama, PROMPT, 12).tolist()


def test_given_embeddings_begin_a_session(llama: ModelPair) -> None:
    embeddings = llama.unsplit.get_input_embeddings()(PROMPT)
    expected = llama.unsplit.generate(inputs_embeds=embeddings, max_new_tokens=12)
    with llama.remote.inference_session():
        parts = [
            llama.remote.generate(inputs_embeds=embeddings, max_new_tokens=5),
            llama.remote.generate(max_new_tokens=7),
        ]
        assert torch.cat(parts, dim=1).tolist() == expected.tolist()
        with pytest.raises(ValueError, match="inputs_embeds"):
            llama.remote.generate(inputs_embeds=embeddings, max_new_tokens=1)


def test_steps_by_hand_stand_before_the_text(llama: ModelPair) -> None:
    expected = answer_of(llama, PROMPT, 6)
    hidden = llama.remote.edges.embed(PROMPT[0, :5], torch.arange(5))[None]
    with llama.remote.inference_session() as session:
        session.step(hidden)
        assert llama.remote.generate(PROMPT[:, 5:], max_new_tokens=6).tolist() == expected[:, 5:].tolist()
        session.step(hidden)
        with pytest.raises(ValueError, match="by hand"):
            llama.remote.generate(max_new_tokens=1)
        session.position = 5
        assert llama.remote.generate(PROMPT[:, 5:], max_new_tokens=6).tolist() == expected[:, 5:].tolist()


def test_embeddings_of_a_call_that_failed_are_forgotten(llama: ModelPair) -> None:
    embeddings = llama.unsplit.get_input_embeddings()(PROMPT)

    def fail(batch_id: int, input_ids: Tensor) -> list[int]:
        raise ZeroDivisionError

    with llama.remote.inference_session() as session:
        with pytest.raises(ZeroDivisionError):
            llama.remote.generate(inputs_embeds=embeddings, max_new_tokens=5, prefix_allowed_tokens_fn=fail)
        assert session.position == 0
        answer = llama.remote.generate(inputs_embeds=embeddings, max_new_tokens=5)
    assert answer.tolist() == llama.unsplit.generate(inputs_embeds=embeddings, max_new_tokens=5).tolist()


# --- forgetting ---------------------------------------------------------------------------------------------------


def test_back_to_the_second_position_and_on_with_another_text(llama: ModelPair) -> None:
    other = torch.cat([PROMPT[:, :2], draw_prompts(1, 17, seed=3)], dim=1)
    with llama.remote.inference_session(max_length=40) as session:
        llama.remote.generate(PROMPT, max_new_tokens=8)
        session.position = 2
        assert session.output_ids is not None
        assert session.output_ids.tolist() == PROMPT[:, :2].tolist()
        assert (
            llama.remote.generate(other[:, 2:], max_new_tokens=8).tolist() == answer_of(llama, other, 8)[:, 2:].tolist()
        )
        session.position = 2
        assert llama.remote.generate(other, max_new_tokens=8).tolist() == answer_of(llama, other, 8).tolist()
        session.position = 0
        assert llama.remote.generate(PROMPT, max_new_tokens=8).tolist() == answer_of(llama, PROMPT, 8).tolist()


@pytest.mark.parametrize("position", [-1, 24])
def test_a_position_can_only_be_set_back(llama: ModelPair, position: int) -> None:
    with llama.remote.inference_session() as session:
        llama.remote.generate(PROMPT, max_new_tokens=3)
        with pytest.raises(ValueError, match="between 0 and 23"):
            session.position = position


# --- limits and ends ----------------------------------------------------------------------------------------------


def test_a_text_that_may_not_fit_ends_with_the_session(llama: ModelPair) -> None:
    """It may end long before, so that it is not refused. The last token is never processed, so it needs no room."""
    with llama.remote.inference_session(max_length=20) as session:
        with pytest.raises(ValueError, match="Maximum length exceeded"):
            llama.remote.generate(PROMPT, max_new_tokens=1)
        assert session.position == 0
    with llama.remote.inference_session(max_length=25):
        expected = llama.unsplit.generate(PROMPT, max_new_tokens=5, do_sample=False)
        assert llama.remote.generate(PROMPT, max_new_tokens=10_000, do_sample=False).tolist() == expected.tolist()
        with pytest.raises(ValueError, match="Maximum length exceeded"):
            llama.remote.generate(max_new_tokens=1)


@pytest.mark.parametrize(
    "value, refusal, says",
    [(0, ValueError, "512"), (513, ValueError, "512"), (2.0, TypeError, "integer"), ("9", TypeError, "integer")],
)
def test_a_length_or_position_that_makes_no_sense_is_refused(
    llama: ModelPair, value: Any, refusal: type[Exception], says: str
) -> None:
    with pytest.raises(refusal, match=says):
        llama.remote.inference_session(max_length=value)
    if refusal is TypeError:
        with llama.remote.inference_session() as session, pytest.raises(TypeError, match="integer"):
            session.position = value


@pytest.mark.parametrize(
    "prompts", [torch.zeros(4, 63), torch.zeros(1, 4, 64), torch.full((4, 64), torch.nan), [[0.0] * 64]], ids=str
)
def test_trained_prompts_that_do_not_fit_are_refused(llama: ModelPair, prompts: Any) -> None:
    with pytest.raises(ValueError, match="`prompts`"):
        llama.remote.inference_session(prompts=prompts)


def test_a_session_without_a_length_grows(llama: ModelPair) -> None:
    text = draw_prompts(1, 250)
    with llama.remote.inference_session():
        for count in (4, 30, 100):
            given = text if count == 4 else None
            answer = llama.remote.generate(given, max_new_tokens=count)
            expected = answer_of(llama, text, count)
            assert answer[:, -count:].tolist() == expected[:, -count:].tolist()
            text = expected


def test_a_session_that_does_not_fit_leaves_nothing(llama: ModelPair) -> None:
    pages = llama.stack.statuses()[0].num_free_pages
    with pytest.raises(OutOfPages):
        llama.remote.generate(PROMPT.repeat(pages + 1, 1), max_new_tokens=1)
    gc.collect()
    llama.stack.until_empty()
    assert llama.stack.statuses()[0].num_free_pages == pages


@pytest.mark.parametrize("num_first_rows", ["all", "one"])
def test_a_session_that_grows_where_only_some_hops_have_room_leaves_nothing(
    llama: ModelPair, num_first_rows: str
) -> None:
    num_columns = 300  # more than a session has room for at first
    with llama.remote.inference_session() as session:
        session.prepare(1, num_columns)
        smaller = llama.stack.statuses()[1]
        num_rows = smaller.num_pages // (smaller.num_pages - smaller.num_free_pages) + 1
    llama.stack.until_empty()
    session = llama.remote.inference_session()
    session.prepare(num_rows if num_first_rows == "all" else 1, 1)
    if num_first_rows == "one":
        session.select_rows([0] * num_rows)
    with pytest.raises(OutOfPages):
        session.prepare(num_rows, num_columns)
    assert session.is_closed


def test_an_interrupt_in_the_moment_of_opening_leaves_nothing(
    llama: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Connection.call

    def interrupted_call(connection: Connection, work: Any) -> Any:
        call(connection, work)
        raise KeyboardInterrupt

    monkeypatch.setattr(Connection, "call", interrupted_call)
    with pytest.raises(KeyboardInterrupt):
        llama.remote.inference_session().prepare(1, 1)


def test_a_closed_session_is_refused(llama: ModelPair) -> None:
    with llama.remote.inference_session() as session:
        llama.remote.generate(PROMPT, max_new_tokens=1)
    session.close()
    with pytest.raises(HopSessionLost, match="closed"):
        llama.remote.generate(PROMPT, max_new_tokens=1, session=session)
    with pytest.raises(HopSessionLost, match="closed"):
        session.__enter__()


def test_a_garbage_collected_session_is_closed(llama: ModelPair) -> None:
    session: InferenceSession | None = llama.remote.inference_session()
    llama.remote.generate(PROMPT, max_new_tokens=1, session=session)
    assert any(status.num_sessions for status in llama.stack.statuses())
    session = None
    gc.collect()
    llama.stack.until_empty()


def test_arguments_that_contradict_a_session_are_refused(llama: ModelPair) -> None:
    with llama.remote.inference_session():
        with pytest.raises(ValueError, match="use_cache"):
            llama.remote.generate(PROMPT, use_cache=False)
        llama.remote.generate(PROMPT, max_new_tokens=1)
        with pytest.raises(ValueError, match="holds 1 sequences"):
            llama.remote.generate(PROMPT.repeat(2, 1), max_new_tokens=1)
