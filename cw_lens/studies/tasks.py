"""Accuracy on benchmark tasks while something is removed: by the log-likelihood of the choices.

Unmasked, each log-likelihood is what the Hugging Face model class of lm-evaluation-harness gives
for the same weights: same token ids, same truncation, same sums.
"""

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cw_lens import backend
from cw_lens.errors import InputError
from cw_lens.prompts import BOSWarning, Prompts, prompts_from_ids
from cw_lens.sites import UnsupportedModelError
from cw_lens.tasks import Item, Loglikelihood, Task

Removing = Callable[[Prompts], AbstractContextManager[Any]]

_DEFAULT_CONTEXT = 2048  # the harness', for models that name no limit


@dataclass(frozen=True)
class ItemResult:
    """What a model made of one question.

    Attributes:
        example: number of the question's row.
        gold: which of its choices is right.
        loglikelihoods: log-probability of each choice, in nats.
        scores: the harness' metrics; empty where a log-likelihood is NaN.
    """

    example: int
    gold: int
    loglikelihoods: tuple[float, ...]
    scores: dict[str, float]

    @property
    def correct(self) -> float:
        """1 where the question is answered right, 0 where not, NaN where that is not known."""
        return float(self.scores.get("acc", math.nan))


class _Request(NamedTuple):
    """What the model reads, and the continuation's tokens: read in its last positions."""

    inputs: tuple[int, ...]
    continuation: tuple[int, ...]


def task_accuracy(
    model: Any,
    task: Task,
    *,
    removing: Removing = nullcontext,
    batch_size: int = 8,
    progress: Callable[[int], None] | None = None,
) -> list[ItemResult]:
    """What a model makes of each question of a task, by rising example.

    Args:
        model: any model of TransformerLens with a tokenizer, or what `load_model` and
            `wrap_model` return.
        task: from `load_task`.
        removing: what is active in the forward passes: called with the prompts of each, it gives
            a context, such as `lambda prompts: masked_values(model, plan_of(prompts))`.
        batch_size: questions a pass; those of WinoGrande are two prompts each.
        progress: called with the number of questions done after each pass.

    Raises:
        InputError: no tokenizer, a continuation without a token or longer than the context, or a
            batch size below 1.
        UnsupportedModelError: the model does not predict the next token.
    """
    results = []
    for result in task_results(model, task, removing=removing, batch_size=batch_size):
        results += result
        if progress is not None:
            progress(len(results))
    return sorted(results, key=lambda result: result.example)


def task_results(
    model: Any,
    task: Task,
    *,
    removing: Removing = nullcontext,
    batch_size: int = 8,
    done: Collection[int] = (),
) -> Iterator[list[ItemResult]]:
    """As `task_accuracy`, batch by batch as they are done, the longest prompts first.

    Batches are the same whatever is done already, so that a run taken up again gives what it
    would have given, bit for bit: questions that are done are run again beside those of their
    batch that are not, and are left out of what comes back.

    Args:
        model, task, removing, batch_size: as `task_accuracy`.
        done: examples whose results are not wanted again.

    Raises:
        InputError, UnsupportedModelError: as `task_accuracy`.
    """
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}; it must be at least 1.")
    encoded = [(item, _requests(model, item)) for item in task.items]
    encoded.sort(key=lambda pair: (-_longest(pair[1]), pair[0].example))
    for start in range(0, len(encoded), batch_size):
        batch = encoded[start : start + batch_size]
        if all(item.example in done for item, _ in batch):
            continue
        found = _loglikelihoods(model, [requests for _, requests in batch], removing)
        yield [
            _result(item, loglikelihoods)
            for (item, _), loglikelihoods in zip(batch, found, strict=True)
            if item.example not in done
        ]


