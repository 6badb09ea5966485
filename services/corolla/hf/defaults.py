"""The generation defaults of a checkpoint over remote blocks: a file is followed as far as possible, never refused."""

import logging
from collections.abc import Callable
from typing import Final

from transformers import GenerationConfig

from corolla.models.checkpoint import Checkpoint

log = logging.getLogger(__name__)

# They change what `generate` returns or how it computes, but no token.
_WITHOUT_EFFECT_ON_TEXT: Final = frozenset(
    {
        "cache_config", "cache_implementation", "compile_config", "continuous_batching_config", "disable_compile",
        "low_memory", "output_attentions", "output_hidden_states", "output_logits", "output_scores",
        "prefill_chunk_size", "return_dict_in_generate", "transformers_version", "use_cache",
    }
)  # fmt: skip


def served_defaults(checkpoint: Checkpoint, is_served: Callable[[str], bool]) -> GenerationConfig:
    """The checkpoint's generation defaults without options that are not served, so that only a caller's are refused.

    A warning names the options left out that would change the text.

    Args:
        is_served: whether an option of a generation config is served.

    Raises:
        CheckpointError: `generation_config.json` cannot be read.
    """
    config, usual = checkpoint.generation_config(), GenerationConfig()
    # transformers would derive a config that is marked so anew from the model's configuration.
    config._from_model_config = None
    defaults = GenerationConfig._get_default_generation_params()
    left_out: list[str] = []
    for name, value in config.to_dict().items():
        if name.startswith("_") or is_served(name) or value in (None, False, defaults.get(name)):
            continue
        setattr(config, name, getattr(usual, name, None))
        if name not in _WITHOUT_EFFECT_ON_TEXT:
            left_out.append(name)
    if config.use_cache is False:
        config.use_cache = None
    if left_out:
        log.warning(
            "generation_config.json asks for %s, which remote blocks do not support: answers go without",
            ", ".join(sorted(left_out)),
        )
    return config
