"""``wlb-studies validate``: compare the simulator with published GPU measurements."""

from pathlib import Path
from typing import Annotated

import typer

from wlb.cli import options
from wlb_studies.cli.paper import Out, show_experiments


def validate(
    out: Out = Path("results"),
    measured: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measurements to compare with; default: the published ones."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Compare the simulator with GPU timings that others published; the JSON has every row.

    Example: wlb-studies validate
    """
    from wlb_studies.experiment import Settings
    from wlb_studies.published import experiment as published

    show_experiments({"published": published.run}, Settings(out=out, measured=measured), as_json=json)
