"""What engines are compared on: the first prompts of a few held-out tasks, which nobody plays."""

from __future__ import annotations

from rose.errors import EnvironmentFailed
from rose.logs import logger
from rose.trainer.rollout import Rollout

log = logger("probe")

PROBE_TASKS = 8


async def probe_prompts(rollout: Rollout, first_seed: int) -> list[tuple[int, ...]]:
    """Token ids of the first prompts of the tasks from `first_seed` on, without those whose environment fails.

    Raises EnvironmentFailed if all of them fail, which says that nothing was played yet and what the last one met.
    """
    prompts = []
    for index in range(PROBE_TASKS):
        try:
            prompts.append(await rollout.first_prompt(first_seed + index, f"probe-{index}"))
        except EnvironmentFailed as error:
            log.warning("a held-out task does not begin; engines are compared without it", why=str(error))
            last = error
    if prompts:
        return prompts
    raise EnvironmentFailed(
        f"it began none of the first {PROBE_TASKS} held-out tasks (seeds from {first_seed}). They are opened before "
        f"anything is played, as episodes probe-0 to probe-{PROBE_TASKS - 1}, for the prompts on which engines are "
        f"compared. The last failure: {last.what}",
        expected=last.expected,
        to_do=last.to_do or "mend the environment, or raise environment.reset_timeout_s",
    ) from last
