"""How parameters take in what all nodes agreed on."""

import torch

from daso.plan.merge import ADOPT, Merge

__all__ = ["merge_pairs"]


def merge_pairs(pairs: list[tuple[torch.Tensor, torch.Tensor]], rule: Merge) -> None:
    """Carry out a merge for pairs (x, c), c being g, or g - s where the rule says since_send."""
    if not pairs:
        return
    here, there = [x for x, _ in pairs], [c for _, c in pairs]
    if rule == ADOPT:
        torch._foreach_copy_(here, there)
    elif any(x.dtype != c.dtype for x, c in pairs):
        _merge_wide(pairs, rule)
    elif rule.since_send:
        torch._foreach_add_(here, there)
    else:
        torch._foreach_lerp_(here, there, rule.pull)


def _merge_wide(pairs: list[tuple[torch.Tensor, torch.Tensor]], rule: Merge) -> None:
    """Merge 16-bit parameters: compute in the reference's type, round once."""
    for x, c in pairs:
        wide = x.to(c.dtype)
        x.copy_(wide.add_(c) if rule.since_send else wide.lerp_(c, rule.pull))
