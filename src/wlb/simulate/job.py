"""Jobs for the simulator: from keywords (``simulated_job``) or by name (``NAMED_JOBS``).

The named jobs are those of the evaluation of the paper, and the one of its introduction. Quoted: WLB-LLM (arXiv
2503.17924), Table 1, for model, context window and GPUs; section 1 for the job of 405B parameters on 8,192 GPUs.
Assumed: its shape is that of Llama 3 405B, and the global batch (their layouts are in the studies).
"""

from dataclasses import fields, replace
from typing import Any, NamedTuple

from wlb.errors import check_known
from wlb.job.config import PRESETS, DataConfig, PackingConfig, ShardingConfig, with_preset
from wlb.job.job import Job
from wlb.schedules.layout import Layout
from wlb.workload import Hardware, ModelShape, hardware_preset, model_shape


def simulated_job(
    model: str | ModelShape,
    context_window: int,
    preset: str = "balanced",
    *,
    hardware: str | Hardware = "h100",
    micro_batches: int | None = None,
    packing: dict[str, Any] | None = None,
    sharding: str | None = None,
    dp: int = 1,
    pp: int = 1,
    **layout: Any,
) -> Job:
    """A job of ``model`` under one of the systems in ``wlb.job.config.PRESETS``.

    ``micro_batches`` is for each data-parallel rank, by default the number of pipeline ranks; a global batch has as
    many windows. ``packing`` and ``sharding`` replace settings of the preset. ``layout`` are further fields of
    ``Layout`` and of ``Job``.

    Raises ``UserError`` for settings that no job could have.
    """
    rank_windows = pp if micro_batches is None else micro_batches
    sizes = {field.name: layout.pop(field.name) for field in fields(Layout) if field.name in layout}
    shape = model_shape(model) if isinstance(model, str) else model
    packing_section, sharding_section = preset_sections(
        preset, {"global_batch": rank_windows * dp} | (packing or {}), {"strategy": sharding} if sharding else {}
    )
    tp = sizes.get("tp", 1)
    if shape.kv_heads < tp and tp % shape.kv_heads == 0 and shape.heads % tp == 0:
        shape = replace(shape, kv_heads=tp)  # each key/value head is on several ranks
    return Job(
        shape=shape,
        hardware=hardware_preset(hardware) if isinstance(hardware, str) else hardware,
        packing=packing_section,
        sharding=sharding_section,
        data=DataConfig.of({"store": "documents", "context_window": context_window}, "data"),
        layout=Layout(dp=dp, pp=pp, **sizes),
        **layout,
    )


def preset_sections(
    preset: str, packing: dict[str, Any], sharding: dict[str, Any] | None = None
) -> tuple[PackingConfig, ShardingConfig]:
    """[packing] and [sharding] of a preset, with the given settings in place of its own.

    Raises ``UserError`` for an unknown preset and for settings that no job could have.
    """
    check_known("preset", preset, PRESETS)
    sections = PRESETS[preset]
    return (
        PackingConfig.of(with_preset(sections, "packing", packing), "packing"),
        ShardingConfig.of(with_preset(sections, "sharding", sharding or {}), "sharding"),
    )


class NamedJob(NamedTuple):
    """A model, a context window in tokens, a number of GPUs, and a global batch in context windows."""

    model: str
    context_window: int
    gpus: int
    global_batch: int


_64K, _128K = 65_536, 131_072

NAMED_JOBS = {
    "550m-64k": NamedJob("550m", _64K, 32, 8),
    "550m-128k": NamedJob("550m", _128K, 32, 4),
    "7b-64k": NamedJob("7b", _64K, 32, 4),
    "7b-128k": NamedJob("7b", _128K, 64, 4),
    "30b-64k": NamedJob("30b", _64K, 64, 4),
    "30b-128k": NamedJob("30b", _128K, 128, 4),
    "70b-64k": NamedJob("70b", _64K, 256, 4),
    "70b-128k": NamedJob("70b", _128K, 256, 4),
    "405b-128k": NamedJob("llama3-405b", _128K, 8192, 64),
}
