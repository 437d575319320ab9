"""Check that the code stays small and readable: lines, files, long functions, vague names, raise statements, comments.

    python scripts/house.py          print the figures; exit with status 1 and the offenders if a limit is missed

The limits of totals and shares hold for `src/`. Those of one file and one function also hold for tests, benchmarks and
scripts. They count lines of code: no docstrings, comments or blank lines.

A vague name is a pronoun or participle as a variable or parameter, such as `found`. Optax, Equinox, PEFT, Grain, Orbax
and Flax NNX have 0.0 to 0.6 % of them, 1.4 to 5.7 % of code in raise statements, and 6 to 18 comment lines for each 100
lines of code.
"""

from __future__ import annotations

import ast
import collections
import io
import re
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "benchmarks", "scripts")
MOST = {"lines": 63_941, "files": 250, "% vague names": 0.6, "% of code in raise statements": 7.0}
LEAST = {"% comment lines": 3.0}
MOST_FILE_LINES, MOST_FUNCTION_LINES = 800, 80
VAGUE = frozenset(
    "at found each one given where made left other mine told said seen kept held begun wanted asked there those these"
    " that this what who whose which".split()
)
CODE = (tokenize.OP, tokenize.NAME, tokenize.NUMBER, tokenize.STRING)


def main() -> int:
    """Print the figures of `src/`, and the offenders of a missed limit."""
    totals, offenders = collections.Counter[str](), list[str]()
    for path in sorted((ROOT / "src").rglob("*.py")):
        count, vague = count_file(path.read_text(encoding="utf-8"))
        totals.update(count, files=1)
        offenders += [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in vague]
    figures = {
        "lines": totals["lines"],
        "files": totals["files"],
        "% vague names": 100 * len(offenders) / totals["names"],
        "% of code in raise statements": 100 * totals["raise"] / totals["code"],
        "% comment lines": 100 * totals["comments"] / totals["code"],
    }
    missed = [f"at most {most:,} {name}" for name, most in MOST.items() if figures[name] > most]
    missed += [f"at least {least:,} {name}" for name, least in LEAST.items() if figures[name] < least]
    long = [text for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) for text in long_parts(path)]
    print("src: " + ", ".join(f"{round(figure, 1):,} {name}".replace(" %", "%") for name, figure in figures.items()))
    if missed:
        print(f"error: expected {', '.join(missed)}", *offenders, sep="\n  ")
    if long:
        print("error: too long, split by topic", *long, sep="\n  ")
    return bool(missed or long)


def long_parts(path: Path) -> list[str]:
    """List the file, if it has too many lines of code, and its functions that are too long."""
    source = path.read_text(encoding="utf-8")
    if source.count("\n") <= MOST_FUNCTION_LINES:
        return []
    tree, name = ast.parse(source), path.relative_to(ROOT)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    # Reading the tokens of all files takes five seconds.
    is_long = source.count("\n") > MOST_FILE_LINES
    if not is_long and all(len(lines_of(function)) <= MOST_FUNCTION_LINES for function in functions):
        return []
    code = code_lines(tokenize.generate_tokens(io.StringIO(source).readline), ast.walk(tree))
    long = [
        f"{name}:{function.lineno}: {function.name}"
        for function in functions
        if len(code & {*lines_of(function)}) > MOST_FUNCTION_LINES
    ]
    return [str(name), *long] if len(code) > MOST_FILE_LINES else long


def code_lines(tokens: Iterable[tokenize.TokenInfo], nodes: Iterable[ast.AST]) -> set[int]:
    """Return the lines that contain code other than docstrings."""
    code = {line for token in tokens if token.type in CODE for line in range(token.start[0], token.end[0] + 1)}
    return code - {line for node in nodes if is_docstring(node) for line in lines_of(node)}


def count_file(source: str) -> tuple[dict[str, int], list[tuple[int, str]]]:
    """Return the counts of a file, and its vague names with their lines."""
    nodes = [*ast.walk(ast.parse(source))]
    tokens = [*tokenize.generate_tokens(io.StringIO(source).readline)]
    code = code_lines(tokens, nodes)
    raised = {line for node in nodes if isinstance(node, ast.Raise) for line in lines_of(node)}
    names = [(node.lineno, name) for node in nodes if (name := bound_name(node))]
    counts = {
        "lines": source.count("\n"),
        "code": len(code),
        "raise": len(raised & code),
        "comments": sum(token.type == tokenize.COMMENT and token.start[0] not in code for token in tokens),
        "names": len(names),
    }
    return counts, [(line, name) for line, name in names if re.sub("^_+|_+$", "", name) in VAGUE]


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def lines_of(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def bound_name(node: ast.AST) -> str | None:
    """Return the name that a variable or a parameter binds."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.arg if isinstance(node, ast.arg) else None


if __name__ == "__main__":
    sys.exit(main())
