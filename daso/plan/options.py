"""Option records of the optimizer: frozen, checked on construction."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

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
from daso.plan.portions import Order

NonFinite = Literal["drop", "raise"]
Wire = Literal["auto", "fp32", "bf16", "fp16", "int8", "int4", "int2", "topk"]
GradientWire = Literal["auto", "fp32", "bf16", "int8", "int4"]
Restore = Literal["auto", "on", "off"]
MergeName = Literal["auto", "daso", "delta", "eager"]
MERGES = get_args(MergeName)

WIDE, NARROW, NARROWEST = "int8", "int4", "int2"
# Bits per number: int8 has an fp32 scale per 128 numbers, int4 and int2 a bf16 scale per 32, topk
# an index and a value for 1 of 64.
BITS = {"fp32": 32.0, "bf16": 16.0, "fp16": 16.0, WIDE: 8.25, NARROW: 4.5, NARROWEST: 2.5}
BITS["topk"] = 0.5
MiB = 1 << 20
BucketRule = Literal["auto", "search"]
MOST_FRAGMENTS = 100_000
NAMES = Rule(
    'a tuple of names, as ("queue", "*.hidden")',
    lambda names: (
        isinstance(names, tuple) and all(isinstance(name, str) and name for name in names)
    ),
)


@validated_record
@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Options of exchanges between nodes.

    Args:
        algorithm: Algorithm of the mean over nodes. All but ``"mpi"`` add in a fixed order, bit for
            bit reproducible. ``"direct"``: each node sends every other node its part, and sends the
            mean of its own part back; two nodes swap everything. ``"two-level"``: the same in
            groups of about as many nodes as groups, then between these. ``"halving"``: recursive
            halving and doubling, with groups of the prime factors of the number of nodes.
            ``"ring"``: parts travel round a ring, for unequal links. ``"planned"``: links between
            nodes are measured in time slots, at the start and when exchanges slow down, and all
            ranks switch to the fitting plan and order of nodes after the same exchange; bits depend
            on the links then. ``"mpi"`` leaves it to MPI's ``Iallreduce``, for gradients and the
            fp32 wire alone. ``"auto"``: direct up to 16 nodes, above that the cheapest plan with
            messages of at least 64 KiB; see `daso.plan.cost_model.choose_plan`.
        chunk_bytes: Bytes of a message between nodes, in the wire's encoding (of int4 with
            ``wire="auto"``). Messages are smaller
            where they would hold more than 262,144 numbers, or between more than 16 nodes. From
            devices they hold at least 4,194,304 numbers, as each is encoded by launches of its own.
        nonfinite: Response to NaN or infinity in a node's delta. ``"drop"``: all ranks drop that
            exchange and log it, and the node restarts from the reference; the third drop without
            two good exchanges in a row between raises. ``"raise"``: all ranks raise at once.
        timeout_seconds: Seconds that a rank waits for another before it raises and names it.
        fragments: Parts of the model that take turns (Streaming DiLoCo). Each exchange carries one
            part, and each part is exchanged every fragments * skip batches.
        gpu_direct: Whether MPI reads and writes the memory of CUDA devices. Needs an MPI library
            that reports to be able to, and not ``algorithm="mpi"``. Otherwise payloads are copied
            to pinned host memory. The sum is taken on the device either way.
        step_restoration: Whether steps of Adam and similar optimizers are lengthened between
            exchanges. The factor is measured: the mean of all nodes' steps is shorter than the step
            of one big batch by as much; see `daso.plan.step_restoration`. ``"auto"``: where a few
            steps of a copy of the optimizer show that it divides by the size of its gradients;
            never with ``outer``, which has a gain of its own, or ``wire="topk"``. Learning rates in
            ``param_groups`` stay the user's.
        elastic: Whether training continues without the node of a rank that is killed. See
            `docs/how-to/elastic.md`. Needs Open MPI 5 or later, started by
            ``mpirun --with-ft ulfm``, as ``daso run --elastic`` does; elsewhere a warning is logged
            and the job ends with the rank.
        keep_local: Buffers and frozen parameters that each rank keeps for itself. Names, or
            patterns as of `fnmatch`, such as queues and hidden states: no call averages them.
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
                    f"but {pattern!r} names none; it has {known}"
                    f"{', ...' if len(names) > 3 else ''}",
                    code="kept-name-unknown",
                )

    def keeps_own(self, name: str) -> bool:
        """Return whether a buffer or frozen parameter stays local to each rank."""
        return any(fnmatchcase(name, pattern) for pattern in self.keep_local)

    def __post_init__(self) -> None:
        check("Exchange.keep_local", self.keep_local, NAMES)
        check("Exchange.gpu_direct", self.gpu_direct, flag())
        if self.gpu_direct and self.algorithm == "mpi":
            raise ConfigError(
                "Exchange(gpu_direct=True) needs another algorithm (MPI libraries that send from "
                "devices cannot add there while others compute) than 'mpi'; leave algorithm out",
                code="gpu-direct-needs-algorithm",
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
    """Options of gradient averages: inside a node, and between nodes in synchronous phases.

    Args:
        bucket_bytes: Bytes of gradients that fill a bucket. A full bucket is averaged while
            backward continues; the last ones are smaller. ``"auto"``: 25 MiB on GPUs, where a
            bucket costs launches, and 4 MiB elsewhere (1 MiB with ``"host"``); ``"search"`` tries
            sizes in the first hundreds of batches, keeps the fastest, and restarts when batches
            become much slower or faster. No bit of a sum in a fixed order depends on it
            (``Exchange(algorithm="mpi")`` has none from three nodes on, and in rings, and above 16
            nodes, the order follows sizes). With ``"prioritized"`` the size of portions, which
            cannot be searched; ``"auto"`` is that of ``link_efficiency``.
        reducer: Order in which gradients are averaged, and the thread that does it. ``"bucketed"``:
            as they become ready, by the training thread. ``"host"``: in that order too, added on
            the host by a separate thread. ``"prioritized"``: in portions between nodes, those of
            layers near the input first, in synchronous phases (without a ``policy``, all batches).
        step: Whether an optimizer step covers the model or a layer. ``"model"``: backward ends with
            all gradients averaged, and the step is taken as a whole. ``"layerwise"``: in
            synchronous phases (without a ``policy``, all batches) a layer's forward waits for its
            own gradients, and the optimizer's step for that layer is taken then. Until then, or
            `DASO.flush`, parameters have their old values; clipping, GradScaler and closures need
            all gradients at once, and ``"model"``. Changed gradients are refused, except for writes
            through ``.data``, which torch does not count. ``"auto"``: ``"layerwise"`` with
            ``"prioritized"``, which gains little without, elsewhere ``"model"``.
        priority: Order of the portions that are ready. ``"layer"``: needed first; ``"lifo"``: ready
            last; ``"fifo"``: ready first.
        link_efficiency: Share of the link's rate to reach with portions, from 0.01 to 0.999. Sets
            the size of portions whose size is ``"auto"``, from the cost of messages measured at the
            start (US 11941528 B2, claim 14).
        wire: Encoding of gradients between nodes, in synchronous phases. ``"fp32"``, ``"bf16"``,
            ``"int8"`` or ``"int4"`` with a scale per 128 or 32 numbers. Rounding errors are kept
            and added to the next gradient (error feedback; Seide et al. 2014). ``"auto"``: fp32,
            and int4 or int8 where `Auto` averages gradients because that is cheap.
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
                f"cross in full precision), not {self.wire!r}; leave reducer out",
                code="wire-needs-buckets",
            )
        check("Gradients.reducer", self.reducer, choice("bucketed", "prioritized", "host"))
        check("Gradients.step", self.step, choice("auto", "model", "layerwise"))
        check("Gradients.priority", self.priority, choice(*get_args(Order)))
        if self.reducer == "bucketed" and self.step == "layerwise":
            raise ConfigError(
                "Gradients.step='layerwise' needs gradients that a thread of its own averages: "
                "reducer='prioritized' or 'host', not 'bucketed'",
                code="layerwise-needs-background",
            )
        if self.reducer == "prioritized" and self.bucket_bytes == "search":
            raise ConfigError(
                "Gradients.bucket_bytes must be a number of bytes with reducer='prioritized', not "
                "'search'",
                code="prioritized-cannot-search",
            )
        check("Gradients.link_efficiency", self.link_efficiency, number(0.01, 0.999))
        nbytes = whole(1, of=" of bytes")
        rule = either(
            nbytes, one_of(*get_args(BucketRule)), text=f'{nbytes.text}, "auto" or "search"'
        )
        check("Gradients.bucket_bytes", self.bucket_bytes, rule)

    @property
    def sizes_portions(self) -> bool:
        """True if the size of portions follows from the cost of messages."""
        return self.reducer == "prioritized" and self.bucket_bytes == "auto"

    def first_bucket_bytes(self, *, on_gpu: bool) -> int | None:
        """Return the initial size of buckets, or None if the search chooses it."""
        if self.bucket_bytes == "search":
            return None
        if self.bucket_bytes == "auto":
            sizes = (25 if on_gpu else 4) if self.reducer == "bucketed" else 1
            return sizes * MiB
        return self.bucket_bytes


