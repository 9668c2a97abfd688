"""Why a state does not fit, of all that can be other."""

import pytest

from daso.train.model.misfit import Misfit, misfit, remedy

SHAPE = {"format": 4, "rank": 0, "node_sizes": [1, 1], "layout": 7, "setup": "a"}
FITS = {"shape": SHAPE, "sync": {}}


@pytest.mark.parametrize(
    ("state", "shape", "reason"),
    [
        (FITS, SHAPE, Misfit.NONE),
        (None, SHAPE, Misfit.NOTHING),
        (FITS, None, Misfit.UNOPENED),
        ({"shape": None, "sync": None}, SHAPE, Misfit.UNOPENED),
        (FITS | {"sync": None}, SHAPE, Misfit.ONE_COPY),
        (FITS, SHAPE | {"rank": 1}, Misfit.RANK),
        (FITS, SHAPE | {"setup": "b", "rank": 1}, Misfit.SETUP),
        (FITS, SHAPE | {"devices": ["cuda"]}, Misfit.SETUP),
        (FITS, SHAPE | {"layout": 8, "setup": "b"}, Misfit.MODEL),
        (FITS, SHAPE | {"node_sizes": [2, 2], "layout": 8}, Misfit.WORLD),
    ],
)
def test_the_strongest_reason_is_said(state, shape, reason):
    assert misfit(state, shape) is reason


def test_each_reason_has_a_remedy():
    for reason in set(Misfit) - {Misfit.NONE}:
        assert all(remedy(reason))
