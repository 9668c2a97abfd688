import pytest

from daso.comm.health.spares import Member, members_of_next_world


def left(node_of, alive, spares=(), spares_alive=(), ranks=None):
    """Return what those that are left say: first of the world, then spares."""
    members = [
        Member(rank, (False, node), node_of.count(node), "host", ready=True)
        for rank, node in enumerate(node_of)
        if rank in alive
    ]
    return members + [
        Member(0, (True, node), spares.count(node), "host", ready=True)
        for at, node in enumerate(spares)
        if at in spares_alive
    ]


@pytest.mark.parametrize(
    ("node_of", "alive", "stay"),
    [
        ((0, 1, 2), (0, 1), [0, 1]),
        ((0, 0, 1, 1), (0, 1, 3), [0, 1]),
        ((0, 0, 1, 1), (1, 2), []),
        ((0, 1, 0, 1), (1, 3), [1, 3]),  # launchers may deal ranks out
        ((0, 0, 0, 1), (0, 1, 2), [0, 1, 2]),
    ],
)
def test_ranks_of_whole_nodes_stay(node_of, alive, stay):
    members = left(node_of, alive)
    assert [members[at].rank for at in members_of_next_world(members, 0)] == stay


@pytest.mark.parametrize(
    ("alive", "spares", "spares_alive", "come"),
    [
        ((0, 1, 2), (0, 1), (0, 1), [(True, 0)]),  # one node is missing, one comes
        ((0, 1, 2), (0, 1), (1,), [(True, 1)]),  # a spare may be lost too
        ((0, 1, 2, 3), (0, 1), (0, 1), []),  # a spare alone was lost
        ((0,), (0, 0, 1, 1), (0, 2, 3), [(True, 1)] * 2),  # of a broken spare node none comes
        ((0,), (0, 0, 1, 1), (0, 1, 2, 3), [(True, 0)] * 2 + [(True, 1)] * 2),
        ((), (0,), (0,), []),  # nobody has anything to hand over
    ],
)
def test_as_many_whole_spare_nodes_come_as_are_missing(alive, spares, spares_alive, come):
    members = left((0, 1, 2, 3), alive, spares, spares_alive)
    chosen = members_of_next_world(members, 4)
    assert [members[at].node for at in chosen[len(alive) :]] == come
    assert [members[at].rank for at in chosen[: len(alive)]] == list(alive)
