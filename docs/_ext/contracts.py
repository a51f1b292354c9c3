"""Tables generated from the operators' contracts, so that the pages cannot drift from the code.

    ```{contract-tables} gqa_dense        every table of the operators of one stem
    ```
    ```{operator-table}                   one row per Op class
    ```
    ```{accuracy-table}                   the rows of ops_registry/accuracy.py
    ```

`python docs/_ext/contracts.py` prints the operator table for README.md.
"""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import tileops.attention
from ops_registry import accuracy, targets
from ops_registry.contract import BUILTIN_KERNELS, CONTRACTS, OpContract, TensorSpec

if TYPE_CHECKING:
    from docutils import nodes

ACCURACY_ROWS = {
    "FORWARD": "forward",
    "FORWARD_ROPE": "forward, fused RoPE",
    "FP8_CACHE": "16-bit query over an e4m3 cache",
    "FP8": "e4m3 query, keys and values",
    "FP8_ROPE": "the same with fused RoPE",
    "BACKWARD": "each gradient",
    "LSE": "returned lse",
    "LSE_ROPE": "returned lse, fused RoPE",
    "INDEXER": "indexer logits",
}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, or nothing without rows."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    if not rows:
        return []
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def code(value: object) -> str:
    return f"`{value}`"


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------ one contract's tables


def shape_cell(spec: TensorSpec) -> str:
    if spec.shape is None:
        return "see text"
    return code(
        "[" + ", ".join("·" if axis.letter is None else axis.text for axis in spec.axes) + "]"
    )


def dtype_cell(spec: TensorSpec) -> str:
    if spec.dtypes is None:
        return "see text"
    if isinstance(spec.dtypes, str):
        return f"as {code(spec.dtypes)}"
    return ", ".join(code(dtype_name(dtype)) for dtype in spec.dtypes)


def role_cell(spec: TensorSpec) -> str:
    roles = [
        word
        for word, holds in (
            ("optional", spec.optional),
            ("written in place", spec.mutated),
            ("differentiable", spec.differentiable),
        )
        if holds
    ]
    return ", ".join(roles)


def tensor_rows(specs: Iterable[tuple[str, TensorSpec]]) -> Iterator[tuple[str, ...]]:
    for name, spec in specs:
        yield code(name), shape_cell(spec), dtype_cell(spec), role_cell(spec), spec.note


def option_rows(contract: OpContract) -> Iterator[tuple[str, ...]]:
    """Everything of the schema that is neither a tensor nor the target."""
    for argument in contract.schema.arguments:
        if argument.name in contract.tensors or argument.name == "target":
            continue
        default = repr(argument.default_value) if argument.has_default_value() else "required"
        note = contract.options.get(argument.name, "")
        yield code(argument.name), code(schema_type(contract, argument.name)), code(default), note


def schema_type(contract: OpContract, name: str) -> str:
    """The type as the signature spells it: the parsed schema turns `ScalarType` into `int`."""
    inside = contract.signature.partition(") ->")[0].lstrip("(")
    for declaration in inside.split(", "):
        kind, _, rest = declaration.partition(" ")
        if rest.partition("=")[0] == name:
            return kind
    raise KeyError(name)


def accuracy_rows(rows: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, ...]]:
    for name, row in rows:
        if isinstance(row, accuracy.Tolerance):
            yield name, "any", *tolerance_cells(row)
            continue
        for dtype, tolerance in row.items():
            yield name, code(dtype_name(dtype)), *tolerance_cells(tolerance)


def tolerance_cells(tolerance: accuracy.Tolerance) -> tuple[str, str, str]:
    if tolerance == accuracy.EXACT:
        return "bit-exact", "0", "0"
    rel = "-" if tolerance.rel_l2 is None else f"{tolerance.rel_l2:g}"
    return rel, f"{tolerance.atol:g}", f"{tolerance.rtol:g}"


def kernel_rows(contract: OpContract) -> Iterator[tuple[str, ...]]:
    for kernel in BUILTIN_KERNELS.get(contract.name, ()):
        needs = targets._KINDS[kernel.name].requires
        yield (
            code(kernel.name),
            ", ".join(map(code, kernel.devices)) or "any",
            kernel.lowering.value,
            code(needs) if needs else "",
        )


