"""Clocks of real ranks compared over MPI, and what they recorded gathered in one file."""

import errno
import json
import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import daso
from daso import trace
from daso.errors import ConfigError
from daso.timeline.chrome import chrome_events
from daso.timeline.clock_offsets import Reading, clocks, close_loop
from daso.timeline.clock_sync import ask_round
from daso.timeline.recording import Recording
from daso.timeline.report import late_ranks, read_timeline, shares
from daso.trace import EXCHANGE, MERGE, MESSAGES, SEND, STEP, WAIT_INTRA_NODE

pytestmark = pytest.mark.mpi
STALL_SECONDS = 30.0


@pytest.fixture
def path(topology, tmp_path):
    return Path(topology.world_comm.bcast(str(tmp_path))) / "deep" / "trace.jsonl"


def one_rank(rank_info):
    return rank_info.world_size == 1


def own_time(shown, rank):
    return shown(rank, time.perf_counter())


OFFSETS, DRIFTS = (0.0, 17.5, -30.0, 4.0), (0.0, 5e-5, -5e-5, 3e-5)  # of crystals, about


def test_injected_offsets_and_drifts_are_found_to_what_the_trips_allow(topology, rank_info):
    """All ranks of a test share one clock, so that what is injected is all there is to find."""
    begun = topology.world_comm.bcast(time.perf_counter())

    def shown(rank, at):
        return at + OFFSETS[rank] + DRIFTS[rank] * (at - begun)

    def true(rank, own):
        return begun + (own - begun - OFFSETS[rank]) / (1 + DRIFTS[rank])

    loops, lasted, spans = [], 0.0, []
    for _ in range(2):
        now = partial(own_time, shown, rank_info.rank)
        readings = ask_round(topology, STALL_SECONDS, now)
        loops.append(close_loop([Reading(*one) for one in readings]))
        asked = [true(rank, own) for rank, own in enumerate(loops[-1].ats)]
        lasted = max(lasted, max(asked) - min(asked))
        spans.append((min(asked), max(asked)))
        time.sleep(1.1)
    found = clocks(loops)
    first, last = spans[0][1], spans[1][0]  # outside, errors grow with the distance
    for middle in (first, (first + last) / 2, last):
        for rank in range(rank_info.world_size):
            error = abs(found[rank].first(shown(rank, middle)) - shown(0, middle))
            allowed = max(loop.bounds[rank] for loop in loops)
            assert error <= 2 * allowed + 2e-4 * lasted  # ranks do not ask at the same time


def test_the_real_clocks_of_one_machine_close(topology, rank_info):
    loop = close_loop([Reading(*one) for one in ask_round(topology, STALL_SECONDS)])
    assert loop.sound
    for offset, bound in zip(loop.offsets, loop.bounds, strict=True):
        assert abs(offset) <= bound
    assert loop.bound < 0.1


def test_a_rank_that_sees_another_time_than_it_tells_is_found_by_the_loop(topology, rank_info):
    """Rank 0 asks by one clock and answers by another: its links do not add up."""
    calls = iter(range(10**9))

    def lying():
        wrong = (
            0.25 if rank_info.rank == 0 and next(calls) >= 200 else 0.0
        )  # it asks first, then tells
        return time.perf_counter() + wrong

    loop = close_loop([Reading(*one) for one in ask_round(topology, STALL_SECONDS, lying)])
    assert not loop.sound
    assert abs(loop.closure) == pytest.approx(0.25, abs=0.1)


def train(topology, path, steps=12, marks=(), capacity=1 << 14):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    optimizer = daso.DASO(
        torch.optim.SGD(model.parameters(), lr=0.01),
        module=model,
        topology=topology,
        policy=daso.Fixed(4, 1),
    )
    with Recording(path, topology, capacity=capacity, timeout_seconds=STALL_SECONDS) as recording:
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.ones(3, 8)).sum().backward()
            optimizer.step()
            if step in marks:
                recording.mark()
        optimizer.synchronize()
    optimizer.close()


def everyones(topology, path):
    """Return what world rank 0 reads, once it is written."""
    topology.world_comm.Barrier()
    return read_timeline(path)


