"""A real Ray cluster of several processes on this machine makes the store that one process makes."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

import wlb.documents.prepare.sources as prepare_sources
from tests.documents.prepare.test_parts import write_corpus
from tests.documents.prepare.test_prepare import contents
from wlb.documents.prepare import prepare_parts, prepare_store, train_tokenizer
from wlb.documents.prepare.on_ray import cluster, map_on_ray
from wlb.documents.prepare.tokenization import BytesTokenizer
from wlb.errors import UserError

ray = pytest.importorskip("ray", reason="Ray is not installed (the extra ray)")


@pytest.fixture(scope="module", autouse=True)
def four_processes():
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_sources, "_TASK_BYTES", (2000, 2000))
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


def test_any_number_of_processes_writes_the_same_bytes(tmp_path, corpus):
    tokenizer = train_tokenizer(corpus, 300)
    prepare_store(corpus, tmp_path / "alone", tokenizer)
    for workers in (1, 2, 4):
        prefix, progress = tmp_path / f"ray-{workers}", list[int]()
        parts = prepare_parts(corpus, prefix, tokenizer, ray="auto", workers=workers, on_progress=progress.append)
        assert parts.missing() == []
        assert len(progress) == 1 + len(parts.tasks)
        assert sum(progress) == corpus.total_bytes
        prepare_store(corpus, prefix, tokenizer)
        assert contents(prefix) == contents(tmp_path / "alone")


@pytest.mark.parametrize("kills", [1, 9])
def test_a_killed_process_loses_nothing(tmp_path, corpus, kills):
    lives, prefix = tmp_path / "lives", tmp_path / "s"
    lives.mkdir()
    for number in range(kills):
        (lives / str(number)).touch()
    tokenizer = DeadlyTokenizer(str(lives))
    if kills > 1:  # more than Ray retries
        with pytest.raises(UserError, match=r"Ray lost a task, and again in 3 retries.*goes on from here$") as caught:
            prepare_parts(corpus, prefix, tokenizer, ray="auto")
        assert "\n" not in str(caught.value)
        assert len(list(lives.iterdir())) == kills - 4
    prepare_parts(corpus, prefix, BytesTokenizer() if kills > 1 else tokenizer, ray="auto")
    assert kills > 1 or not list(lives.iterdir())
    prepare_store(corpus, prefix, BytesTokenizer())
    prepare_store(corpus, tmp_path / "alone", BytesTokenizer())
    assert contents(prefix) == contents(tmp_path / "alone")


def test_a_damaged_source_is_one_line(tmp_path, corpus):
    damaged = tmp_path / "corpus" / "b.jsonl.gz"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"^[^\n]*b\.jsonl\.gz is damaged[^\n]*$"):
        prepare_parts(corpus, tmp_path / "s", BytesTokenizer(), ray="auto")


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
