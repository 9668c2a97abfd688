"""A run on ranks beside the sequential oracle, bit for bit after every step."""

from dataclasses import replace

import pytest
import torch
from models import batch_loss, flat_bytes, seeded
from sequential import Sequential

import daso

ORDERED = daso.Exchange(algorithm="direct", chunk_bytes=512)


def assert_equal_to_oracle(model, oracle, node):
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    for name, mine, theirs in zip(
        names,
        [p for p in model.parameters() if p.requires_grad],
        oracle.params(node),
        strict=True,
    ):
        assert torch.equal(mine, theirs), f"{name}: {(mine - theirs).abs().max()}"


def compare(topology, make, make_inner, policy, *, steps=11, epochs=1, **options):
    """Run both for some steps; compare after every step and at the end."""
    options.setdefault("merge", "daso")
    build, gradients = seeded(make), options.pop("gradients", daso.Gradients(bucket_bytes=256))
    known = {name: value for name, value in options.items() if name != "gpu_direct"}
    oracle = Sequential(build, make_inner, batch_loss, topology.node_sizes, policy=policy, **known)
    model = build()
    varied = {name: options.pop(name) for name in ("fragments", "gpu_direct") if name in options}
    exchange = replace(ORDERED, **varied)
    settings = {"exchange": exchange, "gradients": gradients}
    with daso.DASO(
        make_inner(model), module=model, topology=topology, policy=policy, **settings, **options
    ) as optimizer:
        for epoch in range(epochs):
            for step in range(steps):
                optimizer.zero_grad()
                batch_loss(model, topology.rank, epoch * steps + step).backward()
                oracle.gain = optimizer.report()["gain"]
                assert oracle.gain == pytest.approx(oracle.gain_measured, rel=1e-4)
                optimizer.step()
                optimizer.flush()
                oracle.run(1)
                assert_equal_to_oracle(model, oracle, topology.node)
            optimizer.end_epoch(1.0)
            oracle.end_epoch(1.0)
            assert_equal_to_oracle(model, oracle, topology.node)
        optimizer.synchronize()
        oracle.synchronize()
        assert_equal_to_oracle(model, oracle, topology.node)
        assert topology.equal_on_all_ranks(b"".join(flat_bytes(p) for p in model.parameters()))
        return optimizer.report()
