"""Flows in plain torch: the messages of an instance one after the other, in one autograd graph.

It shares a flow's nodes and edges with the program under test, and none of its code.
"""

from collections import defaultdict, deque
from itertools import accumulate, pairwise

import torch

from daso.flow import Item


class PlainFlow:
    """Goes through a flow with one instance.

    Args:
        graph: The flow.
        instance: As the source is given it.
    """

    def __init__(self, graph, instance):
        self.graph, self.instance, self.loss_of_all = graph, instance, torch.zeros(())
        self.todo, self.waiting = deque(), defaultdict(dict)

    def loss_of_instance(self):
        made = self.graph.nodes[0].call(self.instance)
        for state, payload in (made if isinstance(made, dict) else {(): made}).items():
            self.send(self.graph.nodes[0], 0, state, payload)
        while self.todo:
            node, *message = self.todo.popleft()
            getattr(self, node.kind)(node, *message)
        return self.loss_of_all

    def send(self, node, out, state, payload):
        payload = payload if isinstance(payload, tuple) else (payload,)
        for edge in self.graph.edges:
            if (edge.source, edge.out) == (node.index, out):
                target = self.graph.nodes[edge.target]
                self.todo.append((target, edge.into, Item(self.instance, state, payload)))

    def layer(self, node, _, item):
        self.send(node, 0, item.state, node.call(*item.payload))

    def function(self, node, _, item):
        self.send(node, 0, item.state, node.call(item, *item.payload))

    def loss(self, node, _, item):
        loss = node.call(item, *item.payload)
        self.loss_of_all = self.loss_of_all + (loss[0] if isinstance(loss, tuple) else loss).sum()

    def drop(self, *_):
        pass

    def cond(self, node, _, item):
        self.send(node, int(node.call(item)), item.state, item.payload)

    def phi(self, node, _, item):
        self.send(node, 0, item.state, item.payload)

    def update(self, node, _, item):
        self.send(node, 0, node.call(item), item.payload)

    def broadcast(self, node, _, item):
        for out in range(len(node.outputs)):
            self.send(node, out, item.state, item.payload)

    def flatmap(self, node, _, item):
        for state in node.call(item):
            self.send(node, 0, state, item.payload)

    def ungroup(self, node, _, item):
        rows = zip(*item.payload, strict=True)
        for state, row in zip(node.call(item), rows, strict=True):
            self.send(node, 0, state, row)

    def group(self, node, _, item):
        members = self.waiting[node.index, node.call(item)]
        members[item.state] = item.payload
        if len(members) == node.more(item):
            columns = zip(*(members[state] for state in sorted(members)), strict=True)
            self.send(node, 0, node.call(item), tuple(map(torch.stack, columns)))

    def concat(self, node, port, item):
        parts = self.waiting[node.index, item.state]
        parts[port] = item.payload
        if len(parts) == node.inputs:
            payloads = [parts[port] for port in range(node.inputs)]
            if node.call is None:
                joined = sum(payloads, ())
            else:
                joined = tuple(torch.cat(c, node.call) for c in zip(*payloads, strict=True))
            self.send(node, 0, item.state, joined)

    def split(self, node, _, item):
        if node.call is None:
            parts = [item.payload[a:b] for a, b in pairwise([0, *accumulate(node.more)])]
        else:
            parts = zip(
                *(tensor.split(node.more, node.call) for tensor in item.payload), strict=True
            )
        for out, part in enumerate(parts):
            self.send(node, out, item.state, part)
