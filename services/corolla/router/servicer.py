"""The methods of RouterService: each checks its request, asks the store and decides."""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Final

from corolla.chassis.audit import Caller
from corolla.chassis.errors import InvalidRequest, ModelNotFound, RouteUnknown
from corolla.chassis.handlers import Call
from corolla.planning.bookings import Bookings
from corolla.planning.candidates import candidates, chain_of
from corolla.planning.pairing import with_partners
from corolla.planning.planner import plan_around_suspects
from corolla.planning.replicas import PlannedSession, Replicas
from corolla.router import quotas, validation
from corolla.router.registry import Registry
from corolla.router.sessions import SessionRecords
from corolla.router.settings import RouterSettings
from corolla.router.watch import PlacementWatches
from corolla.trust.credentials import workload_of_call
from corolla.trust.workload import Role, Workload
from corolla.v1 import router_pb2 as pb

# The time from planning a chain until its last hop has opened the session.
_BOOKING_LAG_S: Final = 0.25
# The defaults for callers that name no time: how long a conversation waits for its next turn, and how long a turn holds
# its lock without renewing it.
_SESSION_TTL_MS: Final = 3_600_000
_TURN_LOCK_MS: Final = 30_000
_STATES = frozenset({pb.SERVER_STATE_JOINING, pb.SERVER_STATE_READY, pb.SERVER_STATE_DRAINING})


