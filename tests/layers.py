"""Layers made by hand: random patterns, values and biases of any shape, with padding."""

import torch
from hypothesis import strategies as st

from cw_lens.layer import LayerAttention, layer_attention


def random_layer(
    batch: int = 2,
    heads: int = 4,
    groups: int = 2,
    length: int = 7,
    *,
    d_head: int = 5,
    d_model: int = 11,
    bias: bool = True,
    padding: str | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    causal: bool = True,
    gated: bool = False,
) -> LayerAttention:
    """A layer whose value vectors carry a bias; examples differ in length if padded."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch, length, dtype=torch.bool)
    for row in range(batch):
        cut = row % length if padding else 0
        mask[row, : cut if padding == "left" else 0] = False
        if padding == "right":
            mask[row, length - cut :] = False
    logits = torch.randn(batch, heads, length, length, generator=g, dtype=dtype) * 2
    hidden = ~mask[:, None, None, :].expand_as(logits)
    if causal:
        hidden = hidden | torch.ones(length, length, dtype=torch.bool).triu(1)
    pattern = logits.masked_fill(hidden, -1e9).softmax(-1)
    value = torch.randn(batch, groups, length, d_head, generator=g, dtype=dtype)
    value = value + torch.randn(groups, 1, d_head, generator=g, dtype=dtype)
    return layer_attention(
        1,
        pattern,
        value,
        W_O=torch.randn(heads, d_head, d_model, generator=g, dtype=dtype),
        b_O=3 * torch.randn(d_model, generator=g, dtype=dtype) if bias else None,
        residual=torch.randn(batch, length, d_model, generator=g, dtype=dtype),
        ids=torch.randint(0, 50, (batch, length), generator=g),
        mask=mask,
        causal=causal,
        gate=torch.rand(batch, heads, length, d_head, generator=g, dtype=dtype) if gated else None,
    )


@st.composite
def any_layer(draw: st.DrawFn) -> LayerAttention:
    """Groups, biases, gates, batches, lengths 1 to 64, padding on either side or none."""
    groups = draw(st.sampled_from([1, 2, 3]))
    return random_layer(
        batch=draw(st.integers(1, 3)),
        heads=groups * draw(st.sampled_from([1, 2, 3])),
        groups=groups,
        length=draw(st.integers(1, 64)),
        bias=draw(st.booleans()),
        padding=draw(st.sampled_from([None, "left", "right"])),
        seed=draw(st.integers(0, 10_000)),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
        causal=draw(st.booleans()),
        gated=draw(st.booleans()),
    )
