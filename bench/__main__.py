"""`./dev python -m bench NAME --json FILE [--runs N] [--note TEXT]`; without a name, says which benches there are.

Exit status: 0 all targets met; 1 a target missed (the file is written), or the bench itself failed (none is).
"""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from bench.registry import Bench, benches
from bench.result import BenchResult, git_state
from rose.errors import RoseError


def parse(arguments: list[str], known: dict[str, Bench]) -> Namespace:
    parser = ArgumentParser(prog="python -m bench", description="Measure ROSE and write what was found to a file.")
    names = parser.add_subparsers(dest="bench", metavar="NAME", title="benches")
    for bench in known.values():
        one = names.add_parser(bench.name, help=bench.summary, description=bench.summary)
        one.add_argument("--json", type=Path, required=True, metavar="FILE", help="where to write the result")
        one.add_argument("--runs", type=_positive, default=bench.runs, metavar="N", help="how often (%(default)s)")
        one.add_argument("--note", default="", metavar="TEXT", help="a word on the circumstances, kept in the file")
        bench.add_arguments(one)
    found = parser.parse_args(arguments)
    if found.bench is None:
        parser.print_help()
        raise SystemExit(0)
    return found


def run(arguments: Namespace, bench: Bench, command: str) -> BenchResult:
    """Raises BenchFailed if a run fails; what was measured before it is not worth keeping."""
    commit, dirty = git_state()
    runs = []
    for index in range(arguments.runs):
        print(f"{bench.name}: run {index + 1} of {arguments.runs} ...", file=sys.stderr, flush=True)
        runs.append(bench.measure(arguments, index))
        found = ", ".join(f"{name} {runs[-1][name]:.4g}" for name in bench.headline if runs[-1].get(name) is not None)
        print(f"  {found}", file=sys.stderr, flush=True)
    return BenchResult(
        bench=bench.name,
        command=command,
        commit=commit,
        dirty=dirty,
        runs=runs,
        headline=bench.headline,
        targets=bench.targets,
        left_out=bench.left_out(arguments),
        note=arguments.note,
    )


def tell(result: BenchResult, path: Path) -> None:
    for name, value in result.figures().items():
        print(f"{name:<22} {'not measured' if value is None else format(value, '.6g')}")
    for name, why in result.left_out.items():
        print(f"{name:<22} {why}")
    for target in result.missed():
        print(f"missed: {target}")
    print(f"written to {path}")


def main(argv: list[str]) -> int:
    known = benches()
    arguments = parse(argv, known)
    command = shlex.join(["./dev", "python", "-m", "bench", *argv])
    try:
        result = run(arguments, known[arguments.bench], command)
        result.write(arguments.json)
    except RoseError as error:
        print(error, file=sys.stderr)
        return 1
    tell(result, arguments.json)
    return 1 if result.missed() else 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a count of at least 1")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
