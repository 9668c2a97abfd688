"""Two tiers of one suite, and what a run says of itself at its end.

The everyday tier is what `pytest` runs; with ``--all`` everything is run. What is left to it lies
in one of the rooms in `LATER`, or has a marker that says why:

    @pytest.mark.later("starts a job of four ranks for each case")
    @pytest.mark.slow("SLURM's shortest time limit is a minute")  # may take more than 20 s

The limit holds in the everyday tier: with everything else, jobs of four ranks run beside a test.

Tests of ranks run in jobs of their own and write down there how they ended; the test that starts
the job hands that on, so that they are counted and timed here.
"""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import slowness

__all__ = ["RECORD", "hand_on"]

TESTS = Path(__file__).parents[1]
ROOMS = {"unit", "world", "ranks", "commands", "gpu", "cluster"}
LATER = {"cluster": "needs hosts and SLURM", "gpu": "devices are simulated, or real"}
JOBS = ("test_ranks.py", "test_pretended_cuda.py")  # more ranks than cores: one job at a time
# With costly fixtures.
TOGETHER = ("test_resume.py", "test_bench.py", "test_to_accuracy.py", "test_elastic.py")
LONGEST_SECONDS = 20.0  # where each process has a core; in proportion where more of them run
SLOW_SECONDS = 900  # for one that is marked slow, before it is taken for one that hangs
RECORD = "DASO_TESTS_RECORD"  # names the file in which a job's tests are written down
SLOWEST = 10
# The first pattern that the file of a test matches; the rows of `docs/explanation/design.md`.
CAPABILITIES = {
    "DDP's buckets in few bits": r"ddp_hook",
    "swap and recompute, captured steps": r"memory/|test_memory\.|captured",
    "dynamic models (AMPNet)": r"flow",
    "eager-update parameter server": r"server",
    "prediction and throttles": r"predict|throttle",
    "SLURM": r"slurm/|submit|minicluster",
    "elastic jobs and faults": r"elastic|survivors|spares|census|faults|drills|recovery",
    "checkpoints, stop requests": r"checkpoint|resume|stopping|test_state",
    "recordings on one clock": r"timeline/|recording",
    "Trainer, Accelerate, Lightning": r"integrations",
    "devices": r"gpu/|device|nccl|cuda|triton",
    "documentation, notebooks, examples": r"docs|readme|notebooks|examples|prose",
    "commands and benches": r"cli/|commands/|benchmarks/|test_bench",
    "hierarchical optimizer": r"world/|ranks/|plan/|kernels/|comm/|train/|cluster/",
    "the code's own rules, inputs of any kind": r"",
}

