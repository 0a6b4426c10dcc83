"""The store of units: durable, exclusive, true to its configuration, honest about damage."""

import math
import os
import sqlite3
import subprocess
import sys
import time

import pytest

from cw_lens.store import STORE, CorruptStoreWarning, StoreError, opened_store

pytestmark = pytest.mark.apart

COLUMNS = {"name": str, "number": int, "loss": float}
CONFIGURATION = {"model": "m", "fractions": [0.1, 0.2]}


def unit(number, loss=0.1):
    return {"name": f"unit {number}", "number": number, "loss": loss}


def test_what_is_kept_comes_back_in_the_order_of_batches(tmp_path):
    with opened_store(tmp_path, CONFIGURATION, COLUMNS) as store:
        store.add(2, [unit(5), unit(6)])
        store.add(0, [unit(1, 1 / 3), unit(2, math.nan)])
        assert store.done() == {0, 2}
    with opened_store(tmp_path, CONFIGURATION, COLUMNS) as store:
        store.add(1, [unit(3, math.inf)])
        table = store.table()
    assert table["number"].tolist() == [1, 2, 3, 5, 6]
    assert table["loss"][0] == 1 / 3
    assert math.isnan(table["loss"][1]) and table["loss"][2] == math.inf
    assert [str(kind) for kind in table.dtypes] == ["str", "int64", "float64"]


def test_bytes_come_back_and_one_that_changed_is_damage(tmp_path):
    columns = {"name": str, "arrays": bytes}
    content = bytes(range(256)) * 100
    with opened_store(tmp_path, CONFIGURATION, columns) as store:
        store.add(0, [{"name": "a", "arrays": content}, {"name": "b", "arrays": b""}])
        assert store.table()["arrays"].tolist() == [content, b""]
    with opened_store(tmp_path, CONFIGURATION, columns) as store:
        assert store.table()["arrays"].tolist() == [content, b""]
    with sqlite3.connect(tmp_path / STORE) as connection:
        connection.execute("UPDATE units SET arrays = ? WHERE at = 1", (b"\0",))
    with pytest.warns(CorruptStoreWarning, match="units of batch 0 are not those written"):
        with opened_store(tmp_path, CONFIGURATION, columns) as store:
            assert store.done() == set()


def reopened(folder):
    with opened_store(folder, CONFIGURATION, COLUMNS) as store:
        return store.done()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": "n"}, 'model was "m" there and is "n" here'),
        ({"fractions": [0.1]}, r"fractions was \[0.1, 0.2\] there and is \[0.1\] here"),
    ],
)
def test_another_configuration_is_refused_and_named(tmp_path, changed, said):
    with opened_store(tmp_path, CONFIGURATION, COLUMNS) as store:
        store.add(0, [unit(1)])
    with pytest.raises(StoreError, match=f"holds another run: {said}. Give another folder"):
        with opened_store(tmp_path, CONFIGURATION | changed, COLUMNS):
            pass
    with opened_store(tmp_path, CONFIGURATION, COLUMNS) as store:
        assert store.done() == {0}


def test_a_field_that_is_known_later_is_held_to_as_well(tmp_path):
    with opened_store(tmp_path, CONFIGURATION, COLUMNS) as store:
        store.require({"weight_hash": "abc"})
    with opened_store(tmp_path, CONFIGURATION, COLUMNS) as store:
        store.require({"weight_hash": "abc"})
        with pytest.raises(StoreError, match='weight_hash was "abc" there and is "d" here'):
            store.require({"weight_hash": "d"})


