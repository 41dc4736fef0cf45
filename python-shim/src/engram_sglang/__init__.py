"""The SGLang side of Engram, a durable memory for models with a recurrent state."""

__all__ = ["__version__"]

__version__ = "0.1.0"
