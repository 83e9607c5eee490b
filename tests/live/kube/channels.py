"""The server's end of a WebSocket with channels (``v4.channel.k8s.io``), as a kubelet speaks it."""

import base64
import hashlib
import struct

ACCEPT = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def accept(handler):
    """Answer the handshake on an ``http.server`` handler."""
    key = handler.headers["Sec-WebSocket-Key"]
    digest = base64.b64encode(hashlib.sha1((key + ACCEPT).encode()).digest()).decode()
    handler.wfile.write(
        (
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Accept: {digest}\r\nSec-WebSocket-Protocol: v4.channel.k8s.io\r\n\r\n"
        ).encode()
    )
    handler.wfile.flush()


def send(handler, channel, data):
    """One message; a server does not mask."""
    payload = bytes([channel]) + data
    size = len(payload)
    if size < 126:
        head = struct.pack(">BB", 0x82, size)
    elif size < 1 << 16:
        head = struct.pack(">BBH", 0x82, 126, size)
    else:
        head = struct.pack(">BBQ", 0x82, 127, size)
    handler.wfile.write(head + payload)
    handler.wfile.flush()


def close(handler):
    handler.wfile.write(struct.pack(">BBH", 0x88, 2, 1000))
    handler.wfile.flush()


def messages(handler):
    """(channel, data) of what the client sends, until it closes."""
    while True:
        head = handler.rfile.read(2)
        if len(head) < 2:
            return
        code, size = head[0] & 0x0F, head[1] & 0x7F
        if size == 126:
            (size,) = struct.unpack(">H", handler.rfile.read(2))
        elif size == 127:
            (size,) = struct.unpack(">Q", handler.rfile.read(8))
        mask = handler.rfile.read(4) if head[1] & 0x80 else b"\0\0\0\0"
        data = bytes(byte ^ mask[index % 4] for index, byte in enumerate(handler.rfile.read(size)))
        if code == 8:
            return
        if code in (1, 2) and data:
            yield data[0], data[1:]
