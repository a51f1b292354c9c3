"""Every head dim that random keys have, a few calls each: layouts of tiles change with it."""

import itertools

import pytest

from tests.gpu import random_calls
from tests.triton_target import kernels

DIMS = {
    name: sorted({random_calls.Job(name, 0, key, 0, "cuda").drawn["dim"] for key in range(300)})
    for name in kernels()
    if "dim" in random_calls.Job(name, 0, 0, 0, "cuda").drawn
}


@pytest.mark.parametrize("name, dim", [(name, dim) for name in DIMS for dim in DIMS[name]])
def test_values(name, dim):
    jobs = (random_calls.Job(name, 0, key, 4, "cuda") for key in itertools.count())
    job = next(job for job in jobs if job.drawn["dim"] == dim)
    line = random_calls.run(job)
    assert not line["failures"] and not line["refused"], random_calls.summary([line])
