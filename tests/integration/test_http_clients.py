"""Clients that others wrote, each in a process of its own, and the OpenAPI document under a fuzzer."""

import asyncio

import httpx2
import pytest

from tests.http_clients import command_of, script, variables
from tests.integration.swarm import Swarm, tiny_swarm

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.full, pytest.mark.timeout(600)]

KEY = "a-key-of-the-clients"


swarm = tiny_swarm(
    ["0:2", "2:5"],
    context_length=4096,
    keys=f"clients:{KEY}\n",
    # Most of schemathesis' requests set no limit, and the random model seldom ends an answer by itself.
    client={"http_port": 0, "default_max_tokens": 64},
    api_key=KEY,
)


async def run(*arguments: str) -> None:
    """What the program says is shown where it fails."""
    process = await asyncio.create_subprocess_exec(
        *command_of(*arguments), env=variables(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()[-6000:]


@pytest.mark.parametrize("what", ["chats", "tools"])
@pytest.mark.parametrize(
    "package",
    ["anthropic", "openai", "langchain", "pydantic_ai", "litellm", "llm", "smolagents", "instructor", "guidance"],
)
async def test_a_client_finds_what_it_knows(swarm: Swarm, package: str, what: str) -> None:
    await run(script(package), swarm.url, KEY, what)


async def test_nothing_that_the_document_allows_is_a_fault(swarm: Swarm) -> None:
    async with httpx2.AsyncClient() as http:
        assert (await http.get(f"{swarm.url}/openapi.json")).json()["openapi"] == "3.1.0"
    await run(
        "-m", "schemathesis.cli", "run", f"{swarm.url}/openapi.json", "--header", f"Authorization: Bearer {KEY}",
        "--checks", "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
        "--max-examples", "10", "--request-timeout", "30", "--phases", "examples,coverage,fuzzing",
        "--generation-database", "none", "--seed", "1",
        "--exclude-path", "/v1/placement",  # a stream without an end
    )  # fmt: skip
