"""What ten thousand rules cost: produce and fetch beside ten rules, in turn on one secured cluster.

The rules are of all sorts: literal and prefixed, of topics, groups and transactional ids, from
everywhere and from networks, a fifth of them denials. A tenth are for the user under load and as
many for everybody, the others for some hundred users. None decides the topic under load; some
share a prefix with it.
"""

from __future__ import annotations

from typing import Final

from attrs import evolve
from confluent_kafka.admin import AdminClient

from benchmarks.clients import admin, create_topic, delete_topics, new_name
from benchmarks.errors import BenchmarkError
from benchmarks.plan import Metrics, Plan
from benchmarks.processes import MIB, CpuWatch
from benchmarks.secured import USER_PRINCIPAL, create_rules, delete_rules_of
from benchmarks.stats import median, percentile
from benchmarks.targets import Target
from benchmarks.workloads.bulk import KIB, consume, produce
from raftmq.metadata.features import SUPPORTED
from raftmq.metadata.image import RAFTMQ_LEVEL, MetadataImage
from raftmq.metadata.snapshot import encode_image
from raftmq.rights import EVERYBODY, NO_RULES, Kind, Operation, Pattern, Permission, Rule

FEW: Final = 10
_USERS: Final = [USER_PRINCIPAL, EVERYBODY, *(f"User:service-{number}" for number in range(160))]
_HOSTS: Final = ["127.0.0.0/8", "10.1.0.0/16", "fd00::/8", "192.168.7.9"]
"""No `*`: rules from everywhere are those of the user from the beginning, which stay."""
_KINDS: Final = (
    (Kind.TOPIC, Operation.WRITE),
    (Kind.TOPIC, Operation.READ),
    (Kind.TOPIC, Operation.DESCRIBE),
    (Kind.GROUP, Operation.READ),
    (Kind.TRANSACTIONAL_ID, Operation.WRITE),
)


def many_rules(count: int) -> list[Rule]:
    """So many different rules, the same each time."""
    return [_rule(number) for number in range(count)]


def _rule(number: int) -> Rule:
    kind, operation = _KINDS[number % len(_KINDS)]
    turn = number // len(_KINDS)
    principal = _USERS[turn % 10] if turn % 10 < 2 else _USERS[2 + number % (len(_USERS) - 2)]
    denies = number % 5 == turn % 5
    pattern = Pattern.PREFIXED if turn % 2 else Pattern.LITERAL
    name = f"rules-of-team-{number}" if number % 3 else f"team-{number}."
    return Rule(
        kind,
        pattern,
        name,
        principal,
        _HOSTS[number % len(_HOSTS)],
        operation,
        Permission.DENY if denies else Permission.ALLOW,
    )


def snapshot_bytes(rules: list[Rule]) -> int:
    """How large these rules are in a snapshot of the metadata."""
    bare = MetadataImage()
    bare = evolve(bare, features=bare.features.set(RAFTMQ_LEVEL, SUPPORTED[RAFTMQ_LEVEL][1]))
    full = evolve(bare, rules=NO_RULES.with_rules(rules))
    return len(encode_image(full)) - len(encode_image(bare))


def rules(target: Target, plan: Plan) -> Metrics:
    """Turns with ten rules and with ten thousand; the ratio is the median of those of the turns."""
    client = admin(target)
    many = many_rules(plan.rules)
    requests: list[float] = []
    few_turns: list[Metrics] = []
    many_turns: list[Metrics] = []
    _turn(target, plan)  # warm
    for number in range(plan.rules_turns):
        # Which comes first changes: what a cluster holds grows with every turn.
        for is_many in (number % 2 == 0, number % 2 == 1):
            if is_many:
                requests += create_rules(client, many)
            else:
                create_rules(client, many[:FEW])
            (many_turns if is_many else few_turns).append(_turn(target, plan))
            _delete_all(client)
    found = {"create_s": sum(requests) / plan.rules_turns}
    found |= {"create_request_p99_ms": percentile(requests, 0.99) * 1e3}
    found |= {"snapshot_kib": snapshot_bytes(many) / KIB}
    for name in few_turns[0]:
        pairs = [(few[name], more[name]) for few, more in zip(few_turns, many_turns, strict=True)]
        found[f"few_{name}"] = median([few for few, _ in pairs])
        found[f"many_{name}"] = median([more for _, more in pairs])
        if all(few for few, _ in pairs):  # small runs may take less CPU than can be told
            found[f"{name}_ratio"] = median([more / few for few, more in pairs])
    return found


def _delete_all(client: AdminClient) -> None:
    for host in _HOSTS:
        delete_rules_of(client, _USERS, host)


def _turn(target: Target, plan: Plan) -> Metrics:
    """Produce 1 KiB records and read them back.

    Raises:
        BenchmarkError: not all came through.
    """
    topic = new_name("rules")
    create_topic(target, topic, plan.partitions)
    count = plan.bulk_count // 4
    watch = CpuWatch(target.servers)
    made = produce(target, topic, count, KIB, plan.partitions)
    cpu = watch.servers_s
    got, size, seconds = consume(target, topic, count, plan.partitions)
    delete_topics(target, topic)
    if made.failed or got < count:
        raise BenchmarkError(f"{made.failed} produces failed, {count - got} records missing")
    return {
        "produce_mb_s": made.acknowledged * KIB / MIB / made.seconds,
        "produce_cpu_s_per_gb": cpu / (count * KIB / 2**30),
        "fetch_mb_s": size / MIB / seconds,
    }
