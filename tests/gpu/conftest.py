"""Tests that need a CUDA device are skipped where there is none; others simulate one."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents and item.path.name != "test_pretended_cuda.py":
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))
