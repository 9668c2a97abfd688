"""Asynchronous model parallelism for models whose control flow depends on each instance.

A `Graph` says what is computed, a `Runtime` trains it over all ranks. The mechanism is that of
AMPNet (arXiv 1705.09786).
"""

from daso.flow.epoch import Epoch
from daso.flow.model.graph import Graph
from daso.flow.model.node import Item, Port
from daso.flow.plan import Updates
from daso.flow.replay import replay
from daso.flow.runtime import Runtime

__all__ = ["Epoch", "Graph", "Item", "Port", "Runtime", "Updates", "replay"]
