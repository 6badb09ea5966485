"""Finds the tensors of a checkpoint that a model would leave over, although they could change its answers. Pure.

transformers only logs such tensors. A bias that the configuration does not mention, or scales of a quantisation that
nothing describes, would then be missing without a word.
"""

import re
from collections.abc import Iterable
from typing import Final

from corolla.chassis.errors import CheckpointError

# Masks and tables of positions that older releases of transformers saved, and that the code now computes.
_COMPUTED: Final = re.compile(
    r".*\b(rotary_emb\.inv_freq|inv_freq|position_ids|masked_bias|causal_mask|attn\.bias|attention\.bias"
    r"|embed_positions\.weights)"
)
# Scales of keys, values and scores for caches in 8 bits, which are not used here (docs/models.md).
_CACHE_SCALES: Final = re.compile(r".*\.((k|v|q|kv|prob)_scale|(k|v|q)_proj\.(output_scale|output_zero_point))")
# Parts next to a language model that no text reaches: those that see and hear, those that predict further tokens, and
# the head by which training judges an answer.
_OTHER_PARTS: Final = re.compile(
    r"(.*\.)?(mtp|mtp_layers|visual|vision_tower|vision_model|vision_embed_tokens|multi_modal_projector|mm_projector"
    r"|audio_tower|audio_model|embed_vision|embed_audio|v_head)\..*"
)


def refuse_leftovers(model: str, model_type: str, names: Iterable[str], ignored: Iterable[str] = ()) -> None:
    """Refuses tensors that a model does not use, except for those that change no answer.

    Args:
        names: the names of tensors that the model does not use.
        ignored: regular expressions of transformers for names that may be left over.

    Raises:
        CheckpointError: a tensor is left over.
    """
    patterns = [re.compile(each) for each in ignored]
    odd = [
        name
        for name in names
        if not (
            any(known.fullmatch(name) for known in (_COMPUTED, _CACHE_SCALES, _OTHER_PARTS))
            or any(each.search(name) for each in patterns)
        )
    ]
    if odd:
        raise CheckpointError(
            f"{model} holds {len(odd)} tensors that a {model_type} model with its configuration does not use, "
            f"{min(odd)} among them, so answers could be others than those it was made for; correct config.json, or "
            "give a checkpoint whose tensors it describes."
        )
