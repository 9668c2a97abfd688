"""Ranks that compute on devices: the same bodies as on CPUs, over copies that take their time.

With ``-p pretended_cuda`` they compute on what torch takes for CUDA devices
(tests/support/pretended_cuda); where there are real ones, on those.
"""

import copy
import sys

import pytest
import torch
from compare import compare
from models import Odd, Wide, adamw, batch_loss, bits, mlp, seeded, sgd
from training import train_batches
from world import (
    test_behaviour,
    test_gradient_wire,
    test_interactions,
    test_parameter_server,
    test_state,
    test_sync,
)

import daso
from daso.comm.emulation import CopyLink, pretend_device
from daso.comm.node.host import HostBucket, HostNode
from daso.errors import NonFiniteError
from daso.plan.allreduce_plan import AllReducePlan, Level

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.nodes((1, 1), (2,), (2, 1)),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]


@pytest.fixture(autouse=True)
def device(topology):
    """Let every rank compute as if on a device of its own."""
    if "pretended_cuda" not in sys.modules and not torch.cuda.is_available():
        with pretend_device(CopyLink(1e9, 1e-4)):
            yield
        return
    mine = topology.device
    torch.cuda.set_device(mine)
    torch.set_default_device(mine)  # of the models, and of the batches
    try:
        yield
    finally:
        torch.set_default_device(None)


# What holds on CPUs holds on devices.
test_phases = test_sync.test_the_papers_phases_equal_one_process
test_iallreduce = test_sync.test_iallreduce_stays_near_the_oracle_and_identical
test_resumed = test_state.test_a_run_resumed_right_after_a_send_may_stop_there
test_one_nan = test_interactions.test_one_nan_costs_one_exchange_and_no_other_nodes_work
test_dropped_ahead = test_interactions.test_eager_node_reverts_a_dropped_exchange_with_its_work
test_sparse = test_interactions.test_what_a_sparse_wire_holds_back_goes_out_when_nodes_agree
test_nan_is_told = test_behaviour.test_nan_on_one_node_drops_that_exchange_everywhere_and_heals
test_added_later = test_behaviour.test_parameters_added_mid_run_are_exchanged_too
if not torch.cuda.is_available() or "pretended_cuda" in sys.modules:
    # Replayed on a CPU, which a GPU's own products of matrices do not match to the bit.
    test_replay = test_state.test_one_process_replays_a_run_from_its_log
test_buffers = test_behaviour.test_batchnorm_statistics_are_equal_and_the_mean_of_all_ranks


@pytest.mark.nodes((1, 1), (2, 1))
@pytest.mark.parametrize("wire", test_gradient_wire.NARROW)
def test_narrow_gradients(topology, wire):
    test_gradient_wire.test_ranks_are_alike_after_every_step_and_bytes_are_fewer(topology, wire)


@pytest.mark.nodes((1, 1), (1, 1, 1))
@pytest.mark.parametrize("wire", ["fp32", *test_gradient_wire.NARROW])
@pytest.mark.parametrize("way", ["auto", "ring", "whole"])
def test_gradients_that_stay_on_the_device_get_the_bits_of_the_host(
    topology, wire, way, monkeypatch
):
    """Encoded, added and decoded there, and what was rounded away goes through a checkpoint."""
    if way != "auto":  # as among more nodes
        plan = AllReducePlan((Level(topology.nodes, way),))
        monkeypatch.setattr("daso.train.channels.choose_plan", lambda *_: plan)
    left, real = [], HostBucket.mark_ready

    def start(self, parts, *, onward=False, stay=False):
        real(self, parts, onward=onward, stay=stay)
        left.append(self.device_ready is not None)

    monkeypatch.setattr(HostBucket, "mark_ready", start)
    ended = []
    for stays in (True, False):
        if not stays:
            never = property(lambda _: False, lambda *_: None)
            monkeypatch.setattr(HostNode, "reduces_on_device", never, raising=False)
        model, kept = seeded(mlp)(), None
        for steps in (range(4), range(4, 8)):
            inner = adamw(model)
            with test_gradient_wire.wrapped(topology, inner, model, wire) as optimizer:
                if kept is not None:
                    optimizer.load_state_dict(kept)
                train_batches(optimizer, model, topology.rank, steps)
                kept = copy.deepcopy(optimizer.state_dict())
        ended.append(bits(model))
        assert set(left) == {stays}
        left.clear()
    assert ended[0] == ended[1]


@pytest.mark.nodes((1, 1), (2, 1))
def test_a_narrow_gradient_that_is_not_finite(topology):
    test_gradient_wire.test_a_gradient_that_is_not_finite_drops_a_step_and_is_forgotten(topology)


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("skip", "wait", "merge", "fragments"),
    [(4, 1, "daso", 1), (3, 3, "delta", 1), (2, 0, "delta", 1), (2, 2, "eager", 3), (1, 1, 0.5, 2)],
)
def test_skipping_equals_one_process(topology, skip, wait, merge, fragments, wire):
    options = {"wire": wire, "merge": merge, "fragments": fragments}
    compare(topology, mlp, sgd, daso.Fixed(skip, wait), **options)


