"""What a figure depends on beside the code: versions, machine, variables, command line."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import confluent_kafka
import msgspec

from benchmarks.peers import kafka_version

_ROOT = Path(__file__).parent.parent


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Where and with what a comparison was made."""

    started: str
    raftmq: str
    kafka: str
    librdkafka: str
    confluent_kafka: str
    python: str
    java: str
    kernel: str
    cores: int
    cpu: str
    memory_mib: int
    load_average: float
    variables: dict[str, str]
    """PYTHON* and RAFTMQ_*: they change what runs."""
    command: list[str]


def environment(command: list[str]) -> Environment:
    """Look around."""
    return Environment(
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        raftmq=f"{metadata.version('raftmq')} {_commit()}".strip(),
        kafka=kafka_version(),
        librdkafka=confluent_kafka.libversion()[0],
        confluent_kafka=str(confluent_kafka.version()[0]),
        python=sys.version.split()[0],
        java=_java_version(),
        kernel=platform.release(),
        cores=len(os.sched_getaffinity(0)),
        cpu=_field(Path("/proc/cpuinfo"), "model name"),
        memory_mib=int(_field(Path("/proc/meminfo"), "MemTotal").split()[0]) >> 10,
        load_average=round(os.getloadavg()[0], 2),
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("PYTHON", "RAFTMQ_"))
        },
        command=command,
    )


def _field(path: Path, name: str) -> str:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "0"


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).strip() if done.returncode == 0 else ""


def _commit() -> str:
    commit = _output("git", "rev-parse", "--short", "HEAD")
    is_changed = bool(_output("git", "status", "--porcelain", "--", "raftmq"))
    return f"{commit}+changes" if commit and is_changed else commit


def _java_version() -> str:
    lines = _output("java", "-version").splitlines()
    return lines[0] if lines else ""
