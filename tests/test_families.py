"""Every architecture against the same laws: what is read adds up, and what is written lands."""

from contextlib import nullcontext

import pytest
import torch

import cw_lens
from cw_lens import backend, scores, sites
from cw_lens.edits import write_routes
from cw_lens.geometry import (
    bias_share,
    decompose,
    inter_head_contributions,
    intra_head_contributions,
)
from cw_lens.metrics import METRICS
from cw_lens.model_paths import ModelLoadError
from cw_lens.scores import layer_scores
from cw_lens.sinks import SINK_DETECTORS
from cw_lens.sites import UnsupportedModelError, attention_layers, attention_site
from tests import oracles
from tests.conftest import ON_FOUR
from tests.families import (
    FAMILIES,
    HOOKED_TRANSFORMERS,
    NOT_ON_THREE,
    hf_model,
    prompts,
    wrapped,
)

HEAD, KEY = 2, 3


HELD = tuple(FAMILIES) if ON_FOUR else (*(set(FAMILIES) - set(NOT_ON_THREE)), "gemma2_hooked")


@pytest.fixture(params=sorted(HELD))
def model(request):
    return wrapped(request.param)


@pytest.mark.skipif(ON_FOUR, reason="transformer-lens 4 holds every family, as a bridge")
def test_what_transformer_lens_3_holds():
    for name in FAMILIES:
        if name in NOT_ON_THREE:
            message = rf"TransformerLens 3\.9.*{NOT_ON_THREE[name]}.* version"
            with pytest.raises(ModelLoadError, match=message):
                wrapped(name)
        else:
            hooked = type(wrapped(name)).__name__ == "HookedTransformer"
            assert hooked == (name in HOOKED_TRANSFORMERS), name


@pytest.mark.skipif(ON_FOUR, reason="HookedTransformer is gone in transformer-lens 4")
def test_the_hooked_gemma2_computes_what_hugging_face_does():
    ids = torch.arange(9)[None]
    with torch.no_grad():
        close(wrapped("gemma2_hooked")(ids), hf_model("gemma2")(ids).logits)


def close(actual, expected, tolerance=1e-4):
    scale = expected.abs().max().clamp_min(1e-6)
    torch.testing.assert_close(actual / scale, expected / scale, rtol=0, atol=tolerance)


def observed(model, given, layer, context=None):
    """The layer's parts and the logits of a forward pass; those of a context after it wrote."""
    site = attention_site(model, layer)
    seen = {}
    hooks = [(p, lambda t, part=part: seen.update({part: t})) for part, p in site.points.items()]
    hooks.append((site.attention, lambda t: seen.update(module=t[0] if type(t) is tuple else t)))
    with torch.no_grad(), context or nullcontext(), backend.hooked(hooks):
        seen["logits"] = backend.forward(model, given)
    return seen


@pytest.mark.parametrize("space", ["residual", "attention"])
def test_what_is_read_adds_up(model, space):
    run = cw_lens.capture(model, prompts(model), space=space)
    assert [c.layer for c in run.certificates] == attention_layers(model)
    for layer, certificate in zip(run.layers, run.certificates, strict=True):
        assert max(certificate.value_error, certificate.output_error) < 1e-4
        assert certificate.space == layer.space == space
        assert layer.causal == backend.predicts_next_token(model)
        real = layer.query_mask
        contribution = inter_head_contributions(layer)
        close(contribution, oracles.inter_head(layer).float(), 1e-4)
        shares = contribution.sum(dim=(1, 3))[real]
        torch.testing.assert_close(shares, torch.ones_like(shares), atol=1e-5, rtol=0)
        own = intra_head_contributions(layer)
        floored = layer.head_output_norm <= layer.head_output_floor[:, None, None]
        close(own, oracles.intra_head(layer).float().where(~floored[..., None], own), 1e-4)
        factors = decompose(layer)
        close(factors.attention * factors.relative_norm * factors.cosine, contribution)
        with_bias = inter_head_contributions(layer, include_bias=True).sum(dim=(1, 3))
        shares = (with_bias + bias_share(layer))[real]
        torch.testing.assert_close(shares, torch.ones_like(shares), atol=1e-4, rtol=0)
        assert METRICS["output_distance"](layer).isfinite().all()
        close(METRICS["output_distance"](layer), oracles.output_distance(layer).float())
        close(METRICS["value_weighted"](layer), oracles.written(layer).norm(dim=-1).float(), 1e-4)


