"""What packs rows on a device is tried before it is taken."""

import sys
from types import ModuleType

import pytest
import torch

import daso.comm
from daso.comm.stopwatch import HostStamp
from daso.train import packing
from daso.train.packing import views

CPU = torch.device("cpu")


class Clock:
    """Says that what kernels did took so many times as long."""

    def __init__(self, ratio):
        # The first of each is longer: kernels are compiled then.
        self.taken = [time for one in (1.0, ratio) for time in [9.0] + [one] * packing.ROUNDS]
        self.now, self.ends = 0.0, False

    def stamp(self):
        if self.ends:
            self.now += self.taken.pop(0)
        self.ends = not self.ends
        made = HostStamp()
        made._at = self.now
        return made


def kernels(wrong=0.0, error=None):
    """Return a module that does with torch what kernels do."""
    made = ModuleType("kernels")
    made.WIRES = {torch.bfloat16: None}
    made.EVEN, made.BLOCK, made.version = 8, 2048, lambda: "3.x"

    def pack(jobs, number, wire, reference, residual, lost, first, *, aligned):
        if error is not None:
            raise error
        assert residual is None and lost is None
        whole = torch.cat([p for p, _ in made.views])
        for _, at, there, numel in jobs.tolist():
            values = whole[at : at + numel] - reference[at : at + numel]
            wire[there : there + numel] = values

    def take(mean, sent, reference, residual, shown):
        apart = mean - sent.float()
        reference += mean
        shown.copy_(apart + wrong)
        return torch.stack([apart.dot(apart), reference.dot(reference)])

    made.pack, made.take = pack, take
    return made


@pytest.fixture
def chosen(monkeypatch):
    """Return what is chosen with certain kernels, and a clock."""
    monkeypatch.setattr(packing, "NUMELS", (4096, 10, 3000, 7))

    def choose(made, ratio=0.5):
        real = packing.views

        def noted(params):
            made.views = real(params)
            return made.views

        monkeypatch.setattr(packing, "views", noted)
        monkeypatch.setitem(sys.modules, "daso.comm.kernels", made)
        monkeypatch.setattr(daso.comm, "kernels", made, raising=False)
        return packing._chosen.__wrapped__(CPU, Clock(ratio))

    return choose


def test_kernels_are_taken_where_they_are_faster(chosen):
    made = kernels()
    found = chosen(made, 0.41)
    assert found.kernels is made
    assert found.told == "kernels (Triton 3.x), 0.41 of the time of torch's operations"


def test_kernels_that_are_slower_are_not_taken(chosen):
    found = chosen(kernels(), 1.3)
    assert found == packing.Choice(None, "torch's operations (kernels take 1.30 of their time)")


def test_kernels_that_give_other_bits_are_not_taken(chosen):
    found = chosen(kernels(wrong=1e-6))
    assert found == packing.Choice(None, "torch's operations (kernels give other bits here)")


def test_kernels_that_do_not_start_are_not_taken(chosen):
    error = RuntimeError("Failed to find C compiler\nand more")
    told = "torch's operations (kernels do not start: RuntimeError: Failed to find C compiler)"
    assert chosen(kernels(error=error)) == packing.Choice(None, told)


def test_without_triton_torch_packs(monkeypatch):
    monkeypatch.delattr(daso.comm, "kernels", raising=False)
    monkeypatch.setitem(sys.modules, "daso.comm.kernels", None)
    found = packing._chosen.__wrapped__(CPU, Clock(1.0))
    assert found.kernels is None
    assert found.told.startswith("torch's operations (import of daso.comm.kernels halted")


def test_a_device_is_asked_once(monkeypatch):
    tried = []
    monkeypatch.setattr(packing, "_trial", lambda *_: tried.append(1) or 2.0)
    packing._chosen.cache_clear()
    clocks = [packing._Clock(Clock(1.0)) for _ in range(2)]
    assert len({packing._chosen(CPU, clock) for clock in clocks}) == 1
    packing._chosen.cache_clear()
    assert len(tried) == 1


def test_tensors_lie_one_after_the_other():
    found = views([torch.zeros(3), torch.zeros(0), torch.zeros(2)])
    assert [at for _, at in found] == [0, 3, 3]
