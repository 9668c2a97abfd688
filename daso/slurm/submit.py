"""`daso submit`: builds a job from flags and a site profile, and submits its script to sbatch."""

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO, get_type_hints

from daso.environment import find_mpirun, is_placed_by_sbatch
from daso.errors import ConfigError
from daso.paths import expand_home, path_of
from daso.slurm.job import LOGS, Job, flag, name_of, options, render
from daso.slurm.launcher import CHOICES, Launcher, choose
from daso.slurm.sites import Site, known_sites, read_site, read_template
from daso.slurm.slurm_commands import (
    NoAnswerError,
    ask,
    cpus_of_a_rank,
    explain,
    has_settings,
    is_there,
    library_of,
    offered,
    require,
    too_big,
)

RECORDS = "jobs.jsonl"  # in the folder of logs, a line per submitted job


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A submitted job, as a line of the folder's records."""

    job: str
    name: str
    log: str  # its file, with %a for the number in an array
    script: str
    site: str
    submitted: str
    client: dict[str, str] = field(default_factory=dict)  # as in the site's profile


# sbatch's own names of options.
SBATCH = {
    "name": ("-J", "--job-name"),
    "nodes": ("-N",),
    "tasks_per_node": ("--ntasks-per-node",),
    "cpus_per_task": ("-c",),
    "time": ("-t",),
    "partition": ("-p",),
    "account": ("-A",),
    "qos": ("-q",),
    "constraint": ("-C",),
    "array": ("-a",),
    "dependency": ("-d",),
}
# sbatch's options of totals over all nodes, by the option per node.
TOTALS = {
    "tasks_per_node": (("-n", "--ntasks"), "ranks"),
    "gpus_per_node": (("-G", "--gpus"), "GPUs"),
}
PATHS = ("logs", "python", "container")
# Options of sbatch that select where a job runs.
ELSEWHERE = re.compile(r"(?:^|\s)(?:--partition|--clusters?|-p|-M)")
# Options by which a site may choose a partition for jobs without one.
ROUTED = re.compile(r"(?:^|\s)(?:--(?:qos|constraint|account|gres|gpus)|-[qCAG])")
# Options that set the CPUs of a rank.
CPUS = re.compile(r"(?:^|\s)(?:--cpus-per-(?:task|gpu)|-c)")
FLAGS = ("--dry-run", "--help", "-h")  # options without a value, besides the boolean ones


