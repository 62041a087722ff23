"""The dry run of a job: predict what would stop it at its start, its memory, and its first steps.

It starts no process and changes no file, so a job of any size can be tried on any machine. If the job's token store is
elsewhere, synthetic documents take its place; their tokens are all zero and take no memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from wlb.documents.store.index import TokenIndex
from wlb.documents.store.reader import Shard, TokenStore
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.job.config import JobConfig
from wlb.job.configured_shape import configured_shape
from wlb.job.job import Job, limit_of_gpu
from wlb.job.memory.fit import predicted_memory
from wlb.job.memory.walk import MemoryEstimate
from wlb.simulate import simulate
from wlb.simulate.estimate import CONFIGURED, judge_config
from wlb.simulate.run import SimulationResult
from wlb.training.preflight import CheckedJob, checked, memory_limit
from wlb.workload import hardware_preset

_FIRST_STEPS = 4
_DOCUMENTS_PER_WINDOW = 100  # on average 50 fill a context window
_MOST_DOCUMENTS = 2**20  # later steps repeat them
_TOKEN_TYPE = np.dtype("<i4")


class SyntheticStore(TokenStore):
    """Takes the place of a store that is elsewhere; its lengths come from ``wlb.documents.synthetic``."""

    identity = "synthetic"

    def __init__(self, config: JobConfig) -> None:
        """Documents for the first steps of ``config``, as many in every store, with the vocabulary of its model."""
        documents = min(_DOCUMENTS_PER_WINDOW * config.packing.global_batch * _FIRST_STEPS, _MOST_DOCUMENTS)
        lengths = sample_lengths(documents, config.data.context_window)
        ends = np.cumsum(lengths)
        pointers, firsts = (ends - lengths) * _TOKEN_TYPE.itemsize, np.arange(documents + 1)
        index = TokenIndex("synthetic", _TOKEN_TYPE, lengths.astype(np.int32), pointers, firsts)
        tokens = np.broadcast_to(np.zeros(1, _TOKEN_TYPE), int(ends[-1]))
        self._drawn = Shard("synthetic", index, tokens, {"vocab_size": configured_shape(config.model).vocab_size})
        super().__init__([["synthetic"]] * len(config.data.stores))

    def _open_shard(self, prefix: str) -> Shard:
        return self._drawn


def find_problems(config: JobConfig, hardware: str) -> tuple[CheckedJob, list[str]]:
    """The job of ``config`` on machines of preset ``hardware``, with the files of this machine, and what would stop it.

    Raises ``UserError`` if no job can be made of ``config`` at all.
    """
    problems: dict[str, None] = {}

    def tried(check: Callable[[], Any]) -> Any:
        try:
            return check()
        except UserError as error:
            problems[str(error)] = None
            return None

    rates = hardware_preset(hardware)
    limit = limit_of_gpu(rates.memory_bytes)
    if rates.device_type == "cpu":
        limit = memory_limit("cpu", config.parallel.layout.world_size)
    stored = tried(lambda: TokenStore.open(*config.data.stores))
    job = checked(config, stored or SyntheticStore(config), hardware, limit, tried)
    if stored:
        tried(job.check_data)
    return job, [*problems]


@dataclass(frozen=True)
class DryRun:
    """The problems of a job, the memory of its worst step, and the simulation of its first steps.

    ``speed`` is tokens per second over those of plain-4d, on the job's own documents. Both ``speed`` and
    ``simulated`` may be None; ``not_simulated`` says why, such as documents that do not fill a step.
    """

    job: Job
    hardware: str
    problems: list[str]
    synthetic: bool  # whether synthetic documents stand for the job's own
    memory: MemoryEstimate
    simulated: SimulationResult | None
    not_simulated: str | None
    speed: float | None

    def to_json(self) -> dict[str, Any]:
        return {
            "gpus": self.job.layout.world_size,
            "layout": self.job.sizes,
            "hardware": self.hardware,
            "data": "synthetic" if self.synthetic else "store",
            "problems": self.problems,
            "memory_limit_bytes": int(self.job.memory_limit.number_of_bytes),
            "worst_step_bytes": self.memory.total,
            "worst_step": self.memory.parts,
            "first_steps": None if self.simulated is None else self.simulated.to_json(),
            "not_simulated": self.not_simulated,
            "speedup": self.speed,
        }


def dry_run(config: JobConfig, hardware: str = "h100") -> DryRun:
    """Try ``config`` on machines of ``hardware``; raises ``UserError`` as ``find_problems`` does."""
    found, problems = find_problems(config, hardware)
    store, synthetic = found.store, isinstance(found.store, SyntheticStore)
    of_stores = np.split(store.lengths, store.firsts[1:-1])
    lengths = of_stores[0] if len(of_stores) == 1 else of_stores
    simulated = speed = reason = None
    try:
        simulated = simulate(found.job, lengths, min(_FIRST_STEPS, config.training.steps or _FIRST_STEPS))
        if not synthetic:  # the same figure as from ``wlb simulate``
            job = Job.from_config(config, hardware, vocab_size=found.model.shape.vocab_size)
            speed = judge_config(config, job, lengths).speed(CONFIGURED)
    except UserError as error:
        reason = str(error)
    memory = predicted_memory(found.job)
    return DryRun(found.job, hardware, problems, synthetic, memory, simulated, reason, speed)
