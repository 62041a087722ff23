"""``wlb export``: a checkpoint as a Hugging Face model."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from wlb.cli import options
from wlb.cli.console import emit_json, stderr
from wlb.errors import require

WeightDtype = StrEnum("WeightDtype", ["BFLOAT16", "FLOAT32"])


def export(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="Configuration that the job was started with (TOML).")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory to make; it must not exist.", show_default=False)],
    step: Annotated[int | None, options.number("Checkpoint of this step; default: the newest.")] = None,
    dtype: Annotated[
        WeightDtype, typer.Option(metavar="bfloat16|float32", help="Type of the weights; a checkpoint has float32.")
    ] = WeightDtype.BFLOAT16,
    overrides: options.Settings = None,
    json: options.Json = False,
) -> None:
    """Write a checkpoint as a directory that Hugging Face transformers, vLLM and others open.

    It holds config.json, safetensors and, where the job has them, the tokenizer's files.

    Example: wlb export configs/tiny.toml --out runs/tiny/model
    """
    with stderr.status("reading the checkpoint and writing the model"):
        torch = require("torch", "train")
        from wlb.job.config_file import load_config
        from wlb.training.checkpoint.export import export_checkpoint

        loaded = load_config(config, overrides or (), auto_dp=lambda of_one_rank: 1)
        exported = export_checkpoint(loaded, out, step=step, dtype=getattr(torch, dtype.value))
    tokenizer = exported["tokenizer_files"]
    if json:
        emit_json({"out": str(out), "dtype": dtype.value, **exported})
        return
    kept = f"tokenizer: {', '.join(tokenizer)}" if tokenizer else "without a tokenizer"
    print(f"step {exported['step']}, {exported['parameters']:,} parameters as {dtype.value}, in {out}; {kept}")
