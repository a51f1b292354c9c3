"""`python -m tests.run_package package inputs outputs`: run an AOTInductor package.

The package must not need the library that made it: tileops is never imported.
"""

import sys

import torch


def main(package: str, source: str, target: str) -> None:
    model = torch._inductor.aoti_load_package(package)
    results = []
    for inputs in torch.load(source):
        returned = model(*inputs)
        if returned is None:
            returned = ()
        elif torch.is_tensor(returned):
            returned = (returned,)
        results.append((tuple(returned), tuple(inputs)))
    assert "tileops" not in sys.modules and not hasattr(torch.ops.tileops, "gqa_dense_fwd")
    torch.save(results, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
