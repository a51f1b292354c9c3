"""`python -m tests.gpu.run_cases NAME ...`: a small call of every case of the named operators.

For tools that watch a process, such as `compute-sanitizer`. Each tensor is an allocation of its
own, so that an access past its end is seen.
"""

import os
import sys

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

from tests import poison
from tests.gpu.cases import CASES


def main(names):
    for case in CASES:
        if case.contract.name in names:
            for size in (1, 9, 40):
                case.contract.op(*poison.poisoned(case.call(size)))
                torch.cuda.synchronize()
            print(case, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
