"""What a schedule chose, change by change."""

import json
from dataclasses import replace

from daso.plan.schedule import State
from daso.plan.small_tensors import SmallTensors
from daso.train.metrics import History


def test_a_change_is_added_with_its_batch_and_goes_through_a_file():
    before = State(skip=1, wait=1)
    history = History.of(before)
    for batch, change in (
        (3, {"skip": 2}),
        (5, {}),
        (8, {"small": SmallTensors(period=0)}),
        (9, {"wait": 2}),
    ):
        now = replace(before, batch=batch, **change)
        history.take(before, now)
        before = now
    assert history.skip == [(0, 1, 1), (3, 2, 1), (9, 2, 2)]
    assert history.small == [(0, 2), (8, 0)]
    assert History.load(json.loads(json.dumps(history.state()))) == history
