"""A SLURM cluster on one machine: hosts are namespaces, links have a rate, the daemons are real.

`scripts/minicluster` is the door. Standard library only, so that no virtual environment is needed.

How it is cleaned up, whenever `up` was killed: the record, with a random token, is written before
anything else is made. Every process that is started outside carries the token in its command line
and is process 1 of namespaces of its own; the one link outside is named after it. Killing those
processes ends all others, and the kernel takes links, mounts and namespaces away with the last.
"""

import argparse
import contextlib
import fcntl
import ipaddress
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn, TypeAlias

from daso.errors import ConfigError, DasoError
from daso.run.minicluster_text import CONTROL, MAX_HOSTS, Minicluster, parse_rate

__all__ = ["main"]

FOLDER = "/run/daso-minicluster"
RECORD = "record.json"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PACKAGES = {
    "slurm-wlm": ("slurmctld", "slurmd", "sinfo"),
    "munge": ("munged",),
    "iproute2": ("ip", "tc"),
    "util-linux": ("unshare", "nsenter"),
    "mount": ("mount",),
    "hostname": ("hostname",),
}
UP_SECONDS = 30
CALL_SECONDS = 20
REAP_SECONDS = 3


Popen: TypeAlias = "subprocess.Popen[str]"


class ClusterError(DasoError):
    """The cluster could not be started, or does not answer."""


# --- what runs ----------------------------------------------------------------------------------


def call(*words: str, text: str = "", conf: str | None = None) -> str:
    """Run a short program to its end and return what it prints.

    Args:
        words: The command.
        text: Its standard input.
        conf: The slurm.conf of a SLURM command.

    Raises:
        ClusterError: It failed.
    """
    env = {"PATH": PATH, "LC_ALL": "C", **({"SLURM_CONF": conf} if conf else {})}
    try:
        done = subprocess.run(
            words,
            env=env,
            input=text,
            capture_output=True,
            text=True,
            timeout=CALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{' '.join(words)} did not end in {CALL_SECONDS} s") from error
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(words)} failed: {' '.join(done.stderr.split())}")
    return done.stdout


def holders(token: str) -> dict[int, str]:
    """Find the processes that hold a cluster's namespaces.

    Args:
        token: The cluster's.

    Returns:
        Process ids; for each the name of its host if it is process 1 there, else "".
    """
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return {pid: name for pid in pids if (name := _held_by(pid, token)) is not None}


def _held_by(pid: int, token: str) -> str | None:
    """Return the host that a process holds, "" for its launcher; None for any other process."""
    path = Path("/proc", str(pid))
    try:
        words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        # Anybody can write a command line: only root's counts.
        if words[-1:] != [token] or path.stat().st_uid != 0:
            return None
    except OSError:  # it has just ended
        return None
    return Path(words[1]).parent.name if words[0] == "sh" else ""


def process_of(cluster: Minicluster, name: str) -> int:
    """Return the process id of a host.

    Raises:
        ConfigError: There is no such host.
        ClusterError: It is gone.
    """
    if name not in (*cluster.names, CONTROL):
        raise ConfigError(
            f"a host must be one of {cluster.names[0]} to {cluster.names[-1]}, not {name!r}"
        )
    for pid, host in holders(cluster.token).items():
        if host == name:
            return pid
    raise ClusterError(f"{name} must be running, but it is gone; run `down`, then `up`")


def inside(pid: int, *kinds: str) -> list[str]:
    """Return the command that what follows is run with to run inside a host."""
    return ["nsenter", f"--target={pid}", *(f"--{kind}" for kind in kinds), "--"]


def kill(token: str) -> None:
    """End every process of a cluster, and wait until they are gone."""
    deadline = time.monotonic() + CALL_SECONDS
    killed = set[int]()
    empty = 0
    while empty < 2:  # twice: a process may just have been started, and not carry the token yet
        pids = holders(token)
        killed |= set(pids)
        open_ = [descriptor for pid in pids if (descriptor := _kill(pid, token)) is not None]
        for descriptor in open_:
            select.select([descriptor], [], [], max(0, deadline - time.monotonic()))
            os.close(descriptor)
        empty = 0 if open_ else empty + 1
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the processes {sorted(holders(token))} must end when killed, but they are still "
                f"there; look at them, then run `down` again"
            )
        time.sleep(0.01)
    _reaped(killed)


def _reaped(pids: Iterable[int]) -> None:
    """Wait until the init of this machine has reaped what was killed, as far as it does."""
    deadline = time.monotonic() + REAP_SECONDS
    while any(Path("/proc", str(pid)).exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)


