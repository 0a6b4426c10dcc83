"""What the tables of every study are called, and what each of their columns means.

One place for both: a page takes titles, the tips of its headers and the legend below a table from
here, and a test holds every table that a study writes against it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cw_lens.metrics import METRICS


@dataclass(frozen=True)
class TableWords:
    """What a person is told of a table.

    Attributes:
        title: above it.
        about: what one row is, and what the numbers are of.
        first: the columns that people come for, shown before the others.
        interval: the column whose interval stands in `low` and `high`.
        columns: meanings that are this table's own.
    """

    title: str
    about: str
    first: tuple[str, ...] = ()
    interval: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)


LOW, HIGH, COUNT = "_low", "_high", "_n"
"""Ends of the names of a number's interval and of what it rests on."""

COLUMNS = {
    "data": "the corpus",
    "example": "number of the text in its corpus",
    "tokens": "tokens of the text, the first (BOS) included",
    "layer": "layer, from 0; empty: all layers together",
    "head": "head of the layer, from 0",
    "position": "position of the token in its text, from 0",
    "token_id": "number of the token in the vocabulary",
    "token": "how the token is written",
    "sink": "whether the `cosine` detector marks the token as a sink",
    "metric": "what ranks the tokens",
    "series": "the metric, with its ranking where both were run",
    "remove": "which end is removed: the highest (comprehensiveness) or lowest (sufficiency)",
    "granularity": "where pairs are ranked: in each layer, each head, or over all layers (global)",
    "protected": "the sink detector whose tokens are never removed, or none",
    "ranking": "online: ranked in the very pass that is masked; clean: in a pass before it",
    "other_ranking": "the other's ranking",
    "fraction": "share of the eligible (head, token) pairs removed, from 0 to 1",
    "fractions": "how many fractions the area is taken over",
    "seed": "of the random control; 0 elsewhere",
    "n": "texts that the number rests on",
    "n_seeds": "seeds whose losses were averaged in each text first",
    "failed": "units without a finite loss, which are in no average",
    "removed": "(head, token) pairs removed, over all layers",
    "removed_pairs": "(head, token) pairs really removed, mean over texts",
    "predicted": "predicted tokens, over all texts",
    "nll_sum": "loss of the edited run, nats, summed over the text",
    "clean_nll_sum": "loss of the run as it is, nats, summed over the text",
    "kl_sum": "divergence of the edited predictions from the clean, nats, summed over the text",
    "top1_agreed": "predicted tokens whose most likely token stayed the same",
    "clean_perplexity": "perplexity of the run as it is",
    "perplexity": "exp of the mean loss over all predicted tokens",
    "delta_perplexity": "edited minus clean perplexity",
    "delta_nll": "edited minus clean loss, nats per predicted token, mean over texts",
    "kl": "divergence of the edited predictions from the clean ones, nats per predicted token",
    "top1_agreement": "share of predicted tokens whose most likely token stayed the same",
    "aopc": "area over the curve: change in loss, nats per token, mean over the fractions",
    "aopc_delta_perplexity": "change in perplexity, mean over the fractions",
    "other": "the metric that it is compared with",
    "role": "why the two are compared",
    "value": "of the first named, nats per token",
    "other_value": "of the other, nats per token",
    "difference": "the first minus the other, mean over the texts that hold both",
    "verdict": "on which side of 0 the interval lies; none is given from fewer than 6 texts",
    "low": "lower end of the 95 % bootstrap interval",
    "high": "upper end of the 95 % bootstrap interval",
    "layers": "the layers in which values were edited",
    "edit": "what was done to the value: scale, random (a random vector as long), keep_parallel, "
    "keep_orthogonal, flip_parallel, mean, or no_op",
    "target": "whose value: the first token's, all sinks', or a control token's",
    "factor": "γ, what the value is multiplied by",
    "other_edit": "what was done in the run that it is compared with",
    "other_target": "whose value was edited there",
    "other_factor": "the factor there",
    "changed": "(head, token) values changed in the text, over all layers",
    "changed_values": "(head, token) values changed, over all layers, mean over texts",
    "detector": "the sink detector",
    "marked": "how often it is marked as a sink, a mean over heads",
    "occurs": "how often it occurs in the texts",
    "share": "marked / how often it could have been",
    "texts": "texts that the number rests on",
    "keys": "which keys: all, the first, or all others",
    "spread": "standard deviation over the five folds",
    "model": "the model's name",
    "weight": "which weight: attention, value-weighted, or contribution",
    "query": "position of the query, from 0",
    "attention": "attention of the query to the first key",
    "norm": "length of the head's output, residual stream units",
    "g": "fit of <v₁, w> = g (1 − α): below 0, the other keys write against the first",
    "kappa": "fit of ||w|| = κ (1 − α), residual stream units",
    "V": "||v₁||², mean over texts",
    "alpha_star": "the attention to the first key at which the modelled output is shortest",
    "r2_w": "R² of the fit of ||w||",
    "r2_g": "R² of the fit of <v₁, w>",
    "r2_norm": "R² of the predicted length of the output",
    "a": "the sink's value along μ, the mean direction of the others, residual stream units",
    "b": "the sink's value orthogonal to μ, residual stream units",
    "sink_norm": "length of the sink's value, residual stream units",
    "cone_angle": "angle around μ that holds 90 % of the non-sink values, degrees",
    "inside": "share of the shortest quarter of outputs that lies inside the cone",
    "inside_without": "the same once the sink's term is taken from the outputs",
    "without_gain": "inside_without minus inside",
    "inside_rerun": "the same in a pass with the sink's value set to 0 throughout",
    "rerun_gain": "inside_rerun minus inside",
    "left_out": "values or outputs of length 0, which have no direction",
    "first_cosine": "cosine of the first key's projected value to the others', mean",
    "first_spread": "standard deviation of that cosine within a text, mean over texts",
    "others_cosine": "cosine among the other keys' projected values, mean",
    "others_spread": "standard deviation of that cosine within a text, mean over texts",
}
"""Meaning of each column, with its unit, unless a table says otherwise."""

