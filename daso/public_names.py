"""Public names of a package, imported on first use."""

import difflib
from collections.abc import Callable, Mapping
from importlib import import_module

__all__ = ["on_first_use"]


def on_first_use(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return a package's ``__getattr__`` and ``__dir__``."""

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}{_hint(name, homes)}"
            )
        module = import_module(homes[name])
        return module if homes[name] == f"{package}.{name}" else getattr(module, name)

    return get, lambda: sorted(homes)


def _hint(name: str, public: Mapping[str, str]) -> str:
    """Return which public name was probably meant, as the end of a message."""
    by_small = {one.lower(): one for one in public}
    near = difflib.get_close_matches(name.lower(), by_small, 1)
    return f"; did you mean {by_small[near[0]]!r}?" if near else ""
