"""Connections over TLS do what plain ones do; handshakes are bounded and judged."""

from __future__ import annotations

import gc
import socket
import ssl
import struct
from contextlib import suppress
from pathlib import Path
from random import Random

import attrs
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from raftmq.log.model import FileSpan
from raftmq.runtime import certificates
from raftmq.runtime.clock import RealClock
from raftmq.runtime.disk import RealDisk
from raftmq.server.audit import Audit
from raftmq.server.kafka import listener as client_port
from raftmq.server.kafka.authentication import Caller
from raftmq.server.kafka.connection import SCRATCH_BYTES, Connection
from raftmq.server.kafka.limits import Limits
from raftmq.server.kafka.replies import Pieces, Slot
from raftmq.tls import TlsLayer
from tests.server.auditing import Lines
from tests.server.kafka.tls_clients import (
    HOST,
    Secure,
    authority,
    client_context,
    receive,
    request,
    secure_port,
    until,
    write_files,
)

PRODUCE = 0


class Echo:
    """Answers with the correlation id, the request's size and what else it is told to."""

    def __init__(self, extra: Pieces = ()) -> None:
        self.extra = extra
        self.callers: list[Caller] = []
        self.sums: list[int] = []

    def __call__(self, frame: memoryview, slot: Slot, connection: Connection) -> None:
        self.callers.append(connection.caller)
        self.sums.append(sum(frame))
        correlation_id = struct.unpack_from(">i", frame, 4)[0]
        slot.answer((struct.pack(">ii", correlation_id, len(frame)), *self.extra))


def version(context: ssl.SSLContext, wanted: ssl.TLSVersion) -> ssl.SSLContext:
    context.minimum_version = context.maximum_version = wanted
    return context


