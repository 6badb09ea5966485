"""Corolla serves one language model from many machines.

`from corolla import Client` imports the Python client. `AsyncClient` is the client for asyncio; `errors` has the
exceptions of both. The names of the library, such as `AutoDistributedModelForCausalLM`, come from `corolla.hf`, with a
class for each family; they need torch and transformers.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corolla.chassis import errors as errors
    from corolla.hf import AutoDistributedModelForCausalLM as AutoDistributedModelForCausalLM
    from corolla.hf import DistributedModelForCausalLM as DistributedModelForCausalLM
    from corolla.hf import InferenceSession as InferenceSession
    from corolla.hf import RemoteBlocks as RemoteBlocks
    from corolla.hf import RemoteGenerationMixin as RemoteGenerationMixin
    from corolla.hf import RemoteModelForCausalLM as RemoteModelForCausalLM
    from corolla.hf import RemotePastKeyValues as RemotePastKeyValues
    from corolla.sdk.async_client import AsyncClient as AsyncClient
    from corolla.sdk.client import Client as Client

__version__ = "0.2.0"
__all__ = [
    "AsyncClient",
    "AutoDistributedModelForCausalLM",
    "Client",
    "DistributedModelForCausalLM",
    "InferenceSession",
    "RemoteBlocks",
    "RemoteGenerationMixin",
    "RemoteModelForCausalLM",
    "RemotePastKeyValues",
    "__version__",
    "errors",
]

# If torchao is installed, transformers imports it, and torchao warns about kernels for devices that are not there.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)

# `__getattr__` imports these names at first use, so that services and `corolla --help` do not wait for them.
_MODULES = {name: "corolla.hf" for name in __all__ if name != "__version__"} | {
    "AsyncClient": "corolla.sdk.async_client",
    "Client": "corolla.sdk.client",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("corolla.chassis.errors")
    # Only the library knows the names of families' classes, such as `DistributedLlamaForCausalLM`.
    module_name = _MODULES.get(name, "corolla.hf" if name.startswith("Distributed") else None)
    if module_name is None or not hasattr(module := import_module(module_name), name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
