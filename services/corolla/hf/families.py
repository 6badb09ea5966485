"""Makes a class for each family in the table of families, such as `DistributedLlamaForCausalLM`."""

from typing import Any, Final, Literal, overload

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from corolla.hf.modeling import DistributedModelForCausalLM
from corolla.hf.remote_model import RemoteModelForCausalLM
from corolla.models.checkpoint import Checkpoint
from corolla.models.families import FAMILIES, family_of

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
"""The classes by `config.model_type`."""

CLASSES_BY_NAME: Final = {model_class.__name__: model_class for model_class in MODEL_CLASSES.values()}


class AutoDistributedModelForCausalLM:
    """Loads checkpoints as models of their family's distributed class. This class itself has no instances."""

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__name__} is made by `from_pretrained` or `from_config`.")

    @overload
    @staticmethod
    def from_pretrained(
        name_or_path: str, *, edges: Literal["local"] = "local", **options: Any
    ) -> DistributedModelForCausalLM: ...

    @overload
    @staticmethod
    def from_pretrained(name_or_path: str, *, edges: Literal["remote"], **options: Any) -> RemoteModelForCausalLM: ...

    @staticmethod
    def from_pretrained(
        name_or_path: str, *, edges: Literal["local", "remote"] = "local", **options: Any
    ) -> DistributedModelForCausalLM | RemoteModelForCausalLM:
        """See `DistributedModelForCausalLM.from_pretrained`.

        Args:
            edges: where embedding, head and sampling run; `remote` returns a `RemoteModelForCausalLM`, without weights.

        Raises:
            UnsupportedFamily: the table of families does not have the checkpoint's family.
            ValueError: `edges` is neither `local` nor `remote`.
        """
        if edges == "remote":
            return RemoteModelForCausalLM.from_pretrained(name_or_path, **options)
        if edges != "local":
            raise ValueError("`edges` must be `local` or `remote`.")
        checkpoint = Checkpoint.from_pretrained(name_or_path, revision=options.get("revision"))
        return MODEL_CLASSES[checkpoint.family.model_type].from_pretrained(name_or_path, **options)

    @staticmethod
    def from_config(config: PretrainedConfig, **options: Any) -> DistributedModelForCausalLM:
        """See `DistributedModelForCausalLM.from_config`."""
        return MODEL_CLASSES[family_of(config).model_type].from_config(config, **options)
