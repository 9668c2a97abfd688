"""Twelve short seeded trainings, and what each ends with: parameters and state as a hash.

    python tests/support/hashes.py

Before and after a change that is to change nothing, the lines must be the same; on another machine
or torch they are others. Names are in no hash, so that they may change.
"""

import argparse
import hashlib
import io
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from models import Odd, adamw, batch_loss, mlp, nesterov, seeded, sgd
from training import train_batches

import daso
from daso.data import make_lists
from daso.plan.policies import Replay

LIMIT_SECONDS = 120


def numbers(value: Any) -> Iterator[bytes]:
    """Yield the tensors and numbers in a state, without the names that they have there."""
    if isinstance(value, torch.Tensor):
        yield value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        # Layers that are stepped as their gradients come get their state in that order.
        counted = all(isinstance(key, int) for key in value)
        for _, one in sorted(value.items()) if counted else value.items():
            yield from numbers(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from numbers(one)
    elif isinstance(value, bool | int | float):
        yield repr(float(value)).encode()


def digest(*values: Any) -> str:
    return hashlib.sha256(b"".join(one for value in values for one in numbers(value))).hexdigest()


def ends(model: torch.nn.Module, optimizer: Any = None) -> str:
    """Return the hash of parameters, and of the optimizer's state but for how long things took."""
    if optimizer is None:
        return digest(dict(model.state_dict()))
    state = optimizer.state_dict()
    ours = state.pop("daso", {})
    exchanges = (ours.get("sync") or {}).get("exchanges") or {}
    return digest(
        dict(model.state_dict()), state, ours.get("history", {}).get("skip"), exchanges.get("rows")
    )


def train(
    topology: Any,
    *,
    make: Callable[[], torch.nn.Module] = mlp,
    inner: Callable[[torch.nn.Module], Any] = sgd,
    steps: int = 21,
    resumed_at: int | None = None,
    **options: Any,
) -> str:
    """Train with daso.DASO, in epochs of seven steps."""
    exchange = options.pop("exchange", daso.Exchange(chunk_bytes=512))

    def start() -> tuple[torch.nn.Module, Any]:
        model = seeded(make)()
        wrapped = daso.DASO(
            inner(model), module=model, topology=topology, exchange=exchange, **options
        )
        return model, wrapped

    model, optimizer = start()
    for step in range(steps):
        if step == resumed_at:
            saved = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict()], saved)
            optimizer.close()
            model, optimizer = start()
            saved.seek(0)
            for one, state in zip((model, optimizer), torch.load(saved), strict=True):
                one.load_state_dict(state)
        optimizer.zero_grad()
        batch_loss(model, topology.rank, step).backward()
        optimizer.step()
        if step % 7 == 6:
            optimizer.end_epoch(1.0)
    optimizer.flush()
    before = ends(model, optimizer)
    optimizer.synchronize()
    after = ends(model)
    optimizer.close()
    return f"{before[:12]} {after[:12]}"


def serve(topology: Any) -> str:
    """Train with the parameter server in each mode."""
    found = []
    for mode in ("sharded", "local_rows"):
        model = seeded(Odd)()
        with daso.ParameterServer(model, torch.optim.Adam, topology=topology, mode=mode) as server:
            train_batches(server, model, topology.rank, range(6))
        found.append(ends(model))
    return " ".join(one[:8] for one in found)


def flow(topology: Any) -> str:
    """Train a flow, one instance at a time."""
    torch.manual_seed(0)
    graph = daso.flow.Graph()
    start = graph.source(lambda instance: torch.zeros(1, 8))
    last = graph.function(lambda item, state: state + item.instance.tokens[-1], start)
    hidden = graph.layer(torch.nn.Linear(8, 8), last)
    cross_entropy = torch.nn.functional.cross_entropy
    graph.loss(
        lambda item, logits: (cross_entropy(logits, item.instance.answer), {}),
        graph.layer(torch.nn.Linear(8, 10), hidden),
    )
    with daso.flow.Runtime(
        graph, torch.optim.Adam, topology=topology, max_active_keys=1
    ) as runtime:
        loss = runtime.train_epoch(make_lists(40, seed=0)).loss
    return digest([loss])


def plan(topology: Any) -> str:
    """Train by a plan of memory."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(8)]
    model = torch.nn.Sequential(*(m for layer in layers for m in (layer, torch.nn.Tanh())))
    optimizer, rows = torch.optim.Adam(model.parameters()), torch.randn(512, 256)
    loss = torch.Tensor.sum
    planned = daso.memory.plan(model, rows, budget="12MiB", optimizer=optimizer, loss=loss)
    with daso.memory.apply(planned):
        for _ in range(3):
            optimizer.zero_grad()
            loss(model(rows)).backward()
            optimizer.step()
    return digest(dict(model.state_dict()), optimizer.state_dict())


HIDDEN = Replay(((0, 1, 0), (9, 1, 1)), hidden=(0,))
RUNS: dict[str, tuple[int, int, Callable[[Any], str]]] = {  # ranks, those of a node
    "alone": (1, 1, lambda t: train(t, inner=adamw)),
    "synchronous": (2, 1, lambda t: train(t, make=Odd, policy=daso.Fixed(1, 0), wire="fp32")),
    "4 bits": (2, 1, lambda t: train(t, inner=adamw, policy=HIDDEN, wire="int4")),
    "resumed": (
        *(2, 1),
        lambda t: train(t, policy=daso.Fixed(4, 3), wire="int8", outer=nesterov, resumed_at=9),
    ),
    "paper": (
        *(4, 2),
        lambda t: train(
            t,
            make=Odd,
            inner=adamw,
            policy=daso.Plateau(3, warmup=1, cooldown=1),
            wire="bf16",
            merge="daso",
        ),
    ),
    "fragments": (
        *(4, 2),
        lambda t: train(
            t,
            make=Odd,
            policy=daso.Fixed(2, 1, warmup=2),
            wire="topk",
            exchange=daso.Exchange(fragments=3),
        ),
    ),
    "eager merges": (4, 1, lambda t: train(t, policy=daso.Fixed(3, 2), merge="eager", wire="fp16")),
    "priority": (
        *(2, 1),
        lambda t: train(t, gradients=daso.Gradients(reducer="prioritized", bucket_bytes=128)),
    ),
    "host": (
        *(4, 2),
        lambda t: train(t, policy=daso.Fixed(1, 0), gradients=daso.Gradients(reducer="host")),
    ),
    "server": (4, 2, serve),
    "flow": (2, 1, flow),
    "memory": (1, 1, plan),
}


def on_ranks(name: str) -> str:
    """Run one on ranks of its own; return what rank 0 says."""
    ranks, of_a_node, _ = RUNS[name]
    words = ["run", "-n", str(ranks), "--ranks-per-node", str(of_a_node), __file__, "--one", name]
    run = subprocess.run(
        [sys.executable, "-m", "daso", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("hash ")]
    return lines[0].removeprefix("hash ") if lines else f"FAILED: {run.stderr[-500:]}"


def main() -> int:
    """Print a line for each."""
    parser = argparse.ArgumentParser(prog="hashes", description=__doc__.splitlines()[0])
    parser.add_argument("--one", choices=list(RUNS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        topology = daso.init()
        topology = getattr(topology, "topology", topology)
        torch.set_num_threads(1)
        found = RUNS[options.one][2](topology)
        if topology.rank == 0:
            print(f"hash {found}", flush=True)
        return 0
    failed = 0
    for name in RUNS:
        found = on_ranks(name)
        failed += found.startswith("FAILED")
        print(f"{name:<14}{found[:26] if not found.startswith('FAILED') else found}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
