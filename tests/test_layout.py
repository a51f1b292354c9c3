"""The shape of the source: one stem in every tree, imports in one direction, small files."""

import ast
import importlib

import pytest

from ops_registry.contract import OpContract
from tests.checks import ROOT

# Where the files of an operator live; a stem found in one of these belongs in all.
PLACES = (
    "ops_registry/attention/{}.py",
    "meta_kernels/attention/{}.py",
    "tileops/attention/{}.py",
    "tileops/kernels/attention/{}/__init__.py",
    "tileops/kernels/attention/{}/reference.py",
    "tests/attention/test_{}.py",
    "tests/cases/{}.py",
    "docs/attention/{}.md",
)
NOT_STEMS = {"__init__", "index", "shared"}
TREES = ("ops_registry", "meta_kernels", "tileops")
LONG, TOO_LONG = 600, 900


def stems():
    found = set()
    for place in PLACES:
        folder, _, pattern = place.partition("{}")
        folder, _, prefix = folder.rpartition("/")
        head, *rest = pattern.split("/", 1)
        for path in (ROOT / folder).glob(f"{prefix}*{head}"):
            if not rest or (path / rest[0]).exists():
                found.add(path.name.removeprefix(prefix).removesuffix(head))
    return sorted(found - NOT_STEMS)


def sources(tree):
    return sorted((ROOT / tree).rglob("*.py"))


def imported(path):
    """Every module a file imports, wherever in the file, relative names made absolute."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_the_stems_are_found():
    assert len(stems()) >= 12, stems()


@pytest.mark.parametrize("place", PLACES)
def test_every_stem_is_in_every_tree(place):
    missing = [place.format(stem) for stem in stems() if not (ROOT / place.format(stem)).exists()]
    assert not missing, f"missing: {', '.join(missing)}"


@pytest.mark.parametrize("stem", stems())
def test_kernels_are_files_of_the_stem(stem):
    module = importlib.import_module(f"tileops.attention.{stem}")
    folder = ROOT / "tileops" / "kernels" / "attention" / stem
    for name in module.KERNELS:
        assert (folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists(), (
            f"missing: {folder.relative_to(ROOT)}/{name}.py, named in KERNELS of {stem}"
        )
    reference = importlib.import_module(f"tileops.kernels.attention.{stem}.reference")
    contracts = vars(importlib.import_module(f"ops_registry.attention.{stem}")).values()
    for name in [c.name for c in contracts if isinstance(c, OpContract)]:
        assert hasattr(reference, name), f"{stem}/reference.py: no {name}"


@pytest.mark.parametrize("tree, forbidden", [(TREES[0], TREES[1:]), (TREES[1], TREES[2:])])
def test_imports_go_one_way(tree, forbidden):
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(tree)
        for name in imported(path)
        if name.partition(".")[0] in forbidden
    ]
    assert not wrong, "\n".join(wrong)


def test_kernels_import_neither_each_other_nor_op_classes():
    kernels = ROOT / "tileops" / "kernels"
    wrong = []
    for path in sources("tileops/kernels"):
        own = ".".join(path.relative_to(ROOT).parts[:4])
        for name in imported(path):
            allowed = ("tileops.kernels.common", own) if "attention" in path.parts else ()
            if path.is_relative_to(kernels / "common"):
                allowed = ("tileops.kernels.common",)
            inside = name == "tileops" or name.startswith("tileops.")
            if inside and not f"{name}.".startswith(tuple(f"{a}." for a in allowed)):
                if name in ("tileops.kernels", "tileops.kernels.attention"):
                    continue  # the parents of `from tileops.kernels import common`
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_package_never_imports_its_tests():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for tree in TREES
        for path in sources(tree)
        for name in imported(path)
        if name.partition(".")[0] in ("tests", "benchmarks", "export_examples")
    ]
    assert not wrong, "\n".join(wrong)


def test_files_stay_small(capsys):
    trees = (*TREES, "tests", "export_examples", "benchmarks")
    lengths = {p: len(p.read_text().splitlines()) for tree in trees for p in sources(tree)}
    longest = sorted(lengths.items(), key=lambda item: -item[1])
    for path, lines in longest:
        if lines > LONG:
            print(f"{lines:5} lines  {path.relative_to(ROOT)}")
    long = [f"{path.relative_to(ROOT)}: {n} lines" for path, n in longest if n > TOO_LONG]
    assert not long, f"split these (at most {TOO_LONG} lines): {long}"
