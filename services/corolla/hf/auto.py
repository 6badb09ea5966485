"""The class for whatever family a checkpoint is of."""

from typing import Any

from transformers import PretrainedConfig

from corolla.hf.families import MODEL_CLASSES
from corolla.hf.modeling import DistributedModelForCausalLM
from corolla.models.checkpoint import Checkpoint
from corolla.models.families import family_of


class AutoDistributedModelForCausalLM:
    """Makes the distributed class of a checkpoint's family; it has no instances of its own."""

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__name__} is made by `from_pretrained` or `from_config`.")

    @staticmethod
    def from_pretrained(name_or_path: str, **options: Any) -> DistributedModelForCausalLM:
        """See `DistributedModelForCausalLM.from_pretrained`.

        Raises:
            UnsupportedFamily: no row of the table of families serves it.
        """
        checkpoint = Checkpoint.open(name_or_path, revision=options.get("revision"))
        return MODEL_CLASSES[checkpoint.family.model_type].from_pretrained(name_or_path, **options)

    @staticmethod
    def from_config(config: PretrainedConfig, **options: Any) -> DistributedModelForCausalLM:
        """See `DistributedModelForCausalLM.from_config`."""
        return MODEL_CLASSES[family_of(config).model_type].from_config(config, **options)
