import math
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import cw_lens
from cw_lens import backend, models
from cw_lens.identity import first_not_finite, model_identity, weight_hash
from cw_lens.models import SEAL, ModelLoadError, load_model, wrap_model
from cw_lens.prompts import prompts_from_ids
from tests.conftest import ON_FOUR
from tests.tiny import tiny_gpt2, tiny_llama, tiny_tokenizer

IDS = torch.tensor([[1, 5, 9, 14, 3]])


def tiny_model(family: str):
    """A two-layer model of a family, with grouped queries where the family has them."""
    if family == "gpt2":
        return tiny_gpt2()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        **({} if family == "gpt_neox" else {"num_key_value_heads": 2, "head_dim": 8}),
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    "build",
    [
        tiny_llama,
        lambda: tiny_llama(bias=True),
        tiny_gpt2,
        *(partial(tiny_model, family) for family in ("mistral", "qwen2", "qwen3", "gpt_neox")),
    ],
    ids=["llama", "bias", "gpt2", "mistral", "qwen2", "qwen3", "gpt_neox"],
)
def test_a_wrapped_model_computes_what_the_original_does(build):
    hf_model = build()
    with torch.no_grad():
        expected = hf_model(IDS).logits
    model = wrap_model(hf_model)
    with torch.no_grad():
        found = model(IDS, return_type="logits")
    assert (found - expected).abs().max() < 1e-4
    assert not model.training


@pytest.mark.skipif(ON_FOUR, reason="transformer-lens 4 has no HookedTransformer")
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox"])
def test_on_three_nine_what_a_hooked_transformer_can_hold_is_one(family):
    assert type(wrap_model(tiny_model(family))).__name__ == "HookedTransformer"


@pytest.mark.skipif(ON_FOUR, reason="transformer-lens 4 has no HookedTransformer")
def test_on_three_nine_what_it_cannot_hold_is_a_bridge():
    # its Llama converter drops the attention's biases: the bridge computes the right thing
    assert type(wrap_model(tiny_llama(bias=True))).__name__ == "TransformerBridge"


@pytest.mark.skipif(not ON_FOUR, reason="3.9's HookedTransformer copies the weights")
def test_a_wrapped_model_shares_its_parameters_and_is_eager():
    hf_model = tiny_llama()
    model = wrap_model(hf_model)
    theirs = {p.data_ptr() for p in hf_model.parameters()}
    assert theirs == {p.data_ptr() for p in model.parameters()}
    assert hf_model.config._attn_implementation == "eager"
    assert hf_model.config.architectures == ["LlamaForCausalLM"]


@pytest.mark.parametrize("dtype", ["float32", torch.bfloat16, "torch.float64"])
def test_a_folder_loads_in_the_dtype_asked_for(folder, dtype):
    model = load_model(folder, dtype=dtype)
    assert str(next(model.parameters()).dtype).endswith(str(dtype).removeprefix("torch."))
    assert cw_lens.tokenize(model, "ab").ids.shape == (1, 3)


def test_a_ready_transformer_lens_model_is_taken_as_it_is():
    if ON_FOUR:
        from transformer_lens.config import TransformerBridgeConfig
        from transformer_lens.model_bridge import TransformerBridge

        config = TransformerBridgeConfig(
            d_model=16,
            d_head=4,
            n_layers=2,
            n_ctx=32,
            n_heads=4,
            d_vocab=50,
            d_mlp=32,
            architecture="TransformerLensNative",
            act_fn="gelu",
            normalization_type="LN",
        )
        model = TransformerBridge.boot_native(config)
    else:
        from transformer_lens import HookedTransformer, HookedTransformerConfig

        config = HookedTransformerConfig(
            d_model=16,
            d_head=4,
            n_layers=2,
            n_ctx=32,
            n_heads=4,
            d_vocab=50,
            d_mlp=32,
            act_fn="gelu",
            normalization_type="LN",
        )
        model = HookedTransformer(config)
    run = cw_lens.capture(model, prompts_from_ids(model, [[1, 5, 9], [4, 2]]))
    assert len(run.layers) == 2
    total = cw_lens.inter_head_contributions(run.layers[1]).sum(dim=(1, 3))
    assert total[0].tolist() == pytest.approx([1, 1, 1], abs=1e-5)


