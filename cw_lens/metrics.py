"""Edge metrics: how much each key matters to each query, by ten definitions (SPEC 3).

A metric is a function LayerAttention -> [batch, head, query, key], row-wise in the query and 0
where a query does not see a key. `METRICS` names those that cw_lens ships; a user's own function
serves wherever a name does.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from cw_lens.errors import InputError
from cw_lens.geometry import inter_head_contributions, intra_head_contributions
from cw_lens.layer import LayerAttention
from cw_lens.noise import mixed, uniform

Edges = Float[Tensor, "batch head query key"]
Metric = Callable[[LayerAttention], Tensor]


def attention(layer: LayerAttention) -> Edges:
    """alpha, the weight after the softmax. Not signed. Vaswani et al. 2017."""
    return layer.pattern


def value_weighted(layer: LayerAttention) -> Edges:
    """alpha ||v W_O||, in units of the residual stream. Not signed. Kobayashi et al. 2020."""
    return layer.pattern * layer.edge_value_norm


def value_weighted_output_normalized(layer: LayerAttention) -> Edges:
    """alpha ||v W_O|| / ||o||, o the whole layer's output. Not signed. Paper section 5.2."""
    return value_weighted(layer) / layer.output_norm[:, None, :, None]


def contribution(layer: LayerAttention) -> Edges:
    """|c-hat|, the size of the inter-head contribution. Not signed. Paper section 5.2."""
    return inter_head_contributions(layer).abs()


def signed_contribution(layer: LayerAttention) -> Edges:
    """c-hat, the inter-head contribution; sums to 1 over head and key. Signed. Paper 4.2."""
    return inter_head_contributions(layer)


def intra_head_contribution(layer: LayerAttention) -> Edges:
    """c-check, the contribution within the head; sums to 1 over key. Signed. Paper 4.2."""
    return intra_head_contributions(layer)


def output_distance(layer: LayerAttention) -> Edges:
    """ALTI: max(0, ||o||_1 - ||o - alpha v W_O||_1), normalised to 1 over head and key.

    Not signed; 0 throughout where no edge is left. The 1-norm needs d_model, so it is taken head
    by head over blocks of queries. Ferrando et al. 2022.
    """
    edges = torch.zeros_like(layer.pattern)
    norm = layer.output.abs().sum(dim=-1)
    keys, d_model = layer.value.shape[2], layer.output.shape[-1]
    size = max(1, _ALTI_ELEMENTS // (keys * d_model * len(layer.output)))
    block = layer.output.new_empty(len(layer.output), size, keys, d_model)
    for head in range(layer.pattern.shape[1]):
        projected = (layer.value[:, head] @ layer.W_O[head])[:, None]
        for start in range(0, layer.pattern.shape[2], size):
            rows = slice(start, start + size)
            # no causal query sees a later key
            seen = slice(0, layer.query_start + start + size if layer.causal else keys)
            alpha = layer.pattern[:, head, rows, seen]
            if layer.gate is not None:
                gated = layer.gate[:, head, rows, None] * layer.value[:, head, None]
                projected = gated @ layer.W_O[head]
            outputs = layer.output[:, rows, None]
            left = block[:, : outputs.shape[1], seen]
            torch.addcmul(outputs, alpha[..., None], projected[:, :, seen], value=-1, out=left)
            gain = norm[:, rows, None] - left.abs_().sum(dim=-1)
            # an edge of weight 0 changes nothing; rounding must not say otherwise
            edges[:, head, rows, seen] = gain.clamp_min(0.0).masked_fill(alpha == 0, 0.0)
    whole = edges.sum(dim=(1, 3), keepdim=True)
    return torch.where(whole > 0, edges / whole, 0.0)


def stream_contribution(layer: LayerAttention) -> Edges:
    """|c-hat| ||y|| / ||x||: the contribution measured against the stream it is added to.

    x is the layer's input, y what the attention adds to it: o, after any norm and multiplier
    behind the output matrix, without bias. Not signed; comparable across layers, which |c-hat| is
    not (SPEC 3).
    """
    rows = slice(layer.query_start, layer.query_start + layer.pattern.shape[2])
    stream = layer.residual[:, rows].norm(dim=-1)
    ratio = torch.where(stream > 0, layer.output_norm / stream, 0.0)
    if layer.stream_gain is not None:
        ratio = ratio * layer.stream_gain
    return contribution(layer) * ratio[:, None, :, None]


def gradient(layer: LayerAttention) -> Edges:
    """|<dL/dz, alpha v>|, L the summed next-token loss: attribution patching to zero.

    Not signed. It needs a backward pass: read the layer with capture(..., gradient=True), as
    `token_scores` does by itself.

    Raises:
        InputError: the layer was read without its gradient.
    """
    if layer.z_gradient is None:
        raise InputError(
            f"layer {layer.index} holds no gradient; the gradient metric needs a backward pass. "
            "Read the model with capture(model, prompts, gradient=True)."
        )
    return (layer.pattern * layer.aligned(layer.z_gradient)).abs()


def random(layer: LayerAttention, seed: int = 0) -> Edges:
    """Uniform in [0, 1) for each head and key, a control; functools.partial sets another seed.

    All queries give a key the same number, so that its token score is uniform too: means over
    queries of separate numbers would gather around 1/2 for early keys, and a ranking by them would
    begin and end with late ones. Fixed by the seed, the example's own tokens, layer, head and key,
    so that an example alone, in a padded batch and in query blocks gets the same numbers.
    """
    device = layer.pattern.device
    heads = layer.pattern.shape[1]
    key = torch.arange(layer.mask.shape[1], device=device) - layer.first[:, None]
    state = mixed(layer.prompt_digest + seed)[:, None, None]
    state = mixed(state + layer.index)
    state = mixed(state + torch.arange(heads, device=device)[:, None])
    state = mixed(state + key[:, None, :])
    edges = uniform(state).to(layer.pattern)[:, :, None].expand(layer.pattern.shape)
    return edges.masked_fill(~layer.edge_mask[:, None], 0.0)


METRICS: dict[str, Metric] = {
    "attention": attention,
    "value_weighted": value_weighted,
    "value_weighted_output_normalized": value_weighted_output_normalized,
    "contribution": contribution,
    "signed_contribution": signed_contribution,
    "intra_head_contribution": intra_head_contribution,
    "output_distance": output_distance,
    "stream_contribution": stream_contribution,
    "gradient": gradient,
    "random": random,
}

PAPER_METRICS = (
    "attention",
    "value_weighted",
    "value_weighted_output_normalized",
    "contribution",
)
"""The four that the paper compares (section 5.2)."""

_ALTI_ELEMENTS = 1 << 21  # floats in one block of output_distance: 8 MB, to stay in the cache