@pytest.mark.parametrize("make", [Odd, Wide])
@pytest.mark.parametrize("policy", [daso.Fixed(3, 1, warmup=2), daso.Fixed(1, 0)], ids=repr)
def test_odd_models_equal_one_process(topology, make, policy):
    compare(topology, make, sgd, policy, wire="bf16", merge="delta", steps=7)


@pytest.mark.parametrize("merge", ["auto", "delta"])
@pytest.mark.parametrize(("skip", "wait"), [(4, 2), (2, 0)])
def test_an_outer_optimizer_equals_one_process(topology, skip, wait, merge):
    options = {"merge": merge, "outer": test_sync.nesterov, "wire": "bf16"}
    compare(topology, mlp, adamw, daso.Fixed(skip, wait), **options)


def test_many_pieces_and_messages_equal_one_process(topology, monkeypatch):
    """Rows are cut as those of large models are."""
    monkeypatch.setattr("daso.kernels.torch_kernels.DEVICE_PIECE", 1 << 16)
    monkeypatch.setattr("daso.train.deltas.shard.LEAST", 70_000)

    def wide():
        return torch.nn.Sequential(torch.nn.Linear(6, 30_000), torch.nn.Linear(30_000, 3))

    compare(topology, wide, sgd, daso.Fixed(2, 1), wire="bf16", steps=4)


# --- the parameter server -------------------------------------------------------------------------


@pytest.fixture
def many_owners(monkeypatch):
    """Let shares of small layers be worth a message."""
    monkeypatch.setattr("daso.server.plan.FLOOR_BYTES", 24)


def one_by_one(params):
    """SGD that rounds 16-bit parameters on a device as on the host, where a server has rows."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3, foreach=False)


@pytest.mark.parametrize("every", [1, "auto"])
@pytest.mark.parametrize("make", [mlp, Odd])
def test_a_server_equals_one_process(topology, many_owners, make, every):
    test_parameter_server.test_without_staleness_every_step_equals_one_process(
        topology, make, one_by_one, every, 100
    )


def test_a_servers_local_rows_equal_one_process(topology, many_owners):
    test_parameter_server.test_local_rows_equal_one_process_too(topology, Odd, one_by_one)


if not torch.cuda.is_available() or "pretended_cuda" in sys.modules:
    # As above: a GPU's own products are not those of a CPU to the bit.

    @pytest.mark.parametrize("mode", ["sharded", "local_rows"])
    def test_a_server_without_a_bound_is_replayed(topology, many_owners, mode):
        case = (Odd, one_by_one)
        test_parameter_server.test_a_replay_gives_the_same_bits(topology, mode, None, case, "auto")


@pytest.mark.parametrize("wire", [None, "bf16"])
def test_gradients_that_are_not_finite_are_left_out_and_told_of_once_known(topology, caplog, wire):
    rank, model = topology.rank, seeded(mlp)()
    with daso.ParameterServer(model, one_by_one, topology=topology, wire=wire) as server:
        for step in range(5):
            server.zero_grad()
            loss = batch_loss(model, rank, step)
            (loss * float("nan") if (rank, step) == (0, 2) else loss).backward()
            server.step()
        server.synchronize()
        assert server.report()["dropped"] == (rank == 0)
        assert all(p.isfinite().all() for p in model.parameters())
        told = []
        for end in (server.step, server.step, server.step, server.synchronize):
            server.zero_grad()
            if end == server.step:
                (batch_loss(model, rank, step) * float("nan")).backward()
            try:  # it is known in the third step, or once all have met
                end()
            except NonFiniteError as error:
                told.append(str(error))
        assert len(told) == 1
        assert "in 3 steps in a row" in told[0]
    assert ("not finite in step 2 on rank 0" in caplog.text) == (rank == 0)


if torch.cuda.is_available():  # a CPU does not tell who waits for it

    @pytest.mark.parametrize("mode", ["sharded", "local_rows"])
    @pytest.mark.parametrize("staleness", [0, None])
    def test_no_thread_of_a_server_waits_for_the_device(topology, many_owners, mode, staleness):
        """Steps wait for other ranks alone, and the thread that serves asks what has come."""
        model = seeded(Odd)()
        how = {"topology": topology, "mode": mode, "staleness": staleness}
        batches = [torch.randn(5, 6) for _ in range(6)]
        targets = torch.arange(5) % 3
        with daso.ParameterServer(model, one_by_one, **how) as server:
            for step, batch in enumerate(batches):
                # A driver may wait once for memory that it pins.
                torch.cuda.set_sync_debug_mode("error" if step else "default")
                try:
                    server.zero_grad()
                    torch.nn.functional.cross_entropy(
                        model(batch, step % 2 == 0), targets
                    ).backward()
                    server.step()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
