"""The example programs run and learn, alone and on ranks."""

import re
from pathlib import Path

import pytest
from jobs import started

EXAMPLES = Path(__file__).parents[2] / "daso" / "examples"


def run(*words: str) -> str:
    done = started(*words, DASO_DATA="")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.later("trains")
@pytest.mark.slow("trains")
@pytest.mark.parametrize("launch", [(), ("daso", "run", "-n", "4", "--ranks-per-node", "2", "-m")])
def test_the_cnn_learns(launch: tuple[str, ...]) -> None:
    words = ["daso.examples.cnn", "--data=digits", "--epochs=6"]
    accuracies = re.findall(r"test accuracy (\S+)", run(*launch, *words))
    assert len(accuracies) == 6
    assert float(accuracies[-1]) > 0.9


@pytest.mark.later("trains")
@pytest.mark.slow("trains")
@pytest.mark.parametrize(
    "launch", [(), ("daso", "run", "-n", "3", "--ranks-per-node", "2,1", "-m")]
)
def test_the_transformer_learns(launch: tuple[str, ...]) -> None:
    words = ["daso.examples.transformer", "--steps=100", "--batch-size=8"]
    losses = [float(x) for x in re.findall(r"(\S+) bits per byte", run(*launch, *words))]
    assert len(losses) == 2
    assert losses[-1] < 5.5  # 8 bits would be knowing nothing


@pytest.mark.later("trains")
@pytest.mark.slow("trains")
def test_the_server_learns_as_well_as_all_in_step() -> None:
    launch = ["daso", "run", "-n", "2", "-m"]
    words = ["daso.examples.server", "--data=digits", "--epochs=8", "--batch-size=16"]
    found = {}
    for staleness in ("0", "none"):
        more = [] if staleness == "none" else [f"--staleness={staleness}"]
        accuracies = re.findall(r"test accuracy (\S+)", run(*launch, *words, *more))
        assert len(accuracies) == 8
        found[staleness] = float(accuracies[-1])
    assert min(found.values()) > 0.9
    assert found["none"] > found["0"] - 0.03  # 360 images: ten of them


@pytest.mark.later("trains")
@pytest.mark.slow("trains")
@pytest.mark.parametrize(
    ("words", "least"),
    [
        (["lists", "--lists=2000", "--epochs=4"], 0.8),
        (["trees", "--trees=1500", "--epochs=2"], 0.85),
        (["graphs", "--graphs=200", "--epochs=3"], 0.95),
        (["pipeline", "--data=digits", "--epochs=3"], 0.85),
    ],
    ids=lambda found: found[0] if isinstance(found, list) else "",
)
def test_flows_learn(words: list[str], least: float) -> None:
    launch = ["daso", "run", "-n", "2", "-m"]
    found = re.findall(
        r"test accuracy (\S+),", run(*launch, f"daso.examples.{words[0]}", *words[1:])
    )
    assert float(found[-1]) > least


@pytest.mark.later("trains")
@pytest.mark.slow("trains")
def test_a_flow_learns_numbers_of_molecules() -> None:
    words = ["daso.examples.graphs", "--task=molecules", "--graphs=300", "--epochs=6"]
    errors = [float(x) for x in re.findall(r"test error (\S+),", run(*words))]
    assert errors[-1] < 0.6 * errors[0]


def test_every_example_is_short_and_tested_here() -> None:
    programs = sorted(path.stem for path in EXAMPLES.glob("[!_]*.py"))
    assert programs == [
        "cnn",
        "graphs",
        "lists",
        "pipeline",
        "server",
        "transformer",
        "trees",
    ]
    for name in programs:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 200
