"""CPU kernels in C++, compiled for this machine's processor on first use."""
