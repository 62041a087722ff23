"""``--model`` takes the directory or ``config.json`` of a Hugging Face model wherever it takes a preset."""

import json

from tests.cli.conftest import printed, refusal

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
SIZE = ("--context-window", 4096, "--batch-tokens", 4 * 4096, "--gpus", 2, "--steps", 1, "--systems", "plain-4d")
COMMANDS = {
    "check": ("synthetic:400:4096:0", *SIZE),
    "report": ("synthetic:400:4096:0", *SIZE[:-2]),
}


def test_a_directory_its_config_json_and_no_unknown_name_are_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL), encoding="utf-8")
    for command, arguments in COMMANDS.items():
        named = [(*command.split(), *arguments, "--model", name) for name in (tmp_path, tmp_path / "config.json")]
        found = [json.loads(printed(*of_one, "--json"))["systems"] for of_one in named]
        assert found[0] == found[1]
        unknown = refusal(*command.split(), *arguments, "--model", "mixtrol")
        assert "unknown model 'mixtrol'; did you mean mixtral-8x7b? choose from tiny" in unknown
