"""One folder of kernels per operator stem."""
