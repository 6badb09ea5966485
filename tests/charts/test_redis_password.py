"""The chart generates a password for Redis if the cluster has none, and never when it is only rendered."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Final

import yaml

from tests.charts.rendering import ALL_APIS, CURRENT, Object, named, of_kind, template

SECRET: Final = "rel-corolla-redis"
SECRETS: Final = "/api/v1/namespaces/ns/secrets"
DISCOVERY: Final[Object] = {
    "/version": {"major": "1", "minor": CURRENT.split(".")[1], "gitVersion": f"v{CURRENT}"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [{"name": "secrets", "namespaced": True, "kind": "Secret", "verbs": ["get", "list"]}],
    },
}


def arguments() -> list[str]:
    return ["--kube-version", CURRENT, *(word for api in ALL_APIS for word in ("--api-versions", api))]


@contextmanager
def cluster(folder: Path, *secrets: Object) -> Iterator[dict[str, str]]:
    """The environment in which helm finds an API server that knows these Secrets and nothing else."""
    answers = DISCOVERY | {SECRETS: {"kind": "SecretList", "apiVersion": "v1", "metadata": {}, "items": list(secrets)}}
    answers |= {f"{SECRETS}/{each['metadata']['name']}": each for each in secrets}

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


def drawn(environment: dict[str, str]) -> str:
    objects = template(["--dry-run=server", *arguments()], environment=environment)
    return base64.b64decode(named(objects, "Secret", SECRET)["data"]["password"]).decode()


def test_rendering_is_deterministic_and_holds_no_password() -> None:
    first, second = template(arguments()), template(arguments())
    assert first == second
    assert of_kind(first, "Secret") == []


def test_an_installation_draws_a_password(tmp_path: Path) -> None:
    with cluster(tmp_path) as environment:
        passwords = {drawn(environment) for _ in range(2)}
    assert len(passwords) == 2
    assert {len(each) for each in passwords} == {32}


def test_an_upgrade_keeps_the_password_that_there_is(tmp_path: Path) -> None:
    present = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET, "namespace": "ns"}}
    present["data"] = {"password": base64.b64encode(b"as it was").decode()}
    with cluster(tmp_path, present) as environment:
        assert drawn(environment) == "as it was"
