"""How a model is trained over all ranks: the keywords of the doors, checked, compared and told."""

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
from daso.plan.merge import MergeName
from daso.plan.options import Exchange, Gradients, Settings, Wire
from daso.plan.policies import Fixed, Plateau, Qsr
from daso.plan.schedule import Policy, State
from daso.train.deltas.outer import MakeOuter, build_optimizer
from daso.train.inner.combined import CombinedOptimizer
from daso.train.model.params import Named, Trained, layout_of

__all__ = ["FACTORY", "MODULE", "Setup", "check_format", "combined", "make_setup", "stall_limit"]

ADDRESS = re.compile(" at 0x[0-9a-f]+")  # in what Python says of an object by itself
# Of a stored exchange; goes up when a tensor changes its meaning, or a run its bits.
FORMAT = 4


@dataclass(frozen=True, slots=True)
class Setup:
    """The keywords of the doors; what a copy of the optimizer takes with it."""

    module: torch.nn.Module | None
    policy: Policy
    settings: Settings
    outer: MakeOuter | None
    policy_text: (
        str  # the policy in words, as it was given: one of somebody's own may count in itself
    )

    def check(self, inner: torch.optim.Optimizer) -> None:
        """Raise where the policy asks for what an optimizer lacks."""
        if not self.settings.whole and self.module is None:
            raise ConfigError(
                f"{self.settings.gradients!r} needs the model whose layers wait for their "
                f"gradients, but there is none; pass module=, or step='model'"
            )
        if self.module is not None:
            held = {id(param) for param in self.module.parameters()}
            trained = [param for group in inner.param_groups for param in group["params"]]
            if trained and not any(id(param) in held for param in trained):
                raise ConfigError(
                    f"module must hold the parameters that the optimizer trains, but none of the "
                    f"{len(trained)} is in this {type(self.module).__name__}; pass the model whose "
                    f"parameters() the optimizer was given"
                )
        self._check_kept_names(inner)
        if isinstance(inner, CombinedOptimizer) and not self.settings.whole:
            raise ConfigError(
                f"several optimizers must step as a whole, but {self.settings.gradients!r} steps "
                f"layer by layer; leave Gradients(reducer=, step=) out"
            )
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(inner).__mro__):
            raise ConfigError(
                "an optimizer must hold the state of all its parameters, but "
                "ZeroRedundancyOptimizer keeps a part on each rank; shard the model by "
                "torch.distributed.fsdp.fully_shard, which shards the state too"
            )
        if isinstance(self.policy, Qsr) and any(
            group.get("lr") is None for group in inner.param_groups
        ):
            raise ConfigError(
                f"Qsr needs a learning rate in every parameter group, but {type(inner).__name__} "
                f"has none; use {Auto()!r}"
            )

    def _check_kept_names(self, inner: torch.optim.Optimizer) -> None:
        """Refuse names of `Exchange.keep_local` that no buffer or frozen parameter has."""
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

    def text(self) -> str:
        """Return what must be equal on all ranks, as text."""
        one = torch.nn.Parameter(torch.zeros(1, device="cpu"))
        outer = self.outer and repr(build_optimizer("outer", self.outer, [one]))
        return f"policy={self.policy_text}, outer={outer}, {self.settings!r}"

    def lasting(self) -> str:
        """Return what must stay the same for a checkpoint to fit, as text.

        How long ranks wait for each other may change, how long the run shall be, from which
        memory deltas cross, and what happens when a rank is lost.
        """
        exchange = self.settings.exchange
        exchange = replace(
            exchange, timeout_seconds=1.0, nonfinite="drop", gpu_direct=False, elastic=False
        )
        policy, policy_text = self.policy, self.policy_text
        if isinstance(policy, Plateau):
            policy_text = _told(replace(policy, epochs=1 + policy.warmup + policy.cooldown))
        settings = replace(self.settings, exchange=exchange)
        return replace(self, policy_text=policy_text, settings=settings).text()

    def shape(
        self,
        inner: torch.optim.Optimizer,
        rank_info: RankInfo | None,
        named: Named | None = None,
    ) -> dict[str, Any] | None:
        """Return what a checkpoint must have in common with a session to fit it exactly.

        Args:
            inner: The optimizer.
            rank_info: Who is where; None for a copy that was not opened yet: it knows no world, and
                asking is collective.
            named: What an open session trains; what was frozen since is still of its state.
        """
        if rank_info is None:
            return None
        named = Trained.by(inner, self.module).named if named is None else named
        # Messages are of other sizes on devices, and with them what owners round away.
        devices = sorted({tensor.device.type for _, tensor in named} - {"cpu"})
        return {
            "format": FORMAT,
            "rank": rank_info.rank,
            "node_sizes": list(rank_info.node_sizes),
            "layout": layout_of(named).digest,
            "setup": self.lasting(),
            **({"devices": devices} if devices else {}),
        }

    def choices(self, rank_info: RankInfo | None) -> dict[str, Any]:
        """Return what was chosen, as plain values; of the world nothing where it is not known."""
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


