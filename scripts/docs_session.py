"""Run the blocks of one documentation page. `scripts/docs_outputs.py` starts this process in an empty folder.

Standard input contains the blocks as JSON. The script writes the outputs as JSON to the file named by its argument.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WIDEST = 120
"""Width in columns at which output lines are wrapped."""


def main(answer: str) -> None:
    """Run the blocks in order."""
    sys.path.insert(0, os.getcwd())
    sys.dont_write_bytecode = True
    session: dict[str, Any] = {"__name__": "__main__"}
    outputs: list[list[str]] = []
    num_lines = 0
    for block in json.load(sys.stdin):
        try:
            texts = _run(block, session, num_lines)
        except BaseException:
            traceback.print_exc()
            sys.exit(f"the block at line {block['line']} failed")
        outputs.append([_tidy(text, block["words"]) for text in texts])
        num_lines += block["code"].count("\n") + 1
    Path(answer).write_text(json.dumps(outputs))


def _run(block: dict[str, Any], session: dict[str, Any], num_lines: int) -> list[str]:
    """Run one block; return one text per command, or one text for Python."""
    words, code = block["words"], block["code"]
    if "file" in words:
        Path(words["file"]).write_text(code)
        return []
    if block["language"] == "python":
        return [_run_python(code, words.get("raises"), session, num_lines)]
    return [_run_command(line, int(words.get("status", "0"))) for line in block["commands"]]


def _run_python(code: str, raises: str | None, session: dict[str, Any], num_lines: int) -> str:
    printed = io.StringIO()
    error = None
    # Line numbers in tracebacks count only the page's code. Line numbers of the page would change when
    # an output above grows.
    program = compile("\n" * num_lines + code, "session.py", "exec")
    with contextlib.redirect_stdout(printed):
        try:
            exec(program, session)
        except Exception as failure:
            if type(failure).__name__ != raises:
                raise
            error = failure
    if raises is not None:
        if error is None:
            raise AssertionError(f"nothing raised {raises}")
        printed.write("".join(traceback.format_exception_only(error)))
    return printed.getvalue()


def _run_command(line: str, status: int) -> str:
    done = subprocess.run(line, shell=True, text=True, capture_output=True, check=False)
    if done.returncode != status:
        raise RuntimeError(f"$ {line}\nended with {done.returncode}, not {status}\n{done.stdout}{done.stderr}")
    return done.stdout


def _tidy(text: str, words: dict[str, str]) -> str:
    # An editable install is not below site-packages, so the paths of Lowtide's sources contain this folder; remove it.
    text = text.replace(f"{ROOT}{os.sep}src{os.sep}", "").replace(os.getcwd() + os.sep, "")
    text = re.sub(r"/tmp/tmp\w{8}\b", "/tmp/folder", text)
    lines = [part for line in text.rstrip().splitlines() for part in _wrapped(line.rstrip())]
    if len(lines) > (limit := int(words.get("first", len(lines)))):
        lines = [*lines[:limit], "…"]
    if wrong := [line for line in lines if line.startswith(("```", "$ "))]:
        raise ValueError(f"an output cannot hold this line, it would end the block or look like a command: {wrong[0]}")
    return "\n".join(lines)


def _wrapped(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    long_words = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(line, WIDEST, subsequent_indent=indent, drop_whitespace=True, **long_words) or [""]


if __name__ == "__main__":
    main(sys.argv[1])
