"""Flows as they are built: a node that can never work is refused by name, and text shows them."""

import pytest
import torch
from flows import both, choose, empty, linear, refused, same, small_loop, started, total
from torch import nn

from daso.errors import ConfigError
from daso.flow import Port
from daso.flow.model.checks import wire


def some(item, x, y, z=None):
    return x


def summed(graph, port):
    return graph.function(both, port, name="sum")


def twice(graph, port):
    return graph.function(lambda _, x: (x, x), port, name="twice", outputs=2)


def connected(graph, start, others):
    """Connect to a phi, after others, what is too wide for it."""
    meet = graph.phi(start, name="meet")
    for _ in range(others):
        graph.connect(graph.function(same, meet), meet)
    graph.connect(twice(graph, meet), meet)


def elsewhere():
    graph, start = started()
    return graph.layer(linear(), start)


def nowhere(port):
    return None


REFUSED = {  # by name: outputs of the source, builder, words of the error
    "no module": (1, lambda g, s: g.layer(same, s), "torch.nn.Module, same, use function()"),
    "layer": (2, lambda g, s: g.layer(linear(), s), "'linear', takes, 1,, with 2"),
    "layer, ports": (2, lambda g, s: g.layer(linear(), s, s, name="l"), "'l', takes, 1,, with 4"),
    "function": (1, lambda g, s: g.function(both, s), "'both', the item and 2,, with 1"),
    "loss": (1, lambda g, s: g.loss(both, s, name="end"), "'end', the item and 2,, with 1"),
    "default": (1, lambda g, s: g.function(some, s), "'some', the item and 2 to 3,, with 1"),
    "phi of none": (1, lambda g, _: g.phi(name="empty"), "'empty', a port at least"),
    "concat of none": (1, lambda g, _: g.concat(name="empty"), "'empty', a port at least"),
    "layer of none": (1, lambda g, _: g.layer(linear(), name="l"), "'l, a port at least"),
    "function of none": (1, lambda g, _: g.function(total, name="f"), "'f, a port at least"),
    "loss of none": (1, lambda g, _: g.loss(total, name="end"), "'end, a port at least"),
    "phi": (2, lambda g, s: g.phi(s, summed(g, s), name="meet"), "'meet', 'sum', port 1, have 1"),
    "concat": (2, lambda g, s: g.concat(s, s, summed(g, s), dim=0), "'concat', 'sum', port 2"),
    "connect": (1, lambda g, s: g.connect(s, twice(g, s)), "a phi, function 'twice', own method"),
    "connect 1": (1, lambda g, s: connected(g, s, 0), "'meet', 'twice', port 1, have 2"),
    "connect 2": (1, lambda g, s: connected(g, s, 1), "'meet', 'twice', port 2, have 2"),
    "split": (3, lambda g, s: g.split(s, [2, 2], name="cut"), "'cut', 3,, not to 4, dim"),
    "split, none": (1, lambda g, s: g.split(s, [], dim=0), "the sizes of split 'split', not ()"),
    "split, negative": (1, lambda g, s: g.split(s, [2, -1]), "the sizes of split, not (2, -1)"),
    "other graph": (
        1,
        lambda g, _: g.drop(elsewhere()),
        "'drop', of this graph, Port(node=1",
    ),
    "loop": (1, lambda g, s: g.loop(nowhere, s, go_on=choose), "ports of this graph, None"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_node_that_cannot_work_is_refused_when_added(name):
    outputs, build, words = REFUSED[name]
    with refused(*words.split(", ")):
        build(*started(outputs=outputs))


@pytest.mark.parametrize("batch", [0, -1, 1.5, True, "8"])
def test_a_batch_is_a_whole_number(batch):
    graph, start = started()
    with refused("batch", repr(batch), kind=ConfigError):
        graph.layer(linear(), start, batch=batch)


@pytest.mark.parametrize("kind", ["broadcast", "cond"])
def test_a_node_must_have_an_output_port(kind):
    graph, start = started()
    with refused((kind == "cond" and "ways") or "copies", "0", kind=ConfigError):
        graph.cond(choose, start, ways=0) if kind == "cond" else graph.broadcast(start, 0)


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(),
        nn.AlphaDropout(),
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Dropout1d())),
        nn.TransformerEncoderLayer(4, 2),
        nn.MultiheadAttention(4, 2, dropout=0.5),
        nn.LSTM(4, 4, num_layers=2, dropout=0.5),
    ],
    ids=lambda module: type(module).__name__,
)
def test_layers_that_draw_compute_messages_one_by_one(module):
    graph, start = started(outputs=3)
    with refused("'drop'", "dropout", "batch at 1"):
        graph.layer(module, *graph.split(start, [1, 1, 1])[: arity(module)], name="drop", batch=2)
    assert len(graph.nodes) == 2  # nothing was added


def arity(module):
    return 3 if isinstance(module, nn.MultiheadAttention) else 1


@pytest.mark.parametrize(
    "module", [nn.Linear(4, 4), nn.LSTM(4, 4, dropout=0.0), nn.Sequential(nn.Tanh())], ids=str
)
def test_other_layers_may_compute_messages_together(module):
    graph, start = started()
    graph.layer(module, start, batch=8)
    assert graph.nodes[-1].more == 8


