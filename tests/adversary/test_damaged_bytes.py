"""Bytes that are almost right, where they are taken apart: records, samplers, parts of sessions, templates, files."""

import base64
import contextlib
import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from safetensors.torch import save_file
from transformers.utils import sentencepiece_model_pb2_new

from corolla.block_server.row_sampling import SessionSampler
from corolla.cache.store import KVStore
from corolla.cache.transfer import TokenCopy, check_tokens, forget_unsent, write_tokens
from corolla.chassis.channels import open_channel
from corolla.chassis.errors import CheckpointError, CorollaError, InvalidRequest, MalformedMessage, OutOfPages
from corolla.chassis.status import from_rpc_error
from corolla.client.text.chat import TemplateProcess
from corolla.client.text.template import TemplateRefusal
from corolla.models.checkpoint import Checkpoint
from corolla.models.gguf.architectures import ARCHITECTURES, SETTINGS
from corolla.models.gguf.description import FACTORS, configuration
from corolla.models.gguf.header import GgufHeader, GgufTensor
from corolla.models.span_model import load_span
from corolla.models.tokenizer import load_tokenizer
from corolla.v1 import blocks_pb2, common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.v1.router_pb2_grpc import RouterServiceStub
from corolla.wire.span import Span
from tests.adversary.messages import damaged, messages
from tests.adversary.running import REASONS, running
from tests.checkpoints import CHAT_TEMPLATE, make_tiny_checkpoint
from tests.embedded_redis import EmbeddedRedis
from tests.integration.router.conftest import running_router
from tests.tiers import quick
from tests.vocabularies import sentencepiece_folder, tekken_folder, tiktoken_folder

NUM_PAGES, MAX_TOKENS, WINDOWS = 32, 24, (None, 6, None)


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    """Which is closed; each template has one of its own."""
    process = TemplateProcess(CHAT_TEMPLATE, {})
    yield process
    process.close()


_ODD_VALUES = st.one_of(
    st.sampled_from((0, 1, 2, 3, -1, 1 << 31, (1 << 64) - 1, 0.0, 1e-5, -1.0, float("nan"), float("inf"), "", "yarn")),
    st.lists(st.sampled_from((0, 1, 1 << 40, 0.5, True)), max_size=5), st.sampled_from(("longrope", "none", True)),
)  # fmt: skip
_MORE_KEYS = (
    "attention.recurrent_layers", "attention.sliding_window", "attention.sliding_window_pattern",
    "attention.value_length", "expert_gating_func", "full_attention_interval", "nextn_predict_layers",
    "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor",
    "rope.scaling.original_context_length", "rope.scaling.yarn_log_multiplier", "rope.freq_base_swa",
)  # fmt: skip


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_odd_settings_of_a_file_are_refused_or_describe_a_model(tmp_path: Path, data: st.DataObject) -> None:
    architecture = data.draw(st.sampled_from(sorted(ARCHITECTURES)))
    own = ARCHITECTURES[architecture].variant({}).settings
    said: dict[str, Any] = {
        "block_count": 3, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5,
        "attention.kv_lora_rank": 16, "attention.key_length_mla": 24, "attention.value_length_mla": 16,
        "rope.dimension_count": 16,
    }  # fmt: skip
    keys = st.sampled_from(sorted({*SETTINGS, *own, *_MORE_KEYS}))
    said |= data.draw(st.dictionaries(keys, _ODD_VALUES, max_size=3))
    (tmp_path / "factors").write_bytes(data.draw(st.binary(min_size=64, max_size=64)))
    tensors = {f"blk.{block}.attn_norm.weight": GgufTensor(Path("x"), (64,), 0, 0, 256) for block in range(3)}
    for name in data.draw(st.sets(st.sampled_from(sorted(FACTORS)))):
        shape, kind = data.draw(st.sampled_from([((8,), 0), ((4,), 0), ((2, 4), 0), ((8,), 1)]))
        tensors[name] = GgufTensor(tmp_path / "factors", shape, kind, 0, 4 * 8 if len(shape) == 1 else 32)
    metadata = {f"{architecture}.{key}": value for key, value in said.items()}
    tokens = {"general.architecture": architecture, "tokenizer.ggml.tokens": ["a", "b"]}
    with contextlib.suppress(CheckpointError):
        configuration(GgufHeader({**tokens, **metadata}, tensors, b""))


