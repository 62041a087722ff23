"""What every command has in common."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from tests.cases import in_turn
from tests.cli.conftest import printed, refusal
from tests.training.processes import ignore_nothing
from wlb.cli.app import _COMMANDS, app, main


@pytest.mark.parametrize(("sent", "status", "line"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_a_signal_while_the_command_line_is_imported_is_one_line(tmp_path: Path, sent, status, line):
    """A module that interrupts its own import stands for the Ctrl-C."""
    (tmp_path / "typer.py").write_text(
        f"import os, signal, time\nos.kill(os.getpid(), signal.{sent})\ntime.sleep(60)\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, "-m", "wlb", "--help"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=ignore_nothing,
    )
    assert result.returncode == status
    assert result.stderr == f"wlb: {line}\n"


COMMANDS = [name for names in _COMMANDS.values() for name in names]


def test_a_missing_argument_comes_with_an_example():
    said = refusal("check")
    assert said == "Missing argument 'LENGTHS'; for example: wlb check lengths.json --gpus 64 --model llama3-8b"


@in_turn("name", COMMANDS)
def test_help_is_in_one_style_and_its_examples_can_be_parsed(name):
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    command = group.commands[name]
    examples = re.findall(r"^Example: wlb (.*)$", command.help or "", re.MULTILINE)
    assert examples
    for example in examples:
        first, *arguments = shlex.split(example)
        assert first == name
        command.make_context(name, arguments)
    shown = CliRunner().invoke(app, [name, "--help"], terminal_width=200).stdout
    assert not re.search(r"<\w+>|x[<>]=|BOOLEAN|\bTEXT\b|INTEGER|FLOAT", shown)
    (usage,) = re.findall(r"Usage: .*", shown)
    assert not re.search(r"[\[{][a-z_]+[\]}]", usage)


@in_turn(
    "arguments",
    [
        ["check", "synthetic:500:1K", "--micro-batch-tokens"],
        ["check", "synthetic:500:1K", "--batch-tokens"],
        ["report", "synthetic:500:1K", "--context-window"],
        ["profile", "--out", "profile.json", "--max-length"],
    ],
)
def test_what_is_no_number_of_tokens_is_refused_by_option(arguments):
    for wrong in ("0", "4KB", "9" * 30):
        said = refusal(*arguments, wrong)
        assert said.startswith(f"Invalid value for '{arguments[-1]}': '{wrong}' is not a number of tokens")


def test_any_path_that_the_system_refuses_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text('[data]\nstore = "corpus"\n')
    for setting in ("data.store", "model.name"):
        said = refusal("simulate", "job.toml", "--set", f"{setting}={'a' * 300}")
        assert "File name too long" in said or "exist" in said
    for error, line in (
        (OSError(30, "Read-only file system", "/disk/x"), "/disk/x cannot be used: Read-only file system; give"),
        (OSError(28, "No space left on device"), "No space left on device; give another path"),
    ):
        monkeypatch.setattr("wlb.documents.lengths.read_lengths", Mock(side_effect=error))
        assert refusal(*CHECK).startswith(line)
    monkeypatch.setattr(sys, "argv", ["wlb", *map(str, CHECK)])
    for bug in (OSError("nothing that the system said"), OSError(12, "Cannot allocate"), ConnectionError(111, "no")):
        monkeypatch.setattr("wlb.documents.lengths.read_lengths", Mock(side_effect=bug))
        with pytest.raises(OSError, match=str(bug.args[-1])):
            main()


def test_one_document_or_too_few_are_refused_at_once(tmp_path):
    for lengths, message in (
        ([2**31 - 1, 5], "document 0 has 2147483647 tokens and alone fills over 64 steps of"),
        ([10, 20, 30], "the documents have 60 tokens, and one step"),
    ):
        (tmp_path / "l.json").write_text(json.dumps(lengths))
        for arguments in (
            [*SIMULATE[:2], "--lengths", tmp_path / "l.json"],
            [*CHECK[:1], tmp_path / "l.json", *CHECK[2:]],
            ["report", tmp_path / "l.json", "--context-window", "4K", "--out", tmp_path / "r.html"],
        ):
            assert message in refusal(*arguments)


def test_without_torch_training_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "job.toml").write_text('[data]\nstore = "corpus"\n[checkpoint]\ndir = "c"\n')
    for name in [name for name in sys.modules if name.startswith("wlb.training.dry_run")]:
        monkeypatch.delitem(sys.modules, name)
    for missing in ("torch", "safetensors"):
        monkeypatch.setitem(sys.modules, missing, None)
        for arguments in (["train", tmp_path / "job.toml", "--dry-run"], ["train", tmp_path / "job.toml"]):
            said = refusal(*arguments)
            assert said == f"{missing} is not installed; run: pip install 'wlb-llm[train]'"


CHECK = ["check", "synthetic:500:4K", "--context-window", "4K"]
SIMULATE = ["simulate", "550m-64k", "--lengths", "synthetic:500:4K"]
REPORT = ["report", "synthetic:500:4K", "--context-window", "4K"]


@in_turn(
    ("arguments", "message"),
    [
        ([*CHECK, "--gpus", 0], "Invalid value for '--gpus': must be greater than or equal to 1 (got 0)"),
        (
            [*CHECK, "--pp", 2, "--sharding", "gathered"],
            "--sharding 'gathered' is for jobs without a pipeline, not for --pp 2",
        ),
        ([*CHECK, "--gpus", "some"], "Invalid value for '--gpus': must be a whole number (got some)"),
        ([*CHECK, "--steps", 1000001], "less than or equal to 1000000 (got 1000001)"),
        ([*CHECK, "--systems", "any,"], "--systems 'any,' has an empty name; list names as a,b,c"),
        ([*CHECK, "--gpu", 8], "No such option: --gpu; did you mean --gpus?"),
        ([*CHECK, "--colour"], "No such option: --colour; wlb check --help lists all"),
        (["nosuch"], "No such command 'nosuch'; wlb --help lists all"),
        (["chek"], "No such command 'chek'. Did you mean 'check'?"),
        ([*CHECK, "--gpus", 8, "--dp", 4, "--pp", 4], "no multiple of --dp 4 x --pp 4 = 16; change one of the sizes"),
        ([*CHECK, "--gpus", 100_000_000], "100,000,000 GPUs cannot share a step of 8 windows of 4096 tokens"),
        ([*CHECK, "--gpus", 1, "--model", "70b"], "with 74.5 GiB each fits this model and window of 4096 tokens"),
        ([*CHECK, "--pp", 33], "model has 32 layers, fewer than the 33 pipeline stages; lower --pp"),
        ([*CHECK, "--cp", 10_000], "--cp 10000 is not a group size; it must be from 1 to 512"),
        ([*REPORT, "--dp", "10000000000"], "--dp 10000000000: must be less"),
        ([*REPORT, "--schedule", "gpipe"], "--schedule 'gpipe': choose from auto"),
        ([*CHECK, "--virtual-pp", 2, "--pp", 1], "--virtual-pp 2 needs --pp of at least 2"),
        ([*CHECK, "--virtual-pp", 20, "--pp", 2], "fewer than the 40 pipeline stages; lower --pp or --virtual-pp"),
        ([*CHECK, "--tp", 3], "--tp 3 does not divide 32 query heads"),
        ([*CHECK, "--ep", 2], "--ep 2 shares experts, and the model has none; name another, or leave --ep out"),
        ([*CHECK, "--ep", 3, "--model", "qwen3-30b-a3b"], "--ep 3 does not divide the model's 128 experts"),
        (
            [*REPORT, "--batch-tokens", 100],
            "--batch-tokens 100 is smaller than one context window of 4096 tokens; raise it",
        ),
        (
            [*REPORT, "--gpus", 8, "--dp", 2, "--pp", 2, "--cp", 1, "--tp", 1],
            "--gpus 8 contradicts --dp 2 x --pp 2 x --cp 1 x --tp 1 = 4",
        ),
        (
            [*CHECK, "--gpus", 521, "--batch-tokens", "32K"],
            "521 GPUs cannot share a step of 8 windows of 4096 tokens",
        ),
        ([*CHECK, "--gpus", 2, "--batch-tokens", "1024M"], "holds 262144 windows of 4096, over 65536; lower it"),
        (["prepare", "--stdlib", "--out", "s", "--train-bpe", 2**31], "--train-bpe 2147483648: give 257 to"),
        (["prepare", "--stdlib", "--out", "s", "--workers", 10**6], "--workers"),
    ],
)
def test_values_that_cannot_be_are_refused_at_once(arguments, message):
    assert message in refusal(*arguments)


@in_turn(
    ("arguments", "message"),
    [
        ([*CHECK, "--profile", "p.json", "--model", "7b"], "--model has no effect with --profile"),
        ([*CHECK, "--length-column", "n", "--tokenizer", "bytes"], "--length-column has no effect with --tokenizer"),
        (["train", "job.toml", "--dry-run", "--trace"], "--trace has no effect with --dry-run"),
        (["report", ".", "--steps", 3], "--steps has no effect on the report of a training run"),
        (["prepare", "--stdlib", "--out", "s", "--text-field", "t"], "--text-field has no effect with --stdlib"),
    ],
)
def test_options_that_would_not_be_read_are_refused(arguments, message):
    said = refusal(*arguments)
    assert message in said
    assert re.search(r" \(got \S+\); leave it out$", said)
    assert refusal("train", "job.toml", "--hardware", "h100") == "--hardware needs --dry-run"
    assert refusal(*CHECK, "--chat") == "--chat needs --tokenizer"


@in_turn(
    "arguments",
    [
        ["profile", "--out"],
        [*REPORT, "--out"],
        [*SIMULATE, "--trace"],
    ],
)
def test_files_that_cannot_be_written_are_refused_before_the_work(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "directory.png").mkdir(exist_ok=True)
    for path, message in (
        ("missing/x.png", "directory missing of missing/x.png does not exist"),
        ("directory.png", "directory.png is a directory"),
        ("/proc/x.png", "/proc/x.png cannot be written: No such file or directory"),
        ("a" * 300 + ".png", "cannot be written: File name too long"),
    ):
        assert message in refusal(*arguments, path)


@in_turn(
    "arguments",
    [
        CHECK[:1],
        [*CHECK, "--model"],
        [*CHECK, "--profile"],
        ["simulate"],
        [*SIMULATE[:2], "--lengths"],
        [*SIMULATE, "--profile"],
        ["report"],
        [*REPORT, "--before"],
        ["prepare", "--out", "store"],
        ["prepare", "--stdlib", "--out"],
        ["prepare", "--stdlib", "--out", "store", "--tokenizer"],
        ["train"],
    ],
)
def test_paths_that_do_not_serve_are_one_line(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "directory").mkdir(exist_ok=True)
    (tmp_path / "file").touch()
    rest = CHECK[2:] if arguments == ["check"] else []
    for path in ("", ".", "directory", "file/x", "missing/lines\nof it", "a" * 300):
        if arguments[-1] != "--out" or "missing" not in path:  # that directory is made
            assert "Errno" not in refusal(*arguments, path, *rest)


_DOCUMENTS = "lengths.json"
_SMALL = ["--model", "tiny", "--hardware", "cpu", "--context-window", "4K"]
_PLAIN = ["--systems", "plain-4d"]
_BATCH = ["--batch-tokens", "64K", "--steps", 1]
_SIZES = ["--dp", 2, "--pp", 1, "--cp", 2, "--tp", 1, "--batch-tokens", "32K", "--steps", 1]
_ALONE = ["--tp", 1, "--pp", 1, "--steps", 1]


@in_turn(
    ("arguments", "commands"),
    [
        (["prepare", "texts", "--out", "my store"], ["check"]),
        (["report", "my store", *_SMALL, *_SIZES], ["train"]),
        (["check", "texts/08.txt", "--tokenizer", "bytes", *_SMALL, *_ALONE], ["prepare"]),
        (["check", _DOCUMENTS, *_SMALL, *_SIZES], ["report", "simulate"]),
        (["simulate", "550m-64k", "--steps", 1, "--lengths", "long.json", *_PLAIN], ["report", "simulate"]),
        (["simulate", "job.toml", "--set", "parallel.tp=1", "--hardware", "cpu", "--steps", 1, *_PLAIN], ["train"]),
    ],
)
def test_the_next_command_can_be_run_as_it_is_printed(small_corpus, arguments, commands):
    """The last one of a case is parsed only."""
    for command in commands:
        narrow = _ALONE if "--gpus" in arguments else []  # of 32 GPUs, as it is printed
        out = printed(*arguments, *narrow)
        (following,) = re.findall("^next: wlb (.*)", out, re.MULTILINE)
        assert out.endswith(f"{following}\n")
        before, arguments = arguments, shlex.split(following)
        assert arguments[0] == command
        if "cpu" in before and command in ("simulate", "train"):
            assert arguments[arguments.index("--hardware") + 1] == "cpu"
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    group.commands[command].make_context(command, arguments[1:])


@pytest.fixture
def small_corpus(tmp_path, monkeypatch):
    """The working directory: lengths, texts, and a job on the texts."""
    (tmp_path / "lengths.json").write_text(str([4096, 600, 1500, 900, 3000, 700, *range(20, 100, 10)] * 25))
    (tmp_path / "long.json").write_text(str([65_536, 9000, 24_000, 30_000] * 25))
    (tmp_path / "texts").mkdir()
    for number in range(32):
        (tmp_path / "texts" / f"{number:02}.txt").write_text("word " * (900 if number % 8 == 0 else 20 * number))
    job = 'preset = "balanced"\n[model]\nname = "tiny"\n[training]\ndevice = "cpu"\n[packing]\nglobal_batch = 1\n'
    (tmp_path / "job.toml").write_text(job + '[data]\nstore = "my store"\ncontext_window = 4096\n')
    monkeypatch.chdir(tmp_path)


def test_what_cannot_be_read_twice_has_no_next_command(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("4000\n900\n" * 60))
    out = printed("check", "-", *_SMALL, *_SIZES, "--systems", "plain-4d")
    assert "plain-4d" in out
    assert "next:" not in out
