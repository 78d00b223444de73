"""A replay in a process of its own that dies, by SIGKILL, after some blocks.

    python replay_driver.py BOOTSTRAP DIR INTO BLOCKS

Blocks are of 400 rows; the next one is on its way when it dies.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys

from raftmq_spark.export import replay as replaying
from raftmq_spark.export.archive import find_archive
from raftmq_spark.security import ClientSettings
from tests.export.inline import open_at


def main(bootstrap: str, to: str, into: str, blocks: str) -> None:
    replaying.BLOCK_ROWS = 400  # type: ignore[misc] - so that there are many
    counter = itertools.count(1)
    send = replaying.Producer.send
    state = {"sent_after": -1}

    def die_soon(*arguments: object, **named: object) -> object:
        if state["sent_after"] >= 0:
            state["sent_after"] += 1
            if state["sent_after"] > 150:
                os.kill(os.getpid(), signal.SIGKILL)
        return send(*arguments, **named)  # type: ignore[arg-type]

    def after_block() -> None:
        if next(counter) == int(blocks):
            state["sent_after"] = 0

    replaying.Producer.send = die_soon  # type: ignore[method-assign,assignment]
    client = ClientSettings(bootstrap, "raftmq-test")
    wishes = replaying.ReplayWishes(into=into)
    replaying.replay(find_archive(open_at(to)), client, wishes, after_block=after_block)


if __name__ == "__main__":
    main(*sys.argv[1:])
