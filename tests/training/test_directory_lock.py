"""A directory belongs to one job at a time, and must be the same one for all ranks."""

import pytest

from tests.training.jobs import job
from wlb.errors import UserError
from wlb.training.preflight import check_shared, directories_of


def test_a_directory_is_held_until_the_job_ends(tmp_path):
    first = job(tmp_path, checkpoint={"dir": str(tmp_path / "checkpoints")})
    second = job(tmp_path / "other", checkpoint={"dir": str(tmp_path / "checkpoints")})
    with (
        directories_of(first),
        pytest.raises(UserError, match=r"another job is writing to checkpoint\.dir .*checkpoints; wait"),
        directories_of(second),
    ):
        pass
    with directories_of(second):
        pass


def test_metrics_and_checkpoints_may_share_a_directory(tmp_path):
    with directories_of(job(tmp_path, checkpoint={"dir": str(tmp_path / "metrics")})):
        pass


def test_a_directory_that_rank_0_does_not_hold_is_not_shared(tmp_path):
    config = job(tmp_path, checkpoint={"dir": str(tmp_path / "checkpoints")})
    with pytest.raises(UserError, match=r"checkpoint\.dir .*checkpoints is not shared by all machines"):
        check_shared(config)
    with directories_of(config):
        check_shared(config)
