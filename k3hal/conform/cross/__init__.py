"""Kernels compiled for GPUs that need not be here, and what they take held against what those have."""
