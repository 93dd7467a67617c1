"""`python -m rose.simulator`: run worlds over many seeds, or replay one seed with its whole trace."""

from __future__ import annotations

import logging
import time
from typing import Annotated

import typer

from rose.driver.virtual import SimulationFailed
from rose.simulator.worlds import WORLDS

ALL = "all"


def main(
    world: Annotated[str, typer.Argument(help=f"One of: {', '.join(WORLDS)}, {ALL}.")] = ALL,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds of each world.")] = 2000,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Replay this one seed and print its trace.")] = None,
) -> None:
    """Run the product's pure cores in simulated worlds full of faults.

    Ends with code 1 at the first seed that breaks an invariant, and names the command that replays it.
    """
    if world != ALL and world not in WORLDS:
        raise typer.BadParameter(f"no world {world!r}; there are {', '.join(WORLDS)} and {ALL}", param_hint="WORLD")
    for name in WORLDS if world == ALL else (world,):
        try:
            if seed is None:
                _sweep(name, first, seeds)
            else:
                _replay(name, seed)
        except SimulationFailed as failure:
            typer.echo(str(failure), err=True)
            raise typer.Exit(1) from failure


def _sweep(name: str, first: int, seeds: int) -> None:
    began_s = time.perf_counter()
    for seed in range(first, first + seeds):
        WORLDS[name](seed).run()
    typer.echo(f"{name}: seeds {first} to {first + seeds - 1} hold, {time.perf_counter() - began_s:.1f} s")


def _replay(name: str, seed: int) -> None:
    world = WORLDS[name](seed)
    try:
        world.run()
    finally:
        for line in world.trace():
            typer.echo(line)
        typer.echo(f"{name}, seed {seed}: trace {world.fingerprint()}")


if __name__ == "__main__":
    # In a world things are meant to go wrong: the trace tells of them, in their place.
    logging.getLogger("rose").setLevel(logging.CRITICAL)
    typer.run(main)
