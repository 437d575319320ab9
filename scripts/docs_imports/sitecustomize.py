"""Record the Lowtide modules that a process imports, in the file that `DOCS_IMPORTS` names.

Python imports this module at its start when this folder is on PYTHONPATH. `scripts/docs_outputs.py` puts it there, so
the commands of a page are recorded, too. A module is recorded when its import begins, so a killed process counts.
"""

import contextlib
import os
import sys


class _Recorder:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ("lowtide", "lowtide_pytest"):
            with contextlib.suppress(OSError), open(os.environ["DOCS_IMPORTS"], "a") as log:
                log.write(name + "\n")


if "DOCS_IMPORTS" in os.environ:
    sys.meta_path.insert(0, _Recorder)  # type: ignore[arg-type]
