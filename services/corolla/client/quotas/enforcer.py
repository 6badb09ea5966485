"""Keeps tenants within their quotas.

A router counts for all client services; while no router answers, each client service enforces its share of the limits.
"""

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from corolla.chain.control import ControlPlane
from corolla.chassis.breaker import Breaker
from corolla.chassis.errors import CorollaError, InvalidRequest, QuotaExceeded
from corolla.chassis.tenant_limits import QuotaTable, TenantLimits
from corolla.client.metrics import ClientMetrics
from corolla.client.quotas.share import StaticShare
from corolla.trust.watched_files import Contents, WatchedFiles
from corolla.v1 import router_pb2 as pb
from corolla.v1.generation_pb2 import Usage

log = logging.getLogger(__name__)

_LEASE_S: Final = 60.0
_RENEWALS_IN_A_LEASE: Final = 3
_SETTLE_INTERVAL_S: Final = 1.0
_TIMEOUT_S: Final = 0.5
_REST_S: Final = 1.0
_MOST_TAKES: Final = 256
_BILL_PATIENCE_S: Final = 5.0
"""If no router has counted a bill of generated tokens after this time, the client service counts it itself."""
_BILL_LEASE_S: Final = 2 * _BILL_PATIENCE_S
"""How long the router recognises a bill that is sent again."""
_RETRY_PAUSES_S: Final = (0.05, 0.1, 0.2, 0.4)
"""The pauses between tries of a refused take: the router may not have counted the end of the last request yet."""
_MOST_PATIENT: Final = 4
"""How many requests of one tenant may retry at a time, so that a tenant cannot multiply the calls to the router."""
_RATE: Final = "requests_per_second"
_UNKNOWN_TAKERS: Final = 8
"""The number of client services that share a limit, for one to which no router has said it yet. There are seldom more,
and a share that is too small harms less than one that is too large."""


