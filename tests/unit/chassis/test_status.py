"""Every error of the tree goes over the wire and comes back as itself."""

import grpc
import pytest
from google.rpc import error_details_pb2

from corolla.chassis import errors
from corolla.chassis.status import from_reason, parse_status, to_status


def classes(root: type[errors.CorollaError]) -> list[type[errors.CorollaError]]:
    return [root, *(each for child in root.__subclasses__() for each in classes(child))]


def made(cls: type[errors.CorollaError]) -> errors.CorollaError:
    if issubclass(cls, errors.InvalidRequest):
        return cls("field", "is wrong", ("other", "is wrong, too"))
    if issubclass(cls, errors.PositionGap):
        return cls("a sentence", 7)
    return cls("a sentence")


ALL = [cls for cls in classes(errors.CorollaError) if cls.__module__ == errors.__name__]


@pytest.mark.parametrize("cls", ALL)
def test_an_error_comes_back_as_it_went(cls: type[errors.CorollaError]) -> None:
    error = made(cls)
    error.metadata["fact"] = "1"
    back = parse_status(to_status(error))
    assert (back.reason, back.code, back.message) == (error.reason, error.code, error.message)
    assert back.metadata == error.metadata
    assert back.retry_after_s == error.retry_after_s
    if isinstance(error, errors.InvalidRequest):
        assert isinstance(back, errors.InvalidRequest)
        assert tuple(back.violations) == (("field", "is wrong"), ("other", "is wrong, too"))
    if isinstance(error, errors.PositionGap):
        assert isinstance(back, errors.PositionGap)
        assert back.held == 7


def test_labels_name_one_code_each_and_none_is_unknown() -> None:
    codes: dict[str, grpc.StatusCode] = {}
    for cls in ALL:
        assert codes.setdefault(cls.reason, cls.code) is cls.code
        assert cls.code is not grpc.StatusCode.UNKNOWN
        assert cls.reason == cls.reason.upper()


@pytest.mark.parametrize("cls", ALL)
def test_retryable_errors_carry_a_delay(cls: type[errors.CorollaError]) -> None:
    names = {detail.type_url.rpartition(".")[2] for detail in to_status(made(cls)).details}
    assert "ErrorInfo" in names
    if cls.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED) and cls is not errors.StaleEpoch:
        assert "RetryInfo" in names
    if issubclass(cls, errors.InvalidRequest):
        assert "BadRequest" in names
        assert "RetryInfo" not in names


def test_a_delay_of_parts_of_a_second_is_kept() -> None:
    status = to_status(errors.QueueFull("a sentence", retry_after_s=1.25))
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (1, 250_000_000)


def test_errors_to_callers_do_not_name_the_failed_hop() -> None:
    error = from_reason("HOP_UNAVAILABLE", "a sentence", {"address": "10.0.0.1:50052"})
    assert isinstance(error, errors.HopUnavailable)
    assert error.address == "10.0.0.1:50052"
    assert b"10.0.0.1" not in to_status(error).SerializeToString()


def test_a_label_of_a_later_version_is_our_own_fault() -> None:
    assert type(from_reason("SOMETHING_NEW", "a sentence")) is errors.InternalError


def test_numbers_from_a_peer_are_not_trusted() -> None:
    error = from_reason("POSITION_GAP", "a sentence", {"num_cached_tokens": "many"})
    assert isinstance(error, errors.PositionGap)
    assert error.held == 0
