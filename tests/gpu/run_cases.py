"""`python -m tests.gpu.run_cases NAME ...`: small calls of every case of the named operators.

One more is long enough for the TileLang kernel, where the operator has one.

For tools that watch a process, such as `compute-sanitizer`. Each tensor is an allocation of its
own, so that an access past its end is seen.
"""

import os
import sys

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

from ops_registry.contract import CONTRACTS
from tests import poison
from tests.gpu import draws
from tests.gpu.cases import CASES


def main(names):
    for case in CASES:
        if case.contract.name in names:
            for size in (1, 9, 40):
                case.contract.op(*poison.poisoned(case.call(size)))
                torch.cuda.synchronize()
            print(case, flush=True)
    for name in draws.LONG:
        if name in names:
            call = draws.draw_call(name, draws.LONG[name], draws.Draw(name, "cuda", 1 << 18))
            CONTRACTS[name].op(*poison.poisoned(call))
            torch.cuda.synchronize()
            print(f"{name} long", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
