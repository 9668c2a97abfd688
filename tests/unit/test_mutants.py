"""What tests/mutants.toml says is still so; `scripts/mutants` plants the faults themselves."""

import ast

import mutants
import pytest

MUTANTS = mutants.read()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_can_be_planted_and_the_test_that_finds_it_is_there(mutant):
    assert (mutants.ROOT / mutant.file).read_text().count(mutant.old) == 1
    file, _, test = mutant.test.partition("::")
    defined = ast.walk(ast.parse((mutants.ROOT / file).read_text()))
    names = {node.name for node in defined if isinstance(node, ast.FunctionDef)}
    assert not test or test.split("[")[0] in names


def test_no_two_have_one_name():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
