"""`daso.ParameterServer`: every rank computes, and serves a part of the model's parameters.

Updates of a layer leave while backward goes on for the layers below, and no step waits for the
slowest rank unless it is told to.
"""

import atexit
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch

from daso.checks import NONE, check, either, instance_of, validate_call
from daso.comm.collectives import gather, gather_unlike
from daso.comm.device.staging import DeviceStaging
from daso.comm.node.select import staging_of
from daso.comm.reclaim import Closer, forget, keep, reclaim
from daso.comm.topology import Topology, default, errors_on_all_ranks
from daso.errors import CheckpointError, ConfigError, LayoutError
from daso.plan.options import Exchange
from daso.server.hooks import ServerHooks
from daso.server.partition import Partition, layers_of
from daso.server.plan import Log, Mode, OptimizerState, Plan, Transport
from daso.server.service import ServerThread
from daso.server.shard import MakeOptimizer, ParameterShard
from daso.train.model.one_copy import is_saving_one_copy
from daso.train.model.params import Named, Trained, check_same_layout, start_equal
from daso.train.model.shards import refusal
from daso.train.others import OtherTensors, Ranks
from daso.train.setup import FACTORY, MODULE, stall_limit
from daso.train.state_sync import average_tensors

__all__ = ["ParameterServer"]


