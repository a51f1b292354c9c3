"""`python -m tileops`: what is installed here and which kernel serves each operator."""

from tileops.report import report

print(report())
