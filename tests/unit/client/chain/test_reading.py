"""One job reads a whole gang: each row by its own reader, and no row disturbs another."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from corolla.chassis.errors import CorollaError, InternalError, NonFiniteOutput
from corolla.client.chain.awaited import RowResult
from corolla.client.chain.reading import Arrival, Reading, embed, read
from corolla.client.edges import Edges, load_edges
from corolla.models.checkpoint import Checkpoint
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.tensors import tensor_type, to_payload
from tests.checkpoints import make_tiny_checkpoint


# A family that only looks its embedding up, and one that adds learned positions.
@pytest.fixture(scope="module", params=["llama", "gpt2"])
def edges(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Edges:
    folder: Path = make_tiny_checkpoint(request.param, tmp_path_factory.mktemp("edges") / "tiny")
    return load_edges(Checkpoint.open(str(folder)), dtype=torch.float32)


class Listener:
    """Takes the likeliest token of its first `num_tokens` rows, and keeps the logits that it saw."""

    def __init__(self, num_tokens: int = 1, *, goes_on: bool = True, failure: CorollaError | None = None) -> None:
        self.goes_on = goes_on
        self.seen = torch.empty(0)
        self._num_tokens = num_tokens
        self._failure = failure

    def read(self, logits: torch.Tensor) -> list[int]:
        if self._failure is not None:
            raise self._failure
        self.seen = logits
        likeliest: list[int] = logits[: self._num_tokens].argmax(dim=-1).tolist()
        return likeliest


def arrival(hidden: torch.Tensor, reader: Listener, position: int, num_tokens: int | None = None) -> Arrival:
    num_results = len(hidden)
    row = pb.StepRow(position=position, num_tokens=num_tokens or num_results, num_result_tokens=num_results)
    result = RowResult(to_payload(hidden), num_results, tensor_type(hidden.dtype), hidden.shape[1])
    return Arrival(row, result, reader)


def states(edges: Edges, num_tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(num_tokens, edges.config.hidden_size, generator=torch.Generator().manual_seed(seed))


def succeeded(readings: Sequence[Reading | CorollaError]) -> list[Reading]:
    assert all(isinstance(each, Reading) for each in readings)
    return [each for each in readings if isinstance(each, Reading)]


def test_rows_of_a_gang_get_their_own_logits_and_their_own_next_input(edges: Edges) -> None:
    hidden = [states(edges, 1, 1), states(edges, 4, 2), states(edges, 1, 3)]
    readers = [Listener(), Listener(num_tokens=3), Listener()]
    # One token, one token with three guesses of which two were right, and the last chunk of a prompt.
    arrivals = [
        arrival(hidden[0], readers[0], 5),
        arrival(hidden[1], readers[1], 7),
        arrival(hidden[2], readers[2], 2, num_tokens=6),
    ]
    readings = succeeded(read(edges, arrivals))
    assert [reading.position for reading in readings] == [6, 10, 8]
    for part, reader, reading in zip(hidden, readers, readings, strict=True):
        torch.testing.assert_close(reader.seen, edges.head(part))
        assert len(reading.token_ids) == reader._num_tokens
        expected = embed(edges, reading.token_ids[-1:], [reading.position])
        assert reading.hidden is not None
        assert torch.equal(reading.hidden, expected)


def test_what_has_ended_is_not_embedded_even_at_the_end_of_the_context(edges: Edges) -> None:
    end = edges.config.max_position_embeddings
    arrivals = [
        arrival(states(edges, 1, 1), Listener(goes_on=False), end - 1),
        arrival(states(edges, 1, 2), Listener(), 3),
    ]
    ended, going_on = succeeded(read(edges, arrivals))
    assert ended.hidden is None
    assert going_on.hidden is not None


def test_a_row_that_cannot_go_on_is_no_concern_of_the_others(edges: Edges) -> None:
    failure = NonFiniteOutput("The model's output is not finite.")
    arrivals = [
        arrival(states(edges, 1, 1), Listener(failure=failure), 4),
        arrival(states(edges, 1, 2), Listener(), 4),
    ]
    failed, sound = read(edges, arrivals)
    assert failed is failure
    assert isinstance(sound, Reading)
    assert sound.hidden is not None


def test_a_reader_must_choose_something(edges: Edges) -> None:
    with pytest.raises(InternalError):
        read(edges, [arrival(states(edges, 1, 1), Listener(num_tokens=0), 4)])
