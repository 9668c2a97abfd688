"""The option records of the optimizer: frozen, checked when made."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

from daso.checks import (
    NONE,
    Rule,
    check,
    choice,
    either,
    flag,
    number,
    one_of,
    positive,
    validated_record,
    whole,
)
from daso.errors import ConfigError
from daso.plan.allreduce_plan import Algorithm
from daso.plan.layout import small_tensors
from daso.plan.merge import MergeName, check_merge, is_eager
from daso.plan.portions import Order

__all__ = [
    "BITS",
    "NARROW",
    "NARROWEST",
    "BucketRule",
    "Exchange",
    "GradientWire",
    "Gradients",
    "Settings",
    "Wire",
]

NonFinite = Literal["drop", "raise"]
Wire = Literal["auto", "fp32", "bf16", "fp16", "int8", "int4", "int2", "topk"]
GradientWire = Literal["auto", "fp32", "bf16", "int8", "int4"]
Restore = Literal["auto", "on", "off"]

WIDE, NARROW, NARROWEST = "int8", "int4", "int2"
# Bits of a number: int8 has a scale (fp32) for each 128, int4 and int2 one (bf16) for each 32, topk
# a place and a number for 1 of 64.
BITS = {"fp32": 32.0, "bf16": 16.0, "fp16": 16.0, WIDE: 8.25, NARROW: 4.5, NARROWEST: 2.5}
BITS["topk"] = 0.5
MiB = 1 << 20
BucketRule = Literal["auto", "search"]
MOST_FRAGMENTS = 100_000
NAMES = Rule(
    'a tuple of names, as ("queue", "*.hidden")',
    lambda value: isinstance(value, tuple) and all(isinstance(one, str) and one for one in value),
)


@validated_record
@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """How nodes exchange.

    Args:
        algorithm: How the mean over nodes is taken. All but ``"mpi"`` add in a fixed order, bit for
            bit reproducible. ``"direct"``: each node sends each its part, and the means back; two
            swap all they have. ``"two-level"``: the same in groups of about as many as there are
            groups, then between these. ``"halving"``: recursive halving and doubling, with groups
            of the prime factors of the number of nodes. ``"ring"``: parts go round, for links that
            are unequal. ``"planned"``: links between nodes are measured in time slots, at the
            start and when exchanges take longer than before, and the plan and order of nodes that
            suit them are taken, by all ranks after the same exchange: bits depend on links then.
            ``"mpi"`` leaves it to MPI's ``Iallreduce``, for gradients and the fp32
            wire alone. ``"auto"``: direct up to 16 nodes, then what costs least with messages of
            64 KiB at the least; see `daso.plan.cost_model.choose_plan`.
        chunk_bytes: Size of the messages an exchange is cut into, in bytes of the wire (of int4,
            where that is chosen while training); less where they would hold more than 262,144
            numbers, or between more than 16 nodes. From devices no less than 4,194,304 numbers,
            for each message is encoded by launches of its own.
        nonfinite: What happens when a node's delta holds NaN or infinity. ``"drop"``: all ranks
            drop that exchange, say so, and the node starts again from the reference; the third
            drop without two good exchanges in a row between raises. ``"raise"``: all ranks raise
            at once.
        timeout_seconds: How long a rank waits for another before it raises and names who is late.
        fragments: Parts of the model that take turns: each exchange carries one, and each part is
            exchanged every fragments * skip batches (Streaming DiLoCo).
        gpu_direct: Whether MPI reads and writes the memory of CUDA devices, with a library that
            says it is able to, and not with ``algorithm="mpi"``. Otherwise what crosses is
            copied to pinned memory of the host. It is added on the device either way.
        step_restoration: Whether an inner optimizer that divides by the size of its gradients (as
            Adam does) steps longer between exchanges, by as much as the mean of all nodes' steps is
            shorter than the step of one big batch; see `daso.plan.step_restoration`. ``"auto"``:
            where a few steps of a copy of it show that it does; never with ``outer``, which has a
            gain of its own, or ``wire="topk"``. Learning rates in ``param_groups`` stay the user's.
        elastic: Whether training goes on when a rank is killed, without that rank's node: see
            `docs/how-to/elastic.md`. Under Open MPI 5 or later, started by
            ``mpirun --with-ft ulfm``, as ``daso run --elastic`` does; anywhere else it says so, and
            the job ends.
        keep_local: Names, or patterns as of `fnmatch`, of buffers and frozen parameters that stay
            each rank's own, as queues and hidden states do: no call averages them.
    """

    algorithm: Algorithm = "auto"
    chunk_bytes: int = MiB // 4
    nonfinite: NonFinite = "drop"
    timeout_seconds: float = 300.0
    fragments: int = 1
    gpu_direct: bool = False
    step_restoration: Restore = "auto"
    elastic: bool = False
    keep_local: tuple[str, ...] = ()

    def check_kept(self, names: Sequence[str]) -> None:
        """Raise unless each pattern of ``keep_local`` matches a buffer or frozen parameter."""
        for pattern in self.keep_local:
            if not any(fnmatchcase(name, pattern) for name in names):
                known = ", ".join(names[:3]) or "none: pass module="
                raise ConfigError(
                    f"Exchange.keep_local must name buffers or frozen parameters of the module, "
                    f"but {pattern!r} names none; it has {known}{', ...' if len(names) > 3 else ''}"
                )

    def keeps_own(self, name: str) -> bool:
        """Return whether a buffer or frozen parameter stays each rank's own."""
        return any(fnmatchcase(name, pattern) for pattern in self.keep_local)

    def __post_init__(self) -> None:
        check("Exchange.keep_local", self.keep_local, NAMES)
        check("Exchange.gpu_direct", self.gpu_direct, flag())
        if self.gpu_direct and self.algorithm == "mpi":
            raise ConfigError(
                "Exchange(gpu_direct=True) needs another algorithm (MPI libraries that send from "
                "devices cannot add there while others compute) than 'mpi'; leave algorithm out"
            )
        check("Exchange.elastic", self.elastic, flag())
        check("Exchange.step_restoration", self.step_restoration, choice(*get_args(Restore)))
        check("Exchange.algorithm", self.algorithm, choice(*get_args(Algorithm)))
        check("Exchange.nonfinite", self.nonfinite, choice(*get_args(NonFinite)))
        check("Exchange.chunk_bytes", self.chunk_bytes, whole(1, of=" of bytes"))
        check("Exchange.timeout_seconds", self.timeout_seconds, positive())
        check("Exchange.fragments", self.fragments, whole(1, MOST_FRAGMENTS))


