"""A job's configuration as TOML, ready to copy into a file and to start with ``wlb train``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wlb.simulate.job import SimulatedJob
from wlb.workload import MODEL_SHAPES

_PLACEHOLDER = "data/corpus"


def recommended_config(
    job: SimulatedJob, model: str, source: str, store: str | None = None, *, preset: str = "best"
) -> str:
    """The sections that ``job`` settles, under ``preset``; without ``store`` a placeholder stands for it."""
    packing = job.packing
    sections: dict[str, dict[str, Any]] = {
        "model": {"name" if model in MODEL_SHAPES or not Path(model).is_dir() else "pretrained": model},
        "data": {"store": store or _PLACEHOLDER, "context_window": job.context_window},
        "parallel": {"dp": job.layout.dp, "pp": job.layout.pp, "cp": job.layout.cp, "tp": job.layout.tp},
        "packing": {"micro_batches": packing.micro_batches},
    }
    if preset == "best":
        sections["packing"]["max_length_factor"] = float(packing.length_factor)
    if job.layout.virtual_pp > 1 or job.layout.schedule != "1f1b":
        sections["parallel"] |= {"virtual_pp": job.layout.virtual_pp, "schedule": job.layout.schedule}
    if job.activation_checkpointing != "none":
        sections["training"] = {"activation_checkpointing": job.activation_checkpointing}
    remark = "" if store else "; name your token store in data.store (wlb prepare)"
    lines = [f"# For documents as in {_one_line(source)}{remark}.", f'preset = "{preset}"']
    for name, settings in sections.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in settings.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """JSON's numbers, lists and strings are TOML's, but for one control character that TOML wants escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _one_line(name: str) -> str:
    """What may stand in a comment: TOML has no control characters there."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)