def _told(policy: Policy) -> str:
    """Return a policy in words that are the same in every process, also of a plain class."""
    if type(policy).__repr__ is not object.__repr__:
        return ADDRESS.sub("", repr(policy))
    slots = [name for cls in type(policy).__mro__ for name in getattr(cls, "__slots__", ())]
    names = sorted({*getattr(policy, "__dict__", {}), *slots} - {"__weakref__", "__dict__"})
    told = ", ".join(f"{name}={getattr(policy, name, None)!r}" for name in names)
    return ADDRESS.sub("", f"{type(policy).__name__}({told})")


def make_setup(  # noqa: PLR0913 - the keywords of the doors
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
    """Return the keywords of a door, checked, as one record."""
    check("inner", inner, OPTIMIZER, "; make one first: torch.optim.AdamW(model.parameters())")
    check("module", module, either(MODULE, NONE))
    check("topology", topology, either(instance_of(Topology), NONE))
    check("policy", policy, either(POLICY, NONE), "; write policy=daso.Auto()")
    check("outer", outer, either(FACTORY, NONE))
    check("exchange", exchange, either(instance_of(Exchange), NONE))
    check("gradients", gradients, either(instance_of(Gradients), NONE))
    settings = Settings(
        wire=wire,
        merge=merge,
        exchange=Exchange() if exchange is None else exchange,
        gradients=Gradients() if gradients is None else gradients,
        outer=outer is not None,
    )
    if policy is None:
        synchronous = settings.gradients.reducer == "prioritized" or not settings.whole
        policy = Fixed(1, 0) if synchronous else Auto()
    settings = replace(settings, selective=getattr(policy, "selective", None))
    setup = Setup(module, policy, settings, outer, _told(policy))
    setup.check(inner)  # type: ignore[arg-type]  # it is one
    return setup


def check_format(shape: Mapping[str, Any] | None) -> None:
    """Raise CheckpointError for a stored shape of another format."""
    if shape is not None and shape.get("format") != FORMAT:
        raise CheckpointError(
            f"the part 'daso' of a state_dict must be of this version of daso, whose format is "
            f"{FORMAT}, but it is of format {shape.get('format')}; leave it out to load the inner "
            f"optimizer's alone"
        )


def combined(
    inner: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> torch.optim.Optimizer:
    """Return several optimizers as one; one as it is."""
    if not isinstance(inner, list | tuple):
        return inner  # type: ignore[return-value]  # it is checked later
    for number, one in enumerate(inner):
        check(f"inner[{number}]", one, OPTIMIZER)
    if not inner:
        raise ConfigError(
            "inner must be an optimizer, or several, not an empty list; make one first: "
            "torch.optim.AdamW(model.parameters())"
        )
    return inner[0] if len(inner) == 1 else CombinedOptimizer(inner)


def stall_limit(exchange: object) -> float:
    """Return how long ranks wait for each other: the default where that cannot be told."""
    return (
        exchange.timeout_seconds if isinstance(exchange, Exchange) else Exchange().timeout_seconds
    )


def _is_optimizer(value: object) -> bool:
    # Others' classes need not be torch's: what is called must be there.
    parts = ("param_groups", "state", "step", "zero_grad", "state_dict")
    ours = any(getattr(value, one, None) is not None for one in ("_session", "_serving"))
    return not isinstance(value, type) and all(hasattr(value, one) for one in parts) and not ours


def _is_policy(value: object) -> bool:
    parts = ("start", "tune_batch", "tune_exchange", "tune_epoch")
    return not isinstance(value, type) and all(callable(getattr(value, one, None)) for one in parts)


OPTIMIZER = Rule("an optimizer of torch's kind, not wrapped yet", _is_optimizer)
POLICY = Rule("daso.Auto(), daso.Fixed(...), daso.Plateau(...) or daso.Qsr(...)", _is_policy)
MODULE = Rule("a torch.nn.Module", lambda value: isinstance(value, torch.nn.Module))
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
        # Of several ranks the node says it, once it is there.
        "node_transport": "none" if rank_info.world_size == 1 else "not chosen yet",
    }
