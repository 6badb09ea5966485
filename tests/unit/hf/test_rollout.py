"""Rollouts of a local model, against `generate` of transformers and against rules that are easy to state."""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from corolla.hf import rollout
from tests.checkpoints import make_tokenizer

PAD_ID, EOS_ID = 0, 1
NUM_PROMPT_TOKENS = 9


@pytest.fixture
def tokenizer() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(PAD_ID)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD_ID, EOS_ID)
    return tokenizer


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(make_tokenizer()), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2, bos_token_id=None, eos_token_id=None,
        pad_token_id=PAD_ID,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.generation_config.pad_token_id = PAD_ID
    return model


@pytest.fixture
def prompts() -> Tensor:
    """Four rows, padded on the left by 0, 2, 5 and 8."""
    ids = torch.randint(4, 256, (4, NUM_PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    for row, num_pads in enumerate((0, 2, 5, 8)):
        ids[row, :num_pads] = PAD_ID
    return ids


@pytest.mark.parametrize(
    "options",
    [{"do_sample": False}, {}, {"temperature": 0.7, "top_k": 20}, {"top_p": 0.8, "temperature": 1.4}],
    ids=["greedy", "sampling", "top k", "top p"],
)
def test_answers_are_those_of_transformers(model: Any, tokenizer: Any, prompts: Tensor, options: Any) -> None:
    torch.manual_seed(5)
    got = rollout.generate(model, prompts, tokenizer, NUM_PROMPT_TOKENS + 14, **options)
    torch.manual_seed(5)
    expected = model.generate(
        prompts, attention_mask=prompts.ne(PAD_ID).long(), max_new_tokens=14,
        eos_token_id=EOS_ID, **{"do_sample": True, "top_k": 0, **options},
    )  # fmt: skip
    assert got.tolist() == expected.tolist()


def test_beams_are_those_of_transformers(model: Any, tokenizer: Any, prompts: Tensor) -> None:
    got = rollout.generate(model, prompts, tokenizer, 20, num_beams=3, do_sample=False)
    expected = model.generate(
        prompts, attention_mask=prompts.ne(PAD_ID).long(), max_length=20, num_beams=3, early_stopping=True,
        eos_token_id=EOS_ID,
    )  # fmt: skip
    assert got.tolist() == expected.tolist()
    for option in ({"stop_token_ids": [[5]]}, {"prepare_inputs_fn": rollout.prepare_inputs_fn}):
        with pytest.raises(ValueError, match="num_beams=1"):
            rollout.generate(model, prompts, tokenizer, 20, num_beams=3, **option)


def test_rows_end_one_by_one_and_are_padded_from_there_on(model: Any, tokenizer: Any, prompts: Tensor) -> None:
    free = rollout.generate(model, prompts, tokenizer, 20, do_sample=False)
    eos_id = int(free[1, NUM_PROMPT_TOKENS + 2])
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos_id)
    ended = rollout.generate(model, prompts, tokenizer, 20, do_sample=False)
    num_ended = 0
    for row, whole in zip(ended.tolist(), free.tolist(), strict=True):
        answer, full = row[NUM_PROMPT_TOKENS:], whole[NUM_PROMPT_TOKENS:]
        end = full.index(eos_id) + 1 if eos_id in full else len(full)
        num_ended += end < len(full)
        assert answer == full[:end] + [PAD_ID] * (len(answer) - end)
    assert 0 < num_ended < len(prompts)


def test_a_stop_sequence_ends_a_row_with_its_last_token(model: Any, tokenizer: Any, prompts: Tensor) -> None:
    free = rollout.generate(model, prompts, tokenizer, 24, do_sample=False).tolist()
    stops = [
        free[0][NUM_PROMPT_TOKENS + 3 : NUM_PROMPT_TOKENS + 6],
        free[2][NUM_PROMPT_TOKENS + 7 : NUM_PROMPT_TOKENS + 9],
    ]
    got = rollout.generate(model, prompts, tokenizer, 24, do_sample=False, stop_token_ids=stops).tolist()
    ends = set()
    for row, whole in zip(got, free, strict=True):
        end = min(
            (end for stop in stops for end in range(NUM_PROMPT_TOKENS + 1, 25) if whole[end - len(stop) : end] == stop),
            default=24,
        )
        assert row == whole[:end] + [PAD_ID] * (len(row) - end)
        ends.add(end)
    assert len(ends) > 1


def test_early_stopping_returns_as_soon_as_all_rows_have_ended(model: Any, tokenizer: Any, prompts: Tensor) -> None:
    row = prompts[:1]
    free = rollout.generate(model, row, tokenizer, 24, do_sample=False)
    stops = [free[0, NUM_PROMPT_TOKENS : NUM_PROMPT_TOKENS + 4].tolist()]
    got = rollout.generate(model, row, tokenizer, 24, do_sample=False, stop_token_ids=stops)
    assert got.tolist() == free[:, : NUM_PROMPT_TOKENS + 4].tolist()
    late = rollout.generate(model, row, tokenizer, 24, do_sample=False, stop_token_ids=stops, early_stopping=False)
    assert late.shape == (1, 24)
    assert late[0, NUM_PROMPT_TOKENS + 4 :].eq(PAD_ID).all()


@pytest.mark.parametrize("interval", [1, 2, 5, 100])
def test_a_stream_grows_to_the_result_of_generate(model: Any, tokenizer: Any, prompts: Tensor, interval: int) -> None:
    expected = rollout.generate(model, prompts, tokenizer, 20, do_sample=False)
    parts = list(rollout.generate_streaming(model, prompts, tokenizer, 20, do_sample=False, stream_interval=interval))
    lengths = [part.shape[1] for part in parts]
    assert lengths == [*range(NUM_PROMPT_TOKENS + interval, 20, interval), 20]
    for part in parts:
        assert part.tolist() == expected[:, : part.shape[1]].tolist()


def test_lengths(model: Any, tokenizer: Any, prompts: Tensor) -> None:
    for max_length, max_new_tokens, num_tokens in ((15, None, 15), (15, 3, 12), (12, 9, 12), (9, None, 9), (20, 0, 9)):
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens}
        assert rollout.generate(model, prompts, tokenizer, max_length, **options).shape == (4, num_tokens)
        *_, last = rollout.generate_streaming(model, prompts, tokenizer, max_length, **options)
        assert last.shape == (4, num_tokens)