def test_arguments_with_defaults_may_be_left_out():
    graph, start = started()
    graph.function(some, start, start)
    graph.function(some, start, start, start)


def test_a_callable_without_a_signature_takes_any_number():
    graph, start = started()
    graph.function(max, start)  # of which inspect finds no signature
    graph.function(lambda item, *tensors: tensors, start, start, start, outputs=3)


def test_widths_of_parts_add_up():
    graph, start = started(outputs=3)
    assert [port.width for port in graph.split(start, [2, 1])] == [2, 1]
    assert [port.width for port in graph.split(start, [2, 2], dim=0)] == [3, 3]
    one = graph.function(total, start)
    assert graph.concat(start, start, one).width == 7  # side by side they may differ


@pytest.mark.parametrize("port", [Port(0, 1, 1), Port(0, 0, 2), Port(1, 0, 1)], ids=str)
def test_a_port_that_no_node_of_this_graph_has_is_refused(port):
    # Of another graph, in which nodes of the same numbers have more ports or wider ones.
    graph, start = started()
    graph.loss(total, start)
    with refused("'loss'", "ports of this graph", "Port(node="):
        graph.loss(total, port)


@pytest.mark.parametrize("wrong", [None, "source", ("port", "port")], ids=str)
def test_what_is_no_port_is_refused(wrong):
    graph, _ = started()
    for add in (graph.layer, graph.function):
        with refused("'given'", "ports of this graph"):
            add(linear() if add == graph.layer else same, wrong, name="given")


def test_names_are_made_unique():
    graph, start = started()
    ports = [graph.layer(linear(), start) for _ in range(3)]
    graph.function(same, *ports[:1], name="linear 4")
    graph.layer(linear(), start)
    graph.function(lambda item, x: x, start)
    graph.function(lambda item, x: x, start)
    graph.update(empty, start)
    assert [node.name for node in graph.nodes] == [
        "source",
        *("linear", "linear 2", "linear 3", "linear 4", "linear 5"),
        *("function", "function 2", "empty"),
    ]


def test_names_of_inserted_copies_are_unique_too():
    graph, start = started()
    graph.loss(total, graph.function(same, start, name="copies of source"))
    graph.loss(total, start)
    names = [node.name for node in wire(graph).nodes]
    assert len(set(names)) == len(names)


def test_a_callable_object_is_named_after_its_class():
    class Choice:
        def __call__(self, item):
            return 0

    graph, start = started()
    graph.cond(Choice(), start)
    assert graph.nodes[-1].name == "Choice"


# --- text ----------------------------------------------------------------------------------------


def test_a_graph_is_told_as_a_list():
    assert str(small_loop()) == LISTED


def test_a_graph_is_told_as_mermaid():
    assert small_loop().mermaid() == MERMAID


def test_a_graph_is_told_as_graphviz():
    assert small_loop().dot() == DOT


def test_quotes_in_names_do_not_end_labels():
    graph, start = started()
    graph.loss(total, graph.layer(nn.Tanh(), start, name='the "bent" one'))
    assert "n1[\"the 'bent' one: layer\"]" in graph.mermaid()
    assert "[label=\"the 'bent' one: layer\", shape=box]" in graph.dot()


def test_parts_of_a_split_are_numbered_in_text():
    graph, start = started(outputs=2)
    graph.loss(total, *graph.split(start, [1, 1], name="cut"))
    assert "from cut [0], cut [1]" in str(graph)
    assert "n1 -->|1| n2" in graph.mermaid()
    assert 'n1 -> n2 [label="1"];' in graph.dot()


def test_building_draws_no_random_numbers():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    graph, start = started()
    graph.loss(total, graph.layer(nn.Tanh(), start))
    wire(graph)
    assert torch.equal(torch.get_rng_state(), before)


LISTED = """\
  0  source     source
  1  update     loop begin  from source
  2  phi        loop phi  from loop begin, loop next
  3  cond       loop cond  from loop phi
  4  layer      linear  from loop cond [1]  (6 parameters)
  5  update     loop next  from linear
  6  update     loop end  from loop cond [0]
  7  loss       loss  from loop end"""

MERMAID = """\
flowchart TD
    n0(["source"])
    n1("loop begin: update")
    n2("loop phi")
    n3{"loop cond"}
    n4["linear: layer"]
    n5("loop next: update")
    n6("loop end: update")
    n7(["loss"])
    n0 --> n1
    n1 --> n2
    n2 --> n3
    n3 -->|1| n4
    n4 --> n5
    n5 --> n2
    n3 -->|0| n6
    n6 --> n7"""

DOT = """\
digraph flow {
    node [fontname=sans];
    n0 [label="source", shape=oval];
    n1 [label="loop begin: update", shape=plain];
    n2 [label="loop phi", shape=plain];
    n3 [label="loop cond", shape=diamond];
    n4 [label="linear: layer", shape=box];
    n5 [label="loop next: update", shape=plain];
    n6 [label="loop end: update", shape=plain];
    n7 [label="loss", shape=oval];
    n0 -> n1;
    n1 -> n2;
    n2 -> n3;
    n3 -> n4 [label="1"];
    n4 -> n5;
    n5 -> n2;
    n3 -> n6 [label="0"];
    n6 -> n7;
}"""
