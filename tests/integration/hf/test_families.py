"""Every family: the distributed model chooses the unsplit model's tokens, with every decoding strategy."""

import inspect
from pathlib import Path

import pytest
import torch

from corolla.chassis.errors import UnsupportedFamily
from tests.checkpoints import RECURRENT_FAMILIES, make_tiny_checkpoint
from tests.families import family_cases
from tests.integration.hf.models import ModelPair, draw_prompts, left_padding
from tests.integration.hf.stacks import Stacks

SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2}


def takes_embeddings(pair: ModelPair) -> bool:
    """Whether the family's own `generate` takes embeddings, by the library's own rule."""
    return "inputs_embeds" in inspect.signature(pair.unsplit.prepare_inputs_for_generation).parameters


@pytest.mark.parametrize("family", family_cases(kept=("deepseek_v3", "gemma2", "qwen3_next")))
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
    pair.stack.until_empty()
    stacks.end()