_HEADS = "One row for each layer and head."
_LAYERS = "One row for each layer, of means over its heads."

TABLES = {
    "units": TableWords("Units", "One row for each text and removal."),
    "failed_units": TableWords(
        "Units that failed",
        "Their loss is NaN or infinite; they are in no average.",
        ("data", "example", "metric"),
    ),
    "curves": TableWords(
        "Every point of the curves",
        "One row for each metric and fraction.",
        ("series", "remove", "fraction", "delta_nll", "perplexity", "delta_perplexity"),
    ),
    "aopc": TableWords(
        "Area over the perturbation curve (AOPC)",
        "One row for each metric and direction. Where the highest are removed larger is better, "
        "where the lowest are, smaller.",
        ("series", "remove", "aopc", "aopc_delta_perplexity"),
    ),
    "comparisons": TableWords(
        "Every comparison of two metrics",
        "One row for each pair and fraction; an empty fraction is the area over all of them.",
        ("metric", "other", "remove", "fraction", "verdict", "difference"),
        "difference",
        {
            "verdict": "whether the first named is better or worse: more harm where the highest "
            "are removed, less where the lowest are; none is given from fewer than 6 texts",
            "role": "the other is attention, random, or the next best",
            "value": "change in loss of the first named, nats per token",
            "other_value": "change in loss of the other, nats per token",
            "difference": "the first minus the other, nats per token, mean over texts",
            "fraction": "share of the eligible pairs removed; empty: the AOPC",
        },
    ),
    "ablations": TableWords(
        "Every value masked alone",
        "One row for each (layer, head, token).",
        columns={
            "nll_sum": "loss with this one value masked, nats, summed over the text",
            "delta_nll": "masked minus clean loss, nats, summed over the text",
        },
    ),
    "correlations": TableWords(
        "Rank correlation of token scores with the measured effect",
        "One row for each metric, group of values and effect. Intervals are over the values, which "
        "share texts and layers.",
        ("metric", "among", "effect", "rho", "within_layers"),
        "rho",
        {
            "among": "over all values, or those that are no sinks",
            "effect": "size: |change in loss|; harm: the change itself",
            "rho": "Spearman's rank correlation",
            "within_layers": "mean of the layers' own rank correlations",
            "n": "values that were masked and have a loss",
        },
    ),
    "results": TableWords(
        "Every answer",
        "One row for each question, removal and seed.",
        columns={
            "task": "the benchmark",
            "example": "number of the question",
            "correct": "1 where the answer is right, 0 where it is wrong",
            "gold_loglikelihood": "log-likelihood of the right answer, nats",
            "metric": "what ranks the tokens; none: nothing was removed",
        },
    ),
    "accuracy": TableWords(
        "Accuracy",
        "One row for each task, metric and fraction. Intervals of accuracy are Wilson's, those of "
        "differences paired over questions.",
        ("task", "metric", "remove", "fraction", "accuracy", "difference"),
        columns={
            "task": "the benchmark",
            "metric": "what ranks the tokens; none: nothing was removed",
            "n": "questions answered",
            "seeds": "seeds that were averaged in each question first",
            "failed": "questions without a finite log-likelihood, left out",
            "accuracy": "share of questions answered rightly",
            "difference": "accuracy minus that of the unmasked run",
        },
    ),
    "sinks": TableWords(
        "Sinks by layer",
        "One row for each detector and layer.",
        ("layer", "detector", "sinks", "protected_share", "most"),
        columns={
            "sinks": "sinks in a text, mean over heads and texts",
            "protected_share": "share of (head, token) pairs that are sinks",
            "most": "sinks in one head of one text, at most",
            "crowded": "whether more than a quarter of the pairs are sinks, several in some head",
        },
    ),
    "sink_attention": TableWords(
        "Attention to the first token",
        _LAYERS,
        ("layer", "first_attention"),
        columns={"first_attention": "attention to the first token, mean over queries and heads"},
    ),
    "sink_positions": TableWords(
        "Positions that are sinks",
        "The ten most often marked of each detector and layer.",
        ("layer", "position", "share"),
        columns={"texts": "texts that are as long", "share": "marked / texts"},
    ),
    "sink_tokens": TableWords(
        "Tokens that are sinks",
        "The ten most often marked of each detector and layer.",
        ("layer", "token", "share"),
        columns={"share": "marked / occurs"},
    ),
    "alignment": TableWords("Alignment of projected values, by layer", _LAYERS, ("layer",)),
    "alignment_layers": TableWords("Alignment of projected values, by layer", _LAYERS, ("layer",)),
    "alignment_heads": TableWords("Alignment of projected values, by head", _HEADS, ("layer",)),
    "norm_model": TableWords(
        "The norm model over all heads",
        "One row for each quantity.",
        ("quantity", "value"),
        "value",
        {
            "quantity": "negative_g and inner_minimum: shares of fitted heads with g < 0 and with "
            "0 < α* < 1; r2_w, r2_g and r2_norm: means over heads of R²",
            "value": "the share or mean",
        },
    ),
    "norm_model_heads": TableWords(
        "The norm model of every head",
        _HEADS,
        ("layer", "head", "g", "kappa", "alpha_star", "r2_norm"),
        columns={"n": "queries"},
    ),
    "norm_points": TableWords(
        "Outputs of the head whose norm model is drawn",
        "One row for each query.",
        columns={"predicted": "length that the norm model predicts, residual stream units"},
    ),
    "cone_layers": TableWords("The semantic cone, by layer", _LAYERS, ("layer",)),
    "cone_heads": TableWords("The semantic cone, by head", _HEADS, ("layer", "head")),
    "cone_points": TableWords(
        "Outputs of the head whose cone is drawn",
        "One row for each query.",
        columns={
            "x": "the output along μ",
            "y": "the output along u, orthogonal to μ in the plane of the sink",
            "x_without": "the output along μ without the sink's term",
            "y_without": "the output along u without the sink's term",
            "low": "whether it is one of the shortest quarter",
        },
    ),
    "sweep_units": TableWords(
        "Units of the sweep",
        "One row for each text and edit.",
        columns={"failed": "why there is no loss; empty where there is one"},
    ),
    "failed_edits": TableWords(
        "Edits that failed",
        "They have no finite loss and are in no average.",
        ("data", "example", "edit", "failed"),
        columns={"failed": "why there is no loss"},
    ),
    "sweep": TableWords(
        "The sink's value edited",
        "One row for each edit and factor.",
        ("edit", "target", "factor", "delta_nll", "perplexity", "delta_perplexity"),
    ),
    "sweep_comparisons": TableWords(
        "Every comparison of two edits",
        "One row for each pair.",
        ("edit", "target", "factor", "verdict", "difference"),
        "difference",
        {
            "role": "the other is a control token scaled alike, a random vector as long, another "
            "surgery, one step back in the sweep, or the first token alone (sinks)",
            "value": "change in loss of the first named, nats per token",
            "other_value": "change in loss of the other, nats per token",
            "difference": "the first minus the other, nats per token, mean over texts",
            "verdict": "whether the first named harms more or less; none from fewer than 6 texts",
        },
    ),
    "paper": TableWords(
        "The paper against here",
        "One row for each number. A claim is of a sign or an order; it holds or fails where the "
        "interval over texts says so.",
        ("item", "quantity", "paper", "here", "holds", "claim"),
        "here",
        {
            "item": "table or figure of the paper; fig12 is its appendix D.6",
            "quantity": "what the number is",
            "paper": "what the paper prints, of its own models; empty where it prints no number",
            "here": "what this run found",
            "claim": "what the paper says of it",
            "holds": "whether it holds here; not distinguishable where the interval leaves it open",
            "tokens": "tokens of all texts of the corpus",
        },
    ),
    "components": TableWords(
        "What contributions are made of: R² of linear regressions (tables 1 and 3)",
        "One row for each kind of keys, regressor and scale.",
        ("keys", "regressor", "scale", "r2", "r2_by_text"),
        "r2",
        {
            "regressor": "a factor of the contribution, or a product of two",
            "r2": "R² held out, mean over five folds of edges",
            "spread": "standard deviation of R² over the folds",
            "r2_by_text": "R² held out over five folds of whole texts",
            "scale": "raw, or logarithms of the magnitudes",
        },
    ),
    "component_correlations": TableWords(
        "Correlations of the log factors (table 2)",
        "One row for each kind of keys and pair of factors.",
        ("keys", "first", "second", "r"),
        "r",
        {
            "first": "one factor",
            "second": "the other factor",
            "r": "Pearson's correlation of the logarithms of their magnitudes",
        },
    ),
    "component_samples": TableWords(
        "Edges sampled",
        "One row for each kind of keys.",
        ("keys", "points"),
        columns={
            "points": "edges in the sample",
            "zero": "of those, how many have a factor of 0 and so no logarithm",
            "edges": "edges that they were drawn from",
            "low_queries": "queries left out: their output is too short to take shares of",
        },
    ),
    "component_joint": TableWords(
        "Joint distribution of two factors (figure 7)",
        "One row for each cell that is not empty.",
        columns={
            "x": "one factor",
            "y": "the other factor",
            **{
                f"{axis}{end}": f"{side} edge of the cell, log₁₀; of the cosine itself"
                for axis in ("x", "y")
                for end, side in ((LOW, "lower"), (HIGH, "upper"))
            },
            "points": "edges in the cell",
        },
    ),
    "first_key_weights": TableWords(
        "Weight of the first key (table 4)",
        "One row for each weight and layer.",
        ("layer", "weight", "value"),
        "value",
        {
            "value": "mean weight of the first key: attention is a mean over heads, the others are "
            "shares of the layer, absolute_contribution of the head's own row"
        },
    ),
    "entropies": TableWords(
        "Entropy of the rows (table 5)",
        "One row for each weight and layer, with the first key and without it.",
        ("layer", "weight", "first_key", "value"),
        "value",
        {
            "first_key": "whether the row holds the first key, or is normalised over the others",
            "value": "mean entropy of the heads' rows, nats",
        },
    ),
    "amplification": TableWords(
        "Contribution over attention, by position (appendix D.6)",
        "One row for each ratio, layer and range of positions.",
        ("layer", "position", "ratio", "value"),
        "value",
        {
            "position": "first position of the range, from 0",
            "last": "last position of the range",
            "ratio": "mean of the edges' ratios, or ratio of the sums",
            "value": "c / α",
        },
    ),
    "heads": TableWords(
        "What each head gives",
        f"{_HEADS} Means over the text's queries.",
        ("layer", "head"),
        columns={
            "first_attention": "attention to the first token",
            "first_value_weighted": "share of the layer's value-weighted attention on it",
            "first_contribution": "contribution of the first token, share of the layer's output",
            "first_intra_head_contribution": "contribution of the first token, share of the head's "
            "own output",
            "attention_entropy": "entropy of the attention row, nats",
            "value_weighted_entropy": "entropy of the value-weighted row, nats",
            "contribution_entropy": "entropy of the row of |contributions|, nats",
            "sink_cosine": "cosine of the first key's projected value to the others', mean; 0 "
            "where it is not defined",
            "gross": "sum of |contributions|, share of the layer's output",
            "net": "sum of contributions, share of the layer's output",
            "output_norm": "length of the head's output, residual stream units",
        },
    ),
    "token_means": TableWords(
        "What each token gives",
        "One row for each token; scores are means over layers and heads.",
        ("position", "token", "sink_share"),
        columns={"sink_share": "share of layers and heads in which it is marked as a sink"},
    ),
    "token_scores": TableWords("Token scores", "One row for each layer, head and token."),
    "certificates": TableWords(
        "Certificates",
        "One row for each layer: how well Σ α v W_O adds up to what the model computed.",
        ("layer", "output_error", "value_error", "tolerance"),
        columns={
            "value_error": "largest error of Σ α v against what the model computed, relative",
            "output_error": "largest error of Σ α v W_O against the layer's output, relative",
            "tolerance": "largest error that is accepted",
            "low_outputs": "queries whose output is too short to take shares of",
            "dtype": "what the model computed in",
            "space": "where contributions are measured, if a norm follows the output matrix",
        },
    ),
}
"""Every table that a study writes or a page shows, by the name of its file."""


def meaning(table: str, column: str) -> str | None:
    """What a column of a table means, with its unit; None if nobody wrote it down.

    The token score of a metric is named by the metric.
    """
    words = TABLES.get(table)
    own = {} if words is None else words.columns
    if column in own or (column in COLUMNS and not _is_score(table, column)):
        return own.get(column, COLUMNS.get(column))
    if column in METRICS:
        return f"token score by {column}: {(METRICS[column].__doc__ or '').splitlines()[0]}"
    for end, what in (
        (LOW, "lower end of the 95 % interval of"),
        (HIGH, "upper end of the 95 % interval of"),
        (COUNT, "texts behind"),
    ):
        of = column.removesuffix(end)
        if of != column and meaning(table, of) is not None:
            return f"{what} {of}"
    return None


def _is_score(table: str, column: str) -> bool:
    """Whether a column named as a metric holds its scores."""
    return column in METRICS and table in ("ablations", "token_scores", "token_means")
