import random

import numpy as np
import pytest
import torch

from daso.data import images, teacher_student, tokens

MAKERS = {
    "teacher_student": lambda n, seed: teacher_student(n, 6, 4, seed=seed),
    "images": lambda n, seed: images(n, seed=seed, size=12, classes=4),
    "tokens": lambda n, seed: tokens(n, 9, 20, seed=seed),
}


@pytest.fixture(params=list(MAKERS))
def make(request):
    return MAKERS[request.param]


def test_the_seed_decides_every_bit(make):
    first = make(50, 3).tensors
    torch.manual_seed(99)
    assert all(map(torch.equal, first, make(50, 3).tensors))
    assert not torch.equal(first[0], make(50, 4).tensors[0])


def test_global_randomness_is_left_alone(make):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    make(10, 0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]


def test_shapes_and_types_are_as_promised():
    expected = {
        teacher_student(7, 5, 3, seed=0): ((7, 5), torch.float32, (7,)),
        images(7, seed=0): ((7, 1, 28, 28), torch.float32, (7,)),
        images(7, seed=0, size=9, classes=2): ((7, 1, 9, 9), torch.float32, (7,)),
        tokens(7, 11, 5, seed=0): ((7, 11), torch.int64, (7, 11)),
    }
    for dataset, (shape, dtype, target_shape) in expected.items():
        inputs, targets = dataset.tensors
        assert (inputs.shape, inputs.dtype) == (shape, dtype)
        assert (targets.shape, targets.dtype) == (target_shape, torch.int64)


def test_the_teacher_uses_all_classes():
    targets = teacher_student(2000, 16, 5, seed=0).tensors[1]
    assert targets.bincount(minlength=5).min() > 100
    assert targets.max() == 4


def test_a_linear_student_of_one_seed_answers_the_samples_of_another():
    train, test = (teacher_student(4000, 8, 3, seed=seed).tensors for seed in (0, 1))
    student = torch.linalg.lstsq(train[0], torch.nn.functional.one_hot(train[1]).float()).solution
    right = (test[0] @ student).argmax(dim=1) == test[1]
    assert right.float().mean() > 0.75


def test_class_means_of_one_seed_tell_the_images_of_another():
    train, test = (images(1000, seed=seed).tensors for seed in (0, 1))
    means = torch.stack([train[0][train[1] == label].mean(dim=0) for label in range(10)]).flatten(1)
    guesses = torch.cdist(test[0].flatten(1), means).argmin(dim=1)
    accuracy = (guesses == test[1]).float().mean()
    assert accuracy > 0.9


def test_images_do_not_give_the_class_away_in_one_pixel():
    inputs, targets = images(1000, seed=0).tensors
    brightest = inputs.flatten(1).argmax(dim=1)
    most_common = torch.stack([brightest[targets == label].mode().values for label in range(10)])
    assert (brightest == most_common[targets]).float().mean() < 0.2


def test_targets_of_tokens_are_the_inputs_one_ahead():
    inputs, targets = tokens(20, 8, 6, seed=0).tensors
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("vocabulary", [2, 64])
def test_tokens_stay_in_the_vocabulary(vocabulary):
    inputs, targets = tokens(50, 20, vocabulary, seed=0).tensors
    assert inputs.unique().numel() > 1
    assert all(part.min() >= 0 and part.max() < vocabulary for part in (inputs, targets))


def test_tokens_follow_one_chain_whatever_the_seed():
    followers = [{} for _ in range(64)]
    for seed in (0, 1):
        inputs, targets = tokens(400, 50, 64, seed=seed).tensors
        for token, after in zip(inputs.flatten().tolist(), targets.flatten().tolist(), strict=True):
            followers[token][after] = followers[token].get(after, 0) + 1
    assert max(len(counts) for counts in followers) == 4
    often = [max(counts.values()) / sum(counts.values()) for counts in followers if counts]
    assert min(often) > 0.4
    assert sum(often) / len(often) == pytest.approx(0.6, abs=0.05)
