"""Triton kernels and their launches; imported when a provider that needs one is first called, never before."""
