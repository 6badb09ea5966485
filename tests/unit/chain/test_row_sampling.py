"""One job reads a whole microbatch: each row by its own sampler, and no row disturbs another."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from corolla.chain.pending import RowResult
from corolla.chain.row_sampling import RowOutput, SampledTokens, embed, sample_rows
from corolla.chassis.errors import CorollaError, InternalError, NonFiniteOutput
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import Edges, load_edges
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.tensors import tensor_type, to_payload
from tests.checkpoints import make_tiny_checkpoint


# A family that only looks its embedding up, and one that adds learned positions.
@pytest.fixture(scope="module", params=["llama", "gpt2"])
def edges(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Edges:
    folder: Path = make_tiny_checkpoint(request.param, tmp_path_factory.mktemp("edges") / "tiny")
    return load_edges(Checkpoint.from_pretrained(str(folder)), dtype=torch.float32)


class Listener:
    """Takes the likeliest token of its first `num_tokens` rows, and keeps the logits that it saw."""

    def __init__(self, num_tokens: int = 1, *, wants_more: bool = True, failure: CorollaError | None = None) -> None:
        self.wants_more = wants_more
        self.seen = torch.empty(0)
        self.num_tokens = num_tokens
        self._failure = failure

    def sample(self, logits: torch.Tensor) -> list[int]:
        if self._failure is not None:
            raise self._failure
        self.seen = logits
        likeliest: list[int] = logits[: self.num_tokens].argmax(dim=-1).tolist()
        return likeliest


def output(hidden: torch.Tensor, sampler: Listener, position: int, num_tokens: int | None = None) -> RowOutput:
    num_results = len(hidden)
    row = pb.StepRow(position=position, num_tokens=num_tokens or num_results, num_result_tokens=num_results)
    result = RowResult(to_payload(hidden), num_results, tensor_type(hidden.dtype), hidden.shape[1])
    return RowOutput(row, result, sampler)


def states(edges: Edges, num_tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(num_tokens, edges.config.hidden_size, generator=torch.Generator().manual_seed(seed))


def succeeded(sampled_rows: Sequence[SampledTokens | CorollaError]) -> list[SampledTokens]:
    assert all(isinstance(each, SampledTokens) for each in sampled_rows)
    return [each for each in sampled_rows if isinstance(each, SampledTokens)]


def test_rows_of_a_microbatch_get_their_own_logits_and_their_own_next_input(edges: Edges) -> None:
    hidden = [states(edges, 1, 1), states(edges, 4, 2), states(edges, 1, 3)]
    samplers = [Listener(), Listener(num_tokens=3), Listener()]
    # One token, one token with three draft tokens of which two were right, and the last chunk of a prompt.
    outputs = [
        output(hidden[0], samplers[0], 5),
        output(hidden[1], samplers[1], 7),
        output(hidden[2], samplers[2], 2, num_tokens=6),
    ]
    sampled_rows = succeeded(sample_rows(edges, outputs))
    assert [sampled.position for sampled in sampled_rows] == [6, 10, 8]
    for part, sampler, sampled in zip(hidden, samplers, sampled_rows, strict=True):
        torch.testing.assert_close(sampler.seen, edges.head(part))
        assert len(sampled.token_ids) == sampler.num_tokens
        expected = embed(edges, sampled.token_ids[-1:], [sampled.position])
        assert sampled.hidden is not None
        assert torch.equal(sampled.hidden, expected)


def test_an_ended_row_is_not_embedded_even_at_the_end_of_the_context(edges: Edges) -> None:
    end = edges.config.max_position_embeddings
    outputs = [
        output(states(edges, 1, 1), Listener(wants_more=False), end - 1),
        output(states(edges, 1, 2), Listener(), 3),
    ]
    ended, going_on = succeeded(sample_rows(edges, outputs))
    assert ended.hidden is None
    assert going_on.hidden is not None


def test_a_row_that_fails_leaves_the_other_rows_unaffected(edges: Edges) -> None:
    failure = NonFiniteOutput("The model's output is not finite.")
    outputs = [
        output(states(edges, 1, 1), Listener(failure=failure), 4),
        output(states(edges, 1, 2), Listener(), 4),
    ]
    failed, sound = sample_rows(edges, outputs)
    assert failed is failure
    assert isinstance(sound, SampledTokens)
    assert sound.hidden is not None


def test_a_reader_must_choose_something(edges: Edges) -> None:
    with pytest.raises(InternalError):
        sample_rows(edges, [output(states(edges, 1, 1), Listener(num_tokens=0), 4)])
