"""What a model loses against its own clean predictions of a text."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cw_lens import backend
from cw_lens.prompts import Prompts


@dataclass(frozen=True, eq=False)
class Clean:
    """What the model predicts when nothing is removed.

    Attributes:
        logp: log-probability of every next token.
        nll_sum: loss in nats, summed over the text.
    """

    logp: Float[Tensor, "predicted vocabulary"]
    nll_sum: float


def clean_predictions(model: Any, prompts: Prompts) -> Clean:
    """What the model predicts for one text when nothing is removed."""
    with torch.no_grad():
        logp = _logp(backend.forward(model, prompts)[0])
    return Clean(logp, _nll_sum(logp, prompts.ids[0]))


def losses(
    logits: Float[Tensor, "position vocabulary"], ids: Int[Tensor, " position"], clean: Clean
) -> dict[str, Any]:
    """Sums over one text: loss and KL(clean || this) in nats, and top tokens that agree."""
    logp = _logp(logits)
    return {
        "nll_sum": _nll_sum(logp, ids),
        "clean_nll_sum": clean.nll_sum,
        "kl_sum": (clean.logp.exp() * (clean.logp - logp)).sum(dim=-1).double().sum().item(),
        "top1_agreed": int((logp.argmax(dim=-1) == clean.logp.argmax(dim=-1)).sum()),
    }


def _logp(logits: Float[Tensor, "position vocabulary"]) -> Float[Tensor, "predicted vocabulary"]:
    return logits[:-1].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)


def sum_nll(logits: Float[Tensor, "position vocabulary"], ids: Int[Tensor, " position"]) -> float:
    """Loss of one text in nats, summed over its predicted tokens."""
    return _nll_sum(_logp(logits), ids)


def _nll_sum(logp: Float[Tensor, "predicted vocabulary"], ids: Int[Tensor, " position"]) -> float:
    return -logp.gather(1, ids[1:, None].to(logp.device)).double().sum().item()
