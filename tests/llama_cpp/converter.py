"""llama.cpp's converter from checkpoints to GGUF files, at the version of `requirements/llama-cpp.txt`.

It comes with its own edition of the package `gguf`, which is newer than the one that Corolla needs; no other code of
this process sees that edition.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest import mock

import torch

SOURCES: Final = Path(os.environ.get("COROLLA_CONVERTER", Path(sys.prefix) / "converter"))
_OWN: Final = "gguf"
_loaded: dict[str, ModuleType] = {}


@contextlib.contextmanager
def _own_packages() -> Iterator[None]:
    def taken() -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == _OWN}

    assert SOURCES.exists(), "llama.cpp's converter is not there; run: make converter"
    others = taken()
    sys.modules.update(_loaded)
    sys.path.insert(0, str(SOURCES))
    try:
        with mock.patch.dict(os.environ, {"NO_LOCAL_GGUF": "1"}):
            yield
    finally:
        sys.path.remove(str(SOURCES))
        _loaded.update(taken())
        sys.modules.update(others)


def convert(folder: Path, path: Path, pre: str, published: Mapping[str, Any]) -> None:
    """Writes the GGUF file of a checkpoint, with matrices in float32.

    Args:
        pre: llama.cpp's name of the way in which the tokenizer splits a text, which it tells by the tokens of a text.
        published: fields that config.json would have in a published checkpoint of this kind.
    """
    with _own_packages(), torch.inference_mode():
        import gguf
        from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
        from conversion.base import logger

        logger.setLevel(logging.ERROR)
        settings = {**ModelBase.load_hparams(folder, False), **published}
        converter: Any = get_model_class(get_model_architecture(settings, ModelType.TEXT))
        model = converter(folder, gguf.LlamaFileType.ALL_F32, path, eager=True, hparams=settings)
        # Some models are converted by another object.
        model = getattr(model, "impl", model)
        model.get_vocab_base_pre = lambda tokenizer: pre
        # Some ways look for a file of sentencepiece, which tiny checkpoints lack.
        model.set_vocab = model._set_vocab_gpt2
        model.write()
