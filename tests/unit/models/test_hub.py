"""A process fetches only the files that it needs from the hub, and uses only undamaged ones."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants, snapshot_download
from safetensors.torch import load_file, save_file

from corolla.chassis.errors import CheckpointError, HubUnavailable
from corolla.client.text.tokenizer import TextTokenizer
from corolla.local import model_fetch
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import edge_tensors, load_edges
from corolla.models.hub import Hub
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint
from tests.hub_server import COMMIT, REPOSITORY, HubServer
from tests.published import PUBLISHED, Row
from tests.tiers import quick

SERVICES = Path(__file__).parents[3] / "services"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint("llama", tmp_path_factory.mktemp("pristine") / "tiny", num_blocks=8)


@pytest.fixture
def server(pristine: Path, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(Path(shutil.copytree(pristine, tmp_path / "served"))) as server:
        yield server


@pytest.fixture(autouse=True)
def may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(server: HubServer, tmp_path: Path) -> Hub:
    return Hub(patience_s=0.0, cache=tmp_path / "cache", endpoint=server.url)


def opened(hub: Hub, revision: str | None = None) -> Checkpoint:
    return Checkpoint.from_pretrained(REPOSITORY, revision=revision, hub=hub)


def offline(hub: Hub) -> Hub:
    return replace(hub, offline=True)


def shards_of(checkpoint: Checkpoint, span: Span) -> set[str]:
    return {
        shard.name
        for name, shard in checkpoint.weight_index.items()
        if name.startswith("model.layers.") and span.start <= int(name.split(".")[2]) < span.end
    }


def of_another_process(hub: Hub) -> Hub:
    """The hub as a process sees it that has read no cached file yet."""
    return replace(hub, checked={})


def test_opening_fetches_no_weights(hub: Hub, server: HubServer) -> None:
    checkpoint = opened(hub)
    assert server.sent_shards() == []
    assert {"config.json", "model.safetensors.index.json", "tokenizer.json", "chat_template.jinja"} <= set(
        server.sent()
    )
    assert (checkpoint.name, checkpoint.num_blocks) == (REPOSITORY, 8)
    TextTokenizer.load(checkpoint.folder)


def test_a_span_fetches_its_shards_and_computes_the_same(hub: Hub, server: HubServer, pristine: Path) -> None:
    checkpoint = opened(hub)
    span = Span(2, 5)
    assert 0 < len(shards_of(checkpoint, span)) < len(set(checkpoint.weight_index.values()))
    model = load_span(checkpoint, span, dtype=torch.float32)
    assert server.sent_shards() == sorted(shards_of(checkpoint, span))
    hidden = torch.randn(1, 7, checkpoint.hidden_size, generator=torch.Generator().manual_seed(0))
    local = load_span(Checkpoint.from_pretrained(str(pristine)), span, dtype=torch.float32)
    assert torch.equal(model(hidden), local(hidden))


def test_another_span_fetches_the_rest(hub: Hub, server: HubServer) -> None:
    checkpoint = opened(hub)
    load_span(checkpoint, Span(0, 4), dtype=torch.float32)
    load_span(checkpoint, Span(3, 8), dtype=torch.float32)
    assert server.sent_shards() == sorted(shards_of(checkpoint, Span(0, 8))), "each once"


@pytest.mark.parametrize("has_embedding, has_head", [(True, True), (True, False), (False, True)])
def test_what_no_server_needs_is_not_fetched(hub: Hub, server: HubServer, has_embedding: bool, has_head: bool) -> None:
    """Such as blocks that predict further tokens, and a vision tower."""
    more = {
        "mtp.safetensors": ("mtp.embed_tokens.weight", "mtp.layers.0.mlp.up_proj.weight", "mtp.norm.weight"),
        "mtp-head.safetensors": ("mtp.lm_head.weight", "model.layers.8.shared_head.norm.weight"),
        "vision.safetensors": ("visual.patch_embed.proj.weight", "model.vision_tower.norm.weight"),
    }
    index_file = server.folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    for shard, names in more.items():
        save_file({name: torch.zeros(2) for name in names}, server.folder / shard)
        index["weight_map"].update(dict.fromkeys(names, shard))
    index_file.write_text(json.dumps(index))
    checkpoint = opened(hub)
    checkpoint.fetch(edge_tensors(checkpoint, has_embedding=has_embedding, has_head=has_head).values())
    load_edges(checkpoint, dtype=torch.float32, has_embedding=has_embedding, has_head=has_head)
    needed = {"model.embed_tokens.weight"} if has_embedding else set()
    needed |= {"model.norm.weight", "lm_head.weight"} if has_head else set()
    assert server.sent_shards() == sorted({checkpoint.weight_index[name].name for name in needed})


def test_a_repository_of_gguf_files_says_how_to_give_one(hub: Hub, server: HubServer) -> None:
    for path in server.folder.iterdir():
        path.unlink()
    (server.folder / "tiny.Q4_K_M.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        CheckpointError, match=rf"{REPOSITORY} holds GGUF files, .*; give {REPOSITORY}/tiny.Q4_K_M.gguf"
    ):
        opened(hub)


def test_a_single_file_takes_precedence_over_an_index_and_is_fetched_whole(hub: Hub, server: HubServer) -> None:
    tensors = {name: tensor for path in server.folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    save_file(tensors, server.folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = opened(hub)
    assert {shard.name for shard in checkpoint.weight_index.values()} == {"model.safetensors"}
    load_span(checkpoint, Span(0, 1), dtype=torch.float32)
    assert server.sent_shards() == ["model.safetensors"]


def test_processes_agree_on_the_fingerprint_whatever_they_fetched(hub: Hub, server: HubServer, tmp_path: Path) -> None:
    whole, parts, ends = (
        opened(Hub(patience_s=0.0, cache=tmp_path / name, endpoint=server.url)) for name in ("a", "b", "c")
    )
    whole.fetch()
    load_span(parts, Span(6, 8), dtype=torch.float32)
    load_edges(ends, dtype=torch.float32)
    assert len({each.fingerprint("float32") for each in (whole, parts, ends)}) == 1
    assert opened(offline(parts.snapshot.hub)).fingerprint("float32") == whole.fingerprint("float32")  # type: ignore[union-attr]


def another_weight(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[2]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2 + 1000] ^= 1
    shard.write_bytes(bytes(content))


def another_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))


def another_readme(folder: Path) -> None:
    (folder / "README.md").write_text("Better words.")


@pytest.mark.parametrize(
    "change, tells_apart", [(another_weight, True), (another_config, True), (another_readme, False)]
)
def test_a_commit_has_another_fingerprint_if_it_computes_something_else(
    hub: Hub, server: HubServer, change: Callable[[Path], None], tells_apart: bool
) -> None:
    before = opened(hub)
    change(server.folder)
    server.commit = "6" * 40
    after = opened(hub)
    assert after.folder.name == server.commit
    assert (after.fingerprint("float32") != before.fingerprint("float32")) is tells_apart


def test_all_files_are_of_the_commit_that_was_first(hub: Hub, server: HubServer) -> None:
    checkpoint = opened(hub)
    server.commit = "6" * 40  # somebody pushes; the server no longer gives files of the older commit
    with pytest.raises(CheckpointError, match="no such revision"):
        checkpoint.fetch()


def test_cached_files_are_not_fetched_again(hub: Hub, server: HubServer) -> None:
    load_span(opened(hub), Span(0, 2), dtype=torch.float32)
    sent = server.sent()
    hub = of_another_process(hub)
    load_span(opened(hub), Span(0, 2), dtype=torch.float32)
    assert server.sent() == sent
    num_requests = server.num_requests
    load_span(opened(hub, COMMIT), Span(0, 2), dtype=torch.float32)
    assert server.num_requests == num_requests, "a commit never changes, so nobody is asked"


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [cut_short, flip_a_bit])
@pytest.mark.parametrize("name", ["shard", "config.json"])
def test_a_damaged_file_of_the_cache_is_fetched_again(
    hub: Hub, server: HubServer, pristine: Path, damage: Callable[[Path], None], name: str
) -> None:
    checkpoint = opened(hub)
    load_span(checkpoint, Span(0, 2), dtype=torch.float32)
    shard = sorted(shards_of(checkpoint, Span(0, 1)))[0]
    path = checkpoint.folder / (shard if name == "shard" else name)
    damage(path.resolve())
    hub = of_another_process(hub)
    server.asked_for.clear()
    load_span(opened(hub), Span(0, 2), dtype=torch.float32)
    assert server.sent() == [path.name]
    assert path.read_bytes() == (pristine / path.name).read_bytes()


def test_a_damaged_file_is_found_on_a_disk_without_links(hub: Hub, server: HubServer) -> None:
    checkpoint = opened(hub)
    load_span(checkpoint, Span(0, 2), dtype=torch.float32)
    for path in checkpoint.folder.iterdir():
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    shard = checkpoint.folder / sorted(shards_of(checkpoint, Span(0, 1)))[0]
    flip_a_bit(shard)
    hub = of_another_process(hub)
    load_span(opened(hub), Span(0, 2), dtype=torch.float32)
    assert (
        hashlib.sha256(shard.read_bytes()).digest()
        == hashlib.sha256((server.folder / shard.name).read_bytes()).digest()
    )


def test_a_damaged_file_is_not_used_without_the_hub(hub: Hub) -> None:
    checkpoint = opened(hub)
    load_span(checkpoint, Span(0, 2), dtype=torch.float32)
    flip_a_bit((checkpoint.folder / sorted(shards_of(checkpoint, Span(0, 1)))[0]).resolve())
    hub = of_another_process(hub)
    with pytest.raises(CheckpointError, match="is damaged and offline mode is on"):
        load_span(opened(offline(hub)), Span(0, 2), dtype=torch.float32)


def test_a_transfer_that_breaks_off_goes_on(hub: Hub, server: HubServer, pristine: Path) -> None:
    checkpoint = opened(hub)
    broken: set[str] = set()

    def break_off_once(name: str, content: bytes) -> bytes:
        if name in broken:
            return content
        broken.add(name)
        return content[: len(content) // 2]

    server.damage = break_off_once
    load_span(checkpoint, Span(0, 1), dtype=torch.float32)
    for name in shards_of(checkpoint, Span(0, 1)):
        assert (checkpoint.folder / name).read_bytes() == (pristine / name).read_bytes()


def test_a_file_that_arrives_damaged_is_fetched_again_a_few_times(hub: Hub, server: HubServer) -> None:
    checkpoint = opened(hub)
    server.damage = lambda _name, content: content[:-1] + bytes([content[-1] ^ 1])
    with pytest.raises(HubUnavailable, match="is not what the hub says that it has"):
        load_span(checkpoint, Span(0, 1), dtype=torch.float32)
    server.damage = lambda _name, content: content
    load_span(checkpoint, Span(0, 1), dtype=torch.float32)


def test_an_overloaded_hub_is_asked_again(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.status = 503
    waits: list[str] = []

    def recover(message: str, **_facts: object) -> None:
        waits.append(message)
        server.status = 0

    monkeypatch.setattr("corolla.models.hub.log.warning", recover)
    assert opened(Hub(patience_s=60.0, cache=tmp_path / "cache", endpoint=server.url)).num_blocks == 8
    assert len(waits) == 1


def test_a_transfer_ends_when_the_process_does(hub: Hub, server: HubServer) -> None:
    checkpoint = opened(Hub(patience_s=60.0, cache=hub.cache, endpoint=server.url))
    assert checkpoint.snapshot is not None
    server.damage = lambda _name, content: (checkpoint.snapshot.hub.stop(), content)[1]  # type: ignore[union-attr]
    started = time.monotonic()
    with pytest.raises(HubUnavailable):
        load_span(checkpoint, Span(0, 1), dtype=torch.float32)
    assert time.monotonic() - started < 30
    assert list(hub.cache.rglob("*.incomplete")) == []


def test_a_complete_cache_needs_no_hub(hub: Hub, server: HubServer) -> None:
    load_span(opened(hub), Span(0, 2), dtype=torch.float32)
    server.close()
    hub = of_another_process(hub)
    load_span(opened(hub), Span(0, 2), dtype=torch.float32)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_that_stays_overloaded_is_given_up(hub: Hub, server: HubServer, status: int) -> None:
    server.status = status
    with pytest.raises(HubUnavailable, match="the hub cannot be reached or its answers break off; check"):
        opened(hub)


def test_a_hub_that_is_away_is_given_up(hub: Hub, server: HubServer) -> None:
    server.close()
    with pytest.raises(HubUnavailable, match="the hub cannot be reached"):
        opened(hub)


@pytest.mark.parametrize(
    "status, advice",
    [
        (401, r"refuses access .*status 401.*HF_TOKEN"),
        (403, r"refuses access .*status 403.*HF_TOKEN"),
        (404, r"refuses .*status 404.*check the name and HF_ENDPOINT"),
    ],
)
def test_a_refusal_is_not_tried_again(server: HubServer, tmp_path: Path, status: int, advice: str) -> None:
    server.status = status
    with pytest.raises(CheckpointError, match=advice):
        opened(Hub(patience_s=60.0, cache=tmp_path / "cache", endpoint=server.url))
    assert server.num_requests == 1


def test_an_unknown_model_or_revision_is_named(hub: Hub) -> None:
    with pytest.raises(CheckpointError, match="'nobody/none' is not a local folder, and the hub does not know it"):
        Checkpoint.from_pretrained("nobody/none", hub=hub)
    with pytest.raises(CheckpointError, match="no such revision"):
        opened(hub, "v7")


def test_a_gated_model_needs_a_token(hub: Hub, server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.token = "hf_secret"
    with pytest.raises(CheckpointError, match="is gated: accept its terms on the hub, and give an access token"):
        opened(hub)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    load_span(opened(hub), Span(0, 1), dtype=torch.float32)


def test_pickled_weights_are_refused_before_they_are_fetched(hub: Hub, server: HubServer) -> None:
    for path in (*server.folder.glob("*.safetensors"), server.folder / "model.safetensors.index.json"):
        path.unlink()
    (server.folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"only pickled weights \(pytorch_model.bin\)"):
        opened(hub)
    assert "pytorch_model.bin" not in server.sent()


def test_an_index_that_names_missing_files_is_refused(hub: Hub, server: HubServer) -> None:
    lost = sorted(server.folder.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=rf"{lost.name} is missing in 'tests/tiny' although .* names it"):
        opened(hub)


def test_files_beyond_the_free_disk_space_are_refused_before_the_fetch(
    hub: Hub, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = opened(hub)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(total=10, used=9, free=1))
    with pytest.raises(CheckpointError, match=r"MiB left, and the missing files .* give the cache more room"):
        load_span(checkpoint, Span(0, 1), dtype=torch.float32)
    assert server.sent_shards() == []


def test_a_disk_that_fills_up_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_up(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoint = opened(hub)
    monkeypatch.setattr("huggingface_hub.file_download.http_get", fill_up)
    with pytest.raises(CheckpointError, match="is full; give the cache more room"):
        load_span(checkpoint, Span(0, 1), dtype=torch.float32)
    assert list((hub.cache).rglob("*.incomplete")) == []


def test_leftovers_of_killed_processes_are_removed(hub: Hub, server: HubServer) -> None:
    checkpoint = opened(hub)
    blobs = checkpoint.folder.parents[1] / "blobs"
    old, new = blobs / "x.1.incomplete", blobs / "x.2.incomplete"
    for leftover in (old, new):
        leftover.write_bytes(b"half")
    os.utime(old, (0, 0))
    load_span(checkpoint, Span(0, 1), dtype=torch.float32)
    assert (old.exists(), new.exists()) == (False, True)


def test_without_the_hub_the_missing_file_is_named(hub: Hub, server: HubServer) -> None:
    with pytest.raises(CheckpointError, match=r"does not know its revision 'main', and offline mode is on"):
        opened(offline(hub))
    checkpoint = opened(hub)
    load_span(checkpoint, Span(0, 2), dtype=torch.float32)
    num_requests = server.num_requests
    again = opened(offline(hub))
    load_span(again, Span(0, 2), dtype=torch.float32)
    absent = sorted(shards_of(checkpoint, Span(0, 8)) - shards_of(checkpoint, Span(0, 2)))[0]
    with pytest.raises(CheckpointError, match=rf"{absent} of 'tests/tiny' is missing in .*, and offline mode is on"):
        load_span(again, Span(0, 8), dtype=torch.float32)
    assert server.num_requests == num_requests


def test_a_cache_filled_by_another_tool_works_offline(hub: Hub, server: HubServer) -> None:
    snapshot_download(REPOSITORY, cache_dir=hub.cache, endpoint=server.url)
    num_requests = server.num_requests
    checkpoint = opened(offline(hub))
    load_span(checkpoint, Span(0, 8), dtype=torch.float32)
    assert server.num_requests == num_requests
    assert checkpoint.fingerprint("float32") == opened(hub).fingerprint("float32")
    lost = next(iter(sorted(shards_of(checkpoint, Span(0, 1)))))
    (checkpoint.folder / lost).unlink()
    shutil.rmtree(checkpoint.folder.parents[1] / "corolla")
    with pytest.raises(CheckpointError, match=rf"{lost} of 'tests/tiny' is missing in"):
        opened(offline(hub))


def test_a_hub_without_checksums_is_refused(hub: Hub, server: HubServer) -> None:
    server.commit = "../../../elsewhere"
    with pytest.raises(CheckpointError, match="does not say which files 'tests/tiny' has, with their checksums"):
        opened(hub)


def test_the_local_stack_fetches_all_before_it_starts(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert model_fetch.main([REPOSITORY, ""]) == 0
    assert '"num_blocks": 8' in capsys.readouterr().out
    assert server.sent_shards() == sorted(path.name for path in server.folder.glob("*.safetensors"))


# In a process of its own: what the environment says is read when the hub's client is imported.
LOADER = """
import logging, sys
logging.basicConfig(level="DEBUG")
if "no-sockets" in sys.argv:
    def refuse(event, arguments):
        if event == "socket.connect" or event == "socket.getaddrinfo":
            raise RuntimeError("a socket was opened")
    sys.addaudithook(refuse)