@pytest.mark.parametrize("wanted", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_requests_are_served_and_answered_in_order(
    tmp_path: Path, wanted: ssl.TLSVersion
) -> None:
    echo = Echo()
    listener = write_files(tmp_path).listener()
    async with secure_port(echo, listener) as secure:
        async with await secure.connect(version(client_context(), wanted)) as stream:
            await stream.send_all(b"".join(request(i) for i in range(100)))
            answers = await receive(stream, 800)
        assert list(struct.iter_unpack(">ii", answers)) == [(i, 32) for i in range(100)]
        assert set(echo.callers) == {Caller("User:ANONYMOUS", HOST, "SECURE")}
        assert (secure.metrics.handshakes, secure.metrics.handshake_failures) == (1, {})


@pytest.mark.parametrize("seed", range(4))
async def test_frames_of_any_size_come_whole(tmp_path: Path, seed: int) -> None:
    """Around the sizes of records, of the shared buffers and of the marks; each answered."""
    random = Random(seed)
    echo = Echo()
    edges = [16 << 10, SCRATCH_BYTES, 64 << 10, 80 << 10, 512 << 10, 1 << 20]
    sizes = [8 + random.randrange(200) for _ in range(20)]
    sizes += [edge + random.randrange(-40, 40) for edge in edges for _ in range(3)]
    random.shuffle(sizes)
    async with secure_port(echo, write_files(tmp_path).listener()) as secure:
        async with await secure.connect() as stream, trio.open_nursery() as nursery:
            frames = []
            for number, size in enumerate(sizes):
                body = struct.pack(">hhi", PRODUCE, 9, number) + random.randbytes(size - 8)
                frames.append(body)
            data = b"".join(struct.pack(">i", len(frame)) + frame for frame in frames)

            async def send() -> None:
                position = 0
                while position < len(data):
                    step = random.choice([1, 100, 5_000, 16_384, 40_000, 300_000])
                    await stream.send_all(data[position : position + step])
                    position += step

            nursery.start_soon(send)
            with trio.fail_after(60):
                answers = await receive(stream, 8 * len(sizes))
        assert list(struct.iter_unpack(">ii", answers)) == list(enumerate(sizes))
        assert echo.sums == [sum(frame) for frame in frames]
        assert secure.metrics.bytes_in == len(data)


async def test_a_mark_is_never_above_what_is_still_to_come(tmp_path: Path) -> None:
    """Ciphertext that was taken in as a part of a record is not to come any more. Nobody looks at
    the connections, which would lift the mark of one that is slow."""

    async def never(_seconds: float) -> None:
        await trio.sleep_forever()

    echo = Echo()
    size = 100_000
    listener = write_files(tmp_path).listener()
    async with secure_port(echo, listener, pause=never) as secure:
        sock = trio.socket.socket()
        await sock.connect((HOST, secure.number))
        layer = TlsLayer(client_context(), HOST)
        await shake(sock, layer)
        layer.write([request(7, size, PRODUCE)])
        sealed = b"".join(bytes(piece) for piece in layer.outgoing())
        with trio.fail_after(60):
            for start, end in ((0, 40_000), (40_000, 99_000), (99_000, len(sealed))):
                await send(sock, sealed[start:end])
                await trio.testing.wait_all_tasks_blocked(0.01)
            await until(lambda: echo.callers)
        sock.close()


async def test_what_a_turn_leaves_in_memory_is_read_without_a_word_of_the_kernel(
    tmp_path: Path,
) -> None:
    """The shared buffer is full to the last byte, and the turn used up: the epoll, which would name
    a plain connection again, knows of nothing."""
    echo = Echo()

    def begin(frame: memoryview, slot: Slot, connection: Connection) -> None:
        echo(frame, slot, connection)
        for _ in range(1_000):
            if not secure.port.shared.budget.try_take(1 << 20):
                break

    async with secure_port(begin, write_files(tmp_path).listener()) as secure:
        stream = await secure.connect()
        await until(lambda: secure.port.connections)
        half = SCRATCH_BYTES // 2 - 4
        await stream.send_all(request(1, half, PRODUCE) + request(2, half, PRODUCE) + request(3))
        with trio.fail_after(60):
            assert await receive(stream, 24)
        await trio.aclose_forcefully(stream)


async def shake(sock: trio.socket.SocketType, layer: TlsLayer) -> None:
    layer.shake()
    while not layer.is_ready:
        await flush(sock, layer)
        layer.received(await sock.recv_into(layer.buffer()))


async def flush(sock: trio.socket.SocketType, layer: TlsLayer) -> None:
    for piece in layer.outgoing():
        await send(sock, bytes(piece))


async def send(sock: trio.socket.SocketType, data: bytes) -> None:
    await trio.SocketStream(sock).send_all(data)


@pytest.mark.parametrize("count", [1, 40])
async def test_requests_that_come_with_the_end_of_the_handshake_are_served(
    tmp_path: Path, count: int
) -> None:
    """They are in memory already, and no epoll tells of them."""
    echo = Echo()
    async with secure_port(echo, write_files(tmp_path).listener()) as secure:
        sock = trio.socket.socket()
        await sock.connect((HOST, secure.number))
        layer = TlsLayer(version(client_context(), ssl.TLSVersion.TLSv1_3), HOST)
        await shake(sock, layer)  # its last flight waits here
        layer.write([request(number, 3_000) for number in range(count)])
        await flush(sock, layer)
        await until(lambda: len(echo.callers) == count)
        sock.close()


async def test_spans_of_files_leave_encrypted_and_whole(tmp_path: Path) -> None:
    """What sendfile does for a plain connection; the reader is slow, so that the socket fills."""
    data = Random(1).randbytes(3_000_000)
    path = tmp_path / "segment"
    path.write_bytes(data)
    file = RealDisk().open(str(path))
    spans = [FileSpan(file, 0, 5_000), FileSpan(file, 5_000, len(data) - 5_000)]
    async with secure_port(Echo(spans), write_files(tmp_path).listener()) as secure:
        stream = await secure.connect()
        await stream.send_all(request(1) + request(2))
        for number in (1, 2):
            assert await receive(stream, 8) == struct.pack(">ii", number, 32)
            for start in range(0, len(data), 300_000):
                assert await receive(stream, 300_000) == data[start : start + 300_000]
                await trio.sleep(0.001)
        await stream.aclose()
        assert secure.metrics.bytes_sendfile == 0
        assert secure.metrics.bytes_out == 2 * (8 + len(data))
    file.close()


async def test_an_answer_that_the_socket_does_not_take_is_no_answer_lost(tmp_path: Path) -> None:
    """Also where nothing follows it that would push it out."""
    big = bytes(range(256)) * 20_000
    async with secure_port(Echo((big,)), write_files(tmp_path).listener()) as secure:
        stream = await secure.connect()
        await stream.send_all(request(1) + request(2) + request(3))
        await until(lambda: secure.metrics.writer_wakes)  # the buffers of both kernels are full
        for number in (1, 2, 3):
            assert await receive(stream, 8) == struct.pack(">ii", number, 32)
            assert await receive(stream, len(big)) == big
        await stream.aclose()


async def test_a_port_says_goodbye_and_hears_it(tmp_path: Path) -> None:
    async with secure_port(Echo(), write_files(tmp_path).listener()) as secure:
        stream = await secure.connect()
        await stream.send_all(request(1))
        assert await receive(stream, 8)
        await stream.aclose()
        await until(lambda: not secure.port.connections)
        await trio.aclose_forcefully(await secure.connect())  # without a word
        await until(lambda: secure.metrics.connections_accepted == 2)
        await until(lambda: not secure.port.connections)
        other = await secure.connect()
        with trio.fail_after(60):
            await secure.port.drain(lambda: None)
            assert await other.receive_some() == b"", "a close_notify, not a torn stream"
        await trio.aclose_forcefully(other)


async def test_rubbish_after_the_handshake_costs_its_connection_alone(tmp_path: Path) -> None:
    async with secure_port(Echo(), write_files(tmp_path).listener()) as secure:
        rude, fine = await secure.connect(), await secure.connect()
        await rude.transport_stream.send_all(b"\x17\x03\x03\x00\x20" + bytes(32))
        await until(lambda: len(secure.port.connections) == 1)
        await fine.send_all(request(1))
        assert await receive(fine, 8)
        assert secure.metrics.bugs == {}
        for stream in (rude, fine):
            await trio.aclose_forcefully(stream)


# ---- handshakes that fail ----


async def failed(secure: Secure, failures: dict[str, int]) -> None:
    await until(lambda: secure.metrics.handshake_failures == failures)


async def test_a_client_that_speaks_plain_is_hung_up_on(tmp_path: Path) -> None:
    async with secure_port(Echo(), write_files(tmp_path).listener()) as secure:
        async with await secure.plain() as stream:
            await stream.send_all(request(1))
            with trio.fail_after(60):
                assert await stream.receive_some() == b""
        await failed(secure, {"protocol": 1})
        assert len(secure.port.handshakes) == 0


async def test_an_old_version_is_refused(tmp_path: Path) -> None:
    context = client_context()
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="deprecated"):
        version(context, ssl.TLSVersion.TLSv1_1)
    async with secure_port(Echo(), write_files(tmp_path).listener()) as secure:
        with pytest.raises(trio.BrokenResourceError) as caught:
            await secure.connect(context)
        assert "PROTOCOL_VERSION" in str(caught.value.__cause__)
        await failed(secure, {"protocol": 1})


