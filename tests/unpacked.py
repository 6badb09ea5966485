"""GGUF files as folders of float32 safetensors: what chains of such files are compared with.

transformers' own reader unpacks them. It takes header and numbers from the package `gguf`, so it shares no code with
the reader that serves them but what says which tensor is which.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from corolla.models.checkpoint import Checkpoint
from corolla.models.demo import demo_checkpoint
from corolla.models.loading import LOADING
from tests.run_folder import made_once


def unpacked_demo() -> Path:
    """The demo model's folder; made once in a test run, in some ten seconds."""
    return made_once("unpacked-demo", lambda folder: unpack(demo_checkpoint(), folder, end_token_ids=[2, 0]))


def unpack(file: Path, folder: Path, *, end_token_ids: Sequence[int]) -> None:
    """Writes a file's model with tokenizer and chat template to a folder that is not there yet.

    Args:
        end_token_ids: those that end an answer, which the file does not say, or not all of them.
    """
    # The tokenizer is the one that is served: transformers' own reader ignores how a vocabulary cuts texts.
    shutil.copytree(Checkpoint.from_pretrained(str(file)).folder, folder)
    library: Any = AutoModelForCausalLM
    read_gguf: Any = load_gguf_checkpoint
    # `from_pretrained(gguf_file=...)` would do these steps, but asks for one more package.
    with LOADING, _header_read_once():
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        with torch.device("meta"):
            empty = library.from_config(config)
        read = read_gguf(str(file), return_tensors=True, model_to_load=empty, torch_dtype=torch.float32)
        model = type(empty).from_pretrained(None, config=config, state_dict=read["tensors"], dtype=torch.float32)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=list(end_token_ids), pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder, max_shard_size="200MB")


@contextmanager
def _header_read_once() -> Iterator[None]:
    """Has transformers read a file's header once, and from a plain array.

    It reads the header twice, for the configuration and for the tensors, and slices numpy's `memmap` several times for
    each string of the vocabulary. So unpacking took 53 processor-seconds with 262,144 strings, and takes 18 now.
    """
    opened: Any = numpy.memmap
    with (
        mock.patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)),
        mock.patch.object(numpy, "memmap", lambda *given, **named: numpy.asarray(opened(*given, **named))),
    ):
        yield