class QuotaEnforcer:
    """Takes quotas before a request begins, counts its use while it runs, and gives held quotas back at its end.

    A request takes the quota for the first token of each sequence when it begins; later tokens are charged as they
    come, so a quota never cuts an answer off. A tenant that has exceeded the quota in this way cannot begin another
    answer until the excess is made up for.

    Args:
        quotas_file: the file, in the format of `QuotaTable`; None: no quotas.
        max_running: the most sequences that run in this client service at a time; fewer must be guaranteed.
        timeout_s: seconds without an answer after which a router counts as away.
        lease_s: seconds for which the router holds a request's amounts if this client service ends.

    Attributes:
        files: the files to watch; None without quotas.

    Raises:
        SettingsError: the file cannot be read, or does not have that format.
    """

    def __init__(
        self,
        quotas_file: Path | None,
        metrics: ClientMetrics,
        *,
        max_running: int | None = None,
        timeout_s: float = _TIMEOUT_S,
        lease_s: float = _LEASE_S,
    ) -> None:
        self._metrics = metrics
        self._max_running = max_running
        self._timeout_s = timeout_s
        self._lease_s = lease_s
        self._table = QuotaTable()
        self._guaranteed_sequences: Mapping[str, int] = {}
        self.files: WatchedFiles | None = None
        if quotas_file is not None:
            self.files = WatchedFiles(
                "COROLLA_QUOTAS_FILE", quotas_file.parent, (quotas_file.name,), self._parse, named=quotas_file
            )
        self._control: ControlPlane | None = None
        self._taker_id = secrets.token_hex(16)
        self._num_takers = _UNKNOWN_TAKERS
        self._share = StaticShare()
        self._breaker = Breaker(1, _REST_S)
        self._running: dict[str, Allowance] = {}
        self._num_unbilled_tokens: Counter[str] = Counter()
        # Bills of generated tokens that no router has counted, each with the time when it was written.
        self._bills: list[tuple[pb.QuotaTake, float]] = []
        # Ended requests, each with its tenant and the time until which the router holds its amounts.
        self._ended: dict[str, tuple[str, float]] = {}
        self._has_ended = asyncio.Event()
        self._num_patient: Counter[str] = Counter()
        # Tenants that send too many requests, each with the time until which these are refused without asking a router.
        self._refused_until_s: dict[str, float] = {}

    def limits(self, tenant: str) -> TenantLimits:
        return self._table.of(tenant)

    def guaranteed_sequences(self) -> Mapping[str, int]:
        """How many running sequences each tenant is guaranteed."""
        return self._guaranteed_sequences

    def start(self, control: ControlPlane) -> None:
        """Sets the connection to the router, which counts from now on."""
        self._control = control

    async def check_request(self, tenant: str) -> None:
        """Counts a request that uses only the quota of requests per second. Raises QuotaExceeded."""
        uses = self.limits(tenant).uses({_RATE: 1}, must_fit=True)
        await self.take(tenant, secrets.token_hex(16), uses, _BILL_LEASE_S)

    def check_rate(self, tenant: str) -> None:
        """Refuses a request whose tenant was just refused another one. It counts nothing. Raises QuotaExceeded."""
        if (wait_s := self._refused_until_s.get(tenant, 0.0) - self._now_s()) > 0:
            raise QuotaExceeded.used_up(_RATE, wait_s)

    @contextlib.contextmanager
    def counted_refusals(self) -> Iterator[None]:
        """Counts in the metrics a QuotaExceeded that leaves the context."""
        try:
            yield
        except QuotaExceeded as refusal:
            self._metrics.quota_refusals.labels(refusal.metadata.get("quota", "")).inc()
            raise

    @asynccontextmanager
    async def running(
        self, tenant: str, num_sequences: int, usage: Usage, *, is_streamed: bool = False
    ) -> AsyncIterator["Allowance"]:
        """Holds quotas for a request from before it waits in line until it ends. `usage` counts its generated tokens.

        Raises QuotaExceeded.
        """
        limits = self.limits(tenant)
        if not limits.are_counted:
            yield Allowance(self, tenant, "", limits, usage)
            return
        amounts = {
            _RATE: 1,
            "running_requests": 1,
            "running_sequences": num_sequences,
            "open_streams": int(is_streamed),
            "generated_tokens_per_minute": num_sequences,
        }
        request_id = secrets.token_hex(16)
        is_refused = False
        try:
            uses = limits.uses(amounts, must_fit=True)
            try:
                await self.take(tenant, request_id, uses)
            except QuotaExceeded:
                is_refused = True
                raise
            running = Allowance(self, tenant, request_id, limits, usage, self._now_s(), num_sequences, _held(uses))
            self._running[request_id] = running
            yield running
        finally:
            # A request whose caller left before the router answered is ended, too: the router may have counted it.
            if not is_refused:
                self._end(tenant, request_id)

    async def run(self) -> None:
        """Sends the router the uncounted use once a second, and whenever a request ends; never returns."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_INTERVAL_S):
                    await self._has_ended.wait()
            self._has_ended.clear()
            await self.settle()

    async def settle(self) -> None:
        """Sends the router the use that it has not counted yet; keeps that use for the next call if this fails."""
        now_s = self._now_s()
        self._write_bills()
        self._count_late_bills(now_s)
        self._ended = {request_id: end for request_id, end in self._ended.items() if now_s < end[1]}
        bills, ended = list(self._bills), list(self._ended.items())
        renewed = [
            each
            for each in self._running.values()
            if each.held and now_s - each.renewed_s >= self._lease_s / _RENEWALS_IN_A_LEASE
        ]
        takes = [
            *(bill for bill, _ in bills),
            *map(self._renewal, renewed),
            *(pb.QuotaTake(tenant=tenant, request_id=request_id) for request_id, (tenant, _) in ended),
        ]
        if not takes or not self._breaker.admits(now_s):
            return
        for first in range(0, len(takes), _MOST_TAKES):
            if not await self._settled(takes[first : first + _MOST_TAKES]):
                return
        self._bills = self._bills[len(bills) :]
        for request_id, _ in ended:
            del self._ended[request_id]
        for each in renewed:
            each.renewed_s = now_s

    # --- one take -------------------------------------------------------------------------------------------------

    async def take(
        self, tenant: str, request_id: str, uses: Sequence[pb.QuotaUse], lease_s: float | None = None
    ) -> None:
        """Counts the use of a request. Raises QuotaExceeded."""
        take = _message(tenant, request_id, uses, lease_s or self._lease_s)
        with self.counted_refusals():
            try:
                return await self._take(take)
            except QuotaExceeded as refusal:
                if not _may_fit_soon(take, refusal) or self._num_patient[tenant] >= _MOST_PATIENT:
                    raise
            return await self._take_patiently(take)

    async def _take_patiently(self, take: pb.QuotaTake) -> None:
        self._num_patient[take.tenant] += 1
        try:
            for wait_s in _RETRY_PAUSES_S[:-1]:
                await asyncio.sleep(wait_s)
                with contextlib.suppress(QuotaExceeded):
                    return await self._take(take)
            await asyncio.sleep(_RETRY_PAUSES_S[-1])
            return await self._take(take)
        finally:
            self._num_patient[take.tenant] -= 1

    async def _take(self, take: pb.QuotaTake) -> None:
        if not take.uses:
            return
        if any(use.quota == _RATE for use in take.uses):
            self.check_rate(take.tenant)
        try:
            if self._breaker.admits(self._now_s()) and await self._sent([take]):
                return
        except QuotaExceeded as refusal:
            if refusal.metadata.get("quota") == _RATE and refusal.retry_after_s is not None:
                self._refused_until_s[take.tenant] = self._now_s() + refusal.retry_after_s
            raise
        self._metrics.local_quota_takes.inc()
        held = self._held_here(take.tenant, except_of=take.request_id)
        self._share.take(take.tenant, take.uses, held, self._now_s(), self._num_takers)

    async def _settled(self, takes: Sequence[pb.QuotaTake]) -> bool:
        """Sends takes to the router, and drops those that it refuses. Returns whether a router has answered."""
        try:
            return await self._sent(takes)
        except (QuotaExceeded, InvalidRequest) as refusal:
            if len(takes) == 1:
                log.warning("the router refuses to count a tenant's use", extra={"reason": refusal.reason})
                return True
        # It has counted none of them, and the others have to be counted.
        for each in takes:
            if not await self._settled([each]):
                return False
        return True

    async def _sent(self, takes: Iterable[pb.QuotaTake]) -> bool:
        """Sends takes to the router. Returns whether it has counted them. Raises what the router refuses them with."""
        if self._control is None:
            return False
        request = pb.TakeQuotasRequest(model=self._control.model, taker_id=self._taker_id, takes=takes)
        try:
            answer = await self._control.take_quotas(request, self._timeout_s)
        except CorollaError as failure:
            if isinstance(failure, QuotaExceeded | InvalidRequest):
                # The router answers, and refuses these takes: because of a quota, or of what stands in them.
                self._breaker.succeeded()
                raise
            # A router of an older version comes here, too: it does not count quotas.
            self._breaker.failed(self._now_s())
            log.debug(
                "no router answers; this client service counts quotas itself, with its share of each limit",
                extra={"reason": failure.reason},
            )
            return False
        self._breaker.succeeded()
        self._num_takers = max(1, answer.num_takers)
        return True

    def _held_here(self, tenant: str, except_of: str) -> Counter[str]:
        """The amounts by quota that a tenant's requests hold in this client service, except for one of them."""
        held: Counter[str] = Counter()
        for request_id, each in self._running.items():
            if each.tenant == tenant and request_id != except_of:
                held.update(each.held)
        return held

    def _end(self, tenant: str, request_id: str) -> None:
        if (running := self._running.pop(request_id, None)) is not None:
            self._note_tokens(running)
        self._ended[request_id] = (tenant, self._now_s() + self._lease_s)
        self._has_ended.set()

    def _renewal(self, running: "Allowance") -> pb.QuotaTake:
        uses = self.limits(running.tenant).uses(running.held, must_fit=False)
        return _message(running.tenant, running.request_id, uses, self._lease_s)

    # --- generated tokens -----------------------------------------------------------------------------------------

    def _note_tokens(self, running: "Allowance") -> None:
        num_tokens = running.usage.completion_tokens - running.num_noted_tokens
        if num_tokens > 0:
            running.num_noted_tokens += num_tokens
            self._num_unbilled_tokens[running.tenant] += num_tokens

    def _write_bills(self) -> None:
        for each in self._running.values():
            self._note_tokens(each)
        for tenant, num_tokens in self._num_unbilled_tokens.items():
            uses = self.limits(tenant).uses({"generated_tokens_per_minute": num_tokens}, must_fit=False)
            if uses:
                take = _message(tenant, secrets.token_hex(16), uses, _BILL_LEASE_S)
                self._bills.append((take, self._now_s()))
        self._num_unbilled_tokens.clear()

    def _count_late_bills(self, now_s: float) -> None:
        """Counts old bills in this service's share and drops them: a router that got one later could count it twice."""
        for bill, since_s in self._bills:
            if now_s - since_s >= _BILL_PATIENCE_S:
                self._share.take(bill.tenant, bill.uses, {}, now_s, self._num_takers)
        self._bills = [(bill, since_s) for bill, since_s in self._bills if now_s - since_s < _BILL_PATIENCE_S]

    def _parse(self, contents: Contents) -> None:
        table = QuotaTable.parse(contents[0])
        guaranteed = table.guaranteed("guaranteed_sequences")
        if self._max_running is not None and sum(guaranteed.values()) >= self._max_running:
            raise ValueError(
                f"tenants: guaranteed_sequences add up to {sum(guaranteed.values())}, and must leave others one of the "
                f"{self._max_running} places of COROLLA_MAX_RUNNING_REQUESTS"
            )
        self._table, self._guaranteed_sequences = table, guaranteed

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


