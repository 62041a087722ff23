"""A store in parts: one file of tokens for each task of a corpus, made by any number of processes on any machines.

``PREFIX.parts`` is a directory, which appears with its ``manifest.json``: which corpus it is, how it is divided into
tasks, and how it is tokenised. A process with other arguments is refused. The part of a task is written under a name of
its own and renamed when it is on the disk. So a part is whole or not there, what was killed is done again by whoever
comes next, and two processes that do the same task do no harm. The store is the parts in the order of their tasks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from wlb.documents.prepare.batches import TokenizedBatch
from wlb.documents.prepare.sources import CorpusTask
from wlb.documents.store.index import index_path, store_path
from wlb.errors import UserError
from wlb.files import flush, move, sync, write_synced

_FORMAT = "wlb-parts/1"
_MANIFEST = "manifest.json"
_MERGING = "merging"  # names the shard that merges


@dataclass(frozen=True, slots=True)
class TaskShard:
    """The share of tasks that one of ``count`` processes does: every ``count``-th from ``index`` on, from 1."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def chosen(self, tasks: int) -> range:
        """The numbers of its tasks, from 0."""
        return range(self.index - 1, tasks, self.count)

    @classmethod
    def parse(cls, text: str, environment: Mapping[str, str] = os.environ) -> TaskShard:
        """``I/N``, or ``slurm`` for the element of a job array that this process is. Raises ``UserError``."""
        if text == "slurm":
            return cls._of_slurm(environment)
        match = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(f"--shard {text} is neither slurm nor I/N with I from 1 to N, such as 3/100")
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def _of_slurm(cls, environment: Mapping[str, str]) -> TaskShard:
        names = ("ID", "COUNT", "MIN", "MAX", "STEP")
        try:
            this, count, least, most, step = (int(environment[f"SLURM_ARRAY_TASK_{name}"]) for name in names)
            tasks = range(least, most + 1, step)
        except (KeyError, ValueError):
            raise UserError("--shard slurm needs a SLURM job array (sbatch --array); give --shard I/N") from None
        if len(tasks) != count or this not in tasks or tasks[-1] != most:
            raise UserError(
                f"--shard slurm cannot number {count} tasks from {least} to {most}, of which this is {this}; give an "
                "array A-B, or --shard I/N"
            )
        return cls(tasks.index(this) + 1, count)


def parts_directory(prefix: Path) -> Path:
    """``PREFIX.parts``."""
    return store_path(prefix, ".parts")