class RouterServicer:
    """Answers the calls of RouterService. Methods raise StoreUnavailable when Redis does not answer.

    Args:
        registrant: A function that returns the workload that made a block server's call, or an empty string if callers
            are not authenticated. It raises AddressNotYours if the description has an address that is not the caller's.
        on_deregistered: A function that is called with the UID of the pod of a server that left, and the server's
            request.
    """

    def __init__(
        self,
        settings: RouterSettings,
        registry: Registry,
        sessions: SessionRecords,
        tenant_quotas: quotas.Quotas,
        watches: PlacementWatches,
        *,
        registrant: Callable[[Call[Caller], pb.ServerDescription | None], str],
        on_deregistered: Callable[[str, pb.DeregisterServerRequest], None],
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._sessions = sessions
        self._quotas = tenant_quotas
        self._watches = watches
        self._registrant = registrant
        self._on_deregistered = on_deregistered
        # The bookings by model. Each router counts the sessions that it placed itself.
        self._bookings: defaultdict[str, Bookings] = defaultdict(lambda: Bookings(_BOOKING_LAG_S))

    # --- for block servers ---

    async def RegisterServer(self, request: pb.RegisterServerRequest, call: Call[Caller]) -> pb.RegisterServerResponse:
        server = validation.check_server(request.server)
        wanted = validation.check_span("span", request.span) if request.HasField("span") else None
        span = await self._registry.register(server, wanted, self._registrant(call, server))
        return pb.RegisterServerResponse(
            span=span.to_message(),
            lease_ms=self._settings.lease_ms,
            heartbeat_interval_ms=self._settings.heartbeat_interval_ms,
        )

    async def Heartbeat(self, request: pb.HeartbeatRequest, call: Call[Caller]) -> pb.HeartbeatResponse:
        validation.check_text("model", request.model)
        validation.check_name("server_id", request.server_id)
        if request.state not in _STATES:
            raise InvalidRequest("state", "must be JOINING, READY or DRAINING")
        validation.check_load(request.load)
        if request.HasField("server"):
            validation.check_self_description(request)
        server = request.server if request.HasField("server") else None
        span = await self._registry.heartbeat(request, self._registrant(call, server))
        return pb.HeartbeatResponse(move_to=span.to_message() if span else None)

    async def DeregisterServer(
        self, request: pb.DeregisterServerRequest, call: Call[Caller]
    ) -> pb.DeregisterServerResponse:
        validation.check_text("model", request.model)
        validation.check_name("server_id", request.server_id)
        roster = await self._registry.snapshot(request.model)
        await self._registry.deregister(request.model, request.server_id, self._registrant(call, None))
        for each in roster.servers:
            if each.server.server_id == request.server_id:
                self._on_deregistered(each.server.pod_uid, request)
        return pb.DeregisterServerResponse()

    # --- for client services ---

    async def PlanChain(self, request: pb.PlanChainRequest, call: Call[Caller]) -> pb.PlanChainResponse:
        validation.check_text("model", request.model)
        validation.check_text("fingerprint", request.fingerprint, may_be_empty=True)
        if request.session_id:
            validation.check_session_id("session_id", request.session_id)
        excluded = validation.check_excluded(list(request.excluded_server_ids))
        roster, pinned = await self._registry.snapshot_for(request.model, request.session_id)
        if not roster.is_known:
            raise ModelNotFound("no block server has registered for this model", request.model)
        if pinned is not None and roster.carries(pinned, fingerprint=request.fingerprint, excluded=excluded):
            return pb.PlanChainResponse(chain=pinned, by_affinity=True)
        bookings, now_s = self._bookings[request.model], asyncio.get_running_loop().time()
        bookings.hear(roster.servers, now_s)
        ready = candidates(roster.servers, fingerprint=request.fingerprint)
        # The planner prefers the first of equal servers, so shuffling spreads the sessions over them.
        random.shuffle(ready)
        replicas = Replicas(ready)
        session = PlannedSession(request.num_tokens, excluded, partial(bookings.booked, now_s=now_s))
        planned = plan_around_suspects(replicas.usable(session), roster.num_blocks)
        planned = with_partners(planned, replicas, session)
        chain = chain_of(planned.hops, planned.fingerprint)
        bookings.book(chain.hops, request.num_tokens, now_s)
        return pb.PlanChainResponse(chain=chain)

    async def ReportServer(self, request: pb.ReportServerRequest, call: Call[Caller]) -> pb.ReportServerResponse:
        validation.check_text("model", request.model)
        validation.check_name("server_id", request.server_id)
        if request.slow:
            await self._registry.doubt(request.model, request.server_id)
        else:
            await self._registry.report(request.model, request.server_id)
        return pb.ReportServerResponse()

    async def GetPlacement(self, request: pb.GetPlacementRequest, call: Call[Caller]) -> pb.Placement:
        validation.check_text("model", request.model, may_be_empty=True)
        model = request.model or await self._only_model()
        if not model:
            return pb.Placement()
        placement = (await self._registry.snapshot(model, with_adapters=True)).placement()
        return shown_to(workload_of_call(call.context.auth_context()), placement)

    async def _only_model(self) -> str:
        """Returns the name of the only model; empty while there is none. Raises InvalidRequest if there are several."""
        models = sorted(await self._registry.models())
        if len(models) > 1:
            raise InvalidRequest("model", f"is required, since there are several: {', '.join(models)}")
        return models[0] if models else ""

    async def WatchPlacement(
        self, request: pb.WatchPlacementRequest, call: Call[Caller]
    ) -> AsyncIterator[pb.Placement]:
        validation.check_text("model", request.model)
        caller = workload_of_call(call.context.auth_context())
        async for placement in self._watches.watch(request.model):
            yield shown_to(caller, placement)

    # --- session records ---

    async def CreateSessionRecord(self, request: pb.CreateSessionRecordRequest, call: Call[Caller]) -> pb.SessionRecord:
        record = validation.check_record(request.record)
        return await self._sessions.create(
            record, self._ttl_ms(request.ttl_ms), request.max_tenant_sessions, request.max_tenant_bytes
        )

    async def GetSessionRecord(self, request: pb.GetSessionRecordRequest, call: Call[Caller]) -> pb.SessionRecord:
        return await self._sessions.get(*self._session(request), request.tenant)

    async def BeginTurn(self, request: pb.BeginTurnRequest, call: Call[Caller]) -> pb.SessionRecord:
        session = self._session(request)
        turn_id = validation.check_name("turn_id", request.turn_id)
        return await self._sessions.begin_turn(
            *session,
            request.tenant,
            turn_id,
            self._lock_ms(request.lock_ms),
            request.max_tenant_bytes,
            request.num_new_bytes,
        )

    async def RenewTurn(self, request: pb.RenewTurnRequest, call: Call[Caller]) -> pb.RenewTurnResponse:
        session = self._session(request)
        turn_id = validation.check_name("turn_id", request.turn_id)
        await self._sessions.renew_turn(*session, turn_id, self._lock_ms(request.lock_ms))
        return pb.RenewTurnResponse()

    async def EndTurn(self, request: pb.EndTurnRequest, call: Call[Caller]) -> pb.EndTurnResponse:
        record = validation.check_record(request.record)
        turn_id = validation.check_name("turn_id", request.turn_id)
        await self._sessions.end_turn(record, turn_id, self._ttl_ms(request.ttl_ms), discard=request.discard)
        return pb.EndTurnResponse()

    async def MoveSession(self, request: pb.MoveSessionRequest, call: Call[Caller]) -> pb.MoveSessionResponse:
        model, session_id = self._session(request)
        server_id = validation.check_name("server_id", request.server_id)
        hop = validation.check_hop(request.hop)
        # Client services connect to the addresses in a record, so the hop must be a registered server.
        roster = await self._registry.snapshot(model)
        if not roster.places(hop):
            raise RouteUnknown("the session would go to a block server that the placement does not name")
        await self._sessions.move(model, session_id, request.tenant, server_id, hop, roster.servers)
        return pb.MoveSessionResponse()

    async def DeleteSessionRecord(self, request: pb.DeleteSessionRecordRequest, call: Call[Caller]) -> pb.SessionRecord:
        return await self._sessions.delete(*self._session(request), request.tenant)

    async def CountSessionRecords(
        self, request: pb.CountSessionRecordsRequest, call: Call[Caller]
    ) -> pb.CountSessionRecordsResponse:
        validation.check_text("model", request.model)
        return pb.CountSessionRecordsResponse(num_sessions=await self._sessions.count(request.model))

    # --- quotas ---

    async def TakeQuotas(self, request: pb.TakeQuotasRequest, call: Call[Caller]) -> pb.TakeQuotasResponse:
        return pb.TakeQuotasResponse(num_takers=await self._quotas.take(quotas.checked(request)))

    # --- adapters ---

    async def AddAdapter(self, request: pb.AddAdapterRequest, call: Call[Caller]) -> pb.AddAdapterResponse:
        model = validation.check_text("model", request.model)
        await self._registry.add_adapter(model, validation.check_adapter(request.adapter))
        return pb.AddAdapterResponse()

    async def RemoveAdapter(self, request: pb.RemoveAdapterRequest, call: Call[Caller]) -> pb.RemoveAdapterResponse:
        model = validation.check_text("model", request.model)
        await self._registry.remove_adapter(model, validation.check_name("name", request.name))
        return pb.RemoveAdapterResponse()

    def _session(
        self,
        request: pb.GetSessionRecordRequest
        | pb.BeginTurnRequest
        | pb.RenewTurnRequest
        | pb.MoveSessionRequest
        | pb.DeleteSessionRecordRequest,
    ) -> tuple[str, str]:
        model = validation.check_text("model", request.model)
        return model, validation.check_session_id("session_id", request.session_id)

    def _ttl_ms(self, asked_ms: int) -> int:
        return validation.check_duration("ttl_ms", asked_ms, validation.MOST_SESSION_TTL_MS, _SESSION_TTL_MS)

    def _lock_ms(self, asked_ms: int) -> int:
        return validation.check_duration("lock_ms", asked_ms, validation.MOST_LOCK_MS, _TURN_LOCK_MS)


def shown_to(caller: Workload | None, placement: pb.Placement) -> pb.Placement:
    """Returns the placement with only the facts about adapters that the caller may know.

    Only block servers and operators learn where an adapter's files are. A library, which is a tenant's own process,
    learns only of that tenant's adapters.

    Args:
        caller: The caller's workload; None: callers are not authenticated.
    """
    has_any = placement.adapters or placement.removed_adapters
    if caller is None or caller.role not in (Role.CLIENT, Role.LIBRARY) or not has_any:
        return placement
    shown = pb.Placement()
    shown.CopyFrom(placement)
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