def choice_loglikelihoods(
    model: Any, items: Sequence[Item], *, removing: Removing = nullcontext
) -> list[list[Loglikelihood]]:
    """Per item and choice, the continuation's log-probability and whether it is greedy's choice.

    One forward pass, padded on the right. Requests that read the same ids share a row: choices of
    one token, as in MMLU and BoolQ, all come from the same position. Different ids share nothing,
    since a removal may depend on all of them.

    Log-probabilities are taken in float32 at least. The prompts are as lm-evaluation-harness
    makes them: the tokenizer puts what it puts by itself, so that with most tokenizers no BOS
    comes first (an empty context is a BOS, or else an EOS); spaces that end a context go to the
    continuation; what is beyond the model's context is cut off on the left.

    Args:
        model, removing: as `task_accuracy`.
        items: questions of a task.

    Raises:
        InputError, UnsupportedModelError: as `task_accuracy`.
    """
    return _loglikelihoods(model, [_requests(model, item) for item in items], removing)


def _loglikelihoods(
    model: Any, items: Sequence[Sequence[_Request]], removing: Removing
) -> list[list[Loglikelihood]]:
    rows = {inputs: row for row, inputs in enumerate({r.inputs: None for i in items for r in i})}
    with warnings.catch_warnings():  # no BOS is the harness' convention
        warnings.simplefilter("ignore", BOSWarning)
        prompts = prompts_from_ids(model, list(rows))
    with torch.no_grad(), removing(prompts):
        logits = backend.forward(model, prompts)
        return [[_loglikelihood(logits[rows[r.inputs]], r) for r in item] for item in items]


def _loglikelihood(logits: Tensor, request: _Request) -> Loglikelihood:
    """Of a request, from the logits of its row."""
    end = len(request.inputs)
    logits = logits[end - len(request.continuation) : end]
    logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
    ids = torch.tensor(request.continuation, device=logp.device)
    greedy = bool((logp.argmax(dim=-1) == ids).all())
    return logp.gather(1, ids[:, None]).sum().item(), greedy


def _result(item: Item, loglikelihoods: Sequence[Loglikelihood]) -> ItemResult:
    values = tuple(value for value, _ in loglikelihoods)
    scores = {} if any(map(math.isnan, values)) else item.score(loglikelihoods)
    return ItemResult(item.example, item.gold, values, scores)


def _longest(requests: Sequence[_Request]) -> int:
    return max(len(request.inputs) for request in requests)


def _requests(model: Any, item: Item) -> list[_Request]:
    """The token ids of a question's requests, as the harness' Hugging Face model makes them."""
    if not backend.predicts_next_token(model):
        raise UnsupportedModelError(
            "the model does not predict the next token from those before it, so the choices of a "
            "task have no log-likelihood. Use a causal language model."
        )
    tokenizer = backend.tokenizer(model)
    if tokenizer is None:
        raise InputError(
            "the model has no tokenizer, so a task's texts cannot be tokenized. Pass one to "
            "wrap_model(hf_model, tokenizer)."
        )
    limit = backend.context_length(model) or _DEFAULT_CONTEXT
    requests = []
    for context, continuation in item.requests:
        before, after = _encoded_pair(tokenizer, context, continuation)
        if not before:
            raise InputError(
                f"example {item.example}: the context {context!r} has no token, and none to stand "
                "for it (BOS or EOS of the tokenizer, where it is empty). Leave the row out."
            )
        if not 0 < len(after) <= limit:
            raise InputError(
                f"example {item.example}: the continuation {continuation!r} has {len(after)} "
                f"tokens; it must have 1 to {limit}, the model's context. Leave the row out."
            )
        ids = (before + after)[-(limit + 1) :]
        requests.append(_Request(tuple(ids[:-1]), tuple(after)))
    return requests


def _encoded_pair(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Ids of context and continuation, split where the context's own ids end."""
    prefix = tokenizer.bos_token_id
    prefix = tokenizer.eos_token_id if prefix is None else prefix
    if context == "":
        after = tokenizer.encode(continuation, add_special_tokens=False)
        prefixes = [] if prefix is None else [prefix]
        return prefixes, after[1:] if after[:1] == prefixes else after
    words = context.rstrip()
    continuation = context[len(words) :] + continuation
    before = _encode(tokenizer, words, prefix)
    return before, _encode(tokenizer, words + continuation, prefix)[len(before) :]


def _encode(tokenizer: Any, text: str, prefix: int | None) -> list[int]:
    """Ids of a text, with what the tokenizer adds by itself, unless the prefix is there already."""
    if prefix is not None and text.startswith(tokenizer.decode(prefix)):
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode(text)
