"""The steps of a job in the trainer, and what identifies them.

The document order follows from the token store and some settings. If one of them differs from the checkpoint's, the job
would repeat some documents and leave out others, so it is refused.
"""

from functools import partial
from typing import Any

from wlb.documents.store.reader import TokenStore
from wlb.job.config import TrainingConfig
from wlb.job.job import Job
from wlb.runtime.batch import Batch, RankSlice
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
    **how: Any,
) -> RankSteps[Batch]:
    """The steps of ``job`` for the rank that trains ``share``, from ``state`` if given; ``close`` them.

    They end with the epoch if ``training.steps`` is unset, and never otherwise. Raises ``UserError`` if ``state`` was
    saved with other data or settings. ``how`` has further arguments of ``RankSteps``.
    """
    share, epoch = share or RankSlice(), state["planner"]["stream"]["epoch"] if state else 0
    options: dict[str, Any] = {"epochs": None if training.steps else epoch + 1, "whole": False, **CHECKS}
    planned = PlannedSteps(job, store.stored_lengths, data_settings(store, job), pipeline=share.dp_rank, **options)
    read = partial(read_batch, store=store, vocab_size=job.shape.vocab_size)
    return RankSteps(planned, read, share, ahead=True, state=state, **how)


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
