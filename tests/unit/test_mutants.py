"""What tests/mutants.toml says is still so; `scripts/mutants` plants the faults themselves."""

import ast
from functools import cache

import mutants

MUTANTS = mutants.read()


@cache
def text_of(file):
    return (mutants.ROOT / file).read_text()


@cache
def functions_of(file):
    nodes = ast.walk(ast.parse(text_of(file)))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def has_its_test(mutant):
    file, _, test = mutant.test.partition("::")
    return not test or test.split("[")[0] in functions_of(file)


def test_every_fault_can_be_planted():
    assert [one.name for one in MUTANTS if text_of(one.file).count(one.old) != 1] == []


def test_every_fault_names_a_test():
    assert [one.name for one in MUTANTS if not has_its_test(one)] == []


def test_no_two_have_one_name():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
