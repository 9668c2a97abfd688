"""Instances of different shapes, made from a seed: lists, trees, deductions, molecules.

They are problems like those of the AMPNet paper (arXiv 1705.09786), of which none needs a download.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = [
    "Deduction",
    "Digits",
    "Expression",
    "Molecule",
    "make_deductions",
    "make_expressions",
    "make_lists",
    "make_molecules",
]

LONGEST = 10  # digits of a list
OPERATIONS = 4  # on lists
VALUES = 5  # of expressions
OPERATORS = 3  # in expressions
ATOMS, BONDS = 4, 3  # kinds in molecules


@dataclass(frozen=True, slots=True)
class Digits:
    """An operation on a list of digits: its largest, smallest, their difference, or its length.

    Args:
        tokens: The operation (10 and up), then digits; (length,).
        answer: 0 to 9; of a length of 10: 0.
    """

    tokens: torch.Tensor
    answer: torch.Tensor


def make_lists(count: int, seed: int) -> list[Digits]:
    """Return lists of 1 to 10 digits with an operation each.

    Args:
        count: How many.
        seed: Of random numbers.
    """
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        operation = draw.randrange(OPERATIONS)
        digits = [draw.randrange(10) for _ in range(draw.randint(1, LONGEST))]
        answers = (max(digits), min(digits), max(digits) - min(digits), len(digits) % 10)
        tokens = torch.tensor([10 + operation, *digits], device="cpu")
        made.append(Digits(tokens, torch.tensor([answers[operation]], device="cpu")))
    return made


@dataclass(frozen=True, slots=True)
class Expression:
    """A binary tree of operators over numbers 0 to 4: larger, smaller, sum modulo 5.

    Args:
        labels: Of every node: a number, at leaves; an operator (0 to 2) elsewhere.
        parents: Of every node; -1 of the root.
        lefts: Whether a node is the left child of its parent.
        leaves: Indices of those.
        values: What every node comes to, (nodes,).
    """

    labels: tuple[int, ...]
    parents: tuple[int, ...]
    lefts: tuple[bool, ...]
    leaves: tuple[int, ...]
    values: torch.Tensor


def make_expressions(count: int, seed: int, *, leaves: int = 8) -> list[Expression]:
    """Return random expressions of 1 up to so many leaves.

    Args:
        count: How many.
        seed: Of random numbers.
        leaves: At most.
    """
    draw = random.Random(seed)
    return [_expression(draw, draw.randint(1, leaves)) for _ in range(count)]


def _expression(draw: random.Random, leaves: int) -> Expression:
    labels: list[int] = []
    parents: list[int] = []
    lefts: list[bool] = []
    ends: list[int] = []
    values: list[int] = []

    def grow(size: int, parent: int, left: bool) -> int:
        index = len(labels)
        labels.append(draw.randrange(OPERATORS if size > 1 else VALUES))
        parents.append(parent)
        lefts.append(left)
        values.append(0)
        if size == 1:
            ends.append(index)
            values[index] = labels[index]
            return values[index]
        first = draw.randint(1, size - 1)
        a, b = grow(first, index, True), grow(size - first, index, False)
        values[index] = (max(a, b), min(a, b), (a + b) % VALUES)[labels[index]]
        return values[index]

    grow(leaves, -1, False)
    parts = (tuple(labels), tuple(parents), tuple(lefts), tuple(ends))
    return Expression(*parts, torch.tensor(values, device="cpu"))


@dataclass(frozen=True, slots=True)
class Deduction:
    """Who is afraid of whom: Gertrude is a mouse, mice are afraid of wolves.

    Args:
        species: How many; vertices from 0.
        kinds: Species of each individual; vertices after the species.
        feared: Species that each species is afraid of.
        asked: Vertex of an individual.
        answer: Species that it is afraid of.
        edges: Of each kind, from which vertices to which (2, edges): is a, is afraid of, and both
            the other way around.
    """

    species: int
    kinds: tuple[int, ...]
    feared: tuple[int, ...]
    asked: int
    answer: int
    edges: tuple[torch.Tensor, ...]

    @property
    def vertices(self) -> int:
        """How many there are."""
        return self.species + len(self.kinds)


def make_deductions(count: int, seed: int) -> list[Deduction]:
    """Return questions about 3 to 6 species and 2 to 6 individuals, in the manner of bAbI task 15.

    Args:
        count: How many.
        seed: Of random numbers.
    """
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        species, people = draw.randint(3, 6), draw.randint(2, 6)
        kinds = tuple(draw.randrange(species) for _ in range(people))
        feared = tuple(
            draw.choice([other for other in range(species) if other != one])
            for one in range(species)
        )
        who = draw.randrange(people)
        is_a = torch.tensor([range(species, species + people), kinds], device="cpu")
        afraid = torch.tensor([range(species), feared], device="cpu")
        edges = (is_a, afraid, is_a.flip(0), afraid.flip(0))
        answer = feared[kinds[who]]
        made.append(Deduction(species, kinds, feared, species + who, answer, edges))
    return made


@dataclass(frozen=True, slots=True)
class Molecule:
    """A connected graph with kinds of atoms and bonds, and a number that these determine.

    Args:
        atoms: Kind of each.
        bonds: Two atoms and a kind.
        target: (1,).
        edges: Of each kind of bond, in both directions: from which atoms to which (2, edges).
    """

    atoms: tuple[int, ...]
    bonds: tuple[tuple[int, int, int], ...]
    target: torch.Tensor
    edges: tuple[torch.Tensor, ...]

    @property
    def vertices(self) -> int:
        """How many atoms there are."""
        return len(self.atoms)


# Energies of bonds by kind, scaled by what two atoms bring along: the target is their sum, and a
# little for every ring.
STRENGTHS = (0.3, 0.7, 1.2)
CHARGES = (-0.6, -0.1, 0.4, 0.8)
RING = 0.5


def make_molecules(count: int, seed: int, *, atoms: int = 12) -> list[Molecule]:
    """Return random molecules of 2 up to so many atoms, some with rings.

    Args:
        count: How many.
        seed: Of random numbers.
        atoms: At most.
    """
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        kinds = tuple(draw.randrange(ATOMS) for _ in range(draw.randint(2, atoms)))
        pairs = [(draw.randrange(one), one) for one in range(1, len(kinds))]
        for _ in range(draw.randrange(3)):
            a, b = sorted(draw.sample(range(len(kinds)), 2))
            if (a, b) not in pairs:
                pairs.append((a, b))
        bonds = tuple((a, b, draw.randrange(BONDS)) for a, b in pairs)
        energy = sum(
            STRENGTHS[kind] * (1 + CHARGES[kinds[a]] * CHARGES[kinds[b]]) for a, b, kind in bonds
        )
        rings = len(bonds) - len(kinds) + 1
        target = torch.tensor([(energy + RING * rings) / 10], device="cpu")
        made.append(Molecule(kinds, bonds, target, _both_ways(bonds)))
    return made


def _both_ways(bonds: Sequence[tuple[int, int, int]]) -> tuple[torch.Tensor, ...]:
    """Return the edges of each kind of bond, in both directions."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(BONDS)]
    for a, b, kind in bonds:
        found[kind] += [(a, b), (b, a)]
    return tuple(
        torch.tensor(one, dtype=torch.int64, device="cpu").view(-1, 2).T.contiguous()
        for one in found
    )
