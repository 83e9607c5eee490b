"""A rank tells what it does while its main thread stands still."""

import threading
from pathlib import Path

from muster.health.hang import flight_recorder, stacks
from muster.rank.capture import captured


def test_stacks_of_all_threads_as_an_analyser_reads_them():
    release, told = threading.Event(), []
    waiter = threading.Thread(target=release.wait, name="reader", daemon=True)
    waiter.start()
    teller = threading.Thread(target=lambda: told.append(captured()))
    teller.start()
    teller.join()  # the main thread is here
    release.set()
    waiter.join()
    threads = stacks.parse(told[0].stacks)
    main = stacks.main_thread(threads)
    assert main is not None and "reader" in {one.name for one in threads}
    assert main.user_line is not None and main.user_line.file == str(Path(__file__))
    assert main.user_line.function.startswith("test_stacks_of_all_threads")


def test_the_recorder_is_torchs_own_dump():
    import torch.distributed  # noqa: F401

    told = captured()
    assert told.recorder is not None
    assert flight_recorder.parse(told.recorder).version.startswith("2.")
