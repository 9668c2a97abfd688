"""Hugging Face's Trainer with DASO in place of DDP."""

from typing import Any

from transformers import Trainer, TrainerCallback

from daso.integrations.accelerate import DasoAccelerator

__all__ = ["DasoTrainer"]


class DasoTrainer(Trainer):
    """A `transformers.Trainer` that trains on all ranks of the world, by DASO.

    `daso.integrations.start` comes first, then `TrainingArguments` (``use_cpu=True`` on CPUs). Data
    are sharded over all ranks, metrics gathered from all, and rank 0 saves; before all ranks
    evaluate or save they agree, so that a run resumes from one copy. All else is Trainer's.

    Args:
        *args: As for `transformers.Trainer`.
        daso: Keywords of `daso.attach`: policy, wire, exchange, ...
        **kwargs: As for `transformers.Trainer`.
    """

    def __init__(self, *args: Any, daso: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._daso = daso or {}
        super().__init__(*args, **kwargs)
        self.add_callback(_Agree(self.accelerator))

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator as Trainer does, and let it use DASO."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = DasoAccelerator
        self.accelerator.use_daso(self._daso)


class _Agree(TrainerCallback):
    """Lets all ranks hold the same before they evaluate or save, and at the end."""

    def __init__(self, accelerator: DasoAccelerator) -> None:
        self._accelerator = accelerator

    def _agree(self, args: Any, control: Any) -> None:
        if control.should_save or control.should_evaluate:
            saves = control.should_save or str(args.save_strategy).endswith("best")
            self._accelerator.synchronize(optimizer_state=saves)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Agree where a save or an evaluation comes."""
        self._agree(args, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Agree where a save or an evaluation comes."""
        self._agree(args, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Agree, and stop exchanging."""
        self._accelerator.close()