import torch
from corolla.models.checkpoint import Checkpoint
from corolla.models.span_model import load_span
from corolla.client.text.tokenizer import TextTokenizer
from corolla.wire.span import Span
checkpoint = Checkpoint.from_pretrained("tests/tiny")
TextTokenizer.load(checkpoint.folder)
load_span(checkpoint, Span(0, int(sys.argv[1])), dtype=torch.float32)
print("fingerprint", checkpoint.fingerprint("float32"))
"""


def loader(server: HubServer, cache: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    given = {"HF_ENDPOINT": server.url, "HF_HOME": str(cache), "PYTHONPATH": str(SERVICES), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", LOADER, *arguments], env={**inherited, **given}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def fingerprint(output: str) -> str:
    (line,) = [line for line in output.splitlines() if line.startswith("fingerprint ")]
    return line


@pytest.mark.full
def test_two_processes_share_a_cache(server: HubServer, tmp_path: Path) -> None:
    both = [loader(server, tmp_path / "home", "8") for _ in range(2)]
    with ThreadPoolExecutor() as pool:  # a full pipe would hold up one of them, and with it the other
        outputs = [output for output, _ in pool.map(lambda process: process.communicate(timeout=120), both)]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert len({fingerprint(output) for output in outputs}) == 1
    checkpoint = Checkpoint.from_pretrained(str(server.folder))
    assert server.sent_shards() == sorted(shards_of(checkpoint, Span(0, 8))), "each once"


@pytest.mark.parametrize("source", quick(["HF_TOKEN", "HF_TOKEN_PATH"]))
def test_a_token_is_taken_from_the_environment_or_a_file_and_never_shown(
    server: HubServer, tmp_path: Path, source: str
) -> None:
    server.token = "hf_verysecret"
    (tmp_path / "token").write_text("hf_verysecret\n")
    given = "hf_verysecret" if source == "HF_TOKEN" else str(tmp_path / "token")
    process = loader(server, tmp_path / "home", "2", **{source: given})
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert (server.tokens, server.tokens_at_store) == ({"hf_verysecret"}, set())
    assert "hf_verysecret" not in output
    server.token = "hf_other"
    process = loader(server, tmp_path / "elsewhere", "2", **{source: given})
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "is gated" in output
    assert "hf_verysecret" not in output


@pytest.mark.full
def test_offline_no_socket_is_opened(server: HubServer, tmp_path: Path) -> None:
    home = tmp_path / "home"
    output, _ = loader(server, home, "4").communicate(timeout=120)
    process = loader(server, home, "4", "no-sockets", HF_HUB_OFFLINE="1")
    again, _ = process.communicate(timeout=120)
    assert process.returncode == 0, again
    assert fingerprint(again) == fingerprint(output)
    process = loader(server, home, "8", "no-sockets", HF_HUB_OFFLINE="1")
    lacking, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "is missing in" in lacking
    assert "a socket was opened" not in lacking


@pytest.mark.full
def test_a_repository_in_mistrals_own_format_is_read(tmp_path: Path) -> None:
    name = "Magistral-Small, in Mistral's own files"
    row = Row(next(each for each in PUBLISHED if each.name == name), tmp_path)
    with HubServer(row.folder) as server:
        hub = Hub(patience_s=0.0, cache=tmp_path / "cache", endpoint=server.url)
        checkpoint = opened(hub)
        assert server.sent_shards() == []
        load_span(checkpoint, Span(0, 1), dtype=torch.float32)
        assert server.sent_shards() == [
            "consolidated-00001-of-00002.safetensors",
            "consolidated-00002-of-00002.safetensors",
        ]
        local = Checkpoint.from_pretrained(str(row.folder))
        assert opened(hub).names == dict(checkpoint.names)
        assert checkpoint.config.to_dict() | {"_name_or_path": ""} == local.config.to_dict() | {"_name_or_path": ""}
