"""Slow, literal formulas in d_model and float64: what the fast ones are held against."""

import torch
from torch import Tensor

from cw_lens.layer import LayerAttention


def written(layer: LayerAttention) -> Tensor:
    """alpha_ij v_j W_O of every edge, [batch, head, query, key, d_model]: the huge tensor.

    Where a query has a gate, its value is gate_i * v_j.
    """
    value = layer.value.double()[:, :, None]
    if layer.gate is not None:
        value = value * layer.gate.double()[:, :, :, None]
    projected = torch.einsum("bhqkd,hdm->bhqkm", value, layer.W_O.double())
    return layer.pattern.double()[..., None] * projected


def inter_head(layer: LayerAttention) -> Tensor:
    edges = written(layer)
    output = edges.sum(dim=(1, 3))
    inner = torch.einsum("bqm,bhqkm->bhqk", output, edges)
    return _divided(inner, output.pow(2).sum(-1)[:, None, :, None])


def intra_head(layer: LayerAttention) -> Tensor:
    edges = written(layer)
    output = edges.sum(dim=3)
    inner = torch.einsum("bhqm,bhqkm->bhqk", output, edges)
    return _divided(inner, output.pow(2).sum(-1)[..., None])


def output_distance(layer: LayerAttention) -> Tensor:
    edges = written(layer)
    output = edges.sum(dim=(1, 3))
    left = (output[:, None, :, None] - edges).abs().sum(-1)
    gain = (output.abs().sum(-1)[:, None, :, None] - left).clamp_min(0)
    return _divided(gain, gain.sum(dim=(1, 3), keepdim=True))


def token_score(edges: Tensor, mask: Tensor, causal: bool = True) -> Tensor:
    """SPEC 4, one example, head and key at a time."""
    batch, heads, queries, keys = edges.shape
    scores = torch.zeros(batch, heads, keys, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for j in range(keys):
                seen = [
                    edges[b, h, i, j].item()
                    for i in range(queries)
                    if mask[b, i] and mask[b, j] and (i >= j or not causal)
                ]
                if seen:
                    scores[b, h, j] = sum(seen) / len(seen)
    return scores


def _divided(top: Tensor, bottom: Tensor) -> Tensor:
    return torch.where(bottom > 0, top / bottom, torch.zeros((), dtype=top.dtype))
