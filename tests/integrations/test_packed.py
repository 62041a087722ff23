"""Packed steps and the collator: tokens, labels and counts are those of the documents, and states are exact."""

import json
import os
import queue
import threading
import warnings
from collections import UserDict
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from tests.cases import in_turn
from tests.limits import HUNG_SECONDS
from tests.training.distributed import run_ranks
from wlb.documents.segments import OverlongReport
from wlb.documents.store.reader import TokenStore, TokenStoreWriter
from wlb.errors import UserError
from wlb.integrations.batches import PlannedBatchSampler
from wlb.integrations.document_fields import ids_and_labels
from wlb.integrations.packed import FlatteningCollator, packed_batches
from wlb.runtime import steps as runtime_steps
from wlb.workload import make_workload

RANDOM = np.random.default_rng(0)
DOCUMENTS = [RANDOM.integers(0, 97, length) for length in RANDOM.integers(2, 60, 80)]
LENGTHS = [len(ids) for ids in DOCUMENTS]
SIZES: dict[str, Any] = {"context_window": 64, "micro_batches": 2, "model": "tiny"}


def masked(documents: list[Any] = DOCUMENTS) -> list[dict[str, Any]]:
    """The same documents as instruction data: the first half of each is a prompt."""
    return [
        {"input_ids": ids.tolist(), "labels": [-100] * (len(ids) // 2) + ids[len(ids) // 2 :].tolist()}
        for ids in documents
    ]


def mixed(documents: list[Any] = DOCUMENTS) -> list[Any]:
    """Documents that learn all or their second half, by each of the fields that may say so, some of them padded."""
    result: list[Any] = []
    for number, (ids, document) in enumerate(zip(documents, masked(documents), strict=True)):
        flags = [int(label != -100) for label in document["labels"]]
        mask = {"input_ids": [*ids.tolist(), 0, 0], "attention_mask": [1] * len(ids) + [0, 0]}
        name = ("completion_mask", "loss_mask")[number % 2]
        result.append((ids, document, mask | {name: [*flags, 1, 1]}, mask)[number % 4])
    return result


def documents_in(batch: Any) -> list[list[int]]:
    return [batch.tokens[a:b].tolist() for a, b in pairwise(batch["cu_seq_lens_q"].tolist())]


@pytest.mark.parametrize("of_stream", [False, True])
def test_documents_that_are_too_long_are_split_without_losing_a_label_and_counted(of_stream):
    documents = [*DOCUMENTS, torch.arange(150) % 97]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        steps = packed_batches(iter(documents) if of_stream else documents, **SIZES)
        planned = [*steps]
    (told,) = [str(one.message) for one in warned]
    assert told.startswith("wlb: some documents have more than context_window = 64 tokens; overlong = 'split'; steps")
    assert steps.overlong == OverlongReport(documents=1, pieces=3, tokens_dropped=0)
    batches = [batch for step in planned for batch in step.batches]
    assert sum(len(batch.tokens) for batch in batches) == sum(LENGTHS) + 150
    assert sum(int((batch.labels >= 0).sum()) for batch in batches) == sum(LENGTHS) + 150 - 81
    assert sum(step.loss_tokens for step in planned) == sum(LENGTHS) + 150 - 81


@in_turn("of_stream", [False, True])
def test_other_policies_for_documents_that_are_too_long(of_stream):
    def taken(overlong):
        documents = [*DOCUMENTS, torch.arange(150) % 97]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            steps = packed_batches(iter(documents) if of_stream else documents, **SIZES, overlong=overlong)
            tokens = sum(len(batch.tokens) for step in steps for batch in step.batches)
        return tokens - sum(LENGTHS), steps.overlong

    assert taken("truncate") == (64, OverlongReport(documents=1, pieces=1, tokens_dropped=86))
    assert taken("drop") == (0, OverlongReport(documents=1, pieces=0, tokens_dropped=150))
    with pytest.raises(UserError, match="document 80 has 150 tokens, over"):
        taken("error")


@in_turn("documents", [DOCUMENTS, masked(), mixed()])
def test_a_stream_gives_the_steps_of_the_same_documents_in_order(documents):
    def of_steps(steps):
        return [[(documents_in(b), b.labels.tolist()) for b in s.batches] + [s.loss_tokens] for s in steps]

    expected = of_steps(packed_batches(documents, **SIZES, shuffle=False))
    assert of_steps(packed_batches(iter(documents), **SIZES)) == expected
    for taken in (0, 3, len(expected) - 1):
        begun = packed_batches(iter(documents), **SIZES)
        head = of_steps(islice(begun, taken))
        state = json.loads(json.dumps(begun.state_dict()))
        assert head + of_steps(packed_batches(iter(documents), **SIZES, state=state)) == expected
    alone: dict[str, Any] = {
        "dp": 2,
        "rank": 1,
    }  # one of two processes, which reads the documents of both to count labels
    assert of_steps(packed_batches(iter(documents), **SIZES, **alone)) == of_steps(
        packed_batches(documents, **SIZES, **alone, shuffle=False)
    )


class Arriving(IterableDataset[Any]):
    """As ``datasets.IterableDataset`` is one, which inherits a ``__getitem__`` that raises."""

    def __iter__(self) -> Any:
        return iter(DOCUMENTS)


def test_an_iterable_data_set_is_a_stream():
    assert contents(packed_batches(Arriving(), **SIZES)) == contents(packed_batches(iter(DOCUMENTS), **SIZES))
    datasets = pytest.importorskip("datasets")
    arriving = datasets.Dataset.from_list(masked()).to_iterable_dataset()
    expected = packed_batches(masked(), **SIZES, shuffle=False)
    assert contents(packed_batches(arriving, **SIZES)) == contents(expected)


def test_what_holds_no_documents_and_what_a_stream_cannot_do_is_refused():
    stream = packed_batches(iter(DOCUMENTS), **SIZES).state_dict()
    refused: list[tuple[Any, dict[str, Any], str]] = [
        ({"train": masked(), "test": masked()}, {}, "documents is a dict of train, test, not a sequence"),
        (UserDict({"input_ids": [[1], [3]]}), {}, r"a UserDict of input_ids.*Dataset.from_dict\(...\)"),
        (masked, {}, "documents is the function masked, .*; give its result"),
        ("corpus.jsonl", {}, r"documents is the path corpus.jsonl, .*; give datasets.load_dataset"),
        *((none, {}, "documents is of type") for none in (DataLoader(Arriving()), {1: [1]}.values(), None, 5)),
        *(([1, one], {}, r"document \d is of type (int|str); give token ids") for one in (2, "text")),
        (DOCUMENTS, {"epochs": 1.5}, "epochs = 1.5 is not a whole number"),
        (iter(DOCUMENTS), {"epochs": 2}, "a stream is one epoch, and epochs = 2"),
        (iter(DOCUMENTS), {"pool": "auto", "dp": 2, "rank": 0}, "a stream has no lengths to choose pools by"),
        (DOCUMENTS, {"state": stream}, "documents = 'a stream' and this run has 80"),
        (DOCUMENTS, {"dp": 0}, "dp = 0 is not a whole number >= 1"),
        (DOCUMENTS, {"cp": "2"}, "cp = '2' is not a whole number >= 1"),
        (DOCUMENTS, {"pool": 3}, "pool = 3 does not divide the dp x cp = 1 ranks"),
        (DOCUMENTS, {"dp": 2}, "dp x cp = 2 is not the number of processes, 1"),
        *((DOCUMENTS, {"calibrate": every}, f"calibrate = {every} is not") for every in (True, -1, 1.5)),
        (DOCUMENTS, {"calibrate": 2, "workload": make_workload("7b")}, "calibrate measures prices, and workload"),
        (DOCUMENTS, {"calibrate": 2, "cp": 2, "rank": 0}, "calibrate cannot time shared"),
        (DOCUMENTS, {"calibrate": 2, "ep": 2, "own_lists": True, "dp": 2, "rank": 0}, "calibrate cannot time shared"),
        (DOCUMENTS, {"ep": 2}, "ep = 2 is for own_lists"),
        (DOCUMENTS, {"own_list": True}, "own_list is not a setting; did you mean own_lists?"),
    ]
    for documents, settings, message in refused:
        with pytest.raises(UserError, match=message):
            packed_batches(documents, **SIZES | {"model": "qwen3-30b-a3b"} | settings)


def test_a_step_that_was_not_measured_stops_the_next():
    steps = packed_batches(DOCUMENTS, **SIZES, calibrate=2)
    next(steps)
    with pytest.raises(UserError, match="the last step was not measured"):
        next(steps)


@pytest.mark.parametrize("of_stream", [False, True])
def test_steps_that_are_over_are_not_looped_over_again_and_broken_off_ones_go_on(of_stream: bool):
    documents = iter(DOCUMENTS) if of_stream else DOCUMENTS
    steps = packed_batches(documents, **SIZES)
    head = contents(islice(steps, 3))
    expected = contents(packed_batches(iter(DOCUMENTS) if of_stream else DOCUMENTS, **SIZES))
    assert head + contents(steps) == expected
    over = "the stream is over; open it again" if of_stream else r"epochs = 1 is over; give epochs= for more passes"
    with pytest.raises(UserError, match=f"all steps were taken: {over}"):
        iter(steps)


def test_a_loop_that_takes_steps_ahead_saves_the_state_after_the_one_that_it_trained():
    expected = contents(packed_batches(DOCUMENTS, **SIZES))
    steps = packed_batches(DOCUMENTS, **SIZES)
    for step, _ in zip(steps, range(2), strict=False):  # takes a third one
        trained = step
    for state, after in ((steps.state_dict(trained), 2), (steps.state_dict(), 3)):
        assert contents(packed_batches(DOCUMENTS, **SIZES, state=json.loads(json.dumps(state)))) == expected[after:]


def test_a_state_of_other_documents_of_the_same_lengths_is_refused(tmp_path: Path):
    alike = RANDOM.integers(0, 97, (35, 20))
    stores = {name: str(tmp_path / name) for name in ("saved", "other", "plain", "plain other")}
    for name, prefix in stores.items():
        with TokenStoreWriter(prefix, vocab_size=97) as writer:
            for ids in alike[::-1] if "other" in name else alike:
                writer.add(ids)
        if "plain" in name:
            Path(f"{prefix}.json").unlink()  # as stores of Megatron-Core
    opened = {name: TokenStore.open(prefix) for name, prefix in stores.items()}
    listed = ({"input_ids": [*ids, 0], "attention_mask": [1] * 20 + [0]} for ids in alike.tolist())
    for saved, same, other in (
        ([*alike], [*listed], [*alike[::-1]]),
        ([*alike], [*alike], [*alike[:17], alike[18], alike[17], *alike[19:]]),
        (opened["saved"], TokenStore.open(stores["saved"]), opened["other"]),
        (opened["plain"], [*alike], opened["plain other"]),
    ):
        steps = packed_batches(saved, **SIZES)
        next(steps)
        state = steps.state_dict()
        assert contents(packed_batches(same, **SIZES, state=state)) == contents(steps)
        with pytest.raises(UserError, match=r"the state was saved with digest of tokens = '.*' and this run has"):
            packed_batches(other, **SIZES, state=state)
    stream = packed_batches(iter(alike), **SIZES)
    next(stream)
    with pytest.raises(UserError, match=r"the stream does not begin with the \d+ trained documents"):
        packed_batches(iter(alike[::-1]), **SIZES, state=stream.state_dict())


def contents(steps: Any) -> list[list[list[list[int]]]]:
    return [[documents_in(batch) for batch in step.batches] for step in steps]


ALIKE = [*RANDOM.integers(0, 97, (40, 20))]


# What one of two processes does otherwise, and what both are told. All left documents out and trained others twice.
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"rank": 0}, "rank = 0, 0, and dp x cp = 2"),
    "dp of all": ({"dp": 4, "rank": None}, "dp x cp = 4 is not the number of processes, 2"),
    "dp": ({"dp": 4, "rank": 1}, "dp = 2 and 4"),
    "seed": ({"seed": 1}, "seed = 0 and 1"),
    "order": ({"documents": DOCUMENTS[::-1]}, "digest of lengths = "),
    "order of documents of equal length": ({"documents": ALIKE[::-1]}, "digest of tokens = "),
    "a share of them": ({"documents": ALIKE[1::2]}, "digest of tokens = "),
    "a share of a stream": ({"documents": ALIKE[1::2]}, "process 1 and process 0 planned different steps"),
    "number": ({"documents": DOCUMENTS[1:]}, "documents = 80 and 79, digest of lengths = "),
    "window": ({"context_window": 96}, "context_window = 64 and 96"),
    "micro-batches": ({"micro_batches": 3}, "micro_batches = 2 and 3"),
    "preset": ({"preset": "wlb-llm"}, "method = 'balanced' and 'variable_length'"),
    "model": ({"model": "7b"}, "prices = "),
    "epochs": ({"epochs": 2}, "epochs = 1 and 2"),
    "state": ({"state": None}, "state = "),
    "calibrate after a state": ({"calibrate": 3}, "calibrate = 0 and 3"),
    "ranks to calibrate": ({"dp": 1, "rank": 0, "calibrate": 3}, "the 2 processes must be the dp x cp = 1 ranks"),
    "stream": (
        {"documents": [*DOCUMENTS[:70], DOCUMENTS[70][:1], *DOCUMENTS[71:]]},
        "process 1 and process 0 planned different steps",
    ),
    "end": ({"documents": DOCUMENTS[:70]}, "process 1 and process 0 planned different steps"),
}


