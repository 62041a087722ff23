"""The Lightning module of docs/stacks/loop.md: whole steps, exact gradients, and checkpoints that continue exactly."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.code_blocks import ROOT, blocks_of
from wlb.integrations.packed import packed_batches

RANDOM = np.random.default_rng(0)
DOCUMENTS = [RANDOM.integers(0, 19, length) for length in RANDOM.integers(2, 60, 60)]
SETTINGS: dict[str, Any] = {"context_window": 64, "micro_batches": 4, "model": "tiny"}


class Bigrams(torch.nn.Module):
    """A model that takes the keywords of a Hugging Face one; its score of a token depends on the one before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores = torch.nn.Parameter(torch.randn(19, 19, dtype=torch.float64))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return type("Output", (), {"logits": self.scores[input_ids]})


def planned() -> Any:
    """The module of the page, for the documents here and plain gradient descent."""
    (block,) = (b for b in blocks_of(ROOT / "docs" / "stacks" / "loop.md") if "LightningModule" in b.text)
    code = block.text.replace('context_window=8192, micro_batches=4, model="7b"', "**SETTINGS")
    assert "SETTINGS" in code
    code = code.replace("register_attention(model)", "")  # of transformers, which these bigrams are not
    names: dict[str, Any] = {"documents": DOCUMENTS, "SETTINGS": SETTINGS}
    exec(code.partition("lightning.Trainer(")[0], names)

    base: Any = names["Planned"]

    class Descending(base):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.5)

    return Descending(Bigrams())


def trainer(folder: Path, **limits: Any) -> Any:
    import lightning  # it takes 1.5 s, and most workers run none of these tests

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, default_root_dir=folder, **quiet, **limits)


def one_at_a_time(steps: int) -> torch.Tensor:
    model = Bigrams()
    for _, step in zip(range(steps), packed_batches(DOCUMENTS, **SETTINGS), strict=False):
        for segment in step.plan.segments:
            ids = torch.from_numpy(DOCUMENTS[segment.document])
            loss = torch.nn.functional.cross_entropy(model.scores[ids[:-1]], ids[1:], reduction="sum")
            (loss / step.loss_tokens).backward()
        assert model.scores.grad is not None
        with torch.no_grad():
            model.scores.sub_(0.5 * model.scores.grad)
        model.scores.grad = None
    return model.scores.detach()


@pytest.mark.proves("Lightning")
@pytest.mark.filterwarnings("ignore")
def test_a_limit_of_batches_ends_after_whole_steps_and_a_checkpoint_continues_with_the_next(tmp_path: Path):
    steps = len(list(packed_batches(DOCUMENTS, **SETTINGS)))
    assert steps > 5
    module = planned()
    limited = trainer(tmp_path, limit_train_batches=3)
    limited.fit(module)
    torch.testing.assert_close(module.model.scores.detach(), one_at_a_time(3), rtol=1e-12, atol=1e-12)

    import lightning

    class Stops(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "after3.ckpt")
                trainer.should_stop = True

    trainer(tmp_path, callbacks=[Stops()]).fit(planned())
    resumed = planned()
    trainer(tmp_path).fit(resumed, ckpt_path=tmp_path / "after3.ckpt")
    torch.testing.assert_close(resumed.model.scores.detach(), one_at_a_time(steps), rtol=1e-12, atol=1e-12)
