import gzip
import struct
from pathlib import Path

import pytest
import torch
from expected_errors import raises

from daso.data import fashion, find_fashion, load_fashion
from daso.errors import DataError

MEAN, STD = 0.286041, 0.353024
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


def idx(shape, data, magic=None):
    magic = 0x0800 + len(shape) if magic is None else magic
    return struct.pack(f">{1 + len(shape)}I", magic, *shape) + bytes(data)


def pixels(n, offset):
    return [(offset + i) % 256 for i in range(n * 28 * 28)]


def write(folder, zipped=True):
    files = {
        IMAGES: idx((3, 28, 28), pixels(3, 0)),
        LABELS: idx((3,), [9, 0, 4]),
        TEST_IMAGES: idx((2, 28, 28), pixels(2, 100)),
        TEST_LABELS: idx((2,), [1, 2]),
    }
    for name, data in files.items():
        replace(folder, name, data, zipped)
    return folder


def replace(folder, name, data, zipped=True):
    path = folder / (f"{name}.gz" if zipped else name)
    path.write_bytes(gzip.compress(data) if zipped else data)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("as_type", [str, Path])
def test_both_splits_are_read_and_normalised(tmp_path, zipped, as_type):
    folder = as_type(write(tmp_path, zipped))
    for train, labels, offset in ((True, [9, 0, 4], 0), (False, [1, 2], 100)):
        inputs, targets = load_fashion(folder, train=train).tensors
        grey = torch.tensor(pixels(len(labels), offset)).reshape(-1, 1, 28, 28)
        torch.testing.assert_close(inputs, (grey / 255 - MEAN) / STD)
        assert inputs.dtype == torch.float32
        assert targets.dtype == torch.int64
        assert targets.tolist() == labels


def test_found_only_where_all_four_files_are(tmp_path):
    assert find_fashion(tmp_path) is None
    write(tmp_path)
    assert find_fashion(str(tmp_path)) == tmp_path
    (tmp_path / f"{TEST_LABELS}.gz").unlink()
    assert find_fashion(tmp_path) is None
    replace(tmp_path, TEST_LABELS, b"", zipped=False)
    assert find_fashion(tmp_path) == tmp_path


def test_without_a_folder_the_system_folder_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(fashion, "_SYSTEM", tmp_path)
    assert find_fashion() is None
    write(tmp_path)
    assert find_fashion() == tmp_path
    assert load_fashion(train=True).tensors[1].tolist() == [9, 0, 4]


def test_without_a_folder_the_one_that_daso_data_names_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("DASO_DATA", str(write(tmp_path)))
    assert len(load_fashion(train=True)) == 3


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def refused(_):
        raise PermissionError(13, "Permission denied")

    write(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(DataError, match=r"it cannot be read \(Permission denied\)"):
        load_fashion(tmp_path, train=True)


def test_a_folder_given_is_the_only_place(tmp_path, monkeypatch):
    system, given = tmp_path / "system", tmp_path / "given"
    system.mkdir()
    monkeypatch.setattr(fashion, "_SYSTEM", write(system))
    assert find_fashion(given) is None
    with raises("fashion-mnist-missing"):
        load_fashion(given, train=True)


def test_missing_files_are_named_with_the_place_and_the_remedy(tmp_path):
    write(tmp_path)
    (tmp_path / f"{LABELS}.gz").unlink()
    with pytest.raises(DataError) as caught:
        load_fashion(tmp_path, train=True)
    message = str(caught.value)
    for part in (LABELS, str(tmp_path), "dataset-fashion-mnist", "DASO_DATA"):
        assert part in message
    assert IMAGES not in message
    assert len(load_fashion(tmp_path, train=False)) == 2  # its files are all there


CORRUPT = {
    "magic": (IMAGES, idx((3, 28, 28), pixels(3, 0), magic=2049), "magic number is 2049, not 2051"),
    "swapped": (LABELS, idx((3, 28, 28), pixels(3, 0)), "magic number is 2051, not 2049"),
    "header": (IMAGES, idx((3, 28, 28), [])[:7], "header is 16 bytes long and only 7"),
    "empty": (LABELS, b"", "header is 8 bytes long and only 0"),
    "short": (IMAGES, idx((3, 28, 28), pixels(2, 0)), "promises 2352 bytes of data and 1568"),
    "long": (LABELS, idx((3,), [0, 1, 2, 3]), "promises 3 bytes of data and 4"),
    "nothing": (LABELS, idx((0,), []), "promises 0 bytes"),
    "size": (IMAGES, idx((3, 28, 27), bytes(3 * 28 * 27)), "28 x 27 pixels, not 28 x 28"),
    "count": (LABELS, idx((2,), [0, 1]), "2 labels for 3 images"),
    "class": (LABELS, idx((3,), [0, 10, 1]), "highest label is 10"),
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("case", list(CORRUPT))
def test_a_corrupt_file_is_named_with_what_is_wrong(tmp_path, case, zipped):
    name, data, what = CORRUPT[case]
    replace(write(tmp_path, zipped), name, data, zipped)
    with pytest.raises(DataError, match=what) as caught:
        load_fashion(tmp_path, train=True)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda zipped: zipped[:-20],
        lambda zipped: b"plain" + zipped,
        lambda zipped: zipped[:10] + b"\xff" * 40 + zipped[50:],
        lambda zipped: zipped[:-8] + bytes(8),
    ],
    ids=["truncated", "not gzip", "overwritten", "checksum"],
)
def test_a_damaged_gzip_file_is_named(tmp_path, damage):
    path = write(tmp_path) / f"{IMAGES}.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match="does not unzip") as caught:
        load_fashion(tmp_path, train=True)
    assert str(path) in str(caught.value)


@pytest.mark.skipif(find_fashion() is None, reason=f"no Fashion-MNIST in {fashion._SYSTEM}")
def test_the_real_files_have_the_numbers_that_the_constants_say():
    inputs, targets = load_fashion(train=True).tensors
    assert inputs.shape == (60000, 1, 28, 28)
    assert inputs.double().mean().item() == pytest.approx(0, abs=1e-5)
    assert inputs.double().std().item() == pytest.approx(1, abs=1e-5)
    assert targets.bincount().tolist() == [6000] * 10
    assert len(load_fashion(train=False)) == 10000
