"""What the chart learns from a cluster: it generates the secrets that are not there, and refuses some upgrades.

Where it is only rendered, it generates none.
"""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Final

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from corolla.issuer.role_tokens import ROLES, RoleTokens
from corolla.trust.authority import Authority
from corolla.trust.credentials import CertificateHolders
from corolla.trust.join_token import JoinToken
from corolla.trust.workload import Role, Workload
from tests.charts.rendering import ALL_APIS, CURRENT, NAMED, Object, Refused, named, of_kind, render, template

PASSWORD: Final = "rel-corolla-redis"
IDENTITIES: Final = "rel-corolla-identities"
NAMESPACE: Final = "/api/v1/namespaces/ns"
REDIS: Final = "/apis/apps/v1/namespaces/ns/statefulsets/rel-corolla-redis"
DISCOVERY: Final[Object] = {
    "/version": {"major": "1", "minor": CURRENT.split(".")[1], "gitVersion": f"v{CURRENT}"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [
            {"name": name, "namespaced": True, "kind": kind, "verbs": ["get", "list"]}
            for name, kind in (("secrets", "Secret"), ("configmaps", "ConfigMap"))
        ],
    },
    "/apis/apps/v1": {
        "kind": "APIResourceList",
        "groupVersion": "apps/v1",
        "resources": [{"name": "statefulsets", "namespaced": True, "kind": "StatefulSet", "verbs": ["get", "list"]}],
    },
}


def arguments() -> list[str]:
    return ["--kube-version", CURRENT, *(word for api in ALL_APIS for word in ("--api-versions", api))]


@contextmanager
def cluster(folder: Path, *present: Object) -> Iterator[dict[str, str]]:
    """The environment in which helm finds an API server that knows these objects and nothing else."""
    listed = {"kind": "SecretList", "apiVersion": "v1", "metadata": {}, "items": []}
    answers = DISCOVERY | {f"{NAMESPACE}/secrets": listed}
    for each in present:
        place = REDIS if each["kind"] == "StatefulSet" else f"{NAMESPACE}/{each['kind'].lower()}s"
        answers[place if place == REDIS else f"{place}/{each['metadata']['name']}"] = each

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            self.send_response(200 if answer else 404)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer or status).encode())

        def log_message(self, *words: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "fake",
        "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "nobody"}}],
        "users": [{"name": "nobody", "user": {}}],
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(config), encoding="utf-8")
    try:
        yield {"KUBECONFIG": str(folder / "kubeconfig"), "HOME": str(folder)}
    finally:
        server.shutdown()
        server.server_close()


def present(kind: str, name: str, data: dict[str, str]) -> Object:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": "ns"}, "data": data}


def drawn(environment: dict[str, str]) -> dict[str, dict[str, str]]:
    """What is in each Secret of a release, by name."""
    objects = template(["--dry-run=server", *arguments()], environment=environment)
    return {
        each["metadata"]["name"]: {key: base64.b64decode(value).decode() for key, value in each["data"].items()}
        for each in of_kind(objects, "Secret")
    }


def test_rendering_is_deterministic_and_holds_no_secret() -> None:
    first, second = (template(arguments(), json.dumps(NAMED)) for _ in range(2))
    assert first == second
    assert of_kind(first, "Secret") == []


def test_who_only_renders_must_say_where_certificates_come_from() -> None:
    """Argo CD would otherwise give certificates to a release that has none."""
    with pytest.raises(Refused, match=r"without a cluster.*issuer\.existingSecret.*tls\.enabled=false"):
        template(arguments())
    for values in OTHERWISE[1:]:
        template(arguments(), json.dumps(values))


