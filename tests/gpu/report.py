"""`python -m tests.gpu.report DIR`: what `run_all.sh` found, a table per operator.

Reads the JUnit files of the pytest steps and the lines of the random calls; writes DIR/report.md.
"""

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path

from ops_registry.contract import CONTRACTS
from tests.gpu.random_calls import summary
from tests.triton_target import kernels

OTHER = "no one operator"


def outcomes(path: Path) -> list[tuple[str, str, str, str]]:
    """(test, operator, outcome, first line of what it said) of a JUnit file."""
    found = []
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname').split('.')[-1]}::{case.get('name')}"
        outcome = next((child for child in case if child.tag != "system-out"), None)
        kind = "passed" if outcome is None else outcome.tag
        said = "" if outcome is None else (outcome.get("message") or "").split("\n")[0][:300]
        found.append((name, operator_of(name), kind, said))
    return found


def operator_of(test: str) -> str:
    """The operator that a test names, the longest name first."""
    names = sorted(CONTRACTS, key=len, reverse=True)
    stems = {name.removesuffix("_fwd").removesuffix("_bwd"): name for name in names}
    return next(
        (name for name in names if name in test),
        next((name for stem, name in stems.items() if stem in test), OTHER),
    )


def main(folder: Path) -> None:
    tables = defaultdict(lambda: defaultdict(lambda: defaultdict(int)))
    wrong, skipped = defaultdict(list), defaultdict(Counter)
    for path in sorted(folder.glob("*.xml")):
        for test, operator, kind, said in outcomes(path):
            tables[operator][path.stem][kind] += 1
            if kind == "skipped":
                skipped[operator][said] += 1
            elif kind != "passed":
                wrong[operator].append(f"- {kind}: `{test}` {said}")
    path = folder / "random_calls.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    text = ["# On the GPU", ""]
    for operator in [name for name in (*CONTRACTS, OTHER) if name in tables or name in kernels()]:
        text += [f"## {operator}", "", "| step | passed | failed | errors | skipped |"]
        text += ["| --- | --- | --- | --- | --- |"]
        for step, counts in tables[operator].items():
            row = [counts[kind] for kind in ("passed", "failure", "error", "skipped")]
            text.append(f"| {step} | {' | '.join(map(str, row))} |")
        own = [line for line in lines if line["op"] == operator]
        reasons = [f"- skipped {n}: {reason}" for reason, n in skipped[operator].items()]
        text += ["", *wrong[operator], *reasons, ""]
        if own:
            text += ["```", summary(own), "```", ""]
    (folder / "report.md").write_text("\n".join(text))
    print(f"report: {folder / 'report.md'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
