"""Record the Lowtide modules that a process imports, in the file that `DOCS_IMPORTS` names.

Python imports this module at its start when this folder is on PYTHONPATH. `scripts/docs_outputs.py` puts it there, so
the commands of a page are recorded, too.
"""

import atexit
import contextlib
import os
import sys
from collections.abc import Iterable


def _record(names: Iterable[str]) -> None:
    if names := [name for name in names if name.partition(".")[0] in ("lowtide", "lowtide_pytest")]:
        with contextlib.suppress(OSError), open(os.environ["DOCS_IMPORTS"], "a") as log:
            log.write("\n".join(names) + "\n")


class _Recorder:
    """A finder that finds nothing. It records an import when it begins, so a killed process counts."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        _record([name])


if "DOCS_IMPORTS" in os.environ:
    sys.meta_path.insert(0, _Recorder)  # type: ignore[arg-type]
    # pytest puts its own finder first, so its plugins reach no other finder.
    atexit.register(lambda: _record(sys.modules))