class StoreParts:
    """The parts of the store ``prefix``, one for each of ``tasks``."""

    def __init__(self, prefix: Path, tasks: Sequence[CorpusTask]) -> None:
        self.directory = parts_directory(prefix)
        self.tasks = tasks
        self.skipped_files = 0
        self._prefix = prefix

    def begin(self, settings: dict[str, Any], skipped_files: int) -> None:
        """Begin the parts, or go on with those that are there.

        ``settings`` are what parts of one store have in common beside their tasks. ``skipped_files`` is kept as the
        first process counted it, as the directory itself may lie among the sources. Raises ``UserError`` where the
        parts were begun with other settings or tasks.
        """
        states = [[task.name, task.state] for task in self.tasks]
        manifest = {"format": _FORMAT, **settings, "skipped_files": skipped_files, "tasks": states}
        manifest = json.loads(json.dumps(manifest))  # as it is read
        with _disk_errors(self.directory):
            if not (self.directory / _MANIFEST).exists():
                self._make_directory(manifest)
        begun = self._read_manifest()
        self._check(begun, manifest)
        self.skipped_files = begun["skipped_files"]

    def _make_directory(self, manifest: dict[str, Any]) -> None:
        new = self.directory.with_name(f"{self.directory.name}.{uuid4().hex}")
        new.mkdir(parents=True)
        write_synced(new / _MANIFEST, json.dumps(manifest, indent=1) + "\n")
        sync(new)
        try:
            move(new, self.directory)  # which fails where there is one that is not empty: somebody was faster
        except OSError:
            shutil.rmtree(new)

    def _read_manifest(self) -> dict[str, Any]:
        try:
            with _disk_errors(self.directory):
                manifest = json.loads((self.directory / _MANIFEST).read_bytes())
            if manifest["format"] == _FORMAT:
                return dict(manifest)
        except (ValueError, TypeError, KeyError):
            pass
        raise UserError(f"{self.directory} holds no parts of this version; remove it or choose another --out")

    def _check(self, begun: dict[str, Any], now: dict[str, Any]) -> None:
        remedy = f"give what it was begun with, choose another --out, or remove {self.directory}"
        for name, value in now.items():
            if name not in ("tasks", "skipped_files") and begun.get(name) != value:
                raise UserError(
                    f"{self.directory} was begun with {name} {json.dumps(begun.get(name))}, "
                    f"not {json.dumps(value)}; {remedy}"
                )
        for (name, state), (name_now, state_now) in zip(begun["tasks"], now["tasks"], strict=False):
            if state != state_now:
                change = f"{name} has changed" if name == name_now else f"{name_now} is in the place of {name}"
                raise UserError(f"{change} since {self.directory} was begun; {remedy}")
        if len(begun["tasks"]) != len(now["tasks"]):
            raise UserError(
                f"{self.directory} was begun with {len(begun['tasks'])} tasks, and the sources now make "
                f"{len(now['tasks'])}; {remedy}"
            )

    def path(self, number: int) -> Path:
        """The part of a task."""
        return self.directory / f"{number:07d}"

    def missing(self) -> list[int]:
        """The numbers of the tasks that have no part yet; none once the store is made."""
        with _disk_errors(self.directory):
            try:
                names = {*os.listdir(self.directory)}
            except FileNotFoundError:
                return [] if index_path(self._prefix).exists() else [*range(len(self.tasks))]
        return [number for number in range(len(self.tasks)) if self.path(number).name not in names]

    def claim_merging(self, shard: TaskShard) -> bool:
        """Whether ``shard`` is the one that makes the store of all parts: the first that asks, when none is missing.

        The same shard may ask again after it was killed.
        """
        if self.missing():
            return False
        path = self.directory / _MERGING
        with _disk_errors(path):
            try:
                with path.open("x", encoding="utf-8") as file:
                    file.write(str(shard))
            except FileExistsError:
                return path.read_text(encoding="utf-8") == str(shard)
            except FileNotFoundError:  # the store is made
                return False
        return True

    def batches(self, dtype: np.dtype[Any]) -> Generator[TokenizedBatch, None, None]:
        """What all parts hold, in the order of their tasks."""
        for number in range(len(self.tasks)):
            yield from read_part(self.path(number), dtype)

    def remove(self) -> None:
        """Remove all parts. A process that looks meanwhile finds all of them or none."""
        gone = self.directory.with_name(self.directory.name + ".merged")
        with _disk_errors(self.directory):
            shutil.rmtree(gone, ignore_errors=True)  # of a run that was killed
            move(self.directory, gone)
        shutil.rmtree(gone, ignore_errors=True)


def write_part(path: Path, batches: Iterable[TokenizedBatch]) -> None:
    """Write what a task gives to the file ``path``, which appears whole or not at all."""
    own = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        with own.open("wb") as file:
            for batch in batches:
                _write_batch(file, batch)
            _write_line(file, None)
            flush(file)
        move(own, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    finally:
        own.unlink(missing_ok=True)


def read_part(path: Path, dtype: np.dtype[Any]) -> Iterator[TokenizedBatch]:
    """The batches of a part whose tokens are of type ``dtype``. Raises ``UserError`` where it is damaged."""
    with _disk_errors(path), path.open("rb") as file:
        try:
            while (head := json.loads(file.readline())) is not None:
                yield TokenizedBatch(
                    _read_array(file, dtype, head["tokens"]),
                    _read_array(file, np.dtype(np.int64), head["documents"]),
                    Counter(head["rejects"]),
                    head["text_bytes"],
                    head["progress"],
                    _read_array(file, np.dtype(np.bool_), head["tokens"]) if head["masked"] else None,
                )
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{path} is damaged; remove it and run the command again") from None


def _write_batch(file: BinaryIO, batch: TokenizedBatch) -> None:
    head: dict[str, Any] = {
        "tokens": batch.tokens.size,
        "documents": batch.lengths.size,
        "masked": batch.mask is not None,
    }
    head |= {"rejects": batch.rejects, "text_bytes": batch.text_bytes, "progress": batch.progress}
    _write_line(file, head)
    for array in (batch.tokens, batch.lengths, batch.mask):
        if array is not None:
            file.write(array.data)


def _write_line(file: BinaryIO, value: Any) -> None:
    file.write(json.dumps(value).encode() + b"\n")


def _read_array(file: BinaryIO, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    return np.frombuffer(file.read(count * dtype.itemsize), dtype, count)


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path} is gone; another process may have merged the parts or removed them") from None
    except OSError as error:
        raise UserError(f"{path} cannot be used: {error.strerror}") from error
