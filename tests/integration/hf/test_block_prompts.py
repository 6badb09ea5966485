"""Trained prompts for each block, against the unsplit model with the same additions made by hooks."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from corolla.chassis.errors import InvalidRequest
from corolla.models.families import FAMILIES
from corolla.wire.frames import MAX_PROMPT_BYTES
from tests.checkpoints import HIDDEN_SIZE, make_tiny_checkpoint
from tests.integration.hf.models import ModelPair, draw_prompts, left_padding
from tests.integration.hf.stacks import Stacks
from tests.tiers import quick

NUM_BLOCKS = 5
PROMPT = draw_prompts(1, 21)
BATCH, MASK = draw_prompts(3, 15), left_padding(15, 0, 3, 11)

CHAINS = {
    "llama": ["0:2", "2:5"],
    "bloom": ["0:5"],
    "gemma3_text": ["0:1", "1:4", "4:5"],
    "gpt2": ["0:2", "2:3", "3:5"],
    "falcon": ["0:3", "3:5"],
}


@pytest.fixture(scope="module", params=quick(CHAINS, "llama", "bloom"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, stacks: Stacks) -> ModelPair:
    return load(request.param, tmp_path_factory, stacks)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, stacks: Stacks) -> ModelPair:
    return load("llama", tmp_path_factory, stacks)


def load(family: str, tmp_path_factory: pytest.TempPathFactory, stacks: Stacks) -> ModelPair:
    folder = make_tiny_checkpoint(family, tmp_path_factory.mktemp("prompted") / family)
    return ModelPair.load(folder, stacks.start(folder, CHAINS[family]))


def train(num_tokens: int, *batch: int, seed: int = 0) -> Tensor:
    """`[blocks, *batch, num_tokens, H]`, as strong as what they are added to."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_BLOCKS, *batch, num_tokens, HIDDEN_SIZE, generator=generator)


