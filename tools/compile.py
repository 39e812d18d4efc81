"""Builds a copy of the package whose hot modules are compiled, for long simulations.

    python tools/compile.py build/compiled
    PYTHONPATH=build/compiled python -m stepserve.cli.main simulate ...

The same sources, through mypyc (part of the ``dev`` extra) and a C compiler with the headers of
Python; about a minute. Results are the same, byte for byte, in about half the time. What is
left out: values that are sent to other processes, and enums that compute their members.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "stepserve"

COMPILED = (
    *("core/" + name for name in ("actions", "denoising", "events", "forecast", "instance")),
    *("core/" + name for name in ("request", "running", "segment")),
    *("control/" + name for name in ("local_scheduler", "global_scheduler", "ledger", "pages")),
    *(
        "control/" + name
        for name in (
            "lifecycle",
            "load_control",
            "plan_demand",
            "reconfigure",
            "relocation",
            "admission",
        )
    ),
    *("policies/batching/" + name for name in ("all_running", "latency_budget")),
    "policies/migration/recompute_step",
    "policies/placement/step_completion",
    *("policies/threshold/" + name for name in ("deadline_fit", "early_fit", "fixed")),
    *("policies/caps/" + name for name in ("horizons", "horizon_caps", "load_caps")),
    "policies/caps/marginal_caps",
    "policies/threshold/unless_infeasible",
    "policies/refresh/when_slack",
    "families/programs/diffusion",
    *("cost/" + name for name in ("step_table", "remaining_steps")),
    *("sim/" + name for name in ("known_steps", "outcomes", "quality", "rows", "world")),
)


def main() -> int:
    """Copy and compile; the compiler's exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", type=Path, help="where to put the compiled copy, in place of an older one"
    )
    parser.add_argument("--only", action="append", metavar="MODULE", help="such as core/segment")
    args = parser.parse_args()
    if SOURCE.resolve().is_relative_to(args.folder.resolve()):
        parser.error(f"{args.folder} holds the sources")
    for name in ("stepserve", "build"):
        shutil.rmtree(args.folder / name, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(SOURCE, args.folder / "stepserve", ignore=ignored)
    files = [f"stepserve/{name}.py" for name in args.only or COMPILED]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    call = [sys.executable, "-m", "mypyc", "--python-version", version, *files]
    environment = {**os.environ, "MYPYPATH": "."}
    return subprocess.run(call, cwd=args.folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
