"""Reading real models: the identity of each layer, what is left behind, what is refused."""

import pytest
import torch
from torch import nn

import cw_lens
from cw_lens import backend
from cw_lens.certificates import IdentityError
from cw_lens.errors import InputError
from cw_lens.metrics import METRICS
from cw_lens.prompts import Prompts, prompts_from_ids
from cw_lens.runs import LowOutputWarning
from cw_lens.sites import attention_site
from tests.test_geometry import assert_close
from tests.tiny import tiny_gpt2, tiny_llama

ROWS = [[1, 5, 9, 14, 3, 8, 21], [1, 7, 2], [4, 4, 11, 90, 3]]
SHAPES = [
    {"heads": 4, "groups": 4},
    {"heads": 4, "groups": 2, "bias": True},
    {"heads": 6, "groups": 1, "bias": True},
    {"heads": 6, "groups": 3},
]


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("shape", SHAPES)
def test_layers_hold_what_the_hugging_face_model_computed(shape):
    """Patterns, values and outputs against transformers' own modules, not TransformerLens."""
    hf_model = tiny_llama(**shape)
    hf_model.set_attn_implementation("eager")
    seen: dict[str, torch.Tensor] = {}

    def keep(name):
        return lambda _module, _inputs, output: seen.__setitem__(name, output)

    attention = hf_model.model.layers[1].self_attn
    handles = [
        attention.v_proj.register_forward_hook(keep("value")),
        attention.o_proj.register_forward_hook(keep("output")),
    ]
    ids = torch.tensor([ROWS[0]])
    with torch.no_grad():
        attentions = hf_model(ids, output_attentions=True).attentions
    for handle in handles:
        handle.remove()
    model = cw_lens.wrap_model(hf_model)
    layer = cw_lens.capture(model, prompts_from_ids(model, [ROWS[0]])).layers[1]
    assert_close(layer.pattern, attentions[1])
    heads, groups = shape["heads"], shape["groups"]
    value = seen["value"].view(1, -1, groups, 8).transpose(1, 2)
    for head in range(heads):
        assert_close(layer.value[:, head], value[:, head // (heads // groups)])
    bias = 0.0 if layer.b_O is None else layer.b_O
    assert_close(layer.output + bias, seen["output"])


@pytest.mark.parametrize("build", [tiny_gpt2, tiny_llama])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_reads_as_one_by_one(build, side):
    model = cw_lens.wrap_model(build())
    batch = prompts_from_ids(model, ROWS, padding_side=side)
    together = cw_lens.capture(model, batch)
    for number, row in enumerate(ROWS):
        alone = cw_lens.capture(model, prompts_from_ids(model, [row]))
        real = batch.mask[number]
        for layer, single in zip(together.layers, alone.layers, strict=True):
            assert_close(layer.output[number, real], single.output[0])
            assert_close(layer.pattern[number][:, real][..., real], single.pattern[0])
            assert (layer.pattern[number][..., ~real] == 0).all()
            assert (layer.output[number, ~real] == 0).all()
            for name in ("contribution", "intra_head_contribution", "stream_contribution"):
                edges = METRICS[name](layer)[number][:, real][..., real]
                assert_close(edges, METRICS[name](single)[0])


def test_certificates_measure_and_layers_come_in_order(llama):
    run = cw_lens.capture(llama, prompts_from_ids(llama, ROWS), layers=[-1, 0, 1])
    assert [layer.index for layer in run.layers] == [0, 1]
    for certificate in run.certificates:
        assert 0 <= certificate.value_error < 1e-5
        assert 0 <= certificate.output_error < 1e-5
        assert certificate.tolerance == 1e-4
        assert certificate.dtype == "float32"
        assert certificate.low_outputs == 0


def test_reduce_sees_one_layer_at_a_time(llama):
    prompts = prompts_from_ids(llama, ROWS)
    whole = cw_lens.capture(llama, prompts)
    run = cw_lens.capture(llama, prompts, reduce=lambda layer: (layer.index, layer.output.norm()))
    assert [r[0] for r in run.layers] == [0, 1]
    assert [r[1] for r in run.layers] == [layer.output.norm() for layer in whole.layers]


def test_the_forward_pass_is_left_as_it_was(llama):
    prompts = prompts_from_ids(llama, ROWS)
    before = backend.forward(llama, prompts)
    asked = [p.requires_grad for p in llama.parameters()]
    cw_lens.capture(llama, prompts, layers=[0])
    cw_lens.token_scores(llama, prompts, ["gradient"])
    assert torch.equal(backend.forward(llama, prompts), before)
    assert [p.requires_grad for p in llama.parameters()] == asked
    assert all(p.grad is None for p in llama.parameters())


def test_nothing_hooked_remains_and_the_users_hooks_survive(llama):
    prompts = prompts_from_ids(llama, ROWS)
    seen = []
    point = llama.hook_dict["blocks.0.attn.hook_pattern"]
    point.add_hook(lambda tensor, hook: seen.append(hook.name) and None)
    count = hooks_of(llama)
    cw_lens.capture(llama, prompts)
    cw_lens.token_scores(llama, prompts, ["gradient"])
    assert hooks_of(llama) == count
    assert len(seen) >= 2

    def broken(_layer):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        cw_lens.capture(llama, prompts, reduce=broken)
    with pytest.raises(KeyError, match="mine"):
        cw_lens.token_scores(llama, prompts, {"mine": broken})
    assert hooks_of(llama) == count
    llama.reset_hooks()


@pytest.mark.parametrize("index", [0, 1])
def test_z_gradients_are_those_of_finite_differences(index):
    model = cw_lens.wrap_model(tiny_llama(heads=4, groups=2, bias=True).double())
    prompts = prompts_from_ids(model, [ROWS[0]])
    layer = cw_lens.capture(model, prompts, gradient=True).layers[index]
    site = attention_site(model, index)
    step = 1e-2  # transformers takes its softmax and norms in float32

    def loss(shift: float) -> float:
        def shifted(z: torch.Tensor) -> torch.Tensor:
            z = z.clone().reshape(1, len(ROWS[0]), 4, 8)
            z[0, 0, 2, 5] += shift
            return z.reshape(shape)

        with torch.no_grad(), backend.hooked([(site.points["z"], shifted)]):
            return backend.next_token_nll(model, prompts).sum().item()

    captured = []
    with torch.no_grad(), backend.hooked([(site.points["z"], captured.append)]):
        backend.forward(model, prompts)
    shape = captured[0].shape
    slope = (loss(step) - loss(-step)) / (2 * step)
    assert layer.z_gradient[0, 2, 0, 5].item() == pytest.approx(slope, rel=2e-2)


def test_next_token_nll_is_the_models_loss(llama):
    prompts = prompts_from_ids(llama, ROWS)
    nll = cw_lens.next_token_nll(llama, prompts)
    for number, row in enumerate(ROWS):
        ids = torch.tensor([row])
        logits = backend.forward(llama, prompts_from_ids(llama, ids.tolist()))
        expected = nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
        assert nll[number].sum().item() == pytest.approx(expected.item(), rel=1e-5)
        assert (nll[number, len(row) - 1 :] == 0).all()


def test_from_cache_equals_capture(llama):
    prompts = prompts_from_ids(llama, ROWS)
    _, cache = llama.run_with_cache(prompts.ids, attention_mask=prompts.mask.long())
    run = cw_lens.from_cache(cache, llama, prompts)
    for layer, expected in zip(run.layers, cw_lens.capture(llama, prompts).layers, strict=True):
        assert layer.index == expected.index
        assert_close(layer.output, expected.output)
        assert_close(layer.value, expected.value)
    partial = {k: v for k, v in cache.items() if "blocks.0" not in k}
    assert [x.index for x in cw_lens.from_cache(partial, llama, prompts).layers] == [1]


def test_from_cache_names_what_is_missing_or_foreign(llama):
    prompts = prompts_from_ids(llama, [ROWS[0]])
    _, cache = llama.run_with_cache(prompts.ids, attention_mask=prompts.mask.long())
    held = dict(cache.items())
    with pytest.raises(InputError, match="holds no hook_pattern of any layer"):
        cw_lens.from_cache({}, llama, prompts)
    less = {k: v for k, v in held.items() if not k.endswith("blocks.0.attn.hook_z")}
    with pytest.raises(InputError, match=r"layer 0: the cache holds no blocks\.0\.attn\.hook_z"):
        cw_lens.from_cache(less, llama, prompts)
    with pytest.raises(InputError, match=r"layer 0: the cached residual has shape \(1, 7, 32\)"):
        cw_lens.from_cache(held, llama, prompts_from_ids(llama, [[1, 2]]))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("value", r"layer 1: sum of alpha v misses hook_z by [\d.]+ .*tolerance 1e-04.*clamp"),
        ("output", r"layer 1: z W_O \+ b_O misses the attention's output by [\d.]+ .*norm or gate"),
    ],
)
def test_parts_that_do_not_add_up_are_refused(llama, part, message):
    prompts = prompts_from_ids(llama, ROWS)
    site = attention_site(llama, 1)
    with pytest.raises(IdentityError, match=message):
        with backend.hooked([(site.points[part], lambda x: x + 0.2 * x.abs().mean())]):
            if part == "output":  # the hook must come before the reader's own
                cw_lens.capture(llama, prompts)
            else:
                read_with_foreign_values(llama, prompts)


