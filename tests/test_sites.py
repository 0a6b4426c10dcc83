"""Attention that cannot be read as sum(alpha v) W_O: each refusal names layer, cause and remedy."""

import pytest
import torch
from torch import nn

import cw_lens
from cw_lens import sites
from cw_lens.certificates import IdentityError
from cw_lens.errors import InputError
from cw_lens.sites import UnsupportedModelError
from tests.conftest import ON_FOUR
from tests.families import hf_model, prompts, wrapped

on_four = pytest.mark.skipif(not ON_FOUR, reason="transformer-lens 3.9 folds and wraps otherwise")


def test_a_norm_before_the_output_matrix_is_refused():
    model = wrapped("bitnet")
    message = r"layer 0: a norm \(attn_sub_norm\) stands .*contributions do not exist.* Use a model"
    with pytest.raises(UnsupportedModelError, match=message):
        cw_lens.capture(model, prompts(model))


def test_cross_attention_is_refused():
    model = wrapped("t5")
    message = r"an encoder with a decoder, whose cross-attention .* Use a decoder-only or encoder-"
    with pytest.raises(UnsupportedModelError, match=message):
        cw_lens.capture(model, prompts(model))


def test_a_model_without_attention_is_refused():
    model = wrapped("mamba")
    with pytest.raises(
        UnsupportedModelError, match="shows attention in none of the 2 .* Use a model"
    ):
        cw_lens.capture(model, prompts(model))


def test_a_layer_without_attention_is_skipped_and_named_when_asked_for():
    model = wrapped("jamba")
    given = prompts(model)
    assert [c.layer for c in cw_lens.capture(model, given).certificates] == [1]
    assert cw_lens.token_scores(model, given).layers == (1,)
    message = r"layer 0 has no attention .*those that have are 1\. Leave it out with layers="
    with pytest.raises(UnsupportedModelError, match=message):
        cw_lens.capture(model, given, layers=[0, 1])


def test_a_quantised_output_matrix_is_refused():
    model = wrapped("llama_attention_bias")
    linear = sites.attention_site(model, 0).attention.o.original_component
    linear.weight = nn.Parameter(linear.weight.to(torch.uint8), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"layer 0: .*uint8, quantised.* unquantised"):
        cw_lens.capture(model, prompts(model))


