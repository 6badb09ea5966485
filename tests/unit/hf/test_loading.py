"""What checkpoints' files say is never refused, and `from_pretrained` takes or names the options of transformers."""

import copy
import json
import logging
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from corolla.chassis.errors import UnsupportedFamily
from corolla.hf import AutoDistributedModelForCausalLM, families
from corolla.hf.defaults import served_defaults
from corolla.hf.loading import read_options
from corolla.hf.refusals import UNSUPPORTED_OPTIONS, refuse_in_session, refuse_unsupported
from corolla.hf.remote_model import RemoteModelForCausalLM, refuse_without_logits
from corolla.models.checkpoint import Checkpoint
from tests.checkpoints import make_tiny_checkpoint

FILES: dict[str, Any] = {
    "missing": None,
    "from the model": {"_from_model_config": True, "eos_token_id": 1},
    "no cache": {"use_cache": False, "eos_token_id": 1},
    "static": {"cache_implementation": "static", "output_attentions": True, "return_dict_in_generate": True},
    "other text": {"no_repeat_ngram_size": 3, "num_beams": 2, "low_memory": True, "penalty_alpha": 0.6, "top_k": 4},
}


@pytest.fixture(params=FILES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    folder = make_tiny_checkpoint("llama", tmp_path / "tiny")
    file, content = folder / "generation_config.json", FILES[request.param]
    file.unlink(missing_ok=True)
    if content is not None:
        file.write_text(json.dumps(content))
    return Checkpoint.from_pretrained(str(folder))


def test_only_what_a_caller_asks_for_is_refused(checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    connection: Any = None
    with caplog.at_level(logging.WARNING):
        remote: Any = RemoteModelForCausalLM(checkpoint, connection, "public", reuse_prefixes=False)
    file = checkpoint.folder / "generation_config.json"
    said = json.loads(file.read_text()) if file.exists() else {}
    assert ("num_beams" in caplog.text) == ("num_beams" in said), "what changes the text is not ignored silently"
    refuse_without_logits(remote.generation_config, {})
    # A config that the caller derives from the model is the caller's own.
    refuse_without_logits(GenerationConfig.from_model_config(checkpoint.config), {})
    asked = copy.deepcopy(remote.generation_config)
    asked.num_beams = 3
    with pytest.raises(ValueError, match="`num_beams`"):
        refuse_without_logits(asked, {})
    local = served_defaults(checkpoint, lambda name: name not in UNSUPPORTED_OPTIONS)
    refuse_unsupported({}, local)
    refuse_in_session({}, local, has_text=False)
    assert local.num_beams == said.get("num_beams"), "local edges do what the file says as far as they can"
    local.use_cache = False
    with pytest.raises(ValueError, match="`use_cache=False`"):
        refuse_in_session({}, local, has_text=False)


def test_options_of_transformers_are_taken_or_named() -> None:
    cpu = torch.device("cpu")
    assert read_options({}, None, None) == (torch.float32, "cpu")
    assert read_options({"torch_dtype": torch.bfloat16, "device_map": "cpu"}, None, None) == (torch.bfloat16, cpu)
    assert read_options({"torch_dtype": "float16", "device_map": {"": "cpu"}}, "bfloat16", None) == ("bfloat16", cpu)
    assert read_options({"device_map": "auto"}, None, "meta")[1] == "meta"
    assert read_options(
        {"low_cpu_mem_usage": True, "attn_implementation": "sdpa", "trust_remote_code": False}, None, None
    )
    for options, sentence in (
        ({"torch_dtype": "auto"}, "`dtype` must be what the block servers run"),
        ({"device_map": {"model": "cpu", "lm_head": "meta"}}, "`device_map` must name one device"),
        ({"device_map": "nowhere"}, "`device_map` must be a device"),
        ({"trust_remote_code": True}, "`trust_remote_code` is not supported over remote blocks"),
        ({"load_in_4bit": True}, "the block servers quantise"),
        ({"dytpe": "float32"}, "`dytpe` is no option"),
    ):
        with pytest.raises(ValueError, match=sentence):
            read_options(options, None, None)


@pytest.mark.parametrize("edges", ["remote", "local"])
def test_what_block_servers_refuse_is_refused_before_they_are_asked(tmp_path: Path, edges: str) -> None:
    folder = make_tiny_checkpoint("llama", tmp_path / "tiny", config_changes={"is_causal": False})
    library: Any = AutoDistributedModelForCausalLM
    with pytest.raises(UnsupportedFamily, match="a token of this llama model sees later tokens"):
        library.from_pretrained(str(folder), edges=edges, router="127.0.0.1:1")


def test_models_can_generate_and_say_why_they_cannot_be_pickled(tmp_path: Path) -> None:
    classes: list[Any] = [RemoteModelForCausalLM, families.CLASSES_BY_NAME["DistributedLlamaForCausalLM"]]
    assert all(each.can_generate() for each in classes)
    folder = make_tiny_checkpoint("llama", tmp_path / "tiny")
    for edges in ("remote", "local"):
        library: Any = AutoDistributedModelForCausalLM
        model = library.from_pretrained(str(folder), edges=edges, router="127.0.0.1:1", torch_dtype="float32")
        with pytest.raises(TypeError, match=r"cannot be pickled.*from_pretrained"):
            ForkingPickler.dumps(model)
        assert copy.deepcopy(model).config.to_dict() == copy.copy(model).config.to_dict() == model.config.to_dict()
