"""Sessions for scripts, and what is said where Java, pyspark or pyarrow is missing.

Spark itself says "Java gateway process exited" when there is no Java. `check_prerequisites` looks
first and says what to install. Looks only at PATH, JAVA_HOME and installed packages; importing this
module needs none of them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from raftmq_spark.errors import MissingPrerequisiteError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_MIN: Final = 17
_PACKAGES: Final = ("pyspark", "pyarrow", "pandas")
_INSTALL_JAVA: Final = (
    f"install Java {JAVA_MIN} or newer (Debian, Ubuntu: apt-get install"
    f" openjdk-{JAVA_MIN}-jre-headless; macOS: brew install openjdk@{JAVA_MIN}) and put it on PATH"
    " or into JAVA_HOME"
)
_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')


def check_prerequisites() -> None:
    """Make sure that Spark can start here.

    Raises:
        MissingPrerequisiteError: something is missing or too old; says what to install.
    """
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise MissingPrerequisiteError(
                f"Spark needs {package}: install the extra, pip install 'raftmq[spark]'"
            )
    check_java()


def check_java() -> str:
    """The Java that Spark will run.

    Raises:
        MissingPrerequisiteError: there is none, or it is too old.
    """
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None:
        raise MissingPrerequisiteError(f"Spark needs Java and found none: {_INSTALL_JAVA}")
    try:
        said = subprocess.run(
            [java, "-version"], capture_output=True, text=True, check=False, timeout=60
        )
    except OSError as error:
        raise MissingPrerequisiteError(
            f"Spark needs Java and cannot run {java} ({error.strerror}): {_INSTALL_JAVA}"
        ) from error
    match = _VERSION.search(said.stderr + said.stdout)
    if match is None:
        raise MissingPrerequisiteError(f"{java} does not tell its version: {_INSTALL_JAVA}")
    if int(match[1]) < JAVA_MIN:
        raise MissingPrerequisiteError(f"{java} is Java {match[1]}: {_INSTALL_JAVA}")
    return java


def spark_session(name: str = "raftmq", *, master: str = "local[*]", **conf: str) -> SparkSession:
    """A session, or what is missing for one; dots in names of `conf` are written as `__`.

    Spark's Python workers run this very interpreter, unless PYSPARK_PYTHON names another: Spark's
    own choice is the first `python3` on PATH, which may know nothing of raftmq.

    Raises:
        MissingPrerequisiteError: something is missing or too old; says what to install.
    """
    check_prerequisites()
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name).master(master)
    for key, value in conf.items():
        builder = builder.config(key.replace("__", "."), value)
    return builder.getOrCreate()
