"""Reads settings of `daso train` from TOML and ``--key=value`` words, and lists them."""

import difflib
import re
import shutil
import textwrap
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from daso.checks import did_you_mean
from daso.cli.train.config import Config
from daso.errors import ConfigError

MOST_COLUMNS = 100  # of the help text


def read_config(path: Path | None, words: Sequence[str]) -> Config:
    """Read a TOML file and ``--key=value`` words; the words override the file."""
    values: dict[str, object] = {}
    if path is not None:
        values.update(_flatten(_read_toml(path)))
    values.update(_read_word(word) for word in words)
    config: Config = _build(Config, values)
    return config


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"a file of settings must be readable, but {path}: {error.strerror}; mend the path (a "
            f"single setting looks like --key=value)",
            code="settings-not-readable",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} must be text in UTF-8, but: {error}; save it so", code="settings-not-text"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path} must be TOML, but: {error}; mend that line", code="settings-not-toml"
        ) from error


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        path = prefix + key
        if isinstance(value, Mapping) and (value or path in SECTIONS):
            yield from _flatten(value, f"{path}.")
        else:
            yield path, value


def _read_word(word: str) -> tuple[str, object]:
    kinds = {key: annotation for key, annotation, _ in _keys(Config)}
    name = word.removeprefix("--").replace("-", "_")
    if word.startswith("--") and "=" not in word and kinds.get(name, bool) is bool:
        return name, "true"  # a switch; an unknown key is refused later, with a suggestion
    if not word.startswith("--") or "=" not in word:
        raise ConfigError(
            f"settings must look like --key=value, not {word!r}; {_valid()}",
            code="setting-without-value",
        )
    key, _, value = word.removeprefix("--").partition("=")
    return key.replace("-", "_"), value


def takes_value(word: str) -> bool:
    """Return whether a setting's value is the next word: neither ``--key=value`` nor a switch."""
    kinds = {key: annotation for key, annotation, _ in _keys(Config)}
    key = word.removeprefix("--").replace("-", "_")
    return word.startswith("--") and "=" not in word and kinds.get(key) is not bool


SECTIONS = tuple(field.name for field in fields(Config) if is_dataclass(field.default_factory))


def _valid(key: str = "") -> str:
    """List the keys of the section of a key, or else the keys without a section."""
    section = key.partition(".")[0]
    keys = [key for key, _, _ in _keys(Config)]
    near = [name for name in keys if name.startswith(f"{section}.")]
    valid = near or [
        *(name for name in keys if "." not in name),
        *(f"{name}.*" for name in SECTIONS),
    ]
    return f"valid keys: {', '.join(valid)}; `daso train --help` explains them"


