"""The numbers that follow from the node of each rank."""

import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from daso.comm.rank_info import RankInfo

UNEVEN = RankInfo(rank=4, world_size=5, local_rank=2, node=0, node_of=(0, 0, 1, 1, 0))


def test_numbers_follow_from_the_nodes_of_ranks():
    assert (UNEVEN.node_sizes, UNEVEN.nodes, UNEVEN.local_size) == ((3, 2), 2, 3)
    assert (UNEVEN.lanes, UNEVEN.largest_node) == (2, 3)
    assert UNEVEN.ranks_of_node == {0, 1, 4}


@pytest.mark.parametrize(("local_rank", "lane"), [(0, 0), (1, 1), (2, None)])
def test_ranks_beyond_the_smallest_node_have_no_lane(local_rank, lane):
    assert replace(UNEVEN, local_rank=local_rank).lane == lane


def test_a_record_is_that_of_its_given_numbers():
    others = replace(UNEVEN, node=1, local_rank=0, rank=2)
    assert (others.local_size, others.lane, others.ranks_of_node) == (2, 0, {2, 3})
    assert pickle.loads(pickle.dumps(UNEVEN)) == UNEVEN != others
    assert pickle.loads(pickle.dumps(UNEVEN)).lanes == 2
    assert repr(UNEVEN).endswith("node_of=(0, 0, 1, 1, 0))")
    with pytest.raises(FrozenInstanceError):
        UNEVEN.nodes = 3