def _told_of_mistakes() -> dict[str, str]:
    told = {}
    trained = packed_batches(DOCUMENTS, **SIZES)
    next(trained)
    for name, (change, _) in MISTAKES.items():
        differs = dist.get_rank() == 1 or name in ("dp of all", "ranks to calibrate")
        documents = ALIKE[::2] if "share" in name else ALIKE if "equal length" in name else DOCUMENTS
        arguments = {"documents": documents, **SIZES, **(change if differs else {})}
        if name == "calibrate after a state" or (name == "state" and not differs):
            arguments["state"] = trained.state_dict()
        if "stream" in name or name == "end":
            arguments["documents"] = iter(arguments["documents"])
        with pytest.raises(UserError) as error:
            list(packed_batches(**arguments))
        told[name] = str(error.value)
    for rows in (DOCUMENTS, iter(DOCUMENTS)):  # and in equal documents nothing differs
        next(packed_batches(rows, **SIZES))
    with pytest.raises(UserError, match="seed"):
        iter(PlannedBatchSampler(LENGTHS, **SIZES, seed=dist.get_rank()))
    planned = PlannedBatchSampler([20] * 20, **SIZES, rank=dist.get_rank())
    share: Any = ALIKE[dist.get_rank() :: 2]
    with pytest.raises(UserError, match="digest of tokens"):
        iter(DataLoader(share, batch_sampler=planned, collate_fn=FlatteningCollator()))
    with pytest.raises(UserError, match="rank = None, None"):  # each would train the documents of both
        iter(PlannedBatchSampler(LENGTHS, **SIZES))
    group, dist.group.WORLD = dist.group.WORLD, None  # as before init_process_group
    steps = packed_batches(DOCUMENTS, **SIZES)
    dist.group.WORLD = group
    with pytest.raises(UserError, match="dp was left out when there was no process group, and now it has 2"):
        next(steps)
    return told


