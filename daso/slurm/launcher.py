"""Which program starts the ranks of a SLURM job: a table of MPI libraries and what srun offers.

A wrong pair starts N worlds of one rank each, or fails: MPICH does not speak PMIx to SLURM 22.05,
Open MPI does not speak PMI-2.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from daso.errors import ConfigError

__all__ = ["CHOICES", "Launcher", "choose", "family", "read_netmods", "read_offered"]

CHOICES = ("auto", "pmix", "pmi2", "cray_shasta", "srun", "mpirun")

# MPI library: what starts its ranks, best first. "srun" is srun with the site's own default.
MATRIX = {
    "MPICH": ("pmi2", "mpirun"),
    "Open MPI": ("pmix", "mpirun"),
    "Cray MPICH": ("cray_shasta", "srun"),
    "Intel MPI": ("mpirun",),
}

# In the order in which they are looked for: Cray's text also says MPICH.
NAMES = {
    "CRAY MPICH": "Cray MPICH",
    "Intel(R) MPI": "Intel MPI",
    "Open MPI": "Open MPI",
    "MPICH": "MPICH",
}


@dataclass(frozen=True, slots=True)
class Launcher:
    """What starts the ranks.

    Args:
        kind: ``"pmix"``, ``"pmi2"``, ``"cray_shasta"``, ``"srun"`` or ``"mpirun"``.
        library: Name of the MPI library; None where it cannot be seen from here.
        why: Why it was chosen, for people.
        netmods: How an MPICH can reach other hosts, its own choice first: ``("ucx", "ofi")``.
    """

    kind: str
    library: str | None
    why: str
    netmods: tuple[str, ...] = ()

    @property
    def by_mpirun(self) -> bool:
        """Whether mpirun starts the ranks, so that the batch script has to pass signals on."""
        return self.kind == "mpirun"

    def __str__(self) -> str:
        return self.kind if self.kind in ("mpirun", "srun") else f"srun --mpi={self.kind}"

    def words(self, mpirun: str) -> list[str]:
        """Return how its command line begins, without the number of ranks."""
        if not self.by_mpirun:
            return [*str(self).split(), "--kill-on-bad-exit=1"]
        # Open MPI binds a rank to one core otherwise, with all its threads.
        return [mpirun, *(["--bind-to", "none"] if self.library == "Open MPI" else [])]

    def environment(self, *, root: bool) -> dict[str, str]:
        """Return what has to be set for it."""
        ours: dict[str, str] = {}
        if self.library == "Open MPI":
            ours["OMPI_MCA_osc"] = "^ucx"  # as for `daso run`
        if self.kind == "pmix":
            # Open MPI 5.0 under SLURM's PMIx 4 complains of munge and of shared memory otherwise.
            ours |= {"PMIX_MCA_psec": "native", "PMIX_MCA_gds": "hash"}
        if self.kind == "pmi2" and self.netmods[:1] == ("ucx",) and "ofi" in self.netmods:
            # Slower than UCX, but see `choose`.
            ours["MPIR_CVAR_CH4_NETMOD"] = "ofi"
        if self.by_mpirun:
            # mpirun starts its helpers by srun; with a site default of pmix they would hang.
            ours["SLURM_MPI_TYPE"] = "none"
            if self.library == "Open MPI" and root:
                ours |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return ours


def family(text: str) -> str | None:
    """Return the name of an MPI library from what it says of itself."""
    return next((name for sign, name in NAMES.items() if sign.lower() in text.lower()), None)


def read_netmods(text: str) -> tuple[str, ...]:
    """Return how an MPICH can reach other hosts, its own choice first."""
    found = re.search(r"^MPICH Device:\s*ch4:([\w, ]+)$", text, re.MULTILINE)
    return tuple(re.findall(r"\w+", found[1])) if found else ()


def read_offered(text: str) -> tuple[str, ...]:
    """Return the plugins that ``srun --mpi=list`` names."""
    return tuple(dict.fromkeys(re.findall(r"\b(?:none|openmpi|cray_shasta|pm\w+)\b", text)))


def choose(said: str | None, offered: Sequence[str], wanted: str = "auto") -> Launcher:
    """Choose what starts the ranks."""
    library, netmods = family(said or ""), read_netmods(said or "")
    plugins = ", ".join(offered) or "no plugin"
    if wanted not in CHOICES:
        raise ConfigError(f"--launcher must be one of {', '.join(CHOICES)}, not {wanted!r}")
    if wanted != "auto":
        if offered and wanted not in ("srun", "mpirun", *offered):
            raise ConfigError(
                f"--launcher must be one that srun offers here, but it offers {plugins}, not "
                f"{wanted}; leave --launcher out, or take mpirun"
            )
        usual = MATRIX[library][0] if library else wanted
        other = "" if wanted in (usual, "mpirun") else f"; {library} usually takes {usual}"
        return Launcher(wanted, library, f"as asked for{other}", netmods)
    if library is None:
        raise ConfigError(
            "the MPI library of the ranks must be known to choose a launcher, but it cannot be "
            "seen from here; give --launcher (Open MPI: pmix, MPICH: pmi2, Cray MPICH: cray_shasta)"
        )
    why = f"the MPI library is {library}, and srun offers {plugins}"
    if library == "MPICH" and netmods[:1] == ("ucx",):
        # A rank's UCX address takes several PMI messages, and SLURM reads at most 1024 bytes of
        # one: some jobs would fail in MPI_Init ("value not properly terminated").
        why += "; but UCX addresses are too long for SLURM's PMI-2"
        return Launcher("mpirun", library, why, netmods)
    kind = next(one for one in (*MATRIX[library], "srun") if one in (*offered, "mpirun", "srun"))
    return Launcher(kind, library, why, netmods)
