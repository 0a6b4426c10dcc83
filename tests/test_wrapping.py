"""Wrapping proves that TransformerLens computes what Hugging Face does, and refuses the rest."""

import json

import pytest
import torch
import transformers

import cw_lens
from cw_lens import backend, trials, wrapping
from cw_lens.model_paths import ModelLoadError
from cw_lens.models import load_model
from cw_lens.prompts import prompts_from_ids
from cw_lens.sites import UnsupportedModelError
from cw_lens.wrapping import wrap_model
from tests.conftest import ON_FOUR
from tests.families import SIZES, hf_model, prompts, randomised
from tests.tiny import tiny_tokenizer


def saved(name, folder, **config):
    """A model folder whose config says something else than its weights."""
    model = hf_model(name)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 3}, r"weights lack 9 of the model's parameters, model\.layers\.2\."),
        (
            {"num_attention_heads": 8},
            r"o_proj\.weight has shape \[32, 32\] in the weights and \[32, 64",
        ),
        (
            {"vocab_size": 100},
            r"lm_head\.weight has shape \[97, 32\] in .* and \[100, 32\] by conf",
        ),
        ({"num_attention_heads": 3}, r"hidden size \(32\) is not a multiple of the number of atte"),
        ({"hidden_act": "blub"}, r"KeyError 'blub'.*Check its config"),
        ({"num_hidden_layers": 0}, r"cannot wrap|no layers"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(tmp_path, config, message):
    with pytest.raises(cw_lens.CWLensError, match=message):
        model = load_model(saved("llama", tmp_path, **config))
        cw_lens.capture(model, prompts_from_ids(model, [[1, 2]]))


def test_an_encoder_with_a_decoder_is_refused_from_a_folder(tmp_path):
    with pytest.raises(ModelLoadError, match=r"cannot load .*: it is an encoder with a decoder"):
        load_model(saved("t5", tmp_path))


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_encoders_and_vision_models_load_from_folders(tmp_path, name):
    model = load_model(saved(name, tmp_path))
    assert cw_lens.doctor(model).ok
    assert not backend.predicts_next_token(model)


def test_a_model_that_transformer_lens_runs_otherwise_is_refused():
    """Given a padding mask, its bridge of the first GPT lets tokens see those after them."""
    config = transformers.OpenAIGPTConfig(vocab_size=97, n_embd=32, n_layer=2, n_head=4)
    model = randomised(transformers.OpenAIGPTLMHeadModel(config))
    with pytest.raises(
        ModelLoadError, match=r"does not run OpenAIGPTLMHeadModel as .* Use another"
    ):
        wrap_model(model)


def test_a_token_that_sees_ahead_is_noticed_also_where_logits_hardly_change():
    config = transformers.OpenAIGPTConfig(vocab_size=97, n_embd=32, n_layer=2, n_head=4)
    raw = randomised(transformers.OpenAIGPTLMHeadModel(config))
    raw.config.architectures = ["OpenAIGPTLMHeadModel"]
    held = trials.trial(raw)
    model = wrapping._bridge(raw).eval()
    found = trials.difference(model, held, tolerance=1.0)
    assert found == "it differs in whether a token sees those after it"


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3"])
def test_a_window_longer_than_the_trial_is_kept(name):
    sizes = {**SIZES, "num_key_value_heads": 2, "sliding_window": 12, "use_sliding_window": True}
    config = getattr(transformers, f"{name}Config")(**sizes, max_window_layers=0)
    raw = randomised(getattr(transformers, f"{name}ForCausalLM")(config))
    ids = torch.arange(40)[None] % 90
    with torch.no_grad():
        expected = raw(ids, use_cache=False).logits
    model = wrap_model(raw)
    given = prompts_from_ids(model, ids.tolist())
    with torch.no_grad():
        found = backend.forward(model, given)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert not cw_lens.capture(model, given).layers[0].pattern[..., 20, :8].any()


@pytest.mark.skipif(not ON_FOUR, reason="transformer-lens 3.9 has no option for it")
def test_a_decoder_made_bidirectional_has_no_next_token_loss():
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "use_bidirectional_attention": True}
    raw = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes))
    model = wrap_model(randomised(raw))
    given = prompts(model)
    assert not cw_lens.capture(model, given).layers[0].causal
    with pytest.raises(UnsupportedModelError, match="does not predict the next token"):
        cw_lens.next_token_nll(model, given)


def test_a_model_is_wrapped_once():
    raw = hf_model("gemma")
    model = wrap_model(raw)
    for again in (raw, model):
        with pytest.raises(ModelLoadError, match=r"wrapped already|needs no wrapping"):
            wrap_model(again)
    cw_lens.capture(model, prompts(model))
