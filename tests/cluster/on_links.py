"""Trains over links that change in mid-run; tests/cluster/test_training.py submits it.

Arguments: a file that is there once links have changed, and one for what was found.
"""

import json
import sys
from pathlib import Path

import torch

import daso

MORE = 14  # exchanges after the change


def exchanges(optimizer):
    return [
        event for event in optimizer.report()["events"] if event["kind"] in ("exchange", "links")
    ]


def main():
    changed, out = map(Path, sys.argv[1:])
    topology = daso.init()
    torch.manual_seed(topology.rank)
    model = torch.nn.Linear(1000, 500)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    exchange = daso.Exchange(algorithm="planned")
    optimizer = daso.DASO(
        inner, module=model, policy=daso.Fixed(2, 1), wire="fp32", exchange=exchange
    )
    (out.parent / "training").touch()
    noticed = None
    while noticed is None or optimizer.report()["exchanges"] < noticed + MORE:
        optimizer.zero_grad()
        model(torch.randn(2, 1000)).square().mean().backward()
        optimizer.step()
        if topology.world_comm.bcast(changed.exists()) and noticed is None:
            noticed = optimizer.report()["exchanges"]
    optimizer.synchronize()
    weights = torch.cat([p.detach().view(-1) for p in model.parameters()])
    same = topology.equal_on_all_ranks(weights.numpy().tobytes())
    if topology.rank == 0:
        kinds = [event["kind"] for event in exchanges(optimizer)]
        found = {"noticed": noticed, "same": same, "kinds": kinds, **optimizer.report()}
        out.write_text(json.dumps({key: found[key] for key in ("noticed", "same", "kinds")}))
    optimizer.close()


if __name__ == "__main__":
    main()
