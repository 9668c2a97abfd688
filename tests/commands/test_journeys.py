"""How many files of daso a reader of one operation opens: no more than today."""

import json
from pathlib import Path

import pytest
from jobs import started

pytestmark = [
    pytest.mark.later("starts two ranks"),
    pytest.mark.slow("starts two ranks"),
]

# Ceilings only come down; two new checks, of references and of payloads, took a function each.
# Moves count turns from one file to another in the training thread; where
# ranks wait, a few depend on who comes first. Each part has a file: a construction enters them all.
CEILINGS = {
    "construction": {"files": 68, "functions": 445, "moves": 550},
    "backward between nodes": {"files": 12, "functions": 103, "moves": 34},
    "backward in a node": {"files": 6, "functions": 61, "moves": 34},
    "one delta": {"files": 25, "functions": 206, "moves": 104},
}


@pytest.mark.parametrize(
    ("ranks_per_node", "names"),
    [(1, ["construction", "backward between nodes", "one delta"]), (2, ["backward in a node"])],
)
def test_an_operation_enters_no_more_files(ranks_per_node, names):
    program = str(Path(__file__).parents[1] / "support" / "journeys.py")
    how = ["run", "-n", "2", "--ranks-per-node", str(ranks_per_node), program]
    run = started("daso", *how, str(ranks_per_node))
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[0])
    for name in names:
        for count, ceiling in CEILINGS[name].items():
            assert 0 < found[name][count] <= ceiling, f"{count} of {name}"
