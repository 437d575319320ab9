"""Run a script or a module in a forked process. `forks.py` starts this file with the global `JOB`.

The parent process has imported JAX and Lowtide and has no backend yet, so this file can still choose the devices.
"""

import atexit
import os
import runpy
import sys
import traceback

import jax

JOB: dict = globals()["JOB"]

log = os.open(JOB["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(log, 1)
os.dup2(log, 2)
os.chdir(JOB["folder"])
os.environ["XLA_FLAGS"] = JOB["xla_flags"]
# JAX reads environment variables on import only, and the parent process has imported it.
for name, value in JOB["config"].items():
    jax.config.update(name, value)
sys.argv = JOB["argv"]
code = 1
try:
    if sys.argv[0].endswith(".py"):
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    code = 0
except SystemExit as error:
    code = error.code or 0
except BaseException:
    traceback.print_exc()
finally:
    # `multiprocessing` skips these handlers, and one of them disconnects JAX from the other processes.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
