"""A SLURM job as a record, and its batch script.

The fields of `Job` with a help text are the options: flags of ``daso submit``, keys of a site
profile, checks and defaults all come from them.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from daso.errors import ConfigError
from daso.slurm.launcher import Launcher
from daso.slurm.rank_entry import REQUEUE
from daso.version import __version__

LOGS = "runs/slurm"
MOST_NAME = 200  # letters: names of log files contain it and the job's number


def _option(default: Any, text: str, metavar: str = "TEXT") -> Any:
    return field(default=default, metadata={"help": text, "metavar": metavar})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A SLURM job.

    Args:
        program: Program of each rank: a script or ``-m module``, then its arguments.
        launcher: Program that starts the ranks.
        chdir: The folder to run in; absolute.
        root: Whether root submits.
        site: Name of the site profile, for a comment; empty for none.
        mpirun: Path of mpirun, if it is the launcher.
    """

    program: tuple[str, ...]
    launcher: Launcher
    chdir: Path
    root: bool = False
    site: str = ""
    mpirun: str = "mpirun"

    name: str = _option("daso", "name of the job; default: that of the program")
    nodes: int = _option(1, "number of nodes", "N")
    tasks_per_node: int = _option(1, "ranks on each node", "N")
    cpus_per_task: int = _option(
        1, "CPUs, and threads, of each rank; default: those of a node, shared by its ranks", "N"
    )
    gpus_per_node: int = _option(0, "GPUs of each node", "N")
    gpu_bind: str = _option("none", "which GPUs a rank sees: none (all of its node), closest, ...")
    gpu_request: str = _option("gpus-per-node", "how GPUs are asked for: gpus-per-node or gres")
    mem: str = _option("", "memory of each node, such as 64G", "SIZE")
    time: str = _option("", "time limit: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S", "TIME")
    partition: str = _option("", "partition")
    account: str = _option("", "account to charge")
    qos: str = _option("", "quality of service")
    constraint: str = _option("", "features that nodes must have")
    network: str = _option("", "network option of the site")
    exclusive: bool = _option(False, "share nodes with no other job")
    array: str = _option("", "run several times, such as 0-9%%2", "LIST")
    dependency: str = _option("", "wait for other jobs, such as afterany:123")
    signal_seconds: int = _option(120, "send SIGUSR1 so long before the time limit", "S")
    max_restarts: int = _option(100, f"requeue at most so often after exit code {REQUEUE}", "N")
    restart_on_failure: int = _option(0, "requeue a job that fails, at most so often", "N")
    logs: str = _option(LOGS, "folder of logs and scripts", "FOLDER")
    python: str = _option("", "Python of the ranks; default: the one that submits", "PATH")
    container: str = _option("", "run in this image", "IMAGE")
    container_command: str = _option("apptainer exec", "how a container is started")
    container_gpu: str = _option("--nv", "the option that lets a container see GPUs")
    module: tuple[str, ...] = _option((), "load a module; may be repeated", "NAME")
    setup: tuple[str, ...] = _option((), "a line of shell to run first; may be repeated", "LINE")
    environment: tuple[str, ...] = _option((), "set a variable; may be repeated", "NAME=VALUE")
    srun: tuple[str, ...] = _option((), "one more option of srun; may be repeated", "WORD")
    extra: tuple[str, ...] = _option((), "one more #SBATCH line; may be repeated", "WORDS")
    login_shell: bool = _option(False, "run the script in a login shell")

    def __post_init__(self) -> None:
        if not self.program:
            raise ConfigError(
                "a program must follow: `daso submit train.py`, or -m module",
                code="no-program-to-submit",
            )
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(
                    f"{flag(name)} must be at least {least}, not {getattr(self, name)}",
                    code="job-number-too-small",
                )
        if self.signal_seconds > 65535:  # sbatch's limit
            raise ConfigError(
                f"--signal-seconds must be at most 65535, not {self.signal_seconds}; take less",
                code="signal-time-too-long",
            )
        for name, (pattern, rule) in FORMS.items():
            value = getattr(self, name)
            if value and not re.fullmatch(pattern, value, re.ASCII):
                raise ConfigError(
                    f"{flag(name)} must be {rule}, not {value!r}", code="job-value-invalid"
                )
        self._check_container()
        self._check_lines()
        self._check_time()

    def _check_container(self) -> None:
        for name in ("container_command", "container_gpu"):
            try:
                shlex.split(getattr(self, name))
            except ValueError as error:
                raise ConfigError(
                    f"{flag(name)} must be words of a shell, not {getattr(self, name)!r}: {error}; "
                    f"quote it for a shell",
                    code="job-words-invalid",
                ) from error

    def _check_time(self) -> None:
        if 0 < _seconds(self.time) <= self.signal_seconds:
            raise ConfigError(
                f"--time must be longer than --signal-seconds, {self.signal_seconds} s, not "
                f"{self.time!r}, or the job is asked to save and end as soon as it begins; give "
                f"more --time, or less --signal-seconds",
                code="time-below-signal-time",
            )

    def _check_lines(self) -> None:
        if any("\0" in word for word in self.program):
            raise ConfigError(
                "a program's words must be text without zero bytes; leave them out",
                code="word-with-zero-byte",
            )
        names = f"{self.chdir}{self.logs}{self.python}{self.container}{self.mpirun}{self.site}"
        if re.search(r"[\x00-\x1f\x7f\x85\u2028\u2029]", names):
            raise ConfigError(
                "names of files and folders must be single lines; rename them",
                code="name-of-several-lines",
            )
        if "\\" in f"{self.chdir}{self.logs}":  # sbatch removes one, even in quotes
            raise ConfigError(
                f"the folders that a job runs and logs in must have no backslash in their names, "
                f"but {self.chdir} and {self.logs} do; rename them",
                code="folder-with-backslash",
            )
        for name in ("module", "setup", "environment", "srun", "extra"):
            pattern, rule = LINE_FORMS[name]
            for line in getattr(self, name):
                if not re.fullmatch(pattern, line, re.ASCII):
                    raise ConfigError(
                        f"{flag(name)} must be {rule}, not {line!r}", code="job-line-invalid"
                    )

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.nodes * self.tasks_per_node

    @property
    def size(self) -> str:
        """Return the size in words: ``4 nodes x 1 rank``."""
        return f"{_count(self.nodes, 'node')} x {_count(self.tasks_per_node, 'rank')}"

    @property
    def folder(self) -> Path:
        """Return the folder of logs; absolute."""
        return self.chdir / self.logs

    @property
    def log_pattern(self) -> str:
        """Return the log file in sbatch's notation."""
        folder = str(self.folder).replace("%", "%%")
        return f"{folder}/%x-{'%A_%a' if self.array else '%j'}.out"

    def directives(self) -> list[str]:
        """Return the options of the ``#SBATCH`` lines."""
        # B: signals the batch script; otherwise SLURM signals every step and so every rank.
        prefix = "B:" if self.launcher.by_mpirun else ""
        lines = {
            "job-name": self.name,
            "nodes": self.nodes,
            "ntasks-per-node": self.tasks_per_node,
            "cpus-per-task": self.cpus_per_task,
            **self._gpus(),
            "mem": self.mem,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "network": self.network,
            "array": self.array,
            "dependency": self.dependency,
            "chdir": shlex.quote(str(self.chdir)),
            "output": shlex.quote(self.log_pattern),
            "open-mode": "append",
            "signal": f"{prefix}USR1@{self.signal_seconds}",
        }
        words = [f"--{name}={value}" for name, value in lines.items() if value not in ("", 0)]
        flags = ["--requeue", *(["--exclusive"] if self.exclusive else [])]
        return [*words, *flags, *self.extra]

    def _gpus(self) -> dict[str, str]:
        if not self.gpus_per_node:
            return {}
        count = str(self.gpus_per_node)
        request = (
            {"gres": f"gpu:{count}"} if self.gpu_request == "gres" else {"gpus-per-node": count}
        )
        return {**request, "gpu-bind": self.gpu_bind}

    def variables(self) -> list[str]:
        """Return the exported variables as words of a shell; the site's and user's come last."""
        ours = self.launcher.environment(root=self.root)
        if self.launcher.by_mpirun and (masks := self._cpu_masks()):
            ours |= {"DASO_CPU_MASKS": masks}
        pairs = [*ours.items(), *(line.split("=", 1) for line in self.environment)]
        return [f"{name}={quote(value)}" for name, value in pairs]

    def _cpu_masks(self) -> str:
        """Return the masks that srun would bind ranks to, in hexadecimal, by commas."""
        masks = [word.removeprefix(MASKS) for word in self.srun if word.startswith(MASKS)]
        return masks[-1] if masks else ""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return options of srun without effect, because mpirun starts the ranks."""
        if not self.launcher.by_mpirun:
            return ()
        return tuple(word for word in self.srun if not word.startswith((MASKS, UNBOUND)))

    def command(self) -> list[str]:
        """Return the words that start the ranks.

        Python runs the program through mpi4py, so that an exception on one rank ends all, and
        through daso, which records an exit code that srun would lose.
        """
        launch = self.launcher.words(self.mpirun)
        launch += ["-n", str(self.ranks)] if self.launcher.by_mpirun else self.srun
        inside = []
        if self.container:
            gpu = shlex.split(self.container_gpu) if self.gpus_per_node else []
            inside = [*shlex.split(self.container_command), *gpu, self.container]
        python = [self.python or "python3", "-m", "mpi4py", "-m", "daso.slurm.rank_entry"]
        return [*launch, *inside, *python, *self.program]


MASKS, UNBOUND = "--cpu-bind=mask_cpu:", "--cpu-bind=none"
LEAST = {
    "nodes": 1,
    "tasks_per_node": 1,
    "cpus_per_task": 1,
    "gpus_per_node": 0,
    "signal_seconds": 0,
    "max_restarts": 0,
    "restart_on_failure": 0,
}
# Values without quoting in sbatch: a blank, quote or # would end them.
WORD = (r"[^\s'\"\\#]+", "one word without blanks, quotes, # and backslashes")
FORMS = {
    "name": (r"[\w.+-]{1,200}", "up to 200 letters, digits and . + - _ (file names have it)"),
    "time": (
        r"\d+|\d+:[0-5]?\d|\d+:[0-5]?\d:[0-5]?\d|\d+-\d+(:[0-5]?\d){0,2}",
        "M, M:S, H:M:S, D-H, D-H:M or D-H:M:S, such as 0:30:00 for half an hour",
    ),
    "mem": (r"\d+[KMGTkmgt]?", "a number with K, M, G or T, such as 64G"),
    "array": (
        r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%[1-9]\d*)?",
        "numbers and ranges, such as 0-9, 1,3,5 or 0-9%2 for two at a time",
    ),
    "dependency": (
        r"(singleton|\w+:\d\w*([:+]\d\w*)*)([,?](singleton|\w+:\d\w*([:+]\d\w*)*))*",
        "such as afterany:123, afterok:123:124 or singleton",
    ),
    "gpu_request": (r"gpus-per-node|gres", "gpus-per-node or gres"),
    "gpu_bind": WORD,
    "partition": WORD,
    "account": WORD,
    "qos": WORD,
    "constraint": WORD,
    "network": WORD,
}
LINE_FORMS = {
    "module": (r"[^\s;&|`$()<>'\"\\]+", "the name of one module, such as GCC/12"),
    "setup": (r"[^\n\r\0]+", "one line of shell"),
    "environment": (r"[A-Za-z_]\w*=[^\n\r\0]*", "NAME=VALUE"),
    "srun": (r"-[^\n\r\0]+", "an option of srun, such as --srun=--cpu-bind=cores"),
    "extra": (r"-[^\n\r\0]+", "options of sbatch, such as --extra=--reservation=NAME"),
}


def options() -> dict[str, Any]:
    """Return the fields of `Job` that a user may set, by name."""
    return {option.name: option for option in fields(Job) if "help" in option.metadata}


def flag(name: str) -> str:
    """Return a field's name as a flag."""
    return f"--{name.replace('_', '-')}"


