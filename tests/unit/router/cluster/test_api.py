"""Where a router finds out that it runs in a cluster."""

from pathlib import Path

import pytest

from corolla.router.cluster.api import is_in_cluster


@pytest.mark.parametrize("has_token", [True, False])
@pytest.mark.parametrize("has_host", [True, False])
def test_a_cluster_is_a_token_and_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_token: bool, has_host: bool
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if has_token:
        (tmp_path / "token").write_text("x")
    if has_host:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert is_in_cluster(tmp_path) == (has_token and has_host)
