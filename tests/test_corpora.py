"""Texts of files, of data sets and as they ship, and what is said when there are none."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pandas as pd
import pytest
import torch

import cw_lens
from cw_lens import corpora
from cw_lens.corpora import CorpusError, ShortCorpusWarning, corpus_prompts, load_corpus
from cw_lens.prompts import BOSWarning, prompts_from_ids
from tests.conftest import SHARED
from tests.tiny import tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.apart

TEXTS = ("one, two", "NA", "007", "drei · vier")
WIKI = [
    "",
    " = First Title = \n",
    "",
    " Some text . \n",
    "",
    " = = A section = = \n",
    "",
    " where the frequency is \n",
    " = 1 rad / s and a nominal impedance k = \n",
    " = x and = \n",
    "",
    " = y = \n",
    " 1 Ω . \n",
    "",
    "",
    " = Second = \n",
    "",
    " More . \n",
]
HUB_SCRIPT = """
import json, sys, time
from cw_lens import corpora, model_paths

model_paths.HUB_SECONDS = 1
for name in sys.argv[1:]:
    start = time.monotonic()
    try:
        corpora.load_corpus(name, 2)
    except corpora.CorpusError as error:
        print(json.dumps([str(error), time.monotonic() - start]))
"""


def written(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def lines_of(path, rows):
    return written(path, "".join(json.dumps(row) + "\n" for row in rows))


def data_file(name):
    path = SHARED / "data" / name
    if not path.exists():
        pytest.skip(f"the data set is not on this machine ({name})")
    return str(path)


def model_with(tokenizer):
    hf_model = tiny_llama(layers=1)
    hf_model.resize_token_embeddings(258)
    return cw_lens.wrap_model(hf_model, tokenizer)


def test_the_shipped_corpus_alternates_prose_and_problems():
    corpus = load_corpus("samples")
    assert len(corpus.texts) == len(set(corpus.texts)) == 24
    assert corpus.name == corpora.SHIPPED
    assert corpus.rows == tuple(range(24))
    assert re.fullmatch("shipped with cw_lens, sha256 [0-9a-f]{64}", corpus.source)
    assert all(70 <= len(text.split()) <= 150 for text in corpus.texts[::2])
    assert all(text.startswith("Question: ") for text in corpus.texts[1::2])
    assert load_corpus("samples", 3).texts == corpus.texts[:3]


def test_the_sums_of_the_shipped_problems_are_right():
    for text in load_corpus("samples").texts[1::2]:
        answer = text.split("\nAnswer: ")[1]
        results = []
        for sum_, result, shown in re.findall(r"<<([-+*/. \d]+)=([.\d]+)>>([.\d]*\d)", answer):
            assert eval(sum_) == pytest.approx(float(result), abs=1e-12), answer
            assert result == shown
            results.append(result)
        assert len(results) == answer.count("<<") > 1
        assert answer.splitlines()[-1] == f"#### {results[-1]}"


def test_every_kind_of_file_gives_the_same_texts(tmp_path):
    rows = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
    table = pd.DataFrame(rows)
    table.to_parquet(tmp_path / "a.parquet")
    table.to_csv(tmp_path / "a.csv", index=False)
    paths = [
        lines_of(tmp_path / "a.jsonl", rows),
        lines_of(tmp_path / "strings.JSONL", TEXTS),
        lines_of(tmp_path / "lines.json", rows),
        written(tmp_path / "a.json", " \n" + json.dumps(rows, indent=1)),
        written(tmp_path / "marked.json", "\ufeff" + json.dumps(rows)),
        str(tmp_path / "a.parquet"),
        str(tmp_path / "a.csv"),
        written(tmp_path / "a.txt", "\n \n\n".join(TEXTS)),
    ]
    for path in paths:
        corpus = load_corpus(path)
        assert corpus.texts == TEXTS, path
        assert corpus.name == Path(path).stem
        assert corpus.source == f"{path}, sha256 {corpora.file_sha256(tmp_path / path)}"
        assert corpus.rows == ((0, 3, 6, 9) if path.endswith(".txt") else (0, 1, 2, 3))


def test_a_table_of_numbers_is_text(tmp_path):
    assert load_corpus(written(tmp_path / "a.csv", "code\n007\n1.50\n")).texts == ("007", "1.50")


def test_a_text_file_is_split_at_blank_lines(tmp_path):
    path = written(tmp_path / "a.txt", "\r\n\r\n first\r\nline\u2028still \r\n\t\r\nsecond")
    corpus = load_corpus(path)
    assert corpus.texts == (" first\nline\u2028still ", "second")
    assert corpus.rows == (2, 5)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": "t", "question": "q", "answer": "a"}, "Question: q\nAnswer: a"),
        ({"text": "t", "question": "q", "answer": 3}, "t"),
        ({"text": "t", "question": "q"}, "t"),
        ({"title": "x", "text": "t"}, "t"),
        ({"sentence": "s", "id": 3, "choices": ["a"]}, "s"),
    ],
)
def test_a_row_is_read_by_its_columns(tmp_path, row, text):
    path = lines_of(tmp_path / "a.jsonl", [row])
    assert load_corpus(path).texts == (text,)


def test_a_named_field_wins(tmp_path):
    rows = [{"text": "t", "question": "q", "answer": "a"}, {"question": "r", "text": None}]
    path = lines_of(tmp_path / "a.jsonl", rows)
    assert load_corpus(path, field="question").texts == ("q", "r")
    assert load_corpus(path, field="text").texts == ("t",)


def test_blank_rows_are_left_out_and_keep_their_numbers(tmp_path):
    path = lines_of(tmp_path / "a.jsonl", [{"text": t} for t in ["", "a", " \n", None, "b", "c"]])
    corpus = load_corpus(path, 2)
    assert corpus.texts == ("a", "b")
    assert corpus.rows == (1, 4)


def test_rows_of_several_forms_stand_in_one_file(tmp_path):
    path = written(tmp_path / "a.jsonl", '{"question":"q","answer":"a"}\n\n"plain"\n{"text":"t"}\n')
    assert load_corpus(path).texts == ("Question: q\nAnswer: a", "plain", "t")
    assert load_corpus(path).rows == (0, 1, 2)


def test_a_sample_is_seeded_without_repeats_and_in_order(tmp_path):
    path = lines_of(tmp_path / "a.jsonl", [f"text {number}" for number in range(50)])
    draws = [load_corpus(path, 20, sample_seed=seed) for seed in range(30)]
    assert draws[3] == load_corpus(path, 20, sample_seed=3)
    assert len({draw.rows for draw in draws}) == 30
    for draw in draws:
        assert list(draw.rows) == sorted(set(draw.rows))
        assert draw.texts == tuple(f"text {row}" for row in draw.rows)
    assert {row for draw in draws for row in draw.rows} == set(range(50))
    assert load_corpus(path, sample_seed=3).rows == tuple(range(50))


def test_too_few_texts_are_all_taken_with_a_warning(tmp_path):
    path = lines_of(tmp_path / "a.jsonl", ["a", "", "b"])
    for seed in (None, 0):
        with pytest.warns(ShortCorpusWarning, match=r"a\.jsonl holds 2 texts and 5 were asked"):
            assert load_corpus(path, 5, sample_seed=seed).texts == ("a", "b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_corpus(path, 2)


def test_wikitext_is_split_into_articles_as_a_file_and_as_rows(tmp_path):
    file = written(tmp_path / "w.txt", "".join(line or " \n" for line in WIKI))
    rows = lines_of(tmp_path / "w.jsonl", [{"text": line} for line in WIKI])
    corpus = load_corpus(file)
    assert len(corpus.texts) == 2
    assert corpus.texts[0].startswith(
        " = First Title = \n\n Some text . \n\n = = A section = = \n\n"
    )
    assert corpus.texts[0].endswith("k = \n = x and = \n\n = y = \n 1 Ω . ")
    assert corpus.texts[1] == " = Second = \n\n More . "
    assert corpus.rows == (1, 15)
    assert load_corpus(rows).texts == corpus.texts
    assert load_corpus(rows, field="text").rows == corpus.rows
    assert load_corpus(rows, 1).texts == corpus.texts[:1]
    tight = load_corpus(written(tmp_path / "t.txt", " \n = Title = \n Text . \n\n More ."))
    assert tight.texts == (" = Title = \n Text . \n\n More .",)
    assert tight.rows == (1,)


def test_the_known_data_sets_are_read():
    gsm8k = load_corpus(data_file("gsm8k.jsonl"), 5)
    assert gsm8k.texts[0].startswith("Question: Janet")
    assert gsm8k.texts[0].endswith("\n#### 18")
    assert len(load_corpus(data_file("fineweb_edu.jsonl")).texts) == 166
    assert len(load_corpus(data_file("boolq.jsonl"), 4, field="passage").texts) == 4
    articles = load_corpus(data_file("wikitext2.txt"))
    assert len(articles.texts) == 60
    assert articles.texts[0].startswith(" = Robert Boulter = \n\n Robert Boulter is an")
    assert articles.texts[-1].startswith(" = The Hustler ( film ) = ")
    kept = sum(len(re.sub(r"\s", "", text)) for text in articles.texts)
    with open(data_file("wikitext2.txt"), encoding="utf-8") as file:
        assert kept == len(re.sub(r"\s", "", file.read()))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "a"}\n\n{"text": \n',
            r"a\.jsonl, line 3 is not JSON: Expecting value",
        ),
        (
            "a.json",
            b'{"text": "a"}\n{"text" "b"}',
            r"a\.json, line 2 is not JSON: .*one list of rows",
        ),
        (
            "a.json",
            b'[{"text": "a"}, ',
            r"cannot read .*a\.json: Expecting value: line 1 .*\. Give",
        ),
        (
            "a.jsonl",
            b"[1, 2]\n",
            r"row 0 of .*a\.jsonl is a list without columns\. Leave out field",
        ),
        ("a.json", b"[null]", r"row 0 of .*a\.json is a NoneType without columns"),
        ("a.jsonl", b'"caf\xe9"\n', r"cannot read .*: it is not UTF-8 \(.*\); save it in UTF-8\."),
        ("a.txt", b"caf\xe9\n", "it is not UTF-8"),
        ("a.csv", b"text\ncaf\xe9\n", "it is not UTF-8"),
        ("a.csv", b"a,b\nx,y\nz,w,v\n", r"cannot read .*a\.csv: .*Expected 2 fields in line 3"),
        ("a.csv", b"a,b\nx,y,z\n", r"cannot read .*a\.csv: Length of header .*loss of data"),
        ("a.csv", b"", r"cannot read .*a\.csv: No columns to parse"),
        ("a.parquet", b"PAR1", r"cannot read .*a\.parquet: .*Give \"samples\" .*gsm8k.*\.txt"),
        ("a.jsonl", b"", r"a\.jsonl holds no text: it has no rows, or all are blank\. Give"),
        ("a.txt", b" \n\n\t\n", r"a\.txt holds no text"),
        ("a.csv", b"a,b\nx,y\n", r"row 0 of .* no text in a column 'text'; .* are a, b\..*--field"),
        (
            "a.jsonl",
            b'{"text": 3}',
            r"row 0 of .* holds a int in its column 'text', no text\. Name another",
        ),
        ("a.jsonl", b'{"a": "x", "b": null}', r"no text in a column 'text'; its columns are a, b"),
        ("a.zip", b"", r"a\.zip is a file of no known kind\. Give a file whose name ends, .*\.csv"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        load_corpus(str(tmp_path / name))


def test_a_wrong_field_is_named(tmp_path):
    path = lines_of(tmp_path / "a.jsonl", [{"a": "x", "b": 1}, {"c": "y"}])
    with pytest.raises(CorpusError, match="row 0 of .* in a column 'd'; .* are a, b"):
        load_corpus(path, field="d")
    with pytest.raises(CorpusError, match="row 0 of .* holds a int in its column 'b', no text"):
        load_corpus(path, field="b")
    with pytest.raises(CorpusError, match=r"row 1 of .*its columns are c\. Name the one"):
        load_corpus(path, field="a")
    with pytest.raises(CorpusError, match=r"row 0 of .* is a str without columns"):
        load_corpus(written(tmp_path / "a.txt", "words"), field="text")


def test_what_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    for gone in (
        "gone.jsonl",
        "org/gone.txt",
        "./gone",
        "~/gone-from-here",
        "/gone",
        "csv",
        "a/b/c",
    ):
        with pytest.raises(CorpusError, match=f"there is no file or data set '{gone}'. Give \"sam"):
            load_corpus(gone, 2)
    with pytest.raises(CorpusError, match=r"org/name is a folder\. Give a file whose name ends"):
        load_corpus("org/name", 2)
    with pytest.raises(CorpusError, match="cannot read a{300}: .*File name too long"):
        load_corpus("a" * 300, 2)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.touch(mode=0o000)
    with pytest.raises(CorpusError, match=r"cannot read .*Permission denied"):
        load_corpus(str(path))


def test_a_short_name_means_the_hub_whatever_folder_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").mkdir()
    with pytest.raises(CorpusError, match=r"cannot read gsm8k: Couldn't reach 'openai/gsm8k'"):
        load_corpus("gsm8k", 2)
    lines_of(tmp_path / "rows.jsonl", ["a file wins over a name on the hub"])
    (tmp_path / "org").mkdir()
    shutil.move("rows.jsonl", "org/rows.jsonl")
    assert load_corpus("org/rows.jsonl").texts == ("a file wins over a name on the hub",)


def test_half_a_character_is_named_with_its_row(tmp_path):
    path = written(tmp_path / "a.jsonl", '{"text": "good"}\n{"text": "a \\ud800 b"}\n')
    with pytest.raises(CorpusError, match=r"row 1 of .*a\.jsonl is no text \(surrogates"):
        load_corpus(path)


def test_wrong_numbers_are_refused():
    for examples in (0, -3):
        with pytest.raises(CorpusError, match=f"examples is {examples}; it must be a whole number"):
            load_corpus("samples", examples)
    for name in ("gsm8k", "org/name:subset"):
        with pytest.raises(CorpusError, match=rf"{name} is a stream .*examples=100 \(--examples"):
            load_corpus(name)


@pytest.fixture
def dataset(tmp_path):
    """A data set of two subsets as a folder; datasets reads it as it reads the hub's."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    lines_of(folder / "long.jsonl", [{"text": f"text {number}"} for number in range(40)])
    lines_of(folder / "short.jsonl", [{"text": "short"}])
    wiki = [{"text": line} for line in WIKI]
    lines_of(folder / "wiki.jsonl", wiki)
    written(
        folder / "README.md",
        "---\nconfigs:\n- config_name: one\n  data_files:\n"
        "  - split: train\n    path: long.jsonl\n  - split: validation\n    path: short.jsonl\n"
        "- config_name: two\n  data_files:\n"
        "  - split: odd\n    path: wiki.jsonl\n---\n",
    )
    return folder


