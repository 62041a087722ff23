"""The ``wlb-studies`` command: comparisons, the paper's evaluation and published measurements."""

from typing import NoReturn

from wlb import __version__
from wlb.cli.app import application, run

COMMANDS = {
    "The paper and measurements": ("paper", "validate"),
    "Comparisons": ("rivals", "packing", "sharding", "thresholds", "prefill"),
    "In a browser": ("page",),
}
app = application(
    "wlb-studies",
    "Compare WLB with published policies, the paper's evaluation and published measurements.",
    f"wlb-studies {__version__}",
    "wlb_studies.cli",
    COMMANDS,
)


def main() -> NoReturn:
    """Run ``wlb-studies``, as ``wlb.cli.app.run`` does."""
    run(app)
