"""The rate by which jobs are chosen is the one that the simulator reports."""

import numpy as np

from tests.simulate.jobs import documents, job
from wlb.simulate import simulate
from wlb.simulate.decide import decide
from wlb.simulate.rate import rate


def test_rate_is_that_of_the_simulation():
    simulated = decide(job("balanced", pp=2, cp=2, dp=2), documents())
    result = simulate(simulated, documents(), 5)
    rated = rate(simulated, documents(), 5, simulated.work_prices)
    assert rated.work_rate == result.work_rate
    assert rated.seconds == result.seconds
    np.testing.assert_array_equal(rated.step_tokens, result.step_tokens)
    np.testing.assert_allclose(sum(rated.step_work_seconds), rated.work_seconds, rtol=1e-12)
