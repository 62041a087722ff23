"""Every code block of the documentation runs as it stands, or says above it why it is not run.

Those that two processes run are tested by ``test_stack_pages.py``.

The blocks of a page run in order, in one directory that looks like a clone, and print what the page shows below them
(only ``train`` runs for fewer steps than a reader would, and ``check`` is of a small job where figures vary). What is
not run must still name commands, options, files, settings and functions that exist.
"""

import ast
import importlib
import json
import re
import shutil
import sysconfig
import tomllib
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing import forkserver
from pathlib import Path

import pytest
import typer

from tests.cases import in_turn
from tests.code_blocks import PAGES, ROOT, Block, blocks_of, program_and_arguments
from tests.programs import finished
from tests.report.conftest import write_run
from tests.workload.profiles import analytic_profile
from wlb.cli.app import app
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.job.config import JobConfig
from wlb.job.config_file import load_config
from wlb.workload import ModelShape
from wlb.workload.profile import write_profile
from wlb_studies.app import app as studies
from wlb_studies.registry import EXPERIMENTS

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
COMMANDS = [(str(block), command) for block in BLOCKS if block.language == "shell" for command in block.commands]
INLINE = [
    (str(page.relative_to(ROOT)), " ".join(command.split()))
    for page in PAGES
    for command in re.findall(r"`((?:wlb|wlb-studies|make) [^`]+)`", page.read_text(encoding="utf-8"))
]
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
APPLICATIONS = {"wlb": app, "wlb-studies": studies}
SMALL_CHECK = ["--model=550m", "--hardware=a100", "--gpus=16", "--tp=1", "--pp=1", "--context-window=64K"]
_SHAPE = ModelShape(hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, ffn_hidden=352, vocab_size=512)


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: the project's own files, and those of a reader that the pages name."""
    for name in ("README.md", "configs", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("src/wlb/packing", "tests/packing"):  # enough of the sources to prepare
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "lengths.json").write_text(json.dumps(sample_lengths(4000, 131_072, 0).tolist()))
    write_profile(analytic_profile(_SHAPE), tmp_path / "profile.json")
    for name in ("plain", "balanced"):
        write_run(tmp_path / "runs" / name)
    small = tmp_path / "standard library"
    small.mkdir()
    paths = sysconfig.get_paths()
    for module in ("ast", "json/decoder", "random", "tomllib/_parser", "typing"):
        source = Path(paths["stdlib"], f"{module}.py")
        (small / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths | {"stdlib": str(small)})
    forkserver.ensure_running()  # not in the clone, where it would not find our own tests
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.not_run is None for b in blocks_of(p))], ids=lambda p: p.stem
)
def test_blocks_run_and_print_what_pages_show(page: Path, clone: Path, capfd: pytest.CaptureFixture[str]):
    for block in blocks_of(page):
        if block.not_run is None and block.on_two is None and block.language == "python":
            exec(compile(block.text, str(block), "exec"), {})
        elif block.not_run is None and block.language == "shell":
            capfd.readouterr()
            commands = [program_and_arguments(command) for command in block.commands]
            outputs = [] if any("train" in command for command in commands) else _outputs_of(commands)
            for program, *arguments in commands:
                assert program in APPLICATIONS, f"{block}: mark {program} as not run, and say why"
                small = SMALL_CHECK if arguments[0] == "check" and all(shown.figures_vary for shown in outputs) else []
                _run(APPLICATIONS[program], [*arguments, *small], str(block))
            printed = capfd.readouterr().out
            for shown in outputs:
                assert shown.shows(printed), f"{shown} shows other lines than those that are printed now:\n{printed}"
        elif block.file is not None:
            (clone / block.file).write_text(block.text, encoding="utf-8")


def _outputs_of(commands: Sequence[Sequence[str]]) -> list[Block]:
    """What any page shows below these commands, also one that does not run them."""
    return [
        shown
        for block, shown in pairwise(BLOCKS)
        if shown.language == "output" and [program_and_arguments(command) for command in block.commands] == commands
    ]


