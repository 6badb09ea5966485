"""Tries everything that a block server does at start on this machine, by starting one that joins no placement."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from corolla.block_server.registration import Registration
from corolla.block_server.service import BlockServer
from corolla.block_server.settings import BlockServerSettings
from corolla.chassis import exposure, heap, logs
from corolla.chassis.channels import TLS_1_3_ONLY
from corolla.chassis.errors import CorollaError, ModelNotFound, RouterUnavailable, StartupError
from corolla.chassis.handlers import call_path
from corolla.chassis.settings import load
from corolla.compute.compute_thread import let_others_compute_alone
from corolla.v1 import router_pb2
from corolla.wire.network import Network
from corolla.wire.span import Span


class TrialRegistration(Registration):
    """Chooses a span as large as a router may choose one, and tells no router of the server."""

    async def register(self, span: Span | None) -> Span:
        """Returns the given span, or the one from block 0 on that the server's description has room for."""
        described = self.server
        if span is not None:
            return span
        num_blocks = min(described.capacity_blocks, described.num_model_blocks)
        if described.weight_blocks:
            # The first server has the embedding, which takes as much as the head.
            num_blocks = min(num_blocks, int(described.weight_blocks - described.head_blocks))
        return Span(0, max(1, num_blocks))

    async def run(self) -> None:
        """Sends no heartbeat."""
        await asyncio.Event().wait()

    async def ask_router(self) -> int:
        """Asks a router for the placement, and returns how many servers of the model it has.

        Raises:
            CorollaError: no router answers, or the router refuses this server.
        """
        return len(await super().placement())

    async def placement(self) -> Sequence[router_pb2.PlacedServer]:
        """Returns no servers, so that none is called."""
        return ()

    async def deregister(self, num_moved_sessions: int = 0, num_left_sessions: int = 0) -> None:
        """Has nothing to give back."""


@dataclass(frozen=True, slots=True)
class Checked:
    """One thing that was tried.

    Attributes:
        name: what it was.
        failure: why a server would not start; None: it went well.
        found: what was found, for people.
        seconds: how long it took.
    """

    name: str
    failure: str | None
    found: str = ""
    seconds: float = 0.0


def check_start(sentence_of: Callable[[CorollaError], str], **overrides: Any) -> list[Checked]:
    """Starts a block server with the settings of the environment, stops it, and says how each part went.

    What comes after a failure is not tried, except for the router, which needs none of the rest.

    Args:
        sentence_of: what to tell people of an error.
        overrides: settings that take precedence over the environment; None does not.
    """
    began_s = time.monotonic()
    try:
        settings = load(BlockServerSettings, **overrides)
        exposure.check(settings)
        network = Network.from_folder(settings.tls_dir)
    except StartupError as failure:
        return [Checked("settings", failure.message, seconds=time.monotonic() - began_s)]
    found = f"{settings.model}, blocks {settings.blocks}, {settings.dtype}, {settings.device}"
    checked = [Checked("settings", None, found, time.monotonic() - began_s)]
    os.environ.setdefault(*TLS_1_3_ONLY)
    logs.configure(settings.log_level, settings.log_format, with_audit=False)
    return [*checked, *asyncio.run(_checked(settings, network, sentence_of))]


async def _checked(
    settings: BlockServerSettings, network: Network, sentence_of: Callable[[CorollaError], str]
) -> list[Checked]:
    router = await _router(settings, network, sentence_of)
    let_others_compute_alone()
    heap.expect_loading()
    began_s = time.monotonic()
    try:
        server = BlockServer(settings, network=network, new_registration=TrialRegistration)
    except StartupError as failure:
        return [router, Checked("ports", sentence_of(failure), seconds=time.monotonic() - began_s)]
    failed: str | None = None
    try:
        await server.start()
    except CorollaError as failure:
        failed = sentence_of(failure)
    except Exception as failure:
        failed = f"{type(failure).__name__} at {call_path(failure)}: {failure}"
    finally:
        await server.stop()
    checked = [router, *(Checked(stage.name, None, stage.found, stage.seconds) for stage in server.parts.stages)]
    if failed is not None:
        checked.append(Checked(server.parts.open_stage or "serving", failed))
    return checked


async def _router(
    settings: BlockServerSettings, network: Network, sentence_of: Callable[[CorollaError], str]
) -> Checked:
    """Asks a router, which answers without servers of the model, too."""
    began_s = time.monotonic()
    described = router_pb2.ServerDescription(model=settings.model)
    registration = TrialRegistration(settings.router, described, router_pb2.ServerLoad, network.channels)
    failure: str | None = None
    try:
        await registration.ask_router()
    except ModelNotFound:
        pass
    except RouterUnavailable:
        failure = f"no router answers at COROLLA_ROUTER={settings.router}; a server would wait for one"
    except CorollaError as refusal:
        failure = f"{settings.router}: {sentence_of(refusal)}"
    finally:
        await registration.close()
    return Checked("router", failure, settings.router, time.monotonic() - began_s)
