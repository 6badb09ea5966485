"""llama.cpp as a yardstick, where a Python with `llama-cpp-python` is at hand."""

import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.piped_process import PipedProcess
from benchmarks.timing import Timing
from corolla.models.demo import demo_checkpoint
from tests.run_folder import made_once

PYTHON_VARIABLE: Final = "LLAMA_CPP_PYTHON"
_PROCESS: Final = Path(__file__).with_name("llama_process.py")


def find_python() -> str | None:
    """A Python that has `llama_cpp`: the one that `LLAMA_CPP_PYTHON` names, or this one."""
    named = os.environ.get(PYTHON_VARIABLE)
    return named or (sys.executable if importlib.util.find_spec("llama_cpp") else None)


class LlamaCpp(PipedProcess):
    """A model in llama.cpp.

    Args:
        model: a GGUF file; None: the demo model, as float16.
    """

    def __init__(self, python: str, num_threads: int, model: Path | None = None) -> None:
        super().__init__([python, str(_PROCESS), str(model or demo_as("F16")), str(num_threads)])

    def answer(self, prompt_ids: Sequence[int], num_tokens: int) -> Timing:
        """Greedily; an end token does not end it."""
        started_s = time.perf_counter()
        seconds = self.ask({"prompt_ids": list(prompt_ids), "num_tokens": num_tokens})
        return Timing(started_s, tuple(started_s + each for each in seconds))

    def answers(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Timing:
        """Several at once, in one batch; the stamps are those of each of them."""
        started_s = time.perf_counter()
        seconds = self.ask({"prompts": [list(prompt) for prompt in prompts], "num_tokens": num_tokens})
        return Timing(started_s, tuple(started_s + each for each in seconds))


def demo_as(kind: str) -> Path:
    """The demo model's file with all matrices of another type, F16 or Q8_0."""
    return made_once(f"demo-{kind.lower()}.gguf", lambda path: _write_as(kind, demo_checkpoint(), path))


def _write_as(kind: str, source: Path, target: Path) -> None:
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            of_field = field.types[0]
            writer.add_key_value(
                field.name, field.contents(), of_field, field.types[-1] if len(field.types) > 1 else None
            )
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    wanted = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if numbers.ndim == 1:
            writer.add_tensor(tensor.name, numbers.astype(np.float32))
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(numbers, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
