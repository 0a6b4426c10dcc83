"""One line for each architecture: tiny random models from configs, no downloads.

Value and output biases and norms are large and random, so that a wrong formula cannot hide. A new
architecture joins every conformance test, and the table in docs/what-works-where.md, with a line.
"""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
import transformers

import cw_lens
from cw_lens import backend
from cw_lens.prompts import Prompts, prompts_from_ids

VOCABULARY = 97
IMAGE = 8  # pixels, in patches of 2: 16 and CLS make 17 positions

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 2}
GROUPED_8 = {"num_key_value_heads": 2, "head_dim": 8}
WINDOW = {"sliding_window": 4}
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}


@dataclass(frozen=True)
class Family:
    """A model class of transformers, the name of its config class, and what differs from SIZES."""

    model: str
    config: str
    own: dict[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "gpt2": Family("GPT2LMHeadModel", "GPT2"),
    "gpt_neo": Family("GPTNeoForCausalLM", "GPTNeo", {"attention_types": [[["global", "local"], 1]], "window_size": 4}),
    "gpt_neox": Family("GPTNeoXForCausalLM", "GPTNeoX"),
    "gptj": Family("GPTJForCausalLM", "GPTJ", {"rotary_dim": 4}),
    "gpt_bigcode": Family("GPTBigCodeForCausalLM", "GPTBigCode"),
    "opt": Family("OPTForCausalLM", "OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": Family("BloomForCausalLM", "Bloom"),
    "falcon_multi_query": Family("FalconForCausalLM", "Falcon", {"multi_query": True, "alibi": False}),
    "falcon_alibi": Family("FalconForCausalLM", "Falcon", {"multi_query": False, "alibi": True, "parallel_attn": False, "bias": True}),
    "mpt": Family("MptForCausalLM", "Mpt", {"max_seq_len": 64}),
    "llama": Family("LlamaForCausalLM", "Llama", GROUPED),
    "llama_attention_bias": Family("LlamaForCausalLM", "Llama", {**GROUPED, "attention_bias": True}),
    "llama4": Family("Llama4ForCausalLM", "Llama4Text", {**GROUPED_8, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}),
    "mistral": Family("MistralForCausalLM", "Mistral", {**GROUPED_8, **WINDOW}),
    "mixtral": Family("MixtralForCausalLM", "Mixtral", {**GROUPED, **EXPERTS}),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2", GROUPED),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", "Qwen2Moe", {**GROUPED, **EXPERTS}),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3", GROUPED_8),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "Qwen3Moe", {**GROUPED_8, **EXPERTS}),
    "qwen3_next": Family("Qwen3NextForCausalLM", "Qwen3Next", {**GROUPED_8, **EXPERTS, **HYBRID}),
    "qwen3_5": Family("Qwen3_5ForCausalLM", "Qwen3_5Text", {**GROUPED_8, **HYBRID}),
    "gemma": Family("GemmaForCausalLM", "Gemma", GROUPED_8),
    "gemma2": Family("Gemma2ForCausalLM", "Gemma2", {**GROUPED_8, **WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3Text", {**GROUPED_8, **TWO_KINDS}),
    "gemma4_text": Family("Gemma4ForCausalLM", "Gemma4Text", {**GROUPED_8, **TWO_KINDS, "global_head_dim": 16}),
    "phi": Family("PhiForCausalLM", "Phi"),
    "phi3": Family("Phi3ForCausalLM", "Phi3", GROUPED),
    "olmo_clip_qkv": Family("OlmoForCausalLM", "Olmo", {**GROUPED, "clip_qkv": 0.5}),
    "olmoe_clip_qkv": Family("OlmoeForCausalLM", "Olmoe", {**GROUPED, "clip_qkv": 0.5, "num_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": Family("Olmo2ForCausalLM", "Olmo2", GROUPED),
    "olmo3": Family("Olmo3ForCausalLM", "Olmo3", {**GROUPED, **WINDOW}),
    "cohere": Family("CohereForCausalLM", "Cohere", GROUPED),
    "cohere2": Family("Cohere2ForCausalLM", "Cohere2", {**GROUPED, **WINDOW}),
    "granite": Family("GraniteForCausalLM", "Granite", {**GROUPED, "residual_multiplier": 0.22, "attention_multiplier": 0.3}),
    "starcoder2": Family("Starcoder2ForCausalLM", "Starcoder2", GROUPED),
    "stablelm": Family("StableLmForCausalLM", "StableLm", {**GROUPED, "use_qkv_bias": True}),
    "nemotron": Family("NemotronForCausalLM", "Nemotron", GROUPED_8),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", "DeepseekV2", LATENT),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", "DeepseekV3", LATENT),
    "gpt_oss": Family("GptOssForCausalLM", "GptOss", {**GROUPED_8, **WINDOW, **EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "smollm3": Family("SmolLM3ForCausalLM", "SmolLM3", GROUPED),
    "glm4": Family("Glm4ForCausalLM", "Glm4", {**GROUPED_8, "attention_bias": True}),
    "exaone4": Family("Exaone4ForCausalLM", "Exaone4", GROUPED_8),
    "ernie4_5": Family("Ernie4_5ForCausalLM", "Ernie4_5", GROUPED_8),
    "falcon_h1": Family("FalconH1ForCausalLM", "FalconH1", {**GROUPED_8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 8, "attention_out_multiplier": 0.3}),
    "jamba": Family("JambaForCausalLM", "Jamba", {**GROUPED, **EXPERTS, "mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "bert": Family("BertForMaskedLM", "Bert"),
    "roberta": Family("RobertaForMaskedLM", "Roberta"),
    "vit": Family("ViTForImageClassification", "ViT", {"image_size": IMAGE, "patch_size": 2}),
}  # fmt: skip

REFUSED: dict[str, Family] = {
    "bitnet": Family("BitNetForCausalLM", "BitNet", GROUPED),
    "t5": Family("T5ForConditionalGeneration", "T5", {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
    "mamba": Family("MambaForCausalLM", "Mamba"),
}  # fmt: skip


NOT_ON_THREE: dict[str, str] = {
    "cohere": "does not run CohereForCausalLM as Hugging Face does: its logits are 0",
    "cohere2": "does not run Cohere2ForCausalLM as Hugging Face does: its logits are 0",
    "qwen3_5": "cannot wrap Qwen3_5ForCausalLM",
    "qwen3_next": "cannot wrap Qwen3NextForCausalLM",
    "roberta": "cannot wrap RobertaForMaskedLM",
}
"""What transformer-lens 3.9 cannot hold, and how that is refused."""

HOOKED_TRANSFORMERS = (
    "gpt2", "gpt_neox", "gptj", "gpt_oss", "opt", "bloom", "llama", "mistral", "mixtral", "qwen2",
    "qwen3", "phi3", "olmo3", "olmoe_clip_qkv",
)  # fmt: skip
"""What transformer-lens 3.9 holds as a HookedTransformer; the rest it holds as a bridge."""


def hf_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The random Hugging Face model of a family, the same each time."""
    family = {**FAMILIES, **REFUSED}[name]
    config = getattr(transformers, f"{family.config}Config")(**{**SIZES, **family.own})
    torch.manual_seed(0)
    return randomised(getattr(transformers, family.model)(config)).to(dtype)


def wrapped(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The family's model as cw_lens loads it."""
    if name == "gemma2_hooked":
        return hooked_gemma2()
    return cw_lens.wrap_model(hf_model(name, dtype))


def hooked_gemma2() -> Any:
    """Gemma 2 as transformer-lens 3.9's from_pretrained makes it, which takes hub names alone."""
    transformer_lens: Any = import_module("transformer_lens")
    conversions = import_module("transformer_lens.pretrained.weight_conversions")
    raw = hf_model("gemma2")
    cfg = transformer_lens.HookedTransformerConfig(
        d_model=32,
        d_head=8,
        n_heads=4,
        n_key_value_heads=2,
        d_mlp=48,
        n_layers=2,
        n_ctx=64,
        d_vocab=VOCABULARY,
        eps=raw.config.rms_norm_eps,
        act_fn="gelu_pytorch_tanh",
        normalization_type="RMS",
        positional_embedding_type="rotary",
        rotary_dim=8,
        rotary_base=10000.0,
        attn_scale=8**0.5,
        window_size=4,
        use_local_attn=True,
        attn_types=["local", "global"],
        attn_scores_soft_cap=50.0,
        output_logits_soft_cap=30.0,
        gated_mlp=True,
        final_rms=True,
        use_normalization_before_and_after=True,
        original_architecture="Gemma2ForCausalLM",
    )
    model = transformer_lens.HookedTransformer(cfg, move_to_device=False)
    state = conversions.convert_gemma_weights(raw, cfg)
    loading = transformer_lens.loading_from_pretrained
    model.load_state_dict(loading.fill_missing_keys(model, state), strict=False)
    return model.eval()


def prompts(model: Any, lengths: tuple[int, ...] = (9, 6), side: str = "right") -> Prompts:
    """Random texts of these lengths, padded; as many random images for a vision model."""
    generator = torch.Generator().manual_seed(3)
    if backend.reads_images(model):
        pixels = torch.randn(len(lengths), 3, IMAGE, IMAGE, generator=generator)
        return cw_lens.prompts_from_images(model, pixels)
    rows = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    return prompts_from_ids(model, rows, padding_side=side)


def randomised(model: Any, spread: float = 1.0) -> Any:
    """Every weight drawn anew: matrices keep sizes, biases have size 2, gains 1 and `spread`."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(2 * noise)
            elif parameter.ndim == 1:  # norms
                parameter.copy_(1 + spread * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model.eval()
