"""Texts to token ids, padding mask and tokens a person can read."""

import unicodedata
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from cw_lens import backend
from cw_lens.errors import CWLensWarning, InputError


class PromptError(InputError):
    """A text that cannot be made into a prompt; the message says what to do."""


class BOSWarning(CWLensWarning):
    """A prompt does not begin with exactly one BOS token."""


@dataclass(frozen=True, eq=False)
class Prompts(backend.Inputs):
    """A batch of token ids, or of images, exactly as a model will see them.

    Attributes:
        ids: token ids; padding holds the pad id.
        mask: True at real tokens.
        tokens: per example, one readable string for each position, padding included.
        bos: per example, whether its first real token is the tokenizer's BOS.
        pixels: images, where the model reads those; `ids` then only tell images apart.
    """

    tokens: tuple[tuple[str, ...], ...]
    bos: tuple[bool, ...]

    @property
    def first(self) -> Int[Tensor, " batch"]:
        """Position of each example's first real token."""
        return self.mask.int().argmax(dim=1)

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """Number of real tokens of each example."""
        return self.mask.sum(dim=1)

    def __len__(self) -> int:
        return len(self.tokens)

    def text(self, row: int) -> "Prompts":
        """One example by itself, without its padding."""
        start = int(self.first[row])
        within = slice(start, start + int(self.lengths[row]))
        return Prompts(
            ids=self.ids[row : row + 1, within],
            mask=self.mask[row : row + 1, within],
            tokens=(self.tokens[row][within],),
            bos=(self.bos[row],),
            pixels=None if self.pixels is None else self.pixels[row : row + 1],
        )


def tokenize(
    model: Any,
    texts: str | Sequence[str],
    *,
    prepend_bos: bool = True,
    padding_side: str = "right",
    truncate: bool = False,
) -> Prompts:
    """Prompts of one text or several, padded to the longest, with the model's own tokenizer.

    Args:
        model: a model from `load_model` or `wrap_model`, or any TransformerLens model.
        texts: one text or several.
        prepend_bos: put the BOS token first where the tokenizer has one and did not add it.
        padding_side: "right" or "left".
        truncate: cut a text that is longer than the model's context instead of raising.

    Raises:
        PromptError: a model that reads images, no tokenizer, no texts, an empty text, or a text
            beyond the context.

    Warns:
        BOSWarning: when an example begins with no BOS token, or with two.
    """
    _require_text(model)
    tokenizer = backend.tokenizer(model)
    if tokenizer is None:
        raise PromptError(
            "the model has no tokenizer, so texts cannot be tokenized. Pass one to "
            "wrap_model(hf_model, tokenizer), or build prompts from ids with prompts_from_ids."
        )
    texts = [texts] if isinstance(texts, str) else list(texts)
    if not texts:
        raise PromptError("no texts given; pass at least one.")
    bos = first_token_id(tokenizer)
    rows = []
    for number, text in enumerate(texts):
        if not text:
            raise PromptError(f"text {number} is empty; give it at least one character.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"text {number} is not UTF-8 ({error.reason}). Give it in UTF-8, or in a file."
            ) from error
        row = list(tokenizer(text, verbose=False)["input_ids"])
        if prepend_bos and bos is not None and row[:1] != [bos]:
            row = [bos, *row]
        context = backend.context_length(model)
        if context is not None and len(row) > context:
            if not truncate:
                raise PromptError(
                    f"text {number} has {len(row)} tokens and the model's context holds "
                    f"{context}. Shorten it, or pass truncate=True (--truncate) to keep the "
                    f"first {context}."
                )
            row = row[:context]
        rows.append(row)
    return prompts_from_ids(model, rows, padding_side=padding_side)