@validated_record
@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """How gradients are averaged: inside a node, and between nodes in synchronous phases.

    Args:
        reducer: ``"bucketed"``: in the order in which they become ready, by the training thread, as
            far as it comes by. ``"host"``: in that order too, added on the host by a thread of its
            own. ``"prioritized"``: between nodes they cross in portions, those of layers near the
            input first, in synchronous phases (which without a ``policy`` are all batches).
        step: ``"model"``: backward ends with all gradients averaged, and a step is taken as a
            whole. ``"layerwise"``: no step waits for all gradients in synchronous phases (which
            without a ``policy`` are all batches): a layer's forward waits for its own, and the
            optimizer's step for that layer is taken then. Until then, or `DASO.flush`, parameters
            have their old values; clipping, GradScaler and closures need all gradients at once, and
            ``"model"``. Gradients that are changed are refused, but for writes through ``.data``,
            of which torch keeps no count. ``"auto"``: ``"layerwise"`` with ``"prioritized"``, which
            gains little without, elsewhere ``"model"``.
        priority: Which of the portions that are ready crosses next: ``"layer"``, the one needed
            first; ``"lifo"``, ready last; ``"fifo"``, ready first.
        bucket_bytes: Size from which a bucket of gradients counts as full and is averaged while
            backward goes on, in bytes; the last ones are smaller. ``"auto"``: 25 MiB on GPUs, where
            a bucket costs launches, and 4 MiB elsewhere (1 MiB with ``"host"``); ``"search"`` tries
            sizes in the first hundreds of batches, keeps the fastest, and starts again when batches
            come to take much longer or shorter. No bit of a sum in a fixed order depends on it
            (``Exchange(algorithm="mpi")`` has none from three nodes on, and in rings, and above 16
            nodes, the order follows sizes). With ``"prioritized"`` the size of portions, which
            cannot be searched; ``"auto"`` is that of ``link_efficiency``.
        link_efficiency: Of portions whose size is ``"auto"``: the share of its rate that the link
            between nodes is to reach with them, from 0.01 to 0.999; their size follows from what
            messages cost, measured at the start (US 11941528 B2, claim 14).
        wire: What gradients cross between nodes in, in synchronous phases: ``"fp32"``, ``"bf16"``,
            ``"int8"`` or ``"int4"`` with a scale per 128 or 32 numbers. What these round away is
            kept and added to the next gradient (error feedback; Seide et al. 2014). ``"auto"``:
            fp32, and int4 where `Auto` averages gradients because that is cheap.
    """

    bucket_bytes: int | BucketRule = "auto"
    reducer: Literal["bucketed", "prioritized", "host"] = "bucketed"
    step: Literal["auto", "model", "layerwise"] = "auto"
    priority: Order = "layer"
    link_efficiency: float = 0.9
    wire: GradientWire = "auto"

    def __post_init__(self) -> None:
        check("Gradients.wire", self.wire, choice(*get_args(GradientWire)))
        if self.wire not in ("auto", "fp32") and self.reducer != "bucketed":
            raise ConfigError(
                f"Gradients.wire must be 'auto' or 'fp32' with reducer={self.reducer!r} (portions "
                f"cross in full precision), not {self.wire!r}; leave reducer out"
            )
        check("Gradients.reducer", self.reducer, choice("bucketed", "prioritized", "host"))
        check("Gradients.step", self.step, choice("auto", "model", "layerwise"))
        check("Gradients.priority", self.priority, choice(*get_args(Order)))
        if self.reducer == "bucketed" and self.step == "layerwise":
            raise ConfigError(
                "Gradients.step='layerwise' needs gradients that a thread of its own averages: "
                "reducer='prioritized' or 'host', not 'bucketed'"
            )
        if self.reducer == "prioritized" and self.bucket_bytes == "search":
            raise ConfigError(
                "Gradients.bucket_bytes must be a number of bytes with reducer='prioritized', not "
                "'search'"
            )
        check("Gradients.link_efficiency", self.link_efficiency, number(0.01, 0.999))
        nbytes = whole(1, of=" of bytes")
        rule = either(
            nbytes, one_of(*get_args(BucketRule)), text=f'{nbytes.text}, "auto" or "search"'
        )
        check("Gradients.bucket_bytes", self.bucket_bytes, rule)

    @property
    def sizes_portions(self) -> bool:
        """Whether the size of portions follows from what messages cost."""
        return self.reducer == "prioritized" and self.bucket_bytes == "auto"

    def first_bucket_bytes(self, *, on_gpu: bool) -> int | None:
        """Return the size of buckets to begin with; None: the search says."""
        if self.bucket_bytes == "search":
            return None
        if self.bucket_bytes == "auto":
            sizes = (25 if on_gpu else 4) if self.reducer == "bucketed" else 1
            return sizes * MiB
        return self.bucket_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to exchange: the optimizer's keywords as one record.

    Args:
        wire: What crosses between nodes for deltas: ``"fp32"``, ``"bf16"``, ``"fp16"``,
            ``"int8"`` with a scale per 128 numbers, ``"int4"`` and ``"int2"`` with a scale per 32,
            or ``"topk"``: of every 4096 numbers the 64 largest. ``"auto"``: int4, and int2 where an
            int4 exchange takes more than a batch with an optimizer that normalizes.
        merge: How a mean that is some batches old is taken in; see `daso.plan.merge`.
        outer: Whether an outer optimizer moves the reference.
        exchange: How nodes exchange.
        gradients: How gradients are averaged.
        selective: Numbers of a model from which on its small tensors shall be exchanged more often;
            None: never.
    """

    wire: Wire
    merge: MergeName | float
    exchange: Exchange
    gradients: Gradients
    outer: bool = False
    selective: int | None = None

    def __post_init__(self) -> None:
        check("wire", self.wire, choice(*get_args(Wire)))
        check("selective", self.selective, either(whole(1), NONE))
        check_merge(self.merge)
        if self.sparse and self.merge not in ("auto", "delta", "eager"):
            raise ConfigError(
                f"wire='topk' needs merge 'auto', 'delta' or 'eager' (what it does not send would "
                f"count twice where local parameters keep a part of it), not {self.merge!r}"
            )
        if self.sparse and self.exchange.algorithm == "planned":
            raise ConfigError(
                "wire='topk' needs an Exchange.algorithm that stays (what is held back lies in its "
                "parts), not 'planned'; use algorithm='auto', or another wire"
            )
        if self.by_mpi and self.wire != "fp32":
            raise ConfigError(
                f"Exchange.algorithm='mpi' needs wire='fp32' (MPI adds 16-bit numbers wrongly or "
                f"not at all), not {self.wire!r}; use algorithm='auto'"
            )
        if self.by_mpi and self.gradients.wire not in ("auto", "fp32"):
            raise ConfigError(
                f"Exchange.algorithm='mpi' needs Gradients.wire='fp32' (MPI adds 16-bit numbers "
                f"wrongly or not at all), not {self.gradients.wire!r}; use algorithm='auto'"
            )

        if self.exchange.elastic and not (self.whole and self.gradients.reducer == "bucketed"):
            raise ConfigError(
                f"Exchange(elastic=True) needs steps of the whole model and gradients in buckets, "
                f"but {self.gradients!r} has them otherwise; leave Gradients(reducer=, step=) out"
            )

    @property
    def whole(self) -> bool:
        """Whether a backward ends with all gradients averaged."""
        step, reducer = self.gradients.step, self.gradients.reducer
        return step == "model" or (step == "auto" and reducer != "prioritized")

    @property
    def wires(self) -> tuple[str, ...]:
        """Wires that exchanges may take, the first one first."""
        return (NARROW, NARROWEST) if self.wire == "auto" else (self.wire,)

    @property
    def eager(self) -> bool:
        """Whether nodes go ahead when they send."""
        return is_eager(self.merge, outer=self.outer)

    @property
    def may_restore_steps(self) -> bool:
        """Whether steps of an optimizer that normalizes are made longer between exchanges."""
        return self.exchange.step_restoration != "off" and not self.outer and not self.sparse

    @property
    def sparse(self) -> bool:
        """Whether an exchange leaves work behind that must not be lost."""
        return self.wire == "topk"

    def small_tensors(self, numels: Sequence[int]) -> list[int]:
        """Return which tensors of a model are exchanged alone, too."""
        return small_tensors(numels) if self.sends_small_tensors(sum(numels)) else []

    def sends_small_tensors(self, total: float) -> bool:
        """Tell whether small tensors of a model of so many numbers are exchanged alone, too."""
        whole = self.exchange.fragments == 1 and not self.sparse
        large = self.selective is not None and total >= self.selective
        return large and whole and not self.outer and not self.eager

    def small_share(self, numel: float, total: float) -> float:
        """Return the share of the bytes of everything that small tensors have."""
        return numel / max(1, total)

    @property
    def by_mpi(self) -> bool:
        """Whether MPI adds between nodes, in an order of its own.

        Over what a link can carry, MPICH's sum takes 1.08 times with 2 nodes, but 2.78 with 3 and
        1.68 with 4; in rank order it is 1.06, 1.06 and 1.07 (scripts/figures/exchange.json).
        """
        return self.exchange.algorithm == "mpi"

    def gradient_wire(self, *, hidden: bool, wide: bool = False) -> str:
        """Return what gradients cross between nodes in.

        Args:
            hidden: They cross at every batch while that is cheap; see `Auto`.
            wide: In 8 bits.
        """
        wire = self.gradients.wire
        if wire != "auto":
            return wire
        return (WIDE if wide else NARROW) if hidden else "fp32"

    @property
    def may_hide(self) -> bool:
        """Whether `Auto` may average gradients at every batch where that is cheap."""
        ordered = self.gradients.reducer == "bucketed" and not self.by_mpi
        return ordered and self.may_restore_steps
