"""A corpus of files of every kind."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from wlb.documents.prepare.sources import FileCorpus


def compressed(path, content):
    match path.suffix:
        case ".gz":
            content = gzip.compress(content)
        case ".zst":
            # Two frames, as tools that compress in parallel write.
            half = len(content) // 2
            frames = content[:half], content[half:]
            content = b"".join(pa.Codec("zstd").compress(frame, asbytes=True) for frame in frames)
    path.write_bytes(content)
    return path


def write_corpus(directory: Path) -> FileCorpus:
    """Of every kind of file."""
    directory.mkdir()
    lines = "".join(json.dumps({"text": f"{i} " * (i % 90)}) + "\n" for i in range(200)).encode()
    (directory / "a.jsonl").write_bytes(lines + b'{oops\n{"text": "' + b"x" * 5000 + b'"}\n')
    compressed(directory / "b.jsonl.gz", lines)
    table = pa.table({"text": [f"cell {i} " * 20 for i in range(100)]})
    pq.write_table(table, directory / "c.parquet", row_group_size=30, compression="none")
    for i in range(30):
        (directory / f"d{i}.txt").write_text(f"text {i} " * 40 * (i % 3))
    (directory / "e.png").write_bytes(b"")
    return FileCorpus([directory])
