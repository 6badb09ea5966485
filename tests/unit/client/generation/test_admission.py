import pytest
from prometheus_client import CollectorRegistry

from corolla.chassis.errors import QueueFull
from corolla.client.generation.admission import Admission
from corolla.client.generation.stopping import FinishReason
from corolla.client.generation.usage import Usage
from corolla.client.metrics import ClientMetrics


class Door:
    """An admission, and what its metrics say."""

    def __init__(self, max_running: int) -> None:
        self._registry = CollectorRegistry()
        self.admission = Admission(max_running, ClientMetrics(self._registry))

    def value(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(f"corolla_{name}", labels) or 0

    @property
    def held(self) -> tuple[float, float]:
        """Requests that wait and that run."""
        return self.value("num_requests_waiting"), self.value("num_requests_running")


def test_a_request_waits_until_its_prompt_is_known_and_then_runs() -> None:
    door, usage = Door(2), Usage()
    with door.admission.request(usage) as meter:
        assert door.held == (1, 0)
        meter.prompt(10, 4, 2)
        assert door.held == (0, 1)
        meter.prompt(0, 0, 0)
        assert door.held == (0, 1), "several completions are one request"
    assert door.held == (0, 0)
    assert door.value("prefix_cache_hits_total") == 4
    assert door.value("prefix_cache_queries_total") == door.value("prompt_tokens_total") == 10
    assert door.value("recomputed_tokens_total") == 2


@pytest.mark.parametrize("is_known", [False, True])
def test_every_way_out_gives_the_place_back(is_known: bool) -> None:
    door = Door(1)
    for _ in range(3):
        with pytest.raises(GeneratorExit), door.admission.request(Usage()) as meter:  # noqa: PT012
            if is_known:
                meter.prompt(1, 0, 0)
            raise GeneratorExit
        assert door.held == (0, 0)


def test_one_too_many_is_refused_and_takes_nothing() -> None:
    door = Door(1)
    with door.admission.request(Usage()):
        with pytest.raises(QueueFull), door.admission.request(Usage()):
            pass
        assert door.held == (1, 0)
    with door.admission.request(Usage()):
        pass


def test_tokens_and_ends_are_counted() -> None:
    door, usage = Door(1), Usage()
    with door.admission.request(usage) as meter:
        meter.prompt(3, 0, 0)
        for index in (0, 1, 0, 1, 0):
            meter.token(index)
        meter.finished(FinishReason.EOS)
    assert usage.completion_tokens == door.value("generation_tokens_total") == 5
    assert door.value("time_to_first_token_seconds_count") == 1
    # Between two tokens of one completion, never between those of different ones.
    assert door.value("inter_token_latency_seconds_count") == 3
    assert door.value("request_success_total", finished_reason="eos") == 1
    assert usage.time_to_first_token_s > 0
