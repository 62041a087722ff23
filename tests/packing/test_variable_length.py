"""The thresholds chosen are the best of those tried, and change when the documents do and only then."""

from tests.packing.streams import WORKLOADS
from wlb.documents.synthetic import sample_lengths
from wlb.packing.registry import make_packer
from wlb.packing.variable_length import VariableLengthPacker

JOB = {"micro_batches": 4, "context_window": 256, "workload": WORKLOADS["7b"]}
HEAVY = sample_lengths(4000, 256, seed=1, tail_share=0.3).tolist()
LIGHT = [length % 16 + 1 for length in HEAVY]


def tuner():
    return make_packer("variable_length", outlier_thresholds="auto", **JOB)


def chosen(one, lengths, at_once):
    """What a tuner answers to ``lengths`` in pieces, where that is not "no change"."""
    answers = [one._observe(lengths[start : start + at_once]) for start in range(0, len(lengths), at_once)]
    return [answer for answer in answers if answer is not None]


def test_tunes_again_on_drift_and_not_without(monkeypatch):
    monkeypatch.setattr(VariableLengthPacker, "_SAMPLE_STEPS", 24)
    one = tuner()
    assert len(chosen(one, HEAVY, 7)) == 1
    assert chosen(one, HEAVY[::-1], 7) == []
    for moved in (LIGHT * 6, HEAVY * 2):
        assert len(chosen(one, moved, 7)) in (1, 2)  # the first sample after the change holds some of both
        assert chosen(one, moved, 7) == []


def test_thresholds_do_not_depend_on_how_documents_arrive(monkeypatch):
    monkeypatch.setattr(VariableLengthPacker, "_SAMPLE_STEPS", 8)
    lengths = HEAVY[:600] + LIGHT[:1200] + HEAVY[600:900]
    outcomes = []
    for at_once in (1, 13, len(lengths)):
        packer = make_packer("variable_length", outlier_thresholds="auto", **JOB)
        plans = [
            plan for start in range(0, len(lengths), at_once) for plan in packer.plan(lengths[start : start + at_once])
        ]
        outcomes.append((plans, packer.state_dict()))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0][1]["tuned_shares"] is not None
