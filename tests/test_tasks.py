"""Benchmark tasks: what lm-evaluation-harness makes of the same rows, and what a mask changes."""

import json
import math
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import cw_lens
from cw_lens import backend
from cw_lens.corpora import ShortCorpusWarning
from cw_lens.errors import InputError
from cw_lens.sites import UnsupportedModelError
from cw_lens.studies.accuracy import UNMASKED, accuracy_table, results_table
from cw_lens.studies.tasks import choice_loglikelihoods, task_accuracy, task_results
from cw_lens.task_rows import TASKS, TaskError
from cw_lens.tasks import Item, load_task
from tests.conftest import ON_FOUR, SHARED
from tests.families import wrapped
from tests.tiny import tiny_llama, tiny_tokenizer

SUBJECTS = [
    ("anatomy", "Which bone is in the leg? ", ["Femur", "Ulna", "Rib", "Jaw"], 0),
    ("college_physics", "2 + 2 =", ["3", "5", "4", "1"], 2),
    ("anatomy", "Blood is", ["blue", "red", "a gas", "dry"], 1),
    ("us_foreign_policy", "Treaty?", ["a b", "c", "d", "e"], 3),
]
BLANKS = [
    ("Ann fed Eve as _ was hungry.", "Ann", "Eve", 2),
    ("_ won.", "The tall man", "He", 1),
    ("The cup fit the box for the _ was big .", "cup", "box", 2),
]


def objects(fields, rows):
    return [dict(zip(fields, row, strict=True)) for row in rows]


ROWS = {
    "mmlu": objects(("subject", "question", "choices", "answer"), SUBJECTS),
    "winogrande": objects(("sentence", "option1", "option2", "answer"), BLANKS),
    "boolq": [
        {"passage": "Ice -- Ice is cold.", "question": "is ice cold", "answer": True},
        {"passage": "Fire is\nhot. ", "question": "is fire cold", "answer": False},
        {"passage": "x", "question": "is ice cold", "answer": False},
    ],
    "lambada": [
        {"text": "She took the cup and drank the tea"},
        {"text": "One"},  # an empty context
        {"text": "“Yes ,” he said , and then a double  space"},
        {"text": "He ran  home"},
        {
            "text": "<s>The tokenizer's own BOS and a text that does not fit into the context. "
            "What is left of it is read from its end, as far back as the context reaches: to here"
        },
    ],
}


def as_on_the_hub(name, row):
    """A row in the schema of the data set that the harness downloads, written out on its own."""
    if name == "winogrande":
        return row | {"answer": str(row["answer"])}
    if name == "boolq":
        return {k: v for k, v in row.items() if k != "answer"} | {"label": [0, 1][row["answer"]]}
    return row


