"""`python -m tests.run_package inputs outputs`: run AOTInductor packages.

The inputs are [(path, [tensors of a call])], the outputs [[(results, inputs after)]]. A package
must not need the library that made it: tileops is never imported. A crash inside a package leaves
the stack on standard error.
"""

import faulthandler
import sys

import torch


def as_tuple(returned):
    if returned is None:
        return ()
    return (returned,) if torch.is_tensor(returned) else tuple(returned)


def main(load, source, target):
    results = []
    for path, calls in torch.load(source):
        model = load(path)
        results.append([(as_tuple(model(*inputs)), tuple(inputs)) for inputs in calls])
    torch.save(results, target)


if __name__ == "__main__":
    faulthandler.enable()
    main(torch._inductor.aoti_load_package, *sys.argv[1:])
    assert "tileops" not in sys.modules
