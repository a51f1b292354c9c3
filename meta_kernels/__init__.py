"""Whether a call is legal and what comes out: the `infer_*` functions. Imports ops_registry."""
