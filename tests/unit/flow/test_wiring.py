"""Flows as they run: a whole that can never work is refused, and ports used twice get copies."""

import pytest
from flows import both, changed, choose, empty, end_all, linear, refused, same, started, total
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from daso.flow import Graph
from daso.flow.model.checks import wire

REFUSED = {}  # by name: builder, words of the error
checked = settings(derandomize=True, max_examples=100, deadline=None)
CHANGES = ("update", "group", "ungroup", "flatmap")


def refusing(*words):
    return lambda build: REFUSED.setdefault(build.__name__.replace("_", " "), (build, words))


# --- the whole -----------------------------------------------------------------------------------


@refusing("port 1", "cond 'fork'", "to drop()")
def a_port_that_nothing_takes(graph, start):
    taken, _ = graph.cond(choose, start, name="fork")
    graph.loss(total, taken)


@refusing("one source, not 2", "several tensors")
def a_second_source(graph, start):
    graph.loss(total, start, graph.source(same))


@refusing("'first'", "'second'", "share", "phi()")
def a_parameter_of_two_nodes(graph, start):
    shared = linear()
    first = graph.layer(shared, start, name="first")
    graph.loss(total, graph.layer(nn.Sequential(shared, nn.Tanh()), first, name="second"))


# --- loops ---------------------------------------------------------------------------------------


@refusing("a way out", "'around', 'on'")
def a_loop_without_a_cond(graph, start):
    around = graph.phi(start, name="around")
    graph.connect(graph.update(empty, around, name="on"), around)


@refusing("a way out", "'around', 'where', 'empty', 'empty 2'")
def a_loop_whose_cond_leads_back_by_every_way(graph, start):
    around = graph.phi(start, name="around")
    for way in graph.cond(choose, around, name="where"):
        graph.connect(graph.update(empty, way), around)


@refusing("change its state", "'around', 'where', 'body'")
def a_loop_that_does_not_change_the_state(graph, start):
    around = graph.phi(start, name="around")
    over, again = graph.cond(choose, around, name="where")
    graph.connect(graph.function(same, again, name="body"), around)
    graph.loss(total, over)


@refusing("every way around", "'skips'")
def a_loop_that_does_not_change_the_state_on_one_way(graph, start):
    around = graph.phi(start, name="around")
    over, again, unchanged = graph.cond(choose, around, ways=3, name="where")
    graph.connect(graph.update(empty, again, name="on"), around)
    graph.loss(total, over)
    graph.connect(graph.update(empty, unchanged), around)
    wire(graph)
    graph.connect(graph.function(same, again, name="skips"), around)


@refusing("change its state", "'inner'", "'stay'")
def an_inner_loop_that_does_not_change_the_state(graph, start):
    def body(port):
        inner = graph.phi(port, name="inner")
        over, again = graph.cond(choose, inner, name="stay")
        graph.connect(again, inner)
        return over

    graph.loss(total, graph.loop(body, start, go_on=choose, name="outer"))


# --- joins ---------------------------------------------------------------------------------------


def fork(graph, start):
    left, right = graph.cond(choose, start, name="fork")
    return graph.layer(linear(), graph.broadcast(left, 2)[1]), right


ways_meet = ("port 0 took way 0", "'fork'", "port 1 way 1", "phi()")


@refusing("'join'", *ways_meet)
def a_concat_of_two_ways_of_a_cond(graph, start):
    graph.concat(*fork(graph, start), name="join")
    end_all(graph)


@refusing("'join inputs'", *ways_meet)
def a_function_of_two_ways_of_a_cond(graph, start):
    graph.function(both, *fork(graph, start), name="join")
    end_all(graph)


@refusing("'join'", "'outer'")
def a_join_of_a_way_with_one_behind_the_other(graph, start):
    left, right = graph.cond(choose, start, name="outer")
    inner, _ = graph.cond(choose, left, name="inner")
    graph.concat(inner, right, name="join")
    end_all(graph)


@pytest.mark.parametrize("name", REFUSED)
def test_a_graph_that_cannot_work_is_refused(name):
    build, words = REFUSED[name]
    graph, start = started()
    build(graph, start)
    with refused(*words):
        wire(graph)


def test_a_flow_has_a_source():
    with refused("one source, not 0"):
        wire(Graph())


# --- what works ----------------------------------------------------------------------------------


def test_messages_may_end_without_a_loss():
    graph, start = started()
    taken, other = graph.cond(choose, start)
    graph.loss(total, taken)
    graph.drop(other)
    assert [node.kind for node in wire(graph).nodes] == ["source", "cond", "loss", "drop"]
    assert 'n3(["drop"])' in graph.mermaid()
    assert 'n3 [label="drop", shape=oval];' in graph.dot()


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


@pytest.mark.parametrize("kind", CHANGES)
def test_every_node_that_changes_states_may_be_in_a_loop(kind):
    graph, start = started()
    around = graph.phi(start)
    over, again = graph.cond(choose, around)
    graph.connect(changed(graph, kind, again), around)
    graph.loss(total, over)
    assert len(wire(graph).nodes) == 5


def test_loops_may_lie_in_loops():
    graph, start = started()

    def body(port):
        return graph.loop(lambda inner: graph.layer(linear(), inner), port, go_on=choose)

    graph.loss(total, graph.loop(body, start, go_on=choose))
    wire(graph)


@pytest.mark.parametrize("kind", CHANGES)
def test_two_ways_of_a_cond_may_meet_where_states_were_changed(kind):
    graph, start = started()
    left, right = graph.cond(choose, start)
    graph.loss(total, changed(graph, kind, left), right)
    wire(graph)


def test_a_concat_may_join_messages_of_a_phi_and_of_no_cond():
    graph, start = started()
    left, right = graph.cond(choose, start)
    graph.loss(total, graph.phi(graph.layer(linear(), left), right), start)
    wire(graph)


def test_ways_of_different_conds_may_meet():
    graph, start = started()
    left, _ = graph.cond(choose, start)
    _, right = graph.cond(choose, start)
    graph.loss(total, left, right)
    end_all(graph)
    wire(graph)


def test_the_same_way_of_a_cond_may_meet_itself():
    graph, start = started()
    left, _ = graph.cond(choose, start)
    graph.loss(total, graph.layer(linear(), left), left)
    end_all(graph)
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
def test_every_output_port_has_one_target_and_every_input_port_one_source(steps):
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
    end_all(graph)
    wiring = wire(graph)
    assert [node.index for node in wiring.nodes] == [*range(len(wiring.nodes))]
    names = [node.name for node in wiring.nodes]
    assert len(set(names)) == len(names)
    leave = [(node.index, port) for node in wiring.nodes for port in range(len(node.outputs))]
    enter = [(node.index, port) for node in wiring.nodes for port in range(node.inputs)]
    assert sorted((edge.source, edge.out) for edge in wiring.edges) == leave
    assert sorted((edge.target, edge.into) for edge in wiring.edges) == enter
