"""Streams, events and pinned memory, on a CUDA that only keeps books."""

import mmap
from itertools import pairwise

import pytest
import torch
from fake_cuda import Copies, Cuda

from daso.comm.device.cuda import pages
from daso.comm.mpi import load
from daso.comm.node.shm import SharedWindow

DEVICE = torch.device("cpu")


class Row:
    """A tensor that tells on which stream it was written."""

    is_cuda = True

    def __init__(self, cuda):
        self.cuda, self.written_on, self.kept_for = cuda, None, []

    def copy_(self, _, *, non_blocking):
        assert non_blocking
        self.written_on = self.cuda.current_stream(DEVICE)
        self.written_on.launch()
        self.written_after = dict(self.written_on.after)

    def record_stream(self, stream):
        self.kept_for.append(stream)


@pytest.fixture
def cuda():
    return Cuda()


@pytest.fixture
def copies(cuda):
    return Copies(DEVICE, cuda)


def test_a_copy_out_comes_after_what_computes_it_and_nothing_waits_for_it(cuda, copies):
    source, target = Row(cuda), Row(cuda)
    cuda.compute.launch()
    arrived = copies.to_host(source, target)
    assert target.written_on is not cuda.compute
    assert target.written_after["compute"] == 1
    assert cuda.compute.after == {"compute": 1}
    event = arrived.__self__
    assert event.stream is target.written_on
    assert event.after == target.written_after
    assert source.kept_for == [target.written_on]


@pytest.mark.parametrize("in_order", [False, True])
def test_a_copy_back_waits_for_other_launches_only_when_told(cuda, copies, in_order):
    source, target = Row(cuda), Row(cuda)
    source.is_cuda = False
    cuda.compute.launch()
    copies.to_device(source, target, in_order=in_order)
    assert target.written_after.get("compute", 0) == int(in_order)
    assert target.kept_for == [target.written_on]


def test_copies_each_way_and_what_runs_beside_do_not_wait_for_each_other(cuda, copies):
    there, back = Row(cuda), Row(cuda)
    copies.to_host(Row(cuda), there)
    copies.to_device(Row(cuda), back)
    with copies.side_stream():
        beside = cuda.current_stream(DEVICE)
        event = copies.completion().__self__
    assert len({there.written_on, back.written_on, beside, cuda.compute}) == 4
    assert event.stream is beside
    assert copies.completion().__self__.stream is cuda.compute


def test_rows_are_pinned_page_by_page_and_given_back(cuda, copies):
    memory = torch.zeros(5 * mmap.PAGESIZE, dtype=torch.uint8)
    copies.pin([memory[:100], memory[100:200], memory[3 * mmap.PAGESIZE :], memory[:0]])
    assert len(cuda.registered) == 2
    assert all(at % mmap.PAGESIZE == 0 for at in cuda.registered)
    with pytest.raises(RuntimeError, match="712"):
        copies.pin([memory[:1]])
    copies.unpin()
    copies.unpin()
    assert not cuda.registered


def test_rows_of_windows_can_be_pinned_one_after_the_other(cuda, copies):
    """A window of a single rank has pages of its own; MPI takes such memory from the heap."""
    windows = [SharedWindow(load().COMM_SELF, 100) for _ in range(20)]
    for window in windows:
        copies.pin(window.segments)
    assert len(cuda.registered) == len(windows)
    copies.unpin()
    for window in windows:
        window.free()


def test_pages_hold_all_rows_and_never_overlap():
    memory = torch.zeros(64 * mmap.PAGESIZE, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        cuts = torch.randint(0, memory.numel(), (8,), generator=generator).sort().values.tolist()
        rows = [memory[a:b] for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
        found = pages(rows[::-1])
        assert all(stop < start for (_, stop), (start, _) in pairwise(found))
        for row in rows:
            last = row.data_ptr() + row.nbytes
            assert not row.numel() or any(a <= row.data_ptr() and last <= b for a, b in found)
