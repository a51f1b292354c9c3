"""What two families of kernels share unchanged."""
