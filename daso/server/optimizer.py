"""`daso.ParameterServer`: every rank computes, and serves a part of the model's parameters.

Gradients of a layer are pushed during backward. Steps wait for the slowest rank only if
``staleness`` requires it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch

from daso.checks import NONE, check, either, instance_of, validate_call
from daso.comm.control import broadcast, gather, gather_unlike
from daso.comm.reclaim import CloseCallbacks, reclaim, track, untrack
from daso.comm.topology import Topology, default, errors_on_all_ranks
from daso.errors import CheckpointError, ConfigError
from daso.plan.options import Exchange
from daso.server.hooks import ServerHooks
from daso.server.partition import Partition, layers_of
from daso.server.plan import Log, Mode, OptimizerState, Plan
from daso.server.service import ServerThread
from daso.server.shard import MakeOptimizer, ParameterShard
from daso.torch_private import post_step_hooks, pre_step_hooks, set_step_hooks
from daso.train.model.one_copy import is_saving_one_copy
from daso.train.model.others import OtherTensors, Ranks
from daso.train.model.params import Trained, check_same_layout, start_equal
from daso.train.model.shards import refusal
from daso.train.model.state_sync import average_tensors
from daso.train.setup import FACTORY, MODULE, stall_limit


class ParameterServer(torch.optim.Optimizer):
    """Trains a model whose parameters are each updated by one rank, without a common step.

    Used like an optimizer, around an ordinary loop::

        with daso.ParameterServer(model, lambda p: torch.optim.SGD(p, lr=0.1)) as server:
            for inputs, targets in loader:
                server.zero_grad()
                loss_fn(model(inputs), targets).backward()  # gradients leave here
                server.step()

    Parameters change only before a layer's forward. All ranks start from world rank 0's parameters
    and buffers, and `synchronize`, or the end of ``with``, makes them equal again. Gradients are
    applied before all are known: clip with ``clip_value`` or ``clip_norm``; GradScaler and closures
    need `daso.DASO`.

    Args:
        model: On its device, with the initial weights.
        optimizer_factory: Creates the optimizer of this rank's rows from a list of parameters: for
            each trained parameter of the model, in the order of ``model.parameters()``, its rows
            (rows, ...), possibly empty. Its arithmetic must be elementwise (SGD, Adam and similar;
            not LBFGS, LARS, Muon).
        topology: Topology of the ranks; None: MPI's world.
        mode: ``"sharded"``: each rank updates its rows of every weight with all ranks' gradients,
            and keeps the optimizer's state only for these rows. ``"local_rows"``: it updates them
            only with its own gradients, which halves the traffic; a row then learns only from its
            owner's data.
        staleness: Maximum steps that a rank may be ahead of the slowest. 0: all take the same steps
            with the mean gradient, bit for bit those of one process that adds in rank order. None:
            ranks do not wait for other ranks' steps, only until owners have applied their gradients
            of the step before last, so that a slow link does not make gradients old. Unless it is
            0, an owner applies each gradient separately, with the learning rate divided by the
            number of ranks.
        push_every: Number of finished layers (n) after which gradients are pushed; ``"auto"``
            adapts it to the send backlog.
        scale_by_staleness: Divide the learning rate of a gradient by one more than its age in
            steps.
        optimizer_state: ``"per_rank"``: unless ``staleness`` is 0, an owner keeps a state
            (momentum, Adam's moments) for the gradients of each rank, and uses SGD's momentum in
            Nesterov's form; otherwise momentum of late gradients adds up. Each rank then needs as
            much memory as for the plain optimizer on the whole model; ``optimizer_factory`` is
            called once for each rank. After DANA (Hakimi et al., arXiv 1907.11612).
            ``"shared"``: one state for all ranks.
        wire: Wire of gradients: ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"`` or ``"topk"``; its
            rounding error is added to the next gradient. Rows are returned uncompressed. None:
            gradients are uncompressed too.
        clip_value: Limit of each gradient element's absolute value, applied by the owner right
            before its optimizer's step: to the mean gradient if ``staleness`` is 0, otherwise to
            each rank's gradient. None: no limit.
        clip_norm: Limit of the L2 norm of the whole gradient, one step late: owners multiply a
            step's gradients by ``min(1, clip_norm / (norm + 1e-6))`` with the norm of the step
            before, of the mean gradient if ``staleness`` is 0, otherwise of the rank's own
            gradient. The first step is not scaled. Applied before ``clip_value``; needs
            ``mode="sharded"``. None: no limit.
        exchange: ``chunk_bytes``: pieces of a message, so that urgent messages wait only for a few
            of them. ``timeout_seconds``: time without any message from other ranks after which a
            rank raises and names the missing ranks. ``nonfinite``: non-finite gradients of a layer
            are skipped, and raise in the third step in a row; or at once. On a GPU, on which hooks
            do not wait, they raise in the first step after the result arrived. ``keep_local``:
            names of buffers and frozen parameters that stay local to each rank.

    Raises:
        ConfigError: A keyword has an invalid value.
        LayoutError: Parameters cannot be exchanged, or differ between ranks.
        TopologyError: MPI, launcher and ranks are inconsistent.

    Collective over the world; blocking.
    """

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
        clip_value: float | None = None,
        clip_norm: float | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        # Optimizer.__init__ is not called: groups and state belong to this rank's rows.
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
                clip_value=clip_value,
                clip_norm=clip_norm,
                exchange=Exchange() if exchange is None else exchange,
            )
            every = (*model.named_parameters(), *model.named_buffers())
            plan.exchange.check_kept([name for name, tensor in every if not tensor.requires_grad])
        self._topology = default() if topology is None else topology
        self._model, self._plan = model, plan
        limit = plan.exchange.timeout_seconds
        self._topology.rendezvous("make a daso.ParameterServer", limit)
        number = reclaim(self._topology, lambda report: gather(self._topology, report, limit))
        names, named, layers = layers_of(model)
        self._agree(named)
        rank_info = self._topology.rank_info
        partition = Partition(named, layers, rank_info.world_size)
        rows = ParameterShard(rank_info.rank, partition, plan, optimizer_factory)
        self._topology.raise_on_all_ranks(rows.problem(), limit)
        # Groups for schedulers and users to change; the serving thread has its own.
        groups = self._groups = [dict(group) for group in rows.inner.param_groups]
        self._shard = rows
        self._serving = ServerThread(self._topology, partition, plan, rows)
        self._client = ServerHooks(model, names, partition, plan, self._serving, lambda: groups)
        self._closed = False
        trained = Trained(None, model, named)  # type: ignore[arg-type]  # the rows have an optimizer
        self._others = OtherTensors(
            trained,
            frozenset,
            Ranks(
                partial(gather_unlike, self._topology, timeout_seconds=limit),
                self._average,
                self._average,
                None,
                plan.exchange.keeps_own,
                warns=rank_info.rank == 0,
            ),
        )
        set_step_hooks(self)
        client = self._client
        callbacks = CloseCallbacks(client.close, client.abandon, client.open_state)
        track(self, self._topology, number, callbacks)

    def _agree(self, named: Any) -> None:
        """Raise if options or models differ between ranks, and start from rank 0's values."""
        trained = Trained(None, self._model, named)  # type: ignore[arg-type]  # no optimizer yet
        topology, exchange = self._topology, self._plan.exchange
        limit = exchange.timeout_seconds
        first = broadcast(topology, repr(self._plan), limit)
        topology.raise_on_all_ranks(self._plan.difference(first), limit)
        problem = refusal([*named, *trained.others()], "for daso.ParameterServer", "use daso.DASO")
        topology.raise_on_all_ranks(problem, limit)
        check_same_layout(trained, topology, limit)
        start_equal(trained, topology, limit, topology, exchange.keeps_own)

    # --- as an optimizer ---------------------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuse a GradScaler, which reads this attribute before it steps an optimizer."""
        raise ConfigError(
            "a GradScaler must check all gradients before any is applied, but a ParameterServer "
            "applies them during backward; use autocast with torch.bfloat16, which needs no "
            "scaler, or daso.DASO",
            code="server-with-grad-scaler",
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # read only
        """Return the groups of this rank's rows, whose values apply from the next step."""
        return self._groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # read only
        """Return this rank's rows' optimizer state, changed by its serving thread."""
        if is_saving_one_copy():
            raise CheckpointError(
                "torch.distributed.checkpoint keeps one copy for all ranks, but a "
                "ParameterServer's state is that of each rank's own rows; save state_dict() of "
                "each rank by torch.save",
                code="server-state-not-shared",
            )
        return self._shard.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # read only
        """Return the defaults of the optimizer of this rank's rows."""
        return self._shard.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the model's trained parameters."""
        for _, tensor in self._client.partition.named:
            if set_to_none:
                tensor.grad = None
            elif tensor.grad is not None:
                tensor.grad.detach_()
                tensor.grad.zero_()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """End a step: push its remaining gradients.

        Args:
            closure: None; a closure cannot be called before gradients are pushed.

        Raises:
            ConfigError: A closure was passed.
            ExchangeError: Serving failed since the last step.
            NonFiniteError: Gradients were not finite three steps in a row.

        Blocks while more than two steps' messages are queued.
        """
        if closure is not None:
            raise ConfigError(
                "a step must be taken without a closure where gradients leave during backward; "
                "call backward before step(), or use daso.DASO",
                code="server-step-with-closure",
            )
        for hook in (*pre_step_hooks(self).values(),):
            hook(self, (), {})
        self._client.step()
        for hook in (*post_step_hooks(self).values(),):
            hook(self, (), {})

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank; the first backward outside pushes them."""
        self._client.keep(keeps=True)
        try:
            yield
        finally:
            self._client.keep(keeps=False)

    # --- between steps -----------------------------------------------------------------------

    @torch.inference_mode(mode=False)
    def synchronize(self) -> None:
        """Apply all gradients; make parameters and buffers bit-identical on all ranks.

        Call it before evaluating, saving, and at the end; unless staleness is 0, ranks may have
        taken different numbers of steps. The model's floating-point buffers (BatchNorm statistics),
        and frozen parameters that ranks changed differently, become the means of all ranks.

        Collective over the world; blocking.
        """
        self._client.meet()
        self._others.equalize()
        self._client.checks.settle()  # may raise, after all collectives

    def _average(self, tensors: list[torch.Tensor]) -> None:
        """Set tensors to their means over all ranks. Collective over the world; blocking."""
        chunk_bytes = self._plan.exchange.chunk_bytes
        average_tensors(
            *(tensors, self._topology, self._serving.engine.run, chunk_bytes),
            timeout_seconds=self._plan.exchange.timeout_seconds,
        )

    def report(self) -> dict[str, Any]:
        """Return this rank's settings and counters.

        Returns:
            Plain values: ``mode``, ``staleness``, ``wire``, ``push_every`` (layers, now),
            ``steps``, ``gradient_age`` (mean, in steps of all ranks, when this rank applied them),
            ``updates`` (of this rank's rows, over layers), ``norm`` (of the last step's gradient,
            with ``clip_norm``), ``dropped`` (steps), ``bytes_sent`` (to all ranks),
            ``exposed_seconds`` (the training thread waited for others).
        """
        return {
            "mode": self._plan.mode,
            "staleness": self._plan.staleness,
            "wire": self._plan.wire,
            "push_every": self._client.pushes.pace.layers,
            "steps": self._client.steps,
            "gradient_age": self._shard.ages.mean,
            "updates": sum(self._shard.versions),
            "norm": self._serving.service.norm.last,
            "dropped": self._client.checks.dropped,
            "bytes_sent": self._serving.service.queue.sent_bytes,
            "exposed_seconds": self._serving.exposed_seconds,
        }

    def keep_log(self) -> None:
        """Start logging, in memory, the events for a replay; call it before the first step."""
        self._client.keep_log()
        self._shard.logs = True

    def logged(self) -> Log:
        """Return this rank's log since `keep_log`; see `daso.server.replay`."""
        return self._client.logged()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state for this rank's rows; save one on every rank.

        Raises:
            CheckpointError: Ranks have not synchronized since the last step: rows may be changing.
        """
        return self._serving.state(self._groups, self._client.steps)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of this rank's rows; load the model before creating the server.

        Args:
            state_dict: State from `state_dict` of this rank.

        Raises:
            CheckpointError: The state belongs to other rows, or ranks have not synchronized since
                the last step.

        Collective over the world; blocking.
        """
        self._serving.load_state(state_dict)
        self._groups[:] = [dict(group) for group in self._shard.inner.param_groups]
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
        """Stop serving and remove the hooks; call `synchronize` first to make ranks equal.

        Collective over the world; blocking; idempotent.
        """
        if not self._closed:
            self._closed = True
            untrack(self)
            self._client.close()

    def abandon(self) -> None:
        """Stop the thread in any state; not collective: ranks may be missing."""
        self._client.abandon()

    def __repr__(self) -> str:
        return f"ParameterServer({self._shard.inner!r}, {self._plan!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(
            "a ParameterServer cannot be copied: it serves this process's ranks; save state_dict()",
            code="server-cannot-be-copied",
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002 - torch's
        """Raise `ConfigError`: ranks own no rows of new parameters."""
        raise ConfigError(
            "a ParameterServer trains the parameters that its model had when it was made; make "
            "another one after adding some",
            code="server-parameters-are-fixed",
        )
