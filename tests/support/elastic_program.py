"""A training in which ranks are killed at moments that are told; run by ranks.

    python elastic_program.py FOLDER POLICY STEPS RANK:STEP:MOMENT...

Each rank that comes to the end writes FOLDER/RANK.json, by the number that it began with.
"""

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import daso
from daso.comm.mpi import load
from daso.plan.schedule import Policy

BATCH = 8
EPOCH = 16  # batches
FEATURES = 6


def network() -> torch.nn.Module:
    """Return the same model on every rank."""
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)
    )


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that remembers."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch_loss(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return the loss on a rank's batch of a step."""
    inputs = torch.randn(
        BATCH, FEATURES, generator=torch.Generator().manual_seed(1000 * rank + step)
    )
    return torch.nn.functional.mse_loss(model(inputs), inputs[:, :2].sign())


def digest(model: torch.nn.Module) -> str:
    """Return a hash of all parameters, bit for bit."""
    rows = [tensor.detach().numpy().tobytes() for tensor in model.state_dict().values()]
    return hashlib.sha256(b"".join(rows)).hexdigest()


def hand_down(world: daso.Topology, may_end: Callable[[str], None]) -> None:
    """Let the last rank but one wait for the last; all others are through at once."""
    if world.world_size == 1:
        return
    if world.rank == world.world_size - 1:
        may_end("handing")
        world.world_comm.send("word", world.rank - 1)
    elif world.rank == world.world_size - 2:
        world.world_comm.recv(source=world.rank + 1)


def meet(optimizer: daso.DASO, model: torch.nn.Module, may_end: Callable[[str], None]) -> None:
    """Do what all ranks do together at the end of an epoch."""
    with optimizer.averaged():
        may_end("averaged")
        batch_loss(model, 0, 0)
    may_end("epoch")
    optimizer.end_epoch(1.0)
    may_end("meeting")
    optimizer.together(lambda: daso.init().rendezvous("save a checkpoint", 60.0))
    optimizer.together(lambda: hand_down(daso.init(), may_end))
    optimizer.state_dict()
    may_end("synchronize")
    optimizer.synchronize()


def train(folder: Path, policy: Policy, steps: int, ends: set[tuple[int, int, str]]) -> None:
    """Train, and die where that is told."""
    world = daso.init()
    first = load().COMM_WORLD.Get_rank()

    def may_end(step: int, moment: str) -> None:
        if (first, step, moment) in ends:
            os.kill(os.getpid(), signal.SIGKILL)

    model = network()
    exchange = daso.Exchange(elastic=True, timeout_seconds=60.0)
    optimizer = daso.DASO(sgd(model), module=model, policy=policy, exchange=exchange, wire="fp32")
    longest_seconds = 0.0
    optimizer.state_dict()  # as frameworks do that prepare an optimizer; on spares too
    begun_at = optimizer.join()
    for step in range(begun_at, steps):
        may_end(step, "forward")
        begun = time.perf_counter()
        optimizer.zero_grad()
        loss = batch_loss(model, first, step)
        loss.register_hook(lambda _, step=step: may_end(step, "backward"))
        loss.backward()
        may_end(step, "step")
        optimizer.step()
        longest_seconds = max(longest_seconds, time.perf_counter() - begun)
        may_end(step, "after")
        if (step + 1) % EPOCH == 0:
            meet(optimizer, model, partial(may_end, step))
    optimizer.synchronize()
    result = {
        "digest": digest(model),
        "begun_at": begun_at,
        "batches": optimizer.report()["batches"],
        "events": optimizer.report()["events"],
        "rank": world.rank,
        "world": world.world_size,
        "longest_seconds": longest_seconds,
    }
    (folder / f"{first}.json").write_text(json.dumps(result, default=str))
    optimizer.close()


if __name__ == "__main__":
    told = [word.split(":") for word in sys.argv[4:]]
    train(
        Path(sys.argv[1]),
        eval(f"daso.{sys.argv[2]}"),
        int(sys.argv[3]),
        {(int(rank), int(step), moment) for rank, step, moment in told},
    )
