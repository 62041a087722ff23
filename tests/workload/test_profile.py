import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workload.profiles import PREFIX, analytic_profile, profile_of
from wlb.errors import UserError
from wlb.workload import make_workload, model_shape
from wlb.workload.profile import Measurements, PrefixMeasurements, read_profile, write_profile

TINY = model_shape("tiny")
TOKENS = tuple(2**k for k in range(6, 18))
TABLE = PREFIX.model_dump(mode="json")
QUERIES, KEYS = np.array([16, 64, 256, 1024]), np.array([64, 512, 4096])


def law(queries, keys):
    return 3e-9 * queries * keys + 2e-7 * queries + 1e-8 * keys + 1e-6


def prefix_table(forward, backward):
    return PrefixMeasurements(
        queries=QUERIES.tolist(),
        keys=KEYS.tolist(),
        forward_seconds=forward.tolist(),
        backward_seconds=backward.tolist(),
    )


@st.composite
def measurements(draw):
    tokens = draw(st.lists(st.integers(1, 10**6), min_size=2, max_size=8, unique=True))
    seconds = st.lists(st.floats(1e-7, 1e3), min_size=len(tokens), max_size=len(tokens))
    return Measurements(
        tokens=tuple(sorted(tokens)),
        forward_seconds=tuple(draw(seconds)),
        backward_seconds=tuple(draw(seconds)),
    )