def test_an_installation_draws_a_password_an_authority_and_tokens(tmp_path: Path) -> None:
    with cluster(tmp_path) as environment:
        one, other = drawn(environment), drawn(environment)
    assert one.keys() == other.keys() == {PASSWORD, IDENTITIES}
    for name in one:
        assert not {*one[name].values()} & {*other[name].values()}
    assert len(one[PASSWORD]["password"]) == 32
    folder = tmp_path / "identities"
    folder.mkdir()
    for name, text in one[IDENTITIES].items():
        (folder / name).write_text(text)
    authority = Authority.read_from(folder)
    assert one[IDENTITIES].keys() == {"ca.crt", "ca.key", *(f"{role.value}.token" for role in ROLES)}
    for role in ROLES:
        token = JoinToken.parse(one[IDENTITIES][f"{role.value}.token"])
        assert token is not None
        assert token.authority == authority.digest
        assert RoleTokens(folder).role_of(token) is role
    own = authority.sign(ec.generate_private_key(ec.SECP256R1()).public_key(), Workload("corolla", Role.BLOCK, "a"))
    holder = CertificateHolders(authority.certificate_pem).find((own.public_bytes(Encoding.DER),))
    assert holder is not None


def test_an_upgrade_keeps_the_secrets_that_there_are(tmp_path: Path) -> None:
    # An authority from before Redis had a role; it gets that token, too.
    before = {PASSWORD: {"password": "as it was"}, IDENTITIES: {"ca.crt": "a", "ca.key": "b", "block.token": "c"}}
    known = [
        present("Secret", name, {key: base64.b64encode(text.encode()).decode() for key, text in data.items()})
        for name, data in before.items()
    ]
    with cluster(tmp_path, *known) as environment:
        after = drawn(environment)
    assert after[PASSWORD] == before[PASSWORD]
    assert before[IDENTITIES].items() <= after[IDENTITIES].items()
    assert JoinToken.parse(after[IDENTITIES]["redis.token"]) is not None


OTHERWISE: Final[tuple[Object, ...]] = (
    {},
    {"tls": {"enabled": False}},
    {"tls": {"certManager": {"issuer": "authority"}}},
)
FOLDERS: Final = ("/run/corolla/tls", "", "/etc/corolla/tls")


@pytest.mark.parametrize("before, folder", [*enumerate(FOLDERS)], ids=["issuer", "none", "cert-manager"])
def test_an_upgrade_keeps_the_way_in_which_pods_get_certificates(tmp_path: Path, before: int, folder: str) -> None:
    known = present("ConfigMap", "rel-corolla-router", {"COROLLA_TLS_DIR": folder} if folder else {"COROLLA_PORT": "1"})
    with cluster(tmp_path, known) as environment:
        upgrade = ["--dry-run=server", "--is-upgrade", *arguments()]
        template(upgrade, json.dumps(OTHERWISE[before]), environment)
        says = "leave `tls` as it was" if folder else r"install a second release .*, or set tls\.enabled=false"
        with pytest.raises(Refused, match=says):
            template(upgrade, json.dumps(OTHERWISE[before - 1]), environment)


@pytest.mark.parametrize("had_certificate", [True, False])
def test_an_upgrade_gives_redis_no_certificate_that_routers_do_not_await(tmp_path: Path, had_certificate: bool) -> None:
    values = json.dumps(OTHERWISE[2])
    redis = present("StatefulSet", "rel-corolla-redis", {})
    if had_certificate:
        redis["spec"] = named(render(OTHERWISE[2]), "StatefulSet", "rel-corolla-redis")["spec"]
    else:
        redis["spec"] = {"template": {"spec": {"containers": [{"name": "redis", "args": ["exec redis-server -"]}]}}}
    known = present("ConfigMap", "rel-corolla-router", {"COROLLA_TLS_DIR": "/etc/corolla/tls"})
    with cluster(tmp_path, known, redis) as environment:
        upgrade = ["--dry-run=server", "--is-upgrade", *arguments()]
        with nullcontext() if had_certificate else pytest.raises(Refused, match="install a second release"):
            template(upgrade, values, environment)
