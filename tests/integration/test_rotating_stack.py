"""Leaves and authority are replaced again and again under the answers of a stack of processes, and keys revoked.

Certificates live for three periods only. `COROLLA_TEST_ROTATIONS` and `COROLLA_TEST_STREAMS` make it longer and wider:
15 rotations of 20 s are five minutes.
"""

import asyncio
import datetime
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
import pytest_asyncio

from corolla.chassis.errors import Unauthenticated
from corolla.local.log_files import LogFile
from corolla.local.ports import Ports
from corolla.local.processes import ManagedProcess, client_process
from corolla.sdk.async_client import AsyncClient
from corolla.trust import loopback
from corolla.trust.authority import Authority
from corolla.trust.workload import Role
from corolla.v1 import router_pb2, router_pb2_grpc
from corolla.wire.network import Network
from corolla.wire.stream import Receiver, Stream
from tests.checkpoints import make_tiny_checkpoint
from tests.faults.stand import NUM_BLOCKS, TINY_SPANS, Stand, standing
from tests.identities import Identities
from tests.integration.metrics import sample
from tests.integration.waiting import until
from tests.reference import Sampling, Unsplit

NUM_ROTATIONS: Final = int(os.environ.get("COROLLA_TEST_ROTATIONS", "2"))
NUM_STREAMS: Final = int(os.environ.get("COROLLA_TEST_STREAMS", "8"))
PERIOD_S: Final = 20.0
LIFE: Final = datetime.timedelta(seconds=3 * PERIOD_S)
TAKEN_S: Final = 8.0
"""Every process has taken a change by then, and all that stands goes on with it."""
OUT_S: Final = 10.0
"""Within which who is not believed any more is out."""
NUM_TOKENS: Final = 192
NUM_QUESTIONS: Final = 16
_SAMPLED: Final[Sampling] = {"temperature": 0.9, "top_p": 0.95, "seed": 5}

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.full,
    pytest.mark.timeout(300 + NUM_ROTATIONS * PERIOD_S),
]


@dataclass
class Place:
    """A stack, two client services of it, and its certificates.

    Attributes:
        expected: the unsplit model's answers, by the numbers of the questions.
    """

    stand: Stand
    services: Sequence[ManagedProcess]
    identities: Identities
    believed: bytes
    expected: list[list[int]]

    async def rotate(self) -> None:
        """Other certificates of another authority for all; the old one is worth nothing at the end."""
        new = Authority()
        self.identities.believe_pem(self.believed, new.certificate_pem)
        await asyncio.sleep(TAKEN_S)
        self.identities.replace(new, datetime.datetime.now(datetime.UTC) + LIFE)
        await asyncio.sleep(TAKEN_S)
        self.identities.believe(new)
        self.believed = new.certificate_pem

    def num_unbelieved(self) -> int:
        """Streams, watches and calls that any process has ended or lost since a certificate counted no longer."""
        logs = [each.log.path.read_text() for each in self.stand.stack.processes]
        return sum(text.count(Unauthenticated.reason) for text in logs)

    async def num_recoveries(self) -> float:
        """Of both client services."""
        counted = [await sample(each.metrics_port, "corolla_session_recoveries_total") for each in self.services]
        return sum(counted)


def question(number: int) -> tuple[list[int], Sampling]:
    """Of a caller: greedy, or sampled with a seed."""
    return [1, 2, 3 + number % NUM_QUESTIONS], _SAMPLED if number % 4 == 3 else {}


