"""Export converted and plain checkpoints to ONNX, for runtimes without lpconv."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.export.options import ExportOptions as ExportOptions
    from lpconv.export.run import export_onnx as export_onnx

__all__ = lazily(__name__)
