import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from daso.data import ShardedSampler
from daso.errors import ConfigError
from daso.examples.transformer import batches

checked = settings(derandomize=True, max_examples=60, deadline=None)


@st.composite
def worlds(draw):
    size, batch_size = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    return {
        "length": draw(st.integers(size * batch_size, 150)),
        "size": size,
        "batch_size": batch_size,
        "seed": draw(st.integers(0, 2**64)),
        "shuffle": draw(st.booleans()),
    }


def samplers(world, epoch=0):
    ranks = [ShardedSampler(**world, rank=rank) for rank in range(world["size"])]
    for sampler in ranks:
        sampler.set_epoch(epoch)
    return ranks


def global_batches(world, epoch=0):
    """Per step, the indices of all ranks in rank order."""
    steps = zip(*samplers(world, epoch), strict=True)
    return [list(itertools.chain(*step)) for step in steps]


@checked
@given(worlds(), st.integers(0, 1000))
def test_every_rank_gets_as_many_full_batches(world, epoch):
    count = world["length"] // (world["size"] * world["batch_size"])
    for sampler in samplers(world, epoch):
        assert len(sampler) == count
        assert [len(batch) for batch in sampler] == [world["batch_size"]] * count


@checked
@given(worlds(), st.integers(0, 1000))
def test_no_sample_twice_in_an_epoch_and_only_the_tail_is_dropped(world, epoch):
    dealt = list(itertools.chain(*global_batches(world, epoch)))
    dropped = world["length"] % (world["size"] * world["batch_size"])
    assert len(set(dealt)) == len(dealt) == world["length"] - dropped
    assert set(dealt) <= set(range(world["length"]))


@checked
@given(worlds(), st.integers(0, 1000))
def test_same_global_batch_sees_the_same_samples(world, epoch):
    alone = world | {"size": 1, "batch_size": world["size"] * world["batch_size"]}
    assert global_batches(world, epoch) == global_batches(alone, epoch)


@checked
@given(worlds(), st.data())
def test_an_interrupted_epoch_goes_on_where_it_was(world, data):
    whole, interrupted = samplers(world, epoch=3)[-1], samplers(world, epoch=3)[-1]
    expected = list(whole)
    stop = data.draw(st.integers(0, len(expected)))
    begun = list(itertools.islice(interrupted, stop))
    assert interrupted.state_dict() == {"epoch": 3, "batch": stop}

    resumed = samplers(world)[-1]
    resumed.load_state_dict(interrupted.state_dict())
    assert resumed.state_dict() == {"epoch": 3, "batch": stop}
    assert begun + list(resumed) == expected
    assert resumed.state_dict() == {"epoch": 3, "batch": len(expected)}
    assert list(resumed) == expected  # the one after is whole


def test_without_shuffle_the_order_is_that_of_the_data_set():
    world = {"length": 11, "size": 2, "batch_size": 2, "shuffle": False}
    first, second = samplers(world, epoch=5)
    assert list(first) == [[0, 1], [4, 5]]
    assert list(second) == [[2, 3], [6, 7]]


def test_seed_and_epoch_each_change_the_order():
    world = {"length": 100, "size": 1, "batch_size": 100}
    keys = itertools.product([0, 1, 2**32], [0, 1, 2])
    orders = [global_batches(world | {"seed": seed}, epoch)[0] for seed, epoch in keys]
    assert len({tuple(order) for order in orders}) == 9


def test_order_is_independent_of_global_randomness():
    world = {"length": 100, "size": 2, "batch_size": 5}
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = global_batches(world)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert global_batches(world) == first


def test_the_epoch_moves_by_set_epoch_alone():
    sampler = ShardedSampler(20, rank=0, size=1, batch_size=5)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert sampler.state_dict() == {"epoch": 1, "batch": 4}


def test_set_epoch_keeps_a_restored_place_in_its_epoch():
    sampler = ShardedSampler(20, rank=0, size=1, batch_size=5)
    sampler.load_state_dict({"epoch": 2, "batch": 3})
    sampler.set_epoch(2)
    assert len(list(sampler)) == 1
    sampler.load_state_dict({"epoch": 2, "batch": 3})
    sampler.set_epoch(3)
    assert sampler.state_dict() == {"epoch": 3, "batch": 0}
    assert len(list(sampler)) == 4


def test_an_abandoned_iteration_does_not_shorten_the_next():
    sampler = ShardedSampler(20, rank=0, size=1, batch_size=5)
    next(iter(sampler))
    again = iter(sampler)
    assert sampler.state_dict() == {"epoch": 0, "batch": 0}
    assert len(list(again)) == 4


def test_a_loader_takes_it_as_batch_sampler_and_its_place_follows():
    data = TensorDataset(torch.arange(21))
    sampler = ShardedSampler(21, rank=1, size=2, batch_size=5, shuffle=False)
    loader = DataLoader(data, batch_sampler=sampler)
    assert len(loader) == 2
    places, seen = [], []
    for (batch,) in loader:
        places.append(sampler.state_dict()["batch"])
        seen.append(batch.tolist())
    assert places == [1, 2]
    assert seen == [[5, 6, 7, 8, 9], [15, 16, 17, 18, 19]]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"rank": 2}, "rank .* not 2 of 2"),
        ({"rank": -1}, "rank .* not -1"),
        ({"size": 0, "rank": 0}, "rank .* not 0 of 0"),
        ({"batch_size": 0}, "batch_size .* not 0"),
        ({"seed": -1}, "seed .* -1"),
        ({"length": 9}, "10 samples, and the data set has 9; lower batch_size"),
    ],
)
def test_numbers_out_of_range_are_refused_with_rule_value_and_remedy(wrong, match):
    good = {"length": 10, "rank": 0, "size": 2, "batch_size": 5}
    assert len(ShardedSampler(**good)) == 1
    with pytest.raises(ConfigError, match=match):
        ShardedSampler(**good | wrong)


