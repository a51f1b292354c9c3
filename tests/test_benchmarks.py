"""The GPU benchmark's parts that need no GPU: rows, references, processes, file and plot."""

import json
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from benchmarks import gpu, plot, results, work
from benchmarks.inputs import DTYPES, E4M3, build
from benchmarks.peers import CONTESTANTS, PEERS, Unserved, serves
from benchmarks.processes import ROOT, WORKER, Contestants, Process, Stopwatch, parse_sites
from benchmarks.reference import expect
from benchmarks.rows import ROWS, Row, find, select
from tests import oracle

# GFLOP and MB of rows as the operators' pages state them.
STATED = {
    "dense-gemma2-9b-8k": (412, 201),
    "dense-qwen3-30b-a3b-chunk": (515, 134),
    "dense-decode-llama3-8b-b32-8k": (4.29, 1074),
    "dense-fp8-b1-s8192-d128": (550, 117),
    "dense-causal-bwd-llama3-8b-b2-4k": (687, 337),
    "dense-noncausal-bwd-llama3-8b-b2-2k": (344, 168),
    "varlen-ragged-h64-d128": (274, 161),
    "varlen-gpt-oss-120b-4x2k": (16.7, 151),
    "varlen-gemma3-27b-2x8k": (258, 403),
    "paged-decode-gpt-oss-120b-b128-8k": (0.27, 35.7),
    "paged-llama3-8b-mixed-step": (62.2, 554),
    "paged-prefill-llama3-8b-rope-chunk": (258, 202),
    "append-prefill-qwen3-30b-a3b-8x1k-prefix32k": (4467, 705),
    "append-prefill-llama3-8b-fp8cache": (292, 159),
    "mha-decode-llama2-7b-spec4-b16-4k": (4.29, 1075),
    "mla-decode-b128-n8192-h128": (292, 1244),
    "dsa-ds-v32-prefill-4k": (1753, 1179),
    "dsa-ds-v32-decode-b64-32k": (36.5, 169),
    "nsa-compressed-27b-8x4k": (33.8, 1083),
    "nsa-topk-ragged": (6.9, 68),
    "nsa-sparse-d64-4x8k": (129, 290),
    "indexer-ds-v32-4k-of-128k": (8659, 2199),
    "indexer-bf16-h32-d64-8k": (137, 304),
    "cache-write-qwen3-235b-fp8-4k": (0, 12.6),
}

LENGTHS = {"s", "s_q", "s_kv", "length", "keys", "tokens"}
LISTS = {"q_lens", "kv_lens", "old_lens", "lens"}


