"""A job whose ranks are killed goes on as if nothing had happened, as long as it gets anywhere."""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.programs import Program, forked
from tests.training.jobs import VOCABULARY, endless, read_steps, write_config
from tests.training.processes import (
    process,
    ranks_of,
    reserved_port,
    steps_written,
    wait_until,
)
from wlb.documents.store.reader import TokenStoreWriter
from wlb.training.checkpoint.files import HIDDEN

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrun_two_nodes.sh"


MOMENTS = ("between steps", "in a checkpoint", "at the start")
EVERY = 3  # steps between checkpoints
START_SECONDS = 6.0  # ranks take about so long until their first step
COMPARED = ("step", "document_ids", "loss", "grad_norm", "learning_rate", "tokens")


@contextmanager
def running(folder: Path, documents: int, preset: str) -> Iterator[Program]:
    """An epoch of short and long ``documents`` on two processes, in small steps."""
    lengths = np.random.default_rng(5).integers(8, 201, documents)
    folder.mkdir()
    with TokenStoreWriter(folder / "store", vocab_size=VOCABULARY) as writer:
        for length in lengths:
            writer.add(np.random.default_rng(length).integers(0, VOCABULARY, length))
    config = write_config(
        folder,
        preset,
        parallel={"dp": 2},
        packing={"global_batch": 2},
        training={"steps": None},
        checkpoint={"dir": str(folder / "checkpoints"), "every": EVERY},
    )
    with forked("-m", "wlb", "train", config) as program:
        for stream in (program.stdout, program.stderr):
            threading.Thread(target=stream.read, daemon=True).start()  # or the job would wait for a reader
        yield program


def kill_a_rank(job: Program, folder: Path, moment: str, step: int, rng: random.Random) -> bool:
    """SIGKILL at ``moment``, when ``step`` is written; whether there was a rank to kill."""

    def wait(condition: Callable[[], bool]) -> None:
        wait_until(lambda: job.poll() is not None or condition())

    if moment == "at the start":  # of the restart after the kill before
        wait(lambda: bool(ranks_of(job.pid)))
        time.sleep(rng.uniform(0, START_SECONDS))
    else:
        wait(lambda: steps_written(folder) >= step)
    if moment == "in a checkpoint":
        wait(lambda: any((folder / "checkpoints").glob(f"{HIDDEN}*")))
    elif moment == "between steps":
        time.sleep(rng.uniform(0, 0.5))
    ranks = ranks_of(job.pid)
    if job.poll() is not None or not ranks:
        return False
    os.kill(rng.choice(ranks), signal.SIGKILL)
    wait(lambda: not set(ranks) & set(ranks_of(job.pid)))
    return True


# That level steps and those of other layouts resume with the same bits, test_checkpointer proves without kills.
@pytest.mark.parametrize(("kills", "documents"), [(2, 30), pytest.param(30, 900, marks=pytest.mark.exhaustive)])
def test_kills_at_random_moments_change_nothing(tmp_path, kills, documents):
    """The same bits as of a job left in peace, and every document exactly once."""
    rng = random.Random(1)
    with running(tmp_path / "peaceful", documents, "balanced") as job:
        assert job.wait() == 0
    expected, disturbed = read_steps(tmp_path / "peaceful"), tmp_path / "disturbed"
    with running(disturbed, documents, "balanced") as job:
        steps = [1 + int(kill / kills * (len(expected) - 2 * EVERY)) for kill in range(kills)]
        killed = [kill_a_rank(job, disturbed, MOMENTS[n % 3], step, rng) for n, step in enumerate(steps)]
        assert job.wait() == 0
    assert sum(killed) >= kills - 1
    actual = read_steps(disturbed)
    assert [[row[key] for key in COMPARED] for row in actual] == [[row[key] for key in COMPARED] for row in expected]
    assert sorted(document for row in actual for document in row["document_ids"]) == list(range(documents))


@pytest.mark.exhaustive  # test_elastic_machines kills one, too
def test_two_nodes_survive_a_kill_on_one_of_them(folder):
    """Two torchrun agents on this machine, each with one process of a job, started as on two machines."""
    options = (endless(folder), "--set", "training.steps=40")
    with ExitStack() as stack:
        endpoint = f"localhost:{stack.enter_context(reserved_port())}"
        agent = partial(process, EXAMPLE, endpoint, "1", *options, program="bash", PYTHON=sys.executable)
        one, other = (stack.enter_context(agent()) for _ in range(2))
        wait_until(lambda: steps_written(folder) >= 7)
        os.kill(ranks_of(other.pid)[0], signal.SIGKILL)
        for node in (one, other):
            _, err = node.communicate()
            assert node.returncode == 0, err
    rows = read_steps(folder)
    assert [row["step"] for row in rows] == list(range(1, 41))
    trained = [document for row in rows for document in row["document_ids"]]
    assert len(trained) == len(set(trained))
