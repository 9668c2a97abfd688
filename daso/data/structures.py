"""Samples of varying shapes, generated from a seed: lists, trees, deductions, molecules.

They resemble the problems of the AMPNet paper (arXiv 1705.09786), and need no download.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
        answer: 0 to 9; a length of 10 counts as 0.
    """

    tokens: torch.Tensor
    answer: torch.Tensor


def make_lists(count: int, seed: int) -> list[Digits]:
    """Return lists of 1 to 10 digits with an operation each.

    Args:
        count: Number of samples.
        seed: Seed of the random numbers.
    """
    draw = random.Random(seed)
    lists = []
    for _ in range(count):
        operation = draw.randrange(OPERATIONS)
        digits = [draw.randrange(10) for _ in range(draw.randint(1, LONGEST))]
        answers = (max(digits), min(digits), max(digits) - min(digits), len(digits) % 10)
        tokens = torch.tensor([10 + operation, *digits], device="cpu")
        lists.append(Digits(tokens, torch.tensor([answers[operation]], device="cpu")))
    return lists


@dataclass(frozen=True, slots=True)
class Expression:
    """A binary tree of operators over numbers 0 to 4: larger, smaller, sum modulo 5.

    Args:
        labels: Label of every node: a number at leaves, otherwise an operator (0 to 2).
        parents: Parent of every node; -1 for the root.
        lefts: Whether a node is the left child of its parent.
        leaves: Indices of the leaves.
        values: Value of every node, (nodes,).
    """

    labels: tuple[int, ...]
    parents: tuple[int, ...]
    lefts: tuple[bool, ...]
    leaves: tuple[int, ...]
    values: torch.Tensor


def make_expressions(count: int, seed: int, *, leaves: int = 8) -> list[Expression]:
    """Return random expressions of 1 to `leaves` leaves.

    Args:
        count: Number of samples.
        seed: Seed of the random numbers.
        leaves: Maximum number of leaves.
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
    """A question of fear: Gertrude is a mouse, mice are afraid of wolves.

    Args:
        species: Number of species; vertices from 0.
        kinds: Species of each individual; vertices after the species.
        feared: Species that each species is afraid of.
        subject: Vertex of the individual in question.
        answer: Species that it is afraid of.
        edges: Edges of each kind, sources and targets (2, edges): is a, is afraid of, and both
            reversed.
    """

    species: int
    kinds: tuple[int, ...]
    feared: tuple[int, ...]
    subject: int
    answer: int
    edges: tuple[torch.Tensor, ...]

    @property
    def vertices(self) -> int:
        """Return the number of vertices."""
        return self.species + len(self.kinds)


def make_deductions(count: int, seed: int) -> list[Deduction]:
    """Return questions about 3 to 6 species and 2 to 6 individuals, similar to bAbI task 15.

    Args:
        count: Number of samples.
        seed: Seed of the random numbers.
    """
    draw = random.Random(seed)
    deductions = []
    for _ in range(count):
        species, people = draw.randint(3, 6), draw.randint(2, 6)
        kinds = tuple(draw.randrange(species) for _ in range(people))
        feared = tuple(
            draw.choice([other for other in range(species) if other != own])
            for own in range(species)
        )
        person = draw.randrange(people)
        is_a = torch.tensor([range(species, species + people), kinds], device="cpu")
        afraid = torch.tensor([range(species), feared], device="cpu")
        edges = (is_a, afraid, is_a.flip(0), afraid.flip(0))
        answer = feared[kinds[person]]
        deductions.append(Deduction(species, kinds, feared, species + person, answer, edges))
    return deductions


@dataclass(frozen=True, slots=True)
class Molecule:
    """A connected graph with kinds of atoms and bonds, and a number determined by them.

    Args:
        atoms: Kind of each atom.
        bonds: Two atoms and a kind for each bond.
        target: The number, (1,).
        edges: Edges of each kind of bond in both directions, sources and targets (2, edges).
    """

    atoms: tuple[int, ...]
    bonds: tuple[tuple[int, int, int], ...]
    target: torch.Tensor
    edges: tuple[torch.Tensor, ...]

    @property
    def vertices(self) -> int:
        """Return the number of atoms."""
        return len(self.atoms)


# Energies of bonds by kind, scaled by the charges of both atoms: the target is their sum plus a
# constant per ring.
STRENGTHS = (0.3, 0.7, 1.2)
CHARGES = (-0.6, -0.1, 0.4, 0.8)
RING = 0.5


def make_molecules(count: int, seed: int, *, atoms: int = 12) -> list[Molecule]:
    """Return random molecules of 2 to `atoms` atoms, some of them with rings.

    Args:
        count: Number of samples.
        seed: Seed of the random numbers.
        atoms: Maximum number of atoms.
    """
    draw = random.Random(seed)
    molecules = []
    for _ in range(count):
        kinds = tuple(draw.randrange(ATOMS) for _ in range(draw.randint(2, atoms)))
        pairs = [(draw.randrange(atom), atom) for atom in range(1, len(kinds))]
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
        molecules.append(Molecule(kinds, bonds, target, _both_ways(bonds)))
    return molecules


def _both_ways(bonds: Sequence[tuple[int, int, int]]) -> tuple[torch.Tensor, ...]:
    """Return the edges of each kind of bond, in both directions."""
    edges: list[list[tuple[int, int]]] = [[] for _ in range(BONDS)]
    for a, b, kind in bonds:
        edges[kind] += [(a, b), (b, a)]
    return tuple(
        torch.tensor(edges_of_kind, dtype=torch.int64, device="cpu").view(-1, 2).T.contiguous()
        for edges_of_kind in edges
    )