def test_reproduces_the_law_it_was_sampled_from_between_and_beyond_the_samples(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(analytic_profile(TINY, "cpu", TOKENS).model_dump_json())
    measured, law = read_profile(path), make_workload("tiny", "cpu")
    lengths = np.unique(np.geomspace(64, 131_072, 500).astype(int))
    for phase in ("forward", "backward", "both"):
        np.testing.assert_allclose(
            measured.attention_seconds(lengths, phase), law.attention_seconds(lengths, phase), rtol=1e-9
        )
        np.testing.assert_allclose(
            measured.linear_seconds(lengths, phase), law.linear_seconds(lengths, phase), rtol=1e-9
        )
    documents = make_workload(TINY, "cpu", profile=measured)
    np.testing.assert_allclose(documents.document_seconds(lengths), law.document_seconds(lengths), rtol=2e-3)
    beyond = 10**6
    assert measured.attention_seconds(beyond) == pytest.approx(law.attention_seconds(beyond), rel=0.01)
    assert measured.linear_seconds(beyond) == pytest.approx(law.linear_seconds(beyond), rel=1e-3)


@given(measurements(), measurements(), st.lists(st.integers(1, 2 * 10**6), min_size=2, max_size=30))
def test_prices_are_sane_whatever_was_measured(attention, linear, lengths):
    workload = profile_of(TINY, attention, linear)
    ascending = np.unique(lengths)
    documents = make_workload(TINY, "cpu", profile=workload)
    for price in (workload.attention_seconds, documents.document_seconds):
        assert price(0) == 0
        seconds = price(ascending)
        assert np.all(seconds > 0)
        assert np.all(np.diff(seconds / ascending) >= -1e-12 * (seconds / ascending)[1:])
    assert workload.linear_seconds(0) == 0
    assert np.all(np.diff(workload.linear_seconds(ascending)) >= 0)


def test_a_launch_is_shared_by_the_short_documents_of_a_micro_batch():
    launch_bound = Measurements(
        tokens=(64, 128, 4096), forward_seconds=(3e-5, 3e-5, 9e-3), backward_seconds=(6e-5, 6e-5, 2e-2)
    )
    workload = profile_of(TINY, launch_bound, launch_bound)
    assert workload.attention_seconds(64, "forward") == pytest.approx(3e-5 / 2)
    assert workload.attention_seconds(128, "forward") == pytest.approx(3e-5)


def test_a_measured_workload_travels_between_processes():
    workload = make_workload(TINY, profile=analytic_profile(TINY, "cpu", TOKENS))
    copy = pickle.loads(pickle.dumps(workload))
    np.testing.assert_array_equal(copy.document_seconds(TOKENS), workload.document_seconds(TOKENS))
    assert copy == workload


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "version: must be 2"),
        ({"format": "chrome-trace"}, "format: "),
        ({"attention": {"tokens": [8, 8], "forward_seconds": [1, 2], "backward_seconds": [1, 2]}}, "increase"),
        (
            {"attention": {"tokens": [8, 9], "forward_seconds": [1], "backward_seconds": [1, 2]}},
            "forward_seconds has 1 values for 2",
        ),
        ({"linear": {"tokens": [8, 9], "forward_seconds": [1, 0], "backward_seconds": [1, 2]}}, "greater than 0"),
        ({"linear": {"tokens": [8], "forward_seconds": [1], "backward_seconds": [1]}}, "linear.tokens"),
        ({"prefix_attention": TABLE | {"queries": [32, 16]}}, "prefix_attention.queries: sizes must increase"),
        (
            {"prefix_attention": TABLE | {"forward_seconds": [[1, 2]]}},
            "forward_seconds must have 2 rows",
        ),
    ],
)
def test_a_bad_profile_is_named_in_one_line(tmp_path, change, message):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(json.loads(analytic_profile(TINY, "cpu", TOKENS).model_dump_json()) | change))
    with pytest.raises(UserError, match=message) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_profile_is_named(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_profile(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not valid JSON"):
        read_profile(tmp_path / "binary.json")
    with pytest.raises(UserError, match="cannot be written"):
        write_profile(analytic_profile(TINY, "cpu", TOKENS), tmp_path)


def test_a_piece_costs_what_it_costs_alone_and_over_the_keys_before_it(tmp_path):
    path = tmp_path / "profile.json"
    profile = analytic_profile(TINY, "cpu", TOKENS)
    write_profile(profile.model_copy(update={"prefix_attention": PREFIX}), path)
    workload = read_profile(path)
    alone = workload.attention_seconds([16, 32, 24])
    np.testing.assert_allclose(workload.piece_seconds([64, 128, 0], [80, 160, 24]) - alone, [2, 8, 0], atol=1e-12)


def test_any_bilinear_law_is_met_between_its_samples():
    forward = law(QUERIES[:, None], KEYS)
    table = prefix_table(forward, 2 * forward)
    queries, keys = np.meshgrid(np.arange(16, 1025, 7), np.arange(64, 4097, 31))
    np.testing.assert_allclose(table.price(queries, keys, "forward"), law(queries, keys), rtol=1e-9)
    np.testing.assert_allclose(table.price(queries, keys, "both"), 3 * law(queries, keys), rtol=1e-9)


def test_beyond_the_samples():
    table = prefix_table(law(QUERIES[:, None], KEYS), law(QUERIES[:, None], KEYS))
    largest = table.price(1024, 4096, "forward")
    assert table.price(2048, 8192, "forward") == pytest.approx(4 * largest)
    assert table.price(1, 512, "forward") == table.price(16, 512, "forward")  # a tile that is not full
    assert table.price(16, 32, "forward") == pytest.approx(table.price(16, 64, "forward") / 2)
    assert table.price([0, 16], [64, 0], "both").tolist() == [0, 0]


@given(
    st.lists(st.floats(1e-7, 1e3), min_size=12, max_size=12),
    st.tuples(st.integers(1, 10**5), st.integers(0, 10**5)),
    st.tuples(st.integers(0, 10**5), st.integers(0, 10**5)),
)
def test_more_work_never_costs_less_whatever_was_measured(seconds, size, more):
    measured = np.reshape(seconds, (len(QUERIES), len(KEYS)))
    table = prefix_table(measured, measured)
    (queries, keys), (more_queries, more_keys) = size, more
    less = table.price(queries, keys, "both")
    assert table.price(queries + more_queries, keys + more_keys, "both") >= less * (1 - 1e-12)
