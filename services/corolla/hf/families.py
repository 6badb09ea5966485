"""A class for each family, made from the table of families: `LlamaForCausalLM` gives `DistributedLlamaForCausalLM`."""

from typing import Final

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from corolla.hf.modeling import DistributedModelForCausalLM
from corolla.models.families import FAMILIES

PREFIX: Final = "Distributed"


def _make(model_type: str) -> type[DistributedModelForCausalLM]:
    name = PREFIX + MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    facts = {
        "model_type": model_type,
        "__module__": __name__,
        "__doc__": f"A causal language model of the family `{model_type}` whose blocks are remote.",
    }
    return type(name, (DistributedModelForCausalLM,), facts)


MODEL_CLASSES: Final = {model_type: _make(model_type) for model_type in FAMILIES}
"""By `config.model_type`."""

CLASSES_BY_NAME: Final = {model_class.__name__: model_class for model_class in MODEL_CLASSES.values()}
