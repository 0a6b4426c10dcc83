"""Trying a model out: short random inputs, and writes whose effect is known beforehand."""

from collections.abc import Callable
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from cw_lens import backend
from cw_lens.edits import write_routes
from cw_lens.images import prompts_from_images
from cw_lens.interventions import scaled_values
from cw_lens.layer import LayerAttention
from cw_lens.prompts import Prompts, first_token_id, prompts_from_ids, repeated
from cw_lens.runs import capture
from cw_lens.sites import attention_sites

POSITIONS = 12
"""Tokens of a trial text."""

_LAYERS_AT_ONCE = 16  # bounds the logits of one batch of trial writes


def trial_prompts(model: Any, examples: int = 1, seed: int = 0) -> Prompts:
    """Random ids, or noise for a vision model; BOS first where the tokenizer has one."""
    generator = torch.Generator().manual_seed(seed)
    if backend.reads_images(model):
        channels, height, width, _ = backend.image_shape(model.original_model.config)
        noise = torch.randn(examples, channels, height, width, generator=generator)
        return prompts_from_images(model, noise)
    length = min(POSITIONS, backend.context_length(model) or POSITIONS)
    shape = (examples, length)
    ids = torch.randint(0, backend.vocabulary_size(model), shape, generator=generator)
    tokenizer = backend.tokenizer(model)
    bos = None if tokenizer is None else first_token_id(tokenizer)
    if bos is not None:
        ids[:, 0] = bos
    return prompts_from_ids(model, ids.tolist())


def write_miss(model: Any, layers: list[int]) -> float:
    """How far the outputs after trial writes are from what they should be, at worst.

    In each layer one value is masked, and one of another query head halved, and the layer's output
    must lose exactly what they gave. One batch tries many layers: example n is written into at
    its own layer alone, the last example nowhere; until then each must be as it was.

    Returns:
        The largest miss of any layer, relative to its longest output; infinity if the logits of
        an example do not change.
    """
    tries = [layers[i : i + _LAYERS_AT_ONCE] for i in range(0, len(layers), _LAYERS_AT_ONCE)]
    return max(_write_miss(model, tried) for tried in tries)


def _write_miss(model: Any, layers: list[int]) -> float:
    given = repeated(trial_prompts(model), len(layers) + 1)
    clean = capture(model, given, layers=layers, space="attention", allow_folded=True).layers
    masked: dict[int, Tensor] = {}
    halved: dict[int, Tensor] = {}
    lost = []
    for row, layer in enumerate(clean):
        key = int(layer.pattern[row, 0].sum(dim=0).argmax())
        masked[layer.index] = _marked(layer, row, 0, key)
        lost.append(_written(layer, row, 0, key))
        last = layer.pattern.shape[1] - 1
        if last:
            halved[layer.index] = _marked(layer, row, last, key)
            lost[row] += 0.5 * _written(layer, row, last, key)
    outputs: dict[int, Tensor] = {}
    hooks = _output_hooks(model, layers, outputs)
    writes = scaled_values(model, 0.0, masked), scaled_values(model, 0.5, halved)
    with torch.no_grad(), writes[0], writes[1], backend.hooked(hooks):  # ours see what was written
        logits = backend.forward(model, given)
    moved = (logits[:-1] - logits[-1]).abs().flatten(1).amax(dim=1)
    if not (moved > 0).all():
        return float("inf")
    worst = 0.0
    for row, layer in enumerate(clean):
        expected = layer.output if layer.b_O is None else layer.output + layer.b_O
        expected = expected[row:].clone()
        expected[0] -= lost[row]
        found = outputs[layer.index].reshape(layer.output.shape).to(expected)[row:]
        size = layer.output.norm(dim=-1).max()
        worst = max(worst, ((found - expected).norm(dim=-1).max() / size).item())
    return worst


def _output_hooks(
    model: Any, layers: list[int], outputs: dict[int, Tensor]
) -> list[tuple[torch.nn.Module, Callable[[Any], None]]]:
    """Hooks that keep each layer's output behind the place where writes go in."""
    routes = write_routes(model, layers)

    def keep(layer: int) -> Callable[[Any], None]:
        def hook(returned: Any) -> None:
            outputs[layer] = returned[0] if isinstance(returned, tuple) else returned

        return hook

    return [
        (
            site.attention if routes[site.index] == "output" else site.points["output"],
            keep(site.index),
        )
        for site in attention_sites(model, layers)
    ]


def _marked(layer: LayerAttention, row: int, head: int, key: int) -> Tensor:
    mask = torch.zeros_like(layer.pattern[:, :, 0], dtype=torch.bool)
    mask[row, head, key] = True
    return mask


def _written(
    layer: LayerAttention, row: int, head: int, key: int
) -> Float[Tensor, "query d_model"]:
    value = layer.value[row, head, key].expand(layer.pattern.shape[2], -1)
    if layer.gate is not None:
        value = value * layer.gate[row, head]
    projected = einsum(value, layer.W_O[head], "query d, d model -> query model")
    return layer.pattern[row, head, :, key, None] * projected
