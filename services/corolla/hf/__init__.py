"""The Python library: `generate()` of transformers over blocks that block servers compute.

Each family has two classes here, such as `DistributedLlamaForCausalLM` and `DistributedLlamaForSpeculativeGeneration`;
the second one drafts tokens.
"""

from typing import TYPE_CHECKING, Any

from corolla.hf.blocks import RemoteBlocks
from corolla.hf.cache import RemotePastKeyValues
from corolla.hf.families import CLASSES_BY_NAME, AutoDistributedModelForCausalLM
from corolla.hf.generation import RemoteGenerationMixin
from corolla.hf.modeling import DistributedModelForCausalLM
from corolla.hf.remote_model import RemoteModelForCausalLM
from corolla.hf.session import InferenceSession
from corolla.hf.speculative import SPECULATIVE_CLASSES_BY_NAME

globals().update(CLASSES_BY_NAME | SPECULATIVE_CLASSES_BY_NAME)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


__all__ = [
    "AutoDistributedModelForCausalLM",
    "DistributedModelForCausalLM",
    "InferenceSession",
    "RemoteBlocks",
    "RemoteGenerationMixin",
    "RemoteModelForCausalLM",
    "RemotePastKeyValues",
    *CLASSES_BY_NAME,
    *SPECULATIVE_CLASSES_BY_NAME,
]
