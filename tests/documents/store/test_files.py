"""Stores at URLs against the same stores on a disk, on servers that fail, stop in the middle and change."""

import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.cases import in_turn
from tests.web import Faults, files_of, running, served
from wlb.documents.lengths import read_lengths
from wlb.documents.order import DataConfig
from wlb.documents.store import files
from wlb.documents.store import reader as reader_module
from wlb.documents.store.files import RemoteArray, names_store
from wlb.documents.store.reader import TokenStore, TokenStoreWriter, stored_vocab_size
from wlb.errors import UserError

VOCAB = 300
BLOCK = 256  # bytes


class Place:
    """Where the files of ``folder`` are served: ``url`` is that of the folder, ``gets`` are names of files read."""

    url: str
    faults: deque[str]
    gets: list[str]
    put: Callable[[Path], object]  # one file
    remove: Callable[[str], object]  # a file by its name


@pytest.fixture(params=["http", "s3"])
def place(request, tmp_path, monkeypatch) -> Iterator[Place]:
    pytest.importorskip("fsspec")
    monkeypatch.setattr(files, "_BLOCK", BLOCK)
    monkeypatch.setattr(files, "_FIRST_DELAY", 0.0)
    monkeypatch.setattr(reader_module, "_SAMPLED", 1)
    yield from {"http": _on_the_web, "s3": _in_a_bucket}[request.param](tmp_path, monkeypatch)


def _on_the_web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    pytest.importorskip("aiohttp")
    folder, place = tmp_path / "web", Place()
    folder.mkdir()
    server = Faults(files_of(folder))
    place.faults, place.gets = server.faults, server.gets
    place.put = lambda path: (folder / path.name).write_bytes(path.read_bytes())
    place.remove = lambda name: (folder / name).unlink()
    with served(server) as place.url:
        yield place


def _in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    s3fs = pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server", exc_type=ImportError)
    server, place = Faults(moto.DomainDispatcherApplication(moto.create_backend_app)), Place()
    place.faults, place.gets = server.faults, server.gets
    serving = pytest.importorskip("werkzeug.serving")  # which reads the chunks in which s3fs uploads
    with running(serving.make_server("127.0.0.1", 0, server, threaded=True)) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
        s3fs.S3FileSystem.clear_instance_cache()
        files = s3fs.S3FileSystem(use_listings_cache=False)
        bucket = f"wlb-{tmp_path.name.replace('_', '-').lower()}"
        files.mkdir(bucket)
        place.url = f"s3://{bucket}/corpora"
        place.put = lambda path: files.pipe_file(f"{place.url}/{path.name}", path.read_bytes())
        place.remove = lambda name: files.rm_file(f"{place.url}/{name}")
        yield place
        s3fs.S3FileSystem.clear_instance_cache()


def write(prefix: Path, *, documents: int = 40, seed: int = 0, masked: bool = False) -> Path:
    random = np.random.default_rng(seed)
    with TokenStoreWriter(prefix, vocab_size=VOCAB, masked=masked, overwrite=True) as writer:
        for length in np.random.default_rng(0).integers(0, 100, documents):
            writer.add(random.integers(0, VOCAB, length), *([random.random(length) < 0.5] if masked else []))
    return prefix


@pytest.fixture
def local(tmp_path, place) -> TokenStore:
    """A store on the disk, whose files are in ``place`` too."""
    store = TokenStore.open(write(tmp_path / "corpus", masked=True))
    put_all(place, tmp_path)
    return store


def put_all(place: Place, folder: Path) -> None:
    for path in folder.glob("corpus.*"):
        place.put(path)


def same_tokens(store: TokenStore, local: TokenStore) -> bool:
    return all(np.array_equal(store.read(document), local.read(document)) for document in range(len(local)))