def test_an_edge_masked_changes_the_output_by_what_it_wrote(model):
    """Every layer, one query head of a group, one key, one example of the batch; nothing else."""
    given = prompts(model)
    for index in attention_layers(model):
        clean = observed(model, given, index)
        layer = cw_lens.capture(model, given, layers=[index], space="attention").layers[0]
        key = int(layer.pattern[1, HEAD].sum(dim=0).argmax())
        where = torch.zeros(layer.pattern[:, :, 0].shape, dtype=torch.bool)
        where[1, HEAD, key] = True
        for factor in (0.0, 0.25):
            seen = observed(
                model, given, index, cw_lens.scaled_values(model, factor, {index: where})
            )
            lost = (1 - factor) * oracles.written(layer)[1, HEAD, :, key].float()
            real = layer.query_mask[1]
            assert torch.equal(seen["pattern"], clean["pattern"])
            assert torch.equal(seen["module"][0], clean["module"][0])
            # BERT's module returns the norm of the sum, whose input its output is
            part = "module" if torch.equal(clean["module"], clean["output"]) else "output"
            change = (clean[part] - seen[part])[1][real]
            size = clean["output"][1][real].abs().max()
            assert lost[real].abs().max() > 1e-3 * size
            assert (change - lost[real]).abs().max() < 1e-6 * size
            assert (seen["logits"][1] - clean["logits"][1]).abs().max() > 1e-4


def test_in_residual_space_an_edge_is_what_removing_it_takes_from_the_normed_output(model):
    given = prompts(model)
    for index in attention_layers(model):
        site = attention_site(model, index)
        layer = cw_lens.capture(model, given, layers=[index]).layers[0]
        before_norm = observed(model, given, index)["output"].unflatten(0, (len(given), -1))
        before_norm = before_norm.reshape(layer.output.shape)
        written = oracles.written(layer)[1, HEAD, :, KEY].float()
        if site.norm is None:
            continue
        unfolded = cw_lens.capture(model, given, layers=[index], space="attention").layers[0]
        edge = oracles.written(unfolded)[1, HEAD, :, KEY].float()
        norm = getattr(model.blocks[index], sites._norm_name(model.blocks[index]))
        norm = getattr(norm, "original_component", norm)
        with torch.no_grad():
            clean, removed = norm(before_norm[1]), norm(before_norm[1] - edge)
        # the scalar held fixed: 1 / rms of what it was before the edge went
        eps = getattr(norm, "eps", None) or norm.variance_epsilon
        left, whole = (before_norm[1] - edge).square(), before_norm[1].square()
        removed = removed * ((left.mean(-1) + eps) / (whole.mean(-1) + eps)).sqrt()[:, None]
        real = layer.query_mask[1]
        assert edge[real].abs().max() > 1e-3
        close((clean - removed)[real], (written * layer.stream_gain[1][:, None])[real])
        assert not torch.allclose(written, edge, rtol=0.1)


def test_masking_nothing_is_the_clean_run_and_masking_a_head_zeroes_its_z(model):
    given = prompts(model)
    index = attention_layers(model)[-1]
    site = attention_site(model, index)
    clean = observed(model, given, index)
    heads, keys = clean["pattern"].shape[1], clean["pattern"].shape[3]
    nothing = torch.zeros(1, heads, keys, dtype=torch.bool)
    for context in (
        cw_lens.masked_values(model, {index: nothing}),
        cw_lens.scaled_values(model, 1.0, {index: ~nothing}),
    ):
        assert torch.equal(observed(model, given, index, context)["logits"], clean["logits"])
    all_keys = nothing.clone()
    all_keys[:, HEAD] = True
    masked = observed(model, given, index, cw_lens.masked_values(model, {index: all_keys}))

    def zero_head(z):
        parts = z.clone().unflatten(-1, (heads, -1)) if z.ndim == 3 else z.clone()
        parts[:, :, HEAD] = 0
        return parts.reshape(z.shape)

    with torch.no_grad(), backend.hooked([(site.points["z"], zero_head)]):
        zeroed = backend.forward(model, given)
    real = given.mask if clean["logits"].ndim == 3 else slice(None)
    close(masked["logits"][real], zeroed[real])


def test_masks_nest_and_multiply(model):
    given = prompts(model)
    index = attention_layers(model)[0]
    pattern = observed(model, given, index)["pattern"]
    where = torch.zeros(pattern[:, :, 0].shape, dtype=torch.bool)
    where[:, HEAD, KEY] = True
    other = where.clone()
    other[:, HEAD - 1, KEY - 1] = True
    with torch.no_grad():
        with cw_lens.scaled_values(model, 0.5, {index: where}):
            with cw_lens.scaled_values(model, 0.5, {index: other}):
                nested = backend.forward(model, given)
        only = {index: other & ~where}
        with cw_lens.scaled_values(model, 0.25, {index: where}):
            with cw_lens.scaled_values(model, 0.5, only):
                once = backend.forward(model, given)
    real = given.mask if nested.ndim == 3 else slice(None)
    close(nested[real], once[real], 1e-5)


