"""By what the seconds of a job are priced: devices, measurements of them, and the software around the kernels."""

from __future__ import annotations

from dataclasses import dataclass, field

from wlb.errors import UserError
from wlb.workload import Hardware, ModelShape
from wlb.workload.base import DocumentPrices
from wlb.workload.costs import Software
from wlb.workload.profile import WorkloadProfile


@dataclass(frozen=True)
class Pricing:
    """What a job's seconds depend on beside its model and layout.

    ``hardware`` has the rates of the type that the job computes in. A measured ``profile`` replaces what it measured;
    links stay the hardware's. ``packed_by`` are a caller's own prices of documents, by which they are packed.
    """

    hardware: Hardware
    profile: WorkloadProfile | None = field(default=None, hash=False)  # it has a dict
    packed_by: DocumentPrices | None = None
    software: Software = field(default_factory=Software)

    def check(self, shape: ModelShape, gpus_of_stage: int) -> None:
        """Raise ``UserError`` unless the experts of a model of ``shape`` divide so many GPUs of a pipeline rank."""
        ranks, experts = self.software.expert_parallel, shape.experts
        if ranks < 1 or gpus_of_stage % ranks or (ranks > 1 and (experts is None or experts.count % ranks)):
            raise UserError(
                f"expert_parallel = {ranks} must divide the {gpus_of_stage} GPUs of a pipeline stage and the model's "
                f"{experts.count if experts else 0} experts; choose a common divisor, or 1"
            )
