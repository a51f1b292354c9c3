"""One contract file per operator stem."""
