"""Explanations made by hand: random layers under any token texts, without a model."""

import torch

from cw_lens.certificates import Certificate
from cw_lens.layer import LayerAttention, layer_attention
from cw_lens.prompts import Prompts
from cw_lens.runs import Run
from cw_lens.scores import layer_scores, resolve_metrics, stacked_scores
from cw_lens.sinks import cosine
from cw_lens.studies.explain import SHOWN_METRICS, Explanation
from cw_lens.studies.heads import head_profile, layer_head_statistics

HOSTILE = (
    "<|im_start|>", "</script>", "<b>x", "&amp;", "&", "↵", "⇥", "\U0001f600", "مرحبا", "<0xE2>",
    "<U+202E>", "<!--", "<img·src=x·onerror=alert(1)>", "{{data}}", "%{z}", "\\u003c", '"', "'",
    "$x$", "\u2028", "\ud83d", "constructor",
)  # fmt: skip
"""Tokens that break a page which takes them for anything but text."""


def made_up_explanation(
    tokens: tuple[str, ...] = HOSTILE,
    *,
    layers: int = 3,
    heads: int = 4,
    chosen: tuple[int, ...] = (0, 2),
    causal: bool = True,
    gated: bool = False,
    seed: int = 0,
) -> Explanation:
    """A random model's explanation whose first key takes much attention and has a short value."""
    generator = torch.Generator().manual_seed(seed)
    made = [_layer(i, len(tokens), heads, causal, generator, gated=gated) for i in range(layers)]
    functions = resolve_metrics(SHOWN_METRICS)
    certificates = tuple(
        Certificate(index, 1e-7 * (index + 1), 2e-7, 1e-4, int(index == 1), "float32", "residual")
        for index in range(layers)
    )
    ids = torch.arange(100, 100 + len(tokens))[None]
    return Explanation(
        prompts=Prompts(ids=ids, mask=ids > 0, tokens=(tokens,), bos=(True,)),
        scores=stacked_scores([layer_scores(layer, functions) for layer in made], certificates),
        heads=head_profile([layer_head_statistics(layer) for layer in made], range(layers)),
        sinks=torch.stack([cosine(layer)[0, 0] for layer in made]),
        layers=tuple(made[index] for index in chosen),
        certificates=certificates,
        nll=torch.rand(len(tokens) - 1, generator=generator) * 5,
        model={
            "name": "made-up</script><b>",
            "architecture": "RandomForCausalLM",
            "n_layers": layers,
            "n_heads": heads,
            "d_model": 12,
            "dtype": "float32",
            "weights": "raw",
            "weight_hash": "0123456789abcdef",
        },
    )


def _layer(
    index: int,
    length: int,
    heads: int,
    causal: bool,
    generator: torch.Generator,
    *,
    gated: bool,
) -> LayerAttention:
    logits = torch.randn(1, heads, length, length, generator=generator)
    logits[..., 0] += 2
    if causal:
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        logits = logits.masked_fill(hidden, -torch.inf)
    value = torch.randn(1, heads, length, 5, generator=generator)
    value[:, :, 0] *= 0.2
    ids = torch.arange(100, 100 + length)[None]
    return layer_attention(
        index,
        logits.softmax(-1),
        value,
        W_O=torch.randn(heads, 5, 12, generator=generator),
        b_O=None,
        residual=torch.randn(1, length, 12, generator=generator),
        ids=ids,
        mask=torch.ones_like(ids, dtype=torch.bool),
        causal=causal,
        gate=torch.rand(1, heads, length, 5, generator=generator) if gated else None,
    )


def made_up_run(*, tokens: int, heads: int, layers: int, seed: int = 0) -> Run:
    """A random model's run of one text."""
    generator = torch.Generator().manual_seed(seed)
    made = [_layer(i, tokens, heads, True, generator, gated=False) for i in range(layers)]
    certificates = tuple(
        Certificate(index, 1e-7, 2e-7, 1e-4, 0, "float32", "residual") for index in range(layers)
    )
    ids = torch.arange(100, 100 + tokens)[None]
    names = (tuple(f"·t{i}" for i in range(tokens)),)
    return Run(Prompts(ids, ids > 0, names, (True,)), tuple(made), certificates)
