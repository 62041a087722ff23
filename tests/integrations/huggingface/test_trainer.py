"""A balanced ``Trainer``: the weights of one document at a time, exact resuming, and what it refuses."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import shutil
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers.trainer_pt_utils import LabelSmoother

from tests.cases import in_turn
from tests.integrations.huggingface.models import (
    DATA,
    LENGTHS,
    SIZES,
    arguments,
    balanced_trainer,
    model,
    relative,
    transformers,
)
from tests.training.distributed import run_ranks
from wlb.attention import segment_attention
from wlb.errors import UserError
from wlb.integrations.batches import PlannedBatchSampler
from wlb.integrations.huggingface import balanced, register_attention
from wlb.integrations.huggingface.trainer import TrainLoader
from wlb.integrations.packed import FlatteningCollator, packed_batches
from wlb.workload.model_json import shape_of_config


class Recording(list[Any]):
    """Documents that also write down which of them were read in training."""

    def __init__(self) -> None:
        super().__init__(DATA)
        self.seen: list[int] = []

    def forget_the_check(self) -> Any:
        documents = self

        class Callback(transformers.TrainerCallback):
            def on_train_begin(self, *positional: Any, **arguments: Any) -> None:
                documents.seen.clear()

        return Callback()

    def __getitem__(self, number: Any) -> Any:
        self.seen.append(number)
        return super().__getitem__(number)


def train(
    folder: str,
    resume: bool | str = False,
    planning: dict[str, Any] | None = None,
    family: str = "Llama",
    **settings: Any,
) -> tuple[torch.Tensor, list[int], Any]:
    """Weights afterwards, the documents of this process, and the steps."""
    packed, documents = model(family), Recording()
    register_attention(packed)
    trainer = balanced_trainer(folder, packed, documents, planning=planning or {}, **settings)
    trainer.add_callback(documents.forget_the_check())
    trainer.train(resume_from_checkpoint=resume)
    weights = torch.cat([parameter.detach().flatten() for parameter in packed.parameters()])
    return weights, documents.seen, trainer.state.global_step


def one_at_a_time(epochs: int, smoothing: float = 0.0, family: str = "Llama", **planning: Any) -> torch.Tensor:
    """The same steps of plain SGD, a document at a time in one process, by transformers' own attention."""
    oracle = model(family)
    settings: dict[str, Any] = {"context_window": 128, "micro_batches": 2, "hardware": "cpu", "seed": 42}
    planned = PlannedBatchSampler(LENGTHS, epochs=epochs, model=shape_of_config(oracle.config), **settings | planning)
    for plan in planned.steps():
        oracle.zero_grad()
        for segment in plan.segments:
            ids = torch.tensor([DATA[segment.document % len(DATA)]["input_ids"]])
            labelled = sum(s.length - 1 for s in plan.segments)
            scores = oracle(input_ids=ids).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(scores, ids[0, 1:], reduction="sum", label_smoothing=smoothing)
            (loss / labelled).backward()
        with torch.no_grad():
            for parameter in oracle.parameters():
                parameter -= 1e-3 * parameter.grad
    return torch.cat([parameter.detach().flatten() for parameter in oracle.parameters()])


@pytest.mark.proves("Trainer", "resume")
def test_a_trainer_takes_every_document_once_an_epoch_and_resumes_exactly(tmp_path: Path):
    save: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5}
    weights, seen, steps = train(str(tmp_path / "whole"), **save)
    assert Counter(seen) == dict.fromkeys(range(len(DATA)), 2)
    assert relative(weights, one_at_a_time(2)) < 1e-7
    with pytest.warns(UserWarning, match="dataloader_num_workers = 0 in training"):
        train(str(tmp_path / "ahead"), **save, dataloader_num_workers=2, max_steps=7)
    again, rest, of_all = train(str(tmp_path / "ahead"), resume=str(tmp_path / "ahead" / "checkpoint-5"))
    assert torch.equal(again, weights)
    assert of_all == steps
    assert len(rest) < len(seen)


@pytest.mark.proves("Trainer", "experts")
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_a_mixture_of_experts_trains_as_one_document_at_a_time(tmp_path: Path, family: str):
    weights, *_ = train(str(tmp_path), family=family, num_train_epochs=1)
    assert relative(weights, one_at_a_time(1, family=family)) < 1e-7


