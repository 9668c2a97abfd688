import struct
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from daso.cli.train.config import DataConfig, OptimizerConfig
from daso.cli.train.task import evaluate, loss_of, make_optimizer, make_task
from daso.data import fashion
from daso.errors import DataError


def write_fashion(folder, train=6, test=4):
    """Write the four files of Fashion-MNIST, with a few black images."""
    folder.mkdir(exist_ok=True)
    for name, n in (("train", train), ("t10k", test)):
        images = struct.pack(">4I", 0x0803, n, 28, 28) + bytes(n * 28 * 28)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(images)
        labels = struct.pack(">2I", 0x0801, n) + bytes(range(n))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(labels)
    return folder


@pytest.fixture(autouse=True)
def system(tmp_path, monkeypatch):
    """Stand in for the folder of the Debian package; empty."""
    folder = tmp_path / "system"
    folder.mkdir()
    monkeypatch.setattr(fashion, "_SYSTEM", folder)
    monkeypatch.delenv("DASO_DATA", raising=False)
    return folder


def test_auto_is_digits_where_fashion_is_not_on_disk():
    task = make_task(DataConfig())
    assert (task.data, task.train_length, len(task.test)) == ("digits", 1437, 360)


def test_auto_is_fashion_where_the_system_has_it(system):
    write_fashion(system)
    task = make_task(DataConfig())
    assert (task.data, task.train_length, len(task.test)) == ("fashion", 6, 4)


def test_auto_is_digits_where_one_file_is_missing(system):
    write_fashion(system)
    next(system.iterdir()).unlink()
    assert make_task(DataConfig()).data == "digits"


def test_the_folder_of_the_environment_wins_over_the_systems(system, tmp_path, monkeypatch):
    write_fashion(system)
    monkeypatch.setenv("DASO_DATA", str(write_fashion(tmp_path / "mine", train=3)))
    assert make_task(DataConfig()).train_length == 3
    monkeypatch.setenv("DASO_DATA", str(tmp_path / "nosuch"))
    assert make_task(DataConfig()).data == "digits"


def test_the_folder_of_the_settings_wins_over_the_environments(tmp_path, monkeypatch):
    monkeypatch.setenv("DASO_DATA", str(write_fashion(tmp_path / "mine", train=3)))
    folder = str(write_fashion(tmp_path / "other", train=5))
    assert make_task(DataConfig(folder=folder)).train_length == 5


@pytest.mark.parametrize("name", ["fashion", "digits", "synthetic", "text"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_each_model_maps_a_batch_of_its_data_to_scores(system, tmp_path, name, split):
    write_fashion(system)
    (tmp_path / "a.txt").write_text("the quick brown fox " * 100)
    folder = str(tmp_path) if name == "text" else ""
    task = make_task(DataConfig(name=name, folder=folder, context=16))
    assert task.data == name
    inputs, targets = next(iter(DataLoader(getattr(task, split), batch_size=3)))
    scores = task.model(inputs)
    assert scores.shape == ((3, 16, 256) if name == "text" else (3, 10))
    assert scores.shape[:-1] == targets.shape
    assert scores.dtype == torch.float32
    loss = loss_of(task.model, inputs, targets)
    assert loss.shape == ()
    assert torch.isfinite(loss)


def test_the_same_seed_gives_the_same_model_and_data():
    def made(seed):
        torch.manual_seed(seed)
        return make_task(DataConfig(name="synthetic"))

    one, two, other = made(1), made(1), made(2)
    assert torch.equal(one.train.tensors[0], two.train.tensors[0])
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(next(one.model.parameters()), next(other.model.parameters()))


def test_train_and_test_data_are_not_the_same_samples():
    task = make_task(DataConfig(name="synthetic"))
    for train, test in zip(task.train.tensors, task.test.tensors, strict=True):
        assert not torch.equal(train[:100], test[:100])


@pytest.mark.parametrize("given", ["settings", "environment", "nothing"])
def test_missing_fashion_is_told_with_how_to_get_it(tmp_path, system, monkeypatch, given):
    folder = system if given == "nothing" else tmp_path / "empty"
    if given == "environment":
        monkeypatch.setenv("DASO_DATA", str(folder))
    config = DataConfig(name="fashion", folder=str(folder) if given == "settings" else "")
    with pytest.raises(DataError) as caught:
        make_task(config)
    message = str(caught.value)
    assert str(folder) in message
    assert "dataset-fashion-mnist" in message
    assert "DASO_DATA" in message


def test_a_folder_without_text_is_told_with_what_to_do(system):
    with pytest.raises(DataError) as caught:
        make_task(DataConfig(name="text", folder=str(system)))
    assert str(system) in str(caught.value)
    assert ".txt" in str(caught.value)


def test_text_is_looked_for_where_the_environment_says(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("abcdefghij" * 20)
    monkeypatch.setenv("DASO_DATA", str(tmp_path))
    task = make_task(DataConfig(name="text", context=9))
    assert task.train_length == (180 - 1) // 9


@pytest.mark.parametrize("samples", [1, 3, 7, 600])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_all_ranks_together_evaluate_each_sample_once(samples, size):
    seen = Counter()

    class Data(Dataset):
        def __len__(self):
            return samples

        def __getitem__(self, index):
            seen[index] += 1
            return torch.eye(3)[index % 3], torch.tensor(0)

    counts = [evaluate(torch.nn.Identity(), Data(), rank=rank, size=size) for rank in range(size)]
    assert seen == Counter(range(samples))
    assert sum(total for _, total in counts) == samples
    assert sum(right for right, _ in counts) == len(range(0, samples, 3))
    assert max(total for _, total in counts) - min(total for _, total in counts) <= 1


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_evaluate_counts_every_byte_of_a_text(size):
    scores = torch.nn.functional.one_hot(torch.tensor([[0, 1], [1, 1], [2, 2]]), 3).float()
    data = TensorDataset(scores, torch.tensor([[0, 1], [1, 0], [0, 2]]))
    counts = [evaluate(torch.nn.Identity(), data, rank=rank, size=size) for rank in range(size)]
    assert (sum(right for right, _ in counts), sum(total for _, total in counts)) == (4, 6)


def test_evaluate_changes_nothing_of_a_model_in_training():
    task = make_task(DataConfig(name="synthetic"))
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    data = TensorDataset(*(tensor[:8] for tensor in task.test.tensors))
    evaluate(task.model, data, rank=0, size=1)
    assert task.model.training
    for name, value in task.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in task.model.parameters())


def test_the_loss_is_the_mean_over_all_answers():
    scores = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 2, 3, 0], [3, 2, 1, 0, 3]])
    expected = -scores.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).mean()
    torch.testing.assert_close(loss_of(torch.nn.Identity(), scores, targets), expected)


@pytest.mark.parametrize(("name", "kind"), [("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)])
def test_the_inner_optimizer_is_the_one_asked_for(name, kind):
    model = torch.nn.Linear(2, 2)
    config = OptimizerConfig(name=name, lr=0.25, momentum=0.5, weight_decay=0.125)
    made = make_optimizer(config, model)
    assert type(made) is kind
    (group,) = made.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.25, 0.125)
    assert group.get("momentum") == (0.5 if name == "sgd" else None)
    assert {id(one) for one in group["params"]} == {id(one) for one in model.parameters()}
