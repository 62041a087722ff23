"""Models with layers that carry a state, packed: exact or refused, under every version of transformers.

Their kernels need a GPU; stand-ins read the boundaries that transformers hands on.
"""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import huggingface_models as hybrids
from benchmarks.parts import kernel_stand_ins
from tests.integrations.huggingface.models import transformers
from tests.training.distributed import run_ranks
from wlb.errors import UserError
from wlb.integrations.huggingface import register_attention
from wlb.integrations.packed import FlatteningCollator

SINCE_5_16 = (
    "Lfm2",
    "Lfm2Moe",
    "Qwen3Next",
    "Qwen3_5",
    "Qwen3_5Moe",
    "OlmoHybrid",
    "Bamba",
    "GraniteMoeHybrid",
    "Zamba2",
)
SINCE_5_17 = ("FalconH1", "NemotronH")
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))


def _errors() -> dict[str, float | str]:
    """Of each family that of its gradient, or why it is refused."""
    kernel_stand_ins.install()
    return {family: _error(hybrids.model_of(family)) for family in SINCE_5_16 + SINCE_5_17}


def _error(model: Any) -> float | str:
    hybrids.train_singly(model)
    expected = hybrids.gradient(model)
    try:
        register_attention(model)
    except UserError as error:
        return str(error)
    return hybrids.error_of(model, FlatteningCollator()(hybrids.DOCUMENTS), expected)


@pytest.fixture(scope="module")
def errors() -> dict[str, float | str]:
    (found,) = run_ranks(1, _errors)
    return dict(found)


def _check(found: float | str, since: tuple[int, int], record_property: Callable[[str, object], None]) -> None:
    if since > VERSION:
        assert f"learn where documents end since transformers {since[0]}.{since[1]}; upgrade it" in str(found)
        record_property("refused", found)
    else:
        assert isinstance(found, float)
        assert found < hybrids.EXACT


@pytest.mark.proves("Lfm2, Qwen3-Next, Qwen3.5, Bamba, Zamba2")
@pytest.mark.parametrize("family", SINCE_5_16)
def test_documents_stay_apart_in_layers_with_a_state(family: str, errors: Any, record_property: Any):
    _check(errors[family], (5, 16), record_property)


@pytest.mark.proves("Nemotron-H, Falcon-H1")
@pytest.mark.parametrize("family", SINCE_5_17)
def test_documents_stay_apart_in_layers_that_learnt_it_later(family: str, errors: Any, record_property: Any):
    _check(errors[family], (5, 17), record_property)


@pytest.mark.proves("OPT")
def test_opt_is_exact_where_it_leaves_its_mask_to_the_attention(record_property: Any):
    found = _error(hybrids.model_of("OPT"))
    if VERSION < (5, 18):
        assert "or made by the model as in OPT before transformers 5.18, but packed micro-batches have none" in str(
            found
        )
        record_property("refused", found)
    else:
        assert float(found) < hybrids.EXACT
