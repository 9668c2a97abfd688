"""Hugging Face's Trainer with DASO instead of DDP."""

from typing import Any

from transformers import Trainer, TrainerCallback

from daso.integrations.accelerate import DasoAccelerator


class DasoTrainer(Trainer):
    """A `transformers.Trainer` that trains with DASO on all ranks of the world.

    Call `daso.integrations.start` first, then `TrainingArguments` (``use_cpu=True`` on CPUs). Data
    are sharded over all ranks, metrics gathered from all, and rank 0 saves. Ranks synchronize
    before they evaluate or save, so that a run resumes from one copy. All else is Trainer's.

    Args:
        *args: As for `transformers.Trainer`.
        daso: Keywords of `daso.attach`: policy, wire, exchange, ...
        **kwargs: As for `transformers.Trainer`.
    """

    def __init__(self, *args: Any, daso: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._daso = daso or {}
        super().__init__(*args, **kwargs)
        self.add_callback(_Close(self))

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator as Trainer does, and make it use DASO."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = DasoAccelerator
        self.accelerator.use_daso(self._daso)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Synchronize ranks before they evaluate or save, and after the last step."""
        control = self.control
        if control.should_save or control.should_evaluate or control.should_training_stop:
            saves = not control.should_evaluate or control.should_save
            joined = saves or self.args.save_strategy == "best"
            self.accelerator.synchronize(optimizer_state=joined)
        super()._maybe_log_save_evaluate(*args, **kwargs)


class _Close(TrainerCallback):
    """Closes DASO when training ends; ranks synchronized after the last step."""

    def __init__(self, trainer: DasoTrainer) -> None:
        self._trainer = trainer

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Close the accelerator."""
        self._trainer.accelerator.close()
