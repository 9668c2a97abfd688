"""Start a cluster, and take it down."""

import contextlib
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from daso.errors import ConfigError
from daso.predict.links import parse_rate
from minicluster.processes import (
    PATH,
    ClusterError,
    call,
    check_root,
    inside,
    kill,
    process_of,
)
from minicluster.state import (
    locked,
    read_record,
    remove,
    running,
    write_files,
    write_record,
)
from minicluster.text import CONTROL, Minicluster

__all__ = ["interruptible", "set_rate", "states", "take_down", "up"]

PACKAGES = {
    "slurm-wlm": ("slurmctld", "slurmd", "sinfo"),
    "munge": ("munged",),
    "iproute2": ("ip", "tc"),
    "util-linux": ("unshare", "nsenter"),
    "mount": ("mount",),
    "hostname": ("hostname",),
}
UP_SECONDS = 30

Popen: TypeAlias = "subprocess.Popen[str]"


def check_machine() -> None:
    """Look for what is needed.

    Raises:
        ClusterError: Something is missing.
    """
    check_root()
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
    call(*control, "tc", "-batch", "-", text=cluster.port_shapes())


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


def set_rate(folder: Path, rate: str, hosts: Sequence[str] = ()) -> None:
    """Change the rate of links of a running cluster, at once.

    Args:
        folder: Its state folder.
        rate: Such as ``"100mbit"``, or ``"none"``.
        hosts: Whose links; without any all, and none has a rate of its own any more.

    Raises:
        ConfigError: It is no rate, there is no such host, or no cluster is up there.
    """
    parse_rate(rate)
    cluster = running(folder)
    own = {**cluster.rates, **dict.fromkeys(hosts, rate)}
    cluster = replace(cluster, rates=own) if hosts else replace(cluster, rate=rate, rates={})
    with locked(folder):
        write_record(folder, cluster)
        for name in hosts or cluster.names:
            shape = cluster.shape("eth0", rate).split()
            call(*inside(process_of(cluster, name), "net"), "tc", *shape)
        control = inside(process_of(cluster, CONTROL), "net")
        call(*control, "tc", "-batch", "-", text=cluster.port_shapes())


def states(cluster: Minicluster) -> dict[str, str]:
    """Return what SLURM says of every host: idle, mixed, down*, ..."""
    lines = call("sinfo", "-hNo", "%n %T", conf=cluster.path("slurm.conf")).splitlines()
    return {name: state for name, _, state in (line.partition(" ") for line in lines)}


def take_down(cluster: Minicluster) -> None:
    """Remove everything that a cluster is made of."""
    kill(cluster.token)
    if Path("/sys/class/net", cluster.link).exists():
        # The kernel removes it with its other end, and may be at it.
        with contextlib.suppress(ClusterError):
            call("ip", "link", "delete", cluster.link)
    remove(Path(cluster.folder))
