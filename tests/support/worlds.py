"""Tests between ranks: one body for a world of threads and for ranks that mpirun started.

Every rank of a world runs a test that takes ``topology``. Without ``--with-mpi`` the ranks are
threads of this process (`local_world`); with it, they are those of COMM_WORLD, and all give the
same verdict. A marker says into which nodes the ranks are cut; without one it is `DEFAULT`:

    @pytest.mark.nodes(*UNEVEN)
    @pytest.mark.real_mpi  # threads cannot run it, as all in tests/ranks

Threads run the first of these cuts, real ranks the others (`real_mpi`: all): each runs once. Of a
test with many cases, threads and two real ranks run all; on more ranks, where a case costs most,
as many as show each value of each parameter once on each cut. Where another world runs them all
(tests/world on threads, the contract on two ranks), it is one case of a test and cut, another one
for each test, unless the test is marked `also_real`.
"""

import os
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from local_world import run_ranks

__all__ = [
    "ANY",
    "APART",
    "EVERY",
    "EVERYDAY",
    "INSIDE",
    "SEVERAL_NODES",
    "UNEVEN",
    "PerRank",
    "each_value",
    "is_first_rank",
]

Nodes = tuple[int, ...]  # ranks of each node

DEFAULT: list[Nodes] = [(1, 1), (2, 2)]
ANY: list[Nodes] = [(1, 1), (1, 2), (3, 1)]  # two, three and four ranks, however they are cut
APART: list[Nodes] = [(1, 1), (1, 1, 1, 1)]  # a rank a node
INSIDE: list[Nodes] = [(2,), (3,), (4,)]
SEVERAL_NODES: list[Nodes] = [*DEFAULT, (2, 1)]
UNEVEN: list[Nodes] = [(2, 1), (3, 1)]
EVERYDAY: Nodes = (2, 1)  # of every cut, the one that threads run
EVERY: list[Nodes] = [*INSIDE, *UNEVEN, (1, 1, 1), (1, 2), (1, 1, 1, 1)]  # but for `DEFAULT`

ELSEWHERE = (0,)
ALL_CASES_ON = 2  # real ranks
RANKS = Path(__file__).parents[1] / "ranks"


@dataclass(frozen=True)
class PerRank:
    """What a fixture returns that every rank makes for itself: ``make(topology)``."""

    make: Callable[[Any], Any]


def _on_mpi(config: pytest.Config) -> bool:
    return bool(config.getoption("--with-mpi", default=False))


def _world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


def is_first_rank() -> bool:
    """Return whether this process is rank 0 of what mpirun started, or was not started by it."""
    return "mpi4py.MPI" not in sys.modules or _world().Get_rank() == 0


# --- which ranks, cut how -------------------------------------------------------------------------


@pytest.hookimpl(trylast=True)  # once there is a reporter
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nodes(*sizes): the nodes that ranks are cut into")
    config.addinivalue_line("markers", "real_mpi: not for ranks that are threads")
    config.addinivalue_line("markers", "also_real: on many real ranks each value, not one case")
    config.addinivalue_line("markers", "ranks(*sizes): for tests without nodes; without it: 2")
    if _on_mpi(config):
        _one_voice(config)


