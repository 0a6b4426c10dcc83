"""Models whose attention cannot be read as sum(alpha v) W_O: each refusal says which and why."""

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

import cw_lens
from cw_lens import backend
from cw_lens.backend import UnsupportedModelError
from cw_lens.prompts import prompts_from_ids
from tests.conftest import ON_FOUR

ROWS = [[1, 5, 9, 14]]


def test_a_norm_after_the_output_matrix_is_refused():
    config = Gemma2Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    model = cw_lens.wrap_model(Gemma2ForCausalLM(config))
    with pytest.raises(UnsupportedModelError, match="layer 0: a norm follows the attention's out"):
        cw_lens.capture(model, prompts_from_ids(model, ROWS))


@pytest.mark.skipif(not ON_FOUR, reason="3.9 has no adapter that wraps this hybrid raw")
def test_a_layer_without_attention_is_named():
    config = Qwen3NextConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=2,
        num_experts_per_tok=1,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    )
    model = cw_lens.wrap_model(Qwen3NextForCausalLM(config))
    with pytest.raises(UnsupportedModelError, match=r"layer 0 has no attention .*with layers="):
        cw_lens.capture(model, prompts_from_ids(model, ROWS))


def test_attention_that_does_not_show_its_pattern_is_refused():
    """Bridged without eager attention, GPT-J's hook_pattern never fires."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    config = GPTJConfig(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4)
    hf_model = GPTJForCausalLM(config).eval()
    hf_model.set_attn_implementation("sdpa")
    model = build_bridge_from_module(hf_model, "GPTJForCausalLM", hf_config=config)
    with pytest.raises(UnsupportedModelError, match=r"layer 0: .*never showed its .*pattern"):
        cw_lens.capture(model, prompts_from_ids(model, ROWS))


def test_a_loss_that_does_not_depend_on_z_has_no_gradient(llama):
    prompts = prompts_from_ids(llama, ROWS)
    site = backend.attention_site(llama, 1)
    cut = (site.points["output"], lambda output: output.detach() * 0)
    with backend.hooked([cut]), pytest.raises(UnsupportedModelError, match="loss does not depend"):
        cw_lens.token_scores(llama, prompts, ["gradient"], layers=[1])


def test_hooks_of_ours_replace_and_are_removed():
    module = torch.nn.Identity()
    with backend.hooked([(module, lambda x: x + 1), (module, lambda _: None)]):
        assert module(torch.zeros(1)).item() == 1
    assert module(torch.zeros(1)).item() == 0