def _kill(pid: int, token: str) -> int | None:
    """Kill a process and return a descriptor that tells of its end; None if it is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    # The descriptor holds the process, its number may have gone to another: look again.
    if _held_by(pid, token) is None:
        os.close(descriptor)
        return None
    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    return descriptor


# --- the state folder ---------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other commands on the same cluster waiting.

    Raises:
        ClusterError: Another one is at work.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ClusterError(
            f"one command at a time may change the cluster in {folder}, and another is at work; "
            f"wait for it or end it"
        ) from error
    finally:
        os.close(descriptor)


def read_record(folder: Path) -> Minicluster | None:
    """Return the cluster whose state is in a folder; None if there is none.

    Raises:
        ConfigError: The folder holds something else.
    """
    try:
        found = json.loads((folder / RECORD).read_text())
        return Minicluster(**{**found, "share": tuple(found["share"])})
    except FileNotFoundError:
        pass
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{folder / RECORD} must be minicluster's own, but {error!r}; set DASO_MINICLUSTER to "
            f"another folder"
        ) from error
    if folder.exists() and {path.name for path in folder.iterdir()} - {f"{RECORD}.new"}:
        raise ConfigError(
            f"the state folder must be empty or minicluster's own, but {folder} holds other files; "
            f"set DASO_MINICLUSTER to another folder"
        )
    return None


def write_record(folder: Path, cluster: Minicluster) -> None:
    """Write the record, whole or not at all."""
    new = folder / f"{RECORD}.new"
    new.write_text(json.dumps(asdict(cluster)))
    new.replace(folder / RECORD)


def write_files(cluster: Minicluster) -> None:
    """Write the files of the state folder, and make the folders of the hosts."""
    folder = Path(cluster.folder)
    for name in (*cluster.names, CONTROL):
        (folder / name).mkdir()
        (folder / name / "spool").mkdir()
        (folder / name / "tmp").mkdir()
    for name, text in cluster.files().items():
        (folder / name).write_text(text)
    key = folder / CONTROL / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))


def running(folder: Path) -> Minicluster:
    """Return the cluster of a folder.

    Raises:
        ConfigError: None is up.
    """
    cluster = read_record(folder)
    if cluster is None:
        raise ConfigError(f"a cluster must be up in {folder}, but none is; run `up 4` first")
    return cluster


# --- up -----------------------------------------------------------------------------------------


def check_machine() -> None:
    """Look for what is needed.

    Raises:
        ClusterError: Something is missing.
    """
    if os.geteuid() != 0:
        raise ClusterError("minicluster must run as root, which may make namespaces; use sudo")
    missing = [
        (package, program)
        for package, programs in PACKAGES.items()
        for program in programs
        if shutil.which(program, path=PATH) is None
    ]
    if missing:
        packages = dict.fromkeys(package for package, _ in missing)
        raise ClusterError(
            f"{', '.join(program for _, program in missing)} must be installed; on Debian: apt "
            f"install {' '.join(packages)}"
        )


def free_subnet(folder: str) -> int:
    """Return a SUBNET such that no route of this machine leads to 10.77.SUBNET.x.

    Clusters with other folders look at other ones first: they may start at the same time.
    """
    taken = []
    for route in json.loads(call("ip", "-json", "-4", "route", "show", "table", "all")):
        with contextlib.suppress(ValueError):  # "default" is everywhere
            taken.append(ipaddress.ip_network(route["dst"], strict=False))
    start = zlib.crc32(folder.encode())
    for step in range(256):
        number = (start + step) % 256
        network = ipaddress.ip_network(f"10.77.{number}.0/24")
        if not any(network.overlaps(other) for other in taken if other.prefixlen):
            return number
    raise ClusterError("one of the networks 10.77.0.0/24 to 10.77.255.0/24 must be free; none is")


def memory_mebibytes() -> int:
    """Return this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20