def test_every_rank_is_in_the_file_with_its_steps_and_exchanges(topology, rank_info, path):
    train(topology, path, marks=(5,))
    timeline = everyones(topology, path)
    assert len(timeline.ranks) == rank_info.world_size
    assert [rank.node for rank in timeline.ranks] == list(rank_info.node_of)
    assert len(timeline.loops) == 3  # entered, marked, left
    found = shares(timeline)
    assert [one.steps for one in found] == [12] * rank_info.world_size
    for one in found:
        parts = one.computing_seconds + one.node_seconds + one.exposed_seconds + one.send_seconds
        assert parts == pytest.approx(one.step_seconds)
        assert 0 <= one.hidden <= 1
        assert one.computing_seconds > 0
    sent = [{span.key for span in rank.spans if span.kind == SEND} for rank in timeline.ranks]
    assert all(keys == sent[0] for keys in sent)
    assert len(sent[0]) >= 3  # at steps 4, 8 and 12, and at the end
    assert all(len([s for s in r.spans if s.kind == SEND]) == len(sent[0]) for r in timeline.ranks)
    for rank in timeline.ranks:
        assert {span.key for span in rank.spans if span.kind == MERGE} == sent[0]
        assert {s.key for s in rank.spans if s.kind == EXCHANGE and s.key >= 0} == sent[0]
        threads = {rank.threads[s.thread] for s in rank.spans if s.kind == EXCHANGE}
        assert threads == {"daso-exchange"}
        assert {rank.threads[s.thread] for s in rank.spans if s.kind == STEP} == {"MainThread"}
    lanes = sum(any(s.kind == MESSAGES for s in rank.spans) for rank in timeline.ranks)
    assert lanes == rank_info.lanes * rank_info.nodes
    assert sum(one.last for one in late_ranks(timeline)) == len(sent[0])
    for event in chrome_events(timeline):
        assert event.get("ts", 0) >= 0


def test_no_merge_comes_before_what_it_merges_was_sent(topology, rank_info, path):
    """Ranks of one machine share a clock: there it is so before anything is set right."""
    train(topology, path, steps=20)
    timeline = everyones(topology, path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    spans = [span for line in lines for span in line.get("spans", [])]
    sent, merged = {}, {}
    for kind, _, key, begins, ends, _ in spans:
        if kind == SEND:
            sent[key] = max(ends, sent.get(key, ends))
        elif kind == MERGE:
            merged[key] = min(begins, merged.get(key, begins))
    assert set(merged) == set(sent)
    assert (rank_info.nodes > 1) == bool(sent)
    assert all(merged[key] > sent[key] for key in sent)
    assert timeline.moved == 0  # nor by what clocks are off


def test_ranks_of_a_node_that_wait_for_each_other_are_told(topology, rank_info, path):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = daso.DASO(inner, module=model, topology=topology, policy=daso.Fixed(100, 1))
    with Recording(path, topology, timeout_seconds=STALL_SECONDS):
        for _ in range(3):
            time.sleep(0.05 * (rank_info.local_rank == 0))
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    optimizer.close()
    timeline = everyones(topology, path)
    for number, rank in enumerate(timeline.ranks):
        waited = sum(span.ends - span.begins for span in rank.spans if span.kind == WAIT_INTRA_NODE)
        first = rank_info.node_of.index(rank_info.node_of[number]) == number
        alone = rank_info.node_of.count(rank_info.node_of[number]) == 1
        assert alone or first or waited > 0.08


def test_what_there_is_no_room_for_is_counted(topology, rank_info, path):
    train(topology, path, steps=30, capacity=16)
    if not one_rank(rank_info):
        assert all(rank.lost > 0 for rank in everyones(topology, path).ranks)


def test_a_file_that_cannot_be_written_is_refused_on_all_ranks(topology, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="a recording's file must be writable"):
        Recording(file / "trace.jsonl", topology, timeout_seconds=STALL_SECONDS).__enter__()
    # And when the disk is full later.
    path = Path(topology.world_comm.bcast(str(tmp_path))) / "trace.jsonl"
    made = Recording(path, topology, timeout_seconds=STALL_SECONDS)
    with pytest.raises(ConfigError, match=os.strerror(errno.ENOSPC)), made:
        if made._file is not None:
            made._file.close()
            monkeypatch.setattr(made, "_file", Full())
    trace.record(STEP, 1.0)  # by nobody any more
    assert made._recorder.take()[0] == []


class Full:
    """A file on a full disk, whose buffer goes nowhere when it is closed either."""

    def write(self, line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self):
        self.write("")


def test_a_rank_leaves_by_an_error_without_others(topology, rank_info, path):
    """What a rank raises must reach its user at once, whatever other ranks do."""
    made = Recording(path, topology, timeout_seconds=STALL_SECONDS)
    last = rank_info.rank == rank_info.world_size - 1
    made.__enter__()
    if last:
        error = ZeroDivisionError()
        assert not made.__exit__(type(error), error, None)  # and waits for nobody
        assert trace._recorder is None
    topology.world_comm.Barrier()
    if not last:
        trace.stop()
        if made._file is not None:
            made._file.close()
    topology.world_comm.Barrier()
    if rank_info.rank == 0:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert not any("spans" in line for line in lines)


def test_what_ends_while_a_mark_is_made_is_left_out(topology, rank_info, path):
    """Or it would end before it begins: what began before a mark begins there."""
    with Recording(path, topology, timeout_seconds=STALL_SECONDS) as recording:
        early = time.perf_counter()
        time.sleep(0.01)
        recording.mark()
        recording._recorder.add(STEP, early - 1, early, 1, 0)
        recording._recorder.add(STEP, early, time.perf_counter(), 2, 0)
    for rank in everyones(topology, path).ranks:
        assert [span.key for span in rank.spans] == [2]
        assert all(span.ends > span.begins for span in rank.spans)