def check_merge(merge: str | float) -> None:
    """Raise unless ``merge`` is a known name or a number between 0 and 1."""
    if isinstance(merge, str):
        if merge in MERGES:
            return
    elif isinstance(merge, int | float) and not isinstance(merge, bool) and 0 <= merge <= 1:
        return
    raise ConfigError(
        f"merge must be one of {', '.join(MERGES)}, or a number between 0 and 1 (the weight of "
        f"local parameters), not {merge!r}",
        code="unknown-merge",
    )


def is_eager(merge: str | float, *, outer: bool) -> bool:
    """Return whether merges are eager: nodes move to an estimated mean when they send."""
    return merge == "eager" or (merge == "auto" and outer)


def _derived() -> Any:
    """Return a record field that is computed from other fields."""
    return field(init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The optimizer's keywords as one record.

    Args:
        wire: Format of deltas between nodes: ``"fp32"``, ``"bf16"``, ``"fp16"``,
            ``"int8"`` with a scale per 128 numbers, ``"int4"`` and ``"int2"`` with a scale per 32,
            or ``"topk"``: the 64 largest of every 4096 numbers. ``"auto"``: int4, and int2 if an
            int4 exchange takes more than a batch with an optimizer that normalizes.
        merge: How a mean that is some batches old is merged; see `daso.plan.exchange`.
        outer: Whether an outer optimizer moves the reference.
        exchange: Options of exchanges.
        gradients: Options of gradient averages.
        selective: Parameters of a model from which on its small tensors are exchanged more often;
            None: never.
    """

    wire: Wire
    merge: MergeName | float
    exchange: Exchange
    gradients: Gradients
    outer: bool = False
    selective: int | None = None
    # Computed from the keywords once, because every step reads them.
    whole: bool = _derived()  # a backward ends with all gradients averaged
    wires: tuple[str, ...] = _derived()  # that exchanges may use, the initial one first
    eager: bool = _derived()  # see `is_eager`
    sparse: bool = _derived()  # an exchange leaves out work, which must be kept
    # Steps of a normalizing optimizer are made longer between exchanges.
    may_restore_steps: bool = _derived()
    # MPI sums between nodes, in its own order. Relative to the limit of a link, MPICH's sum takes
    # 1.08 times as long with 2 nodes, but 2.78 with 3 and 1.68 with 4; in rank order 1.06, 1.06 and
    # 1.07 (scripts/figures/exchange.json).
    by_mpi: bool = _derived()
    may_hide: bool = _derived()  # `Auto` may average gradients at every batch if that is cheap
    hidden_wire: str = _derived()  # initial wire of these gradients

    def __post_init__(self) -> None:
        self._derive()
        check("wire", self.wire, choice(*get_args(Wire)))
        check("selective", self.selective, either(whole(1), NONE))
        check_merge(self.merge)
        if self.sparse and self.merge not in ("auto", "delta", "eager"):
            raise ConfigError(
                f"wire='topk' needs merge 'auto', 'delta' or 'eager' (what it does not send would "
                f"count twice where local parameters keep a part of it), not {self.merge!r}",
                code="topk-needs-merge",
            )
        if self.sparse and self.exchange.algorithm == "planned":
            raise ConfigError(
                "wire='topk' needs an Exchange.algorithm that stays (what is held back lies in its "
                "parts), not 'planned'; use algorithm='auto', or another wire",
                code="topk-needs-fixed-algorithm",
            )
        if self.by_mpi and self.wire != "fp32":
            raise ConfigError(
                f"Exchange.algorithm='mpi' needs wire='fp32' (MPI adds 16-bit numbers wrongly or "
                f"not at all), not {self.wire!r}; use algorithm='auto'",
                code="mpi-needs-full-wire",
            )
        if self.by_mpi and self.gradients.wire not in ("auto", "fp32"):
            raise ConfigError(
                f"Exchange.algorithm='mpi' needs Gradients.wire='fp32' (MPI adds 16-bit numbers "
                f"wrongly or not at all), not {self.gradients.wire!r}; use algorithm='auto'",
                code="mpi-needs-full-gradients",
            )

        if self.exchange.elastic and not (self.whole and self.gradients.reducer == "bucketed"):
            raise ConfigError(
                f"Exchange(elastic=True) needs steps of the whole model and gradients in buckets, "
                f"but {self.gradients!r} has them otherwise; leave Gradients(reducer=, step=) out",
                code="elastic-needs-buckets",
            )

    def _derive(self) -> None:
        """Compute the fields that follow from others."""
        gradients, exchange = self.gradients, self.exchange
        sparse, by_mpi = self.wire == "topk", exchange.algorithm == "mpi"
        whole = {"model": True, "auto": gradients.reducer != "prioritized"}
        restores = exchange.step_restoration != "off" and not self.outer and not sparse
        derived = {
            "whole": whole.get(gradients.step, False),
            "wires": (NARROW, NARROWEST) if self.wire == "auto" else (self.wire,),
            "eager": is_eager(self.merge, outer=self.outer),
            "sparse": sparse,
            "may_restore_steps": restores,
            "by_mpi": by_mpi,
            "may_hide": gradients.reducer == "bucketed" and not by_mpi and restores,
            "hidden_wire": self.gradient_wire(hidden=True),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def small_tensors(self, numels: Sequence[int]) -> list[int]:
        """Return the indices of tensors that are also exchanged alone."""
        return small_tensors(numels) if self.sends_small_tensors(sum(numels)) else []

    def sends_small_tensors(self, total: float) -> bool:
        """Return whether small tensors of a model with ``total`` parameters are exchanged alone."""
        whole = self.exchange.fragments == 1 and not self.sparse
        large = self.selective is not None and total >= self.selective
        return large and whole and not self.outer and not self.eager

    def small_share(self, numel: float, total: float) -> float:
        """Return the share of small tensors in the bytes of an exchange of everything."""
        return numel / max(1, total)

    def gradient_wire(self, *, hidden: bool, wide: bool = False) -> str:
        """Return the wire format of gradients between nodes.

        Args:
            hidden: They are averaged at every batch while that is cheap; see `Auto`.
            wide: Use 8 bits.
        """
        wire = self.gradients.wire
        if wire != "auto":
            return wire
        return (WIDE if wide else NARROW) if hidden else "fp32"
