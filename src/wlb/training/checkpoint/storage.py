"""DCP's file format, with checksums when writing and a restricted unpickler when reading.

``ChecksummedWriter`` notes size and CRC-32 of each file while it is written; the first rank, to which DCP brings what
all have written, completes the checkpoint. An error on one rank becomes a ``CheckpointException`` on all of them.

``ConfinedReader`` reads what may have been tampered with. DCP keeps its metadata as a pickle, so only the classes that
such metadata consists of are loaded; entries that DCP would unpickle without restriction are refused, and so is any
path that leaves the checkpoint. Tensors DCP itself reads with ``weights_only``.
"""

from __future__ import annotations

import io
import os
import pickle
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from wlb.errors import UserError
from wlb.training.checkpoint.files import (
    FileRecord,
    Manifest,
    Progress,
    hidden_path,
    is_plain_name,
    open_regular,
    publish,
    start_writing,
)

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),  # a name to a torch.layout
}


class ChecksummedWriter(FileSystemWriter):
    """Writes one file per rank and the manifest, and gives ``checkpoint`` its name when all of them are complete."""

    def __init__(self, checkpoint: Path, progress: Progress, model: Mapping[str, Any]) -> None:
        # Nothing is copied from a GPU ahead of writing: that would use its streams from a second thread.
        super().__init__(hidden_path(checkpoint), per_thread_copy_ahead=0)
        self.fs: _ChecksummedFiles = _ChecksummedFiles()
        self._checkpoint, self._progress, self._model = checkpoint, progress, model

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        start_writing(self._checkpoint)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        """The results of this rank, the last of which are the records of its files."""
        try:
            results = super().write_data(plan, planner).value()
        except Exception as error:
            raise self.fs.error or error from error  # what torch raises in its place may not name it
        done: Future[list[Any]] = Future()
        done.set_result([*results, self.fs.records])
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        super().finish(metadata, [of_rank[:-1] for of_rank in results])
        files = {name: record for *_, records in results for name, record in records.items()}
        publish(self._checkpoint, Manifest(self._progress, self._model, files | self.fs.records))

    def storage_meta(self) -> None:
        """Nothing: it would tell where the checkpoint was written, which does not matter to whoever reads it."""


class ConfinedReader(FileSystemReader):
    """Reads the checkpoint at ``path`` and nothing else. Raises ``UserError`` for one that was tampered with."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = _ConfinedFiles()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._get_metadata_path()
        try:
            with self.fs.create_stream(path, "rb") as file:
                metadata = _checked(_MetadataUnpickler(file).load())
        except Exception as e:  # what garbage makes a pickle raise can be anything
            raise UserError(
                f"checkpoint {self.path} was not written by this program: {Path(path).name}: {e}; remove it to "
                "continue from the one before it"
            ) from e
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """What the checkpoint holds, by name."""
        return cast(dict[str, TensorStorageMetadata], self.read_metadata().state_dict_metadata)  # ``_checked``


def first_failure(error: CheckpointException) -> str:
    """The first failure of ``error`` in one line, without its traceback."""
    rank, (cause, _) = next(iter(error.failures.items()))
    (line, *_) = str(cause).splitlines() or [""]
    what = cause.strerror if isinstance(cause, OSError) and cause.strerror else f"{type(cause).__name__}: {line}"
    return f"{what} (rank {rank})"


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_type or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _checked(metadata: Any) -> Metadata:
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError("it holds no metadata")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise pickle.UnpicklingError(f"{name} is not a tensor")
    for index, info in metadata.storage_data.items():
        if not is_plain_name(info.relative_path):
            raise pickle.UnpicklingError(f"{index.fqn} lies in {info.relative_path!r}, outside the checkpoint")
    return metadata


class _ConfinedFiles(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with open(open_regular(Path(path)), mode) as stream:
            yield cast(io.IOBase, stream)


class _ChecksummedFiles(FileSystem):
    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        try:
            with _ChecksummedFile(Path(path), self) as file:
                yield file
        except OSError as error:
            self.error = self.error or error
            raise
        self.records[Path(path).name] = FileRecord(file.size, file.crc32)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _ChecksummedFile(io.BufferedWriter):
    """A file that is written from its start to its end; ``owner`` hears of errors, which torch may replace."""

    def __init__(self, path: Path, owner: _ChecksummedFiles) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._owner = owner
        self.size = self.crc32 = 0

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError as error:
            self._owner.error = self._owner.error or error
            raise
        self.size += written
        self.crc32 = zlib.crc32(data, self.crc32)
        return written
