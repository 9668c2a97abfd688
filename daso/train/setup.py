"""Validate the keywords of `daso.DASO` and `daso.attach` into one `Setup` record."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from daso.checks import NONE, Rule, check, either, instance_of
from daso.comm.mpi import library
from daso.comm.topology import RankInfo, Topology
from daso.errors import CheckpointError, ConfigError
from daso.plan.auto import Auto
from daso.plan.options import Exchange, Gradients, MergeName, Settings, Wire
from daso.plan.policies import Fixed, Plateau, Qsr
from daso.plan.schedule import Policy, State
from daso.train.deltas.outer import MakeOuter, build_optimizer
from daso.train.inner.combined import CombinedOptimizer
from daso.train.model.params import Named, Trained, layout_of

ADDRESS = re.compile(" at 0x[0-9a-f]+")  # in Python's default repr of an object
# Version of a stored exchange; raised when the meaning of a tensor or the bits of a run change.
FORMAT = 4


@dataclass(frozen=True, slots=True)
class Setup:
    """Keywords of `daso.DASO` and `daso.attach`; copied with the optimizer."""

    module: torch.nn.Module | None
    policy: Policy
    settings: Settings
    outer: MakeOuter | None
    policy_text: str  # the policy as given; a user's own policy may change while it runs

    def check(self, inner: torch.optim.Optimizer) -> None:
        """Raise if the optimizer lacks something that the keywords need."""
        if not self.settings.whole and self.module is None:
            raise ConfigError(
                f"{self.settings.gradients!r} needs the model whose layers wait for their "
                f"gradients, but there is none; pass module=, or step='model'",
                code="layerwise-needs-module",
            )
        if self.module is not None:
            held = {id(param) for param in self.module.parameters()}
            trained = [param for group in inner.param_groups for param in group["params"]]
            if trained and not any(id(param) in held for param in trained):
                raise ConfigError(
                    f"module must hold the parameters that the optimizer trains, but none of the "
                    f"{len(trained)} is in this {type(self.module).__name__}; pass the model whose "
                    f"parameters() the optimizer was given",
                    code="module-without-parameters",
                )
        self._check_kept_names(inner)
        if isinstance(inner, CombinedOptimizer) and not self.settings.whole:
            raise ConfigError(
                f"several optimizers must step as a whole, but {self.settings.gradients!r} steps "
                f"layer by layer; leave Gradients(reducer=, step=) out",
                code="several-optimizers-by-layer",
            )
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(inner).__mro__):
            raise ConfigError(
                "an optimizer must hold the state of all its parameters, but "
                "ZeroRedundancyOptimizer keeps a part on each rank; shard the model by "
                "torch.distributed.fsdp.fully_shard, which shards the state too",
                code="zero-redundancy-optimizer",
            )
        if isinstance(self.policy, Qsr) and any(
            group.get("lr") is None for group in inner.param_groups
        ):
            raise ConfigError(
                f"Qsr needs a learning rate in every parameter group, but {type(inner).__name__} "
                f"has none; use {Auto()!r}",
                code="qsr-needs-learning-rate",
            )

    def _check_kept_names(self, inner: torch.optim.Optimizer) -> None:
        """Raise for names of `Exchange.keep_local` that no buffer or frozen parameter has."""
        names = [name for name, _ in Trained.by(inner, self.module).others()]
        self.settings.exchange.check_kept(names)

    def start(self) -> State:
        """Return the schedule's state before the first batch."""
        settings = self.settings
        return replace(
            self.policy.start(),
            fragments=settings.exchange.fragments,
            sparse=settings.sparse,
        )

    def start_from(self, old: State, *, same: bool) -> State:
        """Return the state that continues another run's count, with nothing in flight.

        Args:
            old: State of that run.
            same: Whether it had the same keywords.
        """
        first, batch = self.start(), old.batch
        return replace(
            old if same else replace(first, epoch=old.epoch),
            batch=batch,
            sent=None,
            last=batch,
            agreed=batch,
            fragments=first.fragments,
        )

    def text(self) -> str:
        """Return the keywords that must be equal on all ranks, as text."""
        param = torch.nn.Parameter(torch.zeros(1, device="cpu"))
        outer = self.outer and repr(build_optimizer("outer", self.outer, [param]))
        return f"policy={self.policy_text}, outer={outer}, {self.settings!r}"

    def compatibility_text(self) -> str:
        """Return the keywords that must be equal when a checkpoint is loaded, as text.

        The stall limit, the length of the run, the memory from which deltas are sent and the
        response to a lost rank may differ.
        """
        exchange = self.settings.exchange
        exchange = replace(
            exchange, timeout_seconds=1.0, nonfinite="drop", gpu_direct=False, elastic=False
        )
        policy, policy_text = self.policy, self.policy_text
        if isinstance(policy, Plateau):
            policy_text = _policy_text(replace(policy, epochs=1 + policy.warmup + policy.cooldown))
        settings = replace(self.settings, exchange=exchange)
        return replace(self, policy_text=policy_text, settings=settings).text()

    def shape(
        self,
        inner: torch.optim.Optimizer,
        rank_info: RankInfo | None,
        named: Named | None = None,
    ) -> dict[str, Any] | None:
        """Return the properties in which a checkpoint and a session must agree for an exact fit.

        Args:
            inner: The optimizer.
            rank_info: The ranks and nodes; None for a copy before its first step, which knows no
                world, as finding it is collective.
            named: Parameters of an open session, including those frozen since it opened.
        """
        if rank_info is None:
            return None
        named = Trained.by(inner, self.module).named if named is None else named
        # Message sizes, and with them rounding errors, depend on the kind of device.
        devices = sorted({tensor.device.type for _, tensor in named} - {"cpu"})
        return {
            "format": FORMAT,
            "rank": rank_info.rank,
            "node_sizes": list(rank_info.node_sizes),
            "layout": layout_of(named).digest,
            "setup": self.compatibility_text(),
            **({"devices": devices} if devices else {}),
        }

    def choices(self, rank_info: RankInfo | None) -> dict[str, Any]:
        """Return the choices as plain values; without the world if it is not known yet."""
        settings = self.settings
        return {
            **({} if rank_info is None else _surroundings(rank_info)),
            "wire": settings.wire,
            "merge": settings.merge,
            "outer": settings.outer,
            "fragments": settings.exchange.fragments,
            "gpu_direct": settings.exchange.gpu_direct,
            "algorithm": settings.exchange.algorithm,
            "gradient_reducer": settings.gradients.reducer,
            "step": "model" if settings.whole else "layerwise",
            "policy": self.policy_text,
        }


