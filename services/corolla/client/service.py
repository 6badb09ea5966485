"""The client service as a table of its parts, in the order in which they start."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Final

from starlette.types import ASGIApp

from corolla.chain.cache_salts import CacheSalts
from corolla.chain.control import ControlPlane
from corolla.chain.placement import PlacementWatch
from corolla.chain.recovery_budget import RecoveryReport
from corolla.chain.reservations import ChainLimits
from corolla.chain.routes import Routes
from corolla.chain.session import ChainSessions
from corolla.chain.streams import DataPlane
from corolla.chassis.channels import MAX_FRAME_BYTES, CallerBounds
from corolla.chassis.descriptors import most_connections_of_a_port
from corolla.chassis.errors import SettingsError
from corolla.chassis.handlers import service_handler
from corolla.chassis.lifecycle import fail
from corolla.chassis.metrics import MetricsEndpoint, RpcMetrics, TaskMetrics, new_registry
from corolla.chassis.parts import Part, Parts
from corolla.chassis.rpc_server import RpcServer
from corolla.chassis.tasks import TaskGroup
from corolla.chassis.weight_formats import tokens_follow_numerics
from corolla.client.adapters import ModelNames
from corolla.client.api.issuer import issuer_keys
from corolla.client.api.requests import RequestParser
from corolla.client.api.servicer import CallBounds, GenerationServicer
from corolla.client.api.tenants import Tenants, Tokens
from corolla.client.api.tokens import TokenRules
from corolla.client.generation.admission import Admission
from corolla.client.generation.answer_factory import DRAFT_SOURCES, AnswerFactory, ModelLimits
from corolla.client.generation.answering import Answering
from corolla.client.generation.running_request import Entrance
from corolla.client.generation.waiting_line import WaitingLine
from corolla.client.held_bytes import HeldBytes
from corolla.client.metrics import ClientMetrics
from corolla.client.output_parsing.parser_choice import OutputFormat
from corolla.client.quotas.enforcer import QuotaEnforcer
from corolla.client.reply_sizes import stated_bytes
from corolla.client.settings import ClientSettings
from corolla.client.text.chat import ChatTemplate, TemplateProcess
from corolla.client.text.grammar_process import GrammarProcess
from corolla.client.text.tokenizer import TextTokenizer
from corolla.client.transcripts import Transcripts
from corolla.http.endpoints import EndpointFactory
from corolla.http.exchange import Limits
from corolla.http.metrics import HttpMetrics
from corolla.http.openapi import router
from corolla.http.placement_facts import PlacementFacts, RecoveryLog, placement_facts
from corolla.http.placement_stream import PlacementStream
from corolla.http.routes import HttpRoutes
from corolla.http.server import HttpServer
from corolla.models.checkpoint import Checkpoint, end_token_ids_of
from corolla.models.demo import DEMO_MODEL
from corolla.models.families import recurrent_layers
from corolla.models.hub import Hub
from corolla.trust.credentials import PublicCertificate
from corolla.trust.origins import AllowedOrigins, OwnPages
from corolla.v1 import blocks_pb2, generation_pb2
from corolla.wire.network import Network
from corolla.wire.stream import between_servers

log = logging.getLogger(__name__)

_LEASE_MS: Final = 60_000
"""How long hops keep a running session without steps: longer than a client service needs to restart."""
_MAX_FIELDS: Final = 1 << 15
"""The most fields of a gRPC request: twice those of a request with everything that the servicer allows."""
_MAX_GRPC_REPLY_BYTES: Final = MAX_FRAME_BYTES - (1 << 10)
_MAX_CONNECTION_AGE_S: Final = 3600.0
"""A gRPC connection of this age takes no new calls. Its caller connects again, perhaps to a new replica."""


@dataclass(frozen=True, slots=True)
class ClientBounds:
    """Timeouts and limits of a client service that are the same in every deployment.

    Attributes:
        ping_after_s: seconds of silence after which a block server is pinged.
        silence_s: seconds of silence after which a block server counts as lost. A frozen server delays answers by that
            long.
        open_timeout_s: seconds that a live block server may take to open a session before it is avoided; a server that
            first finishes a long step needs far less.
        http_read_timeout_s: seconds until the head of an HTTP request must have arrived, and again for its body.
        farewell_s: how many seconds before a call's deadline the service stops waiting for a chain, so that the error
            still reaches the caller.
        reader_timeout_s: seconds after which an answer ends because its caller reads nothing and all buffers are full.
        quota_timeout_s: seconds that a router may take to count quotas; then the client service counts its own share.
        max_watchers: callers that may watch the placement at a time; where there are several tenants, each may have a
            quarter of these. All watchers get the same events, so the limit bounds connections, not work.
        token_skew_s: seconds by which the clocks of the issuer and of this service may differ.
        issuer_refresh_s: seconds until the issuer's key set is fetched again. A token with an unknown key causes an
            earlier fetch, but at most one in a thirtieth of this time.
    """

    ping_after_s: float = 1.0
    silence_s: float = 2.0
    open_timeout_s: float = 15.0
    http_read_timeout_s: float = 30.0
    farewell_s: float = 0.2
    reader_timeout_s: float = 120.0
    quota_timeout_s: float = 0.5
    max_watchers: int = 64
    token_skew_s: float = 30.0
    issuer_refresh_s: float = 300.0


USUAL_BOUNDS: Final = ClientBounds()


class ClientService:
    """One client service in this process.

    Args:
        network: the connections to routers and block servers; None: the settings decide them.
        bounds: how long the service waits for callers, routers and block servers.
    """

    # Each of these is there once its part has started; `_parts` names the parts.
    _checkpoint: Checkpoint
    _fingerprint: str
    _control: ControlPlane
    _placement: PlacementWatch
    _tokenizer: TextTokenizer
    _plane: DataPlane
    _routes: Routes
    _sessions: ChainSessions
    _transcripts: Transcripts
    _chat: ChatTemplate
    _end_token_ids: frozenset[int]
    _grammars: GrammarProcess
    _names: ModelNames
    _answering: Answering
    _model: generation_pb2.Model
    _servicer: GenerationServicer

    def __init__(
        self,
        settings: ClientSettings,
        *,
        network: Network | None = None,
        bounds: ClientBounds = USUAL_BOUNDS,
    ) -> None:
        self.settings = settings
        _warn_of_few_descriptors(settings)
        if settings.max_held_request_bytes < 2 * (settings.max_request_bytes + (settings.max_reply_mib << 20)):
            raise SettingsError(
                "COROLLA_MAX_HELD_REQUEST_BYTES must be at least twice COROLLA_MAX_REQUEST_BYTES and "
                "COROLLA_MAX_REPLY_MIB together, so that one tenant's largest request leaves room for others"
            )
        self._cache_salts = CacheSalts(settings.cache_secret.get_secret_value())
        self._network = network or Network.from_folder(settings.tls_dir)
        self._bounds = bounds
        self._hub = Hub(patience_s=settings.hub_patience_s)
        self._tokens = _tokens(settings, bounds)
        self._tenants = Tenants(settings.api_keys_file, self._tokens)
        self._certificate = PublicCertificate(settings.public_tls_dir) if settings.public_tls_dir else None
        self._registry = new_registry()
        self._metrics = ClientMetrics(self._registry)
        self._rpc_metrics = RpcMetrics(self._registry)
        self._quotas = QuotaEnforcer(
            settings.quotas_file,
            self._metrics,
            max_running=settings.max_running_requests,
            timeout_s=bounds.quota_timeout_s,
        )
        self._rpc = RpcServer(
            settings.host,
            settings.port,
            with_reflection=settings.reflection,
            callers=CallerBounds(settings.max_request_bytes, settings.max_connections, _MAX_CONNECTION_AGE_S),
            credentials=self._certificate.for_rpc_servers() if self._certificate is not None else None,
            metrics=self._rpc_metrics,
        )
        self._metrics_endpoint = MetricsEndpoint(
            self._registry, settings.metrics_host, settings.metrics_port, lambda: self._rpc.is_serving
        )
        self._http_metrics = HttpMetrics(self._registry, self._rpc_metrics)
        self._http = self._http_server()
        # If several tenants may come, a single one does not get the whole budget.
        self._held = HeldBytes(settings.max_held_request_bytes, self._min_shares)
        self._tasks = TaskGroup(lambda: fail(self._rpc.not_ready), TaskMetrics(self._registry))
        self._recoveries = RecoveryLog(time.time)
        self._watched_placement = PlacementStream(
            self._placement_facts, max_watchers=bounds.max_watchers, max_of_tenant=self._max_watchers_of_tenant
        )
        self._parts = Parts(
            Part("metrics port", stop=self._metrics_endpoint.close),
            Part("tasks", stop=self._tasks.close),
            Part("http port", stop=self._stop_http),
            Part("grpc port", stop=lambda: self._rpc.stop(0)),
            Part("metrics", self._metrics_endpoint.start, ["metrics port"]),
            Part("watched files", self._watch_files, ["tasks"]),
            Part("checkpoint", self._find_checkpoint),
            Part("router", self._connect_router, ["checkpoint", "tasks"], self._disconnect_router),
            Part("data plane", self._make_plane, ["router"], lambda: self._plane.close()),
            Part("routes", self._make_routes, ["router"], lambda: self._routes.close()),
            Part("sessions", self._make_sessions, ["routes", "data plane"], lambda: self._transcripts.close()),
            Part("text", self._make_text, ["checkpoint"], lambda: asyncio.to_thread(self._close_text)),
            Part("answering", self._make_answering, ["sessions", "text"]),
            Part("servicer", self._make_servicer, ["answering"]),
            Part("doors", self._open_doors, ["servicer", "grpc port", "http port"], self._close_doors),
        )

    @property
    def _max_grpc_reply_bytes(self) -> int:
        return min(self.settings.max_reply_mib << 20, _MAX_GRPC_REPLY_BYTES)

    @property
    def port(self) -> int:
        return self._rpc.port

    @property
    def http_port(self) -> int | None:
        """The port on which the service answers HTTP; None if it does not."""
        return self._http.port if self._http is not None else None

    @property
    def metrics_port(self) -> int:
        return self._metrics_endpoint.port

    @property
    def num_pending(self) -> int:
        """The number of steps and openings that block servers have not answered yet; 0 when no request runs."""
        return self._plane.num_pending if "data plane" in self._parts.started else 0

    async def start(self) -> None:
        """Loads the tokenizer, and serves."""
        await self._parts.start()
        log.info(
            "ready",
            extra={
                "port": self.port,
                "http_port": self.http_port,
                "metrics_port": self.metrics_port,
                "model": self._checkpoint.name,
            },
        )

    async def stop(self) -> None:
        """Lets running answers end within the grace period, and frees everything."""
        # A thread that waits for the hub would keep the process from ending.
        self._hub.stop()
        await self._parts.stop()

    def _watch_files(self) -> None:
        self._network.start_renewal(self._tasks)
        for part in (self._certificate, self._tenants, self._quotas):
            if part is not None and part.files is not None:
                self._tasks.start_restartable(part.files.run, "watched_files")
        if self._tokens is not None:
            keys = self._tokens.keys
            self._metrics.issuer_up.set_function(lambda: not keys.is_away)
            self._tasks.start_restartable(keys.run, "issuer_keys")

    async def _find_checkpoint(self) -> None:
        settings = self.settings
        self._checkpoint = await asyncio.to_thread(
            Checkpoint.from_pretrained, settings.model, revision=settings.revision, hub=self._hub
        )
        self._fingerprint = await asyncio.to_thread(
            self._checkpoint.fingerprint, settings.dtype, settings.quantization, settings.kv_cache_dtype
        )
        self._tokenizer = await asyncio.to_thread(TextTokenizer.load, self._checkpoint.folder)

    def _connect_router(self) -> None:
        self._control = ControlPlane(self.settings.router, self._checkpoint.name, self._network.channels)
        self._placement = PlacementWatch(self._control)
        self._tasks.start_essential(self._placement.run, "placement_watch")
        if self._quotas.files is not None:
            self._quotas.start(self._control)
            self._tasks.start_restartable(self._quotas.run, "quotas")

    async def _disconnect_router(self) -> None:
        # Tasks that ask the router end first.
        await self._tasks.close()
        # Gives back the quotas of requests that have just ended.
        await self._quotas.settle()
        await self._control.close()

    def _make_plane(self) -> None:
        bounds = self._bounds
        self._plane = DataPlane(
            self._fingerprint,
            self._tasks.subgroup(),
            replace(between_servers(), ping_after_s=bounds.ping_after_s, silence_s=bounds.silence_s),
            bounds.open_timeout_s,
            self._network.connect,
            self._metrics.discarded_tokens.inc,
            self._network.capabilities(self._fingerprint),
            self._placement,
        )

    async def _make_routes(self) -> None:
        settings, checkpoint = self.settings, self._checkpoint
        routes = self._routes = Routes(
            self._control,
            self._placement,
            self._fingerprint,
            checkpoint.num_blocks,
            on_quarantine=lambda cause: self._metrics.quarantines.labels(cause).inc(),
            fingerprint_parts=await asyncio.to_thread(
                checkpoint.fingerprint_parts, settings.dtype, settings.quantization, settings.kv_cache_dtype
            ),
        )
        clock = asyncio.get_running_loop().time
        self._metrics.quarantined.set_function(lambda: routes.quarantine.count(clock()))

    def _make_sessions(self) -> None:
        settings = self.settings
        limits = ChainLimits(
            prefill_chunk_tokens=settings.prefill_chunk_tokens,
            step_timeout_s=settings.step_timeout_s,
            lease_ms=_LEASE_MS,
            recovery_patience_s=settings.recovery_patience_s,
            max_microbatches=settings.max_microbatches,
            short_factor_length=self._checkpoint.short_factor_length,
            follows_numerics=tokens_follow_numerics(settings.dtype, settings.kv_cache_dtype),
            # Everybody could try which texts servers hold if there were no secret in it.
            names_beginnings=bool(settings.cache_secret.get_secret_value()),
        )
        self._sessions = ChainSessions(self._routes, self._plane, limits, self._tasks, self._on_recovery)
        self._transcripts = Transcripts(self._control, settings.session_ttl_s, self._tasks.subgroup())

    def _make_text(self) -> None:
        self._chat = ChatTemplate(self._tokenizer, TemplateProcess)
        self._end_token_ids = _end_token_ids(self._checkpoint, self._tokenizer)
        self._grammars = GrammarProcess(
            self._tokenizer, self._checkpoint.vocab_size, self._end_token_ids, self._metrics.grammars
        )

    def _close_text(self) -> None:
        self._chat.close()
        self._grammars.close()

    async def _make_answering(self) -> None:
        settings, checkpoint = self.settings, self._checkpoint
        own = (checkpoint.name, *([DEMO_MODEL] if settings.model == DEMO_MODEL else []))
        self._names = ModelNames(settings.model_names or own[:1], self._placement, own)
        drafts = blocks_pb2.Drafts(
            source=DRAFT_SOURCES[
                generation_pb2.SpeculationMode.Value(f"SPECULATION_MODE_{settings.speculation.upper()}")
            ],
            max_tokens=settings.max_draft_tokens,
            is_adaptive=settings.adaptive_drafts,
        )
        limits = ModelLimits(
            checkpoint.context_length,
            checkpoint.vocab_size,
            settings.default_max_tokens,
            self._end_token_ids,
            may_speculate=not recurrent_layers(checkpoint.config),
        )
        factory = AnswerFactory(self._tokenizer, limits, drafts, await asyncio.to_thread(self._tokenizer.widths))
        entrance = Entrance(
            self._quotas,
            self._admission(settings.max_running_requests, self._quotas.guaranteed_sequences),
            self._grammars,
            self._metrics,
            checkpoint.name,
            settings.trace_callers,
        )
        self._answering = Answering(entrance, self._sessions, self._names, factory, self._transcripts)

    def _admission(self, max_running: int, guarantees: Callable[[], Mapping[str, int]] = dict) -> Admission:
        # If several tenants may come, a single one does not get the whole line.
        return Admission(WaitingLine(max_running, self.settings.max_waiting_requests, self._min_shares, guarantees))

    def _make_servicer(self) -> None:
        checkpoint = self._checkpoint
        self._model = generation_pb2.Model(
            name=self._names.model, family=checkpoint.family.model_type, num_blocks=checkpoint.num_blocks,
            context_length=checkpoint.context_length, vocab_size=checkpoint.vocab_size, dtype=self.settings.dtype,
            fingerprint=self._fingerprint, has_chat_template=self._chat.exists, hidden_size=checkpoint.hidden_size,
        )  # fmt: skip
        # Only one tokenization runs at a time: its thread takes time from the thread that serves answers.
        self._servicer = GenerationServicer(
            self._model, self._quotas, self._answering, self._admission(1), self._transcripts, self._sessions,
            self._placement, self._tokenizer, self._chat, self._names,
            RequestParser(
                self._model, self._chat.reserved_names, OutputFormat.from_tokenizer(self._tokenizer), self._cache_salts,
                self.settings.standby,
            ),
            CallBounds(self._bounds.farewell_s, self._max_grpc_reply_bytes),
        )  # fmt: skip

    async def _open_doors(self) -> None:
        service = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
        handler = service_handler(
            service,
            self._servicer,
            self._rpc_metrics,
            max_request_bytes=self.settings.max_request_bytes,
            max_fields=_MAX_FIELDS,
            most_reply_bytes=partial(stated_bytes, most_bytes=self._max_grpc_reply_bytes),
            hold=self._held.hold,
            reader_timeout_s=self._bounds.reader_timeout_s,
            authenticate=self._tenants.authenticate,
            audited={f"{service.name}/{method.name}" for method in service.methods},
        )
        self._rpc.add(service, handler)
        if self._tokens is not None:
            await self._tokens.keys.ready()
        await self._rpc.start()
        if self._http is not None:
            await self._http.start(self._http_app())
            self._tasks.start_essential(self._http.run, "http")
        await self._rpc.ready()

    async def _close_doors(self) -> None:
        """Lets running answers end within the grace period."""
        self._watched_placement.close()
        grace_s = self.settings.grace_s
        await asyncio.gather(self._rpc.stop(grace_s), *([self._http.stop(grace_s)] if self._http is not None else []))
        await self._tasks.close()

    async def _stop_http(self) -> None:
        if self._http is not None:
            await self._http.stop(0)

    def _http_server(self) -> HttpServer | None:
        settings = self.settings
        if settings.http_port is None:
            return None
        return HttpServer(
            settings.host,
            settings.http_port,
            self._certificate.for_listeners() if self._certificate is not None else None,
            self._http_metrics,
            max_connections=min(settings.max_connections, most_connections_of_a_port()),
            head_timeout_s=self._bounds.http_read_timeout_s,
        )

    def _http_app(self) -> ASGIApp:
        settings, bounds = self.settings, self._bounds
        routes = HttpRoutes(
            self._servicer,
            self._model.name,
            lambda: self._rpc.is_serving,
            self._watched_placement,
            settings.max_reply_mib << 20,
        )
        limits = Limits(settings.max_request_bytes, self._held, bounds.http_read_timeout_s, bounds.reader_timeout_s)
        asks_for_keys = settings.api_keys_file is not None or bool(settings.oidc_issuer)
        origins = AllowedOrigins.parse(settings.http_origins)
        pages = None if asks_for_keys else OwnPages(settings.host, origins)
        endpoints = EndpointFactory(self._tenants.authenticate, self._http_metrics, limits, pages, origins)
        return router(endpoints, routes, has_page=settings.http_page)

    def _max_watchers_of_tenant(self) -> int:
        # If several tenants may come, a single one does not get all places.
        max_watchers = self._bounds.max_watchers
        return -(-max_watchers // 4) if self._tenants.are_several else max_watchers

    def _min_shares(self) -> int:
        """The least number of shares of the waiting line: 2 if several tenants may come, so that no tenant gets all."""
        return 2 if self._tenants.are_several else 1

    def _on_recovery(self, report: RecoveryReport) -> None:
        self._metrics.count_recovery(report)
        self._recoveries.add(report)

    def _placement_facts(self) -> PlacementFacts:
        model = self._model
        servers = [each for each in self._placement.servers if each.server.fingerprint == model.fingerprint]
        return placement_facts(
            model.name, model.num_blocks, servers, self._sessions.count_by_server(), self._recoveries
        )


def _warn_of_few_descriptors(settings: ClientSettings) -> None:
    if (most := most_connections_of_a_port()) < settings.max_connections:
        log.warning(
            "each port accepts fewer connections than COROLLA_MAX_CONNECTIONS, since this process may open few files; "
            "raise the limit (ulimit -Hn) to four times that number",
            extra={"connections": most},
        )


def _tokens(settings: ClientSettings, bounds: ClientBounds) -> Tokens | None:
    if not settings.oidc_issuer:
        return None
    rules = TokenRules(
        issuer=settings.oidc_issuer,
        audience=settings.oidc_audience,
        skew=timedelta(seconds=bounds.token_skew_s),
        tenant_claim=settings.oidc_tenant_claim,
        models_claim=settings.oidc_models_claim,
        scopes_claim=settings.oidc_scopes_claim,
    )
    keys = issuer_keys(settings.oidc_issuer, settings.oidc_jwks, settings.oidc_ca_file, bounds.issuer_refresh_s)
    return Tokens(rules, keys)


def _end_token_ids(checkpoint: Checkpoint, tokenizer: TextTokenizer) -> frozenset[int]:
    """The tokens that end answers; warns if the tokenizer's own end token is not among them."""
    found = frozenset(end_token_ids_of(checkpoint.generation_config()))
    if (end := tokenizer.unnamed_end(found)) is not None:
        log.warning(
            "generation_config.json does not name the tokenizer's end token, so answers go on after it",
            extra={"token": end},
        )
    return found
