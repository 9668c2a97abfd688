"""Flows as they are built: what can never work is refused by name, and the rest is told as text."""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from daso.errors import ConfigError, FlowError
from daso.flow import Graph, Port
from daso.flow.model.checks import wire
from daso.flow.placement import said

checked = settings(derandomize=True, max_examples=100, deadline=None)


def same(item, x):
    return x


def both(item, x, y):
    return x + y


def total(item, *tensors):
    return sum(tensor.sum() for tensor in tensors)


def choose(item):
    return 0


def empty(item):
    return ()


def linear():
    return nn.Linear(2, 2)


def started(outputs=1):
    graph = Graph()
    return graph, graph.source(lambda one: one, outputs=outputs)


@contextmanager
def refused(*words, kind=FlowError):
    """Hold what is raised against the words that its message must have."""
    with pytest.raises(kind) as error:
        yield
    for word in words:
        assert word in str(error.value)


# --- building ------------------------------------------------------------------------------------


def test_a_layer_that_is_no_module_is_refused_and_told_of_function():
    graph, start = started()
    with refused("torch.nn.Module", "same", "use function()"):
        graph.layer(same, start)


@pytest.mark.parametrize("batch", [0, -1, 1.5, True, "8"])
def test_a_batch_is_a_whole_number(batch):
    graph, start = started()
    with refused("batch", repr(batch), kind=ConfigError):
        graph.layer(linear(), start, batch=batch)


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


def test_a_layer_is_given_as_many_tensors_as_it_takes():
    graph, start = started(outputs=2)
    with refused("'linear'", "takes, 1,", "with 2"):
        graph.layer(linear(), start)


def test_a_layer_given_several_ports_takes_their_tensors_in_order():
    graph, start = started(outputs=2)
    with refused("'thin'", "takes, 1,", "with 4"):
        graph.layer(linear(), start, start, name="thin")


@pytest.mark.parametrize("add", ["function", "loss"])
def test_functions_are_given_the_item_and_as_many_tensors_as_they_take(add):
    graph, start = started()
    with refused("'narrow'", "the item and 2,", "with 1"):
        getattr(graph, add)(both, start, name="narrow")


def test_what_may_be_left_out_is_counted():
    def two_or_three(item, x, y, z=None):
        return x

    graph, start = started()
    with refused("'two_or_three'", "the item and 2 to 3,", "with 1"):
        graph.function(two_or_three, start)
    graph.function(two_or_three, start, start)
    graph.function(two_or_three, start, start, start)


def test_what_cannot_be_seen_of_a_callable_is_not_asked_for():
    graph, start = started()
    graph.function(max, start)  # of which inspect finds no signature
    graph.function(lambda item, *tensors: tensors, start, start, start, outputs=3)


@pytest.mark.parametrize("add", ["phi", "concat"])
def test_a_node_of_several_ports_must_have_one(add):
    graph, _ = started()
    with refused("'empty'", "a port at least"):
        getattr(graph, add)(name="empty")


@pytest.mark.parametrize("add", ["layer", "function", "loss"])
def test_a_node_that_computes_must_have_a_port(add):
    graph, _ = started()
    with refused("'alone", "a port at least"):
        getattr(graph, add)(linear() if add == "layer" else total, name="alone")


def test_all_ports_of_a_phi_are_as_wide():
    graph, start = started(outputs=2)
    one = graph.function(both, start, name="sum")
    with refused("'meet'", "'sum'", "port 1", "have 1"):
        graph.phi(start, one, name="meet")


def test_all_ports_of_a_concat_along_a_dimension_are_as_wide():
    graph, start = started(outputs=2)
    one = graph.function(both, start, name="sum")
    with refused("'put'", "'sum'", "port 2", "have 1"):
        graph.concat(start, start, one, dim=0, name="put")
    assert graph.concat(start, start, one).width == 5  # side by side they may differ


def test_a_port_is_connected_to_a_phi_alone():
    graph, start = started()
    end = graph.layer(linear(), start, name="body")
    with refused("a phi", "layer 'body'", "own method"):
        graph.connect(start, end)