def test_identity_and_hash_tell_models_apart():
    model = wrap_model(tiny_llama())
    identity = model_identity(model)
    assert identity["n_layers"] == 2
    assert identity["n_key_value_heads"] == 2
    assert identity["dtype"] == "float32"
    assert identity["weights"] == "raw"
    assert identity["weight_hash"] == weight_hash(wrap_model(tiny_llama()))
    other = wrap_model(tiny_llama())
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1e-3
    assert weight_hash(other) != identity["weight_hash"]
    assert len(weight_hash(wrap_model(tiny_llama().to(torch.bfloat16)))) == 64


@pytest.mark.skipif(not ON_FOUR, reason="compatibility mode is the bridge's")
def test_processed_weights_are_told():
    model = wrap_model(tiny_llama())
    model.enable_compatibility_mode(disable_warnings=True)
    assert model_identity(model)["weights"] == "compatibility mode"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_named(bad):
    hf_model = tiny_llama()
    assert first_not_finite(hf_model) is None
    with torch.no_grad():
        hf_model.model.layers[1].mlp.up_proj.weight[0, 0] = bad
    with pytest.raises(ModelLoadError, match=r"parameter model\.layers\.1\.mlp\.up_proj\.weight"):
        wrap_model(hf_model)


def test_large_finite_weights_are_no_error():
    hf_model = tiny_llama()
    with torch.no_grad():
        hf_model.model.norm.weight.fill_(3e38)
    assert first_not_finite(hf_model) is None


def test_an_architecture_without_adapter_is_refused():
    hf_model = tiny_llama()
    hf_model.config.architectures = ["NobodysModel"]
    with pytest.raises(ModelLoadError, match="cannot wrap NobodysModel: .*Use an architecture"):
        wrap_model(hf_model)


def test_wrong_dtypes_and_devices_are_named(folder):
    with pytest.raises(ModelLoadError, match="unknown dtype 'int3'; there are float32, float16"):
        load_model(folder, dtype="int3")
    with pytest.raises(ModelLoadError, match="cannot load onto device 'toaster'"):
        load_model(folder, device="toaster")
    with pytest.raises(ModelLoadError, match="cannot load onto device 'toaster'"):
        load_model("nobody/none", device="toaster")  # before anything is read
    with pytest.raises(ModelLoadError, match=r"parameter \S+ is on the meta device and has no"):
        load_model(folder, device="meta")


def test_only_a_model_in_memory_can_be_wrapped():
    with pytest.raises(ModelLoadError, match="takes a Hugging Face model .*, not a str. Use load_"):
        wrap_model("gpt2")


@pytest.mark.parametrize("damaged", ["model.safetensors", "tokenizer.json", "config.json", SEAL])
def test_a_damaged_unpacked_default_is_unpacked_again(tmp_path, monkeypatch, caplog, damaged):
    unpacked = []

    def save(gguf, target):  # in place of the reading of the GGUF file, which takes a minute
        unpacked.append(gguf)
        model = tiny_llama()
        model.resize_token_embeddings(258)
        model.save_pretrained(target)
        tiny_tokenizer().save_pretrained(target)

    monkeypatch.setattr(models, "embedded_weights", lambda: tmp_path / "default.gguf")
    monkeypatch.setattr(models, "_save_unquantized", save)
    assert load_model().cfg.n_layers == load_model("smollm2-135m").cfg.n_layers == 2
    assert len(unpacked) == 1
    assert "is damaged" not in caplog.text
    (folder,) = tmp_path.glob("smollm2-135m-*")
    (folder / damaged).write_bytes((folder / damaged).read_bytes()[:-20] + b"\xff")
    assert load_model().cfg.n_layers == 2
    assert len(unpacked) == 2
    assert "is damaged (wrong sha256); unpacking it again" in caplog.text
    assert [path.name for path in tmp_path.glob("convert-*")] == []


def test_a_model_without_positions_limit_takes_any_length(llama):
    llama.cfg.n_ctx = None
    assert backend.context_length(llama) is None


@pytest.mark.golden
@pytest.mark.slow
def test_the_unpacked_default_is_the_gguf_file(smollm2):
    """The folder that the embedded default loads from computes what the GGUF file does."""
    from cw_lens.weights import embedded_weights

    direct = load_model(embedded_weights())
    assert weight_hash(direct) == weight_hash(smollm2)
    text = "Two and two is\n\tfour — naïve?"
    assert torch.equal(cw_lens.tokenize(direct, text).ids, cw_lens.tokenize(smollm2, text).ids)
