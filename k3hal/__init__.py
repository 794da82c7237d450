"""K3HAL: Kimi K3 from one hardware-agnostic model text."""

__version__ = "0.1.0"

__all__ = ["__version__"]
