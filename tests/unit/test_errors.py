"""Every error has a code, which names its rule and is the same on all ranks."""

import ast
import copy
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from expected_errors import raises
from local_world import run_ranks

import daso
from daso import errors
from daso.comm.topology import Topology, errors_on_all_ranks
from daso.slurm.slurm_commands import NoAnswerError

PACKAGE = Path(daso.__file__).parent
KINDS = [*(getattr(errors, name) for name in errors.__all__ if name != "summarize"), NoAnswerError]
NAMES = {kind.__name__ for kind in KINDS}
FORM = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+){1,3}")


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Return each call of the package that makes an error, and its place."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if named and node.func.id in NAMES:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node


def code_of(call: ast.Call) -> object:
    words = [word.value for word in call.keywords if word.arg == "code"]
    return words[0].value if words and isinstance(words[0], ast.Constant) else None


def first_words(call: ast.Call) -> str:
    """Return the first words of a message, with <> for values that are known at run time."""
    message = call.args[0]
    parts = message.values if isinstance(message, ast.JoinedStr) else [message]
    text = "".join(str(part.value) if isinstance(part, ast.Constant) else "<>" for part in parts)
    return " ".join(text.split()[:3])


def test_every_error_has_a_code() -> None:
    places = list(calls())
    assert len(places) > 400
    wrong = [place for place, call in places if not FORM.fullmatch(str(code_of(call)))]
    assert wrong == [], 'an error needs a literal code of 2 to 4 words, as code="spare-must-wait"'


def test_a_code_belongs_to_one_class_and_one_rule() -> None:
    kinds, rules = defaultdict(set), defaultdict(set)
    for _, call in calls():
        assert isinstance(call.func, ast.Name)
        kinds[code_of(call)].add(call.func.id)
        rules[code_of(call)].add(first_words(call))
    assert {code: names for code, names in kinds.items() if len(names) > 1} == {}
    assert {code: words for code, words in rules.items() if len(words) > 1} == {}


def test_every_error_class_is_checked() -> None:
    """Else an error of a new class would need no code."""

    def below(kind: type) -> set[type]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    ours = {kind for kind in below(errors.DasoError) if kind.__module__.startswith("daso.")}
    assert ours == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_code_survives_copies(kind: type[errors.DasoError]) -> None:
    error = kind("a rule; a remedy", code="a-rule")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert (type(twin), str(twin), twin.code) == (kind, "a rule; a remedy", "a-rule")
    assert str(error) == "a rule; a remedy", "the code is not printed"
    assert kind("a rule").code == ""


def test_an_error_of_one_rank_has_its_class_and_code_on_all() -> None:
    def body(world: object) -> tuple[type, str, str]:
        topology = Topology(world, ranks_per_node=(2, 1))  # type: ignore[arg-type]
        with raises("gradient-is-sparse") as caught:  # noqa: SIM117 - what raises is the inner one
            with errors_on_all_ranks(topology, "wrap an optimizer", 5.0):
                if topology.rank == 1:
                    raise errors.LayoutError("a rule", code="gradient-is-sparse")
        topology.free()
        return type(caught.value), str(caught.value), caught.value.code

    expected = (errors.LayoutError, "rank 1: a rule", "gradient-is-sparse")
    assert run_ranks(3, body) == [expected] * 3
