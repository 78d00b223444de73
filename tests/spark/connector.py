"""The JARs of Spark's own Kafka source, fetched once from Maven Central."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

CONNECTOR = {"4.2": "4.2.0", "4.3": "4.2.0"}
"""For each Spark the newest connector that was to be had."""
PROVIDER = "4.0.0"
"""The same of what it gets Kerberos tokens with, which nobody needs here."""


def connector_jars() -> list[str]:
    """Spark's own Kafka source, fetched once by Maven; nothing where it cannot be."""
    import pyspark

    version = CONNECTOR.get(pyspark.__version__[:3], pyspark.__version__)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "raftmq-spark", version)
    if not list(cache.glob("spark-sql-kafka*.jar")):
        if shutil.which("mvn") is None:
            return []
        cache.mkdir(parents=True, exist_ok=True)
        pom = (Path(__file__).parent / "connector-pom.xml").read_text()
        pom = pom.replace("VERSION", version).replace("PROVIDER", PROVIDER)
        (cache / "pom.xml").write_text(pom)
        command = ["mvn", "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={cache}"]
        done = subprocess.run(command, cwd=cache, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.stderr.write(done.stdout[-2000:])
            return []
    return sorted(str(path) for path in cache.glob("*.jar"))
