"""The deployment: the flow on a schedule, one run at a time, in a process work pool.

It is called finetune/<name of the workspace's folder>; prefect.yaml keeps to the same rule.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flows.embedded import users_server
from tasks.errors import UserError
from tasks.paths import Paths

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

POOL = "elastane"


def deploy(paths: Paths, cron: str | None) -> str:
    """Creates pool and deployment (or brings them up to date) and says how to start a worker.

    A second run that comes due beside the first is cancelled, not queued: the next one finds the same work.

    Raises:
        UserError: no Prefect server is configured or it does not answer, the schedule is no cron, or the
            folder's name cannot be a deployment's or is one already.
    """
    _need_a_server()
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.flows import Flow
    from prefect.schedules import Cron

    name = _name(paths)
    try:
        with get_client(sync_client=True) as client:
            _refuse_anothers(client, name, paths)
            with suppress(ObjectAlreadyExists):
                client.create_work_pool(WorkPoolCreate(name=POOL, type="process", concurrency_limit=1))
        flow = Flow.from_source(str(paths.root), entrypoint="flows/finetune.py:finetune")
        flow.deploy(
            name=name,
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
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"--cron {cron!r} is no schedule ({error}); write it as '0 3 * * *'") from None
    when = f"on '{cron}'" if cron else "when asked"
    return (
        f"deployed finetune/{name} {when}; start a worker with "
        f"`prefect worker start --pool {POOL}`, run once now with `prefect deployment run 'finetune/{name}'`"
    )


def _need_a_server() -> None:
    if not users_server():
        raise UserError(
            "a schedule needs a Prefect server that stays up, and PREFECT_API_URL is not set; run "
            "`prefect server start` in another terminal, then "
            "`export PREFECT_API_URL=http://127.0.0.1:4200/api`, and deploy again"
        )


def _name(paths: Paths) -> str:
    from prefect.types import BANNED_CHARACTERS

    name = paths.root.name
    if not name or any(character in name for character in BANNED_CHARACTERS):
        raise UserError(
            f"a deployment is named after its folder, and Prefect takes no {' '.join(BANNED_CHARACTERS)} in a name "
            f"({name!r}); rename the folder"
        )
    return name


def _refuse_anothers(client: SyncPrefectClient, name: str, paths: Paths) -> None:
    from prefect.exceptions import ObjectNotFound

    with suppress(ObjectNotFound):
        there = client.read_deployment_by_name(f"finetune/{name}").parameters.get("workspace")
        if there is not None and Path(there).resolve() != paths.root.resolve():
            raise UserError(
                f"finetune/{name} at this Prefect server belongs to {there}, and a deployment is named after its "
                f"folder; rename this folder or, if that one is gone, run `prefect deployment delete 'finetune/{name}'`"
            )
