"""Shadow mode in Hugging Face's Trainer and its derivatives (TRL, Axolotl, LLaMA-Factory, ms-swift)."""

from typing import Any

from transformers import TrainerCallback

from wlb.shadow_mode import shadow


class ShadowCallback(TrainerCallback):
    """Measures what balanced steps would gain: ``trainer.add_callback(ShadowCallback())``.

    ``settings`` are keywords of ``wlb.shadow``; ``shadow.gain`` is the latest result.
    """

    def __init__(self, **settings: Any) -> None:
        self.shadow: Any = None
        self._settings = settings

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.shadow = shadow(model, **self._settings)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.shadow is not None:
            self.shadow.close()
