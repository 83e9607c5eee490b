"""What a pool of connections yields, kept in order."""

from muster.transport.connections import Lost, Received


def turn(pool, timeout_s, heard, gone=None):
    """``heard``: messages; ``gone``: why connections ended."""
    for event in pool.poll(timeout_s):
        match event:
            case Received(message=message):
                heard.append(message)
            case Lost(reason=reason) if gone is not None:
                gone.append(reason)