def answers(model: Path) -> list[list[int]]:
    unsplit = Unsplit(model)
    return [
        unsplit.generate(prompt_ids, NUM_TOKENS, sampling, ignore_eos=True).token_ids
        for prompt_ids, sampling in map(question, range(NUM_QUESTIONS))
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("rotation")
    changes = {"max_position_embeddings": 8192}
    model = make_tiny_checkpoint("llama", folder / "tiny", num_blocks=NUM_BLOCKS, config_changes=changes)
    expected = await asyncio.to_thread(answers, model)
    async with standing(str(model), TINY_SPANS) as stand:
        service = await stand.add_service()
        operator = loopback.tls_dir(stand.stack.router_address, Role.OPERATOR)
        assert operator is not None
        identities = Identities.found_in(operator.parent)
        believed = (operator / "ca.crt").read_bytes()
        place = Place(stand, (stand.service, service), identities, believed, expected)
        await place.rotate()
        yield place


@dataclass
class Callers:
    """They ask for the same again and again.

    Attributes:
        longest_s: between a token and the next, during each rotation.
        first_s: until the first token of an answer, at most.
    """

    place: Place
    is_over: bool = False
    num_answers: int = 0
    longest_s: list[float] = field(default_factory=list)
    first_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    async def run(self, number: int) -> None:
        prompt_ids, sampling = question(number)
        async with AsyncClient(self.place.services[number % 2].address) as client:
            while not self.is_over:
                token_ids: list[int] = []
                heard_s = time.monotonic()
                stream = client.stream(prompt_ids, max_tokens=NUM_TOKENS, ignore_eos=True, **sampling)
                async for chunk in stream:
                    self._note(time.monotonic() - heard_s, is_first=not token_ids)
                    heard_s = time.monotonic()
                    token_ids += chunk.token_ids
                if token_ids != self.place.expected[number % NUM_QUESTIONS]:
                    self.wrong.append(f"caller {number}: {token_ids}")
                self.num_answers += 1

    def _note(self, waited_s: float, *, is_first: bool) -> None:
        if is_first:
            self.first_s = max(self.first_s, waited_s)
        else:
            self.longest_s[-1] = max(self.longest_s[-1], waited_s)


async def test_answers_go_on_while_all_certificates_are_replaced(place: Place) -> None:
    callers, num_unbelieved = Callers(place), place.num_unbelieved()
    async with asyncio.TaskGroup() as tasks:
        for number in range(NUM_STREAMS):
            tasks.create_task(callers.run(number))
        for _ in range(NUM_ROTATIONS):
            began_s = time.monotonic()
            callers.longest_s.append(0.0)
            await place.rotate()
            await asyncio.sleep(began_s + PERIOD_S - time.monotonic())
        callers.is_over = True
    num_recoveries = await place.num_recoveries()
    waits = " ".join(f"{each:.2f}" for each in callers.longest_s)
    sys.stdout.write(
        f"\n{NUM_ROTATIONS} rotations, {NUM_STREAMS} streams, {callers.num_answers} answers, "
        f"{num_recoveries:.0f} recoveries; longest wait for a first token {callers.first_s:.2f} s, between two tokens "
        f"{max(callers.longest_s):.2f} s, during each rotation {waits}\n"
    )
    assert callers.wrong == []
    assert callers.num_answers >= NUM_STREAMS
    assert place.num_unbelieved() == num_unbelieved


def take_nothing(stream: Stream) -> Receiver:
    return lambda frame: None


async def until_ended(watch: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
    while await watch.read() is not grpc.aio.EOF:
        pass


async def test_a_revoked_certificate_is_out(place: Place) -> None:
    folder = place.identities.folder_of(Role.CLIENT, "rogue")
    network = Network.of(folder)
    stream = network.connect(place.stand.servers[0].address, take_nothing)
    async with network.open_channel(place.stand.stack.router_address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        watch = stub.WatchPlacement(router_pb2.WatchPlacementRequest(model=place.stand.stack.model_name))
        assert await watch.read()
        assert not stream.ended.done()
        place.identities.revoke(folder)
        async with asyncio.timeout(OUT_S):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await until_ended(watch)
            await asyncio.shield(stream.ended)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def keys(*arguments: str) -> str:
    """What `corolla keys` prints."""
    command = [sys.executable, "-m", "corolla.cli.app", "keys", *arguments]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


async def test_a_revoked_key_is_out_of_answers_that_run(place: Place, tmp_path: Path) -> None:
    file = str(tmp_path / "keys")
    revoked, kept = [await asyncio.to_thread(keys, "new", file, "--tenant", "acme") for _ in range(2)]
    stack, ports = place.stand.stack, Ports()
    process = client_process(stack.options, ports.free(), ports.free(), ports.free(), stack.router_address)
    process = replace(process, name="client-keys", log=LogFile(stack.options.log_folder / "client-keys.log"))
    tls_dir = place.identities.folder_of(Role.CLIENT, "keys")
    stack.launch(process, {"COROLLA_API_KEYS_FILE": file, loopback.VARIABLE: str(tls_dir)})
    await place.stand.until_serving(process)
    async with (
        AsyncClient(process.address, api_key=kept) as other,
        AsyncClient(process.address, api_key=revoked) as one,
    ):

        async def is_ready() -> bool:
            return (await other.models())[0].ready

        await until(is_ready)
        answer = one.stream([1, 2, 3], max_tokens=8000, ignore_eos=True)
        await anext(answer)
        await asyncio.to_thread(keys, "revoke", file, revoked.split("_")[1])
        async with asyncio.timeout(OUT_S):
            with pytest.raises(Unauthenticated):
                async for _ in answer:
                    pass
        with pytest.raises(Unauthenticated):
            await one.generate([1, 2, 3], max_tokens=1)
        assert (await other.generate([1, 2, 3], max_tokens=1)).token_ids
