"""The files of the page: complete, without a foreign address, and nothing in them makes markup of a text."""

import re
import shutil
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

from corolla.http.page import HEADERS, pages
from tests.architecture.sources import PACKAGE, ROOT

FOLDER = PACKAGE / "http" / "static"
FILES = sorted(FOLDER.iterdir())
PATHS = {path for path, _ in pages()}

files = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


class Elements(HTMLParser):
    """The elements of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


ELEMENTS = Elements((FOLDER / "index.html").read_text(encoding="utf-8")).found


def test_every_file_has_its_path() -> None:
    assert {"/" if file.name == "index.html" else f"/page/{file.name}" for file in FILES} == PATHS


@files
def test_what_a_file_names_is_there_and_here(file: Path) -> None:
    text = file.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert re.findall(r"https?:|//\w+\.\w+|url\(|@import", text) == []
    named = re.findall(r'(?:src|href)="([^"#]+)"', text) if file.suffix == ".html" else []
    named += [f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', text)]
    assert {f"/{name}" for name in named} <= PATHS


@files
def test_no_text_becomes_markup_or_script(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    sinks = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|\beval\b|Function\("
    )
    assert re.findall(sinks, text) == []


def test_the_page_has_no_script_or_style_in_it() -> None:
    assert all(attributes.get("src") for tag, attributes in ELEMENTS if tag == "script")
    assert "style" not in {tag for tag, _ in ELEMENTS}
    named = {name for _, attributes in ELEMENTS for name in attributes}
    assert [name for name in named if name == "style" or name.startswith("on")] == []
    assert "unsafe" not in HEADERS["content-security-policy"]


def test_every_field_has_a_label_and_every_reference_an_element() -> None:
    ids = [attributes["id"] for _, attributes in ELEMENTS if "id" in attributes]
    assert len(ids) == len(set(ids))
    labelled = {attributes["for"] for tag, attributes in ELEMENTS if tag == "label" and "for" in attributes}
    wrapped = {"temperature", "max-tokens"}  # stand inside of their labels
    fields = {attributes["id"] for tag, attributes in ELEMENTS if tag in ("input", "textarea")}
    assert fields == labelled | wrapped
    referring = ("aria-labelledby", "aria-describedby", "for")
    named = {attributes[name] for _, attributes in ELEMENTS for name in referring if name in attributes}
    assert named <= set(ids)
    asked_for = {
        name for file in FILES if file.suffix == ".js" for name in re.findall(r'byId\("([^"]+)"\)', file.read_text())
    }
    assert asked_for <= set(ids)


@pytest.mark.full
def test_the_wheel_brings_the_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "services", source / "services", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "."]
    subprocess.run([*build, "--wheel-dir", str(tmp_path)], cwd=source, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    assert {file.relative_to(ROOT / "services") for file in FILES} <= names