def _policy_text(policy: Policy) -> str:
    """Return a text of a policy that is equal in every process, also for a plain class."""
    if type(policy).__repr__ is not object.__repr__:
        return ADDRESS.sub("", repr(policy))
    slots = [name for cls in type(policy).__mro__ for name in getattr(cls, "__slots__", ())]
    names = sorted({*getattr(policy, "__dict__", {}), *slots} - {"__weakref__", "__dict__"})
    fields = ", ".join(f"{name}={getattr(policy, name, None)!r}" for name in names)
    return ADDRESS.sub("", f"{type(policy).__name__}({fields})")


def make_setup(  # noqa: PLR0913 - the keywords of DASO and attach
    inner: object,
    topology: object,
    *,
    module: torch.nn.Module | None,
    policy: Policy | None,
    wire: Wire,
    merge: MergeName | float,
    outer: MakeOuter | None,
    exchange: Exchange | None,
    gradients: Gradients | None,
) -> Setup:
    """Return checked keywords as one record."""
    check("inner", inner, OPTIMIZER, "; make one first: torch.optim.AdamW(model.parameters())")
    check("module", module, either(MODULE, NONE))
    check("topology", topology, either(instance_of(Topology), NONE))
    check("policy", policy, either(POLICY, NONE), "; write policy=daso.Auto()")
    check("outer", outer, either(FACTORY, NONE))
    check("exchange", exchange, either(instance_of(Exchange), NONE))
    check("gradients", gradients, either(instance_of(Gradients), NONE))
    gradients = Gradients() if gradients is None else gradients
    if policy is None:
        # Prioritized portions and layerwise steps average gradients at every batch.
        synchronous = gradients.reducer == "prioritized" or gradients.step == "layerwise"
        policy = Fixed(1, 0) if synchronous else Auto()
    settings = Settings(
        wire=wire,
        merge=merge,
        exchange=Exchange() if exchange is None else exchange,
        gradients=gradients,
        outer=outer is not None,
        selective=getattr(policy, "selective", None),
    )
    setup = Setup(module, policy, settings, outer, _policy_text(policy))
    setup.check(inner)  # type: ignore[arg-type]  # it is one
    return setup


