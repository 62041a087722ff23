"""The benchmark of Hugging Face models says what is exact, what is refused, and what must not be."""

import pytest


def test_the_table_says_what_is_wrong(benchmark):
    row = {"model": "Falcon", "transformers": 0.3, "packed": "no", "shared": "no"}
    assert [*benchmark.verdicts(row).values()] == ["Falcon", "WRONG, 3e-01", "refused: no ...", ""]
    assert "exact, 3e-16" in benchmark.verdicts(row | {"transformers": 3e-16}).values()


def test_every_model_can_be_made_and_is_compared(benchmark):
    pytest.importorskip("transformers")
    row = benchmark.error_of  # of one process, without the second column
    model = benchmark.model_of("Mistral")
    benchmark.train(model, *_single(benchmark))
    batch = benchmark.FlatteningCollator()(benchmark.DOCUMENTS[:1])
    assert row(model, batch, benchmark.gradient(model), shared=False) < benchmark.EXACT


def _single(benchmark):
    import torch

    ids = torch.tensor([benchmark.DOCUMENTS[0]["input_ids"]])
    return {"input_ids": ids, "use_cache": False}, ids[:, 1:]


def test_an_unknown_model_is_one_line(benchmark, capsys):
    assert benchmark.main(["--models", "Llama9"]) == 2
    assert capsys.readouterr().err.startswith(
        "huggingface models benchmark: error: unknown model 'Llama9'; choose from Llama"
    )