async def test_a_client_that_trusts_another_ca_says_so_and_is_counted(tmp_path: Path) -> None:
    async with secure_port(Echo(), write_files(tmp_path).listener()) as secure:
        context = client_context(ca=authority("other"))

        def connect() -> None:
            with socket.create_connection((HOST, secure.number)) as sock:
                context.wrap_socket(sock, server_hostname=HOST)

        with pytest.raises(ssl.SSLCertVerificationError):
            await trio.to_thread.run_sync(connect)
        await failed(secure, {"certificate": 1})


@pytest.mark.parametrize("wanted", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_required_certificates_are_required_and_name_the_client(
    tmp_path: Path, wanted: ssl.TLSVersion
) -> None:
    echo = Echo()
    listener = write_files(tmp_path).listener("required")
    ours = authority().issue_cert("app@example", common_name="app, one")
    theirs = authority("other").issue_cert("app@example")
    async with secure_port(echo, listener) as secure:
        for certificate in (None, theirs):
            context = version(client_context(certificate), wanted)
            with pytest.raises(trio.BrokenResourceError) as caught:
                await secure.ask(context)  # with TLS 1.3 the verdict follows the handshake
            reason = getattr(caught.value.__cause__, "reason", "")
            assert "ALERT" in reason, "the client is told why"
        await failed(secure, {"certificate": 2})
        await secure.ask(version(client_context(ours), wanted))
    (caller,) = echo.callers
    assert caller.principal.startswith("User:CN=app\\, one,OU=Testing cert \\#")
    assert (caller.host, caller.listener) == (HOST, "SECURE")


async def test_clients_whose_certificate_was_revoked_meanwhile_are_hung_up_on(
    tmp_path: Path,
) -> None:
    """And nobody else: not others of the listener, nor those of another one."""
    alice, bob = (authority().issue_cert(name, common_name=name) for name in ("alice", "bob"))
    der = ssl.PEM_cert_to_DER_cert(alice.cert_chain_pems[0].bytes().decode())
    serial, _, issuer, *_ = certificates._fields(der)
    revoked = certificates.Revoked(frozenset({(issuer, serial)}))
    listener = write_files(tmp_path).listener("wanted")
    async with secure_port(Echo(), listener) as secure:
        contexts = [client_context(one) for one in (alice, bob, None)]
        streams = [await secure.connect(context) for context in contexts]
        for stream in streams:
            await stream.send_all(request(1))
            await receive(stream, 8)
        assert secure.port.end_revoked("OTHER", revoked) == 0
        assert secure.port.end_revoked("SECURE", certificates.NONE_REVOKED) == 0
        assert secure.port.end_revoked("SECURE", revoked) == 1
        await until(lambda: len(secure.port.connections) == 2)
        for stream in streams[1:]:
            await stream.send_all(request(2))
            await receive(stream, 8)
        for stream in streams:
            await trio.aclose_forcefully(stream)


async def test_wanted_certificates_may_be_missing_but_not_false(tmp_path: Path) -> None:
    echo = Echo()
    listener = write_files(tmp_path).listener("wanted")
    lines = Lines()
    audit = Audit(lines, RealClock(), cluster="cluster", node=1)
    async with secure_port(echo, listener, audit=audit) as secure:
        for certificate in (None, authority().issue_cert("a", common_name="a")):
            await secure.ask(client_context(certificate))
        theirs = client_context(authority("other").issue_cert("a"))
        with pytest.raises(trio.BrokenResourceError):
            await secure.ask(theirs)
        await failed(secure, {"certificate": 1})
    assert echo.callers[0].principal == "User:ANONYMOUS"
    named = echo.callers[1].principal
    assert named.startswith("User:CN=a,OU=")
    told = [(line["mechanism"], line["outcome"], line.get("principal")) for line in lines.read]
    assert told == [("certificate", "ok", named), ("certificate", "failed", None)]


async def test_mapping_rules_name_clients_or_turn_them_away(tmp_path: Path) -> None:
    echo = Echo()
    rules = "RULE:^CN=([a-z]+),.*$/$1/U"
    listener = attrs.evolve(write_files(tmp_path).listener("wanted"), principal_mapping_rules=rules)
    lines = Lines()
    audit = Audit(lines, RealClock(), cluster="cluster", node=1)
    async with secure_port(echo, listener, audit=audit) as secure:
        await secure.ask(client_context(authority().issue_cert("a", common_name="app")))
        await secure.ask(client_context())
        unnamed = client_context(authority().issue_cert("a", common_name="App 2"))
        with pytest.raises((trio.BrokenResourceError, AssertionError)):
            await secure.ask(unnamed)
        await failed(secure, {"mapping_rules": 1})
        assert not secure.port.connections
    assert [caller.principal for caller in echo.callers] == ["User:APP", "User:ANONYMOUS"]
    told = [(line["outcome"], line.get("principal"), line.get("why")) for line in lines.read]
    assert told[0] == ("ok", "User:APP", None)
    assert told[1][:2] == ("failed", None)
    assert told[1][2].startswith("no mapping rule gives its certificate a name: CN=App 2,OU=")


async def test_a_silent_client_is_hung_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_port, "HANDSHAKE_S", 0.05)
    async with secure_port(Echo(), write_files(tmp_path).listener()) as secure:
        for said in (b"", b"\x16\x03\x01"):
            async with await secure.plain() as stream:
                await stream.send_all(said)
                with trio.fail_after(60):
                    assert await stream.receive_some() == b""
        assert secure.metrics.handshake_failures == {"timeout": 2}


