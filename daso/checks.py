"""Argument checking for all public calls: value rules with a text, and signature checks.

Every message is rule, value, remedy, on one line; the remedy knows the names of other libraries.
"""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from daso.errors import ConfigError

Call = TypeVar("Call", bound=Callable[..., Any])
Kind = TypeVar("Kind")

LONGEST = 100  # characters of a value in a message
MOST = 2**63 - 1  # of any count without a limit in its rule
LONGEST_SECONDS = 10**9  # of timeouts: threads can wait at least this long


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule for a value: a test, and its text in messages."""

    text: str  # follows "must be "
    holds: Callable[[Any], bool]


def whole(least: int, most: int = MOST, of: str = "") -> Rule:
    """Return the rule of a whole number."""
    limit = "" if most == MOST else f" and at most {most}"
    return Rule(
        f"a whole number{of} of at least {least}{limit}",
        lambda value: type(value) is int and least <= value <= most,
    )


def number(least: float, most: float) -> Rule:
    """Return the rule of a number in a closed range."""
    return Rule(f"a number from {least:g} to {most:g}", lambda value: _is_real(value, least, most))


def positive(most: float = float(LONGEST_SECONDS)) -> Rule:
    """Return the rule of a number above 0, seconds by default."""
    limit = "" if most == LONGEST_SECONDS else f" of at most {most:g}"
    return Rule(f"a positive number{limit}", lambda value: _is_real(value, 0.0, most) and value > 0)


def choice(*names: str | None) -> Rule:
    """Return the rule of one name out of a set."""
    return Rule(
        f"one of {', '.join(map(str, names))}",
        lambda value: (value is None or isinstance(value, str)) and value in names,
    )


def flag() -> Rule:
    """Return the rule of a boolean."""
    return Rule("True or False", lambda value: isinstance(value, bool))


def either(first: Rule, *others: Rule, text: str | None = None) -> Rule:
    """Return the rule that at least one of several rules holds."""
    rules = (first, *others)
    return Rule(
        text or ", or ".join(rule.text for rule in rules),
        lambda value: any(rule.holds(value) for rule in rules),
    )


def one_of(*values: object, text: str = "") -> Rule:
    """Return the rule of one value out of a set, such as None or a word where numbers are usual."""
    return Rule(
        text or " or ".join(map(repr, values)),
        lambda value: any(
            value is known or (type(value) is str and value == known) for known in values
        ),
    )


def instance_of(kind: type) -> Rule:
    """Return the rule of an instance of a class, such as ``daso.Exchange(...)``."""
    return Rule(f"daso.{kind.__name__}(...)", lambda value: isinstance(value, kind))


NONE = one_of(None, text="None")


def _is_real(value: object, least: float, most: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return least <= value <= most


def check(name: str, value: object, rule: Rule, remedy: str = "") -> None:
    """Raise `ConfigError` unless a rule holds for a value."""
    if not rule.holds(value):
        raise ConfigError(
            f"{name} must be {rule.text}, not {format_value(value)}{remedy}",
            code="value-not-allowed",
        )


def format_value(value: object) -> str:
    """Return a value's repr for a message: one line of limited length."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # repr may raise, for example for integers of too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


# --- calls ----------------------------------------------------------------------------------------

# Keywords of other libraries, and keywords on the wrong call: where the option is.
ELSEWHERE = {
    "skip": "pass policy=daso.Fixed(skip=..., wait=...)",
    "wait": "pass policy=daso.Fixed(skip=..., wait=...)",
    "model": "pass module=",
    "updates": "pass gradients=daso.Gradients(step=...)",
    "timeout_seconds": "pass exchange=daso.Exchange(timeout_seconds=...)",
    "timeout": "pass exchange=daso.Exchange(timeout_seconds=...)",
    "bucket_bytes": "pass gradients=daso.Gradients(bucket_bytes=...)",
    "bucket_cap_mb": "pass gradients=daso.Gradients(bucket_bytes=...)",
    "process_group": "pass topology=daso.Topology(...)",
}


def validate_call(call: Call) -> Call:
    """Make a call raise `ConfigError`, naming the valid arguments, if its arguments do not fit."""
    signature = inspect.signature(call)
    name = call.__qualname__.removesuffix(".__init__")

    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise _misfit(name, signature, kwargs, str(error)) from None
        return call(*args, **kwargs)

    return checked  # type: ignore[return-value]


def validated_record(kind: type[Kind]) -> type[Kind]:
    """Make a record's constructor check its arguments; see `validate_call`."""
    setattr(kind, "__init__", validate_call(kind.__init__))  # noqa: B010 - mypy rejects the assignment
    return kind


def _misfit(
    name: str, signature: inspect.Signature, kwargs: dict[str, Any], problem: str
) -> ConfigError:
    """Return the error for arguments that do not fit a signature."""
    params = [param for param in signature.parameters.values() if param.name != "self"]
    names = [param.name for param in params]
    if strangers := [key for key in kwargs if key not in names]:
        known, stranger = ", ".join(names), strangers[0]
        return ConfigError(
            f"{name} takes {known}, but not {stranger!r}; {_hint(stranger, names)}",
            code="unknown-argument",
        )
    if missing := re.search(r"missing a required (?:keyword-only )?argument: '(\w+)'", problem):
        return ConfigError(
            f"{name} needs {missing[1]}, but it is missing; pass {missing[1]}=",
            code="argument-is-missing",
        )
    by_name = [param.name for param in params if param.kind is inspect.Parameter.KEYWORD_ONLY]
    if "too many positional" in problem and by_name:
        return ConfigError(
            f"{name} takes {', '.join(by_name)} by name, but one is given without; write "
            f"{by_name[0]}=...",
            code="argument-without-name",
        )
    return ConfigError(
        f"{name} takes {', '.join(names) or 'nothing'}, but {problem}; leave it out",
        code="arguments-do-not-fit",
    )


def _hint(stranger: str, names: Sequence[str]) -> str:
    known = ELSEWHERE.get(stranger)
    if known is not None and re.search(r"\w+(?==)", known)[0] in names:  # type: ignore[index]
        return known
    return did_you_mean(stranger, names).removeprefix("; ") or "leave it out"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a suggestion of the nearest known word, as the end of a message, or ""."""
    by_small = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_small, 1)
    return f"; did you mean {by_small[near[0]]!r}?" if near else ""