def test_what_is_connected_to_a_phi_is_as_wide():
    graph, start = started()
    meet = graph.phi(start, name="meet")
    wide = graph.function(lambda item, x: (x, x), meet, name="twice", outputs=2)
    with refused("'meet'", "'twice'", "port 1", "have 2"):
        graph.connect(wide, meet)
    graph.connect(graph.function(same, meet), meet)
    with refused("'meet'", "'twice'", "port 2", "have 2"):
        graph.connect(wide, meet)


def test_the_sizes_of_a_split_add_up_to_its_tensors():
    graph, start = started(outputs=3)
    with refused("'cut'", "3,", "not to 4", "dim"):
        graph.split(start, [2, 2], name="cut")
    assert [port.width for port in graph.split(start, [2, 1])] == [2, 1]
    assert [port.width for port in graph.split(start, [2, 2], dim=0)] == [3, 3]


def test_a_port_of_another_graph_is_refused():
    other, start = started()
    foreign = other.layer(linear(), start)
    graph, _ = started()
    with refused("'linear'", "ports of this graph", "Port(node=1"):
        graph.layer(linear(), foreign)


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


def test_a_loop_whose_body_returns_no_port_is_refused():
    graph, start = started()
    with refused("ports of this graph", "None"):
        graph.loop(lambda port: None, start, go_on=choose)


@pytest.mark.parametrize(
    "add",
    [
        lambda graph, port: graph.broadcast(port, 0),
        lambda graph, port: graph.cond(choose, port, ways=0),
        lambda graph, port: graph.split(port, [], dim=0),
        lambda graph, port: graph.concat(*graph.split(port, [2, -1])),
    ],
    ids=["broadcast", "cond", "split", "negative split"],
)
def test_a_node_has_a_way_on_and_no_fewer_tensors_than_none(add):
    graph, start = started()
    with pytest.raises((FlowError, ConfigError)):
        add(graph, start)
        ends(graph)
        wire(graph)


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


def test_names_are_unique_also_beside_those_of_copies():
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


# --- checks of the whole -------------------------------------------------------------------------


def test_a_port_that_nothing_takes_is_named():
    graph, start = started()
    taken, _ = graph.cond(choose, start, name="fork")
    graph.loss(total, taken)
    with refused("port 1", "cond 'fork'", "to drop()"):
        wire(graph)


def test_messages_may_end_without_a_loss():
    graph, start = started()
    taken, other = graph.cond(choose, start)
    graph.loss(total, taken)
    graph.drop(other)
    assert [node.kind for node in wire(graph).nodes] == ["source", "cond", "loss", "drop"]
    assert 'n3(["drop"])' in graph.mermaid()
    assert 'n3 [label="drop", shape=oval];' in graph.dot()


def test_a_flow_has_a_source():
    with refused("one source, not 0"):
        wire(Graph())


def test_a_flow_has_no_second_source():
    graph, start = started()
    graph.loss(total, start, graph.source(same))
    with refused("one source, not 2", "several tensors"):
        wire(graph)


def test_a_parameter_is_of_one_node():
    graph, start = started()
    shared = linear()
    first = graph.layer(shared, start, name="first")
    graph.loss(total, graph.layer(nn.Sequential(shared, nn.Tanh()), first, name="second"))
    with refused("'first'", "'second'", "share", "phi()"):
        wire(graph)


def test_a_parameter_may_be_used_twice_in_a_node_and_what_has_none_in_two():
    graph, start = started()
    shared, bend = linear(), nn.Tanh()
    port = graph.layer(nn.Sequential(shared, shared), graph.layer(bend, start))
    graph.loss(total, graph.layer(bend, port))
    assert len(wire(graph).nodes) == 5


def test_a_name_that_no_node_has_is_refused_and_layers_are_listed():
    graph, start = started()
    graph.loss(total, graph.layer(linear(), graph.layer(linear(), start)))
    wiring = wire(graph)
    assert wiring.named("linear 2") == 2
    with refused("'liner'", "'linear', 'linear 2'"):
        wiring.named("liner")


# --- loops ---------------------------------------------------------------------------------------


def test_a_loop_has_a_way_out():
    graph, start = started()
    around = graph.phi(start, name="around")
    graph.connect(graph.update(empty, around, name="on"), around)
    with refused("a way out", "'around', 'on'"):
        wire(graph)