def test_rollouts_may_be_trained_on(model: Any, tokenizer: Any, prompts: Tensor) -> None:
    sequences = rollout.generate(model, prompts, tokenizer, 12)
    loss = model(sequences, labels=sequences).loss
    loss.backward()
    assert not sequences.requires_grad


def test_own_functions_for_inputs_and_arguments_are_called_for_each_token(
    model: Any, tokenizer: Any, prompts: Tensor
) -> None:
    """There is no cache: each call gets the whole text."""
    masks: list[list[int]] = []

    def prepare(input_ids: Tensor, pad_token_id: int, **model_kwargs: Any) -> dict[str, Any]:
        assert model_kwargs["mine"] == len(masks)
        mask = input_ids.ne(pad_token_id).long()
        positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
        return {"input_ids": input_ids, "attention_mask": mask, "position_ids": positions, "use_cache": False}

    def update(outputs: Any, new_mask: Tensor, **model_kwargs: Any) -> dict[str, Any]:
        masks.append(new_mask.flatten().tolist())
        return {**model_kwargs, "mine": model_kwargs["mine"] + 1}

    got = rollout.generate(
        model, prompts, tokenizer, 16, do_sample=False, prepare_inputs_fn=prepare, update_model_kwargs_fn=update, mine=0
    )
    assert got.tolist() == rollout.generate(model, prompts, tokenizer, 16, do_sample=False).tolist()
    assert masks == [[1, 1, 1, 1]] * 7


def test_a_token_is_processed_once(
    model: Any, tokenizer: Any, prompts: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_columns: list[int] = []
    forward = type(model).forward

    def counted(self: Any, input_ids: Any, **kwargs: Any) -> Any:
        num_columns.append(input_ids.shape[1])
        return forward(self, input_ids, **kwargs)

    counted.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(type(model), "forward", counted)
    rollout.generate(model, prompts, tokenizer, 14, do_sample=False)
    assert num_columns == [9, 1, 1, 1, 1]


def test_bad_calls_are_refused(model: Any, tokenizer: Any, prompts: Tensor) -> None:
    right_padded = prompts.flip(1)
    with pytest.raises(ValueError, match="ends in padding"):
        rollout.generate(model, right_padded, tokenizer, 20)
    for stops in ([5, 6], [[5], []]):
        with pytest.raises(ValueError, match="stop_token_ids"):
            rollout.generate(model, prompts, tokenizer, 20, stop_token_ids=stops)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_beams"):
        next(rollout.generate_streaming(model, prompts, tokenizer, 20, num_beams=2))
    with pytest.raises(ValueError, match="stream_interval"):
        next(rollout.generate_streaming(model, prompts, tokenizer, 20, stream_interval=0))
    tokenizer.padding_side = "right"
    for num_beams in (1, 2):
        with pytest.raises(ValueError, match="padding_side"):
            rollout.generate(model, prompts, tokenizer, 20, num_beams=num_beams)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = None
    with pytest.raises(ValueError, match="pad_token"):
        rollout.generate(model, prompts, tokenizer, 20)


def test_processors_are_those_that_do_something() -> None:
    assert len(rollout.prepare_logits_processor()) == 0
    assert len(rollout.prepare_logits_processor(top_k=0, top_p=1.0, temperature=1.0)) == 0
    names = [type(each).__name__ for each in rollout.prepare_logits_processor(top_k=3, top_p=0.5, temperature=0.5)]
    assert names == ["TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"]


def test_a_batch_is_finished_when_no_row_goes_on() -> None:
    assert rollout.is_sequence_finished(torch.tensor([0, 0]))
    assert not rollout.is_sequence_finished(torch.tensor([0, 1]))


GROUP = """
import os, sys, torch
from corolla.hf.rollout import is_sequence_finished
rank = 0 if os.fork() else 1
torch.distributed.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
rows = [torch.tensor([rank, 0]), torch.tensor([0, 0, 0][: rank + 1])]
finished = [is_sequence_finished(each) for each in rows]
torch.distributed.destroy_process_group()
os.write(1, f"{finished}\\n".encode())
if rank == 0:
    os.wait()
"""


@pytest.mark.full
def test_processes_of_a_group_end_together(tmp_path: Path) -> None:
    """Also when their batches have different sizes."""
    answered = subprocess.run(
        [sys.executable, "-c", GROUP, f"file://{tmp_path}/group"], stdout=subprocess.PIPE, text=True, timeout=90,
        env=os.environ, check=True,
    )  # fmt: skip
    assert answered.stdout.splitlines() == ["[False, True]"] * 2