_began = time.monotonic()
_ended: list[tuple[str, str, float]] = []  # test, outcome, seconds
_failed: list[str] = []  # what fails the run, though every test passed
_too_long: list[str] = []  # tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run everything, not the everyday tier")
    parser.addoption("--every-room", action="store_true", help="fail where all of one were skipped")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "later(why): not in the everyday tier")
    config.addinivalue_line("markers", "slow(why): may take more than 20 s")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep on one worker what shares a cluster, or what its file prepares once."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):  # xdist's own groups do not hold with pytest 9.2
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", maxsplit=1)[0]
            if kind_of(nodeid) == "cluster":
                return "cluster"
            if Path(file).name in JOBS:
                return "jobs"
            return file if Path(file).name in TOGETHER else nodeid

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            """Forget a unit that is complete: each of thousands is counted at every test."""
            super().mark_test_complete(node, item_index, duration)
            scope = self._split_scope(self.registered_collections[node][item_index])
            if all(self.assigned_work[node].get(scope, {}).values()):
                self.assigned_work[node].pop(scope, None)

    config.option.loadscopereorder = False  # what is in `_turn` first starts first
    return Lanes(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to ``--all`` what is not of the everyday tier; start what takes longest first."""
    items.sort(key=_turn)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))
    if config.getoption("--all") or _named(config):
        return
    kept = [item for item in items if not _is_later(item)]
    config.hook.pytest_deselected(items=[item for item in items if _is_later(item)])
    items[:] = kept


def _turn(item: pytest.Item) -> int:
    if kind_of(item.nodeid) == "cluster" or item.path.name in JOBS:
        return 0
    return 1 if item.get_closest_marker("slow") else 2


def _named(config: pytest.Config) -> bool:
    """Return whether the caller names what is to run: then it runs."""
    return any(Path(word.split("::")[0]).resolve() != TESTS for word in config.args)


def _is_later(item: pytest.Item) -> bool:
    return kind_of(item.nodeid) in LATER or item.get_closest_marker("later") is not None


def kind_of(test: str) -> str:
    """Return in which room of tests/ a test lies."""
    parts = test.split("::", maxsplit=1)[0].split("/")
    return parts[1] if parts[0] == "tests" and len(parts) > 2 else "others"


# --- what a job's tests were ----------------------------------------------------------------------


def hand_on(path: Path, record_property: Callable[[str, Any], None]) -> int:
    """Give on what a job's tests wrote down; return how many passed."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    record_property("job", lines)
    return sum(outcome == "passed" for _, outcome, _ in lines)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    lines = [(report.nodeid, report.outcome, report.duration)]
    if path := os.environ.get(RECORD):
        _write_down(Path(path), lines)
        return
    for name, inner in report.user_properties:
        lines += [tuple(one) for one in inner] if name == "job" else []
    _ended.extend(lines)
    if report.duration > LONGEST_SECONDS * slowness() and "slow" not in report.keywords:
        _too_long.append(f"{report.nodeid}: {report.duration:.1f} s")


def _write_down(path: Path, lines: list[Any]) -> None:
    from worlds import is_first_rank

    if is_first_rank():
        with path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how long all took, how many of each kind ran, and which took longest."""
    if os.environ.get(RECORD) or hasattr(config, "workerinput") or not _ended:
        return
    say = terminalreporter.write_line
    counts = Counter(kind_of(test) for test, outcome, _ in _ended if outcome != "skipped")
    tier = "everything" if config.getoption("--all") else "the everyday tier"
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    say("")
    say(f"{tier}: {time.monotonic() - _began:.0f} s; tests that ran: {kinds}")
    if config.getoption("--all"):
        say("tests and seconds by capability:")
        for name, (count, seconds) in _by_capability().items():
            say(f"  {count:5d} {seconds:7.0f} s  {name}")
    say("the slowest:")
    for test, _, seconds in sorted(_ended, key=lambda one: -one[2])[:SLOWEST]:
        say(f"  {seconds:6.1f} s  {test}")
    for line in [] if config.getoption("--all") else _too_long:
        say(f"FAILED: a test must end within {LONGEST_SECONDS:g} s or be marked slow: {line}")
    for line in _failed:
        say(f"FAILED: {line}")


def _by_capability() -> dict[str, tuple[int, float]]:
    """Return how many tests of each capability ran, and their seconds, in jobs of ranks, too."""
    totals = dict.fromkeys(CAPABILITIES, (0, 0.0))
    for test, outcome, seconds in _ended:
        path = test.split("::", maxsplit=1)[0].removeprefix("tests/")
        if path.endswith(JOBS):  # its own tests are counted
            continue
        name = next(name for name, words in CAPABILITIES.items() if re.search(words, path))
        count, total = totals[name]
        totals[name] = count + (outcome != "skipped"), total + seconds
    return totals


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    if exitstatus != 0 or hasattr(config, "workerinput"):
        return
    if config.getoption("--every-room"):
        ran = {kind_of(test) for test, outcome, _ in _ended if outcome != "skipped"}
        _failed.extend(f"of tests/{room}, none ran; -rs says why" for room in sorted(ROOMS - ran))
    if _failed or (_too_long and not config.getoption("--all")):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
