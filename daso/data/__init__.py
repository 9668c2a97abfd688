"""Data sets without downloads, and the sampler that divides them among the world's ranks."""

from daso.data.digits import load_digits
from daso.data.fashion import find_fashion, load_fashion
from daso.data.sampler import ShardedSampler
from daso.data.structures import (
    Deduction,
    Digits,
    Expression,
    Molecule,
    make_deductions,
    make_expressions,
    make_lists,
    make_molecules,
)
from daso.data.synthetic import images, teacher_student, tokens
from daso.data.text import ByteWindows, load_text

__all__ = [
    "ByteWindows",
    "Deduction",
    "Digits",
    "Expression",
    "Molecule",
    "ShardedSampler",
    "find_fashion",
    "images",
    "load_digits",
    "load_fashion",
    "load_text",
    "make_deductions",
    "make_expressions",
    "make_lists",
    "make_molecules",
    "teacher_student",
    "tokens",
]
