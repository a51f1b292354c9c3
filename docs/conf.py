"""Sphinx configuration; build with `sphinx-build --fail-on-warning docs docs/_build/html`."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "_ext"), str(Path(__file__).parent.parent)]

project = "tileops"
copyright = "the tileops authors"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "contracts",
]
exclude_patterns = ["_build", "_ext"]

html_theme = "furo"
html_title = "tileops"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_google_docstring = True
