"""What each rank of `scripts/bench recovery` runs: a training in which one of them is killed.

    python -m benchmarks.recovery_ranks PLAN

It runs under two Pythons: that of the bench, and one that has torchft.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from daso.cli.bench.models import score, small_cnn
from daso.data import load_fashion
from daso.environment import data_folder

__all__ = ["BOTH", "DASO", "DYING_SECONDS", "KILLED", "ROUNDS", "TORCHFT", "Plan"]

DASO, TORCHFT = "DASO", "torchft"
BOTH = "elastic and not"  # in the same processes, in turns: what being elastic costs
ROUNDS = "rounds"  # a file: seconds of a step of each, round by round
TURNS, TURN_SKIPS = 20, 4  # rounds of each, and exchanges in a round
KILLED = "killed"  # a file: when, in seconds of the clock that all hosts share
DYING_SECONDS = 0.05  # from the end of the backward whose step exchanges
BATCH = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """One training.

    Args:
        by: ``"DASO"``, ``"torchft"`` or ``"elastic and not"``.
        folder: Where each rank writes what it saw.
        steps: Of each rank.
        skip: Steps from one exchange to the next.
        seed: Of the model and the batches.
        kill_step: After so many steps the second rank is killed, while it exchanges; 0: none is.
        lr: Learning rate of SGD with momentum 0.9.
    """

    by: str
    folder: str
    steps: int
    skip: int
    seed: int
    kill_step: int
    lr: float = 0.05


class Training:
    """The model, the batches and the log of one rank."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        torch.set_num_threads(1)
        torch.manual_seed(plan.seed)
        self.model = small_cnn()
        self.inner = torch.optim.SGD(self.model.parameters(), lr=plan.lr, momentum=0.9)
        self.samples = load_fashion(data_folder(), train=True).tensors
        self.step_ends: list[float] = []
        self.exchanges: list[tuple[float, int]] = []  # when, and between how many ranks
        self.ready_at = time.time()

    def exchanged(self, ranks: int) -> None:
        """Note that an exchange is over."""
        self.exchanges.append((time.time(), ranks))

    def step(self, number: int, take: Callable[[], object]) -> None:
        """Train one batch; ``take`` steps the optimizer."""
        images, labels = self.samples
        draw = torch.Generator().manual_seed(self.plan.seed * 10**9 + self.rank * 10**6 + number)
        chosen = torch.randint(len(labels), (BATCH,), generator=draw)
        self.inner.zero_grad()
        cross_entropy(self.model(images[chosen]), labels[chosen]).backward()
        if number + 1 == self.plan.kill_step and self.rank == 1 and not self._killed.exists():
            threading.Timer(DYING_SECONDS, self._die).start()
        take()
        self.step_ends.append(time.time())

    @property
    def _killed(self) -> Path:
        return Path(self.plan.folder) / KILLED

    def _die(self) -> None:
        self._killed.write_text(repr(time.time()), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGKILL)

    def write(self, *, first_step: int, by: str) -> None:
        """Test the model, and write what this rank saw, and which versions it had."""
        found = {
            "rank": self.rank,
            "by": by,
            "first_step": first_step,
            "ready_at": self.ready_at,
            "step_ends": self.step_ends,
            "exchanges": self.exchanges,
            "accuracy": score(self.model, *load_fashion(data_folder(), train=False).tensors),
        }
        path = Path(self.plan.folder) / f"{os.getpid()}-{socket.gethostname()}.json"
        path.write_text(json.dumps(found), encoding="utf-8")


def train_daso(plan: Plan) -> None:
    """Train by an elastic `daso.DASO`; a spare rank waits until it is needed."""
    import daso

    world = daso.init()
    from mpi4py import MPI

    training = Training(plan, MPI.COMM_WORLD.Get_rank())  # its number stays when others are lost
    optimizer = daso.DASO(
        training.inner,
        module=training.model,
        policy=daso.Fixed(plan.skip, 1),
        exchange=daso.Exchange(elastic=True),
    )
    optimizer.on_exchange(lambda _: training.exchanged(world.world_size))
    first = optimizer.join()
    for number in range(first, plan.steps):
        training.step(number, optimizer.step)
    optimizer.synchronize()
    training.write(first_step=first, by=f"daso {daso.__version__}, torch {torch.__version__}")
    optimizer.close()


def train_both(plan: Plan) -> None:
    """Train two models in turns, one of them by an elastic optimizer; nobody is killed."""
    import daso

    world = daso.init()
    ways = []
    for elastic in (False, True):
        training = Training(plan, world.rank)
        exchange = daso.Exchange(elastic=elastic)
        policy = daso.Fixed(plan.skip, 1)
        optimizer = daso.DASO(
            training.inner, module=training.model, policy=policy, exchange=exchange
        )
        ways.append((training, optimizer))
    seconds: list[list[float]] = [[], []]
    steps = TURN_SKIPS * plan.skip
    for turn in range(TURNS + 1):  # the first warms up
        for way in (turn % 2, 1 - turn % 2):
            training, optimizer = ways[way]
            world.world_comm.Barrier()
            begun = time.perf_counter()
            for number in range(turn * steps, (turn + 1) * steps):
                training.step(number, optimizer.step)
            world.world_comm.Barrier()
            seconds[way].append((time.perf_counter() - begun) / steps)
    for _, optimizer in ways:
        optimizer.close()
    if world.rank == 0:
        told = {"plain": seconds[0][1:], "elastic": seconds[1][1:]}
        (Path(plan.folder) / ROUNDS).write_text(json.dumps(told), encoding="utf-8")


def train_torchft(plan: Plan) -> None:
    """Train by torchft's LocalSGD; each rank is a replica group of its own."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import LocalSGD

    rank = int(os.environ["SLURM_PROCID"])
    training = Training(plan, rank)
    model, inner, limit = training.model, training.inner, timedelta(seconds=60)
    address = socket.gethostbyname(socket.gethostname())
    make_store: Any = vars(torch.distributed)["TCPStore"]  # torch does not tell of its type
    store = make_store(address, 0, is_master=True, wait_for_workers=False)

    number = first = 0

    def load(state: dict[str, Any]) -> None:
        nonlocal number, first
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])
        number, first = state["number"], state["number"] + 1

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "inner": inner.state_dict(), "number": number}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=state,
        replica_id=f"rank_{rank}",
        store_addr=address,
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname=address,
        timeout=limit,
        use_async_quorum=False,
        init_sync=False,  # seeds are equal
    )
    should_commit = manager.should_commit

    def commit(*words: Any) -> bool:
        agreed = bool(should_commit(*words))
        if agreed:
            training.exchanged(manager.num_participants())
        return agreed

    manager.should_commit = commit
    with LocalSGD(manager, model, inner, sync_every=plan.skip):
        while number < plan.steps:
            training.step(number, inner.step)  # a rank that joins is as far as the others now
            number += 1
    training.write(first_step=first, by=f"torchft {version('torchft')}, torch {torch.__version__}")
    manager.shutdown(wait=False)
    os._exit(0)  # its threads wait for the lighthouse


if __name__ == "__main__":
    asked = Plan(**json.loads(sys.argv[1]))
    {DASO: train_daso, TORCHFT: train_torchft, BOTH: train_both}[asked.by](asked)