@pytest.mark.full
@settings(max_examples=150)
@given(damaged(st.just(CHAT_TEMPLATE.encode())))
@example(b"{% break %}")
@example(b"{{ " + b"(" * 5000 + b")" * 5000 + b" }}")
def test_a_damaged_template_is_rendered_or_refused(data: bytes) -> None:
    process = TemplateProcess(data.decode(errors="replace"), {"bos_token": "<s>"})
    with contextlib.suppress(InvalidRequest, TemplateRefusal):
        process.render([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    process.close()


@given(st.lists(st.dictionaries(st.text(max_size=8), st.text(max_size=40), max_size=3), max_size=3))
def test_any_messages_are_rendered_or_refused(process: TemplateProcess, given: list[dict[str, str]]) -> None:
    with contextlib.suppress(TemplateRefusal):
        process.render(given, add_generation_prompt=False)
    user = [{"role": "user", "content": "hi"}]
    assert "hi" in str(process.render(user, add_generation_prompt=True))


VOCABULARIES = {
    "tiktoken.model": tiktoken_folder,
    "tekken.json": tekken_folder,
    "tokenizer.model": sentencepiece_folder,
}


@pytest.mark.parametrize("num_examples", [15, pytest.param(300, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_damaged_vocabulary_is_read_or_refused(tmp_path: Path, name: str, num_examples: int) -> None:
    folder = VOCABULARIES[name](tmp_path)

    @settings(max_examples=num_examples)
    @given(damaged(st.just((folder / name).read_bytes())))
    @example(b"{" * 100_000)
    @example(b'{"config":{"pattern":"(","default_num_special_tokens":1e99},"vocab":[],"special_tokens":[]}')
    @example(b"YQ== 99999999999\n" * 3)
    def load(data: bytes) -> None:
        (folder / name).write_bytes(data)
        with contextlib.suppress(CheckpointError):
            load_tokenizer(folder)

    load()


def _chain(length: int) -> list[bytes]:
    """Each token is made of two others in as many ways as it has bytes."""
    return [*(bytes([byte]) for byte in range(256)), *(b"a" * count for count in range(2, length))]


def _chain_of_pieces(folder: Path) -> bytes:
    library: Any = sentencepiece_model_pb2_new
    model = library.ModelProto()
    model.ParseFromString((folder / "tokenizer.model").read_bytes())
    known = {piece.piece for piece in model.pieces}
    for token in _chain(1000)[256:]:
        if token.decode() not in known:
            model.pieces.add(piece=token.decode(), score=-1.0)
    return bytes(model.SerializeToString())


MADE_OF_EACH_OTHER: dict[str, Callable[[Path], bytes]] = {
    "tiktoken.model": lambda _: b"".join(
        base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(_chain(1000))
    ),
    "tekken.json": lambda folder: json.dumps(
        {
            **json.loads((folder / "tekken.json").read_text()),
            "vocab": [
                {"rank": rank, "token_bytes": base64.b64encode(token).decode()}
                for rank, token in enumerate(_chain(1000))
            ],
        }
    ).encode(),
    "tokenizer.model": _chain_of_pieces,
}


@pytest.mark.parametrize("name", quick(VOCABULARIES, "tekken.json"))
def test_a_small_vocabulary_of_which_gigabytes_would_be_made_is_refused(tmp_path: Path, name: str) -> None:
    folder = VOCABULARIES[name](tmp_path)
    data = MADE_OF_EACH_OTHER[name](folder)
    assert len(data) < 2 << 20
    (folder / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=r"cannot be read; fetch it again, or give") as refusal:
        load_tokenizer(folder)
    assert "in too many ways" in str(refusal.value.__cause__)


def _mistral_folder(folder: Path) -> Path:
    """A model of one block in Mistral's own format, in two files."""
    (folder / "params.json").write_text(json.dumps({**PARAMS, "llama_4_scaling": None, "yarn": None}))
    sizes = {
        "attention.wq": (64, 64), "attention.wk": (32, 64), "attention.wv": (32, 64), "attention.wo": (64, 64),
        "feed_forward.w1": (96, 64), "feed_forward.w2": (64, 96), "feed_forward.w3": (96, 64),
        "attention_norm": (64,), "ffn_norm": (64,),
    }  # fmt: skip
    blocks = {f"layers.0.{name}.weight": torch.ones(size) for name, size in sizes.items()}
    ends = {"norm.weight": torch.ones(64), "tok_embeddings.weight": torch.ones(320, 64)}
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate((blocks, {**ends, "output.weight": torch.ones(320, 64)}), 1):
        save_file(tensors, folder / f"consolidated-0000{number}-of-00002.safetensors")
        weight_map |= dict.fromkeys(tensors, f"consolidated-0000{number}-of-00002.safetensors")
    (folder / "consolidated.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("num_examples", [10, pytest.param(300, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["consolidated-00001-of-00002.safetensors", "consolidated.safetensors.index.json"])
def test_a_damaged_file_of_weights_is_read_or_refused(tmp_path: Path, name: str, num_examples: int) -> None:
    folder = _mistral_folder(tmp_path)
    whole = (folder / name).read_bytes()

    def load() -> None:
        checkpoint = Checkpoint.from_pretrained(str(folder))
        load_span(checkpoint, Span(0, 1), dtype=torch.float32)

    load()
    # The beginning has all lengths, offsets and names.
    beginning = whole[:1200]

    @settings(max_examples=num_examples, deadline=None)
    @given(damaged(st.just(beginning)))
    @example((2**63 - 1).to_bytes(8, "little") + beginning[8:])
    @example(b'{"weight_map": {"layers.0.ffn_norm.weight": {"a": []}, "norm.weight": "../../x.safetensors"}}')
    @example(b'{"weight_map": {"layers.0.ffn_norm.weight": "' + b"x" * 5000 + b'"}}')
    @example(b'{"weight_map": ' + b'{"a":' * 100_000)
    def read(data: bytes) -> None:
        (folder / name).write_bytes(data + whole[len(beginning) :])
        with contextlib.suppress(CorollaError):
            load()

    read()


_KEYS = st.sampled_from(
    ["model_type", "text_config", "llm_config", "thinker_config", "num_hidden_layers", "rope_parameters"]
)
_VALUES: st.SearchStrategy[Any] = st.sampled_from(
    ["qwen3_vl_text", "qwen3_vl", "llama", "", None, 0, -1, 2**70, 1e300, [], "x" * 100]
)
NESTED = st.dictionaries(
    _KEYS, st.recursive(_VALUES, lambda inner: st.dictionaries(_KEYS, inner, max_size=4)), max_size=4
)


PARAMS = {
    "dim": 64, "n_layers": 1, "head_dim": 16, "hidden_dim": 96, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5,
    "vocab_size": 320, "rope_theta": 1e6, "sliding_window": None, "llama_4_scaling": {},
    "yarn": {"factor": 8.0, "alpha": 1, "beta": 32, "apply_scale": False, "original_max_position_embeddings": 64},
}  # fmt: skip


@pytest.mark.parametrize("num_examples", [10, pytest.param(300, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["config.json", "params.json"])
def test_a_damaged_description_of_a_model_is_read_or_refused(tmp_path: Path, name: str, num_examples: int) -> None:
    folder = make_tiny_checkpoint("qwen3", tmp_path / "qwen3", num_blocks=1)
    inner = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    wrapper = {"model_type": "qwen3_vl", "text_config": {**inner, "model_type": "qwen3_vl_text"}, "vision_config": {}}
    data = json.dumps(wrapper if name == "config.json" else PARAMS).encode()

    @settings(max_examples=num_examples)
    @given(damaged(st.just(data)) | NESTED.map(lambda table: json.dumps(table).encode()))
    @example(json.dumps({"model_type": "a", "thinker_config": {"text_config": {"llm_config": {}}}}).encode())
    @example(json.dumps({**PARAMS, "yarn": [], "n_layers": 2**40}).encode())
    @example(json.dumps({**PARAMS, "sliding_window": [[]], "head_dim": -1}).encode())
    @example(json.dumps({**PARAMS, "kv_lora_rank": 8, "moe": [1], "quantization": "fp8"}).encode())
    def read(data: bytes) -> None:
        (folder / name).write_bytes(data)
        with contextlib.suppress(CorollaError):
            Checkpoint.from_pretrained(str(folder))

    read()


SAMPLERS = messages(blocks_pb2.Sampler, {}).map(lambda message: message.SerializeToString())


@settings(max_examples=300)
@given(damaged(SAMPLERS))
def test_what_is_known_of_an_answer_is_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(DecodeError):
        sampler = blocks_pb2.Sampler.FromString(data)
        with contextlib.suppress(CorollaError):
            SessionSampler.read(sampler, None, vocab_size=64, max_tokens=MAX_TOKENS)


COUNTS = st.integers(0, 8)
FIRSTS = st.tuples(st.just(0), st.integers(0, 30), st.just(0)) | st.tuples(*[st.integers(0, 30)] * 3)


@settings(max_examples=300)
@given(st.lists(st.tuples(COUNTS, COUNTS, FIRSTS, st.binary(max_size=64), st.booleans()), max_size=6))
def test_whatever_parts_of_a_session_come_a_cache_holds_finite_numbers_and_its_pages_add_up(parts: list[Any]) -> None:
    store, layers = KVStore(NUM_PAGES, 4, WINDOWS), range(len(WINDOWS))
    one = torch.zeros(1, 1, 2)
    held = [tensor.zero_() for layer in layers for tensor in store.layer_like(layer, one, one)]
    cache = store.new_cache()
    cache.reserve(MAX_TOKENS)
    for back, num_tokens, firsts, numbers, is_odd in parts:
        position = max(0, cache.num_tokens - back)
        end = min(position + num_tokens, MAX_TOKENS)
        # Sizes are mostly right: wrong ones alone are soon refused.
        num_bytes = 16 * sum(max(0, end - max(position, first)) for first in firsts) + is_odd
        copy = TokenCopy(position, end - position, firsts, numbers.ljust(num_bytes, b"\x00")[:num_bytes])
        if cache.can_continue_from(position):
            with contextlib.suppress(MalformedMessage, OutOfPages):
                write_tokens(cache, check_tokens(store, layers, copy))
                forget_unsent(cache, layers, firsts)
                assert cache.num_tokens == end
        assert all(tensor.isfinite().all() for tensor in held)
    cache.clear()
    assert store.pool.num_available == NUM_PAGES


RECORDS = messages(pb.SessionRecord, {}).map(lambda message: message.SerializeToString())


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis.start(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.mark.parametrize("num_examples", [20, pytest.param(300, marks=pytest.mark.full)])
def test_a_damaged_record_is_an_error_that_is_known(redis: EmbeddedRedis, num_examples: int) -> None:
    """Any field of what the store holds for a session may be anything; INTERNAL may say that it cannot be read."""
    services, stack = running(), AsyncExitStack()
    session_id = secrets.token_hex(16)
    hop = common_pb2.Hop(server_id="s", address="a:1", span=common_pb2.BlockSpan(start=0, end=5))
    chain = common_pb2.Chain(hops=[hop], fingerprint="f")
    record = pb.SessionRecord(session_id=session_id, tenant="t", model="m", token_log=[1, 2, 3], chain=chain)

    async def start() -> str:
        router = await stack.enter_async_context(running_router(redis.url, redis_timeout_ms=5000))
        return f"127.0.0.1:{router.process.port}"

    address = services.call(start())

    async def reasons(field: int, data: bytes) -> list[str]:
        async with Redis.from_url(redis.url) as store, open_channel(address) as channel:
            await store.flushdb()
            stub, found = RouterServiceStub(channel), []
            await stub.CreateSessionRecord(pb.CreateSessionRecordRequest(record=record, ttl_ms=60_000))
            (key,) = [key async for key in store.scan_iter() if session_id.encode() in key]
            names = sorted(await store.hkeys(key))
            await store.hset(key, names[field % len(names)], data)
            whose: dict[str, Any] = {"model": "m", "session_id": session_id, "tenant": "t"}
            for call in (
                stub.GetSessionRecord(pb.GetSessionRecordRequest(**whose)),
                stub.BeginTurn(pb.BeginTurnRequest(turn_id="turn", lock_ms=1000, **whose)),
                stub.DeleteSessionRecord(pb.DeleteSessionRecordRequest(**whose)),
            ):
                try:
                    await call
                except grpc.aio.AioRpcError as failure:
                    error = from_rpc_error(failure)
                    # The guard of a method gives this message where a failure was not foreseen.
                    assert error.message != "internal error"
                    found.append(error.reason)
            return found

    @settings(max_examples=num_examples)
    @given(field=st.integers(0, 9), data=damaged(RECORDS) | st.binary(max_size=32))
    def read(field: int, data: bytes) -> None:
        assert set(services.call(reasons(field, data))) <= REASONS | {"INTERNAL"}

    with services.watched():
        read()
    services.call(stack.aclose())
