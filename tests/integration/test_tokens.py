"""Tokens of an identity provider, over real gRPC: which ones hold, what they allow, and what becomes of their keys."""

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives import serialization

from corolla.chassis import audit
from corolla.chassis.channels import open_channel
from corolla.chassis.errors import QuotaExceeded, ScopeDenied, SettingsError, Unauthenticated
from corolla.chassis.settings import load
from corolla.client.api.keys import NewKey
from corolla.client.service import ClientBounds, ClientService
from corolla.client.settings import ClientSettings
from corolla.sdk.async_client import AsyncClient
from tests.checkpoints import make_tiny_checkpoint
from tests.identity_provider import AUDIENCE, IdentityProvider, SigningKey, key_set
from tests.integration.metrics import sample
from tests.integration.refusals import is_taken, refusal
from tests.integration.swarm import Swarm
from tests.integration.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = 12_000
SKEW_S = 2.0
REFRESH_S = 15.0
PAUSE_S = REFRESH_S / 30


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IdentityProvider]:
    folder = tmp_path_factory.mktemp("provider")
    with IdentityProvider(folder, SigningKey("first"), SigningKey("curve", has_curve=True)) as provider:
        yield provider


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(tmp_path_factory: pytest.TempPathFactory, provider: IdentityProvider) -> AsyncIterator[Swarm]:
    folder = tmp_path_factory.mktemp("tokens")
    model = make_tiny_checkpoint("llama", folder / "tiny", config_changes={"max_position_embeddings": 16384})
    bounds = ClientBounds(token_skew_s=SKEW_S, issuer_refresh_s=REFRESH_S)
    key = provider.token(exp=time.time() + 600)
    async with Swarm(folder, model, ["0:5"], client=provider.settings, bounds=bounds, api_key=key) as swarm:
        yield swarm


def encoded(part: Mapping[str, Any] | bytes) -> str:
    data = part if isinstance(part, bytes) else json.dumps(part).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def signed_with_the_public_key(provider: IdentityProvider) -> str:
    """HS256, with what everybody knows as the secret."""
    public = provider.keys[0].private.public_key()
    secret = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    signed = f"{encoded({'alg': 'HS256', 'kid': 'first'})}.{encoded(provider.claims())}"
    return f"{signed}.{encoded(hmac.new(secret, signed.encode(), hashlib.sha256).digest())}"


def bad_tokens(provider: IdentityProvider) -> dict[str, str]:
    now, first = time.time(), provider.keys[0]
    good = first.sign(provider.claims())
    head, claims, signature = good.split(".")
    return {
        "another audience": first.sign(provider.claims(aud="another")),
        "no audience": first.sign(provider.claims(aud=None)),
        "another issuer": first.sign(provider.claims(iss="https://another")),
        "no issuer": first.sign(provider.claims(iss=None)),
        "expired": first.sign(provider.claims(exp=now - SKEW_S - 1)),
        "for ever": first.sign(provider.claims(exp=None)),
        "until the end of numbers": first.sign(provider.claims(exp=1e308)),
        "not yet": first.sign(provider.claims(nbf=now + SKEW_S + 30)),
        "of the future": first.sign(provider.claims(iat=now + SKEW_S + 30)),
        "nobody's": first.sign(provider.claims(sub=None)),
        "a name of two lines": first.sign(provider.claims(sub="a\nb")),
        "a long name": first.sign(provider.claims(sub="a" * 257)),
        "no algorithm": f"{encoded({'alg': 'none', 'kid': 'first'})}.{claims}.",
        "the public key as a secret": signed_with_the_public_key(provider),
        "another algorithm of the key": f"{encoded({'alg': 'ES256', 'kid': 'first'})}.{claims}.{signature}",
        "another's key": SigningKey("first").sign(provider.claims()),
        "an unknown key": SigningKey("unknown", has_curve=True).sign(provider.claims()),
        "no key": f"{encoded({'alg': 'RS256'})}.{claims}.{signature}",
        "a key of its own": first.sign(provider.claims(), {"kid": "unknown", "jwk": first.described}),
        "other claims": f"{head}.{encoded(provider.claims(sub='eve'))}.{signature}",
        "critical parts": first.sign(provider.claims(), {"crit": ["x"], "x": 1}),
        "a list as algorithm": f"{encoded({'alg': ['RS256'], 'kid': 'first'})}.{claims}.{signature}",
        "nesting": f"{encoded(b'[' * 5000)}.{claims}.{signature}",
        "no claims": f"{head}.{encoded(b'7')}.{signature}",
        "one part": "x",
        "nothing": "",
    }


