"""The trace has the form that Perfetto and Chrome read, and shows the simulated step."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from tests.simulate.jobs import documents, job
from wlb.job.planner import StepPlanner
from wlb.report.timeline import timeline
from wlb.report.trace import MOST_TRACKS, write_trace

LAYOUTS = [
    {"pp": 4, "cp": 2, "dp": 2},
    {"pp": 1, "dp": 3, "micro_batches": 2},
    {"pp": 2, "virtual_pp": 2, "schedule": "interleaved_1f1b", "micro_batches": 4},
]


def traced(tmp_path, **settings):
    simulated = job("wlb-llm", **settings)
    line = timeline(next(StepPlanner(simulated, documents()).plans()), simulated)
    path = tmp_path / "step.json"
    write_trace(path, {"system": line})
    return line, json.loads(path.read_text(encoding="utf-8"))


def tracks_of(trace):
    return {(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["name"] == "thread_name"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_event_has_the_fields_of_the_format(tmp_path, layout):
    """Trace Event Format: metadata ("M") needs name and args, complete events ("X") also ts, dur, pid and tid."""
    line, trace = traced(tmp_path, **layout)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    metadata = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    assert len(spans) + len(metadata) == len(trace["traceEvents"])
    fields = {"name": str, "cat": str, "pid": int, "tid": int, "args": dict}
    for event in spans:
        assert all(isinstance(event[name], kind) for name, kind in fields.items())
        assert event["ts"] >= 0
        assert event["dur"] > 0
    named = tracks_of(trace)
    assert named == {(event["pid"], event["tid"]) for event in spans}
    assert len(named) == line.job.layout.pp * line.job.layout.dp * line.job.layout.cp

    check_tracks(trace)


def check_tracks(trace):
    """That events of a track follow or contain each other."""
    by_track = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            by_track[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["cat"]))
    slack = 1e-3  # microseconds
    for events in by_track.values():
        outer = sorted(event for event in events if event[2] != "wait")
        for before, after in pairwise(outer):
            assert before[1] <= after[0] + slack
        for start, end, _ in (event for event in events if event[2] == "wait"):
            assert any(begin - slack <= start and end <= stop + slack for begin, stop, _ in outer)


def test_it_shows_the_step(tmp_path):
    line, trace = traced(tmp_path, pp=4, cp=2, dp=2)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(1e6 * line.seconds)
    names = {event["name"] for event in spans}
    assert {"forward 0", "backward 3", "gradient reduction", "optimizer"} <= names
    forward = next(event for event in spans if event["name"] == "forward 2" and event["pid"] == 1)
    assert forward["args"]["tokens"] == line.plan.ranks[1][2].tokens


def test_large_jobs_are_drawn_in_part(tmp_path):
    line, trace = traced(tmp_path, pp=8, cp=16, dp=8, micro_batches=8)
    assert line.job.layout.pp * line.job.layout.cp * line.job.layout.dp > MOST_TRACKS
    assert len(tracks_of(trace)) == 8 * 16
    slowest = int(line.rank_ends.max(axis=0).argmax())
    assert {event["pid"] for event in trace["traceEvents"]} == {slowest}


def test_systems_have_processes_of_their_own(tmp_path):
    line, alone = traced(tmp_path, pp=4, cp=2, dp=2)
    write_trace(tmp_path / "two.json", {"plain-4d": line, "balanced": line})
    trace = json.loads((tmp_path / "two.json").read_text())
    processes = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert processes == ["plain-4d dp 0", "plain-4d dp 1", "balanced dp 0", "balanced dp 1"]
    spans = [[event for event in one["traceEvents"] if event["ph"] == "X"] for one in (alone, trace)]
    assert spans[1] == spans[0] + [event | {"pid": event["pid"] + 2} for event in spans[0]]
    assert trace["otherData"]["balanced"]["seconds"] == alone["otherData"]["system"]["seconds"] == line.seconds
