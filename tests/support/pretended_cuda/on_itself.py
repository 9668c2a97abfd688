"""The pretended device finds what it is for; tests/gpu/test_pretended_cuda.py starts this."""

import copy
import threading
import time

import pytest
import torch

import pretended_cuda

HERE = torch.device("cuda", 0)


def side():
    return torch.cuda.Stream(HERE)


def trained(model, x):
    inner = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        inner.zero_grad()
        model(x).square().mean().backward()
        inner.step()
    return model.state_dict()


@pytest.mark.parametrize("convolves", [False, True])
def test_kernels_give_what_the_cpu_gives(convolves):
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3, bias=False) if convolves else torch.nn.Dropout(0.0),
        torch.nn.BatchNorm2d(3 if convolves else 2),
        torch.nn.Flatten(),
        torch.nn.Linear(12 if convolves else 32, 2),
    )
    x = torch.randn(5, 2, 4, 4)
    there = trained(copy.deepcopy(model).to(HERE), x.to(HERE))
    mine = trained(model, x)
    assert all(value.is_cuda for value in there.values())
    for name, value in mine.items():
        # The CPU has a library for convolutions, which torch does not ask for a device's.
        torch.testing.assert_close(
            there[name].cpu(), value, **({} if convolves else {"rtol": 0, "atol": 0})
        )


def test_tensors_of_two_devices_cannot_be_mixed():
    with pytest.raises(RuntimeError, match="device"):
        torch.ones(3, device=HERE) + torch.ones(3)
    assert (torch.ones(3, device=HERE) * torch.tensor(2.0)).tolist() == [2, 2, 2]  # 0-dim: allowed


def test_a_storage_gives_its_memory_back_and_takes_it_again():
    before = torch.cuda.memory_allocated(HERE)
    row = torch.ones(1000, device=HERE)
    row.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated(HERE) == before
    row.untyped_storage().resize_(row.nbytes)
    assert torch.cuda.memory_allocated(HERE) == before + row.nbytes
    assert row.zero_().tolist() == [0] * 1000
    beside = side()
    beside.wait_stream(torch.cuda.current_stream(HERE))
    with torch.cuda.stream(beside):
        row.add_(1)
    row.untyped_storage().resize_(0)
    assert "given back while in use" in " ".join(pretended_cuda.violations())


def test_a_copy_between_devices_is_in_turn_on_both():
    mine, theirs = torch.ones(1000, device=HERE), torch.empty(1000, device="cuda:1")
    theirs.copy_(mine)
    theirs += 1
    mine.zero_()
    del mine
    assert theirs.tolist() == [2] * 1000
    assert not pretended_cuda.violations()


def test_hooks_of_backward_run_in_a_thread_of_their_own():
    seen = []
    weight = torch.ones(3, device=HERE, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(threading.get_ident()))
    weight.sum().backward()
    assert seen != [threading.get_ident()]


def test_a_copy_is_not_there_before_somebody_waited_for_it():
    there = torch.arange(4.0, device=HERE)
    host = torch.empty(4, pin_memory=True)
    host.copy_(there, non_blocking=True)
    assert host.isnan().all()
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(HERE))
    while not event.query():
        pass
    assert host.tolist() == [0, 1, 2, 3]


def test_memory_that_is_not_pinned_is_counted():
    before = pretended_cuda.pageable()
    torch.zeros(4).to(HERE, non_blocking=True)
    assert pretended_cuda.pageable() == before + 1


@pytest.mark.parametrize(("one", "other"), ["wr", "rw", "ww", "rr"])
@pytest.mark.parametrize("waits", [False, True])
def test_two_streams_and_no_event_between_them(one, other, waits):
    row, beside = torch.zeros(100, device=HERE), side()
    torch.cuda.synchronize(HERE)

    def use(how):
        return row[40:60].add_(1) if how == "w" else row[50:70] + 1

    use(one)
    if waits:
        beside.wait_stream(torch.cuda.current_stream(HERE))
    with torch.cuda.stream(beside):
        used = use(other)
        row[70:90].add_(1)  # another range
    found = pretended_cuda.violations()
    assert any("no event is between" in line for line in found) == (
        not waits and "w" in (one, other)
    )
    torch.cuda.synchronize(HERE)
    del used


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_given_back_while_another_stream_uses_it(recorded):
    row, beside = torch.zeros(10, device=HERE), side()
    beside.wait_stream(torch.cuda.current_stream(HERE))
    with torch.cuda.stream(beside):
        kept = row + 1
        if recorded:
            row.record_stream(beside)
    del row
    found = pretended_cuda.violations()
    assert bool(found) != recorded
    assert all("given back while in use" in line for line in found)
    del kept


def test_what_makes_the_host_wait_is_told_and_can_be_refused():
    row = torch.ones(3, device=HERE)
    pretended_cuda.waits()
    assert float(row.sum()) == 3
    assert row.cpu().tolist() == [1, 1, 1]
    assert len(row.nonzero()) == 3
    assert pretended_cuda.waits() == {"item": 1, "copy to the host": 1, "aten::nonzero": 1}
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation: item"):
            row.sum().item()
        row.add_(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_new_memory_and_old_is_nan():
    assert torch.empty(5, device=HERE).isnan().all()
    assert torch.empty(5, pin_memory=True).isnan().all()


def test_bytes_are_counted():
    before = torch.cuda.memory_allocated(HERE)
    torch.cuda.reset_peak_memory_stats(HERE)
    row = torch.zeros(1 << 20, device=HERE)
    assert torch.cuda.memory_allocated(HERE) == before + row.nbytes
    del row
    assert torch.cuda.memory_allocated(HERE) == before
    assert torch.cuda.max_memory_allocated(HERE) >= before + (4 << 20)


@pytest.mark.parametrize("waits", [False, True])
def test_memory_that_was_just_given_out_is_still_used_on_its_stream(waits):
    torch.ones(4, device=HERE).add_(1)
    fresh = torch.empty(4, device=HERE)
    if waits:
        torch.cuda.synchronize(HERE)
    pretended_cuda.taken_by_mpi(fresh)
    found = pretended_cuda.violations()
    assert any("its last owner" in line for line in found) != waits


def test_a_device_that_sleeps_is_behind_its_host():
    begun, slept, ended = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start = time.perf_counter()
    begun.record(torch.cuda.current_stream(HERE))
    torch.cuda._sleep(int(0.5 * pretended_cuda.CYCLES_PER_SECOND))
    slept.record(torch.cuda.current_stream(HERE))
    beside = side()
    beside.wait_event(slept)
    ended.record(beside)
    assert not slept.query() and not ended.query()
    assert time.perf_counter() - start < 0.5, "the host goes on"
    torch.cuda.synchronize(HERE)
    assert time.perf_counter() - start >= 0.5
    assert 500 <= begun.elapsed_time(slept) <= begun.elapsed_time(ended) < 1000
    while not (slept.query() and ended.query()):
        pass