def test_a_trainer_learns_what_masks_let_without_padding(tmp_path: Path):
    few, none = [], []
    for ids in (document["input_ids"] for document in DATA[:8]):
        padded = {"input_ids": [*ids, 0], "attention_mask": [1] * len(ids) + [0]}
        few.append(padded | {"completion_mask": [0] * (len(ids) - 2) + [1] * 3})
        none.append(padded | {"completion_mask": [0] * (len(ids) + 1)})
    for documents in (few, none):
        packed, oracle = model(), model()
        register_attention(packed)
        trainer = balanced_trainer(tmp_path, packed, documents, num_train_epochs=1, gradient_accumulation_steps=8)
        assert [len(plan.ranks[0]) for plan in trainer._wlb_steps.plans()] == [8]
        trainer._set_signature_columns_if_needed()
        assert {"completion_mask", "loss_mask", "length"} < {*trainer._signature_columns}
        with nullcontext() if documents is few else pytest.warns(UserWarning, match="a step has no labelled token"):
            trainer.train()
        for document in few if documents is few else []:
            ids = torch.tensor([document["input_ids"][:-1]])
            labels = ids.where(torch.tensor([document["completion_mask"][:-1]]) > 0, -100)
            oracle(input_ids=ids, labels=labels, num_items_in_batch=2 * len(few)).loss.backward()
        for trained, expected in zip(packed.parameters(), oracle.parameters(), strict=True):
            change = 0 if expected.grad is None else 1e-3 * expected.grad
            torch.testing.assert_close(trained, expected - change, rtol=1e-9, atol=1e-9)


def test_a_trainer_resumes_with_other_settings_and_loses_nothing(two_processes: list[FoundByRank], tmp_path: Path):
    one, other = two_processes
    seen = Counter([*one.first, *one.apart, *other.apart, *one.together])
    folder, save = str(tmp_path), {**SAVING, "gradient_accumulation_steps": 4}
    shutil.copytree(one.folder, folder, dirs_exist_ok=True)
    seen.update(train(folder, True, **save, max_steps=12, save_only_model=True)[1])
    elastic = {"context_window": 160, "preset": "balanced", "pool": 1, "rank_micro_batches": 3}
    seen.update(train(folder, True, elastic, **save)[1])
    assert seen == dict.fromkeys(range(len(DATA)), 2)


def test_steps_of_other_numbers_of_micro_batches_lose_nothing():
    lengths, seen = [19, 30, 28, 27, 29, 21, 14], Counter[int]()
    for rank in range(2):
        documents: list[Any] = [[number] * length for number, length in enumerate(lengths)]
        planned: dict[str, Any] = {"context_window": 32, "model": "tiny", "micro_batches": 2, "dp": 2, "epochs": 2}
        steps = packed_batches(documents, rank=rank, **planned)
        assert [len(plan.ranks[0]) for plan in steps.plans()] == [2, 3]
        loader, ends = TrainLoader(steps, -1, (0, 0.0, steps.state_dict())), []
        for inputs in loader:
            ends.append(loader.step)
            if loader.step < 3:
                seen.update(inputs["input_ids"][inputs["position_ids"] == 0].tolist())
        assert ends == [0, 1, 1, 1, 1, 3]  # not 2, after which there are more; the last is empty
        assert (inputs["input_ids"].tolist(), inputs["labels"].tolist()) == ([[0]], [[-100]])
        assert (len(loader), loader.all_steps, loader.epoch) == (6, 3, 2.0)
    assert seen == dict.fromkeys(range(len(lengths)), 2)


def test_a_trainer_refuses_to_resume_in_another_order(tmp_path: Path):
    folder = str(tmp_path)
    train(folder, save_strategy="steps", save_steps=2, max_steps=2)
    for name in ("seed", "data_seed"):
        other: dict[str, Any] = {name: 7}
        with pytest.raises(UserError, match="saved with seed = 42 and this run has 7; continue with the saved one"):
            train(folder, True, **other)
    state = tmp_path / "checkpoint-2" / "trainer_state.json"
    plain = json.loads(state.read_text())
    del plain["stateful_callbacks"]["BalancedState"]
    state.write_text(json.dumps(plain))  # as another Trainer saves it
    with pytest.raises(UserError, match="checkpoint-2 has no state of"):
        train(folder, True)


SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
# Before transformers 5.16 a smoothed loss is a mean over its micro-batch, which the check refuses.
SMOOTHS_SUMS = "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters
PLANNINGS: tuple[tuple[dict[str, Any], int, float], ...] = (  # planning, readers of a document, label smoothing
    ({}, 1, 0.0),
    ({"cp": 2}, 2, 0.1 if SMOOTHS_SUMS else 0.0),
    ({"preset": "balanced", "pool": 2, "rank_micro_batches": 3}, 2, 0.0),
)


class FoundByRank(NamedTuple):
    """What one of two processes found."""

    trained: list[tuple[torch.Tensor, list[int], int]]
    # A job in ``folder``, step by step: documents of three steps of one process, of three with a share for each rank,
    # and of three in which both share every micro-batch.
    folder: str
    first: list[int]
    apart: list[int]
    together: list[int]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[FoundByRank]:
    """One start for all tests, as importing transformers takes a process seconds."""
    folder = str(tmp_path_factory.mktemp("resumed"))
    first = train(folder, **SAVING, max_steps=3)[1]
    return run_ranks(2, _find_on_a_rank, str(tmp_path_factory.mktemp("trained")), folder, first)


def _find_on_a_rank(folder: str, resumed: str, first: list[int]) -> FoundByRank:
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")
    trained = _train_on_a_rank(folder)
    apart = train(resumed, True, **SAVING, max_steps=6)[1]
    dist.barrier()  # the checkpoint is there
    together = train(resumed, True, {"cp": 2}, **SAVING, max_steps=9)[1]
    return FoundByRank(trained, resumed, first, apart, together)


def _train_on_a_rank(folder: str) -> list[tuple[torch.Tensor, list[int], int]]:
    with pytest.raises(UserError, match=r"processes have different settings: digest of lengths .*give all the same"):
        # Before the check, in which other documents would be other collectives.
        balanced_trainer(folder, documents=DATA[dist.get_rank() :][:80]).train()
    for trainer_class in (ForgetsProcesses, NeedsItems, RemembersProcesses):
        trainer = balanced_trainer(folder, base=trainer_class, max_steps=1, gradient_accumulation_steps=3)
        with (
            nullcontext()
            if trainer_class is RemembersProcesses
            else pytest.raises(UserError, match=r"the loss of a step is 0.5 times the mean over its labelled tokens")
        ):
            trainer.train()
        assert trainer.state.global_step == (trainer_class is RemembersProcesses)
    predicted = balanced_trainer(folder, per_device_eval_batch_size=2).predict(DATA[:9]).label_ids
    assert [row[row >= 0].tolist() for row in predicted] == [document["input_ids"][1:] for document in DATA[:9]]
    return [
        train(folder, planning=planning, label_smoothing_factor=smoothing, num_train_epochs=1)
        for planning, _, smoothing in PLANNINGS
    ]