def test_processes_that_would_train_other_plans_are_all_told_so():
    first, second = run_ranks(2, _told_of_mistakes)
    assert first == second
    for name, (_, expected) in MISTAKES.items():
        assert expected in first[name]
        assert "\n" not in first[name]


def _prefetched() -> int:
    """Tokens of a pass in which rank 0 takes steps in a thread while it reduces gradients."""
    model, trained = DistributedDataParallel(Bigrams()), 0
    steps = packed_batches(DOCUMENTS, **SIZES)
    step: Any = next(steps)
    taken, inside = queue.SimpleQueue[Any](), threading.Event()
    gather = runtime_steps.gathered_rows

    def gathers(row: Any, dtype: Any, device: Any, group: Any = None) -> torch.Tensor:
        inside.set()
        return gather(row, dtype, device, group)

    runtime_steps.gathered_rows = gathers
    while step is not None:
        inside.clear()
        ahead = threading.Thread(target=lambda: taken.put(next(steps, None)), daemon=True)
        if dist.get_rank() == 0:
            ahead.start()
            inside.wait(HUNG_SECONDS)
        for batch in step.batches:
            batch.loss(model(batch.tokens)).backward()
            trained += len(batch.tokens)
        if dist.get_rank() == 1:
            ahead.start()
        step = taken.get(timeout=HUNG_SECONDS)
    return trained