async def test_the_oldest_half_open_client_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_port, "HALF_OPEN_MAX", 3)
    async with secure_port(Echo(), write_files(tmp_path).listener()) as secure:
        silent = []
        for number in range(3):
            silent.append(await secure.plain())
            await until(lambda count=number: len(secure.port.handshakes) > count)
        await secure.ask()
        with trio.fail_after(60):
            assert await silent[0].receive_some() == b""
        assert secure.metrics.handshake_failures == {"half_open_max": 1}
        assert len(secure.port.handshakes) == 2
        for each in silent:
            await each.aclose()


async def test_who_goes_on_does_not_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came first, and is in the middle of its handshake when others come that are silent."""
    monkeypatch.setattr(client_port, "HALF_OPEN_MAX", 3)
    async with secure_port(Echo(), write_files(tmp_path).listener()) as secure:
        layer = TlsLayer(client_context(), host=HOST)
        first = await secure.plain()
        silent = [await secure.plain() for _ in range(2)]
        await until(lambda: len(secure.port.handshakes) == 3)
        while not layer.is_ready:
            layer.shake()
            await first.send_all(b"".join(layer.outgoing()))
            if layer.is_ready:
                break
            answer = await first.receive_some()
            assert answer, "hung up on"
            layer.feed(answer)
            # It was this node's turn, and is the client's again.
            silent += [await secure.plain() for _ in range(2)]
            await until(lambda: secure.metrics.handshake_failures == {"half_open_max": 2})
        await until(lambda: secure.metrics.handshakes == 1)
        for each in (first, *silent):
            await each.aclose()


async def test_who_waits_for_a_thread_does_not_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_port, "HALF_OPEN_MAX", 3)
    async with secure_port(Echo(), write_files(tmp_path).listener()) as secure:
        limiter = secure.port.handshakes._limiter
        for number in range(client_port.HANDSHAKE_THREADS):
            limiter.acquire_on_behalf_of_nowait(number)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(secure.ask)
            await until(lambda: limiter.statistics().tasks_waiting)
            silent = [await secure.plain() for _ in range(5)]
            await until(lambda: secure.metrics.handshake_failures == {"half_open_max": 3})
            for number in range(client_port.HANDSHAKE_THREADS):
                limiter.release_on_behalf_of(number)
        assert secure.metrics.handshakes == 1
        for each in silent:
            await each.aclose()


@pytest.mark.parametrize("bound", ["connections_per_ip_max", "connections_max"])
async def test_half_open_clients_count_as_clients(tmp_path: Path, bound: str) -> None:
    limits = Limits(**{bound: 2})
    async with secure_port(Echo(), write_files(tmp_path).listener(), limits) as secure:
        both = await secure.plain(), await secure.connect()
        async with await secure.plain() as third:
            with trio.fail_after(60):
                assert await third.receive_some() == b""
        for stream in both:
            await trio.aclose_forcefully(stream)
        assert secure.metrics.refusals == {bound: 1}


async def test_a_handshake_that_fails_leaves_no_ring_of_objects(tmp_path: Path) -> None:
    """Full collections are rare: strangers would fill the memory with them."""
    said = b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00"
    async with secure_port(Echo(), write_files(tmp_path).listener()) as secure:
        for number in range(12):
            if number == 2:
                gc.collect()
                gc.disable()
            async with await secure.plain() as stream:
                await stream.send_all(said)
                with suppress(trio.BrokenResourceError), trio.fail_after(60):
                    while await stream.receive_some():
                        pass
            await until(lambda: not len(secure.port.handshakes))
        try:
            layers = sum(isinstance(one, TlsLayer) for one in gc.get_objects())
        finally:
            gc.enable()
        assert layers <= 1


async def test_a_draining_port_hangs_up_on_the_half_open(tmp_path: Path) -> None:
    async with secure_port(Echo(), write_files(tmp_path).listener()) as secure:
        stream = await secure.plain()
        await until(lambda: len(secure.port.handshakes))
        with trio.fail_after(60):
            await secure.port.drain(lambda: None)
            assert await stream.receive_some() == b""
        await stream.aclose()


async def test_a_bug_in_a_handshake_costs_that_client_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_layer: TlsLayer) -> None:
        raise KeyError("a bug")

    async with secure_port(Echo(), write_files(tmp_path).listener()) as secure:
        with monkeypatch.context() as patch, capture_logs() as lines:
            patch.setattr(client_port.TlsLayer, "shake", broken)
            with pytest.raises((trio.BrokenResourceError, EOFError)):
                await secure.connect()
        assert secure.metrics.bugs == {"KeyError": 1}
        assert [line["event"] for line in lines] == ["connection closed: a bug"]
        await secure.ask()