@pytest.mark.parametrize("state", [{"epoch": 0, "batch": 5}, {"epoch": -1, "batch": 0}])
def test_a_state_of_another_data_set_is_refused_and_changes_nothing(state):
    sampler = ShardedSampler(20, rank=0, size=1, batch_size=5)
    with pytest.raises(ConfigError, match="resume with the data set"):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == {"epoch": 0, "batch": 0}


def test_a_negative_epoch_is_refused():
    with pytest.raises(ConfigError, match="-1"):
        ShardedSampler(20, rank=0, size=1, batch_size=5).set_epoch(-1)


@dataclass(frozen=True)
class Fewer:
    """A world that lost ranks, as one of those that are left is told of it."""

    rank: int
    world_size: int
    most: Callable[[int], int]
    first: Callable[[object], object] = lambda value: value
    is_new: bool = False


def deal_anew(stay, size, most, new=()):
    """Tell samplers, in the order of their ranks, of a world of this size."""
    told = {}

    def first(value):
        return told.setdefault("first", value)

    for rank, sampler in enumerate((*stay, *new)):
        sampler.regroup(Fewer(rank, size, lambda _: most, first, is_new=rank >= len(stay)))


def samples(batches):
    return [sample for batch in batches for sample in batch]


@checked
@given(worlds().filter(lambda world: world["size"] > 1), st.data())
def test_a_rank_that_is_new_shares_what_is_left_of_the_epoch(world, data):
    """It draws the batch once more that the furthest rank is in, which it lets pass."""
    *stay, spare = samplers(world)
    if earlier := data.draw(st.booleans()):  # the loss was in the epoch before
        list(map(list, stay))
        deal_anew(stay, len(stay), len(stay[0]))
    for sampler in stay:
        sampler.set_epoch(int(earlier))
    drawn = [data.draw(st.integers(1, len(stay[0]))) for _ in stay]
    begun = list(map(iter, stay))
    seen = [list(itertools.islice(one, count)) for one, count in zip(begun, drawn, strict=True)]
    deal_anew(stay, world["size"], max(drawn), new=[spare])
    assert (spare.epoch, spare.batches_done) == (int(earlier), max(drawn) - 1)
    spare.set_epoch(int(earlier))
    passes, *rest = list(spare)
    assert len(passes) == world["batch_size"]
    dealt = samples(rest)
    for before, after in zip(seen, begun, strict=True):
        batches = [*before, *after]
        assert len(batches) == max(drawn) + len(rest) == len(stay[0])
        dealt += samples(batches)
    assert len(set(dealt)) == len(dealt)
    for sampler in (*stay, spare):
        sampler.set_epoch(5)
    whole = samples(samples(map(list, (*stay, spare))))
    assert len(set(whole)) == len(whole) == len(spare) * world["size"] * world["batch_size"]


@checked
@given(worlds(), st.data())
def test_ranks_that_are_left_deal_what_is_left_of_the_epoch_among_them(world, data):
    """None of them sees a sample twice, and none is lost that a lost rank had not drawn."""
    ranks, size = samplers(world), world["size"]
    drawn = [data.draw(st.integers(0, len(ranks[0]))) for _ in ranks]
    begun = [iter(sampler) for sampler in ranks]
    seen = [list(itertools.islice(one, count)) for one, count in zip(begun, drawn, strict=True)]
    left = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1)))
    most = max(drawn[rank] for rank in left)
    for new, rank in enumerate(left):
        ranks[rank].regroup(Fewer(new, len(left), lambda _: most))
        assert ranks[rank].batches_done == drawn[rank]
    rest = {rank: [*seen[rank], *begun[rank]] for rank in left}
    assert len({len(batches) for batches in rest.values()}) == 1
    assert {len(ranks[rank]) for rank in left} == {len(batches) for batches in rest.values()}
    dealt = [sample for batches in rest.values() for batch in batches for sample in batch]
    assert len(set(dealt)) == len(dealt)
    whole = global_batches(world)
    lost = {
        sample
        for batch in whole[:most]
        for rank in set(range(size)) - set(left)
        for sample in batch[rank * world["batch_size"] :][: world["batch_size"]]
    }
    assert not lost & set(dealt)
    ended = most == len(whole)  # by some rank: what is left over is dropped as ever
    rest_of = size if ended else len(left)
    assert world["length"] - len(lost) - len(dealt) < rest_of * world["batch_size"]
    assert len(ranks[left[0]]) == most or not ended
    first = ranks[left[0]]
    place = first.state_dict()["batch"] * len(left) * world["batch_size"]
    assert world["length"] - place < 2 * len(left) * world["batch_size"]
    first.set_epoch(1)
    assert len(first) == world["length"] // (len(left) * world["batch_size"])


def test_an_example_goes_over_the_data_as_often_as_its_steps_take():
    sampler = ShardedSampler(10, rank=0, size=2, batch_size=2, seed=1)
    seen = [one.tolist() for one in batches(torch.arange(10), sampler, 2 * len(sampler) + 1)]
    assert len(seen) == 2 * len(sampler) + 1
    epochs = [seen[: len(sampler)], seen[len(sampler) : 2 * len(sampler)]]
    assert epochs[0] != epochs[1], "drawn anew"