def check_format(shape: Mapping[str, Any] | None) -> None:
    """Raise CheckpointError for a stored shape of another format."""
    if shape is not None and shape.get("format") != FORMAT:
        raise CheckpointError(
            f"the part 'daso' of a state_dict must be of this version of daso, whose format is "
            f"{FORMAT}, but it is of format {shape.get('format')}; leave it out to load the inner "
            f"optimizer's alone",
            code="state-of-other-format",
        )


def combined(
    inner: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> torch.optim.Optimizer:
    """Return several optimizers as one; a single one unchanged."""
    if not isinstance(inner, list | tuple):
        return inner  # type: ignore[return-value]  # it is checked later
    for number, optimizer in enumerate(inner):
        check(f"inner[{number}]", optimizer, OPTIMIZER)
    if not inner:
        raise ConfigError(
            "inner must be an optimizer, or several, not an empty list; make one first: "
            "torch.optim.AdamW(model.parameters())",
            code="no-inner-optimizer",
        )
    return inner[0] if len(inner) == 1 else CombinedOptimizer(inner)


def stall_limit(exchange: object) -> float:
    """Return the stall limit in seconds; the default for a wrong type."""
    return (
        exchange.timeout_seconds if isinstance(exchange, Exchange) else Exchange().timeout_seconds
    )


def _is_optimizer(value: object) -> bool:
    # Classes need not derive from torch's; they must have the attributes that daso uses.
    names = ("param_groups", "state", "step", "zero_grad", "state_dict")
    ours = any(getattr(value, name, None) is not None for name in ("_session", "_serving"))
    return not isinstance(value, type) and all(hasattr(value, name) for name in names) and not ours


def _is_policy(value: object) -> bool:
    names = ("start", "tune_batch", "tune_exchange", "tune_epoch")
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in names
    )


OPTIMIZER = Rule("an optimizer of torch's kind, not wrapped yet", _is_optimizer)
POLICY = Rule("daso.Auto(), daso.Fixed(...), daso.Plateau(...) or daso.Qsr(...)", _is_policy)
MODULE = Rule("a torch.nn.Module", lambda value: isinstance(value, torch.nn.Module))
STATE_DICT = Rule(
    "what an optimizer's state_dict() returns, with 'state' and 'param_groups'",
    lambda value: isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys(),
)
FACTORY = Rule(
    "a function that makes an optimizer from a list of parameters",
    lambda value: callable(value) and not isinstance(value, torch.optim.Optimizer),
)


def _surroundings(rank_info: RankInfo) -> dict[str, Any]:
    return {
        "mpi": library(),
        "world": rank_info.world_size,
        "nodes": rank_info.nodes,
        "node_sizes": list(rank_info.node_sizes),
        "lanes": rank_info.lanes,
        # With several ranks the node adds its transport once it is built.
        "node_transport": "none" if rank_info.world_size == 1 else "not chosen yet",
    }
