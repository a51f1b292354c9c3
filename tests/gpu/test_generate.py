"""The text generation example on a GPU: the checks of tests/test_generate.py in every mode."""

import pytest

from tests.test_generate import (
    SLOW,
    check_paris,
    check_picks,
    checkpoint,  # noqa: F401  a fixture
    mode_cases,
    reference,  # noqa: F401  a fixture
    transformers,  # noqa: F401  a fixture
)

pytestmark = [SLOW, pytest.mark.model]


@pytest.mark.parametrize("mode", mode_cases())
def test_picks_agree_with_transformers(mode, checkpoint, reference, capsys):  # noqa: F811  the fixtures
    check_picks(mode, "cuda", checkpoint, reference, capsys)


@pytest.mark.parametrize("mode", mode_cases())
def test_the_command_line_answers_paris(mode):
    check_paris(mode, "cuda")
