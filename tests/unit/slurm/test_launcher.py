import pytest

from daso.errors import ConfigError
from daso.slurm.launcher import CHOICES, MATRIX, Launcher, choose, family, read_offered

SAID = {"Intel MPI": "Intel(R) MPI Library 2021.11"}  # the others say their name as it is here
DEBIAN = ("pmix", "none", "cray_shasta", "pmi2", "pmix_v4")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25", "MPICH"),
        ("Open MPI v5.0.11, package: Open MPI user@localhost Distribution", "Open MPI"),
        ("MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)", "Cray MPICH"),
        ("Intel(R) MPI Library 2021.11 for Linux* OS", "Intel MPI"),
        ("MVAPICH of the year 3000, not in the table".replace("MPICH", ""), None),
        ("", None),
    ],
)
def test_a_library_is_known_by_what_it_says_of_itself(text, name):
    assert family(text) == name


@pytest.mark.parametrize(
    "text",
    [
        # SLURM 22.05, on standard error
        "MPI plugin types are...\n\tpmix\n\tnone\n\tcray_shasta\n\tpmi2\n"
        "specific pmix plugin versions available: pmix_v4\n",
        "srun: MPI types are...\nsrun: pmix\nsrun: none\nsrun: cray_shasta\nsrun: pmi2\n"
        "srun: pmix_v4\n",
    ],
)
def test_what_srun_offers_is_read_from_its_list(text):
    assert read_offered(text) == DEBIAN


@pytest.mark.parametrize(
    ("library", "offered", "wanted", "chosen"),
    [
        ("MPICH", DEBIAN, "auto", "pmi2"),
        ("MPICH", ("none", "pmix"), "auto", "mpirun"),
        ("MPICH", (), "auto", "mpirun"),
        ("Open MPI", DEBIAN, "auto", "pmix"),
        ("Open MPI", ("none", "pmi2"), "auto", "mpirun"),
        ("Open MPI", (), "auto", "mpirun"),
        ("Cray MPICH", DEBIAN, "auto", "cray_shasta"),
        ("Cray MPICH", ("none", "pmi2"), "auto", "srun"),
        ("Intel MPI", DEBIAN, "auto", "mpirun"),
        # asked for
        ("MPICH", DEBIAN, "mpirun", "mpirun"),
        ("MPICH", DEBIAN, "pmix", "pmix"),
        ("MPICH", (), "pmi2", "pmi2"),
        ("MPICH", ("none",), "srun", "srun"),
        (None, DEBIAN, "pmix", "pmix"),
        (None, (), "cray_shasta", "cray_shasta"),
    ],
)
def test_the_table_of_libraries_and_plugins(library, offered, wanted, chosen):
    assert choose(SAID.get(library, library), offered, wanted).kind == chosen


def wheel(device):
    return f"MPICH Version:      5.0.2\nMPICH Device:       ch4:{device}\nMPICH CC:  cc\n"


@pytest.mark.parametrize(("device", "kind"), [("ucx ofi", "mpirun"), ("ofi", "pmi2")])
def test_mpich_over_ucx_takes_mpirun_and_says_why(device, kind):
    found = choose(wheel(device), DEBIAN)
    assert found.kind == kind
    assert ("UCX" in found.why) == (kind == "mpirun")
    assert choose(wheel(device), DEBIAN, "pmi2").kind == "pmi2"


@pytest.mark.parametrize(
    ("device", "kind", "netmod"),
    [
        ("ucx ofi", "pmi2", "ofi"),  # the wheel
        ("ucx,ofi", "pmi2", "ofi"),
        ("ucx ofi", "mpirun", None),
        ("ofi ucx", "pmi2", None),  # takes ofi without being told
        ("ucx", "pmi2", None),  # has nothing else
        ("ofi", "pmi2", None),
    ],
)
def test_addresses_of_mpich_are_short_enough_for_slurms_pmi_2(device, kind, netmod):
    found = choose(wheel(device), DEBIAN, kind)
    assert found.library == "MPICH"
    assert found.environment(root=False).get("MPIR_CVAR_CH4_NETMOD") == netmod


@pytest.mark.parametrize("library", sorted(MATRIX))
@pytest.mark.parametrize("offered", [(), ("none",), ("pmi2",), ("pmix",), DEBIAN])
def test_what_is_chosen_is_there_and_the_reason_is_told(library, offered):
    found = choose(SAID.get(library, library), offered)
    assert found.kind in (*offered, "mpirun", "srun")
    assert library in found.why
    assert all(one in found.why for one in offered)


def test_a_choice_that_is_unusual_for_the_library_says_so():
    assert choose("Open MPI", DEBIAN, "pmi2").why == "as requested; Open MPI usually takes pmix"
    assert choose("Open MPI", DEBIAN, "pmix").why == "as requested"


@pytest.mark.parametrize(
    ("library", "offered", "wanted", "parts"),
    [
        ("MPICH", DEBIAN, "slurm", ["auto, pmix, pmi2", "'slurm'"]),
        ("MPICH", ("none", "pmi2"), "pmix", ["none, pmi2", "not pmix", "mpirun"]),
        (None, DEBIAN, "auto", ["give --launcher", "MPICH: pmi2"]),
        (None, (), "auto", ["give --launcher"]),
    ],
)
def test_what_cannot_be_chosen_is_told_in_one_line(library, offered, wanted, parts):
    with pytest.raises(ConfigError) as caught:
        choose(library, offered, wanted)
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in parts)


def test_words_and_names_of_launchers():
    assert str(Launcher("pmi2", "MPICH", "")) == "srun --mpi=pmi2"
    assert str(Launcher("srun", None, "")) == "srun"
    words = {kind: Launcher(kind, "Open MPI", "").words("/opt/mpirun") for kind in CHOICES[1:]}
    assert words == {
        "pmix": ["srun", "--mpi=pmix", "--kill-on-bad-exit=1"],
        "pmi2": ["srun", "--mpi=pmi2", "--kill-on-bad-exit=1"],
        "cray_shasta": ["srun", "--mpi=cray_shasta", "--kill-on-bad-exit=1"],
        "srun": ["srun", "--kill-on-bad-exit=1"],
        "mpirun": ["/opt/mpirun", "--bind-to", "none"],
    }
    assert Launcher("mpirun", "MPICH", "").words("mpirun") == ["mpirun"]


@pytest.mark.parametrize(
    ("kind", "library", "root", "names"),
    [
        ("pmi2", "MPICH", True, set()),
        ("mpirun", "MPICH", True, {"SLURM_MPI_TYPE"}),
        ("pmix", "Open MPI", True, {"OMPI_MCA_osc", "PMIX_MCA_psec", "PMIX_MCA_gds"}),
        ("mpirun", "Open MPI", False, {"OMPI_MCA_osc", "SLURM_MPI_TYPE"}),
        (
            *("mpirun", "Open MPI", True),
            {
                *("OMPI_MCA_osc", "SLURM_MPI_TYPE"),
                *("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"),
            },
        ),
    ],
)
def test_the_environment_goes_with_library_and_launcher(kind, library, root, names):
    assert Launcher(kind, library, "").environment(root=root).keys() == names