def test_a_cond_all_of_whose_ways_lead_back_is_no_way_out():
    graph, start = started()
    around = graph.phi(start, name="around")
    for way in graph.cond(choose, around, name="where"):
        graph.connect(graph.update(empty, way), around)
    with refused("a way out", "'around', 'where', 'empty', 'empty 2'"):
        wire(graph)


def test_a_loop_changes_the_state():
    graph, start = started()
    around = graph.phi(start, name="around")
    over, again = graph.cond(choose, around, name="where")
    graph.connect(graph.function(same, again, name="body"), around)
    graph.loss(total, over)
    with refused("change its state", "'around', 'where', 'body'"):
        wire(graph)


def test_every_way_around_a_loop_changes_the_state():
    graph, start = started()
    around = graph.phi(start, name="around")
    over, again, unchanged = graph.cond(choose, around, ways=3, name="where")
    graph.connect(graph.update(empty, again, name="on"), around)
    graph.loss(total, over)
    graph.connect(graph.update(empty, unchanged), around)
    wire(graph)
    graph.connect(graph.function(same, again, name="skips"), around)
    with refused("every way around", "'skips'"):
        wire(graph)


@pytest.mark.parametrize("kind", ["update", "group", "ungroup", "flatmap"])
def test_whatever_changes_states_can_do_it_in_a_loop(kind):
    graph, start = started()
    around = graph.phi(start)
    over, again = graph.cond(choose, around)
    graph.connect(changed(graph, kind, again), around)
    graph.loss(total, over)
    assert len(wire(graph).nodes) == 5


def changed(graph, kind, port):
    if kind == "group":
        return graph.group(empty, port, count=choose)
    return getattr(graph, kind)(empty, port)


def test_loops_may_lie_in_loops():
    graph, start = started()

    def body(port):
        return graph.loop(lambda inner: graph.layer(linear(), inner), port, go_on=choose)

    graph.loss(total, graph.loop(body, start, go_on=choose))
    wire(graph)


def test_an_inner_loop_needs_a_change_of_its_own():
    graph, start = started()

    def body(port):
        inner = graph.phi(port, name="inner")
        over, again = graph.cond(choose, inner, name="stay")
        graph.connect(again, inner)
        return over

    graph.loss(total, graph.loop(body, start, go_on=choose, name="outer"))
    with refused("change its state", "'inner'", "'stay'"):
        wire(graph)


# --- joins ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("add", ["concat", "function"])
def test_two_ways_of_a_cond_do_not_meet_in_a_concat(add):
    graph, start = started()
    left, right = graph.cond(choose, start, name="fork")
    left = graph.layer(linear(), graph.broadcast(left, 2)[1])
    if add == "concat":
        graph.concat(left, right, name="join")
    else:
        graph.function(both, left, right, name="join")
    join = "'join'" if add == "concat" else "'join inputs'"
    ends(graph)
    with refused(join, "port 0 took way 0", "'fork'", "port 1 way 1", "phi()"):
        wire(graph)


def ends(graph):
    """End every port that nothing takes in a loss."""
    used = {(edge.source, edge.out) for edge in graph.edges}
    for node in list(graph.nodes):
        for port, width in enumerate(node.outputs):
            if (node.index, port) not in used:
                graph.loss(total, Port(node.index, port, width))


def test_a_way_of_a_cond_behind_the_other_does_not_meet_it():
    graph, start = started()
    left, right = graph.cond(choose, start, name="outer")
    inner, _ = graph.cond(choose, left, name="inner")
    graph.concat(inner, right, name="join")
    ends(graph)
    with refused("'join'", "'outer'"):
        wire(graph)


@pytest.mark.parametrize("kind", ["update", "group", "ungroup", "flatmap"])
def test_two_ways_of_a_cond_may_meet_where_states_were_changed(kind):
    graph, start = started()
    left, right = graph.cond(choose, start)
    graph.loss(total, changed(graph, kind, left), right)
    wire(graph)


def test_what_a_phi_put_together_may_meet_what_took_no_way():
    graph, start = started()
    left, right = graph.cond(choose, start)
    graph.loss(total, graph.phi(graph.layer(linear(), left), right), start)
    wire(graph)