def test_the_subset_and_split_of_a_data_set_are_chosen(dataset):
    source, rows = corpora._hub_rows(str(dataset), "one", None)
    assert re.fullmatch(r".*/tiny:one:validation, revision [0-9a-f]+", source)
    assert list(rows) == [{"text": "short"}]
    assert len(list(corpora._hub_rows(str(dataset), "one", "train")[1])) == 40
    assert ":two:odd, revision" in corpora._hub_rows(str(dataset), "two", "")[0]
    with pytest.raises(CorpusError, match=r"tiny has no split 'test'; it has train, validation\."):
        corpora._hub_rows(str(dataset), "one", "test")
    for subset, message in [
        ("three", r"cannot read x: BuilderConfig 'three' not found\. Available: \['one', 'two'\]"),
        ("", r"Config name is missing\. Please pick one among .*\['one', 'two'\]\. Give "),
    ]:
        with pytest.raises(CorpusError, match=message):
            with corpora._reading("x"):
                corpora._hub_rows(str(dataset), subset, None)


def test_a_data_set_that_was_downloaded_before_is_streamed(dataset, tmp_path, monkeypatch):
    import datasets

    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    for subset in ("one", "two"):
        builder = datasets.load_dataset_builder(str(dataset), subset, cache_dir=str(tmp_path / "x"))
        builder.download_and_prepare()
        shutil.copytree(builder.cache_dir, cache / "org___tiny" / subset / "0.0.0" / builder.hash)
    corpus = load_corpus("org/tiny:one:train", 3)
    assert corpus.texts == ("text 0", "text 1", "text 2")
    assert corpus.source == f"org/tiny:one:train, revision {builder.hash}"
    with pytest.warns(ShortCorpusWarning, match="org/tiny:one holds 1 texts and 2 were asked for"):
        assert load_corpus("org/tiny:one", 2).texts == ("short",)
    articles = load_corpus("org/tiny:two:odd", 2)
    assert articles.rows == (1, 15)

    monkeypatch.setattr(corpora, "DRAWN_FROM", 6)
    draws = [load_corpus("org/tiny:one:train", 4, sample_seed=seed) for seed in range(12)]
    assert draws[3] == load_corpus("org/tiny:one:train", 4, sample_seed=3)
    assert {row for draw in draws for row in draw.rows} == set(range(10))
    assert draws[0].texts == tuple(f"text {row}" for row in draws[0].rows)