class ParameterServer(torch.optim.Optimizer):
    """Trains a model whose parameters every rank updates a part of, without a step in common.

    Used like an optimizer, around an ordinary loop::

        with daso.ParameterServer(model, lambda p: torch.optim.SGD(p, lr=0.1)) as server:
            for inputs, targets in loader:
                server.zero_grad()
                loss_fn(model(inputs), targets).backward()  # gradients leave here
                server.step()

    Parameters change before a layer's forward, and there alone. All ranks start from world rank 0's
    parameters and buffers, and `synchronize`, or the end of ``with``, makes them equal again.
    Gradients leave before all are known: clipping by their common norm, GradScaler and closures
    need `daso.DASO`.

    Args:
        model: On its device, with the weights to start from.
        optimizer_factory: Makes the optimizer of this rank's rows from a list of parameters: for
            each trained parameter of the model, in the order of ``model.parameters()``, its rows
            (rows, ...), which may be none. Its arithmetic must be number by number (SGD, Adam and
            kin; not LBFGS, LARS, Muon).
        topology: Who is where; found from MPI if None.
        mode: ``"sharded"``: each rank updates its rows of every weight with all ranks' gradients,
            and keeps the optimizer's state for these alone. ``"local_rows"``: it updates them with
            its own gradients alone, which halves the traffic; a row then learns from its owner's
            data. ``"replicated"``: each rank updates everything with its own gradients, and
            computes with the mean of all ranks' newest.
        staleness: How many steps a rank may be ahead of the slowest. 0: all take the same steps
            with the mean gradient, bit for bit those of one process that adds in rank order. None:
            nobody waits for other ranks' steps, only until its own gradients of the step before
            last are taken in: a slow link does not make gradients old. Unless it is 0, an owner
            takes in each gradient by itself, with the learning rate divided by the number of ranks.
        push_every: After how many finished layers gradients leave (n); ``"auto"`` follows what
            waits to be sent.
        scale_by_staleness: Divide the learning rate of a gradient by one more than its age in
            steps.
        optimizer_state: ``"per_rank"``: unless ``staleness`` is 0, an owner keeps a state
            (momentum, Adam's moments) for the gradients of each rank, and takes SGD's momentum in
            Nesterov's form; without that, momentum of gradients that are late adds up. Costs as
            much memory a rank as the bare optimizer on the whole model; ``optimizer_factory`` is
            called once for each rank. After DANA (Hakimi et al., arXiv 1907.11612).
            ``"shared"``: one for all.
        wire: How gradients cross: ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"`` or ``"topk"``;
            what it loses is part of the next gradient. Rows come back as they are. None: gradients
            too.
        transport: ``"messages"``: two-sided. ``"windows"``: memory that ranks of a node share, and
            one-sided puts between nodes; refused where these fail, or wait for their target.
        exchange: ``chunk_bytes`` of a message cross in one piece: what is needed sooner waits for
            no more than a few of them. A rank waits ``timeout_seconds`` without a sign of the
            others before it raises and names who is missing. ``nonfinite``: gradients of a layer
            that are not finite are left out, and raise in the third step in a row; or at once. On
            a GPU, which no hook waits for, they raise in the first step that knows of it.
            ``keep_local``: names of buffers and frozen parameters that stay each rank's own.

    Raises:
        ConfigError: A keyword has no such value.
        LayoutError: Parameters cannot be exchanged, or differ between ranks.
        TopologyError: MPI, launcher and ranks do not fit together.

    Collective over the world; blocking.
    """

    _step_supports_amp_scaling = False

    @validate_call
    def __init__(  # noqa: PLR0913 - checked as one record
        self,
        model: torch.nn.Module,
        optimizer_factory: MakeOptimizer,
        *,
        topology: Topology | None = None,
        mode: Mode = "sharded",
        staleness: int | None = 0,
        push_every: int | Literal["auto"] = "auto",
        scale_by_staleness: bool = False,
        optimizer_state: OptimizerState = "per_rank",
        wire: str | None = None,
        transport: Transport = "messages",
        exchange: Exchange | None = None,
    ) -> None:
        # Optimizer.__init__ is not called: groups and state are those of this rank's rows.
        with errors_on_all_ranks(topology, "make a daso.ParameterServer", stall_limit(exchange)):
            check("model", model, MODULE)
            check("optimizer_factory", optimizer_factory, FACTORY)
            check("topology", topology, either(instance_of(Topology), NONE))
            plan = Plan(
                mode=mode,
                staleness=staleness,
                push_every=push_every,
                scale_by_staleness=scale_by_staleness,
                optimizer_state=optimizer_state,
                wire=wire,
                transport=transport,
                exchange=Exchange() if exchange is None else exchange,
            )
            every = (*model.named_parameters(), *model.named_buffers())
            plan.exchange.check_kept([name for name, one in every if not one.requires_grad])
        self._topology = default() if topology is None else topology
        self._model, self._plan = model, plan
        limit = plan.exchange.timeout_seconds
        self._topology.rendezvous("make a daso.ParameterServer", limit)
        number = reclaim(self._topology, lambda word: gather(self._topology, word, limit))
        names, named, layers = layers_of(model)
        self._agree(named)
        rank_info = self._topology.rank_info
        shares = Partition(named, layers, rank_info.world_size, whole=plan.whole)
        rows = ParameterShard(rank_info.rank, shares, plan, optimizer_factory)
        self._topology.raise_on_all_ranks(_problem(rows), ConfigError)
        # What schedulers and people change; the serving thread has groups of its own.
        groups = self._groups = [dict(group) for group in rows.inner.param_groups]
        self._shard = rows
        self._serving = ServerThread(self._topology, shares, plan, rows, _copies(named))
        self._client = ServerHooks(model, names, shares, plan, self._serving, lambda: groups)
        self._closed = False
        trained = Trained(None, model, named)  # type: ignore[arg-type]  # the rows have one
        self._others = OtherTensors(
            trained,
            frozenset,
            Ranks(
                partial(gather_unlike, self._topology, timeout_seconds=limit),
                self._average,
                self._average,
                None,
                plan.exchange.keeps_own,
                says=rank_info.rank == 0,
            ),
        )
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Any] = OrderedDict()
        _open.add(self._serving)
        keep(self, self._topology, number, _closer(self._client, self._serving))

    def _agree(self, named: Any) -> None:
        trained = Trained(None, self._model, named)  # type: ignore[arg-type]  # it has none yet
        plan = repr(self._plan)
        first = self._topology.world_comm.bcast(plan)
        self._topology.raise_on_all_ranks(
            None
            if plan == first
            else f"every rank must be given the same options, but there are {plan} here and "
            f"{first} on rank 0; pass the same keywords everywhere",
            ConfigError,
        )
        problem = refusal([*named, *trained.others()], "for daso.ParameterServer", "use daso.DASO")
        self._topology.raise_on_all_ranks(problem, LayoutError)
        check_same_layout(trained, self._topology)
        exchange, where = self._plan.exchange, self._topology
        start_equal(trained, where, exchange.timeout_seconds, where, exchange.keeps_own)

    # --- as an optimizer ---------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # read only
        """Groups of this rank's rows; the next step is taken with the values that are in them."""
        return self._groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # read only
        """State for this rank's rows and its own gradients, which its serving thread changes."""
        if is_saving_one_copy():
            raise CheckpointError(
                "torch.distributed.checkpoint keeps one copy for all ranks, but a "
                "ParameterServer's state is that of each rank's own rows; save state_dict() of "
                "each rank by torch.save"
            )
        return self._shard.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # read only
        """Defaults of the optimizer of this rank's rows."""
        return self._shard.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the model's trained parameters."""
        for _, tensor in self._client.shares.named:
            if set_to_none:
                tensor.grad = None
            elif tensor.grad is not None:
                tensor.grad.detach_()
                tensor.grad.zero_()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """End a step: what has not left of its gradients leaves.

        Args:
            closure: None; a closure cannot be called before gradients leave.

        Raises:
            ConfigError: There is a closure.
            ExchangeError: Serving failed since the last step.
            NonFiniteError: Gradients were not finite three steps in a row.

        Blocks while more than two steps' messages have not left.
        """
        if closure is not None:
            raise ConfigError(
                "a step must be taken without a closure where gradients leave during backward; "
                "call backward before step(), or use daso.DASO"
            )
        for hook in (*self._optimizer_step_pre_hooks.values(),):
            hook(self, (), {})
        self._client.step()
        for hook in (*self._optimizer_step_post_hooks.values(),):
            hook(self, (), {})

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients pile up on this rank; those of the first backward outside leave."""
        self._client.keep(keeps=True)
        try:
            yield
        finally:
            self._client.keep(keeps=False)

    # --- beside steps ------------------------------------------------------------------------

    @torch.inference_mode(mode=False)
    def synchronize(self) -> None:
        """Take in all gradients; make parameters and buffers bit-identical on all ranks.

        Call it before evaluating, saving, and at the end; ranks may have taken different numbers of
        steps, unless staleness is 0. The model's floating buffers (BatchNorm statistics), and
        frozen parameters that ranks changed differently, become the means of all ranks.

        Collective over the world; blocking.
        """
        self._client.meet()
        self._others.equalize()
        self._client.checks.settle()  # who raises has met the others

    def _average(self, tensors: list[torch.Tensor]) -> None:
        """Set tensors to their means over all ranks. Collective over the world; blocking."""
        chunk_bytes = self._plan.exchange.chunk_bytes
        average_tensors(tensors, self._topology, self._serving.engine.run, chunk_bytes)

    def report(self) -> dict[str, Any]:
        """Return what was chosen and what happened so far, on this rank.

        Returns:
            Plain values: ``mode``, ``staleness``, ``wire``, ``transport``, ``push_every`` (layers,
            now), ``steps``, ``gradient_age`` (mean, in steps of all ranks, when this rank took one
            in), ``updates`` (of this rank's rows, over layers), ``dropped`` (steps), ``bytes_sent``
            (to all ranks), ``exposed_seconds`` (the training thread stood still for others).
        """
        return {
            "mode": self._plan.mode,
            "staleness": self._plan.staleness,
            "wire": self._plan.wire,
            "transport": self._plan.transport,
            "push_every": self._client.departures.pace.layers,
            "steps": self._client.steps,
            "gradient_age": self._shard.ages.mean,
            "updates": sum(self._shard.versions),
            "dropped": self._client.checks.dropped,
            "bytes_sent": self._serving.service.queue.sent_bytes,
            "exposed_seconds": self._serving.exposed_seconds,
        }

    def keep_log(self) -> None:
        """Keep in memory from now on what a training is replayed from; before the first step."""
        self._client.keep_log()
        self._shard.logs = True

    def logged(self) -> Log:
        """Return what this rank did since `keep_log`: see `daso.server.replay`."""
        return self._client.logged()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state for this rank's rows; save one on every rank.

        Raises:
            CheckpointError: Ranks did not meet since the last step: rows may be changing.
        """
        if self._serving.serves:
            raise CheckpointError(
                "state must be saved while nobody trains, but steps were taken, or the model was "
                "evaluated, since ranks met; call synchronize() on all ranks first"
            )
        optimizers = self._shard.optimizers
        return {
            "inner": {source: self._saved(inner) for source, inner in optimizers.items()},
            "residuals": self._serving.service.compressor.residuals(),
            "share": self._share(),
            "steps": self._client.steps,
        }

    def _saved(self, inner: torch.optim.Optimizer) -> dict[str, Any]:
        """Return an optimizer's state, with the values of groups that steps are taken with."""
        state = inner.state_dict()
        groups = [
            {**group, "params": saved["params"]}
            for group, saved in zip(self._groups, state["param_groups"], strict=True)
        ]
        return {**state, "param_groups": groups}

    def _share(self) -> dict[str, Any]:
        rank_info = self._topology.rank_info
        return {
            "mode": self._plan.mode,
            "rank": rank_info.rank,
            "ranks": rank_info.world_size,
            "states": [*self._shard.optimizers],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with the state of this rank's rows; load the model before making the server.

        Args:
            state_dict: From `state_dict` of this rank.

        Raises:
            CheckpointError: It is of other rows, or ranks did not meet since the last step.

        Collective over the world; blocking.
        """
        problem = None
        if self._serving.serves:
            problem = "state must be loaded while nobody trains; call synchronize() first"
        elif state_dict.get("share") != self._share():
            problem = (
                f"state must be that of the same rows, {self._share()}, not "
                f"{state_dict.get('share')}; load each rank's own, in a world of the same size"
            )
        self._topology.raise_on_all_ranks(problem, CheckpointError)
        timeout_seconds = self._plan.exchange.timeout_seconds
        counts = gather(self._topology, int(state_dict["steps"]), timeout_seconds)
        if self._plan.together and min(counts) != max(counts):
            raise CheckpointError(
                f"with staleness=0 all ranks must have taken the same number of steps, but these "
                f"states are of {min(counts)} to {max(counts)}; give the staleness they had"
            )
        server = self._shard
        for source, inner in server.optimizers.items():
            inner.load_state_dict(dict(state_dict["inner"][source]))
        self._serving.service.compressor.load_residuals(state_dict.get("residuals", {}))
        self._groups[:] = [dict(group) for group in server.inner.param_groups]
        self._client.resume(int(state_dict["steps"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            try:
                self.synchronize()
            except BaseException:
                self.abandon()
                raise
            self.close()
        else:
            self.abandon()

    def close(self) -> None:
        """Stop serving and take the hooks off; call `synchronize` first to agree.

        Collective over the world; blocking; idempotent.
        """
        if not self._closed:
            self._closed = True
            forget(self)
            _close(self._client, self._serving)

    def abandon(self) -> None:
        """Stop the thread, whatever is under way; nothing collective: ranks may be missing."""
        self._client.close()
        self._serving.engine.abandon()

    def __repr__(self) -> str:
        return f"ParameterServer({self._shard.inner!r}, {self._plan!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(
            "a ParameterServer cannot be copied: it serves this process's ranks; save state_dict()"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002 - torch's
        """Refuse: the rows of new parameters would belong to nobody."""
        raise ConfigError(
            "a ParameterServer trains the parameters that its model had when it was made; make "
            "another one after adding some"
        )


def _copies(named: Named) -> DeviceStaging | None:
    """Return how gradients come to the host; None where that is their place, or places differ."""
    devices = {tensor.device for _, tensor in named}
    return staging_of(devices.pop()) if len(devices) == 1 else None


def _problem(rows: ParameterShard) -> str | None:
    """Return what is wrong with what a factory made."""
    mine = {id(param) for param in rows.stand_ins}
    given = {id(param) for group in rows.inner.param_groups for param in group["params"]}
    if not given <= mine:
        return (
            "optimizer_factory must make an optimizer of the parameters it is given, but it took "
            "others; pass on its argument"
        )
    return None


_open: "weakref.WeakSet[ServerThread]" = weakref.WeakSet()


def _close(client: ServerHooks, serving: ServerThread) -> None:
    """Take the hooks off and stop serving. Collective over the world; blocking."""
    client.close()
    serving.close()
    _open.discard(serving)


def _closer(client: ServerHooks, serving: ServerThread) -> Closer:
    """Return how to close a server that was dropped."""

    def abandon() -> None:
        client.close()
        serving.engine.abandon()

    def state() -> object:
        return serving.serves if serving.engine.sound else None  # who serves ends by giving up

    return Closer(partial(_close, client, serving), abandon, state)


@atexit.register
def _stop_threads() -> None:
    """Stop the threads before MPI is finalized; nothing collective: ranks may be missing."""
    for serving in list(_open):
        serving.engine.abandon()
