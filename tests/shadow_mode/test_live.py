"""A loop under shadow mode trains the same batches, and what is found is exact by a clock that is."""

import copy
import pickle
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import optimizer
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import wlb
from tests.training.distributed import run_ranks
from wlb.cli.app import app
from wlb.errors import UserError
from wlb.shadow_mode.gain import gain_of
from wlb.shadow_mode.live import Shadow
from wlb.workload.fitted import FittedPrices

TRUE = FittedPrices(square=2e-9, token=3e-6, fixed=4e-3, r_squared=1.0)
SECONDS = [0.0]  # of the injected clock


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "thread_time", lambda: SECONDS[0])


class Loader:
    """Packed batches of random documents, with what else a loader has."""

    dataset = "documents"

    def __init__(self, count: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.epoch, self.batches = 0, [rng.lognormal(5, 1, 6).astype(int) + 1 for _ in range(count)]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for lengths in self.batches:
            positions = torch.cat([*map(torch.arange, lengths.tolist())])[None]
            yield {"input_ids": torch.zeros_like(positions), "position_ids": positions, "lengths": lengths.tolist()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, input_ids: Any, lengths: Any, **_: Any) -> Any:
        SECONDS[0] += TRUE.seconds(lengths)
        return self.weight.sum()


def train(loader: Any, model: nn.Module, accumulate: int = 2) -> list[Any]:
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for _ in range(2)]
    seen = []
    for number, batch in enumerate(loader, 1):
        seen.append(batch["lengths"])
        model(batch["input_ids"], **{name: batch[name] for name in ("lengths", "position_ids")}).backward()
        if number % accumulate == 0:
            for optimizer in optimizers:
                optimizer.step()
            SECONDS[0] += 100  # logging, evaluation, ... are no part of a micro-batch
    return seen


def test_a_loader_is_passed_through_and_prices_are_found(capsys: pytest.CaptureFixture[str]):
    loader = Loader(40)
    shadowed: Any = wlb.shadow(loader, every=10)
    shadowed.set_epoch(3)
    assert (len(shadowed), shadowed.dataset, loader.epoch) == (40, "documents", 3)
    assert not hasattr(shadowed, "sampler")
    assert train(shadowed, Model()) == [lengths.tolist() for lengths in loader.batches]
    prices = shadowed.gain.prices
    assert (prices.square, prices.token, prices.fixed) == pytest.approx((TRUE.square, TRUE.token, TRUE.fixed))
    assert shadowed.gain.measured == pytest.approx(sum(TRUE.seconds(lengths) for lengths in loader.batches) / 20)
    said = capsys.readouterr().out
    assert "step 11, the last 11: step 0.0191 s measured" in said
    assert "(padding 1.00x, no balance on one process)" in said
    assert "wlb shadow: keep what you have" in said


def test_a_model_is_watched_while_it_trains():
    model, loader = Model(), Loader(40)
    watched: Any = wlb.shadow(model)
    with torch.no_grad():
        model(torch.zeros(1), lengths=[5])
    model.eval()
    model(torch.zeros(1), lengths=[5])
    model.train()
    train(loader, model)
    gain = watched.close()
    assert gain.steps == 20
    assert gain.prices.square == pytest.approx(TRUE.square)
    train(loader, model)
    assert watched.close().steps == 20


def test_lengths_may_be_a_function_of_the_batch():
    shadowed: Any = wlb.shadow(Loader(20), lengths=lambda batch: batch["lengths"])
    train(shadowed, Model())
    assert shadowed.gain.prices.token == pytest.approx(TRUE.token)


def test_what_fails_in_measuring_is_told_once_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def broken(*_: Any) -> None:
        raise RuntimeError("no disk")

    model, whole = Model(), len(Loader(40))
    failing: dict[str, dict[str, Any]] = {
        "TypeError": {"lengths": lambda batch: 1 + batch},
        "RuntimeError: no disk": {"tensorboard": SimpleNamespace(add_scalar=broken)},
        "UserError: profile": {"profile": tmp_path / "none" / "prices", "model": "550m"},
    }
    for message, settings in failing.items():
        assert len(train(wlb.shadow(Loader(40), every=4, **settings), model)) == whole
        said = capsys.readouterr().out
        assert f"wlb shadow: process 0: {message}" in said
        assert said.count("; nothing is measured from here on") == 1
    watched: Any = wlb.shadow(model)
    monkeypatch.setattr("wlb.shadow_mode.live.lengths_of", broken)
    assert len(train(Loader(40), model)) == whole
    assert watched.close() is None
    assert capsys.readouterr().out.count("no disk; nothing is measured from here on") == 1


