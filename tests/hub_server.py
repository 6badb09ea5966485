"""A hub on this machine: it serves one real checkpoint to the hub's client, and fails on demand."""

import hashlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Final
from urllib.parse import unquote, urlsplit

COMMIT: Final = "5" * 40
REPOSITORY: Final = "tests/tiny"
LARGE_SUFFIXES: Final = (".safetensors", "tokenizer.json")


class HubServer:
    """Serves `folder` as the repository `tests/tiny`, whose main branch is at `COMMIT`.

    Attributes:
        asked_for: (method, file) of each request for a file's content or facts, in order; content has the method GET.
        tokens, tokens_at_store: access tokens that were sent to the hub itself, and to where its large files are.
        token: without it files are refused, as those of a gated repository; empty: they are everybody's.
        status: what every request is answered with; 0: as it should be.
        num_requests: whatever they were for, as long as it was a model.
        damage: what is sent of a file's content in place of its bytes.
        commit: where the main branch is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked_for: list[tuple[str, str]] = []
        self.num_requests = 0
        self.tokens: set[str] = set()
        self.tokens_at_store: set[str] = set()
        self.token = ""
        self.status = 0
        self.damage: Callable[[str, bytes], bytes] = lambda _name, content: content
        self.commit = COMMIT
        hub = self

        class Handler(_Handler):
            server_of = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def store_url(self) -> str:
        """The place of large files, which has another name: the hub's own store is on other hosts, too."""
        return f"http://localhost:{self._server.server_port}"

    def __enter__(self) -> "HubServer":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops; connections are refused afterwards."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def sent(self) -> list[str]:
        """The files whose contents were sent, in the order of their names, each as often as that."""
        return sorted(name for method, name in self.asked_for if method == "GET")

    def sent_shards(self) -> list[str]:
        return [name for name in self.sent() if name.endswith(".safetensors")]

    def facts(self) -> dict[str, Any]:
        """The facts of the repository that the hub's API returns."""
        siblings = []
        for path in sorted(self.folder.iterdir()):
            content = path.read_bytes()
            facts: dict[str, Any] = {"rfilename": path.name, "size": len(content), "blobId": git_checksum(content)}
            if path.name.endswith(LARGE_SUFFIXES):
                digest = hashlib.sha256(content).hexdigest()
                facts["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
            siblings.append(facts)
        gated = "auto" if self.token else False
        return {"id": REPOSITORY, "sha": self.commit, "siblings": siblings, "private": False, "gated": gated}

    def tree(self) -> list[dict[str, Any]]:
        """The same as a listing of the root folder, which other tools ask for."""
        return [
            {
                "type": "file",
                "path": each["rfilename"],
                "size": each["size"],
                "oid": each["blobId"],
                **({"lfs": {"oid": lfs["sha256"], **lfs}} if (lfs := each.get("lfs")) else {}),
            }
            for each in self.facts()["siblings"]
        ]


def git_checksum(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


# The hub's client asks other things, too, of which nothing depends.
_ROUTES: Final = ("/api/models/", f"/{REPOSITORY}/", "/content/")


class _Handler(BaseHTTPRequestHandler):
    server_of: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_arguments: object) -> None:
        """Says nothing."""

    def _answer(self) -> None:
        hub = self.server_of
        bearer = self.headers.get("Authorization")
        path = unquote(urlsplit(self.path).path)
        if path.startswith(_ROUTES):
            hub.num_requests += 1
        tokens = hub.tokens_at_store if path.startswith("/content/") else hub.tokens
        if bearer is not None:
            tokens.add(bearer.removeprefix("Bearer "))
        if hub.status:
            self._refuse(hub.status, "")
        elif path.startswith("/content/"):
            self._send_content(path.removeprefix("/content/"))
        elif path == f"/api/models/{REPOSITORY}/tree/{hub.commit}":
            self._send(200, {"Content-Type": "application/json"}, json.dumps(hub.tree()).encode())
        elif path.startswith("/api/models/"):
            self._describe(path.removeprefix("/api/models/"))
        elif path.startswith(f"/{REPOSITORY}/resolve/"):
            revision, name = path.removeprefix(f"/{REPOSITORY}/resolve/").split("/", 1)
            self._resolve(revision, name)
        else:
            self._refuse(404, "RepoNotFound")

    def _describe(self, rest: str) -> None:
        hub = self.server_of
        repository, _, revision = rest.partition("/revision/")
        if repository != REPOSITORY:
            self._refuse(401, "RepoNotFound")  # as of a private one
        elif revision not in ("", "main", hub.commit):
            self._refuse(404, "RevisionNotFound")
        else:
            content = json.dumps(hub.facts()).encode()
            self._send(200, {"Content-Type": "application/json"}, content)

    def _resolve(self, revision: str, name: str) -> None:
        hub = self.server_of
        path = hub.folder / name
        if revision not in ("main", hub.commit):
            self._refuse(404, "RevisionNotFound")
        elif hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._refuse(403, "GatedRepo")
        elif not path.is_file():
            self._refuse(404, "EntryNotFound")
        elif name.endswith(LARGE_SUFFIXES):
            content = path.read_bytes()
            facts = {
                "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Linked-Size": str(len(content)),
                "Location": f"{hub.store_url}/content/{name}",
            }
            self._send(302, {"X-Repo-Commit": hub.commit, **facts}, b"")
        else:
            self._send_content(name)

    def _send_content(self, name: str) -> None:
        hub = self.server_of
        hub.asked_for.append((self.command, name))
        content = (hub.folder / name).read_bytes()
        facts = {"X-Repo-Commit": hub.commit, "ETag": f'"{git_checksum(content)}"'}
        sent = hub.damage(name, content)
        start = 0
        if (wanted := self.headers.get("Range")) is not None:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            facts["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(206 if wanted else 200, facts, sent[start:], num_bytes=len(content) - start)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, {"X-Error-Code": code} if code else {}, b"{}")

    def _send(self, status: int, headers: dict[str, str], content: bytes, num_bytes: int | None = None) -> None:
        promised = len(content) if num_bytes is None else num_bytes
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(promised))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        if len(content) < promised:
            self.close_connection = True  # breaks off