def harness_samples(folder, name, rows, hf_model, tokenizer):
    """What the harness' Hugging Face model class gives for these rows, sample by sample.

    Its own YAML files say everything but where the rows are: in json files.
    """
    import lm_eval
    import lm_eval.tasks
    from lm_eval.models.huggingface import HFLM

    defined = Path(lm_eval.tasks.__file__).parent
    by_task = {}
    for number, row in enumerate(rows):
        task = {"mmlu": f"mmlu_{row.get('subject')}", "lambada": "lambada_openai"}.get(name, name)
        by_task.setdefault(task, []).append((number, as_on_the_hub(name, row)))
    files = {
        "winogrande": "winogrande/default",
        "boolq": "super_glue/boolq/default",
        "lambada_openai": "lambada/lambada_openai",
    }
    for task, numbered in by_task.items():
        data = folder / f"{task}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for _, row in numbered))
        splits = dict.fromkeys(("train", "validation", "test", "dev"), str(data))
        config = {
            "include": f"{defined}/{files.get(task, f'mmlu/default/{task}')}.yaml",
            "task": f"ours_{task}",
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": splits, "cache_dir": str(folder / "cache")},
        }
        (folder / f"{task}.yaml").write_text(json.dumps(config))
    found = lm_eval.simple_evaluate(
        HFLM(pretrained=hf_model, tokenizer=tokenizer, batch_size=4),
        tasks=[f"ours_{task}" for task in by_task],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    samples = {}
    for task, numbered in by_task.items():
        for sample in found["samples"][f"ours_{task}"]:
            samples[numbered[sample["doc_id"]][0]] = sample
    return [samples[number] for number in range(len(rows))]


def jsonl(folder, rows, name="rows"):
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny_pair(bos_added=False):
    """A random Llama with its tokenizer, which may put a BOS by itself."""
    from tokenizers.processors import TemplateProcessing

    torch.manual_seed(0)
    hf_model = tiny_llama(bias=True)
    hf_model.resize_token_embeddings(258)
    tokenizer = tiny_tokenizer()
    if bos_added:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    return hf_model, tokenizer


@pytest.fixture(scope="module")
def tiny():
    return cw_lens.wrap_model(*tiny_pair())


@pytest.fixture
def tasks(tmp_path):
    return {name: load_task(name, jsonl(tmp_path, rows, name)) for name, rows in ROWS.items()}


def assert_as_the_harness(results, samples):
    assert [result.example for result in results] == list(range(len(samples)))
    for result, sample in zip(results, samples, strict=True):
        expected = [answer[0][0] for answer in sample["resps"]]
        assert result.loglikelihoods == pytest.approx(expected, rel=0, abs=1e-4)
        assert result.correct == sample["acc"]


@pytest.mark.parametrize("bos_added", [False, True])
@pytest.mark.parametrize("name", list(TASKS))
def test_unmasked_results_are_the_harness_own(tmp_path, name, bos_added):
    """Also where prompts are longer than the context, as those of MMLU are here."""
    hf_model, tokenizer = tiny_pair(bos_added)
    model = cw_lens.wrap_model(hf_model, tokenizer)
    task = load_task(name, jsonl(tmp_path, ROWS[name]))
    samples = harness_samples(tmp_path, name, ROWS[name], hf_model, tokenizer)
    assert_as_the_harness(task_accuracy(model, task, batch_size=3), samples)
    greedy = [[g for _, g in item] for item in choice_loglikelihoods(model, task.items)]
    assert greedy == [[answer[0][1] for answer in sample["resps"]] for sample in samples]


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.golden
@pytest.mark.parametrize("name", list(TASKS))
def test_unmasked_results_of_the_default_model_are_the_harness_own(tmp_path, smollm2, name):
    path = SHARED / "data" / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"the rows are not on this machine ({path.name})")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = rows[:: len(rows) // 25][:25]
    results = task_accuracy(smollm2, load_task(name, jsonl(tmp_path, rows)), batch_size=5)
    samples = harness_samples(tmp_path, name, rows, default_hf_model(smollm2), smollm2.tokenizer)
    assert_as_the_harness(results, samples)


def default_hf_model(smollm2):
    if ON_FOUR:
        return smollm2.original_model
    from transformers import AutoModelForCausalLM

    from cw_lens.models import _embedded_folder

    return AutoModelForCausalLM.from_pretrained(_embedded_folder(), attn_implementation="eager")


def by_hand(*requests, example=0, gold=0):
    return Item(example, requests, gold, harness=None, document={})


@pytest.mark.parametrize("bos_added", [False, True])
def test_every_kind_of_request_is_read_as_the_harness_reads_it(bos_added):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    hf_model, tokenizer = tiny_pair(bos_added)
    requests = [
        ("a context", " a"),
        ("a context", " b"),
        ("a context", " and more"),
        ("a context  ", "moved spaces"),
        ("a line\n\n", "moved lines"),
        ("", "no context"),
        ("", "<s>begins with what stands for no context"),
        ("<s>begins with BOS", " itself"),
        ("x" * 140, " cut on the left"),
        ("x", "y" * 128),  # as long as the context
        ("Zürich — naïve", " 中文"),
    ]
    instances = [Instance("loglikelihood", {}, request, 0) for request in requests]
    harness = HFLM(pretrained=hf_model, tokenizer=tokenizer)
    expected = harness.loglikelihood(instances, disable_tqdm=True)
    (found,) = choice_loglikelihoods(cw_lens.wrap_model(hf_model, tokenizer), [by_hand(*requests)])
    assert [value for value, _ in found] == pytest.approx([v for v, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_greedy_continuations_are_known_as_such(tiny):
    """Random weights seldom choose what is asked for: here it is asked for what they choose."""
    tokenizer, letters = tiny.tokenizer, "abcdefghij"
    (found,) = choice_loglikelihoods(tiny, [by_hand(*(("A text", letter) for letter in letters))])
    ids = torch.tensor([tokenizer.encode("A text")])
    logits = backend.forward(tiny, backend.Inputs(ids, torch.ones_like(ids, dtype=torch.bool)))
    chosen = tokenizer.decode(logits[0, -1].argmax())
    (((value, greedy),),) = choice_loglikelihoods(tiny, [by_hand(("A text", chosen))])
    assert greedy
    assert value > max(value for value, _ in found)
    assert not any(greedy for _, greedy in found)


def test_questions_and_answers(tasks):
    """Literally, as one would find them in the harness' own logs."""
    described = "The following are multiple choice questions (with answers) about {}.\n\n{}"
    asked = "Which bone is in the leg?\nA. Femur\nB. Ulna\nC. Rib\nD. Jaw\nAnswer:"
    mmlu = tasks["mmlu"].items
    assert mmlu[0].requests[2] == (described.format("anatomy", asked), " C")
    assert mmlu[1].requests[0][0].startswith(described.format("college physics", "2 + 2 =\nA. 3"))
    assert tasks["winogrande"].items[0].requests == (
        ("Ann fed Eve as Ann", " was hungry."),
        ("Ann fed Eve as Eve", " was hungry."),
    )
    assert tasks["boolq"].items[0].requests == tuple(
        ("Ice -- Ice is cold.\nQuestion: is ice cold?\nAnswer:", answer)
        for answer in (" no", " yes")
    )
    assert tasks["lambada"].items[0].requests == (("She took the cup and drank the", " tea"),)
    golds = {name: [item.gold for item in task.items] for name, task in tasks.items()}
    assert golds == {
        "mmlu": [0, 2, 1, 3],
        "winogrande": [1, 0, 1],
        "boolq": [1, 0, 0],
        "lambada": [0, 0, 0, 0, 0],
    }


def test_an_answer_is_right_where_the_likeliest_choice_is(tasks):
    item = tasks["mmlu"].items[1]  # the third of four is right
    assert item.score([(-2.0, False), (-3.0, False), (-1.5, False), (-9.0, True)])["acc"] == 1
    assert item.score([(-1.0, False), (-3.0, True), (-1.5, False), (-9.0, True)])["acc"] == 0
    word = tasks["lambada"].items[0]
    assert [word.score([(-0.1, greedy)])["acc"] for greedy in (False, True)] == [0, 1]


def noting(passes):
    @contextmanager
    def removing(prompts):
        passes.append(prompts)
        yield
        passes.append("over")

    return removing


def test_choices_that_read_the_same_ids_share_a_row(tiny, tasks):
    """A letter of MMLU is its last byte here, after the same space; other choices differ."""
    rows = {"mmlu": 1, "winogrande": 2, "boolq": 2, "lambada": 1}
    for name, task in tasks.items():
        passes = []
        choice_loglikelihoods(tiny, task.items, removing=noting(passes))
        prompts, over = passes
        assert len(prompts) == rows[name] * len(task.items)
        assert over == "over"


def test_a_batch_holds_the_longest_questions_first_and_no_more_than_asked(tiny, tasks):
    passes = []
    counts = []
    task_accuracy(
        tiny, tasks["lambada"], removing=noting(passes), batch_size=2, progress=counts.append
    )
    lengths = [prompts.lengths.tolist() for prompts in passes[::2]]
    assert [len(batch) for batch in lengths] == [2, 2, 1]
    flat = [length for batch in lengths for length in batch]
    assert flat == sorted(flat, reverse=True)
    assert counts == [2, 4, 5]


def first_half_masked(model, heads=4):
    """Removes the first half of each prompt from all but one head of the last layer."""

    def removing(prompts):
        positions = torch.arange(prompts.ids.shape[1])
        half = positions < prompts.lengths[:, None] // 2
        mask = half[:, None].repeat(1, heads, 1)
        mask[:, 0] = False
        return cw_lens.masked_values(model, {-1: mask})

    return removing


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", list(TASKS))
def test_results_do_not_depend_on_the_batch(tiny, tasks, name, masked):
    options = {"removing": first_half_masked(tiny)} if masked else {}
    alone = task_accuracy(tiny, tasks[name], batch_size=1, **options)
    together = task_accuracy(tiny, tasks[name], batch_size=8, **options)
    for one, other in zip(alone, together, strict=True):
        assert one.loglikelihoods == pytest.approx(other.loglikelihoods, rel=0, abs=1e-4)
        assert (one.example, one.correct) == (other.example, other.correct)


@pytest.mark.parametrize("name", list(TASKS))
def test_a_mask_changes_results_and_is_gone_afterwards(tiny, tasks, name):
    clean = task_accuracy(tiny, tasks[name])
    masked = task_accuracy(tiny, tasks[name], removing=first_half_masked(tiny))
    for one, other in zip(clean, masked, strict=True):
        changes = np.subtract(one.loglikelihoods, other.loglikelihoods)
        assert (np.abs(changes) > 1e-2).all()
    assert task_accuracy(tiny, tasks[name]) == clean


def test_a_run_taken_up_again_gives_the_same_bit_for_bit(tiny, tasks):
    task = tasks["lambada"]
    whole = task_accuracy(tiny, task, batch_size=2)
    (first, *_), passes = task_results(tiny, task, batch_size=2), []
    done = {first[0].example}  # one of the two that the first batch gave
    rest = task_results(tiny, task, batch_size=2, done=done)
    again = [first[0], *(result for batch in rest for result in batch)]
    assert sorted(again, key=lambda result: result.example) == whole
    done = {result.example for result in first}
    rest = list(task_results(tiny, task, batch_size=2, done=done, removing=noting(passes)))
    assert [len(batch) for batch in rest] == [2, 1]
    assert len(passes) == 2 * 2  # the first batch was not run again


def test_a_loglikelihood_that_is_no_number_is_told_and_not_scored(tiny, tasks):
    def removing(prompts):  # stands for a model that overflows
        points = [(tiny.hook_dict["blocks.1.hook_resid_post"], lambda x: x + math.nan)]
        return backend.hooked(points)

    results = task_accuracy(tiny, tasks["boolq"], removing=removing)
    assert all(math.isnan(result.correct) and result.scores == {} for result in results)
    assert all(math.isnan(value) for value in results[0].loglikelihoods)
    table = accuracy_table(results_table("boolq", results))
    assert (table["failed"].item(), table["n"].item()) == (3, 0)
    assert table[["accuracy", "accuracy_low", "difference"]].isna().all(axis=None)


def test_examples_are_drawn_by_a_seed_in_the_order_of_the_file(tmp_path):
    rows = [{"text": f"The number is {number}"} for number in range(40)]
    path = jsonl(tmp_path, rows)

    def numbers(examples, seed):
        task = load_task("lambada", path, examples, sample_seed=seed)
        for item in task.items:
            assert item.requests == (("The number is", f" {item.example}"),)
        return [item.example for item in task.items]

    assert numbers(5, None) == [0, 1, 2, 3, 4]
    assert numbers(5, 1) == numbers(5, 1) == sorted(numbers(5, 1)) != numbers(5, 2)
    assert numbers(None, 1) == list(range(40))
    with pytest.warns(ShortCorpusWarning, match="lambada has 40 rows and 41 were asked for; all"):
        assert numbers(41, 1) == list(range(40))


def test_a_task_says_where_it_comes_from(tmp_path):
    path = jsonl(tmp_path, ROWS["boolq"])
    task = load_task("boolq", str(path))
    assert task.source.startswith(f"{path}, sha256 ")
    assert task.harness.startswith("lm_eval 0.")
    assert "boolq 2" in task.harness


def test_questions_of_the_hub_are_those_of_the_same_rows_in_a_file(tmp_path, monkeypatch):
    import datasets

    asked = []

    def load_dataset(path, name, **_):
        asked.append((path, name))
        rows = [
            {"subject": name, "question": f"{name} {n}", "choices": list("wxyz"), "answer": n}
            for n in range(3)
        ]
        return dict.fromkeys(("test", "validation", "dev"), datasets.Dataset.from_list(rows))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    hub = load_task("mmlu", examples=20, sample_seed=3)
    assert len(asked) == 57
    assert {path for path, _ in asked} == {"cais/mmlu"}
    assert hub.source == "cais/mmlu on the Hugging Face hub"
    rows = [row for place in tuple(asked) for row in load_dataset(*place)["test"]]
    local = load_task("mmlu", jsonl(tmp_path, rows), examples=20, sample_seed=3)
    for one, other in zip(hub.items, local.items, strict=True):
        assert (one.example, one.requests, one.gold) == (other.example, other.requests, other.gold)


def test_a_hub_that_does_not_answer_is_told_with_what_to_do(monkeypatch):
    message = "the Hugging Face hub did not give the rows of boolq: .*rows=... .--rows boolq=FILE"
    with pytest.raises(TaskError, match=message):
        load_task("boolq")
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    monkeypatch.setattr("cw_lens.tasks.hub_silence", lambda _: "No route to host.")
    with pytest.raises(TaskError, match="the rows of boolq: No route to host. Connect to it, set"):
        load_task("boolq")


def test_what_is_missing_is_named_with_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    message = r"the tasks need lm-evaluation-harness .* pip install 'cw-lens\[tasks\]'"
    with pytest.raises(TaskError, match=message):
        load_task("boolq", jsonl(tmp_path, ROWS["boolq"]))


def without(row, field):
    return {name: value for name, value in row.items() if name != field}


MMLU_ROW, WINOGRANDE_ROW, BOOLQ_ROW = (ROWS[name][0] for name in ("mmlu", "winogrande", "boolq"))


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("mmlu", without(MMLU_ROW, "choices"), "has no choices. A row of mmlu holds question, "),
        ("mmlu", MMLU_ROW | {"choices": ["a", "b", "c"]}, r"has choices that are not 4 texts: \["),
        ("mmlu", MMLU_ROW | {"choices": "abcd"}, "has choices that are not 4 texts: 'abcd'"),
        ("mmlu", MMLU_ROW | {"choices": [1, 2, 3, 4]}, r"has choices that are not 4 texts: \[1"),
        ("mmlu", MMLU_ROW | {"answer": 4}, "has the answer 4; it must be one of 0, 1, 2, 3"),
        ("mmlu", MMLU_ROW | {"answer": True}, "has the answer True; it must be one of 0, 1, 2, 3"),
        ("mmlu", MMLU_ROW | {"answer": "A"}, "has the answer 'A'; it must be one of 0, 1, 2, 3"),
        ("mmlu", without(MMLU_ROW, "subject"), "has no subject. A row of mmlu holds "),
        (
            "winogrande",
            WINOGRANDE_ROW | {"sentence": "None."},
            r"has a sentence with 0 blanks \(_\) instead of one",
        ),
        (
            "winogrande",
            WINOGRANDE_ROW | {"sentence": "_ _"},
            r"has a sentence with 2 blanks \(_\) instead of one",
        ),
        ("winogrande", WINOGRANDE_ROW | {"answer": "2"}, "has the answer '2'; .* one of 1, 2"),
        ("winogrande", without(WINOGRANDE_ROW, "option2"), "has no option2. A row of winogrande"),
        ("boolq", BOOLQ_ROW | {"answer": 1}, "has the answer 1; it must be one of True, False"),
        ("boolq", BOOLQ_ROW | {"passage": " "}, "has a passage that is no text: ' '"),
        ("boolq", without(BOOLQ_ROW, "answer"), "has no answer. A row of boolq holds passage, "),
        ("lambada", {"text": 3}, "has a text that is no text: 3. A row of lambada holds text."),
        ("lambada", ["text"], "is a list, no object. A row of lambada holds text."),
    ],
)
def test_a_row_that_is_wrong_is_named_by_its_line(tmp_path, name, row, message):
    path = jsonl(tmp_path, [ROWS[name][0], row])
    path.write_text("\n" + path.read_text())  # blank lines count as lines
    with pytest.raises(TaskError, match=f"rows.jsonl, line 3 {message}"):
        load_task(name, path)


def test_files_and_names_that_cannot_be_right_are_refused(tmp_path):
    with pytest.raises(TaskError, match="there is no task 'hellaswag'; there are mmlu, wino"):
        load_task("hellaswag")
    with pytest.raises(TaskError, match="there is no file .*none.jsonl. Give the rows of boolq as"):
        load_task("boolq", tmp_path / "none.jsonl")
    with pytest.raises(TaskError, match="examples is 0; it must be at least 1"):
        load_task("boolq", jsonl(tmp_path, ROWS["boolq"]), 0)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a b"}\n{"text": ')
    with pytest.raises(TaskError, match="line 2 is not JSON .Expecting value.*. A row of lambada"):
        load_task("lambada", broken)
    broken.write_text("\n \n")
    with pytest.raises(TaskError, match="broken.jsonl holds no rows. A row of lambada holds text"):
        load_task("lambada", broken)
    broken.write_bytes(b'{"text": "\xff\xfe a"}')
    with pytest.raises(TaskError, match="cannot read .*broken.jsonl: .* Save it in UTF-8"):
        load_task("lambada", broken)
    rows = jsonl(tmp_path, [MMLU_ROW | {"subject": "alchemy"}])
    with pytest.raises(TaskError, match="no task 'mmlu_alchemy'. Correct .* mmlu_abstract_algebra"):
        load_task("mmlu", rows)


def test_models_and_requests_that_cannot_be_right_are_refused(tiny, tasks):
    task = tasks["boolq"]
    with pytest.raises(InputError, match="batch_size is 0; it must be at least 1"):
        task_accuracy(tiny, task, batch_size=0)
    silent = cw_lens.wrap_model(tiny_pair()[0])
    with pytest.raises(InputError, match="no tokenizer, so a task's texts .* Pass one to wrap_"):
        task_accuracy(silent, task)
    with pytest.raises(UnsupportedModelError, match="does not predict the next token .* causal"):
        task_accuracy(wrapped("bert"), task)
    with pytest.raises(
        InputError, match="example 4: the continuation '' has 0 tokens; .* 1 to 128"
    ):
        choice_loglikelihoods(tiny, [by_hand(("a", ""), example=4)])
    with pytest.raises(InputError, match="has 129 tokens; it must have 1 to 128, the model's cont"):
        choice_loglikelihoods(tiny, [by_hand(("a", "x" * 129))])
    with pytest.raises(InputError, match="example 0: the context '  ' has no token, and none to"):
        choice_loglikelihoods(tiny, [by_hand(("  ", "a"))])


def answers(task, correct, seed=0, **removed):
    columns = {"task": task, "metric": UNMASKED, "remove": UNMASKED, "fraction": 0.0, "seed": seed}
    rows = {"example": range(len(correct)), "correct": correct}
    return pd.DataFrame(columns | removed | rows, index=range(len(correct)))


REMOVED = {"metric": "contribution", "remove": "lowest", "fraction": 0.5}


def test_accuracies_and_their_intervals():
    generator = np.random.default_rng(0)
    clean = generator.integers(0, 2, 50).astype(float)
    masked = np.where(generator.random(50) < 0.3, 0.0, clean)
    table = accuracy_table(
        pd.concat([answers("boolq", clean), answers("boolq", masked, **REMOVED)]), resamples=2000
    )
    unmasked, removed = (table[table["fraction"] == f].iloc[0] for f in (0.0, 0.5))
    n, p, z = 50, masked.mean(), stats.norm.ppf(0.975)
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    assert (removed["n"], removed["accuracy"]) == (50, p)
    assert removed["accuracy_low"] == pytest.approx(centre - half)
    assert removed["accuracy_high"] == pytest.approx(centre + half)
    assert removed["difference"] == pytest.approx((masked - clean).mean())
    error = (masked - clean).std(ddof=1) / math.sqrt(n) * stats.t.ppf(0.975, n - 1)
    for end, sign in (("difference_low", -1), ("difference_high", 1)):
        assert removed[end] == pytest.approx(removed["difference"] + sign * error, abs=0.03)
    assert unmasked[["difference", "difference_low", "difference_high"]].tolist() == [0, 0, 0]


def test_seeds_are_averaged_within_a_question():
    """Three seeds are no three times as many questions."""
    removed = REMOVED | {"metric": "random"}
    seeds = [[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]]
    rows = [answers("boolq", row, seed, **removed) for seed, row in enumerate(seeds)]
    table = accuracy_table(pd.concat([answers("boolq", [1.0, 1.0, 0.0, 1.0]), *rows]))
    row = table[table["metric"] == "random"].iloc[0]
    assert (row["n"], row["seeds"]) == (4, 3)
    assert row["accuracy"] == pytest.approx(2 / 4)  # 1 + 0 + 1/3 + 2/3
    ends = stats.binomtest(2, 4).proportion_ci(method="wilson")
    assert row["accuracy_low"] == pytest.approx(ends.low)
    assert row["difference"] == pytest.approx((0 - 1 + 1 / 3 - 1 / 3) / 4)
    rows[0].loc[2, "correct"] = 1.0  # two thirds more: 2 1/3 of 4
    table = accuracy_table(pd.concat([answers("boolq", [1.0, 1.0, 0.0, 1.0]), *rows]))
    row = table[table["metric"] == "random"].iloc[0]
    assert row["accuracy_low"] == pytest.approx(ends.low)
    assert row["accuracy_high"] == pytest.approx(
        stats.binomtest(3, 4).proportion_ci(method="wilson").high
    )


def test_averages_that_add_up_to_a_whole_count_but_for_rounding_are_that_count():
    averages = [0.7, 0.2, 0.1]
    assert sum(averages) < 1
    row = accuracy_table(answers("boolq", averages)).iloc[0]
    assert row["accuracy_low"] == stats.binomtest(1, 3).proportion_ci(method="wilson").low


def test_tasks_are_compared_with_their_own_unmasked_run_over_shared_questions():
    clean = answers("boolq", [1.0, 0.0, math.nan, 1.0])
    masked = answers("boolq", [0.0, 0.0, 1.0, math.nan, 1.0], **REMOVED)
    other = answers("lambada", [0.0, 0.0])
    table = accuracy_table(pd.concat([clean, masked, other])).set_index(["task", "fraction"])
    row = table.loc["boolq", 0.5]
    assert (row["n"], row["failed"], row["accuracy"]) == (4, 1, 0.5)
    assert row["difference"] == pytest.approx(-1 / 2)  # of the first two questions
    assert table.loc["boolq", 0.0]["failed"] == 1
    assert table.loc["lambada", 0.0]["accuracy"] == 0


def test_tables_that_cannot_be_compared_are_refused():
    with pytest.raises(InputError, match="the results have no column 'seed'; make them by results"):
        accuracy_table(answers("boolq", [1.0]).drop(columns="seed"))
    with pytest.raises(InputError, match="boolq has no unmasked run to compare with. Add its"):
        accuracy_table(answers("boolq", [1.0], **REMOVED))


def test_results_become_rows_of_a_table(tiny, tasks):
    results = task_accuracy(tiny, tasks["mmlu"])
    table = results_table("mmlu", results, metric="random", remove="lowest", fraction=0.3, seed=2)
    assert table["example"].tolist() == [0, 1, 2, 3]
    assert table["correct"].tolist() == [result.correct for result in results]
    assert table["gold_loglikelihood"].tolist() == [r.loglikelihoods[r.gold] for r in results]
    assert set(map(tuple, table[["metric", "remove", "fraction", "seed"]].to_numpy())) == {
        ("random", "lowest", 0.3, 2)
    }
