"""The deployment: the flow on a schedule, one run at a time, in a process work pool."""

from __future__ import annotations

from contextlib import suppress

from flows.embedded import users_server
from tasks.errors import UserError
from tasks.paths import Paths

POOL = "elastane"


def deploy(paths: Paths, cron: str | None) -> str:
    """Creates pool and deployment (or brings them up to date) and says how to start a worker.

    A second run that comes due beside the first is cancelled, not queued: the next one on schedule
    finds the same work, and a queue of stale runs helps nobody.

    Raises:
        UserError: no Prefect server is configured or it does not answer, or the schedule is no cron.
    """
    if not users_server():
        raise UserError(
            "a schedule needs a Prefect server that stays up, and PREFECT_API_URL is not set; run "
            "`prefect server start` in another terminal, then "
            "`export PREFECT_API_URL=http://127.0.0.1:4200/api`, and deploy again"
        )
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.flows import Flow
    from prefect.schedules import Cron

    try:
        with get_client(sync_client=True) as client, suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process", concurrency_limit=1))
        flow = Flow.from_source(str(paths.root), entrypoint="flows/finetune.py:finetune")
        flow.deploy(
            name=paths.root.name,
            work_pool_name=POOL,
            schedule=Cron(cron) if cron else None,
            parameters={"workspace": str(paths.root)},
            concurrency_limit=ConcurrencyLimitConfig(
                limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW
            ),
            build=False,
            ignore_warnings=True,
            print_next_steps=False,
        )
    except httpx.HTTPError as error:
        raise UserError(
            f"the Prefect server does not answer ({error}); start it, or mend PREFECT_API_URL"
        ) from None
    except ValueError as error:
        raise UserError(f"--cron {cron!r} is no schedule ({error}); write it as '0 3 * * *'") from None
    when = f"on '{cron}'" if cron else "when asked"
    return (
        f"deployed finetune/{paths.root.name} {when}; start a worker with "
        f"`prefect worker start --pool {POOL}`, run once now with `prefect deployment run finetune/{paths.root.name}`"
    )