def _one_voice(config: pytest.Config) -> None:
    """Let rank 0 alone report, and give every rank a folder of its own.

    pytest deletes what earlier runs left, and two ranks that delete the same folder fail.
    """
    rank = _world().Get_rank()
    files = Path(tempfile.gettempdir()) / f"daso-tests-{os.getuid()}-rank-{rank}"
    files.mkdir(exist_ok=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(files)
    if rank > 0:
        config.option.verbose = -2
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter._tw._file = open(os.devnull, "w")  # noqa: PTH123, SIM115


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Cut the world into the nodes that a test is marked for."""
    if "topology" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("nodes")
    real = _is_real(metafunc.definition)
    shapes = list(marker.args) if marker else DEFAULT
    if _on_mpi(metafunc.config):
        size = _world().Get_size()
        shapes = [one for one in (shapes if real else shapes[1:]) if sum(one) == size]
    else:
        shapes = [] if real else shapes[:1]
    metafunc.parametrize(
        "topology", shapes or [ELSEWHERE], indirect=True, ids=_name, scope="session"
    )


def _is_real(item: pytest.Item) -> bool:
    return RANKS in item.path.parents or item.get_closest_marker("real_mpi") is not None


def _name(shape: Nodes) -> str:
    return "+".join(map(str, shape))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what runs elsewhere: on other ranks, or on none."""
    mine = [item for item in items if _runs_here(item, on_mpi=_on_mpi(config))]
    if _on_mpi(config) and _world().Get_size() > ALL_CASES_ON:
        mine = _fewest(mine)
    kept = set(mine)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = mine


def _runs_here(item: pytest.Item, *, on_mpi: bool) -> bool:
    callspec = getattr(item, "callspec", None)
    shape = callspec.params.get("topology") if callspec else None
    if shape is None and on_mpi:  # on ranks all the same, and on two of them
        sizes = item.get_closest_marker("ranks")
        return _is_real(item) and _world().Get_size() in (sizes.args if sizes else (2,))
    return shape != ELSEWHERE


def _fewest(items: list[pytest.Item]) -> list[pytest.Item]:
    """Keep of each test, on each cut, one case, or as many as show each value."""
    cases = defaultdict[tuple[str, str], list[pytest.Item]](list)
    for item in items:
        cases[item.nodeid.split("[")[0], repr(_params(item).get("topology"))].append(item)
    kept = set[pytest.Item]()
    for (name, _), of_one in cases.items():
        if _runs_elsewhere(of_one[0]):
            kept.add(of_one[zlib.crc32(name.encode()) % len(of_one)])
        else:
            shown = [{(key, repr(value)) for key, value in _params(i).items()} for i in of_one]
            kept.update(of_one[index] for index in each_value(shown))
    return [item for item in items if item in kept]


def _params(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {"": None}


def _runs_elsewhere(item: pytest.Item) -> bool:
    """Return whether all cases of this test run in a cheaper world."""
    in_world = not _is_real(item) and item.get_closest_marker("also_real") is None
    return in_world or item.path.name == "test_contract.py"


def each_value(cases: Sequence[set[Any]]) -> list[int]:
    """Return which cases together have every value of all, taking what shows most first."""
    missing, taken = set[Any]().union(*cases), []
    while missing:
        most = max(range(len(cases)), key=lambda index: len(cases[index] & missing))
        missing -= cases[most]
        taken.append(most)
    return taken


# --- running --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def topology(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Who is where; in a world of threads the hook below gives each rank its own."""
    if not _on_mpi(request.config):
        yield request.param
        return
    from daso.comm.topology import Topology

    made = Topology(ranks_per_node=request.param)
    yield made
    made.free()


@pytest.fixture
def rank_info(topology: Any) -> Any:
    """This rank's numbers in the topology."""
    if isinstance(topology, tuple):
        return PerRank(lambda topology: topology.rank_info)
    return topology.rank_info


@pytest.fixture
def shared_folder(topology: Any, tmp_path: Path) -> Path:
    """One folder for all ranks."""
    return (
        tmp_path if isinstance(topology, tuple) else Path(topology.world_comm.bcast(str(tmp_path)))
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test's body once for each rank."""
    names = pyfuncitem._fixtureinfo.argnames
    given = {name: pyfuncitem.funcargs[name] for name in names}
    topology = pyfuncitem.funcargs.get("topology")
    if topology is None:
        return None

    def body(topology: Any) -> None:
        own = {
            name: value.make(topology) if isinstance(value, PerRank) else value
            for name, value in given.items()
        }
        if "topology" in own:
            own["topology"] = topology
        pyfuncitem.obj(**own)

    if isinstance(topology, tuple):
        run_ranks(sum(topology), lambda world: _in_topology(world, topology, body))
    else:
        body(topology)
    return True


def _in_topology(world: Any, nodes: Nodes, body: Callable[[Any], None]) -> None:
    from daso.comm.topology import Topology

    topology = Topology(world, ranks_per_node=nodes)
    body(topology)
    topology.free()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Give the same verdict on all ranks of COMM_WORLD."""
    error = None
    try:
        yield
    except BaseException as caught:
        error = caught
    if _on_mpi(item.config):
        verdicts = _world().allgather(None if error is None else repr(error)[:500])
        others = {rank: verdict for rank, verdict in enumerate(verdicts) if verdict is not None}
        if error is None and others:
            pytest.fail(f"failed on other ranks: {others}", pytrace=False)
    if error is not None:
        raise error
