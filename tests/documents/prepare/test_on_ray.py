"""A real Ray cluster of several processes on this machine makes shards of the store that one process makes."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from tests.documents.prepare.corpora import write_corpus
from wlb.documents.prepare import prepare_shards, prepare_store, train_tokenizer
from wlb.documents.prepare.processes import cluster, map_on_ray
from wlb.documents.prepare.tokenization import BytesTokenizer
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError

ray = pytest.importorskip("ray", reason="Ray is not installed (the extra ray)")


@pytest.fixture(scope="module", autouse=True)
def four_processes():
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
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


def test_shards_of_several_processes_are_the_store(tmp_path, corpus):
    tokenizer = train_tokenizer(corpus, 300)
    alone = prepare_store(corpus, tmp_path / "alone", tokenizer)
    progress = list[int]()
    report = prepare_shards(corpus, tmp_path / "ray", tokenizer, ray="auto", shards=3, on_progress=progress.append)
    assert len(progress) == 3
    assert report.to_json() | {"files": None} == alone.to_json() | {"files": None}
    assert np.array_equal(TokenStore.open(tmp_path / "ray-*-of-3").lengths, TokenStore.open(tmp_path / "alone").lengths)


@pytest.mark.parametrize("kills", [1, 9])
def test_a_killed_process_loses_nothing(tmp_path, corpus, kills):
    lives, prefix = tmp_path / "lives", tmp_path / "s"
    lives.mkdir()
    for number in range(kills):
        (lives / str(number)).touch()
    tokenizer = DeadlyTokenizer(str(lives))
    if kills > 1:  # more than Ray retries
        with pytest.raises(UserError, match=r"Ray lost a task, and again in 3 retries.*goes on from here$") as caught:
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


def test_a_node_without_the_package_is_one_line():
    with pytest.raises(UserError, match=r"^a node of the Ray cluster cannot run .*'not_installed_here'.* all nodes$"):
        list(map_on_ray(Uninstalled(), [1]))


def test_a_cluster_that_is_not_there_is_one_line(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with (
        pytest.raises(UserError, match=r"^no Ray cluster at 127\.0\.0\.1:1: .*; start one with ray start"),
        cluster("127.0.0.1:1"),
    ):
        pass