def test_steps_may_be_taken_in_a_thread_while_gradients_are_reduced():
    assert sum(run_ranks(2, _prefetched)) == sum(LENGTHS)


def _learnt(documents: list[Any]) -> list[list[int]]:
    """The labels of every document of ``mixed`` but the first, -100 where it does not learn."""
    learnt = [
        ids.tolist() if number % 4 in (0, 3) else labels["labels"]
        for number, (ids, labels) in enumerate(zip(documents, masked(documents), strict=True))
    ]
    return [labels[1:] for labels in learnt]


def test_every_document_learns_what_its_own_fields_say():
    expected = {tuple(ids.tolist()): labels for ids, labels in zip(DOCUMENTS, _learnt(DOCUMENTS), strict=True)}
    seen = []
    for step in packed_batches(mixed(), **SIZES):
        for batch in step.batches:
            for start, stop in pairwise(batch["cu_seq_lens_q"].tolist()):
                ids = tuple(batch.tokens[start:stop].tolist())
                assert batch.labels[start:stop].tolist() == [*expected[ids], -100]
                assert batch.position_ids[start:stop].tolist() == [*range(len(ids))]
                seen.append(ids)
        assert step.loss_tokens == sum(int((batch.labels >= 0).sum()) for batch in step.batches)
    assert sorted(seen) == sorted(expected)
    collated = FlatteningCollator()(mixed())
    assert collated["input_ids"][0].tolist() == [token for ids in DOCUMENTS for token in ids.tolist()]
    assert collated["labels"][0].tolist() == [label for labels in _learnt(DOCUMENTS) for label in (-100, *labels)]
    assert collated["position_ids"][0].tolist() == [place for length in LENGTHS for place in range(length)]
    ends = [0, *np.cumsum(LENGTHS)]
    assert collated["cu_seq_lens_q"].tolist() == collated["cu_seq_lens_k"].tolist() == ends
    assert collated["cu_seq_lens_q"].dtype == torch.int32
    assert collated["max_length_q"] == collated["max_length_k"] == max(LENGTHS)
    assert "attention_mask" not in collated
    with pytest.raises(UserError, match="the batch has no documents"):
        FlatteningCollator()([])


