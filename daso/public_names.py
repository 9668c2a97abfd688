"""Public names of a package, imported on first use."""

from collections.abc import Callable, Mapping
from importlib import import_module

from daso.checks import did_you_mean


def on_first_use(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return a package's ``__getattr__`` and ``__dir__`` that import its names on first use."""

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}{did_you_mean(name, homes)}"
            )
        module = import_module(homes[name])
        return module if homes[name] == f"{package}.{name}" else getattr(module, name)

    return get, lambda: sorted(homes)
