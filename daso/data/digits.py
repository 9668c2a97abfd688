"""Handwritten digits of 8 x 8 pixels from scikit-learn: real data, no download."""

import torch
from torch.utils.data import TensorDataset

from daso.errors import DataError

# Of the train split, in grey levels of 0..16. Constants, so that all ranks have the same bits
# whatever order their machines add in.
_MEAN = 4.891354
_STD = 6.016708

_CLASSES = 10
_TEST_PER_CLASS = 36  # x 10 classes = 360 of the 1797 samples


def load_digits(*, train: bool) -> TensorDataset:
    """Load one split of scikit-learn's digits; the split is the same on every machine.

    Args:
        train: The train split (1437 samples), or else the test split (360, 36 of each digit).

    Returns:
        Inputs, float32 (N, 1, 8, 8), standardised by the train split; targets 0..9, int64 (N,).

    Raises:
        DataError: scikit-learn cannot be imported.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise DataError(
            f"the digits data set is part of scikit-learn, which cannot be imported ({error}); "
            "pip install scikit-learn",
            code="scikit-learn-not-installed",
        ) from error
    bunch = datasets.load_digits()
    targets = torch.from_numpy(bunch.target).long()
    chosen = _test_mask(targets) != train
    inputs = (torch.from_numpy(bunch.images).float() - _MEAN) / _STD
    return TensorDataset(inputs[chosen].unsqueeze(1), targets[chosen])


def _test_mask(targets: torch.Tensor) -> torch.Tensor:
    # The set is ordered by writer: without a shuffle the test split would have other writers.
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0), device="cpu")
    mask = torch.zeros(len(targets), dtype=torch.bool, device="cpu")
    for digit in range(_CLASSES):
        mask[order[targets[order] == digit][:_TEST_PER_CLASS]] = True
    return mask
