"""Channels over an emulated link between nodes, for predictions of a slower cluster."""

import time

import torch

from daso.comm.emulation import EmulatedEngine, LinkModel
from daso.comm.engine import Engine, Work
from daso.comm.health.step_watchdog import StepWatchdog
from daso.comm.topology import Topology
from daso.plan.cost_model import LinkCosts, vote_rounds
from daso.plan.options import Settings
from daso.train.channels import Channels, Communicators
from daso.train.gradients.compression import Averaged


class EmulatedChannels(Channels):
    """Channels whose work takes at least as long as over an emulated link.

    Args:
        topology: See `Channels`.
        settings: See `Channels`.
        replicas: See `Channels`.
        comms: See `Channels`.
        watchdog: See `Channels`.
        link: Link between nodes.
    """

    def __init__(
        self,
        topology: Topology,
        settings: Settings,
        replicas: Topology,
        comms: Communicators,
        watchdog: StepWatchdog,
        link: LinkModel,
    ) -> None:
        self._link = link
        super().__init__(topology, settings, replicas, comms, watchdog)

    def _start_engine(self) -> Engine:
        return EmulatedEngine(
            self.settings.exchange.timeout_seconds,
            self.missing,
            self.late,
            occupied_seconds=self._occupied_seconds,
        )

    def _occupied_seconds(self, result: object) -> float:
        """Return the seconds that work with this result occupies the link."""
        if isinstance(result, int):  # bytes of averaged gradients
            result = Averaged(result)
        if isinstance(result, Averaged):
            rounds = self.plan(result.nbytes).rounds
            return result.made_seconds + self._link.seconds(result.nbytes, rounds)
        sent = getattr(result, "nbytes", 0)
        rounds = vote_rounds(self.rank_info.nodes) + (self.plan(sent).rounds if sent else 0)
        return float(getattr(result, "made_seconds", 0.0)) + self._link.seconds(sent, rounds)

    def measured_costs(self) -> LinkCosts:
        """Return the costs of messages over the emulated link."""
        return LinkCosts(self._link.latency_seconds, 1 / self._link.bytes_per_second)

    def gradient_mean(self, total: torch.Tensor, slot: int = 0) -> Work[int]:
        """Replace sums over nodes by the mean over the world, as `Channels.gradient_mean`."""
        return self._occupy_link(super().gradient_mean(total, slot))

    def _occupy_link(self, mean: Work[int]) -> Work[int]:
        """Let a mean occupy the link after the means that began before it."""
        begun = time.perf_counter()
        nbytes = yield from mean
        free_at = self._link.occupy(nbytes, self.plan(nbytes).rounds, begun)
        yield lambda: time.perf_counter() >= free_at
        return nbytes