def test_ways_of_different_conds_may_meet():
    graph, start = started()
    left, _ = graph.cond(choose, start)
    _, right = graph.cond(choose, start)
    graph.loss(total, left, right)
    ends(graph)
    wire(graph)


def test_the_same_way_of_a_cond_may_meet_itself():
    graph, start = started()
    left, _ = graph.cond(choose, start)
    graph.loss(total, graph.layer(linear(), left), left)
    ends(graph)
    wire(graph)


# --- copies --------------------------------------------------------------------------------------


def test_a_port_that_is_used_twice_gets_a_broadcast():
    graph, start = started()
    bent = graph.layer(nn.Tanh(), start)
    graph.loss(total, bent)
    graph.loss(total, bent, start)
    nodes, edges = len(graph.nodes), list(graph.edges)
    wiring = wire(graph)
    copies = {node.name: node for node in wiring.nodes[nodes:]}
    assert set(copies) == {"copies of source", "copies of tanh"}
    for name, node in copies.items():
        assert (node.kind, node.inputs, node.outputs) == ("broadcast", 1, (1, 1))
        assert wiring.named(name) == node.index
        targets = [edge for edge in wiring.edges if edge.source == node.index]
        assert [edge.out for edge in targets] == [0, 1]
        assert all(edge.target < node.index for edge in targets)
    assert (len(graph.nodes), graph.edges) == (nodes, edges)  # the caller's graph stays
    assert wire(graph) == wiring


def test_copies_are_named_after_the_port_unless_it_is_the_first():
    graph, start = started()
    for way in graph.cond(choose, start, name="fork"):
        graph.loss(total, way)
        graph.loss(total, way)
    names = [node.name for node in wire(graph).nodes if node.kind == "broadcast"]
    assert names == ["copies of fork", "copies of fork [1]"]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["function", "phi", "update", "broadcast", "flatmap"]),
        st.lists(st.integers(0, 50), min_size=1, max_size=3),
    ),
    max_size=12,
)


@checked
@given(STEPS)
def test_messages_of_every_port_go_to_one_port_and_every_port_hears_of_one(steps):
    graph, start = started()
    ports = [start]
    for kind, picks in steps:
        chosen = [ports[pick % len(ports)] for pick in picks]
        if kind == "function":
            ports.append(graph.function(total, *chosen))
        elif kind == "phi":
            ports.append(graph.phi(*chosen))
        elif kind == "broadcast":
            ports += graph.broadcast(chosen[0], len(picks))
        else:
            ports.append(getattr(graph, kind)(empty, chosen[0]))
    ends(graph)
    wiring = wire(graph)
    assert [node.index for node in wiring.nodes] == [*range(len(wiring.nodes))]
    names = [node.name for node in wiring.nodes]
    assert len(set(names)) == len(names)
    leave = [(node.index, port) for node in wiring.nodes for port in range(len(node.outputs))]
    enter = [(node.index, port) for node in wiring.nodes for port in range(node.inputs)]
    assert sorted((edge.source, edge.out) for edge in wiring.edges) == leave
    assert sorted((edge.target, edge.into) for edge in wiring.edges) == enter


# --- who computes --------------------------------------------------------------------------------


def small_loop():
    graph, start = started()
    end = graph.loop(lambda port: graph.layer(nn.Linear(2, 2), port), start, go_on=choose)
    graph.loss(total, end)
    return graph


def test_nodes_are_placed_by_their_names():
    wiring = wire(small_loop())
    assert said(wiring, {"linear": [2, 0], "loop cond": 1}, 3) == {4: (2, 0), 3: (1,)}


@pytest.mark.parametrize("wanted", [3, -1, [0, 0], []], ids=str)
def test_a_rank_that_is_not_there_is_refused(wanted):
    with refused("'linear'", "from 0 to 2", repr(wanted)):
        said(wire(small_loop()), {"linear": wanted}, 3)


def test_layers_alone_have_replicas():
    with refused("'loop cond'", "a cond"):
        said(wire(small_loop()), {"loop cond": [0, 1]}, 3)


def test_the_source_is_where_instances_come_in():
    assert said(wire(small_loop()), {"source": 0}, 3) == {0: (0,)}
    with refused("'source'"):
        said(wire(small_loop()), {"source": 1}, 3)


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
