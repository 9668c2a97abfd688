"""Flows that cannot go on: the node is named, with the instance and the state where it failed."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from flows import ONES, Mix, Net, numbers, refused, rows_of, square, started
from torch import nn

CASES = {}  # by name: what the source makes of an instance, builder, words of the error


def failing(*words, take=lambda one: one.x, ones=ONES[1:2], each=((),)):
    """Add a builder of a flow that fails with these words, for each of some arguments of its own.

    Words may name these arguments by their places, as "{0}" and "{1!r}" do.
    """

    def add(build):
        for values in each:
            name = ", ".join([build.__name__.replace("_", " "), *map(str, values)])
            said = [word.format(*values) for word in words]
            CASES[name] = take, partial(build, *values), said, ones
        return build

    return add


# --- states --------------------------------------------------------------------------------------


def two_states(one):
    return {(0,): one.x, (1,): one.x}


@failing("state (7,) came twice", "update 'all alike'", take=two_states)
def a_state_comes_twice(graph, start):
    graph.loss(square, graph.update(lambda item: (7,), start, name="all alike"))


@failing("state () came twice", "phi 'meet'")
def a_state_comes_to_a_phi_by_two_ports(graph, start):
    graph.loss(square, graph.phi(start, start, name="meet"))


CHANGES = ("update", "flatmap", "ungroup", "group")
STATES = (3, None, ("a",), (0.5,), (None,))


@failing(
    "tuple of whole numbers",
    "{0} 'odd'",
    "{1!r}",
    each=[(kind, state) for kind in CHANGES for state in STATES],
)
def a_state_is_not_whole_numbers(kind, state, graph, start):
    given = [state] if kind in ("flatmap", "ungroup") else state
    keywords = {"count": lambda item: 1} if kind == "group" else {}
    graph.loss(square, getattr(graph, kind)(lambda _: given, start, name="odd", **keywords))


@failing(
    "{0} 'spread'",
    "none twice",
    "{1}",
    "for state ()",
    each=[(kind, states) for kind in ("flatmap", "ungroup") for states in ([(1,), (2,), (1,)], [])],
)
def states_repeat_or_are_none(kind, states, graph, start):
    graph.loss(square, getattr(graph, kind)(lambda item: states, start, name="spread"))


@failing(
    "{0} 'spread'",
    "state (1,)",
    "from (0,) and from (1,)",
    take=two_states,
    each=[("flatmap",), ("ungroup",)],
)
def a_state_is_made_from_two_messages(kind, graph, start):
    def states(item):
        return [(item.state[0] + more,) for more in range(3)]

    graph.loss(square, getattr(graph, kind)(states, start, name="spread"))


@failing("ungroup 'apart'", "3,", "given 2")
def an_ungroup_has_fewer_states_than_rows(graph, start):
    graph.loss(square, graph.ungroup(lambda item: [(0,), (1,)], start, name="apart"))


def a_group(count, states, graph, start):
    many = graph.flatmap(lambda item: [(k,) for k in range(states)], start)
    graph.loss(square, graph.group(lambda _: (9,), many, count=lambda _: count, name="all"))


failing("state (9,) came twice", "group 'all'", each=[(2, 4)])(a_group)
waits = ("no message is left to compute", "state (9,) of instance 0")
failing("group 'all' has 1 of the messages", *waits, each=[(2, 3)])(a_group)
failing("group 'all' has 3 of the messages", *waits, each=[(4, 3)])(a_group)
failing("group of 'all'", "at least one member", "a group of {0}", each=[(0, 1), (-1, 1)])(a_group)


# --- ways ----------------------------------------------------------------------------------------


@failing(
    "no message is left to compute",
    "concat 'both inputs' has 1 of the messages",
    "state () of instance 2",
    ones=ONES,
)
def a_way_never_comes_to_a_join(graph, start):
    no, yes = graph.cond(lambda item: item.instance.n == 3, start)
    graph.loss(square, no, start, name="both")
    graph.loss(square, yes)


@failing("cond 'fork'", "0 to 1", "not {0}", each=[(2,), (-1,)])
def a_cond_chooses_a_way_that_it_does_not_have(way, graph, start):
    for port in graph.cond(lambda item: way, start, name="fork"):
        graph.loss(square, port)


# --- what users' functions return ----------------------------------------------------------------


def source_of(take, graph, start):
    graph.nodes[0] = replace(graph.nodes[0], call=take)
    graph.loss(lambda item, *tensors: torch.zeros(()), start)


def none_for_three(one):
    return {} if one.n == 3 else one.x


def no_such_image(one):
    raise RuntimeError("no such image")


@failing("source 'source'", "instance 2", ones=ONES)
def a_source_makes_no_message(graph, start):
    source_of(none_for_three, graph, start)


@failing("'source'", "instance 0", "RuntimeError: no such image")
def a_source_fails(graph, start):
    source_of(no_such_image, graph, start)


WRONG = ([torch.ones(3)], 3.0, None, (torch.ones(3), torch.ones(3)), {(0,): 1})


@failing("source 'source'", "1", each=[(made,) for made in WRONG])
def a_source_makes_other_than_its_outputs_say(made, graph, start):
    source_of(lambda one: made, graph, start)


@failing("tuple of whole numbers", "'source'", each=[("ab",), ((0.5,),)])
def a_source_makes_a_state_that_is_not_whole_numbers(state, graph, start):
    source_of(lambda one: {state: torch.ones(3)}, graph, start)


RETURNS = {
    "Tensor, Tensor": lambda x: (x, x),
    "it returned": lambda x: (),
    "list": lambda x: [x],
    "float": lambda x: 3.0,
    "Tensor, tuple": lambda x: (x, (x, x)),
    "NoneType": lambda x: None,
}


class Calls(nn.Module):
    """Returns what a function does."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


