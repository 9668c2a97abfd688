"""Trainings of the soak, by kinds; run by ranks. Each rank writes its parameters' hash.

    python soak_program.py KIND FOLDER STEPS

`watched` trains until FOLDER/stop exists, and writes a line to FOLDER/RANK.jsonl now and then.
"""

import gc
import hashlib
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import daso
from daso.checkpoint.state import Checkpoints
from daso.data import make_expressions
from daso.examples.trees import adam, build

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))

from doors import bits, network
from training import adamw, batch, sgd, train

SLEEP_SECONDS = 0.005  # of a watched batch, as on a device: other jobs share the cores
POLL_BATCHES = 20
WIDTH = 256  # of the watched model
MIB = 2**20


def adamw_program(steps: int) -> bytes:
    """Train on nodes of one rank."""
    world = daso.init()
    model = network()
    policy = daso.Fixed(4, 1)
    with daso.DASO(adamw(model), module=model, policy=policy, wire="fp32") as optimizer:
        train(optimizer, model, world.rank, steps)
        optimizer.synchronize()
    return bits(*model.parameters())


def fsdp2_program(steps: int) -> bytes:
    """Train a model that is sharded inside nodes."""
    from test_sharded import network as network_of_shards
    from test_sharded import sharded, trained

    world = daso.init(torch_backend="gloo")
    model = sharded(network_of_shards(), world)
    return trained(world, model, steps, policy=daso.Fixed(3, 1))[0]


def server_program(steps: int) -> bytes:
    """Train with a server whose ranks take the same steps."""
    world = daso.init()
    model = network()
    with daso.ParameterServer(model, sgd, staleness=0) as server:
        train(server, model, world.rank, steps)
        server.synchronize()
    return bits(*model.parameters())


def stale_server_program(steps: int) -> bytes:
    """Train with a server whose ranks run ahead."""
    world = daso.init()
    model = network()
    with daso.ParameterServer(model, sgd, staleness=None) as server:
        train(server, model, world.rank, steps)
        server.synchronize()
    return bits(*model.parameters())


def flow_program(steps: int) -> bytes:
    """Train trees of any shape; hold the result against a replay of what the ranks logged."""
    world = daso.init()
    graph, twin, trees = (*(build(width=16, batch=4) for _ in range(2)), make_expressions(steps, 1))
    epochs, logs = [random.Random(epoch).sample(trees, len(trees)) for epoch in range(2)], []
    with daso.flow.Runtime(graph, adam, max_active_keys=8) as runtime:
        runtime.keep_log()
        for instances in epochs:
            runtime.train_epoch(instances)
            logs.append(world.world_comm.allgather(runtime.logged()))
    daso.flow.replay(logs, twin, adam, epochs)
    trained_bits, replayed_bits = (bits(*layers_of(one)) for one in (graph, twin))
    assert trained_bits == replayed_bits, "the replay differs"
    return trained_bits


def layers_of(graph: daso.flow.Graph) -> list[torch.nn.Module]:
    """Return the layers of a flow."""
    return [node.call for node in graph.nodes if node.kind == "layer"]


PROGRAMS: dict[str, Callable[[int], bytes]] = {
    "adamw": adamw_program,
    "fsdp2": fsdp2_program,
    "server": server_program,
    "stale server": stale_server_program,
    "flow": flow_program,
}


# --- the watched training --------------------------------------------------------------------


def usage() -> dict[str, float]:
    """Return this process's memory, threads and descriptors."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "rss_mb": int(status["VmRSS"].split()[0]) * 1024 / MIB,
        "threads": int(status["Threads"]),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


def watched(folder: Path, every_seconds: float) -> None:
    """Train, save and sample until a file asks for the end."""
    world = daso.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH)
    )
    policy = daso.Fixed(2, 1)  # 10,000 exchanges, which a report lists at most, come early
    optimizer = daso.DASO(adamw(model, lr=1e-4), module=model, policy=policy)
    checkpoints = Checkpoints(folder / "checkpoints", world, keep=2)
    sampled_at, sampled_batch, step, word = time.monotonic(), 0, 0, ""
    while word != "stop":
        for _ in range(POLL_BATCHES):
            optimizer.zero_grad()
            model(batch(step, world.rank)).square().mean().backward()
            optimizer.step()
            time.sleep(SLEEP_SECONDS)
            step += 1
        due = time.monotonic() - sampled_at >= every_seconds
        word = world.world_comm.bcast(
            "stop" if (folder / "stop").exists() else "sample" if due else "", root=0
        )
        if word == "sample":
            seconds = time.monotonic() - sampled_at
            optimizer.synchronize()
            checkpoints.save(step, {"model": model.state_dict()}, background=True)
            gc.collect()
            row = {
                "at": time.monotonic(),  # the same clock in all processes of a host
                "batch": step,
                **usage(),
                "batches_per_second": (step - sampled_batch) / seconds,
                "digest": hashlib.sha256(bits(*model.parameters())).hexdigest(),
            }
            with (folder / f"{world.rank}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            sampled_at, sampled_batch = time.monotonic(), step
    checkpoints.wait()
    optimizer.close()


def main(kind: str, folder: Path, number: str) -> None:
    """Run a training, and write its hash."""
    torch.set_num_threads(1)
    if kind == "watched":
        watched(folder, float(number))
        return
    digest = hashlib.sha256(PROGRAMS[kind](int(number))).hexdigest()
    (folder / f"{daso.init().rank}.json").write_text(json.dumps({"digest": digest}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
