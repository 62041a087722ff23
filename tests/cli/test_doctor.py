"""``wlb doctor`` in good and in broken environments."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import refusal, run
from wlb.integrations import environment

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 80,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}
OPT = {
    "model_type": "opt",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 96,
    "vocab_size": 80,
}
REMOTE = LLAMA | {"model_type": "custom", "auto_map": {"AutoConfig": "configuration_custom.CustomConfig"}}
MAMBA = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2}


@pytest.fixture
def installed(monkeypatch):
    """Let only these packages be installed, and their imports fail with these errors."""

    def only(versions: dict[str, str | None], errors: dict[str, str] | None = None) -> None:
        def version(name: str) -> str | None:
            if name not in versions:
                raise environment.PackageNotFoundError(name)
            return versions[name]

        found = environment.STACKS | environment.KERNELS
        of_module = {found[name]: error for name, error in (errors or {}).items()}
        monkeypatch.setattr(environment, "version", version)
        monkeypatch.setattr(environment, "_import_error", lambda module: of_module.get(module, ""))

    return only


def written(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def diagnosis(*arguments: object) -> tuple[int, Any]:
    done = run("doctor", *arguments, "--json")
    return done.returncode, json.loads(done.stdout)


def test_without_torch_there_is_only_planning(installed):
    installed({"numpy": "2.3.0"})
    done = run("doctor", "--model", "llama3-8b")
    assert done.returncode == 0
    assert "planning only" in done.stdout
    assert "wlb check     llama3-8b: works" in done.stdout
    assert "wlb train" not in done.stdout


def test_each_package_says_what_was_tested_with_its_version(installed, monkeypatch):
    tested = [
        {
            "stack": "transformers",
            "version": "5.24.0",
            "pins": {"transformers": "5.24.0"},
            "features": {"packing": "exact", "lists": "refused"},
        },
        {"stack": "ms-swift", "version": "4.6.0", "pins": {"trl": "0.29.1"}, "features": {"packing": "exact"}},
        {"stack": "transformers", "version": "5.16.1", "pins": {"torch": "2.13.0"}, "features": {"packing": "exact"}},
    ]
    monkeypatch.setattr(environment.json, "loads", lambda text: tested)
    installed({"transformers": "5.24.0"})
    assert "exact: packing; refused: lists" in run("doctor").stdout
    installed({"transformers": "5.20.0", "trl": "1.0", "torch": "2.13.0+cpu", "ms-swift": "4.6.0", "verl": None})
    said = " ".join(run("doctor").stdout.split())
    for text in (
        "nothing; 5.24.0, 5.16.1 were",
        "trl 1.0 works nothing",
        "under the pins of transformers 5.16.1",
        "verl unknown",
    ):
        assert text in said
    assert "its pins, without it: exact: packing" in said


def test_broken_and_unsuitable_packages_are_problems(installed):
    installed({"torch": "2.0.1", "megatron-core": "0.16.1"}, {"torch": "OSError: libcudart", "megatron-core": "gone"})
    done = run("doctor", "--model", "llama3-8b")
    assert done.returncode == 1
    problems = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.startswith("problem")]
    assert problems[0].startswith("torch 2.0.1: wlb-llm needs torch")
    assert problems[1:] == ["torch 2.0.1: OSError: libcudart", "megatron-core 0.16.1: gone"]
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("found", [None, "unknown", "2.13.0"])
def test_a_version_that_nobody_can_compare_is_no_problem(found, monkeypatch):
    monkeypatch.setattr(environment, "version", lambda name: found)
    monkeypatch.setattr(environment, "requires", lambda name: ["torch<2.15,>=2.11"])
    assert [*environment.wrong_versions()] == []


def test_an_import_that_fails_crashes_or_prints_is_one_line(tmp_path, monkeypatch):
    sources = {
        "raises": "raise ImportError('undefined symbol:\\n  _ZN3c10')",
        "crashes": "import os; os.abort()",
        "exits": "raise SystemExit(3)",
        "prints": "print('hello')",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    found = {name: environment._import_error(name) for name in (*sources, "absent")}
    assert found == {
        "raises": "ImportError: undefined symbol: _ZN3c10",
        "crashes": "import crashes ends the process with status -6",
        "exits": "SystemExit: 3",
        "prints": "",
        "absent": "ModuleNotFoundError: No module named 'absent'",
    }


@pytest.mark.parametrize(
    ("device", "problems"),
    [
        ({"gpus": ["H100"], "capabilities": [(9, 0)], "nccl": (2, 27, 3), "settings": {}}, []),
        ({"gpus": ["V100"], "capabilities": [(7, 0)], "nccl": (2, 27, 3), "settings": {}}, ["compute capability 8.0"]),
        ({"gpus": ["H100"], "capabilities": [(9, 0)], "nccl": (2, 25, 1), "settings": {}}, ["NCCL 2.25.1 ignores"]),
        ({"gpus": [], "settings": {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}}, ["unset it"]),
    ],
)
def test_what_gpus_and_settings_cannot_do_is_a_problem(device, problems):
    found = [*environment.wrong_gpus(device)]
    assert len(found) == len(problems)
    for text, problem in zip(problems, found, strict=True):
        assert text in problem


def test_a_model_is_a_problem_only_if_nothing_here_trains_it(tmp_path, installed):
    pytest.importorskip("transformers")
    installed({"torch": "2.13.0", "transformers": "5.24.0"})
    status, found = diagnosis("--model", written(tmp_path / "llama", LLAMA))
    assert (status, found["problems"]) == (0, [])
    assert found["model"] == {"wlb check": "", "wlb train": "", "transformers": ""}
    status, found = diagnosis("--model", written(tmp_path / "mamba", MAMBA))
    assert status == 1
    assert all(found["model"].values())
    assert "where documents end" in found["model"]["transformers"]
    status, found = diagnosis("--model", written(tmp_path / "broken", LLAMA | {"num_attention_heads": 5}))
    assert status == 1
    assert "hidden_size" in found["model"]["wlb check"]
    status, found = diagnosis("--model", "nemotron-h-8b")  # a preset that is only priced
    assert (status, found["problems"]) == (1, [f"model: {found['model']['wlb train']}"])
    for name, message in (("nosuch", "unknown model 'nosuch'"), (str(tmp_path), "holds no config.json")):
        assert message in refusal("doctor", "--model", name)
    status, found = diagnosis("--model", written(tmp_path / "opt", OPT))
    assert (status, found["problems"]) == (0, [])
    assert found["model"]["wlb check"]
    assert not found["model"]["transformers"]
    status, found = diagnosis("--model", written(tmp_path / "remote", REMOTE))
    assert (status, found["problems"]) == (1, [f"model: {found['model']['wlb train']}"])
    assert "custom code" in found["model"]["transformers"]


@pytest.mark.parametrize(
    ("gpus", "settings", "said"),
    [
        (["H100"], {}, "training sets PYTORCH_ALLOC_CONF = expandable_segments:True"),
        (["H100"], {"PYTORCH_CUDA_ALLOC_CONF": "a:1"}, "PYTORCH_CUDA_ALLOC_CONF = a:1, as you set it"),
        ([], {}, ""),
    ],
)
def test_the_allocator_is_what_training_leaves_or_sets(installed, monkeypatch, gpus, settings, said):
    device = {"gpus": gpus, "capabilities": [(9, 0)] * len(gpus), "cuda": "12.8", "settings": settings}
    monkeypatch.setattr(environment, "find_gpus", lambda: device)
    installed({"torch": "2.13.0"})
    allocator = [line for line in run("doctor").stdout.splitlines() if line.startswith("allocator")]
    assert [line.split(maxsplit=1)[1] for line in allocator] == ([said] if said else [])


def test_here_the_screen_has_a_row_for_torch(monkeypatch):
    pytest.importorskip("torch")
    for found in (environment.STACKS, environment.KERNELS):  # others are imported in the same way, which takes seconds
        for name in found.keys() - {"torch"}:
            monkeypatch.delitem(found, name)
    done = run("doctor")
    assert "torch built for" in done.stdout
    assert any(line.split()[:1] == ["torch"] and "works" in line for line in done.stdout.splitlines())