def split_words(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split the words behind ``submit`` into options and the program."""
    hints = get_type_hints(Job)
    switches = [name for name in options() if hints[name] is bool]
    flags = {*FLAGS, *map(flag, switches), *(flag(f"no_{name}") for name in switches)}
    ours, at = list[str](), 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "--"):
        joined = "=" in words[at] or re.match(r"-[A-Za-z].", words[at])  # --nodes=2, -N2
        alone = words[at] in flags or joined or at + 1 == len(words)
        ours.append(words[at] if alone else f"{words[at]}={words[at + 1]}")
        at += 1 if alone else 2
    return ours, tuple(words[at + 1 :] if words[at : at + 1] == ["--"] else words[at:])


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``daso submit``; they come from the fields of `Job`."""
    parser.usage = "daso submit [OPTIONS] (SCRIPT | -m MODULE) [ARGUMENTS]"
    parser.add_argument("--dry-run", action="store_true", help="print the script, submit nothing")
    sites = ", ".join(known_sites())
    parser.add_argument("--site", help=f"site profile: {sites}, or a TOML file; default: DASO_SITE")
    parser.add_argument("--template", type=path_of, metavar="FILE", help="a Jinja template to use")
    parser.add_argument(
        "--launcher",
        metavar="KIND",
        help=f"starter of the ranks: {', '.join(CHOICES)}; default: auto, by the MPI library",
    )
    hints = get_type_hints(Job)
    for name, option in options().items():
        text, metavar = option.metadata["help"], option.metadata["metavar"]
        if option.default not in ("", (), False, 0) and "default" not in text:
            text += f"; default: {option.default}"
        if hints[name] is bool:
            parser.add_argument(
                flag(name), action=argparse.BooleanOptionalAction, default=None, help=text
            )
        elif hints[name] == tuple[str, ...]:
            parser.add_argument(flag(name), action="append", metavar=metavar, help=text)
        else:
            flags, kind = (*SBATCH.get(name, ()), flag(name)), hints[name]
            parser.add_argument(*flags, dest=name, type=kind, metavar=metavar, help=text)
    for flags, noun in TOTALS.values():
        text = f"{noun} of all nodes together"
        parser.add_argument(*flags, type=int, metavar="N", help=text)
    parser.set_defaults(run=submit)


def submit(chosen: argparse.Namespace, program: Sequence[str]) -> int:
    """Run ``daso submit``."""
    site = read_site(chosen.site)
    template, name = read_template(chosen.template)
    job = _job(vars(chosen), site, tuple(program))
    cpus = _requested_cpus(job, chosen.cpus_per_task or site.defaults.get("cpus_per_task"))
    nodes = "" if chosen.dry_run and cpus else _nodes(site, dry_run=chosen.dry_run)
    if cpus is None:
        job, cpus = _with_cpus(job, nodes)
    summary = f"{job.size}, {job.launcher}: {job.launcher.why}; CPUs of each rank: {cpus}"
    text = render(job, template, name=name)
    if job.ignored:
        print(
            f"daso: mpirun starts the ranks, so options of srun are left out: "
            f"{' '.join(job.ignored)}; --launcher=srun keeps them",
            file=sys.stderr,
        )
    if chosen.dry_run:
        # SLURM does not create the folder of logs, and a job without it ends silently.
        needs = "" if job.folder.is_dir() else f"; before: mkdir -p {shlex.quote(str(job.folder))}"
        print(f"daso: {summary}{needs}", file=sys.stderr)
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
        sys.stdout.buffer.flush()
        return 0
    require("sbatch")
    _check_size(job, nodes)
    folder = _folder(job)
    number, cluster = _sbatch(job, text, site)
    print(f"submitted job {number} ({summary})", flush=True)
    try:
        client = dict(site.unexpanded) | ({"SLURM_CLUSTERS": cluster} if cluster else {})
        record = _write_record(
            job, text, number=number, folder=folder, site=site.name, client=client
        )
    except OSError as error:  # the job is submitted nevertheless
        print(
            f"daso: job {number} runs, but is not recorded in {folder}, so that daso status "
            f"and daso logs do not list it: {error.strerror}; squeue does",
            file=sys.stderr,
        )
        return 0
    where = "" if job.logs == LOGS else f" --logs {shlex.quote(str(job.logs))}"
    print(
        f"script: {record.script}\nfollow it: daso logs --follow{where} {number}{_first(job.array)}"
    )
    return 0


def _first(array: str) -> str:
    """Return the suffix that names the first job of an array, or nothing."""
    return f"_{re.findall(r'^[0-9]+', array)[0]}" if array else ""


def _job(flags: Mapping[str, Any], site: Site, program: tuple[str, ...]) -> Job:
    """Build a job from defaults, the site's values, and flags; list options are concatenated."""
    if not program:
        raise ConfigError(
            "a program must follow: `daso submit --nodes 2 train.py`, or -m module",
            code="no-program-to-submit",
        )
    values: dict[str, Any] = {"name": name_of(program), **site.defaults}
    for name in options():
        value = flags[name]
        if isinstance(value, list):
            values[name] = (*values.get(name, ()), *value)
        elif value is not None:
            values[name] = value
    values |= _totals(flags, values.get("nodes", 1))
    # Shells do not expand values after "=" or in a profile.
    values |= {name: expand_home(values[name]) for name in PATHS if name in values}
    _check_program(program, container=bool(values.get("container")))
    on_host = not values.get("python") and not values.get("container")
    if on_host:
        values["python"] = sys.executable
    return Job(
        **values,
        program=program,
        launcher=_launcher(values, flags["launcher"] or site.launcher, site.client),
        chdir=Path.cwd(),
        root=os.geteuid() == 0,
        site=site.name,
        mpirun=str(find_mpirun() or "mpirun") if on_host else "mpirun",
    )


def _totals(flags: Mapping[str, Any], nodes: int) -> dict[str, int]:
    """Return per-node values from flags that give totals."""
    values = dict[str, int]()
    for name, (words, noun) in TOTALS.items():
        total = flags[words[-1].removeprefix("--")]
        if total is None:
            continue
        each = total // max(1, nodes)
        if each < 1 or total != each * nodes:
            raise ConfigError(
                f"{words[-1]} must be a multiple of --nodes, but {total} {noun} do not go evenly "
                f"on {nodes} nodes; change one, or say how many each node has",
                code="total-not-divisible",
            )
        if flags[name] not in (None, each):
            raise ConfigError(
                f"{words[-1]} and {flag(name)} must agree, but {total} in all are {each} on "
                f"each node, not {flags[name]}; leave one out",
                code="totals-do-not-agree",
            )
        values[name] = each
    return values


def _check_program(program: Sequence[str], *, container: bool) -> None:
    word = program[0]
    if word == "-m" and len(program) == 1:
        raise ConfigError(
            "-m must be followed by a module, such as `-m daso train`", code="no-module-to-run"
        )
    if word != "-m" and not container and not Path(word).exists():
        raise ConfigError(
            f"the script must exist when it is submitted, but there is no {word} in "
            f"{Path.cwd()}; mend its path, or run a module with -m",
            code="script-to-submit-missing",
        )


def _launcher(values: Mapping[str, Any], kind: str, client: Mapping[str, str]) -> Launcher:
    """Choose the launcher by the MPI library and srun's plugins."""
    version_text = None if values.get("container") else library_of(values["python"])
    return choose(version_text, offered(client), kind)


def _nodes(site: Site, *, dry_run: bool) -> str:
    """Return sinfo's rows of partition, CPUs, number and GPUs of nodes; empty without them."""
    if not is_there("sinfo") or (dry_run and not has_settings(site.client)):
        return ""
    # Without --noconvert, 1536 nodes become 1.50K; without --exact, nodes of 32 and 64 CPUs 32+.
    words = ["sinfo", "--noconvert", "--exact", "-h", "-o", "%P|%c|%D|%G"]
    try:
        sinfo = ask(words, client=site.client)
    except NoAnswerError:
        if dry_run:
            return ""
        raise
    return _text(sinfo.stdout) if sinfo.returncode == 0 else ""


def _requested_cpus(job: Job, number: int | None) -> str | None:
    """Return the requested CPUs of each rank in words, or None without a request."""
    if any(CPUS.search(words) for words in job.extra):
        return "as --extra requests"
    return None if number is None else f"{number}, as requested"


def _with_cpus(job: Job, nodes: str) -> tuple[Job, str]:
    """Return the job with a share of a node's CPUs for each rank, and the share in words."""
    share = None if _is_elsewhere(job) else cpus_of_a_rank(job, nodes, routed=_is_routed(job))
    if share is None:
        return job, "1, because sinfo does not list the nodes; --cpus-per-task sets more"
    cpus, reason = share
    why = f"{cpus}, because {reason}; --cpus-per-task sets another number"
    return replace(job, cpus_per_task=cpus), why


def _is_elsewhere(job: Job) -> bool:
    """Return whether something besides --partition selects where a job runs."""
    is_placed = is_placed_by_sbatch(partition=bool(job.partition))
    return is_placed or any(ELSEWHERE.search(words) for words in job.extra)


def _is_routed(job: Job) -> bool:
    """Return whether a site may choose another partition than the default one."""
    if job.partition:
        return False
    routes = bool(job.gpus_per_node or job.qos or job.constraint or job.account)
    return routes or any(ROUTED.search(words) for words in job.extra)


def _check_size(job: Job, nodes: str) -> None:
    """Raise `ConfigError` for a job too large for its partition, which would wait forever.

    Without a named partition, it checks the default one, unless something else may route the job.
    `sbatch --test-only` would also refuse jobs that wait for a broken node.
    """
    problem = None if _is_elsewhere(job) or _is_routed(job) else too_big(job, nodes)
    if problem is not None:
        raise problem


def _folder(job: Job) -> Path:
    """Create the folder of logs: SLURM does not, and a job without it ends silently."""
    folder = job.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _open_records(folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"--logs must be a folder to write in, but {folder}: {error.strerror}; give another",
            code="logs-not-writable",
        ) from error
    return folder


def _open_records(folder: Path) -> TextIO:
    """Open the records of jobs for appending, private to this user: profiles may hold secrets."""

    def private(path: str, flags: int) -> int:
        return os.open(path, flags, mode=0o600)

    return open(folder / RECORDS, "a", encoding="utf-8", opener=private)


def _sbatch(job: Job, text: str, site: Site) -> tuple[str, str]:
    """Submit a job; return its id, and its cluster if sbatch names one."""
    option_names = re.findall(r"(?:^| )--([\w-]+)", "\n".join(job.directives()), re.MULTILINE)
    sbatch = ask(["sbatch", "--parsable"], client=site.client, text=text, options=option_names)
    if sbatch.returncode != 0:
        raise ConfigError(explain(_text(sbatch.stderr), job), code="sbatch-refused-job")
    print(_text(sbatch.stderr), end="", file=sys.stderr)  # for example, that a site moved it
    # A site's own sbatch may print more.
    ids = list(re.finditer(r"^(\d+)(?:;(\S+))?$", _text(sbatch.stdout), re.MULTILINE))
    if not ids:
        raise ConfigError(
            f"sbatch must name the job that it took, but said {_text(sbatch.stdout).strip()!r}; "
            f"`squeue --me` lists it",
            code="sbatch-named-no-job",
        )
    return ids[-1][1], ids[-1][2] or ""


def _write_record(
    job: Job, text: str, *, number: str, folder: Path, site: str, client: Mapping[str, str]
) -> Record:
    script = folder / f"{job.name}-{number}.sbatch"
    script.write_bytes(text.encode("utf-8", "surrogateescape"))
    record = Record(
        job=number,
        name=job.name,
        log=str(folder / f"{job.name}-{number}{'_%a' if job.array else ''}.out"),
        script=str(script),
        site=site,
        submitted=datetime.now(UTC).isoformat(timespec="seconds"),
        client=dict(client),
    )
    with _open_records(folder) as file:
        file.write(json.dumps(asdict(record)) + "\n")
    return record


def _text(output: bytes) -> str:
    return output.decode("utf-8", "replace")
