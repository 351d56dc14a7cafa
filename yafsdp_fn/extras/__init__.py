"""Parts that a step may use beside its program: CUDA graphs and offloading."""