def up(cluster: Minicluster) -> None:
    """Start a cluster and wait until every host is idle.

    Args:
        cluster: What to start; its subnet and memory are found here.

    Raises:
        ConfigError: One is up already.
        ClusterError: It could not be started; nothing is left of it.
    """
    folder = Path(cluster.folder)
    check_machine()
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    with locked(folder), interruptible():
        if read_record(folder) is not None:
            raise ConfigError(f"one cluster may be up in {folder}, and one is; run `down` first")
        try:
            subnet = free_subnet(cluster.folder)
            cluster = replace(cluster, subnet=subnet, memory=memory_mebibytes())
            write_record(folder, cluster)
            write_files(cluster)
            _start(cluster)
        except BaseException:
            take_down(cluster)
            raise


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let the signals that would end this program raise KeyboardInterrupt, as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {n: signal.signal(n, interrupt) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(cluster: Minicluster) -> None:
    started = dict[str, Popen]()
    try:
        for name in (CONTROL, *cluster.names):
            started[name] = _hold(cluster, name)
        _connect(cluster, {name: _pid(cluster, name, one) for name, one in started.items()})
        _go(cluster, started)
    except BaseException:
        for process in started.values():
            process.kill()
            process.wait()
        raise
    finally:
        for process in started.values():
            assert process.stdin and process.stdout
            process.stdin.close()
            process.stdout.close()


def _connect(cluster: Minicluster, pids: Mapping[str, int]) -> None:
    call("ip", "-batch", "-", text=cluster.outer_link(pids[CONTROL]))
    control = inside(pids[CONTROL], "net")
    call(*control, "ip", "-batch", "-", text=cluster.inner_links(pids))
    call(*control, "tc", "-batch", "-", text=cluster.port_shapes(cluster.rate))


def _go(cluster: Minicluster, started: Mapping[str, Popen]) -> None:
    """Let the daemons start, and wait until SLURM calls every host idle."""
    deadline = time.monotonic() + UP_SECONDS
    _tell(started[CONTROL])
    while not _listens(cluster.address(CONTROL)):
        _pause(cluster, started, deadline, CONTROL)
    for name in cluster.names:  # not earlier: a slurmd that meets nobody tries again a second later
        _tell(started[name])
    while waiting := [name for name, state in states(cluster).items() if state != "idle"]:
        _pause(cluster, started, deadline, waiting[0])


def _hold(cluster: Minicluster, name: str) -> Popen:
    """Start process 1 of a host; it waits for `_go` before it starts a daemon."""
    with Path(cluster.path(name, "log")).open("w") as log:
        return subprocess.Popen(
            cluster.holder(name),
            env={"PATH": PATH, "LC_ALL": "C"},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C is for `up`
        )


def _pid(cluster: Minicluster, name: str, process: Popen) -> int:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise ClusterError(
            f"{name} must get namespaces of its own, but: {_last_lines(cluster, name)}; "
            f"run it where root may make them (a container needs --privileged)"
        )
    return int(line)


def _tell(process: Popen) -> None:
    assert process.stdin
    process.stdin.write("go\n")
    process.stdin.flush()


def _listens(address: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, 6817), timeout=1):
        return True
    return False


def _pause(cluster: Minicluster, started: Mapping[str, Popen], deadline: float, late: str) -> None:
    """Wait a moment for a host.

    Raises:
        ClusterError: A host has ended, the daemon of this one has given up, or it is late.
    """
    time.sleep(0.05)
    for name, process in started.items():
        if process.poll() is not None:
            raise ClusterError(f"{name} must stay up, but it ended: {_last_lines(cluster, name)}")
    if time.monotonic() > deadline or "fatal:" in _log(cluster, late):
        raise ClusterError(
            f"every host must be idle within {UP_SECONDS} s, but {late} is not, and its log ends: "
            f"{_last_lines(cluster, late)}"
        )


def _log(cluster: Minicluster, name: str) -> str:
    """Return what the daemons of a host have said so far."""
    return Path(cluster.path(name, "log")).read_text(errors="replace")


def _last_lines(cluster: Minicluster, name: str) -> str:
    return " | ".join(_log(cluster, name).splitlines()[-5:]) or "nothing"


def states(cluster: Minicluster) -> dict[str, str]:
    """Return what SLURM says of every host: idle, mixed, down*, ..."""
    lines = call("sinfo", "-hNo", "%n %T", conf=cluster.path("slurm.conf")).splitlines()
    return {name: state for name, _, state in (line.partition(" ") for line in lines)}


# --- down ---------------------------------------------------------------------------------------


def take_down(cluster: Minicluster) -> None:
    """Remove everything that a cluster is made of."""
    kill(cluster.token)
    if Path("/sys/class/net", cluster.link).exists():
        # The kernel removes it with its other end, and may be at it.
        with contextlib.suppress(ClusterError):
            call("ip", "link", "delete", cluster.link)
    shutil.rmtree(cluster.folder)


# --- what a person types ------------------------------------------------------------------------


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
    options = _parser().parse_args(words)
    try:
        options.run(options, Path(folder or FOLDER).resolve())
    except ConfigError as error:
        return _say(error, 2)
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
    start.add_argument("--cpus", type=int, default=4, help="that each host declares (4)")
    start.add_argument(
        "--share",
        metavar="DIR",
        type=Path,
        action="append",
        default=[],
        help="a folder in /tmp that the hosts shall see; may be given several times",
    )
    change = add("rate", _rate, "change the rate of every link")
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
    parse_rate(options.rate)
    cluster = running(folder)
    with locked(folder):
        write_record(folder, replace(cluster, rate=options.rate))
        for name in cluster.names:
            shape = cluster.shape("eth0", options.rate).split()
            call(*inside(process_of(cluster, name), "net"), "tc", *shape)
        control = inside(process_of(cluster, CONTROL), "net")
        call(*control, "tc", "-batch", "-", text=cluster.port_shapes(options.rate))


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
        print(f"  {name:<7} {cluster.address(name):<14} {cables[name]:<5} {said.get(name, '?')}")
    print(f"use it: export SLURM_CONF={cluster.path('slurm.conf')}; srun hostname")


def _cables(cluster: Minicluster) -> Mapping[str, str]:
    """Return for every host whether its cable is ``in`` or ``cut``."""
    control = inside(process_of(cluster, CONTROL), "net")
    links = json.loads(call(*control, "ip", "-json", "link", "show"))
    return {link["ifname"]: "in" if "UP" in link["flags"] else "cut" for link in links}
