"""`python -m tests.run_program program inputs outputs`: run a saved exported program."""

import sys

import torch

import tileops  # noqa: F401  registers the operators that the program names


def main(program: str, source: str, target: str) -> None:
    module = torch.export.load(program).module()
    results = []
    for inputs in torch.load(source):
        returned = module(*inputs)
        if returned is None:
            returned = ()
        elif torch.is_tensor(returned):
            returned = (returned,)
        results.append((tuple(returned), tuple(inputs)))
    torch.save(results, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
