"""Calls with a common prefix: block servers compute the prefix once, and no token changes."""

from typing import Any

import pytest
import torch

from corolla.chain.pending import RowFuture
from corolla.chain.streams import DataPlane
from corolla.chassis.errors import HopLeaving
from corolla.hf import AutoDistributedModelForCausalLM, DistributedModelForCausalLM
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.hf.models import ModelPair, draw_prompts, left_padding
from tests.integration.hf.stacks import Stacks

PAGE_TOKENS = 32
PROMPT = draw_prompts(1, 100)
NEW: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, stacks: Stacks) -> ModelPair:
    """All layers see everything in one family; in the other most see the last 12 tokens only."""
    folder = make_tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param) / request.param)
    return ModelPair.load(folder, stacks.start(folder, ["0:2", "2:5"]))


def sharing(pair: ModelPair, tenant: str, *, reuse_prefixes: bool = True) -> DistributedModelForCausalLM:
    folder, router = str(pair.remote.config.name_or_path), pair.stack.router
    return AutoDistributedModelForCausalLM.from_pretrained(
        folder, router=router, tenant=tenant, reuse_prefixes=reuse_prefixes
    )


def generate(model: DistributedModelForCausalLM, text: torch.Tensor, **options: Any) -> tuple[torch.Tensor, int]:
    """The generated tokens, and the number of prompt tokens that the hops had cached."""
    with model.inference_session(max_length=200) as session:
        output = model.generate(text, **{**NEW, **options})
        return output, session.num_reused_positions


def test_the_second_call_reuses_the_pages_of_the_first(pair: ModelPair) -> None:
    model = sharing(pair, "ada")
    for number, text in enumerate((PROMPT, PROMPT, torch.cat([PROMPT[:, :70], draw_prompts(1, 20)], dim=1))):
        expected = pair.unsplit.generate(text, **NEW)
        output, num_reused = generate(model, text)
        assert torch.equal(output, expected)
        assert num_reused == [0, 3 * PAGE_TOKENS, 2 * PAGE_TOKENS][number]
    pair.stack.until_empty()


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"do_sample": True},
        {"prompt_lookup_num_tokens": 4},
        {"num_return_sequences": 2, "num_beams": 2},
    ],
    ids=str,
)
def test_every_decoding_strategy_reuses_the_prefix(pair: ModelPair, options: dict[str, Any]) -> None:
    model = sharing(pair, "bob")
    generate(model, PROMPT)
    torch.manual_seed(7)
    expected = pair.unsplit.generate(PROMPT, **{**NEW, **options})
    torch.manual_seed(7)
    output, num_reused = generate(model, PROMPT, **options)
    assert torch.equal(output, expected)
    assert num_reused == 3 * PAGE_TOKENS


def test_rows_of_a_batch_reuse_a_prefix_and_continue_from_the_same_position(pair: ModelPair) -> None:
    model = sharing(pair, "cyd")
    generate(model, PROMPT)
    batch = torch.cat([PROMPT, PROMPT, torch.cat([PROMPT[:, :50], draw_prompts(1, 50)], dim=1)])
    output, num_reused = generate(model, batch)
    assert torch.equal(output, pair.unsplit.generate(batch, **NEW))
    # A hop that holds more goes back to where all can go on from; a sliding window cannot.
    assert num_reused == (PAGE_TOKENS if pair.unsplit.config.model_type == "llama" else 0)
    mask = left_padding(100, 0, 60, 3)
    output, _ = generate(model, batch, attention_mask=mask)
    assert torch.equal(output, pair.unsplit.generate(batch, attention_mask=mask, **NEW))
    pair.stack.until_empty()


def test_logits_of_the_whole_text_are_all_computed(pair: ModelPair) -> None:
    model = sharing(pair, "dan")
    generate(model, PROMPT)
    with torch.inference_mode():
        expected = pair.unsplit(PROMPT).logits
        torch.testing.assert_close(model(PROMPT).logits, expected, rtol=1e-4, atol=1e-4)
        last = model(PROMPT, logits_to_keep=40).logits
    torch.testing.assert_close(last, expected[:, -40:], rtol=1e-4, atol=1e-4)


def test_prefixes_are_shared_only_on_request_and_within_a_tenant(pair: ModelPair) -> None:
    generate(sharing(pair, "eve"), PROMPT)
    assert generate(sharing(pair, "fay"), PROMPT)[1] == 0
    assert generate(sharing(pair, "eve", reuse_prefixes=False), PROMPT)[1] == 0
    embedded = sharing(pair, "eve")
    with embedded.inference_session(max_length=200) as session:
        embedded.generate(inputs_embeds=embedded.get_input_embeddings()(PROMPT), **NEW)
        assert session.num_reused_positions == 0


def test_a_sequence_that_diverges_from_its_prefix_is_not_cached_under_that_prefix(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor after a recovery, which opens the sequence once more."""
    model, other = sharing(pair, "dan"), torch.cat([PROMPT[:, :40], draw_prompts(1, 60, seed=1)], dim=1)
    step, num_steps = DataPlane.step, 0

    def step_in_vain_once(plane: DataPlane, *what: Any, **how: Any) -> list[RowFuture]:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 2:
            raise HopLeaving("a hop of the chain handed sessions over")
        return step(plane, *what, **how)

    with model.inference_session(max_length=200) as session:
        model.generate(PROMPT, **NEW)
        session.position = 40
        with monkeypatch.context() as patch:
            patch.setattr(DataPlane, "step", step_in_vain_once)
            output = model.generate(other[:, 40:], **NEW)
        assert num_steps > 2
        assert torch.equal(output, pair.unsplit.generate(other, **NEW)[:, 40:])
    output, _ = generate(model, PROMPT)
    assert torch.equal(output, pair.unsplit.generate(PROMPT, **NEW))
    pair.stack.until_empty()
