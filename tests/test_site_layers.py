"""What a pass showed of a layer: whether its queries see only earlier keys."""

import pytest
import torch

from cw_lens.site_layers import _is_causal

pytestmark = pytest.mark.apart


def patterns(*rows: str) -> torch.Tensor:
    """One example for each name: causal, both (ways) or nan."""
    lower = torch.ones(4, 4).tril()
    made = {
        "causal": lower / lower.sum(-1, keepdim=True),
        "both": torch.full((4, 4), 0.25),
        "nan": torch.full((4, 4), torch.nan),
    }
    return torch.stack([made[row] for row in rows])[:, None]


@pytest.mark.parametrize(
    ("rows", "causal"),
    [
        (["causal"], True),
        (["both"], False),
        (["causal", "both"], False),
        (["causal", "nan"], True),
        (["both", "nan"], False),
    ],
)
def test_a_layer_is_causal_unless_a_first_query_sees_a_later_key(rows, causal):
    """An example whose activations broke beside sound ones must not change how those are read."""
    assert _is_causal(patterns(*rows), torch.ones(len(rows), 4, dtype=torch.bool)) is causal


def test_padding_before_the_first_token_is_no_later_key():
    pattern = patterns("causal")
    mask = torch.tensor([[False, True, True, True]])
    assert _is_causal(pattern, mask)
    pattern[0, 0, 1, 3] = 0.5
    assert not _is_causal(pattern, mask)