@pytest.mark.proves("Trainer")
def test_two_processes_train_as_one(two_processes: list[FoundByRank]):
    ranks = zip(*(of_rank.trained for of_rank in two_processes), strict=True)
    for (planning, readers, smoothing), results in zip(PLANNINGS, ranks, strict=True):
        expected = one_at_a_time(1, smoothing, **planning | {"dp": 2 // planning.get("cp", 1)})
        for weights, _, _ in results:
            assert relative(weights, expected) < 1e-7, planning
        seen = Counter(document for _, documents, _ in results for document in documents)
        assert seen == dict.fromkeys(range(len(DATA)), readers)  # ranks that share micro-batches read the same


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


@in_turn(
    ("settings", "change", "message"),
    [
        ({"num_train_epochs": 1.5}, {}, "num_train_epochs = 1.5"),
        ({"neftune_noise_alpha": 5.0}, {}, "neftune_noise_alpha = 5.0: NEFTune noise shrinks with the tokens of a row"),
        ({}, {"family": "Bloom", "attention": None}, "BloomForCausalLM does not use transformers' AttentionInterface"),
        ({}, {"family": "Mixtral", "output_router_logits": True}, "output_router_logits = True adds a router loss"),
        ({}, {"accepts_loss_kwargs": False}, "takes no num_items_in_batch"),
        (
            {"planning": {"context_window": 64}},
            {},
            r"document \d+ has \d+ tokens, over context_window = 64; raise",
        ),
        ({"planning": {"own_lists": True}}, {}, "own_lists needs a different number of micro-batches on each rank"),
        ({"planning": {"calibrate": 5}}, {}, "the number of steps in an epoch is not known; give max_steps"),
        (
            {},
            {"rope_parameters": DYNAMIC, "max_position_embeddings": 64},
            "over 64 tokens rotary scaling dynamic",
        ),
    ],
)
def test_a_trainer_refuses_what_breaks_packing(
    tmp_path: Path, settings: dict[str, Any], change: dict[str, Any], message: str
):
    packed = model(**change)
    packed.accepts_loss_kwargs = change.get("accepts_loss_kwargs", True)
    with pytest.raises(UserError, match=message):
        balanced_trainer(tmp_path, packed, **settings)


class Saves(transformers.TrainerCallback):
    """The steps and epochs after which a Trainer saves, and after which epochs end and begin."""

    def __init__(self) -> None:
        self.after: list[tuple[int, float]] = []
        self.begun: list[int] = []
        self.ended: list[int] = []

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
        self.begun.append(int(state.epoch or 0))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
        self.ended.append(int(state.epoch))

    def on_save(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
        self.after.append((state.global_step, state.epoch))


def test_the_strategy_of_epochs_saves_when_as_many_documents_are_trained(tmp_path: Path):
    saves = []
    for part, resume in ((5, False), (-1, True)):  # the second goes on in the middle of an epoch
        trainer = balanced_trainer(
            tmp_path, num_train_epochs=3, save_strategy="epoch" if resume else "steps", save_steps=5, max_steps=part
        )
        trainer.add_callback(one := Saves())
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.args.num_train_epochs == 3
        assert (one.begun, one.ended) == (([0, 1, 2], [1, 2, 3]) if resume else ([0], [0]))
        saves.append(one.after)
    steps, (first, *_, last) = trainer.state.global_step, saves[1]
    assert saves[0][0][0] == 5
    assert [round(epoch) for _, epoch in saves[1]] == [1, 2, 3]
    assert first[0] < 0.5 * steps
    assert first[1] >= 1
    assert last == (steps, 3.0)


def test_what_breaks_packing_is_set_right_in_a_copy(tmp_path: Path):
    wrong = {"train_sampling_strategy": "group_by_length", "ignore_data_skip": True, "use_cache": True}
    given = arguments(str(tmp_path), **wrong, accelerator_config={"split_batches": True})
    given.packing, given.padding_free, given.max_length = True, True, 4096  # of SFTConfig
    with pytest.warns(UserWarning, match=r'packing = False, .*max_length = 128, .*split_batches.*use_cache .*"wlb"'):
        trainer = balanced(transformers.Trainer, context_window=128)(model(use_cache=True), given, None, DATA)
    assert not trainer.model.config.use_cache
    assert (given.packing, given.max_length, given.accelerator_config.split_batches) == (True, 4096, True)


def test_a_collator_that_is_not_ours_is_refused(tmp_path: Path):
    class Own(FlatteningCollator):
        pass

    for collator in (transformers.DataCollatorWithFlattening(), transformers.default_data_collator, Own()):
        with pytest.raises(UserError, match=r"the data collator \w+ would have no effect"):
            balanced_trainer(tmp_path, None, DATA, collator)


def test_arguments_are_left_alone_and_planned_by(tmp_path: Path):
    given = arguments(str(tmp_path), num_train_epochs=3, max_steps=2)
    alone = [{"input_ids": [5] * 128}] * 6  # no micro-batch has several, in a stream that does not end
    trainer = balanced(transformers.Trainer, context_window=128)(model(), given, None, alone)
    trainer.train()
    assert (given.num_train_epochs, trainer.state.global_step) == (3, 2)
    trainer.args.gradient_accumulation_steps = 4  # as a search of hyperparameters may
    with pytest.raises(UserError, match=r"train_dataset or args have changed since the steps were planned"):
        trainer.train()


class OwnModel(torch.nn.Module):
    """A model without a configuration, which keeps documents apart by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(97, 16, dtype=torch.float64)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **batch: Any
    ) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids[0])
        heads = hidden[:, None]
        hidden = hidden + segment_attention(heads, heads, heads, batch["cu_seq_lens_q"].diff().tolist())[:, 0]
        scores = hidden @ self.embedding.weight.T
        total = torch.nn.functional.cross_entropy(scores[:-1], labels[0, 1:], reduction="sum")
        return {"loss": total / num_items_in_batch}


def test_a_model_without_a_configuration_is_trained_with_a_shape_to_price_it_by(tmp_path: Path):
    trainer = balanced_trainer(tmp_path, OwnModel(), planning={"model": "tiny"}, max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
    with pytest.raises(UserError, match="OwnModel has no config to price documents by"):
        balanced_trainer(tmp_path, OwnModel())
    with pytest.raises(UserError, match="OwnModel is not a transformers model"):
        register_attention(OwnModel())


def test_a_trainer_without_training_documents_evaluates(tmp_path: Path):
    packed = model()
    register_attention(packed)
    trainer = balanced(transformers.Trainer, context_window=128)(
        packed, arguments(str(tmp_path), per_device_eval_batch_size=90), eval_dataset=DATA
    )
    oracle, total = model(), 0.0
    for document in DATA:
        ids = torch.tensor([document["input_ids"]])
        total += oracle(input_ids=ids, labels=ids, num_items_in_batch=1).loss.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(total / sum(LENGTHS - 1), rel=1e-6)
    with pytest.raises(UserError, match="there are no documents to train; give train_dataset"):
        trainer.train()


def test_a_trainer_refuses_what_it_cannot_train(tmp_path: Path):
    torch.manual_seed(0)
    classifier = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES, pad_token_id=0))
    if importlib.util.find_spec("peft"):
        peft = importlib.import_module("peft")
        prompted = peft.get_peft_model(model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    else:
        prompted = model()
        prompted.peft_config = {"default": SimpleNamespace(is_prompt_learning=True)}
    stream = (document for document in DATA)
    refused: list[tuple[Any, Any, str]] = [
        (classifier, [one | {"label": 1} for one in DATA], "SequenceClassification does not learn the next token"),
        (prompted, DATA, "prompt and prefix tuning put tokens before a row"),
        (None, {"train": DATA, "test": DATA}, "train_dataset is a dict of train, test, not a sequence"),
        (None, stream, "train_dataset is a stream without lengths to plan by"),
    ]
    for of_model, documents, message in refused:
        with pytest.raises(UserError, match=message):
            balanced_trainer(tmp_path, of_model, documents)
    dealt: Any = SimpleNamespace(train_sampling_strategy="batch_rebalance")
    with pytest.raises(
        UserError, match="deals padded documents to ranks, and balanced\\(\\) packed ones; leave it out"
    ):
        balanced(transformers.Trainer, context_window=128)(model(), dealt)
    for name in ("DPOTrainer", "GRPOTrainer", "RewardTrainer"):
        try:
            trainer_class = getattr(importlib.import_module("trl"), name)
        except (ImportError, RuntimeError):  # without TRL, or what this trainer of an old one imports
            trainer_class = type(name, (transformers.Trainer,), {"__module__": f"trl.trainer.{name}"})
        with pytest.raises(UserError, match=f"{name} learns from pairs, rewards or its own generations"):
            balanced(trainer_class, context_window=128)


class Here(NamedTuple):
    """Where a model lets documents attend each other: of the kind given, everywhere else it does not."""

    long: bool = False
    many: bool = False
    training: bool = False


class LeakingAtTimes(transformers.LlamaForCausalLM):
    here = Here()

    def forward(self, *positional: Any, **arguments: Any) -> Any:
        lengths = arguments["cu_seq_lens_q"].diff().tolist()
        leaks = Here(max(lengths) == max(LENGTHS), len(lengths) > 6, self.training)
        if any(leaking and here for leaking, here in zip(leaks, self.here, strict=True)):
            arguments["cu_seq_lens_q"] = arguments["cu_seq_lens_q"][[0, -1]]
        return super().forward(*positional, **arguments)


class ForgetsProcesses(transformers.Trainer):
    def compute_loss(self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None, **more: Any) -> Any:
        return model(**inputs, num_items_in_batch=num_items_in_batch).loss


class NeedsItems(transformers.Trainer):
    """Which has no loss without them."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None, **more: Any) -> Any:
        labels = inputs["labels"][0, 1:]
        scores = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits[0, :-1]
        return torch.nn.functional.cross_entropy(scores, labels, reduction="sum") / num_items_in_batch


class RemembersProcesses(NeedsItems):
    def compute_loss(self, *positional: Any, **more: Any) -> Any:
        return super().compute_loss(*positional, **more) * self.accelerator.num_processes


class DividesByMicroBatches(transformers.Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        loss = loss / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


LETS_DIVIDE = hasattr(transformers.Trainer, "loss_is_scaled_for_ga")  # since transformers 5.19


class LetsTheTrainerDivide(transformers.Trainer):
    loss_is_scaled_for_ga = False


@pytest.mark.parametrize("here", [Here(long=True), Here(many=True), Here(training=True), Here()], ids=str)
def test_the_check_sees_long_documents_many_short_ones_and_training_mode(tmp_path: Path, here: Here):
    leaking = LeakingAtTimes(model().config).double()
    leaking.here = here
    # Where nothing is learnt of any document, the check finds labels of its own.
    unlearnt = [{**document, "loss_mask": [0] * len(document["input_ids"])} for document in DATA]
    trainer = balanced_trainer(tmp_path, leaking, unlearnt if here.training else DATA, max_steps=1)
    leaks = pytest.raises(UserError, match="packed documents give other gradients")
    with leaks if any(here) else nullcontext():
        trainer.train()
    assert trainer.state.global_step == (not any(here))


class AveragedLoss(transformers.Trainer):
    def compute_loss(self, model: Any, inputs: Any, *positional: Any, **arguments: Any) -> Any:
        return model(**inputs).loss


@in_turn(
    ("trainer_class", "message"),
    [
        (AveragedLoss, "packed documents give other gradients"),
        (DividesByMicroBatches, "the loss of a step is 0.25 times the mean over its labelled tokens"),
        *[(LetsTheTrainerDivide, "the loss of a step is 0.25 times the mean over its labelled tokens")] * LETS_DIVIDE,
    ],
)
def test_training_does_not_begin_where_packing_changes_it(tmp_path: Path, trainer_class: Any, message: str):
    changed = model()
    trainer = balanced_trainer(tmp_path, changed, base=trainer_class, gradient_accumulation_steps=4)
    with pytest.raises(UserError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0
    assert all(parameter.grad is None for parameter in changed.parameters())


class OwnLoader(transformers.Trainer):
    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader()


class OwnSampler(transformers.Trainer):
    def _get_train_sampler(self, *positional: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class DropsMicroBatches(transformers.Trainer):
    def get_batch_samples(self, iterator: Any, count: int, device: Any) -> Any:
        batches, items = super().get_batch_samples(iterator, count, device)
        return batches[: len(batches) - (count > 1)], items


def test_what_a_subclass_or_an_attribute_would_replace_is_refused(tmp_path: Path):
    for base, name in ((OwnLoader, "get_train_dataloader"), (OwnSampler, "_get_train_sampler")):
        with pytest.raises(UserError, match=f"{name} of {base.__name__} would have no effect"):
            balanced_trainer(tmp_path, base=base)
    above = type("Above", (balanced(transformers.Trainer, context_window=128),), {**vars(OwnLoader)})
    with pytest.raises(UserError, match="get_train_dataloader of Above would have no effect"):
        above(model(), arguments(str(tmp_path)), None, DATA)
    for name, message in (("data_collator", "the data collator"), ("get_train_dataloader", "get_train_dataloader of")):
        trainer = balanced_trainer(tmp_path)
        setattr(trainer, name, lambda *_: None)
        with pytest.raises(UserError, match=f"{message} .*would have no effect"):
            trainer.train()
    trainer = balanced_trainer(tmp_path)
    trainer.finetuning_args = SimpleNamespace(disable_shuffling=True)
    with pytest.raises(UserError, match=r"disable_shuffling = True would have no effect; give .*shuffle=False"):
        trainer.train()
    with pytest.raises(UserError, match="get_batch_samples gave 1 of 2 micro-batches"):
        balanced_trainer(tmp_path, base=DropsMicroBatches).train()


def test_a_model_that_is_made_when_training_begins_attends_by_documents(tmp_path: Path):
    with pytest.warns(UserWarning, match="use_cache = False"):
        trainer = balanced(transformers.Trainer, context_window=128)(
            args=arguments(str(tmp_path), max_steps=1),
            train_dataset=DATA,
            model_init=lambda: model("GPT2", use_cache=True, attn_pdrop=0.0),
        )
    trainer.train()
    assert trainer.model.config._attn_implementation == "wlb"
    assert not trainer.model.config.use_cache


NEW, OLD = "activation_checkpointing", "gradient_checkpointing"
CHECKPOINTING = NEW if hasattr(transformers.TrainingArguments, NEW) else OLD  # since transformers 5.24


def _count_tokens(module: Any, positional: Any, arguments: dict[str, Any]) -> None:
    module.tokens += arguments["input_ids"].numel()


def test_the_check_changes_nothing_that_is_trained(tmp_path: Path):
    weights = []
    for check in (True, False):
        dropping = model("Starcoder2", residual_dropout=0.1)  # dropout by the layers themselves
        dropping.register_buffer("tokens", torch.zeros(()))
        dropping.register_forward_pre_hook(_count_tokens, with_kwargs=True)
        register_attention(dropping)
        settings = {"max_steps": 2, CHECKPOINTING: True}
        trainer = balanced_trainer(tmp_path, dropping, planning={"check": check}, **settings)
        trainer.train()
        weights.append(torch.cat([value.flatten() for value in dropping.state_dict().values()]))
    assert torch.equal(*weights)


def test_a_trainer_times_micro_batches_but_the_first_and_last_of_a_step(tmp_path: Path):
    trainer = balanced_trainer(tmp_path, planning={"calibrate": 3}, gradient_accumulation_steps=4, max_steps=4)
    trainer.train()
    assert trainer._wlb_steps.calibration.state_dict()["steps"] == 4
    assert len(trainer._wlb_steps.calibration._timed) == 8  # of all steps: too few for prices


class EndsEpochs(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
        control.should_epoch_stop = True


def test_an_epoch_cannot_end_early(tmp_path: Path):
    trainer = balanced_trainer(tmp_path, planning={"check": False})
    trainer.add_callback(EndsEpochs())
    with pytest.raises(UserError, match="a callback set should_epoch_stop, but all epochs are one stream"):
        trainer.train()


@pytest.mark.proves("evaluation")
def test_predictions_have_a_row_for_each_document(tmp_path: Path):
    found = []

    def seen(of: Any) -> dict[str, float]:
        found.append(of)
        return {}

    settings = {"per_device_eval_batch_size": 4, "include_for_metrics": ["inputs"]}
    for trainer_class in (balanced(transformers.Trainer, context_window=128), transformers.Trainer):
        trainer = trainer_class(
            model(),
            arguments(str(tmp_path), **settings),
            None if "Balanced" in trainer_class.__name__ else padded_rows,
            eval_dataset=DATA[:10],
            compute_metrics=seen,
        )
        trainer.evaluate()
        found.append(trainer.predict(DATA[:10]))
    for packed, padded in zip(found[:3], found[3:], strict=True):
        for row, (scores, expected) in enumerate(zip(packed.predictions, padded.predictions, strict=True)):
            length = LENGTHS[row]
            np.testing.assert_allclose(scores[:length], expected[:length], rtol=1e-6, atol=1e-9)
            assert packed.label_ids[row, 1:length].tolist() == DATA[row]["input_ids"][1:]
            assert (packed.label_ids[row, length:] == -100).all()
    assert found[0].inputs[3, : LENGTHS[3]].tolist() == DATA[3]["input_ids"]
    given = arguments(str(tmp_path))
    given.predict_with_generate = True
    with pytest.raises(UserError, match="predict_with_generate = True would generate from packed documents"):
        balanced(transformers.Seq2SeqTrainer, context_window=128)(model(), given)


def padded_rows(documents: Any) -> dict[str, torch.Tensor]:
    longest = max(len(one["input_ids"]) for one in documents)
    rows = {name: torch.full((len(documents), longest), of) for name, of in (("input_ids", 0), ("labels", -100))}
    mask = torch.zeros(len(documents), longest, dtype=torch.int64)
    for row, one in enumerate(documents):
        length = len(one["input_ids"])
        rows["input_ids"][row, :length] = rows["labels"][row, :length] = torch.tensor(one["input_ids"])
        mask[row, :length] = 1
    return rows | {"attention_mask": mask}


def test_samples_in_a_second_count_the_documents_of_all_epochs(tmp_path: Path):
    trainer = balanced_trainer(tmp_path, num_train_epochs=3)
    values: Any = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    assert values[3] == 3 * len(DATA)
