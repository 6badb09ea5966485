"""Remote blocks without `generate`: all of them or some, in one call or in steps, are those of the unsplit model."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from corolla.chassis.errors import HopSessionLost
from corolla.hf import InferenceSession, RemoteBlocks
from corolla.models.families import FAMILIES
from tests.checkpoints import HIDDEN_SIZE, make_tiny_checkpoint
from tests.integration.hf.models import ModelPair, draw_prompts
from tests.integration.hf.stacks import Stacks
from tests.tiers import quick

PROMPT = draw_prompts(1, 7)
assert_near = partial(torch.testing.assert_close, atol=2e-4, rtol=2e-4)


@pytest.fixture(scope="module", params=quick(["bloom", "llama"], "bloom"))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, stacks: Stacks) -> ModelPair:
    folder = make_tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param) / request.param)
    return ModelPair.load(folder, stacks.start(folder, ["0:3", "2:5", "0:2"]))


@pytest.fixture(autouse=True)
def nothing_stays(pair: ModelPair) -> Iterator[None]:
    yield
    pair.stack.until_empty()


def draw_hidden(num_rows: int, num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, num_tokens, HIDDEN_SIZE, generator=torch.Generator().manual_seed(seed))


def local_blocks(pair: ModelPair, start: int, end: int) -> Callable[[Tensor], Tensor]:
    """The same blocks of the unsplit model, from position 0, by hooks that swap their input and catch their output."""
    layers = pair.unsplit.base_model.get_submodule(FAMILIES[pair.unsplit.config.model_type].layers)

    def run(hidden: Tensor) -> Tensor:
        caught: list[Tensor] = []

        def swap(_module: Any, arguments: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
            return (hidden, *arguments[1:]), options

        def catch(_module: Any, _arguments: Any, output: Any) -> None:
            caught.append(output if isinstance(output, Tensor) else output[0])

        handles = [
            layers[start].register_forward_pre_hook(swap, with_kwargs=True),
            layers[end - 1].register_forward_hook(catch),
        ]
        try:
            with torch.no_grad():
                pair.unsplit(torch.zeros(hidden.shape[:2], dtype=torch.int64), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return caught[0]

    return run


def step_by_step(session: InferenceSession, hidden: Tensor, chunk: int = 1) -> Tensor:
    return torch.cat([session.step(part) for part in torch.split(hidden, chunk, dim=1)], dim=1)


# --- the full model -----------------------------------------------------------------------------------------------


def test_parallel_forward_equals_the_local_model(pair: ModelPair) -> None:
    logits = pair.remote(PROMPT).logits
    assert logits.isfinite().all()
    assert_near(logits, pair.unsplit(PROMPT).logits)


@pytest.mark.parametrize("chunk", [1, 3])
def test_stepwise_inference_equals_parallel_forward(pair: ModelPair, chunk: int) -> None:
    edges, positions = pair.remote.edges, torch.arange(7)
    hidden = edges.embed(PROMPT[0], positions)[None]
    with pair.remote.inference_session(max_length=7) as session:
        output = step_by_step(session, hidden, chunk)
        assert (session.position, session.num_blocks, session.batch_size) == (7, 5, 1)
    assert_near(edges.head(output[0]), pair.unsplit(PROMPT).logits[0])


# --- sessions over blocks ------------------------------------------------------------------------------------------


def test_a_single_block_equals_the_local_block(pair: ModelPair) -> None:
    hidden = draw_hidden(1, 8)
    for block in (0, 2, 4):
        expected = local_blocks(pair, block, block + 1)(hidden)
        assert_near(pair.remote.blocks[block](hidden), expected)
        with pair.remote.blocks[block].inference_session(max_length=8) as session:
            assert_near(step_by_step(session, hidden), expected)


def test_chained_inference_over_some_blocks(pair: ModelPair) -> None:
    hidden = draw_hidden(2, 8)
    expected = local_blocks(pair, 1, 4)(hidden)
    with pair.remote.blocks[1:4].inference_session(max_length=8) as session:
        assert_near(step_by_step(session, hidden), expected)
        assert session.num_blocks == 3


def test_the_maximum_length_is_respected(pair: ModelPair) -> None:
    hidden = draw_hidden(1, 8)
    with pair.remote.inference_session(max_length=8) as session:
        session.step(hidden)
        with pytest.raises(ValueError, match="Maximum length exceeded"):
            session.step(hidden[:, -1:])
        assert session.position == 8


@pytest.mark.parametrize("blocks", [slice(0, 5), slice(2, 3)], ids=["all blocks", "one block"])
def test_rollback_to_position_two_and_another_continuation(pair: ModelPair, blocks: slice) -> None:
    first, second = draw_hidden(1, 14, seed=1), draw_hidden(1, 14, seed=2)
    second[:, :2] = first[:, :2]
    with pair.remote.blocks[blocks].inference_session(max_length=14) as session:
        before = session.step(first)
        session.position = 2
        after = session.step(second[:, 2:])
    expected = local_blocks(pair, blocks.start, blocks.stop)(second)
    assert_near(torch.cat([before[:, :2], after], dim=1), expected)


def test_a_rollback_before_every_step(pair: ModelPair) -> None:
    hidden, wrong = draw_hidden(1, 6), draw_hidden(1, 6, seed=3)
    outputs = []
    with pair.remote.inference_session(max_length=8) as session:
        for position in range(6):
            session.step(wrong[:, :2])
            session.position = position
            outputs.append(session.step(hidden[:, position : position + 1]))
    assert_near(torch.cat(outputs, dim=1), local_blocks(pair, 0, 5)(hidden))


def test_sessions_do_not_see_each_other(pair: ModelPair) -> None:
    first, second = draw_hidden(1, 6, seed=4), draw_hidden(2, 6, seed=5)
    with pair.remote.inference_session() as one, pair.remote.inference_session() as other:
        outputs = [(one.step(first[:, [i]]), other.step(second[:, [i]])) for i in range(6)]
    run = local_blocks(pair, 0, 5)
    assert_near(torch.cat([output for output, _ in outputs], dim=1), run(first))
    assert_near(torch.cat([output for _, output in outputs], dim=1), run(second))


def test_wrong_shapes_are_refused(pair: ModelPair) -> None:
    with pair.remote.inference_session() as session:
        for wrong in (draw_hidden(1, 0), draw_hidden(1, 3)[..., :-1], draw_hidden(1, 3)[0]):
            with pytest.raises(ValueError, match="hidden"):
                session.step(wrong)
        session.step(draw_hidden(2, 3))
        with pytest.raises(ValueError, match="2 sequences"):
            session.step(draw_hidden(1, 3))
    with pytest.raises(HopSessionLost):
        session.step(draw_hidden(2, 1))


# --- slicing ------------------------------------------------------------------------------------------------------


def test_halves_are_the_whole(pair: ModelPair) -> None:
    blocks = pair.remote.blocks
    first, second = blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]
    assert len(first) + len(second) == len(blocks) == pair.unsplit.config.num_hidden_layers
    assert isinstance(first, RemoteBlocks)
    assert [repr(part) for part in (first, second)] == ["RemoteBlocks(0:2)", "RemoteBlocks(2:5)"]
    hidden = draw_hidden(2, 5)
    output = first(hidden)
    assert output.shape == hidden.shape
    assert_near(second(output), blocks(hidden))
    assert_near(blocks(hidden), local_blocks(pair, 0, 5)(hidden))


def test_slices_of_slices_and_single_blocks(pair: ModelPair) -> None:
    blocks = pair.remote.blocks
    assert repr(blocks[1:5][1:3]) == repr(blocks[2:4])
    assert repr(blocks[-1]) == repr(blocks[4:5])
    with pytest.raises(IndexError):
        blocks[5]
    for wrong in (slice(3, 3), slice(0, 5, 2)):
        with pytest.raises(ValueError, match="slice"):
            blocks[wrong]


# --- trained prompts ----------------------------------------------------------------------------------------------


def test_trained_prompts_at_the_start_of_a_session(pair: ModelPair) -> None:
    prompts, hidden = draw_hidden(1, 3, seed=6)[0], draw_hidden(2, 5, seed=7)
    with pair.remote.blocks.inference_session(prompts=prompts) as session:
        output = step_by_step(session, hidden)
        assert session.position == 8
    whole = torch.cat([prompts.expand(2, 3, HIDDEN_SIZE), hidden], dim=1)
    assert_near(output, local_blocks(pair, 0, 5)(whole)[:, 3:])
