"""What works on a loaded model, found by trying it: each feature passes, or is refused and why."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from cw_lens import backend
from cw_lens.certificates import TOLERANCE, Certificate
from cw_lens.edits import ROUTES, write_routes
from cw_lens.errors import CWLensError
from cw_lens.geometry import inter_head_contributions
from cw_lens.layer import LayerAttention
from cw_lens.probes import trial_prompts, write_miss
from cw_lens.prompts import first_token_id, prompts_from_ids
from cw_lens.runs import capture
from cw_lens.scores import layer_scores, resolve_metrics
from cw_lens.sites import attention_layers, attention_sites, weight_state

PASS, NOTE, REFUSE = "pass", "note", "refuse"
NEVER_PADDED = "images are never padded"


@dataclass(frozen=True)
class Finding:
    """One feature of a model.

    Attributes:
        feature: what was tried.
        status: "pass", "note" (works, and there is something to know) or "refuse".
        what: what was seen, with the figure.
        remedy: what to do, empty where there is nothing to.
        needed: whether the toolkit cannot do without it.
    """

    feature: str
    status: str
    what: str
    remedy: str = ""
    needed: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """All findings about a model.

    Attributes:
        findings: in the order in which they were made.
    """

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing that the toolkit needs is refused."""
        return not any(f.needed and f.status == REFUSE for f in self.findings)

    def __contains__(self, feature: str) -> bool:
        return any(finding.feature == feature for finding in self.findings)

    def __getitem__(self, feature: str) -> Finding:
        for finding in self.findings:
            if finding.feature == feature:
                return finding
        raise KeyError(f"no feature {feature!r}; there are {[f.feature for f in self.findings]}.")

    def table(self) -> pd.DataFrame:
        """One row per feature."""
        rows = [(f.feature, f.status, f.what, f.remedy) for f in self.findings]
        return pd.DataFrame(rows, columns=["feature", "status", "what", "remedy"])


def doctor(model: Any, *, allow_folded: bool = False) -> Diagnosis:
    """What works on this model, each feature tried on a short random input.

    Reading: sum(alpha v) = z, z W_O + b_O = output and shares that sum to 1, in every layer with
    attention. Writing: in every layer one value is masked and one scaled, in one query head and
    one example of a batch each; the output must change by exactly what they gave, and the logits
    move. Padding: a padded batch must score as its texts do alone.

    Args:
        model: any model of TransformerLens, or what `load_model` and `wrap_model` return.
        allow_folded: as `capture`.
    """
    findings: list[Finding] = []
    for check, (feature, needed) in FEATURES.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                findings += check(model, allow_folded)
        except CWLensError as error:
            findings.append(Finding(feature, REFUSE, *_cause_and_remedy(str(error)), needed))
            if check is _layers:
                break  # all others would say the same
    return Diagnosis(tuple(findings))


def _layers(model: Any, _allow_folded: bool) -> list[Finding]:
    having, total = attention_layers(model), backend.n_layers(model)
    attention_sites(model, having)
    without = sorted(set(range(total)) - set(having))
    if not without:
        return [Finding("attention", PASS, f"in all {total} layers", needed=True)]
    what = f"in {len(having)} of {total} layers; skipped: {', '.join(map(str, without))}"
    return [Finding("attention", NOTE, what, needed=True)]


def _identities(model: Any, allow_folded: bool) -> list[Finding]:
    run = capture(
        model, trial_prompts(model), reduce=_share_and_row_error, allow_folded=allow_folded
    )
    value = max(run.certificates, key=lambda c: c.value_error)
    output = max(run.certificates, key=lambda c: c.output_error or 0.0)
    certificate = run.certificates[0]
    share = max(miss for miss, _, _ in run.layers)
    rows = min(total for _, total, _ in run.layers)
    findings = [
        Finding("sum of alpha v = z", PASS, _worst(value, value.value_error), needed=True),
        Finding(
            "z W_O + b_O = output", PASS, _worst(output, output.output_error or 0.0), needed=True
        ),
        Finding(
            "shares sum to 1",
            PASS if share <= 1e-4 else REFUSE,
            f"within {share:.0e}",
            "" if share <= 1e-4 else "The outputs nearly vanish; read projections instead.",
            needed=True,
        ),
        Finding(
            "precision",
            PASS if certificate.dtype == "float32" else NOTE,
            f"{certificate.dtype}, tolerance {certificate.tolerance:.0e}; shares in "
            f"{'float64' if certificate.dtype == 'float64' else 'float32'}",
        ),
    ]
    causal = all(causal for _, _, causal in run.layers)
    findings.append(
        Finding(
            "direction",
            PASS,
            "causal" if causal else "bidirectional: token scores are means over all queries",
        )
    )
    if rows < 0.99:
        what = f"rows sum to as little as {rows:.1g}: a learned sink takes the rest"
        findings.append(Finding("attention rows", NOTE, what))
    return findings


def _share_and_row_error(layer: LayerAttention) -> tuple[float, float, bool]:
    shares = inter_head_contributions(layer).sum(dim=(1, 3))
    true = layer.output.norm(dim=-1) > layer.output_floor[:, None]
    miss = (shares - 1).abs()[true & layer.query_mask]
    rows = layer.pattern.sum(dim=-1).transpose(1, 2)[layer.query_mask]
    return miss.max().item() if len(miss) else 0.0, rows.min().item(), layer.causal


def _worst(certificate: Certificate, error: float) -> str:
    tolerance = f"tolerance {certificate.tolerance:.0e}"
    if not error:
        return f"bit for bit ({tolerance})"
    return f"within {error:.0e} (layer {certificate.layer}; {tolerance})"