def _run(application: typer.Typer, arguments: Sequence[str], where: str) -> None:
    """One command; of ``train`` a smaller job, in one process and for two steps."""
    if arguments[0] == "train":
        alone = ["packing.global_batch=1", "parallel.pp=1", "parallel.dp=1"]
        for setting in ["training.steps=2", "training.threads=1", *alone, "evaluation.documents=2"]:
            arguments = [*arguments, "--set", setting]
        trained = finished("-m", "wlb", *arguments)
        assert trained.returncode == 0, f"{where}: {arguments} fails: {trained.stderr}"
        return
    try:
        status = application([*arguments], standalone_mode=False)
    except Exception as error:
        raise AssertionError(f"{where}: {arguments} fails: {error}") from error
    assert status in (None, 0), f"{where}: {arguments} ends with status {status}"


def test_the_quickstart_of_the_reference_prints_steps(capsys: pytest.CaptureFixture[str]):
    (block,) = (b for b in blocks_of(ROOT / "docs" / "reference.md") if b.language == "python")
    exec(compile(block.text, str(block), "exec"), {})
    assert capsys.readouterr().out.count("Segment(document=") > 10


def test_blocks_have_a_language_and_commands_their_output():
    for block, following in pairwise([*BLOCKS, BLOCKS[0]]):
        assert block.language in ("python", "toml", "yaml", "json", "shell", "text", "output"), block
        if block.language == "shell" and block.not_run is None:
            assert following.language == "output", f"{block}: show below it what it prints"
        if block.language == "text":
            code = re.match(r"(from|import) \w|\[\w+\]\n", block.text)
            assert not code, f"{block} is code: fence it with its language"


def test_a_figure_that_is_off_is_no_longer_shown(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("    wlb check\n\n```output\nlost 1.50 ...\n──── 4,000 documents\n```\n")
    _, exact = blocks_of(page)
    page.write_text(page.read_text().replace("```", "<!-- figures vary -->\n```", 1))
    _, vague = blocks_of(page)
    for printed, as_exact, as_vague in (
        ("lost 1.51 of it\n───────── 4,000 documents\n", True, True),  # the last digit of another platform
        ("lost 1.50 4,000 documents", True, True),
        ("lost 1.52 of it\n──── 4,000 documents", False, True),
        ("lost 1.50 of it\n──── 4,002 documents", False, True),
        ("lost 1.50 of it\n──── 4,000 documents each", False, False),
        ("gained 1.50 of it\n──── 4,000 documents", False, False),
    ):
        assert (exact.shows(printed), vague.shows(printed)) == (as_exact, as_vague), printed


@in_turn(("where", "command"), COMMANDS + INLINE)
def test_commands_exist_and_have_the_options(where: str, command: str):
    words = command.removeprefix("nohup ").split()
    program = words[0].rpartition("/")[2]
    given = set(OPTION.findall(command))
    if program in APPLICATIONS and words[1] != "--help":
        commands = typer.main.get_command(APPLICATIONS[program]).commands  # type: ignore[attr-defined]
        parameters = commands[words[1]].params
        known = {option for parameter in parameters for option in parameter.opts + parameter.secondary_opts}
        assert given <= known, f"{where}: {program} {words[1]} has no {sorted(given - known)}"
        assert words[1] != "paper" or len(words) == 2 or words[2] in (*EXPERIMENTS, "all"), where
    elif program == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), where
    elif program in ("python", "torchrun"):
        _check_script(where, words[1:])
    elif program == "pytest":
        assert all((ROOT / word).exists() for word in words[1:] if not word.startswith("-")), where


