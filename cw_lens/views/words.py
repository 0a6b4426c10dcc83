"""The sentences of the explain page that state its numbers."""

import math

from cw_lens.sinks import CROWDED_SINKS
from cw_lens.studies.explain import Explanation


def verdict(explanation: Explanation) -> dict[str, str]:
    """What the first token receives and gives, in a sentence, and where that differs most."""
    token = isolated(explanation.prompts.tokens[0][0])
    if explanation.prompts.ids.shape[1] == 1:
        only = f"The text is the single token {token}: it receives all attention and gives all"
        return {"verdict": f"{only} of the output.", "detail": ""}
    heads = explanation.heads
    attention = heads.first_attention.mean(dim=1)
    given = heads.first_contribution.sum(dim=1)
    below = int((given < attention).sum())
    widest = int((attention - given).abs().argmax())
    layers = len(heads.layers)
    return {
        "verdict": f"The first token, {token}, receives {percent(attention.mean().item())} of the "
        f"attention and {_gives(given.mean().item())}.",
        "detail": f"Means over {layers} layers, all heads and all queries. Its share of the output "
        f"is below its share of the attention in {below} of {layers} layers; they differ most in "
        f"layer {heads.layers[widest]}, where it receives {percent(attention[widest].item())} and "
        f"{_gives(given[widest].item())}.",
    }


def facts(explanation: Explanation) -> list[tuple[str, str]]:
    """Labelled lines about the model, the text and how far the numbers can be trusted."""
    lines = [
        ("Model", _model(explanation)),
        ("Weights", _weights(explanation)),
        ("Text", _text(explanation)),
        ("Loss", _loss(explanation)),
        ("Sinks", _sinks(explanation)),
        ("Identity", _identity(explanation)),
    ]
    low = {c.layer: c.low_outputs for c in explanation.certificates if c.low_outputs}
    if low:
        lines.append(
            (
                "Low outputs",
                f"{sum(low.values())} outputs in layers {', '.join(map(str, low))} are so short "
                "that shares are taken of a floor instead, and do not sum to 1.",
            )
        )
    return [(label, text) for label, text in lines if text]


def percent(share: float) -> str:
    """A share with two significant digits and a true minus sign."""
    size = abs(share) * 100
    digits = 0 if size >= 9.95 else 1 if size >= 0.95 else 2
    text = f"{size:.{digits}f}"
    sign = "−" if share < 0 and float(text) else ""
    return f"{sign}{text}\u00a0%"


def _gives(share: float) -> str:
    if share < 0:
        return f"works against the output: its contribution is {percent(share)}"
    return f"gives {percent(share)} of the output"


def isolated(token: str) -> str:
    """A token in quotes that no direction of writing leaks out of."""
    return f"“\u2068{token}\u2069”"


def _model(explanation: Explanation) -> str:
    model = explanation.model
    shape = [
        f"{model[key]} {unit}"
        for key, unit in (("n_layers", "layers"), ("n_heads", "heads"), ("d_model", "dimensions"))
        if key in model
    ]
    parts = [model.get("name"), model.get("architecture"), ", ".join(shape)]
    return " · ".join(str(part) for part in parts if part)


def _weights(explanation: Explanation) -> str:
    model = explanation.model
    parts = [model.get("dtype"), model.get("weights")]
    if model.get("weight_hash"):
        parts.append(f"hash {str(model['weight_hash'])[:12]}")
    if model.get("transformer_lens"):
        parts.append(f"{model.get('class', '')} of transformer-lens {model['transformer_lens']}")
    return " · ".join(str(part) for part in parts if part)


def _text(explanation: Explanation) -> str:
    count = explanation.prompts.ids.shape[1]
    first = isolated(explanation.prompts.tokens[0][0])
    start = f"BOS {first}" if explanation.prompts.bos[0] else f"{first}, which is no BOS token"
    return f"{count} token{'s' * (count > 1)}, beginning with {start}"


def _loss(explanation: Explanation) -> str:
    if not explanation.model:
        return ""
    count = explanation.nll.numel()
    if not count:
        if explanation.prompts.ids.shape[1] > 1:
            return "the model does not predict next tokens"
        return "nothing is predicted in a text of one token"
    mean = explanation.nll.double().mean().item()
    # a mean loss beyond 700 nats overflows the exponential
    perplexity = f"{math.exp(mean):.4g}" if mean < 700 else "beyond 1e304"
    return f"perplexity {perplexity} over {count} predicted tokens ({mean:.3f} nats each)"


def _sinks(explanation: Explanation) -> str:
    sinks = explanation.sinks
    counts = sinks.sum(dim=1)
    low, high = int(counts.min()), int(counts.max())
    number = str(low) if low == high else f"{low} to {high}"
    text = f"{number} of {sinks.shape[1]} tokens in each layer (input within cosine 0.95 of the "
    text += "first token’s)"
    if high > CROWDED_SINKS * sinks.shape[1] and high > 1:
        text += "; where many are marked the rule says little, see the centred_cosine detector"
    return text


def _identity(explanation: Explanation) -> str:
    """How well the parts add up, at the layer that comes closest to its tolerance."""
    if not explanation.certificates:
        return ""
    worst = max(explanation.certificates, key=lambda c: c.error / c.tolerance)
    tolerance = f"tolerance {worst.tolerance:.0e}"
    if any(c.output_error is None for c in explanation.certificates):
        return (
            f"the parts of every layer sum to its z within {worst.error:.1e} ({tolerance}); the "
            "cache held no output to compare with"
        )
    if not worst.error:
        return f"the parts of every layer sum to its output bit for bit ({tolerance})"
    return (
        f"the parts of every layer sum to its output within {worst.error:.1e} "
        f"(worst in layer {worst.layer}; {tolerance})"
    )
