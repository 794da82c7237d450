"""Triton kernels in the language of triton-ascend 3.2; imported only where one is launched."""
