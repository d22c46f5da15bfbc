"""The nouns that stages hand to each other; import them from here."""

from tasks.contracts.base import (
    METHOD_NAMES,
    Contract,
    Count,
    Degree,
    FinetuningType,
    Precision,
    write_text,
)
from tasks.contracts.data import BaseModelRef, DataManifest, LengthBin, PackCounts, SplitCounts
from tasks.contracts.hardware import Corrections, Fabric, Gpu, HardwareProfile, Link, Rates
from tasks.contracts.planning import (
    Candidate,
    CostEstimate,
    ModelSpec,
    MoeSpec,
    Plan,
    PlanReport,
    Resolved,
    VisionSpec,
)
from tasks.contracts.review import EvalReport, Registration, Sample, Samples, Score, StageStatus
from tasks.contracts.training import (
    CheckpointManifest,
    FinalManifest,
    Predicted,
    RankPerformance,
    TrainPerformance,
    TrainReport,
)

__all__ = [
    "METHOD_NAMES",
    "BaseModelRef",
    "Candidate",
    "CheckpointManifest",
    "Contract",
    "Corrections",
    "CostEstimate",
    "Count",
    "DataManifest",
    "Degree",
    "EvalReport",
    "Fabric",
    "FinalManifest",
    "FinetuningType",
    "Gpu",
    "HardwareProfile",
    "LengthBin",
    "Link",
    "ModelSpec",
    "MoeSpec",
    "PackCounts",
    "Plan",
    "PlanReport",
    "Precision",
    "Predicted",
    "RankPerformance",
    "Rates",
    "Registration",
    "Resolved",
    "Sample",
    "Samples",
    "Score",
    "SplitCounts",
    "StageStatus",
    "TrainPerformance",
    "TrainReport",
    "VisionSpec",
    "write_text",
]