def _keys(kind: type[Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """List (key, type, default) of all fields, sections included."""
    hints, defaults = get_type_hints(kind), kind()
    for field in fields(kind):
        if is_dataclass(hints[field.name]):
            yield from _keys(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, hints[field.name], getattr(defaults, field.name)


def _build(kind: type[Any], values: Mapping[str, object]) -> Any:
    known = {key: annotation for key, annotation, _ in _keys(Config)}
    for key in values:
        if key not in known:
            raise ConfigError(
                f"unknown key {key!r}{_suggest(key, known)}; {_valid(key)}", code="unknown-setting"
            )
    return _fill(kind, "", {k: _convert(k, v, known[k]) for k, v in values.items()})


def _suggest(key: str, known: Iterable[str]) -> str:
    """Return the end of a message: the same name in another section, or a similar key."""
    section, _, name = key.rpartition(".")
    namesakes = {other.rpartition(".")[0]: other for other in known if _name_of(other) == name}
    similar = difflib.get_close_matches(section, namesakes, 1)
    if similar or not namesakes:
        return did_you_mean(namesakes[similar[0]] if similar else key, known)
    return did_you_mean(next(iter(namesakes.values())), known)


def _name_of(key: str) -> str:
    return key.rpartition(".")[2]


def _fill(kind: type[Any], prefix: str, values: Mapping[str, object]) -> Any:
    hints = get_type_hints(kind)
    keywords = {}
    for field in fields(kind):
        key = prefix + field.name
        if is_dataclass(hints[field.name]):
            keywords[field.name] = _fill(hints[field.name], f"{key}.", values)
        elif key in values:
            keywords[field.name] = values[key]
    return kind(**keywords)


def _convert(key: str, value: object, annotation: Any) -> object:
    """Turn text or a TOML value into a field's type."""
    if get_origin(annotation) is Literal:
        if value not in get_args(annotation):
            choices = ", ".join(map(str, get_args(annotation)))
            raise ConfigError(
                f"{key} must be one of {choices}, not {value!r}", code="setting-not-a-choice"
            )
        return value
    if get_origin(annotation) in (Union, types.UnionType):
        return _convert_number_or_word(key, value, annotation)
    if get_origin(annotation) is tuple:
        return _convert_names(key, value)
    if annotation is bool:
        return _convert_bool(key, value)
    fits = isinstance(value, str | KINDS[annotation]) and not isinstance(value, bool)
    try:
        if fits:
            return annotation(value)
    except ValueError:
        pass
    raise ConfigError(
        f"{key} must be {NAMES[annotation]}, not {value!r}", code="setting-of-wrong-type"
    )


NAMES = {int: "a whole number", float: "a number", str: "text"}
KINDS = {int: int, float: int | float, str: str}  # TOML types that a field accepts


def _convert_number_or_word(key: str, value: object, annotation: Any) -> object:
    number, words = get_args(annotation)
    if value in get_args(words):
        return value
    try:
        return _convert(key, value, number)
    except ConfigError:
        choices = " or ".join([NAMES[number], *get_args(words)])
        raise ConfigError(
            f"{key} must be {choices}, not {value!r}", code="setting-not-a-choice"
        ) from None


def _convert_names(key: str, value: object) -> tuple[str, ...]:
    """Turn ``a,b`` or a TOML list into names."""
    names = value.split(",") if isinstance(value, str) else value
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return tuple(name.strip() for name in names if name)
    raise ConfigError(f"{key} must be names, as a,b, not {value!r}", code="setting-not-names")


def _choices(annotation: Any) -> str:
    """Return the values that a key takes, for a list of keys."""
    if get_origin(annotation) is tuple:
        return "names, as a,b"
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(map(_choices, get_args(annotation)))
    return " | ".join(map(str, get_args(annotation))) or str(annotation.__name__)


def _convert_bool(key: str, value: object) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if str(value).lower() not in words:
        raise ConfigError(f"{key} must be true or false, not {value!r}", code="setting-not-boolean")
    return words[str(value).lower()]


def describe() -> str:
    """Return a table of all keys: default, meaning and values, as wide as the terminal."""
    columns = min(MOST_COLUMNS, shutil.get_terminal_size().columns)
    rows = [
        (f"  --{key}={default}", f"{meaning}{' ' if meaning else ''}({choices})")
        for key, default, meaning, choices in settings()
    ]
    width = max(len(left) for left, _ in rows) + 2
    wrapped = textwrap.TextWrapper(max(40, columns - width), break_long_words=False)
    return "\n".join(
        f"{left:<{width}}{line}"
        for first, text in rows
        for left, line in zip_longest([first], wrapped.wrap(text), fillvalue="")
    )


def _written(default: object) -> str:
    """Return a default in the syntax of a setting."""
    return ",".join(default) if isinstance(default, tuple) else str(default)


def settings() -> Iterator[tuple[str, str, str, str]]:
    """List (key, default, meaning, values) of every setting."""
    meanings = dict(_meanings(Config))
    for key, annotation, default in _keys(Config):
        yield key, _written(default), meanings.get(key, ""), _choices(annotation)


def _meanings(kind: type[Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """List (key, first sentence) of all fields, from docstrings; none under ``python -OO``."""
    hints = get_type_hints(kind)
    text = " ".join((kind.__doc__ or "").partition("Args:")[2].split())
    names = "|".join(field.name for field in fields(kind))
    parts = re.split(rf"(?:^|(?<=\. ))({names}): ", text)[1:]
    for name, meaning in zip(parts[::2], parts[1::2], strict=True):
        if is_dataclass(hints[name]):
            yield from _meanings(hints[name], f"{prefix}{name}.")
        else:
            yield prefix + name, re.split(r"\.(?:\s|$)", meaning.strip())[0].replace("``", "")