@failing(
    "{0} 'odd'",
    "say, 1,",
    "{1}",
    each=[(kind, said) for kind in ("layer", "function") for said in RETURNS],
)
def a_node_returns_other_than_its_outputs_say(kind, said, graph, start):
    call = RETURNS[said]
    if kind == "layer":
        graph.loss(square, graph.layer(Calls(call), start, name="odd"))
    else:
        graph.loss(square, graph.function(lambda _, x: call(x), start, name="odd"))


LOSSES = {
    "numbers": lambda item, x: x,
    "a float": lambda item, x: 3.0,
    "a float and metrics": lambda item, x: (3.0, {}),
    "none": lambda item, x: None,
}


@failing("loss 'odd'", "one number", each=[(kind,) for kind in LOSSES])
def a_loss_is_not_a_tensor_of_one_number(kind, graph, start):
    graph.loss(LOSSES[kind], start, name="odd")


COMPUTING = ("function", "loss", "cond", "update", "flatmap", "group")


@failing(
    "{0} 'breaks'",
    "instance 0, state (2, 4)",
    "KeyError: 'token'",
    each=[(kind,) for kind in COMPUTING],
)
def a_function_fails(kind, graph, start):
    def fail(item, *tensors):
        raise KeyError("token")

    at = graph.update(lambda item: (item.instance.n, 4), start)
    if kind == "loss":
        graph.loss(fail, at, name="breaks")
        return
    keywords = {"count": lambda item: 1} if kind == "group" else {}
    made = getattr(graph, kind)(fail, at, name="breaks", **keywords)
    for port in made if kind == "cond" else [made]:
        graph.loss(square, port)


# --- messages that are computed together ---------------------------------------------------------

SUMS = {"(3,)": lambda x: x.sum(0), "()": lambda x: x.sum()}


@failing(
    "'sums'",
    "{0}",
    "9 rows",
    "batch=1",
    take=rows_of,
    ones=[0],
    each=[(shape,) for shape in SUMS],
)
def a_layer_adds_up_the_rows_of_several_messages(shape, graph, start):
    graph.loss(square, graph.layer(Calls(SUMS[shape]), start, name="sums", batch=5))


ROWS = {  # one row is multiplied by two, which is well by itself; of both messages there are three
    (0,): (numbers(0, 1, 3), numbers(1, 2, 3)),
    (1,): (numbers(2, 2, 3), numbers(3, 1, 3)),
}


@failing("layer 'mix'", "rows", take=two_states)
def tensors_of_a_message_have_different_rows(graph, start):
    both = graph.function(lambda item, _: ROWS[item.state], start, outputs=2)
    graph.loss(square, graph.layer(Mix(Net().a), both, name="mix", batch=2))


# --- the cases ------------------------------------------------------------------------------------


@pytest.mark.parametrize("go", ["train_epoch", "evaluate"])
@pytest.mark.parametrize("name", CASES)
def test_a_stuck_flow_names_the_node(running, name, go):
    take, build, words, ones = CASES[name]
    graph, start = started(take)
    build(graph, start)
    with running(graph) as runtime, refused(*words):
        getattr(runtime, go)(ones)
