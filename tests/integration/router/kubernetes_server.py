"""An HTTP server that answers the few calls of the Kubernetes API which the router makes, and misbehaves on demand."""

import json
import queue
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import yaml

TOKEN: Final = "let-me-in"

Described = dict[str, Any]


class KubernetesServer:
    """Pods and Events of one namespace, and the requests so far.

    `faults` says how a kind of call (list, watch, patch, event) goes wrong: a status, `hang` (nothing comes), `garbage`
    (no JSON), `nonsense` (JSON that means nothing), or `expired` (an ERROR event with 410).
    """

    def __init__(self, http: ThreadingHTTPServer) -> None:
        self._http = http
        self._lock = threading.Lock()
        self._watchers: list[queue.Queue[Described | None]] = []
        self._version = 100
        # Routers with one store that watch the same pods have one leader.
        self.namespace = f"ns-{secrets.token_hex(4)}"
        self.pods: dict[str, Described] = {}
        self.events: list[Described] = []
        self.patches: list[tuple[str, str, Described]] = []
        self.calls: list[tuple[str, dict[str, list[str]]]] = []
        self.faults: dict[str, int | str] = {}
        # Names of pods whose patches are refused.
        self.untouchable: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def num_calls(self, call: str) -> int:
        return sum(name == call for name, _ in self.calls)

    def reasons(self) -> list[str]:
        """The reasons of the Events, oldest first."""
        return [str(each["reason"]) for each in self.events]

    def put(self, pod: Described) -> None:
        """A pod is new, or changes."""
        with self._lock:
            name = pod["metadata"]["name"]
            kind = "MODIFIED" if name in self.pods else "ADDED"
            self._version += 1
            pod["metadata"]["resourceVersion"] = str(self._version)
            self.pods[name] = pod
            self._say({"type": kind, "object": pod})

    def remove(self, name: str) -> None:
        with self._lock:
            self._version += 1
            self._say({"type": "DELETED", "object": self.pods.pop(name)})

    def cut_watches(self) -> None:
        """Every watch ends, as when the API server is restarted."""
        with self._lock:
            for each in self._watchers:
                each.put(None)

    def listing(self) -> Described:
        with self._lock:
            return {"metadata": {"resourceVersion": str(self._version)}, "items": list(self.pods.values())}

    def merge(self, name: str, patch: Described) -> Described | None:
        """Merges the metadata's maps as RFC 7386 says."""
        if name not in self.pods:
            return None
        pod: Described = json.loads(json.dumps(self.pods[name]))
        for kind, entries in patch["metadata"].items():
            kept = pod["metadata"].setdefault(kind, {})
            for key, value in entries.items():
                if value is None:
                    kept.pop(key, None)
                else:
                    kept[key] = value
        self.put(pod)
        return pod

    @contextmanager
    def watching(self) -> Iterator[queue.Queue[Described | None]]:
        changes: queue.Queue[Described | None] = queue.Queue()
        with self._lock:
            self._watchers.append(changes)
        try:
            yield changes
        finally:
            with self._lock:
                self._watchers.remove(changes)

    def _say(self, change: Described) -> None:
        for each in self._watchers:
            each.put(change)


@contextmanager
def kubernetes_server() -> Iterator[KubernetesServer]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    http.daemon_threads = True
    server = KubernetesServer(http)
    http.kubernetes = server  # type: ignore[attr-defined]
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.cut_watches()
        http.shutdown()
        http.server_close()
        thread.join()


def kubeconfig(folder: Path, server: KubernetesServer) -> str:
    """A file that leads to the server."""
    path = folder / "kubeconfig"
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": server.namespace}}],
                "clusters": [{"name": "c", "cluster": {"server": server.url}}],
                "users": [{"name": "u", "user": {"token": TOKEN}}],
            }
        )
    )
    return str(path)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def kubernetes(self) -> KubernetesServer:
        return self.server.kubernetes  # type: ignore[attr-defined, no-any-return]

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        query = parse_qs(address.query)
        if query.get("watch") in (["true"], ["True"]):
            if self._begins("watch", query, "pods"):
                self._stream(float(query["timeoutSeconds"][0]))
        elif self._begins("list", query, "pods"):
            self._answer(200, self.kubernetes.listing())

    def do_PATCH(self) -> None:
        body = self._body()
        name = urlsplit(self.path).path.rpartition("/")[2]
        if name in self.kubernetes.untouchable:
            self._answer(403, {"kind": "Status", "code": 403})
        elif self._begins("patch", {}, f"pods/{name}"):
            self.kubernetes.patches.append((name, str(self.headers["Content-Type"]), body))
            pod = self.kubernetes.merge(name, body)
            self._answer(404 if pod is None else 200, pod or {"kind": "Status"})

    def do_POST(self) -> None:
        body = self._body()
        if self._begins("event", {}, "events"):
            self.kubernetes.events.append(body)
            self._answer(201, body)

    def _begins(self, call: str, query: dict[str, list[str]], path: str) -> bool:
        """Notes the call. False if it has been answered already, wrongly."""
        self.kubernetes.calls.append((call, query))
        fault = self.kubernetes.faults.get(call)
        if urlsplit(self.path).path != f"/api/v1/namespaces/{self.kubernetes.namespace}/{path}":
            self._answer(404, {"kind": "Status"})
        elif self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._answer(401, {"kind": "Status"})
        elif fault is None or (fault == "expired" and call == "watch"):
            return True
        elif fault == "hang":
            while self.kubernetes.faults.get(call) == "hang":
                time.sleep(0.05)
            self.close_connection = True
        elif fault == "garbage":
            self._send(200, b"\xff\xfe<html>\n" * 3)
        elif fault == "nonsense":
            self._answer(200, {"kind": "Status", "items": [None, 7, {"metadata": []}], "type": "ADDED", "object": 5})
        else:
            self._answer(int(fault), {"kind": "Status", "code": int(fault), "reason": "x", "message": "no"})
        return False

    def _stream(self, for_s: float) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if self.kubernetes.faults.get("watch") == "expired":
            status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            self._chunk({"type": "ERROR", "object": status})
        else:
            end_s = time.monotonic() + for_s
            with self.kubernetes.watching() as changes:
                while (left_s := end_s - time.monotonic()) > 0:
                    try:
                        change = changes.get(timeout=left_s)
                    except queue.Empty:
                        break
                    if change is None:
                        break
                    self._chunk(change)
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, event: Described) -> None:
        line = json.dumps(event).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.flush()

    def _body(self) -> Described:
        body: Described = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return body

    def _answer(self, status: int, body: Described) -> None:
        self._send(status, json.dumps(body).encode() + b"\n")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass
