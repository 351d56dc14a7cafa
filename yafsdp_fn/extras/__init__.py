"""Parts that a step may use beside its program: CUDA graphs, offloading, registered memory."""
