"""Doctor: passes what works, refuses what does not, and its docs page is what it finds."""

import pytest
import torch

import cw_lens
from cw_lens import backend, checks, edits, probes
from cw_lens.checks import doctor
from cw_lens.prompts import prompts_from_ids
from tests.conftest import ON_FOUR
from tests.families import NOT_ON_THREE, REFUSED, hf_model, wrapped
from tests.tiny import tiny_tokenizer
from tests.what_works import LINE, PAGE, section


@pytest.mark.slow
def test_the_docs_page_is_what_doctor_finds():
    """Doctor on every architecture; renew the page with python -m tests.what_works."""
    expected = section()
    assert expected in PAGE.read_text()
    refused = {line.split(" | ")[0][2:] for line in expected.splitlines() if "| refused |" in line}
    assert refused == {*REFUSED, *(() if ON_FOUR else NOT_ON_THREE)}
    assert f"## transformer-lens {LINE}" in expected


@pytest.mark.golden
def test_the_default_model_passes_everything(smollm2):
    diagnosis = doctor(smollm2)
    assert diagnosis.ok
    assert set(diagnosis.table()["status"]) == {"pass"}
    assert "30 layers" in diagnosis["attention"].what
    assert diagnosis["first token"].what == "<|im_start|> (id 1), added by tokenize"
    with pytest.raises(KeyError, match="no feature 'nose'; there are .*attention"):
        diagnosis["nose"]


def test_a_refusal_ends_the_trial_and_names_the_remedy():
    diagnosis = doctor(wrapped("bitnet"))
    assert not diagnosis.ok
    (finding,) = diagnosis.findings
    assert finding.status == "refuse" and finding.needed
    assert finding.what.startswith("layer 0: a norm (attn_sub_norm)")
    assert finding.remedy == "Use a model without such a norm."


@pytest.mark.skipif(not ON_FOUR, reason="only a bridge folds weights that it holds already")
def test_folded_value_biases_are_refused_unless_allowed():
    model = wrapped("gpt2")
    model.enable_compatibility_mode(disable_warnings=True)
    diagnosis = doctor(model)
    assert not diagnosis.ok
    assert diagnosis["weights"].status == "refuse"
    assert "allow_folded=True" in diagnosis["weights"].remedy
    assert diagnosis["identities"].status == "refuse"
    assert doctor(model, allow_folded=True).ok


def test_a_write_that_leaves_something_else_is_refused(llama, monkeypatch):
    lost = edits.Edit.lost
    monkeypatch.setattr(edits.Edit, "lost", lambda self, parts: 0.9 * lost(self, parts))
    finding = doctor(llama)["mask and scale values"]
    assert finding.status == "refuse"
    assert "misses what the write should have left by" in finding.what
    assert "do not intervene" in finding.remedy


def test_a_write_that_reaches_another_head_is_refused(llama, monkeypatch):
    lost = edits.Edit.lost
    monkeypatch.setattr(edits.Edit, "lost", lambda self, parts: lost(self, parts).roll(1, dims=1))
    assert doctor(llama)["mask and scale values"].status == "refuse"


def test_a_write_that_does_not_move_the_logits_is_refused(llama):
    layers = [0, 1]
    assert probes.write_miss(llama, layers) < 1e-5
    with backend.hooked([(llama.unembed, torch.zeros_like)]):
        assert probes.write_miss(llama, layers) == float("inf")
        assert not doctor(llama).ok


def test_a_model_that_ignores_the_padding_mask_is_refused(llama, monkeypatch):
    forward = backend.forward

    def unmasked(model, inputs):
        return forward(model, backend.Inputs(inputs.ids, torch.ones_like(inputs.mask)))

    monkeypatch.setattr(backend, "forward", unmasked)
    finding = doctor(llama)["left padding"]
    assert finding.status == "refuse" and "attention to padding" in finding.what
    assert finding.remedy == "The model ignores the padding mask; run its texts one by one."


def test_padding_that_changes_scores_is_refused(llama, monkeypatch):
    def shifted(model, rows, **options):
        return prompts_from_ids(model, [[row[0] ^ len(rows), *row[1:]] for row in rows], **options)

    monkeypatch.setattr(checks, "prompts_from_ids", shifted)
    finding = doctor(llama)["left padding"]
    assert finding.status == "refuse"
    assert finding.remedy == "Run texts one by one, or pad on the other side than left."


@pytest.mark.parametrize(
    ("tokenizer", "what"),
    [
        (None, "no tokenizer: prompts are made of ids"),
        (tiny_tokenizer(bos=False), "the tokenizer has no BOS: the first real token plays its"),
        (tiny_tokenizer(), "<s> (id 0), added by tokenize"),
    ],
)
def test_the_first_token_is_told(tokenizer, what):
    model = cw_lens.wrap_model(hf_model("llama"), tokenizer)
    assert doctor(model)["first token"].what.startswith(what)


def test_low_precision_is_told():
    finding = doctor(wrapped("llama", torch.bfloat16))["precision"]
    assert finding.status == "note"
    assert finding.what == "bfloat16, tolerance 5e-02; shares in float32"
