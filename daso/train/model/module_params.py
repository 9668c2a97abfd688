"""Parameters that a module's forward needs, learned from its calls of submodules."""

from collections.abc import Sequence

import torch

from daso.torch_private import own_parameters
from daso.train.model.params import Named


class ModuleParameters:
    """Parameters that each module's forward needs, assigned to the innermost called module.

    Some modules, such as MultiheadAttention, use parameters of submodules without calling them.

    Args:
        module: The model.
        named: Its parameters.
    """

    def __init__(self, module: torch.nn.Module, named: Named) -> None:
        self._owners = _owners(module, named)
        self._seen: set[str] = set()  # names of modules whose forward was called
        self._params: dict[str, tuple[int, ...]] = {}  # indices, by module
        self.nowhere = tuple(range(len(named)))  # indices of parameters without such a module

    def called(self, name: str) -> tuple[int, ...]:
        """Return the indices of the parameters that a module's forward needs, when it is called."""
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
            for module in around:
                if module is not None:
                    params.setdefault(module, []).append(index)
        self._params = {module: tuple(indices) for module, indices in params.items()}
        self.nowhere = tuple(nowhere)

    def _around(self, name: str) -> str | None:
        """Return the innermost enclosing module whose forward is called."""
        while name:
            name = name.rpartition(".")[0]
            if name in self._seen:
                return name
        return None


def _owners(module: torch.nn.Module, named: Named) -> Sequence[Sequence[str]]:
    """Return the names of the modules that own each parameter; none for other parameters."""
    owners: dict[int, list[str]] = {}
    for name, submodule in module.named_modules():
        for param in own_parameters(submodule).values():
            if param is not None:
                owners.setdefault(id(param), []).append(name)
    return [owners.get(id(tensor), []) for _, tensor in named]
