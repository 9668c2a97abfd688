"""What packs rows on a device is tried before it is taken."""

import sys
from types import ModuleType

import pytest
import torch
from daso.comm.compression import EVEN
from daso.train.deltas.kernel_choice import views

import daso.comm
from daso.train.deltas import kernel_choice as packing

CPU = torch.device("cpu")


class Copies:
    """A device that says how long what was launched took: torch's operations 1, kernels more."""

    def __init__(self, ratio):
        self.taken = [1.0, ratio] * packing.ROUNDS
        self.now, self.ends = 0.0, False

    def stamp(self):
        if self.ends:
            self.now += self.taken.pop(0)
        self.ends = not self.ends
        return Moment(self.now)


class Moment:
    def __init__(self, at):
        self.at = at

    def over(self):
        return True

    def since(self, earlier):
        return self.at - earlier.at


def kernels(wrong=0.0, error=None, interpreted=False):
    """Return a module that does with torch what kernels do."""
    made = ModuleType("kernels")
    made.WIRES, made.BLOCK = {torch.bfloat16: None}, 2048
    made.version, made.interpreted = lambda: "3.x", lambda: interpreted

    def pack(jobs, number, wire, reference, residual, lost, first, *, aligned):
        if error is not None:
            raise error
        whole = torch.cat([p.float() for p, _ in made.views])
        for _, at, there, numel in jobs.tolist():
            assert not aligned or not (at % EVEN or there % EVEN or numel % EVEN)
            values = whole[at : at + numel] - reference[at : at + numel]
            if residual is not None:
                values += residual[at : at + numel]
            wire[there : there + numel] = values
            if lost is not None:
                lost[at : at + numel] = values - wire[there : there + numel].float()

    def take(mean, sent, reference, residual, shown):
        apart = mean - sent.float()
        reference += mean
        if shown is not None:
            shown.copy_(apart + (wrong if residual is None else residual))
        return torch.stack([apart.dot(apart), reference.dot(reference)])

    made.pack, made.take = pack, take
    return made


@pytest.fixture
def chosen(monkeypatch):
    """Return what is chosen with certain kernels, and a clock."""
    f32, b16 = torch.float32, torch.bfloat16
    monkeypatch.setattr(packing, "TENSORS", ((4096, f32), (10, b16), (3000, f32), (7, f32)))

    def choose(made, ratio=0.5):
        real = packing.views

        def noted(params):
            made.views = real(params)
            return made.views

        monkeypatch.setattr(packing, "CudaCopies", lambda _: Copies(ratio))
        monkeypatch.setattr(packing, "views", noted)
        monkeypatch.setitem(sys.modules, "daso.comm.device.triton_kernels", made)
        monkeypatch.setattr(daso.comm, "kernels", made, raising=False)
        return packing.choose.__wrapped__(CPU)

    return choose


def torchs(why):
    return packing.Choice(None, f"torch's operations ({why})")


@pytest.mark.parametrize("usual", [torch.float32, torch.bfloat16, torch.float64])
def test_kernels_are_taken_where_they_are_faster(chosen, usual):
    """Whatever type torch makes tensors of, unless it is told."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(usual)
    try:
        made = kernels()
        found = chosen(made, 0.41)
    finally:
        torch.set_default_dtype(before)
    assert found.told == "kernels (Triton 3.x), 0.41 of the time of torch's operations"
    assert found.kernels is made


def test_kernels_that_are_slower_are_not_taken(chosen):
    assert chosen(kernels(), 1.3) == torchs("kernels take 1.30 of their time")


def test_kernels_that_give_other_bits_are_not_taken(chosen):
    assert chosen(kernels(wrong=1e-6)) == torchs("kernels give other bits here")


def test_kernels_that_do_not_start_are_not_taken(chosen):
    error = RuntimeError("no C compiler\nand more")
    why = "kernels do not start: RuntimeError: no C compiler and more"
    assert chosen(kernels(error=error)) == torchs(why)


def test_kernels_that_are_interpreted_are_not_taken(chosen):
    """They would look for a device's memory on the host."""
    assert chosen(kernels(interpreted=True)).told.endswith("(Triton interprets: TRITON_INTERPRET)")


def test_without_triton_torch_packs(monkeypatch):
    monkeypatch.delattr(daso.comm, "kernels", raising=False)
    monkeypatch.setitem(sys.modules, "daso.comm.device.triton_kernels", None)
    found = packing.choose.__wrapped__(CPU)
    assert found.kernels is None
    assert "import of daso.comm.device.triton_kernels halted" in found.told


def test_a_device_is_asked_once(monkeypatch):
    tried = []
    monkeypatch.setattr(packing, "_trial", lambda *_: tried.append(1) or 2.0)
    packing.choose.cache_clear()
    assert packing.choose(CPU) is packing.choose(CPU)
    packing.choose.cache_clear()
    assert tried == [1]


def test_tensors_lie_one_after_the_other():
    found = views([torch.zeros(3), torch.zeros(0), torch.zeros(2)])
    assert [at for _, at in found] == [0, 3, 3]
