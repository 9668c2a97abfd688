"""Site profiles: TOML files with the settings of a cluster, and daso's built-in profiles."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from daso.checks import did_you_mean
from daso.environment import expand, site_name
from daso.errors import ConfigError
from daso.slurm.job import Job, options

FOLDER = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A site profile.

    Args:
        name: Its name; empty for no site at all.
        defaults: Values of options, which flags override.
        launcher: Launcher of ranks: a choice of ``--launcher``.
        client: Environment of sbatch, scontrol and other commands.
        unexpanded: ``client`` before variables are expanded, whose values may be secret.
    """

    name: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    launcher: str = "auto"
    client: Mapping[str, str] = field(default_factory=dict)
    unexpanded: Mapping[str, str] = field(default_factory=dict)


def known_sites() -> list[str]:
    """Return the names of daso's built-in profiles."""
    return sorted(path.stem for path in (FOLDER / "sites").glob("*.toml"))


def read_site(name: str | None) -> Site:
    """Read a profile."""
    name = name or site_name()
    if not name:
        return Site()
    is_file = name.endswith(".toml")
    if not is_file and name not in known_sites():
        raise ConfigError(
            f"a site must be one of {', '.join(known_sites())}, or a TOML file, not {name!r}; "
            f"leave --site and DASO_SITE out for none",
            code="unknown-site",
        )
    path = Path(name) if is_file else FOLDER / "sites" / f"{name}.toml"
    # The name stands in a comment of the batch script: a line break would end it.
    return parse_site(re.sub(r"[^\w.+-]", "-", path.stem), _read(path, "a site profile"), str(path))


def read_template(path: Path | None) -> tuple[str, str]:
    """Read a template of a batch script."""
    path = path or FOLDER / "job.sbatch.j2"
    return _read(path, "a template"), path.name


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{what} must be readable, but {path}: {error.strerror}; mend its path",
            code="profile-not-readable",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{what} must be text in UTF-8, but {path}: {error}; save it so",
            code="profile-not-text",
        ) from error


def parse_site(name: str, text: str, where: str) -> Site:
    """Read the text of a profile."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"a site profile must be TOML, but {where}: {error}; mend that line",
            code="profile-not-toml",
        ) from error
    launcher = values.pop("launcher", "auto")
    client = _pairs(values.pop("client", {}), "client", where)
    environment = _pairs(values.pop("environment", {}), "environment", where)
    hints = get_type_hints(Job)
    known = options().keys() - {"environment"}
    for key in values:
        if key not in known:
            keys = {*known, "client", "environment", "launcher"}
            hint, valid = did_you_mean(key, keys), ", ".join(sorted(keys))
            raise ConfigError(
                f"unknown key {key!r} in {where}{hint}; valid keys: {valid}",
                code="unknown-profile-key",
            )
    defaults = {key: _convert(key, value, hints[key], where) for key, value in values.items()}
    if environment:
        defaults["environment"] = tuple(f"{key}={value}" for key, value in environment.items())
    expanded = {key: expand(value) for key, value in client.items()}
    return Site(
        name=name, defaults=defaults, launcher=str(launcher), client=expanded, unexpanded=client
    )


def _convert(key: str, value: Any, kind: Any, where: str) -> Any:
    lines = kind == tuple[str, ...]
    fits = (
        isinstance(value, list) and all(isinstance(item, str) for item in value)
        if lines
        else type(value) is kind
    )
    if not fits:
        expected = "a list of texts" if lines else NAMES[kind]
        raise ConfigError(
            f"{key} in {where} must be {expected}, not {value!r}", code="profile-value-invalid"
        )
    return tuple(value) if lines else value


NAMES = {int: "a whole number", str: "text", bool: "true or false"}


def _pairs(value: Any, key: str, where: str) -> dict[str, str]:
    if isinstance(value, Mapping) and all(isinstance(text, str) for text in value.values()):
        return dict(value)
    raise ConfigError(
        f"{key} in {where} must be a table of texts, not {value!r}", code="profile-table-invalid"
    )
