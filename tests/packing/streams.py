"""Random documents, packers and workloads for the packing tests, and the checks that every plan must pass."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from tests.workload.profiles import profile_of
from wlb.documents.segments import Segment
from wlb.packing.plan import StepPlan
from wlb.packing.registry import PACKERS, make_packer
from wlb.workload import make_workload, model_shape
from wlb.workload.profile import Measurements

SETTINGS = settings()  # of the profile that the run was started with; see tests/conftest.py
METHODS = tuple(PACKERS)
POOLING = tuple(name for name in METHODS if name not in ("sequential", "balanced"))  # a document arrives when taken in


class Polynomial:
    """A workload of d^2 + linear d seconds; whole numbers, so that ties between micro-batches happen."""

    def __init__(self, linear):
        self.linear = linear

    def attention_seconds(self, lengths, phase="both"):
        return np.square(np.asarray(lengths, np.float64))

    def linear_seconds(self, tokens, phase="both"):
        return np.asarray(tokens, np.float64) * self.linear

    def document_seconds(self, lengths):
        return self.attention_seconds(lengths) + self.linear_seconds(lengths)


def profile_workload():
    """Prices interpolated between two measurements."""
    one = Measurements(tokens=(16, 4096), forward_seconds=(16.0, 8192.0), backward_seconds=(32.0, 20480.0))
    return make_workload("tiny", profile=profile_of(model_shape("tiny"), one, one))


WORKLOADS = {
    "7b": make_workload("7b"),
    "tiny": make_workload("tiny", tp=2),
    "polynomial": Polynomial(64),
    "square": Polynomial(0),
    "profile": profile_workload(),
}


@st.composite
def packings(draw: Any, /, methods: Sequence[str] = METHODS, **fixed: Any) -> Any:
    """Name and options of a packer, with everything but the documents."""
    method = draw(st.sampled_from(methods))
    window = draw(st.integers(1, 64) | st.integers(1, 4000))
    options = {
        "micro_batches": draw(st.integers(1, 9)),
        "context_window": window,
        "workload": WORKLOADS[draw(st.sampled_from(sorted(WORKLOADS)))],
    }
    if method not in ("sequential", "balanced"):
        options["max_delay"] = draw(st.integers(1, 8))
    if method == "fixed_greedy":
        options["window"] = draw(st.integers(1, 4))
    if method == "balanced":
        options["global_batch"] = draw(st.none() | st.integers(1, 9))
        least = max(1.0, (options["global_batch"] or options["micro_batches"]) / options["micro_batches"])
        options["max_length_factor"] = draw(st.just("auto") | st.floats(least, least + 1))
    if method == "variable_length":
        options["max_length_factor"] = draw(st.sampled_from([1, 1.0, 1.25, 1.5, 2, 3.0]) | st.floats(1, 3))
        some = st.sets(st.integers(1, 2 * window), max_size=4).map(lambda lengths: tuple(sorted(lengths)))
        options["outlier_thresholds"] = draw(st.none() | some)
    return method, options | fixed


SHAPES = {
    "uniform": lambda random, window, count: random.integers(1, window, count, endpoint=True),
    "skewed": lambda random, window, count: np.clip(window // 16 * random.pareto(1, count), 1, window).astype(int),
    "half": lambda random, window, count: np.minimum(window // 2 + random.integers(1, 3, count), window),
    "large": lambda random, window, count: random.integers(window // 2 + 1, window, count, endpoint=True),
}


@st.composite
def document_lengths(draw: Any, /, window: int, most: int = 150) -> Any:
    """Lengths up to ``window``: a list that hypothesis chooses, or a longer one of some shape from a seed."""
    if draw(st.booleans()):
        return draw(st.lists(st.integers(1, window), max_size=most))
    shape = SHAPES[draw(st.sampled_from(sorted(SHAPES)))]
    count = draw(st.integers(most // 2, most))
    return shape(np.random.default_rng(draw(st.integers(0, 999))), window, count).tolist()


@st.composite
def streams(draw: Any, /, **of_packings: Any) -> Any:
    """(method, options, lengths)."""
    method, options = draw(packings(**of_packings))
    return method, options, draw(document_lengths(options["context_window"]))


def packer_for(stream):
    method, options = stream[:2]
    return make_packer(method, **options)


def plan_all(packer, arrivals):
    return packer.plan(arrivals) + packer.drain()


def coverage(segments):
    """Where along each document the number of times that its tokens occur changes, and by how much."""
    changes: Counter[tuple[int, int]] = Counter()
    for document, start, length in segments:
        changes[document, start] += 1
        changes[document, start + length] -= 1
    return {place: change for place, change in changes.items() if change}


def joined(segments):
    """Segments in order, with every piece that continues the one before it joined to that."""
    result: list[Segment] = []
    for document, start, length in segments:
        if start and result and result[-1].document == document and result[-1].start + result[-1].length == start:
            length += result[-1].length
            start = result.pop().start
        result.append(Segment(document, start, length))
    return result


def segments_of(plans):
    return [segment for plan in plans for segment in plan.segments]


def through_json(value):
    return json.loads(json.dumps(value))


def check_plans(plans, method, options, documents):
    """Everything that holds for any plans: completeness, limits, no idle micro-batch, plain data."""
    if method == "sequential":
        assert joined(segments_of(plans)) == joined(documents)
    else:
        assert Counter(segments_of(plans)) == Counter(documents)
    limit = options["context_window"]
    if method == "variable_length":
        limit = int(options["max_length_factor"] * limit)
    if method == "balanced":
        mean = (options.get("global_batch") or options["micro_batches"]) / options["micro_batches"]
        factor = options.get("max_length_factor", "auto")
        limit = math.ceil((max(2 * mean, mean + 1) if factor == "auto" else factor) * limit)
    for number, plan in enumerate(plans):
        assert plan.step == number
        assert len(plan.micro_batches) == options["micro_batches"]
        assert max(micro_batch.tokens for micro_batch in plan.micro_batches) <= limit
        held = [len(micro_batch.segments) for micro_batch in plan.micro_batches]
        assert min(held) > 0 or max(held) <= 1 or method == "balanced"
        assert plan.tokens > 0
        for micro_batch in plan.micro_batches:
            prices = options["workload"].document_seconds(micro_batch.lengths)
            assert np.isclose(micro_batch.workload, prices.sum(), rtol=1e-9, atol=0)
        assert StepPlan.from_json(through_json(plan.to_json())) == plan


def whole_documents(lengths):
    return [Segment(index, 0, length) for index, length in enumerate(lengths)]


ADVERSARIAL = {
    "just over half a window": lambda w: [w // 2 + 1],
    "just over half and whole": lambda w: [w // 2 + 1, w],
    "just over a third": lambda w: [w // 3 + 1],
    "one token and whole": lambda w: [1, w],
    "all outliers of the lower queue": lambda w: [w * 3 // 16],
    "one whole, many short": lambda w: [w] + [1] * (2 * w),
}
