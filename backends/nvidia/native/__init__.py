"""Hopper kernels in CUDA C++, compiled by NVRTC, which comes with torch, on first use."""
