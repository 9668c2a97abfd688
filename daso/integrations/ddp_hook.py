"""Communication hook for DDP: averages its buckets in 8, 4 or 2 bits with error feedback.

Seide et al. 2014 (1-bit SGD), Karimireddy et al. 2019, arXiv 1901.09847 (error feedback).
"""

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from daso.checks import check, choice, validate_call
from daso.comm.reduction import BufferPool
from daso.errors import ConfigError
from daso.kernels.choice import kernels_for
from daso.kernels.codecs import Codec, codec_named
from daso.kernels.rows import EncodeRows, FlatTensors, Mean, divide_
from daso.plan.layout import Span, split

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    GradBucket = Any  # torch does not declare it to type checkers
else:
    from torch.distributed import GradBucket  # DDP compares a hook's annotation with it

WIRES = ("bf16", "int8", "int4", "int2")
EVEN = 128  # elements: alignment of parts, a multiple of every wire's block
REBUILDS = 4  # of a bucket by one DDP: more mean that two models share the state


@dataclass
class _Errors:
    """Rounding errors of one bucket."""

    params: tuple[int, ...]  # ids, in the bucket's order
    residual: torch.Tensor  # of this rank's gradients (numel)
    carry: torch.Tensor | None = None  # of the means that this rank computes (numel of its part)


@dataclass
class _Groups:
    """Process groups of an average: all ranks, or those of a node and those between nodes."""

    between: "ProcessGroup"
    inside: "ProcessGroup | None" = None  # None: each rank is its own node
    between_rank: int = field(init=False)
    between_size: int = field(init=False)

    def __post_init__(self) -> None:
        self.between_rank = dist.get_rank(self.between)
        self.between_size = dist.get_world_size(self.between)


class DdpHookState:
    """State of `ddp_hook` for one DDP model; made by `ddp_hook_state`."""

    def __init__(self, wire: str) -> None:
        self.wire = wire
        self._groups = _form_groups(wire)
        self._errors: dict[int, _Errors] = {}  # by index of the bucket
        self._rebuilds: dict[int, int] = {}
        self._pool = BufferPool()  # of payloads: buckets are averaged one at a time
        # Collectives start in the same order on all ranks, the order of `submit`.
        self._thread: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    @property
    def nodes(self) -> int:
        """Return the number of nodes between which buckets are averaged in fewer bits."""
        return self._groups.between_size

    def close(self) -> None:
        """End the thread; idempotent. Not collective."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()
        self._errors.clear()

    def submit(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the average of a bucket. Collective over the group; non-blocking."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        flat, errors = bucket.buffer(), self._errors_of(bucket)
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "daso-ddp-hook")
            thread = self._thread

        def run() -> None:
            try:
                self._average(flat, errors)
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(flat)

        thread.submit(run)
        return future

    def _errors_of(self, bucket: GradBucket) -> _Errors:
        """Return the rounding errors of a bucket; zeros if DDP has rebuilt it."""
        index, flat = bucket.index(), bucket.buffer()
        if flat.device.type != "cpu":
            raise ConfigError(
                f"gradients must be on the CPU for daso.ddp_hook, but DDP's are on {flat.device}; "
                f"take torch's hooks there, or daso.DASO, which averages on GPUs",
                code="hook-needs-cpu",
            )
        params = tuple(map(id, bucket.parameters()))
        known = self._errors.get(index)
        if known is not None and known.params == params and known.residual.numel() == flat.numel():
            return known
        self._rebuilds[index] = self._rebuilds.get(index, 0) + 1
        if self._rebuilds[index] > REBUILDS:
            raise ConfigError(
                "a state of daso.ddp_hook must belong to one model, but several DDP models use "
                "this one; make a daso.ddp_hook_state() for each",
                code="hook-state-shared",
            )
        row = torch.float64 if flat.dtype == torch.float64 else torch.float32
        self._errors[index] = _Errors(
            params, torch.zeros(flat.numel(), dtype=row, device=flat.device)
        )
        return self._errors[index]

    @torch.no_grad()
    def _average(self, flat: torch.Tensor, errors: _Errors) -> None:
        """Replace a bucket by the mean over all ranks. Collective over the group; blocking."""
        row = flat.to(errors.residual.dtype)  # itself, but for 16-bit gradients
        inside = self._groups.inside
        if inside is None:
            self._average_between(row, errors, 1)
        else:
            local_size, local_rank = dist.get_world_size(inside), dist.get_rank(inside)
            dist.all_reduce(row, group=inside)
            parts = split(row.numel(), local_size, EVEN)
            own = row[slice(*parts[local_rank])]
            self._average_between(own, errors, local_size)
            for received, part in zip(self._gathered(own, parts, inside), parts, strict=True):
                row[slice(*part)].copy_(received)
        if row is not flat:
            flat.copy_(row)

    def _average_between(self, row: torch.Tensor, errors: _Errors, divisor: int) -> None:
        """Replace sums of nodes by their mean, divided by `divisor`. Collective; blocking."""
        if not row.numel():
            return
        groups, kernels = self._groups, kernels_for(row.device)
        if groups.between_size == 1:
            divide_(row, divisor)
            return
        codec = codec_named(self.wire, errors.residual.dtype)
        parts = split(row.numel(), groups.between_size if groups.between_size > 2 else 1, EVEN)
        nbytes = sum(codec.nbytes(stop - start) for start, stop in parts)
        payload = self._pool.row("payload", 0, nbytes, torch.uint8)
        residual = errors.residual[: row.numel()]
        kernels.encode(
            codec,
            FlatTensors([row]),
            parts,
            payload,
            EncodeRows(residual=residual, gradients=True),
        )
        mean = _mean_of(groups, divisor, codec)
        if len(parts) == 1:  # with two nodes each computes the mean itself, rounded once
            payloads = self._gathered(
                payload, [Span(0, nbytes)] * groups.between_size, groups.between
            )
            kernels.reduce(mean(payloads), row.numel(), row=row)
            return
        means = self._means(payload, parts, codec, errors, mean)
        for (start, stop), payload in zip(parts, means, strict=True):
            if stop > start:
                kernels.reduce(Mean(codec, [payload]), stop - start, row=row[start:stop])

    def _means(
        self,
        payload: torch.Tensor,
        parts: Sequence[Span],
        codec: Codec,
        errors: _Errors,
        mean: Callable[[Sequence[torch.Tensor]], Mean],
    ) -> list[torch.Tensor]:
        """Return the encoded mean of each part. Collective over the nodes; blocking."""
        groups, sizes = self._groups, [codec.nbytes(stop - start) for start, stop in parts]
        rank, count = groups.between_rank, groups.between_size
        numel = parts[rank].stop - parts[rank].start
        versions = self._pool.row("versions", 0, count * sizes[rank], torch.uint8)
        dist.all_to_all_single(versions, payload, [sizes[rank]] * count, sizes, groups.between)
        own = self._pool.row("mean", 0, sizes[rank], torch.uint8)
        if numel:
            if errors.carry is None or errors.carry.numel() != numel:
                errors.carry = torch.zeros(numel, dtype=codec.row, device=own.device)
            kernels_for(own.device).reduce(
                mean(versions.split(sizes[rank])),
                numel,
                payload=own,
                carry=errors.carry,
                gradients=True,
            )
        return self._gathered(own, [Span(0, size) for size in sizes], groups.between)

    def _gathered(
        self, own: torch.Tensor, parts: Sequence[Span], group: "ProcessGroup"
    ) -> list[torch.Tensor]:
        """Return each rank's part, with its own length. Collective over the group; blocking."""
        longest = max(stop - start for start, stop in parts)
        padded = self._pool.row("padded", 0, longest, own.dtype)
        padded[: own.numel()] = own
        rows = list(self._pool.row("gathered", 0, longest * len(parts), own.dtype).split(longest))
        dist.all_gather(rows, padded, group=group)
        return [row[: stop - start] for row, (start, stop) in zip(rows, parts, strict=True)]


