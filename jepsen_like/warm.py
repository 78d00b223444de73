"""What is made once, before runs are forked: imports, compiled codecs, interned values.

The server that forks them (`pool.py`) imports this. A whole run makes all that is otherwise made
when it is first wanted, and the interpreter has specialised by then what it runs often. Nothing of
it can change a later run: a run's trace is the same in a fresh process, which
`tests/sim/test_cluster.py` checks.
"""

from __future__ import annotations

import gc

from jepsen_like.cluster.kafka import VERSIONS
from jepsen_like.cluster.run import run_cluster_seed
from raftmq.protocol import ANNOUNCED, warm, warm_client

for warm_up in (warm, warm_client):
    warm_up(VERSIONS.items())
    warm_up((api, ANNOUNCED[api][1]) for api in VERSIONS)  # where fields of other versions are
run_cluster_seed(0)
gc.collect()
gc.freeze()  # no collection looks at it again, in any of the forked