def _check_script(where: str, words: Sequence[str]) -> None:
    """That the script or module in ``words`` exists, knows the options after it and finds the files it is given."""
    if "-c" in words:
        return
    if "-m" in words:
        place = words.index("-m") + 1
        home = ROOT / "src" if words[place].startswith("wlb") else ROOT
        source = home / words[place].replace(".", "/")
        source = source / "__init__.py" if source.is_dir() else source.with_suffix(".py")
    else:
        place = next(index for index, word in enumerate(words) if word.endswith(".py"))
        source = ROOT / words[place]
    assert source.is_file(), f"{where}: {source} does not exist"
    after = words[place + 1 :]
    text = "".join(file.read_text(encoding="utf-8") for file in source.parent.glob(f"{source.stem}*.py"))
    imported = re.findall(r"^from ((?:studies\.)?benchmarks\.[\w.]+)", text, re.M)
    parts = [ROOT / f"{name.replace('.', '/')}.py" for name in imported]
    text += "".join(part.read_text(encoding="utf-8") for part in parts if part.is_file())
    assert all(f'"{option}"' in text for option in OPTION.findall(" ".join(after))), f"{where}: {after}"
    assert all((ROOT / word).is_file() for word in after if word.endswith(".toml")), f"{where}: {after}"


@in_turn("block", [b for b in BLOCKS if b.language == "toml"])
def test_configurations_load(block: Block):
    settings = tomllib.loads(block.text)
    settings.setdefault("data", {})
    if "mixture" not in settings["data"]:
        settings["data"].setdefault("store", "corpus")
    JobConfig.model_validate(settings)


@pytest.mark.parametrize(("where", "command"), [c for c in COMMANDS if re.search(r"wlb train \S+\.toml", c[1])])
def test_settings_on_the_command_line_are_settings(where: str, command: str, tmp_path: Path):
    _, _, config, *rest = program_and_arguments(command)
    for block in BLOCKS:
        if block.file == config:
            (tmp_path / config).write_text(block.text)
    path = tmp_path / config
    load_config(path if path.exists() else ROOT / config, [value for name, value in pairwise(rest) if name == "--set"])


@in_turn("block", [b for b in BLOCKS if b.language == "python" and b.not_run is not None])
def test_python_that_is_not_run_imports_what_exists(block: Block):
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom):
            try:
                module = importlib.import_module(node.module or "")
            except UserError:
                return  # an integration whose framework is not installed
            except ModuleNotFoundError as error:
                if (error.name or "").startswith("wlb"):
                    raise
                return  # the framework itself
            assert all(hasattr(module, name.name) for name in node.names), f"{block}: {ast.unparse(node)}"


NAMED = [
    (str(block), name)
    for block in BLOCKS
    if block.language in ("text", "yaml") and block.page.parent.name == "stacks"
    for name in re.findall(r"\bwlb(?:\.\w+)+", block.text)
]


@in_turn(("where", "name"), NAMED)
def test_names_that_others_load_exist(where: str, name: str):
    """Names in settings of frameworks, which need not be installed."""
    parts = name.split(".")
    modules = [ROOT / "src" / Path(*parts[:count]) for count in range(len(parts) - 1, 0, -1)]
    sources = [file for module in modules for file in (module.with_suffix(".py"), module / "__init__.py")]
    source = next(file for file in sources if file.is_file())
    home = source.parent if source.stem == "__init__" else source.with_suffix("")
    own = parts[len(home.relative_to(ROOT / "src").parts) :][0]
    defined = [
        node.name for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    assert own in defined, f"{where}: {name} does not exist"


def test_settings_that_torchtitan_loads_are_those_of_its_loader():
    (page,) = (block.text for block in BLOCKS if "--override.imports" in block.text and block.language == "text")
    (given,) = re.findall(r"balance=({.+})'", page)
    module = ast.parse((ROOT / "src" / "wlb" / "integrations" / "torchtitan.py").read_text())
    (loader,) = (each for each in module.body if isinstance(each, ast.ClassDef) and each.name == "BalancedDataLoader")
    (config,) = (each for each in loader.body if isinstance(each, ast.ClassDef))
    fields = {
        each.target.id for each in config.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    assert json.loads(given).keys() <= fields
