"""Every public name of the client library says what it is, and has full annotations."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raftmq_client
from raftmq_client import aio, blocking
from raftmq_client.options import ConsumerSettings, ProducerSettings

MODULES = (raftmq_client, aio, blocking)


def public_names() -> Iterator[tuple[str, Any]]:
    for module in MODULES:
        for name in module.__all__:
            yield f"{module.__name__}.{name}", getattr(module, name)


def public_members(kind: type) -> Iterator[tuple[str, Any]]:
    """What a class adds: its functions, properties and class methods, `__init__` for its types."""
    for base in kind.__mro__:
        if not base.__module__.startswith("raftmq"):
            continue
        for name, member in vars(base).items():
            if isinstance(member, classmethod | staticmethod):
                member = member.__func__
            if isinstance(member, property):
                member = member.fget
            if inspect.isfunction(member) and (not name.startswith("_") or name == "__init__"):
                yield name, member


CLASSES = {
    name: found
    for name, found in public_names()
    if inspect.isclass(found) and found.__module__.startswith("raftmq")
}


def test_what_is_said_to_be_public_is_there() -> None:
    for module in MODULES:
        assert all(hasattr(module, name) for name in module.__all__)
        assert module.__doc__
    assert set(blocking.__all__) <= set(aio.__all__), "the drivers have the same names"


@pytest.mark.parametrize("name", CLASSES)
def test_public_classes_are_documented_and_typed(name: str) -> None:
    kind = CLASSES[name]
    assert kind.__doc__, "what is it?"
    assert not kind.__doc__.startswith(f"{kind.__name__}("), "NamedTuple and attrs write their own"
    for member_name, member in public_members(kind):
        if member_name != "__init__":
            assert member.__doc__, f"{member_name}: what does it do?"
        hints = typing.get_type_hints(member)
        assert "return" in hints, f"{member_name} says not what it returns"
        for parameter in list(inspect.signature(member).parameters.values())[1:]:
            assert parameter.name in hints, f"{member_name}: {parameter.name} has no type"


@pytest.mark.parametrize("kind", ["Producer", "Consumer", "Admin"])
def test_the_drivers_have_the_same_methods_and_arguments(kind: str) -> None:
    ours = dict(public_members(getattr(aio, kind)))
    theirs = dict(public_members(getattr(blocking, kind)))
    assert ours.pop("start"), "asyncio alone waits to begin; a blocking client begins as it is made"
    assert ours.keys() == theirs.keys()
    for name in ours:
        here, there = inspect.signature(ours[name]), inspect.signature(theirs[name])
        assert list(here.parameters) == list(there.parameters), f"{kind}.{name}"
        for one, other in zip(here.parameters.values(), there.parameters.values(), strict=True):
            assert (one.kind, one.default) == (other.kind, other.default), f"{kind}.{name}"


def named_in(hint: Any) -> Iterator[type]:
    """The classes that a type hint is made of."""
    of = typing.get_origin(hint) or hint
    if inspect.isclass(of):
        yield of
    for part in typing.get_args(hint):
        yield from named_in(part)


@pytest.mark.parametrize("name", CLASSES)
def test_what_public_methods_take_and_give_is_public_too(name: str) -> None:
    public = {found for _, found in public_names() if inspect.isclass(found)}
    settings = {ConsumerSettings, ProducerSettings}  # they are keyword arguments
    for member_name, member in public_members(CLASSES[name]):
        for hint in typing.get_type_hints(member).values():
            for kind in named_in(hint):
                if kind.__module__.startswith("raftmq") and kind not in settings:
                    assert kind in public, f"{member_name} has a {kind.__name__}"


def test_every_setting_and_every_method_is_on_the_page() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "client.md").read_text()
    said = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", page))))
    settings = {*ProducerSettings.__annotations__, *ConsumerSettings.__annotations__}
    methods = {
        name
        for kind in (aio.Producer, aio.Consumer, aio.Admin)
        for name, _ in public_members(kind)
        if not name.startswith("_")
    }
    known = {"security"}  # has a section of its own
    assert sorted(settings - said - known) == []
    assert sorted(methods - said) == []
