"""The page "The paper, reproduced", made from run folders of `cw-lens paper`."""

import json

import pandas as pd
import pytest

from benchmarks import paper_page
from cw_lens.studies.paper_items import ITEMS
from cw_lens.studies.paper_rows import COLUMNS

pytestmark = pytest.mark.apart


def run_folder(path, items, rows, data=("corpora/d.jsonl",)):
    (path / "figures").mkdir(parents=True)
    table = pd.DataFrame(rows, columns=["item", "data", *COLUMNS])
    table.assign(tokens=70, model="m").to_csv(path / "paper.csv", index=False)
    configuration = {"items": items, "data": data, "examples": 6, "max_tokens": 12}
    tokens = [["d", 0, 12], ["d", 1, 8], ["e", 0, 9]]
    manifest = {"configuration": configuration, "tokens": tokens, "model": {"name": "m"}}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return paper_page.Run(path)


def row(item, holds, claim="positive", paper=None):
    numbers = {"quantity": "q", "paper": paper, "here": 0.5, "low": 0.4, "high": 0.6}
    return {"item": item, "data": "d", **numbers, "holds": holds, "claim": claim, "texts": 6}


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.setattr(paper_page, "PAGE", tmp_path / "docs" / "page.md")
    monkeypatch.setattr(paper_page, "PICTURES", tmp_path / "docs" / "paper")
    (tmp_path / "docs").mkdir()
    one = run_folder(tmp_path / "one", ["fig5a"], [row("fig5a", "yes", paper=-0.2)])
    (one.folder / "figures" / "fig5a-d.png").write_bytes(b"png")
    (one.folder / "figures" / "fig5a-e.png").write_bytes(b"another corpus")
    two = run_folder(tmp_path / "two", ["all"], [row("fig5a", "no"), row("fig11", "no")])
    return paper_page.page([one, two])


def test_each_item_comes_from_the_first_run_that_holds_it(written):
    assert "cw-lens paper fig5a --data d.jsonl --examples 6 --max-tokens 12" in written
    assert "| q | d | -0.200 | 0.500 [0.400, 0.600] | positive | yes |" in written
    assert "| q | d |  | 0.500 [0.400, 0.600] | positive | no |" in written
    assert (
        "Of 2 claims of the paper, of signs and orders, 1 hold here, 1 do not, 0 cannot be told."
        in written
    )
    assert "- m: d, 2 texts of 8 to 12 tokens, 20 in all; e, 1 texts of 9 to 9" in written
    places = [written.index(f": {paper_page.TITLES[item]}\n") for item in ITEMS]
    assert places == sorted(places)
    assert written.count("### ") == len(ITEMS)


def test_pictures_of_the_first_corpus_are_copied(written):
    assert "](paper/fig5a-d.png)" in written and "fig5a-e.png" not in written
    assert (paper_page.PICTURES / "fig5a-d.png").read_bytes() == b"png"


def test_what_was_written_by_hand_is_kept(written, tmp_path):
    text = written.replace(paper_page.READING, f"{paper_page.READING}\nBy hand.\n\nTwice.\n", 1)
    paper_page.PAGE.write_text(text)
    run = paper_page.Run(tmp_path / "two")
    again = paper_page.page([run])
    assert f"{paper_page.READING}\nBy hand.\n\nTwice.\n\n{paper_page.NEXT}" in again
    paper_page.PAGE.write_text(again)
    assert paper_page.page([run]) == again