async def test_every_kind_of_bad_token_gets_the_same_answer(swarm: Swarm, provider: IdentityProvider) -> None:
    answers: dict[str, tuple[Any, str, str]] = {}
    async with open_channel(swarm.address) as channel:
        for name, token in bad_tokens(provider).items():
            refused = await refusal(channel, "ListModels", b"", api_key=token)
            answers[name] = (refused.code, refused.reason, refused.message)
    expected = (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", "the key or token is not known")
    assert {name: answer for name, answer in answers.items() if answer != expected} == {}


@pytest.mark.parametrize("number", [0, 1], ids=["RS256", "ES256"])
async def test_a_token_that_holds_is_taken(swarm: Swarm, provider: IdentityProvider, number: int) -> None:
    token = provider.keys[number].sign(provider.claims(aud=["another", AUDIENCE], nbf=time.time() + SKEW_S / 2))
    async with AsyncClient(swarm.address, api_key=token) as client:
        answer = await client.generate([1, 2, 3], max_tokens=2, ignore_eos=True)
        assert len(answer.token_ids) == 2


async def test_a_bad_token_is_refused_before_the_request_is_read(swarm: Swarm, provider: IdentityProvider) -> None:
    bad = provider.token(aud="another")
    async with open_channel(swarm.address) as channel:
        untyped: Any = channel
        call = untyped.stream_stream("/corolla.v1.GenerationService/GenerateStream")(
            metadata=[("authorization", f"Bearer {bad}")]
        )
        assert await asyncio.wait_for(call.code(), 5) is grpc.StatusCode.UNAUTHENTICATED


async def test_no_token_is_of_a_tenant_that_has_keys(swarm: Swarm, provider: IdentityProvider, tmp_path: Path) -> None:
    """Not even one whose answer runs when the tenant gets its key."""
    key, file = NewKey("acme"), tmp_path / "keys"
    file.write_text("another:0123456789abcdef\n")
    service = await swarm.add_client(api_keys_file=file)
    address = f"127.0.0.1:{service.port}"
    token = provider.token(sub="acme")
    async with AsyncClient(address, api_key=token) as client:
        stream = client.stream([1, 2, 3], max_tokens=LONG, ignore_eos=True)
        await anext(stream)
        file.write_text(f"another:0123456789abcdef\n{key.record.line}\n")

        async def is_refused() -> bool:
            return not await is_taken(address, token)

        await until(is_refused, 10)
        with pytest.raises(Unauthenticated, match="has expired or was revoked"):
            async for _ in stream:
                pass
    assert await is_taken(address, key.key)
    assert await is_taken(address, provider.token())


@pytest.mark.full
async def test_an_answer_ends_with_its_token(swarm: Swarm, provider: IdentityProvider) -> None:
    async with (
        AsyncClient(swarm.address, api_key=provider.token(exp=time.time() + 13)) as one,
        AsyncClient(swarm.address, api_key=provider.token()) as other,
    ):
        # No caller takes their tokens meanwhile, so neither comes to its end.
        ending, going = (each.stream([1, 2, 3], max_tokens=LONG, ignore_eos=True) for each in (one, other))
        for stream in (ending, going):
            await anext(stream)
        await asyncio.sleep(13 + SKEW_S)
        with pytest.raises(Unauthenticated, match="has expired or was revoked"):
            async for _ in ending:
                pass
        for _ in range(50):
            await anext(going)
        going.close()


async def test_claims_name_tenant_models_and_scopes(swarm: Swarm, provider: IdentityProvider, tmp_path: Path) -> None:
    quotas = tmp_path / "quotas"
    quotas.write_text(json.dumps({"tenants": {"acme": {"stored_sessions": 1}}}))
    service = await swarm.add_client(
        oidc_tenant_claim="org", oidc_models_claim="models", oidc_scopes_claim="scope", quotas_file=quotas
    )

    def connect(**claims: Any) -> AsyncClient:
        given = {"org": "acme", "models": ["tiny"], "scope": "openid generate sessions", **claims}
        return AsyncClient(f"127.0.0.1:{service.port}", api_key=provider.token(**given))

    async with connect() as client:
        await client.generate([1, 2, 3], max_tokens=1)
        with pytest.raises(ScopeDenied):
            await client.tokenize("the")
        session_id = (await client.create_session()).session_id
        async with connect(sub="grace") as other:
            assert (await other.get_session(session_id)).session_id == session_id
            with pytest.raises(QuotaExceeded):
                await other.create_session()
        await client.delete_session(session_id)
    for denied in ({"models": ["large"]}, {"models": None}, {"scope": None}, {"scope": ["chat"]}, {"models": 7}):
        async with connect(**denied) as client:
            with pytest.raises(ScopeDenied):
                await client.generate([1, 2, 3], max_tokens=1)
    for org in (None, 7, ["acme"], ""):
        async with connect(org=org) as client:
            with pytest.raises(Unauthenticated):
                await client.models()


async def test_the_audit_log_names_tenant_and_subject_without_showing_who(
    swarm: Swarm, provider: IdentityProvider, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger(audit.LOGGER)
    lines: list[dict[str, Any]] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(vars(record))  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        tokens = [provider.token(), provider.keys[1].sign(provider.claims()), provider.token(sub="eve")]
        for token in tokens:
            async with AsyncClient(swarm.address, api_key=token) as client:
                await client.models()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    ids = [each["key"] for each in lines]
    expected = hashlib.sha256(f"{provider.issuer}\0ada".encode()).hexdigest()[:16]
    assert ids[0] == ids[1] == expected != ids[2]
    assert [each["tenant"] for each in lines] == ["ada", "ada", "eve"]
    assert not any(token in repr(lines) for token in tokens)


async def until_rested(swarm: Swarm, provider: IdentityProvider) -> None:
    """The issuer's keys of now are known, the next unknown one is fetched at once, and none without one for a while."""
    await asyncio.sleep(1.2 * PAUSE_S)
    await is_taken(swarm.address, SigningKey("made-up", has_curve=True).sign(provider.claims()))
    await asyncio.sleep(1.2 * PAUSE_S)


async def test_a_key_that_the_issuer_begins_to_use_is_fetched_for_its_first_token(
    swarm: Swarm, provider: IdentityProvider
) -> None:
    await until_rested(swarm, provider)
    new = SigningKey("second", has_curve=True)
    provider.keys.append(new)
    assert await is_taken(swarm.address, new.sign(provider.claims()))


async def test_an_answer_ends_with_the_key_that_its_token_was_signed_with(
    swarm: Swarm, provider: IdentityProvider
) -> None:
    leaked = SigningKey("leaked", has_curve=True)
    provider.keys.append(leaked)
    await until_rested(swarm, provider)
    async with AsyncClient(swarm.address, api_key=leaked.sign(provider.claims())) as client:
        stream = client.stream([1, 2, 3], max_tokens=LONG, ignore_eos=True)
        await anext(stream)
        provider.keys.remove(leaked)
        assert not await is_taken(swarm.address, SigningKey("made-up", has_curve=True).sign(provider.claims()))
        with pytest.raises(Unauthenticated):
            async for _ in stream:
                pass


async def test_made_up_keys_do_not_become_requests_to_the_issuer(swarm: Swarm, provider: IdentityProvider) -> None:
    claims, one = provider.claims(), SigningKey("any", has_curve=True)
    before, began = provider.num_requests, time.monotonic()
    for wave in range(20):
        tokens = [one.sign(claims, {"kid": f"made-up-{wave}-{number}"}) for number in range(20)]
        assert not any(await asyncio.gather(*(is_taken(swarm.address, each) for each in tokens)))
    assert await is_taken(swarm.address, provider.token())
    assert provider.num_requests - before <= 2 + (time.monotonic() - began) / PAUSE_S


async def test_a_slow_issuer_holds_up_only_those_whose_key_is_not_known(
    swarm: Swarm, provider: IdentityProvider
) -> None:
    await until_rested(swarm, provider)
    before = provider.num_requests
    provider.may_give_keys.clear()
    try:
        asking = asyncio.create_task(
            is_taken(swarm.address, SigningKey("made-up", has_curve=True).sign(provider.claims()))
        )
        await until(lambda: _has_been_asked(provider, before))
        assert await is_taken(swarm.address, provider.token())
        assert not asking.done()
        provider.may_give_keys.set()
        assert not await asking
    finally:
        provider.may_give_keys.set()


async def test_known_keys_stay_in_force_while_the_issuer_is_away(swarm: Swarm, provider: IdentityProvider) -> None:
    async def is_up(expected: float) -> bool:
        return await sample(swarm.clients[0].metrics_port, "corolla_issuer_up") == expected

    await until_rested(swarm, provider)
    assert await is_up(1)
    before = provider.num_requests
    provider.status = 503
    try:
        new = SigningKey("third", has_curve=True)
        provider.keys.append(new)
        assert not await is_taken(swarm.address, new.sign(provider.claims()))
        assert await is_taken(swarm.address, provider.token())
        assert provider.num_requests == before
        assert await is_up(0)
    finally:
        provider.status = 0
    # The provider is asked again soon, though no token names a new key.
    await until(lambda: _has_been_asked(provider, before), 10)
    await until(lambda: is_taken(swarm.address, new.sign(provider.claims())), 10)
    assert await is_up(1)


async def _has_been_asked(provider: IdentityProvider, before: int) -> bool:
    return provider.num_requests > before


async def test_a_file_of_keys_needs_no_issuer(swarm: Swarm, provider: IdentityProvider, tmp_path: Path) -> None:
    first, second = SigningKey("a", has_curve=True), SigningKey("b", has_curve=True)
    file = tmp_path / "jwks.json"
    file.write_bytes(key_set(first))
    service = await swarm.add_client(oidc_issuer="https://nowhere.invalid", oidc_jwks=str(file))
    address = f"127.0.0.1:{service.port}"
    one, other = (each.sign(provider.claims(iss="https://nowhere.invalid")) for each in (first, second))
    assert await is_taken(address, one)
    assert not await is_taken(address, other)
    file.write_bytes(key_set(second))
    await until(partial(is_taken, address, other), 10)
    assert not await is_taken(address, one)
    file.write_text("nonsense")
    await asyncio.sleep(3)
    assert await is_taken(address, other)


async def test_a_client_service_serves_once_it_has_the_issuers_keys(swarm: Swarm, provider: IdentityProvider) -> None:
    provider.describes = {"issuer": "https://another"}
    try:
        starting = asyncio.create_task(swarm.add_client(bounds=ClientBounds(issuer_refresh_s=3.0)))
        await asyncio.sleep(1)
        assert not starting.done()
    finally:
        provider.describes = {}
    service = await asyncio.wait_for(starting, 10)
    assert await is_taken(f"127.0.0.1:{service.port}", provider.token())


async def test_a_broken_file_of_an_issuers_keys_ends_the_start(tmp_path: Path) -> None:
    file = tmp_path / "jwks"
    settings = partial(
        load, ClientSettings, host="127.0.0.1", port=0, metrics_port=0, oidc_issuer="https://a", oidc_audience="b"
    )
    for content, says in (("nonsense", "is not a JSON Web Key Set"), ('{"keys": []}', "holds no public key")):
        file.write_text(content)
        with pytest.raises(SettingsError, match=f"COROLLA_OIDC_JWKS.*{says}"):
            ClientService(settings(oidc_jwks=str(file)))
    with pytest.raises(SettingsError, match=r"COROLLA_OIDC_CA_FILE.*cannot be read"):
        ClientService(settings(oidc_ca_file=tmp_path / "none"))


@pytest.mark.parametrize(
    "given, says",
    [
        ({"oidc_issuer": "http://a", "oidc_audience": "b"}, "COROLLA_OIDC_ISSUER='http://a': .*must begin with https"),
        ({"oidc_issuer": "https://a"}, "COROLLA_OIDC_AUDIENCE='': .*must be set"),
        ({"oidc_jwks": "http://a/keys"}, "COROLLA_OIDC_JWKS.*must begin with https"),
        ({"oidc_audience": "b"}, "COROLLA_OIDC_AUDIENCE='b': .*needs COROLLA_OIDC_ISSUER"),
        ({"oidc_jwks": "/keys"}, "COROLLA_OIDC_JWKS='/keys': .*needs COROLLA_OIDC_ISSUER"),
    ],
    ids=[
        "plain issuer",
        "no audience",
        "plain keys",
        "audience of nobody",
        "keys of nobody",
    ],
)
async def test_settings_that_would_let_others_in_are_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        load(ClientSettings, **given)
