"""One `infer_*` file per operator stem."""