def test_a_remote_store_is_the_same_as_on_the_disk(place, local, tmp_path, capsys):
    store = TokenStore.open(f"{place.url}/corpus")
    assert same_tokens(store, local)
    assert (store.identity, store.sidecar, store.vocab_size) == (local.identity, local.sidecar, VOCAB)
    assert np.array_equal(store.lengths, local.lengths)
    assert str(store.prefix) == f"{place.url}/corpus"
    assert store.is_remote
    assert not local.is_remote
    for document, length in enumerate(local.lengths.tolist()):
        start, end = np.random.default_rng(document).integers(0, length + 1, 2).tolist()
        start, length = min(start, end), abs(end - start)
        assert np.array_equal(store.read(document, start, length), local.read(document, start, length))
        mask, expected = store.loss_mask(document, start, length), local.loss_mask(document, start, length)
        assert mask is not None
        assert mask.tolist() == expected.tolist()
    store.check_labels()
    assert np.array_equal(read_lengths(f"{place.url}/corpus"), read_lengths(tmp_path / "corpus"))
    for source in (f"{place.url}/corpus.idx", [f"{place.url}/corpus"]):
        group = TokenStore.open(source)
        group.check_content()
        assert group.identity == local.identity
        assert np.array_equal(read_lengths(source), read_lengths(tmp_path / "corpus"))
        assert stored_vocab_size(source) == VOCAB
    assert names_store(f"{place.url}/corpus")
    assert not names_store(f"{place.url}/corpus.tokenizer")
    capsys.readouterr()

    assert same_tokens(pickle.loads(pickle.dumps(store)), local)
    place.gets.clear()
    assert same_tokens(store, local)
    assert not place.gets  # all of it is kept

    assert TokenStore.open(f"{place.url}/corpus").tokens == local.tokens


def test_failing_reads_are_repeated_and_lose_nothing(place, local):
    store = TokenStore.open(f"{place.url}/corpus")
    faults = ["error", "cut", "short", "error", "cut"]
    place.faults.extend(faults)
    assert same_tokens(store, local)
    assert place.gets.count("corpus.bin") == -(-2 * local.tokens // BLOCK) + len(faults)


@pytest.mark.parametrize("fault", ["error", "cut", "short"])
def test_what_goes_on_failing_is_one_line(place, local, monkeypatch, fault):
    store = TokenStore.open(f"{place.url}/corpus")
    delays: list[float] = []
    monkeypatch.setattr(files, "_FIRST_DELAY", 1.0)
    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=delays.append))
    place.faults.extend([fault] * 6)
    with pytest.raises(
        UserError, match=r"corpus.bin cannot be read in 6 tries: \w+: .*; check the URL, the ne"
    ) as error:
        store.read(1)
    assert "\n" not in str(error.value)
    assert f"{place.url}/corpus.bin" in str(error.value)
    assert delays == [1, 2, 4, 8, 16]
    assert not place.faults
    assert same_tokens(store, local)


def test_an_object_that_changes_is_refused(place, local, tmp_path):
    store = TokenStore.open(f"{place.url}/corpus")
    first = store.read(1)
    assert first.size
    place.put(write(tmp_path / "other" / "corpus", seed=1, masked=True).with_suffix(".bin"))  # of the same size
    assert np.array_equal(store.read(1), first)  # as it was
    last = int(np.flatnonzero(local.lengths)[-1])
    with pytest.raises(
        UserError, match=r"corpus.bin changed while it was in use: it had \d+ bytes, .*, now it has \d+"
    ):
        store.read(last)
    with pytest.raises(UserError, match=r"corpus.bin is not what was written: its sha256 is"):
        TokenStore.open(f"{place.url}/corpus").check_content()
    new = TokenStore.open(f"{place.url}/corpus")
    assert same_tokens(new, TokenStore.open(tmp_path / "other" / "corpus"))  # nothing of the old one is in its cache
    place.remove("corpus.bin")
    with pytest.raises(UserError, match=r"changed while it was in use: .*, now it is gone; put back what was there"):
        store.read(last)
    with pytest.raises(UserError, match=r"token file \S+/corpus.bin does not exist"):
        TokenStore.open(f"{place.url}/corpus")
    place.remove("corpus.idx")
    for use in (TokenStore.open, read_lengths):
        with pytest.raises(UserError, match=r"token store index \S+://\S+/corpus.idx does not exist; name one store"):
            use(f"{place.url}/corpus")


