"""Connects blocking code to the data plane, in one thread with an event loop for each model that a process uses."""

import asyncio
import logging
import os
import secrets
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar, cast, get_args

import torch

from corolla.chain.cache_salts import CacheSalts
from corolla.chain.control import ControlPlane
from corolla.chain.identity import SessionIdentity
from corolla.chain.placement import PlacementWatch
from corolla.chain.recovery_budget import RecoveryBudget, RecoveryReport
from corolla.chain.reservations import ChainLimits, OpenOptions
from corolla.chain.routes import Routes
from corolla.chain.session import ChainSession, ChainSessions
from corolla.chain.streams import DataPlane
from corolla.chassis.errors import CorollaError, HopUnavailable, StartupError
from corolla.chassis.loop_thread import LoopStopped, LoopThread
from corolla.chassis.tasks import TaskGroup
from corolla.chassis.weight_formats import (
    KVCacheDtypeName,
    QuantizationName,
    full_dtype_name,
    tokens_follow_numerics,
)
from corolla.decoding.sampler_record import SamplerRecord
from corolla.hf.row_group import RowGroup
from corolla.models.checkpoint import Checkpoint
from corolla.models.span_model import empty_span
from corolla.models.visible_tokens import attention_windows
from corolla.trust import loopback
from corolla.trust.workload import Role
from corolla.wire.adapter_version import AdapterVersion
from corolla.wire.network import Network
from corolla.wire.span import Span
from corolla.wire.stream import between_servers
from corolla.wire.tensors import DTYPES

log = logging.getLogger(__name__)

Result = TypeVar("Result")

DEFAULT_ROUTER: Final = "127.0.0.1:50050"

CACHE_SECRET: Final = "COROLLA_CACHE_SECRET"

_SILENCE_S: Final = 5.0
"""Client services end silent streams earlier; here, the caller's own work in the process delays reading."""

# A session lives as long as this process keeps its streams open; its lease only has to outlast a user's pauses.
LIMITS: Final = ChainLimits(prefill_chunk_tokens=256, fewer_during_decode=1, step_timeout_s=60.0, lease_ms=3_600_000)