@contextlib.contextmanager
def prompted(pair: ModelPair, block_prompts: Tensor, mask: Tensor | None = None) -> Iterator[Any]:
    """The unsplit model with the additions. It must be called with whole texts: from position 0, without a cache."""
    by_sequence = block_prompts[:, None] if block_prompts.dim() == 3 else block_prompts
    layers: Any = pair.unsplit.base_model.get_submodule(FAMILIES[pair.unsplit.config.model_type].layers)

    def adding(values: Tensor) -> Any:
        def add(_module: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden = arguments[0].clone()
            num_rows, num_columns = hidden.shape[:2]
            for row in range(num_rows):
                pads = 0 if mask is None else int((mask[row * len(mask) // num_rows] == 0).sum())
                addition = values[row * len(values) // num_rows][: num_columns - pads]
                hidden[row, pads : pads + len(addition)] += addition
            return (hidden, *arguments[1:])

        return add

    handles = [layer.register_forward_pre_hook(adding(by_sequence[index])) for index, layer in enumerate(layers)]
    try:
        yield pair.unsplit
    finally:
        for handle in handles:
            handle.remove()


def answer_of(pair: ModelPair, block_prompts: Tensor, text: Tensor, **options: Any) -> list[list[int]]:
    mask = options.get("attention_mask")
    torch.manual_seed(0)
    with prompted(pair, block_prompts, mask) as unsplit:
        answer: list[list[int]] = unsplit.generate(text, use_cache=False, **options).tolist()
    return answer


def test_answers_are_those_of_the_model_with_the_additions(pair: ModelPair) -> None:
    shared, own = train(6), train(6, 3, seed=1)
    plain = pair.unsplit.generate(PROMPT, max_new_tokens=10).tolist()
    with pair.remote.inference_session(block_prompts=shared) as session:
        expected = answer_of(pair, shared, PROMPT, max_new_tokens=10)
        assert expected != plain
        parts = [pair.remote.generate(PROMPT, max_new_tokens=4), pair.remote.generate(max_new_tokens=6)]
        assert torch.cat(parts, dim=1).tolist() == expected
        # Positions decide: what is processed again gets the same again.
        for position in (0, 2, 6, 9):
            session.position = position
            assert pair.remote.generate(PROMPT, max_new_tokens=10).tolist() == expected
    batch: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 6}
    for prompts in (shared, own):
        for ways in ({}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
            options = {**batch, **ways}
            expected = answer_of(pair, prompts, BATCH, **options)
            with pair.remote.inference_session(block_prompts=prompts):
                torch.manual_seed(0)
                assert pair.remote.generate(BATCH, **options).tolist() == expected
    assert pair.remote.generate(PROMPT, max_new_tokens=10).tolist() == plain
    pair.stack.until_empty()


def test_steps_of_any_size_through_some_of_the_blocks(pair: ModelPair) -> None:
    hidden = torch.randn(2, 9, HIDDEN_SIZE, generator=torch.Generator().manual_seed(2))
    block_prompts = train(5, 2)[1:4]
    whole = hidden
    for index in range(3):
        whole = whole.clone()
        whole[:, :5] += block_prompts[index]
        whole = pair.remote.blocks[1 + index](whole)
    some = pair.remote.blocks[1:4]
    torch.testing.assert_close(some(hidden, block_prompts=block_prompts), whole, atol=2e-4, rtol=2e-4)
    with some.inference_session(block_prompts=block_prompts) as session:
        parts = [session.step(part) for part in torch.split(hidden, [1, 2, 3, 3], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-4, rtol=2e-4)
    pair.stack.until_empty()


# --- more of it, on one model -------------------------------------------------------------------------------------


def test_long_prompts_outlast_chunks_and_a_session_that_grows(llama: ModelPair) -> None:
    text, block_prompts = draw_prompts(1, 330), train(300)
    expected = answer_of(llama, block_prompts, text, max_new_tokens=5)
    with llama.remote.inference_session(block_prompts=block_prompts):
        assert llama.remote.generate(text, max_new_tokens=5).tolist() == expected
    with llama.remote.inference_session(block_prompts=block_prompts) as session:
        # Room for 256 positions at first: the session is opened again in the middle of its prompts.
        session.step(llama.remote.edges.embed(text[0, :200], torch.arange(200))[None])
        assert llama.remote.generate(text[:, 200:], max_new_tokens=5).tolist() == [expected[0][200:]]


def test_block_prompts_are_added_to_shallow_prompts_first(llama: ModelPair) -> None:
    """Deep prompt tuning as Petals has it: as many pseudo tokens as each block has additions."""
    shallow, deep = torch.randn(5, HIDDEN_SIZE, generator=torch.Generator().manual_seed(4)), train(5)
    whole = torch.cat([shallow[None], llama.unsplit.get_input_embeddings()(PROMPT)], dim=1)
    expected: list[int] = []
    with prompted(llama, deep) as unsplit:
        for _ in range(8):
            expected.append(int(unsplit(inputs_embeds=whole, use_cache=False).logits[0, -1].argmax()))
            whole = torch.cat([whole, llama.unsplit.get_input_embeddings()(torch.tensor([expected[-1:]]))], dim=1)
    with llama.remote.inference_session(prompts=shallow, block_prompts=deep):
        assert llama.remote.generate(PROMPT, max_new_tokens=8)[0, 21:].tolist() == expected


def test_each_sequence_of_a_batch_keeps_its_own_whatever_becomes_of_the_batch(llama: ModelPair) -> None:
    batch, own = draw_prompts(2, 9, seed=3).repeat_interleave(2, dim=0), train(6, 4, seed=5)
    with llama.remote.inference_session(block_prompts=own) as session:
        first = llama.remote.generate(batch, max_new_tokens=3)
        assert first.tolist() == answer_of(llama, own, batch, max_new_tokens=3)
        # Equal texts, and yet not one row's tokens for another's.
        beams: dict[str, Any] = {"max_new_tokens": 4, "num_beams": 3}
        text = torch.tensor(answer_of(llama, own, first, **beams))
        assert llama.remote.generate(**beams).tolist() == text[:, 12:].tolist()
        assert session.batch_size == 12
        # Back to one row each; and what was repeated starts anew under the right prompts.
        further = torch.tensor(answer_of(llama, own, text, max_new_tokens=3))
        assert llama.remote.generate(max_new_tokens=3).tolist() == further[:, 16:].tolist()
        for position in (3, 0):
            session.position = position
            expected = answer_of(llama, own, batch, **beams)
            assert llama.remote.generate(batch, **beams).tolist() == expected
    chosen = torch.tensor([3, 0])
    cache = llama.remote(batch).past_key_values
    assert cache.session.batch_size == 4
    with llama.remote.inference_session(block_prompts=own) as session:
        hidden = llama.remote.edges.embed(batch[0], torch.arange(9))[None].repeat(4, 1, 1)
        whole = session.step(hidden)
        session.select_rows(chosen.tolist())
        session.position = 2
        torch.testing.assert_close(session.step(hidden[:2, 2:]), whole[chosen, 2:], atol=2e-4, rtol=2e-4)


def test_drafts_are_checked_under_the_prompts(llama: ModelPair) -> None:
    text, block_prompts = PROMPT.repeat(1, 2), train(6)
    expected = answer_of(llama, block_prompts, text, max_new_tokens=12)
    for drafts in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": llama.unsplit}):
        with llama.remote.inference_session(block_prompts=block_prompts):
            assert llama.remote.generate(text, max_new_tokens=12, **drafts).tolist() == expected


def test_concurrent_sessions_keep_their_own_prompts(llama: ModelPair) -> None:
    by_name = {"none": None, "one": train(6), "other": train(9, seed=7)}
    expected = {"none": llama.unsplit.generate(PROMPT, max_new_tokens=40).tolist()}
    expected |= {
        name: answer_of(llama, prompts, PROMPT, max_new_tokens=40)
        for name, prompts in by_name.items()
        if prompts is not None
    }
    assert len({str(answer) for answer in expected.values()}) == 3
    wrong: list[str] = []

    def answer(name: str) -> None:
        for _ in range(3):
            with llama.remote.inference_session(block_prompts=by_name[name]):
                if llama.remote.generate(PROMPT, max_new_tokens=40).tolist() != expected[name]:
                    wrong.append(name)

    threads = [threading.Thread(target=answer, args=(name,)) for name in by_name]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    llama.stack.until_empty()


SHAPES = [(4, 6, 64), (5, 6, 63), (5, 0, 64), (0, 6, 64), (6, 64), (5, 1, 1, 6, 64), (5, 0, 6, 64), (5, 513, 64), ()]


@pytest.mark.parametrize(
    "prompts, says",
    [
        *((torch.zeros(shape), "`block_prompts`") for shape in SHAPES),
        ([[[0.0] * 64]], "`block_prompts` must be a tensor"),
        *((torch.full((5, 2, 64), value), "finite") for value in (torch.nan, torch.inf)),
    ],
)
def test_block_prompts_that_do_not_fit_are_refused(llama: ModelPair, prompts: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        llama.remote.inference_session(block_prompts=prompts)


def test_a_batch_of_another_size_is_refused(llama: ModelPair) -> None:
    with llama.remote.inference_session(block_prompts=train(2, 3)), pytest.raises(ValueError, match="3 sequences"):
        llama.remote.generate(draw_prompts(4, 5), max_new_tokens=1)


def test_prompts_beyond_the_limit_of_a_hop_are_refused_before_they_are_sent(
    llama: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The context of the tiny model is too short for what a hop would refuse.
    monkeypatch.setattr("corolla.chain.reservations.MAX_PROMPT_BYTES", 3 * 6 * HIDDEN_SIZE * 4 - 1)
    assert MAX_PROMPT_BYTES > 5 * 512 * HIDDEN_SIZE * 4
    with llama.remote.inference_session(block_prompts=train(6)), pytest.raises(InvalidRequest, match="blocks 2:5"):
        llama.remote.generate(PROMPT, max_new_tokens=1)
    llama.stack.until_empty()
