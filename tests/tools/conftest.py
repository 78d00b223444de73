"""The disks that tests of the log have."""

from __future__ import annotations

from tests.log.conftest import place as place