def read_with_foreign_values(model, prompts: Prompts) -> None:
    """A cache whose values are not those that the model used."""
    _, cache = model.run_with_cache(prompts.ids, attention_mask=prompts.mask.long())
    held = dict(cache.items())
    name = "blocks.1.attn.hook_v"
    held[name] = held[name] + held[name].abs().mean() * torch.randn(held[name].shape)
    cw_lens.from_cache(held, model, prompts)


def test_a_model_that_attends_to_padding_is_refused(llama):
    batch = prompts_from_ids(llama, ROWS, padding_side="left")
    everything = torch.ones_like(batch.mask)
    _, cache = llama.run_with_cache(batch.ids, attention_mask=everything.long())
    with pytest.raises(IdentityError, match=r"layer 0: a real query gives .* attention to padding"):
        cw_lens.from_cache(cache, llama, batch)


def test_nan_weights_fail_the_identity(llama):
    with torch.no_grad():
        attention_site(llama, 0).weight[0, 0] = torch.nan
    with pytest.raises(IdentityError, match="layer 0: z W_O .* by nan .*NaN or infinite weights"):
        cw_lens.capture(llama, prompts_from_ids(llama, ROWS))


def test_low_outputs_are_warned_about(llama):
    # the sink's value is all that the first query writes: without it that query writes nothing
    site = attention_site(llama, 0)

    def silent_first(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[:, 0] = 0
        return value

    with backend.hooked([(site.points["value"], silent_first)]):
        with pytest.warns(LowOutputWarning, match="1 outputs in layers 0 are below the floor"):
            run = cw_lens.capture(llama, prompts_from_ids(llama, [ROWS[0]]), layers=[0])
    assert run.certificates[0].low_outputs == 1


@pytest.mark.parametrize("layers", [[2], [-3], []])
def test_layers_that_do_not_exist_are_named(llama, layers):
    with pytest.raises(InputError, match=r"the model has layers 0 to 1 \(or -2 to -1\)"):
        cw_lens.capture(llama, prompts_from_ids(llama, ROWS), layers=layers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_models_certify_and_their_shares_sum_to_one(dtype):
    model = cw_lens.wrap_model(tiny_llama(heads=4, groups=2, bias=True).to(dtype))
    run = cw_lens.capture(model, prompts_from_ids(model, ROWS))
    for layer, certificate in zip(run.layers, run.certificates, strict=True):
        total = cw_lens.inter_head_contributions(layer).sum(dim=(1, 3))[layer.query_mask]
        assert_close(total, torch.ones_like(total))
        assert max(certificate.value_error, certificate.output_error) < certificate.tolerance
        assert str(dtype).endswith(certificate.dtype)
