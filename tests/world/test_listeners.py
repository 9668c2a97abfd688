"""`on_exchange`: what a user is told of each exchange, for W&B, TensorBoard, Prometheus."""

import pytest
from doors import DOORS, network
from training import sgd, train

import daso
from daso.errors import ConfigError

doors = pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)


@doors
def test_a_function_is_told_of_each_exchange(door, topology, rank_info):
    model, told, also = network(), [], []
    keywords = {"module": model, "topology": topology, "policy": daso.Fixed(3, 1)}
    with door(sgd(model), **keywords) as (optimizer, handle):
        stop = handle.on_exchange(told.append)
        handle.on_exchange(also.append)
        train(optimizer, model, rank_info.rank, 10)
        report = handle.report()
        assert [one["batch"] for one in told] == [4, 7, 10]
        assert told == also
        assert told[0] is not also[0]
        assert [one["exchanges"] for one in told] == [1, 2, 3]
        assert {(one["skip"], one["wait"], one["dropped"]) for one in told} == {(3, 1, 0)}
        assert sum(one["bytes_sent"] for one in told) == report["global_bytes_sent"]
        assert sum(one["exposed_seconds"] for one in told) <= report["exposed_seconds"]
        assert all(one["lr"] == 0.05 for one in told)
        assert told[-1]["drift"] > 0
        stop()
        stop()
        train(optimizer, model, rank_info.rank, 3, first=10)
        assert (len(told), len(also)) == (3, 4)


@pytest.mark.nodes((1, 1))
def test_an_error_in_it_is_the_steps_and_the_schedule_goes_on(topology, rank_info):
    model = network()
    optimizer = daso.DASO(sgd(model), module=model, topology=topology, policy=daso.Fixed(2, 0))

    def refuse(_):
        raise OSError("disk full")

    stop = optimizer.on_exchange(refuse)
    train(optimizer, model, rank_info.rank, 1)
    with pytest.raises(OSError, match="disk full"):
        train(optimizer, model, rank_info.rank, 1, first=1)
    stop()
    train(optimizer, model, rank_info.rank, 4, first=2)
    assert optimizer.report()["batches"] == 6
    assert optimizer.report()["exchanges"] == 3
    optimizer.close()


@pytest.mark.nodes((1, 1))
def test_what_cannot_be_called_is_refused(topology):
    model = network()
    optimizer = daso.DASO(sgd(model), module=model, topology=topology)
    with pytest.raises(ConfigError, match=r"on_exchange must be a function of one dict, not 'wand"):
        optimizer.on_exchange("wandb")
    optimizer.close()
