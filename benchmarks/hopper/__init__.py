"""Variants of a dense prefill kernel for Hopper, to be measured before one may serve calls.

Nothing of the package uses them. `docs/design/hopper-log.md` says what each is expected to
bring; `python -m benchmarks.hopper.run` says what it does. Most need TileLang 0.1.15, those of
`specialised.py` Triton 3.6.
"""
