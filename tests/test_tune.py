"""`python -m benchmarks.tune`: its tables, what it chooses, and how it writes configurations."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks import inputs, peers, tune
from benchmarks.rows import find
from benchmarks.tune import TABLES, Table
from ops_registry import targets
from tests import aot
from tests.test_benchmarks import tiny
from tileops.kernels.common import machine
from tileops.kernels.common.machine import CONFIGS

FILES = sorted(CONFIGS.glob("*.json"))
CLASSES = [(name, shape) for name, table in TABLES.items() for shape in table.rows]
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
every_class = pytest.mark.parametrize("name, shape", CLASSES)


def loaded(name):
    return json.loads((CONFIGS / f"{name}.json").read_text())


def test_tables_are_those_of_the_files():
    assert set(TABLES) == {path.stem for path in FILES}
    for name, table in TABLES.items():
        assert set(table.rows) == set(loaded(name)["default"]), name


@pytest.mark.parametrize("name", TABLES)
def test_numbers_that_are_tried_are_those_of_the_file(name):
    known = {key for classes in loaded(name).values() for n in classes.values() for key in n}
    assert {*TABLES[name].compiled, *TABLES[name].free} <= known
    assert not set(TABLES[name].compiled) & set(TABLES[name].free)


class Maker(inputs.Maker):
    """Tensors without contents."""

    def __init__(self, device, seed):
        self.device, self.generator = torch.device("meta"), None


def meta_call(row, monkeypatch):
    monkeypatch.setattr(inputs, "Maker", Maker)
    tensors = row.build("meta")
    op = peers.our_op(row.op, row.options)
    given = peers.our_arguments(op, tensors)
    given += (None,) * (len(op.contract.tensors) - len(given))
    return op.contract.name, op.contract.Call(*op.bound(*given))


@every_class
def test_rows_use_the_numbers(name, shape, monkeypatch):
    """On a machine whose file has two kernels for gradients, where a table is for the second."""
    chip = aot.CHIPS["sm_80" if name == "attention_backward_queries" else "sm_90"]
    looked_up, real = [], machine._looked_up

    def noted(*key):
        looked_up.append(key[:2])
        return real(*key)

    monkeypatch.setattr(machine, "_looked_up", noted)
    for row in TABLES[name].rows[shape]:
        looked_up.clear()
        op, call = meta_call(row, monkeypatch)
        assert op in TABLES[name].ops or op == "gqa_dense_bwd"
        aot.launches(op, call, chip)
        assert (name, shape) in looked_up, row.name


@every_class
def test_candidates_are_arguments_of_the_kernels(name, shape, monkeypatch):
    chip, table = aot.CHIPS["sm_90"], TABLES[name]
    op, call = meta_call(table.rows[shape][0], monkeypatch)
    current = tune.in_use(name, shape, chip.machine)
    tried = table.candidates(current)
    assert tried[0] == current and len(tried) == len(tune.distinct(tried))
    for numbers in (*tried[:2], tried[-1], *tune.varied(tried[-1], table.free)):
        with machine.overriding(name, numbers):
            for launch in aot.launches(op, call, chip):
                aot.specialization(launch)


def test_no_other_kernel_is_timed_instead():
    for numbers, aside in (({"mla_decode": {"warps": 4}}, {"tilelang"}), ({}, set())):
        with peers.overriding(numbers):
            assert targets.set_aside() == aside
            assert machine._overrides == numbers


# --------------------------------------------------------------------------------------- files


@every_file
def test_a_file_that_does_not_change_is_written_as_it_was(path):
    text = path.read_text()
    assert tune.rewritten(text, json.loads(text)) == text


@pytest.mark.parametrize("family", ["sm_80", "sm_90", "gfx942"])
@every_class
def test_numbers_in_use_change_nothing(name, shape, family, tmp_path):
    chip = machine.Machine("hip", family, 1) if family == "gfx942" else aot.CHIPS[family].machine
    path = Path(shutil.copy(CONFIGS / f"{name}.json", tmp_path))
    tune.write(tmp_path, name, family, shape, tune.in_use(name, shape, chip))
    assert path.read_text() == (CONFIGS / f"{name}.json").read_text()


@every_file
def test_a_number_that_changes_is_all_that_differs(path, tmp_path):
    shutil.copy(path, tmp_path)
    family, (shape, numbers) = "default", next(iter(loaded(path.stem)["default"].items()))
    tune.write(tmp_path, path.stem, family, shape, {**numbers, "warps": 16})
    old, new = path.read_text(), (tmp_path / path.name).read_text()
    lines = list(zip(old.splitlines(), new.splitlines(), strict=True))
    assert [(a, b) for a, b in lines if a != b] == [
        (a, a.replace(f'"warps": {numbers["warps"]}', '"warps": 16')) for a, b in lines if a != b
    ]
    assert sum(a != b for a, b in lines) == 1 and old[-1] == new[-1]


def test_a_family_gets_what_differs_from_the_default():
    table = {"default": {"d64": {"BLOCK_M": 64, "warps": 4}}, "sm_90": {"d64": {"note": 7}}}
    found = tune.updated(table, "sm_90", "d64", {"BLOCK_M": 64, "warps": 8, "registers": None})
    assert found == {**table, "sm_90": {"d64": {"note": 7, "warps": 8}}}
    found = tune.updated(table, "sm_120", "d64", {"BLOCK_M": 128, "warps": 4})
    assert list(found) == ["default", "sm_90", "sm_120"]
    assert found["sm_120"] == {"d64": {"BLOCK_M": 128}}


def test_a_number_that_is_left_out_goes():
    table = {"default": {"d64": {"warps": 4}}, "sm_90": {"d64": {"warps": 8, "registers": 168}}}
    found = tune.updated(table, "sm_90", "d64", {"warps": 8, "registers": None})
    assert found["sm_90"] == {"d64": {"warps": 8}}


def test_another_style_is_refused():
    with pytest.raises(ValueError, match="neither of the two styles"):
        tune.rewritten('{"default": {}}  # by hand\n'.partition("#")[0], {})


# --------------------------------------------------------------------------------------- choosing


class Scripted:
    """A process, and who starts it: a candidate is as fast as its BLOCK is small, with faults."""

    def __init__(self, fault):
        self.fault, self.asked, self.current = fault, [], None

    def fresh(self, name):
        return self

    def of(self, name):
        return self

    def ask(self, message, seconds):
        if message["do"] == "sample":
            return {"ok": True, "us": [1.0, self.current, self.current, 1e4]}
        self.current = message["numbers"]["paged_kv_cache_write"]["BLOCK"]
        self.asked.append((message["do"], self.current))
        return {"ok": True, "error": 0.0} | self.fault.get((message["do"], self.current), {})

    def close(self):
        pass


@pytest.fixture
def tuning(monkeypatch):
    """A tuning of four values of BLOCK, 256 in use, on one row."""

    def build(fault):
        row = find("cache-write-t8192-h8-d128")
        table = Table(
            ("paged_kv_cache_write",), {"BLOCK": (64, 128, 256, 512)}, {}, {"16bit": [row]}
        )
        monkeypatch.setitem(TABLES, "paged_kv_cache_write", table)
        chip = aot.CHIPS["sm_90"].machine
        return tune.Tuning("paged_kv_cache_write", "16bit", chip, Scripted(fault))

    return build


def test_the_fastest_candidate_is_chosen(tuning):
    numbers, times = tuning({}).run(1)
    assert numbers["BLOCK"] == 64 and numbers["warps"] == 4
    assert sorted(us for found in times.values() for us in found.values()) == [64, 128, 256, 512]


def test_a_wrong_candidate_is_out_however_fast(tuning):
    wrong = tuning({("prepare", 64): {"error": float("nan")}, ("prepare", 128): {"error": 1e-9}})
    assert wrong.run(1)[0]["BLOCK"] == 256
    assert "error nan > 0" in wrong.failed.values()


def test_what_does_not_compile_is_not_timed(tuning):
    broken = tuning({("warm", 64): {"ok": False, "why": "out of shared memory"}})
    broken.run(1)
    assert ("prepare", 64) not in broken.contestants.asked
    assert "out of shared memory" in broken.failed.values()


def test_what_is_in_use_stays_unless_the_gain_is_more_than_noise():
    current, other = {"BLOCK": 256}, {"BLOCK": 128}
    for us, best in ((99.5, current), (98.0, other), (101.0, current)):
        times = {tune.frozen(current): {"row": 100.0}, tune.frozen(other): {"row": us}}
        assert tune.chosen(current, times) == best
    assert tune.chosen(current, {tune.frozen(other): {"row": 200.0}}) == other
    assert tune.chosen(current, {}) == current


# ----------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["mla"], "no mla; operators: dsa_decode_fwd, fp8_lightning_indexer, gqa_dense_bwd"),
        (["mla_decode", "--shape", "d64"], "--shape d64: mla_decode has w1152h16, w1152h64"),
        (["mla_decode", "--out", "/nowhere"], "--out /nowhere: there is no mla_decode.json"),
        (["mla_decode", "--jobs", "0"], "--jobs: must be a positive integer, got '0'"),
        pytest.param(
            ["mla_decode"],
            "candidates are timed on a GPU and torch finds none here; --list needs none",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here"),
        ),
    ],
)
def test_arguments_that_are_wrong(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        tune.main(arguments)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]


def test_list(capsys):
    assert tune.main(["fp8_lightning_indexer", "--list"]) == 0
    said = capsys.readouterr().out
    assert "fp8_lightning_indexer d128: " in said and "index_keys all: " in said


def test_the_whole_run_on_a_cpu(tmp_path, monkeypatch, capsys):
    """CPU kernels have no such numbers: any candidate may win, and the others stay."""
    path = Path(shutil.copy(CONFIGS / "paged_kv_cache_write.json", tmp_path))
    before = path.read_text()
    row = tiny(find("cache-write-llama3-8b-decode-256"))
    table = Table(("paged_kv_cache_write",), {"BLOCK": (128, 256)}, {}, {"16bit": [row]})
    monkeypatch.setitem(TABLES, "paged_kv_cache_write", table)
    asked = ["paged_kv_cache_write", "--device", "cpu", "--out", str(tmp_path), "--jobs", "1"]
    assert tune.main([*asked, "--dry-run"]) == 0
    assert path.read_text() == before
    assert row.name in capsys.readouterr().out
    assert tune.main(asked) == 0
    after = json.loads(path.read_text())
    assert after["default"] == json.loads(before)["default"]
    assert set(after) <= {"default", "sm_90"}
