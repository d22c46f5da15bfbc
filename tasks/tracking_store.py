"""Where MLflow keeps runs: the user's server, or a SQLite file in the workspace."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.errors import UserError
from tasks.params import RegisterParams
from tasks.paths import Paths
from tasks.stage import heartbeat

if TYPE_CHECKING:
    from mlflow import MlflowClient

RUN_KEY_TAG = "elastane.run_key"


class StoreOutOfReach(UserError):
    """The MLflow store does not answer."""

    def __init__(self, uri: str, error: Exception) -> None:
        super().__init__(
            f"the MLflow store {uri} cannot be used ({str(error).splitlines()[0]}); "
            "mend register.tracking_uri (or MLFLOW_TRACKING_URI) or start the server, then run again"
        )


def tracking_uri(register: RegisterParams, paths: Paths) -> str:
    """params.yaml's, else MLFLOW_TRACKING_URI, else `mlflow.db` in the workspace."""
    return register.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{paths.mlflow_db}"


def connect(register: RegisterParams, paths: Paths) -> str:
    """Points MLflow at the store, makes the experiment if it is new, and returns its id.

    A SQLite store is made whole at its first use, so let one process use it before others do.

    Raises:
        mlflow.exceptions.MlflowException: the store is out of reach.
    """
    import mlflow

    _quiet()
    uri = tracking_uri(register, paths)
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    client = mlflow.MlflowClient()
    found = client.get_experiment_by_name(register.experiment)
    if found is None:
        # A server keeps artifacts where it wants; the embedded store keeps them beside its file.
        place = Path(paths.mlflow_artifacts).as_uri() if uri.startswith("sqlite:") else None
        identity = client.create_experiment(register.experiment, artifact_location=place)
    else:
        identity = found.experiment_id
    mlflow.set_experiment(experiment_id=identity)
    return str(identity)


def reader(register: RegisterParams, paths: Paths) -> MlflowClient:
    """A client that reads the store and makes nothing in it; this process's default store stays as it is."""
    from mlflow import MlflowClient

    _quiet()
    _impatient()
    uri = tracking_uri(register, paths)
    return MlflowClient(uri, registry_uri=uri)


def _quiet() -> None:
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _impatient() -> None:
    # MLflow's own patience with a server that is not there is over two minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")


def open_store(register: RegisterParams, paths: Paths) -> str:
    """`connect` for a stage or command that cannot go on without the store.

    Raises:
        StoreOutOfReach: just that.
    """
    _impatient()
    with heartbeat("opening MLflow"):
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            return connect(register, paths)
        except (MlflowException, SQLAlchemyError, OSError) as error:
            raise StoreOutOfReach(tracking_uri(register, paths), error) from None


def find_run(experiment_id: str, run_key: str) -> str | None:
    """The newest MLflow run of a RunKey."""
    import mlflow

    runs = mlflow.MlflowClient().search_runs(
        [experiment_id],
        filter_string=f"tags.`{RUN_KEY_TAG}` = '{run_key}'",
        order_by=["attributes.start_time DESC"],
        max_results=1,
    )
    return str(runs[0].info.run_id) if runs else None
