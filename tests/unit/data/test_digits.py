import sys

import pytest
import torch

from daso.data import load_digits
from daso.errors import DataError


def test_splits_have_the_promised_shapes():
    for train, samples in ((True, 1437), (False, 360)):
        inputs, targets = load_digits(train=train).tensors
        assert inputs.shape == (samples, 1, 8, 8)
        assert inputs.dtype == torch.float32
        assert targets.shape == (samples,)
        assert targets.dtype == torch.int64


def test_train_split_is_standardised_and_its_numbers_serve_the_test_split():
    train, test = (load_digits(train=split).tensors[0] for split in (True, False))
    assert train.mean().item() == pytest.approx(0, abs=1e-5)
    assert train.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert test.min() == train.min()  # both splits have a pixel that is 0 before


def test_every_digit_is_36_times_in_the_test_split():
    assert load_digits(train=False).tensors[1].bincount().tolist() == [36] * 10


def test_splits_make_up_the_whole_set():
    from sklearn import datasets

    images = [load_digits(train=split).tensors[0].flatten(1) for split in (True, False)]
    grey = (torch.cat(images) * 6.016708 + 4.891354).round().int().tolist()
    assert sorted(grey) == sorted(datasets.load_digits().data.astype(int).tolist())


def test_split_is_the_same_every_time_and_leaves_global_randomness_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = load_digits(train=True).tensors
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again = load_digits(train=True).tensors
    assert all(map(torch.equal, first, again))


def test_without_scikit_learn_the_error_tells_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(DataError, match=r"scikit-learn.*pip install scikit-learn"):
        load_digits(train=True)
