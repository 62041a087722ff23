"""What the commands of the studies have in common: examples, mistakes in one line, and the next command."""

import re
import shlex
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from studies.tests.cli.conftest import studies
from tests.cases import in_turn
from tests.cli.conftest import run as wlb
from wlb.cli.app import app as library
from wlb_studies.app import COMMANDS, app

PACKING: list[object] = ["packing", "synthetic:500:4K", "--context-window", "4K", "--micro-batches", 2]
THRESHOLDS = ["thresholds", *PACKING[1:]]
PREFILL: list[object] = ["prefill", "synthetic:500:4K", "--token-budget", "2K"]
SHARDING: list[object] = ["sharding", "synthetic:500:4K", "--context-window", "4K"]


@in_turn("name", [name for names in COMMANDS.values() for name in names])
def test_examples_can_be_parsed(name: str):
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    examples = re.findall(r"^Example: wlb-studies (.*)$", group.commands[name].help or "", re.MULTILINE)
    assert examples
    for example in examples:
        first, *arguments = shlex.split(example)
        assert first == name
        group.commands[name].make_context(name, arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PACKING, "--overlong", "cat"], "overlong policy 'cat' is unknown; did you mean cut?"),
        ([*PACKING, "--pp", 33], "model has 32 layers, fewer than the 33 pipeline stages; lower --pp"),
        ([*PACKING, "--pp", 4], "a global batch of 2 windows over --dp 1 cannot fill --pp 4 pipeline stages; give at"),
        ([*PACKING, "--cp", 10_000], "--cp 10000 is not a group size; it must be from 1 to 512"),
        ([*PACKING, "--batch-tokens", "8K"], "--micro-batches and --batch-tokens both set the global batch"),
        ([*PACKING, "--methods", "fixed_greedy:0"], "method 'fixed_greedy:0': '0' is not a whole number of at least 1"),
        ([*PACKING, "--max-length-factor", 1e300], "--max-length-factor"),
        ([*PACKING, "--methods", "sequential", "--max-delay", 3], "--max-delay has no effect on sequential (got 3)"),
        ([*PACKING, "--methods", "any,"], "--methods 'any,' has an empty name; list names as a,b,c"),
        ([*PACKING, "--profile", "p.json", "--model", "7b"], "--model has no effect with --profile"),
        ([*PACKING, "--plot", "picture.txt"], "picture picture.txt must end in one of .png, .pdf, .svg"),
        ([*PACKING, "--plot", "missing/x.png"], "directory missing of missing/x.png does not exist"),
        ([*THRESHOLDS, "--max-delay", 0], "'--max-delay': must be greater than or equal to 1 (got 0)"),
        ([*THRESHOLDS, "--max-token-delay", "some"], "must be a number (got some)"),
        ([*PREFILL, "--pp", 1000], "model has 32 layers, fewer than the 1000 pipeline stages"),
        ([*PREFILL, "--dp", 10**6], "--dp 1000000 is over the 512 data-parallel ranks of a simulated prefill"),
        (["prefill", "synthetic:20000:128K", "--token-budget", 100], "passes of --token-budget 100 with --dp 1"),
        (["prefill", "l.json"], "; for example: wlb-studies prefill synthetic:"),
        ([*SHARDING, "--cp", 10_000], "cp = 10000 is not a group size; it must be from 1 to 512"),
        ([*SHARDING, "--cp", 2, "--profile", "p.json", "--tp", 2], "--tp has no effect with --profile"),
        ([*SHARDING, "--cp", 2, "--strategies", "any,"], "--strategies 'any,' has an empty name"),
        (["sharding", "synthetic:500:1K", "--cp", 2, "--context-window", "4KB"], "'4KB' is not a number of tokens"),
        (["packing", "missing/lengths"], "wlb-studies: error: "),
        (["paper", "table2", "--lengths", "missing.json"], "missing.json"),
    ],
)
def test_mistakes_are_one_line(arguments: list[object], message: str):
    result = studies(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_pages_name_commands_of_both_packages_that_exist(tmp_path: Path):
    """The command that follows is of ``wlb``, whatever ran before."""
    lengths = tmp_path / "lengths.json"
    lengths.write_text(str([4096, 600, 1500, 900, 3000, 700, *range(20, 100, 10)] * 25))
    small = ["--model", "tiny", "--hardware", "cpu", "--context-window", "4K"]
    sizes = ["--dp", 2, "--pp", 1, "--cp", 2, "--tp", 1, "--batch-tokens", "32K", "--steps", 1]
    commands: list[tuple[object, ...]] = [
        ("packing", lengths, *small, *sizes, "--methods", "sequential"),
        ("packing", lengths, *small, "--micro-batches", 8, "--steps", 1, "--methods", "sequential"),
        ("sharding", lengths, *small, "--cp", 2, "--samples", 4),
        ("rivals", lengths, *small, "--gpus", 2, "--policies", "plain-4d", "--batch-tokens", "64K", "--steps", 1),
    ]
    group = get_command(library)
    assert isinstance(group, TyperGroup)
    for command in commands:
        result = studies(*command)
        assert result.returncode == 0, result.stderr
        (following,) = re.findall("^next: wlb (.*)", result.stdout, re.MULTILINE)
        name, *arguments = shlex.split(following)
        group.commands[name].make_context(name, arguments)
    assert wlb(*shlex.split(following), "--steps", 1).returncode == 0
