"""Where there is no browser, tests that need one fail with a sentence that says how to install it."""

from pathlib import Path

import pytest

from tests.browser import chromium


def test_a_missing_browser_is_a_failure_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(chromium.NoBrowser, match="apt-get install chromium"), chromium.browser():
        pass


def test_so_is_what_leads_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(chromium, "PACKAGES", tmp_path / "nothing")
    with pytest.raises(chromium.NoBrowser, match="make browser"):
        chromium.package("playwright.sync_api")
