"""The client service, which makes, connects, starts and stops all its parts."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
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
from corolla.chassis.rpc_server import RpcServer
from corolla.chassis.tasks import TaskGroup
from corolla.chassis.weight_formats import tokens_follow_numerics
from corolla.client.adapters import ModelNames
from corolla.client.api.issuer import issuer_keys
from corolla.client.api.servicer import CallBounds, GenerationServicer
from corolla.client.api.tenants import Tenants, Tokens
from corolla.client.api.tokens import TokenRules
from corolla.client.bounds import USUAL_BOUNDS, ClientBounds
from corolla.client.generation.admission import Admission
from corolla.client.generation.answering import Answering, ModelLimits, SpeculationDefaults
from corolla.client.generation.request_trace import RequestTraces
from corolla.client.generation.waiting_line import WaitingLine
from corolla.client.held_bytes import HeldBytes
from corolla.client.http.endpoints import EndpointFactory
from corolla.client.http.exchange import Limits
from corolla.client.http.metrics import HttpMetrics
from corolla.client.http.openapi import router
from corolla.client.http.origins import AllowedOrigins, OwnPages
from corolla.client.http.placement_facts import PlacementFacts, placement_facts
from corolla.client.http.placement_stream import PlacementStream
from corolla.client.http.recovery_log import RecoveryLog
from corolla.client.http.routes import HttpRoutes
from corolla.client.http.server import HttpServer
from corolla.client.metrics import ClientMetrics
from corolla.client.quotas.enforcer import QuotaEnforcer
from corolla.client.reply_sizes import stated_bytes
from corolla.client.settings import ClientSettings
from corolla.client.text.chat import ChatTemplate
from corolla.client.text.grammar_process import GrammarProcess
from corolla.client.text.template_process import TemplateProcess
from corolla.client.text.tokenizer import TextTokenizer
from corolla.client.transcripts import Transcripts
from corolla.decoding.parameters import SpeculationMode
from corolla.models.checkpoint import Checkpoint, end_token_ids_of
from corolla.models.demo import DEMO_MODEL
from corolla.models.families import recurrent_layers
from corolla.models.hub import Hub
from corolla.trust.credentials import PublicCertificate
from corolla.v1 import generation_pb2
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


class ClientService:
    """One client service in this process.

    Args:
        network: the connections to routers and block servers; None: the settings decide them.
        bounds: how long the service waits for callers, routers and block servers.
    """

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
        self._network = network or Network.of(settings.tls_dir)
        self._bounds = bounds
        self._hub = Hub(patience_s=settings.hub_patience_s)
        self._tokens = _tokens(settings, bounds)
        self._tenants = Tenants(settings.api_keys_file, self._tokens)
        self._certificate = PublicCertificate(settings.public_tls_dir) if settings.public_tls_dir else None
        self._registry = new_registry()
        self._metrics = ClientMetrics(self._registry)
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
        )
        self._metrics_endpoint = MetricsEndpoint(
            self._registry, settings.metrics_host, settings.metrics_port, lambda: self._rpc.is_serving
        )
        self._rpc_metrics = RpcMetrics(self._registry)
        self._http_metrics = HttpMetrics(self._registry, self._rpc_metrics)
        self._http = self._http_server()
        # If several tenants may come, a single one does not get the whole budget.
        self._held = HeldBytes(settings.max_held_request_bytes, self._min_shares)
        self._tasks = TaskGroup(lambda: fail(self._rpc.not_ready), TaskMetrics(self._registry))
        self._control: ControlPlane | None = None
        self._plane: DataPlane | None = None
        self._routes: Routes | None = None
        self._transcripts: Transcripts | None = None
        self._chat: ChatTemplate | None = None
        self._grammars: GrammarProcess | None = None
        self._recoveries = RecoveryLog(time.time)
        self._placement_stream: PlacementStream | None = None

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
        return self._plane.num_pending if self._plane is not None else 0

    async def start(self) -> None:
        """Loads the tokenizer, and serves."""
        settings, bounds = self.settings, self._bounds
        self._metrics_endpoint.start()
        self._network.start_renewal(self._tasks)
        for part in (self._certificate, self._tenants, self._quotas):
            if part is not None and part.files is not None:
                self._tasks.start_restartable(part.files.run, "watched_files")
        if self._tokens is not None:
            keys = self._tokens.keys
            self._metrics.issuer_up.set_function(lambda: not keys.is_away)
            self._tasks.start_restartable(keys.run, "issuer_keys")
        checkpoint = await asyncio.to_thread(
            Checkpoint.from_pretrained, settings.model, revision=settings.revision, hub=self._hub
        )
        fingerprint = await asyncio.to_thread(
            checkpoint.fingerprint, settings.dtype, settings.quantization, settings.kv_cache_dtype
        )
        control = self._control = ControlPlane(settings.router, checkpoint.name, self._network.channels)
        placement = PlacementWatch(control)
        self._tasks.start_essential(placement.run, "placement_watch")
        if self._quotas.files is not None:
            self._quotas.start(control)
            self._tasks.start_restartable(self._quotas.run, "quotas")
        tokenizer = await asyncio.to_thread(TextTokenizer.load, checkpoint.folder)
        plane = self._plane = DataPlane(
            fingerprint,
            self._tasks.subgroup(),
            replace(between_servers(), ping_after_s=bounds.ping_after_s, silence_s=bounds.silence_s),
            bounds.open_timeout_s,
            self._network.connect,
            self._metrics.discarded_tokens.inc,
            self._network.capabilities(fingerprint),
            placement,
        )
        routes = self._routes = Routes(
            control,
            placement,
            fingerprint,
            checkpoint.num_blocks,
            on_quarantine=lambda cause: self._metrics.quarantines.labels(cause).inc(),
            fingerprint_parts=await asyncio.to_thread(
                checkpoint.fingerprint_parts, settings.dtype, settings.quantization, settings.kv_cache_dtype
            ),
        )
        clock = asyncio.get_running_loop().time
        self._metrics.quarantined.set_function(lambda: routes.quarantine.count(clock()))
        sessions = ChainSessions(routes, plane, _limits(settings, checkpoint), self._on_recovery)
        transcripts = self._transcripts = Transcripts(control, settings.session_ttl_s, self._tasks.subgroup())
        chat = self._chat = ChatTemplate(tokenizer, TemplateProcess)
        # If several tenants may come, a single one does not get the whole line.
        line = settings.max_waiting_requests, self._min_shares
        admission = Admission(WaitingLine(settings.max_running_requests, *line, self._quotas.guaranteed_sequences))
        # Only one tokenization runs at a time: its thread takes time from the thread that serves answers.
        tokenizations = Admission(WaitingLine(1, *line))
        end_token_ids = _end_token_ids(checkpoint, tokenizer)
        grammars = self._grammars = GrammarProcess(
            tokenizer, checkpoint.vocab_size, end_token_ids, self._metrics.grammars
        )
        names = _names(settings, checkpoint, placement)
        answering = Answering(
            sessions,
            transcripts,
            tokenizer,
            ModelLimits(
                checkpoint.context_length,
                checkpoint.vocab_size,
                settings.default_max_tokens,
                end_token_ids,
                may_speculate=not recurrent_layers(checkpoint.config),
            ),
            self._quotas,
            admission,
            SpeculationDefaults(
                SpeculationMode(settings.speculation), settings.max_draft_tokens, settings.adaptive_drafts
            ),
            self._metrics,
            grammars,
            names,
            RequestTraces(checkpoint.name, settings.trace_callers),
            await asyncio.to_thread(tokenizer.widths),
        )
        model = generation_pb2.Model(
            name=names.model, family=checkpoint.family.model_type, num_blocks=checkpoint.num_blocks,
            context_length=checkpoint.context_length, vocab_size=checkpoint.vocab_size, dtype=settings.dtype,
            fingerprint=fingerprint, has_chat_template=chat.exists, hidden_size=checkpoint.hidden_size,
        )  # fmt: skip
        servicer = GenerationServicer(
            model, self._quotas, answering, tokenizations, transcripts, sessions, placement, tokenizer,
            chat, self._cache_salts, names,
            bounds=CallBounds(bounds.farewell_s, self._max_grpc_reply_bytes),
        )  # fmt: skip
        self._add_to_rpc(servicer)
        if self._tokens is not None:
            await self._tokens.keys.ready()
        await self._rpc.start()
        if self._http is not None:
            describe = partial(self._placement_facts, model, placement, sessions)
            await self._start_http(self._http, servicer, model.name, describe)
        await self._rpc.ready()
        log.info(
            "ready",
            extra={
                "port": self.port,
                "http_port": self.http_port,
                "metrics_port": self.metrics_port,
                "model": checkpoint.name,
            },
        )

    async def stop(self) -> None:
        """Lets running answers end within the grace period, and frees everything."""
        self._hub.stop()
        if self._placement_stream is not None:
            self._placement_stream.close()
        grace_s = self.settings.grace_s
        await asyncio.gather(self._rpc.stop(grace_s), *([self._http.stop(grace_s)] if self._http is not None else []))
        await self._tasks.close()
        for part in (self._quotas, self._transcripts, self._routes, self._plane, self._control):
            if part is not None:
                await part.close()
        for process in (self._chat, self._grammars):
            if process is not None:
                await asyncio.to_thread(process.close)
        self._metrics_endpoint.close()

    def _add_to_rpc(self, servicer: GenerationServicer) -> None:
        service = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
        handler = service_handler(
            service,
            servicer,
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

    async def _start_http(
        self, server: HttpServer, servicer: GenerationServicer, model: str, describe: Callable[[], PlacementFacts]
    ) -> None:
        max_watchers = self._bounds.max_watchers

        def max_of_tenant() -> int:
            # If several tenants may come, a single one does not get all places.
            return -(-max_watchers // 4) if self._tenants.are_several else max_watchers

        watched = PlacementStream(describe, max_watchers=max_watchers, max_of_tenant=max_of_tenant)
        self._placement_stream = watched
        await server.start(
            self._http_app(
                HttpRoutes(servicer, model, lambda: self._rpc.is_serving, watched, self.settings.max_reply_mib << 20)
            )
        )
        self._tasks.start_essential(server.run, "http")

    def _http_app(self, routes: HttpRoutes) -> ASGIApp:
        settings, bounds = self.settings, self._bounds
        limits = Limits(settings.max_request_bytes, self._held, bounds.http_read_timeout_s, bounds.reader_timeout_s)
        asks_for_keys = settings.api_keys_file is not None or bool(settings.oidc_issuer)
        origins = AllowedOrigins.parse(settings.http_origins)
        pages = None if asks_for_keys else OwnPages(settings.host, origins)
        endpoints = EndpointFactory(self._tenants.authenticate, self._http_metrics, limits, pages, origins)
        return router(endpoints, routes, has_page=settings.http_page)

    def _min_shares(self) -> int:
        """The least number of shares of the waiting line: 2 if several tenants may come, so that no tenant gets all."""
        return 2 if self._tenants.are_several else 1

    def _on_recovery(self, report: RecoveryReport) -> None:
        self._metrics.count_recovery(report)
        self._recoveries.add(report)

    def _placement_facts(
        self, model: generation_pb2.Model, placement: PlacementWatch, sessions: ChainSessions
    ) -> PlacementFacts:
        servers = [each for each in placement.servers if each.server.fingerprint == model.fingerprint]
        return placement_facts(model.name, model.num_blocks, servers, sessions.count_by_server(), self._recoveries)


def _warn_of_few_descriptors(settings: ClientSettings) -> None:
    if (most := most_connections_of_a_port()) < settings.max_connections:
        log.warning(
            "each port accepts fewer connections than COROLLA_MAX_CONNECTIONS, since this process may open few files; "
            "raise the limit (ulimit -Hn) to four times that number",
            extra={"connections": most},
        )


def _names(settings: ClientSettings, checkpoint: Checkpoint, placement: PlacementWatch) -> ModelNames:
    """Names of the model: the names in the settings, and its own name."""
    own = (checkpoint.name, *([DEMO_MODEL] if settings.model == DEMO_MODEL else []))
    return ModelNames(settings.model_names or own[:1], placement, own)


def _tokens(settings: ClientSettings, bounds: ClientBounds) -> Tokens | None:
    if not settings.oidc_issuer:
        return None
    rules = TokenRules(
        issuer=settings.oidc_issuer,
        audience=settings.oidc_audience,
        algorithms=settings.algorithms,
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


def _limits(settings: ClientSettings, checkpoint: Checkpoint) -> ChainLimits:
    return ChainLimits(
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        step_timeout_s=settings.step_timeout_s,
        lease_ms=_LEASE_MS,
        recovery_patience_s=settings.recovery_patience_s,
        max_microbatches=settings.max_microbatches,
        short_factor_length=checkpoint.short_factor_length,
        follows_numerics=tokens_follow_numerics(settings.dtype, settings.kv_cache_dtype),
    )
