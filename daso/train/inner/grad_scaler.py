"""What a step needs to know of torch's GradScaler, and of torch's own hidden steps.

A scaler that meets inf or NaN does not call ``step``, so ranks would count differently. An
optimizer with ``_step_supports_amp_scaling`` is always called, with ``grad_scale`` and
``found_inf`` set on it: every attempt counts then, on every rank.
"""

from dataclasses import dataclass

import torch

from daso.plan.step_restoration import rate_of

__all__ = ["NATIVE", "Scaling", "is_probe"]

NATIVE = "_step_supports_amp_scaling"  # torch's name for an optimizer that unscales by itself


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a GradScaler set on the optimizer that it steps."""

    grad_scale: torch.Tensor | None = None  # 0-dim; None: gradients are unscaled already
    found_inf: torch.Tensor | None = None  # 0-dim, above 0 if so; None: there is no scaler

    @classmethod
    def of(cls, stepped: torch.optim.Optimizer) -> "Scaling":
        """Read what a scaler set, if any."""
        return cls(getattr(stepped, "grad_scale", None), getattr(stepped, "found_inf", None))

    @property
    def active(self) -> bool:
        """Whether a scaler makes this step."""
        return self.found_inf is not None

    def unscale(self, inner: torch.optim.Optimizer) -> bool:
        """Divide gradients by the scale, as the scaler would."""
        if self.found_inf is None:
            return True
        if self.grad_scale is not None:
            inverse = self.grad_scale.double().reciprocal().float()
            grads = [p.grad for g in inner.param_groups for p in g["params"] if p.grad is not None]
            for grad in grads:
                grad.mul_(inverse.to(grad.device))
        return not bool(self.found_inf)


def is_probe(inner: torch.optim.Optimizer) -> bool:
    """Return whether this is the step by which torch.distributed.checkpoint makes state.

    It steps an optimizer that has none once, with lr 0 and gradients of zeros.
    """
    if inner.state:
        return False
    groups = inner.param_groups
    if any(rate_of(group, 1.0) != 0 for group in groups):
        return False
    grads = [p.grad for group in groups for p in group["params"] if p.requires_grad]
    return all(grad is not None and not bool(grad.any()) for grad in grads)
