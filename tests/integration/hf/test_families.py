"""Every family: the distributed model chooses the unsplit model's tokens, with every decoding strategy."""

import copy
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from corolla.chassis.errors import UnsupportedFamily
from tests.checkpoints import RECURRENT_FAMILIES, make_tiny_checkpoint
from tests.families import family_cases
from tests.integration.hf.models import ModelPair, draw_prompts, left_padding
from tests.integration.hf.stacks import Stacks

TEXT, PADDED = draw_prompts(3, 40), left_padding(40, 0, 3, 17)
HOLES = PADDED.clone()
HOLES[:, 20:24] = 0
PASSES = {
    "padding": (PADDED, None),
    "padding, positions that count tokens": (PADDED, (PADDED.cumsum(-1) - 1).clamp(min=0)),
    "holes": (HOLES, None),
    "holes, positions that count tokens": (HOLES, (HOLES.cumsum(-1) - 1).clamp(min=0)),
    "later positions": (torch.ones_like(PADDED), torch.arange(5, 45)[None]),
}

SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2}


def takes_embeddings(pair: ModelPair) -> bool:
    """Whether the family's own `generate` takes embeddings, by the library's own rule."""
    return "inputs_embeds" in inspect.signature(pair.unsplit.prepare_inputs_for_generation).parameters


def assert_passes_equal(pair: ModelPair) -> None:
    """That each pass of `PASSES` either gives the unsplit model's logits, or is refused before a step."""
    refused = set()
    for name, (mask, position_ids) in PASSES.items():
        given = {"attention_mask": mask, "position_ids": position_ids, "use_cache": False}
        try:
            answered = pair.remote(TEXT, **given).logits
        except ValueError as refusal:
            refused.add(name)
            if not re.search("`(attention_mask|position_ids)`", str(refusal)):
                raise
            continue
        expected = pair.unsplit(TEXT, **given).logits
        torch.testing.assert_close(answered[mask.bool()], expected[mask.bool()], atol=2e-3, rtol=2e-3, msg=name)
    rules = pair.remote.position_rules
    assert ("padding" in refused) == rules.feels_offset
    assert ("later positions" in refused) != rules.has_free_positions
    assert ("holes, positions that count tokens" in refused) == rules.measures_columns
    assert "padding, positions that count tokens" not in refused


def assert_embeddings_are_replaced(pair: ModelPair) -> None:
    """That both ends are replaced, tied and enlarged as those of the unsplit model."""
    answers = []
    models: tuple[Any, Any] = (pair.unsplit, pair.remote)
    for model in models:
        torch.manual_seed(1)
        own = []
        ends = (
            (model.get_input_embeddings, model.set_input_embeddings),
            (model.get_output_embeddings, model.set_output_embeddings),
        )
        for get, replace in ends:
            end: Any = copy.deepcopy(get())
            end.weight = torch.nn.Parameter(end.weight + 0.5 * end.weight.std() * torch.randn_like(end.weight), False)
            replace(end)
            assert get() is end
            own.append(model(TEXT[:1, :9], use_cache=False).logits)
        model.tie_weights()
        own.append(model(TEXT[:1, :9], use_cache=False).logits)
        model.resize_token_embeddings(330, mean_resizing=False)
        assert model.config.vocab_size == 330
        for get, _ in ends:
            get().weight.data[320:] = 0.1
        own.append(model(torch.cat([TEXT[:1, :9], torch.tensor([[329]])], dim=1), use_cache=False).logits)
        answers.append(own)
    for expected, answered in zip(*answers, strict=True):
        torch.testing.assert_close(answered, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("family", family_cases(kept=("deepseek_v3", "gemma2", "qwen3_next"), within_blocks=False))
def test_generate_answers_as_the_unsplit_model(tmp_path: Path, stacks: Stacks, family: str) -> None:
    folder = make_tiny_checkpoint(family, tmp_path / family)
    pair = ModelPair.load(folder, stacks.start(folder, ["0:2", "2:5"]))
    assert type(pair.remote).__name__ == "Distributed" + type(pair.unsplit).__name__
    prompt = draw_prompts(1, 21)
    batch, mask = draw_prompts(4, 15), left_padding(15, 0, 2, 7, 13)
    pair.assert_equal(prompt, max_new_tokens=12)
    pair.assert_equal(batch, attention_mask=mask, max_new_tokens=8, **SAMPLING)
    pair.assert_equal(batch, attention_mask=mask, max_new_tokens=8, num_beams=3)
    if family in RECURRENT_FAMILIES:
        with pytest.raises(UnsupportedFamily, match="recurrent state"):
            pair.remote.generate(prompt, max_new_tokens=12, prompt_lookup_num_tokens=4)
        cache = pair.remote.generate(prompt, max_new_tokens=2, return_dict_in_generate=True).past_key_values
        with pytest.raises(UnsupportedFamily, match="recurrent state"):
            cache.crop(-1)
        cache.session.close()
    else:
        pair.assert_equal(prompt.repeat(1, 2), max_new_tokens=12, prompt_lookup_num_tokens=4)
    if takes_embeddings(pair):
        embeddings = pair.remote.get_input_embeddings()(prompt)
        answered = pair.remote.generate(inputs_embeds=embeddings, max_new_tokens=6)
        expected = pair.unsplit.generate(inputs_embeds=pair.unsplit.get_input_embeddings()(prompt), max_new_tokens=6)
        assert answered.tolist() == expected.tolist()
    whole = pair.unsplit.generate(prompt, max_new_tokens=12, min_new_tokens=12)
    with pair.remote.inference_session() as session:
        parts = [
            pair.remote.generate(prompt, max_new_tokens=4, min_new_tokens=4),
            pair.remote.generate(max_new_tokens=8, min_new_tokens=8),
        ]
        assert torch.cat(parts, dim=1).tolist() == whole.tolist()
        session.position = 2
        again = pair.remote.generate(whole[:, 2:30], max_new_tokens=3, min_new_tokens=3)
        assert again.tolist() == whole[:, 2:33].tolist()
    with torch.no_grad():
        assert_passes_equal(pair)
        assert_embeddings_are_replaced(pair)
    pair.stack.until_empty()
    stacks.end()