def gradient_sentence(contract: OpContract) -> str:
    if contract.differentiable:
        names = ", ".join(map(code, contract.differentiable))
        return f"Differentiable in {names}."
    return "None: backward through a result raises `GradientError` when it is executed."


def contract_markdown(contract: OpContract) -> list[str]:
    """Every table of one dispatcher operator."""
    headers = ("tensor", "shape", "dtype", "role", "note")
    tolerance = ("result", "dtype", "relative L2 ≤", "atol", "rtol")
    sections: list[tuple[str, list[str]]] = [
        (
            "Dimensions",
            table(("letter", "meaning"), ((code(k), v) for k, v in contract.letters.items())),
        ),
        ("Tensors", table(headers, tensor_rows(contract.tensors.items()))),
        (
            "Returns",
            table(headers, tensor_rows(contract.returns.items())) or ["Nothing: `None`."],
        ),
        ("Options", table(("option", "type", "default", "meaning"), option_rows(contract))),
        ("Accuracy", table(tolerance, accuracy_rows(contract.accuracy.items()))),
        (
            "In-tree kernels, best first",
            table(("kernel", "devices", "to a compiler", "needs"), kernel_rows(contract)),
        ),
        ("Gradient", [gradient_sentence(contract)]),
    ]
    schema = textwrap.wrap(contract.name + contract.signature, 90, subsequent_indent="    ")
    lines = [contract.summary, "", "```text", *schema, "```", ""]
    for title, body in sections:
        if body:
            lines += [f"**{title}**", "", *body, ""]
    return lines


def contracts_of(stem: str) -> list[OpContract]:
    """The contracts defined by ops_registry/attention/<stem>.py."""
    module = importlib.import_module(f"ops_registry.attention.{stem}")
    found = [value for value in vars(module).values() if isinstance(value, OpContract)]
    return [contract for contract in CONTRACTS.values() if contract in found]


# -------------------------------------------------------------------------- tables over all ops


def operator_table() -> list[str]:
    """One row per Op class, from the contracts alone."""
    rows = []
    for name in tileops.attention.__all__:
        contract = getattr(tileops.attention, name).contract
        kernels = BUILTIN_KERNELS[contract.name]
        rows.append(
            (
                code(name),
                contract.summary.rstrip("."),
                ", ".join(map(code, contract.differentiable)) or "-",
                served(kernels, "cpu"),
                served(kernels, "cuda"),
            )
        )
    return table(("class", "what it does", "gradient in", "CPU kernels", "CUDA kernels"), rows)


def served(kernels: Iterable[targets.Kernel], device: str) -> str:
    found = [k.name for k in kernels if not k.devices or device in k.devices]
    return ", ".join(map(code, found)) or "-"


def accuracy_table() -> list[str]:
    rows = ((text, getattr(accuracy, name)) for name, text in ACCURACY_ROWS.items())
    return table(("result", "dtype", "relative L2 ≤", "atol", "rtol"), accuracy_rows(rows))


# --------------------------------------------------------------------------------- directives


def setup(app: Any) -> dict[str, bool]:
    from sphinx.util.docutils import SphinxDirective

    class ContractTables(SphinxDirective):
        required_arguments = 1

        def run(self) -> list[nodes.Node]:
            stem = self.arguments[0]
            lines = []
            for contract in contracts_of(stem):
                lines += [f"**`torch.ops.tileops.{contract.name}`**", ""]
                lines += contract_markdown(contract)
            return self.parse_text_to_nodes("\n".join(lines))

    class OperatorTable(SphinxDirective):
        def run(self) -> list[nodes.Node]:
            return self.parse_text_to_nodes("\n".join(operator_table()))

    class AccuracyTable(SphinxDirective):
        def run(self) -> list[nodes.Node]:
            return self.parse_text_to_nodes("\n".join(accuracy_table()))

    app.add_directive("contract-tables", ContractTables)
    app.add_directive("operator-table", OperatorTable)
    app.add_directive("accuracy-table", AccuracyTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    print("\n".join(operator_table()))
