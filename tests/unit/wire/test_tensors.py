import pytest
import torch

from corolla.chassis.errors import MalformedMessage
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.tensors import DTYPES, from_payload, tensor_type, to_payload


@pytest.mark.parametrize("name", DTYPES)
def test_tensors_come_back_bit_for_bit(name: str) -> None:
    tensor = torch.randn(3, 8).to(DTYPES[name])
    tensor[0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, torch.finfo(DTYPES[name]).tiny])
    payload = to_payload(tensor)
    assert len(payload) == tensor.nbytes
    back = from_payload(bytes(payload), tensor_type(tensor.dtype), 3, 8)
    assert back.dtype == tensor.dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_only_the_tensors_own_numbers_travel_whatever_lies_under_it() -> None:
    whole = torch.arange(24, dtype=torch.float32).view(4, 6)
    for part in (whole.t(), whole[1:3], whole[:, 2:4], whole.clone().requires_grad_()):
        back = from_payload(bytes(to_payload(part)), pb.TENSOR_TYPE_FLOAT32, *part.shape)
        assert torch.equal(back, part)


def test_no_rows_are_no_bytes() -> None:
    assert bytes(to_payload(torch.empty(0, 8))) == b""
    assert from_payload(b"", pb.TENSOR_TYPE_BFLOAT16, 0, 8).shape == (0, 8)


@pytest.mark.parametrize("num_bytes", [0, 4, 63, 65, 128])
def test_a_size_that_is_not_the_shapes_is_malformed(num_bytes: int) -> None:
    with pytest.raises(MalformedMessage):
        from_payload(bytes(num_bytes), pb.TENSOR_TYPE_FLOAT32, 2, 8)


@pytest.mark.parametrize("dtype", [pb.TENSOR_TYPE_UNSPECIFIED, 99])
def test_an_unknown_type_is_malformed(dtype: int) -> None:
    with pytest.raises(MalformedMessage):
        from_payload(bytes(64), dtype, 2, 8)
