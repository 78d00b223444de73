"""`raftmq user ...`: who may authenticate. A password comes from a file, from standard input or is
asked for; never from the words of a command, which every process of the machine can read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from raftmq.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    Bootstrap,
    CommandError,
    Timeout,
    open_admin,
    reported,
    show,
    show_json,
)
from raftmq.cli.console import EXIT_USAGE, out
from raftmq_client.blocking.admin import Admin
from raftmq_client.core.admin import SCRAM_ITERATIONS, SCRAM_MECHANISMS

user_app = typer.Typer(help="Users and their passwords (SASL).", no_args_is_help=True)

COLUMNS: Final = ("User", "Mechanism", "Iterations")
PASSWORD_BYTES_MAX: Final = 4_096

PasswordFile = Annotated[
    str | None,
    typer.Option(
        "--password-file",
        metavar="FILE",
        help="A file with the password in its first line, - for standard input; without it the "
        "password is asked for.",
    ),
]
Mechanisms = Annotated[
    list[str] | None,
    typer.Option(
        "--mechanism", help=f"{' or '.join(SCRAM_MECHANISMS)}; may be repeated. Default: both."
    ),
]
Iterations = Annotated[
    int, typer.Option("--iterations", help="How often a password is salted.", min=4096, max=16384)
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The user.")]


@user_app.command("create")
def create(
    name: Name,
    password_file: PasswordFile = None,
    mechanism: Mechanisms = None,
    iterations: Iterations = SCRAM_ITERATIONS,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
    timeout: Timeout = 30.0,
) -> None:
    """Add a user.

    Examples: raftmq user create alice --password-file alice.txt; raftmq user create alice
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        chosen = _mechanisms(mechanism)
        if admin.users([name]):
            raise CommandError(
                f"user {name!r} is there already",
                hint="`raftmq user password` changes its password.",
            )
        _set(admin, name, _password(password_file), chosen, iterations)
        _tell(name, "was created", chosen, as_json=as_json)


@user_app.command("password")
def password(
    name: Name,
    password_file: PasswordFile = None,
    mechanism: Mechanisms = None,
    iterations: Iterations = SCRAM_ITERATIONS,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
    timeout: Timeout = 30.0,
) -> None:
    """Change a user's password, by all mechanisms that it has.

    Examples: raftmq user password alice --password-file -
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        chosen = _mechanisms(mechanism)
        known = admin.users([name]).get(name)
        if known is None:
            raise _unknown(name)
        if mechanism is None:
            chosen = [one.mechanism for one in known]
        _set(admin, name, _password(password_file), chosen, iterations)
        _tell(name, "has a new password", chosen, as_json=as_json)


@user_app.command("list")
def list_(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
    timeout: Timeout = 30.0,
) -> None:
    """Show all users, and how each can authenticate.

    Examples: raftmq user list --json
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        users = admin.users()
        rows = [
            (name, one.mechanism, one.iterations) for name in sorted(users) for one in users[name]
        ]
        show(COLUMNS, rows, as_json=as_json)


@user_app.command("delete")
def delete(
    name: Name,
    mechanism: Mechanisms = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
    timeout: Timeout = 30.0,
) -> None:
    """Delete a user, which ends its connections; or one of its mechanisms.

    Examples: raftmq user delete alice; raftmq user delete alice --mechanism SCRAM-SHA-256
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        known = admin.users([name]).get(name)
        if known is None:
            raise _unknown(name)
        chosen = [one.mechanism for one in known] if mechanism is None else _mechanisms(mechanism)
        for one in chosen:
            admin.delete_credential(name, one)
        _tell(name, "was deleted", chosen, as_json=as_json)


def _tell(name: str, what: str, mechanisms: list[str], *, as_json: bool) -> None:
    if as_json:
        show_json({"user": name, "mechanisms": mechanisms})
    else:
        out(f"user {name} {what} ({', '.join(mechanisms)})")


def _unknown(name: str) -> CommandError:
    return CommandError(f"there is no user {name!r}", hint="`raftmq user list` shows all.")


def _set(admin: Admin, name: str, word: str, mechanisms: list[str], iterations: int) -> None:
    for mechanism in mechanisms:
        admin.set_password(name, word, mechanism=mechanism, iterations=iterations)


def _mechanisms(chosen: list[str] | None) -> list[str]:
    for one in chosen or ():
        if one not in SCRAM_MECHANISMS:
            raise CommandError(
                f"--mechanism is {' or '.join(SCRAM_MECHANISMS)}, not {one!r}", EXIT_USAGE
            )
    return list(dict.fromkeys(chosen or SCRAM_MECHANISMS))


def _password(file: str | None) -> str:
    """The password, from where it may come.

    Raises:
        CommandError: there is none.
        OSError: the file cannot be read.
    """
    if file is None:
        if not sys.stdin.isatty():
            raise CommandError("--password-file is wanted where nobody can be asked", EXIT_USAGE)
        word: str = typer.prompt("Password", hide_input=True, confirmation_prompt=True)
    elif file == "-":
        word = sys.stdin.readline(PASSWORD_BYTES_MAX).rstrip("\r\n")
    else:
        with Path(file).expanduser().open(encoding="utf-8") as lines:
            word = lines.readline(PASSWORD_BYTES_MAX).rstrip("\r\n")
    if not word:
        raise CommandError("the password is empty", EXIT_USAGE)
    return word
