"""``--model`` takes the directory or ``config.json`` of a Hugging Face model wherever it takes a preset."""

import json

import pytest

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 512,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
LENGTHS = "synthetic:400:4096:0"
STEP = ("--context-window", 4096, "--micro-batches", 4)
COMMANDS = {
    "compare": (LENGTHS, *STEP, "--methods", "sequential", "--steps", 2),
    "prefill": (LENGTHS, "--token-budget", 4096, "--methods", "tokens"),
    "tune": (LENGTHS, *STEP, "--steps", 4),
    "shard": (LENGTHS, "--context-window", 4096, "--cp", 2, "--samples", 2),
    "report": (LENGTHS, "--context-window", 4096, "--parallel", "pp=2", "--steps", 2),
    "simulate --search": (
        *("--gpus", 2, "--context-window", 4096, "--batch-tokens", 4 * 4096, "--lengths", LENGTHS, "--steps", 1),
    ),
}


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixtral").mkdir()
    (tmp_path / "mixtral" / "config.json").write_text(json.dumps(MIXTRAL), encoding="utf-8")
    return "mixtral"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_needs_a_model_takes_a_directory(command, wlb, model):
    status, out, err = wlb(*command.split(), *COMMANDS[command], "--model", model, "--json")
    assert status == 0, err
    json.loads(out)
    status, _, err = wlb(*command.split(), *COMMANDS[command], "--model", "mixtrol")
    assert status == 2
    assert "unknown model 'mixtrol'; did you mean mixtral-8x7b? choose from tiny" in err
    assert err.count("\n") == 1


def test_a_directory_and_its_config_json_give_the_same_prices(wlb, model):
    results = []
    for name in (model, f"{model}/config.json"):
        status, out, _ = wlb("compare", *COMMANDS["compare"], "--model", name, "--json")
        assert status == 0
        result = json.loads(out)
        assert result["workload"].pop("model") == name
        for row in result["methods"]:
            row.pop("planning_ms_per_step")
        results.append(result)
    assert results[0] == results[1]


def test_a_model_that_is_only_priced_is_not_profiled(wlb, model):
    status, _, err = wlb("profile", "--out", "profile.json", "--model", model)
    assert status == 2
    assert "the model has a mixture of experts (experts), which can be priced and simulated but not trained" in err
