"""The program that starts the ranks of a SLURM job, chosen by MPI library and srun's plugins.

A wrong pair starts N worlds of one rank each, or fails: MPICH does not speak PMIx to SLURM 22.05,
Open MPI does not speak PMI-2.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from daso.errors import ConfigError

CHOICES = ("auto", "pmix", "pmi2", "cray_shasta", "srun", "mpirun")

# Launchers of each MPI library, best first. "srun" is srun with the site's default plugin.
MATRIX = {
    "MPICH": ("pmi2", "mpirun"),
    "Open MPI": ("pmix", "mpirun"),
    "Cray MPICH": ("cray_shasta", "srun"),
    "Intel MPI": ("mpirun",),
}

# In search order: Cray's text also contains MPICH.
NAMES = {
    "CRAY MPICH": "Cray MPICH",
    "Intel(R) MPI": "Intel MPI",
    "Open MPI": "Open MPI",
    "MPICH": "MPICH",
}


@dataclass(frozen=True, slots=True)
class Launcher:
    """The program that starts the ranks.

    Args:
        kind: ``"pmix"``, ``"pmi2"``, ``"cray_shasta"``, ``"srun"`` or ``"mpirun"``.
        library: Name of the MPI library; None if unknown here.
        why: The reason of the choice.
        netmods: Network modules of an MPICH, its default first: ``("ucx", "ofi")``.
    """

    kind: str
    library: str | None
    why: str
    netmods: tuple[str, ...] = ()

    @property
    def by_mpirun(self) -> bool:
        """Return whether mpirun starts the ranks; the batch script then forwards signals."""
        return self.kind == "mpirun"

    def __str__(self) -> str:
        return self.kind if self.kind in ("mpirun", "srun") else f"srun --mpi={self.kind}"

    def words(self, mpirun: str) -> list[str]:
        """Return the beginning of its command line, without the number of ranks."""
        if not self.by_mpirun:
            return [*str(self).split(), "--kill-on-bad-exit=1"]
        # Otherwise Open MPI binds a rank, with all its threads, to one core.
        return [mpirun, *(["--bind-to", "none"] if self.library == "Open MPI" else [])]

    def environment(self, *, root: bool) -> dict[str, str]:
        """Return the environment variables that it needs."""
        ours: dict[str, str] = {}
        if self.library == "Open MPI":
            ours["OMPI_MCA_osc"] = "^ucx"  # as for `daso run`
        if self.kind == "pmix":
            # Otherwise Open MPI 5.0 under SLURM's PMIx 4 warns about munge and shared memory.
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
    """Return the name of an MPI library from its version text."""
    return next((name for sign, name in NAMES.items() if sign.lower() in text.lower()), None)


def read_netmods(text: str) -> tuple[str, ...]:
    """Return the network modules of an MPICH, its default first."""
    match = re.search(r"^MPICH Device:\s*ch4:([\w, ]+)$", text, re.MULTILINE)
    return tuple(re.findall(r"\w+", match[1])) if match else ()


def read_offered(text: str) -> tuple[str, ...]:
    """Return the plugins listed by ``srun --mpi=list``."""
    return tuple(dict.fromkeys(re.findall(r"\b(?:none|openmpi|cray_shasta|pm\w+)\b", text)))


def choose(version_text: str | None, offered: Sequence[str], choice: str = "auto") -> Launcher:
    """Choose the launcher.

    version_text is that of the MPI library, None if unknown; choice is the value of --launcher.
    """
    library, netmods = family(version_text or ""), read_netmods(version_text or "")
    plugins = ", ".join(offered) or "no plugin"
    if choice not in CHOICES:
        raise ConfigError(
            f"--launcher must be one of {', '.join(CHOICES)}, not {choice!r}",
            code="unknown-launcher",
        )
    if choice != "auto":
        if offered and choice not in ("srun", "mpirun", *offered):
            raise ConfigError(
                f"--launcher must be one that srun offers here, but it offers {plugins}, not "
                f"{choice}; leave --launcher out, or take mpirun",
                code="launcher-not-offered",
            )
        usual = MATRIX[library][0] if library else choice
        other = "" if choice in (usual, "mpirun") else f"; {library} usually takes {usual}"
        return Launcher(choice, library, f"as requested{other}", netmods)
    if library is None:
        raise ConfigError(
            "the MPI library of the ranks must be known to choose a launcher, but it cannot be "
            "determined here; give --launcher (Open MPI: pmix, MPICH: pmi2, Cray MPICH: "
            "cray_shasta)",
            code="mpi-of-ranks-unknown",
        )
    why = f"the MPI library is {library}, and srun offers {plugins}"
    if library == "MPICH" and netmods[:1] == ("ucx",):
        # A rank's UCX address takes several PMI messages, and SLURM reads at most 1024 bytes of
        # one: some jobs would fail in MPI_Init ("value not properly terminated").
        why += "; but UCX addresses are too long for SLURM's PMI-2"
        return Launcher("mpirun", library, why, netmods)
    kind = next(k for k in (*MATRIX[library], "srun") if k in (*offered, "mpirun", "srun"))
    return Launcher(kind, library, why, netmods)
