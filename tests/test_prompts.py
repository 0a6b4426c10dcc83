import pytest
import torch

import cw_lens
from cw_lens.prompts import BOSWarning, PromptError, display_token, prompts_from_ids
from tests.tiny import tiny_llama, tiny_tokenizer


def model_with(tokenizer):
    hf_model = tiny_llama(layers=1)
    hf_model.resize_token_embeddings(258)
    return cw_lens.wrap_model(hf_model, tokenizer)


@pytest.fixture
def model():
    return model_with(tiny_tokenizer())


def text_of(prompts, row=0):
    return "".join(prompts.tokens[row])


def test_texts_become_ids_masks_and_tokens(model):
    prompts = cw_lens.tokenize(model, ["ab", "a"])
    assert prompts.ids[0, 0] == 0
    assert prompts.bos == (True, True)
    assert prompts.mask.tolist() == [[True, True, True], [True, True, False]]
    assert prompts.tokens[0] == ("<s>", "a", "b")
    assert prompts.lengths.tolist() == [3, 2]
    assert prompts.first.tolist() == [0, 0]
    assert len(prompts) == 2
    assert len(cw_lens.tokenize(model, "a")) == 1


def test_left_padding_moves_the_first_real_position(model):
    prompts = cw_lens.tokenize(model, ["abc", "a"], padding_side="left")
    assert prompts.first.tolist() == [0, 2]
    assert prompts.bos == (True, True)
    assert prompts.mask[1].tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a b", "a·b"),
        ("a\nb", "a↵b"),
        ("a\tb", "a⇥b"),
        ("</script>", "</script>"),
        ("a\x07", "a<U+0007>"),
        ("é", "<0xC3><0xA9>"),
        ("€"[:1], "<0xE2><0x82><0xAC>"),
    ],
)
def test_tokens_are_readable(model, text, shown):
    assert text_of(cw_lens.tokenize(model, text)) == "<s>" + shown


def test_characters_that_turn_or_hide_text_are_named():
    class Whole:  # a tokenizer whose tokens are whole characters
        def convert_ids_to_tokens(self, i):
            return chr(i)

        def decode(self, ids, **_):
            return chr(ids[0])

    for character, shown in [
        ("\u202e", "<U+202E>"),
        ("\u200b", "<U+200B>"),
        ("م", "م"),
        ("😀", "😀"),
    ]:
        assert display_token(Whole(), ord(character)) == shown
    assert display_token(None, 7) == "<7>"


def test_sentencepiece_spaces_are_kept():
    class Pieces:
        def convert_ids_to_tokens(self, i):
            return "\u2581river"

        def decode(self, ids, **_):
            return "river"

    assert display_token(Pieces(), 0) == "·river"


def test_ids_pass_through_unchanged(model):
    prompts = prompts_from_ids(model, [[0, 5, 6]])
    assert prompts.ids.tolist() == [[0, 5, 6]]
    assert prompts.mask.all()


def test_no_bos_and_two_bos_are_warned_about(model):
    with pytest.warns(BOSWarning, match="example 0 does not begin with the BOS token"):
        prompts = cw_lens.tokenize(model, "ab", prepend_bos=False)
    assert prompts.bos == (False,)
    with pytest.warns(BOSWarning, match="example 1 begins with two BOS tokens"):
        prompts_from_ids(model, [[0, 4], [0, 0, 4]])
    bare = model_with(tiny_tokenizer(bos=False))
    with pytest.warns(BOSWarning, match="the tokenizer has no BOS token"):
        assert cw_lens.tokenize(bare, "a").bos == (False,)


def test_a_bos_written_in_the_text_is_not_doubled(model):
    assert cw_lens.tokenize(model, "<s>a").ids.tolist() == cw_lens.tokenize(model, "a").ids.tolist()


def test_a_text_beyond_the_context_is_refused_or_cut(model):
    text = "a" * 200
    with pytest.raises(PromptError, match=r"text 0 has 201 tokens .* holds 128.*--truncate"):
        cw_lens.tokenize(model, text)
    assert cw_lens.tokenize(model, text, truncate=True).lengths.tolist() == [128]


def test_an_empty_text_is_refused(model):
    with pytest.raises(PromptError, match="text 1 is empty"):
        cw_lens.tokenize(model, ["a", ""])


def test_other_wrong_input_is_named(model):
    with pytest.raises(PromptError, match="no texts given"):
        cw_lens.tokenize(model, [])
    with pytest.raises(PromptError, match='padding_side is \'up\'; it must be "left" or "right"'):
        cw_lens.tokenize(model, "a", padding_side="up")
    with pytest.raises(PromptError, match="every example needs at least one token id"):
        prompts_from_ids(model, [[1], []])
    with pytest.raises(PromptError, match="example 0 has token id 258; .* ends at 257"):
        prompts_from_ids(model, [[258]])
    with pytest.raises(PromptError, match=r"no tokenizer.*wrap_model\(hf_model, tokenizer\)"):
        cw_lens.tokenize(cw_lens.wrap_model(tiny_llama(layers=1)), "a")


def test_a_model_without_tokenizer_takes_ids():
    model = cw_lens.wrap_model(tiny_llama(layers=1))
    prompts = prompts_from_ids(model, [[3, 4]])
    assert prompts.tokens == (("<3>", "<4>"),)
    assert prompts.bos == (False,)
    assert torch.isfinite(cw_lens.next_token_nll(model, prompts)).all()
