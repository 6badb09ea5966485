"""A caller whose machine stops for a moment keeps its answer."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from corolla.local.options import StackOptions
from corolla.local.stack import Stack
from corolla.sdk.client import Client
from tests.checkpoints import make_tiny_checkpoint

PROMPT = "the thin man"
OPTIONS: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True}
# Longer than a service takes to give up another service.
PAUSE_S = 3.5
CALLER = """
import json, sys
from corolla.sdk.client import Client
with Client(sys.argv[1]) as client:
    for chunk in client.stream(sys.argv[2], **json.loads(sys.argv[3])):
        print(json.dumps(list(chunk.token_ids)), flush=True)
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("callers")
    model = make_tiny_checkpoint("llama", folder / "tiny", config_changes={"max_position_embeddings": 8192})
    stack = Stack(StackOptions(model=str(model), blocks="0:5", log_folder=folder, restarts=False))
    stack.start()
    yield stack
    stack.stop()


@pytest.mark.full
def test_an_answer_goes_on_after_its_caller_was_frozen(stack: Stack) -> None:
    with Client(stack.client_address) as client:
        expected = client.generate(PROMPT, **OPTIONS).token_ids
    command = [sys.executable, "-c", CALLER, stack.client_address, PROMPT, json.dumps(OPTIONS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        assert caller.stderr is not None
        lines = [caller.stdout.readline() for _ in range(50)]
        for _ in range(2):
            caller.send_signal(signal.SIGSTOP)
            time.sleep(PAUSE_S)
            caller.send_signal(signal.SIGCONT)
            lines += [caller.stdout.readline() for _ in range(50)]
        # `communicate` would not see what was buffered by reading lines.
        lines += caller.stdout.readlines()
        complaint = caller.stderr.read()
    assert caller.returncode == 0, complaint
    received = [token_id for line in lines for token_id in json.loads(line)]
    assert received == list(expected)