def test_online_removal_in_the_first_layer_is_what_a_clean_ranking_removes(model):
    """Whatever the route of the write; where it comes before the pattern it is refused."""
    given = prompts(model)
    first = attention_layers(model)[0]
    options = {"metric": "stream_contribution", "layers": [first]}
    clean, nothing = (
        cw_lens.removal_plan(model, given, **options, fraction=fraction, ranking="clean")
        for fraction in (0.4, 0.0)
    )
    assert not nothing[first].any()
    online = cw_lens.removal_plan(model, given, **options, fraction=0.4)
    if write_routes(model, [first])[first] == "value":
        with pytest.raises(UnsupportedModelError, match='Use ranking="clean"'):
            with cw_lens.masked_values(model, online):
                pass
        return
    idle = cw_lens.removal_plan(model, given, **options, fraction=0.0)
    unmasked = observed(model, given, first)["logits"]
    found = [
        observed(model, given, first, cw_lens.masked_values(model, plan))["logits"]
        for plan in (clean, online, idle)
    ]
    assert torch.equal(found[2], unmasked)
    real = given.mask if unmasked.ndim == 3 else slice(None)
    close(found[1][real], found[0][real], 1e-5)
    assert not torch.equal(found[0][real], unmasked[real])


def test_token_scores_are_means_over_the_queries_that_see_a_key(model, monkeypatch):
    monkeypatch.setattr(scores, "QUERY_BLOCK", 4)
    given = prompts(model)
    layer = cw_lens.capture(model, given).layers[-1]
    found = layer_scores(layer, {"signed": METRICS["signed_contribution"]})["signed"]
    edges = oracles.inter_head(layer)
    close(found, oracles.token_score(edges, given.mask, layer.causal).float())


def test_what_is_added_is_the_same_in_both_spaces(model):
    given = prompts(model)
    for index in attention_layers(model):
        added = []
        for space in ("residual", "attention"):
            layer = cw_lens.capture(model, given, layers=[index], space=space).layers[0]
            gain = 1.0 if layer.stream_gain is None else layer.stream_gain
            added.append((gain * layer.output.norm(dim=-1))[layer.query_mask])
        close(added[0], added[1])


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_reads_as_one_by_one(model, side):
    if backend.reads_images(model):
        pytest.skip("images are never padded")
    lengths = (7, 11, 2, 1)
    given = prompts(model, lengths, side)
    metrics = {name: METRICS[name] for name in METRICS if name != "gradient"}
    together = cw_lens.capture(model, given)
    for row, length in enumerate(lengths):
        ids = given.ids[row][given.mask[row]].tolist()
        alone = cw_lens.capture(model, cw_lens.prompts_from_ids(model, [ids]))
        for batch, single in zip(together.layers, alone.layers, strict=True):
            real = given.mask[row]
            for name, score in layer_scores(batch, metrics).items():
                expected = layer_scores(single, {name: metrics[name]})[name][0]
                close(score[row][:, real], expected, 2e-5)
                assert not score[row][:, ~real].any()
            for name, detector in SINK_DETECTORS.items():
                assert torch.equal(detector(batch)[row][:, real], detector(single)[0]), name
            assert batch.causal == single.causal or length == 1


def test_what_is_added_to_the_stream(model):
    """stream_gain against what the residual stream really gained, where a hook shows it."""
    given = prompts(model)
    for index in attention_layers(model):
        middle = model.hook_dict.get(f"blocks.{index}.hook_resid_mid")
        layer = cw_lens.capture(model, given, layers=[index]).layers[0]
        inner = getattr(model.blocks[index].attn, "original_component", None)
        beside = ("BertAttention", "RobertaAttention", "FalconH1Attention")
        if middle is None or type(inner).__name__ in beside:
            continue  # a parallel block, a norm of the sum, a state space beside the attention
        seen = []
        with torch.no_grad(), backend.hooked([(middle, seen.append)]):
            backend.forward(model, given)
        added = seen[0].reshape(layer.residual.shape) - layer.residual
        gain = 1.0 if layer.stream_gain is None else layer.stream_gain[..., None]
        bias = 0.0 if layer.b_O is None else layer.b_O
        real = layer.query_mask
        close((gain * (layer.output + bias))[real], added[real])
