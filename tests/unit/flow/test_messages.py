"""Messages of a flow as bytes: many in one packet, in their order, where tensors may begin."""

import pytest
import torch

from daso.flow.messages import NO_ADMISSION, Admission, Message, message_seconds, pack, unpack

HOST = torch.device("cpu")
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def message(number, *payload):
    back = bool(number % 2)
    return Message(number, back, 2, (number, -1, 3), payload, Admission(1, (number, 0)))


def assert_same(found, expected):
    assert [one._replace(payload=()) for one in found] == [
        one._replace(payload=()) for one in expected
    ]
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one.payload, other.payload, strict=True):
            if b is None:
                assert a is None
                continue
            assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
            assert torch.equal(a, b)
            assert a.is_contiguous()
            assert not a.numel() or a.data_ptr() % 64 == 0


def test_many_messages_are_one_packet_and_keep_their_order():
    sent = [message(n, torch.full((n % 7, 5), float(n)), None) for n in range(100)]
    assert_same(list(unpack(pack(sent), HOST)), sent)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (3, 5), (64,)], ids=str)
def test_tensors_of_every_type_and_shape_arrive_as_they_were(dtype, shape):
    tensor = (torch.rand(shape) * 9).to(dtype)
    odd = torch.ones(3, dtype=torch.uint8)  # whatever lies before
    sent = [message(1, odd, tensor), message(2, tensor.clone())]
    assert_same(list(unpack(pack(sent), HOST)), sent)


def test_packing_keeps_requires_grad_and_makes_tensors_contiguous():
    wants = torch.rand(4, 6).requires_grad_()
    sent = [message(1, wants, torch.rand(6, 4).T, torch.rand(8, 3)[::2])]
    assert_same(list(unpack(pack(sent), HOST)), sent)


def test_writing_to_a_tensor_changes_no_other_of_its_packet():
    first, second = unpack(pack([message(1, torch.zeros(5)), message(2, torch.zeros(5))]), HOST)
    kept = (second.payload[0].requires_grad_() * 2).exp()
    first.payload[0].add_(1)  # and does not count as a change of what autograd has kept
    kept.sum().backward()
    assert torch.equal(second.payload[0], torch.zeros(5))


def test_every_message_takes_time():
    small, large = torch.zeros(4), torch.zeros(1 << 20)
    taken = message_seconds(
        [Message(0, False, 0, (0,), (one,), NO_ADMISSION) for one in (small, large)]
    )
    assert 0 < taken[0] < taken[1]
