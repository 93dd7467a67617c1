"""One error type per boundary.

Each says where it happened, what was expected and what to do. The boundary is also the verdict on whose
fault it is: a failed environment is data (the trajectory is counted and the run goes on), a failed engine
is replaced, a wrong job file is the caller's to mend.
"""

from __future__ import annotations

from typing import Any


class RoseError(Exception):
    """Base of every error that ROSE raises on purpose.

    `what` happened, what was `expected`, and what `to_do` about it.
    """

    boundary = "rose"

    def __init__(self, what: str, *, expected: str = "", to_do: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.expected = expected
        self.to_do = to_do

    def __reduce__(self) -> tuple[Any, ...]:
        """Between processes: arguments that a subclass asks for are in its attributes, not in `args`."""
        return _again, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        parts = [f"{self.boundary}: {self.what}"]
        if self.expected:
            parts.append(f"expected {self.expected}")
        if self.to_do:
            parts.append(self.to_do)
        return "; ".join(parts)


class ConfigError(RoseError):
    """The job file, a flag or a path in them is wrong: the caller's to mend."""

    boundary = "config"


class EngineError(RoseError):
    """An inference engine failed to start, died, or answered outside its protocol."""

    boundary = "engine"


class EnvironmentFailed(RoseError):
    """The task's environment raised, never answered, or answered outside its contract."""

    boundary = "environment"


class TransferError(RoseError):
    """Weights could not be written, verified or applied; the old version is whole."""

    boundary = "transfer"


class ClusterError(RoseError):
    """The machine or cluster lacks something: port, memory, disk, process, permission."""

    boundary = "cluster"


class SchedulerError(RoseError):
    """The scheduler refuses, or does not answer; what is running elsewhere goes on."""

    boundary = "scheduler"


class TrainingError(RoseError):
    """The policy itself went wrong: not finite, collapsed, or malformed."""

    boundary = "training"


class ContractError(RoseError):
    """A promise of ROSE itself does not hold (parity, ledger): a bug, never the user's fault."""

    boundary = "contract"


class DeadlineExceeded(RoseError):
    """A named wait ran out. `boundary` is that of the party that did not answer."""

    def __init__(self, what: str, *, boundary: str, expected: str = "", to_do: str = "") -> None:
        super().__init__(what, expected=expected, to_do=to_do)
        self.boundary = boundary


def _again(kind: type[RoseError], args: tuple[Any, ...], attributes: dict[str, Any]) -> RoseError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error
