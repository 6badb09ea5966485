"""What each layer sees comes from the family's own code, whatever its configuration says by names that it ignores."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from corolla.chassis.errors import CheckpointError
from corolla.models.empty_model import cut_class, model_class_of, without_weights
from corolla.models.families import FAMILIES, Family, num_blocks
from corolla.models.span_model import cut_to_span
from corolla.models.visible_tokens import attention_windows
from corolla.wire.span import Span
from tests.checkpoints import make_long_rope_checkpoint, tiny_config
from tests.families import family_cases

WINDOW = 12
# What configurations may say, by which some families compute and others do not.
PLANTED: Mapping[str, Mapping[str, Any]] = {
    "nothing": {},
    "a window": {"sliding_window": WINDOW},
    "a window in use": {"sliding_window": WINDOW, "use_sliding_window": True},
    "a window without its kinds": {"sliding_window": WINDOW, "layer_types": ["full_attention"] * 5},
    "kinds with a window": {"sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 5},
    "chunks": {"attention_chunk_size": WINDOW},
    "kinds with chunks": {"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention"] * 5},
    "another window": {"window_size": WINDOW, "attention_window": WINDOW},
    "recurrent kinds": {"layer_types": ["conv", "full_attention", "conv", "conv", "linear_attention"]},
    "not causal": {"is_causal": False},
    "bidirectional": {"use_bidirectional_attention": True},
    "all bidirectional": {"use_bidirectional_attention": "all"},
    "no decoder": {"is_decoder": False},
}
TOKENS: Mapping[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
NUM_TOKENS = 3 * WINDOW


def empty_base(config: PretrainedConfig, family: Family) -> PreTrainedModel:
    """The blocks of the base model, without weights."""
    cut_to = functools.partial(cut_to_span, family=family, span=Span(0, num_blocks(config)))
    return without_weights(cut_class(model_class_of(AutoModel, config), cut_to), config)


@torch.inference_mode()
def seen_in_one_block(family: str, changes: Mapping[str, Any]) -> torch.Tensor:
    """Whether a token of the unsplit model sees another one: bool `[tokens, tokens]`, by changing that one.

    One block only, since each further one lets a token see farther.
    """
    config = tiny_config(family, num_blocks=1, **TOKENS, **changes)
    library: Any = AutoModelForCausalLM
    torch.manual_seed(0)
    model = library.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.normal_(0.0, 0.7 * parameter.shape[-1] ** -0.5)
    ids = torch.randint(10, 300, (1, NUM_TOKENS)).repeat(NUM_TOKENS + 1, 1)
    seen = torch.zeros(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool)
    for step in (7, 11):
        changed = ids.clone()
        changed[range(1, NUM_TOKENS + 1), range(NUM_TOKENS)] += step
        logits = model(changed, use_cache=False).logits
        # Experts round as the number of their tokens has it.
        seen |= ((logits[1:] - logits[:1]).abs().amax(dim=-1) > 1e-6 * logits.abs().max()).T
    return seen


@pytest.mark.parametrize("family", family_cases(kept=("llama", "gemma2", "bloom")))
def test_windows_are_those_of_the_familys_own_masks(family: str) -> None:
    served = 0
    for planted, changes in PLANTED.items():
        if "layer_types" in changes and FAMILIES[family].past.keeps_states:
            continue  # these families' kinds of layers are modules of their own
        # `tiny_config` may refuse a field itself: then no checkpoint has it.
        try:
            config = tiny_config(family, **TOKENS, **changes)
        except Exception:
            continue
        try:
            base = empty_base(config, FAMILIES[family])
            (window,) = set(attention_windows(base, FAMILIES[family])[:1])
        except CheckpointError:
            assert planted != "nothing"
            continue
        served += 1
        # The last block of gemma4_text, which is the only one here, has no window.
        past = FAMILIES[family].past
        if past.keeps_states or past.picks_tokens or family in ("gpt_neo", "doge", "gemma4_text"):
            continue
        first = {name: value[:1] if name == "layer_types" else value for name, value in changes.items()}
        seen = seen_in_one_block(family, first)
        distance = torch.arange(NUM_TOKENS)[:, None] - torch.arange(NUM_TOKENS)
        expected = (distance >= 0) & (distance < (window or NUM_TOKENS))
        if family == "llama4_text" and window is not None:
            chunks = torch.arange(NUM_TOKENS) // window
            expected &= chunks[:, None] == chunks
        assert torch.equal(seen, expected), (planted, window, (seen != expected).nonzero())
    assert served


def test_rotary_embeddings_may_look_at_the_positions(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(make_long_rope_checkpoint("phimoe", tmp_path / "tiny"))
    base = empty_base(config, FAMILIES["phimoe"])
    assert len(attention_windows(base, FAMILIES["phimoe"])) == config.num_hidden_layers
