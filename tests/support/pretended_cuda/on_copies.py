"""Copies that are slowed down on a pretended device; tests/gpu/test_pretended_cuda.py starts it."""

import re
import time

import pytest
import torch
from jobs import slowness

import pretended_cuda
from daso.errors import ConfigError
from daso.predict import slow_copies
from daso.predict.copy_sweep import CopyDelay

HERE = torch.device("cuda", 0)
RATE = 4e8  # bytes per second: far below what this machine's memory does


@pytest.fixture(autouse=True)
def link():
    torch.empty(4, device=HERE).copy_(torch.ones(4, pin_memory=True)).cpu()  # torch's own start
    pretended_cuda.set_link(RATE)
    yield
    pretended_cuda.set_link(0.0)


def seconds(call):
    torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


@pytest.mark.parametrize("factor", [1.0, 2.0, 2.5])
@pytest.mark.parametrize("pinned", [False, True])
def test_every_copy_takes_as_many_times_as_long(factor, pinned):
    host = torch.ones(2_000_000, pin_memory=pinned)  # 20 ms of the link
    there, late = torch.empty(2_000_000, device=HERE), {"non_blocking": pinned}
    calls = [
        lambda: host.to(HERE, **late),
        lambda: host.cuda(**late),
        lambda: there.copy_(host, **late),
        lambda: host.copy_(there, **late),
        lambda: there.to("cpu", **late),
        there.cpu,
    ]
    with CopyDelay(factor) as delay:
        for call in calls:
            call()  # makes memory
            taken = [seconds(call) / (factor * 0.02) for _ in range(3)]
            assert min(taken) > 0.95
            assert min(taken) < 1.5 * slowness()
        assert delay.bytes == [12 * host.nbytes, 12 * host.nbytes]


def test_the_host_goes_on_and_the_stream_is_held_up():
    host, there = torch.ones(2_000_000, pin_memory=True), torch.empty(2_000_000, device=HERE)
    with CopyDelay(3.0):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record(torch.cuda.current_stream())
        at = time.perf_counter()
        there.copy_(host, non_blocking=True)
        assert time.perf_counter() - at < 0.02 * slowness(), "less than one copy takes"
        ended.record(torch.cuda.current_stream())
        torch.cuda.synchronize()
    assert begun.elapsed_time(ended) >= 3 * 20 * 0.99


def test_results_are_the_same_bits_and_copies_of_a_backward_count():
    def train():
        torch.manual_seed(1)
        with torch.device("cpu"):
            first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        second.to(HERE)
        for _ in range(3):
            batch = torch.randn(4, 8, device="cpu")
            second(first(batch).to(HERE)).square().mean().cpu().backward()
            for p in (*first.parameters(), *second.parameters()):
                with torch.no_grad():
                    p.sub_(p.grad, alpha=0.1)
                p.grad = None
        return [p.detach().cpu() for p in (*first.parameters(), *second.parameters())]

    plain = train()
    with CopyDelay(2.0) as delay:
        slow = train()
    assert all(map(torch.equal, plain, slow))
    # Back: of the loss's gradient to the device, of the activations' to the host.
    weights = 4 * (8 * 8 + 8)
    assert delay.bytes == [weights + 3 * (4 * 8 * 4 + 4), weights + 3 * (4 + 4 * 8 * 4)]


def test_it_is_tried_before_it_counts(monkeypatch):
    try:
        with slow_copies(2) as delay:
            assert delay.bytes == [0, 0]
    except ConfigError:  # 5 % is not to be had where others have the memory's bandwidth
        assert slowness() > 1
    monkeypatch.setattr(CopyDelay, "_copy_more", lambda *_, **__: None)
    with pytest.raises(ConfigError, match=r"on trial they take [\d.]+ of the requested") as told:
        slow_copies(2).__enter__()
    # A copy of the trial is held against one made before, by what else the machine does meanwhile.
    found = float(re.search(r"take ([\d.]+) of", str(told.value))[1])
    assert found == pytest.approx(0.5, rel=0.05 * slowness())
