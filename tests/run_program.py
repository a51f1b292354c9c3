"""`python -m tests.run_program inputs outputs`: run saved exported programs."""

import sys

import torch

import tileops  # noqa: F401  registers the operators that the programs name
from tests.run_package import main


def load(path):
    return torch.export.load(path).module()


if __name__ == "__main__":
    main(load, *sys.argv[1:])