def _mean_of(
    groups: _Groups, divisor: int, codec: Codec
) -> Callable[[Sequence[torch.Tensor]], Mean]:
    count = groups.between_size
    return lambda versions: Mean(codec, versions, (1,) * count, count * divisor)


def _form_groups(wire: str) -> _Groups:
    """Create gloo groups for all ranks. Collective over the default group; blocking."""
    hosts_and_wires: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts_and_wires, (_host(), wire))
    if wires := sorted({other for _, other in hosts_and_wires} - {wire}):
        raise ConfigError(
            f"all ranks must use the same wire for daso.ddp_hook, but it is {wire!r} on rank "
            f"{dist.get_rank()} and {wires[0]!r} elsewhere; pass the same to each",
            code="hook-wires-differ",
        )
    check("wire", wire, choice(*WIRES))
    nodes: dict[str, list[int]] = {}
    for rank, (host, _) in enumerate(hosts_and_wires):
        nodes.setdefault(host, []).append(rank)
    sizes = {len(members) for members in nodes.values()}
    if len(nodes) == 1 or sizes == {1} or len(sizes) > 1:
        return _Groups(_new_groups([list(range(len(hosts_and_wires)))]))
    inside = _new_groups(list(nodes.values()))
    return _Groups(_new_groups([list(lane) for lane in zip(*nodes.values(), strict=True)]), inside)


def _host() -> str:
    return socket.gethostname()


def _new_groups(groups: list[list[int]]) -> "ProcessGroup":
    """Create groups on all ranks, members or not; return this rank's group."""
    groups_by_ranks = {tuple(ranks): dist.new_group(ranks, backend="gloo") for ranks in groups}
    own: ProcessGroup = next(
        groups_by_ranks[ranks] for ranks in groups_by_ranks if dist.get_rank() in ranks
    )
    return own


@validate_call
def ddp_hook_state(*, wire: str = "int4") -> DdpHookState:
    """Return the state of `ddp_hook` for one DDP model over all ranks.

    On several hosts, each with the same number of ranks and more than one, gradients are summed
    inside each host in full precision, and averaged between hosts in few bits. Otherwise, also on
    a single host, they are averaged between all ranks in few bits. Ranks keep rounding errors
    and add them to their next gradients (error feedback).

    Args:
        wire: "int4" (default), "int8", "int2" or "bf16"; the same on all ranks.

    Returns:
        The first argument of ``register_comm_hook``.

    Raises:
        ConfigError: No process group was initialized, the wire is unknown, or it differs between
            ranks.

    Collective over torch's default process group; blocking.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "daso.ddp_hook_state() must come behind torch.distributed.init_process_group(), but no "
            "process group was initialized",
            code="hook-without-group",
        )
    return DdpHookState(wire)


def ddp_hook(state: DdpHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of DDP's gradients in few bits, with error feedback.

    ``model.register_comm_hook(daso.ddp_hook_state(), daso.ddp_hook)``

    Args:
        state: State from `ddp_hook_state`.
        bucket: Bucket of DDP, on the CPU.

    Returns:
        A future of the mean over all ranks, in the bucket's memory.

    Collective over the process group; non-blocking.
    """
    return state.submit(bucket)