def tiny(row: Row) -> Row:
    """The row at a few tokens: lengths over 96, two requests, one KV head's group of few."""

    def shrunk(length):
        return -(-length // 96)

    shape, options = dict(row.shape), dict(row.options)
    for key in shape:
        if key in LENGTHS:
            shape[key] = shrunk(shape[key])
        elif key in LISTS:
            shape[key] = [shrunk(n) for n in shape[key][:2]]
    if "lens" in shape:
        shape["lens"] = [n + 30 for n in shape["lens"]]  # more blocks than are selected
    group = max(1, min(3, shape.get("heads", 1) // shape.get("heads_kv", 1)))
    shape["heads_kv"] = min(2, shape.get("heads_kv", 1))
    shape["heads"] = group * shape["heads_kv"]
    shape["dim"] = 16
    for key, most in (("batch", 2), ("pe", 8), ("page", 8), ("picks", 7), ("selected", 4)):
        shape |= {key: min(shape[key], most)} if key in shape else {}
    for key, most in (
        ("page_size", 8),
        ("bs", 4),
        ("block_size", 4),
        ("selected_block_num", 4),
        ("window_size_left", 5),
        ("dim_tail", 8),
    ):
        options |= {key: min(options[key], most)} if key in options else {}
    if "q_start_index_s" in options:
        options["q_start_index_s"] = shape["s_kv"] - shape["s"]
    if "max_seqlen_q" in options:
        options["max_seqlen_q"] = max(shape["q_lens"])
    return Row(row.name, row.op, shape, options, row.tier)


def oracle_outputs(row: Row, t):
    """What the oracle gives on these tensors; it writes the pools of `t`."""
    options = {k: v for k, v in row.options.items() if not k.endswith("dtype")}
    if row.op == "GQADenseFwdOp":
        options.pop("pos_encoding_mode", None)
        return oracle.gqa_dense_fwd(**t, **options)
    if row.op == "GQABwdOp":
        return oracle.gqa_bwd(**t, **options)
    if row.op in ("GQAVarlenFwdOp", "GQAPagedFwdOp"):
        options.pop("pos_encoding_mode", None)
        run = oracle.gqa_varlen_fwd if row.op == "GQAVarlenFwdOp" else oracle.gqa_paged_fwd
        return run(**t, **options)
    if row.op == "GQAPrefillPagedWithKVCacheFwdOp":
        del options["max_seqlen_q"]
        return oracle.gqa_prefill_paged_fwd(**t, **options)
    if row.op == "MHADecodePagedWithKVCacheFwdOp":
        return oracle.mha_decode_paged_fwd(**t, **options)
    if row.op == "MLADecodeWithKVCacheFwdOp":
        return oracle.mla_decode_fwd(**t)
    if row.op == "DSADecodeWithKVCacheFwdOp":
        return oracle.dsa_decode_fwd(**t, **options)
    if row.op.startswith("NSA"):
        t = {k: x for k, x in t.items() if k != "token_indices"}
        run = {
            "NSACompressedVarlenFwdOp": oracle.nsa_compressed_fwd,
            "NSATopKVarlenFwdOp": oracle.nsa_topk,
            "NSAVarlenFwdOp": oracle.nsa_fwd,
        }[row.op]
        return run(**t, **options)
    if row.op == "FP8LightningIndexerFwdOp":
        return oracle.fp8_lightning_indexer(**t)
    return oracle.paged_kv_cache_write(**t)


@pytest.mark.parametrize("name", STATED)
def test_work_is_what_the_pages_state(name):
    row = find(name)
    flops, moved = STATED[name]
    assert 1e-9 * row.flops == pytest.approx(flops, rel=6e-3, abs=6e-3)
    assert 1e-6 * row.bytes == pytest.approx(moved, rel=6e-3)


def test_pairs_are_those_of_the_mask():
    for s_q, s_kv in [(5, 5), (3, 9), (1, 4), (6, 4), (0, 3)]:
        for left in (-1, 0, 2, 20):
            for causal in (True, False):
                if not causal and left >= 0:
                    continue
                options = {"is_causal": causal, "window_size_left": left}
                mask = oracle.visible(s_q, s_kv, causal, left)
                assert work.pairs(s_q, s_kv, options) == int(mask.sum()), (s_q, s_kv, options)


def test_rows_have_their_own_names_and_peers_come_first():
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert [row.tier for row in ROWS] == sorted((row.tier for row in ROWS), key="peers".__ne__)
    assert all(name == name.lower() and " " not in name and "_" not in name for name in names)
    assert {row.op for row in select(tier="peers")} == {row.op for row in ROWS} - {
        "GQAPrefillPagedWithKVCacheFwdOp"
    }


def test_rows_are_selected_by_glob_and_by_part():
    assert [row.name for row in select(["cache-write-*fp8"])] == ["cache-write-t8192-h8-d128-fp8"]
    assert len(select(["mla-decode"], "peers")) == 2
    assert select(["no such row"]) == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_reference_is_the_oracle(row):
    """The oracle's outputs have no error, a kernel's a small one, others a large one."""
    row = tiny(row)
    t = row.build("cpu")
    check = expect(row.op, row.shape, row.options, t)
    outputs = row.ours(t)()
    assert check.error(outputs) <= row.tolerance

    check.poison(outputs)
    error = check.error(outputs)
    assert not error <= row.tolerance

    t = row.build("cpu")
    check = expect(row.op, row.shape, row.options, t)
    exact = oracle_outputs(row, t)
    rounded = 2e-3 if row.options.get("fuse_rope") else 1e-9  # the written keys, rounded once
    assert check.error(exact) <= rounded


def test_a_late_block_that_scores_more_is_an_error():
    row = tiny(find("nsa-topk-ragged"))
    t = row.build("cpu")
    check = expect(row.op, row.shape, row.options, t)
    picked = row.ours(t)()
    last = int(t["token_indices"][-1, 1]) // row.options["bs"]
    assert last + 1 > row.options["selected_block_num"]
    worse = picked.clone()
    left_out = sorted(set(range(last)) - set(picked[-1, 0].tolist()))
    worse[-1, 0, 0] = left_out[0]  # a block of the group's whole score goes
    assert check.error(picked) <= row.tolerance < check.error(worse)
    twice = picked.clone()
    twice[-1, 0, 0] = twice[-1, 0, 1]
    assert check.error(twice) == float("inf")


def test_a_write_beside_its_slots_is_an_error():
    row = tiny(find("cache-write-t8192-h8-d128"))
    t = row.build("cpu")
    check = expect(row.op, row.shape, row.options, t)
    row.ours(t)()
    assert check.error(None) == 0
    free = sorted(set(range(t["k_pages"].shape[0] * 8)) - set(t["slot_mapping"].tolist()))
    t["v_pages"].flatten(0, 1)[free[0]] += 1
    assert check.error(None) == float("inf")


def test_inputs_are_the_same_for_the_same_seed():
    row = tiny(find("paged-decode-fp8cache-b32-l4096-ps64"))
    one, two, other = row.build("cpu"), row.build("cpu"), row.build("cpu", seed=1)
    for name, x in one.items():
        y, z = (v.view(torch.uint8) if v.dtype == E4M3 else v for v in (two[name], other[name]))
        x = x.view(torch.uint8) if x.dtype == E4M3 else x
        assert torch.equal(x, y)
        assert name in ("cache_seqlens", "cu_seqlens_q") or not torch.equal(x, z)


def test_every_row_asks_for_a_known_dtype():
    for row in ROWS:
        assert row.shape["dtype"] in DTYPES
        json.dumps([row.shape, row.options])


def test_a_peer_says_what_it_has_nothing_for():
    row = tiny(find("dense-gemma2-9b-8k"))
    t = row.build("cpu")
    with pytest.raises(Unserved, match="softcap"):
        CONTESTANTS["sdpa-flash"](row.op, row.shape, row.options, t)
    assert serves("fa4", row.op) and not serves("fa4", "MLADecodeWithKVCacheFwdOp")
    assert serves("ours", "MLADecodeWithKVCacheFwdOp")


@pytest.mark.parametrize("name", ["dense-causal-bwd-b4-s2048-d128", "dense-decode-b32-s4096-d128"])
def test_torch_peer_agrees(name):
    row = tiny(find(name))
    t = row.build("cpu")
    check = expect(row.op, row.shape, row.options, t)
    with torch.inference_mode():
        outputs = CONTESTANTS["sdpa-flash"](row.op, row.shape, row.options, t)()
    assert check.error(outputs) <= row.tolerance


# ------------------------------------------------------------------------ file and plot


def measured(row, us=10.0, **peers):
    return results.result(row=row, op="Op", ours_us=us, peers=peers, tolerance=6e-3, machine="m")


def test_merge_replaces_rows_whole_and_keeps_the_order():
    old = [measured("b") | {"first_call_s": 3.0}, measured("gone"), measured("a")]
    merged = results.merge(old, [measured("b", 20.0), measured("c")], ["a", "b", "c"])
    assert [found["row"] for found in merged] == ["a", "b", "c"]
    assert merged[1]["ours_us"] == 20.0
    assert merged[1]["first_call_s"] is None


def test_ratio_is_to_the_best_peer():
    found = measured("a", 10.0, fa4=15.0, tileops=12.0)
    assert (found["best_peer"], found["ratio"]) == ("tileops", 1.2)
    assert measured("a", None, fa4=15.0)["ratio"] is None
    assert measured("a")["best_peer"] is None


def test_file_is_plain_json(tmp_path):
    path = tmp_path / "new" / "h200.json"
    results.save(path, [measured("a", float("nan")) | {"error": float("inf")}], ["a", "b"])
    results.save(path, [measured("b", 12.34567, fa4=1 / 3)], ["a", "b"])
    first, second = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert tuple(first) == results.KEYS
    assert first["ours_us"] is None and first["error"] is None
    assert second["ours_us"] == 12.35 and second["peers"] == {"fa4": 0.3333}


def test_table_lines_stand_under_the_header():
    for found in (measured("a", 10.0, fa4=15.0), measured("b", None)):
        line = results.line(found, "-")
        assert results.HEADER.index("  error") == line.index("  ", len(results.HEADER) - 9)


def test_plot_is_svg_with_a_bar_per_ratio():
    rows = [measured("a", 10.0, fa4=15.0), measured("b", 10.0, fa4=1e4), measured("c")]
    image = ElementTree.fromstring(plot.svg(rows))
    words = [x.text for x in image.iter("{http://www.w3.org/2000/svg}text")]
    assert "a" in words and "b" in words and "c" not in words
    widths = [float(x.get("width")) for x in image.iter("{http://www.w3.org/2000/svg}rect")]
    assert all(0 <= width <= float(image.get("width")) for width in widths)
    assert plot.svg([measured("c")]).startswith("<svg")


# ---------------------------------------------------------------------------- processes

FAKE = """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    print("a package that prints")

    class GQADenseFwdOp:
        def __init__(self, is_causal=False, **options):
            self.is_causal = is_causal

        def __call__(self, *tensors):
            return self.forward(*tensors)

        def forward(self, q, k, v, q_scale=None):
            assert not torch.is_grad_enabled()
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            o = scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, enable_gqa=True)
            return o.transpose(1, 2)

    class GQAVarlenFwdOp(GQADenseFwdOp):
        def forward(self, q, *_):
            return q

    class PagedKVCacheWriteFwdOp(GQADenseFwdOp):
        def forward(self, *_):
            import os
            os._exit(3)

    class GQAPagedFwdOp(GQADenseFwdOp):
        def forward(self, *_):
            raise RuntimeError("no kernel for this call")
"""


@pytest.fixture
def site(tmp_path):
    """A folder with another package of our name, as the release has it."""
    package = tmp_path / "site" / "tileops"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "attention.py").write_text(textwrap.dedent(FAKE))
    return package.parent


def small_rows():
    names = ("dense-causal-fwd-b1-s512-d128", "varlen-4x2048-d128")
    names += ("paged-prefill-b1-q128-l2048-ps64", "cache-write-llama3-8b-decode-256")
    return [tiny(find(name)) for name in names]


def test_a_peer_of_our_name_runs_beside_us(site, capsys):
    """One row it serves, one it answers wrongly, one it refuses, one it dies of."""
    dense, varlen, paged, write = small_rows()
    contestants = Contestants(["tileops"], {"tileops": site}, "cpu")
    machine = gpu.Machine({"device": "cpu", "torch": "2"}, 100.0, 1.0)
    try:
        found = {row.name: gpu.measure(row, contestants, machine, 0.0) for row in small_rows()}
    finally:
        contestants.close()
    told = capsys.readouterr().err
    assert found[dense.name]["best_peer"] == "tileops"
    assert found[dense.name]["ratio"] > 0
    assert found[dense.name]["kernel"] == "cpu"
    assert 0 < found[dense.name]["error"] <= dense.tolerance
    for row in (varlen, paged, write):
        assert found[row.name]["ours_us"] > 0
        assert found[row.name]["peers"] == {}
    assert "tileops: error" in told and "no figure" in told
    assert "no kernel for this call" in told
    assert "the process ended" in told


def test_the_worker_speaks_json_lines(site):
    """Whatever a package prints, and with nothing of this repository in its path."""
    row = small_rows()[0]
    message = gpu.about(row, "tileops", "prepare")
    requests = [{"do": "hello"}, message, {"do": "unknown"}, {"do": "quit"}]
    done = subprocess.run(
        [sys.executable, "-P", str(WORKER), "--device", "cpu"],
        input="".join(json.dumps(x) + "\n" for x in requests),
        env={"PYTHONPATH": str(site), "PATH": "", "OMP_NUM_THREADS": "1"},
        cwd=site,
        capture_output=True,
        text=True,
        check=True,
    )
    hello, prepared, unknown = map(json.loads, done.stdout.splitlines())
    assert hello["ok"] and hello["device"] == "cpu"
    assert prepared["ok"] and prepared["error"] <= row.tolerance and prepared["how"] == "wall"
    assert not unknown["ok"] and "AttributeError" in unknown["why"]
    assert "a package that prints" in done.stderr


def test_a_silent_process_is_given_up(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text("import sys\nfor line in sys.stdin: pass\n")
    monkeypatch.setattr("benchmarks.processes.WORKER", script)
    process = Process([], "cpu")
    reply = process.ask({"do": "hello"}, 0.5)
    process.close()
    assert not reply["ok"] and "no reply to hello" in reply["why"]


def test_the_workers_of_peers_do_not_see_this_repository(monkeypatch, site):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:/elsewhere")
    contestants = Contestants(PEERS, {"tileops": site, "fa4": site}, "cpu")
    assert set(contestants.names) == {"ours", *PEERS}
    peer = contestants.fresh("tileops").environment()["PYTHONPATH"].split(":")
    assert peer == [str(site), "/elsewhere"]
    assert contestants.fresh("ours").environment()["PYTHONPATH"].split(":")[0] == str(ROOT)
    fa4 = contestants.fresh("fa4").environment()["PYTHONPATH"].split(":")
    assert fa4[1].endswith("dsl_packages") and fa4[2] == str(site)


def test_sites_are_checked(tmp_path):
    assert parse_sites([f"fa4={tmp_path}"]) == {"fa4": tmp_path}
    for wrong in ("fa3=/", "fa4=/no/such/folder", "fa4"):
        with pytest.raises(ValueError, match="NAME=FOLDER"):
            parse_sites([wrong])


def test_rows_are_listed(capsys):
    assert gpu.main(["--list", "--tier", "peers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(select(tier="peers"))


def test_the_whole_run_on_a_cpu(tmp_path, monkeypatch, capsys):
    out = tmp_path / "cpu.json"
    rows = [small_rows()[3]]
    monkeypatch.setattr(gpu, "select", lambda patterns, tier: rows)
    arguments = ["--device", "cpu", "--no-peers", "--seconds", "0", "--first-call"]
    assert gpu.main([*arguments, "--out", str(out)]) == 0
    (found,) = json.loads(out.read_text())
    assert found["row"] == rows[0].name
    assert found["ours_us"] > 0 and found["host_us"] > 0 and found["first_call_s"] > 0
    assert "GB/s" in found["machine"]
    assert out.with_suffix(".svg").exists()
    assert rows[0].name in capsys.readouterr().out


def test_rows_are_compiled_in_parallel_and_deaths_are_remembered(site):
    rows = small_rows()
    contestants = Contestants(["tileops"], {"tileops": site}, "cpu")
    gpu.warm([rows[0], rows[3]], contestants, 1, Stopwatch(60.0))
    assert list(contestants.given_up) == [("tileops", rows[3].name)]
    assert "the process ended" in contestants.given_up["tileops", rows[3].name]
    assert not contestants.processes


def test_a_run_past_its_deadline_says_what_it_left(monkeypatch, capsys):
    rows = small_rows()[3:]
    monkeypatch.setattr(gpu, "select", lambda patterns, tier: rows)
    assert gpu.main(["--device", "cpu", "--no-peers", "--deadline", "0"]) == 0
    assert f"not reached: {rows[0].name}" in capsys.readouterr().out


def test_build_needs_no_package_of_ours():
    row = tiny(find("mla-decode-ds-v3-b16-4k"))
    assert set(build(row.op, row.shape, row.options, "cpu")) == {"q", "q_pe", "k", "k_pe"}