@dataclass(slots=True)
class Allowance:
    """The quotas of one running request.

    Attributes:
        usage: counts the request's generated tokens, of which `num_noted_tokens` have been billed.
        renewed_s: when the router last learned that the request runs.
        held: the amounts that it holds, by quota.
    """

    enforcer: QuotaEnforcer
    tenant: str
    request_id: str
    limits: TenantLimits
    usage: Usage
    renewed_s: float = 0.0
    num_noted_tokens: int = 0
    held: dict[str, int] = field(default_factory=dict)

    async def take_reserved(self, num_reserved_tokens: int) -> None:
        """Reserves another number of tokens for the request than before. Raises QuotaExceeded."""
        await self._take({"reserved_tokens": num_reserved_tokens})

    async def take_prompt(self, num_prompt_tokens: int, num_reserved_tokens: int) -> None:
        """Counts a prompt's tokens, and reserves the most tokens that the request may have. Raises QuotaExceeded."""
        await self._take({"prompt_tokens_per_minute": num_prompt_tokens, "reserved_tokens": num_reserved_tokens})

    async def _take(self, amounts: dict[str, int]) -> None:
        uses = self.limits.uses(amounts, must_fit=True)
        await self.enforcer.take(self.tenant, self.request_id, uses)
        self.held.update(_held(uses))


def _message(tenant: str, request_id: str, uses: Iterable[pb.QuotaUse], lease_s: float) -> pb.QuotaTake:
    """The message that reports a request's use. A bill of generated tokens has a request id of its own."""
    return pb.QuotaTake(tenant=tenant, request_id=request_id, lease_ms=round(lease_s * 1000), uses=uses)


def _may_fit_soon(take: pb.QuotaTake, refusal: QuotaExceeded) -> bool:
    """The take failed at a quota of held amounts, which ending requests free, rather than at a rate."""
    return any(use.quota == refusal.metadata.get("quota") and not use.period_ms for use in take.uses)


def _held(uses: Iterable[pb.QuotaUse]) -> dict[str, int]:
    return {use.quota: use.amount for use in uses if not use.period_ms}
