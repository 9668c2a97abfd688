"""Integrations of DASO with Hugging Face's Trainer and Accelerate, and Lightning; all optional."""

from typing import TYPE_CHECKING

from daso.public_names import on_first_use

if TYPE_CHECKING:
    from daso.integrations.accelerate import DasoAccelerator
    from daso.integrations.launch import start
    from daso.integrations.lightning import DasoStrategy
    from daso.integrations.transformers import DasoTrainer

__all__ = ["DasoAccelerator", "DasoStrategy", "DasoTrainer", "start"]

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "DasoAccelerator": "daso.integrations.accelerate",
        "DasoStrategy": "daso.integrations.lightning",
        "DasoTrainer": "daso.integrations.transformers",
        "start": "daso.integrations.launch",
    },
)
