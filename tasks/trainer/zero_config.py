"""A Plan of the engine deepspeed as DeepSpeed's config. It says how, never what is learned.

Our own loop scales the loss, keeps the schedule and chooses the precision (by autocast, as under every plan), so of the
recipe the config holds the clipping alone, which DeepSpeed does while it has the gradients in its hands.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tasks.contracts import Plan
from tasks.params import TrainParams
from tasks.planner.deepspeed_config import with_passed
from tasks.planner.zero import BUCKET, LIVE, PARAMETER_BUFFER, SUB_GROUP

NEVER = 2**31 - 1
STAGES = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3}


def zero_config(plan: Plan, train: TrainParams, swap: Path | None = None) -> dict[str, Any]:
    """DeepSpeed's config of a plan.

    Args:
        swap: the folder for what is kept on NVMe; needed by such a plan alone.
    """
    stage = STAGES[plan.sharding]
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": plan.device == "cuda",
        "reduce_bucket_size": BUCKET,
    }
    if stage == 3:
        zero |= {
            "sub_group_size": SUB_GROUP[plan.offload],
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_max_live_parameters": LIVE[plan.offload_parameters],
            "stage3_max_reuse_distance": LIVE[plan.offload_parameters],
        }
    for key, where in (
        ("offload_optimizer", plan.offload),
        ("offload_param", plan.offload_parameters),
    ):
        if where != "none":
            zero[key] = {"device": where, "pin_memory": plan.device == "cuda"}
        if key == "offload_param" and where == "cpu" and train.finetuning_type == "full":
            # They move into one pinned buffer; pinned ones of their own would never be given back to the system.
            zero[key]["pin_memory"] = False
        if key == "offload_param" and where == "nvme":
            zero[key]["buffer_size"] = PARAMETER_BUFFER // plan.dp_shard
        if where == "nvme":
            assert swap is not None, "a plan that keeps states on NVMe needs a folder there"
            zero[key]["nvme_path"] = str(swap)
    config = {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        # Without ZeRO the engine clips by itself, with the norm that it reports.
        "gradient_clipping": train.max_grad_norm if stage else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": NEVER,
        "wall_clock_breakdown": False,
    }
    return with_passed(config, json.loads(plan.deepspeed_config)) if plan.deepspeed_config else config
