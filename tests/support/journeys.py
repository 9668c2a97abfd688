"""Counts the files and functions of daso that a step enters: `scripts/journey`.

A reader of one exchange opens so many files, and turns from one to another so often. Run on two
ranks; world rank 0 prints one JSON object.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

import daso

HOME = str(Path(daso.__file__).parent) + "/"
SETTLE_SECONDS = 0.3  # for the engine's thread
POLLS = (
    "RunningClock."  # functions that are called once for each poll of a wait: as often as it takes
)


@dataclass
class Journey:
    """What one operation entered."""

    files: dict[str, set[str]] = field(default_factory=dict)  # with the functions
    moves: int = 0  # from one file to another, of the training thread
    last: str = ""

    def enter(self, file: str, function: str, *, trains: bool) -> None:
        """Count a call."""
        self.files.setdefault(file, set()).add(function)
        if trains and not function.startswith(POLLS):
            self.moves += bool(self.last) and file != self.last
            self.last = file

    def counts(self) -> dict[str, int]:
        """Return the numbers of files, functions and moves."""
        functions = sum(map(len, self.files.values()))
        return {"files": len(self.files), "functions": functions, "moves": self.moves}


class Tracer:
    """Follows all threads while it is on."""

    def __init__(self) -> None:
        self.journey: Journey | None = None
        threading.setprofile(self._called)  # of the engine's thread too

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        code, journey = frame.f_code, self.journey
        if event == "call" and journey is not None and code.co_filename.startswith(HOME):
            trains = threading.current_thread() is threading.main_thread()
            journey.enter(code.co_filename[len(HOME) :], code.co_qualname, trains=trains)

    def follow(self, call: Callable[[], object], journey: Journey | None = None) -> Journey:
        """Call a function; return what it entered, in this thread and in others."""
        self.journey = journey or Journey()
        sys.setprofile(self._called)
        try:
            call()
        finally:
            sys.setprofile(None)
        time.sleep(SETTLE_SECONDS)
        found, self.journey = self.journey, None
        return found


def journeys(tracer: Tracer, ranks_per_node: int) -> dict[str, Journey]:
    """Take the steps; return what each kind of operation entered."""
    world = daso.init(ranks_per_node=ranks_per_node)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    torch.manual_seed(1 + world.rank)  # batches of its own
    apart = ranks_per_node == 1
    found = {}
    for name, policy in (("backward", daso.Fixed(1, 0)), ("delta", daso.Fixed(4, 1))):
        made: list[daso.DASO] = []
        inner = torch.optim.SGD(model.parameters(), lr=0.1)

        def wrap(made=made, inner=inner, policy=policy) -> None:
            made.append(daso.DASO(inner, module=model, topology=world, policy=policy))

        built = tracer.follow(wrap)
        (optimizer,) = made
        if name == "backward":
            key = "between nodes" if apart else "in a node"
            found[f"backward {key}"] = _backward(tracer, model, optimizer)
            found["construction"] = built
        elif apart:
            found["one delta"] = _delta(tracer, model, optimizer)
        optimizer.close()
    return found


def _loss(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.randn(32, 64)).square().mean()


def _step(model: torch.nn.Module, optimizer: daso.DASO) -> None:
    optimizer.zero_grad()
    _loss(model).backward()
    optimizer.step()


def _backward(tracer: Tracer, model: torch.nn.Module, optimizer: daso.DASO) -> Journey:
    for _ in range(4):
        _step(model, optimizer)
    optimizer.zero_grad()
    loss = _loss(model)
    found = tracer.follow(loss.backward)
    optimizer.step()
    return found


def _delta(tracer: Tracer, model: torch.nn.Module, optimizer: daso.DASO) -> Journey:
    for _ in range(7):
        _step(model, optimizer)
    found = Journey()
    for _ in range(2):  # the 8th step sends, the 9th receives and merges
        optimizer.zero_grad()
        _loss(model).backward()
        tracer.follow(optimizer.step, found)
    return found


def main() -> None:
    """Print what the operations entered, of two ranks in nodes of this size."""
    torch.set_num_threads(1)
    ranks_per_node, lists = int(sys.argv[1]), "--list" in sys.argv
    found = journeys(Tracer(), ranks_per_node)
    if daso.init().rank == 0:
        counts = {name: journey.counts() for name, journey in found.items()}
        print(json.dumps(counts), flush=True)
        if lists:
            for name, journey in found.items():
                print(f"{name}:")
                for file, functions in journey.files.items():
                    print(f"  {file}: {', '.join(sorted(functions))}")


if __name__ == "__main__":
    main()
