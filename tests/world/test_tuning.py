"""Sizes of gradient buckets that change while training: found alike on all ranks, and no bit."""

import math
from itertools import cycle

import pytest
from models import Odd, adamw, batch_loss, flat_bytes, mlp, seeded, sgd

import daso
from daso.plan.bucket_search import BucketSizeSearch
from daso.train import build
from daso.train.gradients import bucket_tuner as tuning

BEST = 256  # bytes


def train(
    topology, make, inner, policy, *, steps, before=lambda optimizer: None, keep=False, **how
):
    model = seeded(make)()
    with daso.DASO(
        inner(model),
        module=model,
        topology=topology,
        policy=policy,
        exchange=daso.Exchange(algorithm="direct"),
        gradients=daso.Gradients(**how),
    ) as optimizer:
        for step in range(steps):
            before(optimizer)
            optimizer.zero_grad(set_to_none=not keep)
            batch_loss(model, topology.rank, step).backward()
            optimizer.step()
        report = optimizer.report()
    return b"".join(flat_bytes(p) for p in model.parameters()), report


@pytest.mark.parametrize("keep", [False, True], ids=["none", "zeroed"])
@pytest.mark.parametrize("policy", [daso.Fixed(1, 0), daso.Fixed(2, 1)], ids=str)
@pytest.mark.parametrize(("make", "inner"), [(mlp, sgd), (Odd, adamw)])
def test_rows_cut_anew_at_every_step_change_no_bit(topology, make, inner, policy, keep):
    sizes = cycle([1, 300, 64, 1 << 20, 4096])

    def cut(optimizer):
        if optimizer._session.runner.parts is not None:
            optimizer._session.runner.parts.gradients.reducer.rows.cut(next(sizes))

    same, _ = train(topology, make, inner, policy, steps=9, keep=keep, bucket_bytes=512)
    cuts, _ = train(topology, make, inner, policy, steps=9, keep=keep, bucket_bytes=9, before=cut)
    assert same == cuts


class Clock:
    """Time that passes at every step as if buckets of `BEST` bytes were the fastest."""

    def __init__(self, rank):
        self.rank, self.now, self.nbytes = rank, 0.0, BEST

    def perf_counter(self):
        self.now += (1 + self.rank) * (1 + 0.1 * abs(math.log2(self.nbytes / BEST)))
        return self.now


@pytest.mark.real_mpi
@pytest.mark.parametrize("policy", [daso.Fixed(1, 0), daso.Fixed(2, 1)], ids=str)
def test_all_ranks_find_the_same_size_after_the_same_batches(topology, monkeypatch, policy):
    rank_info, clock = topology.rank_info, Clock(topology.rank)
    monkeypatch.setattr(tuning, "time", clock)
    monkeypatch.setattr(build, "bucket_search", lambda _: BucketSizeSearch(32, 4096, every=2))

    def look(optimizer):
        clock.nbytes = optimizer.report().get("bucket_bytes", BEST)

    same, _ = train(topology, Odd, sgd, policy, steps=70, bucket_bytes=512)
    found, report = train(topology, Odd, sgd, policy, steps=70, bucket_bytes="search", before=look)
    assert found == same
    events = [one for one in report["events"] if one["kind"] == "bucket_bytes"]
    told = [(one["batch"], one["nbytes"], one["seconds"], one["holding"]) for one in events]
    assert topology.equal_on_all_ranks(repr(told).encode())
    searched = rank_info.world_size > 1 and (
        max(rank_info.node_sizes) > 1 or policy == daso.Fixed(1, 0)
    )
    # Grown until all is in one bucket: larger sizes make the same one, and are not tried.
    sizes = [64, 128, 256, 256] if searched else []
    assert [one["nbytes"] for one in events] == sizes
    assert [one["holding"] for one in events] == [False] * (len(sizes) - 1) + [True] * searched
    if searched:
        assert report["bucket_bytes"] == BEST
