"""Options of commands that compare packers on one job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple, Self

import numpy as np
import typer
from numpy.typing import NDArray

from wlb.cli.groups import given_again, names_of
from wlb.cli.options import JobOptions, list_of_names, number
from wlb.errors import UserError
from wlb_studies.cli.gpu_options import usual_cp, usual_tp

if TYPE_CHECKING:
    from wlb.job.job import Job

Methods = Annotated[str | None, list_of_names("Packing methods; see above.")]


class AskedJob(NamedTuple):
    """A job under preset ``balanced``, and its prices."""

    job: Job
    priced_by: Mapping[str, str | int]


@dataclass(frozen=True, kw_only=True)
class PackedOptions(JobOptions):
    """A job whose documents are packed by several methods."""

    micro_batches: Annotated[
        int | None,
        number(
            "Micro-batches of a step, over all data-parallel ranks: --batch-tokens in windows. With it and no --gpus, "
            "sizes that are not given are dp 1, pp up to 4, and cp one rank for every 65,536 tokens."
        ),
    ] = None
    methods: Methods = None
    max_delay: Annotated[
        int | None,
        typer.Option(min=1, metavar="STEPS", help="Most steps that a document may be delayed."),
    ] = None

    def job(self, context: typer.Context, source: str | None, lengths: NDArray[np.int64]) -> AskedJob:
        """The job under preset ``balanced``, in the given layout or in the fastest layout of plain-4d."""
        from wlb.simulate.estimate import fastest
        from wlb.simulate.filling import check_filling
        from wlb.simulate.job import preset_sections
        from wlb.simulate.verdict import BALANCED, BASELINE

        if self.micro_batches is not None and self.batch_tokens is not None:
            raise UserError("--micro-batches and --batch-tokens both set the global batch; leave one of them out")
        space = self._with_sizes(lengths).space(context, source, lengths)
        check_filling(lengths, space.batch_tokens, space.context_window, steps=self.steps or 1)
        job = fastest(space, BASELINE, lengths)
        packing, sharding = preset_sections(BALANCED, {"global_batch": job.global_batch})
        return AskedJob(replace(job, packing=packing, sharding=sharding), space.priced_by)

    def _with_sizes(self, lengths: NDArray[np.int64]) -> Self:
        """The same with the sizes that --micro-batches implies."""
        from wlb.documents.lengths import assumed_window
        from wlb.workload import model_shape

        if self.micro_batches is None:
            return self
        window = self.context_window or assumed_window(lengths)
        given = replace(self, batch_tokens=self.micro_batches * window)
        if self.gpus is not None or self.profile is not None:
            return given
        dp = self.dp or 1
        pp = self.pp or (4 if self.virtual_pp else min(4, max(1, self.micro_batches // dp)))
        tp = self.tp or usual_tp(model_shape(self.model), self.hardware)
        return replace(given, dp=dp, pp=pp, tp=tp, cp=self.cp or usual_cp(window))

    def given_again(self, context: typer.Context, job: Job) -> list[str]:
        """The options of ``job`` given on the command line, for a command without --micro-batches."""
        batch = ["--batch-tokens", f"{self.micro_batches * job.context_window}"] if self.micro_batches else []
        return given_again(context, names_of(JobOptions)) + batch
