import sysconfig
from pathlib import Path

import pytest
import torch
from expected_errors import raises
from torch.utils.data import DataLoader

from daso.data import ByteWindows, load_text
from daso.errors import ConfigError, DataError


def read(windows):
    return bytes(torch.cat([inputs for inputs, _ in windows]).tolist())


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_windows_lie_side_by_side_and_targets_are_one_ahead():
    windows = ByteWindows(b"abcdefghijk", 3)
    assert [tuple(bytes(part.tolist()) for part in window) for window in windows] == [
        (b"abc", b"bcd"),
        (b"def", b"efg"),
        (b"ghi", b"hij"),
    ]
    assert len(windows) == 3
    assert torch.equal(windows[-1][0], windows[2][0])


def test_the_last_byte_is_a_target_only():
    assert len(ByteWindows(b"abcdef", 3)) == 1
    assert len(ByteWindows(b"abcdefg", 3)) == 2


def test_no_window_behind_the_last():
    with pytest.raises(IndexError):
        ByteWindows(b"abcdefg", 3)[2]


def test_a_loader_stacks_windows():
    inputs, targets = next(iter(DataLoader(ByteWindows(bytes(range(256)), 5), batch_size=4)))
    assert inputs.shape == targets.shape == (4, 5)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


@pytest.mark.parametrize(("data", "context"), [(b"abc", 0), (b"abc", -1), (b"abc", 3), (b"", 1)])
def test_no_windows_without_a_context_or_enough_bytes(data, context):
    with pytest.raises(ConfigError, match="context"):
        ByteWindows(data, context)


def test_folder_is_joined_by_path_and_cut_at_90_percent(tmp_path):
    files = {"b.txt": "2" * 50, "a/z.py": "1" * 40, "c.md": "3" * 10, "a.bin": "x" * 100}
    write(tmp_path, files)
    assert read(load_text(tmp_path, train=True, context=1)) == b"1" * 40 + b"2" * 49
    assert read(load_text(str(tmp_path), train=False, context=1)) == b"3" * 9


def test_max_bytes_counts_both_splits_together(tmp_path):
    write(tmp_path, {"a.txt": "a" * 15, "b.txt": "b" * 85})
    assert read(load_text(tmp_path, train=True, context=1, max_bytes=30)) == b"a" * 15 + b"b" * 11
    assert len(load_text(tmp_path, train=False, context=1, max_bytes=30)) == 2
    assert len(load_text(tmp_path, train=True, context=1, max_bytes=1000)) == 89


def test_no_more_is_read_than_may_be(tmp_path):
    path = tmp_path / "long.txt"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # of which nothing is on the disk
    assert len(load_text(tmp_path, train=True, context=1, max_bytes=1000)) == 899


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    write(tmp_path, {"a.txt": "abc"})
    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(DataError, match=r"but .*a\.txt: Permission denied; change its mode"):
        load_text(tmp_path, train=True, context=1)


def test_library_files_leave_out_tests_and_machine_files(tmp_path, monkeypatch):
    left_out = [
        "_sysconfigdata__linux.py",
        "sitecustomize.py",
        "config-3.11/tool.py",
        "idlelib/__init__.py",
        "notes.txt",
        "pack/test/__init__.py",
        "pack/data/plain.py",
        "site-packages/torch/__init__.py",
        "dist-packages/__init__.py",
        "test/__init__.py",
    ]
    files = {"pack/sub/__init__.py": "p" * 20, "pack/__init__.py": "i" * 10, "abc.py": "a" * 10}
    write(tmp_path, files | dict.fromkeys(left_out, "x" * 50))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert read(load_text(train=True, context=1)) == b"a" * 10 + b"i" * 10 + b"p" * 15


def test_python_s_own_source_is_there_and_the_same_each_time():
    first = load_text(train=True, context=64, max_bytes=100_000)
    again = load_text(train=True, context=64, max_bytes=100_000)
    assert len(first) == 89_999 // 64
    assert read(first) == read(again)
    assert b"import " in read(first)


def test_all_of_python_s_own_source_is_megabytes():
    train, test = (load_text(train=split, context=1024) for split in (True, False))
    assert len(train) > 2000
    assert len(train) / (len(train) + len(test)) == pytest.approx(0.9, abs=0.001)


def test_a_folder_without_text_is_named(tmp_path):
    (tmp_path / "image.png").write_bytes(b"x")
    with pytest.raises(DataError, match=str(tmp_path)):
        load_text(tmp_path, train=True, context=1)
    with pytest.raises(DataError, match="nowhere"):
        load_text(tmp_path / "nowhere", train=True, context=1)


@pytest.mark.parametrize("max_bytes", [0, -1])
def test_max_bytes_below_one_is_refused(tmp_path, max_bytes):
    with raises("max-bytes-too-small"):
        load_text(tmp_path, train=True, context=1, max_bytes=max_bytes)
