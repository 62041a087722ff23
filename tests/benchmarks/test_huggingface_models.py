"""The benchmark of Hugging Face models says what is exact, what is refused, and what must not be."""

import pytest

from benchmarks import huggingface_models


def test_the_table_says_what_is_wrong():
    row = {"model": "Falcon", "transformers": 0.3, "packed": "no", "shared": "no"}
    assert [*huggingface_models.verdicts(row).values()] == ["Falcon", "WRONG, 3e-01", "refused: no ...", ""]
    assert "exact, 3e-16" in huggingface_models.verdicts(row | {"transformers": 3e-16}).values()


def test_every_model_can_be_made_and_is_compared():
    pytest.importorskip("transformers")
    model = huggingface_models.model_of("Mistral")
    huggingface_models.train(model, *_single())
    batch = huggingface_models.FlatteningCollator()(huggingface_models.DOCUMENTS[:1])
    error = huggingface_models.error_of(model, batch, huggingface_models.gradient(model))
    assert isinstance(error, float)
    assert error < huggingface_models.EXACT


def _single():
    import torch

    ids = torch.tensor([huggingface_models.DOCUMENTS[0]["input_ids"]])
    return {"input_ids": ids, "use_cache": False}, ids[:, 1:]


def test_an_unknown_model_is_one_line(capsys):
    assert huggingface_models.main(["--models", "Llama9"]) == 2
    assert capsys.readouterr().err.startswith(
        "huggingface models benchmark: error: unknown model 'Llama9'; choose from Llama"
    )
