"""Where this working tree is, and what another process needs in order to import it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
PYTHONPATH: Final = os.pathsep.join(str(ROOT / name) for name in ("spark", "client", ""))
