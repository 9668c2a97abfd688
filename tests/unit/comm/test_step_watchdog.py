"""Who rings whom, where ranks wait for each other in different places."""

import pytest

from daso.comm.health.step_watchdog import neighbours


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 16, 37, 1000])
def test_from_any_rank_to_any_other_leads_a_way_of_few_neighbours(ranks):
    """So that of ranks parted in two some are always neighbours of some of the others."""
    steps, reached = 0, {0}
    while len(reached) < ranks:
        reached |= {other for one in reached for other in neighbours(one, ranks)}
        steps += 1
    assert steps <= max(1, (ranks - 1).bit_length())
    of_each = [neighbours(one, ranks) for one in range(ranks)]
    assert all(one in of_each[other] for one in range(ranks) for other in of_each[one])
    assert all(len(of_one) <= 2 * (ranks - 1).bit_length() for of_one in of_each)


def test_of_few_ranks_all_are_neighbours():
    assert neighbours(0, 1) == []
    assert neighbours(1, 4) == [0, 2, 3]
    assert neighbours(2, 3) == [0, 1]
