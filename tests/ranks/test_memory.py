"""What the toolkit holds of a model, in bytes per parameter: a buffer more would show here."""

import pytest

from daso.run.bench import memory

pytestmark = pytest.mark.mpi

CHUNK_BYTES = 1024  # what is held of chunks does not count beside 100,000 parameters


def expected(place, wire):
    """Return bytes per parameter of the rank that holds most, fp32 parameters."""
    # A rank that is not the first of its node keeps its part of a sum of more than two rows.
    sums = [4 / size for size in place.node_sizes if size > 2]
    if place.nodes == 1:
        return max(sums, default=0)
    reference = shown = 4  # shown: where the node reads the merge
    wires = {"bf16": 2, "int4": 0.5 + 4 / 128, "fp32": 0}  # fp32 crosses from where it is shown
    # Of the mean, by the node that owns the part of a chunk; two nodes round nothing twice.
    rounded = 4 / place.nodes if place.nodes > 2 else 0
    rounded = 0 if wire == "fp32" else rounded
    return (reference + shown + wires[wire] + rounded) / place.lanes


@pytest.mark.parametrize("wire", ["bf16", "int4", "fp32"])
def test_no_more_is_held_than_the_design_says(topology, place, wire):
    plan = memory.Plan([100_000, 300_000], 4, [wire], CHUNK_BYTES)
    (row,) = memory.measure(plan, topology)["rows"]
    assert row["bytes_per_parameter"] == pytest.approx(expected(place, wire), abs=0.1)
    assert row["fixed_mib"] < 1
    assert all(one["exchanges"] == (3 if place.nodes > 1 else 0) for one in row["sizes"])