def cache_salt(tenant: str, secret: str | None) -> bytes:
    """The salt with which the digests of a tenant's texts begin.

    Args:
        secret: the client services' secret; None takes it from `COROLLA_CACHE_SECRET`.

    Raises:
        SettingsError: the secret is too short.
    """
    return CacheSalts(os.environ.get(CACHE_SECRET, "") if secret is None else secret).of(tenant, "")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and the router of its block servers.

    Attributes:
        router: `host:port`.
        name: the model's name at the router.
        fingerprint: the fingerprint of the weights that every block server must have.
        tls_dir: folder of the library's certificate; None for connections without TLS.
        short_factor_length: see `ChainLimits`.
        follows_numerics: see `ChainLimits`.
        fingerprint_parts: what the fingerprint stands for, as pairs of name and value.
    """

    router: str
    name: str
    fingerprint: str
    num_blocks: int
    tls_dir: Path | None = None
    short_factor_length: int | None = None
    follows_numerics: bool = True
    fingerprint_parts: tuple[tuple[str, str], ...] = ()


class Connection:
    """The connection to the router and the block servers of one model.

    It is closed when no object refers to it any more, and at the end of the process.
    """

    _shared: ClassVar["weakref.WeakValueDictionary[tuple[int, ServedModel], Connection]"] = (
        weakref.WeakValueDictionary()
    )
    _shared_lock: ClassVar = threading.Lock()

    def __init__(self, model: ServedModel) -> None:
        self._process_id = os.getpid()
        self._thread = LoopThread("corolla")
        self._planes = self.call(_connect(model))
        self.close = weakref.finalize(self, self._thread.stop, self._planes.close)

    @classmethod
    def to(
        cls,
        checkpoint: Checkpoint,
        router: str,
        dtype: str | torch.dtype,
        quantization: str,
        tls_dir: str | Path | None = None,
        kv_cache_dtype: str = "auto",
    ) -> "Connection":
        """The connection to block servers that run a checkpoint with these dtypes and this quantisation.

        Args:
            tls_dir: see `trust.loopback.tls_dir`.

        Raises:
            ValueError: block servers do not have this dtype, quantisation or dtype of keys and values.
            UnsupportedFamily: no block server serves this checkpoint; see `attention_windows`.
        """
        dtype_name = full_dtype_name(str(dtype).removeprefix("torch."))
        if dtype_name not in DTYPES:
            raise ValueError(f"`dtype` must be what the block servers run: one of {', '.join(DTYPES)}.")
        if quantization not in get_args(QuantizationName):
            raise ValueError(f"`quantization` must be one of {', '.join(get_args(QuantizationName))}.")
        if kv_cache_dtype not in get_args(KVCacheDtypeName):
            raise ValueError(f"`kv_cache_dtype` must be one of {', '.join(get_args(KVCacheDtypeName))}.")
        attention_windows(empty_span(checkpoint, Span(0, checkpoint.num_blocks)), checkpoint.family)
        fingerprint = checkpoint.fingerprint(dtype_name, quantization, kv_cache_dtype)
        folder = loopback.tls_dir(router, Role.LIBRARY, tls_dir)
        return cls.shared(
            ServedModel(
                router,
                checkpoint.name,
                fingerprint,
                checkpoint.num_blocks,
                folder,
                checkpoint.short_factor_length,
                tokens_follow_numerics(dtype_name, kv_cache_dtype),
                tuple(checkpoint.fingerprint_parts(dtype_name, quantization, kv_cache_dtype).items()),
            )
        )

    @classmethod
    def shared(cls, model: ServedModel) -> "Connection":
        """The connection to a served model, which all users in this process share."""
        key = (os.getpid(), model)
        with cls._shared_lock:
            connection = cls._shared.get(key)
            if connection is None or not connection.close.alive:
                connection = cls._shared[key] = cls(model)
            return connection

    def __deepcopy__(self, memo: dict[int, Any]) -> "Connection":
        """Returns the same connection: a copied model, for example a frozen reference, uses the same servers."""
        return self

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine in the connection's thread and waits for it; an interrupt cancels it.

        Raises:
            StartupError: the process was forked after the connection was made.
        """
        if os.getpid() != self._process_id:
            work.close()
            raise StartupError(
                "the model's connection cannot be used after a fork; load the model in the process that uses it"
            )
        try:
            return self._thread.call(work)
        except LoopStopped:
            raise HopUnavailable("the model's connection is closed") from None

    def post(self, work: Callable[[], None]) -> None:
        """Runs a function soon in the connection's thread, unless the thread has ended."""
        if os.getpid() == self._process_id:
            self._thread.post(work)

    def iterate(self, items: AsyncGenerator[Result, None]) -> Generator[Result, None, None]:
        """Yields the items of `items`, which runs in the connection's thread. Closing the iterator closes `items`."""
        # After an interrupt, `items` may still be running when it is to be closed.
        turn = asyncio.Lock()
        nothing_left: Final = object()

        async def following() -> Result | object:
            async with turn:
                return await anext(items, nothing_left)

        async def close() -> None:
            async with turn:
                await items.aclose()

        try:
            while (item := self.call(following())) is not nothing_left:
                yield cast(Result, item)
        finally:
            with suppress(CorollaError):
                self.call(close())

    def adapter(self, name: str | None, tenant: str) -> AdapterVersion | None:
        """The version that is registered under an adapter's name; None without a name.

        Raises:
            AdapterNotFound: no adapter has this name.
            AdapterDenied: the adapter is registered for other tenants only.
        """
        return self.call(self._planes.placement.adapter(name, tenant)) if name else None

    @asynccontextmanager
    async def open_session(
        self, tenant: str, open_options: OpenOptions, sampler: SamplerRecord
    ) -> AsyncIterator[ChainSession]:
        """Opens a session on a chain whose last hop chooses the tokens. The hops free it at the end of the context."""
        identity = SessionIdentity(secrets.token_bytes(16), 1, tenant)
        async with self._planes.sessions.open(identity, open_options, sampler, lambda report: None) as session:
            try:
                yield session
            finally:
                session.close()

    async def open_rows(
        self, new: Sequence[SessionIdentity], open_options: OpenOptions, earlier: RowGroup | None = None
    ) -> RowGroup:
        """Opens sequences on one chain, `earlier` ones and `new` ones.

        Args:
            open_options: the options of all sequences.
            earlier: open sequences that stay on their chain and are opened again in the next epoch.

        Raises:
            NoChain, OutOfPages, HopUnavailable, RouterUnavailable: opening failed, and nothing new stays allocated.
        """
        budget = RecoveryBudget(LIMITS.max_recoveries)
        while True:
            identities = tuple(new)
            if earlier is not None:
                kept = earlier.raise_epoch()
                identities = (*kept, *(replace(identity, epoch=kept[0].epoch) for identity in new))
                open_options = replace(open_options, recorded_chain=earlier.chain, only_chain=earlier.chain)
            try:
                binding = await self._planes.sessions.reservations.reserve(identities, open_options)
                break
            except BaseException as failure:
                if earlier is None:
                    raise
                # `reserve` frees no session on the hops of a recorded chain, so the new sessions are freed here.
                self._planes.sessions.reservations.give_back(identities[len(kept) :], earlier.chain.hops)
                if not isinstance(failure, CorollaError):
                    raise
                await earlier.recover(failure, budget)
        sessions = self._planes.sessions
        return RowGroup(binding, self._planes.data, sessions.recovery, sessions.standbys, LIMITS, earlier)


