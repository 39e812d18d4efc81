"""Prints files and functions over the house budgets, and what core and control add up to.

Budgets (ARCHITECTURE.md): a file 400 lines, a function 60, core and control 5,000 in all.
Exits with 1 when a hard limit (420, 70, 5,000) is passed.
"""

import ast
import sys
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "stepserve"
FILE_LINES, FUNCTION_LINES, CONTROL_PLANE_LINES = 420, 70, 5000


def functions(path: Path) -> list[tuple[int, str]]:
    """(lines, where) of every function in a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            found.append((lines, f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}"))
    return found


def main() -> int:
    """Print the report; the exit status."""
    files = sorted(SOURCE.rglob("*.py"))
    sizes = {path: len(path.read_text().splitlines()) for path in files}
    by_package: dict[str, int] = {}
    for path, lines in sizes.items():
        package = path.relative_to(SOURCE).parts[0]
        by_package[package] = by_package.get(package, 0) + lines
    print("lines:", ", ".join(f"{name} {n}" for name, n in sorted(by_package.items())))
    long_files = [(n, str(p.relative_to(SOURCE))) for p, n in sizes.items() if n > FILE_LINES]
    long_functions = [row for p in files for row in functions(p) if row[0] > FUNCTION_LINES]
    for lines, where in sorted(long_files + long_functions, reverse=True):
        print(f"over budget: {lines} lines, {where}")
    control_plane = by_package["core"] + by_package["control"]
    print(f"core + control: {control_plane} of {CONTROL_PLANE_LINES}")
    return int(bool(long_files or long_functions) or control_plane > CONTROL_PLANE_LINES)


if __name__ == "__main__":
    sys.exit(main())