def prompts_from_ids(
    model: Any, rows: Sequence[Sequence[int]], *, padding_side: str = "right"
) -> Prompts:
    """Prompts of exact token ids, one sequence an example; nothing is added but padding.

    Raises:
        PromptError: a model that reads images, an empty batch or example, an id outside the
            vocabulary, a wrong side.

    Warns:
        BOSWarning: as `tokenize`, where the model has a tokenizer with a BOS token.
    """
    _require_text(model)
    if padding_side not in ("left", "right"):
        raise PromptError(f'padding_side is {padding_side!r}; it must be "left" or "right".')
    if not rows or not all(len(row) for row in rows):
        raise PromptError("every example needs at least one token id.")
    vocabulary = backend.vocabulary_size(model)
    for number, row in enumerate(rows):
        wrong = [i for i in row if not 0 <= i < vocabulary]
        if wrong:
            raise PromptError(
                f"example {number} has token id {wrong[0]}; the model's vocabulary ends at "
                f"{vocabulary - 1}. Use the model's own tokenizer."
            )
    tokenizer = backend.tokenizer(model)
    bos = None if tokenizer is None else first_token_id(tokenizer)
    width = max(len(row) for row in rows)
    pad = _pad_id(tokenizer)
    ids = torch.full((len(rows), width), pad, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for number, row in enumerate(rows):
        start = width - len(row) if padding_side == "left" else 0
        ids[number, start : start + len(row)] = torch.tensor(list(row))
        mask[number, start : start + len(row)] = True
    readable: dict[int, str] = {}
    tokens = tuple(
        tuple(readable.setdefault(i, display_token(tokenizer, i)) for i in row)
        for row in ids.tolist()
    )
    device = backend.input_device(model)
    begins = tuple(bos is not None and row[0] == bos for row in rows)
    _warn_about_bos(rows, bos, tokenizer)
    return Prompts(ids=ids.to(device), mask=mask.to(device), tokens=tokens, bos=begins)


def one_by_one(prompts: Prompts) -> list[Prompts]:
    """Each example on its own, without its padding."""
    alone = []
    for row in range(len(prompts)):
        real = prompts.mask[row]
        tokens = zip(prompts.tokens[row], real.tolist(), strict=True)
        alone.append(
            replace(
                prompts,
                ids=prompts.ids[row : row + 1, real],
                mask=prompts.mask[row : row + 1, real],
                tokens=(tuple(token for token, held in tokens if held),),
                bos=(prompts.bos[row],),
                pixels=None if prompts.pixels is None else prompts.pixels[row : row + 1],
            )
        )
    return alone


def repeated(prompts: Prompts, times: int) -> Prompts:
    """The same examples, several times over."""
    return replace(
        prompts,
        ids=prompts.ids.repeat(times, 1),
        mask=prompts.mask.repeat(times, 1),
        tokens=prompts.tokens * times,
        bos=prompts.bos * times,
        pixels=None if prompts.pixels is None else prompts.pixels.repeat(times, 1, 1, 1),
    )


def first_token_id(tokenizer: Any) -> int | None:
    """The id that texts begin with: BOS, of an encoder CLS, or None where there is neither."""
    for name in ("bos_token_id", "cls_token_id"):
        if getattr(tokenizer, name, None) is not None:
            return int(getattr(tokenizer, name))
    return None


def display_token(tokenizer: Any, token_id: int) -> str:
    """A token as a person reads it: spaces as `·`, newlines as `↵`, tabs as `⇥`.

    Bytes that are no character on their own are named (`<0xE2>`), so are characters that draw
    nothing or turn the direction of text (`<U+200B>`). Without a tokenizer, the id.
    """
    if tokenizer is None:
        return f"<{token_id}>"
    piece = tokenizer.convert_ids_to_tokens(token_id)
    if piece is None:
        return f"<{token_id}>"
    text = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
    if piece.startswith("\u2581") and not text.startswith(" "):  # SentencePiece drops it
        text = " " + text
    if "\ufffd" in text and "\ufffd" not in piece:
        return _byte_piece(piece)
    return "".join(_visible(c) for c in text) or piece


def _byte_piece(piece: str) -> str:
    """A byte-level piece that is no whole character: its bytes by name."""
    byte_of = backend.byte_alphabet()
    if not all(c in byte_of for c in piece):
        return piece
    return "".join(f"<0x{byte_of[c]:02X}>" for c in piece)


def _visible(character: str) -> str:
    marks = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}
    if character in marks:
        return marks[character]
    if unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp", "Co", "Cn"):
        return f"<U+{ord(character):04X}>"
    return character


def _require_text(model: Any) -> None:
    if backend.reads_images(model):
        raise PromptError(
            "the model reads images, not text. Make its prompts with "
            "prompts_from_images(model, pixels)."
        )


def _pad_id(tokenizer: Any) -> int:
    """Any id serves, since padding is masked; the tokenizer's own where it has one."""
    for name in ("pad_token_id", "eos_token_id"):
        pad = getattr(tokenizer, name, None)
        if pad is not None:
            return int(pad)
    return 0


def _warn_about_bos(rows: Sequence[Sequence[int]], bos: int | None, tokenizer: Any) -> None:
    if tokenizer is None:
        return
    if bos is None:
        warnings.warn(
            "the tokenizer has no BOS token: the first real token of each prompt plays its part.",
            BOSWarning,
            stacklevel=3,
        )
        return
    for number, row in enumerate(rows):
        if row[0] != bos:
            warnings.warn(
                f"example {number} does not begin with the BOS token (id {bos}); its first "
                "token will act as the sink. Use prepend_bos=True unless this is meant.",
                BOSWarning,
                stacklevel=3,
            )
        elif len(row) > 1 and row[1] == bos:
            warnings.warn(
                f"example {number} begins with two BOS tokens (id {bos}). Take it out of the "
                "text, or pass prepend_bos=False.",
                BOSWarning,
                stacklevel=3,
            )
