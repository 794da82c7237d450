"""CUDA C++ kernels for sm_90a, compiled on first use, and what calls them."""
