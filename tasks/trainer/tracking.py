"""Live curves in MLflow, from a thread of their own: training never waits for its logger."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass

from tasks.contracts import Plan, write_text
from tasks.params import Params
from tasks.paths import Paths
from tasks.stage import say

RUN_ID_FILE = "mlflow_run_id"
FLUSH_SECONDS = 2.0


@dataclass(frozen=True)
class Point:
    step: int
    time_ms: int
    values: dict[str, float]


class Tracker:
    """One MLflow run per RunKey, continued across restarts. A failing store is said once and left alone."""

    def __init__(self, params: Params, paths: Paths, run_key: str, plan: Plan) -> None:
        self._params, self._paths, self._key, self._plan = params, paths, run_key, plan
        self._points: queue.Queue[Point | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()

    def log(self, step: int, values: dict[str, float]) -> None:
        self._points.put(Point(step, int(time.time() * 1000), values))

    def close(self, timeout: float = 60.0) -> None:
        """Sends what is left; gives up after `timeout` seconds."""
        self._points.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            say("tracking: the MLflow store is too slow; the last steps are in runs/ but not in MLflow")

    def _work(self) -> None:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            self._track()
        except (MlflowException, SQLAlchemyError, OSError) as error:
            say(
                f"tracking: MLflow is out of reach ({str(error).splitlines()[0]}); training goes on without it"
            )

    def _track(self) -> None:
        import mlflow

        from tasks.tracking_store import connect, find_run

        experiment = connect(self._params.register_, self._paths)
        run_id = find_run(experiment, self._key)
        tags = {"elastane.run_key": self._key, "elastane.plan": self._plan.name}
        with mlflow.start_run(
            run_id=run_id,
            run_name=None if run_id else f"{self._params.train.finetuning_type}-{self._key[:8]}",
            tags=tags,
            log_system_metrics=True,
        ) as run:
            write_text(self._paths.run(self._key) / RUN_ID_FILE, run.info.run_id)
            self._drain(run.info.run_id)

    def _drain(self, run_id: str) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        client = MlflowClient()
        open_ = True
        while open_:
            time.sleep(0 if self._points.qsize() else FLUSH_SECONDS / 4)
            pending: list[Metric] = []
            deadline = time.monotonic() + FLUSH_SECONDS
            while time.monotonic() < deadline and len(pending) < 900:
                try:
                    point = self._points.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    break
                if point is None:
                    open_ = False
                    break
                pending += [
                    Metric(key, value, point.time_ms, point.step) for key, value in point.values.items()
                ]
            if pending:
                client.log_batch(run_id, metrics=pending)
