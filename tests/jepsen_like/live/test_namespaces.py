"""Links by network namespaces: silence one way or both, and nothing of it left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from jepsen_like.live.links import BLOCKED, CLIENTS, Pair
from jepsen_like.live.namespaces import NamespaceLinks
from jepsen_like.live.storage import LackError
from tests.live.harness import lack

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.root]

PORT = 19_000
SERVE = f"""
import socket
listener = socket.create_server(("0.0.0.0", {PORT}))
print("listening", flush=True)
while True:
    sock, _ = listener.accept()
    sock.close()
"""
DIAL = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 0.4).close()
except TimeoutError:
    print("silence")
else:
    print("connected")
"""


@pytest.fixture
def links() -> Iterator[NamespaceLinks]:
    home = os.readlink("/proc/thread-self/ns/net")
    try:
        links = NamespaceLinks()
    except LackError as why:
        lack(str(why))
    assert os.readlink("/proc/thread-self/ns/net") != home
    yield links
    links.close()
    assert os.readlink("/proc/thread-self/ns/net") == home


def test_links_are_whole_or_silent(links: NamespaceLinks) -> None:
    place = links.place(1, (PORT, 0, 0))
    links.place(2, (0, 0, 0))
    server = subprocess.Popen(
        [*place.prefix, sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"

        def dial() -> str:
            words = [*links.client_prefix, sys.executable, "-c", DIAL, place.host, str(PORT)]
            return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()

        cases: list[tuple[set[Pair], str]] = [
            (set(), "connected"),
            ({(CLIENTS, 1)}, "silence"),
            ({(1, CLIENTS)}, "silence"),
            ({(2, 1), (1, 2), (CLIENTS, 2)}, "connected"),
            (set(), "connected"),
        ]
        for cut, told in cases:
            links.set(dict.fromkeys(cut, BLOCKED))
            assert dial() == told, cut
    finally:
        server.kill()
        server.communicate()
