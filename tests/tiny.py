"""Tiny random models, built from configs: no downloads. Biases and norms are large on purpose."""

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from tests.families import randomised

VOCABULARY = 97


def tiny_llama(heads: int = 4, groups: int = 2, bias: bool = False, seed: int = 0, layers: int = 2):
    """A Llama with grouped queries; `bias` gives q, k, v and o large biases."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8 * heads,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=128,
        attention_bias=bias,
        bos_token_id=1,
        eos_token_id=2,
    )
    return randomised(LlamaForCausalLM(config), spread=0.5)


def tiny_gpt2(seed: int = 0):
    """A GPT-2: Conv1D weights, fused qkv, biases everywhere, learned positions."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        bos_token_id=1,
        eos_token_id=2,
    )
    return randomised(GPT2LMHeadModel(config), spread=0.5)


def tiny_tokenizer(bos: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer without merges: one token a byte, 256 bytes and two specials."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>" if bos else None, eos_token="</s>"
    )