def _seconds(time: str) -> int:
    """Return the seconds of a time limit as sbatch reads it; 0 for none."""
    days, _, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":") if part]
    # H, H:M, H:M:S behind days; else M, M:S, H:M:S.
    units = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
    rest = sum(part * unit for part, unit in zip(parts, units, strict=False))
    return int(days or 0) * 86400 + rest


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def quote(word: str) -> str:
    """Return a word quoted for bash."""
    if not re.search(r"[\x01-\x1f\x7f]", word):
        return shlex.quote(word)
    known = word.replace("\\", r"\\").replace("'", r"\'")
    spelled = re.sub(r"[\x01-\x1f\x7f]", lambda match: f"\\{ord(match[0]):03o}", known)
    return f"$'{spelled}'"


def name_of(program: Sequence[str]) -> str:
    """Return a job name derived from its program."""
    word = program[1] if program[:1] == ("-m",) and len(program) > 1 else Path(program[0]).stem
    return re.sub(r"[^\w.+-]", "-", word, flags=re.ASCII)[:MOST_NAME] or "daso"


def _keys(job: Job) -> dict[str, Any]:
    """Return the variables of templates."""
    values = {name: getattr(job, name) for name in options()}
    return values | {
        "command": " ".join(map(quote, job.command())),
        "directives": job.directives(),
        "folder": quote(str(job.folder)),
        "launcher": str(job.launcher),
        "by_mpirun": job.launcher.by_mpirun,
        "ranks": job.ranks,
        "requeue": REQUEUE,
        "site": job.site,
        "size": job.size,
        "variables": job.variables(),
        "version": __version__,
        "why": job.launcher.why,
    }


def render(job: Job, template: str, *, name: str) -> str:
    """Return the batch script of a job from a template."""
    from jinja2 import Environment, StrictUndefined, meta

    engine = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    keys = _keys(job)
    try:
        unknown = sorted(meta.find_undeclared_variables(engine.parse(template)) - keys.keys())
        if not unknown:
            return engine.from_string(template).render(keys)
    except Exception as error:  # a template is a program and may raise anything
        where = f", line {error.lineno}" if hasattr(error, "lineno") else ""
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"a template must be Jinja text, but {name}{where}: {reason}; mend it",
            code="template-not-jinja",
        ) from error
    raise ConfigError(
        f"a template may use only known keys, but {name} uses {', '.join(unknown)}; the "
        f"keys are {', '.join(sorted(keys))}",
        code="template-key-unknown",
    )