class _Planes:
    """The control plane, the data plane and the sessions of a connection, which live in its thread."""

    def __init__(self, model: ServedModel) -> None:
        network = Network.from_folder(model.tls_dir)
        chain_limits = replace(
            LIMITS, short_factor_length=model.short_factor_length, follows_numerics=model.follows_numerics
        )
        self.control = ControlPlane(model.router, model.name, network.channels)
        # The process belongs to the caller: a background task that fails is restarted and does not end the process.
        self.tasks = TaskGroup()
        network.start_renewal(self.tasks)
        limits = replace(between_servers(), ping_after_s=1.0, silence_s=_SILENCE_S)
        placement = self.placement = PlacementWatch(self.control)
        self.data = DataPlane(
            model.fingerprint,
            self.tasks.subgroup(),
            limits,
            connect=network.connect,
            capabilities=network.capabilities(model.fingerprint),
            placement=placement,
        )
        self.tasks.start_essential(placement.run, "placement_watch")
        parts = dict(model.fingerprint_parts)
        self.routes = Routes(self.control, placement, model.fingerprint, model.num_blocks, fingerprint_parts=parts)
        self.sessions = ChainSessions(self.routes, self.data, chain_limits, self.tasks, _on_recovery)

    async def close(self) -> None:
        await self.tasks.close()
        await self.routes.close()
        await self.data.close()
        await self.control.close()


def _on_recovery(report: RecoveryReport) -> None:
    """Says that tokens may differ from now on. Other recoveries are not reported: the caller gets the same tokens."""
    if report.mixes_numerics:
        log.warning(
            "a lost block server was replaced by one that computes in another way (see `corolla status`): in this "
            "dtype, the tokens that follow may differ from an undisturbed run"
        )


async def _connect(model: ServedModel) -> _Planes:
    """Makes the planes. It is a coroutine so that it runs in the thread whose event loop they use."""
    return _Planes(replace(model, name=await _name_at_router(model)))


async def _name_at_router(model: ServedModel) -> str:
    """The router's name of a model: a folder may have another name here than on the block servers.

    The model keeps its own name if the router knows that, does not answer, or has other weights.
    """
    network = Network.from_folder(model.tls_dir)
    for name in (model.name, ""):
        control = ControlPlane(model.router, name, network.channels)
        try:
            placement = await control.get_placement()
        except CorollaError:
            break
        finally:
            await control.close()
        if any(each.server.fingerprint == model.fingerprint for each in placement.servers):
            return placement.model
        if placement.servers:
            break
    return model.name
