"""Losses of routers in a loop of one's own: the same gradients and state however documents are packed."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.training.distributed import run_ranks
from tests.training.documents import RandomDocuments
from wlb.documents.segments import Segment
from wlb.errors import UserError
from wlb.packing.plan import MicroBatch
from wlb.runtime.batch import Batch, RankSlice
from wlb.runtime.reading import make_batch
from wlb.runtime.routers import RouterLosses
from wlb.schedules.layout import Layout

LAYERS, EXPERTS, ACTIVE, WIDTH = 2, 6, 2, 5
BALANCE, Z = 0.3, 0.2
TOKENS = torch.randn(40, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def batch_of(tokens: int, *, is_empty: bool = False) -> Batch:
    labels = torch.full((tokens,), -100 if is_empty else 0)
    zeros = torch.zeros(tokens, dtype=torch.int64)
    return Batch(zeros, labels, zeros, (tokens,), loss_tokens=len(TOKENS), ranks=3, is_empty=is_empty)


def trained(packings: Sequence[Sequence[int]]) -> tuple[Tensor, RouterLosses]:
    """The gradient of the routers in the last of some steps, whose micro-batches have so many tokens."""
    routers = RouterLosses(ACTIVE, balance=BALANCE, z=Z)
    weights = torch.linspace(-1, 1, LAYERS * EXPERTS * WIDTH, dtype=torch.float64).view(LAYERS, EXPERTS, WIDTH).sin()
    weights.requires_grad_()
    gradient = torch.zeros_like(weights)
    for sizes in packings:
        gradient = torch.zeros_like(weights)
        for rows in TOKENS.split([*sizes]):
            batch = batch_of(len(rows))
            logits = rows.new_zeros(len(rows), 3, requires_grad=True)
            loss = batch.loss(logits, router=routers.of(batch, [rows @ layer.T for layer in weights]))
            gradient += torch.autograd.grad(loss, weights)[0]
        empty = batch_of(1, is_empty=True)
        assert routers.of(empty, [TOKENS[:1] @ layer.T for layer in weights]) == 0
        routers.end_step()
        with torch.no_grad():
            weights -= 0.1 * gradient
    return gradient, routers


def test_packing_changes_neither_gradients_nor_state() -> None:
    exact, routers = trained([[40], [40]])
    for packing in ([10, 10, 10, 10], [1, 36, 3]):
        found, others = trained([packing, packing[::-1]])
        assert torch.allclose(found, exact, rtol=1e-12, atol=1e-14)
        assert torch.equal(others.state_dict()["shares"], routers.state_dict()["shares"])


def test_losses_are_those_of_the_whole_step_with_the_shares_of_the_last() -> None:
    _, routers = trained([[40]])
    logits = [TOKENS @ torch.ones(EXPERTS, WIDTH, dtype=torch.float64).cumsum(0).T / n for n in (7, 3)]
    shares, expected = routers.state_dict()["shares"], 0.0
    assert shares.sum(-1).tolist() == pytest.approx([1.0] * LAYERS)
    for of_layer, share in zip(logits, shares, strict=True):
        expected += BALANCE * float((EXPERTS * of_layer.softmax(-1).mean(0) @ share - 1) * len(TOKENS))
        expected += Z * float(of_layer.logsumexp(-1).square().sum())
    assert routers.of(batch_of(40), logits).item() == pytest.approx(expected, rel=1e-12)
    routers.end_step()
    chosen = [F.one_hot(one.topk(ACTIVE).indices, EXPERTS).sum((0, 1)).double() / 80 for one in logits]
    assert torch.equal(routers.state_dict()["shares"], torch.stack(chosen))


def test_a_rank_without_tokens_has_no_losses_and_counts_none() -> None:
    routers, logits = RouterLosses(ACTIVE, balance=BALANCE, z=Z), [torch.ones(1, EXPERTS)]
    whole = make_batch(MicroBatch((Segment(0, 0, 1),), 0.0), RandomDocuments(np.array([1]), vocab_size=5))
    ranks = [RankSlice(cp_rank=rank, layout=Layout(cp=2)).of(whole) for rank in range(2)]
    assert sorted(float(routers.of(one, logits)) > 0 for one in ranks) == [False, True]
    routers.end_step()
    assert float(routers.state_dict()["shares"].sum()) == 1


def test_router_losses_weigh_as_the_loss_of_a_token_does() -> None:
    batch, logits = batch_of(40), torch.zeros(40, 3, dtype=torch.float64)
    added = batch.loss(logits, router=torch.tensor(5.0)) - batch.loss(logits)
    assert added.item() == pytest.approx(5.0 * batch.ranks / batch.loss_tokens)  # gradients are averaged over ranks


def _shares_of(rows: Sequence[slice]) -> Tensor:
    routers, mine = RouterLosses(ACTIVE), TOKENS[rows[dist.get_rank()]] if dist.is_initialized() else TOKENS[rows[0]]
    routers.of(batch_of(len(mine)), [mine @ torch.eye(WIDTH, EXPERTS, dtype=torch.float64)] * LAYERS)
    routers.end_step()
    shares: Tensor = routers.state_dict()["shares"]
    return shares


def test_shares_are_those_of_all_processes() -> None:
    exact = _shares_of([slice(0, 40)])
    for shares in run_ranks(2, _shares_of, [slice(0, 9), slice(9, 40)]):
        assert torch.equal(shares, exact)


def test_a_state_continues() -> None:
    _, routers = trained([[40]])
    continued = RouterLosses(ACTIVE, balance=BALANCE, z=Z)
    continued.load_state_dict(routers.state_dict())
    logits = [TOKENS.new_ones(40, EXPERTS).cumsum(1)] * LAYERS
    assert torch.equal(continued.of(batch_of(40), logits), routers.of(batch_of(40), logits))


def test_wrong_uses_are_named() -> None:
    routers = RouterLosses(ACTIVE)
    with pytest.raises(UserError, match=r"router_logits are \(3, 6\), not \(40, experts\) in every layer"):
        routers.of(batch_of(40), [torch.zeros(3, EXPERTS)])
    with pytest.raises(UserError, match=r"router_logits are none"):
        routers.of(batch_of(40), ())
    with pytest.raises(UserError, match=r"no losses were computed in this step; call of"):
        routers.end_step()


def test_a_hugging_face_mixture_trains_alike_in_every_packing() -> None:
    transformers = pytest.importorskip("transformers")
    from wlb.integrations.huggingface import register_attention
    from wlb.integrations.packed import packed_batches

    sizes = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 40}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "experts_implementation": "eager"}
    config = transformers.Qwen3MoeConfig(**sizes, **heads, **experts, use_cache=False)
    documents = [torch.arange(length) * 7 % 40 for length in (90, 7, 33, 64, 12, 5, 48, 20)]

    def trained_in(micro_batches: int) -> Tensor:
        torch.manual_seed(0)
        model = transformers.Qwen3MoeForCausalLM(config).double()
        register_attention(model)
        optimizer, routers = torch.optim.SGD(model.parameters(), lr=0.1), RouterLosses(2, balance=BALANCE, z=Z)
        window = sum(map(len, documents)) // micro_batches + 1
        for step in packed_batches(
            documents, context_window=window, micro_batches=micro_batches, model="tiny", epochs=3, shuffle=False
        ):
            for batch in step.batches:
                out = model(**batch, output_router_logits=True)
                batch.loss(out.logits, router=routers.of(batch, out.router_logits)).backward()
            optimizer.step()
            optimizer.zero_grad()
            routers.end_step()
        return torch.cat([weight.detach().flatten() for weight in model.parameters()])

    assert torch.allclose(trained_in(3), trained_in(1), rtol=1e-12, atol=1e-15)
