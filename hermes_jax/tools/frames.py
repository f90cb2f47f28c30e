"""Frames (a header and a payload, both bytes) over a socket: so trainer, worker server and its children talk."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

from hermes_jax.tools.supervisor import LENGTHS, encode

MAX_FRAME_BYTES = 256 << 20
_RECEIVE_BYTES = 1 << 18


class FrameTooLong(ValueError):
    """A frame that is longer than any honest one; the channel is closed."""


class Channel:
    """One end of a socket, driven by an event loop: incoming frames go to a callback, sending never blocks.

    Args:
        sock: connected stream socket; owned by the channel from now on.
        on_frame: called with (header, payload) of each frame.
        on_close: called once when the other end has closed or broke the protocol, not after `close`.
        max_frame_bytes: longer frames from the other end close the channel.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[[bytes, bytes], None],
        on_close: Callable[[], None],
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._on_frame = on_frame
        self._on_close = on_close
        self._max_frame_bytes = max_frame_bytes
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closed = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop that drives this channel, if any yet."""
        return self._loop

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Lets `loop` drive the channel from now on. The loop before, if any, must be closed or give it up."""
        if self._loop is loop or self.closed:
            return
        self._forget_loop()
        self._loop = loop
        loop.add_reader(self._socket, self._receive)
        if self._outgoing:
            loop.add_writer(self._socket, self._flush)

    def send(self, header: bytes, payload: bytes = b"") -> None:
        """Sends a frame, or keeps it until the socket takes it. Does nothing once the channel is closed."""
        if self.closed:
            return
        idle = not self._outgoing
        self._outgoing += encode(header, payload)
        if idle:
            self._flush()

    def close(self) -> None:
        """Closes the socket; `on_close` is not called."""
        if not self.closed:
            self.closed = True
            self._forget_loop()
            self._socket.close()

    def _forget_loop(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._loop = None

    def _flush(self) -> None:
        try:
            while self._outgoing:
                sent = self._socket.send(memoryview(self._outgoing)[:_RECEIVE_BYTES])
                del self._outgoing[:sent]
        except BlockingIOError:
            if self._loop is not None:
                self._loop.add_writer(self._socket, self._flush)
            return
        except OSError:
            self._lost()
            return
        if self._loop is not None:
            self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        try:
            part = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self._lost()
            return
        self._incoming += part
        try:
            while not self.closed and (frame := self._next_frame()) is not None:
                self._on_frame(*frame)
        except FrameTooLong:
            self._lost()

    def _next_frame(self) -> tuple[bytes, bytes] | None:
        if len(self._incoming) < LENGTHS.size:
            return None
        header_length, payload_length = LENGTHS.unpack_from(self._incoming)
        if header_length + payload_length > self._max_frame_bytes:
            raise FrameTooLong(f"frame of {header_length + payload_length} bytes")
        middle = LENGTHS.size + header_length
        end = middle + payload_length
        if len(self._incoming) < end:
            return None
        frame = bytes(self._incoming[LENGTHS.size : middle]), bytes(self._incoming[middle:end])
        del self._incoming[:end]
        return frame

    def _lost(self) -> None:
        self.close()
        self._on_close()


def to_header(fields: dict[str, Any]) -> bytes:
    """A header of named plain values."""
    return json.dumps(fields).encode()


def from_header(header: bytes) -> dict[str, Any]:
    """The inverse of `to_header`."""
    fields: dict[str, Any] = json.loads(header)
    return fields


def send_blocking(sock: socket.socket, fields: dict[str, Any], payload: bytes = b"") -> None:
    """Sends one frame on a blocking socket."""
    sock.sendall(encode(to_header(fields), payload))


def receive_blocking(sock: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """Next frame of a blocking socket, or None when the other end has closed."""
    lengths = _exactly(sock, LENGTHS.size)
    if lengths is None:
        return None
    header_length, payload_length = LENGTHS.unpack(lengths)
    header, payload = _exactly(sock, header_length), _exactly(sock, payload_length)
    return None if header is None or payload is None else (from_header(header), payload)


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