def test_few_blocks_are_kept(place, local, monkeypatch):
    monkeypatch.setattr(files, "_BLOCKS", 3)
    store = TokenStore.open(f"{place.url}/corpus")
    for document in np.random.default_rng(0).integers(0, len(local), 150).tolist():
        assert np.array_equal(store.read(document), local.read(document))
    assert place.gets.count("corpus.bin") > -(-2 * local.tokens // BLOCK)
    recent = len(local) - 1
    assert np.array_equal(store.read(recent), local.read(recent))
    place.gets.clear()
    store.read(recent)
    assert not place.gets


def test_without_packages_it_is_one_line(monkeypatch):
    fsspec = pytest.importorskip("fsspec.core")

    def no_s3fs(*_: Any, **__: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", no_s3fs)
    with pytest.raises(
        UserError, match=r"s3://b/c.idx cannot be opened: Install s3fs .* pip install 'wlb-llm\[remote\]'"
    ):
        TokenStore.open("s3://b/c")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(UserError, match=r"fsspec is not installed; run: pip install 'wlb-llm\[remote\]'"):
        TokenStore.open("s3://b/c")


def test_no_answer_is_not_taken_for_no_file(monkeypatch):
    """fsspec says FileNotFoundError of whatever goes wrong with HTTP, and a store without its mask has other labels."""
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(files, "_FIRST_DELAY", 0.0)

    for status, tries in (("503 Slow Down", " in 6 tries"), ("403 Forbidden", "")):  # asking again gives no rights

        def unavailable(environ, start_response, status=status):
            start_response(status, [("Content-Length", "0")])
            return [b""]

        message = rf"corpus.mask cannot be read{tries}: .*{status[:3]}"
        with served(unavailable) as url, pytest.raises(UserError, match=message):
            RemoteArray(f"{url}/corpus.mask")


def test_a_server_that_ignores_ranges_is_refused_before_it_sends_everything(tmp_path, monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(files, "_BLOCK", BLOCK)
    write(tmp_path / "corpus")
    whole, answers = files_of(tmp_path), list[str]()

    def deaf(environ, start_response):
        environ.pop("HTTP_RANGE", None)
        answers.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
        return whole(environ, start_response)

    with served(deaf) as url:
        with pytest.raises(
            UserError,
            match=r"corpus\.bin cannot be read: ValueError: .* doesn't appear to support range requests",
        ):
            TokenStore.open(f"{url}/corpus")
        assert answers.count("GET /corpus.bin") == 2  # its beginning, and the next place


@in_turn("url", ["s3://bucket/a.b/corpus", "gs://bucket/corpus", "http://host:80/corpus", "memory://corpus"])
def test_urls_stay_what_they_are(url):
    config = DataConfig(store=url)
    assert config.model_dump(mode="json")["store"] == str(config.store) == url
    assert DataConfig.model_validate(config.model_dump(mode="json")) == config == config.changed(seed=0)
    config = DataConfig(mixture=({"store": [url], "weight": 1},))
    assert config.model_dump(mode="json")["mixture"] == [{"store": [url], "weight": 1}]
    assert DataConfig.model_validate(config.model_dump(mode="json")) == config
    with pytest.raises(UserError, match=r"a token store is named twice"):
        TokenStore.open([url], f"{url}.idx")


@in_turn(
    ("source", "message"),
    [
        ("", "path of a token store is empty"),
        ("s3://bucket/*", r"s3://bucket/\* is a pattern, and stores at URLs cannot be listed; name one store"),
        (["s3://bucket/a", "b"], "s3://bucket/a is one of 2 shards, and shards cannot be at URLs; copy them to a disk"),
    ],
)
def test_names_of_no_store_are_refused(source, message):
    assert not names_store(source)
    for use in (TokenStore.open, read_lengths):
        with pytest.raises(UserError, match=message if source or use is not read_lengths else "is empty"):
            use(source)


def test_stores_are_not_written_at_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="s3:/b/c is a URL; make the store on a disk and copy its files there"):
        TokenStoreWriter("s3://b/c", vocab_size=VOCAB)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ValueError, match="path is empty"):
        DataConfig(store="")
