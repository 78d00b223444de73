"""Struct: the attribute bag that stands for one decoded or to-be-encoded Kafka message part.

Owns nothing but attribute access. A Struct decoded from the wire belongs to a class made for its
place in an API's schema (all versions share it), so a field that the decoded version does not
have yet, or no longer has, reads as its schema default, and a name that no version knows is an
AttributeError. A Struct built by hand is plain: only what was given can be read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

DefaultOf = Callable[[str], Any]
"""Answers the default of a field by name; raises KeyError where no version has such a field."""


class Struct:
    """An attribute bag: `Struct(topics=[Struct(name="a", partitions=[])])`."""

    default_of: ClassVar[DefaultOf | None] = None

    def __init__(self, **fields: Any) -> None:
        self.__dict__ = fields

    def __getattr__(self, name: str) -> Any:
        # Reached only for names absent from the instance.
        default_of = type(self).default_of
        if default_of is not None and not name.startswith("__"):
            try:
                return default_of(name)
            except KeyError:
                pass
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")

    if TYPE_CHECKING:  # any attribute may be set

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Struct):
            return NotImplemented
        return self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({fields})"
