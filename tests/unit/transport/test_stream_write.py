"""What a socket cannot take at once is waited for, and nothing of it is lost."""

import socket
import threading

from muster.transport.stream import write


def test_a_write_that_finds_no_room_waits_and_loses_nothing():
    ours, theirs = socket.socketpair()
    data, got = bytes(range(256)) * 8192, bytearray()  # 2 MiB, more than the kernel holds

    def read():
        while len(got) < len(data) and (part := theirs.recv(1 << 16)):
            got.extend(part)

    ours.settimeout(20)
    reader = threading.Thread(target=read)
    reader.start()
    write(ours, b"")
    write(ours, data)
    reader.join(20)
    ours.close()
    theirs.close()
    assert bytes(got) == data
