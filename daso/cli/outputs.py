"""Files that a command is asked to write."""

from importlib.util import find_spec
from pathlib import Path

from daso.errors import ConfigError

__all__ = ["may_write"]


def may_write(json_path: Path | None, plot: Path | None) -> None:
    """Raise now what would go wrong when all is computed."""
    for path in (json_path, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"a file must lie in a folder that is there, not {path}")
    if plot is not None:
        if plot.suffix != ".png":
            raise ConfigError(f"--plot must end in .png, not {plot}")
        if find_spec("matplotlib") is None:
            raise ConfigError("--plot needs matplotlib; `pip install 'daso[plot]'`")
