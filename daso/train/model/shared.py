"""Which tensors beside trained parameters are the same thing on every rank: buffers, frozen ones.

Caches and masks of a model may differ in length between ranks, and some tensors have no memory of
their own to write to: they are named once and left alone.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

__all__ = ["common_tensors", "is_unfit"]

NAMES = 3  # in one message
UNFIT = "is "  # begins the description of what cannot be averaged in place
logger = logging.getLogger("daso")


def common_tensors(
    named: Iterable[tuple[str, torch.Tensor]],
    gather: Callable[[dict[str, str]], Sequence[Mapping[str, str]]],
    told: set[str],
    *,
    says: bool,
) -> list[torch.Tensor]:
    """Return the tensors that every rank has in the same shape and type, and can write to.

    ``gather`` gives every rank's, or one alone where all are alike.

    Collective over the world; blocking.
    """
    mine = dict(named)
    everyones = gather({name: _described(tensor) for name, tensor in mine.items()})
    names = dict.fromkeys(name for one in everyones for name in one)
    problems = {name: text for name in names if (text := _problem(name, everyones))}
    if says:
        _say({name: text for name, text in problems.items() if name not in told})
    told.update(problems)
    return [_real(tensor) for name, tensor in mine.items() if name not in problems]


def _say(problems: Mapping[str, str]) -> None:
    if not problems:
        return
    first = [f"{name} {text}" for name, text in problems.items()][:NAMES]
    more = f"; and {len(problems) - NAMES} more" if len(problems) > NAMES else ""
    logger.warning(
        "buffers and frozen parameters must be plain tensors of the same shape and type on every "
        "rank to be made equal, but %s%s; each rank keeps its own",
        "; ".join(first),
        more,
    )


def _problem(name: str, everyones: Sequence[Mapping[str, str]]) -> str | None:
    """Return why ranks cannot share a tensor; None if they can."""
    first = everyones[0].get(name, "missing")
    for rank, one in enumerate(everyones):
        here = one.get(name, "missing")
        if here.startswith(UNFIT):
            return here
        if here != first:
            return f"is {first} on rank 0 and {here} on rank {rank}"
    return None


def _described(tensor: torch.Tensor) -> str:
    """Return shape and type, or what makes a tensor one that cannot be averaged in place."""
    if tensor.is_inference():
        return f"{UNFIT}an inference tensor"
    if tensor.is_meta:
        return f"{UNFIT}on the meta device"
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return f"{UNFIT}sparse, nested or quantized"
    if tensor.is_conj() or tensor.is_neg():
        return f"{UNFIT}a conjugated or negated view"
    if any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        return f"{UNFIT}expanded"
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def is_unfit(tensor: torch.Tensor) -> bool:
    """Return whether a tensor cannot be averaged in place."""
    return _described(tensor).startswith(UNFIT)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor
