"""The steps of a job in the trainer, and what identifies them.

The document order follows from the token store and some settings. If one of them differs from the checkpoint's, the job
would repeat some documents and leave out others, so it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from wlb.documents.store.reader import TokenStore
from wlb.job.config import TrainingConfig
from wlb.job.job import Job
from wlb.runtime.batch import Batch, RankSlice
from wlb.runtime.calibration import Calibration
from wlb.runtime.reading import read_batch
from wlb.runtime.steps import PlannedSteps, RankSteps, Settings

CHECKS: dict[str, Any] = {"fixed": ("order", "packing"), "remedy": "start anew with another checkpoint.dir"}


def open_steps(
    store: TokenStore,
    job: Job,
    training: TrainingConfig,
    *,
    share: RankSlice | None = None,
    state: dict[str, Any] | None = None,
    calibration: Calibration | None = None,
    asked_to_end: Callable[[], bool] = lambda: False,
) -> RankSteps[Batch]:
    """The steps of ``job`` for the rank that trains ``share``, from ``state`` if given; ``close`` them.

    They end with the epoch if ``training.steps`` is unset, and never otherwise. Raises ``UserError`` if ``state`` was
    saved with other data or settings.
    """
    share = share or RankSlice()
    epoch = 0 if state is None else state["planner"]["stream"]["epoch"]
    planned = PlannedSteps(
        job,
        store.stored_lengths,
        data_settings(store, job),
        epochs=None if training.steps else epoch + 1,
        whole=False,
        pipeline=share.dp_rank,
        **CHECKS,
    )
    read = partial(read_batch, store=store, vocab_size=job.shape.vocab_size)
    steps = RankSteps(planned, read, share, calibration=calibration, ahead=True, asked_to_end=asked_to_end)
    if state is not None:
        steps.load_state_dict(state)
    return steps


def data_settings(store: TokenStore, job: Job) -> Settings:
    """What a state is valid for: the data, and every setting that decides which document trains when.

    Parallel sizes, micro-batches, their assignment to ranks, the model, and what the packer does not read may change.
    """
    data = job.data.model_dump(mode="json", exclude={"store", "mixture"})
    if job.data.mixture:
        data["weights"] = list(job.data.weights)
    order = {"token store": store.identity, "tokenizer": store.tokenizer_identity}
    packing = {"method": job.packing.method, **job.packing.identity(job.context_window)}
    return {
        "order": order | {f"data.{name}": value for name, value in data.items()},
        "packing": {f"packing.{name}": value for name, value in packing.items()},
    }
