"""Python of tests: torch's compiler is loaded by who compiles, not by whoever takes a step.

A torch optimizer imports it for its first step, to tell it that it need not look: 1.5 s, more than
torch itself. Most tests start ranks that live a few seconds.
"""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "torch._dynamo"


class Late(ModuleType):
    """Stands for the compiler until somebody asks it for more than to look away."""

    def graph_break(self, *_, **__):
        """Nothing is being compiled."""

    def disable(self, fn, *args, **kwargs):
        """Return a function that the compiler, should it come, leaves alone."""
        found = []

        def called(*inputs, **named):
            if sys.modules.get(NAME) is self:
                return fn(*inputs, **named)
            if not found:
                found.append(sys.modules[NAME].disable(fn, *args, **kwargs))
            return found[0](*inputs, **named)

        return called

    def __getattr__(self, name):
        if not self.__dict__.get("stands") or (name.startswith("__") and name != "__path__"):
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:
            sys.meta_path.remove(FINDER)
            del sys.modules[NAME]
        return getattr(importlib.import_module(NAME), name)


class Finder(MetaPathFinder, Loader):
    """Finds it where Python looks for the compiler."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == NAME else None

    def create_module(self, spec):
        return Late(spec.name)

    def exec_module(self, module):
        module.stands = True


FINDER = Finder()
sys.meta_path.insert(0, FINDER)