def test_a_loop_that_is_left_early_is_reported_without_waiting(monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []
    taken = Shadow._taken
    monkeypatch.setattr(Shadow, "_taken", lambda self, wait: waits.append(wait) or taken(self, wait))  # type: ignore[func-returns-value]
    for batches in (20, 50):
        shadowed: Any = wlb.shadow(Loader(40))
        train((batch for batch, _ in zip(shadowed, range(batches), strict=False)), Model())
        assert shadowed.gain.steps == min(batches, 40) // 2
    assert waits == [0.0, 5.0]


def test_copies_and_compiled_graphs_of_a_watched_model_are_not_measured():
    watched: Any = wlb.shadow(model := Model())
    others: list[Any] = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.compile(model, backend="eager")]
    for other in others:
        assert len(train(Loader(4), other)) == 4
    assert watched.close() is None


def test_what_torch_compile_returns_is_measured():
    model: Any = torch.compile(Model(), backend="eager")
    watched: Any = wlb.shadow(model)
    train(Loader(20), model)
    assert watched.close().steps == 10


def test_passes_add_up_and_keep_nothing_open():
    loader: Any = wlb.shadow(Loader(10), every=3)
    alone = len(optimizer._global_optimizer_pre_hooks)
    for passes in range(1, 4):
        train(loader, Model())
        assert loader.gain.steps == 5 * passes
        assert len(optimizer._global_optimizer_pre_hooks) == alone


def test_shadows_of_loader_and_model_do_not_measure_each_other(monkeypatch: pytest.MonkeyPatch):
    def planning(*arguments: Any, **settings: Any) -> Any:
        SECONDS[0] += 50
        return gain_of(*arguments, **settings)

    monkeypatch.setattr("wlb.shadow_mode.live.gain_of", planning)
    model, loader = Model(), Loader(40)
    watched: Any = wlb.shadow(model, every=3)
    shadowed: Any = wlb.shadow(loader, every=3)
    train(shadowed, model)
    for gain in (shadowed.gain, watched.close()):
        assert gain.measured == pytest.approx(sum(TRUE.seconds(lengths) for lengths in loader.batches) / 20)


def test_micro_batches_without_an_optimizer_are_told(capsys: pytest.CaptureFixture[str]):
    for _ in wlb.shadow(Loader(1100)):
        pass
    assert "no torch optimizer stepped in 1024 micro-batches; " in capsys.readouterr().out


def test_values_are_logged(monkeypatch: pytest.MonkeyPatch):
    rows: list[tuple[str, float, int]] = []
    run = SimpleNamespace(log=lambda values, commit: rows.extend((*row, -1) for row in values.items()))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    writer = SimpleNamespace(add_scalar=lambda *row: rows.append(row))
    train(wlb.shadow(Loader(20), every=5, tensorboard=writer), Model())
    steps = [step for name, _, step in rows if name == "wlb_shadow/speed"]
    assert steps == [6, -1, 10, -1]


def test_the_profile_is_taken_by_check(tmp_path: Path):
    path = tmp_path / "prices.json"
    train(wlb.shadow(Loader(40), profile=path, model="550m"), Model())
    asked = ["check", "synthetic:500:8K", "--gpus", "2", "--context-window", "8K"]
    result = CliRunner().invoke(app, [*asked, "--profile", str(path)])
    assert result.exit_code == 0, result.output


class Stateful(DataLoader[Any]):
    """Like torchdata's: its state is that of the iterator it made last."""

    counts: Any = None

    def __iter__(self) -> Any:
        self.counts = count()
        return (batch for batch, _ in zip(super().__iter__(), self.counts, strict=False))

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": int(repr(self.counts)[6:-1])}


def batched(rows: list[Any]) -> dict[str, Any]:
    return {"input_ids": torch.stack(rows), "lengths": [len(row) for row in rows]}


