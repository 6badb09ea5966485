"""The devices that tests of GPUs run on: a GPU in half precision where there is one, and the CPU to rehearse them."""

import functools
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch

from corolla.block_server.settings import BlockServerSettings


@dataclass(frozen=True, slots=True)
class Device:
    """Where a test computes, and in which dtype.

    Attributes:
        name: a name that torch knows.
        dtype: the name of the dtype.
    """

    name: str
    dtype: str

    @property
    def is_gpu(self) -> bool:
        return self.name.startswith("cuda")

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of a block server on it; several share it, so each has a bounded cache."""
        return {"device": self.name, "dtype": self.dtype, "kv_cache_mib": 64}

    @property
    def page_tokens(self) -> int:
        return BlockServerSettings.model_validate(self.settings).num_page_tokens

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "float32" else torch.bfloat16


def on(*devices: Device) -> pytest.MarkDecorator:
    """Runs a test on a GPU, with the mark `gpu` and skipped without one; and on the CPU, with the mark `full`."""
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
    cases = [
        pytest.param(each, marks=[pytest.mark.gpu, missing] if each.is_gpu else pytest.mark.full, id=each.name)
        for each in devices
    ]
    return pytest.mark.parametrize("device", cases)


on_half_precision: Final = functools.partial(on, Device("cuda", "bfloat16"), Device("cpu", "float32"))
on_float32: Final = functools.partial(on, Device("cuda", "float32"), Device("cpu", "float32"))