class Bigrams(torch.nn.Module):
    """Scores of the next token by the one before, so that gradients need no attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores = torch.nn.Parameter(torch.randn(97, 97, dtype=torch.float64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.scores[tokens]


def _one_at_a_time(step: Any) -> torch.Tensor:
    """The gradient of a step's documents: the sum over their labelled tokens, divided by their number."""
    model, labelled = Bigrams(), 0
    total = torch.zeros((), dtype=torch.float64)
    for segment in step.plan.segments:
        ids, labels = map(torch.from_numpy, ids_and_labels(mixed()[segment.document]))
        total = total + F.cross_entropy(model(ids[:-1]), labels[1:], reduction="sum")
        labelled += int((labels[1:] != -100).sum())
    (gradient,) = torch.autograd.grad(total / labelled, model.scores)
    return gradient


def _gradient_errors() -> dict[str, float]:
    """The largest of any step, by how processes share the work and what becomes of their gradients."""
    rank, world = dist.get_rank(), dist.group.WORLD
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layouts: dict[str, tuple[dict[str, Any], Any]] = {
        "averaged": ({}, world),
        "neighbours alike, averaged over all": ({"dp": 2, "rank": rank // 2}, world),
        "strides alike, averaged over neighbours": ({"dp": 2, "rank": rank % 2}, halves[rank // 2]),
        "a group, averaged over it": ({"group": halves[rank // 2]}, halves[rank // 2]),
        "context parallelism": ({"cp": 2}, world),
        "summed": ({}, None),
        "stream": ({"documents": iter(mixed())}, world),
    }
    errors = {}
    if rank == 0:  # alone, so the others are not waited for
        next(packed_batches(DOCUMENTS, **SIZES, dp=1))
    for name, (layout, averaged) in layouts.items():
        model = Bigrams()
        trained = DistributedDataParallel(model, process_group=averaged) if averaged else model
        errors[name] = 0.0
        for step in packed_batches(**{"documents": mixed(), **SIZES, **layout}):
            for batch in step.batches:
                if batch.attend is not None:  # by neighbours, in a group that the steps made
                    assert dist.get_process_group_ranks(batch.attend.group) == [rank // 2 * 2, rank // 2 * 2 + 1]
                (batch.loss(trained(batch.tokens)) / (1 if averaged else batch.ranks)).backward()
            errors[name] = float(np.maximum(errors[name], error_of(model, step, averaged)))
    return errors


def error_of(model: Bigrams, step: Any, averaged: Any) -> float:
    gradient = model.scores.grad
    assert gradient is not None
    if not averaged:
        dist.all_reduce(gradient)
    model.scores.grad = None
    return float((gradient - _one_at_a_time(step)).abs().max())


@pytest.mark.proves("packed batches", "context parallelism")
def test_the_loss_of_a_micro_batch_is_right_however_processes_share_the_work():
    for errors in run_ranks(4, _gradient_errors):
        assert all(error < 1e-12 for error in errors.values()), errors


def _losses_without_labels() -> list[str]:
    """Zero in every step, and so is the gradient; what was said."""
    nothing = [{"input_ids": ids, "loss_mask": [0] * len(ids)} for ids in DOCUMENTS[:8]]
    weight = torch.randn(97, 97, requires_grad=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in packed_batches(nothing, **SIZES):
            loss = torch.stack([batch.loss(weight[batch.tokens]) for batch in step.batches]).sum()
            loss.backward()
            assert (step.loss_tokens, loss.detach().item()) == (0, 0.0)
    assert weight.grad is not None
    assert not weight.grad.any()
    return [str(line.message) for line in said]


def test_a_step_without_labels_is_zero_and_reported_by_the_first_rank():
    first, second = run_ranks(2, _losses_without_labels)
    said = "wlb: a step has no labelled token, so its loss and gradients are zero; check its labels and masks"
    assert set(first) == {said}
    assert second == []


def test_documents_that_change_after_they_are_planned_are_refused():
    documents = [{"input_ids": ids.tolist()} for ids in DOCUMENTS]
    steps = packed_batches(documents, **SIZES)
    for document in documents:
        document["input_ids"].append(1)
    with pytest.raises(UserError, match=r"document \d+ changed from \d+ to \d+ tokens"):
        next(steps)


def test_a_store_that_changes_stops_the_loop(tmp_path: Path):
    with TokenStoreWriter(str(tmp_path / "store"), vocab_size=97) as writer:
        for ids in DOCUMENTS:
            writer.add(ids)
    steps = packed_batches(TokenStore.open(str(tmp_path / "store")), **SIZES)
    next(steps)
    os.utime(tmp_path / "store.bin", (0, 0))
    with pytest.raises(UserError, match=r"store\.bin changed while it was in use"):
        next(steps)


def test_batches_arrive_where_the_process_trains(monkeypatch: pytest.MonkeyPatch):
    def devices(**settings: Any) -> set[str]:
        batches = next(packed_batches(DOCUMENTS, **SIZES, **settings)).batches
        return {getattr(batch, name).device.type for batch in batches for name in ("tokens", "labels", "position_ids")}

    monkeypatch.setattr("wlb.integrations.packed.device_of", lambda group: torch.device("meta"))  # for a GPU
    assert devices() == {"cpu"}  # as long as the process has not begun to use it
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert devices() == {"meta"}
    assert devices(device="cpu") == {"cpu"}
    monkeypatch.setattr("wlb.integrations.packed.device_of", lambda group: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    steps = packed_batches(DOCUMENTS, **SIZES)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # as in a thread
    assert steps._device == torch.device("cuda", 3)
