"""Variants of a dense prefill kernel for Hopper, measured before one of them may serve calls.

Nothing of the package uses them. `docs/design/hopper-log.md` says what each is expected to
bring; `python -m benchmarks.hopper.run` says what it does. They need TileLang 0.1.15.
"""
