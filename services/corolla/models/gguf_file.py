"""A GGUF file as a model of transformers: its reader's tensors, all expanded to float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from corolla.models.loading import LOADING


def read_model(gguf: Path, amend: Callable[[Any], None]) -> Any:
    """The whole model, in memory.

    Args:
        amend: changes what the file says wrongly in the configuration, before the model is made of it.

    Raises:
        ImportError: torch or the package `gguf` is not installed.
    """
    # Imported late: callers that find the model converted need not wait for it.
    import torch
    import transformers
    from transformers import AutoConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # Untyped in transformers.
    read_gguf: Any = load_gguf_checkpoint
    library: Any = transformers

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The weights will be plain float32; nothing may say that they are quantised.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    amend(config)
    # `from_pretrained(gguf_file=...)` would do the next three steps, but asks for one more package.
    with LOADING:
        with torch.device("meta"):
            empty = library.AutoModelForCausalLM.from_config(config)
        read = read_gguf(str(gguf), return_tensors=True, model_to_load=empty, torch_dtype=torch.float32)
        return type(empty).from_pretrained(None, config=config, state_dict=read["tensors"], dtype=torch.float32)
