"""Which parameters a module's forward needs, learned from which modules are called."""

from collections.abc import Sequence

import torch

from daso.train.model.params import Named

__all__ = ["ModuleParameters"]


class ModuleParameters:
    """Parameters that each module's forward needs: as far in as can be.

    Some modules use parameters of modules inside without calling them, as MultiheadAttention.

    Args:
        module: The model.
        named: Its parameters.
    """

    def __init__(self, module: torch.nn.Module, named: Named) -> None:
        self._owners = _owners(module, named)
        self._seen: set[str] = set()  # names of modules whose forward was called
        self._params: dict[str, tuple[int, ...]] = {}  # indices, by module
        self.nowhere = tuple(range(len(named)))  # of parameters that no such module has

    def called(self, name: str) -> tuple[int, ...]:
        """Return the parameters (indices) that a module needs whose forward is called now."""
        if name not in self._seen:
            self._learn(name)
        return self._params.get(name, ())

    def _learn(self, name: str) -> None:
        self._seen.add(name)
        params: dict[str, list[int]] = {}
        nowhere = []
        for index, owners in enumerate(self._owners):
            direct = [owner for owner in owners if owner in self._seen]
            around = direct or {self._around(owner) for owner in owners} or {None}
            nowhere += [index] * (None in around)
            for one in around:
                if one is not None:
                    params.setdefault(one, []).append(index)
        self._params = {one: tuple(indices) for one, indices in params.items()}
        self.nowhere = tuple(nowhere)

    def _around(self, name: str) -> str | None:
        """Return the innermost module around one whose forward is called."""
        while name:
            name = name.rpartition(".")[0]
            if name in self._seen:
                return name
        return None


def _owners(module: torch.nn.Module, named: Named) -> Sequence[Sequence[str]]:
    """Return the names of the modules that have each parameter; none for a stranger."""
    owners: dict[int, list[str]] = {}
    for name, one in module.named_modules():
        for param in one._parameters.values():
            if param is not None:
                owners.setdefault(id(param), []).append(name)
    return [owners.get(id(tensor), []) for _, tensor in named]
