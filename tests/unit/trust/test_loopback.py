"""Where programs of one user find the certificates of a stack on this machine."""

import os
import subprocess
from pathlib import Path

import pytest

from corolla.chassis.errors import StartupError
from corolla.trust.loopback import make_folder, tls_dir
from corolla.trust.workload import Role

ROUTER = "127.0.0.1:50050"


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("COROLLA_TLS_DIR", raising=False)
    return tmp_path


def test_a_program_finds_what_the_stack_at_its_router_has_left() -> None:
    folder = make_folder(ROUTER)
    assert tls_dir(ROUTER, Role.LIBRARY) == folder / "library"
    assert tls_dir("localhost:50050", Role.OPERATOR) == folder / "operator"
    assert tls_dir("127.0.0.1:50051", Role.LIBRARY) is None
    assert tls_dir("10.0.0.7:50050", Role.LIBRARY) is None


def test_what_is_named_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(ROUTER)
    monkeypatch.setenv("COROLLA_TLS_DIR", "/from/the/environment")
    assert tls_dir(ROUTER, Role.LIBRARY) == Path("/from/the/environment")
    assert tls_dir(ROUTER, Role.LIBRARY, "/given") == Path("/given")


def test_a_stack_that_was_killed_has_left_nothing() -> None:
    folder = make_folder(ROUTER)
    ended = subprocess.Popen(["true"])
    ended.wait()
    (folder / "stack.pid").write_text(str(ended.pid))
    assert tls_dir(ROUTER, Role.LIBRARY) is None


def test_a_folder_that_others_can_open_is_not_used(runtime_folder: Path) -> None:
    """In a folder for all, somebody else may have made it before."""
    make_folder(ROUTER)
    own = runtime_folder / f"corolla-{os.geteuid()}"
    own.chmod(0o755)
    assert tls_dir(ROUTER, Role.LIBRARY) is None
    with pytest.raises(StartupError, match="other users can read or write"):
        make_folder(ROUTER)
    own.rename(runtime_folder / "elsewhere")
    own.symlink_to(runtime_folder / "elsewhere")
    with pytest.raises(StartupError):
        make_folder(ROUTER)


def test_a_new_stack_begins_with_an_empty_folder() -> None:
    (make_folder(ROUTER) / "library").mkdir()
    assert [each.name for each in make_folder(ROUTER).iterdir()] == ["stack.pid"]