def test_a_hub_that_is_silent_or_has_no_such_data_set_is_told_within_seconds(tmp_path):
    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            if "silent" in self.path:
                time.sleep(5)
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        environment["HF_ENDPOINT"] = f"http://127.0.0.1:{hub.server_port}"
        done = subprocess.run(
            [sys.executable, "-c", HUB_SCRIPT, "nobody/silent", "nobody/none"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        hub.shutdown()
    assert done.stderr == ""
    silent, missing = (json.loads(line) for line in done.stdout.splitlines())
    assert re.fullmatch(
        "cannot read nobody/silent, as the Hugging Face hub does not answer: .*"
        'set HF_HUB_OFFLINE=1 .* Give "samples" .*',
        silent[0],
    )
    assert silent[1] < 3
    assert missing[0].startswith(
        "cannot read nobody/none: Dataset 'nobody/none' doesn't exist on the Hub or cannot be"
    )
    assert missing[0].endswith('or a name on the hub as "org/name:subset:split".')


def test_a_text_becomes_a_batch_of_one_cut_to_its_first_tokens():
    model = model_with(tiny_tokenizer())
    prompts = corpus_prompts(model, "abcdef", 4)
    assert prompts.tokens == (("<s>", "a", "b", "c"),)
    expected = prompts_from_ids(model, prompts.ids.tolist())
    assert prompts.ids.equal(expected.ids)
    assert prompts.mask.equal(expected.mask)
    assert (prompts.tokens, prompts.bos) == (expected.tokens, expected.bos)
    assert corpus_prompts(model, "abc", 100).lengths.tolist() == [4]
    assert corpus_prompts(model, "a" * 500, 1000).lengths.tolist() == [128]
    assert torch.isfinite(cw_lens.next_token_nll(model, prompts)).all()
    with pytest.raises(CorpusError, match="max_tokens is 1; it must be at least 2"):
        corpus_prompts(model, "abc", 1)


def test_a_text_of_one_token_is_returned_with_one_warning():
    model = model_with(tiny_tokenizer(bos=False))
    for text, length in (("a", 1), ("abc", 2)):
        with pytest.warns(BOSWarning) as given:
            assert corpus_prompts(model, text, 2).lengths.tolist() == [length]
        assert len(given) == 1
