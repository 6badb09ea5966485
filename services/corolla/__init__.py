"""Corolla serves one language model from many machines.

`from corolla import Client` imports the Python client. `AsyncClient` is the client for asyncio; `errors` has the
exceptions of both.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corolla.chassis import errors as errors
    from corolla.sdk.async_client import AsyncClient as AsyncClient
    from corolla.sdk.client import Client as Client

__version__ = "0.2.0"
__all__ = ["AsyncClient", "Client", "__version__", "errors"]

# If torchao is installed, transformers imports it, and torchao warns about kernels for devices that are not there.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)

# `__getattr__` imports these names at first use, so that services and `corolla --help` do not wait for them.
_PLACES = {
    "AsyncClient": ("corolla.sdk.async_client", "AsyncClient"),
    "Client": ("corolla.sdk.client", "Client"),
    "errors": ("corolla.chassis.errors", None),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, attribute = _PLACES[name]
    module = import_module(module_name)
    return module if attribute is None else getattr(module, attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