def test_a_loader_stays_the_loader_that_it_is(capsys: pytest.CaptureFixture[str]):
    documents: Any = [torch.arange(8) for _ in range(16)]
    loader = Stateful(documents, batch_size=2, collate_fn=batched)
    shadowed = wlb.shadow(loader)
    assert shadowed is loader
    assert [loader.state_dict()["yielded"] for _ in shadowed] == [*range(1, 9)]
    for copied in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert type(copied) is Stateful
    with torch.no_grad():  # as in an evaluation
        assert len([*shadowed]) == 8
    assert capsys.readouterr().out.count("the gain is unknown") == 1


def test_a_loader_has_one_shadow(capsys: pytest.CaptureFixture[str]):
    loader: Any = Loader(20)
    for _ in range(3):  # as in a loop over epochs
        train(wlb.shadow(loader), Model())
        assert capsys.readouterr().out.count("step 10, the last 10: ") == 1
        assert loader.gain.steps == 10


class Reopened(Loader):
    def __reduce__(self) -> Any:
        return Reopened, (len(self),)


def test_a_copy_is_made_as_its_class_says():
    copied = copy.copy(wlb.shadow(Reopened(7)))
    assert type(copied) is Reopened
    assert len(copied) == 7


class Sealed(DataLoader[Any]):
    def __init_subclass__(cls, key: int) -> None: ...


def test_a_loader_that_cannot_stay_what_it_is_is_refused():
    documents: Any = [torch.arange(8)]
    with pytest.raises(UserError, match=r"__init_subclass__.*; give wlb.shadow the model"):
        wlb.shadow(Sealed(documents))


class Own(list[Any]):
    """Its own iterator, as Lightning's ``CombinedLoader``."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if not self:
            raise StopIteration
        return self.pop(0)


def test_whatever_can_be_looped_over_can_be_a_loader():
    batches = [*Loader(20)]
    loaders: list[Any] = [batches, tuple(batches), iter(batches), (batch for batch in batches), Own(batches)]
    for loader in loaders:
        shadowed: Any = wlb.shadow(loader)
        assert len(train(shadowed, Model())) == 20
        assert shadowed.gain.steps == 10


def test_settings_are_checked():
    with pytest.raises(UserError, match="every = 0 is not a whole number"):
        wlb.shadow(Loader(1), every=0)
    with pytest.raises(UserError, match="profile needs the shape of a model"):
        wlb.shadow(Loader(1), profile="prices.json")
    for wrong in ({"every": "100"}, {"lengths": [3, 4]}, {"tensorboard": "runs"}, {"model": "llama9"}):
        with pytest.raises(UserError, match=r"; (give|did you mean) "):
            wlb.shadow(Loader(1), **wrong)
    with pytest.raises(UserError, match=r"wlb\.shadow got a NoneType; give the loader"):
        wlb.shadow(None)
    with pytest.raises(UserError, match="loop over your loader"):
        list(wlb.shadow(Model()))
    with pytest.raises(UserError, match=r"model has no known shape: .* give a name"):
        wlb.shadow(Loader(1), model=Model())


def _one_rank(batches: tuple[int, int], broken: int | None = None) -> Any:
    time.thread_time = lambda: SECONDS[0]
    rank = dist.get_rank()
    lengths = (lambda batch: 1 + batch) if rank == broken else None
    loader: Any = wlb.shadow(Loader(batches[rank], seed=rank), every=4, lengths=lengths)
    for _ in range(2):  # passes
        train(loader, Model())
    if loader.gain is None:
        return None
    return loader.gain.steps, loader.gain.speed, loader.gain.prices.square


@pytest.mark.parametrize(("batches", "steps"), [((40, 40), 40), ((24, 40), 24), ((40, 24), 24)])
def test_processes_of_unequal_loaders_do_not_wait(batches: tuple[int, int], steps: int):
    (found, speed, square), other = run_ranks(2, _one_rank, batches)
    assert other is None
    assert found == steps
    assert speed > 1.05
    assert square == pytest.approx(TRUE.square)


def test_a_process_that_measures_no_more_is_told_on_the_first():
    assert run_ranks(2, _one_rank, (12, 12), 1) == [None, None]


def _without_store() -> Any:
    dist.ProcessGroup.get_group_store = None  # type: ignore[method-assign,assignment]
    return _one_rank((20, 20))


def test_without_a_store_the_first_process_is_measured_alone():
    (steps, *_), other = run_ranks(2, _without_store)
    assert (steps, other) == (20, None)
