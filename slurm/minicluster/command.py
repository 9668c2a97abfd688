"""What a person types: `scripts/minicluster --help`."""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from daso.cli.outputs import exit_on_broken_pipe
from daso.errors import ConfigError, DasoError
from minicluster.processes import call, inside, process_of
from minicluster.start import set_rate, states, take_down, up
from minicluster.state import locked, read_record, running
from minicluster.text import CONTROL, MAX_HOSTS, Minicluster

__all__ = ["main"]

FOLDER = "/run/daso-minicluster"
DESCRIPTION = "A SLURM cluster on one machine: real daemons, hosts and links that are namespaces."
EPILOG = f"""\
examples:
  scripts/minicluster up 4 --rate 1gbit       four hosts, mini0 to mini3, and their links
  eval "$(scripts/minicluster env)"           from here on sbatch, srun, squeue talk to it
  srun --nodes=4 hostname
  scripts/minicluster rate 100mbit            at once, also under running jobs
  scripts/minicluster cut mini3               pull its cable; `mend mini3` puts it back
  scripts/minicluster exec mini0 ip address   run a program on a host
  scripts/minicluster down                    nothing is left

Each host has its own /tmp and /dev/shm; everything else on disk is this machine's. So programs,
virtual environments and the folder that you submit from must not lie in /tmp, or be named when
starting: `up 4 --share /tmp/project`.

State lies in {FOLDER}; DASO_MINICLUSTER names another folder, for another cluster.
Needs root and the Debian packages slurm-wlm, munge and iproute2 (libpmix-dev for srun --mpi=pmix).
"""


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the words."""

    def error(self, message: str) -> NoReturn:
        """End the program."""
        self.exit(2, f"minicluster: {message}; `{self.prog} --help` shows how\n")


def main(words: Sequence[str], *, folder: str | None) -> int:
    """Run the command line.

    Args:
        words: Arguments.
        folder: The state folder; the default one if None.

    Returns:
        Exit code: 0 done, 1 it failed, 2 wrong use.
    """
    return exit_on_broken_pipe(lambda: _carry_out(words, folder))


def _carry_out(words: Sequence[str], folder: str | None) -> int:
    options = _parser().parse_args(words)
    try:
        options.run(options, Path(folder or FOLDER).resolve())
    except ConfigError as error:
        return _say(error, 2)
    except BrokenPipeError:  # no fault of ours: see `exit_on_broken_pipe`
        raise
    except (DasoError, OSError) as error:
        return _say(error, 1)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    return 0


def _say(what: object, code: int) -> int:
    print(f"minicluster: {what}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="minicluster",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: object, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(run=run)
        return command

    start = add("up", _up, "start a cluster")
    start.add_argument("hosts", metavar="N", type=int, help=f"hosts, 1 to {MAX_HOSTS}")
    start.add_argument(
        "--rate", default="none", help="of every link: 1gbit, 100mbit; none (default)"
    )
    start.add_argument("--racks", type=int, default=1, help="with a bridge of their own each (1)")
    start.add_argument("--uplink", default="none", help="rate of each rack's link to the others")
    start.add_argument("--cpus", type=int, default=4, help="that each host declares (4)")
    start.add_argument(
        "--share",
        metavar="DIR",
        type=Path,
        action="append",
        default=[],
        help="a folder in /tmp that the hosts shall see; may be given several times",
    )
    change = add("rate", _rate, "change the rate of every link, or of some hosts'")
    change.add_argument("hosts", metavar="HOST", nargs="*", help="whose; all without it")
    change.add_argument("rate", metavar="R", help="10mbit, 2.5gbit, ...; none")
    add("status", _status, "show hosts, addresses, links and states")
    for name, text in (("cut", "pull a host's cable"), ("mend", "put it back")):
        add(name, _cable, text).add_argument("host", metavar="HOST")
        commands.choices[name].set_defaults(cable="down" if name == "cut" else "up")
    execute = add("exec", _exec, "run a program on a host")
    execute.add_argument("host", metavar="HOST")
    execute.add_argument("command", metavar="COMMAND", nargs=argparse.REMAINDER)
    add("env", _env, "print what makes a shell's SLURM commands talk to it")
    add("down", _down, "end it, and leave nothing")
    return parser


def _up(options: argparse.Namespace, folder: Path) -> None:
    began = time.monotonic()
    cluster = Minicluster(
        folder=str(folder),
        token=secrets.token_hex(8),
        hosts=options.hosts,
        cpus=options.cpus,
        rate=options.rate,
        racks=options.racks,
        uplink=options.uplink,
        share=tuple(str(share.resolve(strict=True)) for share in options.share),
    )
    up(cluster)
    print(f"{options.hosts} hosts are idle after {time.monotonic() - began:.1f} s")
    _status(options, folder)


def _down(_: argparse.Namespace, folder: Path) -> None:
    cluster = read_record(folder)
    if cluster is None:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)  # what a killed `up` made before the record
        print(f"no cluster is up in {folder}")
        return
    with locked(folder):
        take_down(cluster)


def _rate(options: argparse.Namespace, folder: Path) -> None:
    set_rate(folder, options.rate, options.hosts)


def _cable(options: argparse.Namespace, folder: Path) -> None:
    cluster = running(folder)
    process_of(cluster, options.host)
    with locked(folder):
        control = inside(process_of(cluster, CONTROL), "net")
        call(*control, "ip", "link", "set", options.host, options.cable)
        if options.cable == "up":
            _report_for_duty(cluster, options.host)


def _report_for_duty(cluster: Minicluster, name: str) -> None:
    """Let slurmd register: slurmctld by itself asks a host that is down every few minutes only."""
    with contextlib.suppress(FileNotFoundError):
        pid = Path(cluster.path(name, "slurmd.pid")).read_text().strip()
        call(*inside(process_of(cluster, name), "pid"), "sh", "-c", f"kill -HUP {int(pid)}")


def _exec(options: argparse.Namespace, folder: Path) -> None:
    cluster = running(folder)
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not words:
        raise ConfigError("a command must follow the host; write `exec mini0 ip address`")
    enter = inside(process_of(cluster, options.host), "net", "uts", "mount", "ipc", "pid")
    # Entering another mount namespace leaves one in /: go back, if the folder is there too.
    shell = 'cd -- "$1" 2>/dev/null || :; shift; exec "$@"'
    conf = f"SLURM_CONF={cluster.path('slurm.conf')}"
    words = [*enter, "env", conf, "sh", "-c", shell, "sh", str(Path.cwd()), *words]
    os.execvp(words[0], words)


def _env(_: argparse.Namespace, folder: Path) -> None:
    print(f"export SLURM_CONF={running(folder).path('slurm.conf')}")


def _status(_: argparse.Namespace, folder: Path) -> None:
    cluster = read_record(folder)
    if cluster is None:
        print(f"no cluster is up in {folder}; `up 4` starts one")
        return
    cables = _cables(cluster)
    said = states(cluster)
    print(f"{cluster.hosts} hosts of {cluster.cpus} CPUs, links at {cluster.rate}, in {folder}")
    for name in cluster.names:
        link = cluster.rates.get(name, "") + ("" if cluster.racks == 1 else cluster.bridge(name))
        what = f"{cables[name]:<5} {said.get(name, '?'):<6} {link}".rstrip()
        print(f"  {name:<7} {cluster.address(name):<14} {what}")
    print(f"use it: export SLURM_CONF={cluster.path('slurm.conf')}; srun hostname")


def _cables(cluster: Minicluster) -> Mapping[str, str]:
    """Return for every host whether its cable is ``in`` or ``cut``."""
    control = inside(process_of(cluster, CONTROL), "net")
    links = json.loads(call(*control, "ip", "-json", "link", "show"))
    return {link["ifname"]: "in" if "UP" in link["flags"] else "cut" for link in links}
