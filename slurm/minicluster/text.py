"""What a cluster on one machine is made of, as text: addresses, slurm.conf, scripts. All pure."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from daso.errors import ConfigError
from daso.predict.links import discipline, parse_rate

__all__ = ["CONTROL", "MAX_HOSTS", "Minicluster"]

MAX_HOSTS = 60
CONTROL = "minictl"  # the host of slurmctld, munged and the bridge
# Unix sockets end at 108 bytes, and munge adds to the name of its own.
MAX_FOLDER = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Minicluster:
    """A cluster: hosts on a bridge, and the host that controls them.

    Args:
        folder: Where its state lies: an absolute path that the hosts see too.
        token: Tells its processes and its link from all others; 16 hexadecimal digits.
        hosts: How many.
        cpus: What each host declares to SLURM.
        rate: Of every host's link, in both directions: ``1gbit``, ``none``.
        rates: Of links of single hosts that have another, by name.
        racks: Groups of hosts with a bridge of their own; hosts fill them one after the other.
        uplink: Rate of each rack's link to the others, in both directions.
        subnet: Third number of its addresses, 10.77.SUBNET.x.
        memory: Mebibytes that each host declares.
        share: Folders in /tmp that the hosts see nevertheless.
    """

    folder: str
    token: str
    hosts: int
    cpus: int = 4
    rate: str = "none"
    subnet: int = 0
    memory: int = 1024
    share: tuple[str, ...] = ()
    rates: Mapping[str, str] = field(default_factory=dict)
    racks: int = 1
    uplink: str = "none"

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MAX_HOSTS:
            raise ConfigError(
                f"the number of hosts must be from 1 to {MAX_HOSTS}, not {self.hosts}; "
                f"write `up 4` for four"
            )
        if not 1 <= self.cpus <= 1024:
            raise ConfigError(
                f"the CPUs of a host must be from 1 to 1024, not {self.cpus}; --cpus 4 is usual"
            )
        if not 1 <= self.racks <= self.hosts:
            raise ConfigError(
                f"the number of racks must be from 1 to that of hosts ({self.hosts}), not "
                f"{self.racks}; --racks 2 is usual"
            )
        for rate in (self.rate, self.uplink, *self.rates.values()):
            parse_rate(rate)
        for name in self.rates:
            if name not in self.names:
                raise ConfigError(f"a host must be one of {', '.join(self.names)}, not {name!r}")
        _check_folder(self.folder)
        for folder in self.share:
            _check_name("a folder to share", folder, "move it")

    # --- names and addresses ------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the hosts."""
        return tuple(f"mini{host}" for host in range(self.hosts))

    @property
    def network(self) -> str:
        """The addresses of the bridge, as a network."""
        return f"10.77.{self.subnet}.0/24"

    @property
    def link(self) -> str:
        """The one link that is seen from outside; 15 characters at most."""
        return f"mini-{self.token[:8]}"

    @property
    def outside(self) -> str:
        """The address of whoever is outside, on that link."""
        return f"10.77.{self.subnet}.253"

    def address(self, name: str) -> str:
        """Return the address of a host, or of the one in control."""
        number = 254 if name == CONTROL else self.names.index(name) + 1
        return f"10.77.{self.subnet}.{number}"

    def path(self, *parts: str) -> str:
        """Return a path in the state folder."""
        return str(PurePosixPath(self.folder, *parts))

    # --- what lies in the state folder --------------------------------------------------------

    def files(self) -> dict[str, str]:
        """Return the text of every file that is written before anything starts, by its path."""
        return {
            "slurm.conf": self.slurm_conf(),
            # Nothing here uses cgroups, but slurmd loads a plugin: this one needs no systemd.
            "cgroup.conf": "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n",
            "hosts": self.hosts_file(),
            f"{CONTROL}/init": self.control_script(),
            **{f"{name}/init": self.host_script(name) for name in self.names},
        }

    def hosts_file(self) -> str:
        """Return /etc/hosts as the hosts see it."""
        pairs = [(self.address(name), name) for name in (*self.names, CONTROL)]
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in pairs)]
        return "\n".join(lines) + "\n"

    def slurm_conf(self) -> str:
        """Return slurm.conf."""
        lines = [f"{key}={value}" for key, value in self._settings().items()]
        for name in self.names:
            lines.append(
                f"NodeName={name} NodeAddr={self.address(name)} CPUs={self.cpus} "
                f"RealMemory={self.memory} State=UNKNOWN"
            )
        lines.append(
            f"PartitionName=mini Nodes=ALL MaxNodes={self.hosts} Default=YES State=UP "
            f"MaxTime=INFINITE"
        )
        return "\n".join(lines) + "\n"

    def _settings(self) -> Mapping[str, str]:
        return {
            "ClusterName": "mini",
            "SlurmctldHost": f"{CONTROL}({self.address(CONTROL)})",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            "CryptoType": "crypto/munge",
            # From 1 on, the next cluster's jobs would meet the records of this one's.
            "FirstJobId": str(int(self.token[:5], 16) + 1),
            # A requeued job waits for cred_expire seconds (120 if not told) before it starts again.
            "AuthInfo": f"socket={self.path(CONTROL, 'munge')},cred_expire=5",
            "StateSaveLocation": self.path(CONTROL, "state"),
            "SlurmctldPidFile": self.path(CONTROL, "slurmctld.pid"),
            "SlurmctldLogFile": self.path(CONTROL, "slurmctld.log"),
            "SlurmdSpoolDir": self.path("%n", "spool"),
            "SlurmdPidFile": self.path("%n", "slurmd.pid"),
            "SlurmdLogFile": self.path("%n", "slurmd.log"),
            "JobCompType": "jobcomp/filetxt",
            "JobCompLoc": self.path(CONTROL, "jobs"),
            "AccountingStorageType": "accounting_storage/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "MailProg": "/bin/true",
            # A host may declare more CPUs than this machine has.
            "SlurmdParameters": "config_overrides",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "MpiDefault": "none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,bf_interval=1",
            "EnforcePartLimits": "ALL",  # what can never start is refused, and does not wait
            "JobRequeue": "1",
            "ReturnToService": "2",
            "KillWait": "5",
            "OverTimeLimit": "0",
            "SlurmdTimeout": "20",
            "MessageTimeout": "5",
            "TCPTimeout": "2",
            "TreeWidth": str(
                MAX_HOSTS + 1
            ),  # no host passes messages on: one that is cut delays none
        }

    # --- how it starts ------------------------------------------------------------------------

    def holder(self, name: str) -> list[str]:
        """Return the command that starts a host: its namespaces live as long as its init does."""
        kinds = ["--net", "--uts", "--mount", "--ipc", "--pid"]
        init = ["sh", self.path(name, "init"), self.token]
        # slave: what is unmounted outside is not kept alive in here.
        return ["unshare", *kinds, "--fork", "--propagation", "slave", "--", *init]

    def _begin(self, name: str, *mounts: str) -> list[str]:
        """Return what the script of every host begins with.

        It prints its process id as seen from outside, and goes on once it is told to; when `up` is
        killed meanwhile, `read` fails and the host is gone.
        """
        return [
            "set -eu",
            "read -r pid rest </proc/self/stat",
            "mount -nt proc proc /proc",
            f"mount -n --bind {self.path('hosts')} /etc/hosts",
            *mounts,
            f"hostname {name}",
            "for all in /proc/sys/net/ipv6/conf/*/disable_ipv6; do echo 1 >$all; done",
            "ip link set lo up",
            'echo "$pid"',
            "read -r go",
            f"exec </dev/null >>{self.path(name, 'log')} 2>&1",
        ]

    def host_script(self, name: str) -> str:
        """Return the script that is process 1 of a host."""
        lines = [
            *self._begin(
                name,
                *self._private_tmp(name),
                "mount -nt tmpfs -o mode=1777 tmpfs /dev/shm",
                # MPI looks for interfaces in /sys/class/net: a new sysfs shows those of this host.
                "mount -nt sysfs sysfs /sys",
            ),
            f"ip address add {self.address(name)}/24 dev eth0",
            f"tc {self.shape('eth0', self.rate)}",
            "ip link set eth0 up",
            f"slurmd -D -f {self.path('slurm.conf')} &",
            *WAIT,
        ]
        return "\n".join(lines) + "\n"

    def _private_tmp(self, name: str) -> Iterator[str]:
        """Yield lines that give a host a /tmp of its own, with what it shares mounted in it."""
        new = self.path(name, "tmp")
        yield f"mount -nt tmpfs -o mode=1777 tmpfs {new}"
        for folder in self.share:
            if (path := PurePosixPath(folder)).is_relative_to("/tmp"):
                yield f"mkdir -p {new}/{path.relative_to('/tmp')}"
                yield f"mount -n --bind {folder} {new}/{path.relative_to('/tmp')}"
        yield f"mount -n --move {new} /tmp"

    def control_script(self) -> str:
        """Return the script that is process 1 of the host in control."""
        munge = {
            "key-file": "munge.key",
            "socket": "munge",
            "pid-file": "munged.pid",
            "log-file": "munged.log",
            "seed-file": "munged.seed",
        }
        options = [f"--{key}={self.path(CONTROL, value)}" for key, value in munge.items()]
        lines = [
            *self._begin(CONTROL),
            # --force: a folder that root alone may enter is no reason not to start.
            f"munged --force --num-threads=4 {' '.join(options)}",
            f"[ -S {self.path(CONTROL, 'munge')} ]",
            f"slurmctld -D -c -f {self.path('slurm.conf')} &",
            *WAIT,
        ]
        return "\n".join(lines) + "\n"

    # --- links --------------------------------------------------------------------------------

    def outer_link(self, control: int) -> str:
        """Return lines for ``ip -batch``, outside: the link into the cluster.

        Args:
            control: Process id of the host in control.
        """
        return "\n".join(
            [
                f"link add {self.link} type veth peer name outside netns {control}",
                f"address add {self.outside}/24 dev {self.link}",
                f"link set {self.link} up",
            ]
        )

    def inner_links(self, pids: Mapping[str, int]) -> str:
        """Return lines for ``ip -batch``, in control: the bridge, and a port for every host.

        Args:
            pids: Process id of every host.
        """
        # An address of its own: else it is the lowest of its ports' and changes with them.
        mac = f"02:4d:{':'.join(self.token[i : i + 2] for i in range(0, 8, 2))}"
        lines = [
            f"link add bridge address {mac} type bridge forward_delay 0 mcast_snooping 0",
            f"address add {self.address(CONTROL)}/24 dev bridge",
            "link set bridge up",
            "link set outside master bridge up",
        ]
        for rack in range(self.racks if self.racks > 1 else 0):
            lines += [
                f"link add rack{rack} type bridge forward_delay 0 mcast_snooping 0",
                f"link set rack{rack} up",
                f"link add down{rack} type veth peer name up{rack}",
                f"link set down{rack} master bridge up",
                f"link set up{rack} master rack{rack} up",
            ]
        for name in self.names:
            lines.append(f"link add {name} type veth peer name eth0 netns {pids[name]}")
            lines.append(f"link set {name} master {self.bridge(name)} up")
        return "\n".join(lines)

    def bridge(self, name: str) -> str:
        """Return the bridge that a host's link ends at."""
        rack = self.names.index(name) * self.racks // self.hosts
        return f"rack{rack}" if self.racks > 1 else "bridge"

    def rate_of(self, name: str) -> str:
        """Return the rate of a host's link."""
        return self.rates.get(name, self.rate)

    def port_shapes(self) -> str:
        """Return lines for ``tc -batch``, in control: the bridges' ends of every link."""
        ports = [self.shape(name, self.rate_of(name)) for name in self.names]
        for rack in range(self.racks if self.racks > 1 else 0):
            ports += [self.shape(f"{end}{rack}", self.uplink) for end in ("up", "down")]
        return "\n".join(ports)

    def shape(self, device: str, rate: str) -> str:
        """Return the ``tc`` words that hold a device to a rate."""
        return f"qdisc replace dev {device} root {' '.join(discipline(parse_rate(rate)))}"


# Process 1 takes in orphans: `wait` reaps them, and the sleep gives it something to wait for.
WAIT = ("while :; do sleep 3600 & wait; done",)


def _check_folder(folder: str) -> None:
    if not PurePosixPath(folder).is_absolute() or len(folder) > MAX_FOLDER:
        raise ConfigError(
            f"the state folder must be an absolute path of at most {MAX_FOLDER} characters, not "
            f"{folder!r}; set DASO_MINICLUSTER to a shorter one"
        )
    _check_name("the state folder", folder, "set DASO_MINICLUSTER to another one")
    for private in ("/tmp", "/dev/shm"):
        if PurePosixPath(folder).is_relative_to(private):
            raise ConfigError(
                f"the state folder must not lie in {private}, where every host has files of its "
                f"own, but it is {folder}; set DASO_MINICLUSTER to a folder under /run or /var/tmp"
            )


def _check_name(what: str, folder: str, remedy: str) -> None:
    if re.search(r"[^\w./+-]", folder, re.ASCII):
        raise ConfigError(
            f"{what} must have a name of letters, digits and ._+- alone, not {folder!r}: neither "
            f"slurm.conf nor a script can hold another; {remedy}"
        )