def test_a_second_process_is_refused(tmp_path):
    code = (
        "import sys; from pathlib import Path; from cw_lens.store import opened_store\n"
        f"with opened_store(Path({str(tmp_path)!r}), {{}}, {{}}): print('in', flush=True); "
        "sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "in\n"
        with pytest.raises(StoreError, match="another cw-lens is running in"):
            with opened_store(tmp_path, {}, {}):
                pass
    finally:
        other.kill()  # and a killed one leaves no lock behind
        other.wait()
    with opened_store(tmp_path, {}, {}):
        pass


def test_a_run_with_other_units_is_refused_and_kept(tmp_path):
    with opened_store(tmp_path, CONFIGURATION, COLUMNS) as store:
        store.add(0, [unit(1)])
    with pytest.raises(StoreError, match="holds another run: columns was"):
        with opened_store(tmp_path, CONFIGURATION, {"name": str}):
            pass
    assert reopened(tmp_path) == {0}


def test_a_loss_of_negative_zero_is_no_damage(tmp_path):
    with opened_store(tmp_path, CONFIGURATION, COLUMNS) as store:
        store.add(0, [unit(1, -0.0)])
    assert reopened(tmp_path) == {0}


@pytest.mark.parametrize("damage", ["noise", "cut", "configuration"])
def test_a_damaged_store_is_set_aside_and_named(tmp_path, damage):
    with opened_store(tmp_path, CONFIGURATION, COLUMNS) as store:
        for batch in range(200):
            store.add(batch, [unit(batch), unit(batch)])
    path = tmp_path / STORE
    held = path.read_bytes()
    if damage == "noise":
        number = held.index(b"unit 7")
        path.write_bytes(held[:number] + b"unit 8" + held[number + 6 :])
    elif damage == "cut":
        path.write_bytes(held[: len(held) // 2 + 100])
    else:
        with sqlite3.connect(path) as other:
            other.execute("UPDATE run SET value = '{broken' WHERE field = 'model'")
        other.close()
    before = path.read_bytes()
    with pytest.warns(CorruptStoreWarning, match=r"set aside as units.damaged-1.sqlite"):
        assert reopened(tmp_path) == set()
    assert (tmp_path / "units.damaged-1.sqlite").read_bytes() == before
    path.write_bytes(b"this is no store")
    with pytest.warns(CorruptStoreWarning, match=r"set aside as units.damaged-2.sqlite"):
        assert reopened(tmp_path) == set()


def test_a_full_disk_says_so_and_loses_nothing(tmp_path):
    with opened_store(tmp_path, CONFIGURATION, COLUMNS) as store:
        store.add(0, [unit(1)])
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StoreError, match="disk is full.* What is finished is kept"):
            store.add(1, [unit(number) for number in range(5000)])
    with opened_store(tmp_path, CONFIGURATION, COLUMNS) as store:
        assert store.done() == {0} and len(store.table()) == 1
        store.add(1, [unit(2)])


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(StoreError, match="cannot write .*file.* --out"):
        with opened_store(file, CONFIGURATION, COLUMNS):
            pass
    (tmp_path / STORE).mkdir()
    with pytest.raises(StoreError, match="cannot open .*units.sqlite: .* --out"):
        with opened_store(tmp_path, CONFIGURATION, COLUMNS):
            pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_named(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(StoreError, match="cannot write .* Give another folder with --out"):
        with opened_store(tmp_path, CONFIGURATION, COLUMNS):
            pass


def test_a_batch_is_whole_or_not_there_when_the_process_is_killed(tmp_path):
    code = (
        "from pathlib import Path; from cw_lens.store import opened_store\n"
        f"with opened_store(Path({str(tmp_path)!r}), {{}}, {{'number': int}}) as store:\n"
        "    print('in', flush=True)\n"
        "    for batch in range(10**6): store.add(batch, [{'number': batch}] * 50)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    writer.stdout.readline()
    time.sleep(1.0)
    writer.kill()
    writer.wait()
    with opened_store(tmp_path, {}, {"number": int}) as store:
        done, table = store.done(), store.table()
    assert len(done) > 3
    assert done == set(range(len(done)))
    assert table["number"].tolist() == [batch for batch in sorted(done) for _ in range(50)]
