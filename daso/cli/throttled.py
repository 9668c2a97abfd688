"""`daso predict --throttle` and `--sweep-link`: start a program on this machine slowed down."""

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from daso.cli.launch import shell_code, signals_to
from daso.cli.main import VALUE_OPTIONS
from daso.errors import ConfigError
from daso.predict.copy_sweep import LEAST_FACTORS, LinkSweep
from daso.predict.run_throttled import RESULT
from daso.predict.throttle_plan import read_throttle_file
from daso.processes import end_with_parent

RUNNER = "daso.predict.run_throttled"
PYTHON = re.compile(r"python[\d.]*")
PROGRAM = re.compile(r"-([bBdEhiIOPqRsSuvVx?]*)([cm])")  # flags; the next word is the program
LINKS = "link_bytes_per_second", "latency_seconds", "copy_bytes_per_second"
VALUED = {"-W", "-X", "--check-hash-based-pycs"}  # options of Python with a separate value


def run_throttled(path: Path, program: Sequence[str]) -> int:
    """Run a program throttled by a plan file; return its exit code."""
    read_throttle_file(path)  # raises before anything starts
    return _start(with_runner(program, str(path.resolve())))


def _start(command: Sequence[str]) -> int:
    """Run a command to its end; return its exit code."""
    sys.stdout.flush()
    try:
        process = subprocess.Popen(command, preexec_fn=end_with_parent)  # noqa: PLW1509 - no threads
    except OSError as error:
        raise ConfigError(
            f"the program must start, but {command[0]!r} does not: {error.strerror}; mend its name",
            code="program-does-not-start",
        ) from error
    with signals_to(process):  # the program gets Ctrl-C from the terminal, and may save
        return shell_code(process.wait())


def sweep_links(factors: Sequence[float], program: Sequence[str]) -> int:
    """Run a program over links that are slower by each factor; print its steps and estimates.

    The first run has the links as they are, and measures them.
    """
    if len(set(factors)) < LEAST_FACTORS or not all(1 < factor < math.inf for factor in factors):
        raise ConfigError(
            f"--sweep-link must be at least {LEAST_FACTORS} different factors above 1, by commas, "
            f"not {','.join(f'{factor:g}' for factor in factors) or 'nothing'!r}; write 1.5,2,3,4",
            code="too-few-factors",
        )
    seconds, plan = [], "[current]\nmeasure = true\n[target]\n"
    # All ranks read the plan: the current folder is shared between hosts.
    with tempfile.TemporaryDirectory(prefix=".daso-sweep-", dir=Path.cwd()) as folder:
        file, result = Path(folder, "plan.toml"), Path(folder, "result.json")
        for factor in (1.0, *factors):
            file.write_text(plan.format(factor=factor), encoding="utf-8")
            code = _start(with_runner(program, RESULT, str(result), str(file)))
            if code:
                return code
            values = json.loads(result.read_text(encoding="utf-8"))
            if "seconds" not in values:
                raise ConfigError(
                    f"a sweep needs the times of 24 steps, but an optimizer took "
                    f"{values['count']}; take more",
                    code="too-few-timed-steps",
                )
            seconds.append(values["seconds"])
            if factor == 1.0:
                plan = _links_of(values["current"])
    print(sweep_table(LinkSweep.fit((1.0, *factors), seconds)))
    return 0


def _links_of(current: Mapping[str, float | None]) -> str:
    """Return the plan of computing that is faster over the measured links."""
    rates = {name: current[name] for name in LINKS if current[name]}
    if not {*rates} - {"latency_seconds"}:
        raise ConfigError(
            "a sweep needs a link between nodes or to a device, but this program has neither; "
            "start 2 ranks or more with --ranks-per-node 1",
            code="nothing-to-sweep",
        )
    lines = "\n".join(f"{name} = {rate!r}" for name, rate in rates.items())
    return f'[current]\ncompute = 1.0\n{lines}\n[target]\ncompute = "{{factor}}x"\n'


def sweep_table(sweep: LinkSweep) -> str:
    """Return the steps here, and those on targets that compute faster over the same links."""
    lines = [
        "emulated, not measured on the target: links are slowed down, and times divided",
        f"{'computing':>10}{'ms/step, links slower':>23}{'ms/step there':>15}{'fitted':>10}",
    ]
    for factor, seconds in zip(sweep.factors, sweep.seconds, strict=True):
        lines.append(
            f"{factor:>9g}x{1e3 * seconds:>23.3f}{1e3 * seconds / factor:>15.3f}"
            f"{1e3 * sweep.estimate(factor):>10.3f}"
        )
    bound = sweep.slope * max(sweep.factors) + sweep.base > sweep.floor
    floor = f"at least {1e3 * sweep.slope:.3f} ms a step there, the time of the links"
    return "\n".join([*lines, floor if bound else "the links are hidden behind computing"])


def with_runner(words: Sequence[str], *plan: str) -> list[str]:
    """Return a command with the runner inserted before the program of Python or ``daso run``."""
    at = _place(words)
    if words[at].startswith("-m") and words[at] != "-m":  # Python accepts this form too
        words = [*words[:at], "-m", words[at][2:], *words[at + 1 :]]
    return [*words[:at], "-m", RUNNER, *plan, *words[at:]]


def _place(words: Sequence[str]) -> int:
    """Return the index of the first word of the program."""
    for at, word in enumerate(words):
        name = Path(word).name
        if name == "daso" and list(words[at + 1 : at + 2]) == ["run"]:
            return _behind_options(words, at + 2, {*VALUE_OPTIONS})
        if PYTHON.fullmatch(name):
            begin = _behind_options(words, at + 1, VALUED)
            if list(words[begin : begin + 3]) == ["-m", "daso", "run"]:
                return _behind_options(words, begin + 3, {*VALUE_OPTIONS})
            return begin
    raise ConfigError(
        f"a program must follow that Python or `daso run` starts, as in `daso predict --throttle "
        f"plan.toml -- python train.py`, not {' '.join(words) or 'nothing'!r}; write it so",
        code="program-not-python",
    )


def _behind_options(words: Sequence[str], at: int, valued: set[str]) -> int:
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        program = PROGRAM.match(words[at])
        if program and program[2] == "c":
            raise ConfigError(
                "a throttled program must be a file or a module (-m), not words after -c; write "
                "them to a file",
                code="throttled-code-words",
            )
        if program and program[1]:
            raise ConfigError(
                f"-m must be a separate option in a throttled program, not part of "
                f"{words[at]!r}; write -{program[1]} -m",
                code="module-option-not-separate",
            )
        if program:
            break
        at += 2 if words[at] in valued else 1
    at += list(words[at : at + 1]) == ["--"]
    if at >= len(words):
        raise ConfigError(
            f"a program must follow the options, but {' '.join(words)!r} ends with them; add it",
            code="no-program-after-options",
        )
    return at
