"""Fashion-MNIST from its four idx files, as installed by Debian's dataset-fashion-mnist."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from daso.environment import data_folder
from daso.errors import DataError
from daso.paths import is_file

# Of the 60000 training images, in grey levels of 0..1.
_MEAN = 0.286041
_STD = 0.353024

_SYSTEM = Path("/usr/share/datasets/fashion-mnist")
_TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
_TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_CLASSES = 10
_IMAGE = (28, 28)
_MAGIC = 0x0800  # unsigned bytes; the last byte of the magic number counts the dimensions


def find_fashion(folder: Path | str | None = None) -> Path | None:
    """Return the folder of Fashion-MNIST, or None if it is not complete.

    Args:
        folder: The folder to check; None: DASO_DATA's, else the Debian package's.

    Returns:
        The folder that has all four files, each as NAME.gz or NAME.
    """
    place = _place(folder)
    return None if _missing(place, _TRAIN + _TEST) else place


def load_fashion(folder: Path | str | None = None, *, train: bool) -> TensorDataset:
    """Load one split of Fashion-MNIST.

    Args:
        folder: Folder of the idx files, each as NAME.gz or NAME; None: DASO_DATA's, else the
            Debian package's.
        train: The train split (60000 samples), or else the test split (10000).

    Returns:
        Inputs, float32 (N, 1, 28, 28), normalised by the mean 0.286041 and standard deviation
        0.353024 of the training set; targets 0..9, int64 (N,).

    Raises:
        DataError: A file is missing, or has other contents than its name implies.
    """
    place, names = _place(folder), _TRAIN if train else _TEST
    if missing := _missing(place, names):
        raise DataError(
            f"Fashion-MNIST needs {' and '.join(missing)} (.gz or not), missing in {place}; "
            "install the Debian package dataset-fashion-mnist, or put the four idx files in a "
            "folder and name it as the data path (DASO_DATA)",
            code="fashion-mnist-missing",
        )
    images_path, labels_path = (_file(place, name) for name in names)
    images, labels = _read(images_path, dimensions=3), _read(labels_path, dimensions=1)
    _check_images(images_path, images)
    _check_labels(labels_path, labels, len(images))
    inputs = images.float().div_(255).sub_(_MEAN).div_(_STD)
    return TensorDataset(inputs.unsqueeze(1), labels.long())


def _place(folder: Path | str | None) -> Path:
    return Path(folder) if folder is not None else data_folder() or _SYSTEM


def _file(place: Path, name: str) -> Path:
    zipped = place / f"{name}.gz"
    return zipped if is_file(zipped) else place / name


def _missing(place: Path, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if not is_file(_file(place, name))]


def _read(path: Path, *, dimensions: int) -> torch.Tensor:
    data = _unzip(path)
    begin = 4 * (1 + dimensions)  # bytes of the header: the magic number, then each dimension
    if len(data) < begin:
        raise _corrupt(path, f"its header is {begin} bytes long and only {len(data)} are there")
    magic, *shape = struct.unpack_from(f">{1 + dimensions}I", data)
    if magic != _MAGIC + dimensions:
        raise _corrupt(path, f"its magic number is {magic}, not {_MAGIC + dimensions}")
    promised, follows = math.prod(shape), len(data) - begin
    if follows != promised or follows == 0:
        raise _corrupt(path, f"its header promises {promised} bytes of data and {follows} follow")
    return torch.frombuffer(data, dtype=torch.uint8, offset=begin).reshape(shape)


def _unzip(path: Path) -> bytearray:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _corrupt(path, f"it cannot be read ({error.strerror})") from error
    if path.suffix != ".gz":
        return bytearray(data)
    try:
        return bytearray(gzip.decompress(data))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _corrupt(path, f"it does not unzip ({error})") from error


def _check_images(path: Path, images: torch.Tensor) -> None:
    if images.shape[1:] != _IMAGE:
        height, width = images.shape[1:]
        raise _corrupt(path, f"its images have {height} x {width} pixels, not 28 x 28")


def _check_labels(path: Path, labels: torch.Tensor, images: int) -> None:
    if len(labels) != images:
        raise _corrupt(path, f"it has {len(labels)} labels for {images} images")
    if (highest := int(labels.max())) >= _CLASSES:
        raise _corrupt(path, f"its highest label is {highest}, not {_CLASSES - 1} or less")


def _corrupt(path: Path, problem: str) -> DataError:
    return DataError(
        f"{path} is not a file of Fashion-MNIST: {problem}; replace it by a good copy",
        code="fashion-mnist-damaged",
    )
