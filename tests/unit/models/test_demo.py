"""The demo model is converted once, whole or not at all, and speaks."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from corolla.chassis.errors import CheckpointError
from corolla.models.cache_folder import default_cache_folder
from corolla.models.checkpoint import Checkpoint
from corolla.models.demo import demo_checkpoint
from corolla.models.loading import LOADING

CONVERT = "import sys, pathlib; from corolla.models.demo import demo_checkpoint; "
CONVERT += "print(demo_checkpoint(pathlib.Path(sys.argv[1]), lambda *_: print('converting', flush=True)), flush=True)"

# No file may grow past this: a full disk, as far as a process can tell.
WITHOUT_ROOM = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "


def start(cache_folder: Path, prelude: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", prelude + CONVERT, str(cache_folder)]
    return subprocess.Popen(command, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def demo() -> Checkpoint:
    return Checkpoint.from_pretrained("demo")


@pytest.mark.model
def test_the_demo_model_knows_the_capital_of_france(demo: Checkpoint) -> None:
    library: Any = AutoModelForCausalLM
    with LOADING:
        model = library.from_pretrained(demo.folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(demo.folder)
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
    assert int(answer[-1]) == 2, "the end of the turn ends the generation"


@pytest.mark.model
def test_digits_are_tokens_of_their_own(demo: Checkpoint) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(demo.folder)
    assert tokenizer.tokenize("In 1984, 12+345") == [
        "In",
        "Ġ",
        "1",
        "9",
        "8",
        "4",
        ",",
        "Ġ",
        "1",
        "2",
        "+",
        "3",
        "4",
        "5",
    ]


@pytest.mark.model
def test_the_demo_model_is_a_plain_sharded_checkpoint(demo: Checkpoint) -> None:
    assert (demo.num_blocks, demo.hidden_size, demo.vocab_size, demo.context_length) == (30, 576, 49152, 8192)
    assert len(set(demo.weight_index.values())) >= 5
    assert not hasattr(demo.config, "quantization_config")
    assert demo.config.dtype == torch.float32
    assert {stat.S_IMODE(path.stat().st_mode) for path in demo.folder.iterdir()} == {0o644}


@pytest.mark.model
@pytest.mark.full
def test_an_interrupted_conversion_leaves_nothing_and_two_at_once_make_one(tmp_path: Path) -> None:
    models = tmp_path / "models"
    interrupted = start(tmp_path)
    assert interrupted.stdout is not None
    interrupted.stdout.readline()
    deadline = time.monotonic() + 60
    while not list(models.glob(".*.building-*/tokenizer.json")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    interrupted.kill()
    interrupted.communicate()
    assert [path for path in models.iterdir() if not path.name.startswith(".")] == []

    outputs = [process.communicate(timeout=240) for process in (start(tmp_path), start(tmp_path))]
    folders = {printed.split()[-1] for printed, _ in outputs}
    assert len(folders) == 1
    assert sum("converting" in printed for printed, _ in outputs) == 1
    assert list(models.glob(".*.building-*")) == []
    made = Checkpoint.from_pretrained(folders.pop())
    assert made.fingerprint("float32") == Checkpoint.from_pretrained("demo").fingerprint("float32")


@pytest.mark.model
@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
@pytest.mark.full
def test_a_full_disk_is_reported_and_cleaned_up(tmp_path: Path) -> None:
    _, errors = start(tmp_path, WITHOUT_ROOM).communicate(timeout=120)
    assert "CheckpointError: The demo model cannot be written" in errors
    assert "set COROLLA_CACHE to another folder" in errors
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


def test_a_cache_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written to .*; free .* or set COROLLA_CACHE"):
        demo_checkpoint(tmp_path / "file")


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"COROLLA_CACHE": "/own", "XDG_CACHE_HOME": "/shared"}, "/own"),
        ({"XDG_CACHE_HOME": "/shared"}, "/shared/corolla"),
        ({}, "/home/somebody/.cache/corolla"),
    ],
)
def test_the_cache_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("COROLLA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert default_cache_folder() == Path(expected)
