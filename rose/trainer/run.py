"""One run from its first folder to its last line: folders, logs, signals, the session, the report.

Invariants
- Whatever ends the run (done, failed, interrupted), every process is ended, the books are closed against the final
  token pages, the report is written, and the runtime folder is removed, in this order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from rose.config import Job
from rose.errors import ClusterError, RoseError
from rose.logs import logger, open_log
from rose.metrics import Metrics, serve
from rose.processes import become_subreaper, end_descendants, two_stage_stop
from rose.report.model import RunReport
from rose.report.write import write_report
from rose.runs import open_run
from rose.status import StatusBoard
from rose.stop import Stop
from rose.trainer.books import Books
from rose.trainer.recorder import Recorder
from rose.trainer.session import Session
from rose.waits import WaitBoard

log = logger("run")

END_GRACE_S = 5.0


def run_job(
    job: Job,
    *,
    changed: Callable[[Recorder], None],
    ended: Callable[[RunReport, Path | None], None],
) -> None:
    """Run a checked job to its end. Main thread only.

    `changed` is given the recorder after every change, `ended` the report and the folder that holds it, if
    any could be written. A run that was
    stopped or failed is reported too; its error is raised again once everything is closed, KeyboardInterrupt after
    Ctrl-C.
    """
    become_subreaper()
    waits = WaitBoard()
    stop = Stop()
    metrics, books = Metrics(), Books()
    with (
        open_run(job, waits) as run,
        two_stage_stop(stop.ask, run.close),
        open_log(run.output / "log.jsonl"),
        StatusBoard(run, waits) as board,
        contextlib.closing(serve(job.run.metrics_port, metrics.registry)) as server,
    ):
        board.fact("metrics", server.url)
        recorder = Recorder(job, run, books, waits, board, metrics, changed)
        report, failure = _run_to_report(Session(job, recorder, books, waits), stop)
        written: Path | None = run.output
        try:
            write_report(report, run.output)
        except ClusterError as error:
            log.error("no report", why=str(error))
            failure, written = failure or error, None
        ended(report, written)
    if failure is not None:
        raise failure


def _run_to_report(session: Session, stop: Stop) -> tuple[RunReport, BaseException | None]:
    failure: BaseException | None = None
    try:
        asyncio.run(stop.cancels(session.run()))
    except (Exception, asyncio.CancelledError) as error:  # told in the report, then raised again
        failure = KeyboardInterrupt() if stop.asked else error
        if not isinstance(error, RoseError | asyncio.CancelledError):
            log.error("a fault of rose itself", exc_info=error)
    try:
        end_descendants(END_GRACE_S)
    except ClusterError as error:
        failure = failure or error
    if failure is None:
        return session.recorder.report("finished"), None
    return session.recorder.report("stopped", _cause(failure)), failure


def _cause(failure: BaseException) -> str:
    if isinstance(failure, KeyboardInterrupt):
        return "interrupted"
    return str(failure) if isinstance(failure, RoseError) else f"{type(failure).__name__}: {failure}"
