"""Claude Code, Anthropic's coding agent, at the real HTTP door; its binary comes by npm (`make claude-code`)."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from corolla.client.generation.answering import Answering
from corolla.client.output_parsing.deltas import Delta
from corolla.decoding.stopping import FinishReason
from corolla.v1 import router_pb2
from tests.architecture.sources import ROOT
from tests.integration.swarm import Swarm, tiny_swarm

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.full, pytest.mark.timeout(600)]

KEY: Final = "a-key-of-claude-code"
CONTEXT_LENGTH: Final = 32768
BINARIES: Final = ROOT / ".venv" / "claude-code" / "node_modules" / "@anthropic-ai"
TOOLS: Final = ("--tools", "Read,Edit,Write,Bash,Agent,Skill")
WRONG: Final = "def add(a, b):\n    return a - b\n\n\nprint('sum:', add(20, 3))\n"

swarm = tiny_swarm(
    ["0:2", "2:5"], context_length=CONTEXT_LENGTH, keys=f"coder:{KEY}\n", client={"http_port": 0},
    server={"kv_cache_mib": 512}, api_key=KEY,
)  # fmt: skip


class Trap:
    """A proxy for all other hosts, which notes what requests ask for, and refuses all of them."""

    def __init__(self) -> None:
        self.wanted: list[bytes] = []

    async def refuse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.wanted.append(await reader.readline())
        writer.close()


@asynccontextmanager
async def trap() -> AsyncIterator[tuple[Trap, str]]:
    laid = Trap()
    server = await asyncio.start_server(laid.refuse, "127.0.0.1", 0)
    async with server:
        yield laid, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def claude(swarm: Swarm, folder: Path, *arguments: str, **variables: str) -> dict[str, Any]:
    """What Claude Code says in the end. It wants to go nowhere else."""
    (binary,) = BINARIES.glob("claude-code-*/claude")
    (folder / "home").mkdir(exist_ok=True)
    async with trap() as (laid, proxy):
        environment: Mapping[str, str] = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder / "home"),
            "HTTP_PROXY": proxy,
            "HTTPS_PROXY": proxy,
            "NO_PROXY": "127.0.0.1",
            "ANTHROPIC_BASE_URL": swarm.url,
            "ANTHROPIC_API_KEY": KEY,
            "ANTHROPIC_MODEL": "tiny",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            **variables,
        }
        process = await asyncio.create_subprocess_exec(
            binary, "-p", *arguments, "--output-format", "json",
            cwd=folder, env=environment,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        said, complaints = await process.communicate()
        assert laid.wanted == []
    assert said, complaints.decode()[-4000:]
    found: dict[str, Any] = json.loads(said)
    return found


def markup(name: str, **arguments: Any) -> str:
    """A call as a model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_it_reads_edits_and_checks_a_file(swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model would write is given; all around that is real, and so are the file and the command."""
    file = tmp_path / "sum.py"
    file.write_text(WRONG)
    path = str(file)
    script = [
        "I read it.\n" + markup("Read", file_path=path),
        markup("Edit", file_path=path, old_string="a - b", new_string="a + b"),
        markup("Bash", command=f"python {path}", description="Runs it"),
        "It adds now.",
    ]
    heard: list[list[str]] = []

    async def scripted(
        self: Answering, request: Any, next_prompt: Any, record_turn: Any
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        _, prompt_ids = await asyncio.to_thread(next_prompt, router_pb2.SessionRecord())
        results = ["".join(each.content) for each in request.prompt.messages if each.role == "tool"]
        heard.append(results)
        request.caller.usage.prompt_tokens = len(prompt_ids)
        parser = request.output_parsing.parser(self.factory.tokenizer, prompt_ids, "")
        written = script[len(results)]
        for start in range(0, len(written), 7):
            parsed = parser.push(written[start : start + 7])
            yield 0, parsed
        parsed = parser.finish(is_cut=False)
        reason = FinishReason.TOOL_CALLS if parser.num_calls else FinishReason.EOS
        yield 0, replace(parsed, finish_reason=reason)

    monkeypatch.setattr(Answering, "answer", scripted)
    ended = await claude(swarm, tmp_path, "Make sum.py add.", "--allowedTools", "Read,Edit,Bash")
    assert ended["result"] == "It adds now.", ended
    assert file.read_text() == WRONG.replace("a - b", "a + b")
    first, read, edited, run = heard
    assert first == []
    assert "return a - b" in read[0]
    assert len(edited) == 2
    assert run[2].strip() == "sum: 23"


async def test_its_prompt_streams_through_a_model_with_room_for_it(swarm: Swarm, tmp_path: Path) -> None:
    """The random model does not end its answer, so Claude Code asks it to go on, and its prompt is known then."""
    ended = await claude(swarm, tmp_path, "Who is the thin man?", *TOOLS, CLAUDE_CODE_MAX_OUTPUT_TOKENS="8")
    assert ended["api_error"] == "max_output_tokens", ended
    usage, num_prompts = ended["usage"], ended["num_turns"]
    num_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert 20_000 < num_tokens / num_prompts < CONTEXT_LENGTH
    assert usage["output_tokens"] == 8 * num_prompts
    assert usage["cache_read_input_tokens"] > num_tokens / 2


async def test_a_prompt_without_room_is_refused_in_words_that_it_knows(swarm: Swarm, tmp_path: Path) -> None:
    ended = await claude(swarm, tmp_path, "Who is the thin man?")
    assert ended["terminal_reason"] == "prompt_too_long", ended
    assert f"limit {CONTEXT_LENGTH}" in ended["result"]
