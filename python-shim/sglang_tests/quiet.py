"""What stands for everything that only reports."""

from __future__ import annotations

from typing import Any


class Quiet:
    """Stands for everything that only reports."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def __bool__(self) -> bool:
        return False

    def __add__(self, other: Any) -> Any:
        return self

    __radd__ = __sub__ = __rsub__ = __iadd__ = __mod__ = __add__
