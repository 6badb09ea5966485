"""Idle pods, with the client service's image, in which tests run what others in the cluster might."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from tests.cluster import release

MARK: Final = "corolla.dev/test"
"""The label by which policies of the tests know a pod."""


@dataclass(frozen=True)
class Bystander:
    """A pod.

    Attributes:
        labels: besides `MARK`, which is its name.
        namespace: that of the release, or another one.
        identities: Secret with what it may show, mounted at `IDENTITIES`, `name.file` as `name/file`; empty: none.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: str = release.NAMESPACE
    identities: str = ""

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return release.run("kubectl", "--namespace", self.namespace, *arguments, stdin=stdin)

    def run(self, *command: str, stdin: str | None = None) -> str:
        """The standard output of a command in it. Raises CommandFailed."""
        return self.kubectl("exec", *(("--stdin",) if stdin else ()), self.name, "--", *command, stdin=stdin)


IDENTITIES: Final = "/etc/identities"
TESTER: Final = Bystander("tester", {**release.SELECTOR, "app.kubernetes.io/component": "test"})
"""A pod with the network access of `helm test`'s pod."""


@contextmanager
def standing(*bystanders: Bystander) -> Iterator[None]:
    """They stand there meanwhile."""
    spec = release.pods("client")[0]["spec"]
    try:
        for each in bystanders:
            each.kubectl("create", "--filename", "-", stdin=json.dumps(_pod(each, spec)))
        for each in bystanders:
            each.kubectl("wait", f"pod/{each.name}", "--for=condition=Ready", "--timeout=120s")
        yield
    finally:
        for each in bystanders:
            each.kubectl("delete", "pod", each.name, "--wait=false", "--ignore-not-found")


def _pod(bystander: Bystander, client: dict[str, Any]) -> dict[str, Any]:
    container = {
        "name": "asker",
        "image": client["containers"][0]["image"],
        "command": ["sleep", "3600"],
        "securityContext": client["containers"][0]["securityContext"],
    }
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": client["securityContext"],
        "containers": [container],
        "terminationGracePeriodSeconds": 0,
    }
    if bystander.identities:
        keys = json.loads(bystander.kubectl("get", "secret", bystander.identities, "--output", "json"))["data"]
        items = [{"key": key, "path": key.replace(".", "/", 1)} for key in keys]
        secret = {"secretName": bystander.identities, "items": items, "defaultMode": 0o440}
        spec["volumes"] = [{"name": "identities", "secret": secret}]
        container["volumeMounts"] = [{"name": "identities", "mountPath": IDENTITIES, "readOnly": True}]
    metadata = {"name": bystander.name, "labels": {**bystander.labels, MARK: bystander.name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
