"""The command line of the studies as tests run it."""

from functools import partial

from tests.cli.conftest import run
from wlb_studies.app import app

studies = partial(run, application=app)