@on_four
def test_attention_that_does_not_show_its_pattern_is_refused():
    """Bridged without eager attention, GPT-J's hook_pattern never fires."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    raw = hf_model("gptj")
    raw.set_attn_implementation("sdpa")
    model = build_bridge_from_module(raw, "GPTJForCausalLM", hf_config=raw.config)
    given = prompts(model)
    with pytest.raises(UnsupportedModelError, match=r"layer 0: .*never showed its pattern.* load"):
        cw_lens.capture(model, given)
    where = {0: torch.ones(1, 4, given.ids.shape[1], dtype=torch.bool)}
    message = r"layer 0: no write .* its pattern never shows.* Leave the layer out"
    with pytest.raises(UnsupportedModelError, match=message):
        with cw_lens.masked_values(model, where):
            pass


def test_missing_hook_points_are_named():
    model = wrapped("llama")
    hooks = dict(model.hook_dict)
    del hooks["blocks.1.attn.hook_pattern"]

    class Bare:
        """The same model without one hook point."""

        hook_dict = hooks

        def __getattr__(self, name):
            return getattr(model, name)

    with pytest.raises(UnsupportedModelError, match=r"layer 1 has no blocks\.1\.attn\.hook_patt"):
        sites.attention_site(Bare(), 1)


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "gpt_neox", "llama_attention_bias", "gpt_neo"])
@on_four
def test_folded_value_biases_are_refused_unless_allowed(name):
    raw, model = wrapped(name), wrapped(name)
    given = prompts(model)
    model.enable_compatibility_mode(disable_warnings=True)
    assert sites.weight_state(model)[:2] == ("compatibility mode", "value biases folded")
    message = r"layers 0, 1: the value biases have been folded .*wrap_model.*allow_folded=True"
    for refuse in (
        lambda: cw_lens.capture(model, given),
        lambda: cw_lens.token_scores(model, given),
        lambda: cw_lens.find_sinks(model, given),
    ):
        with pytest.raises(InputError, match=message):
            refuse()
    folded = cw_lens.token_scores(model, given, allow_folded=True)["contribution"]
    true = cw_lens.token_scores(raw, given)["contribution"]
    assert (folded - true).abs().max() > 0.01  # what the refusal protects from


@on_four
def test_other_processing_is_recorded_and_not_refused():
    model = wrapped("gpt2")
    assert sites.weight_state(model) == ("raw",)
    model.enable_compatibility_mode(disable_warnings=True, fold_value_biases=False)
    assert sites.weight_state(model) == ("compatibility mode", "writing weights centred")
    cw_lens.capture(model, prompts(model))
    model = wrapped("gpt_neo")  # its output bias stands beside no value bias
    assert sites.weight_state(model) == ("raw",)


def test_an_unknown_space_is_refused():
    model = wrapped("llama")
    with pytest.raises(InputError, match="unknown space 'stream'; there are residual, attention"):
        cw_lens.capture(model, prompts(model), space="stream")


def test_a_layer_norm_after_the_output_matrix_is_centred_and_its_bias_left_out():
    """No architecture of transformers has one; the rule is the same (SPEC 1)."""
    model = wrapped("gemma2")
    norm = nn.LayerNorm(32)
    with torch.no_grad():
        norm.weight.copy_(1 + torch.randn(32))
        norm.bias.copy_(torch.randn(32))
    found = sites.output_norm(norm, torch.zeros(1, 32))
    assert found.centred
    vectors = torch.randn(5, 32)
    scale = 1 / (vectors.var(dim=-1, unbiased=False) + norm.eps).sqrt()
    expected = norm(vectors).detach()
    rebuilt = found.applied(vectors) * scale[:, None]
    rebuilt = rebuilt * (1 / (found.gain / norm.weight).mean()).detach() + found.bias
    torch.testing.assert_close(rebuilt, expected, atol=1e-5, rtol=1e-4)
    inner = model.blocks[0].ln1_post
    if hasattr(inner, "original_component"):
        found = sites.output_norm(inner, torch.zeros(1, 32))
        assert not found.centred and found.bias is None


def test_a_wrong_gain_fails_the_identity_in_residual_space():
    """The fold is proved on every run: a gain that is not the model's is refused."""
    model = wrapped("gemma2")
    given = prompts(model)
    original = sites.output_norm
    try:
        sites.output_norm = lambda norm, weight: sites.OutputNorm(
            torch.ones(weight.shape[1]), False, None, norm
        )
        with pytest.raises(IdentityError, match=r"layer 0: z W_O \+ b_O misses .* norm or gate"):
            cw_lens.capture(model, given)
    finally:
        sites.output_norm = original


@on_four
def test_an_output_multiplier_is_part_of_what_is_added():
    for name, multiplier in (("falcon_h1", 0.3), ("granite", 0.22)):
        model = wrapped(name)
        layer = cw_lens.capture(model, prompts(model)).layers[0]
        gain = layer.stream_gain[layer.query_mask]
        torch.testing.assert_close(gain, torch.full_like(gain, multiplier))


@pytest.mark.skipif(ON_FOUR, reason="HookedTransformer is gone in transformer-lens 4")
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "gpt_neox", "opt"])
def test_value_biases_folded_in_a_hooked_transformer_are_refused(name):
    model = wrapped(name)
    given = prompts(model)
    assert sites.weight_state(model) == ("raw",)
    options = {"fold_ln": False, "center_writing_weights": False, "center_unembed": False}
    model.load_and_process_state_dict(model.state_dict(), fold_value_biases=True, **options)
    assert sites.weight_state(model) == ("value biases folded",)
    with pytest.raises(InputError, match=r"layers 0, 1: the value biases have been folded"):
        cw_lens.capture(model, given)
    cw_lens.capture(model, given, allow_folded=True)
