"""Certificates of a folder, as they are read, and read again when they change."""

import asyncio
import datetime
import os
import shutil
import socket
import ssl
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from corolla.chassis.errors import SettingsError
from corolla.trust.authority import Authority
from corolla.trust.channels import renewed_channels
from corolla.trust.credentials import (
    AUTHORITY_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    Credentials,
    PublicCertificate,
    workload_of_call,
)
from corolla.trust.watched_files import Contents, WatchedFiles
from corolla.trust.workload import Role, Workload
from tests.identities import Identities

ROUTER, CLIENT = Workload("test", Role.ROUTER, "1"), Workload("test", Role.CLIENT, "2")


def credentials_of(identities: Identities, workload: Workload) -> Credentials:
    return Credentials(identities.folder_of(workload.role, workload.name))


@asynccontextmanager
async def serving(credentials: Credentials | PublicCertificate) -> AsyncIterator[int]:
    """A server that tells callers their workload, and watchers the certificate that they have shown."""

    async def who(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        return str(workload_of_call(context.auth_context())).encode()

    async def watch(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        while True:
            yield b"".join(context.auth_context()["x509_pem_cert"])
            await asyncio.sleep(0.05)

    server = grpc.aio.server()
    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Who": grpc.unary_unary_rpc_method_handler(who),
        "Watch": grpc.unary_stream_rpc_method_handler(watch),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", methods),))
    port = server.add_secure_port("127.0.0.1:0", credentials.for_rpc_servers())
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


async def who(channel: grpc.aio.Channel) -> str:
    ask: Any = channel.unary_unary("/test.Service/Who")
    return str((await ask(b"", timeout=10)).decode())


def test_only_its_owner_reads_a_key(tmp_path: Path) -> None:
    folder = Identities(tmp_path).folder_of(Role.BLOCK, "1")
    assert stat.S_IMODE(os.stat(folder / KEY_FILE).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700


@pytest.mark.parametrize("name", [CERTIFICATE_FILE, KEY_FILE, AUTHORITY_FILE])
def test_a_missing_or_broken_file_is_named(tmp_path: Path, name: str) -> None:
    folder = Identities(tmp_path).folder_of(Role.BLOCK, "1")
    (folder / name).write_text("nonsense")
    with pytest.raises(SettingsError, match=f"COROLLA_TLS_DIR={folder}: "):
        Credentials(folder)
    (folder / name).unlink()
    with pytest.raises(SettingsError, match=f"{name} cannot be read: No such file"):
        Credentials(folder)


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    folder = identities.folder_of(Role.BLOCK, "1")
    shutil.copy(identities.folder_of(Role.BLOCK, "2") / KEY_FILE, folder / KEY_FILE)
    with pytest.raises(SettingsError, match="do not belong together"):
        Credentials(folder)


async def test_calls_say_who_makes_them(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    router, client = credentials_of(identities, ROUTER), credentials_of(identities, CLIENT)
    async with serving(router) as port:
        channel = renewed_channels(client)(f"127.0.0.1:{port}")
        assert await who(channel) == str(CLIENT)
        await channel.close(None)


async def test_who_shows_no_certificate_gets_no_answer(tmp_path: Path) -> None:
    router = credentials_of(Identities(tmp_path), ROUTER)
    authority = (tmp_path / "router-1" / AUTHORITY_FILE).read_bytes()
    async with serving(router) as port:
        for credentials in (grpc.ssl_channel_credentials(authority), None):
            target = f"127.0.0.1:{port}"
            channel = grpc.aio.secure_channel(target, credentials) if credentials else grpc.aio.insecure_channel(target)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await who(channel)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            await channel.close()


async def test_channels_and_servers_go_on_with_new_certificates(tmp_path: Path) -> None:
    """This also holds for a new authority, as long as each end trusts the one of the other while they change."""
    old, new = Authority(), Authority()
    identities = Identities(tmp_path, old)
    router, client = credentials_of(identities, ROUTER), credentials_of(identities, CLIENT)
    async with serving(router) as port:
        channel = renewed_channels(client)(f"127.0.0.1:{port}")
        assert await who(channel) == str(CLIENT)
        for trusted, signer in ((old.certificate_pem + new.certificate_pem, new), (new.certificate_pem, new)):
            for workload, credentials in ((ROUTER, router), (CLIENT, client)):
                folder = identities.folder_of(workload.role, workload.name)
                signer.issue(folder, workload, ["127.0.0.1"])
                (folder / AUTHORITY_FILE).write_bytes(trusted)
                credentials.files.refresh()
            assert await who(channel) == str(CLIENT)
        await channel.close(None)
        outdated = credentials_of(Identities(tmp_path / "other", old), CLIENT)
        channel = renewed_channels(outdated)(f"127.0.0.1:{port}")
        with pytest.raises(grpc.aio.AioRpcError):
            await who(channel)
        await channel.close(None)


def renewed_certificate(identities: Identities, credentials: Credentials, *, signer: Authority | None = None) -> bytes:
    """Which the client's process shows from now on."""
    folder = identities.folder_of(CLIENT.role, CLIENT.name)
    trusted = (folder / AUTHORITY_FILE).read_bytes()
    (signer or identities.authority).issue(folder, CLIENT, ["127.0.0.1"])
    (folder / AUTHORITY_FILE).write_bytes(trusted)
    credentials.files.refresh()
    return (folder / CERTIFICATE_FILE).read_bytes().strip()


async def test_a_watch_ends_when_certificates_change_and_the_next_one_shows_them(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    router, client = credentials_of(identities, ROUTER), credentials_of(identities, CLIENT)
    async with serving(router) as port, asyncio.timeout(60):
        channel = renewed_channels(client)(f"127.0.0.1:{port}")
        shown = (identities.folder_of(CLIENT.role, CLIENT.name) / CERTIFICATE_FILE).read_bytes().strip()
        watch: Any = channel.unary_stream("/test.Service/Watch")
        for _ in range(3):
            before, num_seen = shown, 0
            async for seen in watch(b""):
                assert seen.strip() == before
                num_seen += 1
                if num_seen == 2:
                    shown = renewed_certificate(identities, client)
            assert num_seen >= 2
        await channel.close(None)


async def test_a_channel_keeps_its_certificate_while_the_other_end_does_not_take_the_new_one(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    router, client = credentials_of(identities, ROUTER), credentials_of(identities, CLIENT)
    async with serving(router) as port, asyncio.timeout(60):
        channel = renewed_channels(client)(f"127.0.0.1:{port}")
        watch: Any = channel.unary_stream("/test.Service/Watch")
        num_seen = 0
        async for _ in watch(b""):
            num_seen += 1
            if num_seen == 1:
                renewed_certificate(identities, client, signer=Authority())
            elif num_seen == 20:
                assert await who(channel) == str(CLIENT)
                renewed_certificate(identities, client)
        assert num_seen >= 20
        assert await who(channel) == str(CLIENT)
        await channel.close(None)


def test_files_that_make_no_sense_leave_what_there_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    identities = Identities(tmp_path)
    credentials = credentials_of(identities, ROUTER)
    folder = identities.folder_of(Role.ROUTER, "1")
    (folder / CERTIFICATE_FILE).write_text("half a cert")
    for _ in range(3):
        credentials.files.refresh()
    assert credentials.version == 1
    assert len(caplog.records) == 1
    identities.authority.issue(folder, ROUTER, ["127.0.0.1"])
    credentials.files.refresh()
    assert credentials.version == 2


@pytest.mark.parametrize("number", [1, 100])
def test_files_that_change_at_a_start_are_read_again_and_not_for_ever(tmp_path: Path, number: int) -> None:
    """An issuer that starts beside a service writes its revocations meanwhile."""
    file, taken = tmp_path / "crl.pem", list[bytes]()

    def take(contents: Contents) -> None:
        taken.extend(contents)
        file.write_bytes(str(min(len(taken), number)).encode())

    def watched() -> WatchedFiles:
        return WatchedFiles("COROLLA_TLS_DIR", tmp_path, (), take, optional=(file.name,))

    if number == 1:
        watched()
        assert taken == [b"", b"1"]
    else:
        with pytest.raises(SettingsError, match="again and again"):
            watched()


async def test_a_certificate_that_has_ended_is_worth_nothing(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    router = credentials_of(identities, ROUTER)
    folder = identities.folder_of(Role.CLIENT, "2")
    identities.authority.issue(folder, CLIENT, [], until=datetime.datetime.now(datetime.UTC))
    async with serving(router) as port:
        channel = renewed_channels(Credentials(folder))(f"127.0.0.1:{port}")
        with pytest.raises(grpc.aio.AioRpcError):
            await who(channel)
        await channel.close(None)


async def test_nothing_older_than_tls_1_3_is_spoken_on_streams(tmp_path: Path) -> None:
    credentials = credentials_of(Identities(tmp_path), ROUTER)
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", ssl=credentials.for_listeners())
    port = server.sockets[0].getsockname()[1]

    def version(most: ssl.TLSVersion) -> str | None:
        context = ssl.create_default_context(cafile=str(tmp_path / "router-1" / AUTHORITY_FILE))
        context.load_cert_chain(tmp_path / "router-1" / CERTIFICATE_FILE, tmp_path / "router-1" / KEY_FILE)
        context.maximum_version = most
        with (
            socket.create_connection(("127.0.0.1", port)) as connection,
            context.wrap_socket(connection, server_hostname="localhost") as secured,
        ):
            return secured.version()

    assert await asyncio.to_thread(version, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
    with pytest.raises(ssl.SSLError):
        await asyncio.to_thread(version, ssl.TLSVersion.TLSv1_2)
    server.close()


async def test_callers_of_the_public_api_show_nothing(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    folder = identities.folder_of(Role.CLIENT, "1")
    certificate = PublicCertificate(folder)
    authority = identities.authority.certificate_pem
    async with serving(certificate) as port:
        for _ in range(2):
            async with grpc.aio.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(authority)) as channel:
                assert await who(channel) == "None"
            other = Authority()
            other.issue(folder, CLIENT, ["127.0.0.1"])
            certificate.files.refresh()
            authority = other.certificate_pem


def test_one_of_another_trust_domain_is_a_stranger(tmp_path: Path) -> None:
    """Also where the same authority signs for both."""
    credentials = credentials_of(Identities(tmp_path), ROUTER)
    assert credentials.knows(CLIENT)
    assert not credentials.knows(Workload("elsewhere", Role.CLIENT, "2"))
    assert not credentials.knows(None)