def _space(model: Any, _allow_folded: bool) -> list[Finding]:
    sites = attention_sites(model, attention_layers(model))
    normed = [site for site in sites if site.norm is not None]
    scaled = {site.multiplier for site in sites if site.multiplier != 1}
    notes = []
    if normed:
        notes.append("a norm follows the output matrix: space residual and attention differ")
    if scaled:
        notes.append(f"outputs are multiplied by {', '.join(f'{m:g}' for m in sorted(scaled))}")
    if any("gate" in site.points for site in sites):
        notes.append("a gate on sum of alpha v is part of the value")
    if any(site.clamp for site in sites):
        notes.append("values are clamped before use")
    remedy = "space= chooses; residual, the default, is where it acts." if normed else ""
    return [
        Finding("space", NOTE if notes else PASS, "; ".join(notes) or "one and the same", remedy)
    ]


def _weights(model: Any, allow_folded: bool) -> list[Finding]:
    state = weight_state(model)
    if "value biases folded" in state and not allow_folded:
        return [
            Finding(
                "weights",
                REFUSE,
                ", ".join(state),
                "Load raw weights with load_model or wrap_model, or pass allow_folded=True.",
                needed=True,
            )
        ]
    raw = state == ("raw",)
    return [Finding("weights", PASS if raw else NOTE, ", ".join(state), needed=True)]


def _writes(model: Any, _allow_folded: bool) -> list[Finding]:
    layers = attention_layers(model)
    routes = write_routes(model, layers)
    kinds = dict.fromkeys(routes.values())
    miss = write_miss(model, layers)
    tolerance = TOLERANCE[next(model.parameters()).dtype]
    lands = miss <= tolerance
    return [
        Finding(
            "mask and scale values",
            PASS if lands else REFUSE,
            f"land {' or '.join(ROUTES[kind] for kind in kinds)}, in one query head alone, "
            f"within {miss:.0e}"
            if lands
            else f"the output misses what the write should have left by {miss:.0e}",
            "" if lands else "Read this model, and do not intervene on it.",
            needed=True,
        )
    ]


def _left_padding(model: Any, allow_folded: bool) -> list[Finding]:
    return [_padding(model, allow_folded, "left")]


def _right_padding(model: Any, allow_folded: bool) -> list[Finding]:
    return [_padding(model, allow_folded, "right")]


def _padding(model: Any, allow_folded: bool, side: str) -> Finding:
    if backend.reads_images(model):
        return Finding(f"{side} padding", PASS, NEVER_PADDED)
    functions = resolve_metrics(("contribution", "value_weighted_output_normalized"))
    long = trial_prompts(model, seed=1).ids[0].tolist()
    rows = [long, long[: max(1, len(long) // 2)]]
    batch = _scores(model, rows, side, functions, allow_folded)
    alone = _scores(model, rows[1:], side, functions, allow_folded)[:, 0]  # the one that is padded
    start = len(long) - len(rows[1]) if side == "left" else 0
    real = batch[:, 1, :, start : start + len(rows[1])]
    error = (real - alone).abs().max().item()
    good = error <= TOLERANCE[next(model.parameters()).dtype]
    return Finding(
        f"{side} padding",
        PASS if good else REFUSE,
        f"scores are those of the texts alone within {error:.0e}",
        "" if good else f"Run texts one by one, or pad on the other side than {side}.",
    )


def _scores(
    model: Any, rows: list[list[int]], side: str, functions: Any, allow_folded: bool
) -> Float[Tensor, "layer batch head key"]:
    prompts = prompts_from_ids(model, rows, padding_side=side)

    def reduce(layer: LayerAttention) -> Tensor:
        return sum(layer_scores(layer, functions).values(), torch.zeros(()))

    run = capture(model, prompts, reduce=reduce, allow_folded=allow_folded)
    return torch.stack([scores.cpu() for scores in run.layers])


def _start(model: Any, _allow_folded: bool) -> list[Finding]:
    if backend.reads_images(model):
        return [Finding("first token", PASS, "CLS or the first patch, an ordinary key")]
    tokenizer = backend.tokenizer(model)
    if tokenizer is None:
        what = "no tokenizer: prompts are made of ids"
        return [Finding("first token", NOTE, what, "Pass one to wrap_model for texts.")]
    first = first_token_id(tokenizer)
    if first is None:
        what = "the tokenizer has no BOS: the first real token plays its part"
        return [Finding("first token", NOTE, what)]
    added = list(tokenizer("a")["input_ids"][:1]) == [first]
    name = tokenizer.convert_ids_to_tokens(first)
    by = "the tokenizer" if added else "tokenize"
    return [Finding("first token", PASS, f"{name} (id {first}), added by {by}")]


def _cause_and_remedy(message: str) -> tuple[str, str]:
    """A refusal's last sentence says what to do."""
    cause, _, remedy = message.rpartition(". ")
    return (f"{cause}.", remedy) if cause else (message, "")


FEATURES: dict[Callable[[Any, bool], list[Finding]], tuple[str, bool]] = {
    _layers: ("attention", True),
    _identities: ("identities", True),
    _space: ("space", False),
    _weights: ("weights", True),
    _writes: ("mask and scale values", True),
    _left_padding: ("left padding", False),
    _right_padding: ("right padding", False),
    _start: ("first token", False),
}
"""The checks in their order: what each is called where it cannot be made, and whether the toolkit
needs it."""
