"""The methods of RouterService: each asks the store and decides. `validation` has checked the requests."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Final

from corolla.chassis.audit import Caller
from corolla.chassis.errors import InvalidRequest, ModelNotFound, RouteUnknown
from corolla.chassis.handlers import Call
from corolla.planning.apart import plan_together
from corolla.planning.bookings import Bookings
from corolla.planning.candidates import chain_of
from corolla.planning.pairing import with_partners
from corolla.planning.planner import PlannedChain, plan_around_suspects
from corolla.planning.ready_servers import ReadyServers
from corolla.planning.replicas import PlannedSession
from corolla.router.quotas import Quotas
from corolla.router.registry import Registry
from corolla.router.roster import Roster
from corolla.router.sessions import SessionRecords
from corolla.router.settings import RouterSettings
from corolla.router.watch import PlacementWatches
from corolla.trust.authorisation import check_doubt
from corolla.trust.credentials import workload_of_call
from corolla.trust.workload import Role, Workload
from corolla.v1 import router_pb2 as pb
from corolla.wire.span import Span

# The time from planning a chain until its last hop has opened the session, and until its load is looked at.
_BOOKING_LAG_S: Final = 0.5
# How long a new load may wait, for each server of the model: a quarter of a second with 1,000 servers.
_REGROUP_S_OF_A_SERVER: Final = 0.00025
# The defaults for callers that name no time: how long a conversation waits for its next turn, and how long a turn holds
# its lock without renewing it.
_SESSION_TTL_MS: Final = 3_600_000
_TURN_LOCK_MS: Final = 30_000


@dataclass(eq=False, repr=False)
class RouterServicer:
    """Answers the calls of RouterService. Methods raise StoreUnavailable when Redis does not answer.

    Args:
        registrant: A function that returns the workload that made a block server's call, or an empty string if callers
            are not authenticated. It raises AddressNotYours if the description has an address that is not the caller's.
        on_deregistered: A function that is called with the UID of the pod of a server that left, and the server's
            request.
    """

    settings: RouterSettings
    registry: Registry
    sessions: SessionRecords
    tenant_quotas: Quotas
    watches: PlacementWatches
    _: KW_ONLY
    registrant: Callable[[Call[Caller], pb.ServerDescription | None], str]
    on_deregistered: Callable[[str, pb.DeregisterServerRequest], None]
    # The ready servers by model. Each router counts the sessions that it placed itself.
    _planning: dict[str, "_Planning"] = field(init=False, default_factory=dict)

    # --- for block servers ---

    async def RegisterServer(self, request: pb.RegisterServerRequest, call: Call[Caller]) -> pb.RegisterServerResponse:
        server, wanted = request.server, Span.from_message(request.span) if request.HasField("span") else None
        span = await self.registry.register(server, wanted, self.registrant(call, server))
        return pb.RegisterServerResponse(
            span=span.to_message(),
            lease_ms=self.settings.lease_ms,
            heartbeat_interval_ms=self.settings.heartbeat_interval_ms,
        )

    async def Heartbeat(self, request: pb.HeartbeatRequest, call: Call[Caller]) -> pb.HeartbeatResponse:
        server = request.server if request.HasField("server") else None
        return await self.registry.heartbeat(request, self.registrant(call, server))

    async def DeregisterServer(
        self, request: pb.DeregisterServerRequest, call: Call[Caller]
    ) -> pb.DeregisterServerResponse:
        roster = await self.registry.snapshot(request.model)
        await self.registry.deregister(request.model, request.server_id, self.registrant(call, None))
        for each in roster.servers:
            if each.server.server_id == request.server_id:
                self.on_deregistered(each.server.pod_uid, request)
        return pb.DeregisterServerResponse()

    # --- for client services ---

    async def PlanChain(self, request: pb.PlanChainRequest, call: Call[Caller]) -> pb.PlanChainResponse:
        excluded = frozenset(request.excluded_server_ids)
        roster = await self.registry.snapshot(request.model)
        if not roster.is_known:
            raise ModelNotFound("no block server has registered for this model", request.model)
        now_s = asyncio.get_running_loop().time()
        planning = self._planning.setdefault(request.model, _Planning())
        ready = planning.ready(roster, now_s)
        booked = partial(planning.bookings.booked, now_s=now_s)

        def planned_without(server_ids: frozenset[str]) -> PlannedChain:
            session = PlannedSession(request.num_tokens, server_ids, booked, apart=ready.apart)
            usable = [each for each in ready.replicas.usable(session) if request.fingerprint in ("", each.fingerprint)]
            return with_partners(plan_around_suspects(usable, roster.num_blocks), ready.replicas, session)

        planned = plan_together(ready.apart, planned_without, excluded)
        chain = chain_of(planned.hops, planned.fingerprint)
        planning.bookings.book(chain.hops, request.num_tokens, now_s)
        return pb.PlanChainResponse(chain=chain)

    async def ReportServer(self, request: pb.ReportServerRequest, call: Call[Caller]) -> pb.ReportServerResponse:
        workload = workload_of_call(call.context.auth_context())
        if request.slow:
            check_doubt(workload)
            await self.registry.doubt(request.model, request.server_id)
        else:
            # A connection stands for a workload where there are no certificates.
            await self.registry.report(request.model, request.server_id, str(workload or call.context.peer()))
        return pb.ReportServerResponse()

    async def GetPlacement(self, request: pb.GetPlacementRequest, call: Call[Caller]) -> pb.Placement:
        model = request.model or await self._only_model()
        if not model:
            return pb.Placement()
        placement = (await self.registry.snapshot(model)).placement
        return shown_to(workload_of_call(call.context.auth_context()), placement)

    async def _only_model(self) -> str:
        """Returns the name of the only model; empty while there is none. Raises InvalidRequest if there are several."""
        models = sorted(await self.registry.models())
        if len(models) > 1:
            raise InvalidRequest("model", f"is required, since there are several: {', '.join(models)}")
        return models[0] if models else ""

    async def WatchPlacement(
        self, request: pb.WatchPlacementRequest, call: Call[Caller]
    ) -> AsyncIterator[pb.Placement]:
        caller = workload_of_call(call.context.auth_context())
        async for placement in self.watches.watch(request.model, takes_changes=request.takes_changes):
            yield shown_to(caller, placement)

    # --- session records ---

    async def CreateSessionRecord(self, request: pb.CreateSessionRecordRequest, call: Call[Caller]) -> pb.SessionRecord:
        return await self.sessions.create(request, request.ttl_ms or _SESSION_TTL_MS)

    async def GetSessionRecord(self, request: pb.GetSessionRecordRequest, call: Call[Caller]) -> pb.SessionRecord:
        return await self.sessions.get(request.model, request.session_id, request.tenant)

    async def BeginTurn(self, request: pb.BeginTurnRequest, call: Call[Caller]) -> pb.SessionRecord:
        return await self.sessions.begin_turn(request, request.lock_ms or _TURN_LOCK_MS)

    async def RenewTurn(self, request: pb.RenewTurnRequest, call: Call[Caller]) -> pb.RenewTurnResponse:
        await self.sessions.renew_turn(request, request.lock_ms or _TURN_LOCK_MS)
        return pb.RenewTurnResponse()

    async def EndTurn(self, request: pb.EndTurnRequest, call: Call[Caller]) -> pb.EndTurnResponse:
        await self.sessions.end_turn(request, request.ttl_ms or _SESSION_TTL_MS)
        return pb.EndTurnResponse()

    async def MoveSession(self, request: pb.MoveSessionRequest, call: Call[Caller]) -> pb.MoveSessionResponse:
        # Client services connect to the addresses in a record, so the hop must be a registered server.
        roster = await self.registry.snapshot(request.model)
        if not roster.places(request.hop):
            raise RouteUnknown("the session would go to a block server that the placement does not name")
        await self.sessions.move(
            request.model, request.session_id, request.tenant, request.server_id, request.hop, roster.by_id
        )
        return pb.MoveSessionResponse()

    async def DeleteSessionRecord(self, request: pb.DeleteSessionRecordRequest, call: Call[Caller]) -> pb.SessionRecord:
        return await self.sessions.delete(request.model, request.session_id, request.tenant)

    async def CountSessionRecords(
        self, request: pb.CountSessionRecordsRequest, call: Call[Caller]
    ) -> pb.CountSessionRecordsResponse:
        return pb.CountSessionRecordsResponse(num_sessions=await self.sessions.count(request.model))

    # --- quotas ---

    async def TakeQuotas(self, request: pb.TakeQuotasRequest, call: Call[Caller]) -> pb.TakeQuotasResponse:
        return pb.TakeQuotasResponse(num_takers=await self.tenant_quotas.take(request))

    # --- adapters ---

    async def AddAdapter(self, request: pb.AddAdapterRequest, call: Call[Caller]) -> pb.AddAdapterResponse:
        await self.registry.add_adapter(request.model, request.adapter)
        return pb.AddAdapterResponse()

    async def RemoveAdapter(self, request: pb.RemoveAdapterRequest, call: Call[Caller]) -> pb.RemoveAdapterResponse:
        await self.registry.remove_adapter(request.model, request.name)
        return pb.RemoveAdapterResponse()


class _Planning:
    """What a router knows for the plans of one model: the ready servers, and the sessions that it placed on them."""

    def __init__(self) -> None:
        self.bookings = Bookings(_BOOKING_LAG_S)
        self._roster: Roster | None = None
        self._regroup_s = 0.0
        self._turn = random.random()
        self._ready = ReadyServers()

    def ready(self, roster: Roster, now_s: float) -> ReadyServers:
        """Returns the ready servers, grouped anew after each change of the placement.

        Loads change all the time in a large fleet, and to group servers takes the longer the more there are. So a new
        load waits for a time in proportion to the number of servers.
        """
        before = self._roster
        is_changed = before is None or before.version != roster.version
        if is_changed or (before is not roster and now_s >= self._regroup_s):
            self._roster, self._regroup_s = roster, now_s + _REGROUP_S_OF_A_SERVER * len(roster.servers)
            self.bookings.hear(roster.by_id, now_s)
            self._ready.take(roster.by_id, self._turn)
        return self._ready


def shown_to(caller: Workload | None, placement: pb.Placement) -> pb.Placement:
    """Returns the placement with only the facts about adapters and texts that the caller may know.

    Only block servers and operators learn where an adapter's files are. A library, which is a tenant's own process,
    learns only of that tenant's adapters, and nothing of the texts that servers hold for others.

    Args:
        caller: The caller's workload; None: callers are not authenticated.
    """
    if caller is None or caller.role not in (Role.CLIENT, Role.LIBRARY):
        return placement
    has_texts = caller.role is Role.LIBRARY and any(each.load.beginnings for each in placement.servers)
    if not (placement.adapters or placement.removed_adapters or has_texts):
        return placement
    shown = pb.Placement()
    shown.CopyFrom(placement)
    if has_texts:
        for placed in shown.servers:
            placed.load.beginnings = b""
    del shown.adapters[:]
    for each in placement.adapters:
        if caller.role is Role.CLIENT:
            shown.adapters.add(version=each.version, tenants=each.tenants)
        elif not each.tenants or caller.name in each.tenants:
            shown.adapters.add(version=each.version)
    if caller.role is Role.LIBRARY:
        # The tenants of removed adapters are not known any more, and hops refuse removed adapters anyway.
        del shown.removed_adapters[:]
    return shown
