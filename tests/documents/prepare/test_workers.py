"""Work in other processes, of this machine or of a Ray cluster, comes back in order or is one clear line."""

import os
import signal
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from tests.documents.prepare.corpora import write_corpus
from wlb.documents.prepare import prepare_shards, prepare_store, train_tokenizer
from wlb.documents.prepare.tokenization import BytesTokenizer
from wlb.documents.prepare.workers import _IN_FLIGHT, cluster, map_in_order, map_on_ray
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError


def slow_for_early(number):
    time.sleep(0.05 if number < 2 else 0)
    return number * number


def refuse_seven(number):
    if number == 7:
        raise UserError("seven is refused")
    return number


def die(number):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_order_and_items_are_taken_as_needed(workers):
    taken = []

    def items():
        for number in range(40):
            taken.append(number)
            yield number

    for position, result in enumerate(map_in_order(slow_for_early, items(), workers)):
        assert result == position * position
        assert len(taken) <= position + _IN_FLIGHT * workers
    assert taken == list(range(40))


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_of_the_function_are_raised_here(workers):
    results = map_in_order(refuse_seven, range(100), workers)
    with pytest.raises(UserError, match="seven is refused"):
        list(results)


def test_a_killed_worker_is_one_clear_line():
    with pytest.raises(UserError, match=r"worker process was killed.*--workers"):
        list(map_in_order(die, range(3), 2))


@pytest.fixture(scope="module")
def ray():
    """A cluster of several processes on this machine."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (the extra ray)")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


@dataclass
class DeadlyTokenizer(BytesTokenizer):
    """Kills its process for the text of ``d20.txt``, as often as there are files in ``lives`` to take away."""

    lives: str

    def encode(self, text):
        if text.startswith("text 20 "):
            for life in Path(self.lives).iterdir():
                life.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(text)


def test_shards_made_on_ray_are_the_store(tmp_path, corpus, ray):
    tokenizer = train_tokenizer(corpus, 300)
    alone = prepare_store(corpus, tmp_path / "alone", tokenizer)
    progress = list[int]()
    report = prepare_shards(corpus, tmp_path / "ray", tokenizer, ray="auto", shards=3, on_progress=progress.append)
    assert len(progress) == 3
    assert report.to_json() | {"files": None} == alone.to_json() | {"files": None}
    assert np.array_equal(TokenStore.open(tmp_path / "ray-*-of-3").lengths, TokenStore.open(tmp_path / "alone").lengths)


@pytest.mark.parametrize("kills", [1, 9])
def test_a_process_killed_on_ray_loses_nothing(tmp_path, corpus, ray, kills):
    lives, prefix = tmp_path / "lives", tmp_path / "s"
    lives.mkdir()
    for number in range(kills):
        (lives / str(number)).touch()
    tokenizer = DeadlyTokenizer(str(lives))
    if kills > 1:  # more than Ray retries
        with pytest.raises(UserError, match=r"Ray lost a task, and again in 3 retries.*continues from here$") as caught:
            prepare_shards(corpus, prefix, tokenizer, ray="auto")
        assert "\n" not in str(caught.value)
        assert len(list(lives.iterdir())) == kills - 4
    prepare_shards(corpus, prefix, BytesTokenizer() if kills > 1 else tokenizer, ray="auto")
    assert kills > 1 or not list(lives.iterdir())
    prepare_store(corpus, tmp_path / "alone", BytesTokenizer())
    tokens = b"".join((tmp_path / f"s-{index}-of-4.bin").read_bytes() for index in range(1, 5))
    assert tokens == (tmp_path / "alone.bin").read_bytes()
    with pytest.raises(UserError, match=r"all 4 shards .* exist; choose another --out or pass --overwrite"):
        prepare_shards(corpus, prefix, BytesTokenizer(), ray="auto")


class Uninstalled:
    """A function of a package that the processes of Ray lack."""

    def __call__(self, item):
        return item

    def __reduce__(self):
        return import_module, ("not_installed_here",)


def test_a_node_without_the_package_is_one_line(ray):
    with pytest.raises(UserError, match=r"^a node of the Ray cluster cannot run .*'not_installed_here'.* all nodes$"):
        list(map_on_ray(Uninstalled(), [1]))


def test_a_cluster_that_is_not_there_is_one_line(ray, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with (
        pytest.raises(UserError, match=r"^no Ray cluster at 127\.0\.0\.1:1: .*; start one with ray start"),
        cluster("127.0.0.1:1"),
    ):
        pass
