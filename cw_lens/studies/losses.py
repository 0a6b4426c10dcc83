"""What a model loses against its own clean predictions of a text."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cw_lens import backend
from cw_lens.errors import InputError
from cw_lens.prompts import Prompts
from cw_lens.sites import UnsupportedModelError


@dataclass(frozen=True, eq=False)
class StudyText:
    """One text of a corpus, as the model will be given it.

    Attributes:
        data: the corpus.
        example: its number there.
        prompts: a batch of one, at least two tokens.
    """

    data: str
    example: int
    prompts: Prompts


def require_losses(model: Any, texts: Sequence[StudyText], batch_size: int) -> None:
    """Refuses what would fail later.

    Raises:
        InputError: no texts, one without a token to predict, a batch size below 1.
        UnsupportedModelError: a model that does not predict the next token.
    """
    if not texts or not isinstance(batch_size, int) or batch_size < 1:
        what = "no texts" if not texts else f"a batch size of {batch_size}"
        raise InputError(f"{what}: give at least one text and a batch size of at least 1.")
    for text in texts:
        if text.prompts.ids.shape[1] < 2:
            raise InputError(
                f"{text.data}, example {text.example}: one token alone has no loss. Leave out "
                "texts of a single token."
            )
    if not backend.predicts_next_token(model):
        raise UnsupportedModelError(
            "the model does not predict the next token from those before it, so removing values "
            "has no loss to show in. Use a decoder."
        )


@dataclass(frozen=True, eq=False)
class Clean:
    """What the model predicts when nothing is removed.

    Attributes:
        logp: log-probability of every next token.
        nll_sum: loss in nats, summed over the text.
    """

    logp: Float[Tensor, "predicted vocabulary"]
    nll_sum: float

    @cached_property
    def p(self) -> Float[Tensor, "predicted vocabulary"]:
        """Probability of every next token."""
        return self.logp.exp()

    @cached_property
    def top(self) -> Int[Tensor, " predicted"]:
        """The most probable next tokens."""
        return self.logp.argmax(dim=-1)


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
        "kl_sum": (clean.p * (clean.logp - logp)).sum(dim=-1).double().sum().item(),
        "top1_agreed": int((logp.argmax(dim=-1) == clean.top).sum()),
    }


def _logp(logits: Float[Tensor, "position vocabulary"]) -> Float[Tensor, "predicted vocabulary"]:
    return logits[:-1].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)


def sum_nll(logits: Float[Tensor, "position vocabulary"], ids: Int[Tensor, " position"]) -> float:
    """Loss of one text in nats, summed over its predicted tokens."""
    return _nll_sum(_logp(logits), ids)


def _nll_sum(logp: Float[Tensor, "predicted vocabulary"], ids: Int[Tensor, " position"]) -> float:
    return -logp.gather(1, ids[1:, None].to(logp.device)).double().sum().item()
