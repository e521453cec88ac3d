"""Results of runs as plain frozen records. Reports turn records into text; nothing here handles tensors.

Every record converts to JSON by `to_json` and back by `from_json`; documents carry `schema_version`. Sizes are bytes,
times are seconds, and errors are relative to the source's elements unless a name says otherwise.
"""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.results.advise import (
        AdviceResult as AdviceResult,
        AdviceRow as AdviceRow,
        GapEstimate as GapEstimate,
        LayerPart as LayerPart,
        Recommendation as Recommendation,
    )
    from lpconv.results.batch import (
        BatchResult as BatchResult,
        JobError as JobError,
        JobOutcome as JobOutcome,
        JobResult as JobResult,
    )
    from lpconv.results.bench import (
        BenchChange as BenchChange,
        BenchResult as BenchResult,
        BenchRow as BenchRow,
        EnergyRecord as EnergyRecord,
        GemmRecord as GemmRecord,
        GpuRecord as GpuRecord,
        MemoryParts as MemoryParts,
        MemoryRecord as MemoryRecord,
        NumericsRecord as NumericsRecord,
        PeakRecord as PeakRecord,
        RatioRecord as RatioRecord,
        TimingRecord as TimingRecord,
        VerdictRecord as VerdictRecord,
    )
    from lpconv.results.checkpoint import (
        ByteCounts as ByteCounts,
        CalibrationRecord as CalibrationRecord,
        ConvertResult as ConvertResult,
        DtypeRecord as DtypeRecord,
        ExportResult as ExportResult,
        FileRecord as FileRecord,
        FormatCount as FormatCount,
        InitResult as InitResult,
        InspectResult as InspectResult,
        JobEstimate as JobEstimate,
        OnnxCheck as OnnxCheck,
        PartResult as PartResult,
        PlanResult as PlanResult,
        RestoreResult as RestoreResult,
        RoundingRecord as RoundingRecord,
        SourceRecord as SourceRecord,
        StoredTensor as StoredTensor,
        TensorRecord as TensorRecord,
        WrittenShard as WrittenShard,
    )
    from lpconv.results.doctor import (
        DeviceRecord as DeviceRecord,
        DoctorResult as DoctorResult,
        FormatSupport as FormatSupport,
        PackageRecord as PackageRecord,
        ProductSupport as ProductSupport,
    )
    from lpconv.results.documents import (
        SCHEMA_VERSION as SCHEMA_VERSION,
        from_json as from_json,
        json_line as json_line,
        json_text as json_text,
        ordered_json_text as ordered_json_text,
        to_json as to_json,
    )
    from lpconv.results.training import (
        EvaluationRecord as EvaluationRecord,
        FinetuneResult as FinetuneResult,
        FormatRates as FormatRates,
        GapRecord as GapRecord,
        GradientNoise as GradientNoise,
        HeldOutRecord as HeldOutRecord,
        LayerChange as LayerChange,
        LossAllocation as LossAllocation,
        LossScaleRecord as LossScaleRecord,
        MemoryPlan as MemoryPlan,
        NonfiniteRecord as NonfiniteRecord,
        PeakMemory as PeakMemory,
        ProbedRecord as ProbedRecord,
        ProbeReport as ProbeReport,
        RecipeMemory as RecipeMemory,
        RecipeNoise as RecipeNoise,
        RunRecord as RunRecord,
        Series as Series,
        TrackedRecord as TrackedRecord,
        UpdateQuality as UpdateQuality,
    )
    from lpconv.results.verify import (
        ComparedTensor as ComparedTensor,
        FeedbackCheck as FeedbackCheck,
        FilesCheck as FilesCheck,
        GateRecord as GateRecord,
        HashCheck as HashCheck,
        LogitsCheck as LogitsCheck,
        OpenedCheck as OpenedCheck,
        OpenedModel as OpenedModel,
        TaskCheck as TaskCheck,
        Verification as Verification,
        VerifyResult as VerifyResult,
        WeightsCheck as WeightsCheck,
    )

__all__ = lazily(__name__)
