"""What a run found, as plain frozen records. Reports turn records into text; nothing here knows tensors.

Every record becomes JSON by `to_json` and comes back by `from_json`; the documents carry `schema_version`.
Sizes are bytes, times are seconds, errors are relative to the source's elements unless a name says otherwise.
"""

from lpconv.results.bench import (
    BenchChange,
    BenchResult,
    BenchRow,
    EnergyRecord,
    GemmRecord,
    GpuRecord,
    MemoryParts,
    MemoryRecord,
    NumericsRecord,
    PeakRecord,
    RatioRecord,
    TimingRecord,
    VerdictRecord,
)
from lpconv.results.checkpoint import (
    DtypeRecord,
    FileRecord,
    InspectResult,
    SourceRecord,
    StoredTensor,
)
from lpconv.results.convert import (
    ByteCounts,
    ConvertResult,
    GateRecord,
    HashCheck,
    LogitsCheck,
    PlanResult,
    TensorRecord,
    VerifyResult,
    WeightsCheck,
)
from lpconv.results.documents import (
    SCHEMA_VERSION,
    from_json,
    to_json,
)
from lpconv.results.finetune import (
    FinetuneResult,
    GapRecord,
    LayerChange,
    LossAllocation,
    NonfiniteRecord,
    PeakMemory,
    RunRecord,
    Series,
    TrackedRecord,
    UpdateQuality,
)
from lpconv.results.probe import (
    FormatRates,
    LossScaleRecord,
    ProbedRecord,
    ProbeReport,
)

__all__ = [
    "SCHEMA_VERSION",
    "BenchChange",
    "BenchResult",
    "BenchRow",
    "ByteCounts",
    "ConvertResult",
    "DtypeRecord",
    "EnergyRecord",
    "FileRecord",
    "FinetuneResult",
    "FormatRates",
    "GapRecord",
    "GateRecord",
    "GemmRecord",
    "GpuRecord",
    "HashCheck",
    "InspectResult",
    "LayerChange",
    "LogitsCheck",
    "LossAllocation",
    "LossScaleRecord",
    "MemoryParts",
    "MemoryRecord",
    "NonfiniteRecord",
    "NumericsRecord",
    "PeakMemory",
    "PeakRecord",
    "PlanResult",
    "ProbeReport",
    "ProbedRecord",
    "RatioRecord",
    "RunRecord",
    "Series",
    "SourceRecord",
    "StoredTensor",
    "TensorRecord",
    "TimingRecord",
    "TrackedRecord",
    "UpdateQuality",
    "VerdictRecord",
    "VerifyResult",
    "WeightsCheck",
    "from_json",
    "to_json",
]
